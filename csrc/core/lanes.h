// One element of each kind that the kernels know, and loops over single elements for heads and tails.
#pragma once

#include <cstdint>
#include <cstring>

#include "cast.h"
#include "digest.h"
#include "kernels.h"

namespace weightsync {

// Copies an element as it is; its bits are an unsigned integer.
template <class BitsT>
struct RawLane {
  using Src = BitsT;
  using Dst = BitsT;
  static Dst convert(Src bits) { return bits; }
};

struct F32ToBF16Lane {
  using Src = std::uint32_t;
  using Dst = std::uint16_t;
  static Dst convert(Src bits) { return cast_bits<F32, BF16>(bits); }
};

template <class Lane>
inline constexpr std::size_t kWords = static_cast<std::size_t>(words_of(sizeof(typename Lane::Dst)));

// Elements [first, last) of one run. Addresses need no alignment.
template <class Lane, bool kStore>
inline std::uint64_t run_elements(const std::byte* src, std::byte* dst, std::size_t first, std::size_t last,
                                  const std::int16_t* f) {
  std::uint32_t low = 0, high = 0;
  for (std::size_t i = first; i < last; ++i) {
    typename Lane::Src bits;
    std::memcpy(&bits, src + i * sizeof bits, sizeof bits);
    const typename Lane::Dst out = Lane::convert(bits);
    if constexpr (kStore) std::memcpy(dst + i * sizeof out, &out, sizeof out);
    for (std::size_t w = 0; w < kWords<Lane>; ++w) {
      const std::uint32_t word = word_value(out, static_cast<std::int64_t>(w));
      low += word * static_cast<std::uint32_t>(f[i * kWords<Lane> + w]);
      high += word * static_cast<std::uint32_t>(f[kBlock + i * kWords<Lane> + w]);
    }
  }
  return join(low, high);
}

}  // namespace weightsync
