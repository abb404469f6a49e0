// Making, opening and leaving a piece index; who its owners are and which of them live.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "kvcached/huge_pages.h"
#include "piece_index_locked.h"

namespace kvcached {
namespace {

constexpr std::int64_t kOwnersOffset = 4096;
constexpr std::int64_t kBucketsOffset = kOwnersOffset + kPieceOwners * static_cast<std::int64_t>(sizeof(PieceOwner));
static_assert(sizeof(PieceHeader) <= kOwnersOffset);

std::int64_t slots_offset(std::int64_t buckets) { return kBucketsOffset + buckets * 4; }

std::int64_t buckets_for(std::int64_t slots) {
  std::int64_t buckets = 1024;
  while (buckets < slots) buckets *= 2;
  return buckets;
}

// A lock of an open file, which all its threads have and which goes with it (F_OFD_*), on bytes first .. first + count of it.
struct flock bytes_lock(std::int64_t first, std::int64_t count) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = count;
  return lock;
}

int opened(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) throw system_error(path, errno);
  return fd;
}

// The same file, whatever its name is now.
int again(int fd) { return opened("/proc/self/fd/" + std::to_string(fd), 0); }

}  // namespace

PieceIndex::PieceIndex(const std::string& directory, std::int64_t slots, std::int64_t virtual_bytes)
    : path_(directory + "/index") {
  try {
    attach(directory, slots, virtual_bytes);
    enter();
  } catch (...) {
    release();
    throw;
  }
}

PieceIndex::~PieceIndex() {
  leave();
  release();
}

void PieceIndex::release() {
  if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(header_->virtual_bytes));
  if (header_ != nullptr) munmap(header_, static_cast<std::size_t>(index_bytes_));
  for (int* fd : {&lock_fd_, &pieces_fd_, &index_fd_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
}

void PieceIndex::attach(const std::string& directory, std::int64_t slots, std::int64_t virtual_bytes) {
  index_fd_ = opened(path_, O_CREAT);
  lock_fd_ = again(index_fd_);  // of its own, which no mapping keeps open
  // One process makes it while the others wait; the kernel releases this lock, too, if we die.
  while (flock(lock_fd_, LOCK_EX) != 0) {
    if (errno != EINTR) throw system_error("flock " + path_, errno);
  }
  pieces_fd_ = opened(directory + "/pieces", O_CREAT);
  PieceStamp stamp{0, 0};  // read, not mapped: where there is no memory for its page yet, that would be a signal
  if (pread(index_fd_, &stamp, sizeof stamp, 0) < 0) throw system_error("read " + path_, errno);
  const bool mine = stamp.magic == kPieceIndexMagic && stamp.version == kPieceIndexVersion;
  if (stamp.magic != 0 && !mine && !nobody_uses_it()) {
    throw system_error(path_ + " was made by another version and is in use", EBUSY);
  }
  if (mine) {
    map();
  } else {
    initialise(slots, virtual_bytes);
  }
  owners_ = reinterpret_cast<PieceOwner*>(reinterpret_cast<char*>(header_) + kOwnersOffset);
  buckets_ = reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(header_) + kBucketsOffset);
  slots_ = reinterpret_cast<PieceSlot*>(reinterpret_cast<char*>(header_) + slots_offset(header_->buckets));
  memory_ = reserve_aligned(header_->virtual_bytes);
  if (memory_ == nullptr || mmap(memory_, static_cast<std::size_t>(header_->virtual_bytes), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_NORESERVE | MAP_FIXED, pieces_fd_, 0) == MAP_FAILED) {
    throw system_error("mmap " + directory + "/pieces", errno);
  }
  flock(lock_fd_, LOCK_UN);
}

void PieceIndex::map() {
  struct stat info {};
  if (fstat(index_fd_, &info) != 0) throw system_error("fstat " + path_, errno);
  index_bytes_ = info.st_size;
  void* const at = mmap(nullptr, static_cast<std::size_t>(index_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, index_fd_, 0);
  if (at == MAP_FAILED) throw system_error("mmap " + path_, errno);
  header_ = static_cast<PieceHeader*>(at);
}

bool PieceIndex::nobody_uses_it() const {
  struct flock all = bytes_lock(0, 0);
  return fcntl(lock_fd_, F_OFD_GETLK, &all) == 0 && all.l_type == F_UNLCK;
}

// A predecessor may have been killed half-way.
void PieceIndex::initialise(std::int64_t slots, std::int64_t virtual_bytes) {
  virtual_bytes = pages_of(virtual_bytes);
  const std::int64_t buckets = buckets_for(slots), start = slots_offset(buckets);
  const std::int64_t index_bytes = start + slots * static_cast<std::int64_t>(sizeof(PieceSlot));
  for (const auto& [fd, bytes] : {std::pair{index_fd_, index_bytes}, {pieces_fd_, virtual_bytes}}) {
    if (ftruncate(fd, 0) != 0 || ftruncate(fd, bytes) != 0) throw system_error("ftruncate in " + path_, errno);
  }
  allocate_memory(index_fd_, 0, start);
  map();
  header_->stamp.version = kPieceIndexVersion;
  header_->most_slots = slots;
  header_->buckets = buckets;
  header_->virtual_bytes = header_->limit = virtual_bytes;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int rc = pthread_mutex_init(&header_->lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (rc != 0) throw system_error("lock of " + path_, rc);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  header_->stamp.magic = kPieceIndexMagic;  // it is made from now on, whoever dies
}

void PieceIndex::enter() {
  for (std::uint32_t owner = 0; owner < kPieceOwners; ++owner) {
    struct flock byte = bytes_lock(owner, 1);
    if (fcntl(lock_fd_, F_OFD_SETLK, &byte) != 0) continue;
    Locked lock(*this);
    if (owners_[owner].live != 0) give_back_all_of(owner);
    put(owners_[owner].live, 1u);
    owner_ = owner;
    entered_ = true;
    return;
  }
  throw system_error(path_ + " is used by too many", EUSERS);
}

void PieceIndex::leave() {
  if (!entered_) return;
  Locked lock(*this);
  give_back_all_of(owner_);
  entered_ = false;
}

void PieceIndex::renew() {
  entered_ = false;
  close(lock_fd_);  // the parent still has it, and with it the lock
  lock_fd_ = -1;
  lock_fd_ = again(index_fd_);
  enter();
}

void PieceIndex::reap() {
  Locked lock(*this);
  for (std::uint32_t owner = 0; owner < kPieceOwners; ++owner) {
    if (owners_[owner].live == 0 || owner == owner_) continue;
    struct flock byte = bytes_lock(owner, 1);
    if (fcntl(lock_fd_, F_OFD_GETLK, &byte) == 0 && byte.l_type == F_UNLCK) give_back_all_of(owner);
  }
}

}  // namespace kvcached
