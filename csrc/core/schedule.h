// A move table cut into units: what one thread takes at a time, and the grain of watermarks.
#pragma once

#include <cstdint>
#include <vector>

#include "move.h"

namespace weightsync {

// What a run looks at. Strides that it does not look at can't keep dimensions from being merged.
struct Uses {
  bool dst;
  bool digest;
};

// A move with its mergeable dimensions merged. Its axes are `count` entries of Schedule::axes from `first_axis`; there
// is at least one.
struct Job {
  std::uint32_t row;
  std::uint32_t first_axis;
  std::uint8_t axes;
  std::int8_t partner;  // the axis to walk along with the last, since it is contiguous where the last is not; -1: none
  Type src_type;
  Type dst_type;
  std::uint64_t seed;
  std::int64_t index;
};

struct Box {
  std::array<std::int64_t, kMaxAxes> start;
  std::array<std::int64_t, kMaxAxes> count;
};

// A whole job, or one box of it.
struct Piece {
  static constexpr std::uint32_t kWhole = UINT32_MAX;
  std::uint32_t job;
  std::uint32_t box;
};

struct Unit {
  std::uint32_t first_piece;
  std::uint32_t pieces;
  std::uint64_t src_end;  // slot bytes that must be there before it can start, when the slot is the source
};

struct Schedule {
  std::vector<Axis> axes;
  std::vector<Job> jobs;
  std::vector<Box> boxes;
  std::vector<Piece> pieces;
  std::vector<Unit> units;
  // Slot bytes done before each unit, and after the last, once for each side that the slot may be on.
  std::vector<std::uint64_t> src_marks;
  std::vector<std::uint64_t> dst_marks;
};

Schedule schedule_moves(const std::vector<Move>& moves, Uses uses);

}  // namespace weightsync
