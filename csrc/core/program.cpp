#include "program.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>

#include "threads.h"

namespace weightsync {
namespace {

constexpr std::uint64_t kStreamBytes = std::uint64_t{4} << 20;  // below, what is written is likely read from a cache
constexpr std::uint64_t kThreadBytes = std::uint64_t{1} << 19;  // less is not worth a thread

// Publishes how far the units are done without a gap.
class Watermark {
 public:
  Watermark(std::uint64_t* target, const std::vector<std::uint64_t>& marks)
      : target_(target), marks_(marks), is_done_(target != nullptr ? marks.size() : 0) {}

  // Called after the unit's stores were fenced.
  void finish(std::size_t unit) {
    if (target_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    is_done_[unit] = true;
    while (is_done_[next_]) ++next_;  // the last entry, after all units, stays false
    __atomic_store_n(target_, marks_[next_], __ATOMIC_RELEASE);
  }

 private:
  std::uint64_t* target_;
  const std::vector<std::uint64_t>& marks_;
  std::mutex mutex_;
  std::vector<bool> is_done_;
  std::size_t next_ = 0;
};

}  // namespace

Program::Program(Span<const std::int64_t> table) : moves_(parse_moves(table)) {
  for (const Move& move : moves_) size_bytes_ += static_cast<std::uint64_t>(move.dst_bytes());
}

const Schedule& Program::schedule(Uses uses) const {
  Lazy& lazy = schedules_[(uses.dst ? 2u : 0u) + (uses.digest ? 1u : 0u)];
  std::call_once(lazy.once, [&] { lazy.schedule = schedule_moves(moves_, uses); });
  return lazy.schedule;
}

Status Program::run(Span<const std::uint64_t> src, Span<const std::uint64_t> dst, Span<std::uint64_t> digests,
                    const RunOptions& options) const {
  const Schedule& plan = schedule({!dst.empty(), !digests.empty()});
  const Operands operands{src, dst, digests, size_bytes_ >= kStreamBytes};
  const bool is_src_slot = options.follow != nullptr || dst.empty();
  const std::vector<std::uint64_t>& marks = is_src_slot ? plan.src_marks : plan.dst_marks;
  const Leader leader(options.follow, options.generation, options.timeout_s, options.cancel);
  Watermark watermark(options.progress, marks);
  std::fill(digests.begin(), digests.end(), 0);

  std::atomic<std::size_t> next{0};
  std::atomic<Status> result{leader.check()};
  const auto work = [&](unsigned) noexcept {
    Worker worker(plan, operands);
    while (result.load(std::memory_order_relaxed) == Status::kOk) {
      const std::size_t number = next.fetch_add(1, std::memory_order_relaxed);
      if (number >= plan.units.size()) break;
      const Unit& unit = plan.units[number];
      if (const Status status = leader.wait_until(unit.src_end); status != Status::kOk) {
        Status none = Status::kOk;
        result.compare_exchange_strong(none, status);
        break;
      }
      worker.run(unit);
      fence_streams();
      watermark.finish(number);
    }
  };
  const std::uint64_t useful = std::min<std::uint64_t>(plan.units.size(), size_bytes_ / kThreadBytes);
  run_threads(static_cast<unsigned>(std::clamp<std::uint64_t>(useful, 1, std::max(options.threads, 1u))), work);
  if (result == Status::kOk) result = leader.check();
  if (result == Status::kOk && options.progress != nullptr) {
    __atomic_store_n(options.progress, marks.back(), __ATOMIC_RELEASE);
  }
  return result;
}

}  // namespace weightsync
