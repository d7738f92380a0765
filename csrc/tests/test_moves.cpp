// Copies, casts and digests against one element at a time, at every alignment and stride.

#include <algorithm>
#include <stdexcept>

#include "check.h"
#include "digest.h"
#include "kernels.h"
#include "memory.h"
#include "program.h"
#include "table.h"
#include "tests.h"

namespace weightsync::testing {
namespace {

constexpr Type kTypes[] = {Type::kRaw8, Type::kRaw16, Type::kRaw32, Type::kRaw64,
                           Type::kF16,  Type::kBF16,  Type::kF32,   Type::kF64};

std::uint64_t address(const std::byte* at) { return reinterpret_cast<std::uint64_t>(at); }

// Byte strides of a random layout, perhaps permuted, padded or reversed; the bytes that it spans, and where in them its
// first element is.
struct Layout {
  std::vector<std::int64_t> strides;
  std::int64_t size;
  std::int64_t start;
};

Layout random_layout(std::mt19937_64& random, const std::vector<std::int64_t>& counts, std::int64_t item) {
  std::vector<std::size_t> order(counts.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
  Layout layout{std::vector<std::int64_t>(counts.size()), item, 0};
  std::int64_t step = item;
  for (std::size_t i = order.size(); i-- > 0;) {
    std::int64_t& stride = layout.strides[order[i]];
    const std::int64_t count = counts[order[i]];
    stride = step;
    step *= count + static_cast<std::int64_t>(random() % 4 == 0 ? random() % 3 : 0);
    layout.size += stride * (count - 1);
    if (random() % 12 == 0) {
      layout.start += stride * (count - 1);
      stride = -stride;
    }
  }
  return layout;
}

void check_random_move(std::mt19937_64& random) {
  constexpr std::int64_t kSpans[] = {1, 20000, 300, 40, 14};
  const std::size_t ndim = random() % 5;
  std::vector<std::int64_t> counts(ndim);
  for (std::int64_t& count : counts) {
    count = random() % 5 == 0 ? 1 : 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(kSpans[ndim]));
  }
  Type src_type = kTypes[random() % 8];
  Type dst_type = src_type;
  if (random() % 2 == 0) {
    src_type = kTypes[4 + random() % 4];
    dst_type = kTypes[4 + random() % 4];
  }
  const Layout from = random_layout(random, counts, item_bytes(src_type));
  const Layout to = random_layout(random, counts, item_bytes(dst_type));
  std::vector<Axis> axes(ndim);
  std::int64_t index_step = random() % 20 == 0 ? 3 : 1;
  for (std::size_t d = ndim; d-- > 0;) {
    axes[d] = {counts[d], from.strides[d], to.strides[d], index_step};
    index_step *= counts[d] + static_cast<std::int64_t>(random() % 3 == 0 ? random() % 5000 : 0);
  }
  const Row row = make_row(src_type, dst_type, static_cast<std::int64_t>(random() % 9000), 0, axes);
  const std::size_t skew = random() % 3 == 0 ? random() % 64 : 0;
  // Buffers end with the last byte, so that a sanitizer sees any read or write past it.
  const Bytes source = random_bytes(random, skew + static_cast<std::size_t>(from.size));
  Bytes expected(skew + static_cast<std::size_t>(to.size)), found(expected.size());
  const std::byte* src = source.data() + skew + from.start;
  const std::uint64_t digest = expect_move(row, src, expected.data() + skew + to.start);

  const Program program(Span<const std::int64_t>(row.data(), row.size()));
  const std::uint64_t src_at = address(src), dst_at = address(found.data() + skew + to.start);
  std::uint64_t sum = 1;
  RunOptions options;
  options.threads = 2;
  CHECK(program.run({&src_at, 1}, {&dst_at, 1}, {&sum, 1}, options) == Status::kOk);
  CHECK(sum == digest);
  CHECK(found == expected);
  sum = 1;
  CHECK(program.run({&src_at, 1}, {}, {&sum, 1}, options) == Status::kOk);
  CHECK(sum == digest);
  std::fill(found.begin(), found.end(), std::byte{0});
  CHECK(program.run({&src_at, 1}, {&dst_at, 1}, {}, options) == Status::kOk);
  CHECK(found == expected);
}

void check_kernel_sets(std::mt19937_64& random, const KernelSet& one, const KernelSet& other, std::size_t src_item,
                       std::size_t dst_item) {
  for (int turn = 0; turn < 100; ++turn) {
    const std::size_t words = std::max<std::size_t>(dst_item / 2, 1);
    const std::size_t count = random() % (1200 / words), place = random() % 1000;
    const std::size_t skew = random() % 40;
    const Bytes source = random_bytes(random, skew + count * src_item);
    const std::int16_t* f = kBlockFactors.f[0] + place;
    Bytes first(skew + count * dst_item), second(first.size()), third(first.size());
    const std::uint64_t sum = one.copy(source.data() + skew, first.data() + skew, count, f);
    CHECK(other.copy(source.data() + skew, second.data() + skew, count, f) == sum);
    CHECK(other.stream(source.data() + skew, third.data() + skew, count, f) == sum);
    fence_streams();
    CHECK(first == second && first == third);
    CHECK(one.digest(source.data() + skew, count, f) == sum && other.digest(source.data() + skew, count, f) == sum);
  }
}

}  // namespace

void test_moves_are_what_single_elements_say() {
  std::mt19937_64 random(1);
  for (int turn = 0; turn < 400; ++turn) check_random_move(random);
}

void test_all_kernels_agree() {
  std::mt19937_64 random(2);
  const KernelTable &one = portable_kernels(), &other = kernels();
  check_kernel_sets(random, one.raw8, other.raw8, 1, 1);
  check_kernel_sets(random, one.raw16, other.raw16, 2, 2);
  check_kernel_sets(random, one.raw32, other.raw32, 4, 4);
  check_kernel_sets(random, one.raw64, other.raw64, 8, 8);
  check_kernel_sets(random, one.f32_to_bf16, other.f32_to_bf16, 4, 2);
}

void test_large_tables_stream_on_several_threads() {
  std::mt19937_64 random(3);
  const std::int64_t counts[] = {3000001, 700, 12, 1, 900001};  // one move of several units, a group, another of units
  std::vector<Row> rows;
  std::vector<Bytes> sources, expected, found;
  std::vector<std::uint64_t> src, dst, digests, sums(std::size(counts));
  std::int64_t offset = 0;
  for (const std::int64_t count : counts) {
    rows.push_back(make_run(Type::kF32, Type::kBF16, count, offset));
    offset += 2 * count;
    sources.push_back(random_bytes(random, static_cast<std::size_t>(4 * count)));
    expected.emplace_back(static_cast<std::size_t>(2 * count));
    found.emplace_back(static_cast<std::size_t>(2 * count));
    digests.push_back(expect_move(rows.back(), sources.back().data(), expected.back().data()));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    src.push_back(address(sources[i].data()));
    dst.push_back(address(found[i].data()));
  }
  const std::vector<std::int64_t> table = flatten(rows);
  const Program program{Span<const std::int64_t>(table)};
  CHECK(program.units() > 8);
  std::uint64_t progress = 0;
  RunOptions options;
  options.threads = 3;
  options.progress = &progress;
  CHECK(program.run(src, dst, {sums.data(), sums.size()}, options) == Status::kOk);
  CHECK(found == expected);
  CHECK(sums == digests);
  CHECK(progress == static_cast<std::uint64_t>(offset));
}

void test_plain_copies_of_any_size_and_alignment() {
  std::mt19937_64 random(4);
  for (const std::size_t size : {0, 1, 4095, 40000, (5 << 20) + 77, 3 * (2 << 20) + 2}) {  // the last: whole parts, and 2
    for (const std::size_t skew : {0, 1, 31, 64}) {
      const Bytes source = random_bytes(random, size + skew);
      Bytes found(size + skew, std::byte{0});
      memory_copy(found.data() + skew, source.data() + skew, size, 3);
      CHECK(std::equal(source.begin() + static_cast<std::ptrdiff_t>(skew), source.end(),
                       found.begin() + static_cast<std::ptrdiff_t>(skew)));
    }
  }
}

void test_bad_rows_are_named() {
  const std::vector<std::pair<std::size_t, std::int64_t>> changes = {
      {0, 0}, {0, 5}, {0, 15}, {1, 17}, {5, -1}, {5, 9}, {6, -1}, {3, -1}, {4, -1},
      {6, INT64_MAX}, {14, INT64_MAX}, {22, INT64_MIN}, {30, -1}, {3, INT64_MAX}, {4, INT64_MAX}};
  for (const auto& [column, value] : changes) {
    std::vector<Row> rows(3, make_run(Type::kRaw32, Type::kRaw32, 10, 0));
    rows[2][column] = value;
    const std::vector<std::int64_t> table = flatten(rows);
    bool is_named = false;
    try {
      const Program program{Span<const std::int64_t>(table)};
    } catch (const std::invalid_argument& error) {
      is_named = std::string(error.what()).find("row 2") == 0;
    }
    CHECK(is_named);
  }
}

}  // namespace weightsync::testing
