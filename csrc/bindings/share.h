// How the rows of a call are shared among threads. No result depends on the number of threads. The file that
// includes it says what threads there are: threads(), their number, and ranges(count, grain, body), which has
// them call body(begin, end) for all of count, at least `grain` at a time.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace khot {

// From this length on, a row is worth sharing among threads where there are fewer rows than threads.
constexpr int64_t kLongRow = 1 << 17;
constexpr int64_t kGrain = 1 << 14;  // the number of entries that are worth waking a thread for

// body(begin, end) for ranges of the rows, of `length` entries each.
template <class Body>
void row_ranges(int64_t rows, int64_t length, const Body& body) {
  ranges(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, length)), body);
}

// The threads of a kernel that shares one long row among them.
constexpr Parallel kInside{[](int64_t count, void* context, void (*body)(void*, int64_t)) {
  ranges(count, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, i);
  });
}};

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
  const int64_t together = spec.n <= kShortRow ? kMostLanes : 1, groups = (rows + together - 1) / together;
  row_ranges(groups, together * std::max<int64_t>(1, spec.n), [&](int64_t begin, int64_t end) {
    serve(spec, begin * together, std::min(rows, end * together));
  });
}

// The rows of a call, served by one of the kernels.
template <auto kernel, class SomeSpec, class SomeRows>
void serve(const SomeSpec& spec, const SomeRows& rows, int64_t count) {
  share(spec, count, [&](const SomeSpec& spec, int64_t begin, int64_t end) {
    (kernels().*kernel)(spec, rows, begin, end);
  });
}

// The same by a kernel that does not share a long row among threads.
template <auto kernel, class SomeSpec, class SomeRows>
void serve_whole(const SomeSpec& spec, const SomeRows& rows, int64_t count) {
  row_ranges(count, spec.n, [&](int64_t begin, int64_t end) { (kernels().*kernel)(spec, rows, begin, end); });
}

}  // namespace khot
