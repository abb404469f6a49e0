// How a model's KV cache lies in pages.
//
// Token-major: one cell holds K and V of one token in all layers, cells follow each other, and a step of growth is one page.
//
//   | t0: K0 V0 K1 V1 .. | t1: K0 V0 K1 V1 .. | t2 ...        one region, row = cell
//   |<------------------ page ------------------>|<-- ...
//
//   A cell that would straddle the end of a block is a gap: its slot is never handed out, so that every block stands alone.
//
// Layer-major: one region for the K and one for the V rows of each layer; a block is the same slots in every region.
//
//   | K of layer 0: t0 t1 t2 ... | V of layer 0: t0 t1 ... | K of layer 1 ...      2 x layers regions
//
// A slot is what is handed out: one token, or `tokens_per_slot` tokens for engines with paged attention.
// Slot 0 is never handed out; its block stays mapped, because engines write padding there.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcached {

enum class Order { TokenMajor, LayerMajor };

struct KvLayout {
  std::int64_t layers = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_head_dim = 0;  // 0: one latent row per token and layer, no V (MLA)
  std::int64_t dtype_bytes = 2;
  Order order = Order::TokenMajor;
  std::int64_t page_multiple = 1;    // pages of this many granules
  std::int64_t tokens_per_slot = 1;  // > 1 for paged attention

  std::int64_t k_row_bytes() const { return kv_heads * head_dim * dtype_bytes; }
  std::int64_t v_row_bytes() const { return kv_heads * v_head_dim * dtype_bytes; }
  std::int64_t token_bytes() const { return layers * (k_row_bytes() + v_row_bytes()); }
};

__extension__ using Wide = unsigned __int128;

struct Region {
  std::int64_t offset_bytes;  // from the start of the pool's range
  std::int64_t row_bytes;     // one token
  std::int64_t block_bytes;   // this region's part of a block; a multiple of the page
};

struct Geometry {
  KvLayout layout;
  std::int64_t page_bytes;
  std::vector<Region> regions;
  std::int64_t block_bytes;      // physical bytes of a block: its part in every region
  std::int64_t block_pages;
  std::int64_t blocks;
  std::int64_t min_block_slots;  // every block has this many usable slots, or one or two more
  std::int64_t max_block_slots;
  std::int64_t slots;            // slot ids are 0 <= id < slots (gaps included)
  std::int64_t max_slots;        // how many may be in use at once, padding not counted
  std::int64_t virtual_bytes;    // length of the pool's range

  std::int64_t first_slot(std::int64_t block) const {  // the first that lies wholly inside
    return (block * span_numerator + span_denominator - 1) / span_denominator;
  }
  std::int64_t end_slot(std::int64_t block) const { return (block + 1) * span_numerator / span_denominator; }
  // floor(slot * span_denominator / span_numerator) by multiplication; exact for all ids of this geometry.
  std::int64_t block_of(std::int64_t slot) const {
    if (reciprocal == 0) return slot;
    return static_cast<std::int64_t>((static_cast<Wide>(slot) * reciprocal) >> 64);
  }

  // A block spans numerator / denominator slots: whole for exact layouts, a fraction where cells straddle blocks.
  std::int64_t span_numerator, span_denominator;
  std::uint64_t reciprocal;
};

// BadLayout for sizes that are not positive or too large; `first_offset_bytes` places the range in its arena.
Geometry lay_out(const KvLayout& layout, std::int64_t granularity_bytes, std::int64_t max_tokens, std::int64_t first_offset_bytes);

}  // namespace kvcached
