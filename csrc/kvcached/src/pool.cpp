// A pool's life, and what it may promise: slots counted from what is in use, promised and leased.
#include "kvcached/pool.h"

#include <algorithm>
#include <string>

#include "kvcached/error.h"

namespace kvcached {
namespace {
constexpr std::int64_t kBriefPages = 2;  // some 50 us each on host memory; handing Python's lock over and back takes 10 to 5000
}

std::int64_t Pool::first_lease_bytes(const Geometry& g, std::int64_t lease_bytes) {
  const std::int64_t blocks = lease_bytes == kElastic ? 1 : lease_bytes / g.block_bytes;
  return std::clamp<std::int64_t>(blocks, 1, g.blocks) * g.block_bytes;
}

Pool::Pool(std::shared_ptr<Owner> owner, std::shared_ptr<void> keep, Address arena, const Geometry& geometry, std::int64_t lease_bytes)
    : owner_(std::move(owner)), keep_(std::move(keep)), arena_(arena), geometry_(geometry), table_(geometry), elastic_(lease_bytes == kElastic) {
  handles_.resize(geometry_.blocks * geometry_.block_pages);
  for (std::int64_t b = geometry_.blocks - 1; b > 0; --b) absent_.push_back(static_cast<std::int32_t>(b));
  if (elastic_) high_ = 0;
  lease_ = target_ = first_lease_bytes(geometry_, lease_bytes) / geometry_.block_bytes;
  map_block(0);
  table_.make_ready(0);
  mapped_ = 1;
  publish_locked();
}

Pool::~Pool() {
  try {
    close();
  } catch (const Error&) {
    // A dead driver: pages and books go with the process.
  }
  // Pages that could not be unmapped keep their addresses reserved for ever: nothing else may be put there.
  if (!drained_) new std::shared_ptr<void>(keep_);
}

void Pool::check_open() const {
  if (closed_) throw Error(ErrorKind::ClosedHandle, "this pool is closed: its arena was divided again, or it was freed");
  owner_->check_usable();
}

bool Pool::is_open() const {
  Guard lock(lock_);
  return !closed_ && owner_->usable();
}

std::int64_t Pool::blocks_for(std::int64_t slots) const {
  return slots <= 0 ? 0 : (slots + geometry_.min_block_slots - 1) / geometry_.min_block_slots;
}

// Counted from what is in use and promised, not from the target: that may have been lowered below both meanwhile.
std::int64_t Pool::blocks_needed_locked(std::int64_t more_slots) const {
  return table_.used_blocks() + blocks_for(more_slots + outstanding_ - table_.partial_free());
}

std::int64_t Pool::available_locked() const {
  const std::int64_t used_blocks = table_.used_blocks();
  if (used_blocks > target_) return 0;  // the lease shrank: first work down to it
  const std::int64_t more = std::min(target_, geometry_.blocks) - used_blocks;
  const std::int64_t physical = table_.partial_free() + more * geometry_.min_block_slots;
  const std::int64_t slots = std::min(physical, geometry_.max_slots - table_.used_slots()) - outstanding_;
  return std::max<std::int64_t>(slots, 0);
}

bool Pool::mapped_suffice_locked(std::int64_t fresh_blocks) const {
  return fresh_blocks <= std::min(table_.ready_blocks(), target_ - table_.used_blocks());
}

bool Pool::brief_locked(std::int64_t blocks) const {
  return blocks * geometry_.block_pages <= kBriefPages && owner_->driver().is_brief();
}

bool Pool::had_in_a_moment_locked(std::int64_t fresh_blocks) const {
  if (mapped_suffice_locked(fresh_blocks)) return true;
  const std::int64_t missing = fresh_blocks - table_.ready_blocks();
  return brief_locked(missing) && fresh_blocks <= target_ - table_.used_blocks() && missing <= lease_ - mapped_ &&
         missing <= static_cast<std::int64_t>(absent_.size()) &&
         missing * geometry_.block_bytes <= owner_->pages().spare_bytes();  // a new page is zeroed, which takes long
}

void Pool::make_available(std::int64_t count) {
  const std::int64_t available = available_locked();
  if (count <= available) return;
  const std::int64_t left = geometry_.max_slots - table_.used_slots() - outstanding_;
  if (!elastic_ || count > left) {
    throw Error(ErrorKind::OutOfMemory, "not enough slots: " + std::to_string(count) + " wanted, " + std::to_string(available) +
                    (count > left ? " left in the pool's range" : " in the lease"),
                {{"requested_slots", count}, {"available_slots", available}, {"lease_bytes", lease_ * geometry_.block_bytes},
                 {"used_slots", table_.used_slots()}, {"max_slots", geometry_.max_slots}});
  }
  const std::int64_t needed = blocks_needed_locked(count);
  if (needed > lease_) {
    owner_->lease((needed - lease_) * geometry_.block_bytes, Klass::Kv);
    lease_ = needed;
  }
  target_ = std::max(target_, needed);
}

std::int64_t Pool::available() const {
  Guard lock(lock_);
  check_open();
  idle_ = false;
  return available_locked();
}

std::int64_t Pool::used() const {
  Guard lock(lock_);
  return table_.used_slots();
}

std::int64_t Pool::scattered() const {
  Guard lock(lock_);
  return table_.partial_free();
}

std::int64_t Pool::pressure() const { return owner_->pressure(); }

void Pool::publish_locked() {
  Published& p = owner_->published();
  const auto show = [](std::int64_t now, std::int64_t& shown, std::atomic<std::int64_t>& word) {
    if (now == shown) return;
    word.fetch_add(now - shown, std::memory_order_relaxed);
    shown = now;
  };
  const std::int64_t slot_bytes = geometry_.layout.token_bytes() * geometry_.layout.tokens_per_slot;
  // Not what is on its way: an audit must never see more mapped than there is.
  show((mapped_ - mapping_ - unmapping_) * geometry_.block_bytes, shown_.mapped, p.mapped_bytes);
  show(table_.ready_blocks() * geometry_.block_bytes, shown_.ahead, p.ahead_bytes);
  show(static_cast<std::int64_t>(fences_.size()) * geometry_.block_bytes, shown_.deferred, p.deferred_bytes);
  show(table_.used_slots() * slot_bytes, shown_.used, p.used_bytes);
}

}  // namespace kvcached
