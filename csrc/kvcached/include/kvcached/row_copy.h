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
constexpr std::int64_t kAhead = 8 << 10;  // so far ahead is asked for what is summed as it is copied
constexpr std::int64_t kPages = 4;        // rows further ahead their pages' translations are asked for,
constexpr std::int64_t kTogether = 8;     // those of so many rows at a time
constexpr std::int64_t kChunk = 4 << 10;
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

// Rows that are whole stripes of the sum, to whole lines: copied past the caches and summed as they are read, one after the
// other. What comes kAhead bytes later is asked for, in whichever row it lies. Before that, the first line of rows that lie
// anywhere (which those written are where they are `scattered`), for the translation of its page: several at once, since the
// processor looks for some in the same time as for one, and goes on only when it has found them.
template <bool scattered, typename LaneOf>
std::uint64_t stream_summed(std::int64_t count, std::int64_t width, LaneOf lane_of) {
  Xxh3 sum(count * width);
  std::int64_t soon_row = kAhead / width, soon_at = kAhead % width, asked = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Lane now = lane_of(i);
    for (std::int64_t at = 0; at < width;) {
      const Lane soon = lane_of(std::min(soon_row, count - 1));
      if (soon_at == 0 && asked <= soon_row + kPages) {
        for (const std::int64_t end = std::min(asked + kTogether, count); asked < end; ++asked) {
          __builtin_prefetch(scattered ? lane_of(asked).to : lane_of(asked).from, 0, 2);
        }
      }
      const std::int64_t some = std::min({kChunk, width - at, width - soon_at});
      sum.add_streamed(now.to + at, now.from + at, some, soon.from + soon_at, soon.to + soon_at);
      at += some;
      soon_at += some;
      if (soon_at == width) {
        soon_at = 0;
        ++soon_row;
      }
    }
  }
  stream_fence();
  return sum.value();
}

inline bool streams_summed(const std::uint8_t* to, std::int64_t stride, std::int64_t width) {
  return width % Xxh3::kStripe == 0 && stride % kLine == 0 && to_line(to) == 0 && Xxh3::streams();
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
  if (streamed && detail::streams_summed(packed, width, width)) {  // which costs less than other ways without a sum
    detail::stream_summed<false>(count, width, [&](std::int64_t i) {
      return detail::Lane{packed + i * width, base + rows[i] * stride};
    });
    return;
  }
  detail::gather_some(packed, base, stride, width, rows, {0, count, count}, streamed);
}

inline void scatter_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows,
                         std::int64_t count, const std::uint8_t* packed) {
  if (detail::streams_summed(base, stride, width)) {
    detail::stream_summed<true>(count, width, [&](std::int64_t i) {
      return detail::Lane{base + rows[i] * stride, packed + i * width};
    });
    return;
  }
  detail::scatter_some(base, stride, width, rows, {0, count, count}, packed);
}

// The same, and XXH3 of the packed bytes, of which there are kXxh3Least at least: in one pass, or, where that cannot be, some
// bytes at a time, while what the copy has read or written is in the caches.
inline std::uint64_t gather_summed_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride,
                                        std::int64_t width, const std::int64_t* rows, std::int64_t count, bool streamed) {
  if (streamed && detail::streams_summed(packed, width, width)) {
    return detail::stream_summed<false>(count, width, [&](std::int64_t i) {
      return detail::Lane{packed + i * width, base + rows[i] * stride};
    });
  }
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
  if (detail::streams_summed(base, stride, width)) {
    return detail::stream_summed<true>(count, width, [&](std::int64_t i) {
      return detail::Lane{base + rows[i] * stride, packed + i * width};
    });
  }
  const bool by_rows = width % Xxh3::kStripe == 0;
  return detail::copy_summed(
      count, width, [&](detail::Rows some) { detail::scatter_some(base, stride, width, rows, some, packed); },
      [&](Xxh3& sum, std::int64_t i, std::int64_t end) {
        if (by_rows) sum.add(packed + i * width, (end - i) * width);
        if (!by_rows && end == count) sum.add(packed, count * width);
      });
}

}  // namespace kvcached
