// Reservations, releases, floors and limits.
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "account_locked.h"
#include "kvcached/futex.h"

namespace kvcached {
namespace {

constexpr std::int64_t kReapEvery_ns = 1000000;  // a refused caller looks for dead owners at most this often

void check_bytes(std::int64_t bytes, const char* what) {
  if (bytes < 0) throw Error(ErrorKind::BadRequest, std::string(what) + " must not be negative", {{"bytes", bytes}});
}

}  // namespace

void Account::charge(OwnerSlot& s, std::int64_t before) {
  header_->charged_bytes.fetch_add(s.charged() - before, std::memory_order_release);
}

void Account::reserve_locked(OwnerId owner, std::int64_t bytes, Klass klass, bool yielding, std::int64_t waited) {
  OwnerSlot& s = live_slot(owner);
  const bool outside = klass == Klass::Outside;
  const std::int64_t held = s.held(), before = s.charged();
  const std::int64_t limit = s.limit_bytes.load(std::memory_order_relaxed);
  if (!outside && bytes > limit - held) {
    throw Error(ErrorKind::LimitExceeded, std::string(s.name) + " would exceed its limit",
                {{"requested_bytes", bytes}, {"held_bytes", held}, {"limit_bytes", limit}});
  }
  const std::int64_t floor = s.floor_bytes.load(std::memory_order_relaxed);
  const std::int64_t after = outside ? before - s.outside() + std::max(s.outside(), s.held_as(klass) + bytes)
                                     : std::max(held + bytes, floor) + s.outside();
  const std::int64_t free = klass == Klass::Lent ? lendable(owed(s)) : free_bytes() - (yielding ? owed(s) : 0);
  if (after > before && after - before > free) {  // what lies within the floor is granted whatever else happened
    throw Error(ErrorKind::OutOfMemory, path_ + ": not enough device memory for " + s.name,
                {{"requested_bytes", bytes}, {"free_bytes", free}, {"held_bytes", held}, {"capacity_bytes", capacity_bytes()}});
  }
  if (waited != 0) want_locked(owner, -waited);  // first, or pressure() in between would ask for it once more
  if (klass == Klass::Kv) fulfil_locked(s, bytes);  // likewise
  auto& books = s.held_bytes[static_cast<int>(klass)];
  books.store(books.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  charge(s, before);
}

bool Account::reap_if_due() {
  const std::int64_t now = now_ns();
  std::int64_t last = header_->reaped_at_ns.load(std::memory_order_relaxed);
  if (now - last < kReapEvery_ns && now >= last) return false;
  if (!header_->reaped_at_ns.compare_exchange_strong(last, now, std::memory_order_relaxed)) return false;
  return !reap().empty();
}

void Account::reserve(OwnerId owner, std::int64_t bytes, Klass klass, bool yielding) {
  check_bytes(bytes, "a reservation");
  const auto attempt = [&] {
    Locked lock(*this);
    reserve_locked(owner, bytes, klass, yielding);
  };
  try {
    attempt();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::OutOfMemory || !reap_if_due()) throw;
    attempt();
  }
}

bool Account::reserve_at_once(OwnerId owner, std::int64_t bytes, Klass klass) {
  check_bytes(bytes, "a reservation");
  Locked lock(*this, std::try_to_lock);
  if (!lock.owns()) return false;
  try {
    reserve_locked(owner, bytes, klass);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::OutOfMemory) throw;
    return false;
  }
  return true;
}

void Account::release_locked(OwnerId owner, std::int64_t bytes, Klass klass) {
  OwnerSlot& s = live_slot(owner);
  auto& books = s.held_bytes[static_cast<int>(klass)];
  const std::int64_t held = books.load(std::memory_order_relaxed), before = s.charged();
  if (bytes > held) {
    throw Error(ErrorKind::OverRelease, std::string(s.name) + " gives back more than it holds",
                {{"released_bytes", bytes}, {"held_bytes", held}});
  }
  books.store(held - bytes, std::memory_order_relaxed);
  charge(s, before);
  if (klass == Klass::Lent) lent_came_back();
}

void Account::release(OwnerId owner, std::int64_t bytes, Klass klass) {
  check_bytes(bytes, "a release");
  {
    Locked lock(*this);
    release_locked(owner, bytes, klass);
  }
  memory_came_back();
}

bool Account::release_at_once(OwnerId owner, std::int64_t bytes, Klass klass) {
  check_bytes(bytes, "a release");
  {
    Locked lock(*this, std::try_to_lock);
    if (!lock.owns()) return false;
    release_locked(owner, bytes, klass);
  }
  memory_came_back();
  return true;
}

void Account::set_limit(OwnerId owner, std::int64_t bytes) {
  check_bytes(bytes, "a limit");
  {
    Locked lock(*this);
    live_slot(owner).limit_bytes.store(bytes, std::memory_order_relaxed);
  }
  ring(owner);          // it may have to shrink
  memory_came_back();   // or may now get what it waits for
}

std::int64_t Account::free_bytes() const {
  return capacity_bytes() - foreign_bytes() - header_->charged_bytes.load(std::memory_order_relaxed);
}

std::int64_t Account::held(OwnerId owner, Klass klass) const {
  return live_slot(owner).held_bytes[static_cast<int>(klass)].load(std::memory_order_relaxed);
}
std::int64_t Account::held(OwnerId owner) const { return live_slot(owner).held(); }
std::int64_t Account::floor(OwnerId owner) const { return live_slot(owner).floor_bytes.load(std::memory_order_relaxed); }
std::int64_t Account::limit(OwnerId owner) const { return live_slot(owner).limit_bytes.load(std::memory_order_relaxed); }
Published& Account::published(OwnerId owner) { return live_slot(owner).published; }

std::int64_t Account::excess(OwnerId owner) const {
  const OwnerSlot& s = live_slot(owner);
  const std::int64_t over = s.held() - s.limit_bytes.load(std::memory_order_relaxed);
  return over > 0 ? over : 0;
}

std::int64_t Account::pressure(OwnerId owner) const {
  const OwnerSlot& s = live_slot(owner);
  const std::int64_t held = s.held();
  const std::int64_t over_limit = held - s.limit_bytes.load(std::memory_order_relaxed);
  // Below its floor nothing it gives back would reach anyone else.
  const std::int64_t above_floor = held - s.floor_bytes.load(std::memory_order_relaxed);
  // Read before what is wanted: see reserve_locked().
  const std::int64_t free = capacity_bytes() - foreign_bytes() - header_->charged_bytes.load(std::memory_order_acquire);
  const std::int64_t waited = header_->wanted_bytes.load(std::memory_order_relaxed) - s.wanted_bytes.load(std::memory_order_relaxed);
  const std::int64_t others = (waited > 0 ? waited : 0) + owed(s);
  std::int64_t missing = others > 0 || free < 0 ? others - free : 0;
  const std::int64_t lent = lent_pressure(s, missing, others, free);
  if (missing > 0) missing = after_lent(s, missing);
  if (missing > above_floor) missing = above_floor;
  if (lent > missing) missing = lent;
  const std::int64_t most = over_limit > missing ? over_limit : missing;
  return most > 0 ? most : 0;
}

void Account::die_inside_lock(OwnerId owner, std::int64_t bytes, bool after_total) {
  OwnerSlot& s = live_slot(owner);
  const int rc = pthread_mutex_lock(&header_->lock);
  if (rc == EOWNERDEAD) {
    add_up();
    pthread_mutex_consistent(&header_->lock);
  }
  const std::int64_t free = free_bytes();  // as a reservation would have checked
  if (bytes > free) bytes = free > 0 ? free : 0;
  auto& books = s.held_bytes[static_cast<int>(Klass::Kv)];
  books.store(books.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  if (after_total) header_->charged_bytes.fetch_add(bytes, std::memory_order_relaxed);
  for (;;) kill(getpid(), SIGKILL);
}

}  // namespace kvcached
