#include "kvcached/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace kvcached {

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) {
  if (timeout_ns <= 0) return;
  timespec limit{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

}  // namespace kvcached
