// The entry point of the backward pass (khot/_kernels/reference/soft_topk.py): which kernel takes which row.
#pragma once

#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/backward_careful.h"
#include "soft_topk/backward_lanes.h"
#include "soft_topk/backward_ordinary.h"

namespace khot::KHOT_ISA {

// One row: in float where that carries it, then in double, and with weights relative to the largest density
// where the densities are too small for either, and for log y of the normal CDF and compact support.
template <class C>
void backward_row(const Spec& spec, const C& F, const Row& x, const Row& y, const Row& grad, double grad_lo,
                  double tau, Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  grad_k = grad_tau = 0;
  if (!(std::fabs(t.hi) < kHuge)) {  // nothing is selected, or everything, or the row is bad
    const double value = std::isnan(t.hi) ? kNan : 0;
    grad_k = grad_tau = value;
    return fill_constant<double>(spec, grad_x, x.dtype, x, value, value, 0);
  }
  const bool fast = float_carries(spec, F, x.dtype, tau);
  if constexpr (C::log_fits_float) {
    if (fast && spec.output == Output::kLog &&
        backward_ordinary_log(spec, F, x, grad, grad_lo, tau, t, grad_x, grad_k, grad_tau)) {
      return;
    }
    if (spec.output == Output::kLog && tau > 1e-100 && tau < 1e100) {
      const LogDensity<double, C> density(F, t, tau);
      if (backward_ordinary(spec, density, x, grad, grad_lo, tau, grad_x, grad_k, grad_tau) ==
          Gradients::kWritten)
        return;
    }
  }
  if (fast && spec.output == Output::kValue) {
    if constexpr (C::density_from_value) {
      const ValueDensity<C> density(F, t, tau);
      if (y.data != nullptr && backward_ordinary(spec, density, y, grad, grad_lo, tau, grad_x, grad_k,
                                                 grad_tau) == Gradients::kWritten) {
        return;
      }
    }
    const ScoreDensity<float, C> density(F, t, tau);
    const Gradients gradients =
        backward_ordinary(spec, density, x, grad, grad_lo, tau, grad_x, grad_k, grad_tau);
    if (gradients == Gradients::kWritten) return;
    if (!C::full_support && gradients == Gradients::kFlat && grad_lo == 0) {
      grad_k = gap_gradient(spec, gap_around(spec, x, grad, t).sums);
      return fill_constant<float>(spec, grad_x, x.dtype, x, 0, 0, 0);
    }
  }
  if (float_carries_threshold(spec, F, x.dtype, tau)) {
    const double none = 0;
    const ScoreDensity<float, C> density(F, t, tau);
    if (backward_ordinary(spec, density, x, Row{&none, Dtype::kDouble, 0}, grad_lo, tau, grad_x, grad_k,
                          grad_tau) == Gradients::kWritten)
      return;
  }
  if (spec.output != Output::kLog && tau > 1e-100 && tau < 1e100) {
    const double none = 0;
    const Row v = spec.output == Output::kThreshold ? Row{&none, Dtype::kDouble, 0} : grad;
    const ScoreDensity<double, C> density(F, t, tau);
    if (backward_ordinary(spec, density, x, v, grad_lo, tau, grad_x, grad_k, grad_tau) == Gradients::kWritten)
      return;
  }
  backward_careful(spec, F, x, grad, grad_lo, tau, t, grad_x, grad_k, grad_tau);
}

// The rows [begin, end), in groups where they are short, as in choose.h.
inline void backward(const Spec& spec, const BackwardRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    auto one = [&](int64_t i) {
      double grad_k, grad_tau;
      backward_row(spec, F, rows.x(i), rows.y(i), rows.grad(i), rows.grad_lo(i), rows.tau(i),
                   rows.threshold(i), rows.grad_x(i), grad_k, grad_tau);
      rows.put(i, grad_k, grad_tau);
    };
    int64_t i = begin;
    constexpr int width = LaneBackward<C>::width;
    const bool threshold = C::full_support && spec.output == Output::kThreshold;
    const bool together =
        threshold || spec.output == Output::kValue || (C::log_fits_float && spec.output == Output::kLog);
    if (spec.n > 0 && spec.n <= kShortRow && together && end - begin >= width &&
        rows.x(begin).dtype != Dtype::kDouble && F.fits_float) {
      LaneBackward<C> lanes(spec, F);
      bool done[width];
      for (; i + width <= end; i += width) {
        lanes.run(rows, i, done);
        for (int j = 0; j < width; ++j) {
          if (!done[j]) one(i + j);
        }
      }
    }
    for (; i < end; ++i) one(i);
  });
}

}  // namespace khot::KHOT_ISA
