// Rows in double, from a threshold that float has found: Newton's method with all digits of double. y is
// written by the pass that leaves a short step, and follows that step without another exponential.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/gap.h"

namespace khot::KHOT_ISA {

struct RootSums {
  double m = 0, tails = 0, f = 0;  // as OrdinarySums
  void operator+=(const RootSums& o) { m += o.m, tails += o.tails, f += o.f; }
};

// The sums at t, with a relative error of 1e-10 if kClose; y is written unless it is null.
template <bool kClose, class C>
RootSums root_sums(const Row& x, int64_t n, double tau, const C& F, const Parallel* inside, Threshold t,
                   double* y = nullptr) {
  const double scale = 1 / tau;
  return reduce<double, RootSums>(x, n, inside, [=](RootSums& sums, const double* p, int count, int64_t at) {
    VecD m{}, tails{}, f{};
    vectors<double>(p, count, -kInfinity, [&](VecD v, int i, int lanes) {
      const VecD z = ((v - t.hi) - t.lo) * scale;
      const IntD above = z > F.median;
      TailDensity<double> here;
      if constexpr (kClose) {
        here = F.split_close(z);
      } else {
        here = F.template split<double>(z, above);
      }
      m += above ? splat(1.0) : VecD{};
      tails += above ? -here.tail : here.tail;
      // what rounding leaves undecided at the end of a gap tells no slope
      if constexpr (!C::full_support) here.density = (z > 1e-6) & (z < 1 - 1e-6) ? here.density : VecD{};
      f += here.density;
      if (y != nullptr) store_beside(y + at, i, lanes, above ? 1 - here.tail : here.tail);
    });
    sums.m += sum<double>(m), sums.tails += sum<double>(tails), sums.f += sum<double>(f);
  });
}

template <class C>
class DoubleRow {
 public:
  DoubleRow(const Spec& spec, const C& F, const Row& x, double k, double tau)
      : spec_(spec), F_(F), x_(x), k_(k), tau_(tau), is_float_(x.dtype != Dtype::kDouble) {}

  // Returns whether t is now as near to the root as promised. Then out holds what is wanted.
  KHOT_APART bool finish(Threshold& t, void* out) const {
    double* const y = C::full_support && spec_.output == Output::kValue ? static_cast<double*>(out) : nullptr;
    // log y under compact support needs the digits of z, which is small where k is
    if (!C::full_support && spec_.output == Output::kLog && k_ < 1e-6) return false;
    for (int pass = 0; pass < (C::full_support ? kPasses : kCompactPasses); ++pass) {
      const RootSums s = sums(t, y);
      const bool decided = C::full_support ? s.f < kFaint : s.f == 0 && s.tails == 0;
      if (decided && s.m == k_) return balance<C>(x_, spec_.n, spec_.inside, tau_, t) && write(t, out);
      const double h = miss(s) / s.f;
      if (!(std::fabs(h) < 0.1) || !(s.f > (C::full_support ? kFaint : 1e-3))) return false;
      t.lo += h * tau_;
      if constexpr (C::full_support) {
        if (y != nullptr && std::fabs(h) < (s.f > 1e-2 ? kShort : kLast)) return follow(h, t, y);
      }
      if (std::fabs(h) > (is_float_ ? kLastOfFloat : kLast)) continue;
      return write(t, out);
    }
    return false;
  }

 private:
  RootSums sums(Threshold t, double* y) const {
    if constexpr (C::full_support) {
      if (is_float_) return root_sums<true>(x_, spec_.n, tau_, F_, spec_.inside, t);
    }
    return root_sums<false>(x_, spec_.n, tau_, F_, spec_.inside, t, y);
  }

  static constexpr int kPasses = 4, kCompactPasses = 6;
  // What is left after a step is its square; but compact support has kinks.
  static constexpr double kLast = C::full_support ? 2e-8 : 1e-12;
  static constexpr double kLastOfFloat = C::full_support ? 1e-5 : kLast;
  // After so short a step y follows, with a sum that tells what is left, unless little is undecided. After
  // 1000 times as much the error in y is 1e-7, and it falls at least with its second power. A normal tail at
  // z is off by (z h)^2, and z is 38 at most.
  static constexpr double kShort = C::density_from_value ? 1e-3 * C::last_step : 3e-6;

  double miss(const RootSums& s) const { return (s.m - k_) + s.tails; }

  bool write(Threshold t, void* out) const {
    if (spec_.output != Output::kThreshold) apply<double>(spec_, F_, x_, t, tau_, out);
    return true;
  }

  // Moves y by a step of h, which t has taken, by the midpoint rule, and by what is left of it.
  bool follow(double h, Threshold& t, double* y) const {
    const Row source = C::density_from_value ? Row{y, Dtype::kDouble, 1} : x_;
    const double scale = 1 / tau_;
    for (int pass = 0; pass < kPasses; ++pass) {
      const double hi = t.hi, middle = t.lo - 0.5 * h * tau_;
      const RootSums s = reduce<double, RootSums>(
          source, spec_.n, spec_.inside, [=, this](RootSums& sums, const double* p, int count, int64_t at) {
            VecD m{}, tails{}, f{};
            vectors<double>(p, count, C::density_from_value ? 0 : -kInfinity, [&](VecD v, int i, int lanes) {
              VecD now;
              if constexpr (C::density_from_value) {
                now = v - h * C::density_of(v - 0.5 * h * C::density_of(v));
                f += C::density_of(now);
              } else {
                const VecD density =
                    exp_minus<double>(-F_.template log_density<double>(((v - hi) - middle) * scale));
                now = beside(y + at, i, lanes) - h * density;
                f += density;
              }
              const VecD one = now > 0.5 ? splat(1.0) : VecD{};
              m += one, tails += now - one;
              store_beside(y + at, i, lanes, now);
            });
            sums.m += sum<double>(m), sums.tails += sum<double>(tails), sums.f += sum<double>(f);
          });
      // As near as rounding lets it be: designs take probabilities whose sum is an integer to a few digits.
      if (std::fabs(miss(s)) <= 0x1p-50 * std::max(s.f, 1.0) + static_cast<double>(spec_.n) * 0x1p-54)
        return true;
      h = miss(s) / s.f;
      t.lo += h * tau_;
    }
    return false;
  }

  const Spec& spec_;
  const C& F_;
  Row x_;
  double k_, tau_;
  bool is_float_;
};

// Whether float may look for the threshold of such rows.
template <class C>
bool float_may_search(const C& F, double tau) {
  return F.fits_float && tau > 1e-25 && tau < 1e25;
}

}  // namespace khot::KHOT_ISA
