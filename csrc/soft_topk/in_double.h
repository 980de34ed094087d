// Rows in double, from a threshold that float has found: Newton's method with all digits of double. y is
// written by the pass that leaves a short step, and follows that step without another exponential.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/polish.h"

namespace khot::KHOT_ISA {

template <class C>
class DoubleRow {
 public:
  DoubleRow(const Spec& spec, const C& F, const Row& x, double k, double tau)
      : spec_(spec), F_(F), x_(x), k_(k), few_(std::min(k, static_cast<double>(spec.n) - k)), tau_(tau) {}

  // Whether float may look for the threshold of such rows.
  static bool suits(const C& F, double tau) {
    return C::full_support && F.fits_float && tau > 1e-25 && tau < 1e25;
  }

  // Returns whether t is now as near to the root as promised. Then out holds what is wanted.
  KHOT_APART bool finish(Threshold& t, void* out) const {
    double* const y =
        C::density_from_value && spec_.output == Output::kValue ? static_cast<double*>(out) : nullptr;
    for (int pass = 0; pass < kPasses; ++pass) {
      const RootSums s = at(t, y);
      const double h = miss(s) / s.f;
      if (!(std::fabs(h) < 0.1) || !(s.f > 1e-2 * std::max(few_, 1.0))) return false;
      t.lo += h * tau_;
      if constexpr (C::density_from_value) {
        // After 1000 times this step the error in y is 1e-7, and it falls at least with its second power.
        if (y != nullptr && std::fabs(h) < 1e-3 * C::last_step) return follow(h, t, y);
      }
      if (std::fabs(h) > 2e-8) continue;  // what is left is its square
      if (spec_.output != Output::kThreshold) apply<double>(spec_, F_, x_, t, tau_, out);
      return true;
    }
    return false;
  }

 private:
  static constexpr int kPasses = 4;

  double miss(const RootSums& s) const { return (s.m - k_) + s.tails; }

  // The sums at t; y is written unless it is null.
  RootSums at(Threshold t, double* y) const {
    const double scale = 1 / tau_;
    const C F = F_;
    return reduce<double, RootSums>(
        x_, spec_.n, spec_.inside, [=](RootSums& sums, const double* p, int count, int64_t at) {
          VecD m{}, tails{}, f{};
          vectors<double>(p, count, -kInfinity, [&](VecD v, int i, int lanes) {
            const VecD z = ((v - t.hi) - t.lo) * scale;
            const IntD above = z > 0;
            const auto [tail, density] = F.template split<double>(z, above);
            m += above ? splat(1.0) : VecD{}, tails += above ? -tail : tail, f += density;
            if (y != nullptr) store_beside(y + at, i, lanes, above ? 1 - tail : tail);
          });
          sums.m += sum<double>(m), sums.tails += sum<double>(tails), sums.f += sum<double>(f);
        });
  }

  // Moves y by a step of h, by the midpoint rule, and by what is left of it.
  bool follow(double h, Threshold& t, double* y) const {
    for (int pass = 0; pass < kPasses; ++pass) {
      const RootSums s = reduce<double, RootSums>(
          Row{y, Dtype::kDouble, 1}, spec_.n, spec_.inside,
          [=](RootSums& sums, const double* p, int count, int64_t at) {
            VecD m{}, tails{}, f{};
            vectors<double>(p, count, 0, [&](VecD before, int i, int lanes) {
              const VecD middle = before - 0.5 * h * C::density_of(before);
              const VecD now = before - h * C::density_of(middle), one = now > 0.5 ? splat(1.0) : VecD{};
              m += one, tails += now - one, f += C::density_of(now);
              store_beside(y + at, i, lanes, now);
            });
            sums.m += sum<double>(m), sums.tails += sum<double>(tails), sums.f += sum<double>(f);
          });
      // As near as rounding lets it be: designs take probabilities whose sum is an integer to a few digits.
      if (std::fabs(miss(s)) <= 0x1p-50 * std::max(few_, 1.0) + static_cast<double>(spec_.n) * 0x1p-54)
        return true;
      h = miss(s) / s.f;
      t.lo += h * tau_;
    }
    return false;
  }

  const Spec& spec_;
  const C& F_;
  Row x_;
  double k_, few_, tau_;
};

}  // namespace khot::KHOT_ISA
