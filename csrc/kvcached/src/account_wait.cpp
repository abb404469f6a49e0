// Waiting for memory: who waits, who is asked to give, who is woken; and the tables people look at.
#include <sys/stat.h>

#include <cstdio>

#include "account_locked.h"
#include "kvcached/futex.h"

namespace kvcached {
namespace {

// A dead owner wakes nobody, so waiters look for the dead this often.
constexpr std::int64_t kSlice_ns = 50000000;

class Waiting {
 public:
  explicit Waiting(std::atomic<std::uint32_t>& waiters) : waiters_(waiters) { waiters_.fetch_add(1); }
  ~Waiting() { waiters_.fetch_sub(1); }

 private:
  std::atomic<std::uint32_t>& waiters_;
};

// Bytes of the memfd as the kernel counts them, seen through the owner's descriptor table.
std::int64_t kernel_bytes(const OwnerSlot& s) {
  const int fd = s.published.memfd.load(std::memory_order_relaxed);
  if (fd < 0) return -1;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", s.pid, fd);
  struct stat info {};
  if (stat(path, &info) != 0 || info.st_ino != s.published.memfd_inode.load(std::memory_order_relaxed)) return -1;
  return static_cast<std::int64_t>(info.st_blocks) * 512;
}

}  // namespace

void Account::memory_came_back() {
  header_->freed.fetch_add(1);
  if (header_->waiters.load() != 0) futex_wake_all(header_->freed);
}

void Account::want(OwnerId owner, std::int64_t bytes) {
  Locked lock(*this);
  want_locked(owner, bytes);
}

void Account::want_locked(OwnerId owner, std::int64_t bytes) {
  OwnerSlot& s = live_slot(owner);
  s.wanted_bytes.store(s.wanted_bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  header_->wanted_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void Account::reserve_within(OwnerId owner, std::int64_t bytes, Klass klass, double timeout_s) {
  const std::int64_t deadline_ns = now_ns() + static_cast<std::int64_t>(timeout_s * 1e9);
  try {
    return reserve(owner, bytes, klass);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::OutOfMemory || timeout_s <= 0 || bytes > capacity_bytes()) throw;
  }
  Waiting waiting(header_->waiters);
  want(owner, bytes);
  ring_everyone_but(owner);
  for (;;) {
    const std::uint32_t seen = header_->freed.load();
    try {
      Locked lock(*this);
      return reserve_locked(owner, bytes, klass, false, bytes);
    } catch (const Error& error) {
      const std::int64_t left_ns = deadline_ns - now_ns();
      if (error.kind() == ErrorKind::UnknownOwner) throw;
      if (error.kind() != ErrorKind::OutOfMemory || left_ns <= 0) {
        want(owner, -bytes);
        throw;
      }
      futex_wait(header_->freed, seen, left_ns < kSlice_ns ? left_ns : kSlice_ns);
    }
    reap_if_due();
  }
}

void Account::ring(OwnerId owner) {
  OwnerSlot& s = slot(owner);
  s.doorbell.fetch_add(1);
  if (s.sleepers.load() != 0) futex_wake_all(s.doorbell);
}

void Account::ring_everyone_but(OwnerId owner) {
  for (int i = 0; i < kMaxOwners; ++i) {
    if (slots_[i].live.load(std::memory_order_acquire) && i != (owner & 0xffff)) ring(i);
  }
}

std::uint32_t Account::doorbell(OwnerId owner) const { return slot(owner).doorbell.load(); }

void Account::sleep_at_doorbell(OwnerId owner, std::uint32_t seen, std::int64_t timeout_ns) {
  OwnerSlot& s = slot(owner);
  Waiting sleeping(s.sleepers);
  futex_wait(s.doorbell, seen, timeout_ns);
}

AccountStats Account::stats() {
  Locked lock(*this);
  AccountStats all{};
  all.capacity_bytes = capacity_bytes();
  all.charged_bytes = header_->charged_bytes.load(std::memory_order_relaxed);
  all.foreign_bytes = foreign_bytes();
  all.free_bytes = free_bytes();
  all.wanted_bytes = wanted_bytes();
  all.page_bytes = page_bytes();
  all.lend_keep_bytes = header_->lend_keep_bytes.load(std::memory_order_relaxed);
  all.recoveries = header_->recoveries.load(std::memory_order_relaxed);
  all.reaped_owners = header_->reaped_owners.load(std::memory_order_relaxed);
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& s = slots_[i];
    if (!s.live.load(std::memory_order_relaxed)) continue;
    OwnerStats o{};
    o.id = (static_cast<OwnerId>(s.generation.load(std::memory_order_relaxed)) << 16) | i;
    o.name = s.name;
    o.pid = s.pid;
    o.floor_bytes = s.floor_bytes.load(std::memory_order_relaxed);
    o.limit_bytes = s.limit_bytes.load(std::memory_order_relaxed);
    for (int k = 0; k < kKlasses; ++k) o.held_bytes[k] = s.held_bytes[k].load(std::memory_order_relaxed);
    o.outside_bytes = s.outside();
    o.measured_bytes = s.measured_bytes.load(std::memory_order_relaxed);
    o.wanted_bytes = s.wanted_bytes.load(std::memory_order_relaxed) + s.wish_bytes.load(std::memory_order_relaxed);
    const Published& p = s.published;
    o.kernel_bytes = kernel_bytes(s);
    o.physical_bytes = p.physical_bytes.load(std::memory_order_relaxed);
    o.mapped_bytes = p.mapped_bytes.load(std::memory_order_relaxed);
    o.ahead_bytes = p.ahead_bytes.load(std::memory_order_relaxed);
    o.deferred_bytes = p.deferred_bytes.load(std::memory_order_relaxed);
    o.used_bytes = p.used_bytes.load(std::memory_order_relaxed);
    o.virtual_bytes = p.virtual_bytes.load(std::memory_order_relaxed);
    all.owners.push_back(o);
  }
  return all;
}

}  // namespace kvcached
