// The pooled block of a top-k in magnitude for p = 2 and 4/3, as far as gamma tells it: which entries are
// alone, which are in the block, and what y is. Entries are in float and gamma is in double, one row per
// lane.
//
// With e = 1/(p - 1), W = tau gamma^(1/e) and q = (s - gamma)/W, an entry with q >= 1 is alone, and one with
// 0 < q < 1 is in the block.
#pragma once

#include "cdfs.h"
#include "simd/math.h"

namespace khot::KHOT_ISA {

// One double for each lane of a vector of floats.
struct Doubles {
  VecD half[2];
  KHOT_INLINE double operator[](int i) const { return half[i / kWidth<double>][i % kWidth<double>]; }
  KHOT_INLINE void set(int i, double value) { half[i / kWidth<double>][i % kWidth<double>] = value; }
};
KHOT_INLINE Doubles spread(double value) { return {{splat(value), splat(value)}}; }
KHOT_INLINE Doubles widen(VecF v) {
  Doubles d;
  halves(v, d.half[0], d.half[1]);
  return d;
}
KHOT_INLINE VecF narrow(const Doubles& d) { return join(d.half[0], d.half[1]); }
template <class Function, class... D>
KHOT_INLINE Doubles by_half(Function f, const D&... d) {
  return {{f(d.half[0]...), f(d.half[1]...)}};
}
KHOT_INLINE Doubles operator+(const Doubles& a, const Doubles& b) {
  return {{a.half[0] + b.half[0], a.half[1] + b.half[1]}};
}
KHOT_INLINE Doubles operator-(const Doubles& a, const Doubles& b) {
  return {{a.half[0] - b.half[0], a.half[1] - b.half[1]}};
}
KHOT_INLINE Doubles operator*(const Doubles& a, const Doubles& b) {
  return {{a.half[0] * b.half[0], a.half[1] * b.half[1]}};
}
KHOT_INLINE Doubles operator/(const Doubles& a, const Doubles& b) {
  return {{a.half[0] / b.half[0], a.half[1] / b.half[1]}};
}
KHOT_INLINE Doubles operator+(double a, const Doubles& b) { return spread(a) + b; }
KHOT_INLINE Doubles operator-(double a, const Doubles& b) { return spread(a) - b; }
KHOT_INLINE Doubles operator*(double a, const Doubles& b) { return spread(a) * b; }
KHOT_INLINE Doubles operator/(double a, const Doubles& b) { return spread(a) / b; }
KHOT_INLINE Doubles operator-(const Doubles& a) { return {{-a.half[0], -a.half[1]}}; }
KHOT_INLINE void operator+=(Doubles& a, const Doubles& b) { a = a + b; }
KHOT_INLINE double total(const Doubles& v) { return sum<double>(v.half[0] + v.half[1]); }
inline double total(IntF counts) {
  int32_t sum = 0;
  for (int i = 0; i < kWidth<float>; ++i) sum += counts[i];
  return sum;
}
KHOT_INLINE Doubles abs(const Doubles& d) {
  return by_half([](VecD v) { return abs<double>(v); }, d);
}
// v, and 0 where the slope is 0.
KHOT_INLINE double where_not_zero(double slope, double v) { return slope != 0 ? v : 0; }
KHOT_INLINE Doubles where_not_zero(const Doubles& slope, const Doubles& v) {
  return by_half([](VecD slope, VecD v) { return slope != 0 ? v : VecD{}; }, slope, v);
}
// The largest float that is not above d, and the smallest that is not below it. d > 0.
KHOT_INLINE VecF narrow_down(const Doubles& d) {
  const VecF v = narrow(d);
  return (VecF)((IntF)v + (narrow(widen(v) - d) > 0));
}
KHOT_INLINE VecF narrow_up(const Doubles& d) {
  const VecF v = narrow(d);
  return (VecF)((IntF)v - (narrow(widen(v) - d) < 0));
}

// x^(1/3) for x > 0 that is neither subnormal nor infinite. The first is within 4 % of it: a third of the
// exponent, by way of the bits. The second, after two of Halley's steps, is within a few ulp.
KHOT_INLINE VecF near_cube_root(VecF x) {
  const VecF third = __builtin_convertvector((IntF)x, VecF) * (1.0f / 3);
  return (VecF)(__builtin_convertvector(third, IntF) + 0x2a508935);
}
KHOT_INLINE VecF cube_root(VecF x) {
  VecF r = near_cube_root(x);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const VecF cube = r * r * r;
    r *= (cube + 2 * x) * inverse(2 * cube + x);
  }
  return r;
}
// The same in double, from a root in float, to within 1e-14.
KHOT_INLINE Doubles cube_root(const Doubles& x, const Doubles& near, const Doubles& inverse_slope) {
  return near - (near * near * near - x) * inverse_slope;
}

template <int e>
KHOT_INLINE VecF root(VecF x) {
  if constexpr (e == 1) return x;
  return cube_root(x);
}
template <int e>
KHOT_INLINE Doubles root(const Doubles& x) {
  if constexpr (e == 1) return x;
  const VecF r = cube_root(narrow(x));
  return cube_root(x, widen(r), widen(inverse(3 * r * r)));
}

template <int e, class V>
KHOT_INLINE V power(V q) {
  if constexpr (e == 1) return q;
  return q * q * q;
}

// Where the block begins and ends. Entries are compared with these in float, which is exact.
struct BlockEnds {
  VecF block, alone;  // s >= alone is alone, and any other s > block is in the block
  KHOT_INLINE IntF is_alone(VecF s) const { return s >= alone; }
  KHOT_INLINE IntF is_inside(VecF s) const { return (s > block) & (s < alone); }
};

// v for v + tau v^(p-1) = s: an entry that is alone.
template <int e>
KHOT_INLINE Doubles unpooled(VecF s, const Doubles& tau) {
  if constexpr (e == 1) {
    return widen(s) / (1 + tau);
  } else {
    // c^3 + tau c = s. The smaller of s/tau and the cube root of s is at most 1.5 times its root.
    const VecF t = narrow(tau), linear = s * (1 / t), cubic = near_cube_root(s);
    VecF c = linear < cubic ? linear : cubic;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {  // Halley's steps leave 1.5 % and 1e-6
      const VecF square = c * c, miss = c * (square + t) - s, slope = 3 * square + t;
      c -= miss * slope * rough_inverse(slope * slope - 3 * c * miss);
    }
    const Doubles near = widen(c), inverse_slope = widen(inverse(3 * c * c + t));
    const Doubles r = near - (near * (near * near + tau) - widen(s)) * inverse_slope;
    return r * r * r;
  }
}

// gamma = hi + lo, and what depends on it.
template <int e>
struct Pooled {
  Doubles hi, lo, tau, inverse_tau, inverse_width;
  BlockEnds edges;
  VecF factor, factor_low;  // 1/(1 + tau) is a pair

  KHOT_INLINE Pooled(const Doubles& hi, const Doubles& lo, const Doubles& tau) : hi(hi), lo(lo), tau(tau) {
    const Doubles gamma = hi + lo, width = tau * root<e>(gamma), exact_factor = 1 / (1 + tau);
    inverse_tau = 1 / tau;
    inverse_width = 1 / width;
    edges = {narrow_down(gamma), narrow_up(gamma + width)};
    // At an edge that is a float, rounding must not decide.
    const VecF before = (VecF)((IntF)edges.alone - 1);
    const Doubles lead = by_half([](VecD y, VecD gamma) { return y >= gamma ? splat(1.0) : VecD{}; },
                                 power<e>(above(widen(before)) * inverse_tau), gamma);
    edges.alone = narrow(lead) > 0 ? before : edges.alone;
    factor = narrow(exact_factor);
    factor_low = narrow(exact_factor - widen(factor));
  }

  KHOT_INLINE Doubles above(const Doubles& s) const {  // (s - gamma)+
    return by_half([](VecD v) { return v > 0 ? v : VecD{}; }, (s - hi) - lo);
  }

  KHOT_INLINE VecF value(VecF s, IntF alone) const {
    const VecF pooled = narrow(power<e>(above(widen(s)) * inverse_tau));
    if constexpr (e == 1 && kFused) {
      return alone ? fused<float>(s, factor, s * factor_low) : pooled;
    } else {
      return any(alone) ? (alone ? narrow(unpooled<e>(s, tau)) : pooled) : pooled;
    }
  }
};

// The magnitudes s of a vector of the row's entries, and what gives y their signs.
template <class R>
struct Signs {
  Int<R> mask;
  explicit Signs(bool is_signed) : mask(Int<R>{} + (is_signed ? ~Lanes<R>::kAbs : 0)) {}
  KHOT_INLINE Vec<R> without(Vec<R> x) const { return (Vec<R>)((Int<R>)x & ~mask); }
  KHOT_INLINE Vec<R> apply(Vec<R> v, Vec<R> x) const { return (Vec<R>)((Int<R>)v ^ ((Int<R>)x & mask)); }
};

}  // namespace khot::KHOT_ISA
