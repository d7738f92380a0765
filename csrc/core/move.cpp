#include "move.h"

#include <stdexcept>

namespace weightsync {
namespace {

constexpr std::int64_t kMax = std::int64_t{1} << 61;

[[noreturn]] void refuse(std::size_t row, const std::string& what) {
  throw std::invalid_argument("row " + std::to_string(row) + ": " + what);
}

bool is_type(std::int64_t code) { return (code >= 1 && code <= 4) || (code >= 16 && code <= 19); }
bool is_float(std::int64_t code) { return code >= 16 && code <= 19; }

// a + b * c, or refused: `reach` sums are never above kMax.
std::int64_t grow(std::size_t row, std::int64_t sum, std::int64_t factor, std::int64_t count) {
  std::int64_t product = 0;
  if (factor == INT64_MIN || __builtin_mul_overflow(factor < 0 ? -factor : factor, count, &product) ||
      product > kMax || sum + product > kMax) {
    refuse(row, "shape with these strides is too large");
  }
  return sum + product;
}

bool is_dense(const Move& move, std::int64_t Axis::*stride, std::int64_t step) {
  for (int d = move.ndim - 1; d >= 0; --d) {
    const Axis& axis = move.axes[static_cast<std::size_t>(d)];
    if (axis.count != 1 && axis.*stride != step) return false;
    step *= axis.count;
  }
  return true;
}

Move parse(std::size_t row, const std::int64_t* values) {
  const std::int64_t src_type = values[0], dst_type = values[1], ndim = values[5];
  if (!is_type(src_type) || !(src_type == dst_type || (is_float(src_type) && is_float(dst_type)))) {
    refuse(row, "can't move type " + std::to_string(src_type) + " to type " + std::to_string(dst_type));
  }
  if (ndim < 0 || ndim > kMaxAxes) refuse(row, "expected 0 to 8 dimensions, got " + std::to_string(ndim));
  if (values[3] < 0 || values[3] > kMax) refuse(row, "index " + std::to_string(values[3]) + " is out of range");
  if (values[4] < 0 || values[4] > kMax) refuse(row, "offset " + std::to_string(values[4]) + " is out of range");

  Move move{};
  move.src_type = static_cast<Type>(src_type);
  move.dst_type = static_cast<Type>(dst_type);
  move.ndim = static_cast<std::uint8_t>(ndim);
  move.seed = static_cast<std::uint64_t>(values[2]);
  move.index = values[3];
  move.offset = values[4];
  move.elements = 1;
  std::int64_t src_reach = 0, dst_reach = 0, index_reach = 0, index_below = 0, volume = 1;
  for (std::int64_t d = 0; d < ndim; ++d) {
    const Axis axis{values[6 + d], values[14 + d], values[22 + d], values[30 + d]};
    if (axis.count < 0) refuse(row, "negative shape " + std::to_string(axis.count));
    move.axes[static_cast<std::size_t>(d)] = axis;
    move.elements *= axis.count;  // can't overflow: at most `volume`
    if (axis.count == 0) continue;
    if (__builtin_mul_overflow(volume, axis.count, &volume) || volume > kMax / 8) refuse(row, "shape is too large");
    src_reach = grow(row, src_reach, axis.src, axis.count - 1);
    dst_reach = grow(row, dst_reach, axis.dst, axis.count - 1);
    index_reach = grow(row, index_reach, axis.index, axis.count - 1);
    if (axis.index < 0) index_below -= axis.index * (axis.count - 1);
  }
  if (move.elements > 0 && move.index < index_below) refuse(row, "index strides reach below index 0");
  move.is_src_dense = is_dense(move, &Axis::src, item_bytes(move.src_type));
  move.is_dst_dense = is_dense(move, &Axis::dst, item_bytes(move.dst_type));
  return move;
}

}  // namespace

std::vector<Move> parse_moves(Span<const std::int64_t> table) {
  std::vector<Move> moves;
  moves.reserve(table.size() / kColumns);
  for (std::size_t row = 0; row * kColumns < table.size(); ++row) {
    moves.push_back(parse(row, table.data() + row * kColumns));
  }
  return moves;
}

}  // namespace weightsync
