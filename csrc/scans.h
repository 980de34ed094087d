// The sorted Laplace count, a row at a time: khot/_kernels/reference/laplace.py in one sort and a few sweeps, in double.
//
// Included by scans.cpp only. One pass per direction carries every sum that goes that way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KHOT_ISA scans
#define KHOT_VECTOR_BYTES 32  // two registers where there is no AVX2
#include "vec.h"

// Only exp and log gain from wider vectors: everything else waits for the recurrences.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define KHOT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KHOT_CLONES
#endif

namespace khot::scans {

constexpr double kHuge = std::numeric_limits<double>::max();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kFar = 1000;       // a gap in tau from which exp(-gap) is 0
constexpr int64_t kFewItems = 192;  // up to here a comparison sort beats the counting of digits
constexpr int kLanes = kWidth<double>;

template <class R>
using Bits = std::conditional_t<sizeof(R) == 4, uint32_t, uint64_t>;

// Its key orders as the scores do, but descending, NaN of either sign at one of the ends.
template <class R>
struct Item {
  Bits<R> key;
  int32_t index;
};

template <class R>
KHOT_INLINE Bits<R> to_key(R x) {
  constexpr Bits<R> top = Bits<R>(1) << (8 * sizeof(R) - 1);
  Bits<R> bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits & top ? bits : ~(bits | top);
}

template <class R>
KHOT_INLINE R from_key(Bits<R> key) {
  constexpr Bits<R> top = Bits<R>(1) << (8 * sizeof(R) - 1);
  const Bits<R> bits = key & top ? key : ~key & ~top;
  R x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// What the rows of one thread share, so that memory is taken once.
template <class R>
struct Workspace {
  std::vector<Item<R>> items, spare;
  std::vector<double> numbers;
  std::vector<int32_t> places;
  int64_t taken = 0, stride;

  // arrays of up to `length` numbers, padded for whole vectors
  Workspace(int64_t length, int arrays) : stride(length + 2 * kLanes) { numbers.resize(stride * arrays); }
  double* take() { return numbers.data() + stride * taken++; }
};

// order and y = x[order], descending, ties by index. Least significant digit first, a byte at a time, but for
// the bytes that all keys share (three of four in bfloat16).
template <class R>
void argsort_row(const R* x, int64_t n, Workspace<R>& work, int32_t* order, double* y) {
  work.items.resize(n);
  Item<R>* from = work.items.data();
  for (int64_t i = 0; i < n; ++i) from[i] = {to_key(x[i]), static_cast<int32_t>(i)};
  if (n <= kFewItems) {
    std::sort(from, from + n, [](const Item<R>& a, const Item<R>& b) {
      return a.key < b.key || (a.key == b.key && a.index < b.index);
    });
  } else {
    constexpr int kDigits = sizeof(R);
    work.spare.resize(n);
    Item<R>* to = work.spare.data();
    int32_t starts[kDigits][256] = {};
    for (int64_t i = 0; i < n; ++i) {
      for (int d = 0; d < kDigits; ++d) ++starts[d][from[i].key >> (8 * d) & 255];
    }
    for (int d = 0; d < kDigits; ++d) {
      int32_t* start = starts[d];
      if (start[from[0].key >> (8 * d) & 255] == n) continue;
      int32_t total = 0;
      for (int b = 0; b < 256; ++b) {
        const int32_t count = start[b];
        start[b] = total;
        total += count;
      }
      for (int64_t i = 0; i < n; ++i) to[start[from[i].key >> (8 * d) & 255]++] = from[i];
      std::swap(from, to);
    }
  }
  for (int64_t p = 0; p < n; ++p) order[p] = from[p].index, y[p] = from_key<R>(from[p].key);
}

inline bool has_nan(const double* y, int64_t n) {
  bool nan = false;
  for (int64_t p = 0; p < n; ++p) nan |= y[p] != y[p];
  return nan;
}

inline bool is_temperature(double tau) { return tau > 0 && tau < std::numeric_limits<double>::infinity(); }

// exp(-a) and log(a) in place, for whole vectors.
KHOT_CLONES inline void each_exp_minus(double* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store<double>(a + i, exp_minus<double>(load<double>(a + i)));
}

KHOT_CLONES inline void each_log(double* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store<double>(a + i, log<double>(load<double>(a + i)));
}

// The distance in tau between neighbours, at most kFar.
KHOT_INLINE double gap_of(double above, double below, double tau) {
  const double g = above == below ? 0 : (above - below) / tau;  // infinite ones may be equal, too
  return g < kFar ? g : kFar;
}

// exp(-gap) to the entry before each. Nothing comes before the first entry nor after the last: 0 there, and
// the array has n + 1 entries.
inline void decays(const double* y, int64_t n, double tau, double* decay) {
  for (int64_t p = 1; p < n; ++p) decay[p] = gap_of(y[p - 1], y[p], tau);
  decay[0] = kFar;
  for (int i = 0; i < kLanes; ++i) decay[n + i] = kFar;
  each_exp_minus(decay, n + 1);
}

// What lies at and above each entry, and at and below it, decayed.
inline void masses(const double* decay, int64_t n, double* above, double* below) {
  double sum = 0;
  for (int64_t p = 0; p < n; ++p) above[p] = sum = decay[p] * sum + 1;
  sum = 0;
  for (int64_t p = n - 1; p >= 0; --p) below[p] = sum = decay[p + 1] * sum + 1;
}

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

// dx_j = sum_i f_ij (v_i - v_j)/tau; returns dL/dtau.
template <class R>
double rank_backward_row(const R* grad, const R* x, const int32_t* order, int64_t n, double tau, Workspace<R>& work,
                         R* dx) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *v = work.take(), *partial = work.take(), *mass = work.take();
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

// The finite entries, first <= p < last.
struct Finite {
  int64_t first = 0, last;
  Finite(const double* y, int64_t n) : last(n) {
    while (first < n && y[first] == std::numeric_limits<double>::infinity()) ++first;
    while (last > 0 && y[last - 1] == -std::numeric_limits<double>::infinity()) --last;
  }
  int64_t clamp(int64_t p) const { return std::min(std::max(p, first), last); }
};

// How many entries lie above each threshold of the levels i + 1/2. An entry with the count C does from i =
// C - 1/2 on: counted and summed up, since a search would guess every other branch wrong.
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

// The same for any levels, which mostly ascend by about one.
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
  // C at the entry <= level
  bool reached(int64_t p, double level) const {
    return static_cast<double>(p) + 0.5 * (1 + below_[p] - above_[p]) <= level;
  }
  const double *above_, *below_;
  int64_t n_, at_ = 0;
};

// t in the segment with j entries above: C(t) = j - a e^(-alpha)/2 + b e^(-beta)/2, alpha and beta its distances
// in tau to the neighbours. `big` is 2|j - level| plus the smaller of a e^(-alpha) and b e^(-beta), and so the
// larger; without cancellation, where level and j are not the same.
struct Segment {
  double a, b, lack, root, big;
  Segment(int64_t j, double level, const Finite& finite, const double* above, const double* below,
          const double* decay)
      : a(j > finite.first ? above[j - 1] : 0),
        b(j < finite.last ? below[j] : 0),
        lack(static_cast<double>(j) - level),
        root(std::sqrt(lack * lack + a * b * decay[j])),
        big(std::fabs(lack) + root) {}
  // exp((t - neighbour)/tau) for the nearer neighbour, where there is one
  double ratio() const { return (lack > 0 ? big : b) / (lack > 0 ? a : big); }
};

// The thresholds of the levels i + 1/2, none of which is an integer.
template <class R>
void sort_row(const R* x, int64_t n, double tau, bool descending, Workspace<R>& work,
              R* out, int32_t* order) {
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
  std::copy(y, y + n, near);  // infinite entries stay
  for (int64_t i = finite.first; i < finite.last; ++i) {
    const int64_t j = finite.clamp(places[i]);
    const Segment s(j, static_cast<double>(i) + 0.5, finite, above, below, decay);
    ratio[i] = s.ratio(), near[i] = y[j - (s.lack > 0)];
  }
  each_log(ratio, n);
  for (int64_t i = 0; i < n; ++i) out[descending ? i : n - 1 - i] = static_cast<R>(near[i] + tau * ratio[i]);
}

// dx from what was sent to each entry, to spread from there on; returns what distances add to dL/dtau.
template <class R>
double collect(const double* up, const double* down, const double* y, const double* decay, const int32_t* order,
               int64_t n, double tau, bool want_tau, double* partial, R* dx) {
  double sum = 0, dtau = 0;
  for (int64_t p = 0; p < n; ++p) partial[p] = sum = decay[p] * sum + down[p];
  sum = 0;
  for (int64_t p = n - 1; p >= 0; --p) {
    sum = decay[p + 1] * sum + up[p];
    dx[order[p]] = static_cast<R>(std::isinf(y[p]) ? 0.0 : partial[p] + sum);
  }
  if (!want_tau) return 0;
  double one = 0, distance = 0;
  for (int64_t p = 1; p < n; ++p) {
    one = decay[p] * (one + 1);
    distance = gap_of(y[p - 1], y[p], tau) * one + decay[p] * distance;
    dtau -= up[p] * distance;
  }
  one = distance = 0;
  for (int64_t p = n - 2; p >= 0; --p) {
    one = decay[p + 1] * (one + 1);
    distance = gap_of(y[p], y[p + 1], tau) * one + decay[p + 1] * distance;
    dtau += down[p] * distance;
  }
  return dtau;
}

// dL/dx; returns dL/dtau, or 0 where that is not wanted.
template <class R>
double sort_backward_row(const R* grad, const R* x, const int32_t* order, int64_t n, double tau, bool descending,
                         bool want_tau, Workspace<R>& work, R* dx) {
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
  // what each threshold sends to the entry next below, and next above, with a place for one that is not there
  double* sent[2] = {work.take(), work.take() + 1};
  std::fill(sent[0], sent[0] + n + 1, 0.0), std::fill(sent[1] - 1, sent[1] + n, 0.0);
  double dtau = 0;
  for (int64_t i = finite.first; i < finite.last; ++i) {
    const int64_t j = finite.clamp(places[i]);
    const Segment s(j, static_cast<double>(i) + 0.5, finite, above, below, decay);
    // a e^(-alpha) + b e^(-beta) = 2 root, and their product is a b e^(-gap), 0 where either neighbour is missing
    const double mass[2] = {s.b, s.a}, v = grad[descending ? i : n - 1 - i] / (2 * s.root);
    const int near = s.lack > 0;  // is the one above; indices, since a branch could not be foreseen
    const double to_near = v * s.big / mass[near], to_far = v * decay[j] * mass[near] / s.big;
    sent[near][j - near] += to_near;
    sent[1 - near][j - (1 - near)] += to_far;
    if (want_tau) {
      const double sign = near ? 1 : -1, distance = -sign * std::log(s.ratio());
      const double gap = to_far != 0 ? (y[j - 1] - y[j]) / tau : 0;
      dtau -= sign * (to_near * mass[near] * distance - to_far * mass[1 - near] * (gap - distance));
    }
  }
  const double *up = sent[1], *down = sent[0];
  return dtau + collect(up, down, y, decay, order, n, tau, want_tau, above, dx);
}

template <class R>
void thresholds_row(const R* x, int64_t n, const double* levels, int64_t m, double tau, Workspace<R>& work, double* hi,
                    double* lo, int32_t* order, int32_t* places) {
  work.taken = 0;
  double *y = work.take(), *decay = work.take(), *above = work.take(), *below = work.take(), *ratio = work.take();
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

// dL/dx and dL/dlevel; returns dL/dtau.
template <class R>
double thresholds_backward_row(const double* grad, const R* x, const int32_t* order, int64_t n, const double* hi,
                               const double* lo, const int32_t* places, int64_t m, double tau, Workspace<R>& work,
                               R* dx, double* dlevel) {
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
    // relative to the larger, since in a wide gap both underflow
    const double log_a = has_above ? std::log(a) - alpha : -kHuge, log_b = has_below ? std::log(b) - beta : -kHuge;
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

// out_i = exp(-g_i) (out_(i-1) + w_(i-1)), or from the other end.
inline void scan_row(const double* w, const double* g, int64_t n, bool reverse, double* out) {
  double sum = 0;
  if (n == 0) return;
  if (reverse) {
    out[n - 1] = 0;
    for (int64_t i = n - 1; i > 0; --i) out[i - 1] = sum = std::exp(-g[i]) * (sum + w[i]);
  } else {
    out[0] = 0;
    for (int64_t i = 1; i < n; ++i) out[i] = sum = std::exp(-g[i]) * (sum + w[i - 1]);
  }
}

}  // namespace khot::scans
