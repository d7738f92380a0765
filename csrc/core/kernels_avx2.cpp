#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#include "lanes.h"

#define WS_AVX2 __attribute__((target("avx2")))
#define WS_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace weightsync {
namespace {

constexpr std::size_t kPrefetchBytes = 512;  // ahead of the read; measured on Zen 3, more costs a tenth

using Vector = __m256i;

WS_AVX2_INLINE Vector load(const void* p) { return _mm256_loadu_si256(static_cast<const Vector*>(p)); }

// The two halves of a digest, eight sums each.
struct Accumulators {
  Vector low, high;
};

// Sixteen words and their factors.
WS_AVX2_INLINE void multiply_add(Accumulators& sums, Vector words, const std::int16_t* f) {
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(words, load(f)));
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(words, load(f + kBlock)));
}

// A group is what fills a vector at the destination.
template <class BitsT>
struct Raw : RawLane<BitsT> {
  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::int16_t* f, Accumulators& sums) {
    const Vector bits = load(src);
    if constexpr (sizeof(BitsT) == 1) {
      multiply_add(sums, _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bits)), f);
      multiply_add(sums, _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bits, 1)), f + 16);
    } else {
      multiply_add(sums, bits, f);
    }
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

  WS_AVX2_INLINE static Vector group(const std::byte* src, const std::int16_t* f, Accumulators& sums) {
    const Vector packed = _mm256_packus_epi32(convert8(src), convert8(src + 32));
    const Vector bits = _mm256_permute4x64_epi64(packed, 0xD8);
    multiply_add(sums, bits, f);
    return bits;
  }
};

WS_AVX2_INLINE std::uint32_t sum_of(Vector sums) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
}

WS_AVX2_INLINE std::uint64_t reduce(const Accumulators& sums) { return join(sum_of(sums.low), sum_of(sums.high)); }

template <class Lane>
constexpr std::size_t kGroup = sizeof(Vector) / sizeof(typename Lane::Dst);

template <std::size_t kBytes>
WS_AVX2_INLINE void prefetch(const std::byte* at) {
  for (std::size_t line = 0; line < kBytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes + line), _MM_HINT_T0);
  }
}

template <class Lane>
WS_AVX2 std::uint64_t digest(const std::byte* src, std::size_t count, const std::int16_t* f) {
  constexpr std::size_t kItem = sizeof(typename Lane::Src), kStep = kGroup<Lane>;
  Accumulators even{_mm256_setzero_si256(), _mm256_setzero_si256()}, odd = even;
  std::size_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const std::byte* at = src + i * kItem;
    prefetch<2 * kStep * kItem>(at);
    Lane::group(at, f + i * kWords<Lane>, even);
    Lane::group(at + kStep * kItem, f + (i + kStep) * kWords<Lane>, odd);
  }
  const std::uint64_t sum = add_halves(reduce(even), reduce(odd));
  return add_halves(sum, run_elements<Lane, false>(src, nullptr, i, count, f));
}

template <class Lane, bool kStreaming>
WS_AVX2 std::uint64_t copy(const std::byte* src, std::byte* dst, std::size_t count, const std::int16_t* f) {
  constexpr std::size_t kItem = sizeof(typename Lane::Src), kDstItem = sizeof(typename Lane::Dst);
  constexpr std::size_t kStep = kGroup<Lane>;
  const auto store = [dst](std::size_t i, Vector bits) __attribute__((target("avx2"), always_inline)) {
    auto* to = reinterpret_cast<Vector*>(dst + i * kDstItem);
    kStreaming ? _mm256_stream_si256(to, bits) : _mm256_storeu_si256(to, bits);
  };
  Accumulators even{_mm256_setzero_si256(), _mm256_setzero_si256()}, odd = even;
  std::uint64_t head = 0;
  std::size_t i = 0;
  if constexpr (kStreaming) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(dst) % sizeof(Vector);
    if (past % kDstItem != 0) return copy<Lane, false>(src, dst, count, f);
    i = std::min(count, (sizeof(Vector) - past) % sizeof(Vector) / kDstItem);
    head = run_elements<Lane, true>(src, dst, 0, i, f);
  }
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const std::byte* at = src + i * kItem;
    prefetch<2 * kStep * kItem>(at);
    const Vector first = Lane::group(at, f + i * kWords<Lane>, even);
    const Vector second = Lane::group(at + kStep * kItem, f + (i + kStep) * kWords<Lane>, odd);
    store(i, first);
    store(i + kStep, second);
  }
  const std::uint64_t sum = add_halves(head, add_halves(reduce(even), reduce(odd)));
  return add_halves(sum, run_elements<Lane, true>(src, dst, i, count, f));
}

template <class Lane>
constexpr KernelSet make_set() {
  return {digest<Lane>, copy<Lane, false>, copy<Lane, true>};
}

constexpr KernelTable kTable{make_set<Raw<std::uint8_t>>(),  make_set<Raw<std::uint16_t>>(),
                             make_set<Raw<std::uint32_t>>(), make_set<Raw<std::uint64_t>>(),
                             make_set<F32ToBF16>(),          true};

}  // namespace

const KernelTable& avx2_kernels() { return kTable; }

}  // namespace weightsync

#endif
