#include "kvcached/layout.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "kvcached/error.h"

namespace kvcached {
namespace {

constexpr std::int64_t kMostSlots = std::int64_t{1} << 31;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;
constexpr std::int64_t kGapShare = 16;  // at most a 1/16 of a block may be lost to a straddling cell

void require(bool ok, const char* what, std::int64_t value) {
  if (!ok) throw Error(ErrorKind::BadLayout, std::string("KV layout: ") + what, {{"value", value}});
}

void check(const KvLayout& l, std::int64_t max_tokens) {
  require(l.layers > 0 && l.layers <= 1 << 16, "layers must be 1 to 65536", l.layers);
  require(l.kv_heads > 0 && l.kv_heads <= 1 << 16, "kv_heads must be 1 to 65536", l.kv_heads);
  require(l.head_dim > 0 && l.head_dim <= 1 << 16, "head_dim must be 1 to 65536", l.head_dim);
  require(l.v_head_dim >= 0 && l.v_head_dim <= 1 << 16, "v_head_dim must be 0 (no V) to 65536", l.v_head_dim);
  require(l.dtype_bytes == 1 || l.dtype_bytes == 2 || l.dtype_bytes == 4 || l.dtype_bytes == 8,
          "dtype_bytes must be 1, 2, 4 or 8", l.dtype_bytes);
  require(l.page_multiple > 0 && l.page_multiple <= 4096, "page_multiple must be 1 to 4096", l.page_multiple);
  require(l.tokens_per_slot > 0 && l.tokens_per_slot <= 4096, "tokens_per_slot must be 1 to 4096", l.tokens_per_slot);
  require(max_tokens > 0 && max_tokens < kMostSlots, "max_tokens must be positive and below 2^31", max_tokens);
  require(l.token_bytes() <= kMostBytes / l.tokens_per_slot, "a token is too large", l.layers);
}

// One region: blocks are the fewest whole pages that either fit cells exactly or lose little to the straddling one.
void token_major(Geometry& g, std::int64_t cell_bytes) {
  std::int64_t pages = 1;
  while ((pages * g.page_bytes) % cell_bytes != 0 && cell_bytes > pages * g.page_bytes / kGapShare) ++pages;
  g.block_bytes = pages * g.page_bytes;
  const std::int64_t common = std::gcd(g.block_bytes, cell_bytes);
  g.span_numerator = g.block_bytes / common;
  g.span_denominator = cell_bytes / common;
  g.regions = {{0, g.layout.token_bytes(), g.block_bytes}};
}

// Many regions: the fewest slots that fill whole pages in each of them.
void layer_major(Geometry& g) {
  const KvLayout& l = g.layout;
  std::int64_t slots = 1;
  for (std::int64_t row : {l.k_row_bytes(), l.v_row_bytes()}) {
    if (row == 0) continue;
    const std::int64_t bytes = row * l.tokens_per_slot;
    slots = std::lcm(slots, g.page_bytes / std::gcd(g.page_bytes, bytes));
    require(slots < kMostSlots, "rows fit pages only in blocks of too many slots", slots);
  }
  g.span_numerator = slots;
  g.span_denominator = 1;
  g.block_bytes = 0;
  for (std::int64_t layer = 0; layer < l.layers; ++layer) {
    for (std::int64_t row : {l.k_row_bytes(), l.v_row_bytes()}) {
      if (row == 0) continue;
      g.regions.push_back({0, row, slots * row * l.tokens_per_slot});
      g.block_bytes += g.regions.back().block_bytes;
    }
  }
}

void count_blocks(Geometry& g) {
  const std::int64_t wanted = g.max_slots + 1;  // and the padding slot
  g.min_block_slots = kMostSlots;
  g.max_block_slots = 0;
  // Counted with the smallest block, so that max_slots can be promised whichever blocks they come from.
  for (g.blocks = 0; g.blocks == 0 || g.blocks * g.min_block_slots < wanted; ++g.blocks) {
    const std::int64_t here = g.end_slot(g.blocks) - g.first_slot(g.blocks);
    require(here > 0, "a block holds no whole slot", g.block_bytes);
    require(g.blocks < kMostBytes / g.block_bytes, "the range is too large", g.max_slots);
    g.min_block_slots = std::min(g.min_block_slots, here);
    g.max_block_slots = std::max(g.max_block_slots, here);
  }
  g.slots = g.end_slot(g.blocks - 1);
}

}  // namespace

Geometry lay_out(const KvLayout& layout, std::int64_t granularity_bytes, std::int64_t max_tokens, std::int64_t first_offset_bytes) {
  check(layout, max_tokens);
  Geometry g{};
  g.layout = layout;
  g.page_bytes = granularity_bytes * layout.page_multiple;
  g.max_slots = (max_tokens + layout.tokens_per_slot - 1) / layout.tokens_per_slot;
  if (layout.order == Order::TokenMajor) {
    token_major(g, layout.token_bytes() * layout.tokens_per_slot);
  } else {
    layer_major(g);
  }
  g.block_pages = g.block_bytes / g.page_bytes;
  count_blocks(g);
  require(g.span_numerator < (std::int64_t{1} << 62) / g.slots, "rows and pages have too large a common multiple", g.span_numerator);
  g.reciprocal = g.span_numerator == g.span_denominator
                     ? 0
                     : static_cast<std::uint64_t>((static_cast<Wide>(g.span_denominator) << 64) / g.span_numerator) + 1;
  std::int64_t offset = (first_offset_bytes + g.page_bytes - 1) / g.page_bytes * g.page_bytes;
  const std::int64_t start = offset;
  for (Region& region : g.regions) {
    region.offset_bytes = offset;
    offset += region.block_bytes * g.blocks;
  }
  g.virtual_bytes = offset - start;
  return g;
}

}  // namespace kvcached
