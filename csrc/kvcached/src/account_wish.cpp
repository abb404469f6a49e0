// Standing wishes: who goes before whom, what may stand, and what is kept for it.
#include <algorithm>

#include "account_locked.h"
#include "kvcached/futex.h"

namespace kvcached {

// A total order over wishes, so that there is always a first one, and any wish before no wish.
bool Account::goes_before(const OwnerSlot& wisher, const OwnerSlot& other) const {
  if (other.wish_bytes.load(std::memory_order_acquire) <= 0) return true;
  const std::int64_t mine = wisher.kv(), its = other.kv();
  if (mine != its) return mine < its;
  const std::int64_t my_since = wisher.wish_since_ns.load(std::memory_order_relaxed);
  const std::int64_t its_since = other.wish_since_ns.load(std::memory_order_relaxed);
  return my_since != its_since ? my_since < its_since : &wisher < &other;
}

std::int64_t Account::owed(const OwnerSlot& s) const {
  const std::int64_t all = header_->wish_bytes.load(std::memory_order_relaxed);
  if (all <= s.wish_bytes.load(std::memory_order_relaxed)) return 0;  // the usual case, read in every scheduling step
  std::int64_t sum = 0;
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& other = slots_[i];
    if (&other == &s || !other.live.load(std::memory_order_acquire)) continue;
    const std::int64_t wish = other.wish_bytes.load(std::memory_order_acquire);
    if (wish > 0 && goes_before(other, s)) sum += wish;
  }
  return sum;
}

// How much more KV the owner could hold if all others gave back what they can: of its KV each keeps a page (the first block
// of a pool), of what is lent to it nothing, nor of staging (what passes through it waits), and its weights, its floor and
// what is outside its pages stay.
std::int64_t Account::attainable_locked(const OwnerSlot& s) const {
  std::int64_t rest = capacity_bytes() - foreign_bytes() - s.outside();
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& other = slots_[i];
    if (&other == &s || !other.live.load(std::memory_order_relaxed)) continue;
    const std::int64_t stays = other.held() - other.kv() - other.lent() - other.held_as(Klass::Staging);
    const std::int64_t least = stays + std::min(other.kv(), page_bytes());
    rest -= std::max(least, other.floor_bytes.load(std::memory_order_relaxed)) + other.outside();
  }
  return std::min(rest, s.limit_bytes.load(std::memory_order_relaxed)) - s.held();
}

std::int64_t Account::wish(OwnerId owner, std::int64_t least_bytes, std::int64_t most_bytes, std::int64_t since_ns) {
  if (least_bytes < 0 || most_bytes < least_bytes) {
    throw Error(ErrorKind::BadRequest, "a wish must be 0 <= least <= most", {{"least_bytes", least_bytes}, {"most_bytes", most_bytes}});
  }
  std::int64_t stands = 0, before = 0;
  {
    Locked lock(*this);
    OwnerSlot& s = live_slot(owner);
    const std::int64_t attainable = attainable_locked(s);
    stands = least_bytes <= attainable ? std::max<std::int64_t>(0, std::min(most_bytes, attainable)) : 0;
    before = s.wish_bytes.load(std::memory_order_relaxed);
    if (since_ns == 0) since_ns = before > 0 ? s.wish_since_ns.load(std::memory_order_relaxed) : now_ns();
    s.wish_since_ns.store(since_ns, std::memory_order_relaxed);
    s.wish_bytes.store(stands, std::memory_order_release);
    header_->wish_bytes.fetch_add(stands - before, std::memory_order_relaxed);
  }
  if (stands > before) ring_everyone_but(owner);
  return stands;
}

void Account::fulfil_locked(OwnerSlot& s, std::int64_t bytes) {
  const std::int64_t stands = s.wish_bytes.load(std::memory_order_relaxed);
  if (stands == 0) return;
  const std::int64_t less = std::min(stands, bytes);
  s.wish_bytes.store(stands - less, std::memory_order_relaxed);
  header_->wish_bytes.fetch_sub(less, std::memory_order_relaxed);
}

std::int64_t Account::owed_to_others(OwnerId owner) const { return owed(live_slot(owner)); }

std::int64_t Account::wished(OwnerId owner) const { return live_slot(owner).wish_bytes.load(std::memory_order_relaxed); }

std::int64_t Account::wanted_bytes() const {
  return header_->wanted_bytes.load(std::memory_order_relaxed) + header_->wish_bytes.load(std::memory_order_relaxed);
}

}  // namespace kvcached
