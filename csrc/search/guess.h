// The first guess at a threshold, from the moments of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

constexpr double kHuge = std::numeric_limits<double>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Smaller tails are taken in logarithms: numbers below it have fewer digits.
constexpr double kTiny = std::numeric_limits<double>::min();

struct Statistics {
  double free = 0;    // the number of finite entries
  double pinned = 0;  // the number of entries that are +inf
  bool nan = false;
  // Of the finite entries. Before finish(), these are the sums of d and d^2 for d = x - shift.
  double mean = 0, variance = 0;
  void operator+=(const Statistics& o) {
    free += o.free, pinned += o.pinned, nan |= o.nan;
    mean += o.mean, variance += o.variance;
  }
  void finish(double shift) {
    const double n = std::max(free, 1.0), off = mean / n;
    variance = std::max(variance / n - off * off, 0.0);
    mean = shift + off;
  }
};

// The first finite entry of the first block, or 0. Deviations from it are summed for the variance: deviations
// from 0 would cancel where the mean is far from 0.
KHOT_APART inline float finite_entry(const Row& row, int64_t n) {
  float buffer[kBlock];
  const int count = static_cast<int>(std::min<int64_t>(n, kBlock));
  const float* p = fetch(row, 0, count, buffer);
  for (int i = 0; i < count; ++i) {
    if (std::isfinite(p[i])) return p[i];
  }
  return 0;
}

KHOT_APART inline Statistics statistics(const Row& row, int64_t n, const Parallel* inside) {
  const float shift = finite_entry(row, n);
  Statistics stats = reduce<float, Statistics>(
      row, n, inside, [shift](Statistics& sums, const float* p, int count, int64_t) {
        IntF finite_count{}, pinned_count{}, nan{};
        VecF total{}, squares{};
        vectors<float>(p, count, -kInf<float>, [&](VecF x, int, int) {
          const IntF finite = abs<float>(x) < kInf<float>;
          const VecF centred = finite ? x - shift : VecF{};
          finite_count -= finite;
          pinned_count -= (x == kInf<float>);
          nan |= (x != x);
          total += centred;
          squares += centred * centred;
        });
        for (int i = 0; i < kWidth<float>; ++i) {
          sums.free += static_cast<double>(finite_count[i]);
          sums.pinned += static_cast<double>(pinned_count[i]);
          sums.nan |= nan[i] != 0;
        }
        sums.mean += sum<float>(total);
        sums.variance += sum<float>(squares);
      });
  stats.finish(shift);
  return stats;
}

// k out of n and the quantiles that it stands for. Both are kept from one row to the next, which often asks
// for the same.
struct Goal {
  double k = -1, n = -1;
  double own = 0, normal = 0;  // F^-1(k/n) and Phi^-1(k/n), standardized to mean 0 and variance 1

  template <class C>
  KHOT_APART void set(double new_k, double new_n, const C& F) {
    if (new_k == k && new_n == n) return;
    k = new_k, n = new_n;
    const double share = std::min(std::max(k / n, kTiny), 1 - 1e-16);
    own = (F.icdf(share) - F.mean) / std::sqrt(F.variance);
    normal = normal_quantile(share);
  }
  // The threshold of a distribution that has the moments of the scores plus noise distributed as tau F.
  template <class C>
  KHOT_APART double guess(double mean, double variance, double tau, const C& F) const {
    const double noise = tau * tau * F.variance, total = noise + variance;
    const double quantile = normal + (own - normal) * (noise / total);
    return mean - tau * F.mean - quantile * std::sqrt(total);
  }
};

}  // namespace khot::KHOT_ISA
