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

// Numbers of rows are double to the kernels; in a buffer they are so of rows of double, else float.
struct Doubles : std::vector<double> {
  using std::vector<double>::vector;

  explicit Doubles(const Buffer& x) : vector(x.element_count()) {
    if (x.element_type() == ffi::F64) {
      std::copy_n(static_cast<const double*>(x.untyped_data()), size(), begin());
    } else {
      std::copy_n(static_cast<const float*>(x.untyped_data()), size(), begin());
    }
  }
  operator Listed() const { return {data()}; }
  void write(Result& to) const {
    if (to->element_type() == ffi::F64) {
      std::copy(begin(), end(), static_cast<double*>(to->untyped_data()));
    } else {
      std::transform(begin(), end(), static_cast<float*>(to->untyped_data()),
                     [](double value) { return static_cast<float>(value); });
    }
  }
};

// Thresholds are pairs, of floats for rows of float: these have all digits that are asked of such rows. Where
// all or none is selected, they are the greatest number of the dtype, as kernels have that of double.
constexpr double kMost = std::numeric_limits<double>::max(), kMostFloat = std::numeric_limits<float>::max();

struct Pairs {
  Doubles hi, lo;

  explicit Pairs(int64_t rows) : hi(rows), lo(rows) {}
  Pairs(const Buffer& his, const Buffer& los) : hi(his), lo(los) {
    if (his.element_type() == ffi::F64) return;
    for (size_t i = 0; i < hi.size(); ++i) {
      const bool fixed = std::abs(hi[i]) == kMostFloat;
      hi[i] = fixed ? std::copysign(kMost, hi[i]) : hi[i] + lo[i];
      lo[i] = fixed ? hi[i] : 0;
    }
  }
  void write(Result& his, Result& los) {
    for (size_t i = 0; i < hi.size() && his->element_type() != ffi::F64; ++i) {
      const bool fixed = std::abs(hi[i]) == kMost;
      const double high = fixed ? std::copysign(kMostFloat, hi[i]) : static_cast<float>(hi[i]);
      lo[i] = fixed ? high : (hi[i] - high) + lo[i];
      hi[i] = high;
    }
    hi.write(his), lo.write(los);
  }
};

using Taus = Invertible<Listed>;

// The rows of a buffer, if it has some.
std::optional<Rows> rows_of(const Buffer& x, int64_t n) {
  return x.element_count() > 0 ? std::optional(Rows(x, n)) : std::nullopt;
}

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
  const Doubles ks(k), taus(tau);
  Pairs found(of.rows);
  const SelectionRows<Rows, Listed, Taus> rows(Rows(x, of.n), ks, Taus{taus}, results_in(out, of.n),
                                               found.hi.data(), found.lo.data());
  share(spec, of.rows,
        [&](const Spec& some, int64_t begin, int64_t end) { kernels().forward(some, rows, begin, end); });
  found.write(hi, lo);
  return ffi::Error::Success();
}

ffi::Error topk_pull(ffi::ThreadPool threads, Buffer x, Buffer hint, Buffer hi, Buffer lo, Buffer tau,
                     Buffer v, Buffer g, Result dx, Result dk, Result dtau, Name cdf, Name output,
                     double shape) {
  const Shape of(x);
  Spec spec;
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const Doubles taus(tau), grads(g);
  const Pairs found(hi, lo);
  Doubles dks(of.rows), dtaus(of.rows);
  const Rows scores(x, of.n);
  const GradientRows<Rows, Listed, Taus> rows(scores.dtype, scores, Taus{taus}, rows_of(hint, of.n),
                                              rows_of(v, of.n), grads, found.hi, found.lo,
                                              results_in(dx, of.n), dks.data(), dtaus.data());
  share(spec, of.rows,
        [&](const Spec& some, int64_t begin, int64_t end) { kernels().backward(some, rows, begin, end); });
  dks.write(dk), dtaus.write(dtau);
  return ffi::Error::Success();
}

// `slack` is the share by which a budget may exceed the costs (khot_jax._root.rounding).
ffi::Error budget(ffi::ThreadPool threads, Buffer x, Buffer goal, Buffer tau, Buffer cost, Result out,
                  Result hi, Result lo, Name cdf, Name output, double shape, double slack) {
  const Shape of(x);
  BudgetSpec spec{{}, false, false, slack};
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const Doubles goals(goal), taus(tau);
  Pairs found(of.rows);
  const PricedRows<Rows, Listed> rows(Rows(cost, of.n), Rows(x, of.n), goals, taus, results_in(out, of.n),
                                      found.hi.data(), found.lo.data());
  share(spec, of.rows, [&](const BudgetSpec& some, int64_t begin, int64_t end) {
    kernels().budget(some, rows, begin, end);
  });
  found.write(hi, lo);
  return ffi::Error::Success();
}

ffi::Error budget_pull(ffi::ThreadPool threads, Buffer x, Buffer hint, Buffer hi, Buffer lo, Buffer tau,
                       Buffer cost, Buffer v, Buffer g, Result dx, Result dgoal, Result dtau, Result dcost,
                       Name cdf, Name output, double shape, double slack) {
  const Shape of(x);
  BudgetSpec spec{{}, false, false, slack};
  if (auto error = read({cdf, output, shape}, of.n, spec); error.failure()) return error;
  const InPool in(threads);
  const Doubles taus(tau), grads(g);
  const Pairs found(hi, lo);
  Doubles dgoals(of.rows), dtaus(of.rows);
  const Rows scores(x, of.n);
  const PricedGradients<Rows, Listed> rows(Rows(cost, of.n), results_in(dcost, of.n), scores.dtype, scores,
                                           taus, rows_of(hint, of.n), rows_of(v, of.n), grads, found.hi,
                                           found.lo, results_in(dx, of.n), dgoals.data(), dtaus.data());
  share(spec, of.rows, [&](const BudgetSpec& some, int64_t begin, int64_t end) {
    kernels().budget_backward(some, rows, begin, end);
  });
  dgoals.write(dgoal), dtaus.write(dtau);
  return ffi::Error::Success();
}

ffi::Error mask(ffi::ThreadPool threads, Buffer x, Buffer k, Result out) {
  const Shape of(x);
  const InPool in(threads);
  const Doubles ks(k);
  const HardRows<Rows, Listed> rows(Rows(x, of.n), ks, results_in(out, of.n));
  row_ranges(of.rows, of.n, [&](int64_t begin, int64_t end) { kernels().topk_mask(rows, of.n, begin, end); });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------------- Laplace ranks

// Ranks, or the sorted rows, in `out`; with incoming gradients, theirs, for which the rows are sorted again.
template <class R>
void sorted(const Shape& of, Name what, bool descending, const Buffer& x, const Doubles& taus, Result& out,
            const Buffer* incoming, double* dtaus) {
  const int64_t n = of.n;
  row_ranges(of.rows, n, [&](int64_t begin, int64_t end) {
    laplace::Workspace<R> work(n, incoming ? 14 : 6);
    std::vector<int32_t> order(n), places(n);
    std::vector<R> room(n);
    for (int64_t row = begin; row < end; ++row) {
      const R* one = static_cast<const R*>(x.untyped_data()) + row * n;
      R *to = static_cast<R*>(out->untyped_data()) + row * n, *found = incoming ? room.data() : to;
      if (what == "rank") {
        laplace::count_row<R, R>(one, n, nullptr, n, taus[row], descending, work, found, order.data(),
                                 places.data());
      } else {
        laplace::thresholds_row<R, R>(one, n, nullptr, n, taus[row], work, nullptr, found, order.data(),
                                      places.data());
      }
      if (incoming == nullptr) {
        if (what == "sort" && !descending) std::reverse(to, to + n);
        continue;
      }
      const R* v = static_cast<const R*>(incoming->untyped_data()) + row * n;
      double* const no_levels = nullptr;
      const auto pull = [&](auto in_order) {
        return laplace::thresholds_backward_row<true>(in_order, one, order.data(), n, nullptr, places.data(),
                                                      n, taus[row], work, to, no_levels);
      };
      dtaus[row] = what == "rank"
                       ? laplace::count_backward_row<true>(descending, v, one, order.data(), n, nullptr,
                                                           places.data(), n, taus[row], work, to, no_levels)
                   : descending ? pull(v)
                                : pull(std::make_reverse_iterator(v + n));
    }
  });
}

ffi::Error order(ffi::ThreadPool threads, Buffer x, Buffer tau, Result out, Name what, bool descending) {
  const InPool in(threads);
  const auto run = x.element_type() == ffi::F64 ? sorted<double> : sorted<float>;
  run(Shape(x), what, descending, x, Doubles(tau), out, nullptr, nullptr);
  return ffi::Error::Success();
}

ffi::Error order_pull(ffi::ThreadPool threads, Buffer x, Buffer tau, Buffer v, Result dx, Result dtau,
                      Name what, bool descending) {
  const InPool in(threads);
  const Shape of(x);
  Doubles dtaus(of.rows);
  const auto run = x.element_type() == ffi::F64 ? sorted<double> : sorted<float>;
  run(of, what, descending, x, Doubles(tau), dx, &v, dtaus.data());
  dtaus.write(dtau);
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
