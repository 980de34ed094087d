// The thresholds of any levels under the Laplace CDF, and their gradients.
#pragma once

#include "laplace/segment.h"

namespace khot::laplace {

// How many entries lie above the threshold of a level. The levels mostly ascend by about one, so that the
// search begins where the last one ended.
class Place {
 public:
  Place(const double* above, const double* below, int64_t n) : above_(above), below_(below), n_(n) {}
  int64_t operator()(double level) {
    if (at_ > 0 && !reached(at_ - 1, level)) at_ = 0;
    for (int steps = 0; steps < 8; ++steps) {
      if (at_ == n_ || !reached(at_, level)) return at_;
      ++at_;
    }
    int64_t high = n_;
    while (at_ < high) {
      const int64_t middle = (at_ + high) / 2;
      if (reached(middle, level)) {
        at_ = middle + 1;
      } else {
        high = middle;
      }
    }
    return at_;
  }

 private:
  // Whether C at the entry is at most level.
  bool reached(int64_t p, double level) const {
    return static_cast<double>(p) + 0.5 * (1 + below_[p] - above_[p]) <= level;
  }
  const double *above_, *below_;
  int64_t n_, at_ = 0;
};

template <class R>
void thresholds_row(const R* x, int64_t n, const double* levels, int64_t m, double tau, Workspace<R>& work,
                    double* hi, double* lo, int32_t* order, int32_t* places) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take(),
         *ratio = work.take();
  argsort_row(x, n, work, order, y);
  if (n == 0 || has_nan(y, n) || !is_temperature(tau)) {
    std::fill(hi, hi + m, kNan), std::fill(lo, lo + m, kNan), std::fill(places, places + m, 0);
    return;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  const Finite finite(y, n);
  Place place(above, below, n);
  std::fill(ratio, ratio + m + kLanes, 1.0);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = finite.clamp(place(levels[i]));
    places[i] = static_cast<int32_t>(j);
    const Segment s(j, levels[i], finite, above, below, decay);
    ratio[i] = s.lack != 0 ? s.ratio() : s.b / s.a;
  }
  each_log(ratio, m);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = places[i];
    const double level = levels[i], lack = static_cast<double>(j) - level;
    if (level <= finite.first || level >= finite.last) {
      hi[i] = lo[i] = level <= finite.first ? kHuge : -kHuge;
    } else if (lack != 0) {
      hi[i] = lack > 0 ? y[j - 1] : y[j], lo[i] = tau * ratio[i];
    } else {
      hi[i] = y[j], lo[i] = 0.5 * (y[j - 1] - y[j]) + 0.5 * tau * ratio[i];
    }
    if (level != level) hi[i] = lo[i] = kNan;
  }
}

// Writes dL/dx and dL/dlevel. Returns dL/dtau.
template <class R>
double thresholds_backward_row(const double* grad, const R* x, const int32_t* order, int64_t n,
                               const double* hi, const double* lo, const int32_t* places, int64_t m,
                               double tau, Workspace<R>& work, R* dx, double* dlevel) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take();
  for (int64_t p = 0; p < n; ++p) y[p] = x[order[p]];
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(dx, dx + n, static_cast<R>(kNan)), std::fill(dlevel, dlevel + m, kNan);
    return kNan;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  double *up = work.take(), *down = work.take();
  std::fill(up, up + n, 0.0), std::fill(down, down + n, 0.0);
  const Finite finite(y, n);
  double dtau = 0;
  for (int64_t i = 0; i < m; ++i) {
    dlevel[i] = 0;
    if (std::fabs(hi[i]) == kHuge || grad[i] == 0) continue;
    const int64_t j = places[i];
    const bool has_above = j > finite.first, has_below = j < finite.last;
    const double a = has_above ? above[j - 1] : 1, b = has_below ? below[j] : 1;
    const double alpha = has_above ? ((y[j - 1] - hi[i]) - lo[i]) / tau : 0;
    const double beta = has_below ? (lo[i] - (y[j] - hi[i])) / tau : 0;
    // Both shares are relative to the larger one, since in a wide gap both would underflow.
    const double log_a = has_above ? std::log(a) - alpha : -kHuge,
                 log_b = has_below ? std::log(b) - beta : -kHuge;
    const double top = std::max(log_a, log_b);
    double share_above = std::exp(log_a - top), share_below = std::exp(log_b - top);
    const double mass = share_above + share_below, v = grad[i] / mass;
    dlevel[i] = -grad[i] * std::exp(std::log(2 * tau / mass) - top);
    if (has_above) up[j - 1] += v * share_above / a;
    if (has_below) down[j] += v * share_below / b;
    dtau += v * (share_below * beta - share_above * alpha);
  }
  return dtau + collect(up, down, y, decay, order, n, tau, true, above, dx);
}

}  // namespace khot::laplace
