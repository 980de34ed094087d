// The entries of rank r and r + 1 of a row of finite floats, from counts at levels that lead there as if the
// entries were normal: where they are about that, in half the passes of a search by bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

class RankByCounts {
 public:
  // 1 < r < n - 1, where ranks count from 1 for the largest.
  RankByCounts(const float* entries, int n, int rank) : x_(entries), n_(n), rank_(rank) {}

  // Finds two levels, in [low, high) between which a few entries lie, among them both; false where that takes
  // too many passes.
  KHOT_APART bool bracket(double mean, double deviation) {
    const double n = n_, goal = rough_normal_quantile((rank_ + 0.5) / n);
    // a little beyond the rank, so that levels come to lie on both sides
    const double beyond = 6 / n / std::exp(-0.5 * goal * goal) * 2.5;
    at_low_ = n_;
    double t = mean - deviation * goal, slope = deviation;
    for (int pass = 0; pass < 10; ++pass) {
      const float level = static_cast<float>(t);
      if (!(level > low_ && level < high_)) return false;
      const int count = count_from(level);
      if (count == rank_) return part(level);
      const bool under = count > rank_;
      const double before = under ? static_cast<double>(high_) : static_cast<double>(low_);
      const int at_before = under ? at_high_ : at_low_;
      (under ? low_ : high_) = level, (under ? at_low_ : at_high_) = count;
      if (at_low_ - at_high_ <= kFew) return true;
      const double own = rough_normal_quantile(std::min(std::max(count / n, 0.25 / n), 1 - 0.25 / n));
      if (std::fabs(before) < 1e30 && at_before > 0 && at_before < n_) {  // the slope between two levels
        slope = (t - before) / (rough_normal_quantile(at_before / n) - own);
      }
      t += slope * (own - goal + (under ? beyond : -beyond));
      if (pass > 4 && bounded()) t = 0.5 * low_ + 0.5 * high_;
      if (!(t > low_ && t < high_)) {
        t = 0.5 * std::max<double>(low_, mean - 8 * deviation) +
            0.5 * std::min<double>(high_, mean + 8 * deviation);
      }
    }
    return false;
  }

  // How many entries lie between the levels or within reach of them.
  int within(double reach) const {
    const float bottom = low_ - static_cast<float>(reach), top = high_ + static_cast<float>(reach);
    IntF counts{};
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int, int) { counts -= (v >= bottom) & (v <= top); });
    return total(counts);
  }

  // Where k entries are larger, if those between the levels lie evenly; NaN where the levels have no end.
  double place(double k) const {
    if (!bounded()) return kNan;
    return high_ - (static_cast<double>(high_) - low_) * (k - at_high_) / (at_low_ - at_high_);
  }

  // The entries between the levels, per unit of a score.
  double density() const { return (at_low_ - at_high_) / (static_cast<double>(high_) - low_); }

  // Keeps the entries between the levels and within reach of them, in room for n/2 and a vector; how many
  // they are, also where that is more.
  KHOT_APART int keep(double reach, float* room) {
    low_ = std::max(low_, -std::numeric_limits<float>::max());
    const float bottom = low_ - static_cast<float>(reach), top = high_ + static_cast<float>(reach);
    const int most = n_ / 2;
    IntF over_top{};
    int kept = 0;
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int, int) {
      const IntF over = v > top;
      over_top -= over;
      int32_t* const to = reinterpret_cast<int32_t*>(room) + std::min(kept, most);
      kept += compress(to, (IntF)v, (v >= bottom) & ~over);
    });
    above_ = total(over_top);
    if (kept <= most) x_ = room, n_ = kept;
    return kept;
  }

  // Of the whole row, the entries that are larger than those that were kept.
  double above() const { return above_; }

  // The entries of both ranks; false where too many are equal.
  KHOT_APART bool neighbours(double& last, double& next) const {
    if (at_high_ == rank_) {
      last = high_, next = low_;
      return true;
    }
    alignas(KHOT_VECTOR_BYTES) float few[kFew + 2 * kWidth<float>];
    int size = 0;
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int, int) {
      size += compress(reinterpret_cast<int32_t*>(few) + size, (IntF)v, (v >= low_) & (v < high_));
    });
    const int place = rank_ - at_high_;
    if (place < 1 || place >= size || size > kFew) return false;
    store(few + size, splat(-kInf<float>));
    VecF least = splat(kInf<float>), next_least = least;
    for (int i = 0; i < size; i += kWidth<float>) {
      const VecF own = load(few + i);
      IntF larger{};
      for (int j = 0; j < size; ++j) larger -= few[j] > own;
      least = (larger < place) & (own < least) ? own : least;
      next_least = (larger < place + 1) & (own < next_least) ? own : next_least;
    }
    last = minimum<float>(least), next = minimum<float>(next_least);
    return true;
  }

 private:
  static constexpr int kFew = 48;

  // At a level between both ranks, the levels are their entries.
  KHOT_APART bool part(float level) {
    VecF up = splat(kInf<float>), down = -up;
    vectors<float>(x_, n_, kNan, [&](VecF v, int, int) {
      up = (v >= level) & (v < up) ? v : up;
      down = (v < level) & (v > down) ? v : down;
    });
    low_ = maximum<float>(down), high_ = minimum<float>(up);
    at_low_ = rank_ + 1, at_high_ = rank_;
    return true;
  }

  bool bounded() const { return low_ > -kInf<float> && high_ < kInf<float>; }

  static int total(IntF counts) {
    int result = 0;
    for (int i = 0; i < kWidth<float>; ++i) result += counts[i];
    return result;
  }

  KHOT_APART int count_from(float level) const {
    IntF counts{};
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int, int) { counts -= v >= level; });
    return total(counts);
  }

  const float* x_;
  int n_, rank_, at_low_ = 0, at_high_ = 0, above_ = 0;  // at: the entries from a level on
  float low_ = -kInf<float>, high_ = kInf<float>;
};

}  // namespace khot::KHOT_ISA
