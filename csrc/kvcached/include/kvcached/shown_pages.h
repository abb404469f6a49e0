// What one pool adds to its owner's published page states, which other processes read without a lock.
#pragma once

#include <atomic>
#include <cstdint>

#include "kvcached/account_file.h"

namespace kvcached {

struct PageStates {
  std::int64_t mapped_bytes, ahead_bytes, deferred_bytes, used_bytes;
};

class ShownPages {
 public:
  explicit ShownPages(Published& published) : published_(published) {}

  void show(const PageStates& now) {
    add(now.mapped_bytes, shown_.mapped_bytes, published_.mapped_bytes);
    add(now.ahead_bytes, shown_.ahead_bytes, published_.ahead_bytes);
    add(now.deferred_bytes, shown_.deferred_bytes, published_.deferred_bytes);
    add(now.used_bytes, shown_.used_bytes, published_.used_bytes);
  }

 private:
  static void add(std::int64_t now, std::int64_t& shown, std::atomic<std::int64_t>& word) {
    if (now == shown) return;
    word.fetch_add(now - shown, std::memory_order_relaxed);
    shown = now;
  }

  Published& published_;
  PageStates shown_{};
};

}  // namespace kvcached
