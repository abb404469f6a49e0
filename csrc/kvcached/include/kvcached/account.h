// The account of one device, shared by every process that uses it.
//
// A reservation is atomic and exclusive: it either adds the bytes to the owner's books within the device's capacity,
// every other owner's floor and the owner's limit, or it changes nothing and throws. Nobody checks first and takes later.
// Owners are processes' (pid, start time); whoever meets a dead one gives back what it held.
//
// Two things are facts, not reservations, and are noted whether there is room for them or not: what a process takes outside its
// pages, and what programs take that are no owners. free_bytes() may become negative by them; then nothing more is granted and
// every owner that can give feels pressure().
//
// A wish says that an owner has work for which the memory is missing. It stands until it is withdrawn or its owner is gone,
// and it is felt as pressure() by the owners it goes before. Among owners with wishes the one that holds less KV goes before
// (then the older wish, then the lower slot); any wish goes before owners without one. Why two wishes cannot block each
// other for ever: docs/memory.md.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvcached/account_file.h"
#include "kvcached/process.h"

namespace kvcached {

// Slot index in the low 16 bits, the slot's generation above: never names a later tenant of the same slot.
using OwnerId = std::int64_t;

struct OwnerStats {
  OwnerId id;
  std::string name;
  std::int32_t pid;
  std::int64_t floor_bytes, limit_bytes, held_bytes[kKlasses], wanted_bytes;
  std::int64_t outside_bytes, measured_bytes;  // charged, and found, outside its pages
  std::int64_t physical_bytes, mapped_bytes, ahead_bytes, deferred_bytes, used_bytes, virtual_bytes;
  std::int64_t kernel_bytes;  // what the kernel says this process holds (host devices), -1 unknown
  std::int64_t leased_bytes() const {
    std::int64_t sum = -held_bytes[static_cast<int>(Klass::Outside)];
    for (std::int64_t held : held_bytes) sum += held;
    return sum;
  }
};

struct AccountStats {
  std::int64_t capacity_bytes, foreign_bytes, charged_bytes, free_bytes, wanted_bytes, page_bytes, lend_keep_bytes;
  std::uint64_t recoveries, reaped_owners;
  std::vector<OwnerStats> owners;
};

class Account {
 public:
  // Attaches to the account file or creates it. `capacity_bytes` 0: attach only. Another capacity or page is refused
  // (AccountMismatch) while owners live, and adopted when there are none.
  Account(const std::string& path, std::int64_t capacity_bytes, std::int64_t page_bytes);
  ~Account();
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  OwnerId enter(const std::string& name, std::int64_t floor_bytes, std::int64_t limit_bytes);
  void leave(OwnerId owner);  // gives back everything; no error if it is gone already

  // OutOfMemory, LimitExceeded, UnknownOwner. With a timeout it waits for memory to come back, and says so to the others.
  // `yielding`: takes only what no wish that goes before this owner needs. For new work; what runs takes what is free.
  void reserve(OwnerId owner, std::int64_t bytes, Klass klass, bool yielding = false);
  void reserve_within(OwnerId owner, std::int64_t bytes, Klass klass, double timeout_s);
  void release(OwnerId owner, std::int64_t bytes, Klass klass);  // OverRelease

  // The same without waiting, for callers that hold a lock of their own (Python's): false, and nothing changed, if another
  // thread or process is at the books, or memory is short. The limit and errors of the caller are refused at once.
  bool reserve_at_once(OwnerId owner, std::int64_t bytes, Klass klass);
  bool release_at_once(OwnerId owner, std::int64_t bytes, Klass klass);

  // From now on the owner wishes for `most_bytes` more, of which less than `least_bytes` would be of no use; 0, 0 withdraws.
  // It stands at what could become free if all others gave back what they can, or not at all (returns 0) if `least_bytes`
  // could not: a wish that nobody can meet must not hold others up. What it reserves as KV is taken
  // off it; state it again when something else may have changed. `since_ns`:
  // its age (now_ns()); 0: since there has been a wish.
  std::int64_t wish(OwnerId owner, std::int64_t least_bytes, std::int64_t most_bytes, std::int64_t since_ns);
  std::int64_t wished(OwnerId owner) const;
  std::int64_t owed_to_others(OwnerId owner) const;  // the wishes of others that go before its own

  // From now on the device lends what is free beyond `keep_bytes` and wanted by nobody (class Lent); kLendsNothing: nothing,
  // and what is lent is asked back. Any process.
  void offer(std::int64_t keep_bytes);
  std::int64_t lent_bytes() const;     // by all borrowers: comes back as soon as it is wanted
  std::int64_t offered_bytes() const;  // what could be lent now; reserving is the only way to be sure of it

  void set_limit(OwnerId owner, std::int64_t bytes);  // any process; below what is held: the owner feels pressure()

  // Facts; any process may note them. `driver_free_bytes`: the driver has just refused a page and says that so much is free: what
  // the books count as free beyond that is foreign from now on, until it is noted again.
  void note_outside(OwnerId owner, std::int64_t bytes);
  void note_foreign(std::int64_t bytes);
  void note_refusal(std::int64_t driver_free_bytes);

  std::vector<OwnerId> reap();  // dead owners; anyone may call
  AccountStats stats();         // consistent: taken under the lock

  // Reads without the lock, for use in every scheduling step.
  std::int64_t capacity_bytes() const { return header_->capacity_bytes.load(std::memory_order_relaxed); }
  std::int64_t page_bytes() const { return header_->page_bytes; }
  std::int64_t free_bytes() const;  // below 0: facts overtook the books
  std::int64_t foreign_bytes() const { return header_->foreign_bytes.load(std::memory_order_relaxed); }
  std::int64_t outside_bytes() const;  // of all owners
  std::int64_t wanted_bytes() const;  // by waiting reservations and wishes
  // Bytes this owner should give back now: it is over its limit, or it holds more than its floor and others wait or wish before
  // it, or the device is overdrawn.
  std::int64_t pressure(OwnerId owner) const;
  std::int64_t excess(OwnerId owner) const;  // bytes above its limit
  std::int64_t held(OwnerId owner, Klass klass) const;
  std::int64_t held(OwnerId owner) const;
  std::int64_t floor(OwnerId owner) const;
  std::int64_t limit(OwnerId owner) const;

  Published& published(OwnerId owner);
  void sleep_at_doorbell(OwnerId owner, std::uint32_t seen, std::int64_t timeout_ns);
  std::uint32_t doorbell(OwnerId owner) const;
  void ring(OwnerId owner);

  // For tests: takes the lock, changes half of what a reservation changes, and is killed.
  [[noreturn]] void die_inside_lock(OwnerId owner, std::int64_t bytes, bool after_total);

 private:
  class Locked;
  OwnerSlot& slot(OwnerId owner) const;
  OwnerSlot& live_slot(OwnerId owner) const;
  void attach(std::int64_t capacity_bytes, std::int64_t page_bytes, int fd);
  void initialise(std::int64_t capacity_bytes, std::int64_t page_bytes);
  void adopt(std::int64_t capacity_bytes, std::int64_t page_bytes);
  void add_up();  // totals from slots, under the lock
  void clear(OwnerSlot& slot);
  void charge(OwnerSlot& slot, std::int64_t before);
  void want(OwnerId owner, std::int64_t bytes);
  void want_locked(OwnerId owner, std::int64_t bytes);
  void ring_everyone_but(OwnerId owner);
  void memory_came_back();
  void note(std::atomic<std::int64_t>& fact, OwnerSlot* slot, std::int64_t bytes);
  // `waited`: this much it no longer wants if it gets the bytes.
  void reserve_locked(OwnerId owner, std::int64_t bytes, Klass klass, bool yielding = false, std::int64_t waited = 0);
  void fulfil_locked(OwnerSlot& s, std::int64_t bytes);  // its wish has come true as far as this
  bool goes_before(const OwnerSlot& wisher, const OwnerSlot& other) const;
  std::int64_t owed(const OwnerSlot& s) const;  // the wishes that go before this owner
  std::int64_t attainable_locked(const OwnerSlot& s) const;
  std::int64_t lent_pressure(const OwnerSlot& s, std::int64_t missing, std::int64_t wanted, std::int64_t free) const;
  std::int64_t after_lent(const OwnerSlot& s, std::int64_t missing) const;
  std::int64_t lendable(std::int64_t owed_bytes) const;
  void lent_came_back();
  void release_locked(OwnerId owner, std::int64_t bytes, Klass klass);
  bool reap_if_due();

  std::string path_;
  void* base_ = nullptr;
  AccountHeader* header_ = nullptr;
  OwnerSlot* slots_ = nullptr;
};

}  // namespace kvcached
