// Rows of a pool into packed bytes and back, on host memory: what moves KV touches memory here and nowhere else.
//
//   base  | row 0 | row 1 | row 2 | row 3 | ...     a row every `stride` bytes, of which `width` move
//   packed        | row 3 | row 1 | row 2 | ...     in the order of `rows`, no gaps
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvcached/stream_copy.h"

namespace kvcached {

namespace detail {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kTurn = 256;  // bytes that are copied of one lane before the next one has its turn
constexpr int kLanes = 4;
constexpr int kShortLanes = 8;            // of rows that are short: more of them begin, and less is asked for ahead
constexpr std::int64_t kShort = 16 << 10;
constexpr std::int64_t kLong = 64 << 10;  // a run of rows that is worth lanes of its own

// Bytes up to the next line, so that whole lines are stored from there on: a line that is written in two ways, past the
// caches and through them, costs many times as much.
inline std::int64_t to_line(const std::uint8_t* at) {
  return static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(at) % kLine);
}

struct Lane {
  std::uint8_t* to;
  const std::uint8_t* from;
};

// Copies `bytes` of each lane, a few lines of one after the other. In one stream the copy waits at every row's beginning
// for memory and for its page's translation, and between pages for the processor to see where it goes. `soon`: the lanes
// that follow; may be fewer than lanes. What they read is asked for; where they write in pages far apart (`scattered`),
// the pages' translations, since whole lines are written without being read.
template <int lanes, bool scattered>
inline void copy_lanes(const Lane* now, std::int64_t bytes, bool streamed, const Lane* soon, int soon_count) {
  const std::int64_t head = std::min(bytes, to_line(now[0].to));
  for (std::int64_t done = 0; done < bytes;) {
    const std::int64_t next = std::min(bytes, done == 0 ? head + kTurn : done + kTurn);
    for (int k = 0; k < lanes; ++k) {
      if (k < soon_count) {
        for (std::int64_t at = (done + kLine - 1) / kLine * kLine; at < next; at += kLine) {
          __builtin_prefetch(soon[k].from + at, 0, 2);
          if (scattered && at % kPage == 0) __builtin_prefetch(soon[k].to + at, 0, 2);
        }
      }
      if (streamed) {
        stream_bytes(now[k].to + done, now[k].from + done, static_cast<std::size_t>(next - done));
      } else {
        std::memcpy(now[k].to + done, now[k].from + done, static_cast<std::size_t>(next - done));
      }
    }
    done = next;
  }
}

// One long copy as lanes beside each other.
inline void copy_long(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes, bool streamed) {
  const std::int64_t each = bytes / kLanes / kLine * kLine;
  Lane lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = {to + k * each, from + k * each};
  copy_lanes<kLanes, false>(lanes, each, streamed, nullptr, 0);
  std::memcpy(to + kLanes * each, from + kLanes * each, static_cast<std::size_t>(bytes - kLanes * each));
}

// Copies as many rows from i on as there are lanes.
template <int lanes, bool scattered, typename LaneOf>
inline void copy_beside(std::int64_t i, std::int64_t count, std::int64_t width, bool streamed, LaneOf lane_of) {
  Lane now[lanes], soon[lanes];
  const int ahead = static_cast<int>(std::min<std::int64_t>(lanes, count - i - lanes));
  for (int k = 0; k < lanes; ++k) now[k] = lane_of(i + k);
  for (int k = 0; k < ahead; ++k) soon[k] = lane_of(i + lanes + k);
  copy_lanes<lanes, scattered>(now, width, streamed, soon, ahead);
}

// Copies rows i, which lie at lane_of(i), and what follows them where rows follow each other (`dense`).
template <bool scattered, typename LaneOf>
void copy_rows(const std::int64_t* rows, std::int64_t count, std::int64_t width, bool dense, bool streamed, LaneOf lane_of) {
  const bool lanes_fit = width >= kTurn;
  for (std::int64_t i = 0; i < count;) {
    std::int64_t run = 1;
    while (dense && i + run < count && rows[i + run] == rows[i] + run) ++run;
    const Lane first = lane_of(i);
    if (run == 1 && lanes_fit && width <= kShort && i + kShortLanes <= count) {
      copy_beside<kShortLanes, scattered>(i, count, width, streamed, lane_of);
      run = kShortLanes;
    } else if (run == 1 && lanes_fit && i + kLanes <= count) {
      copy_beside<kLanes, scattered>(i, count, width, streamed, lane_of);
      run = kLanes;
    } else if (run * width >= kLong) {
      copy_long(first.to, first.from, run * width, streamed);
    } else if (streamed) {
      stream_bytes(first.to, first.from, static_cast<std::size_t>(run * width));
    } else {
      std::memcpy(first.to, first.from, static_cast<std::size_t>(run * width));
    }
    i += run;
  }
}

}  // namespace detail

// `streamed`: past the caches, for packed bytes that this core does not read next.
inline void gather_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride, std::int64_t width,
                        const std::int64_t* rows, std::int64_t count, bool streamed) {
  using namespace detail;
  copy_rows<false>(rows, count, width, stride == width, streamed,
                   [&](std::int64_t i) { return Lane{packed + i * width, base + rows[i] * stride}; });
  if (streamed) stream_fence();
}

inline void scatter_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows,
                         std::int64_t count, const std::uint8_t* packed) {
  using namespace detail;
  copy_rows<true>(rows, count, width, stride == width, true,
                  [&](std::int64_t i) { return Lane{base + rows[i] * stride, packed + i * width}; });
  stream_fence();
}

}  // namespace kvcached
