#include "kvcached/lease_books.h"

#include <algorithm>

namespace kvcached {

std::int64_t LeaseBooks::available(const BlockCounts& now) const {
  if (now.used_blocks > target_) return 0;  // the lease shrank: first work down to it
  const std::int64_t more = std::min(target_, shape_.blocks) - now.used_blocks;
  const std::int64_t physical = now.partial_free + more * shape_.block_slots;
  const std::int64_t slots = std::min(physical, shape_.max_slots - now.used_slots) - promised_;
  return std::max<std::int64_t>(slots, 0);
}

std::int64_t LeaseBooks::needed(const BlockCounts& now, std::int64_t more_slots) const {
  return now.used_blocks + blocks_for(more_slots + promised_ - now.partial_free);
}

std::int64_t LeaseBooks::unneeded(const BlockCounts& now, std::int64_t keep_slots) const {
  const std::int64_t keep = blocks_for(keep_slots + promised_ - now.partial_free);
  return std::max<std::int64_t>(0, target_ - std::max<std::int64_t>(1, now.used_blocks) - keep);
}

std::int64_t LeaseBooks::returnable(const BlockCounts& now) const {
  // What alloc() calls that are mapping were promised stays theirs, however far the target has been lowered.
  return std::max<std::int64_t>(0, held_ - std::max({target_, now.mapped, committed(now)}));
}

void LeaseBooks::set_leased(std::int64_t target) {
  elastic_ = false;
  target_ = target;
}

void LeaseBooks::lower_to_use(const BlockCounts& now, std::int64_t keep_ready) {
  const std::int64_t needed = committed(now) + std::min(now.ready, keep_ready);
  target_ = std::max<std::int64_t>(1, std::min(target_, std::max(needed, ensured_)));
}

std::int64_t LeaseBooks::take_back(const BlockCounts& now) {
  const std::int64_t blocks = returnable(now);
  held_ -= blocks;
  return blocks;
}

std::int64_t LeaseBooks::close() {
  const std::int64_t blocks = held_;
  held_ = target_ = 0;
  return blocks;
}

const char* LeaseBooks::problem(const BlockCounts& now) const {
  if (now.mapped > held_) return "the lease does not cover what is mapped";
  if (target_ > held_ || target_ < 1) return "the target is not within the lease";
  if (promised_ < 0 || refilling_ < 0 || refilling_ > now.mapped) return "counters below zero";
  return nullptr;
}

}  // namespace kvcached
