#include "threads.h"

#include <system_error>
#include <thread>
#include <vector>

namespace weightsync {

void run_threads(unsigned count, const std::function<void(unsigned)>& work) {
  std::vector<std::thread> others;
  others.reserve(count > 0 ? count - 1 : 0);
  unsigned next = 1;
  try {
    for (; next < count; ++next) others.emplace_back(work, next);
  } catch (const std::system_error&) {
    // No more threads to be had: the loop below does what is left.
  }
  work(0);
  for (; next < count; ++next) work(next);
  for (std::thread& other : others) other.join();
}

}  // namespace weightsync
