// A KV cache: slots for tokens in an address range whose pages come and go with use.
//
// Lease. The pool holds a lease of whole blocks from the account, exclusively: available() counts only what the lease covers,
// so a caller told "yes" gets its slots whatever other processes do. Two ways to hold it:
//   leased   the lease is what set_lease() says. Shrinking sets a target: what is free goes at once, the rest as slots come back;
//            until then available() is 0.
//   elastic  the lease follows use: alloc() reserves what is missing (or throws OutOfMemory), free() gives back what ran empty.
//
// Parts, each with its own state; the pool holds the lock and does what they say:
//
//             +-- LeaseBooks    how much is held, promised, spare (pure)
//   Pool -----+-- MappingAhead  when to map before it is needed (pure)
//             +-- Blocks        which blocks are mapped, which slots free (pure, with SlotTable)
//             +-- BlockFences   which of them the device may still read
//             +-- BlockPages    the pages behind them: driver calls, without the lock
//             +-- ShownPages    what the account's file tells about them
//
// Thread-safe. Driver calls are made without the lock; a block changing hands is in no list meanwhile.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kvcached/block_fences.h"
#include "kvcached/block_pages.h"
#include "kvcached/blocks.h"
#include "kvcached/layout.h"
#include "kvcached/lease_books.h"
#include "kvcached/mapping_ahead.h"
#include "kvcached/owner.h"
#include "kvcached/shown_pages.h"

namespace kvcached {

inline constexpr std::int64_t kElastic = -1;

struct PoolStats {
  std::int64_t lease_bytes, target_bytes, mapped_bytes, used_bytes, ahead_bytes, deferred_bytes;
  std::int64_t used_slots, available_slots, books_bytes;
  std::int64_t maps, unmaps;  // blocks, since the start
};

class Pool final : public Tended {
 public:
  // `lease_bytes` kElastic, or rounded down to blocks. The caller has leased first_lease_bytes() from the owner for it.
  // Maps block 0, and throws if that fails, the lease still being the caller's.
  // `arena` is where region offsets count from; `keep` holds these addresses reserved.
  Pool(std::shared_ptr<Owner> owner, std::shared_ptr<void> keep, Address arena, const Geometry& geometry, std::int64_t lease_bytes);
  ~Pool() override;
  static std::int64_t first_lease_bytes(const Geometry& geometry, std::int64_t lease_bytes);

  void close();                        // unmaps everything and gives the lease back; waits for fences (seconds at most)
  std::int64_t close_keeping_lease();  // same, but the lease (returned, in bytes) and its spare pages are now the caller's

  // All or nothing: OutOfMemory if there are not enough slots. `fresh`: from empty blocks as far as the lease (or the account,
  // for elastic pools) has any, for a sequence that will go on with alloc_after(); else from the fullest partly-used ones.
  void alloc(std::int64_t* out, std::int64_t count, bool fresh = false);
  // The next slot of each of `count` sequences, given the last one of each: in the same block if it has room, else in an empty
  // one, else in the fullest. Blocks that belong to one sequence empty as a whole when it ends, so little memory is held in vain.
  // A `last` below 1, or given back meanwhile (its prefix turned out to be cached), is a sequence without a block. ForeignSlot.
  void alloc_after(const std::int64_t* last, std::int64_t* out, std::int64_t count);
  // All or nothing: DoubleFree, ForeignSlot. True if settle() has pages to unmap.
  bool free(const std::int64_t* slots, std::int64_t count);
  bool reset();  // every slot is free again; as free()

  // The same for callers that hold a lock of their own (Python's), which they should give up only for what takes long: false,
  // and nothing done, if another thread is at the books, or the account or driver calls are needed that are not brief.
  bool alloc_at_once(std::int64_t* out, std::int64_t count, bool fresh = false);
  bool alloc_after_at_once(const std::int64_t* last, std::int64_t* out, std::int64_t count);
  bool free_at_once(const std::int64_t* slots, std::int64_t count, bool* due);  // *due: as free() returns
  bool settle_at_once();
  void settle();   // unmaps what is surplus now, gives back what the lease no longer needs
  void quiesce();  // the same, and waits for what other threads have begun: afterwards the account shows what this pool does

  std::int64_t available() const;  // a promise
  std::int64_t used() const;
  std::int64_t scattered() const;  // free slots in blocks that have some in use: part of available()
  std::int64_t pressure() const { return owner_->pressure(); }

  void set_lease(std::int64_t bytes);  // from now on leased
  // Grows the lease until `slots` are available; false if refused, nothing changed. An elastic pool keeps them until the next
  // free() or settle(). `yielding`: by memory that no wish before this owner needs (Account::reserve).
  bool ensure(std::int64_t slots, bool yielding = false);
  // Puts pages behind the next `slots` slots that the lease covers (`fresh`: in empty blocks), so that alloc() of them needs no
  // driver call. False if the device is full in spite of the account: then the lease is what is mapped, the rest went back, and
  // available() says so. is_backed(): nothing is missing; never waits, false if it cannot tell at once.
  bool back(std::int64_t slots, bool fresh);
  bool is_backed(std::int64_t slots, bool fresh) const;
  // Shrinks the lease by what is not in use; returns bytes given to the account meanwhile, waits for those on their way there.
  std::int64_t give_back(std::int64_t keep_slots, std::int64_t most_bytes);
  std::int64_t trim();  // gives back the whole unused lease and destroys spare pages; returns bytes given to the account

  // The helper thread keeps between low and high bytes mapped with no slot in use, within the lease; high < 0: no limit.
  void set_ahead(std::int64_t low_bytes, std::int64_t high_bytes);
  void fence_with(std::shared_ptr<Fence> fence);  // covers blocks that run empty from now on; nullptr: none
  void defer_on_stream(std::uintptr_t stream);    // an event on this stream covers every block that runs empty from now on
  std::int64_t tend() override;                   // the helper thread's turn

  const Geometry& geometry() const { return geometry_; }
  Address address() const { return arena_; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }
  PoolStats stats() const;
  void check() const;  // every invariant; throws BadRequest
  bool is_open() const;

 private:
  using Guard = std::unique_lock<std::mutex>;
  enum class Refill { Nothing, Mapped, Later };

  void check_open() const;
  BlockCounts counts() const { return blocks_.counts(); }

  // Handing out and taking back (pool_slots.cpp); the lock is held, and let go while a block is mapped.
  void make_available(std::int64_t count);
  bool mapped_suffice(std::int64_t fresh_blocks) const;   // so many empty blocks need no driver call and no account
  bool had_in_a_moment(std::int64_t fresh_blocks) const;  // so many need only calls that are brief, if any
  void alloc_locked(Guard& lock, std::int64_t* out, std::int64_t count, bool fresh);
  std::int64_t take_fresh(Guard& lock, std::int64_t* out, std::int64_t count);
  void take(Guard& lock, std::int64_t* out, std::int64_t count);
  void finish_after(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t left);  // `left` of `out` are -1
  std::int64_t next_slot(Guard& lock);
  void undo_after(std::int64_t* out, std::int64_t count);
  void undo_take(std::int64_t* out, std::int64_t count);
  bool make_ready_block(Guard& lock);  // an empty mapped block, if the lease or the account allows one
  void map_one_more(Guard& lock);
  void wake_if_low();
  bool free_locked(const std::int64_t* slots, std::int64_t count);
  bool after_free();         // true if settle() has pages to unmap
  bool hand_to_helper();     // false if it does not look after this pool

  // The lease and the pages under it (pool.cpp, pool_lease.cpp)
  void lease_more(std::int64_t blocks);                        // throws OutOfMemory, LimitExceeded
  bool try_lease_more(std::int64_t blocks, bool yielding);     // false if refused
  bool lease_free_block();                                     // one that nobody else needs, for an elastic pool
  void map_absent(Guard& lock) { map_run(lock, 1); }           // one absent block, within the lease
  void map_run(Guard& lock, std::int64_t most);                // neighbours among the absent blocks, with one driver call
  std::int64_t unbacked(std::int64_t slots, bool fresh) const;  // blocks that back() would still have to map
  void lower_to_mapped(Guard& lock);
  bool unmap_oldest(Guard& lock);                              // one ready block; false if none may go now
  std::int64_t surplus() const { return books_.surplus(counts(), ahead_.high()); }
  void settle_locked(Guard& lock);
  void finish(Guard& lock);                                    // settles, and has the helper watch what must wait for fences
  void wait_for_leaving(Guard& lock);                          // settled, and nothing is on its way to the account
  void return_lease(Guard& lock);
  Refill refill_one(Guard& lock);
  std::int64_t bytes(std::int64_t blocks) const { return blocks * geometry_.block_bytes; }
  void have_helper(Guard& lock);
  void publish();
  void close_pages();

  const std::shared_ptr<Owner> owner_;
  const std::shared_ptr<void> keep_;
  const Address arena_;
  const Geometry geometry_;
  mutable std::mutex lock_;
  std::condition_variable changed_;  // a block or a lease arrived somewhere
  LeaseBooks books_;
  MappingAhead ahead_;
  Blocks blocks_;
  BlockFences fences_;
  BlockPages pages_;
  ShownPages shown_;
  std::vector<std::int32_t> emptied_;  // scratch of free()

  bool closed_ = false, drained_ = false;
  bool tended_ = false;            // the helper looks after this pool
  bool woken_ = false;             // and was told to look now
  std::int64_t returning_ = 0;     // threads that give the account blocks which the books no longer count
  std::int64_t returned_ = 0;      // blocks that the account got back, since the start
};

}  // namespace kvcached
