// The lane solver: short rows, as those of MoE routers, as many at once as a vector of floats has lanes, one
// row per lane. The method is that of the ordinary solver, and rows that are not ordinary are given back.
#pragma once

#include <cmath>

#include "search/lanes.h"
#include "soft_topk/ordinary.h"
#include "soft_topk/sharp_lanes.h"

namespace khot::KHOT_ISA {

template <class C>
class LaneSolver : public SharpCounts<C> {
  using Passes = SharpCounts<C>;
  using Passes::n_, Passes::from_, Passes::to_, Passes::goal_, Passes::goal_low_, Passes::one_, Passes::tau_;
  using Passes::scale_, Passes::hi_, Passes::lo_, Passes::x_, Passes::y_, Passes::rows_, Passes::F_;
  using Passes::wants_t_, Passes::is_found_, Passes::is_sorted_, Passes::k_all_, Passes::sums_tails_;

 public:
  using Passes::good, Passes::width;
  using typename Passes::Sums;

  static constexpr int kTrials = C::full_support ? 9 : 12;

  LaneSolver(const Spec& spec, const C& F)
      : Passes(spec, F),
        output_(spec.output),
        last_(static_cast<float>(spec.output == Output::kLog ? OrdinarySolver<C>::kLastUnchecked
                                                             : C::last_step)) {
    wants_t_ = output_ != Output::kValue;
  }

  // Solves and writes the rows first, ..., first + width - 1. ordinary[i] says whether row first + i was
  // ordinary.
  void solve(const ForwardRows& rows, int64_t first, Goal& goal, bool* ordinary) {
    gather(rows, first);
    guess(goal);
    const IntF wanted = good;
    Found<LaneSolver> found{};
    if (!is_found_) found = find(*this);
    if (const IntF lost = wanted & ~good; !is_sorted_ && any(lost)) {
      good = wanted;
      start_between(lost);
      if (!is_found_) found = find(*this);
    }
    if (output_ == Output::kThreshold) {  // what is wanted is threshold()
      for (int j = 0; j < width; ++j) ordinary[j] = good[j] != 0;
      return;
    }
    if (output_ == Output::kLog) {
      write_logs();
      return scatter(rows, first, ordinary);
    }
    VecF miss;
    if (is_found_) {
      miss = Passes::write_found();
    } else if constexpr (C::full_support) {
      miss = Passes::finish(found.moved);
    } else {
      take_middle(found.sums.S1);
      miss = found.sums.miss;  // y is that of the last pass, as the last step had no length
    }
    give_back_unless_reached(miss);
    scatter(rows, first, ordinary);
  }

  // Whether log y of row first + j is to be written again, for entries far above its threshold.
  bool is_bent(int j) const { return bent_[j] != 0; }

  // The threshold of row first + j, where that was ordinary.
  Threshold threshold(int j) const { return {hi_[j], lo_[j]}; }

  // The step in t/tau. Rows that are not ordinary are no longer good and do not move.
  VecF step(const Sums& s) {
    const CountSums<VecF> sums{k_ + s.miss, left_ - s.miss, s.miss, s.S1, s.S2, s.S3, s.S4, s.S5};
    VecF h = step_by(s, sums);
    good &= abs<float>(h) < 50;
    return good ? h : VecF{};
  }

  IntF goes_on(VecF h) const { return Passes::unsettled(abs<float>(h), last_); }

 private:
  VecF step_by(const Sums& s, const CountSums<VecF>& sums) {
    if constexpr (C::full_support) {
      if (sums_tails_) return Passes::sharp_step(s, sums, splat(1.0f));
      if constexpr (C::value_from_odds) good &= s.S1 * static_cast<float>(C::decided_ratio) > k_;
      return refined_step<C, LaneArithmetic>(sums, k_, free_, few_, good);
    } else {
      return held_.step({k_, left_, few_}, sums, [&](const CountSums<VecF>& s) {
        return refined_step<C, LaneArithmetic>(s, k_, free_, few_, good);
      });
    }
  }

  // A row whose y does not have the sum that is asked for is given back.
  void give_back_unless_reached(VecF miss) {
    const VecF allowed = 5e-7f * clamp_below<float>(few_, 1.0f) + free_ * 0x1p-25f;
    good &= abs<float>(miss) <= allowed;
  }

  void gather(const ForwardRows& rows, int64_t first) {
    khot::KHOT_ISA::gather([&](int j) { return rows.x(first + j); }, n_, rows_, x_);
    is_float_ = rows.x(first).dtype == Dtype::kFloat;
    from_ = static_cast<const float*>(rows.x(first).data), to_ = static_cast<const float*>(rows.out(first));
    for (int j = 0; j < width; ++j) {
      k_all_[j] = rows.k(first + j);
      tau_[j] = static_cast<float>(rows.tau(first + j));
      one_[j] = 2 * k_all_[j] > n_;
      const double sum = k_all_[j] - (one_[j] ? n_ : 0);
      k_[j] = static_cast<float>(k_all_[j]);
      goal_[j] = static_cast<float>(sum), goal_low_[j] = static_cast<float>(sum - goal_[j]);
    }
    const double least = output_ == Output::kLog ? C::least_logged : 0;
    good = (k_ > static_cast<float>(least)) & (tau_ > 1e-25f) & (tau_ < 1e25f);
    scale_ = 1 / tau_;
  }

  // Sums of the entries that may be selected: all, or where some are -inf the others.
  struct Moments {
    VecF origin, first{}, second{};  // of the deviations from the origin
  };

  Moments moments() {
    Moments m{*column(x_, 0)};
    for (int i = 0; i < n_; ++i) {
      const VecF d = *column(x_, i) - m.origin;
      m.first += d;
      m.second += d * d;
    }
    free_ = splat(static_cast<float>(n_));
    const IntF finite = abs<float>(m.first) + m.second < kInf<float>;
    return any(good & ~finite) ? moments_of_selectable() : m;
  }

  KHOT_APART Moments moments_of_selectable() {
    Moments m{splat(-kInf<float>)};
    free_ = VecF{};
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i);
      const IntF out = x == -kInf<float>;
      m.origin = m.origin == -kInf<float> ? x : m.origin;
      const VecF d = out ? VecF{} : x - m.origin;
      m.first += d;
      m.second += d * d;
      free_ += out ? VecF{} : splat(1.0f);
    }
    good &= abs<float>(m.first) + m.second < kInf<float>;  // otherwise an entry is +inf or NaN
    return m;
  }

  void guess(Goal& goal) {
    const auto [origin, first, second] = moments();
    for (int j = 0; j < width; ++j) left_[j] = static_cast<float>(free_[j] - k_all_[j]);
    few_ = k_ < left_ ? k_ : left_;
    good &= few_ > 0;
    if (kBends<C> && output_ == Output::kLog)
      good &= (left_ > static_cast<float>(kLeastLeft)) & (tau_ > 1e-18f);  // squares of scores underflow
    const VecF off = first / free_, variance = second / free_ - off * off;
    // Goal::guess in units of tau, in which an ordinary row does not overflow.
    const float noise = static_cast<float>(F_.variance);
    const VecF total = noise + clamp_below<float>(variance * scale_, 0) * scale_;
    const VecF deviation = square_root(total);
    const auto [own, normal] = quantiles(goal);
    const VecF quantile = normal + (own - normal) * (noise / total);
    hi_ = origin + (off - tau_ * (static_cast<float>(F_.mean) + quantile * deviation));
    lo_ = VecF{};
    usual_ = few_ / deviation;
    if constexpr (!C::full_support) held_.start(usual_);
    Passes::forget();
    // The sum of f is about few/deviation. Where it is small beside k, one of y has not the digits that
    // matter.
    if constexpr (C::value_from_odds) sums_tails_ = any(good & (few_ * 12 < k_));
    const IntF sharp = Passes::sharp(good, few_, total);
    sums_tails_ |= C::full_support && any(sharp);
    if (any(sharp & (total > Passes::kSpread))) start_between(sharp);
  }

  void start_between(IntF sharp) {
    Passes::start_between(sharp);
    if constexpr (!C::full_support) held_.start(sharp ? splat(1.0f) : usual_);
  }

  struct Quantiles {
    VecF own, normal;
  };

  // Those of the CDF and of the normal distribution at k/n, as in Goal. Of rows that all have another, a few
  // digits are enough.
  Quantiles quantiles(Goal& goal) {
    const int first = Passes::first_good();
    if (!any(good & ((free_ != free_[first]) | (k_ != k_[first])))) {
      if (good[first]) goal.set(k_all_[first], free_[first], F_);
      return {splat(static_cast<float>(goal.own)), splat(static_cast<float>(goal.normal))};
    }
    const VecF share = clamp_above<float>(k_ / (good ? free_ : splat(1.0f)), 1 - 1e-6f);
    const VecF odds = share / (1 - share), z = log<float>(clamp_below<float>(odds, 1e-30f));
    const float deviation = static_cast<float>(std::sqrt(F_.variance));
    return {(F_.rough_icdf(odds, z) - static_cast<float>(F_.mean)) / deviation, Normal().rough_icdf(odds, z)};
  }

  void write_logs() {
    if constexpr (C::log_fits_float) {
      const VecF scale = scale_, hi = hi_, lo = lo_;
      bent_ = IntF{};
      for (int i = 0; i < n_; ++i) {
        fetch_ahead<true>(to_, (n_ + i) * width);
        const VecF z = ((*column(x_, i) - hi) - lo) * scale;
        if (kBends<C> && is_float_) bent_ |= z > static_cast<float>(kBent);
        *column(y_, i) = F_.template log_value<float>(z);
      }
    }
  }

  // Where all entries are decided, every t between two of them gives this count; the threshold is their
  // middle. S1 is the sum of f where the search has ended, which may be at the end of the gap.
  void take_middle(VecF S1) {
    IntF decided = good;
    for (int j = 0; j < width; ++j) decided[j] &= k_all_[j] == std::floor(k_all_[j]) ? -1 : 0;
    if (!any(decided)) return;
    const auto middle = Passes::gap_middle(decided, [](IntF, VecF) {});
    hi_ = decided ? middle.hi : hi_, lo_ = decided ? middle.lo : lo_;
    if (any(decided & (S1 > 0))) Passes::write();
  }

  void scatter(const ForwardRows& rows, int64_t first, bool* ordinary) {
    for (int j = 0; j < width; ++j) {
      ordinary[j] = good[j] != 0;
      if (ordinary[j]) rows.put(first + j, {hi_[j], lo_[j]});
    }
    khot::KHOT_ISA::scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n_, rows_, y_);
  }

  Output output_;
  float last_;
  VecF k_{}, free_{}, left_{}, few_{};
  VecF usual_{};  // about the sum of f at the threshold
  IntF bent_{};
  bool is_float_ = false;  // whether results keep the digits of float
  CompactSteps held_;
};

}  // namespace khot::KHOT_ISA
