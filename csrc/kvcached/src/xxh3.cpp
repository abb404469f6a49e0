#include "kvcached/xxh3.h"

#include <algorithm>
#include <cstring>

#include "kvcached/stream_copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcached {
namespace {

constexpr std::int64_t kStripe = Xxh3::kStripe;
constexpr std::int64_t kBlockStripes = 16;
constexpr std::int64_t kPage = 4096;
constexpr std::uint64_t k32a = 0x9e3779b1, k32b = 0x85ebca77, k32c = 0xc2b2ae3d;
constexpr std::uint64_t k64a = 0x9e3779b185ebca87, k64b = 0xc2b2ae3d27d4eb4f, k64c = 0x165667b19e3779f9;
constexpr std::uint64_t k64d = 0x85ebca77c2b2ae63, k64e = 0x27d4eb2f165667c5, kAvalanche = 0x165667919e3779f9;

constexpr std::uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr const std::uint8_t* kScramble = kSecret + sizeof(kSecret) - kStripe;
constexpr const std::uint8_t* kLastSecret = kScramble - 7;

std::uint64_t word(const std::uint8_t* at) {
  std::uint64_t read;
  std::memcpy(&read, at, sizeof(read));
  return read;
}

// Sums up `stripes`, the first of which is the `first`-th of its block: each with the secret 8 bytes further on, and at
// the end of each block the sums are scrambled.
void sum_by_words(std::uint64_t* sums, const std::uint8_t* at, std::int64_t stripes, std::int64_t first, std::uint8_t*,
                  const std::uint8_t*) {
  for (std::int64_t n = 0; n < stripes; ++n, at += kStripe) {
    const std::uint8_t* const secret = kSecret + 8 * first;
    for (int i = 0; i < 8; ++i) {
      const std::uint64_t data = word(at + 8 * i), mixed = data ^ word(secret + 8 * i);
      sums[i ^ 1] += data;
      sums[i] += (mixed & 0xffffffff) * (mixed >> 32);
    }
    if (++first < kBlockStripes) continue;
    for (int i = 0; i < 8; ++i) sums[i] = (sums[i] ^ (sums[i] >> 47) ^ word(kScramble + 8 * i)) * k32a;
    first = 0;
  }
}

#if defined(__x86_64__)
// `to`, where it is copied on the way: whole lines. `soon`: asked for, a line for each.
template <bool streamed>
__attribute__((target("avx512f"))) void sum_by_512(std::uint64_t* sums, const std::uint8_t* at, std::int64_t stripes,
                                                   std::int64_t first, std::uint8_t* to, const std::uint8_t* soon) {
  const __m512i prime = _mm512_set1_epi64(k32a);
  __m512i sum = _mm512_load_si512(sums);
  for (std::int64_t n = 0; n < stripes; ++n, at += kStripe) {
    const __m512i data = _mm512_loadu_si512(at), mixed = _mm512_xor_si512(data, _mm512_loadu_si512(kSecret + 8 * first));
    if (streamed) {
      _mm_prefetch(reinterpret_cast<const char*>(soon + n * kStripe), _MM_HINT_T0);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + n * kStripe), data);
    }
    const __m512i swapped = _mm512_shuffle_epi32(data, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2)));
    const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(swapped, product));
    if (++first < kBlockStripes) continue;
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), _mm512_loadu_si512(kScramble));
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
    sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
    first = 0;
  }
  _mm512_store_si512(sums, sum);
}

__attribute__((target("avx2"))) inline __m256i load(const std::uint8_t* from, int half) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
}

template <bool streamed>
__attribute__((target("avx2"))) void sum_by_256(std::uint64_t* sums, const std::uint8_t* at, std::int64_t stripes,
                                                std::int64_t first, std::uint8_t* to, const std::uint8_t* soon) {
  const __m256i prime = _mm256_set1_epi64x(k32a);
  __m256i* const kept = reinterpret_cast<__m256i*>(sums);
  __m256i sum[2] = {_mm256_load_si256(kept), _mm256_load_si256(kept + 1)};
  for (std::int64_t n = 0; n < stripes; ++n, at += kStripe) {
    if (streamed) _mm_prefetch(reinterpret_cast<const char*>(soon + n * kStripe), _MM_HINT_T0);
    for (int half = 0; half < 2; ++half) {
      const __m256i data = load(at, half), mixed = _mm256_xor_si256(data, load(kSecret + 8 * first, half));
      if (streamed) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + n * kStripe) + half, data);
      const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
      sum[half] = _mm256_add_epi64(sum[half], _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)));
      sum[half] = _mm256_add_epi64(sum[half], product);
    }
    if (++first < kBlockStripes) continue;
    for (int half = 0; half < 2; ++half) {
      const __m256i mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
      sum[half] = _mm256_xor_si256(mixed, load(kScramble, half));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum[half], 32), prime);
      sum[half] = _mm256_add_epi64(_mm256_mul_epu32(sum[half], prime), _mm256_slli_epi64(high, 32));
    }
    first = 0;
  }
  for (int half = 0; half < 2; ++half) _mm256_store_si256(kept + half, sum[half]);
}
#endif

using SumStripes = void (*)(std::uint64_t*, const std::uint8_t*, std::int64_t, std::int64_t, std::uint8_t*,
                            const std::uint8_t*);

struct Ways {
  SumStripes sum, stream;  // no `stream`: not on this processor
};

const Ways& widest() {
#if defined(__x86_64__)
  static const Ways found = __builtin_cpu_supports("avx512f") ? Ways{sum_by_512<false>, sum_by_512<true>}
                            : __builtin_cpu_supports("avx2")  ? Ways{sum_by_256<false>, sum_by_256<true>}
                                                              : Ways{sum_by_words, nullptr};
#else
  static const Ways found{sum_by_words, nullptr};
#endif
  return found;
}

std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

Xxh3::Xxh3(std::int64_t bytes) : sums_{k32c, k64a, k64b, k64c, k64d, k32b, k64e, k32a}, bytes_(bytes) {}

// The last stripe of all ends with the last byte and is summed by value(), whole, as the one before it may be.
std::int64_t Xxh3::come(const std::uint8_t* at, std::int64_t bytes) {
  const std::int64_t end = std::min(come_ + bytes, (bytes_ - 1) / kStripe * kStripe);
  const std::int64_t tail = std::min(bytes, kStripe);
  if (tail < kStripe) std::memmove(last_, last_ + tail, static_cast<std::size_t>(kStripe - tail));
  std::memcpy(last_ + kStripe - tail, at + bytes - tail, static_cast<std::size_t>(tail));
  return std::max<std::int64_t>(0, (end - come_) / kStripe);
}

void Xxh3::add(const std::uint8_t* at, std::int64_t bytes) {
  const std::int64_t stripes = come(at, bytes);
  if (stripes > 0) widest().sum(sums_, at, stripes, come_ / kStripe % kBlockStripes, nullptr, nullptr);
  come_ += bytes;
}

bool Xxh3::streams() { return widest().stream != nullptr; }

void Xxh3::add_streamed(std::uint8_t* to, const std::uint8_t* at, std::int64_t bytes, const std::uint8_t* soon,
                        const std::uint8_t* soon_to) {
  for (std::int64_t page = 0; page < bytes; page += kPage) __builtin_prefetch(soon_to + page, 0, 2);
  const std::int64_t stripes = come(at, bytes);
  if (stripes > 0) widest().stream(sums_, at, stripes, come_ / kStripe % kBlockStripes, to, soon);
  const std::int64_t done = stripes * kStripe;
  if (done < bytes) stream_bytes(to + done, at + done, static_cast<std::size_t>(bytes - done));
  come_ += bytes;
}

std::uint64_t Xxh3::value() const {
  std::uint64_t sums[8];
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t data = word(last_ + 8 * (i ^ 1)), mixed = word(last_ + 8 * i) ^ word(kLastSecret + 8 * i);
    sums[i] = sums_[i] + data + (mixed & 0xffffffff) * (mixed >> 32);
  }
  std::uint64_t all = static_cast<std::uint64_t>(bytes_) * k64a;
  for (int i = 0; i < 8; i += 2) {
    all += folded(sums[i] ^ word(kSecret + 11 + 8 * i), sums[i + 1] ^ word(kSecret + 19 + 8 * i));
  }
  all = (all ^ (all >> 37)) * kAvalanche;
  return all ^ (all >> 32);
}

}  // namespace kvcached
