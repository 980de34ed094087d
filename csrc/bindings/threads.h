// torch's threads, among which rows are shared.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace khot {

inline int64_t threads() { return torch::stable::get_num_threads(); }

template <class Body>
void ranges(int64_t count, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace khot

#include "bindings/share.h"
