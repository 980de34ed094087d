// The Fenchel-Young loss of a soft top-k, tau sum (omega*(z) + omega(T) - z T) with z = (x - t)/tau, from its
// threshold t, and its gradients (khot/_kernels/reference/fenchel_young.py). Losses of targets of 0 and 1,
// whose terms do not cancel, in float where that carries the row; the rest, and all gradients, in double.
#pragma once

#include <cmath>
#include <type_traits>

#include "cdfs.h"
#include "simd/passes.h"
#include "soft_topk/apply.h"

namespace khot::KHOT_ISA {

struct TargetSums {
  double mass = 0;
  bool soft = false;  // whether some are neither 0 nor 1
  void operator+=(const TargetSums& o) { mass += o.mass, soft |= o.soft; }
};

inline TargetSums sums_of(const Row& target, int64_t n, const Parallel* inside) {
  return reduce<double, TargetSums>(target, n, inside,
                                    [](TargetSums& s, const double* p, int count, int64_t) {
                                      VecD total{};
                                      IntD soft{};
                                      vectors<double>(p, count, 0, [&](VecD v, int, int) {
                                        total += v;
                                        soft |= (v != 0) & (v != 1);
                                      });
                                      s.mass += sum<double>(total), s.soft |= any((IntF)soft);
                                    });
}

// What a target of this sum is multiplied by so that it sums to k; NaN where it sums to less.
inline double share_of(double mass, double k) {
  constexpr double kShort = 1 - 1e-6;
  if (k == 0) return 0;
  return mass / k < kShort ? kNan : k / mass;
}

struct LongSumOfDouble {
  VecD total{};
  KHOT_INLINE void add(VecD v) { total += v; }
  KHOT_INLINE void flush() {}
};

template <class R, class C>
class LossRow {
 public:
  LossRow(const Spec& spec, const C& F, const LossRows& rows, int64_t row, double share)
      : spec_(spec),
        F_(F),
        x_(rows.x(row)),
        target_(rows.target(row)),
        tau_(rows.tau(row)),
        t_(rows.threshold(row)),
        share_(static_cast<R>(share)),
        hi_(static_cast<R>(t_.hi)),
        lo_(static_cast<R>((t_.hi - hi_) + t_.lo)),
        scale_(static_cast<R>(1 / tau_)) {}

  double loss() const {
    const Sums s = sums();
    if (std::isnan(t_.hi) || std::isnan(share_)) return kNan;
    return s.misses > 0 ? kInfinity : tau_ * s.terms;
  }

  // In double alone: writes dL/dx, and returns dL/dtau. That is sum (omega*(z) + omega(T) - z F(z)), of
  // undecided entries.
  KHOT_APART double pull(double grad, double loss, void* grad_x) const {
    const bool anew = outweighs(loss), direct = x_.dtype == Dtype::kDouble;
    const Sums s = reduce<double, Sums>(
        x_, spec_.n, spec_.inside, [=, this](Sums& s, const double* p, int count, int64_t at) {
          double buffer[kBlock], results[kBlock];
          const double* const g = fetch(target_, at, count, buffer);
          double* const to = direct ? static_cast<double*>(grad_x) + at : results;
          VecD terms{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const Entry now = entry(x, beside(g, i, lanes));
            const VecD e = now.decided ? VecD{} : excess(now);
            terms += anew ? -rate(now) : e * now.z;
            store_beside(to, i, lanes, grad * e);
          });
          s.terms += sum<double>(terms);
          if (!direct) put(grad_x, x_.dtype, at, count, results);
        });
    return grad * ((anew ? 0 : loss / tau_) - s.terms);
  }

 private:
  using Total = std::conditional_t<sizeof(R) == 4, LongSum, LongSumOfDouble>;
  struct Sums {
    double terms = 0;
    bool misses = false;  // whether the target does not agree with a decided entry
    void operator+=(const Sums& o) { terms += o.terms, misses |= o.misses; }
  };
  struct Entry {
    Vec<R> z, T;     // z is 0 where the entry is decided
    Int<R> decided;  // by an infinite score, or as all are
  };

  // Whether a loss is so large beside dL/dtau that it takes the digits of that. That of floats has few.
  bool outweighs(double loss) const {
    return !(std::fabs(loss) < (x_.dtype == Dtype::kDouble ? 1e6 : 1e3) * tau_);
  }

  bool all_decided() const { return std::fabs(t_.hi) == kHuge; }

  KHOT_INLINE Entry entry(Vec<R> x, Vec<R> target) const {
    const Int<R> decided = all_decided() ? Int<R>{} == 0 : abs<R>(x) == kInf<R>;
    const Vec<R> z = ((x - hi_) - lo_) * scale_;
    const Vec<R> T = clamp_above<R>(target * share_, 1);  // a sum may miss k by rounding
    return {decided ? Vec<R>{} : z, T, decided};
  }

  // F(z) - T, also where both are next to 1.
  KHOT_INLINE VecD excess(const Entry& of) const {
    const IntD above = of.z > F_.median;
    const VecD tail = F_.template split<double>(of.z, above).tail;
    return above ? (1 - of.T) - tail : tail - of.T;
  }

  // omega*(z) + omega(T) - z F(z)
  KHOT_INLINE VecD rate(const Entry& of) const {
    const IntD above = of.z > 0;
    const VecD F = F_.template value<double>(of.z),
               tail = F_.template split<double>(of.z, of.z > F_.median).tail;
    const VecD rest = of.z > F_.median ? tail : 1 - F;
    const VecD own = F_.template surplus<double>(of.z) + potential(of.T) + (above ? of.z * rest : -of.z * F);
    return of.decided ? VecD{} : own;
  }

  // That of targets of 0 and 1 needs no logarithm, and no others come in float.
  KHOT_INLINE Vec<R> potential(Vec<R> T) const {
    if constexpr (sizeof(R) == 8) {
      if (any((IntF)((T > 0) & (T < 1)))) return F_.potential(T);
    }
    return T * static_cast<R>(F_.highest_potential());
  }

  KHOT_APART Sums sums() const {
    return reduce_beside<R, Sums>(
        x_, target_, spec_.n, spec_.inside, [this](Sums& s, const R* p, const R* g, int count) {
          const Vec<R> every = splat<R>(t_.hi < 0 ? 1 : 0);  // of those that are decided together
          Total terms;
          Int<R> misses{};
          auto add = [&](Vec<R> x, int i, int lanes) {
            const auto [z, T, decided] = entry(x, beside(g, i, lanes));
            const Vec<R> infinite = x > 0 ? splat<R>(1) : Vec<R>{};
            const Vec<R> off = T - (abs<R>(x) == kInf<R> ? infinite : every);
            misses |= decided & ~(abs<R>(off) < static_cast<R>(kClose));
            const Vec<R> linear = (z > 0 ? z : Vec<R>{}) - z * T;
            const Vec<R> own = linear + (F_.template surplus<R>(z) + potential(T));
            terms.add(decided ? Vec<R>{} : own);
          };
          vectors<R>(p, count, -kInf<R>, add, [&] { terms.flush(); });
          s.terms += sum<double>(terms.total);
          for (int i = 0; i < kWidth<R>; ++i) s.misses |= misses[i] != 0;
        });
  }

  static constexpr double kClose = 1e-6;  // a target within this of a decided entry agrees with it

  const Spec& spec_;
  const C& F_;
  Row x_, target_;
  double tau_;
  Threshold t_;
  R share_, hi_, lo_, scale_;
};

inline void fenchel_young(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    using C = std::remove_cv_t<decltype(same)>;
    for (int64_t i = begin; i < end; ++i) {
      const TargetSums target = sums_of(rows.target(i), spec.n, spec.inside);
      const double share = share_of(target.mass, rows.k(i));
      // under compact support the terms of decided entries have to cancel
      const bool in_float = C::full_support && float_carries(spec, same, rows.x(i).dtype, rows.tau(i));
      double loss = kNan;
      if (in_float && !target.soft && share == 1) loss = LossRow<float, C>(spec, same, rows, i, share).loss();
      // a score may be too many tau from t for float
      if (!std::isfinite(loss)) loss = LossRow<double, C>(spec, same, rows, i, share).loss();
      rows.put(i, loss, share);
    }
  });
}

inline void fenchel_young_backward(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    using C = std::remove_cv_t<decltype(same)>;
    for (int64_t i = begin; i < end; ++i) {
      const LossRow<double, C> row(spec, same, rows, i, rows.share(i));
      rows.put_tau(i, row.pull(rows.grad(i), rows.loss(i), rows.grad_x(i)));
    }
  });
}

}  // namespace khot::KHOT_ISA
