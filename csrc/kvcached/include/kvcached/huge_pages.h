// Files in memory whose pages are the kernel's huge ones: made together, found by one translation each, and given back as one.
#pragma once

#include <cstdint>

namespace kvcached {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

// Puts huge pages, all zeros, behind `bytes` of the file `fd` from `offset` on, both multiples of kHugePage. What is written
// there already stays. False when the system does not give them: kernels before 6.1 cannot, later ones may find no piece of
// memory that large, and a file on a disk has none. What it made until then stays; allocate the rest as usual. Of what
// /sys/kernel/mm/transparent_hugepage says of files in memory only `deny` is heeded.
//
// For many at once: beside a quarter of a millisecond for each, a call waits for every processor to take part, milliseconds
// where all are busy, and whoever changes this process's mappings waits for it. The file is mapped meanwhile: a fork in the
// middle would give the child that mapping.
bool make_huge(int fd, std::int64_t offset, std::int64_t bytes);

// Addresses for mappings that begin at a multiple of `alignment`, so that huge pages can be mapped as such: `bytes` of them, a
// multiple of the system's pages, without access and memory. nullptr: there are none, errno says why.
std::uint8_t* reserve_aligned(std::int64_t bytes, std::int64_t alignment = kHugePage);

}  // namespace kvcached
