// XLA's threads, among which rows are shared.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace khot {

// The pool of the call that this thread serves.
inline thread_local xla::ffi::ThreadPool* pool = nullptr;

// For the time of a call.
struct InPool {
  explicit InPool(xla::ffi::ThreadPool& threads) { pool = &threads; }
  ~InPool() { pool = nullptr; }
  InPool(const InPool&) = delete;
};

inline int64_t threads() { return pool == nullptr ? 1 : std::max<int64_t>(1, pool->num_threads()); }

// body(begin, end) for all of count, `grain` at a time. The caller works, too, and waits only for tasks that
// have begun, so that a pool whose threads are all busy cannot make it wait for ever.
template <class Body>
void ranges(int64_t count, int64_t grain, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    int working = 0;
    bool closed = false;
  };
  const auto shared = std::make_shared<Shared>();
  const int64_t pieces = (count + grain - 1) / grain;
  // no task touches `body` after `closed`
  const auto work = [&body, count, grain, pieces, shared = shared.get()] {
    for (int64_t i; (i = shared->next++) < pieces;) body(i * grain, std::min(count, (i + 1) * grain));
  };
  for (int64_t i = 1; i < std::min(threads(), pieces); ++i) {
    pool->Schedule([shared, work] {
      {
        const std::lock_guard<std::mutex> lock(shared->mutex);
        if (shared->closed) return;
        ++shared->working;
      }
      work();
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (--shared->working == 0) shared->idle.notify_one();
    });
  }
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->closed = true;
  shared->idle.wait(lock, [&] { return shared->working == 0; });
}

}  // namespace khot

#include "bindings/share.h"
