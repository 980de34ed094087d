// Tensors as the kernels see them: rows and per-row scalars, whatever the strides.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "bindings/empty.h"
#include "bindings/rows.h"
#include "kernels.h"

namespace khot {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::Double:
      return Dtype::kDouble;
    case ScalarType::Half:
      return Dtype::kHalf;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "khot: scores must have dtype float64, float32, float16 or bfloat16");
  }
}

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2; }

// Where the entries of a batch of the given sizes lie in a tensor that broadcasts with it.
class Offsets {
 public:
  Offsets(const Tensor& t, const Sizes& batch, int64_t trailing) : batch_(batch), strides_(batch.size()) {
    const int64_t own = t.dim() - trailing;
    STD_TORCH_CHECK(own <= static_cast<int64_t>(batch.size()), "khot: too many dimensions to broadcast");
    for (int64_t i = 0; i < own; ++i) {
      const size_t to = batch.size() - own + i;
      STD_TORCH_CHECK(t.size(i) == 1 || t.size(i) == batch[to], "khot: shapes that do not broadcast");
      strides_[to] = t.size(i) == 1 ? 0 : t.stride(i);
    }
    // Mostly one stride serves all rows, and then an offset is one multiplication.
    int64_t expected = 0;
    bool first = true;
    for (size_t i = batch.size(); i-- > 0;) {
      if (batch[i] == 1) continue;
      if (first) {
        expected = stride_ = strides_[i];
        first = false;
      }
      even_ = even_ && strides_[i] == expected;
      expected = strides_[i] * batch[i];
    }
  }

  int64_t operator()(int64_t row) const {
    if (even_) return row * stride_;
    int64_t offset = 0;
    for (size_t i = batch_.size(); i-- > 0;) {
      offset += row % batch_[i] * strides_[i];
      row /= batch_[i];
    }
    return offset;
  }

 private:
  Sizes batch_, strides_;
  int64_t stride_ = 0;
  bool even_ = true;
};

inline Sizes sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}

inline int64_t product(const Sizes& sizes) {
  int64_t result = 1;
  for (int64_t size : sizes) result *= size;
  return result;
}

// The rows of a tensor: the sizes of their batch, how many they are, and how many entries each has.
struct Shape {
  Sizes sizes, batch;
  int64_t rows, n;

  explicit Shape(const Tensor& x) : sizes(sizes_of(x)), batch(sizes) {
    STD_TORCH_CHECK(sizes.size() > 0, "khot: scores need a dimension");
    batch.pop_back();
    rows = product(batch), n = sizes.back();
  }
  Sizes with(int64_t m) const {
    Sizes result = batch;
    result.push_back(m);
    return result;
  }
};

// The rows of a tensor that broadcasts with shape (*batch, n); it has a dimension of n or 1 entries.
class Rows {
 public:
  Rows(const Tensor& x, const Sizes& batch) : Rows(x, batch, x.size(x.dim() - 1)) {}
  Rows(const Tensor& x, const Sizes& batch, int64_t n)
      : tensor_(usable(x) ? x : torch::stable::contiguous(x)),
        dtype_(to_dtype(x.scalar_type())),
        step_(step_of(tensor_, n)),
        offsets_(tensor_, batch, 1),
        data_(static_cast<const char*>(tensor_.const_data_ptr())),
        size_(size_of(dtype_)) {}

  Row operator()(int64_t row) const { return {data_ + offsets_(row) * size_, dtype_, step_}; }
  Dtype dtype() const { return dtype_; }

 private:
  static int64_t step_of(const Tensor& x, int64_t n) {
    const int64_t last = x.dim() - 1;
    STD_TORCH_CHECK(x.size(last) == n || x.size(last) == 1, "khot: rows that do not broadcast");
    if (x.size(last) == 1) return n == 1 ? 1 : 0;
    return x.stride(last) == 1 ? 1 : 0;
  }
  static bool usable(const Tensor& x) {
    const int64_t stride = x.stride(x.dim() - 1);
    return stride == 0 || stride == 1 || x.size(x.dim() - 1) <= 1;
  }

  Tensor tensor_;
  Dtype dtype_;
  int64_t step_;
  Offsets offsets_;
  const char* data_;
  int64_t size_;
};

// The tensor in double. The way through torch's dispatcher takes longer than to copy a few floats.
inline Tensor in_double(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Double) return t;
  if (t.scalar_type() != ScalarType::Float || !t.is_contiguous()) {
    return torch::stable::to(t, ScalarType::Double);
  }
  Tensor result = empty(t, sizes_of(t), ScalarType::Double);
  std::copy_n(t.const_data_ptr<float>(), t.numel(), result.mutable_data_ptr<double>());
  return result;
}

// Per-row scalars of any floating-point dtype, broadcast with the batch.
class RowScalars {
 public:
  RowScalars(const Tensor& t, const Sizes& batch)
      : tensor_(in_double(t)), offsets_(tensor_, batch, 0), data_(tensor_.const_data_ptr<double>()) {}

  double operator()(int64_t row) const { return data_[offsets_(row)]; }

 private:
  Tensor tensor_;
  Offsets offsets_;
  const double* data_;
};

// The rows of a contiguous result.
inline Results results_in(Tensor& out) {
  return {static_cast<char*>(out.mutable_data_ptr()),
          out.size(out.dim() - 1) * size_of(to_dtype(out.scalar_type()))};
}

// A number in double for each row, where results go.
inline Tensor per_row(const Tensor& x, const Shape& shape) {
  return empty(x, shape.batch, ScalarType::Double);
}
inline double* numbers_in(Tensor& t) { return t.mutable_data_ptr<double>(); }

}  // namespace khot
