// Plain calls on a GPU: from Python's arguments (gpu_arguments.cpp) to a prepared launch (gpu_calls.cpp), and
// the node of its gradient (gpu_gradient.cpp), with what goes around the launch (gpu_around.cpp).
//
// One body serves all operators. What their arguments mean, and what their launches are given, is in tables:
// `kOperators` in prepared.h and `LAUNCHES` in khot/_kernels/triton/native.py.
#pragma once

#include <ATen/DimVector.h>
#include <ATen/core/Generator.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <memory>
#include <optional>
#include <type_traits>

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

// The rows of a tensor along a dimension, counted from the end.
struct Shape {
  int64_t axis = -1, n = 1;
  at::DimVector sizes;  // of the tensor, with that dimension last

  Shape() = default;
  Shape(const Tensor& x, int64_t axis);
  at::IntArrayRef batch() const { return at::IntArrayRef(sizes).slice(0, sizes.size() - 1); }
  bool is_dense(const Tensor& x) const;  // whether they lie one after another
  void put_back(Tensor& made) const;     // the dimension of rows that were made here
};

// The arguments of a call, as they were given.
struct Call {
  Signature signature;
  Shape shape;
  Tensors inputs;  // what has the rows, and a cost
  Numbers numbers;
  Tensor mask;
  bool negated = false, reversed = false;
  Operator which() const { return static_cast<Operator>(signature.facts[0]); }
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

// A given number, which broadcasts with a batch, as a launch reads it.
Tensor for_launch(const Tensor& given, at::IntArrayRef batch);

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
  Tensor sample(const Tensor& probs, const Queue& queue) const;
};

struct Results {
  Tensor first, kept, scratch;  // the first is undefined if nothing was started
};

// Start a prepared launch for rows of such sizes with these addresses and numbers, on a device, which is the
// current one.
Results run(const Prepared& prepared, at::IntArrayRef sizes, c10::Device device,
            c10::ArrayRef<const void*> inputs, c10::ArrayRef<const Number*> numbers, const Queue& queue);

// Let the result, of which a launch wrote `results`, have the gradient of the call.
void record(const Call& call, const Prepared& prepared, const Results& results, Tensor& result);

// torch's own nodes are counted in one way or another, by its version.
template <class T>
auto make_node() {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T, [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// What goes around a launch, as the ordinary way's operations have it; false or null if nothing was started.
//
// What the launch reads, in rows one after another, which may be the call's own inputs; the call's result
// from the launch's; and the same of the gradient, for which the launch's result may be read again.
const Tensors* before(const Call& call, const Queue& queue, Tensors& made);
bool after(const Call& call, const Queue& queue, const Tensors& rows, Tensor& result);
bool before_gradient(const Call& call, const Queue& queue, const Tensor& result, Tensor& grad);
bool after_gradient(const Call& call, const Queue& queue, Tensor& grad);

// The same row for each of these sizes; undefined if nothing was started.
Tensor repeated(const Tensor& row, at::IntArrayRef sizes, const Queue& queue);

// The product of two contiguous tensors of the same shape and type; undefined if nothing was started.
Tensor product(const Tensor& a, const Tensor& b, const Queue& queue);

}  // namespace khot::gpu
