// Exchange of pages and population.

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <stdexcept>
#include <string>
#include <system_error>

#include "check.h"
#include "pages.h"
#include "tests.h"

namespace {

// What mremap() is to refuse; the program is linked with --wrap=mremap.
struct Refused {
  std::uintptr_t from, to;
  bool is_old_kernel;  // does not know MREMAP_DONTUNMAP
};
Refused refused{};

}  // namespace

extern "C" {
void* __real_mremap(void* from, std::size_t old_size, std::size_t size, int flags, ...);

void* __wrap_mremap(void* from, std::size_t old_size, std::size_t size, int flags, ...) {
  std::va_list rest;
  va_start(rest, flags);
  void* to = va_arg(rest, void*);
  va_end(rest);
  constexpr int kDontUnmap = 4;
  if (refused.is_old_kernel && (flags & kDontUnmap) != 0) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  if (reinterpret_cast<std::uintptr_t>(from) == refused.from && reinterpret_cast<std::uintptr_t>(to) == refused.to) {
    munmap(to, size);  // as kernels do before they look closer
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return __real_mremap(from, old_size, size, flags, to);
}
}

namespace weightsync::testing {
namespace {

constexpr std::size_t kSize = std::size_t{1} << 20;

// A mapping that ends with its owner; nothing may be mapped over it but by exchange().
class Range {
 public:
  explicit Range(int protection, int kind = MAP_PRIVATE)
      : start_(mmap(nullptr, kSize, protection, kind | MAP_ANONYMOUS, -1, 0)) {
    CHECK(start_ != MAP_FAILED);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() { munmap(start_, kSize); }

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(start_); }
  unsigned char* bytes() const { return static_cast<unsigned char*>(start_); }
  bool is_all(unsigned char value) const {
    return std::all_of(bytes(), bytes() + kSize, [value](unsigned char byte) { return byte == value; });
  }

 private:
  void* start_;
};

bool is_mapped(const Range& range) {
  void* start = reinterpret_cast<void*>(range.address());
  void* got = mmap(start, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  return got == MAP_FAILED && errno == EEXIST;
}

}  // namespace

void test_exchanged_pages_keep_their_contents() {
  const Range a(PROT_READ | PROT_WRITE), b(PROT_READ | PROT_WRITE), scratch(PROT_NONE);
  std::fill_n(a.bytes(), kSize, 1);
  std::fill_n(b.bytes(), kSize, 2);
  for (int turn = 0; turn < 3; ++turn) {
    CHECK(exchange(a.address(), b.address(), scratch.address(), kSize) > 0);
    CHECK(a.is_all(turn % 2 == 0 ? 2 : 1) && b.is_all(turn % 2 == 0 ? 1 : 2));
  }
  // Reserved again: nothing else is placed there, and nothing can be read.
  CHECK(is_mapped(scratch));
}

void test_whichever_step_fails_everything_is_where_it_was() {
  for (int turn = 0; turn < 12; ++turn) {
    const int kind = turn % 2 == 0 ? MAP_SHARED : MAP_PRIVATE;
    const Range a(PROT_READ | PROT_WRITE, kind), b(PROT_READ | PROT_WRITE, kind), scratch(PROT_NONE);
    std::fill_n(a.bytes(), kSize, 1);
    std::fill_n(b.bytes(), kSize, 2);
    const Refused steps[] = {{a.address(), scratch.address(), turn >= 6},
                             {b.address(), a.address(), turn >= 6},
                             {scratch.address(), b.address(), turn >= 6}};
    const char* const names[] = {"move a to scratch", "move b to a", "move scratch to b"};
    refused = steps[turn / 2 % 3];
    std::string text;
    try {
      exchange(a.address(), b.address(), scratch.address(), kSize);
    } catch (const std::system_error& error) {
      CHECK(error.code().value() == ENOMEM);
      text = error.what();
    }
    refused = {0, 0, turn >= 6};
    CHECK(text.find(names[turn / 2 % 3]) != std::string::npos);
    CHECK(a.is_all(1) && b.is_all(2) && is_mapped(scratch));
    exchange(a.address(), b.address(), scratch.address(), kSize);
    CHECK(a.is_all(2) && b.is_all(1) && is_mapped(scratch));
    refused = {};
  }
}

void test_a_failed_exchange_leaves_everything_where_it_was() {
  const Range a(PROT_READ | PROT_WRITE), b(PROT_READ | PROT_WRITE), scratch(PROT_NONE);
  std::fill_n(a.bytes(), kSize, 1);
  munmap(reinterpret_cast<void*>(b.address()), kSize);  // so that the second step fails
  int error = 0;
  try {
    exchange(a.address(), b.address(), scratch.address(), kSize);
  } catch (const std::system_error& thrown) {
    error = thrown.code().value();
  }
  CHECK(error == EFAULT);
  CHECK(a.is_all(1));
}

void test_ranges_that_overlap_or_end_within_a_page_are_refused() {
  const std::uintptr_t starts[][3] = {{0x10000, 0x10000, 0x900000}, {0x10001, 0x800000, 0x900000}};
  for (const auto& [a, b, scratch] : starts) {
    bool is_refused = false;
    try {
      exchange(a, b, scratch, 0x2000);
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    CHECK(is_refused);
  }
}

void test_population_keeps_contents_and_reports_what_is_not_mapped() {
  const Range range(PROT_READ | PROT_WRITE);
  std::fill_n(range.bytes(), kSize / 2, 3);
  populate(range.address(), kSize, true);
  populate(range.address(), kSize, false);
  CHECK(std::all_of(range.bytes(), range.bytes() + kSize / 2, [](unsigned char byte) { return byte == 3; }));
  const Range hole(PROT_NONE);
  bool is_reported = false;
  try {
    populate(hole.address(), kSize, true);
  } catch (const std::system_error&) {
    is_reported = true;
  }
  CHECK(is_reported);
}

}  // namespace weightsync::testing
