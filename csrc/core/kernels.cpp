#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightsync {

const KernelSet& KernelTable::raw(std::int64_t item) const {
  return item == 1 ? raw8 : item == 2 ? raw16 : item == 4 ? raw32 : raw64;
}

const KernelSet* KernelTable::find(Type src, Type dst) const {
  if (src == dst) return &raw(item_bytes(src));
  return src == Type::kF32 && dst == Type::kBF16 ? &f32_to_bf16 : nullptr;
}

const KernelTable& kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return avx2_kernels();
#endif
  return portable_kernels();
}

void fence_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace weightsync
