// Files in memory whose pages are the kernel's huge ones: made together, found by one translation each, and given back as one.
#pragma once

#include <cstdint>

namespace kvcached {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

// Makes huge pages, all zeros, of `bytes` of the file `fd` from `offset` on, which this process has mapped at `address` for
// writing; all three are multiples of kHugePage. What there is already stays as it is. False when the system does not give
// them: kernels before 6.1 cannot, and later ones may find no piece of memory that large. What it made until then stays;
// allocate the rest as usual. Of what /sys/kernel/mm/transparent_hugepage says of files in memory only `deny` is heeded.
//
// Ask for many at once: beside a quarter of a millisecond for each there is a wait for all processors, once for a call,
// which takes milliseconds where all are busy.
bool make_huge(int fd, std::int64_t offset, std::int64_t bytes, void* address);

// The same for a file that is mapped nowhere. A fork in the middle of it would give the child a mapping.
bool make_huge(int fd, std::int64_t offset, std::int64_t bytes);

}  // namespace kvcached
