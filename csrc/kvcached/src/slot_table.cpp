#include "kvcached/slot_table.h"

#include <algorithm>
#include <string>

#include "kvcached/error.h"

namespace kvcached {
namespace {
constexpr std::int64_t kMostBuckets = 64 * 64;
}

SlotTable::SlotTable(const Geometry& geometry) : geometry_(geometry) {
  words_per_block_ = (geometry.max_block_slots + 63) / 64;
  blocks_.resize(geometry.blocks);
  words_.resize(geometry.blocks * words_per_block_, 0);
  for (std::int64_t b = 0; b < geometry.blocks; ++b) {
    blocks_[b].first = geometry.first_slot(b);
    blocks_[b].capacity = static_cast<std::int32_t>(geometry.end_slot(b) - geometry.first_slot(b));
  }
  while ((geometry.max_block_slots >> bucket_shift_) >= kMostBuckets) ++bucket_shift_;
  buckets_.resize((geometry.max_block_slots >> bucket_shift_) + 1, -1);
  bucket_bits_.resize(buckets_.size() / 64 + 1, 0);
}

std::int64_t SlotTable::books_bytes() const {
  return static_cast<std::int64_t>(sizeof *this + blocks_.capacity() * sizeof(Block) + words_.capacity() * 8 +
                                   buckets_.capacity() * 4 + bucket_bits_.capacity() * 8 + runs_.capacity() * 8);
}

void SlotTable::link_bucket(std::int32_t block) {
  Block& b = blocks_[block];
  const std::int64_t bucket = bucket_of(b.free);
  b.previous = -1;
  b.next = buckets_[bucket];
  if (b.next >= 0) blocks_[b.next].previous = block;
  buckets_[bucket] = block;
  bucket_bits_[bucket / 64] |= std::uint64_t{1} << (bucket % 64);
  bucket_summary_ |= std::uint64_t{1} << (bucket / 64);
}

void SlotTable::unlink_bucket(std::int32_t block) {
  Block& b = blocks_[block];
  const std::int64_t bucket = bucket_of(b.free);
  if (b.next >= 0) blocks_[b.next].previous = b.previous;
  if (b.previous >= 0) {
    blocks_[b.previous].next = b.next;
    return;
  }
  buckets_[bucket] = b.next;
  if (b.next >= 0) return;
  bucket_bits_[bucket / 64] &= ~(std::uint64_t{1} << (bucket % 64));
  if (bucket_bits_[bucket / 64] == 0) bucket_summary_ &= ~(std::uint64_t{1} << (bucket / 64));
}

std::int32_t SlotTable::fullest() const {
  if (bucket_summary_ == 0) return -1;
  const int word = __builtin_ctzll(bucket_summary_);
  return buckets_[word * 64 + __builtin_ctzll(bucket_bits_[word])];
}

void SlotTable::push_ready(std::int32_t block) {
  Block& b = blocks_[block];
  b.state = State::Ready;
  b.next = -1;
  b.previous = ready_.tail;
  (ready_.tail >= 0 ? blocks_[ready_.tail].next : ready_.head) = block;
  ready_.tail = block;
  ++ready_blocks_;
}

void SlotTable::unlink_ready(std::int32_t block) {
  Block& b = blocks_[block];
  (b.previous >= 0 ? blocks_[b.previous].next : ready_.head) = b.next;
  (b.next >= 0 ? blocks_[b.next].previous : ready_.tail) = b.previous;
  --ready_blocks_;
}

std::int32_t SlotTable::oldest_ready() const { return ready_.head; }

void SlotTable::fill_free(std::int32_t block) {
  Block& b = blocks_[block];
  std::uint64_t* bits = words(block);
  for (std::int64_t w = 0; w < words_per_block_; ++w) {
    const std::int64_t here = std::min<std::int64_t>(std::max<std::int64_t>(b.capacity - w * 64, 0), 64);
    bits[w] = here == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << here) - 1;
  }
  b.free = b.capacity;
  b.hint = 0;
}

void SlotTable::make_ready(std::int32_t block) {
  fill_free(block);
  if (block != 0) return push_ready(block);
  words(0)[0] &= ~std::uint64_t{1};  // slot 0: padding, in use for ever
  Block& b = blocks_[0];
  b.state = State::Used;
  b.free -= 1;
  ++used_blocks_;
  partial_free_ += b.free;
  if (b.free > 0) link_bucket(block);
}

void SlotTable::drop(std::int32_t block) {
  unlink_ready(block);
  std::fill_n(words(block), words_per_block_, 0);
  blocks_[block].free = 0;
  blocks_[block].state = State::Absent;
}

std::int64_t SlotTable::take_from(std::int32_t block, std::int64_t* out, std::int64_t count) {
  Block& b = blocks_[block];
  std::uint64_t* bits = words(block);
  const std::int64_t first = b.first;
  const std::int64_t wanted = std::min<std::int64_t>(count, b.free);
  std::int64_t got = 0;
  while (got < wanted) {
    std::uint64_t& word = bits[b.hint];
    const std::int64_t base = first + std::int64_t{b.hint} * 64;
    while (word != 0 && got < wanted) {
      out[got++] = base + __builtin_ctzll(word);
      word &= word - 1;
    }
    if (word == 0 && b.hint + 1 < words_per_block_) ++b.hint;
  }
  return got;
}

std::int64_t SlotTable::take_linked(std::int32_t block, std::int64_t* out, std::int64_t count) {
  const std::int64_t got = take_from(block, out, count);
  blocks_[block].free -= static_cast<std::int32_t>(got);
  partial_free_ -= got;
  used_slots_ += got;
  if (blocks_[block].free > 0) link_bucket(block);
  return got;
}

std::int64_t SlotTable::take_ready(std::int64_t* out, std::int64_t count) {
  const std::int32_t block = ready_.tail;  // the one emptied last is the one still in the caches
  if (block < 0 || count == 0) return 0;
  unlink_ready(block);
  blocks_[block].state = State::Used;
  ++used_blocks_;
  partial_free_ += blocks_[block].free;
  return take_linked(block, out, count);
}

std::int64_t SlotTable::take(std::int64_t* out, std::int64_t count) {
  std::int64_t got = 0;
  while (got < count) {
    const std::int32_t block = fullest();
    if (block >= 0) unlink_bucket(block);
    const std::int64_t here = block >= 0 ? take_linked(block, out + got, count - got) : take_ready(out + got, count - got);
    if (here == 0) break;
    got += here;
  }
  return got;
}

std::int64_t SlotTable::take_after(const std::int64_t* last, std::int64_t* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (last[i] < geometry_.slots) continue;
    throw Error(ErrorKind::ForeignSlot, "slot " + std::to_string(last[i]) + " is not one of this pool's: no sequence ends there",
                {{"slot", last[i]}, {"slots", geometry_.slots}});
  }
  std::int64_t got = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = -1;
    if (last[i] < 1 || !in_use(last[i])) continue;
    const auto block = static_cast<std::int32_t>(geometry_.block_of(last[i]));
    if (blocks_[block].free == 0) continue;
    unlink_bucket(block);
    got += take_linked(block, out + i, 1);
  }
  return got;
}

std::int32_t SlotTable::claim_back(std::int64_t slot) {
  if (slot <= 0 || slot >= geometry_.slots) {
    throw Error(ErrorKind::ForeignSlot, "slot " + std::to_string(slot) + " is not one of this pool's",
                {{"slot", slot}, {"slots", geometry_.slots}});
  }
  const auto block = static_cast<std::int32_t>(geometry_.block_of(slot));
  const std::int64_t local = slot - blocks_[block].first;
  Block& b = blocks_[block];
  if (local < 0 || local >= b.capacity) {
    throw Error(ErrorKind::ForeignSlot, "slot " + std::to_string(slot) + " straddles two blocks and is never handed out",
                {{"slot", slot}, {"block", block}});
  }
  std::uint64_t& word = words(block)[local / 64];
  const std::uint64_t bit = std::uint64_t{1} << (local % 64);
  if (b.state != State::Used || (word & bit) != 0) {
    throw Error(ErrorKind::DoubleFree, "slot " + std::to_string(slot) + " is not in use", {{"slot", slot}, {"block", block}});
  }
  word |= bit;
  b.hint = std::min(b.hint, static_cast<std::int32_t>(local / 64));
  return block;
}

void SlotTable::undo(const std::int64_t* slots, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto block = static_cast<std::int32_t>(geometry_.block_of(slots[i]));
    const std::int64_t local = slots[i] - blocks_[block].first;
    words(block)[local / 64] &= ~(std::uint64_t{1} << (local % 64));
  }
}

void SlotTable::give(const std::int64_t* slots, std::int64_t count, std::vector<std::int32_t>& emptied) {
  runs_.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    std::int32_t block;
    try {
      block = claim_back(slots[i]);
    } catch (...) {
      undo(slots, i);
      throw;
    }
    if (!runs_.empty() && runs_.back().first == block) {
      ++runs_.back().second;
    } else {
      runs_.emplace_back(block, 1);
    }
  }
  for (const auto& [block, freed] : runs_) settle_run(block, freed, emptied);
  used_slots_ -= count;
}

void SlotTable::settle_run(std::int32_t block, std::int32_t count, std::vector<std::int32_t>& emptied) {
  Block& b = blocks_[block];
  if (b.free > 0) unlink_bucket(block);
  b.free += count;
  if (b.free < b.capacity) {
    partial_free_ += count;
    return link_bucket(block);
  }
  partial_free_ -= b.free - count;
  --used_blocks_;
  push_ready(block);
  emptied.push_back(block);
}

void SlotTable::give_all(std::vector<std::int32_t>& emptied) {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    Block& b = blocks_[i];
    if (b.state != State::Used) continue;
    const auto block = static_cast<std::int32_t>(i);
    if (b.free > 0) unlink_bucket(block);
    partial_free_ -= b.free;
    --used_blocks_;
    make_ready(block);
    if (block != 0) emptied.push_back(block);
  }
  used_slots_ = 0;
}

bool SlotTable::in_use(std::int64_t slot) const {
  if (slot < 0 || slot >= geometry_.slots) return false;
  const auto block = static_cast<std::int32_t>(geometry_.block_of(slot));
  const std::int64_t local = slot - blocks_[block].first;
  if (local < 0 || local >= blocks_[block].capacity || blocks_[block].state != State::Used) return false;
  return (words(block)[local / 64] >> (local % 64) & 1) == 0;
}

void SlotTable::check() const {
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw Error(ErrorKind::BadRequest, std::string("slot table: ") + what);
  };
  std::int64_t used_blocks = 0, ready = 0, partial_free = 0, used = 0;
  for (std::int64_t i = 0; i < geometry_.blocks; ++i) {
    const Block& b = blocks_[i];
    std::int64_t set = 0;
    for (std::int64_t w = 0; w < words_per_block_; ++w) set += __builtin_popcountll(words(i)[w]);
    require(set == b.free, "free slots of a block differ from its bits");
    require(b.state != State::Ready || b.free == b.capacity, "a ready block has slots in use");
    require(b.state != State::Used || i == 0 || b.free < b.capacity, "a used block has no slot in use");
    require(b.state != State::Absent || b.free == 0, "an absent block has free slots");
    used_blocks += b.state == State::Used;
    ready += b.state == State::Ready;
    if (b.state == State::Used) partial_free += b.free, used += b.capacity - b.free;
  }
  const bool padded = !blocks_.empty() && blocks_[0].state == State::Used;
  require(used_blocks == used_blocks_ && ready == ready_blocks_, "block counts are off");
  require(partial_free == partial_free_ && used - (padded ? 1 : 0) == used_slots_, "slot counts are off");
}

}  // namespace kvcached
