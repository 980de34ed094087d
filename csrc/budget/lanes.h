// Short rows under a budget, as many at once as a vector of floats has lanes, one row per lane: the method of
// budget/ordinary.h with vectors in place of its numbers per row, as soft_topk/lanes.h is for counts. Rows
// that are not ordinary are given back.
#pragma once

#include <cmath>
#include <type_traits>

#include "budget/ordinary.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// The part that knows no CDF.
class BudgetTile {
 public:
  static constexpr int width = kWidth<float>;

 protected:
  explicit BudgetTile(const BudgetSpec& spec)
      : n_(static_cast<int>(spec.n)), by_value_(spec.by_value ? ~IntF{} : IntF{}) {}

  // An entry of cost a lies at z = (x - t u)/tau.
  KHOT_INLINE VecF u(VecF a) const { return by_value_ ? a : splat(1.0f); }

  // Costs are taken in units that make their mean about 1, a power of 2 for each row: a = w s.
  KHOT_APART void read(const BudgetRows& rows, int64_t first) {
    gather([&](int j) { return rows.x(first + j); }, n_, rows_, x_);
    gather([&](int j) { return rows.cost(first + j); }, n_, rows_, a_);
    ExactBlockSum total;
    IntF bad{};
    most_ = VecF{};
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), w = *column(a_, i);
      bad |= ~(abs<float>(x) < kInf<float>) | ~((w >= 0) & (w < kInf<float>));
      total.add(w, i);
      most_ = w > most_ ? w : most_;
    }
    total.flush();
    const float count = static_cast<float>(n_);
    good_ = ~bad & (total.whole > 1e-30f * count) & (total.whole < 1e30f * count);
    for (int j = 0; j < width; ++j) {
      const double sum = static_cast<double>(total.whole[j]) + total.lost[j];
      const int power = good_[j] ? -std::ilogb(sum / n_) : 0;
      unit_[j] = std::ldexp(1.0f, power);
      const double budget = given_[j] = rows.budget(first + j) * unit_[j], all = sum * unit_[j];
      budget_[j] = static_cast<float>(budget), budget_low_[j] = static_cast<float>(budget - budget_[j]);
      total_[j] = static_cast<float>(all);
      odds_[j] = static_cast<float>(budget / (all - budget));
      tau_[j] = static_cast<float>(rows.tau(first + j));
    }
    good_ &= (odds_ > 1e-6f) & (odds_ < 1e6f) & (tau_ > 1e-25f) & (tau_ < 1e25f);
    odds_ = good_ ? odds_ : splat(1.0f);
    scale_ = 1 / tau_;
    most_ = u(most_ * unit_);
    for (int i = 0; i < n_; ++i) *column(a_, i) *= unit_;
  }

  void move(VecF h) {
    const VecF before = hi_, next = lo_ + h * tau_;
    hi_ = before + next;
    lo_ = (before - hi_) + next;
  }

  template <class Sum>
  VecF missing(Sum sum, VecF& spent) const {
    sum.flush();
    spent = sum.whole + sum.lost;
    return ((sum.whole - budget_) - budget_low_) + sum.lost;
  }

  int n_;
  IntF by_value_;
  VecF total_{}, budget_{}, budget_low_{}, odds_{}, unit_{}, most_{}, tau_{}, scale_{}, hi_{}, lo_{};
  IntF good_{};
  double given_[width];  // the budget
  alignas(KHOT_VECTOR_BYTES) float x_[kShortRow * width], a_[kShortRow * width], y_[kShortRow * width],
      rows_[kShortRow * width];
};

template <class C>
class LaneBudget : BudgetTile {
 public:
  using BudgetTile::width;
  // By value and under compact support, large costs magnify the rounding errors of these sums.
  static bool serves(bool by_value) { return exact(by_value) && (C::full_support || !by_value); }

  LaneBudget(const BudgetSpec& spec, const C& F)
      : BudgetTile(spec), F_(F), stores_(C::value_from_odds && !spec.by_value) {}

  // Solves and writes the rows first, ..., first + width - 1. ordinary[i] says whether row first + i was
  // ordinary.
  void solve(const BudgetRows& rows, int64_t first, bool* ordinary) {
    read(rows, first);
    guess();
    search();
    if constexpr (!C::full_support) take_middle();
    for (int j = 0; j < width; ++j) {
      ordinary[j] = good_[j] != 0;
      // by value, t a = (t s) w for a = w s
      const double unit = by_value_[j] ? unit_[j] : 1;
      if (ordinary[j]) rows.put(first + j, {hi_[j] * unit, lo_[j] * unit});
    }
    scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n_, rows_, y_);
  }

 private:
  static constexpr int kPasses = 8 + C::extra_passes, kCurve = C::Derivatives::kCurve;
  static constexpr float kNear = 0.01f, kDecided = C::full_support ? 16 : 2.5f;

  // Under compact support a few costs may be undecided, or none, beside many that are paid in full.
  using Spent = std::conditional_t<C::full_support, ExactBlockSum, PairSum<float>>;

  struct Sums {
    VecF spent, miss;  // the sum of a y, and by how much it misses the budget
    VecF S[5] = {};    // the sums of a f and of its derivatives along t
  };

  // The threshold where a normal distribution with the moments of the row, and noise distributed as tau F,
  // has the share that the budget asks for. All in units of tau.
  void guess() {
    const VecF origin = by_value_ ? VecF{} : *column(x_, 0), scale = scale_;
    VecF d{}, dd{};
    for (int i = 0; i < n_; ++i) {
      const VecF a = *column(a_, i), off = (*column(x_, i) - origin) * scale, b = a * off;
      d += b;
      dd += b * off;
    }
    good_ &= abs<float>(d) + dd < kInf<float>;
    const VecF z = log<float>(odds_), weight = 1 / total_;
    const float noise = static_cast<float>(F_.variance);
    const VecF own = (F_.rough_icdf(odds_, z) - static_cast<float>(F_.mean)) / std::sqrt(noise),
               normal = Normal().rough_icdf(odds_, z);
    const VecF mean = d * weight, square = dd * weight,
               x = mean - static_cast<float>(F_.mean);  // less the mean of the noise
    const VecF variance = clamp_below<float>(square - mean * mean, 0);
    VecF t;
    if (by_value_[0]) {
      VecF aa{}, ad{}, aaa{};
      for (int i = 0; i < n_; ++i) {
        const VecF a = *column(a_, i), square = a * a;
        aa += square;
        ad += square * (*column(x_, i) * scale);
        aaa += square * a;
      }
      const VecF slope = aa * weight, cross = ad * weight - mean * slope,
                 spread = clamp_below<float>(aaa * weight - slope * slope, 0);
      t = x / slope;
      for (int i = 0; i < 4; ++i) {  // the spread depends on t, so that this is a fixed point
        const VecF total = noise + clamp_below<float>(variance - t * (2 * cross - t * spread), 0);
        t = (x - quantile(own, normal, noise, total)) / slope;
      }
    } else {
      t = x - quantile(own, normal, noise, noise + variance);
    }
    if constexpr (!C::full_support) {
      const VecF k = budget_ / total_, share = k < 0.5f ? k : 1 - k;
      guard_.start(static_cast<float>(n_) * share / square_root(noise + variance));
    }
    good_ &= abs<float>(t) < 1e30f;
    hi_ = good_ ? origin + t * tau_ : VecF{};
    lo_ = VecF{};
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
    const VecF by_mass = 4e-7f * S1 / steep, most = 4e-7f * budget_;
    const VecF least = (much ? splat(5e-8f) : splat(1e-12f)) * budget_;
    const VecF allowed = by_mass > least ? by_mass : least;
    return abs<float>(miss) <= (allowed < most ? allowed : most);
  }

  void search() {
    Sums s = evaluate();
    VecF moved{};  // by how much t has moved since the odds were stored, in tau
    IntF pending = good_, near{};
    for (int pass = 0; pass < kPasses; ++pass) {
      if constexpr (C::full_support) {
        good_ &= undecided(s);
      } else {
        // a row is done after a short step only, as in OrdinaryBudget
        pending = good_ & ~(near & reaches(s.miss, s.S[0], undecided(s)));
        slope_ = s.S[0];
        if (!any(pending)) return;
      }
      VecF h = step(s);
      if constexpr (!C::full_support) {
        h = pending ? h : VecF{};
        near = abs<float>(h) <= kNear;
      }
      move(h);
      moved += h;
      if constexpr (C::full_support) {
        const IntF far = stores_ ? abs<float>(moved) >= 1 : IntF{};  // the odds may overflow
        const VecF reach = abs<float>(h) * most_;
        pending = good_ & ((reach > static_cast<float>(C::last_step)) | far);
        if (!any(pending)) break;
        if (stores_ && !any(good_ & far)) {
          s = shift(moved);
        } else {
          moved = VecF{};
          s = evaluate();
        }
      } else {
        s = evaluate();
      }
    }
    good_ &= ~pending;
    if constexpr (C::full_support) {
      const VecF left = stores_ ? finish(moved) : write();
      const IntF off = good_ & ~reaches(left, s.S[0], good_);
      if (!any(off)) return;
      // float noise, or a Taylor polynomial that is not exact enough; the odds are gone
      const VecF more = off ? left / s.S[0] : VecF{};
      move(more);
      good_ &= reaches(write(), s.S[0], good_) & (abs<float>(more) < kNear);
    }
  }

  // Whether enough of the costs are undecided for float sums to tell the threshold.
  static IntF undecided(const Sums& s) { return s.S[0] * kDecided > s.spent; }

  // The step in t/tau. Rows that are not ordinary leave good_ and do not move.
  VecF step(const Sums& s) {
    const float n = static_cast<float>(n_);
    const VecF scale = n / total_, k = (budget_ + budget_low_) * scale, left = n - k;
    const VecF few = k < left ? k : left, miss = s.miss * scale;
    good_ &= few > 0;
    const CountSums<VecF> sums{k + miss,       left - miss,    miss,           s.S[0] * scale,
                               s.S[1] * scale, s.S[2] * scale, s.S[3] * scale, s.S[4] * scale};
    VecF h;
    if constexpr (C::full_support) {
      h = halley_step<C, LaneArithmetic>(sums, k, n, few, good_);
    } else {
      h = guard_.step({k, left, few, hi_, tau_, scale_}, sums, [&](const CountSums<VecF>& s) {
        const VecF g = LaneArithmetic::log1p(divide<float>(n * s.miss, k * s.rest), good_);
        const VecF h = divide<float>(g * s.count * s.rest, n * s.S1);
        return abs<float>(h) < 0.5f ? refined(h, s) : h;
      });
      good_ &= abs<float>(h) < kInf<float>;
      return good_ ? h : VecF{};
    }
    const VecF reach = abs<float>(h) * most_;
    h = reach < 0.5f ? refined(h, sums) : h;
    good_ &= abs<float>(h) < 50;
    return good_ ? h : VecF{};
  }

  // Where the entries that are chosen whole cost the budget exactly, t is the middle of the gap between them
  // and the others, as in soft_topk/lanes.h. Other rows are given back where too little is undecided to tell
  // y.
  void take_middle() {
    VecF low = splat(-kInf<float>), high = splat(kInf<float>);
    VecD spent[2] = {};
    IntF decided = good_;
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), a = *column(a_, i), y = *column(y_, i), end = x - tau_;
      const IntF out = (y <= 1e-6f) & (a > 0), in = (y >= 1 - 1e-6f) & (a > 0);
      decided &= out | in | (a == 0);
      low = out & (x > low) ? x : low;
      high = in & (end < high) ? end : high;
      VecD half[2];
      halves(in ? a : VecF{}, half[0], half[1]);
      spent[0] += half[0], spent[1] += half[1];
    }
    constexpr int part = kWidth<double>;
    const VecF middle = 0.5f * low + 0.5f * high;
    decided &= (low < middle) & (middle < high);
    for (int j = 0; j < width; ++j) {
      const double off = spent[j / part][j % part] - given_[j];
      decided[j] &= off == 0 ? -1 : 0;  // a budget that misses by rounding is not that of a gap
    }
    good_ &= decided | (slope_ > 1e-5f * budget_);
    if (!any(decided)) return;
    hi_ = decided ? middle : hi_, lo_ = decided ? VecF{} : lo_;
    write();  // entries that cost nothing may be undecided
  }

  // ---- the passes

  // The sums of a pass. entry(i, u, z, y, f) gives what belongs to column i.
  template <class Entry>
  KHOT_INLINE Sums add_up(Entry entry) {
    const typename C::Derivatives derivatives = F_.derivatives();
    const IntF by_value = by_value_;  // a local copy stays in registers
    Spent spent;
    VecF S[kCurve + 1] = {};
    for (int i = 0; i < n_; ++i) {
      const VecF a = *column(a_, i), u = by_value ? a : splat(1.0f);
      VecF z{}, y, f, d[kCurve + 1];
      entry(i, u, z, y, f);
      spent.add(a * y, i);
      derivatives.curve(z, y, f, d);
      VecF weight = a * u;
      S[0] += weight * f;
#pragma GCC unroll 4
      for (int l = 0; l < kCurve; ++l) {
        weight *= u;
        S[l + 1] += weight * d[l];
      }
    }
    Sums s;
    s.miss = missing(spent, s.spent);
#pragma GCC unroll 5
    for (int l = 0; l <= kCurve; ++l) s.S[l] = S[l];
    return s;
  }

  KHOT_INLINE VecF position(VecF x, VecF u) const { return (fused<float>(-hi_, u, x) - lo_ * u) * scale_; }

  // The sums at hi + lo. It stores the odds, from which shift() and finish() go on, or y under compact
  // support.
  Sums evaluate() {
    const float median = static_cast<float>(F_.median);
    const C F = F_;
    const VecF hi = hi_, scale = scale_ * static_cast<float>(kLog2E), lo = lo_ * scale;
    return add_up([&](int i, VecF u, VecF& z, VecF& y, VecF& f) {
      const VecF x = *column(x_, i);
      if constexpr (C::value_from_odds) {
        const VecF e = exp2_held(fused<float>(hi, u, -x) * scale + lo * u);
        *column(y_, i) = e;
        y = C::from_odds(e);
        f = C::density_of(y);
      } else {
        z = position(x, u);
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        y = above ? 1 - v.tail : v.tail, f = v.density;
        if constexpr (!C::full_support) *column(y_, i) = y = F.template value<float>(z);
      }
    });
  }

  // The sums at t + h tau, from the odds that were stored at t.
  Sums shift(VecF h) {
    if constexpr (C::value_from_odds) {
      const VecF factor = exp<float>(h);
      return add_up([&](int i, VecF, VecF&, VecF& y, VecF& f) {
        y = C::from_odds(*column(y_, i) * factor);
        f = C::density_of(y);
      });
    }
    return evaluate();
  }

  // Writes y, and returns by how much the sum of a y misses the budget.
  template <class Value>
  KHOT_INLINE VecF write_values(Value value) {
    ExactBlockSum spent;
    for (int i = 0; i < n_; ++i) {
      const VecF y = value(i);
      *column(y_, i) = y;
      spent.add(*column(a_, i) * y, i);
    }
    VecF sum;
    return missing(spent, sum);
  }
  VecF finish(VecF h) {
    if constexpr (C::value_from_odds) {
      const VecF factor = exp<float>(h);
      return write_values([=](int i) { return C::from_odds(*column(y_, i) * factor); });
    }
    return splat(static_cast<float>(kNan));
  }
  VecF write() {
    const C F = F_;
    return write_values(
        [=](int i) { return F.template value<float>(position(*column(x_, i), u(*column(a_, i)))); });
  }

  C F_;
  Guard guard_;   // of compact support
  VecF slope_{};  // the last sum of a f
  bool stores_;   // whether a pass stores odds
};

}  // namespace khot::KHOT_ISA
