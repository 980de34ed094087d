// The Fenchel-Young loss of a soft top-k, tau sum (omega*(z) + omega(T) - z T) with z = (x - t)/tau, from its
// threshold t, and its gradients (khot/_kernels/reference/fenchel_young.py), in double.
#pragma once

#include <cmath>

#include "cdfs.h"
#include "search/guess.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

struct LossTotal {
  double sum = 0;
  void operator+=(const LossTotal& o) { sum += o.sum; }
};

// What a target is multiplied by so that it sums to k; NaN where it sums to less.
inline double share_of(const Row& target, int64_t n, const Parallel* inside, double k) {
  constexpr double kShort = 1 - 1e-6;
  if (k == 0) return 0;
  const double mass =
      reduce<double, LossTotal>(target, n, inside,
                                [](LossTotal& s, const double* p, int count, int64_t) {
                                  VecD total{};
                                  vectors<double>(p, count, 0, [&](VecD v, int, int) { total += v; });
                                  s.sum += sum<double>(total);
                                })
          .sum /
      k;
  return mass < kShort ? kNan : 1 / mass;
}

template <class C>
class LossRow {
 public:
  LossRow(const Spec& spec, const C& F, const LossRows& rows, int64_t row, double share)
      : spec_(spec),
        F_(F),
        x_(rows.x(row)),
        target_(rows.target(row)),
        share_(share),
        tau_(rows.tau(row)),
        t_(rows.threshold(row)) {}

  double loss() const {
    const Sums s = sums();
    if (std::isnan(t_.hi) || std::isnan(share_)) return kNan;
    return s.misses > 0 ? kInfinity : tau_ * s.terms;
  }

  // Writes dL/dx, and returns dL/dtau. That is sum (omega*(z) + omega(T) - z F(z)), of undecided entries.
  KHOT_APART double pull(double grad, double loss, void* grad_x) const {
    // where the loss is many times that, it would take its digits
    const bool anew = !(std::fabs(loss) < 1e6 * tau_);
    const bool direct = x_.dtype == Dtype::kDouble;
    const LossTotal s = reduce<double, LossTotal>(
        x_, spec_.n, spec_.inside, [=, this](LossTotal& s, const double* p, int count, int64_t at) {
          double buffer[kBlock], results[kBlock];
          const double* const g = fetch(target_, at, count, buffer);
          double* const to = direct ? static_cast<double*>(grad_x) + at : results;
          VecD pulls{}, rates{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const Entry now = entry(x, beside(g, i, lanes));
            const VecD e = now.decided ? VecD{} : F_.template value<double>(now.z) - now.T;
            pulls += e * now.z;
            if (anew) rates += rate(now);
            store_beside(to, i, lanes, grad * e);
          });
          s.sum += anew ? -sum<double>(rates) : sum<double>(pulls);
          if (!direct) put(grad_x, x_.dtype, at, count, results);
        });
    return grad * ((anew ? 0 : loss / tau_) - s.sum);
  }

 private:
  struct Sums {
    double terms = 0, misses = 0;  // misses: the decided entries with which the target does not agree
    void operator+=(const Sums& o) { terms += o.terms, misses += o.misses; }
  };
  struct Entry {
    VecD z, T;     // z is 0 where the entry is decided
    IntD decided;  // by an infinite score, or as all are
  };

  bool all_decided() const { return std::fabs(t_.hi) == kHuge; }

  KHOT_INLINE Entry entry(VecD x, VecD target) const {
    const IntD decided = all_decided() ? IntD{} == 0 : abs<double>(x) == kInfinity;
    const VecD z = ((x - t_.hi) - t_.lo) * (1 / tau_);
    const VecD T = clamp_above<double>(target * share_, 1);  // a sum may miss k by rounding
    return {decided ? VecD{} : z, T, decided};
  }

  // omega*(z) + omega(T) - z F(z)
  KHOT_INLINE VecD rate(const Entry& of) const {
    const IntD above = of.z > 0;
    const VecD F = F_.template value<double>(of.z),
               tail = F_.template split<double>(of.z, of.z > F_.median).tail;
    const VecD rest = of.z > F_.median ? tail : 1 - F;
    const VecD own = F_.surplus(of.z) + potential(of.T) + (above ? of.z * rest : -of.z * F);
    return of.decided ? VecD{} : own;
  }

  // That of targets of 0 and 1 needs no logarithm.
  KHOT_INLINE VecD potential(VecD T) const {
    const bool soft = any((IntF)((T > 0) & (T < 1)));
    return soft ? F_.potential(T) : T * F_.highest_potential();
  }

  KHOT_APART Sums sums() const {
    return reduce_beside<double, Sums>(
        x_, target_, spec_.n, spec_.inside, [this](Sums& s, const double* p, const double* g, int count) {
          const double every = t_.hi < 0 ? 1 : 0;  // of those that are decided together
          VecD terms{}, misses{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const auto [z, T, decided] = entry(x, beside(g, i, lanes));
            const VecD infinite = x > 0 ? splat(1.0) : VecD{};
            const VecD off = T - (abs<double>(x) == kInfinity ? infinite : splat(every));
            misses += decided & ~(abs<double>(off) < kClose) ? splat(1.0) : VecD{};
            const VecD own = ((z > 0 ? z : VecD{}) - z * T) + (F_.surplus(z) + potential(T));
            terms += decided ? VecD{} : own;
          });
          s.terms += sum<double>(terms), s.misses += sum<double>(misses);
        });
  }

  static constexpr double kClose = 1e-6;  // a target within this of a decided entry agrees with it

  const Spec& spec_;
  const C& F_;
  Row x_, target_;
  double share_, tau_;
  Threshold t_;
};

inline void fenchel_young(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    for (int64_t i = begin; i < end; ++i) {
      const double share = share_of(rows.target(i), spec.n, spec.inside, rows.k(i));
      rows.put(i, LossRow(spec, same, rows, i, share).loss(), share);
    }
  });
}

inline void fenchel_young_backward(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    for (int64_t i = begin; i < end; ++i) {
      const LossRow row(spec, same, rows, i, rows.share(i));
      rows.put_tau(i, row.pull(rows.grad(i), rows.loss(i), rows.grad_x(i)));
    }
  });
}

}  // namespace khot::KHOT_ISA
