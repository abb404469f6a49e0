#include "kvcached/housekeeper.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "kvcached/error.h"

namespace kvcached {
namespace {
constexpr std::int64_t kLongest_ns = 500000000;  // a lost ring costs at most this
}

Housekeeper::Housekeeper(std::shared_ptr<Account> account, OwnerId owner) : account_(std::move(account)), owner_(owner) {
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw kvcached::system_error("starting the helper thread", error.code().value());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Housekeeper::~Housekeeper() {
  stop_.store(true);
  account_->ring(owner_);
  thread_.join();
}

void Housekeeper::add(Tended* what) {
  {
    std::lock_guard<std::mutex> guard(lock_);
    if (std::find(tended_.begin(), tended_.end(), what) == tended_.end()) tended_.push_back(what);
  }
  account_->ring(owner_);
}

void Housekeeper::remove(Tended* what) {
  std::lock_guard<std::mutex> guard(lock_);
  tended_.erase(std::remove(tended_.begin(), tended_.end(), what), tended_.end());
}

void Housekeeper::run() {
  pthread_setname_np(pthread_self(), "kvcached");
  while (!stop_.load()) {
    const std::uint32_t seen = account_->doorbell(owner_);
    const std::int64_t pause_ns = round();
    if (!stop_.load()) account_->sleep_at_doorbell(owner_, seen, pause_ns);
  }
}

std::int64_t Housekeeper::round() {
  std::int64_t pause_ns = kLongest_ns;
  std::lock_guard<std::mutex> guard(lock_);
  for (Tended* what : tended_) {
    try {
      pause_ns = std::min(pause_ns, what->tend());
    } catch (...) {
      // Nothing may escape a thread. The pool remembers its state; the next call of the program meets the same error and gets it as an exception.
    }
  }
  return pause_ns;
}

}  // namespace kvcached
