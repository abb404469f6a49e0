// When blocks are mapped ahead of use: two marks, and how often the helper thread looks. Pure; the time is an argument.
//
//   ready blocks   0 ........ low ........ high ........
//                  |<- refill ->|<- as they are ->|<- unmap ->
//
// Refilling begins below low and ends at high, or at low if high is unlimited. While ready blocks are being used the helper looks
// every few milliseconds by itself, because waking it costs the caller more than the slots do.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcached {

class MappingAhead {
 public:
  // Leased pools keep what ran empty mapped, their lease covers it anyway; elastic ones unmap it.
  explicit MappingAhead(bool elastic) : high_(elastic ? 0 : INT64_MAX) {}

  std::int64_t high() const { return high_; }  // most ready blocks
  void set_marks(std::int64_t low, std::int64_t high);
  void become_leased();

  bool decide_refill(std::int64_t ready);  // whether to map more now; remembers that refilling goes on
  std::int64_t lacking(std::int64_t ready) const { return enough() - ready; }  // how many more, then
  bool is_urgent(std::int64_t ready) const { return ready < low_ && !(watched_ && ready > low_ / 2); }  // the helper must look now
  // How long the helper may leave the pool alone when nothing is due, INT64_MAX: until it is woken. Notes whether blocks are used.
  std::int64_t note_use(std::int64_t ready, std::int64_t now_ns);

 private:
  std::int64_t enough() const { return high_ == INT64_MAX ? low_ : std::max(low_, high_); }

  std::int64_t low_ = 0, high_;
  bool refilling_ = false;
  bool watched_ = false;                            // the helper looks again within milliseconds
  std::int64_t seen_ready_ = 0, used_at_ns_ = 0;    // ready blocks as it saw them last, and when it saw fewer than before
};

}  // namespace kvcached
