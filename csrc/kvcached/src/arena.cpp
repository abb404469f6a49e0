#include "kvcached/arena.h"

#include "kvcached/error.h"

namespace kvcached {

Arena::Arena(std::shared_ptr<Owner> owner, std::int64_t virtual_bytes) : owner_(std::move(owner)) {
  owner_->check_usable();
  if (virtual_bytes <= 0) {
    throw Error(ErrorKind::BadRequest, "virtual_bytes must be positive", {{"virtual_bytes", virtual_bytes}});
  }
  const std::int64_t granule = owner_->driver().granularity_bytes();
  virtual_bytes_ = (virtual_bytes + granule - 1) / granule * granule;
  address_ = owner_->driver().reserve(virtual_bytes_);
  owner_->published().virtual_bytes.fetch_add(virtual_bytes_, std::memory_order_relaxed);
}

Arena::~Arena() {
  try {
    if (owner_->usable()) owner_->published().virtual_bytes.fetch_sub(virtual_bytes_, std::memory_order_relaxed);
    owner_->driver().unreserve(address_, virtual_bytes_);
  } catch (const Error&) {
    // A dead driver, or pages that could not be unmapped: the range goes with the process.
  }
}

std::vector<std::shared_ptr<Pool>> Arena::living() const {
  std::vector<std::shared_ptr<Pool>> pools;
  for (const auto& weak : pools_) {
    if (auto pool = weak.lock()) pools.push_back(std::move(pool));
  }
  return pools;
}

void Arena::close() {
  std::lock_guard<std::mutex> guard(lock_);
  for (auto& pool : living()) pool->close();
  pools_.clear();
}

std::vector<std::shared_ptr<Pool>> Arena::divide(const std::vector<Group>& groups, double timeout_s) {
  std::lock_guard<std::mutex> guard(lock_);
  owner_->check_usable();
  std::vector<Geometry> geometries;
  std::int64_t end = 0, needed = 0, held = 0;
  for (const Group& group : groups) {
    geometries.push_back(lay_out(group.layout, owner_->driver().granularity_bytes(), group.max_tokens, end));
    const Geometry& g = geometries.back();
    end = g.regions.back().offset_bytes + g.regions.back().block_bytes * g.blocks;
    needed += Pool::first_lease_bytes(g, group.lease_bytes);
  }
  if (end > virtual_bytes_) {
    throw Error(ErrorKind::BadLayout, "the layout does not fit the arena", {{"needed_bytes", end}, {"virtual_bytes", virtual_bytes_}});
  }
  const std::vector<std::shared_ptr<Pool>> old = living();
  for (auto& pool : old) held += pool->stats().lease_bytes;
  const std::int64_t extra = needed > held ? needed - held : 0;
  if (extra > 0) owner_->lease(extra, Klass::Kv, timeout_s);
  std::int64_t kept = extra;
  for (auto& pool : old) kept += pool->close_keeping_lease();
  pools_.clear();
  return make_pools(groups, geometries, kept, needed, timeout_s);
}

std::vector<std::shared_ptr<Pool>> Arena::make_pools(const std::vector<Group>& groups, const std::vector<Geometry>& geometries,
                                                     std::int64_t held, std::int64_t needed, double timeout_s) {
  std::vector<std::shared_ptr<Pool>> pools;
  std::int64_t given = 0;
  try {
    if (held < needed) {  // the old pools shrank meanwhile
      owner_->lease(needed - held, Klass::Kv, timeout_s);
      held = needed;
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      pools.push_back(std::make_shared<Pool>(owner_, shared_from_this(), address_, geometries[i], groups[i].lease_bytes));
      given += Pool::first_lease_bytes(geometries[i], groups[i].lease_bytes);
    }
    if (held > needed) owner_->unlease(held - needed, Klass::Kv);
  } catch (...) {
    pools.clear();  // closes them
    if (held > given) owner_->unlease(held - given, Klass::Kv);
    throw;
  }
  pools_.assign(pools.begin(), pools.end());
  return pools;
}

}  // namespace kvcached
