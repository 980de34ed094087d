// XLA's threads, among which rows are shared.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
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

// body(i) for every i < count. The caller works, too, and waits only for tasks that have begun, so that a
// pool whose threads are all busy cannot make it wait for ever.
inline void parallel(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    int working = 0;
    bool closed = false;
  };
  const auto shared = std::make_shared<Shared>();
  const auto* work = &body;  // no task touches it after `closed`
  for (int64_t i = 0; i < helpers; ++i) {
    pool->Schedule([shared, work, count] {
      {
        const std::lock_guard<std::mutex> lock(shared->mutex);
        if (shared->closed) return;
        ++shared->working;
      }
      for (int64_t i; (i = shared->next++) < count;) (*work)(i);
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (--shared->working == 0) shared->idle.notify_one();
    });
  }
  for (int64_t i; (i = shared->next++) < count;) body(i);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->closed = true;
  shared->idle.wait(lock, [&] { return shared->working == 0; });
}

template <class Body>
void ranges(int64_t count, int64_t grain, const Body& body) {
  parallel((count + grain - 1) / grain,
           [&](int64_t i) { body(i * grain, std::min(count, (i + 1) * grain)); });
}

}  // namespace khot

#include "bindings/share.h"
