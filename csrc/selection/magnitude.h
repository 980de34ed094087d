// Top-k in magnitude and its gradients, one row at a time, in double. The formulas are explained in
// khot/_kernels/reference/selection.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "selection/kth_largest.h"
#include "soft_topk/guess.h"

namespace khot::KHOT_ISA {

// w^e for e = q - 1 = 1/(p - 1), with closed forms where e is an integer.
struct Exponent {
  double p, e;
  int whole;  // e where that is an integer, as for p = 2 and 4/3, otherwise 0
  explicit Exponent(double p) : p(p), e(1 / (p - 1)), whole(Power(p).whole) {}

  static KHOT_INLINE VecD pow(VecD w, double by) { return exp<double>(by * log<double>(w)); }

  KHOT_INLINE VecD lower(VecD w) const {  // w^(e-1)
    if (whole == 0) return pow(w, e - 1);
    VecD product = splat(1.0);
    for (int i = 1; i < whole; ++i) product *= w;
    return product;
  }
  KHOT_INLINE VecD raise(VecD w) const { return whole == 0 ? pow(w, e) : lower(w) * w; }
  KHOT_INLINE VecD root(VecD y) const { return whole == 1 ? y : pow(y, p - 1); }

  // The solution v of v + tau v^(p-1) = s, and drop = s - v.
  VecD alone(VecD s, double tau, VecD& drop) const {
    if (whole == 1) {
      drop = s * (tau / (1 + tau));
      return s / (1 + tau);
    }
    const VecD c = clamp_above<double>(tau * pow(s < 0 ? VecD{} : s, p - 2), 1e150);
    VecD b = (1 + 0.25 * c) / (1 + c * (0.25 + 1 / e + 0.25 * c));  // exact in the limits c = 0 and c = inf
    // The function is convex: from the second step on, b decreases to its root, as in the reference.
    for (int i = 0; i < 12; ++i) {
      const VecD power = lower(b), step = (power * b + c * b - 1) / (e * power + c);
      b -= step;
      if (minimum<double>(1e-9 * b - abs<double>(step)) >= 0) break;  // the error is the square of this step
    }
    b = clamp_above<double>(clamp_below<double>(b, 0), 1);
    drop = s * clamp_above<double>(c * b, 1);
    return s * raise(b);
  }
};

// Which entries are above the pooled block (alone) and which are inside it, and what pooled entries are.
struct Block {
  VecD w, y;
  IntD alone, inside;
  KHOT_INLINE Block(VecD s, const Magnitude& m, const Exponent& power) {
    const VecD offset = (s - m.gamma.hi) - m.gamma.lo;
    w = (offset < 0 ? VecD{} : offset) / m.tau;
    y = power.raise(w);
    alone = (y >= m.gamma.hi + m.gamma.lo) & (s >= 0);
    inside = (y > 0) & ~alone;
  }
};

KHOT_INLINE int64_t count(IntD mask) {
  int64_t total = 0;
  for (int i = 0; i < kWidth<double>; ++i) total -= mask[i];
  return total;
}

struct BlockSums {
  double alone = 0, total = 0, slope = 0;
  void operator+=(const BlockSums& o) { alone += o.alone, total += o.total, slope += o.slope; }
};

// Searches gamma between anchor + low and anchor + high: (k - #alone) gamma is the sum of Y over the block.
// The anchor is the k-th entry where gamma is near it, so that s - gamma keeps its digits, and otherwise 0,
// so that gamma keeps its own.
inline Threshold solve_block(const Row& s, int64_t n, double k, Magnitude m, const Exponent& power,
                             double anchor, double low, double high) {
  const double drop = -low;
  double offset = 0.5 * low + 0.5 * high;
  for (int step = 0; step < 60; ++step) {
    m.gamma = {anchor, offset};
    const BlockSums sums =
        reduce<double, BlockSums>(s, n, nullptr, [=](BlockSums& sums, const double* p, int count, int64_t) {
          IntD alone{};
          VecD total{}, slope{};
          vectors<double>(p, count, -kInfinity, [&](VecD v, int, int) {
            const Block block(v, m, power);
            alone += block.alone;
            total += block.inside ? block.y : VecD{};
            slope += block.inside ? power.lower(block.w) : VecD{};
          });
          sums.alone += static_cast<double>(khot::KHOT_ISA::count(alone));
          sums.total += sum<double>(total), sums.slope += sum<double>(slope);
        });
    const double left = k - sums.alone, slope = power.e * sums.slope / m.tau,
                 target = sums.total - left * anchor;
    if (target > left * offset) low = std::max(low, offset);
    if (target < left * offset) high = std::min(high, offset);
    double trial = target / (left + slope) + slope / (left + slope) * offset;  // Newton's step
    const double digits = 1e-15 * (anchor == 0 ? std::min(std::max(low, trial), high) : drop);
    bool done = std::fabs(trial - offset) <= digits && std::isfinite(trial);
    // Where the slope changes, Newton's step may fall short of low by a digit.
    if (!done && !(trial > low && trial < high)) {
      trial = std::fabs(trial - low) <= digits ? low + digits : 0.5 * low + 0.5 * high;
      done = high - low <= digits;
    }
    offset = trial;
    if (done) break;
  }
  const double hi = anchor + offset;
  return {hi, (anchor - hi) + offset};
}

// gamma; NaN where there is none. y is scratch space here.
template <class Order, class I>
Threshold pooled(const Order& order, const Row& s, int64_t n, Magnitude m, const Exponent& power, I* y) {
  const auto counts = order.keys(s, n, y);
  const double selectable = static_cast<double>(counts.selectable);
  if (counts.nan || !(m.k >= 0 && m.k <= selectable && m.k == std::floor(m.k)) ||
      !(m.tau > 0 && m.tau < kInfinity) || static_cast<double>(counts.pinned) > m.k) {
    return {kNan, kNan};
  }
  if (m.k == 0) return {kHuge, kHuge};
  I last, next;
  order.neighbours(s, y, n, static_cast<int64_t>(m.k), last, next);
  const double in = order.value(last), out = m.k == selectable ? 0 : order.value(next), gap = in - out;
  VecD drops;
  const double alone = power.alone(splat(in), m.tau, drops)[0], drop = drops[0];
  if (!(gap < drop)) return {alone == kInfinity ? out + 1 : 0.5 * alone + 0.5 * out, 0};

  // Entries below the least possible gamma are in no block, and entries that are alone for the largest
  // possible gamma are alone for all: neither takes part in the search.
  const double root = power.root(splat(out))[0];
  const I bottom = order.key_of(in - drop) - 1, top = std::max(order.key_of(out + m.tau * root), last) + 1;
  const int64_t above = order.at_least(y, n, top), size = order.entries(y, n, bottom, top);
  const bool near = drop < 0.5 * in;    // otherwise gamma may be close to 0
  constexpr double kSlack = 1 + 1e-14;  // because gamma may be the bound itself
  return solve_block({y, s.dtype, 1}, size, m.k - static_cast<double>(above), m, power, near ? in : 0,
                     near ? -drop * kSlack : alone / kSlack, near ? -gap : out);
}

inline void magnitude(const Row& s, int64_t n, Magnitude& m, void* y) {
  const Exponent power(m.p);
  bool constant = false;
  with_order(s.dtype, y, [&](auto order, auto* p) {
    m.gamma = pooled(order, s, n, m, power, p);
    constant = !(m.gamma.hi < kHuge);
    if (constant) std::fill(p, p + n, std::isnan(m.gamma.hi) ? order.nan : 0);
  });
  if (constant) return;
  map<double>(s, n, nullptr, y, s.dtype, [=](VecD v, int64_t, int) {
    const Block block(v, m, power);
    VecD drop;
    return count(block.alone) == 0 ? block.y : block.alone ? power.alone(v, m.tau, drop) : block.y;
  });
}

// dv/ds (own) and -dv/dtau (fall) of the entries that are alone, and dY/ds (rate) of the pooled ones.
struct Rates {
  Block block;
  VecD own, fall, rate;
  KHOT_INLINE Rates(VecD s, VecD y, const Magnitude& m, const Exponent& power) : block(s, m, power) {
    const VecD nothing = y != y ? y : VecD{};
    own = fall = rate = nothing;
    const IntD moves = block.alone & (s < kInfinity) & ((y > 0) | (power.whole == 1 ? IntD{} - 1 : IntD{}));
    if (count(moves) > 0) {
      const VecD value = moves & (y > 0) ? y : splat(1.0), root = power.root(value);
      own = moves ? 1 / (1 + m.tau * (m.p - 1) * (root / value)) : nothing;
      fall = moves & (s > 0) ? own * root : own * 0;
    }
    rate = block.inside ? power.e / m.tau * power.lower(block.w) : nothing;
  }
};

struct RateSums {
  double alone = 0, mass = 0, moment = 0, shift = 0, tau = 0;
  void operator+=(const RateSums& o) {
    alone += o.alone, mass += o.mass, moment += o.moment, shift += o.shift, tau += o.tau;
  }
};

inline double magnitude_backward(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                                 const Magnitude& m, void* grad_s) {
  const Exponent power(m.p);
  auto at = [](const double* p, int i, int lanes) {
    return lanes == kWidth<double> ? load(p + i) : load_part(p + i, lanes, 0.0);
  };
  const RateSums sums =
      reduce<double, RateSums>(s, n, nullptr, [=](RateSums& sums, const double* p, int count, int64_t begin) {
        double y_buffer[kBlock], v_buffer[kBlock];
        const double *ys = fetch(y, begin, count, y_buffer), *vs = fetch(grad, begin, count, v_buffer);
        IntD alone{};
        VecD mass{}, moment{}, shift{}, tau{};
        vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
          const Rates r(x, at(ys, i, lanes), m, power);
          const VecD v = at(vs, i, lanes), w = r.block.inside | (r.block.w != r.block.w) ? r.block.w : VecD{};
          alone += r.block.alone;
          mass += r.rate;
          moment += r.rate * w;
          shift -= r.rate * v;
          tau -= v * (r.fall + r.rate * w);
        });
        sums.alone += static_cast<double>(khot::KHOT_ISA::count(alone));
        sums.mass += sum<double>(mass), sums.moment += sum<double>(moment);
        sums.shift += sum<double>(shift), sums.tau += sum<double>(tau);
      });
  // What gamma, which all pooled entries share, adds to the gradient of each.
  const double shift = sums.mass != 0 ? (grad_lo + sums.shift) / (m.k - sums.alone + sums.mass) : 0;
  double s_buffer[kBlock], y_buffer[kBlock], v_buffer[kBlock], results[kBlock + kWidth<double>];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
    const double *ys = fetch(y, begin, count, y_buffer), *vs = fetch(grad, begin, count, v_buffer);
    vectors<double>(fetch(s, begin, count, s_buffer), count, -kInfinity, [&](VecD x, int i, int lanes) {
      const Rates r(x, at(ys, i, lanes), m, power);
      const VecD v = at(vs, i, lanes);
      store(results + i, r.own * v + r.rate * (v + shift));
    });
    put(grad_s, s.dtype, begin, count, results);
  }
  return sums.tau - shift * sums.moment;
}

}  // namespace khot::KHOT_ISA
