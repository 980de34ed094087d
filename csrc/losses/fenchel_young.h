// The Fenchel-Young loss of a soft top-k, tau sum (omega*(z) + omega(T) - z T) with z = (x - t)/tau, from its
// threshold t, and its gradients (khot/_kernels/reference/fenchel_young.py). Those of targets of 0 and 1 that
// sum to k, whose terms do not cancel, in float where that carries the row, the rest in double.
#pragma once

#include <cmath>
#include <type_traits>

#include "cdfs.h"
#include "simd/passes.h"
#include "soft_topk/apply.h"

namespace khot::KHOT_ISA {

inline double mass_of(const Row& target, int64_t n, const Parallel* inside) {
  return reduce<double, double>(target, n, inside, [](double& sum_of, const double* p, int count, int64_t) {
    VecD total{};
    vectors<double>(p, count, 0, [&](VecD v, int, int) { total += v; });
    sum_of += sum<double>(total);
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

  // In float NaN where the targets are not of 0 and 1 or do not sum to k.
  double loss(double k) const {
    const Sums s = sums();
    if (std::isnan(t_.hi) || std::isnan(share_) || (kFloat && (s.soft || s.mass != k))) return kNan;
    return s.misses > 0 ? kInfinity : tau_ * s.terms;
  }

  // Writes dL/dx, and returns dL/dtau, in float NaN where the targets are not of 0 and 1. That is the sum of
  // omega*(z) + omega(T) - z F(z) of undecided entries, or what e z, with e = F(z) - T, add up to, less than
  // the loss.
  KHOT_APART double pull(double grad, double loss, void* grad_x) const {
    constexpr Dtype own = kFloat ? Dtype::kFloat : Dtype::kDouble;
    const bool anew = kFloat || outweighs(loss), direct = x_.dtype == own;
    const R factor = static_cast<R>(grad);
    const Sums s =
        reduce<R, Sums>(x_, spec_.n, spec_.inside, [=, this](Sums& s, const R* p, int count, int64_t at) {
          R buffer[kBlock], results[kBlock];
          const R* const g = fetch(target_, at, count, buffer);
          R* const to = direct ? static_cast<R*>(grad_x) + at : results;
          Total terms;
          Int<R> soft{};
          auto add = [&](Vec<R> x, int i, int lanes) {
            const Entry now = entry(x, beside(g, i, lanes));
            const Vec<R> e = now.decided ? Vec<R>{} : excess(now);
            terms.add(anew ? -rate(now) : e * now.z);
            if constexpr (kFloat) soft |= (now.T != 0) & (now.T != 1);
            store_beside(to, i, lanes, factor * e);
          };
          vectors<R>(p, count, -kInf<R>, add, [&] { terms.flush(); });
          s.terms += sum<double>(terms.total), s.soft |= any((IntF)soft);
          if (!direct) put(grad_x, x_.dtype, at, count, results);
        });
    if (s.soft) return kNan;
    return grad * ((anew ? 0 : loss / tau_) - s.terms);
  }

 private:
  static constexpr bool kFloat = sizeof(R) == 4;
  using Total = std::conditional_t<kFloat, LongSum, LongSumOfDouble>;
  struct Sums {
    double terms = 0, mass = 0;  // mass, in float: of the target
    bool soft = false;           // in float: whether a target is neither 0 nor 1
    bool misses = false;         // whether the target does not agree with a decided entry
    void operator+=(const Sums& o) { terms += o.terms, mass += o.mass, soft |= o.soft, misses |= o.misses; }
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
  KHOT_INLINE Vec<R> excess(const Entry& of) const {
    const Int<R> above = of.z > static_cast<R>(F_.median);
    const Vec<R> tail = F_.template split<R>(of.z, above).tail;
    return above ? (1 - of.T) - tail : tail - of.T;
  }

  // omega*(z) + omega(T) - z F(z)
  KHOT_INLINE Vec<R> rate(const Entry& of) const {
    const Int<R> above = of.z > static_cast<R>(F_.median);
    const Vec<R> tail = F_.template split<R>(of.z, above).tail, rest = above ? tail : 1 - tail;
    const Vec<R> own =
        F_.template surplus<R>(of.z) + potential(of.T) + (of.z > 0 ? of.z * rest : -of.z * tail);
    return of.decided ? Vec<R>{} : own;
  }

  // That of targets of 0 and 1 needs no logarithm, and no others come in float.
  KHOT_INLINE Vec<R> potential(Vec<R> T) const {
    if constexpr (!kFloat) {
      if (any((IntF)((T > 0) & (T < 1)))) return F_.potential(T);
    }
    return T * static_cast<R>(F_.highest_potential());
  }

  KHOT_APART Sums sums() const {
    return reduce_beside<R, Sums>(
        x_, target_, spec_.n, spec_.inside, [this](Sums& s, const R* p, const R* g, int count) {
          const Vec<R> every = splat<R>(t_.hi < 0 ? 1 : 0);  // of those that are decided together
          Total terms;
          Vec<R> mass{};
          Int<R> misses{}, soft{};
          auto add = [&](Vec<R> x, int i, int lanes) {
            const auto [z, T, decided] = entry(x, beside(g, i, lanes));
            const Vec<R> infinite = x > 0 ? splat<R>(1) : Vec<R>{};
            const Vec<R> off = T - (abs<R>(x) == kInf<R> ? infinite : every);
            misses |= decided & ~(abs<R>(off) < static_cast<R>(kClose));
            const Vec<R> linear = (z > 0 ? z : Vec<R>{}) - z * T;
            const Vec<R> own = linear + (F_.template surplus<R>(z) + potential(T));
            terms.add(decided ? Vec<R>{} : own);
            if constexpr (kFloat) mass += T, soft |= (T != 0) & (T != 1);
          };
          vectors<R>(p, count, -kInf<R>, add, [&] { terms.flush(); });
          s.terms += sum<double>(terms.total), s.mass += sum<R>(mass);
          s.misses |= any((IntF)misses), s.soft |= any((IntF)soft);
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

// Calls row.pull or row.loss by answer(row), with a share of 1, in float where that carries the row, and
// otherwise or where that has no answer in double, with the given share.
template <class C, class Share, class Answer>
double in_float_or_double(const Spec& spec, const C& F, const LossRows& rows, int64_t i, bool whole,
                          Share share, Answer answer) {
  // under compact support the terms of decided entries have to cancel
  if constexpr (C::full_support) {
    if (whole && float_carries(spec, F, rows.x(i).dtype, rows.tau(i))) {
      const double found = answer(LossRow<float, C>(spec, F, rows, i, 1));
      if (std::isfinite(found)) return found;
    }
  }
  return answer(LossRow<double, C>(spec, F, rows, i, share()));
}

inline void fenchel_young(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    for (int64_t i = begin; i < end; ++i) {
      const double k = rows.k(i);
      double share = 1;
      const double loss = in_float_or_double(
          spec, same, rows, i, k > 0,
          [&] { return share = share_of(mass_of(rows.target(i), spec.n, spec.inside), k); },
          [&](const auto& row) { return row.loss(k); });
      rows.put(i, loss, share);
    }
  });
}

inline void fenchel_young_backward(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    for (int64_t i = begin; i < end; ++i) {
      const double share = rows.share(i);
      const double grad_tau = in_float_or_double(
          spec, same, rows, i, share == 1, [&] { return share; },
          [&](const auto& row) { return row.pull(rows.grad(i), rows.loss(i), rows.grad_x(i)); });
      rows.put_tau(i, grad_tau);
    }
  });
}

}  // namespace khot::KHOT_ISA
