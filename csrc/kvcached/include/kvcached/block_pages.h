// The physical side of a pool's blocks: the pages behind each, and the driver calls that put them there and take them away.
// Without a lock: each block belongs to one thread while it is mapped or unmapped (blocks.h).
#pragma once

#include <memory>
#include <vector>

#include "kvcached/blocks.h"
#include "kvcached/layout.h"
#include "kvcached/owner.h"

namespace kvcached {

class BlockPages {
 public:
  // `arena` is where region offsets count from; `owner` and `geometry` must outlive it.
  BlockPages(Owner& owner, Address arena, const Geometry& geometry);

  bool are_contiguous() const { return geometry_.regions.size() == 1; }  // neighbouring blocks are one range of addresses
  void map(BlockRun run);  // several only if they are; all or nothing; throws as HandlePool::take and Driver::map do
  void unmap(std::int32_t block);  // all or nothing; its pages are spare then
  bool are_brief(std::int64_t blocks) const;  // so many are mapped or unmapped in a moment, if their pages exist
  bool are_spare(std::int64_t blocks) const;  // the pages of so many exist: a new page is zeroed, which takes long
  std::int64_t books_bytes() const { return static_cast<std::int64_t>(handles_.capacity() * sizeof(Handle)); }

 private:
  Address place(const Region& region, std::int32_t block) const { return arena_ + region.offset_bytes + block * region.block_bytes; }
  std::int64_t pages(const Region& region) const { return region.block_bytes / geometry_.page_bytes; }
  void map_regions(std::int32_t block, std::size_t count, std::size_t* done);
  void unmap_regions(std::int32_t block, std::size_t count, std::size_t* done);

  Owner& owner_;
  const Address arena_;
  const Geometry& geometry_;
  std::vector<Handle> handles_;  // block_pages per block
};

}  // namespace kvcached
