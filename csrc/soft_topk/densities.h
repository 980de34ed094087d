// What the gradients of y are made of: f, from the scores or from y itself, and its sums.
//
// With z = (x - t)/tau, f = f(z) and the incoming gradient v, the sums of f, fz, fv and fzv give all per-row
// scalars.
#pragma once

#include <cmath>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

// The least sum of f over a row: below it, the products of f with v and z lose digits.
template <class R>
constexpr double kLeastMass = sizeof(R) == 4 ? 1e-20 : 1e-100;

template <class R>
struct DensitySums {
  Vec<R> f{}, fz{}, fv{}, fzv{}, y{};
};

// f from the scores x.
template <class R, class C>
struct ScoreDensity {
  using Real = R;
  C F;
  R hi, lo, scale;

  ScoreDensity(const C& F, Threshold t, double tau)
      : F(F),
        hi(static_cast<R>(t.hi)),
        lo(static_cast<R>((t.hi - hi) + t.lo)),
        scale(static_cast<R>(1 / tau)) {}

  KHOT_INLINE Vec<R> standardized(Vec<R> x) const { return ((x - hi) - lo) * scale; }

  // Returns f, and adds it and its products to the sums.
  KHOT_INLINE Vec<R> density(Vec<R> x, Vec<R> v, DensitySums<R>& sums) const {
    const Vec<R> z = standardized(x), f = F.template density<R>(z);
    const Vec<R> fz = f > 0 ? f * z : Vec<R>{};  // z may be infinite
    sums.f += f;
    sums.fz += fz;
    sums.fv += f * v;
    sums.fzv += fz * v;
    return f;
  }
  KHOT_INLINE Vec<R> density(Vec<R> x) const { return F.template density<R>(standardized(x)); }

  static bool reliable(double mass, double /*y*/) { return mass > kLeastMass<R>; }
};

// f from y, in float, which needs no exponentials. The sums of fz and fzv are left out, and so is dL/dtau.
template <class C>
struct ValueDensity {
  using Real = float;
  float scale;

  ValueDensity(const C&, Threshold, double tau) : scale(static_cast<float>(1 / tau)) {}

  KHOT_INLINE VecF density(VecF y, VecF v, DensitySums<float>& sums) const {
    const VecF f = density(y);
    sums.f += f;
    sums.fv += f * v;
    sums.y += y;
    return f;
  }
  KHOT_INLINE VecF density(VecF y) const { return C::density_of(y); }

  // The rounding error of a y near 1 is as large in f. With this bound it is less than a millionth of the sum
  // of f.
  static bool reliable(double mass, double y) { return mass > kLeastMass<float> && 16 * mass > y; }
};

}  // namespace khot::KHOT_ISA
