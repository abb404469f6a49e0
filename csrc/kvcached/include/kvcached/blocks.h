// Which blocks of a pool are mapped, used or on their way, and which slots of them are free. Pure bookkeeping: no driver, no lock.
//
//   absent --begin_mapping--> (mapping) --end_mapping--> ready <--> used     (slot_table.h)
//     ^                                                    |
//     +----- end_unmapping ------ (unmapping) <-- begin_unmapping
//
// A block in transition belongs to the thread that moves it and is in no list meanwhile, so driver calls need no lock.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcached/lease_books.h"
#include "kvcached/slot_table.h"

namespace kvcached {

// Neighbours: first, first + 1, ...
struct BlockRun {
  std::int32_t first;
  std::int32_t count;
};

class Blocks {
 public:
  explicit Blocks(const Geometry& geometry);  // which must outlive it

  SlotTable& slots() { return table_; }
  const SlotTable& slots() const { return table_; }
  BlockCounts counts() const {
    return {table_.used_slots(), table_.used_blocks(), table_.partial_free(), table_.ready_blocks(), mapped_, unmapping_};
  }
  std::int64_t absent() const { return static_cast<std::int64_t>(absent_.size()); }
  std::int64_t settled() const { return mapped_ - mapping_ - unmapping_; }  // mapped and not in transition
  bool in_transition() const { return mapping_ + unmapping_ > 0; }
  bool is_unmapping() const { return unmapping_ > 0; }
  std::int64_t maps() const { return maps_; }
  std::int64_t unmaps() const { return unmaps_; }
  std::int64_t books_bytes() const;
  void check() const;  // every invariant; throws BadRequest

  void add_first();  // block 0, mapped by the caller and not counted among maps()
  BlockRun begin_mapping(std::int64_t most = 1);  // absent blocks, at least one; there must be one
  void end_mapping(BlockRun run, bool mapped);
  void begin_unmapping(std::int32_t block);  // a ready block
  void end_unmapping(std::int32_t block, bool unmapped);

  // Closing: every block that is not absent leaves, whatever its slots say; then forget_slots().
  std::vector<std::int32_t> all_mapped() const;
  void begin_leaving() { ++unmapping_; }
  void end_leaving(std::int32_t block, bool unmapped);
  void forget_slots();

 private:
  const Geometry& geometry_;
  SlotTable table_;
  std::vector<std::int32_t> absent_;  // stack; lowest block on top at first
  std::int64_t mapped_ = 0;           // blocks mapped or in transition
  std::int64_t mapping_ = 0, unmapping_ = 0;
  std::int64_t maps_ = 0, unmaps_ = 0;
};

inline BlockRun Blocks::begin_mapping(std::int64_t most) {
  BlockRun run{absent_.back(), 0};
  do {
    absent_.pop_back();
    ++run.count;
  } while (run.count < most && !absent_.empty() && absent_.back() == run.first + run.count);
  mapped_ += run.count;
  mapping_ += run.count;
  return run;
}

inline void Blocks::end_mapping(BlockRun run, bool mapped) {
  mapping_ -= run.count;
  if (!mapped) mapped_ -= run.count;
  for (std::int32_t i = run.count - 1; i >= 0 && !mapped; --i) absent_.push_back(run.first + i);
  for (std::int32_t i = 0; i < run.count && mapped; ++i) table_.make_ready(run.first + i);
  if (mapped) maps_ += run.count;
}

inline void Blocks::begin_unmapping(std::int32_t block) {
  table_.drop(block);
  ++unmapping_;
}

inline void Blocks::end_unmapping(std::int32_t block, bool unmapped) {
  --unmapping_;
  if (unmapped) {
    --mapped_;
    ++unmaps_;
    absent_.push_back(block);
  } else {
    table_.make_ready(block);
  }
}

}  // namespace kvcached
