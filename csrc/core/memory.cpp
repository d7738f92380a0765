#include "memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightsync {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPrefetchBytes = 512;
constexpr std::size_t kLargeCopy = std::size_t{4} << 20;

#if defined(__x86_64__)
// Whole lines; `dst` starts at one.
__attribute__((target("avx2"))) void stream_lines(std::byte* dst, const std::byte* src, std::size_t size) {
  for (std::size_t at = 0; at < size; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(src + at + kPrefetchBytes), _MM_HINT_T0);
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at));
    const __m256i top = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at + kLine / 2));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + at + kLine / 2), top);
  }
}
#endif

}  // namespace

void stream_copy(std::byte* dst, const std::byte* src, std::size_t size) {
#if defined(__x86_64__)
  if (kernels().is_avx2 && size >= kPage) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine;
    const std::size_t lines = (size - head) / kLine * kLine;
    std::memcpy(dst, src, head);
    stream_lines(dst + head, src + head, lines);
    std::memcpy(dst + head + lines, src + head + lines, size - head - lines);
    return;
  }
#endif
  std::memcpy(dst, src, size);
}

void memory_copy(std::byte* dst, const std::byte* src, std::size_t size, unsigned threads) {
  if (size < kLargeCopy) {
    if (size > 0) std::memcpy(dst, src, size);  // an empty range may be at null
    return;
  }
  const std::size_t part = ((size + threads - 1) / threads + kPage - 1) / kPage * kPage;  // no byte is left over
  run_threads(threads, [&](unsigned number) {
    const std::size_t first = std::min(size, number * part);
    stream_copy(dst + first, src + first, std::min(part, size - first));
    fence_streams();
  });
}

}  // namespace weightsync
