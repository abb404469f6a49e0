// The lease: growing, shrinking to a target, following use, giving back; and closing.
#include <time.h>

#include <algorithm>
#include <limits>

#include "kvcached/error.h"
#include "kvcached/futex.h"
#include "kvcached/pool.h"

namespace kvcached {
namespace {
constexpr std::int64_t kLongestFence_ns = 10000000000;  // work in flight takes seconds at most
constexpr std::int64_t kFencePoll_ns = 200000;
}  // namespace

std::int64_t Pool::surplus_locked() const {
  const std::int64_t ready = table_.ready_blocks();
  const std::int64_t above_mark = ready > high_ ? ready - high_ : 0;
  const std::int64_t above_lease = mapped_ - unmapping_ - target_;
  return std::min(ready, std::max(above_mark, above_lease));
}

void Pool::follow_use_locked(std::int64_t keep_ready) {
  const std::int64_t needed = table_.used_blocks() + blocks_for(outstanding_) + refilling_ + std::min(table_.ready_blocks(), keep_ready);
  target_ = std::max<std::int64_t>(1, std::min(target_, std::max(needed, ensured_)));
}

void Pool::return_lease(Guard& lock) {
  // What alloc() calls that are mapping were promised stays theirs, however far the target has been lowered.
  const std::int64_t promised = table_.used_blocks() + blocks_for(outstanding_) + refilling_;
  const std::int64_t keep = std::max({target_, mapped_, promised});
  if (closed_ || lease_ <= keep) return;
  const std::int64_t blocks = lease_ - keep;
  lease_ = keep;
  ++returning_;
  lock.unlock();
  const auto arrive = [&] {
    lock.lock();
    --returning_;
    changed_.notify_all();
  };
  try {
    owner_->unlease(blocks * geometry_.block_bytes, Klass::Kv);
  } catch (...) {
    arrive();
    throw;
  }
  arrive();
  returned_ += blocks;
}

void Pool::settle_locked(Guard& lock) {
  ensured_ = 0;
  const std::int64_t keep_ready = owner_->pressure() > 0 ? 0 : high_;  // pages mapped ahead are the first that others get
  if (elastic_) follow_use_locked(keep_ready);
  while (!closed_ && surplus_locked() > 0 && unmap_oldest(lock)) {
    if (elastic_) follow_use_locked(keep_ready);
  }
  return_lease(lock);
  publish_locked();
}

void Pool::finish(Guard& lock) {
  settle_locked(lock);
  if (surplus_locked() == 0 || tended_) return;
  tended_ = true;
  lock.unlock();  // the helper may be waiting for this lock while it holds its own
  owner_->tend(this);
  lock.lock();
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
  const std::int64_t surplus = surplus_locked();
  if (elastic_ || !fences_.empty() || !brief_locked(surplus) || lease_ > std::max(target_, mapped_ - surplus)) return false;
  finish(lock);
  return true;
}

void Pool::quiesce() {
  Guard lock(lock_);
  check_open();
  finish(lock);
  while (mapping_ + leaving_locked() > 0) {
    changed_.wait(lock, [this] { return mapping_ + leaving_locked() == 0; });
    finish(lock);
  }
}

void Pool::set_lease(std::int64_t bytes) {
  if (bytes < 0) throw Error(ErrorKind::BadRequest, "a lease must not be negative", {{"lease_bytes", bytes}});
  const std::int64_t blocks = first_lease_bytes(geometry_, bytes) / geometry_.block_bytes;
  Guard lock(lock_);
  check_open();
  if (blocks > lease_) {
    owner_->lease((blocks - lease_) * geometry_.block_bytes, Klass::Kv);
    lease_ = blocks;
  }
  if (elastic_ && high_ == 0) high_ = std::numeric_limits<std::int64_t>::max();
  elastic_ = false;
  target_ = blocks;
  finish(lock);
}

void Pool::set_elastic() {
  Guard lock(lock_);
  check_open();
  if (!elastic_ && high_ == std::numeric_limits<std::int64_t>::max()) high_ = low_;
  elastic_ = true;
  settle_locked(lock);
}

bool Pool::ensure(std::int64_t slots, bool yielding) {
  Guard lock(lock_);
  check_open();
  idle_ = false;
  const std::int64_t available = available_locked();
  if (slots <= available) {
    ensured_ = std::max(ensured_, blocks_needed_locked(slots));
    return true;
  }
  if (slots > geometry_.max_slots - table_.used_slots() - outstanding_) return false;
  const std::int64_t needed = blocks_needed_locked(slots);
  if (needed > lease_) {
    try {
      const std::int64_t bytes = (needed - lease_) * geometry_.block_bytes;
      if (yielding) {
        owner_->lease_yielding(bytes, Klass::Kv);
      } else {
        owner_->lease(bytes, Klass::Kv);
      }
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::OutOfMemory || error.kind() == ErrorKind::LimitExceeded) return false;
      throw;
    }
    lease_ = needed;
  } else if (owner_->pressure() > 0) {
    return false;  // others wait for what would be kept back here
  }
  target_ = std::max(target_, needed);
  ensured_ = std::max(ensured_, needed);
  return true;
}

std::int64_t Pool::unneeded_locked(std::int64_t keep_slots) const {
  const std::int64_t keep = blocks_for(keep_slots + outstanding_ - table_.partial_free());
  return std::max<std::int64_t>(0, target_ - std::max<std::int64_t>(1, table_.used_blocks()) - keep);
}

std::int64_t Pool::give_back(std::int64_t keep_slots, std::int64_t most_bytes) {
  Guard lock(lock_);
  check_open();
  const std::int64_t before = returned_;
  const std::int64_t most = most_bytes / geometry_.block_bytes + (most_bytes % geometry_.block_bytes != 0);
  target_ -= std::min(unneeded_locked(keep_slots), most);
  finish(lock);
  while (leaving_locked() > 0) {  // what the helper thread is about to give counts, too
    changed_.wait(lock, [this] { return leaving_locked() == 0; });
    finish(lock);
  }
  return (returned_ - before) * geometry_.block_bytes;
}

std::int64_t Pool::relieve(std::int64_t keep_slots) {
  const std::int64_t wanted = pressure();
  return wanted > 0 ? give_back(keep_slots, wanted) : 0;
}

std::int64_t Pool::trim() {
  const std::int64_t bytes = give_back(0, std::numeric_limits<std::int64_t>::max());
  owner_->pages().destroy_spares();
  return bytes;
}

void Pool::wait_for_fences(Guard& lock) {
  if (table_.used_slots() > 0 && stream_set_) fence_ = owner_->driver().record(stream_);
  std::vector<std::shared_ptr<Fence>> waiting;
  for (auto& [block, fence] : fences_) waiting.push_back(fence);
  if (fence_ != nullptr && table_.used_slots() > 0) waiting.push_back(fence_);
  const std::int64_t deadline = now_ns() + kLongestFence_ns;
  lock.unlock();
  for (auto& fence : waiting) {
    while (!fence->passed() && now_ns() < deadline) {
      const timespec pause{0, kFencePoll_ns};
      nanosleep(&pause, nullptr);
    }
  }
  lock.lock();
}

void Pool::close_pages() {
  Guard lock(lock_);
  closed_ = true;
  changed_.wait(lock, [this] { return mapping_ + leaving_locked() == 0 && outstanding_ == 0; });
  wait_for_fences(lock);
  std::vector<bool> absent(geometry_.blocks, false);
  for (std::int32_t block : absent_) absent[block] = true;
  std::exception_ptr failed;
  for (std::int64_t b = 0; b < geometry_.blocks; ++b) {
    if (absent[b]) continue;
    ++unmapping_;
    publish_locked();
    try {
      unmap_block(static_cast<std::int32_t>(b));
      absent_.push_back(static_cast<std::int32_t>(b));
      --mapped_;
    } catch (const Error&) {
      failed = std::current_exception();
    }
    --unmapping_;
  }
  publish_locked();
  if (failed != nullptr) std::rethrow_exception(failed);  // close again to try again
  table_ = SlotTable(geometry_);
  fences_.clear();
  drained_ = true;
  publish_locked();
}

std::int64_t Pool::close_keeping_lease() {
  if (!owner_->usable()) return 0;  // closed with its owner, or left behind by a fork
  owner_->leave_alone(this);
  {
    Guard lock(lock_);
    if (drained_) return 0;
  }
  close_pages();
  Guard lock(lock_);
  const std::int64_t blocks = lease_;
  lease_ = target_ = 0;
  return blocks * geometry_.block_bytes;
}

void Pool::close() {
  const std::int64_t bytes = close_keeping_lease();
  if (bytes > 0) owner_->unlease(bytes, Klass::Kv);
}

}  // namespace kvcached
