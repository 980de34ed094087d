// khot._eager: calls of the commonest operators, in eager mode, without a line of Python.
//
// At (4, 64) the kernel takes 3 µs, the operator's call 5 and the Python around it 8; backward, in a Function
// of Python, takes 60. Here arguments are read, checked and computed with in one call, and the gradient is
// torch's own Function in C++. Whatever is not a plain call gets None, and takes the ordinary way: other
// types, other devices, transforms, modes, tangents, values out of range. That way also raises the errors.
//
// On a GPU a call is one launch, which the ordinary way prepares when it first makes such a call (launch.h).
//
// It needs torch's C++ interface, which is not stable, so it serves only the torch that it was built with
// (khot/_core/eager.py). The kernels are those of khot._C.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#include "bindings/launch.h"
#include "bindings/rows.h"
#include "kernels.h"

namespace khot {
namespace {

using at::Tensor;

// The soft top-k, the soft count and the top-k share their rows among threads, and take calls of any size: at
// (4096, 64) the ordinary way takes as long as a third of the two kernels of the soft top-k. Of the others,
// which do not share their rows, this many entries are the most that one call takes.
constexpr int64_t kAny = std::numeric_limits<int64_t>::max(), kMost = 1 << 14;

const Served* served = nullptr;
PyTypeObject* class_of[std::size(kCdfs)] = {};  // khot.cdfs.Logistic and so on, by their Cdf

bool plain_state() {
  using c10::DispatchKey;
  const c10::DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  return usual.has_all(c10::impl::tls_local_dispatch_key_set().included_) &&
         !c10::impl::dispatch_mode_enabled() && !at::impl::torch_function_mode_enabled();
}

bool plain_tensor(const Tensor& x) {
  using c10::DispatchKey;
  const c10::DispatchKeySet usual(
      {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  return usual.has_all(x.key_set());
}

std::optional<Dtype> dtype_of(const Tensor& x) {
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

bool plain(const Tensor& x) { return plain_tensor(x) || gpu::is_there(x); }

// The rows of a contiguous tensor.
struct Rows {
  Rows(const Tensor& x, Dtype dtype)
      : data(static_cast<const char*>(x.const_data_ptr())),
        bytes(x.size(-1) * x.element_size()),
        dtype(dtype) {}
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
  const auto fill = [&](auto* out) {
    for (int64_t row = 0; row < result.numel(); ++row) {
      out[row] = static_cast<std::remove_reference_t<decltype(*out)>>(value(row));
    }
  };
  switch (*dtype_of(x)) {
    case Dtype::kFloat:
      fill(result.mutable_data_ptr<float>());
      break;
    case Dtype::kDouble:
      fill(result.mutable_data_ptr<double>());
      break;
    case Dtype::kHalf:
      fill(result.mutable_data_ptr<at::Half>());
      break;
    case Dtype::kBFloat16:
      fill(result.mutable_data_ptr<at::BFloat16>());
      break;
  }
  return result;
}

template <class Choice, size_t count>
const char* name_of(Choice choice, const Named<Choice> (&known)[count]) {
  for (const Named<Choice>& one : known) {
    if (one.choice == choice) return one.name;
  }
  return "";
}

using Context = torch::autograd::AutogradContext;
using Variables = torch::autograd::variable_list;

// ------------------------------------------------------------------- the soft top-k and its threshold

struct Problem {
  Spec spec;
  double k, tau;
  const double* counts = nullptr;  // on a GPU: k of each row, in the place of k
  bool threshold() const { return spec.output == Output::kThreshold; }
  gpu::Signature signature(gpu::Signature::Operator which, const Tensor& x) const {
    return {which, x, static_cast<int64_t>(spec.cdf), static_cast<int64_t>(spec.output)};
  }
};

// y or log y on a GPU; undefined where nothing was prepared for it, or nothing could be started.
Tensor forward_there(const Tensor& x, const Problem& problem, double* hi, double* lo) {
  const bool by_row = problem.counts != nullptr;
  const auto which = by_row ? gpu::Signature::kSoftTopkOfRows : gpu::Signature::kSoftTopk;
  const auto prepared = gpu::find(problem.signature(which, x));
  if (prepared == nullptr) return Tensor();
  Tensor y = at::empty(x.sizes(), x.options());
  const void* const from = x.const_data_ptr();
  void* const to = y.mutable_data_ptr();
  const bool started = by_row ? prepared->start(x.device(), {from, to, hi, lo, problem.counts}, {problem.tau})
                              : prepared->start(x.device(), {from, to, hi, lo}, {problem.k, problem.tau});
  return started ? y : Tensor();
}

// Two numbers for each row, both of which begin where Triton's kernels can load and store several at once.
class PairsThere {
 public:
  explicit PairsThere(const Tensor& x)
      : rows_((x.numel() / x.size(-1) + 1) / 2 * 2),
        both_(at::empty({2 * rows_}, x.options().dtype(at::kDouble))) {}
  double* first() { return both_.mutable_data_ptr<double>(); }
  double* second() { return first() + rows_; }

 private:
  int64_t rows_;
  Tensor both_;
};

// y, log y or the threshold. It is undefined where a row has no result.
Tensor forward(const Tensor& x, const Problem& problem, double* hi, double* lo) {
  if (gpu::is_there(x)) return forward_there(x, problem, hi, lo);
  const int64_t rows = x.numel() / problem.spec.n;
  Tensor y = problem.threshold() ? Tensor() : at::empty(x.sizes(), x.options());
  void* const out = y.defined() ? y.mutable_data_ptr() : nullptr;
  const Tensor dense = x.contiguous();
  const Rows scores(dense, *dtype_of(x));
  const Same k{problem.k}, tau{problem.tau};
  served->soft_topk(problem.spec,
                    SelectionRows(scores, k, Invertible<Same>{tau}, scores.results_in(out), hi, lo), rows);
  double total = 0;  // one NaN makes it NaN
  for (int64_t row = 0; row < rows; ++row) total += std::isnan(hi[row]) ? hi[row] : 0;
  if (std::isnan(total)) return Tensor();
  return y.defined() ? y : per_row(x, [=](int64_t row) { return hi[row] + lo[row]; });
}

bool density_from_value(Cdf cdf) { return cdf == Cdf::kLogistic || cdf == Cdf::kLaplace; }

// The derivatives as khot/_ops/soft_topk.py has them: in operations that can be differentiated and mapped.
Tensor vjp(const Tensor& grad, const Tensor& grad_lo, const Tensor& x, const Tensor& hi, const Tensor& lo,
           const Problem& problem) {
  static const auto call = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("khot::soft_topk_vjp", "")
                               .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                             const Tensor&, double, c10::string_view, c10::string_view)>();
  return call.call(grad, grad_lo, x, hi, lo, problem.tau, name_of(problem.spec.cdf, kCdfs),
                   name_of(problem.spec.output, kOutputs));
}

// The gradient of x on a GPU, from a prepared launch or by the operator, which prepares one.
Tensor backward_there(const Tensor& grad, const Tensor& x, const Tensor& hi, const Tensor& lo,
                      const Problem& problem) {
  if (grad.is_contiguous() && grad.scalar_type() == x.scalar_type() && grad.sizes() == x.sizes()) {
    const pybind11::gil_scoped_acquire alone;
    const auto prepared = gpu::find(problem.signature(gpu::Signature::kSoftTopkBackward, x));
    if (prepared != nullptr) {
      Tensor dx = at::empty(x.sizes(), x.options());
      PairsThere rest(x);  // the gradients of k and tau, which are numbers
      const bool started =
          prepared->start(x.device(),
                          {grad.const_data_ptr(), x.const_data_ptr(), hi.const_data_ptr(),
                           lo.const_data_ptr(), dx.mutable_data_ptr(), rest.first(), rest.second()},
                          {problem.tau});
      if (started) return dx;
    }
  }
  static const auto call =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("khot::soft_topk_backward", "")
          .typed<std::tuple<Tensor, Tensor, Tensor>(
              const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
              c10::string_view, double, c10::string_view, const std::optional<Tensor>&)>();
  const auto number = at::TensorOptions(at::kDouble);
  return std::get<0>(call.call(grad, at::scalar_tensor(0.0, number), x, hi, lo,
                               at::scalar_tensor(problem.tau, number), name_of(problem.spec.cdf, kCdfs), 0.0,
                               name_of(problem.spec.output, kOutputs), std::nullopt));
}

class SoftTopk : public torch::autograd::Function<SoftTopk> {
 public:
  // y, log y or the threshold, and the part of the threshold that carries its derivatives
  static Variables forward(Context* context, const Tensor& x, const Problem& problem, bool* valid) {
    const auto options = x.options().dtype(at::kDouble);
    Tensor hi = at::empty(x.sizes().slice(0, x.dim() - 1), options);
    Tensor lo = at::empty(x.sizes().slice(0, x.dim() - 1), options);
    Tensor y = khot::forward(x, problem, hi.mutable_data_ptr<double>(), lo.mutable_data_ptr<double>());
    *valid = y.defined();
    if (!*valid) y = at::empty({0}, x.options());  // the call is left to the ordinary way
    context->set_materialize_grads(false);
    const bool serves = x.scalar_type() == at::kFloat && !gpu::is_there(x) &&
                        density_from_value(problem.spec.cdf) && problem.spec.output == Output::kValue;
    context->save_for_backward({x, serves ? y : Tensor(), hi, lo});
    context->saved_data["problem"] =
        std::vector<double>{static_cast<double>(problem.spec.cdf), static_cast<double>(problem.spec.output),
                            problem.k, problem.tau};
    return {y, lo};
  }

  static Variables backward(Context* context, const Variables& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return {Tensor(), Tensor(), Tensor()};
    const Variables saved = context->get_saved_variables();
    const Tensor &x = saved[0], &y = saved[1], &hi = saved[2], &lo = saved[3];
    const std::vector<double> given = context->saved_data["problem"].toDoubleVector();
    const Spec spec{static_cast<Cdf>(static_cast<int>(given[0])), 0,
                    static_cast<Output>(static_cast<int>(given[1])), x.size(-1), nullptr};
    const Problem problem{spec, given[2], given[3]};
    const bool direct = !at::GradMode::is_enabled() && plain_state() && grads[0].defined() &&
                        plain(grads[0]) && plain(x) && !grads[1].defined();
    Tensor grad = grads[0], grad_lo = grads[1];
    if (problem.threshold() && grad.defined()) {  // the threshold is lo and a constant
      grad = grad.to(at::kDouble);
      grad_lo = grad_lo.defined() ? at::add(grad_lo, grad) : grad;
      grad = Tensor();
    }
    if (!direct) {
      const Tensor first = grad.defined() ? grad : at::zeros_like(x);
      const Tensor second = grad_lo.defined() ? grad_lo : at::zeros({}, hi.options());
      return {vjp(first, second, x, hi, lo, problem), Tensor(), Tensor()};
    }
    RECORD_FUNCTION("khot::soft_topk_backward", std::vector<c10::IValue>());
    if (gpu::is_there(x)) return {backward_there(grad, x, hi, lo, problem), Tensor(), Tensor()};
    Tensor result = at::empty(x.sizes(), x.options());
    if (grad.defined()) grad = grad.contiguous();
    if (grad_lo.defined()) grad_lo = grad_lo.contiguous();
    const Tensor dense = x.contiguous();
    const Dtype dtype = *dtype_of(x);
    const Rows scores(dense, dtype);
    std::optional<Rows> outputs, incoming;
    if (y.defined()) outputs.emplace(y, Dtype::kFloat);
    if (grad.defined()) incoming.emplace(grad, dtype);
    const Listed given_lo{grad_lo.defined() ? grad_lo.const_data_ptr<double>() : nullptr};
    const GradientRows rows(dtype, scores, Invertible<Same>{{problem.tau}}, outputs, incoming, given_lo,
                            Listed{hi.const_data_ptr<double>()}, Listed{lo.const_data_ptr<double>()},
                            scores.results_in(result.mutable_data_ptr()), nullptr, nullptr);
    served->soft_topk_backward(spec, rows, x.numel() / spec.n);
    return {result, Tensor(), Tensor()};
  }
};

// The result of a problem, with its gradient; undefined where a row has no result.
Tensor solve(const Tensor& x, const Problem& problem) {
  RECORD_FUNCTION("khot::soft_topk", std::vector<c10::IValue>());
  const bool there = gpu::is_there(x);
  std::optional<pybind11::gil_scoped_release> others_may_run;
  if (!there) others_may_run.emplace();
  if (at::GradMode::is_enabled() && x.requires_grad()) {
    bool valid = true;
    const Tensor y = SoftTopk::apply(x, problem, &valid)[0];
    return valid ? y : Tensor();
  }
  if (there) {
    PairsThere threshold(x);
    return forward_there(x, problem, threshold.first(), threshold.second());
  }
  c10::SmallVector<double, 64> threshold(2 * (x.numel() / problem.spec.n));
  return forward(x, problem, threshold.data(), threshold.data() + threshold.size() / 2);
}

// ---------------------------------------------------------------------------------- the soft count

using Counts = LevelRows<Rows, Same, Listed>;

Counts counts_of(const Tensor& x, double at, double tau) {
  return {1, Rows(x, *dtype_of(x)), Same{tau}, Same{at}};
}

CountSpec count_spec(const Tensor& x, Cdf cdf) {
  return {{cdf, 0, Output::kValue, x.size(-1), nullptr}, 1, false};
}

Tensor count(const Tensor& x, double at, double tau, Cdf cdf) {
  const int64_t rows = x.numel() / x.size(-1);
  const Tensor scores = x.contiguous();
  c10::SmallVector<double, 64> counts(rows);
  Counts problem = counts_of(scores, at, tau);
  problem.values = counts.data();
  served->soft_count(count_spec(x, cdf), problem, rows);
  return per_row(x, [&](int64_t row) { return counts[row]; });
}

class SoftCount : public torch::autograd::Function<SoftCount> {
 public:
  static Tensor forward(Context* context, const Tensor& x, double at, double tau, Cdf cdf) {
    context->save_for_backward({x});
    context->saved_data["problem"] = std::vector<double>{at, tau, static_cast<double>(cdf)};
    return count(x, at, tau, cdf);
  }

  static Variables backward(Context* context, const Variables& grads) {
    const Tensor x = context->get_saved_variables()[0], &grad = grads[0];
    const std::vector<double> given = context->saved_data["problem"].toDoubleVector();
    const double at = given[0], tau = given[1];
    const Cdf cdf = static_cast<Cdf>(static_cast<int>(given[2]));
    if (at::GradMode::is_enabled() || !plain_state() || !plain_tensor(grad) || !plain_tensor(x)) {
      // the formulas of khot/_ops/soft_count.py, in operations that can be differentiated and mapped
      static const auto vjp =
          c10::Dispatcher::singleton()
              .findSchemaOrThrow("khot::soft_count_vjp", "")
              .typed<Tensor(const Tensor&, const Tensor&, double, double, c10::string_view)>();
      return {vjp.call(grad, x, at, tau, name_of(cdf, kCdfs)), Tensor(), Tensor(), Tensor()};
    }
    RECORD_FUNCTION("khot::soft_count_backward", std::vector<c10::IValue>());
    Tensor result = at::empty(x.sizes(), x.options());
    const Tensor incoming = grad.to(at::kDouble).contiguous(), scores = x.contiguous();
    Counts problem = counts_of(scores, at, tau);
    problem.grads = Listed{incoming.const_data_ptr<double>()};
    problem.results = problem.scores.results_in(result.mutable_data_ptr());
    served->soft_count_backward(count_spec(x, cdf), problem, incoming.numel());
    return {result, Tensor(), Tensor(), Tensor()};
  }
};

// ---------------------------------------------------------------------------------- from Python

// A number of Python, or of a tensor without dimensions and gradient.
std::optional<double> number(PyObject* value) {
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

bool named(PyObject* value, const char* name) {
  return PyUnicode_CheckExact(value) && PyUnicode_CompareWithASCIIString(value, name) == 0;
}

// A CDF without a parameter, by its name or as an object, which layers keep.
std::optional<Cdf> cdf_of(PyObject* cdf) {
  for (const Named<Cdf>& one : kCdfs) {
    if (one.choice == Cdf::kPower) continue;
    if (named(cdf, one.name) || Py_TYPE(cdf) == class_of[static_cast<int>(one.choice)]) return one.choice;
  }
  return std::nullopt;
}

// A plain tensor that has its rows in the last dimension; null for everything else.
const Tensor* rows_in(PyObject* input, PyObject* dim) {
  if (!PyLong_CheckExact(dim)) return nullptr;
  if (!THPVariable_CheckExact(input) || !plain_state()) return nullptr;
  const Tensor& x = THPVariable_Unpack(input);
  int overflow = 0;
  const long at = PyLong_AsLongAndOverflow(dim, &overflow);
  if (overflow != 0) return nullptr;
  if (x.dim() == 0 || (at != -1 && at != x.dim() - 1)) return nullptr;
  if (!plain(x) || !dtype_of(x) || x.numel() == 0) return nullptr;
  return x._fw_grad(0).defined() ? nullptr : &x;
}

// The same on the CPU, of at most so many entries. It is contiguous, or so small that a copy which is costs
// less than the ordinary way.
const Tensor* rows_of(PyObject* input, PyObject* dim, int64_t most) {
  const Tensor* x = rows_in(input, dim);
  if (x == nullptr || served == nullptr || !plain_tensor(*x) || x->numel() > most) return nullptr;
  return x->numel() > kMost && !x->is_contiguous() ? nullptr : x;
}

// The same on a GPU, contiguous.
const Tensor* rows_there(PyObject* input, PyObject* dim) {
  if (gpu::driver().launch == nullptr) return nullptr;
  const Tensor* x = rows_in(input, dim);
  return x != nullptr && gpu::is_there(*x) && x->is_contiguous() ? x : nullptr;
}

// A number that a launch passes by value, with what it has to be for the ordinary way as well.
std::optional<double> passed(PyObject* value) {
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return std::nullopt;
  const auto found = number(value);
  return found && gpu::by_value(*found) ? found : std::nullopt;
}

// The k of each row on the same GPU, in float64 and without a gradient; null for everything else.
const double* counts_of(PyObject* value, const Tensor& x) {
  if (!THPVariable_CheckExact(value)) return nullptr;
  const Tensor& k = THPVariable_Unpack(value);
  const bool fits = gpu::is_there(k) && k.device() == x.device() && k.scalar_type() == at::kDouble &&
                    k.sizes() == x.sizes().slice(0, x.dim() - 1) && k.is_contiguous();
  return fits && !k.requires_grad() && !k._fw_grad(0).defined() ? k.const_data_ptr<double>() : nullptr;
}

// soft_topk(input, k, dim, tau, cdf, largest, mask, group, log)
PyObject* soft_topk(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 9, "khot: soft_topk takes 9 arguments");
  if (args[5] != Py_True || args[6] != Py_None || args[7] != Py_None) Py_RETURN_NONE;
  const Tensor* const there = rows_there(args[0], args[2]);
  const Tensor* const found = there != nullptr ? there : rows_of(args[0], args[2], kAny);
  if (found == nullptr) Py_RETURN_NONE;
  const Tensor& x = *found;
  const auto take = there != nullptr ? passed : number;
  const double* const counts = there != nullptr ? counts_of(args[1], x) : nullptr;
  const auto tau = take(args[3]), k = counts != nullptr ? std::optional(1.0) : take(args[1]);
  const auto cdf = cdf_of(args[4]);
  if (!k || !tau || !cdf || !(*k > 0 && *k <= x.size(-1)) || !(*tau > 0 && std::isfinite(*tau)))
    Py_RETURN_NONE;
  const Output output = args[8] == Py_True ? Output::kLog : Output::kValue;
  Tensor y = solve(x, {{*cdf, 0, output, x.size(-1), nullptr}, *k, *tau, counts});
  if (!y.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// The tensor, level or count, temperature and CDF of a soft count or its inverse.
struct Levelled {
  const Tensor* x = nullptr;
  double level, tau;
  Cdf cdf;
};

// (input, level, dim, tau, cdf)
Levelled levelled(PyObject* const* args, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == 5, "khot: soft_count and inverse_soft_count take 5 arguments");
  const Tensor* x = rows_of(args[0], args[2], kAny);
  if (x == nullptr) return {};
  const auto level = number(args[1]), tau = number(args[3]);
  const auto cdf = cdf_of(args[4]);
  if (!level || std::isnan(*level) || !tau || !(*tau > 0 && std::isfinite(*tau)) || !cdf) return {};
  return {x, *level, *tau, *cdf};
}

PyObject* soft_count(PyObject*, PyObject* const* args, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  const Levelled call = levelled(args, given);
  if (call.x == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::soft_count", std::vector<c10::IValue>());
  const Tensor& x = *call.x;
  Tensor result;
  {
    const pybind11::gil_scoped_release others_may_run;
    const bool recorded = at::GradMode::is_enabled() && x.requires_grad();
    result = recorded ? SoftCount::apply(x, call.level, call.tau, call.cdf)
                      : count(x, call.level, call.tau, call.cdf);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

PyObject* inverse_soft_count(PyObject*, PyObject* const* args, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  const Levelled call = levelled(args, given);
  if (call.x == nullptr || !(call.level > 0 && call.level <= call.x->size(-1))) Py_RETURN_NONE;
  Tensor t =
      solve(*call.x, {{call.cdf, 0, Output::kThreshold, call.x->size(-1), nullptr}, call.level, call.tau});
  if (!t.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(t));
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------------------------- the top-k

std::tuple<Tensor, Tensor> largest(const Tensor& x, const TopKSpec& spec) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = spec.k;
  Tensor values = at::empty(sizes, x.options()), indices = at::empty(sizes, x.options().dtype(at::kLong));
  const Tensor dense = x.contiguous();
  const Rows entries(dense, *dtype_of(x));
  const Results results{static_cast<char*>(values.mutable_data_ptr()), spec.k * x.element_size()};
  const LargestRows rows(entries, results, indices.mutable_data_ptr<int64_t>(), spec.k);
  served->topk(spec, rows, x.numel() / spec.n);
  return {values, indices};
}

class TopK : public torch::autograd::Function<TopK> {
 public:
  static Variables forward(Context* context, const Tensor& x, const TopKSpec& spec) {
    const auto [values, indices] = largest(x, spec);
    context->mark_non_differentiable({indices});
    context->save_for_backward({indices});
    context->saved_data["n"] = spec.n;
    return {values, indices};
  }

  // In operations that can be differentiated and mapped, as khot/_ops/topk.py has it.
  static Variables backward(Context* context, const Variables& grads) {
    c10::DimVector sizes(grads[0].sizes());
    sizes.back() = context->saved_data["n"].toInt();
    const Tensor indices = context->get_saved_variables()[0];
    return {at::zeros(sizes, grads[0].options()).scatter(-1, indices, grads[0]), Tensor()};
  }
};

// topk(input, k, dim, largest, sorted)
PyObject* topk(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "khot: topk takes 5 arguments");
  if (!PyLong_CheckExact(args[1]) || !PyBool_Check(args[3]) || !PyBool_Check(args[4])) Py_RETURN_NONE;
  const Tensor* found = rows_of(args[0], args[2], kAny);
  if (found == nullptr) Py_RETURN_NONE;
  const Tensor& x = *found;
  int overflow = 0;
  const long k = PyLong_AsLongAndOverflow(args[1], &overflow);
  const TopKSpec spec{x.size(-1), k, args[3] == Py_True, args[4] == Py_True};
  if (overflow != 0 || k < 1 || k > spec.n || spec.n >= int64_t{1} << 32) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::topk", std::vector<c10::IValue>());
  Tensor values, indices;
  {
    const pybind11::gil_scoped_release others_may_run;
    if (at::GradMode::is_enabled() && x.requires_grad()) {
      Variables results = TopK::apply(x, spec);
      values = std::move(results[0]), indices = std::move(results[1]);
    } else {
      std::tie(values, indices) = largest(x, spec);
    }
  }
  PyObject* const first = THPVariable_Wrap(std::move(values));
  PyObject* const second = THPVariable_Wrap(std::move(indices));
  return Py_BuildValue("(NN)", first, second);
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------------------------- the hard mask

// Whether a row has no result: then all of it is NaN.
bool starts_with_nan(const char* row, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat:
      return std::isnan(*reinterpret_cast<const float*>(row));
    case Dtype::kDouble:
      return std::isnan(*reinterpret_cast<const double*>(row));
    case Dtype::kHalf:
      return std::isnan(static_cast<float>(*reinterpret_cast<const at::Half*>(row)));
    default:
      return std::isnan(static_cast<float>(*reinterpret_cast<const at::BFloat16*>(row)));
  }
}

// topk_mask(input, k, dim, largest, mask, group)
PyObject* topk_mask(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "khot: topk_mask takes 6 arguments");
  if (args[3] != Py_True || args[4] != Py_None || args[5] != Py_None) Py_RETURN_NONE;
  if (const Tensor* there = rows_there(args[0], args[2])) {
    const auto k = passed(args[1]);
    if (!k || *k > there->size(-1)) Py_RETURN_NONE;
    const auto prepared = gpu::find({gpu::Signature::kTopkMask, *there, 0, 0});
    if (prepared == nullptr) Py_RETURN_NONE;
    RECORD_FUNCTION("khot::topk_mask", std::vector<c10::IValue>());
    Tensor y = at::empty(there->sizes(), there->options());
    const void* const x = there->const_data_ptr();
    if (!prepared->start(there->device(), {x, y.mutable_data_ptr()}, {*k})) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(y));
  }
  const Tensor* found = rows_of(args[0], args[2], kMost);
  if (found == nullptr) Py_RETURN_NONE;
  const auto k = number(args[1]);
  if (!k || !(*k > 0 && *k <= found->size(-1))) Py_RETURN_NONE;

  RECORD_FUNCTION("khot::topk_mask", std::vector<c10::IValue>());
  const Tensor x = found->contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  const Rows scores(x, *dtype_of(x));
  const HardRows rows(scores, Same{*k}, scores.results_in(y.mutable_data_ptr()));
  const int64_t n = x.size(-1), count_of_rows = x.numel() / n;
  served->kernels.topk_mask(rows, n, 0, count_of_rows);
  for (int64_t row = 0; row < count_of_rows; ++row) {
    if (starts_with_nan(static_cast<const char*>(rows.out(row)), scores.dtype)) Py_RETURN_NONE;
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------------------------- ranks and sorts

// The tensor, temperature and dtype of a soft rank or sort that needs no gradient.
struct Ranked {
  const Tensor* x = nullptr;
  Dtype dtype;
  double tau;
  bool descending;
};

// (input, dim, tau, cdf, descending, method, regularization, mask)
Ranked ranked(PyObject* const* args, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == 8, "khot: soft_rank and soft_sort take 8 arguments");
  if (cdf_of(args[3]) != Cdf::kLaplace || !PyBool_Check(args[4]) || !named(args[5], "count") ||
      !named(args[6], "l2") || args[7] != Py_None) {
    return {};
  }
  const Tensor* x = rows_of(args[0], args[1], kMost);
  const auto tau = number(args[2]);
  if (x == nullptr || !tau || !(*tau > 0 && std::isfinite(*tau))) return {};
  if ((at::GradMode::is_enabled() && x->requires_grad()) || x->element_size() < 4) return {};
  return {x, *dtype_of(*x), *tau, args[4] == Py_True};
}

PyObject* soft_rank(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Ranked call = ranked(args, count);
  if (call.x == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::laplace_count", std::vector<c10::IValue>());
  const Tensor scores = call.x->contiguous(), x = call.descending ? scores : scores.detach().neg();
  Tensor rank = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  served->laplace_rank(call.dtype, x.const_data_ptr(), x.numel() / n, n, call.tau, rank.mutable_data_ptr());
  return THPVariable_Wrap(std::move(rank));
  END_HANDLE_TH_ERRORS
}

PyObject* soft_sort(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const Ranked call = ranked(args, count);
  if (call.x == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::laplace_thresholds", std::vector<c10::IValue>());
  const Tensor x = call.x->contiguous();
  Tensor sorted = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  served->laplace_sort(call.dtype, x.const_data_ptr(), x.numel() / n, n, call.tau, call.descending,
                       sorted.mutable_data_ptr());
  return THPVariable_Wrap(std::move(sorted));
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------------------------- the Pareto sample

// What the kernel refuses must not have used up a random number.
template <class R>
bool probabilities(const R* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(p[i] >= 0 && p[i] <= 1)) return false;
  }
  return true;
}

template <class R>
void draw(const Tensor& probs, Dtype dtype, double least, double tolerance, uint64_t seed, Tensor& sample) {
  const int64_t n = probs.size(-1), rows = probs.numel() / n;
  const Rows from(probs, dtype);
  R* to = sample.mutable_data_ptr<R>();
  const std::unique_ptr<double[]> work(new double[scratch_size(n)]);
  const int64_t together = rows_together(n);
  const std::unique_ptr<bool[]> chosen(new bool[together * (n + 1)]);
  Row group[kRowsTogether];
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t count = std::min(together, rows - first);
    for (int64_t j = 0; j < count; ++j) group[j] = from(first + j);
    TORCH_CHECK(
        served->sampling.pareto(group, count, n, least, tolerance, seed, first, work.get(), chosen.get()),
        "khot: a row was refused that may be drawn");
    for (int64_t j = 0; j < count; ++j, to += n) std::copy_n(chosen.get() + j * (n + 1), n, to);
  }
}

// pareto(probs, dim, generator, least)
PyObject* pareto(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "khot: pareto takes 4 arguments");
  const Tensor* found = rows_of(args[0], args[1], kMost);
  const auto least = number(args[3]);
  if (found == nullptr || !least || found->element_size() < 4) Py_RETURN_NONE;
  std::optional<at::Generator> generator;
  if (args[2] != Py_None) {
    if (!THPGenerator_Check(args[2])) Py_RETURN_NONE;
    generator = THPGenerator_Unwrap(args[2]);
    if (!generator->device().is_cpu()) Py_RETURN_NONE;
  }
  const Tensor probs = found->contiguous();
  const int64_t n = probs.size(-1);
  const bool wide = probs.scalar_type() == at::kDouble;
  if (wide ? !probabilities(probs.const_data_ptr<double>(), probs.numel())
           : !probabilities(probs.const_data_ptr<float>(), probs.numel())) {
    Py_RETURN_NONE;
  }
  // the draw of khot/_ops/uniform.py, new_seed
  const Tensor seed = at::randint(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                                  {}, generator, at::TensorOptions(at::kLong));
  const uint64_t key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  RECORD_FUNCTION("khot::pareto_sample", std::vector<c10::IValue>());
  Tensor sample = at::empty(probs.sizes(), probs.options());
  if (wide) {
    draw<double>(probs, Dtype::kDouble, *least, n * std::numeric_limits<double>::epsilon(), key, sample);
  } else {
    draw<float>(probs, Dtype::kFloat, *least, n * std::numeric_limits<float>::epsilon(), key, sample);
  }
  return THPVariable_Wrap(std::move(sample));
  END_HANDLE_TH_ERRORS
}

// selectable(input, dim, most), on a GPU alone
PyObject* selectable(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "khot: selectable takes 3 arguments");
  const Tensor* const x = rows_there(args[0], args[1]);
  const auto most = passed(args[2]);
  if (x == nullptr || !most) Py_RETURN_NONE;
  const auto prepared = gpu::find({gpu::Signature::kSelectable, *x, 0, 0});
  if (prepared == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::selectable", std::vector<c10::IValue>());
  Tensor found = at::empty(x->sizes().slice(0, x->dim() - 1), x->options().dtype(at::kDouble));
  if (!prepared->start(x->device(), {x->const_data_ptr(), found.mutable_data_ptr()}, {*most})) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(found));
  END_HANDLE_TH_ERRORS
}

// ------------------------------------------------------------------------------- launches on a GPU

// use_driver(launch, stream, hooks, unused, device): what starts kernels; see `gpu::Driver`.
PyObject* use_driver(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "khot: use_driver takes 5 arguments");
  using c10::DispatchKey;
  gpu::Driver next;
  next.launch = reinterpret_cast<gpu::Launch>(PyLong_AsVoidPtr(args[0]));
  next.unused = static_cast<int>(PyLong_AsLong(args[3]));
  if (PyErr_Occurred()) return nullptr;
  TORCH_CHECK_VALUE(next.unused >= 0 && next.unused <= 4, "khot: unused must lie in [0, 4]");
  if (named(args[4], "cpu")) {  // for tests, which have no other device
    next.device = c10::DeviceType::CPU;
    next.keys = c10::DispatchKeySet(
        {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  } else {
    next.keys = c10::DispatchKeySet({DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                     DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA});
  }
  next.stream = Py_NewRef(args[1]);
  next.hooks = Py_NewRef(args[2]);
  std::swap(gpu::driver(), next);
  Py_XDECREF(next.stream);
  Py_XDECREF(next.hooks);
  gpu::tables().clear();
  gpu::prepared().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// remember(table, arguments, function, threads, shared, types): how launches with such arguments are started.
// The types are those of the arguments in Triton's words.
PyObject* remember(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && PyTuple_CheckExact(args[5]), "khot: remember takes 6 arguments");
  gpu::Arguments arguments;
  auto kernel = std::make_shared<gpu::Compiled>();
  const int64_t table = PyLong_AsLongLong(args[0]);
  kernel->function = PyLong_AsVoidPtr(args[2]);
  kernel->threads = static_cast<unsigned>(PyLong_AsUnsignedLong(args[3]));
  kernel->shared = static_cast<unsigned>(PyLong_AsUnsignedLong(args[4]));
  if (PyErr_Occurred()) return nullptr;
  if (!arguments.read(args[1]) || PyTuple_GET_SIZE(args[5]) != arguments.count) Py_RETURN_FALSE;
  for (int i = 0; i < arguments.count; ++i) {
    PyObject* const type = PyTuple_GET_ITEM(args[5], i);
    using gpu::Passed;
    using Kind = gpu::Argument::Kind;
    const Kind kind = arguments.given[i].kind;
    const bool pointer =
        PyUnicode_CheckExact(type) && PyUnicode_GET_LENGTH(type) > 1 && PyUnicode_READ_CHAR(type, 0) == '*';
    if (named(type, "constexpr")) {
      kernel->passed.push_back(Passed::kNot);
    } else if (kind == Kind::kPointer && pointer) {
      kernel->passed.push_back(Passed::kPointer);
    } else if (kind == Kind::kInteger && named(type, "i32")) {
      kernel->passed.push_back(Passed::kInt32);
    } else if (kind == Kind::kInteger && named(type, "i64")) {
      kernel->passed.push_back(Passed::kInt64);
    } else if (kind == Kind::kReal && named(type, "fp32")) {
      kernel->passed.push_back(Passed::kFloat32);
    } else {
      Py_RETURN_FALSE;
    }
  }
  gpu::tables()[table][arguments.key()] = std::move(kernel);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// start(table, programs, arguments): whether a remembered kernel was started.
PyObject* start(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "khot: start takes 3 arguments");
  gpu::Arguments arguments;
  if (gpu::driver().launch == nullptr) Py_RETURN_FALSE;
  const int64_t table = PyLong_AsLongLong(args[0]), programs = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const auto kernels = gpu::tables().find(table);
  if (kernels == gpu::tables().end() || !arguments.read(args[2])) Py_RETURN_FALSE;
  const auto found = kernels->second.find(arguments.key());
  if (found == kernels->second.end()) Py_RETURN_FALSE;
  const std::shared_ptr<const gpu::Compiled> kernel = found->second;  // also if another thread forgets it
  if (gpu::start(*kernel, programs, arguments.given.data(), arguments.first->device())) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// prepare(operator, x, cdf, output, table, programs, arguments, places): let plain calls with contiguous rows
// like those of x make this launch of a remembered kernel. The places are those of the addresses among the
// arguments, and then those of the two halves of each number, in the order of `Prepared::start`.
PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8 && THPVariable_Check(args[1]) && PyTuple_CheckExact(args[7]),
                   "khot: prepare takes 8 arguments");
  constexpr struct {
    const char* name;
    gpu::Signature::Operator choice;
    Py_ssize_t places;
  } operators[] = {{"soft_topk", gpu::Signature::kSoftTopk, 8},
                   {"soft_topk_of_rows", gpu::Signature::kSoftTopkOfRows, 7},
                   {"soft_topk_backward", gpu::Signature::kSoftTopkBackward, 9},
                   {"topk_mask", gpu::Signature::kTopkMask, 4},
                   {"selectable", gpu::Signature::kSelectable, 4}};
  int64_t facts[] = {-1, 0, 0};
  for (const auto& one : operators) {
    if (named(args[0], one.name) && PyTuple_GET_SIZE(args[7]) == one.places) facts[0] = one.choice;
  }
  for (const auto& one : kCdfs) {
    if (named(args[2], one.name)) facts[1] = static_cast<int64_t>(one.choice);
  }
  for (const auto& one : kOutputs) {
    if (named(args[3], one.name)) facts[2] = static_cast<int64_t>(one.choice);
  }
  TORCH_CHECK_VALUE(facts[0] >= 0, "khot: prepare knows no such operator with so many places");
  const int64_t table = PyLong_AsLongLong(args[4]), programs = PyLong_AsLongLong(args[5]);
  if (PyErr_Occurred()) return nullptr;
  const auto kernels = gpu::tables().find(table);
  gpu::Arguments arguments;
  if (kernels == gpu::tables().end() || !arguments.read(args[6])) Py_RETURN_FALSE;
  const auto kernel = kernels->second.find(arguments.key());
  if (kernel == kernels->second.end()) Py_RETURN_FALSE;

  auto result = std::make_shared<gpu::Prepared>();
  result->kernel = kernel->second;
  result->programs = programs;
  result->arguments.assign(arguments.given.begin(), arguments.given.begin() + arguments.count);
  std::array<bool, gpu::kMostArguments> placed{};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[7]); ++i) {
    const long place = PyLong_AsLong(PyTuple_GET_ITEM(args[7], i));
    if (PyErr_Occurred()) return nullptr;
    TORCH_CHECK_INDEX(place >= 0 && place < arguments.count, "khot: there is no argument ", place);
    result->places.push_back(static_cast<int>(place));
    placed[place] = true;
  }
  for (int i = 0; i < arguments.count;
       ++i) {  // what was an address must be one of the call's own, and aligned
    const gpu::Argument& argument = arguments.given[i];
    if (argument.kind == gpu::Argument::Kind::kPointer && !(placed[i] && argument.aligned())) Py_RETURN_FALSE;
  }
  if (gpu::prepared().size() >= gpu::kMostPrepared) gpu::prepared().clear();
  const gpu::Signature signature(static_cast<gpu::Signature::Operator>(facts[0]), THPVariable_Unpack(args[1]),
                                 facts[1], facts[2]);
  gpu::prepared()[signature] = std::move(result);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget(): all kernels and launches.
PyObject* forget(PyObject*, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  gpu::tables().clear();
  gpu::prepared().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// serve(address, classes): what khot._C offers, 0 if it is not in use, and the class of each CDF by its name.
PyObject* serve(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyDict_Check(args[1]), "khot: serve takes an address and a dict");
  for (const Named<Cdf>& one : kCdfs) {
    PyObject* found = PyDict_GetItemString(args[1], one.name);
    TORCH_CHECK_TYPE(found == nullptr || PyType_Check(found), "khot: ", one.name, " is not a class");
    Py_XINCREF(found);
    class_of[static_cast<int>(one.choice)] = reinterpret_cast<PyTypeObject*>(found);
  }
  served = static_cast<const Served*>(PyLong_AsVoidPtr(args[0]));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyCFunction method(PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call));
}

PyMethodDef methods[] = {{"serve", method(serve), METH_FASTCALL, nullptr},
                         {"soft_topk", method(soft_topk), METH_FASTCALL, nullptr},
                         {"soft_count", method(soft_count), METH_FASTCALL, nullptr},
                         {"inverse_soft_count", method(inverse_soft_count), METH_FASTCALL, nullptr},
                         {"topk", method(topk), METH_FASTCALL, nullptr},
                         {"topk_mask", method(topk_mask), METH_FASTCALL, nullptr},
                         {"soft_rank", method(soft_rank), METH_FASTCALL, nullptr},
                         {"soft_sort", method(soft_sort), METH_FASTCALL, nullptr},
                         {"pareto", method(pareto), METH_FASTCALL, nullptr},
                         {"selectable", method(selectable), METH_FASTCALL, nullptr},
                         {"use_driver", method(use_driver), METH_FASTCALL, nullptr},
                         {"remember", method(remember), METH_FASTCALL, nullptr},
                         {"start", method(start), METH_FASTCALL, nullptr},
                         {"prepare", method(prepare), METH_FASTCALL, nullptr},
                         {"forget", method(forget), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace khot

// The name carries torch's version (setup.py).
#define KHOT_INIT(name) PyInit_##name
#define KHOT_INIT_OF(name) KHOT_INIT(name)
PyMODINIT_FUNC KHOT_INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&khot::definition); }
