// Rows of a strided matrix into and out of a small contiguous buffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weightsync {

// A matrix whose rows and columns are `row` and `column` bytes apart.
template <class Byte>
struct Matrix {
  Byte* data;
  std::int64_t row;
  std::int64_t column;
};

// Copies rows x columns elements of `item` bytes. Walks along the side that is contiguous in memory.
void copy_matrix(Matrix<std::byte> dst, Matrix<const std::byte> src, std::int64_t rows, std::int64_t columns,
                 std::int64_t item);

}  // namespace weightsync
