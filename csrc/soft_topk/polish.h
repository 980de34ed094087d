// The threshold itself to within about 1e-10 tau, from one that float carries: Newton's method in double, of
// which one step is mostly enough. The slope of the count is known from the search in float.
#pragma once

#include <cmath>

#include "search/guess.h"
#include "soft_topk/gap.h"

namespace khot::KHOT_ISA {

struct RootSums {
  double m = 0, tails = 0, f = 0;  // as OrdinarySums
  void operator+=(const RootSums& o) { m += o.m, tails += o.tails, f += o.f; }
};

// The sums at t, for full support with a relative error of 1e-10 if `close`; y is written unless it is null.
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

struct CloseCount {
  double sum = 0;
  void operator+=(const CloseCount& o) { sum += o.sum; }
};

// The sum of F at t. It has no more digits than double has of it and of x/tau, so that most entries must be
// undecided and near 0.
template <class C>
double close_count(const Row& x, int64_t n, double tau, const Parallel* inside, Threshold t) {
  constexpr double kEnd = 400;
  const double scale = kLog2E / tau, shift = t.hi * scale + t.lo * scale;
  auto exponent = [=](VecD v) {
    return clamp_above<double>(clamp_below<double>(shift - v * scale, -kEnd), kEnd);
  };
  auto block = [=](CloseCount& sums, const float* p, int count, int64_t) {
    VecD total{};
    vectors<float>(p, count, -kInf<float>, [&](VecF v, int, int) {
      VecD low, high;
      halves(v, low, high);
      total += C::two_values_close(exponent(low), exponent(high));
    });
    sums.sum += sum<double>(total);
  };
  return reduce<float, CloseCount>(x, n, inside, block).sum;
}

// Returns whether t is now as near to the root as promised. The slope is that of the count at t.
template <class C>
bool polish(const Row& x, int64_t n, double tau, const C& F, const Parallel* inside, double k, double slope,
            Threshold& t) {
  if constexpr (C::value_from_odds) {
    const bool suits = slope > 1e-5 * static_cast<double>(n) && std::fabs(t.hi) < 1e5 * tau;
    for (int pass = 0; suits && pass < 3; ++pass) {
      const double h = (close_count<C>(x, n, tau, inside, t) - k) / slope;
      if (!(std::fabs(h) < 0.1)) return false;
      t.lo += h * tau;
      // What is left is of the size of h^2, and of h times the relative error of the slope.
      if (std::fabs(h) < 3e-6) return true;
    }
  }
  for (int pass = 0; pass < 3; ++pass) {
    const RootSums s = root_sums<true>(x, n, tau, F, inside, t);
    if (s.f < kFaint) return s.m == k && balance<C>(x, n, inside, tau, t);
    const double h = ((s.m - k) + s.tails) / s.f;
    if (!(std::fabs(h) < 0.1)) return false;
    t.lo += h * tau;
    // C'' is at most of the size of C', so that the error left is of the size of h^2.
    if (std::fabs(h) < 1e-5) return true;
  }
  return false;
}

}  // namespace khot::KHOT_ISA
