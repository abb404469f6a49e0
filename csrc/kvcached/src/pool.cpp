// A pool's life: opening, closing, what it says about itself, and the pages under it.
#include "kvcached/pool.h"

#include <algorithm>
#include <string>

#include "kvcached/error.h"

namespace kvcached {

std::int64_t Pool::first_lease_bytes(const Geometry& g, std::int64_t lease_bytes) {
  const std::int64_t blocks = lease_bytes == kElastic ? 1 : lease_bytes / g.block_bytes;
  return std::clamp<std::int64_t>(blocks, 1, g.blocks) * g.block_bytes;
}

Pool::Pool(std::shared_ptr<Owner> owner, std::shared_ptr<void> keep, Address arena, const Geometry& geometry, std::int64_t lease_bytes)
    : owner_(std::move(owner)),
      keep_(std::move(keep)),
      arena_(arena),
      geometry_(geometry),
      books_({geometry.blocks, geometry.min_block_slots, geometry.max_slots}, first_lease_bytes(geometry, lease_bytes) / geometry.block_bytes,
             lease_bytes == kElastic),
      ahead_(lease_bytes == kElastic),
      blocks_(geometry_),
      fences_(owner_->shared_driver()),
      pages_(*owner_, arena, geometry_),
      shown_(owner_->published()) {
  pages_.map({0, 1});
  blocks_.add_first();
  publish();
}

Pool::~Pool() {
  try {
    close();
  } catch (const Error&) {
    // A dead driver: pages and books go with the process.
  }
  // Pages that could not be unmapped keep their addresses reserved for ever: nothing else may be put there.
  if (!drained_) new std::shared_ptr<void>(keep_);
}

void Pool::check_open() const {
  if (closed_) throw Error(ErrorKind::ClosedHandle, "this pool is closed: its arena was divided again, or it was freed");
  owner_->check_usable();
}

bool Pool::is_open() const {
  Guard lock(lock_);
  return !closed_ && owner_->usable();
}

std::int64_t Pool::available() const {
  Guard lock(lock_);
  check_open();
  return books_.available(counts());
}

std::int64_t Pool::used() const {
  Guard lock(lock_);
  return blocks_.slots().used_slots();
}

std::int64_t Pool::scattered() const {
  Guard lock(lock_);
  return blocks_.slots().partial_free();
}

void Pool::publish() {
  const BlockCounts now = counts();
  const std::int64_t slot_bytes = geometry_.layout.token_bytes() * geometry_.layout.tokens_per_slot;
  // Not what is on its way: an audit must never see more mapped than there is.
  shown_.show({bytes(blocks_.settled()), bytes(now.ready), bytes(fences_.covered()), now.used_slots * slot_bytes});
}

void Pool::map_run(Guard& lock, std::int64_t most) {
  const BlockRun run = blocks_.begin_mapping(pages_.are_contiguous() ? most : 1);
  lock.unlock();
  try {
    pages_.map(run);
  } catch (...) {
    lock.lock();
    blocks_.end_mapping(run, false);
    changed_.notify_all();
    throw;
  }
  lock.lock();
  blocks_.end_mapping(run, true);
  changed_.notify_all();
}

bool Pool::unmap_oldest(Guard& lock) {
  std::int32_t block = blocks_.slots().oldest_ready();
  while (block >= 0 && !fences_.release_if_passed(block)) block = blocks_.slots().next_ready(block);
  if (block < 0) return false;
  blocks_.begin_unmapping(block);
  publish();
  lock.unlock();
  try {
    pages_.unmap(block);
  } catch (...) {
    lock.lock();
    blocks_.end_unmapping(block, false);
    changed_.notify_all();
    throw;
  }
  lock.lock();
  blocks_.end_unmapping(block, true);
  changed_.notify_all();
  return true;
}

void Pool::close_pages() {
  Guard lock(lock_);
  closed_ = true;
  changed_.wait(lock, [this] { return !blocks_.in_transition() && returning_ == 0 && books_.promised_slots() == 0; });
  const auto waiting = fences_.in_flight(blocks_.slots().used_slots() > 0);
  lock.unlock();
  wait_until_passed(waiting);
  lock.lock();
  std::exception_ptr failed;
  for (const std::int32_t block : blocks_.all_mapped()) {
    blocks_.begin_leaving();
    publish();
    try {
      pages_.unmap(block);
      blocks_.end_leaving(block, true);
    } catch (const Error&) {
      failed = std::current_exception();
      blocks_.end_leaving(block, false);
    }
  }
  publish();
  if (failed != nullptr) std::rethrow_exception(failed);  // close again to try again
  blocks_.forget_slots();
  fences_.clear();
  drained_ = true;
  publish();
}

std::int64_t Pool::close_keeping_lease() {
  if (!owner_->usable()) return 0;  // closed with its owner, or left behind by a fork
  owner_->leave_alone(this);
  {
    Guard lock(lock_);
    if (drained_) return 0;
  }
  close_pages();
  Guard lock(lock_);
  return bytes(books_.close());
}

void Pool::close() {
  const std::int64_t leased = close_keeping_lease();
  if (leased > 0) owner_->unlease(leased, Klass::Kv);
}

PoolStats Pool::stats() const {
  Guard lock(lock_);
  const BlockCounts now = counts();
  PoolStats s{};
  s.lease_bytes = bytes(books_.held());
  s.target_bytes = bytes(books_.target());
  s.mapped_bytes = bytes(now.mapped);
  s.used_bytes = now.used_slots * geometry_.layout.token_bytes() * geometry_.layout.tokens_per_slot;
  s.ahead_bytes = bytes(now.ready);
  s.deferred_bytes = bytes(fences_.covered());
  s.used_slots = now.used_slots;
  s.available_slots = closed_ ? 0 : books_.available(now);
  s.books_bytes = blocks_.books_bytes() + pages_.books_bytes() + static_cast<std::int64_t>(sizeof *this - sizeof blocks_);
  s.maps = blocks_.maps();
  s.unmaps = blocks_.unmaps();
  return s;
}

void Pool::check() const {
  Guard lock(lock_);
  if (closed_) return;
  blocks_.check();
  const char* problem = books_.problem(counts());
  if (problem != nullptr) throw Error(ErrorKind::BadRequest, std::string("pool: ") + problem);
}

}  // namespace kvcached
