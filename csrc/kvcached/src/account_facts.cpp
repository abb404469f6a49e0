// Facts about the device that no reservation made: what processes take outside their pages, and what strangers hold.
#include <algorithm>

#include "account_locked.h"

namespace kvcached {
namespace {

void check_size(std::int64_t bytes) {
  if (bytes < 0) throw Error(ErrorKind::BadRequest, "what was measured must not be negative", {{"bytes", bytes}});
}

}  // namespace

void Account::note(std::atomic<std::int64_t>& fact, OwnerSlot* s, std::int64_t bytes) {
  const std::int64_t free = free_bytes(), before = s == nullptr ? 0 : s->charged();
  fact.store(bytes, std::memory_order_relaxed);
  if (s != nullptr) charge(*s, before);
  if (free_bytes() > free) return memory_came_back();
  if (free_bytes() < free && free_bytes() < 0) ring_everyone_but(-1);
}

void Account::note_outside(OwnerId owner, std::int64_t bytes) {
  check_size(bytes);
  Locked lock(*this);
  OwnerSlot& s = live_slot(owner);
  note(s.measured_bytes, &s, bytes);
}

void Account::note_foreign(std::int64_t bytes) {
  check_size(bytes);
  Locked lock(*this);
  note(header_->foreign_bytes, nullptr, bytes);
}

void Account::note_refusal(std::int64_t driver_free_bytes) {
  Locked lock(*this);
  std::int64_t rest = capacity_bytes() - std::max<std::int64_t>(0, driver_free_bytes);
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& s = slots_[i];
    if (!s.live.load(std::memory_order_relaxed)) continue;
    const std::int64_t measured = s.measured_bytes.load(std::memory_order_relaxed);
    rest -= s.published.physical_bytes.load(std::memory_order_relaxed) + (measured > 0 ? measured : s.held_as(Klass::Outside));
  }
  if (rest > foreign_bytes()) note(header_->foreign_bytes, nullptr, rest);
}

std::int64_t Account::outside_bytes() const {
  std::int64_t sum = 0;
  for (int i = 0; i < kMaxOwners; ++i) {
    if (slots_[i].live.load(std::memory_order_acquire)) sum += slots_[i].outside();
  }
  return sum;
}

}  // namespace kvcached
