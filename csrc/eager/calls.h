// The calls that Python makes of khot._eager, and the operators that have them on a GPU.
#pragma once

#include <Python.h>

#include <cstdint>

namespace at {
class Tensor;
}

namespace khot {

#define KHOT_CALL(name) PyObject* name(PyObject* const* args)

// thresholds.cpp
KHOT_CALL(soft_topk);
KHOT_CALL(hard_topk);
KHOT_CALL(soft_count);
KHOT_CALL(inverse_soft_count);
// cpu_calls.cpp
KHOT_CALL(topk);
KHOT_CALL(topk_mask);
// gpu_draws.cpp
KHOT_CALL(pareto);
// gpu_calls.cpp
KHOT_CALL(soft_topk_magnitude);
KHOT_CALL(soft_topk_of_selectable);
KHOT_CALL(sample_khot);
KHOT_CALL(gated);
// launches.cpp
KHOT_CALL(use_driver);
KHOT_CALL(remember);
KHOT_CALL(start);
KHOT_CALL(forget);

namespace gpu {

enum Operator : int64_t {
  kSoftTopk,
  kTopkMask,
  kMagnitude,
  kBudget,
  kSoftRank,
  kSoftSort,
  kSelectable,
  kSizes,  // magnitudes, where a mask takes some out
  kParetoSample,
  kTopk
};

// The result of a plain call on a GPU; null, without an error of Python's, if it is left to other ways.
PyObject* call(Operator which, PyObject* const* args);

// topk(input, k, dim, largest, sorted), without a gradient; false if it is left to other ways.
bool topk(PyObject* const* args, at::Tensor& values, at::Tensor& indices);

}  // namespace gpu
}  // namespace khot
