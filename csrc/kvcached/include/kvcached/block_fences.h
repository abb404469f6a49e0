// What the device may still read although its slots were given back: a block that ran empty under a fence keeps its pages until
// the fence has passed. Its slots may be handed out again at once, since reuse is ordered by the engine's own stream.
// No lock of its own; the pool serialises calls.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kvcached/driver.h"

namespace kvcached {

class BlockFences {
 public:
  explicit BlockFences(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}

  void use_fence(std::shared_ptr<Fence> fence);  // for blocks that run empty from now on; nullptr: none
  void use_stream(std::uintptr_t stream);        // an event on this stream for each
  void cover(const std::vector<std::int32_t>& emptied);  // these ran empty just now
  bool release_if_passed(std::int32_t block) {   // true, and the block is no longer covered, if it may be unmapped
    return fences_.empty() || release_covered(block);
  }
  std::int64_t covered() const { return static_cast<std::int64_t>(fences_.size()); }

  // Everything in flight, an event recorded now included if slots are still in use.
  std::vector<std::shared_ptr<Fence>> in_flight(bool slots_in_use);
  void clear() { fences_.clear(); }

 private:
  bool release_covered(std::int32_t block);
  std::shared_ptr<Fence> fence_for_now() const;

  const std::shared_ptr<Driver> driver_;
  std::unordered_map<std::int32_t, std::shared_ptr<Fence>> fences_;  // of ready blocks
  std::shared_ptr<Fence> fence_;
  std::uintptr_t stream_ = 0;
  bool stream_set_ = false;
};

// Returns when all have passed, or after some seconds: work in flight takes no longer, unless it never ends.
void wait_until_passed(const std::vector<std::shared_ptr<Fence>>& fences);

}  // namespace kvcached
