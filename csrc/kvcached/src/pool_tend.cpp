// What the helper thread does for a pool, and the switches that start it; statistics and self-check.
#include <algorithm>
#include <limits>

#include "kvcached/error.h"
#include "kvcached/futex.h"
#include "kvcached/pool.h"

namespace kvcached {
namespace {
constexpr std::int64_t kNothingDue_ns = 500000000;
constexpr std::int64_t kFencePoll_ns = 500000;
constexpr std::int64_t kWatch_ns = 5000000;       // how often ready blocks are looked after while they are being used,
constexpr std::int64_t kWatchFor_ns = 200000000;  // and for how long after the last was
constexpr std::int64_t kRefillRetry_ns = 20000000;  // the account was empty: memory may come back
}  // namespace

std::int64_t Pool::tend() {
  Guard lock(lock_);
  woken_ = false;
  if (closed_ || !owner_->usable()) return kNothingDue_ns;
  const std::int64_t pressure = owner_->pressure();
  if (idle_ && pressure > 0) {
    const std::int64_t blocks = (pressure + geometry_.block_bytes - 1) / geometry_.block_bytes;
    target_ -= std::min(unneeded_locked(0), blocks);
  }
  // Pages mapped ahead are the first that others get.
  if (elastic_) follow_use_locked(pressure > 0 ? 0 : high_);
  const bool unmapped = surplus_locked() > 0 && unmap_oldest(lock);
  return_lease(lock);
  Refill refill = Refill::Nothing;
  if (!unmapped && pressure == 0) refill = refill_one(lock);
  publish_locked();
  if (unmapped || refill == Refill::Mapped) return 0;
  if (surplus_locked() > 0) return kFencePoll_ns;
  return refill == Refill::Later ? kRefillRetry_ns : watch_locked();
}

std::int64_t Pool::watch_locked() {
  const std::int64_t ready = table_.ready_blocks(), now = now_ns();
  if (ready < watched_ready_) used_at_ns_ = now;
  watched_ready_ = ready;
  watched_ = low_ > 0 && used_at_ns_ > 0 && now - used_at_ns_ < kWatchFor_ns;
  return watched_ ? kWatch_ns : kNothingDue_ns;
}

Pool::Refill Pool::refill_one(Guard& lock) {
  const std::int64_t ready = table_.ready_blocks();
  const std::int64_t enough = high_ == std::numeric_limits<std::int64_t>::max() ? low_ : std::max(low_, high_);
  if (ready < low_) refill_ = true;
  if (ready >= enough) refill_ = false;
  if (!refill_ || absent_.empty()) return Refill::Nothing;
  if (mapped_ >= target_) {
    if (!elastic_ || owner_->account().free_bytes() < geometry_.block_bytes) return elastic_ ? Refill::Later : Refill::Nothing;
    try {
      owner_->lease(geometry_.block_bytes, Klass::Kv);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::OutOfMemory || error.kind() == ErrorKind::LimitExceeded) return Refill::Later;
      throw;
    }
    ++lease_;
    ++target_;
  }
  ++refilling_;
  try {
    map_absent(lock);
  } catch (...) {
    --refilling_;
    throw;
  }
  --refilling_;
  return Refill::Mapped;
}

void Pool::set_ahead(std::int64_t low_bytes, std::int64_t high_bytes) {
  if (low_bytes < 0 || (high_bytes >= 0 && high_bytes < low_bytes)) {
    throw Error(ErrorKind::BadRequest, "marks must be 0 <= low <= high, or high unlimited",
                {{"low_bytes", low_bytes}, {"high_bytes", high_bytes}});
  }
  const auto blocks = [this](std::int64_t bytes) { return (bytes + geometry_.block_bytes - 1) / geometry_.block_bytes; };
  {
    Guard lock(lock_);
    check_open();
    low_ = blocks(low_bytes);
    high_ = high_bytes < 0 ? std::numeric_limits<std::int64_t>::max() : blocks(high_bytes);
    settle_locked(lock);
    if (low_bytes == 0 && surplus_locked() == 0) return;
    tended_ = true;
  }
  owner_->tend(this);
}

void Pool::set_idle(bool idle) {
  {
    Guard lock(lock_);
    check_open();
    idle_ = idle;
    if (!idle) return;
    ensured_ = 0;
    tended_ = true;
  }
  owner_->tend(this);
}

void Pool::fence_with(std::shared_ptr<Fence> fence) {
  Guard lock(lock_);
  fence_ = std::move(fence);
  stream_set_ = false;
}

void Pool::defer_on_stream(std::uintptr_t stream) {
  Guard lock(lock_);
  stream_ = stream;
  stream_set_ = true;
  fence_ = nullptr;
}

void Pool::stop_deferring() {
  Guard lock(lock_);
  stream_set_ = false;
  fence_ = nullptr;
}

PoolStats Pool::stats() const {
  Guard lock(lock_);
  PoolStats s{};
  const std::int64_t bytes = geometry_.block_bytes;
  s.lease_bytes = lease_ * bytes;
  s.target_bytes = target_ * bytes;
  s.mapped_bytes = mapped_ * bytes;
  s.used_bytes = table_.used_slots() * geometry_.layout.token_bytes() * geometry_.layout.tokens_per_slot;
  s.ahead_bytes = table_.ready_blocks() * bytes;
  s.deferred_bytes = static_cast<std::int64_t>(fences_.size()) * bytes;
  s.used_slots = table_.used_slots();
  s.available_slots = closed_ ? 0 : available_locked();
  s.books_bytes = table_.books_bytes() + static_cast<std::int64_t>(sizeof *this + handles_.capacity() * sizeof(Handle) + absent_.capacity() * 4);
  s.maps = maps_;
  s.unmaps = unmaps_;
  return s;
}

void Pool::check() const {
  Guard lock(lock_);
  if (closed_) return;
  table_.check();
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw Error(ErrorKind::BadRequest, std::string("pool: ") + what);
  };
  const std::int64_t settled = table_.used_blocks() + table_.ready_blocks();
  require(settled + mapping_ + unmapping_ == mapped_, "blocks in use, ready and in transition are not all that is mapped");
  require(mapped_ + static_cast<std::int64_t>(absent_.size()) == geometry_.blocks, "mapped and absent are not all blocks");
  require(mapped_ <= lease_ && target_ <= lease_ && target_ >= 1, "the lease does not cover what is mapped");
  require(outstanding_ >= 0 && refilling_ >= 0 && refilling_ <= mapping_, "counters below zero");
}

}  // namespace kvcached
