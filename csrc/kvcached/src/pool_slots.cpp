// Slots of a pool: handing out and taking back.
#include <algorithm>

#include "kvcached/error.h"
#include "kvcached/pool.h"

namespace kvcached {
namespace {

void check_count(std::int64_t count) {
  if (count < 0) throw Error(ErrorKind::BadRequest, "a count of slots must not be negative", {{"count", count}});
}

}  // namespace

bool Pool::mapped_suffice(std::int64_t fresh_blocks) const {
  const BlockCounts now = counts();
  return fresh_blocks <= std::min(now.ready, books_.unused(now));
}

bool Pool::had_in_a_moment(std::int64_t fresh_blocks) const {
  if (mapped_suffice(fresh_blocks)) return true;
  const BlockCounts now = counts();
  const std::int64_t missing = fresh_blocks - now.ready;
  return pages_.are_brief(missing) && fresh_blocks <= books_.unused(now) && missing <= books_.held() - now.mapped &&
         missing <= blocks_.absent() && pages_.are_spare(missing);
}

void Pool::make_available(std::int64_t count) {
  const BlockCounts now = counts();
  const std::int64_t available = books_.available(now);
  if (count <= available) return;
  const std::int64_t left = books_.room(now);
  if (!books_.elastic() || count > left) {
    throw Error(ErrorKind::OutOfMemory, "not enough slots: " + std::to_string(count) + " wanted, " + std::to_string(available) +
                    (count > left ? " left in the pool's range" : " in the lease"),
                {{"requested_slots", count}, {"available_slots", available}, {"lease_bytes", bytes(books_.held())},
                 {"used_slots", now.used_slots}, {"max_slots", geometry_.max_slots}});
  }
  const std::int64_t needed = books_.needed(now, count);
  if (needed > books_.held()) lease_more(needed - books_.held());
  books_.raise_target(needed);
}

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
  const std::int64_t missing = fresh ? count : count - blocks_.slots().partial_free();
  if (count > books_.available(counts()) || !had_in_a_moment(books_.blocks_for(missing))) return false;
  alloc_locked(lock, out, count, fresh);
  return true;
}

void Pool::alloc_locked(Guard& lock, std::int64_t* out, std::int64_t count, bool fresh) {
  make_available(count);
  const std::int64_t got = fresh ? take_fresh(lock, out, count) : 0;
  try {
    take(lock, out + got, count - got);
  } catch (...) {
    undo_take(out, got);
    throw;
  }
  wake_if_low();
  publish();
}

std::int64_t Pool::take_fresh(Guard& lock, std::int64_t* out, std::int64_t count) {
  Promise promise(books_, count);
  try {
    while (promise.left() > 0 && make_ready_block(lock)) {
      promise.keep(blocks_.slots().take_ready(out + (count - promise.left()), promise.left()));
    }
  } catch (...) {
    undo_take(out, count - promise.left());
    throw;
  }
  return count - promise.left();
}

void Pool::take(Guard& lock, std::int64_t* out, std::int64_t count) {
  Promise promise(books_, count);
  try {
    for (;;) {
      promise.keep(blocks_.slots().take(out + (count - promise.left()), promise.left()));
      if (promise.left() == 0) return;
      map_one_more(lock);
    }
  } catch (...) {
    undo_take(out, count - promise.left());
    throw;
  }
}

void Pool::alloc_after(const std::int64_t* last, std::int64_t* out, std::int64_t count) {
  Guard lock(lock_);
  check_open();
  make_available(count);
  finish_after(lock, out, count, count - blocks_.slots().take_after(last, out, count));
}

bool Pool::alloc_after_at_once(const std::int64_t* last, std::int64_t* out, std::int64_t count) {
  Guard lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_open();
  if (count > books_.available(counts())) return false;
  const std::int64_t left = count - blocks_.slots().take_after(last, out, count);
  if (!had_in_a_moment(left)) {
    undo_after(out, count);
    return false;
  }
  finish_after(lock, out, count, left);
  return true;
}

void Pool::finish_after(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t left) {
  Promise promise(books_, left);
  try {
    for (std::int64_t i = 0; promise.left() > 0; ++i) {
      if (out[i] >= 0) continue;
      out[i] = next_slot(lock);
      promise.keep(1);
    }
  } catch (...) {
    undo_after(out, count);
    throw;
  }
  wake_if_low();
  publish();
}

std::int64_t Pool::next_slot(Guard& lock) {
  std::int64_t slot = -1;
  while (slot < 0) {
    SlotTable& table = blocks_.slots();
    if (make_ready_block(lock) ? table.take_ready(&slot, 1) == 0 : table.take(&slot, 1) == 0) map_one_more(lock);
  }
  return slot;
}

void Pool::undo_after(std::int64_t* out, std::int64_t count) {
  std::int64_t* end = std::remove_if(out, out + count, [](std::int64_t slot) { return slot < 0; });
  undo_take(out, end - out);
}

void Pool::undo_take(std::int64_t* out, std::int64_t count) {
  std::vector<std::int32_t> emptied;
  blocks_.slots().give(out, count, emptied);
  changed_.notify_all();
  publish();
}

bool Pool::make_ready_block(Guard& lock) {
  const BlockCounts now = counts();
  if (books_.unused(now) <= 0 && (!books_.elastic() || owner_->pressure() > 0 || !lease_free_block())) return false;
  if (now.ready > 0) return true;
  if (now.mapped >= books_.held() || blocks_.absent() == 0) return false;
  map_absent(lock);
  return counts().ready > 0 && books_.unused(counts()) > 0;
}

void Pool::map_one_more(Guard& lock) {
  if (counts().mapped < books_.held() && blocks_.absent() > 0) return map_absent(lock);
  // The lease covers what was promised, so a block that is changing hands will serve.
  if (!blocks_.in_transition()) throw Error(ErrorKind::BadRequest, "pool: a promise is not covered by the lease");
  changed_.wait(lock);
}

void Pool::wake_if_low() {
  if (woken_ || !ahead_.is_urgent(counts().ready)) return;
  woken_ = true;
  owner_->wake_helper();
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
  blocks_.slots().give(slots, count, emptied_);
  return after_free();
}

bool Pool::reset() {
  Guard lock(lock_);
  check_open();
  emptied_.clear();
  blocks_.slots().give_all(emptied_);
  return after_free();
}

bool Pool::after_free() {
  if (!emptied_.empty()) fences_.cover(emptied_);
  if (books_.promised_slots() > 0) changed_.notify_all();
  publish();
  if (emptied_.empty()) return false;
  books_.forget_ensured();
  books_.follow_use(counts(), ahead_.high());
  const bool due = surplus() > 0 || books_.held() > std::max(books_.target(), counts().mapped);
  return due && !hand_to_helper();
}

bool Pool::hand_to_helper() {
  if (!tended_) return false;
  if (!woken_) owner_->wake_helper();
  return woken_ = true;
}

}  // namespace kvcached
