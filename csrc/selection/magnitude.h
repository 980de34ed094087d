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
  Enclosure<ScalarArithmetic> between(low, high);
  double offset = between.middle();
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
                 target = sums.total - left * anchor, miss = target - left * offset;
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

// What the rows of a problem are made of: entries s >= 0, or x with s = |x| and a sign.
struct Signs {
  IntD mask;
  explicit Signs(const Magnitude& m) : mask(IntD{} + (m.is_signed ? ~Lanes<double>::kAbs : int64_t{0})) {}
  KHOT_INLINE VecD of(VecD x) const { return (VecD)((IntD)x & mask); }
  KHOT_INLINE VecD without(VecD x) const { return (VecD)((IntD)x & ~mask); }
  KHOT_INLINE VecD times(VecD v, VecD sign) const { return (VecD)((IntD)v ^ (IntD)sign); }
};

// For p = 2, Y = (s - gamma)/tau, and an entry that is alone has y = s/(1 + tau).
struct LinearBlock {
  VecD y;  // Y, which is w as well
  IntD alone, inside;
  KHOT_INLINE LinearBlock(VecD s, const Magnitude& m, double inverse_tau) {
    const VecD offset = (s - m.gamma.hi) - m.gamma.lo;
    y = (offset > 0 ? offset : VecD{}) * inverse_tau;
    alone = (y >= m.gamma.hi + m.gamma.lo) & (s >= 0);
    inside = (y > 0) & ~alone;
  }
  // Whether 1/tau neither overflows nor loses digits.
  static bool serves(const Magnitude& m, const Exponent& power) {
    return power.whole == 1 && m.tau > 1e-300 && m.tau < 1e300;
  }
};

inline void careful_magnitude(const Row& s, int64_t n, Magnitude& m, void* y) {
  const Exponent power(m.p);
  bool constant = false;
  with_order(s.dtype, y, [&](auto order, auto* p) {
    if (m.is_signed) order.keep = order.kMost;
    m.gamma = pooled(order, s, n, m, power, p);
    constant = !(m.gamma.hi < kHuge);
    if (constant) std::fill(p, p + n, std::isnan(m.gamma.hi) ? order.nan : 0);
  });
  if (constant) return;
  const Signs signs(m);
  const Magnitude problem = m;
  if (LinearBlock::serves(m, power)) {
    const double inverse_tau = 1 / m.tau, factor = 1 / (1 + m.tau);
    return map<double>(s, n, nullptr, y, s.dtype, [=](VecD x, int64_t, int) {
      const VecD v = signs.without(x);
      const LinearBlock block(v, problem, inverse_tau);
      return signs.times(block.alone ? v * factor : block.y, signs.of(x));
    });
  }
  map<double>(s, n, nullptr, y, s.dtype, [=](VecD x, int64_t, int) {
    const VecD v = signs.without(x);
    const Block block(v, problem, power);
    VecD drop, value = block.y;
    if (count(block.alone) > 0) value = block.alone ? power.alone(v, problem.tau, drop) : value;
    return signs.times(value, signs.of(x));
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
    constexpr int e = decltype(exponent)::value, width = kWidth<float>;
    MagnitudeGoal goal;
    const auto one = [&](int64_t i) {
      Threshold gamma;
      const bool done = magnitude_row<e>(spec, rows.x(i), rows.k(i), rows.tau(i), rows.out(i), goal, gamma);
      done ? rows.put(i, gamma) : careful(i);
    };
    int64_t i = begin;
    if (spec.n <= kShortRow && end - begin >= width) {
      MagnitudeLanes<e> lanes;
      bool done[width];
      for (; i + width <= end; i += width) {
        lanes.solve(spec, rows, i, goal, done);
        for (int j = 0; j < width; ++j) {
          if (!done[j]) careful(i + j);
        }
      }
    }
    for (; i < end; ++i) one(i);
  };
  const int e = Exponent(spec.p).whole;
  if (begin == end) return;
  const bool in_float = spec.n > 0 && rows.x(begin).dtype != Dtype::kDouble;
  if (in_float && e == 1) return ordinary(std::integral_constant<int, 1>());
  if (in_float && e == 3) return ordinary(std::integral_constant<int, 3>());
  for (int64_t i = begin; i < end; ++i) careful(i);
}

// dv/ds (own) and -dv/dtau (fall) of the entries that are alone, and dY/ds (rate) of the pooled ones.
struct Rates {
  VecD own, fall, rate, w;
  IntD alone;
  KHOT_INLINE Rates(VecD s, VecD y, const Magnitude& m, const Exponent& power) {
    const Block block(s, m, power);
    alone = block.alone;
    w = block.inside | (block.w != block.w) ? block.w : VecD{};
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

// The same for p = 2, without divisions.
struct LinearRates {
  VecD own, fall, rate, w;
  IntD alone;
  KHOT_INLINE LinearRates(VecD s, VecD y, const Magnitude& m, double inverse_tau, double factor) {
    const LinearBlock block(s, m, inverse_tau);
    alone = block.alone;
    const IntD moves = alone & (s < kInfinity);
    own = moves ? splat(factor) : VecD{};
    fall = moves ? y * factor : VecD{};
    rate = block.inside ? splat(inverse_tau) : VecD{};
    w = block.inside ? block.y : VecD{};
  }
};

// Writes dL/ds and returns dL/dtau. rates(s, y) has own, fall, rate, w and alone of a vector. The second pass
// reads y only if own or rate depends on it.
template <class RatesOf>
double magnitude_gradients(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                           const Magnitude& m, bool rates_need_y, void* grad_s, RatesOf rates) {
  const Signs signs(m);
  auto at = [](const double* p, int i, int lanes) {
    return lanes == kWidth<double> ? load(p + i) : load_part(p + i, lanes, 0.0);
  };
  // The lanes beyond the end are NaN, and stand for entries that may not be selected.
  auto size_of = [=](VecD x) { return x != x ? splat(-kInfinity) : signs.without(x); };
  const RateSums sums =
      reduce<double, RateSums>(s, n, nullptr, [=](RateSums& sums, const double* p, int count, int64_t begin) {
        double y_buffer[kBlock], v_buffer[kBlock];
        const double *ys = fetch(y, begin, count, y_buffer), *vs = fetch(grad, begin, count, v_buffer);
        VecD alone{}, mass{}, moment{}, shift{}, tau{};
        vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
          const auto r = rates(size_of(x), signs.without(at(ys, i, lanes)));
          const VecD v = signs.times(at(vs, i, lanes), signs.of(x));
          alone += r.alone ? splat(1.0) : VecD{};
          mass += r.rate;
          moment += r.rate * r.w;
          shift -= r.rate * v;
          tau -= v * (r.fall + r.rate * r.w);
        });
        sums.alone += sum<double>(alone), sums.mass += sum<double>(mass), sums.moment += sum<double>(moment);
        sums.shift += sum<double>(shift), sums.tau += sum<double>(tau);
      });
  // What gamma, which all pooled entries share, adds to the gradient of each.
  const double shift = sums.mass != 0 ? (grad_lo + sums.shift) / (m.k - sums.alone + sums.mass) : 0;
  double s_buffer[kBlock], y_buffer[kBlock], v_buffer[kBlock], results[kBlock + kWidth<double>];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
    const double* p = fetch(s, begin, count, s_buffer);
    const double *ys = rates_need_y ? fetch(y, begin, count, y_buffer) : p,
                 *vs = fetch(grad, begin, count, v_buffer);
    vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
      const auto r = rates(size_of(x), signs.without(at(ys, i, lanes)));
      const VecD sign = signs.of(x), v = signs.times(at(vs, i, lanes), sign);
      store(results + i, signs.times(r.own * v + r.rate * (v + shift), sign));
    });
    put(grad_s, s.dtype, begin, count, results);
  }
  return sums.tau - shift * sums.moment;
}

// One row, in double. Writes dL/ds and returns dL/dtau.
inline double careful_backward(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                               const Magnitude& m, void* grad_s) {
  const Exponent power(m.p);
  if (LinearBlock::serves(m, power) && !std::isnan(m.gamma.hi)) {
    const double inverse_tau = 1 / m.tau, factor = 1 / (1 + m.tau);
    return magnitude_gradients(grad, grad_lo, s, y, n, m, false, grad_s,
                               [=](VecD s, VecD y) { return LinearRates(s, y, m, inverse_tau, factor); });
  }
  return magnitude_gradients(grad, grad_lo, s, y, n, m, true, grad_s,
                             [=](VecD s, VecD y) { return Rates(s, y, m, power); });
}

// The rows [begin, end), in groups where they are short, as above.
inline void magnitude_backward(const MagnitudeSpec& spec, const MagnitudeBackwardRows& rows, int64_t begin,
                               int64_t end) {
  const auto one = [&](int64_t i, auto exponent) {
    constexpr int e = decltype(exponent)::value;
    const Magnitude m{rows.k(i), rows.tau(i), spec.p, spec.is_signed, rows.gamma(i)};
    const Row grad = rows.grad(i), s = rows.s(i), y = rows.y(i);
    if constexpr (e != 0) {
      if (serves_backward(m.gamma, m.tau)) {
        const MagnitudeBackwardRow<e> row(m);
        return rows.put(i, row.run(grad, rows.grad_lo(i), s, y, spec.n, rows.grad_s(i)));
      }
    }
    rows.put(i, careful_backward(grad, rows.grad_lo(i), s, y, spec.n, m, rows.grad_s(i)));
  };
  const auto all = [&](auto exponent) {
    constexpr int e = decltype(exponent)::value;
    int64_t i = begin;
    if constexpr (e != 0) {
      using Lanes = MagnitudeBackwardLanes<e>;
      constexpr int width = Lanes::width;
      if (spec.n <= Lanes::kMost && end - begin >= width) {
        Lanes lanes;
        bool done[width];
        for (; i + width <= end; i += width) {
          lanes.run(spec, rows, i, done);
          for (int j = 0; j < width; ++j) {
            if (!done[j]) one(i + j, exponent);
          }
        }
      }
    }
    for (; i < end; ++i) one(i, exponent);
  };
  const int e = Exponent(spec.p).whole;
  const bool in_float = begin < end && spec.n > 0 && rows.s(begin).dtype != Dtype::kDouble;
  if (in_float && e == 1) return all(std::integral_constant<int, 1>());
  if (in_float && e == 3) return all(std::integral_constant<int, 3>());
  all(std::integral_constant<int, 0>());
}

}  // namespace khot::KHOT_ISA
