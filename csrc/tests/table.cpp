#include "table.h"

#include <algorithm>
#include <cstring>

#include "casts.h"
#include "digest.h"

namespace weightsync::testing {

Row make_row(Type src, Type dst, std::int64_t index, std::int64_t offset, const std::vector<Axis>& axes) {
  Row row{};
  row[0] = static_cast<std::int64_t>(src);
  row[1] = static_cast<std::int64_t>(dst);
  row[2] = 0x5EED + index;
  row[3] = index;
  row[4] = offset;
  row[5] = static_cast<std::int64_t>(axes.size());
  for (std::size_t d = 0; d < axes.size(); ++d) {
    row[6 + d] = axes[d].count;
    row[14 + d] = axes[d].src;
    row[22 + d] = axes[d].dst;
    row[30 + d] = axes[d].index;
  }
  return row;
}

Row make_run(Type src, Type dst, std::int64_t count, std::int64_t offset) {
  return make_row(src, dst, 0, offset, {{count, item_bytes(src), item_bytes(dst), 1}});
}

std::vector<std::int64_t> flatten(const std::vector<Row>& rows) {
  std::vector<std::int64_t> table;
  for (const Row& row : rows) table.insert(table.end(), row.begin(), row.end());
  return table;
}

Bytes random_bytes(std::mt19937_64& random, std::size_t size) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::uint64_t expect_move(const Row& row, const std::byte* src, std::byte* dst) {
  const auto src_type = static_cast<Type>(row[0]), dst_type = static_cast<Type>(row[1]);
  const std::int64_t src_item = item_bytes(src_type), dst_item = item_bytes(dst_type), words = words_of(dst_item);
  std::int64_t elements = 1;
  for (std::int64_t d = 0; d < row[5]; ++d) elements *= row[6 + static_cast<std::size_t>(d)];
  std::uint64_t digest = 0;
  for (std::int64_t e = 0; e < elements; ++e) {
    std::int64_t rest = e, src_at = 0, dst_at = 0, index = row[3];
    for (std::size_t d = static_cast<std::size_t>(row[5]); d-- > 0;) {
      const std::int64_t place = rest % row[6 + d];
      rest /= row[6 + d];
      src_at += place * row[14 + d];
      dst_at += place * row[22 + d];
      index += place * row[30 + d];
    }
    std::uint64_t bits = 0;
    if (const CastRun cast = find_cast(src_type, dst_type); cast != nullptr) {
      cast(src + src_at, reinterpret_cast<std::byte*>(&bits), 1);
    } else {
      std::memcpy(&bits, src + src_at, static_cast<std::size_t>(src_item));
    }
    if (dst != nullptr) std::memcpy(dst + dst_at, &bits, static_cast<std::size_t>(dst_item));
    for (std::int64_t w = 0; w < words; ++w) {
      const std::int64_t word = index * words + w;
      const auto place = static_cast<std::uint32_t>(word & (kBlock - 1));
      const std::uint64_t f = join(static_cast<std::uint32_t>(factor_f(0, place)),
                                   static_cast<std::uint32_t>(factor_f(1, place)));
      const std::uint32_t value = word_value(bits, w);
      const auto block = static_cast<std::uint64_t>(word >> kBlockBits);
      const std::uint64_t a = factor_a(static_cast<std::uint64_t>(row[2]), block);
      digest = add_halves(digest, multiply_halves(multiply_halves(join(value, value), f), a));
    }
  }
  return digest;
}

}  // namespace weightsync::testing
