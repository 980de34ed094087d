// Top-k in magnitude and its gradients. The formulas are explained in khot/_kernels/reference/magnitude.py.
// What is here serves every row, in double; the search of magnitude_ordinary.h is tried first.
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "search/guard.h"
#include "search/guess.h"
#include "selection/kth_largest.h"
#include "selection/magnitude_ordinary.h"
#include "selection/magnitude_ordinary_backward.h"

namespace khot::KHOT_ISA {

// w^e for e = q - 1 = 1/(p - 1), with closed forms where e is an integer.
struct Exponent {
  double p, e, tau;
  int whole;         // e where that is an integer, as for p = 2 and 4/3, otherwise 0
  double half, own;  // 1/sqrt(tau), since 1/tau may overflow; and 1/(1 + tau)
  Exponent(double p, double tau)
      : p(p), e(1 / (p - 1)), tau(tau), whole(Power(p).whole), half(1 / std::sqrt(tau)), own(1 / (1 + tau)) {}

  static KHOT_INLINE VecD pow(VecD w, double by) { return exp<double>(by * log<double>(w)); }

  KHOT_INLINE VecD over_tau(VecD v) const { return v * half * half; }

  KHOT_INLINE VecD lower(VecD w) const {  // w^(e-1)
    if (whole == 0) return pow(w, e - 1);
    VecD product = splat(1.0);
    for (int i = 1; i < whole; ++i) product *= w;
    return product;
  }
  KHOT_INLINE VecD raise(VecD w) const { return whole == 0 ? pow(w, e) : lower(w) * w; }
  KHOT_INLINE VecD root(VecD y) const { return whole == 1 ? y : pow(y, p - 1); }

  // The solution v of v + tau v^(p-1) = s, and drop = s - v.
  VecD alone(VecD s, VecD& drop) const {
    if (whole == 1) {
      drop = s * (tau / (1 + tau));
      return s * own;
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
    w = power.over_tau(offset < 0 ? VecD{} : offset);
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

// Searches gamma between anchor + low and anchor + high: (k - #alone) gamma is the sum of Y over the block.
// The anchor is the k-th entry where gamma is near it, so that s - gamma keeps its digits, and otherwise 0,
// so that gamma keeps its own.
inline Threshold solve_block(const Row& s, int64_t n, double k, Magnitude m, const Exponent& power,
                             double anchor, double low, double high) {
  const double drop = -low;
  Enclosure<ScalarArithmetic> between(low, high);
  double offset = between.middle();
  for (int step = 0; step < 60; ++step) {
    m.gamma = {anchor, offset};
    using Sums = MagnitudeTotals;
    const Sums sums =
        reduce<double, Sums>(s, n, nullptr, [=](Sums& sums, const double* p, int count, int64_t) {
          IntD alone{};
          VecD total{}, slope{};
          vectors<double>(p, count, -kInfinity, [&](VecD v, int, int) {
            const Block block(v, m, power);
            alone += block.alone;
            total += block.inside ? block.y : VecD{};
            slope += block.inside ? power.lower(block.w) : VecD{};
          });
          sums.alone += static_cast<double>(khot::KHOT_ISA::count(alone));
          sums.value += sum<double>(total), sums.slope += sum<double>(slope);
        });
    const double left = k - sums.alone, slope = power.e * sums.slope / m.tau,
                 target = sums.value - left * anchor, miss = target - left * offset;
    between.add(offset, miss);
    double trial = target / (left + slope) + slope / (left + slope) * offset;  // Newton's step
    const double digits = 1e-15 * (anchor == 0 ? std::min(std::max(between.low, trial), between.high) : drop);
    bool done = std::fabs(trial - offset) <= digits && std::isfinite(trial);
    // Where the slope changes, Newton's step may fall short of low by a digit.
    if (between.bisects(trial, miss) && !done) {
      trial = std::fabs(trial - between.low) <= digits ? between.low + digits : between.middle();
      done = between.high - between.low <= digits;
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
  order.neighbours(y, n, static_cast<int64_t>(m.k), last, next);
  const double in = order.value(last), out = m.k == selectable ? 0 : order.value(next), gap = in - out;
  VecD drops;
  const double alone = power.alone(splat(in), drops)[0], drop = drops[0];
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

inline void careful_magnitude(const Row& s, int64_t n, Magnitude& m, void* y) {
  const Exponent power(m.p, m.tau);
  bool constant = false;
  with_order(s.dtype, y, [&](auto order, auto* p) {
    if (m.is_signed) order.keep = order.kMost;
    m.gamma = pooled(order, s, n, m, power, p);
    constant = !(m.gamma.hi < kHuge);
    if (constant) std::fill(p, p + n, std::isnan(m.gamma.hi) ? order.nan : 0);
  });
  if (constant) return;
  const Signs<double> signs(m.is_signed);
  const Magnitude problem = m;
  map<double>(s, n, nullptr, y, s.dtype, [=](VecD x, int64_t, int) {
    const VecD v = signs.without(x);
    const Block block(v, problem, power);
    VecD drop, value = block.y;
    if (count(block.alone) > 0) value = block.alone ? power.alone(v, drop) : value;
    return signs.apply(value, x);
  });
}

// The rows [begin, end): short ones in groups, as many as a vector has lanes, and the others one by one.
inline void magnitude(const MagnitudeSpec& spec, const ForwardRows& rows, int64_t begin, int64_t end) {
  const auto careful = [&](int64_t i) {
    Magnitude problem{rows.k(i), rows.tau(i), spec.p, spec.is_signed, {0, 0}};
    careful_magnitude(rows.x(i), spec.n, problem, rows.out(i));
    rows.put(i, problem.gamma);
  };
  const auto ordinary = [&](auto exponent) {
    constexpr int e = decltype(exponent)::value;
    MagnitudeGoal goal;
    const auto one = [&](int64_t i) {
      Threshold gamma;
      const bool done = magnitude_row<e>(spec, rows.x(i), rows.k(i), rows.tau(i), rows.out(i), goal, gamma);
      done ? rows.put(i, gamma) : careful(i);
    };
    MagnitudeLanes<e> lanes;
    const auto several = [&](int64_t first, bool* done) {
      lanes.solve(spec, rows, first, goal, done);
      for (int j = 0; j < lanes.width; ++j) {
        if (!done[j]) careful(first + j);
        done[j] = true;
      }
    };
    each_row(spec.n <= kShortRow, begin, end, several, one);
  };
  const int e = Power(spec.p).whole;
  if (begin == end) return;
  const bool in_float = spec.n > 0 && rows.x(begin).dtype != Dtype::kDouble;
  if (in_float && e == 1) return ordinary(std::integral_constant<int, 1>());
  if (in_float && e == 3) return ordinary(std::integral_constant<int, 3>());
  for (int64_t i = begin; i < end; ++i) careful(i);
}

// dv/ds (own) and -dv/dtau (fall) of the entries that are alone, and dY/ds (rate) of the pooled ones.
struct Rates {
  VecD own{}, fall{}, rate{}, w;
  IntD alone;
  KHOT_INLINE Rates(VecD s, VecD y, const Magnitude& m, const Exponent& power) {
    const Block block(s, m, power);
    const IntD free = block.alone & (s < kInfinity);
    alone = block.alone;
    w = block.inside | (block.w != block.w) ? block.w : VecD{};
    const VecD nothing = y != y ? y : VecD{};
    own = fall = nothing;
    // where y is 0, also since its dtype has no smaller one, tau (p-1) y^(p-2) is infinite for p < 2
    const IntD positive = y > 0, moves = free & (positive | (m.p < 2 ? IntD{} : IntD{} - 1));
    if (power.whole == 1) {  // without divisions
      own = free ? splat(power.own) : nothing;
      fall = free ? y * power.own : nothing;
    } else if (count(moves) > 0) {
      const VecD value = moves & positive ? y : splat(1.0), root = power.root(value);
      const VecD slope =
          positive | (m.p > 2 ? IntD{} : IntD{} - 1) ? m.tau * (m.p - 1) * (root / value) : VecD{};
      own = moves ? 1 / (1 + slope) : nothing;
      fall = moves & (s > 0) ? own * root : own * 0;
    }
    rate = block.inside ? power.e / m.tau * power.lower(block.w) : nothing;
  }
};

// One row, in double. Writes dL/ds and returns dL/dtau.
inline double careful_backward(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                               const Magnitude& m, void* grad_s) {
  const Exponent power(m.p, m.tau);
  const Signs<double> signs(m.is_signed);
  // The lanes beyond the end are NaN, and stand for entries that may not be selected.
  auto size_of = [=](VecD x) { return x != x ? splat(-kInfinity) : signs.without(x); };
  auto rates = [=](VecD x, VecD y) { return Rates(size_of(x), signs.without(y), m, power); };
  using Sums = MagnitudeSums<double>;  // of rates
  const Sums sums =
      reduce<double, Sums>(s, n, nullptr, [=](Sums& sums, const double* p, int count, int64_t begin) {
        double y_buffer[kBlock], v_buffer[kBlock];
        const double *ys = fetch(y, begin, count, y_buffer), *vs = fetch(grad, begin, count, v_buffer);
        VecD alone{}, lower{}, whole{}, lower_v{}, fall_v{};
        vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
          const Rates r = rates(x, beside(ys, i, lanes));
          const VecD v = signs.apply(beside(vs, i, lanes), x);
          alone += r.alone ? splat(1.0) : VecD{};
          lower += r.rate;
          whole += r.rate * r.w;
          lower_v += r.rate * v;
          fall_v += v * (r.fall + r.rate * r.w);
        });
        sums += {sum<double>(alone), sum<double>(lower), sum<double>(whole), sum<double>(lower_v), 0,
                 sum<double>(fall_v)};
      });
  // What gamma, which all pooled entries share, adds to the gradient of each.
  const double shift = sums.shift(m.k, 1, grad_lo);
  double s_buffer[kBlock], y_buffer[kBlock], v_buffer[kBlock], results[kBlock + kWidth<double>];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
    const double* p = fetch(s, begin, count, s_buffer);
    const double *ys = fetch(y, begin, count, y_buffer), *vs = fetch(grad, begin, count, v_buffer);
    vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
      const Rates r = rates(x, beside(ys, i, lanes));
      const VecD v = signs.apply(beside(vs, i, lanes), x);
      store(results + i, signs.apply(r.own * v + r.rate * (v + shift), x));
    });
    put(grad_s, s.dtype, begin, count, results);
  }
  return sums.grad_tau(1, shift);
}

// The rows [begin, end), in groups where they are short, as above.
inline void magnitude_backward(const MagnitudeSpec& spec, const MagnitudeBackwardRows& rows, int64_t begin,
                               int64_t end) {
  const auto one = [&](int64_t i, auto exponent) {
    constexpr int e = decltype(exponent)::value;
    const Magnitude m{rows.k(i), rows.tau(i), spec.p, spec.is_signed, rows.threshold(i)};
    const Row grad = rows.grad(i), s = rows.x(i), y = rows.y(i);
    if constexpr (e != 0) {
      if (serves_backward(m.gamma, m.tau)) {
        const MagnitudeBackwardRow<e> row(m);
        return rows.put(i, 0, row.run(grad, rows.grad_lo(i), s, y, spec.n, rows.grad_x(i)));
      }
    }
    rows.put(i, 0, careful_backward(grad, rows.grad_lo(i), s, y, spec.n, m, rows.grad_x(i)));
  };
  const auto all = [&](auto exponent) {
    constexpr int e = decltype(exponent)::value;
    const auto alone = [&](int64_t i) { one(i, exponent); };
    if constexpr (e != 0) {
      MagnitudeBackwardLanes<e> lanes;
      const auto several = [&](int64_t first, bool* done) { lanes.run(spec, rows, first, done); };
      return each_row(spec.n <= lanes.kMost, begin, end, several, alone);
    }
    for (int64_t i = begin; i < end; ++i) alone(i);
  };
  const int e = Power(spec.p).whole;
  const bool in_float = begin < end && spec.n > 0 && rows.x(begin).dtype != Dtype::kDouble;
  if (in_float && e == 1) return all(std::integral_constant<int, 1>());
  if (in_float && e == 3) return all(std::integral_constant<int, 3>());
  all(std::integral_constant<int, 0>());
}

}  // namespace khot::KHOT_ISA
