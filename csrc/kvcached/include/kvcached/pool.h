// A KV cache: slots for tokens in an address range whose pages come and go with use.
//
// Lease. The pool holds a lease of whole blocks from the account, exclusively: available() counts only what the lease covers,
// so a caller told "yes" gets its slots whatever other processes do. Two ways to hold it:
//   leased   the lease is what set_lease() says. Shrinking sets a target: what is free goes at once, the rest as slots come back;
//            until then available() is 0.
//   elastic  the lease follows use: alloc() reserves what is missing (or throws OutOfMemory), free() gives back what ran empty.
//
// Blocks.  absent -> ready (mapped, no slot in use) -> used -> ready -> absent. Ready blocks beyond the high mark are unmapped;
// below the low mark the helper thread maps more. A block that ran empty under a fence is unmapped only once it has passed;
// its slots may be handed out again at once, since reuse is ordered by the engine's own stream.
//
// Thread-safe. Driver calls are made without the lock; a block changing hands is in no list meanwhile.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "kvcached/layout.h"
#include "kvcached/owner.h"
#include "kvcached/slot_table.h"

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

  // The same for callers that hold a lock of their own (Python's), which they should give up only for what takes long: false,
  // and nothing done, if another thread is at the books, or the account or driver calls are needed that are not brief.
  bool alloc_at_once(std::int64_t* out, std::int64_t count, bool fresh = false);
  bool alloc_after_at_once(const std::int64_t* last, std::int64_t* out, std::int64_t count);
  bool free_at_once(const std::int64_t* slots, std::int64_t count, bool* due);  // *due: as free() returns
  bool settle_at_once();
  bool reset();   // every slot is free again; as free()
  void settle();   // unmaps what is surplus now, gives back what the lease no longer needs
  void quiesce();  // the same, and waits for what other threads have begun: afterwards the account shows what this pool does

  std::int64_t available() const;  // a promise
  std::int64_t used() const;
  std::int64_t scattered() const;  // free slots in blocks that have some in use: part of available()
  std::int64_t pressure() const;

  void set_lease(std::int64_t bytes);      // from now on leased
  void set_elastic();                      // from now on elastic
  // Grows the lease until `slots` are available; false if refused, nothing changed. An elastic pool keeps them until the next
  // free() or settle(). `yielding`: by memory that no wish before this owner needs (Account::reserve).
  bool ensure(std::int64_t slots, bool yielding = false);
  // Shrinks the lease by what is not in use; returns bytes given to the account meanwhile, waits for those on their way there.
  std::int64_t give_back(std::int64_t keep_slots, std::int64_t most_bytes);
  std::int64_t relieve(std::int64_t keep_slots);  // give_back(), as much as pressure() asks for
  std::int64_t trim();  // gives back the whole unused lease and destroys spare pages; returns bytes given to the account
  void set_ahead(std::int64_t low_bytes, std::int64_t high_bytes);  // high < 0: no limit
  void set_idle(bool idle);  // while idle the helper gives back under pressure; alloc, available, ensure end it
  void fence_with(std::shared_ptr<Fence> fence);  // covers blocks that run empty from now on; nullptr: none
  void defer_on_stream(std::uintptr_t stream);    // an event on this stream covers every block that runs empty from now on
  void stop_deferring();

  const Geometry& geometry() const { return geometry_; }
  Address address() const { return arena_; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }
  PoolStats stats() const;
  void check() const;  // every invariant; throws BadRequest
  bool is_open() const;

  std::int64_t tend() override;

 private:
  using Guard = std::unique_lock<std::mutex>;
  enum class Refill { Nothing, Mapped, Later };

  void check_open() const;
  std::int64_t available_locked() const;
  std::int64_t blocks_for(std::int64_t slots) const;
  std::int64_t blocks_needed_locked(std::int64_t more_slots) const;
  std::int64_t unneeded_locked(std::int64_t keep_slots) const;  // blocks of the lease that nothing needs
  void make_available(std::int64_t count);
  bool mapped_suffice_locked(std::int64_t fresh_blocks) const;  // so many empty blocks need no driver call and no account
  bool brief_locked(std::int64_t blocks) const;                 // so many can be mapped or unmapped in a moment
  bool had_in_a_moment_locked(std::int64_t fresh_blocks) const;  // so many need only calls that are brief, if any
  void alloc_locked(Guard& lock, std::int64_t* out, std::int64_t count, bool fresh);
  void take_fresh(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t& got);
  void finish_after(Guard& lock, std::int64_t* out, std::int64_t count, std::int64_t left);  // `left` of `out` are -1
  void undo_after(std::int64_t* out, std::int64_t count);
  bool free_locked(const std::int64_t* slots, std::int64_t count);
  void take(Guard& lock, std::int64_t* out, std::int64_t count);
  void map_one_more(Guard& lock);
  bool make_ready_block(Guard& lock);  // an empty mapped block, if the lease or the account allows one
  void undo_take(std::int64_t* out, std::int64_t count);
  void map_absent(Guard& lock);  // one absent block, within the lease
  void map_block(std::int32_t block);
  void unmap_block(std::int32_t block);
  std::int64_t surplus_locked() const;     // ready blocks that should be unmapped
  bool unmap_oldest(Guard& lock);          // one ready block; false if none may go now
  void settle_locked(Guard& lock);
  void return_lease(Guard& lock);
  void follow_use_locked(std::int64_t keep_ready);
  Refill refill_one(Guard& lock);
  std::int64_t watch_locked();  // ns until the helper looks again when nothing is due
  bool fence_allows_locked(std::int32_t block);
  bool after_free();  // true if settle() has pages to unmap
  void fence_emptied_locked();
  bool hand_over_locked();            // to the helper thread, if it looks after this pool
  void finish(Guard& lock);           // settle, and have the helper watch what must wait for fences
  void wake_if_low_locked();
  void publish_locked();
  void wait_for_fences(Guard& lock);
  void close_pages();
  std::int64_t leaving_locked() const { return unmapping_ + returning_; }  // pieces of work that give memory away

  const std::shared_ptr<Owner> owner_;
  const std::shared_ptr<void> keep_;
  const Address arena_;
  const Geometry geometry_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  SlotTable table_;
  std::vector<std::int32_t> absent_;  // stack; lowest block on top at first
  std::vector<Handle> handles_;       // block_pages per block
  std::unordered_map<std::int32_t, std::shared_ptr<Fence>> fences_;  // of ready blocks
  std::shared_ptr<Fence> fence_;
  std::uintptr_t stream_ = 0;
  bool stream_set_ = false;
  std::vector<std::int32_t> emptied_;  // scratch of free()

  bool elastic_ = false, closed_ = false, drained_ = false, refill_ = false, woken_ = false, tended_ = false;
  bool watched_ = false;                     // the helper looks again within milliseconds, since ready blocks are being used
  std::int64_t watched_ready_ = 0, used_at_ns_ = 0;  // ready blocks as it saw them last, and when it saw fewer than before
  mutable bool idle_ = false;
  std::int64_t lease_ = 0, target_ = 0;      // blocks
  std::int64_t ensured_ = 0;                 // blocks that ensure() said yes for: the helper takes none of them back
  std::int64_t mapped_ = 0;                  // blocks mapped or in transition, all within the lease
  std::int64_t mapping_ = 0, unmapping_ = 0; // of these: a driver call is under way
  std::int64_t returning_ = 0;               // threads that give the account blocks which lease_ no longer counts
  std::int64_t returned_ = 0;                // blocks that the account got back, since the start
  std::int64_t refilling_ = 0;               // of mapping_: by the helper, for nobody in particular
  std::int64_t outstanding_ = 0;             // slots promised to alloc() calls that are mapping
  std::int64_t low_ = 0, high_ = INT64_MAX;  // blocks
  std::int64_t maps_ = 0, unmaps_ = 0;
  struct {
    std::int64_t mapped = 0, ahead = 0, deferred = 0, used = 0;
  } shown_;  // what this pool has added to the owner's published page states
};

}  // namespace kvcached
