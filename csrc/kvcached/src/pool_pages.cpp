// Pages of a pool: blocks mapped and unmapped, the lock let go while the driver works.
#include "kvcached/error.h"
#include "kvcached/pool.h"

namespace kvcached {

bool Pool::make_ready_block(Guard& lock) {
  if (table_.used_blocks() >= target_) {
    if (!elastic_ || owner_->pressure() > 0 || owner_->account().free_bytes() < geometry_.block_bytes) return false;
    try {
      owner_->lease(geometry_.block_bytes, Klass::Kv);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::OutOfMemory || error.kind() == ErrorKind::LimitExceeded) return false;
      throw;
    }
    ++lease_;
    ++target_;
  }
  if (table_.ready_blocks() > 0) return true;
  if (mapped_ >= lease_ || absent_.empty()) return false;
  map_absent(lock);
  return table_.ready_blocks() > 0 && table_.used_blocks() < target_;
}

void Pool::map_one_more(Guard& lock) {
  if (mapped_ < lease_ && !absent_.empty()) return map_absent(lock);
  // The lease covers what was promised, so a block that is changing hands will serve.
  if (mapping_ + unmapping_ == 0) throw Error(ErrorKind::BadRequest, "pool: a promise is not covered by the lease");
  changed_.wait(lock);
}

void Pool::map_absent(Guard& lock) {
  const std::int32_t block = absent_.back();
  absent_.pop_back();
  ++mapped_;
  ++mapping_;
  lock.unlock();
  try {
    map_block(block);
  } catch (...) {
    lock.lock();
    --mapping_;
    --mapped_;
    absent_.push_back(block);
    changed_.notify_all();
    throw;
  }
  lock.lock();
  --mapping_;
  ++maps_;
  table_.make_ready(block);
  changed_.notify_all();
}

void Pool::map_block(std::int32_t block) {
  Handle* handles = &handles_[block * geometry_.block_pages];
  owner_->pages().take(handles, geometry_.block_pages, geometry_.page_bytes);
  const Handle* next = handles;
  std::size_t mapped = 0;
  try {
    for (const Region& r : geometry_.regions) {
      const std::int64_t pages = r.block_bytes / geometry_.page_bytes;
      owner_->driver().map(arena_ + r.offset_bytes + block * r.block_bytes, next, pages, geometry_.page_bytes);
      next += pages;
      ++mapped;
    }
  } catch (...) {
    try {
      for (std::size_t i = 0; i < mapped; ++i) {
        const Region& r = geometry_.regions[i];
        owner_->driver().unmap(arena_ + r.offset_bytes + block * r.block_bytes, r.block_bytes / geometry_.page_bytes,
                               geometry_.page_bytes);
      }
      owner_->pages().give(handles, geometry_.block_pages, geometry_.page_bytes);
    } catch (const Error&) {
      // Neither map nor unmap works: the pages stay counted as physical until the process ends.
    }
    throw;
  }
}

void Pool::unmap_block(std::int32_t block) {
  Handle* handles = &handles_[block * geometry_.block_pages];
  const auto& regions = geometry_.regions;
  std::size_t done = 0;
  try {
    for (; done < regions.size(); ++done) {
      const Region& r = regions[done];
      owner_->driver().unmap(arena_ + r.offset_bytes + block * r.block_bytes, r.block_bytes / geometry_.page_bytes,
                             geometry_.page_bytes);
    }
  } catch (...) {
    const Handle* next = handles;
    for (std::size_t i = 0; i < done; ++i) {
      const std::int64_t pages = regions[i].block_bytes / geometry_.page_bytes;
      owner_->driver().map(arena_ + regions[i].offset_bytes + block * regions[i].block_bytes, next, pages, geometry_.page_bytes);
      next += pages;
    }
    throw;
  }
  owner_->pages().give(handles, geometry_.block_pages, geometry_.page_bytes);
}

bool Pool::unmap_oldest(Guard& lock) {
  std::int32_t block = table_.oldest_ready();
  while (block >= 0 && !fence_allows_locked(block)) block = table_.next_ready(block);
  if (block < 0) return false;
  table_.drop(block);
  ++unmapping_;
  publish_locked();
  lock.unlock();
  try {
    unmap_block(block);
  } catch (...) {
    lock.lock();
    --unmapping_;
    table_.make_ready(block);
    changed_.notify_all();
    throw;
  }
  lock.lock();
  --unmapping_;
  --mapped_;
  ++unmaps_;
  absent_.push_back(block);
  changed_.notify_all();
  return true;
}

}  // namespace kvcached
