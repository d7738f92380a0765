// The inner loops: copy and digest of elements that are contiguous on both sides and lie in one block of the digest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "move.h"

namespace weightsync {

// A copy walks one run at a time: with several, loads run into stores whose addresses agree modulo 4096 (as they do in
// aligned segments), and wait for them. Measured on Zen 3: four at once take 2 to 8 times as long.

// The digest, without the factors A, of `count` elements that it copies. f: the factors F[0] of their words, with F[1] a
// block behind. Addresses need no alignment.
using CopyKernel = std::uint64_t (*)(const std::byte* src, std::byte* dst, std::size_t count, const std::int16_t* f);

// The same without copying.
using DigestKernel = std::uint64_t (*)(const std::byte* src, std::size_t count, const std::int16_t* f);

struct KernelSet {
  DigestKernel digest;
  CopyKernel copy;
  CopyKernel stream;  // with stores that bypass the caches: fence before others may read
};

struct KernelTable {
  KernelSet raw8, raw16, raw32, raw64, f32_to_bf16;
  bool is_avx2;

  // Kernels for elements of this pair; null when it takes a cast first.
  const KernelSet* find(Type src, Type dst) const;
  const KernelSet& raw(std::int64_t item) const;
};

// Those for this CPU.
const KernelTable& kernels();

const KernelTable& portable_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
#endif

// Makes streaming stores visible before any later store.
void fence_streams();

}  // namespace weightsync
