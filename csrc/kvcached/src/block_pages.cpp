#include "kvcached/block_pages.h"

#include "kvcached/error.h"

namespace kvcached {
namespace {
constexpr std::int64_t kBriefPages = 2;  // some 50 us each on host memory; handing Python's lock over and back takes 10 to 5000
}

BlockPages::BlockPages(Owner& owner, Address arena, const Geometry& geometry)
    : owner_(owner), arena_(arena), geometry_(geometry), handles_(geometry.blocks * geometry.block_pages) {}

bool BlockPages::are_brief(std::int64_t blocks) const {
  return blocks * geometry_.block_pages <= kBriefPages && owner_.driver().is_brief();
}

bool BlockPages::are_spare(std::int64_t blocks) const { return blocks * geometry_.block_bytes <= owner_.pages().spare_bytes(); }

void BlockPages::map_regions(std::int32_t block, std::size_t count, std::size_t* done) {
  const Handle* next = &handles_[block * geometry_.block_pages];
  for (*done = 0; *done < count; ++*done) {
    const Region& region = geometry_.regions[*done];
    owner_.driver().map(place(region, block), next, pages(region), geometry_.page_bytes);
    next += pages(region);
  }
}

void BlockPages::unmap_regions(std::int32_t block, std::size_t count, std::size_t* done) {
  for (*done = 0; *done < count; ++*done) {
    const Region& region = geometry_.regions[*done];
    owner_.driver().unmap(place(region, block), pages(region), geometry_.page_bytes);
  }
}

void BlockPages::map(BlockRun run) {
  Handle* handles = &handles_[run.first * geometry_.block_pages];
  const std::int64_t count = run.count * geometry_.block_pages;
  owner_.pages().take(handles, count, geometry_.page_bytes);
  std::size_t mapped = 0, undone = 0;
  try {
    if (run.count > 1) {
      owner_.driver().map(place(geometry_.regions[0], run.first), handles, count, geometry_.page_bytes);
    } else {
      map_regions(run.first, geometry_.regions.size(), &mapped);
    }
  } catch (...) {
    try {
      unmap_regions(run.first, mapped, &undone);
      owner_.pages().give(handles, count, geometry_.page_bytes);
    } catch (const Error&) {
      // Neither map nor unmap works: the pages stay counted as physical until the process ends.
    }
    throw;
  }
}

void BlockPages::unmap(std::int32_t block) {
  std::size_t done = 0, redone = 0;
  try {
    unmap_regions(block, geometry_.regions.size(), &done);
  } catch (...) {
    map_regions(block, done, &redone);
    throw;
  }
  owner_.pages().give(&handles_[block * geometry_.block_pages], geometry_.block_pages, geometry_.page_bytes);
}

}  // namespace kvcached
