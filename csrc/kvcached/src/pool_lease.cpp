// A pool's lease: growing, shrinking to a target, giving back; and the helper thread's turn, which keeps pages ahead of use.
#include <algorithm>
#include <limits>

#include "kvcached/error.h"
#include "kvcached/futex.h"
#include "kvcached/pool.h"

namespace kvcached {
namespace {
constexpr std::int64_t kFencePoll_ns = 500000;
constexpr std::int64_t kRefillRetry_ns = 20000000;  // the account was empty: memory may come back
constexpr std::int64_t kRefillRun = 8;              // blocks that the helper maps with one call
}  // namespace

void Pool::lease_more(std::int64_t blocks) {
  owner_->lease(bytes(blocks), Klass::Kv);
  books_.grant(blocks);
}

bool Pool::try_lease_more(std::int64_t blocks, bool yielding) {
  try {
    if (yielding) {
      owner_->lease_yielding(bytes(blocks), Klass::Kv);
    } else {
      owner_->lease(bytes(blocks), Klass::Kv);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::OutOfMemory || error.kind() == ErrorKind::LimitExceeded) return false;
    throw;
  }
  books_.grant(blocks);
  return true;
}

bool Pool::lease_free_block() {
  if (owner_->account().free_bytes() < bytes(1) || !try_lease_more(1, false)) return false;
  books_.raise_target(books_.target() + 1);
  return true;
}

void Pool::return_lease(Guard& lock) {
  if (closed_) return;
  const std::int64_t blocks = books_.take_back(counts());
  if (blocks == 0) return;
  ++returning_;
  lock.unlock();
  const auto arrive = [&] {
    lock.lock();
    --returning_;
    changed_.notify_all();
  };
  try {
    owner_->unlease(bytes(blocks), Klass::Kv);
  } catch (...) {
    arrive();
    throw;
  }
  arrive();
  returned_ += blocks;
}

void Pool::settle_locked(Guard& lock) {
  books_.forget_ensured();
  const std::int64_t keep_ready = owner_->pressure() > 0 ? 0 : ahead_.high();  // pages mapped ahead are the first that others get
  books_.follow_use(counts(), keep_ready);
  while (!closed_ && surplus() > 0 && unmap_oldest(lock)) books_.follow_use(counts(), keep_ready);
  return_lease(lock);
  publish();
}

void Pool::have_helper(Guard& lock) {
  tended_ = true;
  lock.unlock();  // the helper may be waiting for this lock while it holds its own
  owner_->look_after(this);
  lock.lock();
}

void Pool::finish(Guard& lock) {
  settle_locked(lock);
  if (surplus() > 0 && !tended_) have_helper(lock);
}

void Pool::wait_for_leaving(Guard& lock) {
  const auto arrived = [this] { return !blocks_.is_unmapping() && returning_ == 0; };
  while (!arrived()) {
    changed_.wait(lock, arrived);
    finish(lock);
  }
}

void Pool::settle() {
  Guard lock(lock_);
  check_open();
  finish(lock);
}

bool Pool::settle_at_once() {
  Guard lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  check_open();
  const std::int64_t blocks = surplus();
  const std::int64_t left = std::max(books_.target(), counts().mapped - blocks);
  if (books_.elastic() || fences_.covered() > 0 || !pages_.are_brief(blocks) || books_.held() > left) return false;
  finish(lock);
  return true;
}

void Pool::quiesce() {
  Guard lock(lock_);
  check_open();
  finish(lock);
  const auto still = [this] { return !blocks_.in_transition() && returning_ == 0; };
  while (!still()) {
    changed_.wait(lock, still);
    finish(lock);
  }
}

void Pool::set_lease(std::int64_t lease_bytes) {
  if (lease_bytes < 0) throw Error(ErrorKind::BadRequest, "a lease must not be negative", {{"lease_bytes", lease_bytes}});
  const std::int64_t blocks = first_lease_bytes(geometry_, lease_bytes) / geometry_.block_bytes;
  Guard lock(lock_);
  check_open();
  if (blocks > books_.held()) lease_more(blocks - books_.held());
  if (books_.elastic()) ahead_.become_leased();
  books_.set_leased(blocks);
  finish(lock);
}

bool Pool::ensure(std::int64_t slots, bool yielding) {
  Guard lock(lock_);
  check_open();
  const BlockCounts now = counts();
  const std::int64_t needed = books_.needed(now, slots);
  if (slots > books_.available(now)) {
    if (slots > books_.room(now)) return false;
    if (needed > books_.held()) {
      if (!try_lease_more(needed - books_.held(), yielding)) return false;
    } else if (owner_->pressure() > 0) {
      return false;  // others wait for what would be kept back here
    }
    books_.raise_target(needed);
  }
  books_.keep_ensured(needed);
  return true;
}

std::int64_t Pool::unbacked(std::int64_t slots, bool fresh) const {
  const BlockCounts now = counts();
  const std::int64_t wanted = books_.blocks_for((fresh ? slots : slots - now.partial_free) + books_.promised_slots());
  return std::min(wanted, books_.unused(now)) - now.ready;
}

bool Pool::is_backed(std::int64_t slots, bool fresh) const {
  Guard lock(lock_, std::try_to_lock);
  return lock.owns_lock() && !closed_ && unbacked(slots, fresh) <= 0;
}

bool Pool::back(std::int64_t slots, bool fresh) {
  Guard lock(lock_);
  check_open();
  std::int64_t most = INT64_MAX;
  while (unbacked(slots, fresh) > 0) {
    const std::int64_t missing = std::min({unbacked(slots, fresh), books_.held() - counts().mapped, blocks_.absent(), most});
    if (missing <= 0 && !blocks_.in_transition()) break;
    if (missing <= 0) {
      changed_.wait(lock);
      continue;
    }
    try {
      map_run(lock, missing);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::OutOfMemory) throw;
      most = missing / 2;  // pages that were made are spare now: fewer may do
      if (most == 0) {
        lower_to_mapped(lock);
        return false;
      }
    }
  }
  publish();
  return true;
}

void Pool::lower_to_mapped(Guard& lock) {
  const BlockCounts now = counts();
  books_.forget_ensured();
  books_.shrink(std::max<std::int64_t>(0, books_.target() - std::max(now.mapped - now.unmapping, now.used_blocks)));
  return_lease(lock);
  publish();
  owner_->note_refusal();
}

std::int64_t Pool::give_back(std::int64_t keep_slots, std::int64_t most_bytes) {
  Guard lock(lock_);
  check_open();
  const std::int64_t before = returned_;
  const std::int64_t most = most_bytes / geometry_.block_bytes + (most_bytes % geometry_.block_bytes != 0);
  books_.shrink(std::min(books_.unneeded(counts(), keep_slots), most));
  finish(lock);
  wait_for_leaving(lock);  // what the helper thread is about to give counts, too
  return bytes(returned_ - before);
}

std::int64_t Pool::trim() {
  const std::int64_t given = give_back(0, std::numeric_limits<std::int64_t>::max());
  owner_->pages().destroy_spares();
  return given;
}

std::int64_t Pool::tend() {
  Guard lock(lock_);
  woken_ = false;
  if (closed_ || !owner_->usable()) return INT64_MAX;
  const std::int64_t pressure = owner_->pressure();
  books_.follow_use(counts(), pressure > 0 ? 0 : ahead_.high());  // pages mapped ahead are the first that others get
  const bool unmapped = surplus() > 0 && unmap_oldest(lock);
  return_lease(lock);
  Refill refill = Refill::Nothing;
  if (!unmapped && pressure == 0) refill = refill_one(lock);
  publish();
  if (unmapped || refill == Refill::Mapped) return 0;
  if (surplus() > 0) return kFencePoll_ns;
  return refill == Refill::Later ? kRefillRetry_ns : ahead_.note_use(counts().ready, now_ns());
}

Pool::Refill Pool::refill_one(Guard& lock) {
  if (!ahead_.decide_refill(counts().ready) || blocks_.absent() == 0) return Refill::Nothing;
  if (counts().mapped >= books_.target()) {
    if (!books_.elastic()) return Refill::Nothing;
    if (!lease_free_block()) return Refill::Later;
  }
  const std::int64_t more = std::min({kRefillRun, ahead_.lacking(counts().ready), books_.target() - counts().mapped});
  const Refilling refilling(books_);
  map_run(lock, std::max<std::int64_t>(1, more));
  return Refill::Mapped;
}

void Pool::set_ahead(std::int64_t low_bytes, std::int64_t high_bytes) {
  if (low_bytes < 0 || (high_bytes >= 0 && high_bytes < low_bytes)) {
    throw Error(ErrorKind::BadRequest, "marks must be 0 <= low <= high, or high unlimited",
                {{"low_bytes", low_bytes}, {"high_bytes", high_bytes}});
  }
  const auto blocks = [this](std::int64_t wanted) { return (wanted + geometry_.block_bytes - 1) / geometry_.block_bytes; };
  Guard lock(lock_);
  check_open();
  ahead_.set_marks(blocks(low_bytes), high_bytes < 0 ? INT64_MAX : blocks(high_bytes));
  settle_locked(lock);
  if (tended_) return wake_if_low();
  if (low_bytes > 0 || surplus() > 0) have_helper(lock);
}

void Pool::fence_with(std::shared_ptr<Fence> fence) {
  Guard lock(lock_);
  fences_.use_fence(std::move(fence));
}

void Pool::defer_on_stream(std::uintptr_t stream) {
  Guard lock(lock_);
  fences_.use_stream(stream);
}

}  // namespace kvcached
