#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "lanes.h"

#define WS_AVX2 __attribute__((target("avx2")))
#define WS_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace weightsync {
namespace {

constexpr std::size_t kPrefetchBytes = 1024;  // ahead of each read stream

using Vector = __m256i;

WS_AVX2_INLINE Vector load(const void* p) { return _mm256_loadu_si256(static_cast<const Vector*>(p)); }
WS_AVX2_INLINE Vector high(Vector v) { return _mm256_srli_epi64(v, 32); }

// sum += the products of eight 32-bit elements and their factors.
WS_AVX2_INLINE void multiply_add(Vector& sum, Vector bits, Vector b, Vector b_high) {
  sum = _mm256_add_epi64(sum, _mm256_mul_epu32(bits, b));
  sum = _mm256_add_epi64(sum, _mm256_mul_epu32(high(bits), b_high));
}

// A group is what fills a vector at the destination. `low` and `top` are accumulators; `top` counts 2^32 times.
struct Accumulators {
  Vector low, top;
};

struct Raw8 : RawLane<std::uint8_t> {
  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::uint32_t* b, Accumulators& sums) {
    const Vector bits = load(src);
    const __m128i halves[2] = {_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)};
    for (int i = 0; i < 4; ++i) {
      const __m128i half = halves[i / 2];
      const Vector wide = _mm256_cvtepu8_epi32(i % 2 == 0 ? half : _mm_srli_si128(half, 8));
      const Vector factors = load(b + 8 * i);
      multiply_add(i % 2 == 0 ? sums.low : sums.top, wide, factors, high(factors));
    }
    return bits;
  }
};

struct Raw16 : RawLane<std::uint16_t> {
  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::uint32_t* b, Accumulators& sums) {
    const Vector bits = load(src);
    const Vector b0 = load(b), b1 = load(b + 8);
    multiply_add(sums.low, _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bits)), b0, high(b0));
    multiply_add(sums.top, _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bits, 1)), b1, high(b1));
    return bits;
  }
};

struct Raw32 : RawLane<std::uint32_t> {
  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::uint32_t* b, Accumulators& sums) {
    const Vector bits = load(src);
    const Vector factors = load(b);
    sums.low = _mm256_add_epi64(sums.low, _mm256_mul_epu32(bits, factors));
    sums.top = _mm256_add_epi64(sums.top, _mm256_mul_epu32(high(bits), high(factors)));
    return bits;
  }
};

struct Raw64 : RawLane<std::uint64_t> {
  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::uint32_t* b, Accumulators& sums) {
    const Vector bits = load(src);
    const Vector factors =
        _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    sums.low = _mm256_add_epi64(sums.low, _mm256_mul_epu32(bits, factors));
    sums.top = _mm256_add_epi64(sums.top, _mm256_mul_epu32(high(bits), factors));
    return bits;
  }
};

struct F32ToBF16 : F32ToBF16Lane {
  WS_AVX2_INLINE static Vector convert8(const std::byte* src) {
    const Vector bits = load(src);
    const Vector upper = _mm256_srli_epi32(bits, 16);
    const Vector odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const Vector bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const Vector rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const Vector quieted = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const Vector magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_blendv_epi8(rounded, quieted, _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000)));
  }

  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::uint32_t* b, Accumulators& sums) {
    const Vector first = convert8(src), second = convert8(src + 32);
    const Vector b0 = load(b), b1 = load(b + 8);
    multiply_add(sums.low, first, b0, high(b0));
    multiply_add(sums.top, second, b1, high(b1));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
  }
};

template <class Lane>
WS_AVX2_INLINE std::uint64_t reduce(const Accumulators& sums) {
  // Only the 64-bit elements have a half that counts 2^32 times.
  const Vector top = std::is_same_v<Lane, Raw64> ? _mm256_slli_epi64(sums.top, 32) : sums.top;
  const Vector sum = _mm256_add_epi64(sums.low, top);
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(half)) +
         static_cast<std::uint64_t>(_mm_extract_epi64(half, 1));
}

template <class Lane>
constexpr std::size_t kGroup = sizeof(Vector) / sizeof(typename Lane::Dst);

template <std::size_t kBytes>
WS_AVX2_INLINE void prefetch(const std::byte* at) {
  for (std::size_t line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes + line), _MM_HINT_T0);
  }
}

template <class Lane, std::size_t kCount>
WS_AVX2 void digest(const std::byte* const* src, std::size_t count, const std::uint32_t* b, std::uint64_t* sums) {
  constexpr std::size_t kItem = sizeof(typename Lane::Src), kStep = kGroup<Lane>;
  Accumulators totals[kCount];
  for (Accumulators& total : totals) total = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  std::size_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    for (std::size_t k = 0; k < kCount; ++k) {
      const std::byte* at = src[k] + i * kItem;
      prefetch<2 * kStep * kItem>(at);
      Lane::group(at, b + i, totals[k]);
      Lane::group(at + kStep * kItem, b + i + kStep, totals[k]);
    }
  }
  for (std::size_t k = 0; k < kCount; ++k) {
    sums[k] = reduce<Lane>(totals[k]) + run_elements<Lane, false>(src[k], nullptr, i, count, b);
  }
}

template <class Lane, bool kStreaming>
WS_AVX2 std::uint64_t copy(const std::byte* src, std::byte* dst, std::size_t count, const std::uint32_t* b) {
  constexpr std::size_t kItem = sizeof(typename Lane::Src), kDstItem = sizeof(typename Lane::Dst);
  constexpr std::size_t kStep = kGroup<Lane>;
  const auto store = [dst](std::size_t i, Vector bits) __attribute__((target("avx2"), always_inline)) {
    auto* to = reinterpret_cast<Vector*>(dst + i * kDstItem);
    kStreaming ? _mm256_stream_si256(to, bits) : _mm256_storeu_si256(to, bits);
  };
  Accumulators total{_mm256_setzero_si256(), _mm256_setzero_si256()};
  std::uint64_t head = 0;
  std::size_t i = 0;
  if constexpr (kStreaming) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(dst) % sizeof(Vector);
    if (past % kDstItem != 0) return copy<Lane, false>(src, dst, count, b);
    i = std::min(count, (sizeof(Vector) - past) % sizeof(Vector) / kDstItem);
    head = run_elements<Lane, true>(src, dst, 0, i, b);
  }
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const std::byte* at = src + i * kItem;
    prefetch<2 * kStep * kItem>(at);
    const Vector first = Lane::group(at, b + i, total);
    const Vector second = Lane::group(at + kStep * kItem, b + i + kStep, total);
    store(i, first);
    store(i + kStep, second);
  }
  return head + reduce<Lane>(total) + run_elements<Lane, true>(src, dst, i, count, b);
}

template <class Lane>
constexpr KernelSet make_set() {
  return {digest<Lane, 1>, digest<Lane, kStreams>, copy<Lane, false>, copy<Lane, true>};
}

constexpr KernelTable kTable{make_set<Raw8>(),  make_set<Raw16>(),     make_set<Raw32>(),
                             make_set<Raw64>(), make_set<F32ToBF16>(), true};

}  // namespace

const KernelTable& avx2_kernels() { return kTable; }

}  // namespace weightsync

#endif
