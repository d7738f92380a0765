#include "lanes.h"

namespace weightsync {
namespace {

template <class Lane, std::size_t kCount>
void digest(const std::byte* const* src, std::size_t count, const std::uint32_t* b, std::uint64_t* sums) {
  for (std::size_t k = 0; k < kCount; ++k) sums[k] = run_elements<Lane, false>(src[k], nullptr, 0, count, b);
}

template <class Lane>
std::uint64_t copy(const std::byte* src, std::byte* dst, std::size_t count, const std::uint32_t* b) {
  return run_elements<Lane, true>(src, dst, 0, count, b);
}

template <class Lane>
constexpr KernelSet make_set() {
  return {digest<Lane, 1>, digest<Lane, kStreams>, copy<Lane>, copy<Lane>};
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
