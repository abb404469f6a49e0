#include "kvcached/huge_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvcached {
namespace {

std::atomic<bool> g_known{true};  // to this kernel

}  // namespace

bool make_huge(int fd, std::int64_t offset, std::int64_t bytes, void* address) {
  static const std::int64_t small = sysconf(_SC_PAGESIZE);
  for (std::int64_t at = 0; at < bytes && g_known.load(std::memory_order_relaxed); at += kHugePage) {
    // Collapsing wants one page to begin with. The holes beside it become zeros of the huge page, at a quarter of what it
    // costs to make 512 small ones.
    if (fallocate(fd, 0, offset + at, small) != 0) return false;
    if (madvise(static_cast<char*>(address) + at, static_cast<std::size_t>(kHugePage), MADV_COLLAPSE) != 0) {
      if (errno == EINVAL) g_known.store(false, std::memory_order_relaxed);
      return false;
    }
  }
  return g_known.load(std::memory_order_relaxed);
}

}  // namespace kvcached
