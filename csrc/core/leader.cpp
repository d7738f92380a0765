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
    if (__atomic_load_n(&head_->generation, __ATOMIC_ACQUIRE) != generation_) return Status::kEvicted;
  }
  return Status::kOk;
}

Status Leader::wait_until(std::uint64_t end) const {
  const Status status = check();
  if (head_ == nullptr || status != Status::kOk) return status;
  std::uint64_t seen = __atomic_load_n(&head_->watermark, __ATOMIC_ACQUIRE);
  if (seen >= end) return Status::kOk;
  double since = now_s();
  for (int turn = 0; seen < end; ++turn) {
    if (const Status changed = check(); changed != Status::kOk) return changed;
    if (turn >= kSpins) std::this_thread::sleep_for(kNap);
    const std::uint64_t mark = __atomic_load_n(&head_->watermark, __ATOMIC_ACQUIRE);
    const double now = now_s();
    if (mark != seen) {
      seen = mark;
      since = now;
    } else if (now - since >= timeout_s_) {
      return Status::kTimeout;
    }
  }
  return Status::kOk;
}

}  // namespace weightsync
