// Lent memory: KV of engines of other devices in what is free here. The first to go, whoever needs memory.
//
//   | weights, KV, staging of this device's owners | lent | free beyond what is kept |  keep  |
//                                                    ^ asked back as soon as anybody wants more than the keep
//
// A borrower is an owner like any other (it dies, it is reaped), and feels pressure() for its lent bytes before anybody else
// feels any. It answers between two of its steps. One that does not answer within a grace no longer spares the others.
#include <algorithm>

#include "account_locked.h"
#include "kvcached/error.h"
#include "kvcached/futex.h"

namespace kvcached {
namespace {

constexpr std::int64_t kGrace_ns = 250000000;    // a few engine steps
constexpr std::int64_t kForgotten_ns = 40 * kGrace_ns;  // an earlier need that ended otherwise

}  // namespace

void Account::offer(std::int64_t keep_bytes) {
  if (keep_bytes < kLendsNothing) {
    throw Error(ErrorKind::BadRequest, "what a device keeps back must not be negative", {{"keep_bytes", keep_bytes}});
  }
  {
    Locked lock(*this);
    header_->lend_keep_bytes.store(keep_bytes, std::memory_order_relaxed);
  }
  for (int i = 0; i < kMaxOwners; ++i) {
    if (slots_[i].live.load(std::memory_order_acquire) && slots_[i].lent() > 0) ring(i);
  }
}

std::int64_t Account::lendable(std::int64_t owed_bytes) const {
  const std::int64_t keep = header_->lend_keep_bytes.load(std::memory_order_relaxed);
  if (keep == kLendsNothing) return 0;
  const std::int64_t waited = header_->wanted_bytes.load(std::memory_order_relaxed);
  return std::max<std::int64_t>(0, free_bytes() - keep - waited - owed_bytes);
}

std::int64_t Account::offered_bytes() const { return lendable(header_->wish_bytes.load(std::memory_order_relaxed)); }

std::int64_t Account::lent_bytes() const {
  std::int64_t sum = 0;
  for (int i = 0; i < kMaxOwners; ++i) {
    if (slots_[i].live.load(std::memory_order_acquire)) sum += slots_[i].lent();
  }
  return sum;
}

// What of its lent bytes an owner should give back: for what others want, and for what the device keeps free.
std::int64_t Account::lent_pressure(const OwnerSlot& s, std::int64_t missing, std::int64_t wanted, std::int64_t free) const {
  const std::int64_t lent = s.lent();
  if (lent == 0) return 0;
  const std::int64_t keep = header_->lend_keep_bytes.load(std::memory_order_relaxed);
  if (keep == kLendsNothing) return lent;
  return std::min(lent, std::max({missing, wanted + keep - free, std::int64_t{0}}));
}

// What of `missing` is left for this owner to give when lent memory has gone. Read without the lock: a race makes an owner
// give back a cached prefix more or less.
std::int64_t Account::after_lent(const OwnerSlot& s, std::int64_t missing) const {
  const std::int64_t lent = lent_bytes() - s.lent();
  if (lent == 0) return missing;
  const std::int64_t now = now_ns();
  std::int64_t due = header_->lent_due_ns.load(std::memory_order_relaxed);
  if (due == 0 || now - due > kForgotten_ns) {
    header_->lent_due_ns.compare_exchange_strong(due, now, std::memory_order_relaxed);
    due = now;
  }
  if (now - due > kGrace_ns) return missing;
  return std::max<std::int64_t>(0, missing - lent);
}

void Account::lent_came_back() { header_->lent_due_ns.store(0, std::memory_order_relaxed); }

}  // namespace kvcached
