// Top-k in magnitude for p = 2 and 4/3, of float32 and half precision: a search for gamma in float, and its
// last steps and y in double.
//
// With e = 1/(p - 1), W = tau gamma^(1/e) and q = (s - gamma)/W, gamma is the root of H(gamma) = k, where H
// is the sum over the row of q^e clipped to [0, 1]. So H is a soft count: an entry with q >= 1 is alone, one
// with 0 < q < 1 is in the pooled block, and the k-th largest entry is not needed. Rows that the search does
// not suit are given back, and selection/magnitude.h takes them.
//
// The search knows a row, or as many short rows as a vector of floats has lanes, by the passes that it makes:
// MagnitudeRowPasses and MagnitudeLanePasses. What it computes between them is the same, with one row per
// lane.
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "search/guard.h"
#include "simd/tile.h"

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
// The largest float that is not above d, and the smallest that is not below it. d > 0.
KHOT_INLINE VecF narrow_down(const Doubles& d) {
  const VecF v = narrow(d);
  const Doubles back = widen(v);
  return (VecF)((IntF)v + (narrow(Doubles{{back.half[0] - d.half[0], back.half[1] - d.half[1]}}) > 0));
}
KHOT_INLINE VecF narrow_up(const Doubles& d) {
  const VecF v = narrow(d);
  const Doubles back = widen(v);
  return (VecF)((IntF)v - (narrow(Doubles{{back.half[0] - d.half[0], back.half[1] - d.half[1]}}) < 0));
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
KHOT_INLINE VecD cube_root(VecD x, VecD near, VecD inverse_slope) {
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
  const Doubles near = widen(r), slope = widen(inverse(3 * r * r));
  return {
      {cube_root(x.half[0], near.half[0], slope.half[0]), cube_root(x.half[1], near.half[1], slope.half[1])}};
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
  const Doubles wide = widen(s);
  Doubles v;
  if constexpr (e == 1) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) v.half[h] = wide.half[h] / (1 + tau.half[h]);
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
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      VecD r = near.half[h];
      r -= (r * (r * r + tau.half[h]) - wide.half[h]) * inverse_slope.half[h];
      v.half[h] = r * r * r;
    }
  }
  return v;
}

// gamma = hi + lo, and what depends on it.
template <int e>
struct Pooled {
  Doubles hi, lo, tau, inverse_tau, inverse_width;
  BlockEnds edges;
  VecF factor, factor_low;  // 1/(1 + tau) is a pair

  KHOT_INLINE Pooled(const Doubles& hi, const Doubles& lo, const Doubles& tau) : hi(hi), lo(lo), tau(tau) {
    Doubles gamma, edge, exact_factor;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) gamma.half[h] = hi.half[h] + lo.half[h];
    const Doubles r = root<e>(gamma);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const VecD width = tau.half[h] * r.half[h];
      edge.half[h] = gamma.half[h] + width;
      inverse_tau.half[h] = 1 / tau.half[h];
      inverse_width.half[h] = 1 / width;
      exact_factor.half[h] = 1 / (1 + tau.half[h]);
    }
    edges = {narrow_down(gamma), narrow_up(edge)};
    // At an edge that is a float, rounding must not decide.
    const VecF before = (VecF)((IntF)edges.alone - 1);
    const Doubles wide = widen(before);
    Doubles lead;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      lead.half[h] = power<e>(above(wide, h) * inverse_tau.half[h]) >= gamma.half[h] ? splat(1.0) : VecD{};
    }
    edges.alone = narrow(lead) > 0 ? before : edges.alone;
    factor = narrow(exact_factor);
    const Doubles rounded = widen(factor);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) exact_factor.half[h] -= rounded.half[h];
    factor_low = narrow(exact_factor);
  }

  KHOT_INLINE VecD above(const Doubles& s, int h) const {  // (s - gamma)+
    const VecD offset = (s.half[h] - hi.half[h]) - lo.half[h];
    return offset > 0 ? offset : VecD{};
  }

  KHOT_INLINE VecF value(VecF s, IntF alone) const {
    const Doubles wide = widen(s);
    Doubles y;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) y.half[h] = power<e>(above(wide, h) * inverse_tau.half[h]);
    const VecF pooled = narrow(y);
    if constexpr (e == 1 && kFused) {
      return alone ? fused<float>(s, factor, s * factor_low) : pooled;
    } else {
      return any(alone) ? (alone ? narrow(unpooled<e>(s, tau)) : pooled) : pooled;
    }
  }
};

// What a pass counts and sums: the entries that are alone, and over the block q^e and q^(e-1).
struct RampSums {
  VecF alone{}, value{}, slope{};
};
struct CloseSums {
  Doubles alone{}, inside{}, value{}, slope{};
  bool bad = false;  // whether an entry is infinite or NaN
};

template <int e>
KHOT_INLINE void add_ramp(VecF s, VecF gamma, VecF inverse_width, RampSums& sums) {
  const VecF q = (s - gamma) * inverse_width;
  const IntF alone = q >= 1, inside = (q > 0) & (q < 1);
  const VecF one = splat(1.0f), none{};
  sums.alone += alone ? one : none;
  if constexpr (e == 1) {
    sums.value += inside ? q : none;
    sums.slope += inside ? one : none;
  } else {
    const VecF held = inside ? q : none, square = held * held;
    sums.value += square * held;
    sums.slope += square;
  }
}

// The same in double, with counts as integers.
template <int e>
KHOT_INLINE void add_close(VecF s, const Pooled<e>& now, IntF& alone_count, IntF& inside_count,
                           Doubles& value, Doubles& slope) {
  const IntF alone = now.edges.is_alone(s);
  alone_count -= alone;
  inside_count -= now.edges.is_inside(s);
  const Doubles wide = widen(alone ? VecF{} : s);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const VecD q = now.above(wide, h) * now.inverse_width.half[h];
    if constexpr (e == 1) {
      value.half[h] += q;
    } else {
      const VecD square = q * q;
      value.half[h] += square * q;
      slope.half[h] += square;
    }
  }
}

// The magnitudes s of a vector of the row's entries, and what gives y their signs.
struct FloatSigns {
  IntF mask;
  explicit FloatSigns(bool is_signed) : mask(IntF{} + (is_signed ? ~Lanes<float>::kAbs : 0)) {}
  KHOT_INLINE VecF without(VecF x) const { return (VecF)((IntF)x & ~mask); }
  KHOT_INLINE VecF apply(VecF v, VecF x) const { return (VecF)((IntF)v ^ ((IntF)x & mask)); }
};

// The sums over all lanes.
KHOT_INLINE double total(const Doubles& v) { return sum<double>(v.half[0] + v.half[1]); }
inline double total(IntF counts) {
  int32_t sum = 0;
  for (int i = 0; i < kWidth<float>; ++i) sum += counts[i];
  return sum;
}

// Rows side by side in a tile.
template <int e>
class MagnitudeLanePasses {
 public:
  MagnitudeLanePasses(float* x, float* y, int n, bool is_signed) : x_(x), y_(y), n_(n), signs_(is_signed) {}

  KHOT_INLINE VecF squares() const {
    VecF sum{};
    for (int i = 0; i < n_; ++i) {
      const VecF s = clamp_below<float>(size(i), 0);
      sum += s * s;
    }
    return sum;
  }
  KHOT_INLINE RampSums ramp(VecF gamma, VecF inverse_width) const {
    RampSums sums;
    for (int i = 0; i < n_; ++i) add_ramp<e>(size(i), gamma, inverse_width, sums);
    return sums;
  }
  KHOT_INLINE CloseSums close(const Pooled<e>& now) const {
    CloseSums sums;
    IntF alone{}, inside{};
    for (int i = 0; i < n_; ++i) add_close<e>(size(i), now, alone, inside, sums.value, sums.slope);
    sums.alone = counts(alone), sums.inside = counts(inside);
    return sums;
  }
  // The least entry from the edge on, and the greatest below it.
  KHOT_INLINE void gap(VecF edge, VecF& in, VecF& out) const {
    in = splat(kInf<float>), out = VecF{};
    for (int i = 0; i < n_; ++i) {
      const VecF s = size(i);
      const IntF above = s >= edge;
      in = above & (s < in) ? s : in;
      out = ~above & (s > out) ? s : out;
    }
  }
  // Writes y and counts the entries that are alone and in the block.
  KHOT_INLINE CloseSums write(const Pooled<e>& now) const {
    CloseSums sums;
    IntF alone_count{}, inside_count{};
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), s = signs_.without(x);
      const IntF alone = now.edges.is_alone(s);
      alone_count -= alone;
      inside_count -= now.edges.is_inside(s);
      *column(y_, i) = signs_.apply(now.value(s, alone), x);
    }
    sums.alone = counts(alone_count), sums.inside = counts(inside_count);
    return sums;
  }

 private:
  KHOT_INLINE VecF size(int i) const { return signs_.without(*column(x_, i)); }
  static KHOT_INLINE Doubles counts(IntF v) { return widen(__builtin_convertvector(v, VecF)); }

  float *x_, *y_;
  int n_;
  FloatSigns signs_;
};

// One row. All lanes of a sum hold the same number.
template <int e>
class MagnitudeRowPasses {
 public:
  MagnitudeRowPasses(const Row& x, void* y, int64_t n, bool is_signed, const Parallel* inside)
      : x_(x), y_(y), n_(n), signs_(is_signed), inside_(inside) {}

  VecF squares() const {
    return splat(static_cast<float>(
        reduce<float, Sums>(x_, n_, inside_, [=](Sums& sums, const float* p, int count, int64_t) {
          VecF total{};
          vectors<float>(p, count, 0.0f, [&](VecF x, int, int) {
            const VecF s = clamp_below<float>(signs_.without(x), 0);
            total += s * s;
          });
          sums.value += sum<float>(total);
        }).value));
  }
  RampSums ramp(VecF gamma, VecF inverse_width) const {
    const Sums all =
        reduce<float, Sums>(x_, n_, inside_, [=](Sums& sums, const float* p, int count, int64_t) {
          RampSums parts;
          vectors<float>(p, count, 0.0f, [&](VecF x, int, int) {
            add_ramp<e>(signs_.without(x), gamma, inverse_width, parts);
          });
          sums.alone += sum<float>(parts.alone);
          sums.value += sum<float>(parts.value), sums.slope += sum<float>(parts.slope);
        });
    return {splat(static_cast<float>(all.alone)), splat(static_cast<float>(all.value)),
            splat(static_cast<float>(all.slope))};
  }
  CloseSums close(const Pooled<e>& now) const {
    const Sums all =
        reduce<float, Sums>(x_, n_, inside_, [=, &now](Sums& sums, const float* p, int count, int64_t) {
          const Pooled<e> local = now;  // a local copy stays in registers
          IntF alone{}, inside{};
          Doubles value{}, slope{};
          vectors<float>(p, count, 0.0f, [&](VecF x, int, int) {
            add_close<e>(signs_.without(x), local, alone, inside, value, slope);
          });
          sums.alone += total(alone), sums.inside += total(inside);
          sums.value += total(value), sums.slope += total(slope);
        });
    return of_all(all);
  }
  void gap(VecF edge, VecF& in, VecF& out) const {
    const Range all =
        reduce<float, Range>(x_, n_, inside_, [=](Range& range, const float* p, int count, int64_t) {
          VecF low = splat(kInf<float>), high{};
          vectors<float>(p, count, 0.0f, [&](VecF x, int, int) {
            const VecF s = signs_.without(x);
            const IntF above = s >= edge;
            low = above & (s < low) ? s : low;
            high = ~above & (s > high) ? s : high;
          });
          range += {minimum<float>(low), maximum<float>(high)};
        });
    in = splat(all.in), out = splat(all.out);
  }
  CloseSums write(const Pooled<e>& now) const {
    const bool own = x_.dtype == Dtype::kFloat;
    const Sums all =
        reduce<float, Sums>(x_, n_, inside_, [=, &now](Sums& sums, const float* p, int count, int64_t at) {
          const Pooled<e> local = now;
          float results[kBlock];
          float* const target = own ? static_cast<float*>(y_) + at : results;
          IntF alone_count{}, inside_count{};
          IntF bad{};
          vectors<float>(p, count, 0.0f, [&](VecF x, int i, int lanes) {
            const VecF s = signs_.without(x);
            bad |= ~(s < kInf<float>);
            const IntF alone = local.edges.is_alone(s);
            alone_count -= alone;
            inside_count -= local.edges.is_inside(s);
            const VecF result = signs_.apply(local.value(s, alone), x);
            lanes == kWidth<float> ? store(target + i, result) : store_part(target + i, lanes, result);
          });
          sums.alone += total(alone_count), sums.inside += total(inside_count);
          if (any(bad)) sums.bad = true;
          if (!own) put(y_, x_.dtype, at, count, results);
        });
    return of_all(all);
  }

 private:
  struct Sums {
    double alone = 0, inside = 0, value = 0, slope = 0;
    bool bad = false;
    void operator+=(const Sums& o) {
      alone += o.alone, inside += o.inside, value += o.value, slope += o.slope, bad |= o.bad;
    }
  };
  struct Range {
    float in = kInf<float>, out = 0;
    void operator+=(const Range& o) { in = std::min(in, o.in), out = std::max(out, o.out); }
  };
  static CloseSums of_all(const Sums& s) {
    return {spread(s.alone), spread(s.inside), spread(s.value), spread(s.slope), s.bad};
  }

  Row x_;
  void* y_;
  int64_t n_;
  FloatSigns signs_;
  const Parallel* inside_;
};

// What is known about the rows of a search before it begins.
struct MagnitudeGoal {
  // The quantile and the hazard rate of abs(N(0, 1)) for the share k/n; kept from one row to the next, which
  // often asks for the same.
  void set(double new_k, double new_n) {
    if (new_k == k && new_n == n) return;
    k = new_k, n = new_n;
    const double share = k / n;
    quantile = std::max(-normal_quantile(share / 2), 0.05);
    hazard = 0.79788456080286535588 * std::exp(-0.5 * quantile * quantile) / share;
  }
  double k = -1, n = -1, quantile = 0, hazard = 0;
};

template <int e>
class MagnitudeSearch {
 public:
  static constexpr int width = kWidth<float>;

  // Lane j is a row of n entries.
  void set(int j, double k, double tau, int64_t n, MagnitudeGoal& goal) {
    const double entries = static_cast<double>(n);
    k_.set(j, k), tau_.set(j, tau);
    good_[j] = k > 0 && k < entries && tau > 1e-5 && tau < 1e5 ? -1 : 0;
    goal.set(good_[j] ? k : 1, entries);
    quantile_[j] = static_cast<float>(goal.quantile), hazard_[j] = static_cast<float>(goal.hazard);
    share_[j] = static_cast<float>(goal.k / entries);
  }

  // Finds gamma to about 1e-5 of the width of the ramp or, where the entries are a sample, as well as they
  // tell.
  template <class Passes>
  void approach(const Passes& passes, float n, bool rough = false) {
    const VecF mean_square = passes.squares() / n;
    good_ &= (mean_square > 1e-30f) & (mean_square < 1e30f);
    const VecF size = square_root(good_ ? mean_square : splat(1.0f));
    decline_ = hazard_ / size;
    guess(size * quantile_, decline_);
    // By Chebyshev's inequality, no k entries are above this.
    search(passes, 1.001f * size / square_root(share_), rough);
  }

  // The same from the gamma of a sample.
  template <class Passes>
  void approach_from(const MagnitudeSearch& sample, const Passes& passes) {
    gamma_ = sample.gamma_, decline_ = sample.decline_;
    good_ &= sample.good_;
    search(passes, splat(kInf<float>), false);
  }

  // Writes y and returns which rows have it. The others have to be solved otherwise.
  template <class Passes>
  IntF finish(const Passes& passes) {
    gamma_ = good_ ? gamma_ : splat(1.0f);
    hi_ = widen(gamma_), lo_ = {};
    if (any(good_ & gap_)) part(passes);
    const IntF pooled = good_ & ~gap_;
    CloseSums expected{k_};
    IntF wrong{};
    for (int round = 0; round < kRounds; ++round) {
      const IntF far = any(pooled) ? pooled & refine(passes, expected) : pooled;
      if (any(far) && round + 1 < kRounds) continue;
      const CloseSums found = passes.write(Pooled<e>(hi_, lo_, tau_));
      // Where an entry has moved into the block or out of it, gamma was that of another block.
      Doubles moved;
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        moved.half[h] = abs<double>(found.alone.half[h] - expected.alone.half[h]);
        if (e == 1) moved.half[h] += abs<double>(found.inside.half[h] - expected.inside.half[h]);
      }
      // An empty block has a gamma in the middle of a gap, which this search has missed.
      wrong = far | (narrow(moved) != 0) | (pooled & (narrow(found.inside) == 0));
      if (found.bad) return IntF{};
      if (!any(good_ & wrong)) break;
    }
    return good_ & ~wrong;
  }

  Threshold gamma(int j) const {
    const double hi = hi_[j] + lo_[j];
    return {hi, (hi_[j] - hi) + lo_[j]};
  }

 private:
  static constexpr int kPasses = 24;
  // So near, in W and in gamma, Newton's step is the last one in float.
  static constexpr float kNear = 1e-3f;
  static constexpr float kRough = 3e-3f;
  // The first estimate of the decline of log H, from elsewhere, counts as much as a ramp of this width, in
  // gamma.
  static constexpr float kTrust = 0.02f;
  // So near it is the last one in double: its error is about the square of this. For e = 1 there is none, as
  // long as no entry moves into the block or out of it.
  static constexpr double kClose = e == 1 ? 1e-3 : 3e-7;
  static constexpr float kFew =
      1e-3f;  // a block whose terms q^e sum to less, or miss their number by less, is empty
  static constexpr int kRounds = 5;

  // gamma from the tail of abs(N(0, 1)), which is exponential around the k-th entry, at t, with this hazard
  // rate: t = gamma + e/hazard log(1 + hazard W/(e + 1)), which is right for small and for large W.
  KHOT_INLINE void guess(VecF t, VecF hazard) {
    const VecF slope = hazard * narrow(tau_) * (1.0f / (e + 1));
    gamma_ = t;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const VecF w = slope * root<e>(gamma_),
                 miss = gamma_ + static_cast<float>(e) / hazard * log<float>(1 + w) - t;
      const VecF next = gamma_ - miss / (1 + w / (hazard * gamma_ * (1 + w)));
      gamma_ = next > 0.02f * t ? next : 0.02f * t;
    }
  }

  template <class Passes>
  void search(const Passes& passes, VecF high, bool rough) {
    const VecF k = narrow(k_), tau = narrow(tau_);
    VecF low{}, width{}, reach = kTrust * gamma_, before{};
    Guard<LaneArithmetic> guard;
    IntF pending = good_;
    for (int pass = 0; pass < kPasses && any(pending); ++pass) {
      width = tau * root<e>(gamma_);
      const RampSums sums = passes.ramp(gamma_, inverse(width));
      const VecF miss = (sums.alone - k) + sums.value, count = sums.alone + sums.value;
      low = miss > 0 ? gamma_ : low;
      high = miss < 0 ? gamma_ : high;
      // -d log H/d gamma here and, from the second pass on, between this gamma and the one before. Where the
      // ramp is so narrow that few entries are on it, the latter tells more.
      const VecF slope = static_cast<float>(e) * sums.slope / width;
      const VecF here = (slope + sums.value / gamma_) / count;
      if (pass > 0) decline_ = 2 * abs<float>(count - before) / ((count + before) * reach);
      decline_ = (here * width + decline_ * reach) / (width + reach);
      before = count;
      // Newton's step: for log H, with 2 (x - 1)/(x + 1) for log x, where the ramp is narrow, and for
      // gamma (k - H) where it is wide. These are nearly linear there.
      const VecF left = k - sums.alone;
      const VecF narrow_step = 2 * miss / ((count + k) * decline_);
      const VecF wide_step = gamma_ * miss / (left + gamma_ * slope);
      const VecF trial = gamma_ + ((width > gamma_) & (left > 0) ? wide_step : narrow_step);
      const VecF middle = high < kInf<float> ? 0.5f * low + 0.5f * high : 2 * gamma_;
      // No entry is in the block, or those that are in it are about to leave it: there may be no block.
      const IntF empty =
          ((sums.alone == k) & (sums.value < kFew)) |
          ((abs<float>(sums.alone + sums.slope - k) < kFew) & (sums.value > (1 - kFew) * sums.slope));
      gap_ = pending ? empty : gap_;
      pending &= ~gap_;
      // Close to the root, the sign of the miss is only rounding, and the bracket does not count.
      const VecF near = rough ? kRough * gamma_ : kNear * (width < gamma_ ? width : gamma_);
      const IntF bisects = guard.bisects((trial > low) & (trial < high), high - low, abs<float>(miss)) &
                           ~(abs<float>(trial - gamma_) <= near);
      const VecF next = bisects ? middle : trial;
      reach = abs<float>(next - gamma_);
      gamma_ = pending ? next : gamma_;
      pending &= ~(reach <= near);
    }
    good_ &= ~pending & ((rough ? IntF{} - 1 : gap_) | (width > 1e-4f * gamma_));
  }

  // Where no entry is pooled, gamma is in the middle between the last entry that is selected and the next
  // one.
  template <class Passes>
  void part(const Passes& passes) {
    VecF in, out;
    passes.gap(gamma_ + 0.5f * narrow(tau_) * root<e>(gamma_), in, out);
    const Doubles v = unpooled<e>(in, tau_), below = widen(out), here = widen(gap_ ? splat(1.0f) : VecF{});
    Doubles clear;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      clear.half[h] = v.half[h] - (1 + 1e-12) * below.half[h];
      hi_.half[h] = here.half[h] > 0 ? 0.5 * v.half[h] + 0.5 * below.half[h] : hi_.half[h];
    }
    good_ &= ~gap_ | (narrow(clear) > 0);
  }

  // A step of Newton's method for gamma (k - H), which is linear for e = 1, and whether that was not the
  // last.
  template <class Passes>
  IntF refine(const Passes& passes, CloseSums& sums) {
    const Pooled<e> now(hi_, lo_, tau_);
    sums = passes.close(now);
    Doubles excess;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const VecD inside = e == 1 ? sums.inside.half[h] : sums.slope.half[h];
      const VecD left = k_.half[h] - sums.alone.half[h], gamma = hi_.half[h] + lo_.half[h];
      const VecD slope = left + e * gamma * inside * now.inverse_width.half[h];
      const VecD step = slope != 0 ? gamma * (sums.value.half[h] - left) / slope : VecD{};
      const VecD share = step * now.inverse_width.half[h], own = step / gamma;
      excess.half[h] =
          (abs<double>(share) > abs<double>(own) ? abs<double>(share) : abs<double>(own)) - kClose;
      lo_.half[h] += step;
    }
    return ~(narrow(excess) <= 0);
  }

  Doubles k_{}, tau_{}, hi_{}, lo_{};
  VecF quantile_{}, hazard_{}, share_{}, gamma_{}, decline_{};
  IntF good_{}, gap_{};
};

// One row. Returns whether y was written.
template <int e>
bool magnitude_row(const MagnitudeSpec& spec, const Row& x, double k, double tau, void* y,
                   MagnitudeGoal& goal, Threshold& gamma) {
  if (k != std::floor(k)) return false;
  const MagnitudeRowPasses<e> passes(x, y, spec.n, spec.is_signed, spec.inside);
  MagnitudeSearch<e> search;
  for (int j = 0; j < search.width; ++j) search.set(j, k, tau, spec.n, goal);
  float sample[kSampleMax];
  const int size = spec.n >= kSampleFrom ? take_sample(x, spec.n, sample) : 0;
  const double share = static_cast<double>(size) / static_cast<double>(spec.n);
  if (k * share >= 8 && k * share <= size - 8) {
    const MagnitudeRowPasses<e> few(Row{sample, Dtype::kFloat, 1}, nullptr, size, spec.is_signed, nullptr);
    MagnitudeSearch<e> rough;
    for (int j = 0; j < search.width; ++j) rough.set(j, k * share, tau, size, goal);
    rough.approach(few, static_cast<float>(size), true);
    search.approach_from(rough, passes);
  } else {
    search.approach(passes, static_cast<float>(spec.n));
  }
  if (!search.finish(passes)[0]) return false;
  gamma = search.gamma(0);
  return true;
}

// Short rows, one per lane.
template <int e>
class MagnitudeLanes {
 public:
  static constexpr int width = kWidth<float>;

  // Solves and writes the rows first, ..., first + width - 1. done[j] says whether row first + j was written.
  void solve(const MagnitudeSpec& spec, const ForwardRows& rows, int64_t first, MagnitudeGoal& goal,
             bool* done) {
    const int n = static_cast<int>(spec.n);
    gather([&](int j) { return rows.x(first + j); }, n, rows_, x_);
    const MagnitudeLanePasses<e> passes(x_, y_, n, spec.is_signed);
    MagnitudeSearch<e> search;
    for (int j = 0; j < width; ++j) {
      const double k = rows.k(first + j);
      search.set(j, k == std::floor(k) ? k : kNan, rows.tau(first + j), n, goal);
    }
    search.approach(passes, static_cast<float>(n));
    const IntF good = search.finish(passes);
    for (int j = 0; j < width; ++j) {
      done[j] = good[j] != 0;
      if (done[j]) rows.put(first + j, search.gamma(j));
    }
    scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n, rows_, y_);
  }

 private:
  alignas(KHOT_VECTOR_BYTES) float x_[kShortRow * width], y_[kShortRow * width], rows_[kShortRow * width];
};

}  // namespace khot::KHOT_ISA
