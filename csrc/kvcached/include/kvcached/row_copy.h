// Rows of a pool into packed bytes and back, on host memory: what moves KV touches memory here and nowhere else.
//
//   base  | row 0 | row 1 | row 2 | row 3 | ...     a row every `stride` bytes, of which `width` move
//   packed        | row 3 | row 1 | row 2 | ...     in the order of `rows`, no gaps
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kvcached/stream_copy.h"
#include "kvcached/xxh3.h"

namespace kvcached {

namespace detail {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kTurn = 256;  // bytes that are copied of one lane before the next one has its turn
constexpr int kLanes = 4;
constexpr int kShortLanes = 8;            // of rows that are short: more of them begin, and less is asked for ahead
constexpr std::int64_t kShort = 16 << 10;
constexpr std::int64_t kLong = 64 << 10;  // a run of rows that is worth lanes of its own
constexpr std::int64_t kSummed = 128 << 10;  // bytes that are copied before they are summed: still in the caches

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
inline void copy_beside(std::int64_t i, std::int64_t known, std::int64_t width, bool streamed, LaneOf lane_of) {
  Lane now[lanes], soon[lanes];
  const int ahead = static_cast<int>(std::min<std::int64_t>(lanes, known - i - lanes));
  for (int k = 0; k < lanes; ++k) now[k] = lane_of(i + k);
  for (int k = 0; k < ahead; ++k) soon[k] = lane_of(i + lanes + k);
  copy_lanes<lanes, scattered>(now, width, streamed, soon, ahead);
}

// Rows i .. count of `known` ones: those behind them are copied next, and asked for.
struct Rows {
  std::int64_t i, count, known;
};

// Copies rows, of which the i-th lies at lane_of(i), and what follows it where rows follow each other (`dense`).
template <bool scattered, typename LaneOf>
void copy_rows(const std::int64_t* rows, Rows which, std::int64_t width, bool dense, bool streamed, LaneOf lane_of) {
  const bool lanes_fit = width >= kTurn;
  const std::int64_t count = which.count, known = which.known;
  for (std::int64_t i = which.i; i < count;) {
    std::int64_t run = 1;
    while (dense && i + run < count && rows[i + run] == rows[i] + run) ++run;
    const Lane first = lane_of(i);
    if (run == 1 && lanes_fit && width <= kShort && i + kShortLanes <= count) {
      copy_beside<kShortLanes, scattered>(i, known, width, streamed, lane_of);
      run = kShortLanes;
    } else if (run == 1 && lanes_fit && i + kLanes <= count) {
      copy_beside<kLanes, scattered>(i, known, width, streamed, lane_of);
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

// Copies by `copy(rows)`, some rows at a time, and sums them while they are in the caches: add(sum, i, end).
template <typename Copy, typename Add>
std::uint64_t copy_summed(std::int64_t count, std::int64_t width, Copy copy, Add add) {
  const std::int64_t fit = std::max<std::int64_t>(1, kSummed / width);
  const std::int64_t some = fit < kShortLanes ? fit : fit / kShortLanes * kShortLanes;
  Xxh3 sum(count * width);
  for (std::int64_t i = 0; i < count; i += some) {
    const std::int64_t end = std::min(count, i + some);
    copy(Rows{i, end, count});
    add(sum, i, end);
  }
  return sum.value();
}

inline void gather_some(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride, std::int64_t width,
                        const std::int64_t* rows, Rows which, bool streamed) {
  copy_rows<false>(rows, which, width, stride == width, streamed,
                   [&](std::int64_t i) { return Lane{packed + i * width, base + rows[i] * stride}; });
  if (streamed) stream_fence();
}

inline void scatter_some(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows, Rows which,
                         const std::uint8_t* packed) {
  copy_rows<true>(rows, which, width, stride == width, true,
                  [&](std::int64_t i) { return Lane{base + rows[i] * stride, packed + i * width}; });
  stream_fence();
}

}  // namespace detail

// `streamed`: past the caches, for packed bytes that this core does not read next.
inline void gather_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride, std::int64_t width,
                        const std::int64_t* rows, std::int64_t count, bool streamed) {
  detail::gather_some(packed, base, stride, width, rows, {0, count, count}, streamed);
}

inline void scatter_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows,
                         std::int64_t count, const std::uint8_t* packed) {
  detail::scatter_some(base, stride, width, rows, {0, count, count}, packed);
}

// The same, and XXH3 of the packed bytes, of which there are kXxh3Least at least: what the copy has just read is read
// again, or what it wrote, where stripes of the sum go over the ends of rows.
inline std::uint64_t gather_summed_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride,
                                        std::int64_t width, const std::int64_t* rows, std::int64_t count, bool streamed) {
  const bool by_rows = width % Xxh3::kStripe == 0;
  return detail::copy_summed(
      count, width, [&](detail::Rows some) { detail::gather_some(packed, base, stride, width, rows, some, streamed); },
      [&](Xxh3& sum, std::int64_t i, std::int64_t end) {
        for (; by_rows && i < end; ++i) sum.add(base + rows[i] * stride, width);
        if (!by_rows && end == count) sum.add(packed, count * width);
      });
}

inline std::uint64_t scatter_summed_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width,
                                         const std::int64_t* rows, std::int64_t count, const std::uint8_t* packed) {
  const bool by_rows = width % Xxh3::kStripe == 0;
  return detail::copy_summed(
      count, width, [&](detail::Rows some) { detail::scatter_some(base, stride, width, rows, some, packed); },
      [&](Xxh3& sum, std::int64_t i, std::int64_t end) {
        if (by_rows) sum.add(packed + i * width, (end - i) * width);
        if (!by_rows && end == count) sum.add(packed, count * width);
      });
}

}  // namespace kvcached
