// Short rows under a budget whose scores spread far beyond tau, one row per lane: where the search starts.
// Sums of costs at a few levels lead to the entry with which the budget is spent.
#pragma once

#include "budget/tile.h"
#include "search/sharp_lanes.h"

namespace khot::KHOT_ISA {

template <class C, bool kByValue>
class SharpBudgets : public SharpLanes<C, BudgetTile<kByValue>> {
  using Passes = SharpLanes<C, BudgetTile<kByValue>>;

 public:
  using Passes::good;

 protected:
  using Passes::F_, Passes::goal_, Passes::goal_low_, Passes::hi_, Passes::n_, Passes::scale_, Passes::tau_,
      Passes::x_, Passes::y_;
  using Passes::sums_tails_;

  using Passes::Passes;

  // Starts these rows where the entry with which the budget is spent has the share that is left for it; where
  // that is all of it, in the gap below. Rows in which it is not found are given back.
  KHOT_APART void start_between(IntF sharp) {
    if constexpr (kByValue) put_levels();
    Bracket at = ends();
    for (int pass = 0; pass < kPasses && any(good & sharp & (at.low < at.high)); ++pass) narrow(at, pass);
    good &= ~sharp | (at.low == at.high);
    const IntF whole = sharp & (at.over_low == 0);
    const VecF share = -at.over_high / (at.over_low - at.over_high),
               rest = clamp_below<float>(1 - share, 1e-7f);
    const VecF odds = clamp_below<float>(share, 1e-30f) / rest;
    const VecF z = whole ? splat(static_cast<float>(F_.median)) : F_.rough_icdf(odds, log<float>(odds));
    const VecF next = any(whole) ? below(at.low) : splat(-kInf<float>);
    good &= ~whole | (next > -kInf<float>);
    Passes::place(sharp, at.low, next, whole, at.low, z / (kByValue ? cost_at(at.low) : splat(1.0f)));
    if constexpr (!C::full_support) return;
    sums_tails_ = true;
    if constexpr (!kByValue) balance(whole, at.low, next);
  }

 private:
  // From which threshold on an entry is left out. By value it is written where y is to be.
  KHOT_INLINE VecF level_of(int i) { return *column(kByValue ? y_ : x_, i); }
  void put_levels() {
    for (int i = 0; i < n_; ++i) {
      const VecF a = this->a(i);
      *column(y_, i) = *column(x_, i) / (a > 0 ? a : splat(1.0f));
    }
  }
  VecF cost_at(VecF here) {
    VecF most{};
    for (int i = 0; i < n_; ++i) {
      const VecF a = this->a(i);
      most = (level_of(i) == here) & (a > most) ? a : most;
    }
    return most > 0 ? most : splat(1.0f);
  }

  // In gaps so deep that entries behind the ends may weigh as much.
  void balance(IntF whole, VecF last, VecF next) {
    const IntF deep = whole & ((last - next) * scale_ > 2 * kFar);
    if (!any(good & deep)) return;
    Passes::weigh_ends(deep, last, next, [&](auto add) {
      for (int i = 0; i < n_; ++i) add(*column(x_, i), this->a(i));
    });
  }

  static constexpr int kPasses = 24;
  // From so many tau on, sums of tails are mostly what float adds for entries that are farther still.
  static constexpr float kFar = C::value_from_odds ? 70.0f : 11.5f;

  // The levels of two entries: those from `low` on cost as much as the budget or more, those above `high`
  // less, and so much more.
  struct Bracket {
    VecF low, high, over_low, over_high;
  };

  // The least and the largest of an entry that costs something.
  Bracket ends() {
    PairSum<float> total;
    VecF least = splat(kInf<float>), most = -least;
    for (int i = 0; i < n_; ++i) {
      const VecF x = level_of(i), a = this->a(i);
      const IntF costs = a > 0;
      total.add(a);
      least = costs & (x < least) ? x : least;
      most = costs & (x > most) ? x : most;
    }
    return {least, most, over(total), -goal_};
  }

  // Spends the budget from a level on that lies above `low`: at the guess first, then where a straight line
  // would spend it, or in the middle. One of the entries beside the level is an end of the bracket then.
  KHOT_INLINE void narrow(Bracket& at, int pass) {
    const VecF line = at.over_low / (at.over_low - at.over_high);
    const VecF to = pass == 0 ? hi_ : at.low + (at.high - at.low) * (pass % 3 == 2 ? splat(0.5f) : line);
    const VecF least = at.low + (abs<float>(at.low) * 1.3e-7f + 1e-37f), above = to > least ? to : least;
    const VecF level = above < at.high ? above : at.high;
    PairSum<float> spent;
    VecF up = at.high, down = at.low;
    for (int i = 0; i < n_; ++i) {
      const VecF x = level_of(i), a = this->a(i);
      const IntF costs = a > 0, in = x >= level;
      spent.add(in ? a : VecF{});
      up = costs & in & (x < up) ? x : up;
      down = costs & ~in & (x > down) ? x : down;
    }
    const VecF over = this->over(spent);
    const IntF enough = over >= 0;
    at.over_high = enough ? at.over_high : over;
    at.high = enough ? at.high : down;
    at.over_low = enough ? over : at.over_low;
    at.low = enough ? up : at.low;
  }

  VecF over(const PairSum<float>& spent) const { return (spent.whole - goal_) + (spent.lost - goal_low_); }

  // The entry below this one.
  VecF below(VecF entry) {
    VecF next = splat(-kInf<float>);
    for (int i = 0; i < n_; ++i) {
      const VecF x = level_of(i);
      next = (this->a(i) > 0) & (x < entry) & (x > next) ? x : next;
    }
    return next;
  }
};

}  // namespace khot::KHOT_ISA
