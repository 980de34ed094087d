// The soft ranks of a row under the Laplace CDF, and their gradients.
#pragma once

#include "laplace/rows.h"

namespace khot::laplace {

template <class R>
void rank_row(const R* x, int64_t n, double tau, Workspace<R>& work, R* rank, int32_t* order) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take();
  argsort_row(x, n, work, order, y);
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(rank, rank + n, static_cast<R>(kNan));
    return;
  }
  decays(y, n, tau, decay);
  double* partial = y;
  double up = 0, down = 0;
  for (int64_t p = 0; p < n; ++p) {
    up = decay[p] * (up + 1);
    partial[p] = static_cast<double>(p + 1) - 0.5 * up;
  }
  for (int64_t p = n - 1; p >= 0; --p) {
    down = decay[p + 1] * (down + 1);
    rank[order[p]] = static_cast<R>(partial[p] + 0.5 * down);
  }
}

// dx_j = sum_i f_ij (v_i - v_j)/tau. Returns dL/dtau.
template <class R>
double rank_backward_row(const R* grad, const R* x, const int32_t* order, int64_t n, double tau,
                         Workspace<R>& work, R* dx) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *v = work.take(), *partial = work.take(),
         *mass = work.take();
  for (int64_t p = 0; p < n; ++p) {
    const int32_t i = order[p];
    y[p] = x[i], v[p] = std::isinf(x[i]) ? 0.0 : static_cast<double>(grad[i]);
  }
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(dx, dx + n, static_cast<R>(kNan));
    return kNan;
  }
  decays(y, n, tau, decay);
  double one = 0, sum = 0, distance = 0, dtau = 0;
  for (int64_t p = 0; p < n; ++p) {
    if (p > 0) {
      one = decay[p] * (one + 1);
      sum = decay[p] * (sum + v[p - 1]);
      distance = gap_of(y[p - 1], y[p], tau) * one + decay[p] * distance;
    }
    mass[p] = one, partial[p] = sum;
    dtau -= v[p] * distance;
  }
  one = sum = distance = 0;
  const double scale = 0.5 / tau;
  for (int64_t p = n - 1; p >= 0; --p) {
    if (p < n - 1) {
      one = decay[p + 1] * (one + 1);
      sum = decay[p + 1] * (sum + v[p + 1]);
      distance = gap_of(y[p], y[p + 1], tau) * one + decay[p + 1] * distance;
    }
    dtau += v[p] * distance;
    const double d = scale * (partial[p] + sum - v[p] * (mass[p] + one));
    dx[order[p]] = static_cast<R>(std::isinf(y[p]) ? 0.0 : d);
  }
  return scale * dtau;
}

}  // namespace khot::laplace
