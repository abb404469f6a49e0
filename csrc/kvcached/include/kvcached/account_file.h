// What lies in the shared memory of an account. Plain words only, so that a process may be killed between any two stores.
//
//   +--------------------+ 0
//   | AccountHeader      |  capacity, lock, totals derived from the slots
//   +--------------------+ 4096
//   | OwnerSlot[0]       |  the truth about one owner: every field is a single store
//   | OwnerSlot[1]       |
//   | ...                |  kMaxOwners slots
//   +--------------------+
//
// The slots are the truth and the header's totals are derived from them, so whoever finds the lock's holder dead
// adds the slots up again and the books are exact, wherever the holder was when it died.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvcached {

inline constexpr std::uint64_t kAccountMagic = 0x31746363616d7270;  // "prmacct1"
inline constexpr std::uint32_t kAccountVersion = 4;
inline constexpr int kMaxOwners = 128;
inline constexpr int kNameBytes = 64;
inline constexpr std::int64_t kNoLimit = INT64_MAX;

// What memory is held for. Outside: what the process takes of the device beside its pages (the driver's context, a framework's
// allocator, graphs), as far as it was granted. Lent: KV of an engine of another device, the first to go.
enum class Klass : int { Weights = 0, Kv = 1, Staging = 2, Outside = 3, Lent = 4 };
inline constexpr int kKlasses = 5;
inline constexpr std::int64_t kLendsNothing = -1;

// Page states an owner publishes about itself; only the owner writes them, without the lock.
struct Published {
  std::atomic<std::int64_t> physical_bytes;  // created at the driver: mapped + spare
  std::atomic<std::int64_t> mapped_bytes;    // mapped at some address
  std::atomic<std::int64_t> ahead_bytes;     // of these: mapped, with no slot in use
  std::atomic<std::int64_t> deferred_bytes;  // of these: to be unmapped once a fence has passed
  std::atomic<std::int64_t> used_bytes;      // bytes of slots in use and of committed weights
  std::atomic<std::int64_t> virtual_bytes;   // address space reserved
  std::atomic<std::int32_t> memfd;           // host devices: the descriptor that holds the pages, else -1
  std::atomic<std::uint64_t> memfd_inode;
};

struct alignas(64) OwnerSlot {
  std::atomic<std::uint32_t> live;        // written last when taken, last when freed
  std::atomic<std::uint32_t> generation;  // tells this tenant of the slot from earlier ones
  std::int32_t pid;
  std::uint64_t start_ticks;
  char name[kNameBytes];
  std::atomic<std::int64_t> floor_bytes;
  std::atomic<std::int64_t> limit_bytes;  // kNoLimit: none
  std::atomic<std::int64_t> held_bytes[kKlasses];
  std::atomic<std::int64_t> measured_bytes;  // what it was last found to take outside its pages, granted or not; 0: not known
  std::atomic<std::int64_t> wanted_bytes;  // what its waiters wait for
  std::atomic<std::int64_t> wish_bytes;    // what it would take now if it were free; stands until it is withdrawn
  std::atomic<std::int64_t> wish_since_ns;  // the older one goes first of owners that hold alike; written before wish_bytes
  alignas(64) std::atomic<std::uint32_t> doorbell;  // futex: rung when others want memory
  std::atomic<std::uint32_t> sleepers;
  alignas(64) Published published;

  std::int64_t held_as(Klass klass) const { return held_bytes[static_cast<int>(klass)].load(std::memory_order_relaxed); }
  std::int64_t held() const {  // what floor and limit are about: all but Outside
    std::int64_t sum = 0;
    for (const auto& h : held_bytes) sum += h.load(std::memory_order_relaxed);
    return sum - held_as(Klass::Outside);
  }
  std::int64_t kv() const { return held_as(Klass::Kv); }
  std::int64_t outside() const {
    const std::int64_t granted = held_as(Klass::Outside), measured = measured_bytes.load(std::memory_order_relaxed);
    return granted > measured ? granted : measured;
  }
  // What the owner costs the device: its floor is set aside even where it is not used.
  std::int64_t lent() const { return held_as(Klass::Lent); }
  std::int64_t charged() const {
    const std::int64_t h = held(), f = floor_bytes.load(std::memory_order_relaxed);
    return (h > f ? h : f) + outside();
  }
};

struct AccountHeader {
  std::atomic<std::uint64_t> magic;  // written last: a file without it is not an account yet
  std::uint32_t version;
  std::uint32_t max_owners;
  std::int64_t page_bytes;
  std::atomic<std::int64_t> capacity_bytes;
  alignas(64) pthread_mutex_t lock;  // robust, shared between processes
  alignas(64) std::atomic<std::int64_t> charged_bytes;  // sum of charged() over live slots
  std::atomic<std::int64_t> wanted_bytes;               // sum of wanted_bytes over live slots
  std::atomic<std::int64_t> wish_bytes;                 // sum of wish_bytes over live slots
  std::atomic<std::int64_t> foreign_bytes;              // of the capacity: what programs that are no owners were found to hold
  alignas(64) std::atomic<std::uint32_t> freed;         // futex: changes when memory comes back
  std::atomic<std::uint32_t> waiters;                   // at least the number of sleepers on `freed`
  std::atomic<std::int64_t> reaped_at_ns;
  std::atomic<std::uint64_t> recoveries;                // times a dead lock holder was cleaned up after
  std::atomic<std::uint64_t> reaped_owners;
  std::atomic<std::int64_t> lend_keep_bytes;            // the device lends what is free beyond this; kLendsNothing: nothing
  std::atomic<std::int64_t> lent_due_ns;                // since when lent memory has been asked for; 0: it is not
};

inline constexpr std::size_t kSlotsOffset = 4096;
inline constexpr std::size_t kAccountBytes = kSlotsOffset + kMaxOwners * sizeof(OwnerSlot);
static_assert(sizeof(AccountHeader) <= kSlotsOffset);
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "shared memory needs address-free atomics");

}  // namespace kvcached
