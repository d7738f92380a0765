// The factors of the digest.
//
// D = sum over the elements e of a logical tensor of bits(e) * A(seed, i >> 12) * B[i & 4095] mod 2^64, where i is the
// row-major number of e in the tensor and bits(e) are its bits, extended by zeros. All factors are odd, and those in
// one block of 4096 elements are distinct: a flipped bit always changes D, and so does the exchange of two different
// elements of at most 32 bits in one block. Additive over any partition of the tensor; not cryptographic.
#pragma once

#include <array>
#include <cstdint>

#include "portable.h"

namespace weightsync {

constexpr int kBlockBits = 12;
constexpr std::int64_t kBlock = std::int64_t{1} << kBlockBits;  // elements that share one factor A

// murmur3's finaliser, made odd.
WS_HD constexpr std::uint32_t factor_b(std::uint32_t k) {
  std::uint32_t h = k + 0x9E3779B9u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h | 1u;
}

// splitmix64's finaliser, keyed by the tensor, made odd.
WS_HD constexpr std::uint64_t factor_a(std::uint64_t seed, std::uint64_t block) {
  std::uint64_t z = seed + (block + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) | 1u;
}

struct alignas(64) BlockFactors {
  std::array<std::uint32_t, kBlock> b;
};

constexpr BlockFactors make_block_factors() {
  BlockFactors factors{};
  for (std::uint32_t k = 0; k < kBlock; ++k) factors.b[k] = factor_b(k);
  return factors;
}

inline constexpr BlockFactors kBlockFactors = make_block_factors();

}  // namespace weightsync
