// The C++ core under load from many threads and processes, for the sanitizers (scripts/sanitize.sh). Exit code 0: all well.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvcached/arena.h"
#include "kvcached/device.h"
#include "kvcached/error.h"
#include "kvcached/fence.h"
#include "kvcached/region.h"

using namespace kvcached;

namespace {

constexpr double kPatience_s = 60;  // sanitizers are slow
constexpr std::int64_t kPage = 16384, kCapacity = 256 * kPage;
const KvLayout kLayout{2, 2, 64, 64, 2, Order::TokenMajor, 1, 1};

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::abort();
}

std::shared_ptr<Device> open(const std::string& directory) {
  return std::make_shared<Device>("host:0", DeviceOptions{kCapacity, kPage, directory, ""});
}

// As the Python bindings do: at once if possible. `how`: from anywhere, fresh, or the last ones as a sequence's next.
void take(Pool& pool, std::vector<std::int64_t>& slots, unsigned how) {
  const auto count = static_cast<std::int64_t>(slots.size());
  if (how < 2 && !pool.alloc_at_once(slots.data(), count, how == 1)) pool.alloc(slots.data(), count, how == 1);
  if (how < 2) return;
  const std::vector<std::int64_t> last(slots.size(), 5);  // in use or not, as it happens
  if (!pool.alloc_after_at_once(last.data(), slots.data(), count)) pool.alloc_after(last.data(), slots.data(), count);
}

// Takes slots, marks them, checks the marks, gives them back. `leases`: it also sets the pool's lease, which is then not elastic.
void use(Pool& pool, unsigned seed, int rounds, bool leases = false) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> slots;
  const std::int64_t cell = kLayout.token_bytes();
  for (int i = 0; i < rounds; ++i) {
    slots.resize(random() % 100 + 1);
    try {
      take(pool, slots, random() % 4);
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::OutOfMemory || error.kind() == ErrorKind::LimitExceeded, error.what());
      pool.give_back(0, pool.pressure());
      continue;
    }
    for (std::int64_t s : slots) std::memcpy(reinterpret_cast<void*>(pool.address() + s * cell), &s, 8);
    for (std::int64_t s : slots) require(std::memcmp(reinterpret_cast<void*>(pool.address() + s * cell), &s, 8) == 0, "a slot was lost");
    bool due = false;
    if (!pool.free_at_once(slots.data(), static_cast<std::int64_t>(slots.size()), &due)) {
      due = pool.free(slots.data(), static_cast<std::int64_t>(slots.size()));
    }
    if (due && !pool.settle_at_once()) pool.settle();
    if (i % 16 == 0) pool.available();
    if (i % 64 == 0) pool.trim();
    if (leases && i % 25 == 0) {
      try {
        pool.set_lease(static_cast<std::int64_t>(random() % 20) * kPage);
      } catch (const Error&) {
      }
    }
  }
}

// With a floor, as soon as the others leave room for it.
std::shared_ptr<Owner> enter(Device& device, std::int64_t floor_bytes) {
  for (;;) {
    try {
      return device.enter("own", floor_bytes, kNoLimit);
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::FloorUnavailable, error.what());
    }
    std::this_thread::yield();
  }
}

void threads_on_shared_and_own_pools(const std::string& directory, int rounds) {
  auto device = open(directory);
  auto owner = device->enter("threads", 0, kNoLimit);
  auto arena = std::make_shared<Arena>(owner, std::int64_t{64} << 20);
  owner->adopt(arena);
  auto shared = arena->divide({{kLayout, 2000, kElastic}})[0];
  shared->set_ahead(2 * kPage, 6 * kPage);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) threads.emplace_back([&, t] { use(*shared, t, rounds); });
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      auto mine = enter(*device, 2 * kPage);
      auto range = std::make_shared<Arena>(mine, std::int64_t{64} << 20);
      mine->adopt(range);
      for (int again = 0; again < 3; ++again) {
        auto pool = range->divide({{kLayout, 1000, again == 1 ? 4 * kPage : kElastic}}, kPatience_s)[0];
        pool->set_ahead(kPage, 3 * kPage);
        use(*pool, 100 + t, rounds / 3, again == 1);
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < rounds / 4; ++i) {
      auto fence = std::make_shared<ManualFence>();
      shared->fence_with(fence);
      std::this_thread::yield();
      fence->signal();
      shared->stats();
      device->account().stats();
    }
    shared->fence_with(nullptr);
  });
  threads.emplace_back([&] {
    auto mine = device->enter("weights", 0, kNoLimit);
    WeightRegion region(mine, 20 * kPage, kPage);
    for (int i = 0; i < rounds / 4; ++i) {
      try {
        region.commit(0, region.bytes(), i % 2 == 0 ? 0.01 : 0.0);
        std::memset(reinterpret_cast<void*>(region.address()), i, static_cast<std::size_t>(region.bytes()));
        region.decommit(0, region.bytes());
        Account& account = mine->account();
        if (!account.reserve_at_once(mine->id(), kPage * 8, Klass::Staging)) {
          account.reserve_within(mine->id(), kPage * 8, Klass::Staging, 0.01);
        }
        if (!account.release_at_once(mine->id(), kPage * 8, Klass::Staging)) account.release(mine->id(), kPage * 8, Klass::Staging);
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::OutOfMemory, error.what());
      }
    }
    region.close();
  });
  for (auto& thread : threads) thread.join();
  shared->quiesce();
  shared->check();
  require(shared->used() == 0, "slots are left");
  require(device->audit().problems.empty(), "the audit found a problem");
  owner->close();
  require(device->account().free_bytes() == kCapacity, "memory is left");
}

// What the helper thread has taken off the pool's lease is in the account's books when quiesce() or give_back() returns.
void books_are_exact_when_asked_for(const std::string& directory, int rounds) {
  auto device = open(directory);
  auto owner = device->enter("exact", 0, kNoLimit);
  auto arena = std::make_shared<Arena>(owner, std::int64_t{64} << 20);
  owner->adopt(arena);
  auto pool = arena->divide({{kLayout, 2000, kElastic}})[0];
  std::vector<std::int64_t> slots(150);
  for (int i = 0; i < rounds * 5; ++i) {
    auto fence = std::make_shared<ManualFence>();
    pool->fence_with(fence);
    pool->alloc(slots.data(), 150);
    if (pool->free(slots.data(), 150)) pool->settle();  // nothing may go yet: from now on the helper looks after it
    fence->signal();
    if (i % 3 != 0) owner->wake_helper();
    if (i % 2 == 0) std::this_thread::yield();
    if (i % 4 == 0) {
      require(pool->ensure(70), "refused though there is room");
      owner->wake_helper();
      std::this_thread::yield();
      require(pool->available() >= 70, "the helper took back what was promised");
    }
    const std::int64_t before = i % 5 == 0 ? pool->give_back(0, INT64_MAX) : (pool->quiesce(), 0);
    require(before >= 0, "less than nothing was given back");
    require(owner->account().held(owner->id()) == kPage && pool->stats().lease_bytes == kPage, "memory is still on its way back");
    require(device->account().stats().owners.at(0).mapped_bytes == kPage, "what is shown lags behind");
  }
  owner->close();
}

void processes_killed_at_random(const std::string& directory, int kills) {
  auto device = open(directory);
  std::mt19937 random(7);
  std::vector<pid_t> children;
  for (int i = 0; i < kills; ++i) {
    while (children.size() < 3) {
      const pid_t child = fork();
      require(child >= 0, "fork");
      if (child == 0) {
        auto mine = open(directory)->enter("process", 0, kNoLimit);
        auto arena = std::make_shared<Arena>(mine, std::int64_t{64} << 20);
        auto pool = arena->divide({{kLayout, 2000, kElastic}}, kPatience_s)[0];
        for (;;) use(*pool, static_cast<unsigned>(getpid()), 100, getpid() % 2 == 0);
      }
      children.push_back(child);
    }
    usleep(random() % 20000);
    const std::size_t which = random() % children.size();
    kill(children[which], SIGKILL);
    int status = 0;
    waitpid(children[which], &status, 0);
    require(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a process failed by itself");
    children.erase(children.begin() + static_cast<std::ptrdiff_t>(which));
    require(device->account().stats().charged_bytes <= kCapacity, "overrun");
  }
  for (pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  device->account().reap();
  require(device->account().free_bytes() == kCapacity, "a dead process kept memory");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 400;
  char directory[] = "/tmp/kvcached-stress-XXXXXX";
  require(mkdtemp(directory) != nullptr, "mkdtemp");
  try {
    processes_killed_at_random(directory, rounds / 20);  // first: forking a process with threads is another matter
    books_are_exact_when_asked_for(directory, rounds);
    threads_on_shared_and_own_pools(directory, rounds);
  } catch (const Error& error) {
    require(false, error.what());
  }
  unlink((std::string(directory) + "/host-0.account").c_str());
  rmdir(directory);
  std::puts("stress: all well");
}
