// The soft budget where most costs are decided. Sums of costs at a few levels lead to the entries about the
// threshold, from which alone it is found.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "budget/careful.h"
#include "budget/ordinary.h"

namespace khot::KHOT_ISA {

// The level of an entry, from which threshold on it is left out: its score, or by value that of a unit of
// cost.
template <bool kByValue>
class EntriesNearBudget {
 public:
  EntriesNearBudget(const float* x, const float* cost, int n) : x_(x), cost_(cost), n_(n) {}

  // Finds two levels, at which the entries from there on cost more and less than the budget, with few entries
  // or less than tau between them; false where a row has none, or an entry does not suit. The first trials
  // are where the moments say, and beside that.
  KHOT_APART bool bracket(double budget, double tau, const Around& around) {
    VecF least = splat(kInf<float>), most = -least;
    IntF bad{}, there{};
    LongSum total;
    vectors<float>(
        x_, n_, -kInf<float>,
        [&](VecF v, int i, int lanes) {
          const VecF w = beside(cost_, i, lanes);
          const IntF selectable = v > -kInf<float>, counts = selectable & (w > 0);
          const VecF level = kByValue ? v / (counts ? w : splat(1.0f)) : v;
          bad |= ~(v < kInf<float>) | (selectable & ~((w >= 0) & (w < kInf<float>)));
          there -= counts;
          total.add(selectable ? w : VecF{});
          least = counts & (level < least) ? level : least;
          most = counts & (level > most) ? level : most;
        },
        [&] { total.flush(); });
    all_ = at_low_ = sum<double>(total.total), at_high_ = 0;
    if (any(bad) || !(budget > 0 && budget < all_)) return false;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    low_ = minimum<float>(least);
    if (kByValue) low_ = std::nextafter(low_, -infinity);  // a quotient may be rounded up
    high_ = std::nextafter(maximum<float>(most), infinity);
    int from_low = 0, from_high = 0;
    for (int j = 0; j < kWidth<float>; ++j) from_low += there[j];
    const double mean = all_ / std::max(from_low, 1);
    double trial = around.level;
    bool halve = false;
    for (int pass = 0; pass < 24; ++pass) {
      const double width = static_cast<double>(high_) - low_;
      if (!(width < kInfinity)) return false;
      if (from_low - from_high <= kFew || width <= tau) break;
      if (pass >= kGuessed || !(trial > low_ && trial < high_)) {
        const double line = (at_low_ - budget) / (at_low_ - at_high_);
        trial = low_ + (halve ? 0.5 : std::min(std::max(line, 0.05), 0.95)) * width;
      }
      const float level = static_cast<float>(trial);
      if (!(level > low_ && level < high_)) break;
      int count;
      const double spent = spent_from(level, count);
      // a little beyond where the budget is spent at this density
      const double off = std::fabs(spent - budget), beyond = off + 2 * (std::sqrt(off * mean) + mean);
      trial = level + std::copysign(beyond, spent - budget) / around.density;
      if (spent > budget) {
        low_ = level, at_low_ = spent, from_low = count;
      } else {
        high_ = level, at_high_ = spent, from_high = count;
      }
      halve = static_cast<double>(high_) - low_ > 0.5 * width;
    }
    if (kByValue) a_ = least_cost();
    return true;
  }

  // Keeps the entries whose y is not 0 or 1 for certain: reach(a) says from where on, in tau, F or 1 - F is
  // e^-a or less. False where they are many.
  template <class Reach>
  bool keep(double budget, double tau, Reach reach) {
    const double rounding = 1e-6 * all_, over = at_low_ - budget - rounding,
                 under = budget - at_high_ - rounding;
    if (!(over > 0 && under > 0)) return false;
    // at the ends of this range, what is spent is on the other side of the budget
    least_ = low_ - tau * (reach(std::log(all_ / over)) + 1) / a_;
    most_ = high_ + tau * (reach(std::log(all_ / under)) + 1) / a_;
    return kept(tau * (reach(std::log(all_ / std::min(budget, all_ - budget)) + 22) + 1));
  }

  // What is left of the budget for the entries that were kept; and whether t is where it can be.
  double left(double budget) const { return Pair{budget}.minus(above_).value(); }
  bool holds(double t) const { return t >= least_ && t <= most_; }
  // Whether a pair of floats has the digits of t that tell z of these entries.
  bool has_digits(double t, double tau) const {
    bool all = true;
    for (int i = 0; i < size_; ++i) all &= !kByValue || carries_level(t * costs_[i], tau);
    return all;
  }
  // Whether one that costs something is so near to t. In a gap wider than that, those with the smallest costs
  // may count most by value, however far their levels are.
  bool any_within(double far, double t) const {
    bool found = !kByValue;
    for (int i = 0; i < size_; ++i) {
      found |= costs_[i] > 0 && std::fabs(xs_[i] - t * static_cast<double>(costs_[i])) < far;
    }
    return found;
  }
  // A threshold with an entry beside it at this z.
  double at(double z, double tau) const { return 0.5 * low_ + 0.5 * high_ - tau * z / a_; }
  // Whether one that costs something is chosen less at t than at 0.
  bool reaches_up(double t, double far, double below) const {
    bool found = false;
    for (int i = 0; i < size_; ++i) {
      found |= costs_[i] > 0 && xs_[i] > below && xs_[i] < (kByValue ? costs_[i] : 1) * t + far;
    }
    return found;
  }
  Row x() const { return {xs_, Dtype::kFloat, 1}; }
  Row cost() const { return {costs_, Dtype::kFloat, 1}; }
  int size() const { return size_; }
  float* out() { return ys_; }  // room for their y

 private:
  static constexpr int kFew = 4, kMost = 4096, kGuessed = 3;

  // x - t a, by which an entry is above t.
  static KHOT_INLINE VecF above(VecF x, VecF w, float t) { return offset<Cost<kByValue>>(x, splat(t), w); }

  // Of the entries between the levels.
  KHOT_APART double least_cost() const {
    VecF least = splat(kInf<float>);
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int i, int lanes) {
      const VecF w = beside(cost_, i, lanes);
      const IntF between = (w > 0) & (above(v, w, low_) >= 0) & (above(v, w, high_) < 0);
      least = between & (w < least) ? w : least;
    });
    return minimum<float>(least);
  }

  KHOT_APART double spent_from(float level, int& count) const {
    IntF counts{};
    LongSum spent;
    vectors<float>(
        x_, n_, -kInf<float>,
        [&](VecF v, int i, int lanes) {
          const VecF w = beside(cost_, i, lanes);
          const IntF in = above(v, w, level) >= 0;
          counts -= in & (w > 0);
          spent.add(in ? w : VecF{});
        },
        [&] { spent.flush(); });
    count = 0;
    for (int j = 0; j < kWidth<float>; ++j) count += counts[j];
    return sum<double>(spent.total);
  }

  KHOT_APART bool kept(double far) {
    const int most = std::min(n_ / 2, kMost);
    const float bottom = static_cast<float>(least_), top = static_cast<float>(most_),
                beyond = static_cast<float>(far);
    PairSum<double> chosen;  // to the last digit, which may put t in a gap
    int size = 0;
    vectors<float>(x_, n_, -kInf<float>, [&](VecF v, int i, int lanes) {
      const VecF w = beside(cost_, i, lanes);
      const IntF over = above(v, w, top) > beyond, in = (above(v, w, bottom) >= -beyond) & ~over;
      VecD half[2];
      halves(over ? w : VecF{}, half[0], half[1]);
      chosen.add(half[0]), chosen.add(half[1]);
      const int to = std::min(size, most);
      compress(reinterpret_cast<int32_t*>(xs_) + to, (IntF)v, in);
      size += compress(reinterpret_cast<int32_t*>(costs_) + to, (IntF)w, in);
    });
    above_ = total(chosen), size_ = size;
    return size > 0 && size <= most;
  }

  const float *x_, *cost_;
  int n_, size_ = 0;
  float low_ = 0, high_ = 0;
  double all_ = 0, at_low_ = 0, at_high_ = 0, least_ = 0, most_ = 0;
  Pair above_;    // what the entries cost that are chosen for certain
  double a_ = 1;  // by value, the least cost between the levels
  alignas(KHOT_VECTOR_BYTES) float xs_[kMost + kWidth<float>], costs_[kMost + kWidth<float>],
      ys_[kMost + kWidth<float>];
};

// Whether solve_near() may serve a row.
inline bool suits_near(const BudgetSpec& spec, const Row& x, const Row& cost) {
  auto plain = [](const Row& row) { return row.dtype == Dtype::kFloat && row.step == 1; };
  return plain(x) && plain(cost) && spec.n >= 16 && spec.n <= 1 << 20;
}

// Returns whether there is a threshold t; then out holds y.
template <bool kByValue, class C>
KHOT_APART bool solve_near(const BudgetSpec& spec, const C& F, const BlockCdf& careful, const Row& x,
                           const Row& cost, double budget, double tau, const Around& around, void* out,
                           Goal& goal, Threshold& t) {
  EntriesNearBudget<kByValue> near(static_cast<const float*>(x.data), static_cast<const float*>(cost.data),
                                   static_cast<int>(spec.n));
  if (!near.bracket(budget, tau, around) ||
      !near.keep(budget, tau, [](double a) { return C::tail_reach(a); }))
    return false;
  // Of these alone, more of the costs are undecided.
  const int size = near.size();
  const double left = near.left(budget);
  bool found;
  {
    const FlushSubnormals flush;
    found = OrdinaryBudget<C, kByValue>(near.x(), near.cost(), size, tau, F, nullptr)
                .solve(left, false, false, goal, t, near.out());
  }
  if (!found) {
    BudgetSpec part = spec;
    part.n = size, part.inside = nullptr, part.at_most = false;
    t = CarefulBudget(part, careful, near.x(), near.cost(), tau).solve(left, near.at(F.median, tau));
  }
  if (!near.holds(t.hi) || !near.has_digits(t.hi, tau) ||
      (C::full_support && !near.any_within(tau * C::tail_reach(8), t.hi)))
    return false;
  if (spec.at_most) {
    const double far = tau * C::tail_reach(36), below = C::full_support ? -far : 0;
    if (!(t.hi + t.lo > 0 && near.reaches_up(t.hi, far, below))) return false;
  }
  const FlushSubnormals flush;
  return OrdinaryBudget<C, kByValue>(x, cost, spec.n, tau, F, spec.inside).put(t, budget, out);
}

}  // namespace khot::KHOT_ISA
