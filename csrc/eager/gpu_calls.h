// Plain calls on a GPU: from Python's arguments (gpu_arguments.cpp) to a prepared launch (gpu_calls.cpp), and
// the node of its gradient (gpu_gradient.cpp).
//
// One body serves all operators. What their arguments mean, and what their launches are given, is in tables:
// `kOperators` in prepared.h and `LAUNCHES` in khot/_kernels/triton/native.py.
#pragma once

#include <array>

#include "eager/calls.h"
#include "eager/plain.h"
#include "eager/prepared.h"

namespace khot::gpu {

using Tensors = c10::SmallVector<Tensor, 2>;

// A number by value; or in memory, where the tensors are defined: as it was given, which may be learned, and
// as a launch reads it, with one for each row or one for all.
struct Number {
  double value = 0;
  Tensor given, tensor;
};
using Numbers = std::array<Number, kMostNumbers>;

struct Call {
  Signature signature;
  Tensors inputs;  // the rows, and a cost
  Numbers numbers;
  const Tensor* mask = nullptr;
  bool negated = false, reversed = false;
};

// A given number, which broadcasts with the rows of x, as a launch reads it.
Tensor for_launch(const Tensor& given, const Tensor& x);

// False for what is not plain.
bool read(Operator which, PyObject* const* args, Call& call);

struct Results {
  Tensor first, kept, scratch;  // the first is undefined if nothing was started
};

// Start a prepared launch with these addresses and numbers, on the device of x, which is the current one.
Results run(const Prepared& prepared, const Tensor& x, c10::ArrayRef<const void*> inputs,
            c10::ArrayRef<const Number*> numbers);

// Let the result have the gradient of the call.
void record(const Call& call, const Prepared& prepared, const Results& results);

}  // namespace khot::gpu
