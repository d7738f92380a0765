#include "gather.h"

#include <cstring>
#include <utility>

namespace weightsync {
namespace {

template <class Item>
void copy_items(Matrix<std::byte> dst, Matrix<const std::byte> src, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* from = src.data + r * src.row;
    std::byte* to = dst.data + r * dst.row;
    for (std::int64_t c = 0; c < columns; ++c) {
      Item item;
      std::memcpy(&item, from + c * src.column, sizeof item);
      std::memcpy(to + c * dst.column, &item, sizeof item);
    }
  }
}

}  // namespace

void copy_matrix(Matrix<std::byte> dst, Matrix<const std::byte> src, std::int64_t rows, std::int64_t columns,
                 std::int64_t item) {
  // Whole lines of the far side at a time: the near side is a buffer in the first-level cache.
  if (src.row == item || dst.row == item) {
    std::swap(src.row, src.column);
    std::swap(dst.row, dst.column);
    std::swap(rows, columns);
  }
  switch (item) {
    case 1:
      return copy_items<std::uint8_t>(dst, src, rows, columns);
    case 2:
      return copy_items<std::uint16_t>(dst, src, rows, columns);
    case 4:
      return copy_items<std::uint32_t>(dst, src, rows, columns);
    default:
      return copy_items<std::uint64_t>(dst, src, rows, columns);
  }
}

}  // namespace weightsync
