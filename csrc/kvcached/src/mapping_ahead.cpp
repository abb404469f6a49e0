#include "kvcached/mapping_ahead.h"

namespace kvcached {
namespace {
constexpr std::int64_t kWatch_ns = 5000000;       // how often ready blocks are looked after while they are being used,
constexpr std::int64_t kWatchFor_ns = 200000000;  // and for how long after the last was
}  // namespace

void MappingAhead::set_marks(std::int64_t low, std::int64_t high) {
  low_ = low;
  high_ = high;
}

void MappingAhead::become_leased() {
  if (high_ == 0) high_ = INT64_MAX;
}

bool MappingAhead::decide_refill(std::int64_t ready) {
  if (ready < low_) refilling_ = true;
  if (ready >= enough()) refilling_ = false;
  return refilling_;
}

std::int64_t MappingAhead::note_use(std::int64_t ready, std::int64_t now_ns) {
  if (ready < seen_ready_) used_at_ns_ = now_ns;
  seen_ready_ = ready;
  watched_ = low_ > 0 && used_at_ns_ > 0 && now_ns - used_at_ns_ < kWatchFor_ns;
  return watched_ ? kWatch_ns : INT64_MAX;
}

}  // namespace kvcached
