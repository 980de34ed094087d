// What the gradients are made of: f, from the scores or from y itself, and its sums.
//
// With z = (x - t)/tau, f = f(z) and the incoming gradient v, the sums of f, fz, fv and fzv give all per-row
// scalars. For log y, vf/F takes the place of fv.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "soft_topk/gap.h"

namespace khot::KHOT_ISA {

// The least sum of f over a row: below it, the products of f with v and z lose digits.
template <class R>
constexpr double kLeastMass = sizeof(R) == 4 ? 1e-20 : 1e-100;

struct Steepest {
  float v = 0;
  void operator+=(const Steepest& o) { v = std::max(v, o.v); }
};

// Whether products of f with the incoming gradients are nothing in float, although there are some. These are
// asked only where all f, and what the products f v add up to, are small.
inline bool loses_products(double mass, double fv, const Row& grad, int64_t n, const Parallel* inside) {
  if (mass > 1e-6 || std::fabs(fv) > 1e-30) return false;
  const float most =
      reduce<float, Steepest>(grad, n, inside, [](Steepest& s, const float* p, int count, int64_t) {
        for (int i = 0; i < count; ++i) s.v = std::max(s.v, std::fabs(p[i]));
      }).v;
  return most > 0 && most < 1e-16f;
}

template <class R>
struct DensitySums {
  static constexpr bool kLong = false;
  Vec<R> f{}, fz{}, fv{}, fzv{}, y{};
  KHOT_INLINE void add(Vec<R> own_f, Vec<R> own_fz, Vec<R> own_fv, Vec<R> own_fzv) {
    f += own_f, fz += own_fz, fv += own_fv, fzv += own_fzv;
  }
  KHOT_INLINE double v_total() const { return sum<R>(fv); }
  KHOT_INLINE double zv_total() const { return sum<R>(fzv); }
};
// The same where the sums of v need more digits than float has.
struct LongDensitySums {
  static constexpr bool kLong = true;
  VecF f{}, fz{}, y{};
  LongSum fv, fzv;
  KHOT_INLINE void add(VecF own_f, VecF own_fz, VecF own_fv, VecF own_fzv) {
    f += own_f, fz += own_fz, fv.add(own_fv), fzv.add(own_fzv);
  }
  KHOT_INLINE void flush() { fv.flush(), fzv.flush(); }
  KHOT_INLINE double v_total() const { return sum<double>(fv.total); }
  KHOT_INLINE double zv_total() const { return sum<double>(fzv.total); }
};

// A pass over a row by a source of f: density(x, v, sums) adds to the Sums and returns kept(x), from which
// gradient(kept, v, offset) makes dL/dx. reliable(mass, y, n) says whether the sums have the
// digits that matter. The traits of a source:
//
//   kPad       what stands beyond the end of a row: there f is 0
//   kMoments   whether the sums of fz and fzv are collected, without which there is no dL/dtau
//   slope(tau) with kMoments: what f of this source is multiplied by to be f/tau
//   of_k(v)    dL/dk, from the mean of v by f
//   kKeeps     whether kept(x) is more than what is as quickly made again

// f from the scores x.
template <class R, class C>
struct ScoreDensity {
  using Real = R;
  using Sums = DensitySums<R>;
  static constexpr R kPad = -kInf<R>;
  static constexpr bool kMoments = true, kKeeps = true;
  C F;
  R hi, lo, scale;

  ScoreDensity(const C& F, Threshold t, double tau)
      : F(F),
        hi(static_cast<R>(t.hi)),
        lo(static_cast<R>((t.hi - hi) + t.lo)),
        scale(inverse_of<R>(tau, C::full_support)) {}

  KHOT_INLINE Vec<R> standardized(Vec<R> x) const { return ((x - hi) - lo) * scale; }
  static double slope(double tau) { return 1 / tau; }
  static double of_k(double mean) { return mean; }

  // Returns f, and adds it and its products to the sums.
  KHOT_INLINE Vec<R> density(Vec<R> x, Vec<R> v, DensitySums<R>& sums) const {
    const Vec<R> z = standardized(x), f = F.template density<R>(z);
    const Vec<R> fz = f > 0 ? f * z : Vec<R>{};  // z may be infinite
    sums.add(f, fz, f * v, fz * v);
    return f;
  }
  KHOT_INLINE Vec<R> kept(Vec<R> x) const { return F.template density<R>(standardized(x)); }

  KHOT_INLINE Vec<R> gradient(Vec<R> f, Vec<R> v, R offset) const { return f * scale * (v - offset); }

  static bool reliable(double mass, double /*y*/, int64_t /*n*/) { return mass > kLeastMass<R>; }
};

// The gap around t of a row in which all f are small.
struct FloatGap {
  float up, down;                  // the entries at its ends
  float further_up, further_down;  // how much further from t than the nearest entry these are, in tau
  float distance, most;            // of the nearest entry: how many tau it is away, and its f/tau

  // Without the density.
  static FloatGap around(Edges at, Threshold t, double tau) {
    const double above = (at.up - t.hi) - t.lo, below = (t.hi - at.down) + t.lo;
    const double nearest = std::min(above, below), scale = 1 / tau;
    auto in_float = [](double v) { return static_cast<float>(v); };
    return {in_float(at.up),
            in_float(at.down),
            in_float((above - nearest) * scale),
            in_float((below - nearest) * scale),
            in_float(nearest * scale),
            0};
  }
};

// f from the scores, over that of the entry nearest to t. For log y, vf/(F tau) is summed, and what is kept
// has the sign of z, which 0 has, too; where f/F below t is no constant, only the score tells it.
template <class C, bool kLog>
struct RelativeDensity : ScoreDensity<float, C> {
  static constexpr bool kKeeps = !kLog || C::value_from_odds;
  FloatGap gap;

  RelativeDensity(const C& F, Threshold t, double tau, FloatGap gap)
      : ScoreDensity<float, C>(F, t, tau), gap(gap) {}

  double slope(double /*tau*/) const { return kLog ? 1 : gap.most; }
  double of_k(double mean) const { return kLog ? mean / gap.most : mean; }

  KHOT_INLINE VecF density(VecF x, VecF v, DensitySums<float>& sums) const {
    const VecF z = this->standardized(x), own = signed_density(x), f = abs<float>(own);
    const VecF u = kLog ? pulled(own, z, v) : f * v;
    sums.add(f, f > 0 ? f * z : VecF{}, u, u != 0 ? u * z : VecF{});
    return kKeeps ? own : x;
  }
  KHOT_INLINE VecF kept(VecF x) const { return kKeeps ? signed_density(x) : x; }
  KHOT_INLINE VecF gradient(VecF kept, VecF v, float offset) const {
    if constexpr (!kLog) return kept * gap.most * (v - offset);
    if constexpr (kKeeps) return pulled(kept, VecF{}, v) - abs<float>(kept) * offset;
    const VecF own = signed_density(kept);
    return pulled(own, this->standardized(kept), v) - abs<float>(own) * offset;
  }

 private:
  KHOT_INLINE VecF signed_density(VecF x) const {
    const IntF over = x >= gap.up;
    const VecF more =
        over ? (x - gap.up) * this->scale + gap.further_up : (gap.down - x) * this->scale + gap.further_down;
    const VecF less = C::value_from_odds ? more : more * (gap.distance + 0.5f * more);
    const VecF f = less < 80 ? exp2_held(less * -static_cast<float>(kLog2E)) : VecF{};
    if constexpr (!kLog) return f;
    return ~over & (x > -kInf<float>) ? -f : f;
  }
  KHOT_INLINE VecF pulled(VecF own, VecF z, VecF v) const {
    const VecF below = C::template hazard_below<float>(-z) * this->scale;
    return v * ((IntF)own < 0 ? below : abs<float>(own) * gap.most);
  }
};

// f from the scores, with log y.
template <class R, class C>
struct LogDensity : ScoreDensity<R, C> {
  using Sums = std::conditional_t<sizeof(R) == 4, LongDensitySums, DensitySums<R>>;
  using ScoreDensity<R, C>::ScoreDensity;

  // What F and f are made of again. At an infinite score nothing moves.
  KHOT_INLINE Vec<R> state(Vec<R> z) const {
    const Vec<R> value = C::log_state(z);
    return abs<R>(z) < kInf<R> ? value : Vec<R>{};
  }
  // v f/F, and f. Where y is exactly 0, the derivative is 0, although v may be infinite.
  KHOT_INLINE Vec<R> pulled(Vec<R> state, Vec<R> v, Vec<R>& f) const {
    const Vec<R> slope = this->F.log_slope(state, f);
    if constexpr (C::full_support) return v * slope;
    return (state > 0) & (v != 0) ? v * slope : Vec<R>{};
  }
  template <class Sums>
  KHOT_INLINE Vec<R> density(Vec<R> x, Vec<R> v, Sums& sums) const {
    const Vec<R> z = this->standardized(x), kept = state(z);
    Vec<R> f;
    const Vec<R> u = pulled(kept, v, f);
    sums.add(f, f > 0 ? f * z : Vec<R>{}, u, u != 0 ? u * z : Vec<R>{});
    return kept;
  }
  KHOT_INLINE Vec<R> kept(Vec<R> x) const { return state(this->standardized(x)); }
  KHOT_INLINE Vec<R> gradient(Vec<R> kept, Vec<R> v, R offset) const {
    Vec<R> f;
    const Vec<R> u = pulled(kept, v, f);
    return (u - f * offset) * this->scale;
  }

  // u does not become small with f. Its rounding errors, which float has, come to the entries nearest to t,
  // divided by the sum of f; of few entries they are small beside u.
  static bool reliable(double mass, double /*y*/, int64_t n) {
    constexpr int64_t kFew = 4096;
    return mass > (sizeof(R) == 4 && n > kFew ? 1e-2 * std::sqrt(static_cast<double>(n)) : kLeastMass<R>);
  }
};

// f from y, in float, which needs no exponentials.
template <class C>
struct ValueDensity {
  using Real = float;
  using Sums = DensitySums<float>;
  static constexpr float kPad = 0;
  static constexpr bool kMoments = false, kKeeps = false;
  float scale;

  ValueDensity(const C&, Threshold, double tau) : scale(static_cast<float>(1 / tau)) {}
  static double of_k(double mean) { return mean; }

  KHOT_INLINE VecF density(VecF y, VecF v, DensitySums<float>& sums) const {
    const VecF f = C::density_of(y);
    sums.f += f;
    sums.fv += f * v;
    sums.y += y;
    return y;
  }
  KHOT_INLINE VecF kept(VecF y) const { return y; }
  KHOT_INLINE VecF gradient(VecF y, VecF v, float offset) const {
    return C::density_of(y) * scale * (v - offset);
  }

  // The rounding error of a y near 1 is as large in f. With this bound it is less than a millionth of the sum
  // of f.
  static bool reliable(double mass, double y, int64_t /*n*/) {
    return mass > kLeastMass<float> && 16 * mass > y;
  }
};

}  // namespace khot::KHOT_ISA
