// Rows in double, from a threshold that float has found: Newton's method with all digits of double. y is
// written by the pass that leaves a short step, and follows that step without another exponential.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/polish.h"

namespace khot::KHOT_ISA {

struct Edges {  // the nearest entry on each side of t, minus hi
  double up = kInfinity, down = -kInfinity;
  void operator+=(const Edges& o) { up = std::min(up, o.up), down = std::max(down, o.down); }
};

inline Edges edges_around(const Row& x, int64_t n, const Parallel* inside, Threshold t) {
  return reduce<double, Edges>(x, n, inside, [=](Edges& e, const double* p, int count, int64_t) {
    VecD up = splat(kInfinity), down = splat(-kInfinity);
    vectors<double>(p, count, kNan, [&](VecD v, int, int) {
      const VecD offset = v - t.hi;
      up = (offset > t.lo) & (offset < up) ? offset : up;
      down = (offset <= t.lo) & (offset > down) ? offset : down;
    });
    e += {-maximum<double>(-up), maximum<double>(down)};
  });
}

template <class C>
class DoubleRow {
 public:
  DoubleRow(const Spec& spec, const C& F, const Row& x, double k, double tau)
      : spec_(spec), F_(F), x_(x), k_(k), few_(std::min(k, static_cast<double>(spec.n) - k)), tau_(tau) {}

  // Returns whether t is now as near to the root as promised. Then out holds what is wanted.
  KHOT_APART bool finish(Threshold& t, void* out) const {
    double* const y =
        C::density_from_value && spec_.output == Output::kValue ? static_cast<double*>(out) : nullptr;
    // log y under compact support needs the digits of z, which is small where k is
    if (!C::full_support && spec_.output == Output::kLog && k_ < 1e-6) return false;
    for (int pass = 0; pass < (C::full_support ? kPasses : kCompactPasses); ++pass) {
      const RootSums s = root_sums<false>(x_, spec_.n, tau_, F_, spec_.inside, t, y);
      if (!C::full_support && s.f == 0 && s.tails == 0 && s.m == k_) return take_middle(t, out);
      const double h = miss(s) / s.f;
      // Decided entries round the sums of tails, but not those under compact support.
      if (!(std::fabs(h) < 0.1) || !(s.f > (C::full_support ? 1e-2 * std::max(few_, 1.0) : 1e-3)))
        return false;
      t.lo += h * tau_;
      if constexpr (C::density_from_value) {
        // After 1000 times this step the error in y is 1e-7, and it falls at least with its second power.
        if (y != nullptr && std::fabs(h) < 1e-3 * C::last_step) return follow(h, t, y);
      }
      // What is left is its square; but compact support has kinks.
      if (std::fabs(h) > (C::full_support ? 2e-8 : 1e-12)) continue;
      return write(t, out);
    }
    return false;
  }

 private:
  static constexpr int kPasses = 4, kCompactPasses = 6;

  double miss(const RootSums& s) const { return (s.m - k_) + s.tails; }

  bool write(Threshold t, void* out) const {
    if (spec_.output != Output::kThreshold) apply<double>(spec_, F_, x_, t, tau_, out);
    return true;
  }

  // In a gap of compact support the threshold is its middle.
  bool take_middle(Threshold& t, void* out) const {
    const Edges gap = edges_around(x_, spec_.n, spec_.inside, t);
    if (!(gap.up - t.lo > 0.5 * tau_)) return false;  // an entry is undecided
    t.lo = 0.5 * gap.up + 0.5 * gap.down - 0.5 * tau_;
    return std::fabs(t.lo) < kInfinity && write(t, out);
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

// Whether float may look for the threshold of such rows.
template <class C>
bool float_may_search(const C& F, double tau) {
  return F.fits_float && tau > 1e-25 && tau < 1e25;
}

// Gives the threshold the digits that are wanted of it, and writes what is wanted there. The slope is that of
// the count at t. Returns false where t was too far from the root.
template <class C>
bool finish(const Spec& spec, const C& F, const Row& x, double k, double tau, double slope, Threshold& t,
            void* out) {
  if constexpr (C::full_support) {
    if (spec.output == Output::kThreshold && x.dtype != Dtype::kDouble)
      return polish(x, spec.n, tau, F, spec.inside, k, slope, t);
  }
  return DoubleRow<C>(spec, F, x, k, tau).finish(t, out);
}

}  // namespace khot::KHOT_ISA
