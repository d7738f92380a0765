// One element of each kind that the kernels know, and loops over single elements for heads and tails.
#pragma once

#include <cstdint>
#include <cstring>

#include "cast.h"
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

// Elements [first, last) of one stream. Addresses need no alignment.
template <class Lane, bool kStore>
inline std::uint64_t run_elements(const std::byte* src, std::byte* dst, std::size_t first, std::size_t last,
                                  const std::uint32_t* b) {
  std::uint64_t sum = 0;
  for (std::size_t i = first; i < last; ++i) {
    typename Lane::Src bits;
    std::memcpy(&bits, src + i * sizeof bits, sizeof bits);
    const typename Lane::Dst out = Lane::convert(bits);
    if constexpr (kStore) std::memcpy(dst + i * sizeof out, &out, sizeof out);
    sum += static_cast<std::uint64_t>(out) * b[i];
  }
  return sum;
}

}  // namespace weightsync
