// Top-k in magnitude for p = 2 and 4/3, of float32 and half precision: the search of search/search.h for
// gamma in float, and its last steps and y in double.
//
// gamma is the root of H(gamma) = k, where H is the sum over the row of q^e clipped to [0, 1]
// (selection/pooled.h). So H is a soft count whose scale depends on gamma, and the k-th largest entry is not
// needed. Rows that the search does not suit are given back, and selection/magnitude.h takes them.
#pragma once

#include <algorithm>
#include <cmath>

#include "search/guard.h"
#include "search/search.h"
#include "selection/magnitude_passes.h"

namespace khot::KHOT_ISA {

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

// The rows in a search for gamma in float, as find() asks for them. They are a MagnitudeRow or a
// MagnitudeTile, and what is computed between passes is the same, with one row per lane.
template <int e, class Rows>
class RampSearch {
 public:
  using Arithmetic = LaneArithmetic;
  using Sums = RampSums;
  static constexpr int kTrials = 24;
  static constexpr bool kStores = false;
  static constexpr bool stores() { return kStores; }

  VecF gamma, decline;  // decline: an estimate of -d log H/d gamma
  IntF good, gap{};     // gap: there may be no block

  // gamma lies between 0 and high. With `rough` the entries are a sample.
  KHOT_INLINE RampSearch(const Rows& rows, VecF k, VecF tau, VecF gamma, VecF decline, IntF good, VecF high,
                         bool rough)
      : gamma(gamma),
        decline(decline),
        good(good),
        rows_(rows),
        k_(k),
        tau_(tau),
        rough_(rough),
        pending_(good),
        between_(VecF{}, high),
        reach_(kTrust * gamma) {}

  KHOT_INLINE RampSums evaluate() {
    width_ = tau_ * root<e>(gamma);
    return rows_.run(RampPass<e>{gamma, inverse(width_)});
  }

  // Rows that are done do not move.
  KHOT_INLINE VecF step(const RampSums& sums) {
    const VecF miss = (sums.alone - k_) + sums.value, count = sums.alone + sums.value;
    between_.add(gamma, miss);
    // -d log H/d gamma here and, from the second pass on, between this gamma and the one before. Where the
    // ramp is so narrow that few entries are on it, the latter tells more.
    const VecF slope = static_cast<float>(e) * sums.slope / width_;
    const VecF here = (slope + sums.value / gamma) / count;
    const VecF secant = 2 * abs<float>(count - before_) / ((count + before_) * reach_);
    decline = before_ >= 0 ? secant : decline;
    decline = (here * width_ + decline * reach_) / (width_ + reach_);
    before_ = count;
    // Newton's step: for log H, with 2 (x - 1)/(x + 1) for log x, where the ramp is narrow, and for
    // gamma (k - H) where it is wide. These are nearly linear there.
    const VecF left = k_ - sums.alone;
    const VecF narrow_step = 2 * miss / ((count + k_) * decline);
    const VecF wide_step = gamma * miss / (left + gamma * slope);
    const VecF trial = gamma + ((width_ > gamma) & (left > 0) ? wide_step : narrow_step);
    const VecF middle = between_.high < kInf<float> ? between_.middle() : 2 * gamma;
    // No entry is in the block, or those that are in it are about to leave it: there may be no block.
    const IntF empty =
        ((sums.alone == k_) & (sums.value < kFew)) |
        ((abs<float>(sums.alone + sums.slope - k_) < kFew) & (sums.value > (1 - kFew) * sums.slope));
    gap = pending_ ? empty : gap;
    pending_ &= ~gap;
    // Close to the root, the sign of the miss is only rounding, and the bracket does not count.
    const VecF near = rough_ ? kRough * gamma : kNear * (width_ < gamma ? width_ : gamma);
    const IntF bisects = between_.bisects(trial, miss) & ~(abs<float>(trial - gamma) <= near);
    const VecF h = (bisects ? middle : trial) - gamma;
    reach_ = abs<float>(h);
    const VecF taken = pending_ ? h : VecF{};
    pending_ &= ~(reach_ <= near);
    return taken;
  }

  KHOT_INLINE void move(VecF h) { gamma += h; }
  KHOT_INLINE IntF goes_on(VecF /*h*/) const { return pending_; }

  // Whether the digits of float tell where the ramp is.
  KHOT_INLINE IntF told() const { return width_ > 1e-4f * gamma; }

 private:
  // So near, in W and in gamma, Newton's step is the last one in float.
  static constexpr float kNear = 1e-3f;
  static constexpr float kRough = 3e-3f;
  // The first estimate of the decline of log H, from elsewhere, counts as much as a ramp of this width, in
  // gamma.
  static constexpr float kTrust = 0.02f;
  static constexpr float kFew =
      1e-3f;  // a block whose terms q^e sum to less, or miss their number by less, is empty

  const Rows& rows_;
  VecF k_, tau_;
  bool rough_;
  IntF pending_;
  Enclosure<LaneArithmetic> between_;
  VecF width_{}, reach_, before_ = splat(-1.0f);  // W, and the step and the count of the trial before
};

// From a guess to y.
template <int e, class Rows>
class MagnitudeSearch {
 public:
  static constexpr int width = kWidth<float>;

  // n: the number of entries of each row.
  MagnitudeSearch(const Rows& rows, int64_t n) : rows_(rows), n_(static_cast<double>(n)) {}

  // Lane j is a row with this k and tau.
  void set(int j, double k, double tau, MagnitudeGoal& goal) {
    k_.set(j, k), tau_.set(j, tau);
    good_[j] = k > 0 && k < n_ && tau > 1e-5 && tau < 1e5 ? -1 : 0;
    goal.set(good_[j] ? k : 1, n_);
    quantile_[j] = static_cast<float>(goal.quantile), hazard_[j] = static_cast<float>(goal.hazard);
    share_[j] = static_cast<float>(goal.k / n_);
  }

  // Finds gamma to about 1e-5 of the width of the ramp or, where the entries are a sample, as well as they
  // tell.
  void approach(bool rough = false) {
    const VecF mean_square = rows_.run(SquaresPass()) / static_cast<float>(n_);
    good_ &= (mean_square > 1e-30f) & (mean_square < 1e30f);
    const VecF size = square_root(good_ ? mean_square : splat(1.0f));
    decline_ = hazard_ / size;
    guess(size * quantile_, decline_);
    // By Chebyshev's inequality, no k entries are above this.
    search(1.001f * size / square_root(share_), rough);
  }

  // The same from the gamma of a sample.
  void approach_from(const MagnitudeSearch& sample) {
    gamma_ = sample.gamma_, decline_ = sample.decline_;
    good_ &= sample.good_;
    search(splat(kInf<float>), false);
  }

  // Writes y and returns which rows have it. The others have to be solved otherwise.
  IntF finish() {
    if (!any(good_)) return good_;
    gamma_ = good_ ? gamma_ : splat(1.0f);
    hi_ = widen(gamma_), lo_ = {};
    if (any(good_ & gap_)) part();
    const IntF pooled = good_ & ~gap_;
    CloseSums expected{k_};
    IntF wrong{};
    for (int round = 0; round < kRounds; ++round) {
      const IntF far = any(pooled) ? pooled & refine(expected) : pooled;
      if (any(far) && round + 1 < kRounds) continue;
      const CloseSums found = rows_.write(ClosePass<e>{Pooled<e>(hi_, lo_, tau_)});
      // Where an entry has moved into the block or out of it, gamma was that of another block.
      Doubles moved = abs(found.alone - expected.alone);
      if (e == 1) moved += abs(found.inside - expected.inside);
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
  // So near it is the last one in double: its error is about the square of this. For e = 1 there is none, as
  // long as no entry moves into the block or out of it.
  static constexpr double kClose = e == 1 ? 1e-3 : 3e-7;
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

  void search(VecF high, bool rough) {
    if (!any(good_)) return;
    RampSearch<e, Rows> ramp(rows_, narrow(k_), narrow(tau_), gamma_, decline_, good_, high, rough);
    find(ramp);
    gamma_ = ramp.gamma, decline_ = ramp.decline, gap_ = ramp.gap;
    good_ = rough ? ramp.good : ramp.good & (ramp.gap | ramp.told());
  }

  // Where no entry is pooled, gamma is in the middle between the last entry that is selected and the next
  // one.
  void part() {
    const GapPass gap = rows_.run(GapPass{gamma_ + 0.5f * narrow(tau_) * root<e>(gamma_)});
    const Doubles v = unpooled<e>(gap.in, tau_), below = widen(gap.out),
                  here = widen(gap_ ? splat(1.0f) : VecF{});
    hi_ = by_half([](VecD here, VecD middle, VecD hi) { return here > 0 ? middle : hi; }, here,
                  0.5 * v + 0.5 * below, hi_);
    good_ &= ~gap_ | (narrow(v - (1 + 1e-12) * below) > 0);
  }

  // A step of Newton's method for gamma (k - H), which is linear for e = 1, and whether that was not the
  // last.
  IntF refine(CloseSums& sums) {
    ClosePass<e> pass{Pooled<e>(hi_, lo_, tau_)};
    sums = rows_.run(pass);
    const Doubles &inverse_width = pass.now.inverse_width, &inside = e == 1 ? sums.inside : sums.slope;
    const Doubles left = k_ - sums.alone, gamma = hi_ + lo_;
    const Doubles slope = left + e * gamma * inside * inverse_width;
    const Doubles step = where_not_zero(slope, gamma * (sums.value - left) / slope);
    const Doubles excess = by_half([](VecD share, VecD own) { return (share > own ? share : own) - kClose; },
                                   abs(step * inverse_width), abs(step / gamma));
    lo_ += step;
    return ~(narrow(excess) <= 0);
  }

  Rows rows_;
  double n_;
  Doubles k_{}, tau_{}, hi_{}, lo_{};
  VecF quantile_{}, hazard_{}, share_{}, gamma_{}, decline_{};
  IntF good_{}, gap_{};
};

// One row. Returns whether y was written.
template <int e>
bool magnitude_row(const MagnitudeSpec& spec, const Row& x, double k, double tau, void* y,
                   MagnitudeGoal& goal, Threshold& gamma) {
  if (k != std::floor(k)) return false;
  using Search = MagnitudeSearch<e, MagnitudeRow>;
  const auto begin = [&](const Row& entries, int64_t n, double k, const Parallel* inside) {
    Search search({entries, y, n, spec.is_signed, inside}, n);
    for (int j = 0; j < Search::width; ++j) search.set(j, k, tau, goal);
    return search;
  };
  Search search = begin(x, spec.n, k, spec.inside);
  float sample[kSampleMax];
  const int size = spec.n >= kSampleFrom ? take_sample(x, spec.n, sample) : 0;
  const double share = static_cast<double>(size) / static_cast<double>(spec.n);
  if (k * share >= 8 && k * share <= size - 8) {
    Search rough = begin({sample, Dtype::kFloat, 1}, size, k * share, nullptr);
    rough.approach(true);
    search.approach_from(rough);
  } else {
    search.approach();
  }
  if (!search.finish()[0]) return false;
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
    MagnitudeSearch<e, MagnitudeTile> search({x_, y_, n, spec.is_signed}, n);
    for (int j = 0; j < width; ++j) {
      const double k = rows.k(first + j);
      search.set(j, k == std::floor(k) ? k : kNan, rows.tau(first + j), goal);
    }
    search.approach();
    const IntF good = search.finish();
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
