#include "leader.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace weightsync {
namespace {

constexpr int kSpins = 200;
constexpr std::chrono::microseconds kNap{40};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Status Leader::check() const {
  if (cancel_ != nullptr && __atomic_load_n(cancel_, __ATOMIC_RELAXED) != 0) return Status::kCancelled;
  if (head_ != nullptr) {
    std::atomic_thread_fence(std::memory_order_acquire);  // what we copied was read before the generation
    if (__atomic_load_n(&head_->generation, __ATOMIC_ACQUIRE) > generation_) return Status::kEvicted;
  }
  return Status::kOk;
}

Status Leader::wait_until(std::uint64_t end) const {
  std::optional<std::uint64_t> seen;
  double since = 0;
  for (int turn = 0;; ++turn) {
    const Status status = check();
    if (head_ == nullptr || status != Status::kOk) return status;
    const std::optional<std::uint64_t> mark = watermark();
    if (mark >= end) return Status::kOk;
    const double now = now_s();
    if (turn == 0 || mark != seen) {
      seen = mark;
      since = now;
    } else if (now - since >= timeout_s_) {
      return Status::kTimeout;
    }
    if (turn >= kSpins) std::this_thread::sleep_for(kNap);
  }
}

// Nothing while the slot is not open. The generation is read first, so that the watermark is of no older use.
std::optional<std::uint64_t> Leader::watermark() const {
  if (__atomic_load_n(&head_->generation, __ATOMIC_ACQUIRE) < generation_) return std::nullopt;
  return __atomic_load_n(&head_->watermark, __ATOMIC_ACQUIRE);
}

}  // namespace weightsync
