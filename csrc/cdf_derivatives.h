// What one pass over a row collects about f and its derivatives, one struct per CDF (its trait Derivatives).
//
// add(z, above, v, a) takes one vector of a pass over the scores, add(y, a) of a pass over the odds. The
// entries have the weights a; where all are the constant 1, the compiler leaves them out. put(s, total) adds
// the sums of the first to the fifth derivative of F to s.S1, ..., s.S5, with total() for the sum of a
// vector, and leaves those out that are of no use to this CDF.
//
// curve(z, y, f, d) gives the second and the next derivatives of F at each entry instead, for sums in which
// each derivative has a weight of its own. kCurve is their number.
#pragma once

#include "simd/math.h"

namespace khot::KHOT_ISA {

template <class R>
struct TailDensity {
  Vec<R> tail;     // min(F, 1 - F)
  Vec<R> density;  // f
};

// The sum of f alone serves any CDF.
struct DensitySum {
  static constexpr int kCurve = 0;
  KHOT_INLINE void curve(VecF /*z*/, VecF /*y*/, VecF /*f*/, VecF* /*d*/) const {}
  VecF f{};
  KHOT_INLINE void add(VecF /*z*/, IntF /*above*/, TailDensity<float> v, VecF a) { f += a * v.density; }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    s.S1 += total(f);
  }
};

// The derivatives are polynomials in y.
struct LogisticDerivatives {
  static constexpr int kCurve = 4;
  KHOT_INLINE void curve(VecF /*z*/, VecF y, VecF f, VecF* d) const {
    d[0] = f * (1 - 2 * y);
    d[1] = f * (1 - 6 * f);
    d[2] = d[0] * (1 - 12 * f);
    d[3] = f * (1 + f * (120 * f - 30));
  }
  VecF f1{}, fy{}, ff{}, ffy{}, fff{};
  KHOT_INLINE void add(VecF y, VecF a) { add(y - y * y, y, a); }
  KHOT_INLINE void add(VecF f, VecF y, VecF a) {
    const VecF weighted = a * f, square = weighted * f;
    f1 += weighted;
    fy += weighted * y;
    ff += square;
    ffy += square * y;
    fff += square * f;
  }
  KHOT_INLINE void add(VecF /*z*/, IntF above, TailDensity<float> v, VecF a) {
    add(v.density, above ? 1 - v.tail : v.tail, a);
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    const auto S1 = total(f1), bend = S1 - 2 * total(fy), square = total(ff);
    s.S1 += S1;
    s.S2 += bend;                                   // f' = f (1 - 2y)
    s.S3 += S1 - 6 * square;                        // f'' = f (1 - 6f)
    s.S4 += bend - 12 * (square - 2 * total(ffy));  // f''' = f' (1 - 12f)
    s.S5 += S1 - 30 * square + 120 * total(fff);    // f'''' = f (1 - 30f + 120f^2)
  }
};

// Up to its sign every derivative is f itself, apart from the kinks that entries near t bring.
struct LaplaceDerivatives {
  static constexpr int kCurve = 4;
  KHOT_INLINE void curve(VecF /*z*/, VecF y, VecF f, VecF* d) const {
    d[0] = d[2] = y > 0.5f ? -f : f;
    d[1] = f - (16 * f - 1) * f * (1.0f / 3);  // less what kinks bring on average: see put()
    d[3] = f;
  }
  VecF f1{}, bend{}, ff{};
  KHOT_INLINE void add(VecF y, VecF a) {
    const VecF rest = 1 - y;
    const IntF above = y > 0.5f;
    add(above ? rest : y, above, a);
  }
  KHOT_INLINE void add(VecF /*z*/, IntF above, TailDensity<float> v, VecF a) { add(v.density, above, a); }
  KHOT_INLINE void add(VecF f, IntF above, VecF a) {
    const VecF weighted = a * f;
    f1 += weighted;
    bend += above ? -weighted : weighted;
    ff += weighted * f;
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    // f'' is f minus the number of entries per tau at t. Both the sum of f and four times the sum of f^2
    // estimate that number, with errors due to the curvature of the entries' density, and the second error is
    // a quarter of the first: the combination below cancels them.
    const auto S1 = total(f1), S2 = total(bend), dense = (16 * total(ff) - S1) * (1.0f / 3);
    s.S1 += S1;
    s.S2 += S2;
    s.S3 += S1 - dense;
    s.S4 += S2;
    s.S5 += S1;
  }
};

// The derivatives are f times Hermite's polynomials.
struct NormalDerivatives {
  static constexpr float kEnd = 13;  // from here on f is 0 in float
  static constexpr int kCurve = 4;
  KHOT_INLINE void curve(VecF z, VecF /*y*/, VecF f, VecF* d) const {
    const VecF near = clamp_above<float>(clamp_below<float>(z, -kEnd), kEnd), square = near * near;
    d[0] = -near * f;
    d[1] = (square - 1) * f;
    d[2] = (3 - square) * near * f;
    d[3] = (square * (square - 6) + 3) * f;
  }
  VecF f0{}, f1{}, f2{}, f3{}, f4{};  // sums of f z^i
  KHOT_INLINE void add(VecF z, IntF /*above*/, TailDensity<float> v, VecF a) {
    const VecF near = clamp_above<float>(clamp_below<float>(z, -kEnd), kEnd);
    const VecF weighted = a * v.density, square = near * near, bent = weighted * square;
    f0 += weighted;
    f1 += weighted * near;
    f2 += bent;
    f3 += bent * near;
    f4 += bent * square;
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    const auto m0 = total(f0), m1 = total(f1), m2 = total(f2);
    s.S1 += m0;
    s.S2 -= m1;
    s.S3 += m2 - m0;
    s.S4 += 3 * m1 - total(f3);
    s.S5 += total(f4) - 6 * m2 + 3 * m0;
  }
};

// f = e z^(e-1) on (0, 1), for integers e up to 3. Entries that enter or leave (0, 1) are not accounted for.
struct PowerDerivatives {
  static constexpr int kCurve = 2;
  KHOT_INLINE void curve(VecF z, VecF /*y*/, VecF f, VecF* d) const {
    const VecF inside = f > 0 ? splat(1.0f) : VecF{};
    d[0] = e == 3 ? 6 * (f > 0 ? z : VecF{}) : e == 2 ? 2 * inside : VecF{};
    d[1] = e == 3 ? 6 * inside : VecF{};
  }
  int e;
  VecF f{}, inner{}, inside{};
  KHOT_INLINE void add(VecF z, IntF /*above*/, TailDensity<float> v, VecF a) {
    const IntF within = v.density > 0;
    f += a * v.density;
    inner += within ? a * z : VecF{};
    inside += within ? a : VecF{};
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    s.S1 += total(f);
    if (e == 2) s.S2 += 2 * total(inside);
    if (e == 3) s.S2 += 6 * total(inner), s.S3 += 6 * total(inside);
  }
};

}  // namespace khot::KHOT_ISA
