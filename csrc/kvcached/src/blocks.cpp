#include "kvcached/blocks.h"

#include <string>

#include "kvcached/error.h"

namespace kvcached {

Blocks::Blocks(const Geometry& geometry) : geometry_(geometry), table_(geometry) {
  for (std::int64_t b = geometry.blocks - 1; b > 0; --b) absent_.push_back(static_cast<std::int32_t>(b));
}

void Blocks::add_first() {
  table_.make_ready(0);
  mapped_ = 1;
}

std::vector<std::int32_t> Blocks::all_mapped() const {
  std::vector<bool> absent(geometry_.blocks, false);
  for (std::int32_t block : absent_) absent[block] = true;
  std::vector<std::int32_t> mapped;
  for (std::int64_t b = 0; b < geometry_.blocks; ++b) {
    if (!absent[b]) mapped.push_back(static_cast<std::int32_t>(b));
  }
  return mapped;
}

void Blocks::end_leaving(std::int32_t block, bool unmapped) {
  --unmapping_;
  if (!unmapped) return;
  --mapped_;
  absent_.push_back(block);
}

void Blocks::forget_slots() { table_ = SlotTable(geometry_); }

std::int64_t Blocks::books_bytes() const {
  return table_.books_bytes() + static_cast<std::int64_t>(sizeof *this - sizeof table_ + absent_.capacity() * sizeof(std::int32_t));
}

void Blocks::check() const {
  table_.check();
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw Error(ErrorKind::BadRequest, std::string("pool: ") + what);
  };
  require(mapping_ >= 0 && unmapping_ >= 0, "less than no blocks in transition");
  require(table_.used_blocks() + table_.ready_blocks() == settled(), "blocks in use, ready and in transition are not all that is mapped");
  require(mapped_ + absent() == geometry_.blocks, "mapped and absent are not all blocks");
}

}  // namespace kvcached
