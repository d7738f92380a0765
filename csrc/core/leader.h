// Who is ahead of a run: the watermark that it follows, and whoever may cancel it.
#pragma once

#include <cstdint>
#include <optional>

namespace weightsync {

enum class Status : int { kOk = 0, kTimeout = 1, kCancelled = 2, kEvicted = 3 };

// Shared with another process, which writes it: to open a slot for a new use, the watermark is cleared first, then the
// generation grows.
struct Head {
  std::uint64_t generation;
  std::uint64_t watermark;
};

// Null pointers mean that there is nothing to follow, and nobody who may cancel.
class Leader {
 public:
  Leader(const Head* head, std::uint64_t generation, double timeout_s, const std::uint32_t* cancel)
      : head_(head), generation_(generation), timeout_s_(timeout_s), cancel_(cancel) {}

  // kOk, kCancelled or kEvicted. What was read from the slot before a kOk was not overwritten meanwhile.
  Status check() const;

  // Waits until the slot is open and its bytes below `end` are there; kTimeout when neither advances for that long.
  Status wait_until(std::uint64_t end) const;

 private:
  std::optional<std::uint64_t> watermark() const;

  const Head* head_;
  std::uint64_t generation_;
  double timeout_s_;
  const std::uint32_t* cancel_;
};

}  // namespace weightsync
