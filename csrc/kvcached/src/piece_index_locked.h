// The lock of a piece index, held for a scope, and stores that others see.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "kvcached/error.h"
#include "kvcached/piece_index.h"

namespace kvcached {

inline std::int64_t pages_of(std::int64_t bytes) {  // what an extent for them takes
  return std::max<std::int64_t>(1, (bytes + kPiecePage - 1) / kPiecePage) * kPiecePage;
}

void piece_step();  // may be the moment at which a test kills the process
void allocate_memory(int fd, std::int64_t offset, std::int64_t bytes);  // of a file; raises SystemFailed

// One store: those before it come first and those behind it later, whenever the process dies.
template <typename T>
inline void put(T& word, T value) {
  piece_step();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  word = value;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

class PieceIndex::Locked {
 public:
  explicit Locked(PieceIndex& index) : lock_(index.header_->lock) {
    const int rc = pthread_mutex_lock(&lock_);
    if (rc == EOWNERDEAD) {
      index.recover();
      pthread_mutex_consistent(&lock_);
    } else if (rc != 0) {
      throw system_error("lock of " + index.path_, rc);
    }
  }
  ~Locked() { pthread_mutex_unlock(&lock_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  pthread_mutex_t& lock_;
};

}  // namespace kvcached
