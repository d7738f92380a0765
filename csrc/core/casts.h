// Casts of runs of elements between any two float formats.
#pragma once

#include <cstddef>

#include "move.h"

namespace weightsync {

using CastRun = void (*)(const std::byte* src, std::byte* dst, std::size_t count);

// Null when both types are equal.
CastRun find_cast(Type src, Type dst);

}  // namespace weightsync
