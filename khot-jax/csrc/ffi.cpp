// The CPU kernels as XLA's foreign functions: buffers in and out, rows shared among XLA's threads. It is to
// JAX what csrc/bindings is to torch. All buffers are contiguous, rows lie along the last dimension, and
// shapes were checked in Python.
#include "xla/ffi/api/ffi.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "bindings/rows.h"
#include "kernels.h"
#include "laplace/laplace.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace khot {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;
using Name = std::string_view;

// ------------------------------------------------------------------------------------------- buffers

int64_t bytes_of(ffi::DataType type) { return type == ffi::F64 ? 8 : type == ffi::F32 ? 4 : 2; }

Dtype dtype_of(ffi::DataType type) {
  return type == ffi::F64   ? Dtype::kDouble
         : type == ffi::F32 ? Dtype::kFloat
         : type == ffi::F16 ? Dtype::kHalf
                            : Dtype::kBFloat16;
}

// The rows of a buffer.
struct Rows {
  const char* data;
  int64_t bytes;
  Dtype dtype;

  Rows(const Buffer& x, int64_t n)
      : data(static_cast<const char*>(x.untyped_data())),
        bytes(n * bytes_of(x.element_type())),
        dtype(dtype_of(x.element_type())) {}
  Row operator()(int64_t row) const { return {data + row * bytes, dtype, 1}; }
};

// A number for each row, in float or in double.
struct Numbers {
  const void* data = nullptr;
  bool wide = false;

  Numbers() = default;
  explicit Numbers(const Buffer& x) : data(x.untyped_data()), wide(x.element_type() == ffi::F64) {}
  double operator()(int64_t row) const {
    if (data == nullptr) return 0;
    return wide ? static_cast<const double*>(data)[row] : static_cast<const float*>(data)[row];
  }
};

struct ResultNumbers {
  void* data = nullptr;
  bool wide = false;

  ResultNumbers() = default;
  explicit ResultNumbers(Result& x) : data(x->untyped_data()), wide(x->element_type() == ffi::F64) {}
  void put(int64_t row, double value) const {
    wide ? static_cast<double*>(data)[row] = value
         : static_cast<float*>(data)[row] = static_cast<float>(value);
  }
};

Results results_in(Result& x, int64_t n) {
  return {static_cast<char*>(x->untyped_data()), n * bytes_of(x->element_type())};
}

struct Shape {
  int64_t rows = 1, n;

  explicit Shape(const Buffer& x) {
    const auto sizes = x.dimensions();
    n = sizes[sizes.size() - 1];
    for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  }
};

// Thresholds are pairs, of floats for rows of float: these have all digits that are asked of such rows. Where
// all or none is selected, they are the greatest number of the dtype, as kernels have that of double.
constexpr double kMost = std::numeric_limits<double>::max(), kMostFloat = std::numeric_limits<float>::max();

struct ResultPairs {
  ResultNumbers his, los;

  void put(int64_t row, Threshold t) const {
    if (!his.wide) {
      const double high =
          std::abs(t.hi) == kMost ? std::copysign(kMostFloat, t.hi) : static_cast<float>(t.hi);
      t = {high, std::abs(t.hi) == kMost ? high : (t.hi - high) + t.lo};
    }
    his.put(row, t.hi), los.put(row, t.lo);
  }
};

struct Pairs {
  Numbers his, los;

  Threshold operator()(int64_t row) const {
    const double hi = his(row), lo = los(row);
    if (his.wide) return {hi, lo};
    if (std::abs(hi) == kMostFloat) return {std::copysign(kMost, hi), std::copysign(kMost, hi)};
    return {hi + lo, 0};
  }
};

// ------------------------------------------------------------------------------------------- what kernels
// ask

template <class Interface>
struct Forward : Interface {
  Forward(const Buffer& x, int64_t n, const Buffer& goal, const Buffer& tau, Result& out, Result& hi,
          Result& lo)
      : scores(x, n),
        goals(goal),
        taus{Numbers(tau)},
        results(results_in(out, n)),
        thresholds{ResultNumbers(hi), ResultNumbers(lo)} {}
  Row x(int64_t row) const override { return scores(row); }
  double k(int64_t row) const override { return goals(row); }
  double tau(int64_t row) const override { return taus(row); }
  void* out(int64_t row) const override { return results(row); }
  void put(int64_t row, Threshold t) const override { thresholds.put(row, t); }

  Rows scores;
  Numbers goals;
  Invertible<Numbers> taus;
  Results results;
  ResultPairs thresholds;
};

template <class Interface>
struct Backward : Interface {
  Backward(const Buffer& x, int64_t n, const Buffer& hint, const Buffer& hi, const Buffer& lo,
           const Buffer& tau, const Buffer& v, const Buffer& g, Result& dx, Result& dgoal, Result& dtau)
      : scores(x, n),
        taus{Numbers(tau)},
        incoming_lo(g),
        thresholds{Numbers(hi), Numbers(lo)},
        results(results_in(dx, n)),
        dgoals(dgoal),
        dtaus(dtau) {
    if (hint.element_count() > 0) outputs.emplace(hint, n);
    if (v.element_count() > 0) incoming.emplace(v, n);
  }
  Row x(int64_t row) const override { return scores(row); }
  Row y(int64_t row) const override { return row_of(outputs, row, Dtype::kFloat); }
  Row grad(int64_t row) const override { return row_of(incoming, row, scores.dtype); }
  double grad_lo(int64_t row) const override { return incoming_lo(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold threshold(int64_t row) const override { return thresholds(row); }
  void* grad_x(int64_t row) const override { return results(row); }
  bool keeps_numbers() const override { return true; }
  void put(int64_t row, double grad_k, double grad_tau) const override {
    dgoals.put(row, grad_k), dtaus.put(row, grad_tau);
  }

  Rows scores;
  Invertible<Numbers> taus;
  std::optional<Rows> outputs, incoming;
  Numbers incoming_lo;
  Pairs thresholds;
  Results results;
  ResultNumbers dgoals, dtaus;
};

struct BudgetForward final : Forward<BudgetRows> {
  Rows costs;

  template <class... Given>
  explicit BudgetForward(Rows costs, Given&&... given) : Forward(given...), costs(costs) {}
  Row cost(int64_t row) const override { return costs(row); }
};

struct BudgetBackward final : Backward<BudgetBackwardRows> {
  Rows costs;
  Results cost_results;

  template <class... Given>
  BudgetBackward(Rows costs, Results cost_results, Given&&... given)
      : Backward(given...), costs(costs), cost_results(cost_results) {}
  Row cost(int64_t row) const override { return costs(row); }
  void* grad_cost(int64_t row) const override { return cost_results(row); }
};

template <class Choice, size_t count>
bool find(Name name, const Named<Choice> (&known)[count], Choice& choice) {
  for (const auto& one : known) {
    if (name == one.name) return choice = one.choice, true;
  }
  return false;
}

struct Law {
  Name cdf, output;
  double shape;
};

ffi::Error read(const Law& law, int64_t n, Spec& spec) {
  spec.power = law.shape, spec.n = n, spec.inside = nullptr;
  const bool known = find(law.cdf, kCdfs, spec.cdf) && find(law.output, kOutputs, spec.output);
  return known ? ffi::Error::Success() : ffi::Error::InvalidArgument("khot: unknown cdf or output");
}

// ------------------------------------------------------------------------------------------- the functions

ffi::Error topk(ffi::ThreadPool threads, Buffer x, Buffer k, Buffer tau, Result out, Result hi, Result lo,
                Name cdf, Name output, double shape) {
  const Shape of(x);
  Spec spec;
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const Forward<ForwardRows> rows(x, of.n, k, tau, out, hi, lo);
  share(spec, of.rows,
        [&](const Spec& some, int64_t begin, int64_t end) { kernels().forward(some, rows, begin, end); });
  return ffi::Error::Success();
}

ffi::Error topk_pull(ffi::ThreadPool threads, Buffer x, Buffer hint, Buffer hi, Buffer lo, Buffer tau,
                     Buffer v, Buffer g, Result dx, Result dk, Result dtau, Name cdf, Name output,
                     double shape) {
  const Shape of(x);
  Spec spec;
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const Backward<BackwardRows> rows(x, of.n, hint, hi, lo, tau, v, g, dx, dk, dtau);
  share(spec, of.rows,
        [&](const Spec& some, int64_t begin, int64_t end) { kernels().backward(some, rows, begin, end); });
  return ffi::Error::Success();
}

// `slack` is the share by which a budget may exceed the costs (khot_jax._root.rounding).
ffi::Error budget(ffi::ThreadPool threads, Buffer x, Buffer goal, Buffer tau, Buffer cost, Result out,
                  Result hi, Result lo, Name cdf, Name output, double shape, double slack) {
  const Shape of(x);
  BudgetSpec spec{{}, false, false, slack};
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const BudgetForward rows(Rows(cost, of.n), x, of.n, goal, tau, out, hi, lo);
  share(spec, of.rows, [&](const BudgetSpec& some, int64_t begin, int64_t end) {
    kernels().budget(some, rows, begin, end);
  });
  return ffi::Error::Success();
}

ffi::Error budget_pull(ffi::ThreadPool threads, Buffer x, Buffer hint, Buffer hi, Buffer lo, Buffer tau,
                       Buffer cost, Buffer v, Buffer g, Result dx, Result dgoal, Result dtau, Result dcost,
                       Name cdf, Name output, double shape, double slack) {
  const Shape of(x);
  BudgetSpec spec{{}, false, false, slack};
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const BudgetBackward rows(Rows(cost, of.n), results_in(dcost, of.n), x, of.n, hint, hi, lo, tau, v, g, dx,
                            dgoal, dtau);
  share(spec, of.rows, [&](const BudgetSpec& some, int64_t begin, int64_t end) {
    kernels().budget_backward(some, rows, begin, end);
  });
  return ffi::Error::Success();
}

ffi::Error mask(ffi::ThreadPool threads, Buffer x, Buffer k, Result out) {
  const Shape of(x);
  const InPool in(threads);
  const HardRows<Rows, Numbers> rows(Rows(x, of.n), Numbers(k), results_in(out, of.n));
  row_ranges(of.rows, of.n, kMostLanes,
             [&](int64_t begin, int64_t end) { kernels().topk_mask(rows, of.n, begin, end); });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------------- Laplace ranks

// serve(workspace, row, tau) for all rows of R.
template <class R, class Serve>
void share_sorted(const Shape& of, const Buffer& tau, int arrays, const Serve& serve) {
  const Numbers taus(tau);
  row_ranges(of.rows, of.n, 1, [&](int64_t begin, int64_t end) {
    laplace::Workspace<R> work(of.n, arrays);
    for (int64_t row = begin; row < end; ++row) serve(work, row, taus(row));
  });
}

// Ranks, or the sorted row, of rows of R; with v their gradients, for which the rows are sorted again.
template <class R>
void sorted(const Shape& of, Name what, bool descending, const Buffer& x, const Buffer& tau, R* out) {
  const R* from = static_cast<const R*>(x.untyped_data());
  const int64_t n = of.n;
  share_sorted<R>(of, tau, 6, [=](auto& work, int64_t row, double t) {
    std::vector<int32_t> order(n), places(n);
    const R* one = from + row * n;
    R* to = out + row * n;
    if (what == "rank") {
      laplace::count_row<R, R>(one, n, nullptr, n, t, descending, work, to, order.data(), places.data());
    } else {
      laplace::thresholds_row<R, R>(one, n, nullptr, n, t, work, nullptr, to, order.data(), places.data());
      if (!descending) std::reverse(to, to + n);
    }
  });
}

template <class R>
void sorted_pull(const Shape& of, Name what, bool descending, const Buffer& x, const Buffer& tau,
                 const Buffer& v, R* dx, const ResultNumbers& dtau) {
  const R *from = static_cast<const R*>(x.untyped_data()), *grads = static_cast<const R*>(v.untyped_data());
  const int64_t n = of.n;
  share_sorted<R>(of, tau, 14, [=](auto& work, int64_t row, double t) {
    std::vector<int32_t> order(n), places(n);
    std::vector<R> values(n);
    const R *one = from + row * n, *grad = grads + row * n;
    R* to = dx + row * n;
    if (what == "rank") {
      laplace::count_row<R, R>(one, n, nullptr, n, t, descending, work, values.data(), order.data(),
                               places.data());
      dtau.put(row, laplace::count_backward_row<true>(descending, grad, one, order.data(), n, nullptr,
                                                      places.data(), n, t, work, to,
                                                      static_cast<double*>(nullptr)));
      return;
    }
    laplace::thresholds_row<R, R>(one, n, nullptr, n, t, work, nullptr, values.data(), order.data(),
                                  places.data());
    const auto pull = [&](auto in_order) {
      return laplace::thresholds_backward_row<true>(in_order, one, order.data(), n, nullptr, places.data(), n,
                                                    t, work, to, static_cast<double*>(nullptr));
    };
    dtau.put(row, descending ? pull(grad) : pull(std::make_reverse_iterator(grad + n)));
  });
}

ffi::Error order(ffi::ThreadPool threads, Buffer x, Buffer tau, Result out, Name what, bool descending) {
  const InPool in(threads);
  if (x.element_type() == ffi::F64) {
    sorted(Shape(x), what, descending, x, tau, static_cast<double*>(out->untyped_data()));
  } else {
    sorted(Shape(x), what, descending, x, tau, static_cast<float*>(out->untyped_data()));
  }
  return ffi::Error::Success();
}

ffi::Error order_pull(ffi::ThreadPool threads, Buffer x, Buffer tau, Buffer v, Result dx, Result dtau,
                      Name what, bool descending) {
  const InPool in(threads);
  const ResultNumbers dtaus(dtau);
  if (x.element_type() == ffi::F64) {
    sorted_pull(Shape(x), what, descending, x, tau, v, static_cast<double*>(dx->untyped_data()), dtaus);
  } else {
    sorted_pull(Shape(x), what, descending, x, tau, v, static_cast<float*>(dx->untyped_data()), dtaus);
  }
  return ffi::Error::Success();
}

// A binding with so many buffers in and out.
template <size_t args, size_t rets, class Bound>
auto bind(Bound&& bound) {
  if constexpr (args > 0) {
    return bind<args - 1, rets>(std::move(bound).template Arg<Buffer>());
  } else if constexpr (rets > 1) {
    return bind<0, rets - 1>(std::move(bound).template Ret<Buffer>());
  } else {
    return std::move(bound).template Ret<Buffer>();
  }
}

template <size_t args, size_t rets>
auto rows_bound() {
  return bind<args, rets>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>());
}

template <size_t args, size_t rets>
auto law_bound() {
  return rows_bound<args, rets>()
      .template Attr<Name>("cdf")
      .template Attr<Name>("output")
      .template Attr<double>("shape");
}

template <size_t args, size_t rets>
auto order_bound() {
  return rows_bound<args, rets>().template Attr<Name>("what").template Attr<bool>("descending");
}

}  // namespace
}  // namespace khot

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_topk, khot::topk, (khot::law_bound<3, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_topk_pull, khot::topk_pull, (khot::law_bound<7, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_budget, khot::budget, (khot::law_bound<4, 3>().Attr<double>("slack")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_budget_pull, khot::budget_pull,
                              (khot::law_bound<8, 4>().Attr<double>("slack")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_mask, khot::mask, (khot::rows_bound<2, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_order, khot::order, (khot::order_bound<2, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_order_pull, khot::order_pull, (khot::order_bound<3, 2>()));
#pragma GCC visibility pop
