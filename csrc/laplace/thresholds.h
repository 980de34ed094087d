// The inverse of the soft count of a row under the Laplace CDF: the thresholds of any levels, and their
// gradients. Without levels they are those of i + 1/2, the soft sort.
#pragma once

#include "laplace/rows.h"

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

// The same for the levels i + 1/2 of a whole row. An entry with the count C lies above them from i = C - 1/2
// on, so that these indices are counted and summed up. In a search the processor would mispredict every other
// branch.
inline void half_places(const double* above, const double* below, int64_t n, const Finite& finite,
                        std::vector<int32_t>& starts, int32_t* places) {
  starts.assign(n + 1, 0);
  for (int64_t p = 0; p < n; ++p) {
    const double from = static_cast<double>(p) + 0.5 * (below[p] - above[p]);  // in [-1/2, n)
    const int64_t i = static_cast<int64_t>(from + 1) - 1;
    ++starts[i + (static_cast<double>(i) < from)];
  }
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) places[i] = static_cast<int32_t>(finite.clamp(total += starts[i]));
}

inline double level_of(const double* levels, int64_t i) {
  return levels ? levels[i] : static_cast<double>(i) + 0.5;
}

// t in the segment with j entries above it: C(t) = j - a e^(-alpha)/2 + b e^(-beta)/2, where alpha and beta
// are the distances in tau from t to its neighbours. big is the larger one of a e^(-alpha) and b e^(-beta):
// it is the smaller one plus 2|j - level|, and computed without cancellation where level is not j. There
// both are equal, and may underflow.
struct Segment {
  double a, b, lack, root, big;
  Segment(int64_t j, double level, const Finite& finite, const double* above, const double* below,
          const double* decay)
      : a(j > finite.first ? above[j - 1] : 0),
        b(j < finite.last ? below[j] : 0),
        lack(static_cast<double>(j) - level),
        root(std::sqrt(lack * lack + a * b * decay[j])),
        big(std::fabs(lack) + root) {}
  // exp((t - neighbour)/tau) for the nearer neighbour; where both are as near, exp of twice the distance from
  // t to the middle between them.
  double ratio() const { return lack == 0 ? b / a : (lack > 0 ? big : b) / (lack > 0 ? a : big); }
};

// Writes the threshold hi + lo of each level, or the sum itself to lo if hi is null.
template <class R, class T>
void thresholds_row(const R* x, int64_t n, const double* levels, int64_t m, double tau, Workspace<R>& work,
                    double* hi, T* lo, int32_t* order, int32_t* places) {
  const auto write = [=](int64_t i, double high, double low) {
    if (hi) hi[i] = high;
    lo[i] = static_cast<T>(hi ? low : high + low);
  };
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take(),
         *ratio = work.take();
  argsort_row(x, n, work, order, y);
  if (n == 0 || has_nan(y, n) || !is_temperature(tau)) {
    std::fill(places, places + m, 0);
    for (int64_t i = 0; i < m; ++i) write(i, kNan, kNan);
    return;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  const Finite finite(y, n);
  if (levels) {
    Place place(above, below, n);
    for (int64_t i = 0; i < m; ++i) places[i] = static_cast<int32_t>(finite.clamp(place(levels[i])));
  } else {
    half_places(above, below, n, finite, work.places, places);
  }
  for (int64_t i = 0; i < m; ++i) {
    ratio[i] = Segment(places[i], level_of(levels, i), finite, above, below, decay).ratio();
  }
  std::fill(ratio + m, ratio + m + kLanes, 1.0);
  each_log(ratio, m);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = places[i];
    const double level = level_of(levels, i), lack = static_cast<double>(j) - level;
    if (level <= finite.first || level >= finite.last) {
      const double end = level <= finite.first ? kHuge : -kHuge;
      write(i, end, end);
    } else if (lack == 0) {
      write(i, y[j], 0.5 * (y[j - 1] - y[j]) + 0.5 * tau * ratio[i]);
    } else {
      write(i, level == level ? y[j - (lack > 0)] : kNan, tau * ratio[i]);
    }
  }
}

// Writes dL/dx and dL/dlevel. Returns dL/dtau, or 0 where that is not wanted. The gradients of the thresholds
// are in the order of the levels: a pointer, or an iterator backwards.
template <bool kTau, class R, class Grads>
double thresholds_backward_row(Grads grad, const R* x, const int32_t* order, int64_t n, const double* levels,
                               const int32_t* places, int64_t m, double tau, Workspace<R>& work, R* dx,
                               double* dlevel) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take();
  for (int64_t p = 0; p < n; ++p) y[p] = x[order[p]];
  if (has_nan(y, n) || !is_temperature(tau)) {
    std::fill(dx, dx + n, static_cast<R>(kNan));
    if (levels) std::fill(dlevel, dlevel + m, kNan);
    return kNan;
  }
  decays(y, n, tau, decay);
  masses(decay, n, above, below);
  // What each threshold sends to the next entry below and above it, with room for neighbours that do not
  // exist.
  double* sent[2] = {work.take(), work.take() + 1};
  std::fill(sent[0], sent[0] + n + 1, 0.0), std::fill(sent[1] - 1, sent[1] + n, 0.0);
  const Finite finite(y, n);
  double dtau = 0;
  for (int64_t i = 0; i < m; ++i) {
    if (levels) dlevel[i] = 0;
    const double level = level_of(levels, i);
    if (level <= finite.first || level >= finite.last || grad[i] == 0) continue;
    const int64_t j = places[i];
    const Segment s(j, level, finite, above, below, decay);
    const double gap = s.lack == 0 || decay[j] != 0 ? (y[j - 1] - y[j]) / tau : 0;  // both are there
    const int near = s.lack > 0;  // whether the nearer neighbour is above; an index, to save a branch
    const double mass[2] = {s.b, s.a};
    double to_near, to_far, rate;
    if (s.lack != 0) {
      // The sum of a e^(-alpha) and b e^(-beta) is 2 root. Their product is a b e^(-gap), and 0 where a
      // neighbour is missing.
      const double v = grad[i] / (2 * s.root);
      to_near = v * s.big / mass[near], to_far = v * decay[j] * mass[near] / s.big;
      rate = 1 / s.root;
    } else {
      to_near = 0.5 * grad[i] / s.b, to_far = 0.5 * grad[i] / s.a;
      rate = levels ? std::exp(0.5 * (gap - std::log(s.a * s.b))) : 0;
    }
    sent[near][j - near] += to_near;
    sent[1 - near][j - (1 - near)] += to_far;
    if (levels) dlevel[i] = -grad[i] * tau * rate;
    if (kTau) {
      const double log = std::log(s.ratio()), sign = near ? 1 : -1;
      const double distance = s.lack != 0 ? -sign * log : 0.5 * (gap + log);
      dtau -= sign * (to_near * mass[near] * distance - to_far * mass[1 - near] * (gap - distance));
    }
  }
  return dtau + collect<kTau>(sent[1], sent[0], y, decay, order, n, tau, above, dx);
}

}  // namespace khot::laplace
