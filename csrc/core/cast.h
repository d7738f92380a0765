// Casts between float formats on their bits, in integers only, so that every machine and both twins agree.
//
// Round to nearest, ties to even, once; too large becomes infinite; subnormals are kept. A NaN is quieted and keeps its
// sign and the top of its payload. Unlike hardware, no processor mode (flush to zero) has a say.
#pragma once

#include <cstdint>

#include "portable.h"

namespace weightsync {

template <class BitsT, int kExponentBits>
struct FloatFormat {
  using Bits = BitsT;
  static constexpr int kExponent = kExponentBits;
  static constexpr int kMantissa = static_cast<int>(8 * sizeof(BitsT)) - 1 - kExponentBits;
  static constexpr std::int32_t kTopExponent = (1 << kExponent) - 1;  // of infinities and NaNs
  static constexpr std::int32_t kBias = kTopExponent >> 1;
};

using F16 = FloatFormat<std::uint16_t, 5>;
using BF16 = FloatFormat<std::uint16_t, 8>;
using F32 = FloatFormat<std::uint32_t, 8>;
using F64 = FloatFormat<std::uint64_t, 11>;

WS_HD inline int bit_length(std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(static_cast<long long>(value));
#else
  return value == 0 ? 0 : 64 - __builtin_clzll(value);
#endif
}

template <class From, class To>
WS_HD inline typename To::Bits cast_bits(typename From::Bits bits) {
  using std::uint64_t;
  const uint64_t wide = bits;
  const uint64_t sign = (wide >> (From::kExponent + From::kMantissa)) << (To::kExponent + To::kMantissa);
  const auto exponent = static_cast<std::int32_t>((wide >> From::kMantissa) & From::kTopExponent);
  const uint64_t mantissa = wide & ((uint64_t{1} << From::kMantissa) - 1);
  const uint64_t infinite = static_cast<uint64_t>(To::kTopExponent) << To::kMantissa;
  const auto signed_bits = [sign](uint64_t magnitude) { return static_cast<typename To::Bits>(sign | magnitude); };

  if (exponent == From::kTopExponent) {
    if (mantissa == 0) return signed_bits(infinite);
    constexpr int kGap = From::kMantissa - To::kMantissa;
    const uint64_t payload = kGap >= 0 ? mantissa >> (kGap >= 0 ? kGap : 0) : mantissa << (kGap < 0 ? -kGap : 0);
    return signed_bits(infinite | (uint64_t{1} << (To::kMantissa - 1)) | payload);
  }
  const uint64_t leading = exponent > 0 ? mantissa | (uint64_t{1} << From::kMantissa) : mantissa;
  if (leading == 0) return signed_bits(0);

  // The significand with its leading one at bit 62, and the exponent that the value then has in the target.
  const int length = bit_length(leading);
  const uint64_t significand = leading << (63 - length);
  const std::int32_t scaled = (exponent > 1 ? exponent : 1) + To::kBias - From::kBias + (length - 1 - From::kMantissa);
  if (scaled >= To::kTopExponent) return signed_bits(infinite);
  const std::int32_t below = scaled < 1 ? 1 - scaled : 0;
  if (62 - To::kMantissa + below > 63) return signed_bits(0);
  const int drop = 62 - To::kMantissa + below;
  const uint64_t rest = significand & ((uint64_t{1} << drop) - 1);
  const uint64_t half = uint64_t{1} << (drop - 1);
  uint64_t kept = significand >> drop;
  kept += (rest > half || (rest == half && (kept & 1) != 0)) ? 1 : 0;
  // `kept` has its leading one at the mantissa's end unless subnormal, and carries into the exponent by itself.
  const uint64_t base = scaled > 1 ? static_cast<uint64_t>(scaled - 1) << To::kMantissa : 0;
  return signed_bits(base + kept);
}

// The cast of a training step, without branches.
template <>
WS_HD inline std::uint16_t cast_bits<F32, BF16>(std::uint32_t bits) {
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quieted = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quieted : rounded);
}

}  // namespace weightsync
