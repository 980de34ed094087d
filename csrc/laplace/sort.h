// The soft sort of a row under the Laplace CDF: the thresholds of the levels i + 1/2, and their gradients.
#pragma once

#include "laplace/segment.h"

namespace khot::laplace {

// How many entries lie above the threshold of each level i + 1/2. An entry with the count C does from i = C -
// 1/2 on, so that these indices are counted and summed up. In a search the processor would mispredict every
// other branch.
inline void half_places(const double* above, const double* below, int64_t n, int32_t* places) {
  std::fill(places, places + n + 1, 0);
  for (int64_t p = 0; p < n; ++p) {
    const double from = static_cast<double>(p) + 0.5 * (below[p] - above[p]);  // in [-1/2, n)
    const int64_t i = static_cast<int64_t>(from + 1) - 1;
    ++places[i + (static_cast<double>(i) < from)];
  }
  int32_t total = 0;
  for (int64_t i = 0; i < n; ++i) places[i] = total += places[i];
}

// None of the levels i + 1/2 is an integer, so that lack below is never 0.
template <class R>
void sort_row(const R* x, int64_t n, double tau, bool descending, Workspace<R>& work, R* out,
              int32_t* order) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take();
  double *ratio = work.take(), *near = work.take();
  argsort_row(x, n, work, order, y);
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(out, out + n, static_cast<R>(kNan));
    return;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  work.places.resize(n + 1);
  int32_t* places = work.places.data();
  half_places(above, below, n, places);
  const Finite finite(y, n);
  std::fill(ratio, ratio + n + kLanes, 1.0);
  std::copy(y, y + n, near);  // infinite entries stay as they are
  for (int64_t i = finite.first; i < finite.last; ++i) {
    const int64_t j = finite.clamp(places[i]);
    const Segment s(j, static_cast<double>(i) + 0.5, finite, above, below, decay);
    ratio[i] = s.ratio(), near[i] = y[j - (s.lack > 0)];
  }
  each_log(ratio, n);
  for (int64_t i = 0; i < n; ++i) out[descending ? i : n - 1 - i] = static_cast<R>(near[i] + tau * ratio[i]);
}

// Writes dL/dx. Returns dL/dtau, or 0 where that is not wanted.
template <class R>
double sort_backward_row(const R* grad, const R* x, const int32_t* order, int64_t n, double tau,
                         bool descending, bool want_tau, Workspace<R>& work, R* dx) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take();
  for (int64_t p = 0; p < n; ++p) y[p] = x[order[p]];
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(dx, dx + n, static_cast<R>(kNan));
    return kNan;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  work.places.resize(n + 1);
  int32_t* places = work.places.data();
  half_places(above, below, n, places);
  const Finite finite(y, n);
  // What each threshold sends to the next entry below and above it, with room for neighbours that do not
  // exist.
  double* sent[2] = {work.take(), work.take() + 1};
  std::fill(sent[0], sent[0] + n + 1, 0.0), std::fill(sent[1] - 1, sent[1] + n, 0.0);
  double dtau = 0;
  for (int64_t i = finite.first; i < finite.last; ++i) {
    const int64_t j = finite.clamp(places[i]);
    const Segment s(j, static_cast<double>(i) + 0.5, finite, above, below, decay);
    // The sum of a e^(-alpha) and b e^(-beta) is 2 root. Their product is a b e^(-gap), and 0 where a
    // neighbour is missing.
    const double mass[2] = {s.b, s.a}, v = grad[descending ? i : n - 1 - i] / (2 * s.root);
    const int near = s.lack > 0;  // whether the nearer neighbour is above; an index, to save a branch
    const double to_near = v * s.big / mass[near], to_far = v * decay[j] * mass[near] / s.big;
    sent[near][j - near] += to_near;
    sent[1 - near][j - (1 - near)] += to_far;
    if (want_tau) {
      const double sign = near ? 1 : -1, distance = -sign * std::log(s.ratio());
      const double gap = decay[j] != 0 ? (y[j - 1] - y[j]) / tau : 0;  // both are there
      dtau -= sign * (to_near * mass[near] * distance - to_far * mass[1 - near] * (gap - distance));
    }
  }
  const double *up = sent[1], *down = sent[0];
  return dtau + collect(up, down, y, decay, order, n, tau, want_tau, above, dx);
}

}  // namespace khot::laplace
