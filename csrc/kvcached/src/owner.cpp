#include "kvcached/owner.h"

#include <sys/stat.h>

#include <algorithm>

#include "kvcached/error.h"
#include "kvcached/housekeeper.h"
#include "kvcached/process.h"

namespace kvcached {
namespace {

void close_child(Child& child) {
  for (int attempt = 0; attempt < 3; ++attempt) {  // a driver call may fail once
    try {
      return child.close();
    } catch (const Error&) {
      // A dead driver: the pages go with the process.
    }
  }
}

}  // namespace

Owner::Owner(std::shared_ptr<Driver> driver, std::shared_ptr<Account> account, const std::string& name,
             std::int64_t floor_bytes, std::int64_t limit_bytes)
    : driver_(std::move(driver)),
      account_(std::move(account)),
      fork_generation_(fork_generation()),
      id_(account_->enter(name, floor_bytes, limit_bytes)),
      published_(account_->published(id_)),
      pages_(driver_, published_) {
  const int fd = driver_->memfd();
  struct stat info {};
  if (fd >= 0 && fstat(fd, &info) == 0) {
    published_.memfd_inode.store(info.st_ino, std::memory_order_relaxed);
    published_.memfd.store(fd, std::memory_order_relaxed);
  }
}

Owner::~Owner() {
  try {
    close();
  } catch (const Error&) {
    // The lock could not be taken: whoever meets this process dead will reap the entry.
  }
}

void Owner::close() {
  if (!usable()) return;
  std::vector<std::weak_ptr<Child>> children;
  {
    std::lock_guard<std::mutex> guard(lock_);
    children.swap(children_);
  }
  for (auto& weak : children) {
    const std::shared_ptr<Child> child = weak.lock();
    if (child != nullptr) close_child(*child);
  }
  if (closed_.exchange(true)) return;
  Housekeeper* housekeeper = nullptr;
  {
    std::lock_guard<std::mutex> guard(lock_);
    std::swap(housekeeper, housekeeper_);
  }
  delete housekeeper;  // joins
  try {
    pages_.destroy_spares();
  } catch (const Error&) {
    // A dead driver: the pages go with the process.
  }
  account_->leave(id_);
}

void Owner::adopt(const std::shared_ptr<Child>& child) {
  std::lock_guard<std::mutex> guard(lock_);
  children_.erase(std::remove_if(children_.begin(), children_.end(), [](const auto& c) { return c.expired(); }), children_.end());
  children_.push_back(child);
}

bool Owner::usable() const { return fork_generation() == fork_generation_ && !closed_.load(std::memory_order_relaxed); }

void Owner::check_usable() const {
  if (fork_generation() != fork_generation_) {
    throw Error(ErrorKind::ClosedHandle, "this owner belongs to the process before the fork: register another in the child");
  }
  if (closed_.load(std::memory_order_relaxed)) throw Error(ErrorKind::ClosedHandle, "this owner is closed");
}

void Owner::lease(std::int64_t bytes, Klass klass, double timeout_s) {
  check_usable();
  account_->reserve_within(id_, bytes, klass, timeout_s);
  pages_.raise_budget(bytes);
}

void Owner::lease_yielding(std::int64_t bytes, Klass klass) {
  check_usable();
  account_->reserve(id_, bytes, klass, true);
  pages_.raise_budget(bytes);
}

void Owner::unlease(std::int64_t bytes, Klass klass) {
  pages_.lower_budget(bytes);
  account_->release(id_, bytes, klass);
}

void Owner::note_refusal() {
  const std::int64_t free = driver_->memory().free_bytes;
  if (free >= 0) account_->note_refusal(free);
}

void Owner::look_after(Tended* what) {
  check_usable();
  std::lock_guard<std::mutex> guard(lock_);
  if (housekeeper_ == nullptr) housekeeper_ = new Housekeeper(account_, id_);
  housekeeper_->add(what);
}

void Owner::leave_alone(Tended* what) {
  if (fork_generation() != fork_generation_) return;
  std::lock_guard<std::mutex> guard(lock_);
  if (housekeeper_ != nullptr) housekeeper_->remove(what);
}

void Owner::wake_helper() { account_->ring(id_); }

}  // namespace kvcached
