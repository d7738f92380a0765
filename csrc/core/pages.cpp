#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace weightsync {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// errno, or 0.
int move_pages(std::uintptr_t from, std::uintptr_t to, std::size_t size, int keep) {
  void* moved = mremap(pointer(from), size, size, MREMAP_MAYMOVE | MREMAP_FIXED | keep, pointer(to));
  return moved == MAP_FAILED ? errno : 0;
}

int reserve(std::uintptr_t address, std::size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  return mmap(pointer(address), size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? errno : 0;
}

// Kernels may unmap the target of a move that then fails, so scratch is reserved again whichever step it was.
[[noreturn]] void fail(int error, const std::string& step, std::uintptr_t scratch, std::size_t size) {
  reserve(scratch, size);
  throw std::system_error(error, std::generic_category(), "exchange: " + step + "; everything is where it was");
}

void check_ranges(std::array<std::uintptr_t, 3> starts, std::size_t size) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  std::uintptr_t misaligned = size % page;
  for (const std::uintptr_t start : starts) misaligned |= start % page;
  if (size == 0 || misaligned != 0) {
    throw std::invalid_argument("exchange: expected multiples of the page size " + std::to_string(page));
  }
  std::sort(starts.begin(), starts.end());
  if (starts[1] - starts[0] < size || starts[2] - starts[1] < size) {
    throw std::invalid_argument("exchange: the ranges of " + std::to_string(size) + " bytes overlap");
  }
}

}  // namespace

double exchange(std::uintptr_t a, std::uintptr_t b, std::uintptr_t scratch, std::size_t size) {
  check_ranges({a, b, scratch}, size);
  const auto started = std::chrono::steady_clock::now();
  // A range that is moved away stays mapped where the kernel can do that (5.13 for shared memory), so that no other
  // thread's mmap() lands in it before its new pages arrive.
  int keep = MREMAP_DONTUNMAP;
  int error = move_pages(a, scratch, size, keep);
  if (error == EINVAL || error == ENOMEM) {
    keep = 0;
    error = move_pages(a, scratch, size, keep);
  }
  if (error != 0) fail(error, "move a to scratch", scratch, size);
  error = move_pages(b, a, size, keep);
  if (error != 0) {
    move_pages(scratch, a, size, 0);
    fail(error, "move b to a", scratch, size);
  }
  error = move_pages(scratch, b, size, keep);
  if (error != 0) {
    move_pages(a, b, size, keep);
    move_pages(scratch, a, size, 0);
    fail(error, "move scratch to b", scratch, size);
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  error = reserve(scratch, size);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "exchange: done, but scratch can't be reserved again");
  }
  return taken.count();
}

void populate(std::uintptr_t address, std::size_t size, bool for_writing) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const int advice = for_writing ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  if (madvise(pointer(address), size, advice) == 0) return;
  const int error = errno;
  const bool is_known = madvise(nullptr, 0, advice) == 0;  // EINVAL may also mean that the range forbids the access
  if (is_known || error != EINVAL || address % page != 0) {
    throw std::system_error(error, std::generic_category(), "populate " + std::to_string(size) + " bytes");
  }
  // A kernel before 5.14: touch each page. The addition of 0 is atomic, for others may write there.
  for (std::size_t at = 0; at < size; at += page) {
    auto* byte = reinterpret_cast<unsigned char*>(address + at);
    if (for_writing) {
      __atomic_fetch_add(byte, 0, __ATOMIC_RELAXED);
    } else {
      __atomic_load_n(byte, __ATOMIC_RELAXED);
    }
  }
}

}  // namespace weightsync
