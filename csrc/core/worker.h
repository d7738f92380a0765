// One thread of a run: does the moves of one unit after the other.
#pragma once

#include <cstdint>

#include "casts.h"
#include "kernels.h"
#include "schedule.h"

namespace weightsync {

// Addresses and results, one entry per move. `dst` and `digests` may be empty.
struct Operands {
  Span<const std::uint64_t> src;
  Span<const std::uint64_t> dst;
  Span<std::uint64_t> digests;
  bool streams;  // with stores that bypass the caches
};

class Worker {
 public:
  // What is referred to must outlive the worker.
  Worker(const Schedule& schedule, const Operands& operands);

  // Adds to the digests; stores are visible to others only after fence_streams().
  void run(const Unit& unit);

 private:
  struct Place {
    const std::byte* src;
    std::byte* dst;
    std::int64_t index;
  };

  void run_piece(const Piece& piece);
  void run_row(const Place& at, std::int64_t count);
  void run_misaligned_row(const Place& at, std::int64_t count);
  void run_plane(const Place& at, const Axis& rows, const Axis& columns);
  void run_tile(const Place& at, const Axis& rows, const Axis& columns);
  void digest_row(const Place& at, std::int64_t count, std::int64_t index_step);
  void copy_part(CopyKernel kernel, const Place& at, std::size_t count);
  void digest_part(const std::byte* src, std::int64_t index, std::size_t count);
  void add(std::uint64_t sum, std::int64_t word);
  std::int64_t left_in_block(std::int64_t index) const;

  const Schedule& schedule_;
  const Operands& operands_;
  const KernelTable& kernels_;
  const bool has_dst_, has_digest_;

  // The piece at hand.
  const Job* job_ = nullptr;
  const KernelSet* set_ = nullptr;
  CastRun cast_ = nullptr;
  std::int64_t src_item_ = 0, dst_item_ = 0, words_ = 1;
  std::uint64_t* sum_ = nullptr;

  static constexpr std::size_t kTileBytes = 16384;
  alignas(64) std::byte gathered_[kTileBytes];
  alignas(64) std::byte cast_row_[kTileBytes];
  alignas(64) std::byte scattered_[kTileBytes];
};

}  // namespace weightsync
