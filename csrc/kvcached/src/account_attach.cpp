// Creating, attaching to and leaving an account file; the owners' table.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "account_locked.h"

namespace kvcached {

Account::Account(const std::string& path, std::int64_t capacity_bytes, std::int64_t page_bytes) : path_(path) {
  const int flags = O_RDWR | O_CLOEXEC | (capacity_bytes > 0 ? O_CREAT : 0);
  const int fd = open(path.c_str(), flags, 0600);
  if (fd < 0) throw system_error("account " + path, errno);
  try {
    attach(capacity_bytes, page_bytes, fd);
  } catch (...) {
    close(fd);
    if (base_ != nullptr) munmap(base_, kAccountBytes);
    throw;
  }
  flock(fd, LOCK_UN);  // close alone would not release it: the mapping keeps the open file, and so its lock, alive
  close(fd);
}

Account::~Account() { munmap(base_, kAccountBytes); }

void Account::attach(std::int64_t capacity_bytes, std::int64_t page_bytes, int fd) {
  // The file lock (released by the kernel if we die) lets one process initialise while the others wait.
  while (flock(fd, LOCK_EX) != 0) {
    if (errno != EINTR) throw system_error("flock " + path_, errno);
  }
  struct stat info {};
  if (fstat(fd, &info) != 0) throw system_error("fstat " + path_, errno);
  const bool sized = info.st_size >= static_cast<off_t>(kAccountBytes);
  if (!sized && capacity_bytes <= 0) {
    throw Error(ErrorKind::AccountMismatch, path_ + " is not an account: open it once with a capacity",
                {{"file_bytes", info.st_size}});
  }
  if (!sized && ftruncate(fd, kAccountBytes) != 0) throw system_error("ftruncate " + path_, errno);
  base_ = mmap(nullptr, kAccountBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw system_error("mmap " + path_, errno);
  }
  header_ = static_cast<AccountHeader*>(base_);
  slots_ = reinterpret_cast<OwnerSlot*>(static_cast<char*>(base_) + kSlotsOffset);
  const bool made = header_->magic.load(std::memory_order_acquire) == kAccountMagic;
  if (made && header_->version != kAccountVersion) {
    throw Error(ErrorKind::AccountMismatch, path_ + " was made by another version",
                {{"version", header_->version}, {"expected_version", kAccountVersion}});
  }
  if (!made && capacity_bytes <= 0) {
    throw Error(ErrorKind::AccountMismatch, path_ + " is not an account: open it once with a capacity");
  }
  if (!made) {
    initialise(capacity_bytes, page_bytes);
  } else if (capacity_bytes > 0) {
    adopt(capacity_bytes, page_bytes);
  }
}

void Account::initialise(std::int64_t capacity_bytes, std::int64_t page_bytes) {
  std::memset(base_, 0, kAccountBytes);  // a predecessor may have been killed half-way
  header_->version = kAccountVersion;
  header_->max_owners = kMaxOwners;
  header_->page_bytes = page_bytes;
  header_->capacity_bytes.store(capacity_bytes, std::memory_order_relaxed);
  header_->lend_keep_bytes.store(kLendsNothing, std::memory_order_relaxed);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int rc = pthread_mutex_init(&header_->lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (rc != 0) throw system_error("lock of the account " + path_, rc);
  header_->magic.store(kAccountMagic, std::memory_order_release);
}

void Account::adopt(std::int64_t capacity_bytes, std::int64_t page_bytes) {
  if (this->capacity_bytes() == capacity_bytes && this->page_bytes() == page_bytes) return;
  reap();
  Locked lock(*this);
  std::int64_t owners = 0;
  for (int i = 0; i < kMaxOwners; ++i) owners += slots_[i].live.load(std::memory_order_relaxed);
  if (owners > 0) {
    throw Error(ErrorKind::AccountMismatch, path_ + ": owners live on a device of another capacity or page",
                {{"capacity_bytes", this->capacity_bytes()}, {"wanted_capacity_bytes", capacity_bytes},
                 {"page_bytes", this->page_bytes()}, {"wanted_page_bytes", page_bytes}, {"owners", owners}});
  }
  header_->page_bytes = page_bytes;
  header_->capacity_bytes.store(capacity_bytes, std::memory_order_relaxed);
}

OwnerSlot& Account::slot(OwnerId owner) const {
  const auto index = owner & 0xffff;
  if (owner < 0 || index >= kMaxOwners) {
    throw Error(ErrorKind::UnknownOwner, "no owner has the id " + std::to_string(owner), {{"owner", owner}});
  }
  return slots_[index];
}

OwnerSlot& Account::live_slot(OwnerId owner) const {
  OwnerSlot& s = slot(owner);
  if (!s.live.load(std::memory_order_acquire) || s.generation.load(std::memory_order_relaxed) != (owner >> 16)) {
    throw Error(ErrorKind::UnknownOwner, "owner " + std::to_string(owner) + " has left or was reaped", {{"owner", owner}});
  }
  return s;
}

OwnerId Account::enter(const std::string& name, std::int64_t floor_bytes, std::int64_t limit_bytes) {
  if (floor_bytes < 0 || limit_bytes < 0) {
    throw Error(ErrorKind::BadRequest, "floor and limit of " + name + " must not be negative",
                {{"floor_bytes", floor_bytes}, {"limit_bytes", limit_bytes}});
  }
  reap();
  const ProcessId self = this_process();
  Locked lock(*this);
  int index = 0;
  while (index < kMaxOwners && slots_[index].live.load(std::memory_order_relaxed)) ++index;
  if (index == kMaxOwners) {
    throw Error(ErrorKind::TooManyOwners, path_ + " has no place for another owner", {{"owners", kMaxOwners}});
  }
  const std::int64_t free = free_bytes();
  if (floor_bytes > 0 && floor_bytes > free) {
    throw Error(ErrorKind::FloorUnavailable, "the floor of " + name + " cannot be guaranteed",
                {{"floor_bytes", floor_bytes}, {"free_bytes", free}, {"capacity_bytes", capacity_bytes()}});
  }
  OwnerSlot& s = slots_[index];
  s.pid = self.pid;
  s.start_ticks = self.start_ticks;
  std::memset(s.name, 0, sizeof s.name);
  std::memcpy(s.name, name.data(), std::min(name.size(), sizeof s.name - 1));
  clear(s);
  s.limit_bytes.store(limit_bytes, std::memory_order_relaxed);
  s.floor_bytes.store(floor_bytes, std::memory_order_relaxed);
  const std::uint32_t generation = (s.generation.load(std::memory_order_relaxed) + 1) & 0x7fffffff;
  s.generation.store(generation, std::memory_order_relaxed);
  s.live.store(1, std::memory_order_release);
  charge(s, 0);
  return (static_cast<OwnerId>(generation) << 16) | index;
}

void Account::clear(OwnerSlot& s) {
  for (auto& held : s.held_bytes) held.store(0, std::memory_order_relaxed);
  s.wanted_bytes.store(0, std::memory_order_relaxed);
  s.wish_bytes.store(0, std::memory_order_relaxed);
  s.floor_bytes.store(0, std::memory_order_relaxed);
  s.measured_bytes.store(0, std::memory_order_relaxed);
  Published& p = s.published;
  for (auto* word : {&p.physical_bytes, &p.mapped_bytes, &p.ahead_bytes, &p.deferred_bytes, &p.used_bytes, &p.virtual_bytes}) {
    word->store(0, std::memory_order_relaxed);
  }
  p.memfd.store(-1, std::memory_order_relaxed);
  p.memfd_inode.store(0, std::memory_order_relaxed);
}

void Account::leave(OwnerId owner) {
  {
    Locked lock(*this);
    OwnerSlot& s = slot(owner);
    if (!s.live.load(std::memory_order_relaxed) || s.generation.load(std::memory_order_relaxed) != (owner >> 16)) return;
    clear(s);
    s.live.store(0, std::memory_order_release);
    add_up();
  }
  memory_came_back();
}

std::vector<OwnerId> Account::reap() {
  // Liveness is read from /proc without the lock; the slot's generation says whether it is still the same owner afterwards.
  std::vector<OwnerId> dead;
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& s = slots_[i];
    if (!s.live.load(std::memory_order_acquire)) continue;
    const OwnerId id = (static_cast<OwnerId>(s.generation.load(std::memory_order_relaxed)) << 16) | i;
    if (!is_alive({s.pid, s.start_ticks})) dead.push_back(id);
  }
  if (dead.empty()) return dead;
  std::vector<OwnerId> reaped;
  {
    Locked lock(*this);
    for (OwnerId id : dead) {
      OwnerSlot& s = slot(id);
      if (!s.live.load(std::memory_order_relaxed) || s.generation.load(std::memory_order_relaxed) != (id >> 16)) continue;
      clear(s);
      s.live.store(0, std::memory_order_release);
      reaped.push_back(id);
    }
    header_->reaped_owners.fetch_add(reaped.size(), std::memory_order_relaxed);
    add_up();
  }
  memory_came_back();
  return reaped;
}

void Account::add_up() {
  std::int64_t charged = 0, wanted = 0, wishes = 0;
  for (int i = 0; i < kMaxOwners; ++i) {
    const OwnerSlot& s = slots_[i];
    if (!s.live.load(std::memory_order_relaxed)) continue;
    charged += s.charged();
    wanted += s.wanted_bytes.load(std::memory_order_relaxed);
    wishes += s.wish_bytes.load(std::memory_order_relaxed);
  }
  header_->charged_bytes.store(charged, std::memory_order_relaxed);
  header_->wanted_bytes.store(wanted, std::memory_order_relaxed);
  header_->wish_bytes.store(wishes, std::memory_order_relaxed);
}

}  // namespace kvcached
