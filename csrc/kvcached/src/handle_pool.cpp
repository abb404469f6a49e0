#include "kvcached/handle_pool.h"

#include <algorithm>

#include "kvcached/error.h"

namespace kvcached {

HandlePool::~HandlePool() {
  try {
    destroy_spares();
  } catch (const Error&) {
    // A dead driver keeps its pages until the process ends; the kernel frees them then.
  }
}

std::int64_t HandlePool::spare_bytes() const {
  std::lock_guard<std::mutex> guard(lock_);
  return spare_;
}

std::int64_t HandlePool::budget_bytes() const {
  std::lock_guard<std::mutex> guard(lock_);
  return budget_;
}

void HandlePool::raise_budget(std::int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock_);
  budget_ += bytes;
}

void HandlePool::lower_budget(std::int64_t bytes) {
  std::vector<Spare> surplus;
  {
    std::lock_guard<std::mutex> guard(lock_);
    budget_ -= bytes;
    surplus = pick_over(budget_);
  }
  destroy(surplus);
}

std::vector<HandlePool::Spare> HandlePool::pick_over(std::int64_t most_bytes) {
  std::vector<Spare> picked;
  for (auto& [kind, handles] : spares_) {
    const std::int64_t bytes = kind.first;
    while (physical_ > most_bytes && !handles.empty()) {
      picked.push_back({handles.back(), bytes});
      handles.pop_back();
      spare_ -= bytes;
      physical_ -= bytes;
    }
  }
  return picked;
}

void HandlePool::destroy(const std::vector<Spare>& pages) {
  for (const Spare& page : pages) {
    driver_->destroy(page.handle, page.bytes);
    published_.physical_bytes.fetch_sub(page.bytes, std::memory_order_relaxed);
  }
}

std::int64_t HandlePool::destroy_spares() {
  std::vector<Spare> all;
  {
    std::lock_guard<std::mutex> guard(lock_);
    all = pick_over(physical_ - spare_);
  }
  destroy(all);
  std::int64_t bytes = 0;
  for (const Spare& page : all) bytes += page.bytes;
  return bytes;
}

void HandlePool::create(Handle* out, std::int64_t count, std::int64_t bytes, bool exportable) {
  try {
    return driver_->create_together(out, count, bytes, exportable);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::OutOfMemory || destroy_spares() == 0) throw;
  }
  driver_->create_together(out, count, bytes, exportable);
}

void HandlePool::take(Handle* out, std::int64_t count, std::int64_t bytes, bool exportable) {
  std::int64_t pooled = 0;
  std::vector<Spare> surplus;
  {
    std::lock_guard<std::mutex> guard(lock_);
    auto& handles = spares_[{bytes, exportable}];
    for (; pooled < count && !handles.empty(); ++pooled) {
      out[pooled] = handles.back();
      handles.pop_back();
      spare_ -= bytes;
    }
    const std::int64_t fresh = (count - pooled) * bytes;
    if (fresh > 0) surplus = pick_over(budget_ - fresh);  // spares of another size make room
    physical_ += fresh;
  }
  destroy(surplus);
  std::int64_t made = pooled, next = 0;
  try {
    for (; made < count; made += next) {
      next = std::min(count - made, driver_->most_together());
      published_.physical_bytes.fetch_add(next * bytes, std::memory_order_relaxed);  // before: the books never show less than there is
      create(out + made, next, bytes, exportable);
    }
  } catch (...) {
    published_.physical_bytes.fetch_sub(next * bytes, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> guard(lock_);
      physical_ -= (count - made) * bytes;
    }
    give(out, made, bytes, exportable);
    throw;
  }
}

void HandlePool::give(const Handle* handles, std::int64_t count, std::int64_t bytes, bool exportable) {
  std::lock_guard<std::mutex> guard(lock_);
  auto& spares = spares_[{bytes, exportable}];
  spares.insert(spares.end(), handles, handles + count);
  spare_ += count * bytes;
}

}  // namespace kvcached
