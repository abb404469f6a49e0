// Rows of a pool into packed bytes and back, on host memory: what moves KV touches memory here and nowhere else.
//
//   base  | row 0 | row 1 | row 2 | row 3 | ...     a row every `stride` bytes, of which `width` move
//   packed        | row 3 | row 1 | row 2 | ...     in the order of `rows`, no gaps
#pragma once

#include <cstdint>
#include <cstring>

#include "kvcached/stream_copy.h"

namespace kvcached {

namespace detail {

constexpr std::int64_t kStreamed = 512;  // shorter copies are not worth past-the-caches stores
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kTurn = 512;  // bytes that are copied between two looks ahead

// Without a fence: one for each row would wait for the stores of each row.
inline void copy_bytes(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes, bool streamed) {
  if (streamed && bytes >= kStreamed) {
    stream_bytes(to, from, static_cast<std::size_t>(bytes));
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

// Asks for a line in every `step` bytes. The processor follows a row by itself until its page ends; where a row in no
// order begins only we know, and without asking the copy waits there for memory and for the page's translation.
inline void ask_for(const std::uint8_t* from, std::int64_t bytes, std::int64_t step) {
  for (std::int64_t at = 0; at < bytes; at += step) __builtin_prefetch(from + at, 0, 2);
}

// Calls copy(first row, how many rows follow each other in memory, their place in the packed bytes, the row that is
// next, or -1).
template <typename Copy>
void each_run(const std::int64_t* rows, std::int64_t count, bool dense, Copy copy) {
  for (std::int64_t i = 0; i < count;) {
    std::int64_t run = 1;
    while (dense && i + run < count && rows[i + run] == rows[i] + run) ++run;
    copy(rows[i], run, i, i + run < count ? rows[i + run] : -1);
    i += run;
  }
}

}  // namespace detail

// `streamed`: past the caches, for packed bytes that this core does not read next.
inline void gather_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride, std::int64_t width,
                        const std::int64_t* rows, std::int64_t count, bool streamed) {
  using namespace detail;
  each_run(rows, count, stride == width, [&](std::int64_t row, std::int64_t run, std::int64_t at, std::int64_t next) {
    std::uint8_t* to = packed + at * width;
    const std::uint8_t* from = base + row * stride;
    std::int64_t done = 0;
    // In turns: all of the next row asked for at once is more than a core keeps in flight.
    for (; next >= 0 && done + kTurn <= width; done += kTurn) {
      ask_for(base + next * stride + done, kTurn, kLine);
      copy_bytes(to + done, from + done, kTurn, streamed);
    }
    copy_bytes(to + done, from + done, run * width - done, streamed);
  });
  if (streamed) stream_fence();
}

// Whole lines are written without being read, so that of the next row only its pages' translations are asked for.
inline void scatter_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows,
                         std::int64_t count, const std::uint8_t* packed) {
  using namespace detail;
  each_run(rows, count, stride == width, [&](std::int64_t row, std::int64_t run, std::int64_t at, std::int64_t next) {
    if (next >= 0) ask_for(base + next * stride, width, kPage);
    copy_bytes(base + row * stride, packed + at * width, run * width, true);
  });
  stream_fence();
}

}  // namespace kvcached
