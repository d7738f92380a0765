// Threads that live for one call.
#pragma once

#include <functional>

namespace weightsync {

// Calls work(0) ... work(count - 1), each once, on up to `count` threads of which the caller is one; returns when all
// have. Where the system gives fewer threads, the caller does the rest. `work` must not throw.
void run_threads(unsigned count, const std::function<void(unsigned)>& work);

}  // namespace weightsync
