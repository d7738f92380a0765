// Tables of moves for the tests, and what they must do, one element at a time.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "move.h"

namespace weightsync::testing {

using Row = std::array<std::int64_t, kColumns>;
using Bytes = std::vector<std::byte>;

Row make_row(Type src, Type dst, std::int64_t index, std::int64_t offset, const std::vector<Axis>& axes);
// A row-major run of elements.
Row make_run(Type src, Type dst, std::int64_t count, std::int64_t offset);
std::vector<std::int64_t> flatten(const std::vector<Row>& rows);
Bytes random_bytes(std::mt19937_64& random, std::size_t size);

// Does one row without any of the core's loops; returns the digest.
std::uint64_t expect_move(const Row& row, const std::byte* src, std::byte* dst);

}  // namespace weightsync::testing
