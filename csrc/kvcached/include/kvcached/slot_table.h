// Which slots of which blocks are in use. Pure bookkeeping: no driver, no lock, no clock; its owner serialises calls.
//
//   absent --make_ready--> ready --take--> partly used <--> full
//      ^                     |  ^              |
//      +------- drop --------+  +--- give -----+   (the last slot of the block came back)
//
// Slots are taken from the fullest partly-used block first, so that other blocks run empty and can go back to the device.
// Each slot costs O(1): blocks hang in lists by their number of free slots, and a two-level bitmap finds the first list.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kvcached/layout.h"

namespace kvcached {

class SlotTable {
 public:
  explicit SlotTable(const Geometry& geometry);

  void make_ready(std::int32_t block);  // absent -> ready (block 0: in use at once, by the padding slot)
  std::int32_t oldest_ready() const;    // the one that ran empty first; -1 none
  std::int32_t next_ready(std::int32_t block) const { return blocks_[block].next; }
  void drop(std::int32_t block);        // ready -> absent

  // Writes up to `count` slots, ascending within a block; returns how many were free in mapped blocks.
  std::int64_t take(std::int64_t* out, std::int64_t count);

  // The same from one ready block; 0 if there is none.
  std::int64_t take_ready(std::int64_t* out, std::int64_t count);
  // One slot for each sequence in the block of its `last` slot, if that is in use and has room, else -1. Returns how many got one.
  // ForeignSlot, before anything is taken, if a last slot is beyond the last.
  std::int64_t take_after(const std::int64_t* last, std::int64_t* out, std::int64_t count);

  // All or nothing. DoubleFree, ForeignSlot. Appends blocks that ran empty to `emptied`; they are ready now.
  void give(const std::int64_t* slots, std::int64_t count, std::vector<std::int32_t>& emptied);

  // Every slot is free again. Appends the blocks that ran empty.
  void give_all(std::vector<std::int32_t>& emptied);

  std::int64_t used_slots() const { return used_slots_; }      // padding not counted
  std::int64_t used_blocks() const { return used_blocks_; }    // at least one slot in use
  std::int64_t ready_blocks() const { return ready_blocks_; }  // mapped, none in use
  std::int64_t partial_free() const { return partial_free_; }  // free slots in used blocks
  std::int64_t books_bytes() const;
  bool in_use(std::int64_t slot) const;
  void check() const;  // every invariant, O(slots); throws BadRequest with what is wrong

 private:
  enum class State : std::uint8_t { Absent, Ready, Used };
  struct Block {
    std::int32_t previous = -1, next = -1;
    std::int32_t free = 0, capacity = 0;
    std::int32_t hint = 0;  // no free slot in words before this one
    std::int64_t first = 0;  // its first usable slot
    State state = State::Absent;
  };
  struct List {
    std::int32_t head = -1, tail = -1;
  };

  std::int64_t bucket_of(std::int32_t free) const { return (free - 1) >> bucket_shift_; }
  std::uint64_t* words(std::int32_t block) { return &words_[static_cast<std::size_t>(block) * words_per_block_]; }
  const std::uint64_t* words(std::int32_t block) const { return &words_[static_cast<std::size_t>(block) * words_per_block_]; }
  std::int64_t take_linked(std::int32_t block, std::int64_t* out, std::int64_t count);  // out of no list; links it again
  void fill_free(std::int32_t block);
  void link_bucket(std::int32_t block);
  void unlink_bucket(std::int32_t block);
  void push_ready(std::int32_t block);
  void unlink_ready(std::int32_t block);
  std::int32_t fullest() const;
  std::int64_t take_from(std::int32_t block, std::int64_t* out, std::int64_t count);
  std::int32_t claim_back(std::int64_t slot);  // marks the slot free; returns its block
  void undo(const std::int64_t* slots, std::int64_t count);
  void settle_run(std::int32_t block, std::int32_t count, std::vector<std::int32_t>& emptied);

  Geometry geometry_;
  std::int64_t words_per_block_;
  int bucket_shift_ = 0;
  std::vector<Block> blocks_;
  std::vector<std::uint64_t> words_;  // a set bit is a free slot
  std::vector<std::int32_t> buckets_;
  std::vector<std::uint64_t> bucket_bits_;
  std::uint64_t bucket_summary_ = 0;
  List ready_;
  std::vector<std::pair<std::int32_t, std::int32_t>> runs_;  // scratch of give()
  std::int64_t used_slots_ = 0, used_blocks_ = 0, ready_blocks_ = 0, partial_free_ = 0;
};

}  // namespace kvcached
