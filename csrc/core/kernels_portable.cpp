#include "lanes.h"

namespace weightsync {
namespace {

template <class Lane>
std::uint64_t digest(const std::byte* src, std::size_t count, const std::int16_t* f) {
  return run_elements<Lane, false>(src, nullptr, 0, count, f);
}

template <class Lane>
std::uint64_t copy(const std::byte* src, std::byte* dst, std::size_t count, const std::int16_t* f) {
  return run_elements<Lane, true>(src, dst, 0, count, f);
}

template <class Lane>
constexpr KernelSet make_set() {
  return {digest<Lane>, copy<Lane>, copy<Lane>};
}

constexpr KernelTable kTable{make_set<RawLane<std::uint8_t>>(),
                             make_set<RawLane<std::uint16_t>>(),
                             make_set<RawLane<std::uint32_t>>(),
                             make_set<RawLane<std::uint64_t>>(),
                             make_set<F32ToBF16Lane>(),
                             false};

}  // namespace

const KernelTable& portable_kernels() { return kTable; }

}  // namespace weightsync
