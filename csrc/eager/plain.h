// What every plain call asks of its arguments, and what it tells the kernels of khot._C about rows.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <optional>

#include "bindings/rows.h"
#include "kernels.h"

namespace khot {

using at::Tensor;

// The soft top-k, the soft count and the top-k share their rows among threads, and take calls of any size: at
// (4096, 64) the ordinary way takes as long as a third of the two kernels of the soft top-k. Of the others,
// which do not share their rows, this many entries are the most that one call takes.
constexpr int64_t kAny = std::numeric_limits<int64_t>::max(), kMost = 1 << 14;

inline const Served* served = nullptr;                 // what khot._C offers
inline PyTypeObject* class_of[std::size(kCdfs)] = {};  // khot.cdfs.Logistic and so on, by their Cdf

inline bool plain_state() {
  using c10::DispatchKey;
  const c10::DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  return usual.has_all(c10::impl::tls_local_dispatch_key_set().included_) &&
         !c10::impl::dispatch_mode_enabled() && !at::impl::torch_function_mode_enabled();
}

inline bool plain_tensor(const Tensor& x) {
  using c10::DispatchKey;
  const c10::DispatchKeySet usual(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  return usual.has_all(x.key_set());
}

inline std::optional<Dtype> dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat;
    case at::kDouble:
      return Dtype::kDouble;
    case at::kHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      return std::nullopt;
  }
}

// The rows of a contiguous tensor.
struct Rows {
  Rows(const Tensor& x, Dtype dtype)
      : data(static_cast<const char*>(x.const_data_ptr())),
        bytes(x.size(-1) * x.element_size()),
        dtype(dtype) {}
  Rows(const float* rows, int64_t n)
      : data(reinterpret_cast<const char*>(rows)), bytes(n * sizeof(float)), dtype(Dtype::kFloat) {}
  Row operator()(int64_t row) const { return {data + row * bytes, dtype, 1}; }
  Results results_in(void* out) const { return {static_cast<char*>(out), bytes}; }  // of the same shape

  const char* data;
  int64_t bytes;
  Dtype dtype;
};

// A number for each row, of the dtype of x.
template <class Value>
Tensor per_row(const Tensor& x, const Value& value) {
  Tensor result = at::empty(x.sizes().slice(0, x.dim() - 1), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "khot", [&] {
    scalar_t* const out = result.mutable_data_ptr<scalar_t>();
    for (int64_t row = 0; row < result.numel(); ++row) out[row] = static_cast<scalar_t>(value(row));
  });
  return result;
}

// Whether every row has a hard mask: a row without one is NaN.
inline bool has_results(const Tensor& mask) {
  bool all = true;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, mask.scalar_type(), "khot", [&] {
    const scalar_t* const first = mask.const_data_ptr<scalar_t>();
    for (int64_t at = 0; at < mask.numel(); at += mask.size(-1)) {
      all = all && !std::isnan(static_cast<double>(first[at]));
    }
  });
  return all;
}

template <class Choice, size_t count>
const char* name_of(Choice choice, const Named<Choice> (&known)[count]) {
  for (const Named<Choice>& one : known) {
    if (one.choice == choice) return one.name;
  }
  return "";
}

// A new tensor. The way through torch's dispatcher takes longer than the allocation.
inline Tensor empty(at::IntArrayRef sizes, c10::Device device, at::ScalarType dtype) {
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, device);
  return at::detail::empty_generic(sizes, c10::GetAllocator(device.type()), c10::DispatchKeySet(key), dtype,
                                   std::nullopt);
}

// The draw of khot/_ops/uniform.py, new_seed: what torch.randint does, without its ways through the
// dispatcher.
inline void draw_seed(Tensor& seed, const std::optional<at::Generator>& generator) {
  const at::AutoDispatchBelowADInplaceOrView below;
  seed.random_(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), generator);
}

using Context = torch::autograd::AutogradContext;
using Variables = torch::autograd::variable_list;

// ---------------------------------------------------------------------------------- from Python

// A number of Python, or of a tensor without dimensions and gradient.
inline std::optional<double> number(PyObject* value) {
  if (PyFloat_CheckExact(value)) return PyFloat_AS_DOUBLE(value);
  if (THPVariable_CheckExact(value)) {
    const Tensor& t = THPVariable_Unpack(value);
    if (t.dim() != 0 || !plain_tensor(t) || t.requires_grad() || t._fw_grad(0).defined()) return std::nullopt;
    switch (t.scalar_type()) {
      case at::kFloat:
        return *t.const_data_ptr<float>();
      case at::kDouble:
        return *t.const_data_ptr<double>();
      case at::kLong:
        return static_cast<double>(*t.const_data_ptr<int64_t>());
      default:
        return std::nullopt;
    }
  }
  if (!PyLong_CheckExact(value)) return std::nullopt;
  const double result = PyLong_AsDouble(value);
  if (result == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return result;
}

inline bool named(PyObject* value, const char* name) {
  return PyUnicode_CheckExact(value) && PyUnicode_CompareWithASCIIString(value, name) == 0;
}

// What stands for a CDF: its name and, for a power, p.
struct CdfKey {
  Cdf cdf;
  double power;
};

// A CDF by its name or as an object, which layers keep; a power is an object.
inline std::optional<CdfKey> cdf_of(PyObject* cdf) {
  for (const Named<Cdf>& one : kCdfs) {
    if (Py_TYPE(cdf) == class_of[static_cast<int>(one.choice)]) {
      if (one.choice != Cdf::kPower) return CdfKey{one.choice, 0};
      THPObjectPtr p(PyObject_GetAttrString(cdf, "p"));
      if (!p) throw python_error();
      const auto power = number(p);
      return power ? std::optional(CdfKey{one.choice, *power}) : std::nullopt;
    }
    if (one.choice != Cdf::kPower && named(cdf, one.name)) return CdfKey{one.choice, 0};
  }
  return std::nullopt;
}

// A tensor that has its rows in a dimension, counted from the end as -1, -2 and so on, in a plain state; null
// for everything else.
inline const Tensor* rows_along(PyObject* input, PyObject* dim, int64_t& axis) {
  if (!PyLong_CheckExact(dim)) return nullptr;
  if (!THPVariable_CheckExact(input) || !plain_state()) return nullptr;
  const Tensor& x = THPVariable_Unpack(input);
  int overflow = 0;
  const long at = PyLong_AsLongAndOverflow(dim, &overflow);
  if (overflow != 0 || at < -x.dim() || at >= x.dim()) return nullptr;
  axis = at < 0 ? at : at - x.dim();
  if (!dtype_of(x) || x.numel() == 0) return nullptr;
  return x._fw_grad(0).defined() ? nullptr : &x;
}

// The same if that is the last dimension.
inline const Tensor* rows_in(PyObject* input, PyObject* dim) {
  int64_t axis = 0;
  const Tensor* const x = rows_along(input, dim, axis);
  return axis == -1 ? x : nullptr;
}

// The same on the CPU if it is plain, of at most so many entries. It is contiguous, or so small that a copy
// which is costs less than the ordinary way.
inline const Tensor* rows_of(PyObject* input, PyObject* dim, int64_t most) {
  const Tensor* x = rows_in(input, dim);
  if (x == nullptr || served == nullptr || !plain_tensor(*x) || x->numel() > most) return nullptr;
  return x->numel() > kMost && !x->is_contiguous() ? nullptr : x;
}

}  // namespace khot
