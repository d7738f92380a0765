#include "casts.h"

#include <cstring>

#include "cast.h"

namespace weightsync {
namespace {

template <class From, class To>
void cast_run(const std::byte* src, std::byte* dst, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    typename From::Bits bits;
    std::memcpy(&bits, src + i * sizeof bits, sizeof bits);
    const typename To::Bits out = cast_bits<From, To>(bits);
    std::memcpy(dst + i * sizeof out, &out, sizeof out);
  }
}

template <class From>
CastRun find_from(Type dst) {
  switch (dst) {
    case Type::kF16:
      return cast_run<From, F16>;
    case Type::kBF16:
      return cast_run<From, BF16>;
    case Type::kF32:
      return cast_run<From, F32>;
    default:
      return cast_run<From, F64>;
  }
}

}  // namespace

CastRun find_cast(Type src, Type dst) {
  if (src == dst) return nullptr;
  switch (src) {
    case Type::kF16:
      return find_from<F16>(dst);
    case Type::kBF16:
      return find_from<BF16>(dst);
    case Type::kF32:
      return find_from<F32>(dst);
    default:
      return find_from<F64>(dst);
  }
}

}  // namespace weightsync
