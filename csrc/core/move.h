// One row of a move table: a box of one tensor, from where, to where. `weightsync/_native/layout.py` has the columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "span.h"

namespace weightsync {

constexpr std::size_t kColumns = 38;
constexpr std::int64_t kMaxAxes = 8;

enum class Type : std::uint8_t { kRaw8 = 1, kRaw16 = 2, kRaw32 = 3, kRaw64 = 4, kF16 = 16, kBF16, kF32, kF64 };

constexpr std::int64_t item_bytes(Type type) {
  switch (type) {
    case Type::kRaw8:
      return 1;
    case Type::kRaw16:
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kRaw32:
    case Type::kF32:
      return 4;
    default:
      return 8;
  }
}

// One dimension of a box. Strides of source and destination in bytes, of the index in elements.
struct Axis {
  std::int64_t count;
  std::int64_t src;
  std::int64_t dst;
  std::int64_t index;
};

struct Move {
  Type src_type;
  Type dst_type;
  bool is_src_dense;  // the box is one row-major run in memory
  bool is_dst_dense;
  std::uint8_t ndim;
  std::uint64_t seed;
  std::int64_t index;
  std::int64_t offset;
  std::int64_t elements;
  std::array<Axis, kMaxAxes> axes;

  std::int64_t src_bytes() const { return elements * item_bytes(src_type); }
  std::int64_t dst_bytes() const { return elements * item_bytes(dst_type); }
};

// Parses and checks `table`, rows of kColumns values. Throws std::invalid_argument that names the first bad row.
std::vector<Move> parse_moves(Span<const std::int64_t> table);

}  // namespace weightsync
