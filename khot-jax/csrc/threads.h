// How rows are shared among XLA's threads. No result depends on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "kernels.h"
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

// As in bindings/threads.h: from this length on, a row is worth sharing, and so many entries are worth waking
// a thread for.
constexpr int64_t kLongRow = 1 << 17;
constexpr int64_t kGrain = 1 << 14;

// The threads of a kernel that shares one long row among them.
constexpr Parallel kInside{[](int64_t count, void* context, void (*body)(void*, int64_t)) {
  parallel(count, [=](int64_t i) { body(context, i); });
}};

// serve(begin, end) for ranges of the rows, of `length` entries each, that begin at multiples of `together`.
template <class Serve>
void row_ranges(int64_t rows, int64_t length, int64_t together, const Serve& serve) {
  const int64_t entries = together * std::max<int64_t>(1, length);
  const int64_t step = together * std::max<int64_t>(1, kGrain / entries);
  parallel((rows + step - 1) / step, [&](int64_t i) { serve(i * step, std::min(rows, (i + 1) * step)); });
}

// serve(spec, begin, end) for all rows: rows run in parallel where there are enough, otherwise each row is
// shared.
template <class SomeSpec, class Serve>
void share(SomeSpec spec, int64_t rows, const Serve& serve) {
  if (rows == 0) return;
  if (rows < threads() && spec.n >= kLongRow) {
    spec.inside = &kInside;
    serve(spec, 0, rows);
    return;
  }
  // Short rows are solved in groups. The groups must not depend on the number of threads, or results would.
  const int64_t together = spec.n <= kShortRow ? kMostLanes : 1;
  row_ranges(rows, spec.n, together, [&](int64_t begin, int64_t end) { serve(spec, begin, end); });
}

}  // namespace khot
