// A fence that the program itself signals: for host devices, where work in flight has no stream to record an event on.
#pragma once

#include <atomic>
#include <memory>

#include "kvcached/driver.h"

namespace kvcached {

class ManualFence final : public Fence, public std::enable_shared_from_this<ManualFence> {
 public:
  bool passed() override { return signalled_.load(std::memory_order_acquire); }
  void signal() { signalled_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> signalled_{false};
};

}  // namespace kvcached
