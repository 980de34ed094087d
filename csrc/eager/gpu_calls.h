// Plain calls on a GPU: from Python's arguments (gpu_arguments.cpp) to a prepared launch (gpu_calls.cpp), and
// the node of its gradient (gpu_gradient.cpp), with what goes around the launch (gpu_around.cpp).
//
// One body serves all operators. What their arguments mean, and what their kernels are called with, is in
// tables: `kOperators` in prepared.h and `PLANNED` in khot/_kernels/triton/plans.py.
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
using Addresses = c10::SmallVector<const void*, 2>;

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
  Choices choices{};
  Shape shape;
  Tensors inputs;  // what has the rows, and a cost
  Numbers numbers;
  Tensor mask;
  bool negated = false, ascending = false;
  Operator which() const { return static_cast<Operator>(signature.which); }
};

// A given number, which broadcasts with a batch, as a launch reads it.
Tensor for_launch(const Tensor& given, at::IntArrayRef batch);

// False for what is not plain.
bool read(Operator which, PyObject* const* args, Call& call);

// A sample by Pareto's design from rows of probabilities, or from one row for each of some rows.
struct Draw {
  std::shared_ptr<const Prepared> prepared;
  std::optional<at::Generator> generator;
  const Tensor* rows = nullptr;
  bool multiplies = false;  // the rows, which are contiguous and of the sample's type; others are not read

  // False if there are no launches for rows of probabilities like those of a signature, or for so many of
  // them as there are rows; least is that of khot/_kernels/reference/order_sampling.py.
  bool find(const Signature& like, PyObject* given_generator, PyObject* least, const Tensor* rows = nullptr);

  // What it takes of the memory of launches.
  int64_t bytes() const;

  // Add its launches. Undefined, with no random number used, if there cannot be any.
  Tensor sample(const void* probs, at::IntArrayRef sizes, c10::Device device, Launches& launches) const;
};

// What the rows that a launch reads take of the slots.
inline Slots slots_of(const Addresses& rows) {
  Slots slots{};
  for (size_t i = 0; i < rows.size(); ++i) slots[kInput + i] = rows[i];
  return slots;
}

// Add the launches of a call with these addresses, to which those of the numbers are added; false if they
// cannot be.
bool add(const Prepared& prepared, Slots slots, const Numbers& numbers, Launches& launches);

// Let the result have the gradient of the call, of which a launch has written these; the first of them is the
// result, or undefined if it is not read again. The result may be multiplied by a constant.
void record(const Call& call, const Tensor& first, const Tensor& kept, const Tensor& factor, Tensor& result);

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

// What goes around a launch, as the ordinary way's operations have it; false if it cannot be added.
//
// What the launch reads, in rows one after another, which may be the call's own inputs; the call's result
// from the launch's; and the same of the gradient, for which the launch's result may be read again. What is
// between them lies in the memory of the launches, of which these are the bytes.
int64_t bytes_before(const Call& call);
int64_t bytes_before_gradient(const Call& call, const Tensor& grad);
bool before(const Call& call, Launches& launches, Addresses& rows);
bool is_changed_after(const Call& call);
bool after(const Call& call, Launches& launches, const Addresses& rows, const void* first, Tensor& result);
const void* before_gradient(const Call& call, Launches& launches, const Tensor& result, const Tensor& grad);
bool after_gradient(const Call& call, Launches& launches, Tensor& grad);

// The same row, of this type, for each of some rows.
bool repeat(const void* row, at::ScalarType dtype, int64_t n, int64_t rows, void* made, Launches& launches);

// The product of two contiguous tensors of the same shape and type, of which one lies at b.
bool product(const Tensor& a, const void* b, Tensor& made, Launches& launches);

}  // namespace khot::gpu
