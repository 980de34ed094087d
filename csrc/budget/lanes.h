// Short rows under a budget, as many at once as a vector of floats has lanes, one row per lane: the method of
// budget/ordinary.h with vectors in place of its numbers per row, as soft_topk/lanes.h is for counts. Rows
// that are not ordinary are given back.
#pragma once

#include <cmath>

#include "budget/ordinary.h"
#include "budget/sharp_lanes.h"

namespace khot::KHOT_ISA {

template <class C, bool kByValue>
class LaneBudget : public SharpBudgets<C, kByValue> {
  using Passes = SharpBudgets<C, kByValue>;
  using Passes::most_, Passes::given_, Passes::origin_;
  using Passes::n_, Passes::goal_, Passes::goal_low_, Passes::tau_, Passes::scale_, Passes::hi_, Passes::lo_;
  using Passes::x_, Passes::y_, Passes::rows_, Passes::F_, Passes::total_, Passes::odds_, Passes::unit_;

 public:
  using Passes::good, Passes::width;
  using typename Passes::Sums;

  static constexpr int kTrials = 8 + C::extra_passes;

  static constexpr bool serves = exact(kByValue);

  using Passes::Passes;

  // Solves and writes the rows first, ..., first + width - 1. ordinary[i] says whether row first + i was
  // ordinary; with at_most, rows that do not spend the budget are not.
  void solve(const BudgetRows& rows, int64_t first, bool at_most, bool* ordinary) {
    this->read(rows, first);
    guess();
    confirm(find(*this));
    if (at_most) good &= (hi_ + lo_ > 0) & reaches_up();
    for (int j = 0; j < width; ++j) {
      ordinary[j] = good[j] != 0 && (!kByValue || carries_level(hi_[j] * most_[j], tau_[j]));
      // by value, t a = (t s) w for a = w s
      const double unit = kByValue ? unit_[j] : 1;
      if (ordinary[j]) rows.put(first + j, {hi_[j] * unit, lo_[j] * unit});
    }
    scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n_, rows_, y_);
  }

  // The step in t/tau. Rows that are not ordinary are no longer good and do not move.
  VecF step(const Sums& s) {
    if constexpr (Passes::kSumsTails) {
      if (Passes::sums_tails_) {
        // which takes nothing from the count and its rest
        const VecF h = Passes::sharp_step(s, {VecF{}, VecF{}, s.miss, s.S1, s.S2, s.S3, s.S4, s.S5}, most_);
        good &= abs<float>(h) < (kByValue ? 1e6f : 50.0f);  // by value, small costs ask for long steps
        return good ? h : VecF{};
      }
    }
    const float n = static_cast<float>(n_);
    const VecF scale = n / total_, k = (goal_ + goal_low_) * scale, left = n - k;
    const VecF few = k < left ? k : left, miss = s.miss * scale;
    good &= few > 0;
    const CountSums<VecF> sums{k + miss,     left - miss,  miss,         s.S1 * scale,
                               s.S2 * scale, s.S3 * scale, s.S4 * scale, s.S5 * scale};
    VecF h;
    if constexpr (C::full_support) {
      good &= undecided(s);
      h = halley_step<C, LaneArithmetic>(sums, k, n, few, good);
      h = abs<float>(h) * most_ < 0.5f ? refined(h, sums) : h;
      good &= abs<float>(h) < 50;
      return good ? h : VecF{};
    } else {
      // a row is done after a short step only, as in OrdinaryBudget
      settled_ = near_ & reaches(s.miss, s.S1, undecided(s));
      slope_ = s.S1;
      h = held_.step({k, left, few}, sums, [&](const CountSums<VecF>& s) {
        const VecF g = LaneArithmetic::log1p(divide<float>(n * s.miss, k * s.rest), good);
        const VecF h = divide<float>(g * s.count * s.rest, n * s.S1);
        return abs<float>(h) < 0.5f ? refined(h, s) : h;
      });
      good &= settled_ | (abs<float>(h) < kInf<float>);
      return good & ~settled_ ? h : VecF{};
    }
  }

  IntF goes_on(VecF h) {
    if constexpr (C::full_support) {
      return Passes::unsettled(abs<float>(h) * most_, static_cast<float>(C::last_step));
    }
    near_ = abs<float>(h) <= kNear;
    return ~settled_;
  }

 private:
  static constexpr float kNear = 0.01f, kDecided = C::full_support ? 48 : 2.5f;

  // The threshold where a normal distribution with the moments of the row, and noise distributed as tau F,
  // has the share that the budget asks for. All in units of tau.
  void guess() {
    const VecF origin = kByValue ? VecF{} : origin_, scale = scale_;
    VecF d{}, dd{};
    for (int i = 0; i < n_; ++i) {
      const VecF a = this->a(i), off = (*column(x_, i) - origin) * scale, b = a * off;
      d += b;
      dd += b * off;
    }
    good &= abs<float>(d) + dd < kInf<float>;
    const VecF z = log<float>(odds_), weight = 1 / total_;
    const float noise = static_cast<float>(F_.variance);
    const VecF own = (F_.rough_icdf(odds_, z) - static_cast<float>(F_.mean)) / std::sqrt(noise),
               normal = Normal().rough_icdf(odds_, z);
    const VecF mean = d * weight, square = dd * weight,
               x = mean - static_cast<float>(F_.mean);  // less the mean of the noise
    const VecF variance = clamp_below<float>(square - mean * mean, 0);
    VecF t, spread = variance;
    if constexpr (kByValue) {
      VecF aa{}, ad{}, aaa{};
      for (int i = 0; i < n_; ++i) {
        const VecF a = this->a(i), square = a * a;
        aa += square;
        ad += square * (*column(x_, i) * scale);
        aaa += square * a;
      }
      const VecF slope = aa * weight, cross = ad * weight - mean * slope,
                 costs = clamp_below<float>(aaa * weight - slope * slope, 0);
      t = x / slope;
      for (int i = 0; i < 4; ++i) {  // the spread depends on t, so that this is a fixed point
        spread = clamp_below<float>(variance - t * (2 * cross - t * costs), 0);
        t = (x - quantile(own, normal, noise, noise + spread)) / slope;
      }
    } else {
      t = x - quantile(own, normal, noise, noise + variance);
    }
    good &= abs<float>(t) < 1e30f;
    hi_ = good ? origin + t * tau_ : VecF{};
    lo_ = VecF{};
    Passes::forget();
    const VecF k = goal_ * (static_cast<float>(n_) / total_), left = static_cast<float>(n_) - k;
    const VecF few = k < left ? k : left, total = noise + spread;
    const IntF sharp = Passes::sharp(good, few, total);
    if (any(sharp)) Passes::start_between(sharp);
    if constexpr (!C::full_support) held_.start(sharp ? splat(1.0f) : few / square_root(total));
  }

  // Whether less is spent at the threshold than at 0: not where both lie in a gap.
  IntF reaches_up() {
    const VecF far = static_cast<float>(C::tail_reach(36)) * tau_, below = C::full_support ? -far : VecF{};
    IntF found{};
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), a = this->a(i);
      found |= (a > 0) & (x > below) & (x < (kByValue ? a : splat(1.0f)) * hi_ + far);
    }
    return found;
  }

  static VecF quantile(VecF own, VecF normal, float noise, VecF total) {
    VecF deviation;
    for (int j = 0; j < width; ++j) deviation[j] = std::sqrt(total[j]);
    return (normal + (own - normal) * (noise / total)) * deviation;
  }

  // How far the sum of a y may be from what is asked for, as in OrdinaryBudget; but less where little is
  // undecided.
  IntF reaches(VecF miss, VecF S1, IntF much) const {
    const VecF steep = static_cast<float>(F_.pdf(F_.median)) * most_;
    const VecF by_mass = 4e-7f * S1 / steep, most = 4e-7f * goal_;
    // where tails are summed, the last pass has told more than this sum can
    const VecF least = (Passes::sums_tails_ ? splat(4e-7f) : much ? splat(5e-8f) : splat(1e-12f)) * goal_;
    const VecF allowed = by_mass > least ? by_mass : least;
    return abs<float>(miss) <= (allowed < most ? allowed : most);
  }

  // Whether enough of the costs are undecided for float sums to tell the threshold.
  IntF undecided(const Sums& s) const { return s.S1 * kDecided > s.miss + goal_; }

  // Leaves y where it is expected. Rows in which it does not spend the budget are no longer good.
  void confirm(const Found<LaneBudget>& found) {
    if constexpr (!C::full_support) return take_middle();
    const VecF left = Passes::finish(found.moved), S1 = found.sums.S1;
    const IntF off = good & ~reaches(left, S1, good);
    if (!any(off)) return;
    // float noise, or a Taylor polynomial that is not exact enough; the odds are gone
    const VecF more = off ? left / S1 : VecF{};
    Passes::move(more);
    good &= reaches(Passes::write(), S1, good) & (abs<float>(more) < kNear);
  }

  // By score, where the entries that are chosen whole cost the budget exactly, t is the middle of the gap
  // between them and the others, as in soft_topk/lanes.h. Other rows are given back where too little is
  // undecided to tell y.
  void take_middle() {
    if constexpr (kByValue) {  // rows in a gap are given back
      IntF decided = good;
      for (int i = 0; i < n_; ++i) {
        const VecF y = *column(y_, i);
        decided &= (y <= 1e-6f) | (y >= 1 - 1e-6f) | (this->a(i) == 0);
      }
      good &= ~decided & (slope_ > 1e-5f * goal_);
      return;
    }
    VecD spent[2] = {};
    IntF decided = good;
    const auto middle = Passes::gap_middle(decided, [&](IntF in, VecF a) {
      VecD half[2];
      halves(in ? a : VecF{}, half[0], half[1]);
      spent[0] += half[0], spent[1] += half[1];
    });
    constexpr int part = kWidth<double>;
    for (int j = 0; j < width; ++j) {
      const double off = spent[j / part][j % part] - given_[j];
      decided[j] &= off == 0 ? -1 : 0;  // a budget that misses by rounding is not that of a gap
    }
    good &= decided | (slope_ > 1e-5f * goal_);
    if (!any(decided)) return;
    hi_ = decided ? middle.hi : hi_, lo_ = decided ? middle.lo : lo_;
    Passes::write();  // entries that cost nothing may be undecided
  }

  CompactSteps held_;
  VecF slope_{};  // the last sum of a f
  IntF near_{}, settled_{};
};

}  // namespace khot::KHOT_ISA
