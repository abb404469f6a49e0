// Slots of a pool: handing out, taking back, and the fences that blocks that ran empty wait for.
#include <algorithm>

#include "kvcached/error.h"
#include "kvcached/pool.h"

namespace kvcached {
namespace {

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

void check_count(std::int64_t count) {
  if (count < 0) throw Error(ErrorKind::BadRequest, "a count of slots must not be negative", {{"count", count}});
}

}  // namespace

void Pool::alloc(std::int64_t* out, std::int64_t count, bool fresh) {
  check_count(count);
  Guard lock(lock_);
  check_open();
  alloc_locked(lock, out, count, fresh);
}

bool Pool::alloc_at_once(std::int64_t* out, std::int64_t count, bool fresh) {
  check_count(count);
  Guard lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_open();
  const std::int64_t missing = fresh ? count : count - table_.partial_free();
  if (count > available_locked() || !had_in_a_moment_locked(blocks_for(missing))) return false;
  alloc_locked(lock, out, count, fresh);
  return true;
}

void Pool::alloc_locked(Guard& lock, std::int64_t* out, std::int64_t count, bool fresh) {
  idle_ = false;
  make_available(count);
  std::int64_t got = 0;
  try {
    if (fresh) take_fresh(lock, out, count, got);
    take(lock, out + got, count - got);
  } catch (...) {
    undo_take(out, got);
    throw;
  }
  wake_if_low_locked();
  publish_locked();
}

void Pool::take_fresh(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t& got) {
  outstanding_ += count;
  try {
    while (got < count && make_ready_block(lock)) {
      const std::int64_t here = table_.take_ready(out + got, count - got);
      got += here;
      outstanding_ -= here;
    }
  } catch (...) {
    outstanding_ -= count - got;
    throw;
  }
  outstanding_ -= count - got;
}

void Pool::alloc_after(const std::int64_t* last, std::int64_t* out, std::int64_t count) {
  Guard lock(lock_);
  check_open();
  idle_ = false;
  make_available(count);
  finish_after(lock, out, count, count - table_.take_after(last, out, count));
}

bool Pool::alloc_after_at_once(const std::int64_t* last, std::int64_t* out, std::int64_t count) {
  Guard lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_open();
  if (count > available_locked()) return false;
  idle_ = false;
  const std::int64_t left = count - table_.take_after(last, out, count);
  if (!had_in_a_moment_locked(left)) {
    undo_after(out, count);
    return false;
  }
  finish_after(lock, out, count, left);
  return true;
}

void Pool::finish_after(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t left) {
  outstanding_ += left;
  try {
    for (std::int64_t i = 0; left > 0; ++i) {
      if (out[i] >= 0) continue;
      std::int64_t slot = -1;
      while (slot < 0) {
        if (make_ready_block(lock) ? table_.take_ready(&slot, 1) == 0 : table_.take(&slot, 1) == 0) map_one_more(lock);
      }
      out[i] = slot;
      --outstanding_;
      --left;
    }
  } catch (...) {
    outstanding_ -= left;
    undo_after(out, count);
    throw;
  }
  wake_if_low_locked();
  publish_locked();
}

void Pool::undo_after(std::int64_t* out, std::int64_t count) {
  std::int64_t* end = std::remove_if(out, out + count, [](std::int64_t slot) { return slot < 0; });
  undo_take(out, end - out);
}

void Pool::undo_take(std::int64_t* out, std::int64_t count) {
  std::vector<std::int32_t> emptied;
  table_.give(out, count, emptied);
  changed_.notify_all();
  publish_locked();
}

void Pool::take(Guard& lock, std::int64_t* out, std::int64_t count) {
  // Other threads must not be promised these slots while this one maps without the lock.
  outstanding_ += count;
  std::int64_t got = 0;
  try {
    for (;;) {
      const std::int64_t here = table_.take(out + got, count - got);
      got += here;
      outstanding_ -= here;
      if (got == count) return;
      map_one_more(lock);
    }
  } catch (...) {
    outstanding_ -= count - got;
    undo_take(out, got);
    throw;
  }
}

bool Pool::free(const std::int64_t* slots, std::int64_t count) {
  Guard lock(lock_);
  check_open();
  return free_locked(slots, count);
}

bool Pool::free_at_once(const std::int64_t* slots, std::int64_t count, bool* due) {
  Guard lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_open();
  *due = free_locked(slots, count);
  return true;
}

bool Pool::free_locked(const std::int64_t* slots, std::int64_t count) {
  emptied_.clear();
  table_.give(slots, count, emptied_);
  return after_free();
}

bool Pool::reset() {
  Guard lock(lock_);
  check_open();
  emptied_.clear();
  table_.give_all(emptied_);
  return after_free();
}

bool Pool::after_free() {
  if (!emptied_.empty()) fence_emptied_locked();
  if (outstanding_ > 0) changed_.notify_all();
  publish_locked();
  if (emptied_.empty()) return false;
  ensured_ = 0;
  if (elastic_) follow_use_locked(high_);
  const bool surplus = surplus_locked() > 0 || lease_ > std::max(target_, mapped_);
  return surplus && !hand_over_locked();
}

bool Pool::hand_over_locked() {
  if (!tended_) return false;
  if (!woken_) owner_->wake();
  return woken_ = true;
}

void Pool::fence_emptied_locked() {
  if (!stream_set_ && fence_ == nullptr) {
    if (!fences_.empty()) {
      for (std::int32_t block : emptied_) fences_.erase(block);
    }
    return;
  }
  std::shared_ptr<Fence> fence = fence_;
  try {
    if (stream_set_) fence = owner_->driver().record(stream_);
  } catch (const Error&) {
    fence = std::make_shared<LateFence>(owner_->shared_driver(), stream_);
  }
  for (std::int32_t block : emptied_) fences_[block] = fence;
}

bool Pool::fence_allows_locked(std::int32_t block) {
  if (fences_.empty()) return true;
  const auto found = fences_.find(block);
  if (found == fences_.end()) return true;
  if (!found->second->passed()) return false;
  fences_.erase(found);
  return true;
}

void Pool::wake_if_low_locked() {
  const std::int64_t ready = table_.ready_blocks();
  // Waking costs more than the slots: while the helper looks by itself, only what cannot wait for it is worth that.
  if (ready >= low_ || woken_ || (watched_ && ready > low_ / 2)) return;
  woken_ = true;
  owner_->wake();
}

}  // namespace kvcached
