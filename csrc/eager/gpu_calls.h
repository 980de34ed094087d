// Plain calls on a GPU: from Python's arguments (gpu_arguments.cpp) to a prepared launch (gpu_calls.cpp), and
// the node of its gradient (gpu_gradient.cpp).
//
// One body serves all operators. What their arguments mean, and what their launches are given, is in tables:
// `kOperators` in prepared.h and `LAUNCHES` in khot/_kernels/triton/native.py.
#pragma once

#include <ATen/core/Generator.h>

#include <array>
#include <memory>
#include <optional>

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
  int64_t axis = -1;  // where the rows lie, counted from the end; below they lie in the last dimension
  Tensors inputs;     // the rows, and a cost
  Numbers numbers;
  Tensor mask;
  bool negated = false, reversed = false;
};

// Whether the last call that was asked for is plain, but has no prepared launch: the ordinary way is to
// prepare one.
inline bool& is_missed() {
  static bool last = false;
  return last;
}

// The prepared launches; null, and the call is missed, if there are none.
inline std::shared_ptr<const Prepared> find_or_miss(const Signature& signature) {
  auto found = find(signature);
  is_missed() = found == nullptr;
  return found;
}

// A given number, which broadcasts with the rows of x, as a launch reads it.
Tensor for_launch(const Tensor& given, const Tensor& x);

// As a launch reads them.
Tensors contiguous(const Tensors& inputs);

// False for what is not plain.
bool read(Operator which, PyObject* const* args, Call& call);

// A sample by Pareto's design from rows of probabilities, or from one row for each of some rows.
struct Draw {
  std::shared_ptr<const Prepared> prepared;
  std::optional<at::Generator> generator;
  const Tensor* rows = nullptr;  // which are not read

  // False if there are no launches for rows of probabilities like those of a signature, or for so many of
  // them as there are rows; least is that of khot/_kernels/reference/order_sampling.py.
  bool find(const Signature& like, PyObject* given_generator, PyObject* least, const Tensor* rows = nullptr);

  // Undefined, with no random number used, if nothing was started; unless the driver made an error.
  Tensor sample(const Tensor& probs) const;
};

struct Results {
  Tensor first, kept, scratch;  // the first is undefined if nothing was started
};

// Start a prepared launch with these addresses and numbers, on the device of x, which is the current one.
Results run(const Prepared& prepared, const Tensor& x, c10::ArrayRef<const void*> inputs,
            c10::ArrayRef<const Number*> numbers);

// Let the result have the gradient of the call.
void record(const Call& call, const Prepared& prepared, const Results& results);

}  // namespace khot::gpu
