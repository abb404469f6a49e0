#include "kvcached/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvcached {
namespace {

std::atomic<std::uint32_t> g_fork_generation{0};

void after_fork_in_child() { g_fork_generation.fetch_add(1, std::memory_order_relaxed); }

const bool g_registered = [] { return pthread_atfork(nullptr, nullptr, after_fork_in_child) == 0; }();

struct StatLine {
  char state = 'X';
  long threads = 0;
  std::uint64_t start_ticks = 0;
};

// Fields of /proc/<pid>/stat are counted after the last ')': the command name may contain anything.
bool read_stat(std::int32_t pid, StatLine* out) {
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return false;
  text[n] = 0;
  const char* after = std::strrchr(text, ')');
  if (after == nullptr) return false;
  unsigned long long start = 0;
  // 3 state, 4-19 skipped, 20 num_threads, 21 itrealvalue, 22 starttime
  const int got = std::sscanf(after + 1,
                              " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
                              &out->state, &out->threads, &start);
  out->start_ticks = start;
  return got == 3;
}

}  // namespace

ProcessId this_process() {
  ProcessId self;
  self.pid = getpid();
  StatLine line;
  if (read_stat(self.pid, &line)) self.start_ticks = line.start_ticks;
  return self;
}

bool is_alive(const ProcessId& process) {
  StatLine line;
  if (!read_stat(process.pid, &line) || line.start_ticks != process.start_ticks) return false;
  const bool ended = line.state == 'Z' || line.state == 'X' || line.state == 'x';
  // The first thread may be a zombie while others still run and hold the address space.
  return !(ended && line.threads <= 1);
}

std::uint32_t fork_generation() {
  (void)g_registered;
  return g_fork_generation.load(std::memory_order_relaxed);
}

}  // namespace kvcached
