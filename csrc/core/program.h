// A table of moves, compiled once and replayed for every version.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "leader.h"
#include "move.h"
#include "schedule.h"
#include "worker.h"

namespace weightsync {

struct RunOptions {
  unsigned threads = 1;
  std::uint64_t* progress = nullptr;  // gets the watermark: slot bytes below it are done
  const Head* follow = nullptr;
  std::uint64_t generation = 0;
  double timeout_s = 30.0;
  const std::uint32_t* cancel = nullptr;
};

class Program {
 public:
  // `table`: rows of kColumns values. Throws std::invalid_argument that names the first bad row.
  explicit Program(Span<const std::int64_t> table);

  std::size_t moves() const { return moves_.size(); }
  std::uint64_t size_bytes() const { return size_bytes_; }
  std::size_t units() const { return schedule({true, true}).units.size(); }

  // Addresses of the moves, one each; without `dst` nothing is written, without `digests` nothing is summed up. May be
  // called by several threads at once. After a status other than kOk, what was written is undefined.
  Status run(Span<const std::uint64_t> src, Span<const std::uint64_t> dst, Span<std::uint64_t> digests,
             const RunOptions& options) const;

 private:
  struct Lazy {
    std::once_flag once;
    Schedule schedule;
  };
  const Schedule& schedule(Uses uses) const;

  std::vector<Move> moves_;
  std::uint64_t size_bytes_ = 0;
  mutable std::array<Lazy, 4> schedules_;  // by what a run uses
};

}  // namespace weightsync
