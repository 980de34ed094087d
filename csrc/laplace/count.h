// The soft count of a row at any levels under the Laplace CDF, and its gradients. Without levels it is the
// count at each entry, which counts itself as 1: its rank.
#pragma once

#include "laplace/rows.h"

namespace khot::laplace {

// How many entries of a descending row are at least each level: a binary search without branches, of which
// the processor would mispredict every other one. Several levels search together, since each step waits for
// memory.
inline void count_at_least(const double* y, int64_t n, const double* levels, int64_t m, int32_t* places) {
  constexpr int64_t kTogether = 16;
  for (int64_t first = 0; first < m; first += kTogether) {
    const int64_t count = std::min(kTogether, m - first);
    const double* level = levels + first;
    int64_t at[kTogether] = {};
    for (int64_t left = n; left > 1; left -= left / 2) {
      const int64_t half = left / 2;
      for (int64_t i = 0; i < count; ++i) at[i] += (y[at[i] + half - 1] >= level[i]) * half;
    }
    for (int64_t i = 0; i < count; ++i) {
      places[first + i] = static_cast<int32_t>(at[i] + (n > 0 && y[at[i]] >= level[i]));
    }
  }
}

// For levels with so many entries at or above them: exp(-distance) to the next entry above and to the next
// one below, the distance being in tau; 0 where there is none.
inline void tails(const double* y, const Finite& finite, const double* levels, const int32_t* places,
                  int64_t m, double tau, double* up, double* down) {
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = places[i];
    up[i] = j > finite.first ? gap_of(y[j - 1], levels[i], tau) : kFar;
    down[i] = j < finite.last ? gap_of(levels[i], y[j], tau) : kFar;
  }
  std::fill(up + m, up + m + kLanes, kFar), std::fill(down + m, down + m + kLanes, kFar);
  each_exp_minus(up, m), each_exp_minus(down, m);
}

// With j entries above a level, C = j - a e^(-alpha)/2 + b e^(-beta)/2, where alpha and beta are the
// distances in tau to its neighbours. Without levels places are not written, and ranks may count from the
// smallest entry.
template <class R, class C>
void count_row(const R* x, int64_t n, const double* levels, int64_t m, double tau, bool descending,
               Workspace<R>& work, C* count, int32_t* order, int32_t* places) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take();
  argsort_row(x, n, work, order, y);
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(count, count + m, static_cast<C>(kNan));
    if (levels) std::fill(places, places + m, 0);
    return;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  if (!levels) {
    for (int64_t p = 0; p < n; ++p) {
      const double place = static_cast<double>(descending ? p + 1 : n - p);
      const double apart = 0.5 * (below[p] - above[p]);
      count[order[p]] = static_cast<C>(place + (descending ? apart : -apart));
    }
    return;
  }
  const Finite finite(y, n);
  double *up = work.take(), *down = work.take();
  count_at_least(y, n, levels, m, places);
  for (int64_t i = 0; i < m; ++i) places[i] = static_cast<int32_t>(finite.clamp(places[i]));
  tails(y, finite, levels, places, m, tau, up, down);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = places[i];
    const double a = j > 0 ? above[j - 1] : 0, b = j < n ? below[j] : 0;
    const double c = static_cast<double>(j) - 0.5 * up[i] * a + 0.5 * down[i] * b;
    count[i] = static_cast<C>(levels[i] == levels[i] ? c : kNan);
  }
}

// dx_j = sum_i f_ij (v_i - v_j)/tau, as an entry is a level, too. Returns dL/dtau.
template <bool kTau, class R, class G>
double rank_backward_row(bool descending, const G* grad, const int32_t* order, int64_t n, double tau,
                         const double* y, const double* decay, Workspace<R>& work, R* dx) {
  double *v = work.take(), *partial = work.take(), *ones = work.take(), dtau = 0;
  const double scale = (descending ? 0.5 : -0.5) / tau;
  for (int64_t p = 0; p < n; ++p) v[p] = std::isinf(y[p]) ? 0.0 : static_cast<double>(grad[order[p]]);
  sweep<true>(y, decay, v, n, tau, [&](int64_t p, const Passed& above) {
    partial[p] = above.sum, ones[p] = above.ones;
    if (kTau) dtau -= v[p] * above.distances;
  });
  sweep<false>(y, decay, v, n, tau, [&](int64_t p, const Passed& below) {
    const double d = partial[p] + below.sum - v[p] * (ones[p] + below.ones);
    dx[order[p]] = static_cast<R>(std::isinf(y[p]) ? 0.0 : scale * d);
    if (kTau) dtau += v[p] * below.distances;
  });
  return scale * dtau;
}

// Writes dL/dx and dL/dlevel. Returns dL/dtau, or 0 where that is not wanted.
template <bool kTau, class R, class G>
double count_backward_row(bool descending, const G* grad, const R* x, const int32_t* order, int64_t n,
                          const double* levels, const int32_t* places, int64_t m, double tau,
                          Workspace<R>& work, R* dx, double* dlevel) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take();
  for (int64_t p = 0; p < n; ++p) y[p] = x[order[p]];
  if (has_nan(y, n) || (levels && has_nan(levels, m)) || !is_temperature(tau)) {
    std::fill(dx, dx + n, static_cast<R>(kNan));
    if (levels) std::fill(dlevel, dlevel + m, kNan);
    return kNan;
  }
  decays(y, n, tau, decay);
  if (!levels) return rank_backward_row<kTau>(descending, grad, order, n, tau, y, decay, work, dx);
  double *above = work.take(), *below = work.take(), *up = work.take(), *down = work.take();
  double *to_above = work.take(), *to_below = work.take();
  masses(decay, n, above, below);
  tails(y, Finite(y, n), levels, places, m, tau, to_above, to_below);
  std::fill(up, up + n, 0.0), std::fill(down, down + n, 0.0);
  double dtau = 0;
  for (int64_t i = 0; i < m; ++i) {
    dlevel[i] = 0;
    const double v = 0.5 * grad[i] / tau;
    const int64_t j = places[i];
    if (to_above[i] > 0) {
      const double sent = v * to_above[i], moment = sent * above[j - 1];
      up[j - 1] += sent;
      dlevel[i] -= moment;
      if (kTau) dtau -= moment * gap_of(y[j - 1], levels[i], tau);
    }
    if (to_below[i] > 0) {
      const double sent = v * to_below[i], moment = sent * below[j];
      down[j] += sent;
      dlevel[i] -= moment;
      if (kTau) dtau += moment * gap_of(levels[i], y[j], tau);
    }
  }
  return dtau + collect<kTau>(up, down, y, decay, order, n, tau, above, dx);
}

}  // namespace khot::laplace
