// XXH3 (64 bits, its default secret) of more than 240 bytes, as they come: what is copied is summed while it is in the
// caches. The same sum as the library's, with the widest vectors that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcached {

constexpr std::int64_t kXxh3Least = 241;  // bytes in all: shorter ones are summed in another way

class Xxh3 {
 public:
  static constexpr std::int64_t kStripe = 64;

  explicit Xxh3(std::int64_t bytes);  // that will come
  // Whole stripes; the last bytes of all need not be one.
  void add(const std::uint8_t* at, std::int64_t bytes);
  // The same, and each stripe goes past the caches to `to`, which lies at a line of theirs: read once, where it would be read
  // again to be summed. What follows is asked for meanwhile, as many bytes at `soon`, and the pages' translations of where that
  // goes. To be followed by stream_fence().
  void add_streamed(std::uint8_t* to, const std::uint8_t* at, std::int64_t bytes, const std::uint8_t* soon,
                    const std::uint8_t* soon_to);
  static bool streams();  // this processor can do that
  std::uint64_t value() const;  // of all, when all have come

 private:
  std::int64_t come(const std::uint8_t* at, std::int64_t bytes);  // returns the stripes of them to be summed now

  alignas(64) std::uint64_t sums_[8];
  std::int64_t bytes_, come_ = 0;
  std::uint8_t last_[kStripe];  // the last stripe of what came
};

}  // namespace kvcached
