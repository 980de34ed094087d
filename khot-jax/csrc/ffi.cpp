// The CPU kernels as XLA's foreign functions: buffers in and out, rows shared among XLA's threads. It is to
// JAX what csrc/bindings is to torch. All buffers are contiguous, rows lie along the last dimension, numbers
// of rows are float, and shapes and dtypes were checked in Python (khot_jax/_threshold.py, _order.py,
// _topk.py).
#include "xla/ffi/api/ffi.h"

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/rows.h"
#include "kernels.h"
#include "laplace/laplace.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace khot {
namespace {

using Name = std::string_view;
using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// ------------------------------------------------------------------------------------------- buffers

ffi::AnyBuffer arg(const Args& args, size_t i) { return args.get<ffi::AnyBuffer>(i).value(); }
ffi::AnyBuffer ret(const Rets& rets, size_t i) { return *rets.get<ffi::AnyBuffer>(i).value(); }

float* floats(const ffi::AnyBuffer& x) { return static_cast<float*>(x.untyped_data()); }

struct Rows {
  char* data;
  int64_t count, n;
  Dtype dtype;

  explicit Rows(const ffi::AnyBuffer& x)
      : data(static_cast<char*>(x.untyped_data())),
        n(x.dimensions().back()),
        dtype(x.element_type() == ffi::F32   ? Dtype::kFloat
              : x.element_type() == ffi::F16 ? Dtype::kHalf
                                             : Dtype::kBFloat16) {
    count = n == 0 ? 0 : static_cast<int64_t>(x.element_count()) / n;
  }
  int64_t bytes() const { return n * (dtype == Dtype::kFloat ? 4 : 2); }
  Row operator()(int64_t row) const { return {data + row * bytes(), dtype, 1}; }
  operator Results() const { return {data, bytes()}; }
};

// Rows of no entries are none.
std::optional<Rows> some(const Rows& rows) { return rows.n > 0 ? std::optional(rows) : std::nullopt; }

// Numbers of rows are double to the kernels.
struct Doubles : std::vector<double> {
  using std::vector<double>::vector;

  explicit Doubles(const ffi::AnyBuffer& x) : vector(floats(x), floats(x) + x.element_count()) {}
  operator Listed() const { return {data()}; }
  void write(const ffi::AnyBuffer& to) const { std::copy(begin(), end(), floats(to)); }
};

// Thresholds are pairs of floats: these have all digits that are asked of rows of float. Where all or none is
// selected, they are the greatest float, as kernels have the greatest double.
constexpr double kMost = std::numeric_limits<double>::max(), kMostFloat = std::numeric_limits<float>::max();

struct Pairs {
  Doubles hi, lo;

  explicit Pairs(int64_t rows) : hi(rows), lo(rows) {}
  Pairs(const ffi::AnyBuffer& his, const ffi::AnyBuffer& los) : hi(his), lo(los) {
    for (size_t i = 0; i < hi.size(); ++i) {
      const bool fixed = std::abs(hi[i]) == kMostFloat;
      hi[i] = fixed ? std::copysign(kMost, hi[i]) : hi[i] + lo[i];
      lo[i] = fixed ? hi[i] : 0;
    }
  }
  void write(const ffi::AnyBuffer& his, const ffi::AnyBuffer& los) {
    for (size_t i = 0; i < hi.size(); ++i) {
      const bool fixed = std::abs(hi[i]) == kMost;
      const double high = fixed ? std::copysign(kMostFloat, hi[i]) : static_cast<float>(hi[i]);
      lo[i] = fixed ? high : (hi[i] - high) + lo[i];
      hi[i] = high;
    }
    hi.write(his), lo.write(los);
  }
};

using Taus = Invertible<Listed>;

// ------------------------------------------------------------------------------------------- thresholds

// Names are those of khot_jax/cdfs.py and _threshold.py.
template <class Choice, size_t count>
Choice find(Name name, const Named<Choice> (&known)[count]) {
  for (const auto& one : known) {
    if (name == one.name) return one.choice;
  }
  throw std::invalid_argument(std::string(name));
}

BudgetSpec spec_of(Name cdf, Name output, double shape, double slack, int64_t n) {
  return {{find(cdf, kCdfs), shape, find(output, kOutputs), n, nullptr}, false, false, slack};
}

// From x, the goal, τ and the costs if entries have some, the output and the threshold.
ffi::Error solve(ffi::ThreadPool threads, Args args, Rets rets, Name cdf, Name output, double shape,
                 double slack) {
  const Rows x(arg(args, 0)), out(ret(rets, 0));
  const BudgetSpec spec = spec_of(cdf, output, shape, slack, x.n);
  const InPool in(threads);
  const Doubles goals(arg(args, 1)), taus(arg(args, 2));
  Pairs found(x.count);
  if (args.size() == 4) {
    const PricedRows<Rows, Listed> rows(Rows(arg(args, 3)), x, goals, taus, out, found.hi.data(),
                                        found.lo.data());
    serve<&Kernels::budget>(spec, rows, x.count);
  } else {
    const SelectionRows<Rows, Listed, Taus> rows(x, goals, Taus{taus}, out, found.hi.data(), found.lo.data());
    serve<&Kernels::forward, Spec>(spec, rows, x.count);
  }
  found.write(ret(rets, 1), ret(rets, 2));
  return ffi::Error::Success();
}

// From x, the output, hi, lo, τ and the costs, and the gradients in the output and the threshold, those in x,
// the goal, τ if it is asked for, and the costs.
ffi::Error pull(ffi::ThreadPool threads, Args args, Rets rets, Name cdf, Name output, double shape,
                double slack) {
  const bool priced = args.size() == 8, with_tau = rets.size() == (priced ? 4 : 3);
  const Rows x(arg(args, 0)), out(arg(args, 1)), v(arg(args, args.size() - 2)), dx(ret(rets, 0));
  const BudgetSpec spec = spec_of(cdf, output, shape, slack, x.n);
  const InPool in(threads);
  const Pairs found(arg(args, 2), arg(args, 3));
  const Doubles taus(arg(args, 4)), grads(arg(args, args.size() - 1));
  Doubles dgoals(x.count), dtaus(x.count);
  if (priced) {
    const PricedGradients<Rows, Listed> rows(Rows(arg(args, 5)), Rows(ret(rets, rets.size() - 1)), x.dtype, x,
                                             taus, std::nullopt, some(v), grads, found.hi, found.lo, dx,
                                             dgoals.data(), dtaus.data());
    serve<&Kernels::budget_backward>(spec, rows, x.count);
  } else {
    // these densities follow from y, but z, of which the derivative in τ consists, does not
    const bool from_y =
        !with_tau && output == "y" && x.dtype == Dtype::kFloat && (cdf == "logistic" || cdf == "laplace");
    const GradientRows<Rows, Listed, Taus> rows(x.dtype, x, Taus{taus}, from_y ? some(out) : std::nullopt,
                                                some(v), grads, found.hi, found.lo, dx, dgoals.data(),
                                                with_tau ? dtaus.data() : nullptr);
    serve<&Kernels::backward, Spec>(spec, rows, x.count);
  }
  dgoals.write(ret(rets, 1));
  if (with_tau) dtaus.write(ret(rets, 2));
  return ffi::Error::Success();
}

ffi::Error mask(ffi::ThreadPool threads, Args args, Rets rets) {
  const Rows x(arg(args, 0));
  const InPool in(threads);
  const Doubles ks(arg(args, 1));
  const HardRows<Rows, Listed> rows(x, ks, Rows(ret(rets, 0)));
  row_ranges(x.count, x.n, [&](int64_t begin, int64_t end) { kernels().topk_mask(rows, x.n, begin, end); });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------------- Laplace ranks

// From x and τ the ranks, or the sorted rows; with incoming gradients theirs in x and τ, for which the rows
// are sorted again.
ffi::Error order(ffi::ThreadPool threads, Args args, Rets rets, Name what, bool descending) {
  const Rows x(arg(args, 0));
  const int64_t n = x.n;
  const InPool in(threads);
  const Doubles taus(arg(args, 1));
  Doubles dtaus(x.count);
  const bool backward = args.size() == 3;
  row_ranges(x.count, n, [&](int64_t begin, int64_t end) {
    laplace::Workspace<float> work(n, backward ? 14 : 6);
    std::vector<int32_t> order(n), places(n);
    std::vector<float> room(n);
    double* const no_levels = nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const float* one = floats(arg(args, 0)) + row * n;
      float *to = floats(ret(rets, 0)) + row * n, *found = backward ? room.data() : to;
      if (what == "rank") {
        laplace::count_row<float, float>(one, n, nullptr, n, taus[row], descending, work, found, order.data(),
                                         places.data());
      } else {
        laplace::thresholds_row<float, float>(one, n, nullptr, n, taus[row], work, nullptr, found,
                                              order.data(), places.data());
        if (!backward && !descending) std::reverse(to, to + n);
      }
      if (!backward) continue;
      const float* v = floats(arg(args, 2)) + row * n;
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
  if (backward) dtaus.write(ret(rets, 1));
  return ffi::Error::Success();
}

auto rows_bound() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }
// `slack` is the share by which a budget may exceed the costs (khot_jax/_root.py).
auto law_bound() {
  return rows_bound().Attr<Name>("cdf").Attr<Name>("output").Attr<double>("shape").Attr<double>("slack");
}
auto order_bound() { return rows_bound().Attr<Name>("what").Attr<bool>("descending"); }

}  // namespace
}  // namespace khot

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_solve, khot::solve, khot::law_bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_pull, khot::pull, khot::law_bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_mask, khot::mask, khot::rows_bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_order, khot::order, khot::order_bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(khot_order_pull, khot::order, khot::order_bound());
#pragma GCC visibility pop
