// Host memory as a device: address space is a PROT_NONE reservation, a physical page is a range of a memfd.
//
//   memfd     | page 0 | page 1 | hole | page 3 | ...      make_huge or fallocate = create, punch a hole = destroy
//                  \________       ________/
//   address   ......... | page 1 | page 3 | ..........      MAP_FIXED over the reservation = map
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "kvcached/driver.h"
#include "kvcached/error.h"
#include "kvcached/huge_pages.h"
#include "kvcached/process.h"

namespace kvcached {
namespace {

constexpr std::int64_t kFileBytes = std::int64_t{1} << 44;  // sparse: only what is allocated counts
constexpr std::int64_t kTogether = 32;                      // pages, some 10 ms: a fork waits for as long
constexpr std::int64_t kWorthHuge = 8 << 20;                // together: see make_huge

class HostDriver;

// All drivers of this process. A forked child must not keep its parent's pages alive, nor see them change under it.
std::mutex g_lock;
std::vector<HostDriver*>& all_drivers() {
  static auto* drivers = new std::vector<HostDriver*>;  // never destroyed: the fork handlers outlive static objects
  return *drivers;
}

class HostDriver final : public Driver {
 public:
  HostDriver(std::string name, std::int64_t page_bytes) : name_(std::move(name)), page_bytes_(page_bytes) {
    const std::int64_t os_page = sysconf(_SC_PAGESIZE);
    if (page_bytes <= 0 || page_bytes % os_page != 0) {
      throw Error(ErrorKind::BadRequest, "page_bytes of a host device must be a positive multiple of the system's page",
                  {{"page_bytes", page_bytes}, {"system_page_bytes", os_page}});
    }
    fd_ = memfd_create(("prism " + name_).c_str(), MFD_CLOEXEC);
    if (fd_ < 0) throw system_error("memfd_create", errno);
    if (ftruncate(fd_, kFileBytes) != 0) {
      const int code = errno;
      close(fd_);
      throw system_error("ftruncate of a memfd", code);
    }
    std::lock_guard<std::mutex> guard(g_lock);
    all_drivers().push_back(this);
  }

  ~HostDriver() override {
    std::lock_guard<std::mutex> guard(g_lock);
    auto& all = all_drivers();
    all.erase(std::find(all.begin(), all.end(), this));
    if (fd_ >= 0) close(fd_);
  }

  // In a forked child: drop the parent's pages. Only system calls, no allocation, the locks are held by the fork handlers.
  void forget() {
    close(fd_);
    fd_ = -1;
    for (const auto& [address, bytes] : reserved_) blank(address, bytes);
  }
  // What a fork waits for.
  void hold() {
    making_.lock();
    lock_.lock();
  }
  void release() {
    lock_.unlock();
    making_.unlock();
  }

  std::string name() const override { return name_; }
  std::int64_t granularity_bytes() const override { return page_bytes_; }
  int dlpack_type() const override { return 1; }
  int dlpack_id() const override { return 0; }
  int memfd() const override { return fd_; }
  bool is_brief() const override { return true; }

  Address reserve(std::int64_t bytes) override {
    void* const got = reserve_aligned(bytes, page_bytes_);
    if (got == nullptr) throw system_error("mmap of a reservation", errno);
    const Address start = reinterpret_cast<Address>(got);
    std::lock_guard<std::mutex> guard(lock_);
    reserved_[start] = bytes;
    return start;
  }

  void unreserve(Address address, std::int64_t bytes) override {
    {
      std::lock_guard<std::mutex> guard(lock_);
      reserved_.erase(address);
    }
    munmap(reinterpret_cast<void*>(address), bytes);
  }

  Handle create(std::int64_t bytes, bool exportable) override {
    Handle made = 0;
    create_together(&made, 1, bytes, exportable);
    return made;
  }

  std::int64_t most_together() const override { return kTogether; }

  void create_together(Handle* out, std::int64_t count, std::int64_t bytes, bool) override {
    const std::vector<std::int64_t> offsets = take_ranges(count, bytes);
    if (bytes % kHugePage == 0 && page_bytes_ % kHugePage == 0) make_runs_huge(offsets, bytes);
    int code = 0;
    for (std::int64_t offset : offsets) {  // what is huge by now is found quickly
      while (code == 0 && fallocate(fd_, 0, offset, bytes) != 0) code = errno == EINTR ? 0 : errno;
    }
    if (code == 0) {
      std::copy(offsets.begin(), offsets.end(), out);
      return;
    }
    for (std::int64_t offset : offsets) punch(offset, bytes);
    give_ranges(offsets, bytes);
    if (code != ENOSPC && code != ENOMEM) throw system_error("fallocate of a page", code);
    throw Error(ErrorKind::OutOfMemory, name_ + ": the machine has no memory left for a page, though the account has",
                {{"requested_bytes", bytes}, {"errno", code}});
  }

  void destroy(Handle handle, std::int64_t bytes) override {
    if (punch(static_cast<std::int64_t>(handle), bytes) != 0) throw system_error("punching out a page", errno);
    give_ranges({static_cast<std::int64_t>(handle)}, bytes);
  }

  void map(Address address, const Handle* handles, std::int64_t count, std::int64_t bytes) override {
    for (std::int64_t i = 0; i < count; ++i) {
      try {
        map_file(address + i * bytes, bytes, fd_, static_cast<off_t>(handles[i]));
      } catch (...) {
        blank(address, (i + 1) * bytes);
        throw;
      }
    }
  }

  void unmap(Address address, std::int64_t count, std::int64_t bytes) override {
    if (!blank(address, count * bytes)) throw system_error("unmapping pages", errno);
  }

  ExportedPage export_page(Handle handle, std::int64_t bytes) override {
    const int copy = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw system_error("dup of a memfd", errno);
    return {copy, static_cast<std::int64_t>(handle), bytes};
  }

  Handle import_page(const ExportedPage& page) override {
    const int copy = fcntl(page.fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw system_error("dup of an imported descriptor", errno);
    std::lock_guard<std::mutex> guard(lock_);
    const Handle handle = next_import_++;
    imported_[handle] = {copy, page.offset_bytes, page.bytes};
    return handle;
  }

  void map_imported(Address address, Handle handle, std::int64_t bytes) override {
    ExportedPage page{};
    {
      std::lock_guard<std::mutex> guard(lock_);
      page = imported_.at(handle);
    }
    map_file(address, bytes, page.fd, page.offset_bytes);
  }

  void destroy_imported(Handle handle) override {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = imported_.find(handle);
    if (found == imported_.end()) return;
    close(found->second.fd);
    imported_.erase(found);
  }

  std::shared_ptr<Fence> record(std::uintptr_t) override {
    throw Error(ErrorKind::BadRequest, name_ + " has no streams: use a Fence and signal it");
  }

  DeviceMemory memory() override {
    return {static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE), -1};
  }

 private:
  static bool blank(Address address, std::int64_t bytes) {
    return mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }

  int punch(std::int64_t offset, std::int64_t bytes) {
    int rc;
    do {
      rc = fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
    } while (rc != 0 && errno == EINTR);
    return rc;
  }

  static void map_file(Address address, std::int64_t bytes, int fd, off_t offset) {
    void* got = mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, offset);
    if (got == MAP_FAILED) {
      const int code = errno;
      blank(address, bytes);
      throw system_error("mapping a page (too many mappings?)", code);
    }
  }

  // Neighbours in the file together, where they are worth a call. A fork waits: the pages are mapped meanwhile.
  void make_runs_huge(const std::vector<std::int64_t>& offsets, std::int64_t bytes) {
    std::lock_guard<std::mutex> guard(making_);
    for (std::size_t first = 0, next = 0; first < offsets.size(); first = next) {
      std::int64_t end = offsets[first];
      for (; next < offsets.size() && offsets[next] == end; ++next) end += bytes;
      if (end - offsets[first] >= kWorthHuge && !make_huge(fd_, offsets[first], end - offsets[first])) return;
    }
  }

  // The lowest that are free, in order.
  std::vector<std::int64_t> take_ranges(std::int64_t count, std::int64_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto& free = free_ranges_[bytes];
    const auto reused = std::min(count, static_cast<std::int64_t>(free.size()));
    if (bytes % kHugePage == 0) end_ = (end_ + kHugePage - 1) / kHugePage * kHugePage;
    if (end_ + (count - reused) * bytes > kFileBytes) {
      throw Error(ErrorKind::OutOfMemory, name_ + ": the backing file is used up", {{"requested_bytes", bytes}});
    }
    const auto behind = std::next(free.begin(), reused);
    std::vector<std::int64_t> offsets(free.begin(), behind);
    free.erase(free.begin(), behind);
    for (; static_cast<std::int64_t>(offsets.size()) < count; end_ += bytes) offsets.push_back(end_);
    return offsets;
  }

  void give_ranges(const std::vector<std::int64_t>& offsets, std::int64_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    free_ranges_[bytes].insert(offsets.begin(), offsets.end());
  }

  const std::string name_;
  const std::int64_t page_bytes_;
  int fd_ = -1;
  std::mutex making_;  // before lock_
  std::mutex lock_;
  std::map<Address, std::int64_t> reserved_;
  std::map<std::int64_t, std::set<std::int64_t>> free_ranges_;  // by size
  std::map<Handle, ExportedPage> imported_;
  Handle next_import_ = 1;
  std::int64_t end_ = 0;
};

void before_fork() {
  g_lock.lock();
  for (HostDriver* driver : all_drivers()) driver->hold();
}
void after_fork_in_parent() {
  for (HostDriver* driver : all_drivers()) driver->release();
  g_lock.unlock();
}
void after_fork_in_child() {
  for (HostDriver* driver : all_drivers()) {
    driver->forget();
    driver->release();
  }
  g_lock.unlock();
}

}  // namespace

std::shared_ptr<Driver> make_host_driver(const std::string& name, std::int64_t page_bytes) {
  static const int rc = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (rc != 0) throw system_error("pthread_atfork", rc);
  return std::make_shared<HostDriver>(name, page_bytes);
}

}  // namespace kvcached
