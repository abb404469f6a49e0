// Who is alive: processes named by (pid, start time), and what a fork does to objects made before it.
#pragma once

#include <cstdint>

namespace kvcached {

// A pid alone is reused by the kernel; together with the start time (clock ticks since boot) it names one process for ever.
struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;
  bool operator==(const ProcessId& other) const { return pid == other.pid && start_ticks == other.start_ticks; }
};

ProcessId this_process();

// False once the process has given up its memory: it is gone, or a zombie whose last thread has left.
// A process of another PID namespace looks dead, so all users of one account must share the namespace.
bool is_alive(const ProcessId& process);

// Grows by one in a child at every fork. An object remembers the number it was made under; another number means
// "made before this fork" and the object refuses to work, because pages and threads stayed with the parent.
std::uint32_t fork_generation();

}  // namespace kvcached
