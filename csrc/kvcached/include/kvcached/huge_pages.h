// Memory of a file in memory as the kernel's huge pages: made, found by a walk of one step, and given back as one each.
#pragma once

#include <cstdint>

namespace kvcached {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

// Puts huge pages, all zeros, behind `bytes` of the file `fd` from `offset` on, which this process has mapped at `address`
// for writing; all three are multiples of kHugePage. False when the system does not give them: kernels before 6.1 cannot,
// and later ones may find no piece of memory that large. What it made until then stays; allocate the rest as usual.
// Whatever /sys/kernel/mm/transparent_hugepage says of files in memory, but for `deny`, is no matter here.
bool make_huge(int fd, std::int64_t offset, std::int64_t bytes, void* address);

}  // namespace kvcached
