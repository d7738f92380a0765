// A run that follows another, and whoever watches its own watermark.

#include <algorithm>
#include <cstring>
#include <thread>

#include "check.h"
#include "program.h"
#include "table.h"
#include "tests.h"

namespace weightsync::testing {
namespace {

constexpr std::int64_t kElements = 1 << 21;
constexpr std::size_t kBytes = 2 * kElements;

// A slot that one side fills and the other reads.
struct Slot {
  Status read(RunOptions options) {
    const std::uint64_t src = reinterpret_cast<std::uint64_t>(bytes.data());
    const std::uint64_t dst = reinterpret_cast<std::uint64_t>(copy.data());
    options.follow = &head;
    options.generation = 7;
    options.threads = 2;
    return program.run({&src, 1}, {&dst, 1}, {&digest, 1}, options);
  }

  const Row row = make_run(Type::kRaw16, Type::kRaw16, kElements, 0);
  const Program program{Span<const std::int64_t>(row.data(), row.size())};
  Bytes bytes = Bytes(kBytes), copy = Bytes(kBytes);
  std::uint64_t digest = 0;
  Head head{7, 0};
};

}  // namespace

void test_a_reader_follows_a_writer() {
  std::mt19937_64 random(5);
  const Bytes source = random_bytes(random, kBytes);
  Slot slot;
  std::thread writer([&] {
    const std::uint64_t src = reinterpret_cast<std::uint64_t>(source.data());
    const std::uint64_t dst = reinterpret_cast<std::uint64_t>(slot.bytes.data());
    RunOptions options;
    options.progress = &slot.head.watermark;
    CHECK(slot.program.run({&src, 1}, {&dst, 1}, {}, options) == Status::kOk);
  });
  std::uint64_t last = 0;
  std::thread watcher([&] {
    while (last < kBytes) {
      const std::uint64_t mark = __atomic_load_n(&slot.head.watermark, __ATOMIC_ACQUIRE);
      CHECK(mark >= last && mark <= kBytes);
      CHECK(std::equal(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(mark), slot.bytes.begin()));
      last = mark;
    }
  });
  CHECK(slot.read({}) == Status::kOk);
  writer.join();
  watcher.join();
  CHECK(slot.copy == source);
  CHECK(slot.digest == expect_move(slot.row, source.data(), nullptr));
}

void test_a_watermark_that_stands_still_is_a_timeout() {
  Slot slot;
  slot.head.watermark = 4096;
  RunOptions options;
  options.timeout_s = 0.02;
  CHECK(slot.read(options) == Status::kTimeout);
}

void test_a_reader_is_cancelled_or_evicted_while_it_waits() {
  for (const bool is_cancel : {true, false}) {
    Slot slot;
    std::uint32_t cancel = 0;
    RunOptions options;
    options.cancel = &cancel;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (is_cancel) {
        __atomic_store_n(&cancel, 1, __ATOMIC_RELEASE);
      } else {
        __atomic_store_n(&slot.head.generation, 8, __ATOMIC_RELEASE);
      }
    });
    CHECK(slot.read(options) == (is_cancel ? Status::kCancelled : Status::kEvicted));
    other.join();
  }
}

void test_a_reader_waits_until_the_slot_is_opened() {
  Slot slot;
  slot.head = {6, kBytes};
  RunOptions options;
  options.timeout_s = 0.02;
  CHECK(slot.read(options) == Status::kTimeout);
  std::mt19937_64 random(6);
  const Bytes source = random_bytes(random, kBytes);
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    __atomic_store_n(&slot.head.watermark, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&slot.head.generation, 7, __ATOMIC_RELEASE);
    std::copy(source.begin(), source.end(), slot.bytes.begin());
    __atomic_store_n(&slot.head.watermark, kBytes, __ATOMIC_RELEASE);
  });
  CHECK(slot.read({}) == Status::kOk);
  writer.join();
  CHECK(slot.copy == source);
}

void test_an_older_generation_is_refused_although_all_bytes_are_there() {
  Slot slot;
  slot.head = {8, kBytes};
  CHECK(slot.read({}) == Status::kEvicted);
}

}  // namespace weightsync::testing
