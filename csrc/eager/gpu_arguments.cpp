// Python's arguments of a plain call on a GPU, by their roles (prepared.h).
#include <ATen/SavedTensorHooks.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "eager/gpu_calls.h"

namespace khot::gpu {
namespace {

bool is_beside(const Tensor& value, const Tensor& x) {
  return is_there(value) && value.device() == x.device() && !value._fw_grad(0).defined();
}

// A tensor on the device of x that nothing records.
bool is_constant(const Tensor& value, const Tensor& x) {
  return is_beside(value, x) && !value.requires_grad();
}

bool broadcasts(at::IntArrayRef shape, at::IntArrayRef target) {
  if (shape.size() > target.size()) return false;
  for (size_t i = 1; i <= shape.size(); ++i) {
    const int64_t size = shape[shape.size() - i];
    if (size != 1 && size != target[target.size() - i]) return false;
  }
  return true;
}

// A number of Python, which has to be in the range that it is in the ordinary way as well, or one for each
// row.
bool read_number(PyObject* value, char role, const Tensor& x, const Shape& shape, Number& found,
                 int64_t& fact) {
  if (PyFloat_CheckExact(value) || PyLong_CheckExact(value)) {
    const auto given = number(value);
    if (!given || !by_value(*given)) return false;
    if (role != 't' && *given > static_cast<double>(shape.n)) return false;
    if (role == 'i' && *given != std::floor(*given)) return false;
    found.value = *given;
    return true;
  }
  if (!THPVariable_CheckExact(value)) return false;
  const Tensor& given = THPVariable_Unpack(value);
  const at::ScalarType dtype = given.scalar_type();
  const bool integer = dtype == at::kLong || dtype == at::kInt;
  if (!is_beside(given, x) || !(integer || dtype_of(given)) || !broadcasts(given.sizes(), shape.batch()))
    return false;
  found.given = given;
  found.tensor = for_launch(given, shape.batch());
  fact = given_fact(found.tensor.scalar_type(), given.numel() == 1);
  return true;
}

bool read_cost(PyObject* value, const Tensor& x, Call& call) {
  if (!THPVariable_CheckExact(value)) return false;
  const Tensor& cost = THPVariable_Unpack(value);
  const bool of_each = cost.sizes() == x.sizes(), of_column = cost.dim() == 1 && cost.numel() == x.size(-1);
  if (!is_constant(cost, x) || !dtype_of(cost) || !cost.is_contiguous() || !(of_each || of_column))
    return false;
  call.signature.cost = given_fact(cost.scalar_type(), cost.numel() == x.numel());
  call.inputs.push_back(cost);
  return true;
}

bool read_mask(PyObject* value, const Tensor& x, Call& call) {
  if (value == Py_None) return true;
  if (!THPVariable_CheckExact(value)) return false;
  call.mask = THPVariable_Unpack(value);
  if (call.inputs.size() > 1) {  // the mask makes the cost one of each entry
    call.signature.cost = given_fact(call.inputs[1].scalar_type(), true);
  }
  return is_constant(call.mask, x) && call.mask.scalar_type() == at::kBool &&
         broadcasts(call.mask.sizes(), x.sizes());
}

std::optional<int64_t> cdf_fact(PyObject* value) {
  for (const Named<Cdf>& one : kCdfs) {
    if (Py_TYPE(value) == class_of[static_cast<int>(one.choice)] && one.choice != Cdf::kPower) {
      return fact_of(std::string_view(one.name));
    }
  }
  return PyUnicode_CheckExact(value) ? fact_of(value) : std::nullopt;
}

}  // namespace

Shape::Shape(const Tensor& x, int64_t axis)
    : axis(axis), n(x.size(axis)), sizes(x.sizes().begin(), x.sizes().end()) {
  if (axis != -1) std::rotate(sizes.end() + axis, sizes.end() + axis + 1, sizes.end());
}

bool Shape::is_dense(const Tensor& x) const {
  if (axis == -1) return x.is_contiguous();
  if (n > 1 && x.stride(axis) != 1) return false;
  int64_t step = n;
  for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
    if (dim == x.dim() + axis || x.size(dim) == 1) continue;
    if (x.stride(dim) != step) return false;
    step *= x.size(dim);
  }
  return true;
}

void Shape::put_back(Tensor& made) const {
  if (axis == -1) return;
  at::DimVector size(made.sizes()), stride(made.strides());
  std::rotate(size.end() + axis, size.end() - 1, size.end());
  std::rotate(stride.end() + axis, stride.end() - 1, stride.end());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
}

Tensor for_launch(const Tensor& given, at::IntArrayRef batch) {
  Tensor found = given.requires_grad() ? given.detach() : given;
  if (!dtype_of(found)) found = found.to(at::kDouble);
  if (found.numel() == 1) return found;
  return (found.sizes() == batch ? found : found.expand(batch)).contiguous();
}

bool read(Operator which, PyObject* const* args, Call& call) {
  const char* const roles = kOperators[which].roles;
  // What the gradient reads besides the arguments would be kept from these hooks.
  if (at::GradMode::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return false;
  int64_t axis = -1;
  const Tensor* const given = rows_along(args[0], args[std::strchr(roles, 'd') - roles], axis);
  if (given == nullptr || !is_there(*given)) return false;
  const Tensor& x = *given;
  call.shape = Shape(x, axis);
  // the ordinary way copies rows whose entries do not lie side by side, too, but no others
  if (!call.shape.is_dense(x) && (call.shape.n == 1 || x.stride(axis) == 1)) return false;
  call.signature = Signature(which, x, call.shape.n);
  call.inputs.push_back(x);
  int choice = 0, number = 0;
  for (int i = 1; roles[i] != 0; ++i) {
    PyObject* const value = args[i];
    switch (roles[i]) {
      case 'k':
      case 'i':
      case 't':
        if (!read_number(value, roles[i], x, call.shape, call.numbers[number],
                         call.signature.numbers[number])) {
          return false;
        }
        ++number;
        break;
      case 'c':
      case 'o':
      case '*': {
        const auto fact = roles[i] == 'c' ? cdf_fact(value) : fact_of(value);
        if (!fact) return false;
        call.choices[choice] = value;
        call.signature.choices[choice++] = *fact;
        if (roles[i] == 'o') call.ascending = value == Py_False;
        break;
      }
      case 'w':
        if (axis != -1 || !read_cost(value, x, call)) return false;
        break;
      case 'm':
        if (!read_mask(value, x, call)) return false;
        break;
      case 'l':
        if (!PyBool_Check(value)) return false;
        call.negated = value == Py_False;
        break;
      case 'T':
      case 'F':
        if (value != (roles[i] == 'T' ? Py_True : Py_False)) return false;
        break;
      case 'N':
        if (value != Py_None) return false;
        break;
    }
  }
  return true;
}

}  // namespace khot::gpu
