// What the bindings of the sorted kernels share: dense tensors, and rows shared among torch's threads.
#pragma once

#include <limits>

#include "bindings/tensors.h"
#include "bindings/threads.h"
#include "laplace/rows.h"

namespace khot {

// t in the given dtype, broadcast to the sizes and contiguous.
inline Tensor dense(const Tensor& t, const Sizes& sizes, ScalarType dtype) {
  if (t.scalar_type() == dtype && t.is_contiguous() && sizes_of(t) == sizes) return t;
  Tensor out = empty(t, sizes, dtype);
  torch::stable::copy_(out, t);
  return out;
}

inline ScalarType compute_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

struct SortedShape : Shape {
  ScalarType compute;  // float32 for half precision

  explicit SortedShape(const Tensor& x) : Shape(x), compute(compute_of(x)) {
    STD_TORCH_CHECK(n < std::numeric_limits<int32_t>::max(), "khot: rows must be shorter than 2^31");
  }
  // serve(workspace, row) for all rows. Each thread has its own workspace.
  template <class R, class Serve>
  void share(int64_t length, int arrays, const Serve& serve) const {
    row_ranges(rows, length, [&](int64_t begin, int64_t end) {
      laplace::Workspace<R> work(length, arrays);
      for (int64_t row = begin; row < end; ++row) serve(work, row);
    });
  }
};

template <class Body>
void for_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Double) {
    body(double());
  } else {
    body(float());
  }
}

// The result in the input's dtype, which it has already but for half precision.
inline Tensor narrowed(const Tensor& t, const Tensor& like) {
  return t.scalar_type() == like.scalar_type() ? t : torch::stable::to(t, like.scalar_type());
}

}  // namespace khot
