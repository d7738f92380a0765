#include "schedule.h"

#include <algorithm>

#include "digest.h"

namespace weightsync {
namespace {

constexpr std::int64_t kUnitBytes = std::int64_t{1} << 20;
constexpr std::uint32_t kUnitPieces = 1024;
constexpr std::int64_t kLine = 64;

// Where a unit begins and ends in its move, in elements in row-major order.
struct Range {
  std::int64_t first;
  std::int64_t last;
};

class Scheduler {
 public:
  explicit Scheduler(Uses uses) : uses_(uses) {}

  void add(std::uint32_t row, const Move& move) {
    src_end_ = std::max(src_end_, move.offset + move.src_bytes());
    dst_end_ = std::max(dst_end_, move.offset + move.dst_bytes());
    if (move.elements == 0) return;
    out_.jobs.push_back(merge(row, move));
    const std::int64_t bytes = move.dst_bytes();
    if (bytes > kUnitBytes) {
      close_unit();
      split(out_.jobs.back(), move);
      return;
    }
    if (open_bytes_ + bytes > kUnitBytes || out_.pieces.size() - first_piece_ >= kUnitPieces) close_unit();
    open_bytes_ += bytes;
    add_piece(Piece::kWhole, move, {0, move.elements});
  }

  Schedule finish() {
    close_unit();
    // A unit's start bounds what is done only if no later unit starts lower; tables need not be sorted.
    auto lower = [](std::vector<std::uint64_t>& marks, std::int64_t end) {
      marks.push_back(static_cast<std::uint64_t>(end));
      for (std::size_t i = marks.size() - 1; i-- > 0;) marks[i] = std::min(marks[i], marks[i + 1]);
    };
    lower(out_.src_marks, src_end_);
    lower(out_.dst_marks, dst_end_);
    return std::move(out_);
  }

 private:
  Job merge(std::uint32_t row, const Move& move) {
    const std::size_t first = out_.axes.size();
    for (std::size_t d = 0; d < move.ndim; ++d) {
      Axis axis = move.axes[d];
      if (axis.count == 1) continue;
      if (!uses_.dst) axis.dst = 0;
      if (!uses_.digest) axis.index = 0;
      if (out_.axes.size() > first) {
        Axis& last = out_.axes.back();
        if (last.src == axis.src * axis.count && last.dst == axis.dst * axis.count &&
            last.index == axis.index * axis.count) {
          last = {last.count * axis.count, axis.src, axis.dst, axis.index};
          continue;
        }
      }
      out_.axes.push_back(axis);
    }
    const std::int64_t src_item = item_bytes(move.src_type), dst_item = item_bytes(move.dst_type);
    if (out_.axes.size() == first) out_.axes.push_back({1, src_item, uses_.dst ? dst_item : 0, uses_.digest ? 1 : 0});
    const auto count = static_cast<std::uint8_t>(out_.axes.size() - first);
    Job job{row, static_cast<std::uint32_t>(first), count, -1, move.src_type, move.dst_type, move.seed, move.index};
    const Axis& inner = out_.axes.back();
    for (int d = 0; d + 1 < count; ++d) {
      const Axis& axis = out_.axes[first + static_cast<std::size_t>(d)];
      const bool helps_src = inner.src != src_item && axis.src == src_item;
      const bool helps_dst = uses_.dst && inner.dst != dst_item && axis.dst == dst_item;
      if (helps_src || (helps_dst && job.partner < 0)) job.partner = static_cast<std::int8_t>(d);
    }
    return job;
  }

  // Boxes of about kUnitBytes in row-major order. Single runs are cut where the digest's blocks end.
  void split(const Job& job, const Move& move) {
    const Axis* axes = out_.axes.data() + job.first_axis;
    const int last = job.axes - 1;
    std::array<std::int64_t, kMaxAxes> extent{};
    std::int64_t budget = kUnitBytes / item_bytes(move.dst_type);
    for (int d = 0; d <= last; ++d) extent[static_cast<std::size_t>(d)] = 1;
    if (job.partner >= 0) {
      std::int64_t& rows = extent[static_cast<std::size_t>(job.partner)];
      rows = std::min(axes[job.partner].count, kLine / std::min(item_bytes(move.src_type), item_bytes(move.dst_type)));
      budget = std::max<std::int64_t>(budget / rows, 1);
    }
    for (int d = last; d >= 0; --d) {
      std::int64_t& e = extent[static_cast<std::size_t>(d)];
      const std::int64_t base = e;
      e = std::min(axes[d].count, base * budget);
      budget = std::max<std::int64_t>(budget / std::max<std::int64_t>(e / base, 1), 1);
      if (e < axes[d].count) break;
    }
    const bool is_run = last == 0 && axes[0].index == 1;
    const std::int64_t ahead = is_run ? -move.index & (kBlock - 1) : 0;
    emit_grid(move, Span<const Axis>(axes, job.axes), extent, ahead);
  }

  void emit_grid(const Move& move, Span<const Axis> axes, const std::array<std::int64_t, kMaxAxes>& extent,
                 std::int64_t ahead) {
    Box box{};
    for (;;) {
      for (std::size_t d = 0; d < axes.size(); ++d) {
        const std::int64_t step = axes.size() == 1 && box.start[d] == 0 && ahead > 0 ? ahead : extent[d];
        box.count[d] = std::min(step, axes[d].count - box.start[d]);
      }
      std::int64_t first = 0, last = 0;
      for (std::size_t d = 0; d < axes.size(); ++d) {
        first = first * axes[d].count + box.start[d];
        last = last * axes[d].count + box.start[d] + box.count[d] - 1;
      }
      out_.boxes.push_back(box);
      add_piece(static_cast<std::uint32_t>(out_.boxes.size() - 1), move, {first, last + 1});
      close_unit();
      std::size_t d = axes.size();
      while (d-- > 0) {
        box.start[d] += box.count[d];
        if (box.start[d] < axes[d].count) break;
        box.start[d] = 0;
        if (d == 0) return;
      }
      for (std::size_t inner = d + 1; inner < axes.size(); ++inner) box.start[inner] = 0;
    }
  }

  void add_piece(std::uint32_t box, const Move& move, Range range) {
    if (out_.pieces.size() == first_piece_) {
      unit_end_ = 0;
      src_start_ = dst_start_ = INT64_MAX;
    }
    const std::int64_t src_item = item_bytes(move.src_type), dst_item = item_bytes(move.dst_type);
    src_start_ = std::min(src_start_, move.offset + (move.is_src_dense ? range.first * src_item : 0));
    dst_start_ = std::min(dst_start_, move.offset + (move.is_dst_dense ? range.first * dst_item : 0));
    unit_end_ = std::max(unit_end_, move.offset + (move.is_src_dense ? range.last : move.elements) * src_item);
    out_.pieces.push_back({static_cast<std::uint32_t>(out_.jobs.size() - 1), box});
  }

  void close_unit() {
    const std::size_t count = out_.pieces.size() - first_piece_;
    if (count > 0) {
      out_.units.push_back({static_cast<std::uint32_t>(first_piece_), static_cast<std::uint32_t>(count),
                            static_cast<std::uint64_t>(unit_end_)});
      out_.src_marks.push_back(static_cast<std::uint64_t>(src_start_));
      out_.dst_marks.push_back(static_cast<std::uint64_t>(dst_start_));
    }
    first_piece_ = out_.pieces.size();
    open_bytes_ = 0;
  }

  Uses uses_;
  Schedule out_;
  std::size_t first_piece_ = 0;
  std::int64_t open_bytes_ = 0;
  std::int64_t src_start_ = 0, dst_start_ = 0, unit_end_ = 0;  // of the open unit, in slot bytes
  std::int64_t src_end_ = 0, dst_end_ = 0;                     // of the whole table
};

}  // namespace

Schedule schedule_moves(const std::vector<Move>& moves, Uses uses) {
  Scheduler scheduler(uses);
  for (std::size_t row = 0; row < moves.size(); ++row) scheduler.add(static_cast<std::uint32_t>(row), moves[row]);
  return scheduler.finish();
}

}  // namespace weightsync
