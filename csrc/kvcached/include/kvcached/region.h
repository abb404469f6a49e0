// Weights at an address that never changes: physical pages come and go, pointers (and captured CUDA graphs) stay valid.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "kvcached/owner.h"

namespace kvcached {

class WeightRegion final : public Child {
 public:
  // Address space only. `page_bytes` is the size of its physical pages (rounded up to the granularity); `exportable`: whether
  // export_pages() shall be possible, which makes each page dearer; `klass`: what they are charged as.
  WeightRegion(std::shared_ptr<Owner> owner, std::int64_t bytes, std::int64_t page_bytes, bool exportable = false,
               Klass klass = Klass::Weights);
  ~WeightRegion() override;

  // Puts memory behind every page that [offset, offset + bytes) touches and that has none. All or nothing:
  // OutOfMemory (with a timeout, once other owners had that long to give way), LimitExceeded, driver errors. New pages hold
  // whatever was there last. Returns the bytes added.
  std::int64_t commit(std::int64_t offset, std::int64_t bytes, double timeout_s = 0);
  // Takes it away from every page wholly inside. The caller knows that nothing in flight touches them. Returns the bytes freed.
  std::int64_t decommit(std::int64_t offset, std::int64_t bytes);
  void close() override;

  std::vector<ExportedPage> export_pages();  // of a wholly committed exportable region; the descriptors are the caller's
  std::int64_t committed_bytes() const { return pages_committed_.load() * page_bytes_; }  // never waits
  Address address() const { return address_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t page_bytes() const { return page_bytes_; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }

 private:
  void check_range(std::int64_t offset, std::int64_t bytes) const;
  void map_run(std::int64_t first, std::int64_t end);
  std::int64_t commit_locked(std::int64_t offset, std::int64_t bytes, double timeout_s);
  std::int64_t decommit_locked(std::int64_t first, std::int64_t end);

  const std::shared_ptr<Owner> owner_;
  const std::int64_t bytes_;
  const bool exportable_;
  const Klass klass_;
  std::int64_t page_bytes_;
  Address address_ = 0;
  std::mutex lock_;  // may be held for as long as commit() waits for memory
  std::vector<Handle> handles_;
  std::vector<bool> committed_;
  std::atomic<std::int64_t> pages_committed_{0};
  bool closed_ = false;
};

// Pages of another process's region at an address of ours. Costs this process's account entry nothing.
class ImportedRegion final : public Child {
 public:
  ImportedRegion(std::shared_ptr<Owner> owner, const std::vector<ExportedPage>& pages);
  ~ImportedRegion() override;
  void close() override;
  Address address() const { return address_; }
  std::int64_t bytes() const { return bytes_; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }

 private:
  const std::shared_ptr<Owner> owner_;
  std::int64_t bytes_ = 0;
  Address address_ = 0;
  std::vector<std::pair<std::int64_t, Handle>> pages_;  // bytes of each, in order
  bool closed_ = false;
};

}  // namespace kvcached
