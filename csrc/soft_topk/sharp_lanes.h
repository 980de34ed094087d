// Short rows whose scores spread far beyond tau, one row per lane: what of the lane solver is for them.
//
// The threshold lies near the entries of rank r and r + 1, where r is the integer nearest to k. Those beside
// them are sorted out (selection/rank_lanes.h), and often they are all that is undecided: then the search
// goes on among them alone, and y is written once. Otherwise it starts at what they tell, and takes passes
// over the rows (search/sharp_lanes.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "search/sharp_lanes.h"
#include "selection/rank_lanes.h"
#include "soft_topk/ordinary.h"

namespace khot::KHOT_ISA {

struct CountTile : LaneTile<Unit> {
  explicit CountTile(const Spec& spec) : LaneTile<Unit>(spec.n) {}
};

template <class C>
class SharpCounts : public SharpLanes<C, CountTile> {
  using Passes = SharpLanes<C, CountTile>;

 public:
  using Passes::good, Passes::width;
  using typename Passes::Sums;

 protected:
  using Passes::F_, Passes::goal_, Passes::goal_low_, Passes::hi_, Passes::lo_, Passes::n_, Passes::one_;
  using Passes::rows_, Passes::scale_, Passes::sums_tails_, Passes::to_, Passes::x_, Passes::y_;
  using Passes::wants_t_, Passes::kNothing, Passes::last_, Passes::missed_after, Passes::z_of;
  using typename Passes::Tail;

  using Passes::Passes;

  void forget() {
    Passes::forget();
    is_found_ = is_hard_ = is_sorted_ = false;
  }

  int first_good() const {
    int j = 0;
    while (j + 1 < width && !good[j]) ++j;
    return j;
  }

  // Starts these rows between their entries of rank r and r + 1, or where one of these has the share that k
  // leaves it.
  KHOT_APART void start_between(IntF sharp) {
    int ranks[width], low = n_, high = 1;
    const int first = first_good();
    for (int j = 0; j < width; ++j) {  // rows that are not good may have any
      ranks[j] = rank(k_all_[good[j] ? j : first]);
      low = std::min(low, ranks[j]), high = std::max(high, ranks[j]);
    }
    is_sorted_ = true;
    const RankLanes sorted(x_, n_, low - kWindow + 1, high + kWindow, y_, rows_);
    Beside beside;
#pragma GCC unroll 8
    for (int i = 0; i < kWindow; ++i) {
      beside.up[i] = low == high ? sorted.at(low - i) : sorted.at(ranks, -i);
      beside.down[i] = low == high ? sorted.at(low + 1 + i) : sorted.at(ranks, 1 + i);
    }
    VecF z = splat(static_cast<float>(F_.median));  // of the entry that has a share
    for (int j = 0; j < width; ++j) {
      const double left = ranks[j] - k_all_[j];
      beside.left[j] = static_cast<float>(left);
      if (sharp[j] && left != 0) z[j] = static_cast<float>(F_.icdf(left > 0 ? 1 - left : -left));
    }
    const VecF shared = beside.left < 0 ? beside.down[0] : beside.up[0];
    Passes::place(sharp, beside.up[0], beside.down[0], beside.left == 0, shared, z);
    if constexpr (C::full_support) {
      sums_tails_ = true;
      search_beside(sharp, beside);
    }
  }

  // y of rows that are found, and by how much its sum misses.
  VecF write_found() { return is_hard_ ? write_hard() : Passes::write(); }

  double k_all_[width];
  bool is_found_ = false;   // whether t of all rows is
  bool is_sorted_ = false;  // whether sharp rows have started between their entries

 private:
  static constexpr int kWindow = 8;
  // From so many tau to either side on, the ends of a gap say where t is. Normal tails lose digits before.
  static constexpr float kWide = C::value_from_odds ? 60 : 9;

  // Entries in descending order: those from rank r up, and those from rank r + 1 down; and r - k.
  struct Beside {
    VecF up[kWindow], down[kWindow], left;
  };

  int rank(double k) const { return std::min(n_, static_cast<int>(k + 0.5)); }

  // The search among the entries beside the threshold. They are all that counts where the farthest of them
  // lie so far away that the others together have less than float's digits, also beside the tails of the
  // nearest.
  KHOT_APART void search_beside(IntF sharp, const Beside& beside) {
    const VecF first_up = z_of(beside.up[0]), first_down = -z_of(beside.down[0]);
    const float far = static_cast<float>(C::tail_reach(24));
    IntF covered{};
    int size = 1;
    for (;; size *= 2) {
      const VecF up = z_of(beside.up[size - 1]), down = -z_of(beside.down[size - 1]);
      IntF apart;
      if constexpr (C::value_from_odds) {
        apart = ((up > first_up + 18) | is_all(up)) & ((down > first_down + 18) | is_all(down));
      } else {
        apart = ((up * up > first_up * first_up + 36) | is_all(up)) &
                ((down * down > first_down * first_down + 36) | is_all(down));
      }
      covered = ((up > far) & (down > far) & apart) | ~good;
      if (size == kWindow || !any(~covered)) break;
    }
    const bool all_covered = !any(~covered);
    if (!all_covered) size = 4;  // passes will follow
    const auto in_gap = [&](float z) { return (beside.left == 0) & (first_up > z) & (first_down > z); };
    const IntF hard = in_gap(kDeep<C>), wide = in_gap(kWide) & sharp;
    const IntF settled = step_beside(sharp, beside, wide | ~good, size, all_covered);
    is_found_ = !any(~(covered & settled)) && !any(good & ~sharp);
    is_hard_ = is_found_ && !any(good & ~hard);
    // where entries are decided, t still depends on how many of them lie at the ends of the gap
    const IntF crowded =
        weighs(beside.up[1] - beside.up[0], beside) | weighs(beside.down[0] - beside.down[1], beside);
    if (!any(good & wide & crowded)) return;
    constexpr int farthest = kWindow - 1;
    const IntF many = weighs(beside.up[farthest] - beside.up[0], beside) |
                      weighs(beside.down[0] - beside.down[farthest], beside);
    Passes::weigh_ends(wide, beside.up[0], beside.down[0], [&](auto add) {
      const VecF one = splat(1.0f);
      if (any(good & wide & many)) {
        for (int i = 0; i < n_; ++i) add(*column(x_, i), one);
      } else {
        for (int i = 0; i < kWindow; ++i) add(beside.up[i], one), add(beside.down[i], one);
      }
    });
  }

  // Steps among so many entries on each side; which rows are settled then.
  IntF step_beside(IntF sharp, const Beside& beside, IntF settled, int size, bool to_the_end) {
    if (!any(~settled)) return settled;
    VecF odds[2 * kWindow];
    if constexpr (C::value_from_odds) {
      for (int i = 0; i < size; ++i) {
        odds[i] = exp2_held(z_of(beside.up[i]) * static_cast<float>(-kLog2E));
        odds[kWindow + i] = exp2_held(z_of(beside.down[i]) * static_cast<float>(-kLog2E));
      }
    }
    VecF moved{};
    for (int trial = 0; trial < 4; ++trial) {
      VecF P = clamp_below<float>(beside.left, 0), Q = clamp_below<float>(-beside.left, 0), f_P{}, f_Q{};
      const VecF factor = C::value_from_odds ? exp<float>(moved) : VecF{};
      for (int i = 0; i < size; ++i) {
        Tail up, down;
        if constexpr (C::value_from_odds) {
          up = Passes::tail_of_odds(odds[i] * factor);
          down = Passes::tail_of_odds(odds[kWindow + i] * factor);
        } else {
          up = this->tail_at(z_of(beside.up[i]) - moved);
          down = this->tail_at(z_of(beside.down[i]) - moved);
        }
        Q += up.above ? up.v.tail : 1 - up.v.tail, P += down.above ? 1 - down.v.tail : down.v.tail;
        f_Q += up.v.density, f_P += down.v.density;
      }
      const IntF known = (P > kNothing) & (Q > kNothing) & ~settled;
      const VecF safe_P = known ? P : splat(1.0f), safe_Q = known ? Q : splat(1.0f);
      VecF h = known ? log<float>(safe_P / safe_Q) / (f_Q / safe_Q + f_P / safe_P) : VecF{};
      const IntF lost = abs<float>(h) >= 8;
      h = lost ? VecF{} : h;
      moved += h;
      // where a normal tail bends, or log y is wanted, t has to be right beside tails however small they are;
      // beside a small share that a broken k leaves, nearly so
      const bool loose = C::value_from_odds && !wants_t_;
      const IntF whole = beside.left == 0, enough = missed_after(P, Q, abs<float>(h), whole) < 1e-7f;
      const IntF close = loose ? enough & (whole | (abs<float>(h) < 0.01f)) : IntF{};
      settled |= known & ~lost & (close | (abs<float>(h) < 1e-4f));
      if (!any(~settled)) break;
      if (!to_the_end && !any(~settled & (abs<float>(h) > 0.2f))) break;
    }
    Passes::move(sharp ? moved : VecF{});
    return settled;
  }

  // Whether there are no more entries.
  static IntF is_all(VecF distance) { return distance == kInf<float>; }

  // Whether an entry so far behind the end of a gap weighs anything beside it.
  IntF weighs(VecF away, const Beside& beside) const {
    const VecF a = away * scale_;
    if constexpr (C::value_from_odds) return a < 18;
    return a * (0.5f * (beside.up[0] - beside.down[0]) * scale_) < 18;
  }

  VecF write_hard() {
    for (int i = 0; i < n_; ++i) {
      fetch_ahead<true>(to_, (n_ + i) * width);
      *column(y_, i) = *column(x_, i) >= last_ ? splat(1.0f) : VecF{};
    }
    return VecF{};
  }

  bool is_hard_ = false;  // whether all y are 0 or 1
};

}  // namespace khot::KHOT_ISA
