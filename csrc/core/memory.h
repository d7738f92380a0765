// Plain copies.
#pragma once

#include <cstddef>

namespace weightsync {

// Copies with stores that bypass the caches, for ranges larger than them. Fence before others may read.
void stream_copy(std::byte* dst, const std::byte* src, std::size_t size);

// The fastest plain copy that we can write, each thread one contiguous part: the yardstick of benchmarks.
void memory_copy(std::byte* dst, const std::byte* src, std::size_t size, unsigned threads);

}  // namespace weightsync
