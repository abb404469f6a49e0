// The account's lock, held for a scope. Taking it over from a dead holder puts the books right first.
#pragma once

#include <cerrno>
#include <mutex>

#include "kvcached/account.h"
#include "kvcached/error.h"

namespace kvcached {

class Account::Locked {
 public:
  explicit Locked(Account& account) : account_(account) { settle(pthread_mutex_lock(&account_.header_->lock)); }
  Locked(Account& account, std::try_to_lock_t) : account_(account) {
    const int rc = pthread_mutex_trylock(&account_.header_->lock);
    owns_ = rc != EBUSY;
    if (owns_) settle(rc);
  }
  ~Locked() {
    if (owns_) pthread_mutex_unlock(&account_.header_->lock);
  }
  bool owns() const { return owns_; }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  void settle(int rc) {
    if (rc == EOWNERDEAD) {
      account_.add_up();
      account_.header_->recoveries.fetch_add(1, std::memory_order_relaxed);
      pthread_mutex_consistent(&account_.header_->lock);
    } else if (rc != 0) {
      throw system_error("lock of the account " + account_.path_, rc);
    }
  }

  Account& account_;
  bool owns_ = true;
};

}  // namespace kvcached
