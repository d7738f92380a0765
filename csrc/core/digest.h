// The factors of the digest.
//
// A tensor's elements, in row-major order, are a sequence of 16-bit words: an element of s bytes is max(1, s / 2) words,
// low word first, each read as a signed number (an element of one byte is one word, extended by zeros). A digest is two
// independent sums mod 2^32, D[h] = sum over the words w of w * A[h](seed, j >> 12) * F[h][j & 4095], where j is the
// number of w in the whole tensor; D[0] is the low half of the 64 bits. All factors are odd, those of F distinct: a
// flipped bit always changes both halves, and so does the exchange of two different words in one block of 4096. Additive
// over any partition of the tensor; not cryptographic. Sixteen bits, since one instruction then multiplies and adds
// sixteen words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "portable.h"

namespace weightsync {

constexpr int kBlockBits = 12;
constexpr std::int64_t kBlock = std::int64_t{1} << kBlockBits;  // words that share the factors A

// Words of one element.
WS_HD constexpr std::int64_t words_of(std::int64_t item_bytes) { return item_bytes < 2 ? 1 : item_bytes / 2; }

// F: a permutation of 15 bits (so that no two places have one factor), made odd, read as signed.
WS_HD constexpr std::int16_t factor_f(int half, std::uint32_t place) {
  std::uint32_t x = (place + (half == 0 ? 0x1B3Du : 0x4E6Fu)) & 0x7FFFu;
  x ^= x >> 7;
  x = (x * (half == 0 ? 0x2D35u : 0x6A4Bu)) & 0x7FFFu;
  x ^= x >> 6;
  x = (x * (half == 0 ? 0x5E6Du : 0x3C97u)) & 0x7FFFu;
  x ^= x >> 8;
  return static_cast<std::int16_t>(2 * x + 1);
}

// A: splitmix64's finaliser, keyed by the tensor; the two halves of the result, both made odd.
WS_HD constexpr std::uint64_t factor_a(std::uint64_t seed, std::uint64_t block) {
  std::uint64_t z = seed + (block + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) | 0x0000000100000001u;
}

// Halves add and multiply each for itself.
WS_HD constexpr std::uint64_t join(std::uint32_t low, std::uint32_t high) {
  return (static_cast<std::uint64_t>(high) << 32) | low;
}
WS_HD constexpr std::uint64_t add_halves(std::uint64_t x, std::uint64_t y) {
  return join(static_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(y),
              static_cast<std::uint32_t>(x >> 32) + static_cast<std::uint32_t>(y >> 32));
}
WS_HD constexpr std::uint64_t multiply_halves(std::uint64_t x, std::uint64_t y) {
  return join(static_cast<std::uint32_t>(x) * static_cast<std::uint32_t>(y),
              static_cast<std::uint32_t>(x >> 32) * static_cast<std::uint32_t>(y >> 32));
}

// The signed value of word `number` of an element's bits.
WS_HD constexpr std::uint32_t word_value(std::uint64_t bits, std::int64_t number) {
  return static_cast<std::uint32_t>(static_cast<std::int16_t>(bits >> (16 * number)));
}

struct alignas(64) BlockFactors {
  std::int16_t f[2][kBlock];
};

constexpr BlockFactors make_block_factors() {
  BlockFactors factors{};
  for (int half = 0; half < 2; ++half) {
    for (std::uint32_t k = 0; k < kBlock; ++k) factors.f[half][k] = factor_f(half, k);
  }
  return factors;
}

inline constexpr BlockFactors kBlockFactors = make_block_factors();

}  // namespace weightsync
