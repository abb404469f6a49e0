// The helper thread of an owner: maps pages ahead, unmaps behind fences, gives back under pressure - off the critical path.
// It sleeps on the owner's doorbell in the account, which other processes ring when they want memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kvcached/owner.h"

namespace kvcached {

class Housekeeper {
 public:
  Housekeeper(std::shared_ptr<Account> account, OwnerId owner);
  ~Housekeeper();  // stops and joins

  void add(Tended* what);     // no effect if it is there already
  void remove(Tended* what);  // afterwards it is not being tended and never will be; not from within tend()

 private:
  void run();
  std::int64_t round();  // returns ns until the next

  std::shared_ptr<Account> account_;
  const OwnerId owner_;
  std::atomic<bool> stop_{false};
  std::mutex lock_;  // held while something is tended, so that remove() waits for it
  std::vector<Tended*> tended_;
  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace kvcached
