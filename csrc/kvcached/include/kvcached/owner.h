// One owner of device memory in this process, and what its arenas share: driver, books, spare pages, one helper thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvcached/account.h"
#include "kvcached/driver.h"
#include "kvcached/handle_pool.h"

namespace kvcached {

// Something the helper thread looks after.
class Tended {
 public:
  virtual ~Tended() = default;
  // Does a bounded piece of what is due (refill, unmap behind fences).
  // Returns ns until it wants to be called again; INT64_MAX: not before it is woken.
  virtual std::int64_t tend() = 0;
};

// Something that must be closed before its owner: an arena, a region.
class Child {
 public:
  virtual ~Child() = default;
  virtual void close() = 0;
};

class Housekeeper;

// Shared from this, as fences and arenas are: a pointer taken from Python must not carry a Python reference into C++,
// whose last owner may be a thread that holds a pool's lock and would wait for the interpreter's.
class Owner final : public std::enable_shared_from_this<Owner> {
 public:
  Owner(std::shared_ptr<Driver> driver, std::shared_ptr<Account> account, const std::string& name, std::int64_t floor_bytes,
        std::int64_t limit_bytes);
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  // Closes arenas and regions, stops the helper thread, and gives everything back to the account.
  void close();
  void adopt(const std::shared_ptr<Child>& child);
  void check_usable() const;  // ClosedHandle after close() or in a forked child
  bool usable() const;

  OwnerId id() const { return id_; }
  Account& account() const { return *account_; }
  Driver& driver() const { return *driver_; }
  const std::shared_ptr<Driver>& shared_driver() const { return driver_; }
  HandlePool& pages() { return pages_; }
  Published& published() { return published_; }
  std::int64_t pressure() const { return account_->pressure(id_); }

  // Leases of pages: the account's books and the page budget together, in the order that keeps physical <= books.
  void lease(std::int64_t bytes, Klass klass, double timeout_s = 0);  // as Account::reserve_within
  void lease_yielding(std::int64_t bytes, Klass klass);               // as Account::reserve
  void unlease(std::int64_t bytes, Klass klass);                      // destroys spare pages first
  // The driver has refused a page that the account had granted: has the account know what the driver says is free.
  void note_refusal();

  // The helper thread starts with the first thing to look after; wake_helper() has it look again now.
  void look_after(Tended* what);
  void leave_alone(Tended* what);  // waits for a running tend(); call it without locks that tend() takes
  void wake_helper();

 private:
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Account> account_;
  const std::uint32_t fork_generation_;
  OwnerId id_;
  Published& published_;
  HandlePool pages_;
  std::atomic<bool> closed_{false};
  mutable std::mutex lock_;
  std::vector<std::weak_ptr<Child>> children_;
  Housekeeper* housekeeper_ = nullptr;  // owned; abandoned in a forked child, where its thread does not exist
};

}  // namespace kvcached
