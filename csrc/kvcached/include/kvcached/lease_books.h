// The books of a pool's lease: how much it holds, may use, has promised and can spare. Pure arithmetic, no lock, clock, driver or
// account: the pool serialises calls and carries out what the books say.
//
// Everything is counted in blocks, promises to callers in slots. What a pool of 16 slots a block has to say:
//
//          |<--------------------------- held: charged to the account -------------------------------->|
//          |<------------------ target: what may be used from now on ------------------>|<-- leaving -->|
//   blocks | used          | promised | ensured ...                           | unneeded|               |
//          |               | (slots that alloc() calls are mapping for)                 |               |
//   pages  |<------------- mapped ------------->|<------- not mapped yet: room to map ahead ----------->|
//          | used          | ready (ahead)      |
//          |               |<- surplus: ready blocks beyond the high mark or beyond the target ->|
//
//   target <= held, mapped <= held, always. held > max(target, mapped, used + promised) goes back to the account.
//   available = free slots of used blocks + (target - used) blocks - promised slots; 0 while used > target.
//   unneeded  = target - used - what promises and the caller's `keep` still lack beyond free slots of used blocks.
//
// A leased pool sets the target; an elastic one lets it follow use.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcached {

// What the books must know of the blocks; see Blocks.
struct BlockCounts {
  std::int64_t used_slots;    // padding not counted
  std::int64_t used_blocks;   // at least one slot in use
  std::int64_t partial_free;  // free slots in these
  std::int64_t ready;         // mapped, no slot in use
  std::int64_t mapped;        // used, ready, and in transition
  std::int64_t unmapping;     // of these: on their way out
};

// Sizes that never change.
struct LeaseShape {
  std::int64_t blocks;       // of the pool's range
  std::int64_t block_slots;  // every block has at least so many
  std::int64_t max_slots;    // in use at once
};

class LeaseBooks {
 public:
  LeaseBooks(const LeaseShape& shape, std::int64_t blocks, bool elastic) : shape_(shape), held_(blocks), target_(blocks), elastic_(elastic) {}

  bool elastic() const { return elastic_; }
  std::int64_t held() const { return held_; }
  std::int64_t target() const { return target_; }
  std::int64_t promised_slots() const { return promised_; }

  std::int64_t blocks_for(std::int64_t slots) const {
    return slots <= 0 ? 0 : (slots + shape_.block_slots - 1) / shape_.block_slots;
  }
  std::int64_t available(const BlockCounts& now) const;  // slots that may be handed out for certain
  std::int64_t room(const BlockCounts& now) const {  // slots that the range has left, whatever the lease
    return shape_.max_slots - now.used_slots - promised_;
  }
  // Blocks the lease must have for so many slots more. Counted from what is in use and promised, not from the target: that may
  // have been lowered below both meanwhile.
  std::int64_t needed(const BlockCounts& now, std::int64_t more_slots) const;
  std::int64_t unneeded(const BlockCounts& now, std::int64_t keep_slots) const;  // blocks by which the target may shrink
  std::int64_t surplus(const BlockCounts& now, std::int64_t most_ready) const {  // ready blocks that should be unmapped
    const std::int64_t above_mark = std::max<std::int64_t>(0, now.ready - most_ready);
    const std::int64_t above_target = now.mapped - now.unmapping - target_;
    return std::min(now.ready, std::max(above_mark, above_target));
  }
  std::int64_t returnable(const BlockCounts& now) const;                         // held blocks that nothing counts on any more
  std::int64_t unused(const BlockCounts& now) const { return target_ - now.used_blocks; }  // blocks still to come into use; may be negative
  const char* problem(const BlockCounts& now) const;  // the rule that is broken, nullptr if none is

  void grant(std::int64_t blocks) { held_ += blocks; }                       // the account granted so many more
  void raise_target(std::int64_t blocks) { target_ = std::max(target_, blocks); }
  void keep_ensured(std::int64_t blocks) { ensured_ = std::max(ensured_, blocks); }  // against follow_use()
  void forget_ensured() { ensured_ = 0; }
  void set_leased(std::int64_t target);  // from now on not elastic
  void shrink(std::int64_t blocks) { target_ -= blocks; }
  void follow_use(const BlockCounts& now, std::int64_t keep_ready) {  // elastic: lowers the target to what is used
    if (elastic_) lower_to_use(now, keep_ready);
  }
  std::int64_t take_back(const BlockCounts& now);                    // returnable(), no longer held: the caller gives it to the account
  std::int64_t close();                                              // all that is held, no longer held

  void promise(std::int64_t slots) { promised_ += slots; }  // to an alloc() that is mapping
  void fulfil(std::int64_t slots) { promised_ -= slots; }   // handed out, or given up
  void begin_refill() { ++refilling_; }                     // a block is mapped ahead, for nobody in particular
  void end_refill() { --refilling_; }

 private:
  void lower_to_use(const BlockCounts& now, std::int64_t keep_ready);
  std::int64_t committed(const BlockCounts& now) const { return now.used_blocks + blocks_for(promised_) + refilling_; }

  LeaseShape shape_;
  std::int64_t held_, target_;
  std::int64_t ensured_ = 0;    // blocks that ensure() said yes for: follow_use() takes none of them back
  std::int64_t promised_ = 0;   // slots
  std::int64_t refilling_ = 0;  // blocks
  bool elastic_;
};

// Slots promised to one alloc() while it maps without the pool's lock, so that no other thread is promised them.
// Begins and ends under the lock.
class Promise {
 public:
  Promise(LeaseBooks& books, std::int64_t slots) : books_(books), left_(slots) { books_.promise(slots); }
  ~Promise() { books_.fulfil(left_); }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;
  void keep(std::int64_t slots) {
    books_.fulfil(slots);
    left_ -= slots;
  }
  std::int64_t left() const { return left_; }

 private:
  LeaseBooks& books_;
  std::int64_t left_;
};

// A block that is being mapped ahead, for nobody in particular. Lives under the pool's lock when it begins and ends.
class Refilling {
 public:
  explicit Refilling(LeaseBooks& books) : books_(books) { books_.begin_refill(); }
  ~Refilling() { books_.end_refill(); }
  Refilling(const Refilling&) = delete;
  Refilling& operator=(const Refilling&) = delete;

 private:
  LeaseBooks& books_;
};

}  // namespace kvcached
