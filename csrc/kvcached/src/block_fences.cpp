#include "kvcached/block_fences.h"

#include <time.h>

#include "kvcached/error.h"
#include "kvcached/futex.h"

namespace kvcached {
namespace {
constexpr std::int64_t kLongestFence_ns = 10000000000;
constexpr std::int64_t kFencePoll_ns = 200000;

// Stands in for an event that could not be recorded: one recorded later covers at least as much.
class LateFence final : public Fence {
 public:
  LateFence(std::shared_ptr<Driver> driver, std::uintptr_t stream) : driver_(std::move(driver)), stream_(stream) {}
  bool passed() override {
    if (event_ == nullptr) event_ = driver_->record(stream_);
    return event_->passed();
  }

 private:
  std::shared_ptr<Driver> driver_;
  std::uintptr_t stream_;
  std::shared_ptr<Fence> event_;
};

}  // namespace

void BlockFences::use_fence(std::shared_ptr<Fence> fence) {
  fence_ = std::move(fence);
  stream_set_ = false;
}

void BlockFences::use_stream(std::uintptr_t stream) {
  stream_ = stream;
  stream_set_ = true;
  fence_ = nullptr;
}

std::shared_ptr<Fence> BlockFences::fence_for_now() const {
  if (!stream_set_) return fence_;
  try {
    return driver_->record(stream_);
  } catch (const Error&) {
    return std::make_shared<LateFence>(driver_, stream_);
  }
}

void BlockFences::cover(const std::vector<std::int32_t>& emptied) {
  if (!stream_set_ && fence_ == nullptr) {
    if (fences_.empty()) return;
    for (std::int32_t block : emptied) fences_.erase(block);
    return;
  }
  const std::shared_ptr<Fence> fence = fence_for_now();
  for (std::int32_t block : emptied) fences_[block] = fence;
}

bool BlockFences::release_covered(std::int32_t block) {
  const auto found = fences_.find(block);
  if (found == fences_.end()) return true;
  if (!found->second->passed()) return false;
  fences_.erase(found);
  return true;
}

std::vector<std::shared_ptr<Fence>> BlockFences::in_flight(bool slots_in_use) {
  std::vector<std::shared_ptr<Fence>> waiting;
  for (auto& [block, fence] : fences_) waiting.push_back(fence);
  if (slots_in_use && stream_set_) waiting.push_back(driver_->record(stream_));
  if (slots_in_use && fence_ != nullptr) waiting.push_back(fence_);
  return waiting;
}

void wait_until_passed(const std::vector<std::shared_ptr<Fence>>& fences) {
  const std::int64_t deadline = now_ns() + kLongestFence_ns;
  for (const auto& fence : fences) {
    while (!fence->passed() && now_ns() < deadline) {
      const timespec pause{0, kFencePoll_ns};
      nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace kvcached
