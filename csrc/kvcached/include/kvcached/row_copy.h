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

constexpr std::int64_t kStreamed = 2048;  // shorter copies are not worth past-the-caches stores

inline void copy_run(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes, bool streamed) {
  if (streamed && bytes >= kStreamed) {
    stream_copy(to, from, static_cast<std::size_t>(bytes));
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

// Calls copy(first row, how many rows follow each other in memory, their place in the packed bytes).
template <typename Copy>
void each_run(const std::int64_t* rows, std::int64_t count, bool dense, Copy copy) {
  for (std::int64_t i = 0; i < count;) {
    std::int64_t run = 1;
    while (dense && i + run < count && rows[i + run] == rows[i] + run) ++run;
    copy(rows[i], run, i);
    i += run;
  }
}

}  // namespace detail

// `streamed`: past the caches, for packed bytes that this core does not read next.
inline void gather_rows(std::uint8_t* packed, const std::uint8_t* base, std::int64_t stride, std::int64_t width,
                        const std::int64_t* rows, std::int64_t count, bool streamed) {
  detail::each_run(rows, count, stride == width, [&](std::int64_t row, std::int64_t run, std::int64_t at) {
    detail::copy_run(packed + at * width, base + row * stride, run * width, streamed);
  });
}

inline void scatter_rows(std::uint8_t* base, std::int64_t stride, std::int64_t width, const std::int64_t* rows,
                         std::int64_t count, const std::uint8_t* packed) {
  detail::each_run(rows, count, stride == width, [&](std::int64_t row, std::int64_t run, std::int64_t at) {
    detail::copy_run(base + row * stride, packed + at * width, run * width, true);
  });
}

}  // namespace kvcached
