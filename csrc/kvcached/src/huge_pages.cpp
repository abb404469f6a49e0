#include "kvcached/huge_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvcached {

bool make_huge(int fd, std::int64_t offset, std::int64_t bytes) {
  if (bytes <= 0) return false;
  // The call below wants one small page to begin with. The holes behind it become zeros of the huge page, at a quarter of
  // what it costs to make 512 small ones.
  static const std::int64_t small = sysconf(_SC_PAGESIZE);
  for (std::int64_t at = 0; at < bytes; at += kHugePage) {
    if (fallocate(fd, 0, offset + at, small) != 0) return false;
  }
  void* const window = reserve_aligned(bytes);
  if (window == nullptr) return false;
  const auto length = static_cast<std::size_t>(bytes);
  const bool made = mmap(window, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset) != MAP_FAILED &&
                    madvise(window, length, MADV_COLLAPSE) == 0;
  munmap(window, length);
  return made;
}

std::uint8_t* reserve_aligned(std::int64_t bytes, std::int64_t alignment) {
  const auto size = static_cast<std::size_t>(bytes + alignment);
  void* const got = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  const auto start = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(got));
  const std::int64_t before = (alignment - start % alignment) % alignment;
  auto* const found = static_cast<std::uint8_t*>(got) + before;
  if (before > 0) munmap(got, static_cast<std::size_t>(before));
  if (before < alignment) munmap(found + bytes, static_cast<std::size_t>(alignment - before));
  return found;
}

}  // namespace kvcached
