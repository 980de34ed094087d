// The entry point of the backward pass (khot/_kernels/reference/soft_topk.py): which kernel takes which row.
#pragma once

#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/backward_careful.h"
#include "soft_topk/backward_decided.h"
#include "soft_topk/backward_lanes.h"
#include "soft_topk/backward_ordinary.h"

namespace khot::KHOT_ISA {

// One row: in float where that carries it, then in double, and with weights relative to the largest density
// where the densities are too small for either. Numbers that are not asked for may be left out.
template <class C>
void backward_row(const Spec& spec, const C& F, const Row& x, const Row& y, const Row& grad, double grad_lo,
                  double tau, Threshold t, void* grad_x, bool asked, double& grad_k, double& grad_tau) {
  grad_k = grad_tau = 0;
  if (!(std::fabs(t.hi) < kHuge)) {  // nothing is selected, or everything, or the row is bad
    const double value = std::isnan(t.hi) ? kNan : 0;
    grad_k = grad_tau = value;
    return fill_constant<double>(spec, grad_x, x.dtype, x, value, value, 0);
  }
  const double none = 0;
  const bool threshold = spec.output == Output::kThreshold, log = spec.output == Output::kLog;
  const Row v = threshold ? Row{&none, Dtype::kDouble, 0} : grad;
  const bool fast = float_carries(spec, F, x.dtype, tau) || float_carries_threshold(spec, F, x.dtype, tau);
  const bool in_double = tau > 1e-100 && tau < 1e100;
  auto ordinary = [&](const auto& density, const Row& source) {
    return backward_ordinary(spec, density, source, v, grad_lo, tau, grad_x, grad_k, grad_tau);
  };
  auto done = [&](const auto& density, const Row& source) {
    return ordinary(density, source) == Gradients::kWritten;
  };
  // Rows whose entries are all decided; under compact support these are flat.
  auto write_decided = [&](Gradients gradients) {
    if constexpr (C::full_support) {
      if (threshold) return fast && !asked && DecidedRow<C>(spec, F, x, v, tau, t).share(grad_lo, grad_x);
      return grad_lo == 0 && std::fabs(t.hi) < 1e38 &&
             DecidedRow<C>(spec, F, x, v, tau, t).write(grad_x, asked, grad_k, grad_tau);
    }
    if (gradients != Gradients::kFlat) return false;
    backward_in_gap(spec, x, v, grad_lo, t, grad_x, asked, grad_k, grad_tau);
    return true;
  };
  if (log) {
    if constexpr (C::log_fits_float) {
      if (fast && done(LogDensity<float, C>(F, t, tau), x)) return;
      if (fast && write_decided(Gradients::kUnreliable)) return;
    }
    Gradients gradients = Gradients::kUnreliable;
    if (in_double) gradients = ordinary(LogDensity<double, C>(F, t, tau), x);
    if (gradients == Gradients::kWritten) return;
    if (!(C::log_fits_float && fast) && write_decided(gradients)) return;
    return backward_careful(spec, F, x, v, grad_lo, tau, t, grad_x, grad_k, grad_tau);
  }
  if (fast) {
    if constexpr (C::density_from_value) {
      if (!threshold && y.data != nullptr && done(ValueDensity<C>(F, t, tau), y)) return;
    }
    const Gradients gradients = ordinary(ScoreDensity<float, C>(F, t, tau), x);
    if (gradients == Gradients::kWritten || write_decided(gradients)) return;
  }
  if (in_double) {  // a row that is fast was asked above whether it is decided
    const Gradients gradients = ordinary(ScoreDensity<double, C>(F, t, tau), x);
    if (gradients == Gradients::kWritten || (!fast && write_decided(gradients))) return;
  }
  backward_careful(spec, F, x, v, grad_lo, tau, t, grad_x, grad_k, grad_tau);
}

// The rows [begin, end), in groups where they are short, as in choose.h.
inline void backward(const Spec& spec, const BackwardRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    if (begin == end) return;
    FloatCopies copies(rows.x(begin).dtype, spec.n, 3);
    auto one = [&](int64_t i) {
      double grad_k, grad_tau;
      const Row grad = spec.output == Output::kThreshold ? Row{} : copies.of(rows.grad(i), 1);
      backward_row(spec, F, copies.of(rows.x(i), 0), rows.y(i), grad, rows.grad_lo(i), rows.tau(i),
                   rows.threshold(i), copies.instead_of(rows.grad_x(i), 2), rows.keeps_numbers(), grad_k,
                   grad_tau);
      copies.finish(rows.grad_x(i), 2);
      rows.put(i, grad_k, grad_tau);
    };
    const bool suits =
        spec.output == Output::kValue || (spec.output == Output::kLog ? C::log_fits_float : C::full_support);
    LaneBackward<C> lanes(spec, F);
    each_row(
        suits && fits_tile(rows.x(begin), spec.n) && F.fits_float, begin, end,
        [&](int64_t first, bool* done) { lanes.run(rows, first, done); }, one);
  });
}

}  // namespace khot::KHOT_ISA
