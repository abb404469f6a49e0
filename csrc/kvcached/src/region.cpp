#include "kvcached/region.h"

#include <time.h>

#include <algorithm>

#include "kvcached/error.h"
#include "kvcached/futex.h"

namespace kvcached {
namespace {

constexpr std::int64_t kRetry_ns = 5000000;

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

WeightRegion::WeightRegion(std::shared_ptr<Owner> owner, std::int64_t bytes, std::int64_t page_bytes, bool exportable,
                           Klass klass)
    : owner_(std::move(owner)), bytes_(bytes), exportable_(exportable), klass_(klass) {
  owner_->check_usable();
  if (bytes <= 0 || page_bytes <= 0) {
    throw Error(ErrorKind::BadRequest, "a region and its pages must have bytes", {{"bytes", bytes}, {"page_bytes", page_bytes}});
  }
  page_bytes_ = round_up(page_bytes, owner_->driver().granularity_bytes());
  const std::int64_t pages = (bytes + page_bytes_ - 1) / page_bytes_;
  handles_.resize(pages);
  committed_.resize(pages, false);
  address_ = owner_->driver().reserve(pages * page_bytes_);
  owner_->published().virtual_bytes.fetch_add(pages * page_bytes_, std::memory_order_relaxed);
}

WeightRegion::~WeightRegion() {
  try {
    close();
    if (pages_committed_ > 0) return;  // still mapped: nothing else may be put there
    const std::int64_t bytes = static_cast<std::int64_t>(handles_.size()) * page_bytes_;
    if (owner_->usable()) owner_->published().virtual_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    owner_->driver().unreserve(address_, bytes);
  } catch (const Error&) {
    // A dead driver: the range goes with the process.
  }
}

void WeightRegion::check_range(std::int64_t offset, std::int64_t bytes) const {
  owner_->check_usable();
  if (closed_) throw Error(ErrorKind::ClosedHandle, "this region is closed");
  if (offset < 0 || bytes < 0 || offset > bytes_ || bytes > bytes_ - offset) {
    throw Error(ErrorKind::BadRequest, "outside the region", {{"offset_bytes", offset}, {"bytes", bytes}, {"region_bytes", bytes_}});
  }
}

void WeightRegion::map_run(std::int64_t first, std::int64_t end) {
  owner_->driver().map(address_ + first * page_bytes_, &handles_[first], end - first, page_bytes_);
}

std::int64_t WeightRegion::commit(std::int64_t offset, std::int64_t bytes, double timeout_s) {
  std::lock_guard<std::mutex> guard(lock_);
  check_range(offset, bytes);
  const std::int64_t deadline_ns = now_ns() + static_cast<std::int64_t>(timeout_s * 1e9);
  for (;;) {
    const std::int64_t left_ns = std::max<std::int64_t>(0, deadline_ns - now_ns());
    try {
      return commit_locked(offset, bytes, static_cast<double>(left_ns) * 1e-9);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::OutOfMemory || now_ns() + kRetry_ns >= deadline_ns) throw;
    }
    const timespec pause{0, kRetry_ns};  // the driver refused; the account knows by now, and asks the others
    nanosleep(&pause, nullptr);
  }
}

std::int64_t WeightRegion::commit_locked(std::int64_t offset, std::int64_t bytes, double timeout_s) {
  if (bytes == 0) return 0;
  const std::int64_t first = offset / page_bytes_, end = (offset + bytes - 1) / page_bytes_ + 1;
  std::vector<std::int64_t> missing;
  for (std::int64_t i = first; i < end; ++i) {
    if (!committed_[i]) missing.push_back(i);
  }
  const std::int64_t added = static_cast<std::int64_t>(missing.size()) * page_bytes_;
  if (added == 0) return 0;
  if (klass_ == Klass::Staging) {
    owner_->lease_yielding(added, klass_);
  } else {
    owner_->lease(added, klass_, timeout_s);
  }
  std::size_t taken = 0, mapped = 0;
  const auto undo = [&] {
    try {
      for (std::size_t i = 0; i < mapped; ++i) owner_->driver().unmap(address_ + missing[i] * page_bytes_, 1, page_bytes_);
      for (std::size_t i = 0; i < taken; ++i) owner_->pages().give(&handles_[missing[i]], 1, page_bytes_, exportable_);
      owner_->unlease(added, klass_);
    } catch (const Error&) {
      // A driver that can neither map nor unmap: books and pages stay until the process ends.
    }
  };
  try {
    std::vector<Handle> pages(missing.size());
    owner_->pages().take(pages.data(), static_cast<std::int64_t>(pages.size()), page_bytes_, exportable_);
    for (; taken < missing.size(); ++taken) handles_[missing[taken]] = pages[taken];
    while (mapped < missing.size()) {  // neighbours in one call
      std::size_t next = mapped + 1;
      while (next < missing.size() && missing[next] == missing[next - 1] + 1) ++next;
      map_run(missing[mapped], missing[next - 1] + 1);
      mapped = next;
    }
  } catch (const Error& error) {
    undo();
    if (error.kind() == ErrorKind::OutOfMemory) owner_->note_refusal();
    throw;
  } catch (...) {
    undo();
    throw;
  }
  for (std::int64_t i : missing) committed_[i] = true;
  pages_committed_ += static_cast<std::int64_t>(missing.size());
  owner_->published().mapped_bytes.fetch_add(added, std::memory_order_relaxed);
  owner_->published().used_bytes.fetch_add(added, std::memory_order_relaxed);
  return added;
}

std::int64_t WeightRegion::decommit_locked(std::int64_t first, std::int64_t end) {
  std::int64_t freed = 0;
  while (first < end) {
    if (!committed_[first]) {
      ++first;
      continue;
    }
    std::int64_t next = first;
    while (next < end && committed_[next]) ++next;
    owner_->driver().unmap(address_ + first * page_bytes_, next - first, page_bytes_);
    owner_->pages().give(&handles_[first], next - first, page_bytes_, exportable_);
    for (std::int64_t i = first; i < next; ++i) committed_[i] = false;
    const std::int64_t bytes = (next - first) * page_bytes_;
    pages_committed_ -= next - first;
    owner_->published().mapped_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    owner_->published().used_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    owner_->unlease(bytes, klass_);
    freed += bytes;
    first = next;
  }
  return freed;
}

std::int64_t WeightRegion::decommit(std::int64_t offset, std::int64_t bytes) {
  std::lock_guard<std::mutex> guard(lock_);
  check_range(offset, bytes);
  const std::int64_t first = (offset + page_bytes_ - 1) / page_bytes_;
  const bool to_the_end = offset + bytes == bytes_;
  const std::int64_t end = to_the_end ? static_cast<std::int64_t>(handles_.size()) : (offset + bytes) / page_bytes_;
  return decommit_locked(first, end);
}

void WeightRegion::close() {
  if (!owner_->usable()) return;
  std::lock_guard<std::mutex> guard(lock_);
  if (closed_) return;
  decommit_locked(0, static_cast<std::int64_t>(handles_.size()));
  closed_ = true;
}

std::vector<ExportedPage> WeightRegion::export_pages() {
  std::lock_guard<std::mutex> guard(lock_);
  check_range(0, bytes_);
  if (!exportable_) throw Error(ErrorKind::BadRequest, "this region was not made to be exported");
  if (pages_committed_ != static_cast<std::int64_t>(handles_.size())) {
    throw Error(ErrorKind::BadRequest, "only a wholly committed region can be exported",
                {{"committed_bytes", pages_committed_ * page_bytes_}, {"region_bytes", bytes_}});
  }
  std::vector<ExportedPage> pages;
  for (Handle handle : handles_) pages.push_back(owner_->driver().export_page(handle, page_bytes_));
  return pages;
}

ImportedRegion::ImportedRegion(std::shared_ptr<Owner> owner, const std::vector<ExportedPage>& pages) : owner_(std::move(owner)) {
  owner_->check_usable();
  const std::int64_t granule = owner_->driver().granularity_bytes();
  for (const ExportedPage& page : pages) {
    if (page.bytes <= 0 || page.bytes % granule != 0 || page.fd < 0) {
      throw Error(ErrorKind::BadRequest, "not an exported page", {{"bytes", page.bytes}, {"granularity_bytes", granule}, {"fd", page.fd}});
    }
    bytes_ += page.bytes;
  }
  if (bytes_ == 0) throw Error(ErrorKind::BadRequest, "no pages to import");
  address_ = owner_->driver().reserve(bytes_);
  Address at = address_;
  try {
    for (const ExportedPage& page : pages) {
      const Handle handle = owner_->driver().import_page(page);
      try {
        owner_->driver().map_imported(at, handle, page.bytes);
      } catch (...) {
        owner_->driver().destroy_imported(handle);
        throw;
      }
      pages_.emplace_back(page.bytes, handle);
      at += page.bytes;
    }
  } catch (...) {
    close();
    owner_->driver().unreserve(address_, bytes_);
    throw;
  }
}

ImportedRegion::~ImportedRegion() {
  try {
    close();
    owner_->driver().unreserve(address_, bytes_);
  } catch (const Error&) {
    // A dead driver: the range goes with the process.
  }
}

void ImportedRegion::close() {
  if (closed_ || !owner_->usable()) return;
  closed_ = true;
  Address at = address_;
  for (const auto& [bytes, handle] : pages_) {
    owner_->driver().unmap(at, 1, bytes);
    owner_->driver().destroy_imported(handle);
    at += bytes;
  }
  pages_.clear();
}

}  // namespace kvcached
