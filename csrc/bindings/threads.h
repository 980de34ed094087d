// How rows are shared among torch's threads. No result depends on the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "kernels.h"

namespace khot {

constexpr int64_t kGrain = 1 << 14;  // the number of entries that are worth waking a thread for

// body(begin, end) for ranges of the rows, of `length` entries each.
template <class Body>
void row_ranges(int64_t rows, int64_t length, const Body& body) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, length)), body);
}

// The threads of a kernel that shares one long row among them.
constexpr Parallel kInside{[](int64_t count, void* context, void (*body)(void*, int64_t)) {
  torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, i);
  });
}};

}  // namespace khot
