// Plain calls on the CPU that search for a threshold or count by one: the soft top-k, the soft count and
// its inverse.
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "eager/calls.h"
#include "eager/plain.h"
#include "kernels.h"

namespace khot {
namespace {

// ------------------------------------------------------------------- the soft top-k and its threshold

// k or tau: one number for all rows or, in double and contiguous, one for each row, which may be learned.
struct Argument {
  double same;
  Tensor each;
  Listed numbers() const { return {each.defined() ? each.const_data_ptr<double>() : nullptr, same}; }
  bool learned() const { return each.defined() && each.requires_grad(); }
  std::optional<Tensor> variable() const { return each.defined() ? std::optional(each) : std::nullopt; }
};

struct Problem {
  Spec spec;
  Argument k, tau;
  Tensor mask;        // of the entries that may be selected, of the sizes of x or of one row; or undefined
  bool hard = false;  // the result is the hard mask, with the gradient of y
  int64_t dim = -1;   // of the rows, counted from the end; if it is another one, x is in float and contiguous
  bool threshold() const { return spec.output == Output::kThreshold; }
};

// Several rows at a time, on torch's threads.
template <class Function>
void each_part(int64_t rows, int64_t n, Function function) {
  at::parallel_for(0, rows, std::max<int64_t>(1, at::internal::GRAIN_SIZE / n), function);
}

// The sizes of a tensor without those of its rows, and the distance of the entries of one.
c10::DimVector batch_of(const Tensor& x, int64_t dim) {
  c10::DimVector sizes(x.sizes());
  sizes.erase(sizes.end() + dim);
  return sizes;
}
int64_t step_of(const Tensor& x, int64_t dim) {
  const auto inside = x.sizes().slice(x.dim() + dim + 1);
  return c10::multiply_integers(inside);
}

// Some neighbouring columns, which are rows in another dimension than the last, in copies that are rows.
struct Columns {
  int64_t n, step, first, at, count, size;  // which rows they are, and where the first begins
  float* room;

  Rows read(const Tensor& x, int place) const {
    served->kernels.turn(const_cast<float*>(x.const_data_ptr<float>()) + at, step, n, count, rows(place),
                         false);
    return {rows(place), n};
  }
  Results results(int place) const { return Rows(rows(place), n).results_in(rows(place)); }
  void write(Tensor& x, int place) const {
    served->kernels.turn(x.mutable_data_ptr<float>() + at, step, n, count, rows(place), true);
  }
  float* rows(int place) const { return room + place * size; }
};

// serve(columns) for all of them, which has room for copies of so many tensors.
template <class Serve>
void each_columns(const Tensor& x, int64_t dim, int64_t copies, Serve serve) {
  const int64_t n = x.size(dim), step = step_of(x, dim),
                count = std::clamp<int64_t>((1 << 15) / n / 16, 1, 16) * 16;
  const int64_t each = (step + count - 1) / count, size = (count + 1) * n;
  each_part(x.numel() / (n * step) * each, n * count, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> room(new float[copies * size]);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outside = i / each * step, inside = i % each * count;
      serve(Columns{n, step, outside + inside, outside * n + inside, std::min(count, step - inside), size,
                    room.get()});
    }
  });
}

constexpr double kNever = -std::numeric_limits<double>::infinity();

// The rows without the entries that may not be selected, contiguous.
Tensor entries_of(const Tensor& x, const Problem& problem) {
  const Tensor dense = x.contiguous();
  if (!problem.mask.defined()) return dense;
  Tensor made = at::empty(x.sizes(), x.options());
  const int64_t n = problem.spec.n, bytes = x.element_size() * n;
  const bool* const mask = problem.mask.const_data_ptr<bool>();
  const bool same = problem.mask.numel() != x.numel();
  const char* const from = static_cast<const char*>(dense.const_data_ptr());
  char* const to = static_cast<char*>(made.mutable_data_ptr());
  const Dtype dtype = *dtype_of(x);
  each_part(x.numel() / n, n, [&](int64_t begin, int64_t end) {
    if (!same) {
      served->kernels.masked(dtype, from + begin * bytes, mask + begin * n, (end - begin) * n, kNever,
                             to + begin * bytes);
      return;
    }
    for (int64_t row = begin; row < end; ++row) {
      served->kernels.masked(dtype, from + row * bytes, mask, n, kNever, to + row * bytes);
    }
  });
  return made;
}

// The same in operations that can be differentiated and mapped.
Tensor masked(const Tensor& x, const Tensor& mask) {
  if (!mask.defined()) return x;
  return at::where(mask, x, at::full({}, kNever, x.options()));
}

// The hard mask of contiguous entries.
Tensor hard_mask(const Tensor& entries, const Problem& problem) {
  Tensor made = at::empty(entries.sizes(), entries.options());
  const int64_t n = problem.spec.n;
  if (problem.dim != -1) {
    each_columns(entries, problem.dim, 2, [&](const Columns& some) {
      const HardRows rows(some.read(entries, 0), problem.k.numbers().from(some.first), some.results(1));
      served->kernels.topk_mask(rows, n, 0, some.count);
      some.write(made, 1);
    });
    return made;
  }
  const Rows scores(entries, *dtype_of(entries));
  const HardRows rows(scores, problem.k.numbers(), scores.results_in(made.mutable_data_ptr()));
  each_part(entries.numel() / n, n,
            [&](int64_t begin, int64_t end) { served->kernels.topk_mask(rows, n, begin, end); });
  return made;
}

// y, log y or the threshold. It is undefined where a row has no result.
Tensor forward(const Tensor& x, const Problem& problem, double* hi, double* lo) {
  const int64_t rows = x.numel() / problem.spec.n;
  Tensor y = problem.threshold() ? Tensor() : at::empty(x.sizes(), x.options());
  const Listed ks = problem.k.numbers(), taus = problem.tau.numbers();
  if (problem.dim != -1) {
    each_columns(x, problem.dim, 2, [&](const Columns& some) {
      const SelectionRows rows(some.read(x, 0), ks.from(some.first),
                               Invertible<Listed>{taus.from(some.first)}, some.results(1), hi + some.first,
                               lo + some.first);
      served->kernels.forward(problem.spec, rows, 0, some.count);
      some.write(y, 1);
    });
  } else {
    void* const out = y.defined() ? y.mutable_data_ptr() : nullptr;
    const Tensor dense = x.contiguous();
    const Rows scores(dense, *dtype_of(x));
    served->soft_topk(problem.spec,
                      SelectionRows(scores, ks, Invertible<Listed>{taus}, scores.results_in(out), hi, lo),
                      rows);
  }
  double total = 0;  // one NaN makes it NaN
  for (int64_t row = 0; row < rows; ++row) total += std::isnan(hi[row]) ? hi[row] : 0;
  if (std::isnan(total)) return Tensor();
  return y.defined() ? y : per_row(x, [=](int64_t row) { return hi[row] + lo[row]; });
}

bool density_from_value(Cdf cdf) { return cdf == Cdf::kLogistic || cdf == Cdf::kLaplace; }

// The gradients of x, k and tau as khot/_ops/soft_topk.py has them: in operations that can be differentiated
// and mapped.
std::tuple<Tensor, Tensor, Tensor> vjp(const Tensor& grad, const Tensor& grad_lo, const Tensor& x,
                                       const Tensor& hi, const Tensor& lo, const Argument& tau,
                                       const Spec& spec) {
  static const auto call = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("khot::soft_topk_vjp", "")
                               .typed<std::tuple<Tensor, Tensor, Tensor>(
                                   const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, c10::string_view, double, c10::string_view)>();
  const Tensor taus = tau.each.defined() ? tau.each : at::full({}, tau.same, hi.options());
  return call.call(grad, grad_lo, x, hi, lo, taus, name_of(spec.cdf, kCdfs), spec.power,
                   name_of(spec.output, kOutputs));
}

class SoftTopk : public torch::autograd::Function<SoftTopk> {
 public:
  // y, log y or the threshold, and the part of the threshold that carries its derivatives
  static Variables forward(Context* context, const Tensor& x, const std::optional<Tensor>& /*ks*/,
                           const std::optional<Tensor>& /*taus*/, const Problem& problem, bool* valid) {
    const auto options = x.options().dtype(at::kDouble);
    const c10::DimVector batch = batch_of(x, problem.dim);
    Tensor hi = at::empty(batch, options), lo = at::empty(batch, options);
    const Tensor entries = entries_of(x, problem);
    Tensor y = khot::forward(entries, problem, hi.mutable_data_ptr<double>(), lo.mutable_data_ptr<double>());
    *valid = y.defined();
    if (!*valid) y = at::empty({0}, x.options());  // the call is left to the ordinary way
    context->set_materialize_grads(false);
    const bool serves = x.scalar_type() == at::kFloat && density_from_value(problem.spec.cdf) &&
                        problem.spec.output == Output::kValue && !problem.tau.learned();
    context->save_for_backward({x, serves ? y : Tensor(), hi, lo, problem.mask,
                                problem.mask.defined() ? entries : Tensor(), problem.tau.each});
    if (*valid && problem.hard) y = hard_mask(entries, problem);
    context->saved_data["problem"] = std::vector<double>{static_cast<double>(problem.spec.cdf),
                                                         static_cast<double>(problem.spec.output),
                                                         problem.tau.same,
                                                         static_cast<double>(problem.k.learned()),
                                                         static_cast<double>(problem.dim),
                                                         problem.spec.power};
    return {y, lo};
  }

  static Variables backward(Context* context, const Variables& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return Variables(5);
    const Variables saved = context->get_saved_variables();
    const Tensor &x = saved[0], &y = saved[1], &hi = saved[2], &lo = saved[3];
    const std::vector<double> given = context->saved_data["problem"].toDoubleVector();
    const int64_t dim = static_cast<int64_t>(given[4]);
    const Spec spec{static_cast<Cdf>(static_cast<int>(given[0])), given[5],
                    static_cast<Output>(static_cast<int>(given[1])), x.size(dim), nullptr};
    const Argument tau{given[2], saved[6]};
    const bool learns_k = given[3] != 0;
    const bool direct = !at::GradMode::is_enabled() && plain_state() && grads[0].defined() &&
                        plain_tensor(grads[0]) && plain_tensor(x) && !grads[1].defined();
    Tensor grad = grads[0], grad_lo = grads[1];
    if (spec.output == Output::kThreshold && grad.defined()) {  // the threshold is lo and a constant
      grad = grad.to(at::kDouble);
      grad_lo = grad_lo.defined() ? at::add(grad_lo, grad) : grad;
      grad = Tensor();
    }
    if (!direct) {
      const Tensor first = grad.defined() ? grad : at::zeros_like(x);
      const Tensor second = grad_lo.defined() ? grad_lo : at::zeros({}, hi.options());
      const auto last = [=](const Tensor& t) {
        return spec.output == Output::kThreshold ? t : t.movedim(dim, -1);
      };
      auto [dx, dk, dtau] = vjp(last(first), second, last(masked(x, saved[4])), hi, lo, tau, spec);
      return {dx.movedim(-1, dim), learns_k ? dk : Tensor(), tau.learned() ? dtau : Tensor(), Tensor(),
              Tensor()};
    }
    RECORD_FUNCTION("khot::soft_topk_backward", std::vector<c10::IValue>());
    Tensor result = at::empty(x.sizes(), x.options()), dk, dtau;
    if (learns_k) dk = at::empty_like(hi);
    if (tau.learned()) dtau = at::empty_like(hi);
    const auto numbers_in = [](Tensor& t) { return t.defined() ? t.mutable_data_ptr<double>() : nullptr; };
    if (grad.defined()) grad = grad.contiguous();
    if (grad_lo.defined()) grad_lo = grad_lo.contiguous();
    const Tensor dense = saved[5].defined() ? saved[5] : x.contiguous();
    const Dtype dtype = *dtype_of(x);
    const Rows scores(dense, dtype);
    std::optional<Rows> outputs, incoming;
    double *const dks = numbers_in(dk), *const dtaus = numbers_in(dtau);
    const Listed his{hi.const_data_ptr<double>()}, los{lo.const_data_ptr<double>()};
    if (dim != -1) {
      each_columns(x, dim, 4, [&](const Columns& some) {
        const int64_t first = some.first;
        std::optional<Rows> outputs;
        if (y.defined()) outputs = some.read(y, 1);
        const GradientRows rows(dtype, some.read(dense, 0), Invertible<Listed>{tau.numbers().from(first)},
                                outputs, std::optional<Rows>(some.read(grad, 2)), Listed{nullptr},
                                his.from(first), los.from(first), some.results(3),
                                dks != nullptr ? dks + first : nullptr,
                                dtaus != nullptr ? dtaus + first : nullptr);
        served->kernels.backward(spec, rows, 0, some.count);
        some.write(result, 3);
      });
      return {result, dk, dtau, Tensor(), Tensor()};
    }
    if (y.defined()) outputs.emplace(y, Dtype::kFloat);
    if (grad.defined()) incoming.emplace(grad, dtype);
    const Listed given_lo{grad_lo.defined() ? grad_lo.const_data_ptr<double>() : nullptr};
    const GradientRows rows(dtype, scores, Invertible<Listed>{tau.numbers()}, outputs, incoming, given_lo,
                            his, los, scores.results_in(result.mutable_data_ptr()), dks, dtaus);
    served->soft_topk_backward(spec, rows, x.numel() / spec.n);
    return {result, dk, dtau, Tensor(), Tensor()};
  }
};

// The result of a problem, with its gradient; undefined where a row has no result.
Tensor solve(const Tensor& x, const Problem& problem) {
  RECORD_FUNCTION("khot::soft_topk", std::vector<c10::IValue>());
  const pybind11::gil_scoped_release others_may_run;
  if (at::GradMode::is_enabled() && (x.requires_grad() || problem.k.learned() || problem.tau.learned())) {
    bool valid = true;
    const Tensor y = SoftTopk::apply(x, problem.k.variable(), problem.tau.variable(), problem, &valid)[0];
    return valid ? y : Tensor();
  }
  const Tensor entries = entries_of(x, problem);
  if (problem.hard) {
    const Tensor made = hard_mask(entries, problem);
    const Tensor firsts =
        problem.dim == -1 ? made : made.narrow(problem.dim, 0, 1).contiguous().unsqueeze(-1);
    return has_results(firsts) ? made : Tensor();
  }
  c10::SmallVector<double, 64> threshold(2 * (x.numel() / problem.spec.n));
  return forward(entries, problem, threshold.data(), threshold.data() + threshold.size() / 2);
}

// ---------------------------------------------------------------------------------- the soft count

using Counts = LevelRows<Rows, Listed, Listed>;

Counts counts_of(const Tensor& x, double at, double tau) {
  return {1, Rows(x, *dtype_of(x)), Listed{nullptr, tau}, Listed{nullptr, at}};
}

CountSpec count_spec(const Tensor& x, CdfKey F) {
  return {{F.cdf, F.power, Output::kValue, x.size(-1), nullptr}, 1, false};
}

Tensor count(const Tensor& x, double at, double tau, CdfKey cdf) {
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
  static Tensor forward(Context* context, const Tensor& x, double at, double tau, CdfKey cdf) {
    context->save_for_backward({x});
    context->saved_data["problem"] = std::vector<double>{at, tau, static_cast<double>(cdf.cdf), cdf.power};
    return count(x, at, tau, cdf);
  }

  static Variables backward(Context* context, const Variables& grads) {
    const Tensor x = context->get_saved_variables()[0], &grad = grads[0];
    const std::vector<double> given = context->saved_data["problem"].toDoubleVector();
    const double at = given[0], tau = given[1];
    const CdfKey cdf{static_cast<Cdf>(static_cast<int>(given[2])), given[3]};
    if (at::GradMode::is_enabled() || !plain_state() || !plain_tensor(grad) || !plain_tensor(x)) {
      // the formulas of khot/_ops/soft_count.py, in operations that can be differentiated and mapped
      static const auto vjp =
          c10::Dispatcher::singleton()
              .findSchemaOrThrow("khot::soft_count_vjp", "")
              .typed<Tensor(const Tensor&, const Tensor&, double, double, c10::string_view, double)>();
      return {vjp.call(grad, x, at, tau, name_of(cdf.cdf, kCdfs), cdf.power), Tensor(), Tensor(), Tensor()};
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

// The tensor, level or count, temperature and CDF of a soft count or its inverse.
struct Levelled {
  const Tensor* x = nullptr;
  double level, tau;
  CdfKey cdf;
};

// (input, level, dim, tau, cdf)
Levelled levelled(PyObject* const* args) {
  const Tensor* x = rows_of(args[0], args[2], kAny);
  if (x == nullptr) return {};
  const auto level = number(args[1]), tau = number(args[3]);
  const auto cdf = cdf_of(args[4]);
  if (!level || std::isnan(*level) || !tau || !(*tau > 0 && std::isfinite(*tau)) || !cdf) return {};
  return {x, *level, *tau, *cdf};
}

}  // namespace

// soft_topk(input, k, dim, tau, cdf, largest, mask, group, log, offsets)
namespace {

// A mask that the kernels read: dense, and of the sizes of x or of one row.
bool suits(const Tensor& mask, const Tensor& x, int64_t dim) {
  const bool of_row = dim == -1 && mask.numel() == x.size(-1) && mask.dim() > 0 && mask.dim() <= x.dim() &&
                      mask.size(-1) == x.size(-1);
  return mask.scalar_type() == at::kBool && plain_tensor(mask) && mask.is_contiguous() &&
         (mask.sizes() == x.sizes() || of_row);
}

// A contiguous tensor in float that has its rows in another dimension than the last, not too long to be
// copied.
const Tensor* columns_of(PyObject* input, PyObject* dim, int64_t& axis) {
  const Tensor* const x = rows_along(input, dim, axis);
  if (x == nullptr || served == nullptr || !plain_tensor(*x) || !x->is_contiguous()) return nullptr;
  return x->scalar_type() == at::kFloat && axis != -1 && x->size(axis) <= 1 << 14 ? x : nullptr;
}

// A number greater than 0, or a tensor of such numbers that broadcasts with the rows of x.
std::optional<Argument> argument(PyObject* value, const Tensor& x, int64_t dim, double most) {
  const c10::DimVector batch = batch_of(x, dim);
  Argument result{number(value).value_or(0)};
  int64_t count = 1;
  if (result.same == 0 && THPVariable_CheckExact(value)) {
    const Tensor& given = THPVariable_Unpack(value);
    if (!plain_tensor(given) || given._fw_grad(0).defined() || !at::is_expandable_to(given.sizes(), batch) ||
        !(dtype_of(given) || given.scalar_type() == at::kLong))
      return std::nullopt;
    result.each = given.to(at::kDouble).expand(batch).contiguous();
    count = result.each.numel();
  }
  const Listed numbers = result.numbers();
  for (int64_t row = 0; row < count; ++row) {
    if (!(numbers(row) > 0 && numbers(row) <= most)) return std::nullopt;
  }
  return result;
}

// Packed values as a matrix, if the offsets are those of rows of one length; undefined otherwise.
Tensor equal_rows(const Tensor& x, PyObject* offsets) {
  if (!THPVariable_CheckExact(offsets) || x.dim() != 1) return Tensor();
  const Tensor& starts = THPVariable_Unpack(offsets);
  const int64_t rows = starts.numel() - 1, n = rows > 0 ? x.numel() / rows : 0;
  if (starts.dim() != 1 || !plain_tensor(starts) || !starts.is_contiguous() || n * rows != x.numel()) {
    return Tensor();
  }
  const auto are_even = [=](const auto* start) {
    int64_t row = 0;
    while (row <= rows && start[row] == row * n) ++row;
    return row > rows;
  };
  const bool even = starts.scalar_type() == at::kLong  ? are_even(starts.const_data_ptr<int64_t>())
                    : starts.scalar_type() == at::kInt ? are_even(starts.const_data_ptr<int32_t>())
                                                       : false;
  return even ? x.view({rows, n}) : Tensor();
}

// Whether a number of packed rows is one for all, or a tensor of one for each.
bool is_of_rows(PyObject* number, int64_t rows) {
  if (!THPVariable_CheckExact(number)) return true;
  const Tensor& each = THPVariable_Unpack(number);
  return each.dim() == 0 || each.numel() == rows;
}

PyObject* on_cpu(PyObject* const* args, bool hard) {
  if (args[5] != Py_True || args[7] != Py_None) Py_RETURN_NONE;
  int64_t dim = -1;
  const Tensor* x = rows_of(args[0], args[2], kAny);
  Tensor mask, matrix;
  if (args[6] != Py_None) {
    if (!THPVariable_CheckExact(args[6])) Py_RETURN_NONE;
    mask = THPVariable_Unpack(args[6]);
  }
  if (args[9] != Py_None) {
    if (x != nullptr) matrix = equal_rows(*x, args[9]);
    if (!matrix.defined()) Py_RETURN_NONE;
    for (PyObject* const number : {args[1], args[3]}) {
      if (!is_of_rows(number, matrix.size(0))) Py_RETURN_NONE;
    }
    if (mask.defined()) {
      if (!plain_tensor(mask) || mask.sizes() != x->sizes()) Py_RETURN_NONE;
      mask = mask.view(matrix.sizes());
    }
    x = &matrix;
  } else if (x == nullptr) {
    x = columns_of(args[0], args[2], dim);
  }
  if (x == nullptr) Py_RETURN_NONE;
  // the kernel of packed rows has no search for those of which all are selected
  const double n = static_cast<double>(x->size(dim)), most = matrix.defined() ? std::nextafter(n, 0) : n;
  const auto k = argument(args[1], *x, dim, most);
  const auto tau = argument(args[3], *x, dim, std::numeric_limits<double>::max());
  const auto cdf = cdf_of(args[4]);
  if (!k || !tau || !cdf) Py_RETURN_NONE;
  const Output output = args[8] == Py_True ? Output::kLog : Output::kValue;
  Problem problem{{cdf->cdf, cdf->power, output, x->size(dim), nullptr}, *k, *tau, Tensor(), hard, dim};
  if (mask.defined() && !suits(mask, *x, dim)) Py_RETURN_NONE;
  problem.mask = mask;
  Tensor y = solve(*x, problem);
  if (!y.defined()) Py_RETURN_NONE;
  if (matrix.defined()) y = at::_unsafe_view(y, {-1});
  return THPVariable_Wrap(std::move(y));
}

}  // namespace

KHOT_CALL(soft_topk) {
  if (args[9] == Py_None) {
    if (PyObject* const there = gpu::call(gpu::kSoftTopk, args)) return there;
  }
  return on_cpu(args, false);
}

// hard_topk(input, k, dim, tau, cdf, largest, mask, group, log, offsets): the hard mask with the gradient of
// the soft one
KHOT_CALL(hard_topk) { return on_cpu(args, true); }

KHOT_CALL(soft_count) {
  const Levelled call = levelled(args);
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
}

KHOT_CALL(inverse_soft_count) {
  const Levelled call = levelled(args);
  if (call.x == nullptr || !(call.level > 0 && call.level <= call.x->size(-1))) Py_RETURN_NONE;
  Tensor t = solve(*call.x, {{call.cdf.cdf, call.cdf.power, Output::kThreshold, call.x->size(-1), nullptr},
                             {call.level},
                             {call.tau}});
  if (!t.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(t));
}

}  // namespace khot
