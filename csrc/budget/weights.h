// What the kernels of the soft budget share: where an entry lies, and what a row's costs are like.
#pragma once

#include <algorithm>
#include <cmath>

#include "search/guess.h"
#include "search/terms.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// Whether float carries x - t a. By value and without a fused multiply-add, it has the rounding error of t w.
constexpr bool exact(bool by_value) { return kFused || !by_value; }

// By value: whether t w as a pair of floats moves z by no more than rounding y does.
inline bool carries_level(double tw, double tau) { return std::fabs(tw) < 0x1p24 * tau; }

// A double with twice the digits, so that sums of costs miss a budget by what they do and not by rounding.
struct Pair {
  double whole = 0, lost = 0;
  Pair plus(Pair o) const {
    const double sum = whole + o.whole, added = sum - whole,
                 rest = (whole - (sum - added)) + (o.whole - added) + (lost + o.lost), next = sum + rest;
    return {next, rest - (next - sum)};
  }
  Pair minus(Pair o) const { return plus({-o.whole, -o.lost}); }
  Pair minus(double v) const { return plus({-v, 0}); }
  void operator+=(Pair o) { *this = plus(o); }
  double value() const { return whole + lost; }
};
KHOT_APART inline Pair total(const PairSum<double>& sums) {
  Pair all;
  for (int i = 0; i < kWidth<double>; ++i) all += {sums.whole[i], sums.lost[i]};
  return all;
}

// Arrays of a block have room for whole vectors.
template <class R>
constexpr int kWhole = kBlock + kWidth<R>;

// z = (x - t a)/tau with a = w by value, otherwise a = 1.
template <class R>
struct Position {
  R hi, lo, scale, tau;
  Int<R> by_value;

  Position(Threshold t, double tau, bool by_value, bool full_support = true)
      : hi(static_cast<R>(t.hi)),
        lo(static_cast<R>((t.hi - hi) + t.lo)),
        scale(inverse_of<R>(tau, full_support)),
        tau(static_cast<R>(tau)),
        by_value(by_value ? ~Int<R>{} : Int<R>{}) {}
  KHOT_INLINE Vec<R> a(Vec<R> w) const { return by_value ? w : splat<R>(1); }
  // x - t a
  KHOT_INLINE Vec<R> offset(Vec<R> x, Vec<R> a) const { return fused<R>(splat(-hi), a, x) - lo * a; }
  KHOT_INLINE Vec<R> operator()(Vec<R> x, Vec<R> w) const {
    const Vec<R> off = offset(x, a(w));
    if constexpr (sizeof(R) == 8) return off / tau;  // 1/tau may overflow
    return off * scale;
  }
  // z for a block of entries; 0 where a score is infinite. It has room for whole vectors.
  KHOT_APART void put(const R* x, const R* w, int count, R* z) const {
    vectors<R>(x, count, kInf<R>, [&](Vec<R> v, int i, int lanes) {
      store(z + i, abs<R>(v) < kInf<R> ? (*this)(v, beside(w, i, lanes)) : Vec<R>{});
    });
  }
};

// The entries at one end of a gap: their level, from where on they lie in it, and sums of w and w a.
struct BudgetEdge {
  double level, w = 0, wa = 0;
  double a() const { return w > 0 ? wa / w : 1; }
  void join(const BudgetEdge& o, double sign) {
    if (sign * o.level < sign * level) {
      *this = o;
    } else if (o.level == level) {
      w += o.w, wa += o.wa;
    }
  }
};
// The same for the least level in each lane.
struct EdgeLanes {
  VecD level, w{}, wa{};
  KHOT_INLINE void add(VecD at, VecD cost, VecD a, IntD here) {
    const IntD nearer = here & (at < level), same = here & (at == level);
    const VecD zero{};
    level = nearer ? at : level;
    w = (nearer ? zero : w) + (nearer | same ? cost : zero);
    wa = (nearer ? zero : wa) + (nearer | same ? cost * a : zero);
  }
  KHOT_INLINE BudgetEdge least(double sign) const {
    BudgetEdge edge{sign * kInfinity};
    for (int i = 0; i < kWidth<double>; ++i) edge.join({sign * level[i], w[i], wa[i]}, sign);
    return edge;
  }
};
struct BudgetGap {
  BudgetEdge up{kInfinity}, down{-kInfinity};
  void operator+=(const BudgetGap& o) { up.join(o.up, 1), down.join(o.down, -1); }
  // What the entries above have of a limit of smooth CDFs, in which those at both ends are as far away in z.
  double share() const { return up.a() / (up.a() + down.a()); }
  double middle() const { return share() * up.level + (1 - share()) * down.level; }
};

// Weighted moments of the scores d = x - origin and of the costs, over the finite entries.
struct Moments {
  double w = 0, d = 0, dd = 0;     // sums of w, w d, w d^2
  double ww = 0, wd = 0, www = 0;  // sums of w^2, w^2 d, w^3, by value
  void operator+=(const Moments& o) { w += o.w, d += o.d, dd += o.dd, ww += o.ww, wd += o.wd, www += o.www; }
};

// The threshold where a normal distribution with the moments of x - t w, and noise distributed as tau F, has
// the share that `goal` stands for, and its deviation there. The origin of the scores is 0.
struct Guess {
  double t, deviation;
};
template <class C>
Guess guess_by_value(const Moments& m, const Goal& goal, double tau, const C& F) {
  const double x = m.d / m.w - tau * F.mean, a = m.ww / m.w, noise = tau * tau * F.variance;
  const double x_off = m.d / m.w, xx = std::max(m.dd / m.w - x_off * x_off, 0.0), xa = m.wd / m.w - x_off * a,
               aa = std::max(m.www / m.w - a * a, 0.0);
  double t = x / a, deviation = 0;
  for (int i = 0; i < 4; ++i) {  // the spread depends on t, so that this is a fixed point
    const double total = noise + std::max(xx - 2 * t * xa + t * t * aa, 0.0);
    const double quantile = goal.normal + (goal.own - goal.normal) * (noise / total);
    deviation = std::sqrt(total);
    t = (x - quantile * deviation) / a;
  }
  return {t, deviation};
}

}  // namespace khot::KHOT_ISA
