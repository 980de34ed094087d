// The ordinary solver of the soft budget: rows in which many costs are undecided. A guess from weighted
// moments, or from a sample, and the search of soft_topk/ordinary.h with costs in its sums. Rows that are not
// like this are given back to the careful solver.
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/weights.h"
#include "search/row.h"

namespace khot::KHOT_ISA {

struct MomentSums : Moments {
  float most = 0;
  bool bad = false;
  void operator+=(const MomentSums& o) {
    Moments::operator+=(o);
    most = std::max(most, o.most), bad |= o.bad;
  }
};

inline double power_below(double mean) {
  return mean > 1e-30 && mean < 1e30 ? std::ldexp(1.0, -std::ilogb(mean)) : 1.0;
}

// The reciprocal of the mean of some costs as a power of 2, in which products of costs do not overflow.
KHOT_APART inline double unit_of(const Row& cost, int64_t n) {
  float buffer[kBlock];
  const int count = static_cast<int>(std::min<int64_t>(n, kBlock));
  const float* p = fetch(cost, 0, count, buffer);
  VecF total{};
  vectors<float>(p, count, 0.0f, [&](VecF w, int, int) { total += w; });
  return power_below(sum<float>(total) / static_cast<double>(count));
}

// The sums of a guess, of costs in units of 1/s by value.
template <bool kByValue>
KHOT_APART MomentSums moment_sums(const Row& x, const Row& cost, int64_t n, const Parallel* inside,
                                  float origin, float s) {
  return reduce_beside<float, MomentSums>(
      x, cost, n, inside, [=](MomentSums& sums, const float* p, const float* q, int count) {
        VecF w{}, d{}, dd{}, ww{}, wd{}, www{}, most{};
        IntF bad{};
        vectors<float>(p, count, -kInf<float>, [&](VecF v, int i, int lanes) {
          const VecF given = beside(q, i, lanes);
          const IntF there = v > -kInf<float>;
          bad |= ~((given >= 0) & (given < kInf<float>)) | ~(v < kInf<float>);
          const VecF a = there ? given : VecF{}, off = there ? v - origin : VecF{}, ad = a * off;
          w += a;
          d += ad;
          dd += ad * off;
          if constexpr (kByValue) {
            const VecF b = a * s, square = b * b;
            most = b > most ? b : most;
            ww += square;
            wd += square * off;
            www += square * b;
          }
        });
        sums.w += sum<float>(w), sums.d += sum<float>(d), sums.dd += sum<float>(dd);
        sums.bad |= any(bad);
        if constexpr (kByValue) {
          sums.ww += sum<float>(ww), sums.wd += sum<float>(wd), sums.www += sum<float>(www);
          sums.most = std::max(sums.most, maximum<float>(most));
        }
      });
}

// By the moments of a row, where the budget is spent if entries are taken whole, how far scores spread, and
// what costs there are per unit of a level.
struct Around {
  double level = kNan, deviation = kNan, density = kNan;
};

template <class C, bool kByValue>
class OrdinaryBudget : public RowPasses<C, Cost<kByValue>> {
  using Passes = RowPasses<C, Cost<kByValue>>;
  using Passes::near_, Passes::split;
  using Passes::terms_, Passes::x_, Passes::n_, Passes::tau_, Passes::F_, Passes::inside_, Passes::t_;

 public:
  using Passes::good;

  OrdinaryBudget(const Row& x, const Row& cost, int64_t n, double tau, const C& F, const Parallel* inside)
      : Passes({cost}, x, n, tau, F, inside) {}

  // Returns whether the row was ordinary. Then t is the threshold, and out holds y. At most that much is
  // spent with at_most, where t is not negative. With leaves_wide, rows whose scores spread so far that few
  // costs can be undecided are not ordinary; of these, around() is known.
  bool solve(double budget, bool at_most, bool leaves_wide, Goal& goal, Threshold& t, void* out) {
    if (!(budget > 0 && budget < kInfinity)) return false;
    budget_ = budget;
    const bool stores = Passes::kStores && x_.dtype == Dtype::kFloat;
    if (at_most) {
      if (kByValue) take_unit(unit_of(terms_.cost, n_));
      Passes::start(0, out, false, C::value_from_odds);
      const CostRowSums s = Passes::evaluate();
      const double miss = missing(s.m + s.C);
      if (s.bad || !(std::fabs(miss) > 1e-5 * (s.m + s.C))) return false;
      if (miss < 0) {
        t = {0, 0};
        return std::fabs(Passes::write(t)) < kInfinity;
      }
    }
    double guess = kNan;
    if (n_ >= kSampleFrom) guess = from_sample(goal);
    if (!(std::fabs(guess) < 1e30)) guess = from_moments(goal);
    if (!(std::fabs(guess) < 1e30) || (leaves_wide && is_wide())) return false;
    Passes::start(guess, out, stores, C::value_from_odds);
    const Found<OrdinaryBudget> found = find(*this);
    if (!good || !confirm(found, t)) return false;
    const double unit = terms_.unit;
    t.hi *= unit, t.lo *= unit;  // by value, t a = (t s) w for a = w s
    return !at_most || t.hi + t.lo > 0;
  }

  // From this deviation of the scores on, in tau, few costs are undecided; not few enough in long rows.
  bool is_wide() const { return around_.deviation > tau_ * std::max(100.0, static_cast<double>(n_) / 80); }
  Around around() const { return around_; }

  // Writes y at t, and returns whether it spends the budget.
  bool put(Threshold t, double budget, void* out) {
    budget_ = budget;
    Passes::start(t.hi, out, false, false);
    return std::fabs(missing(Passes::write(t))) <= 4e-7 * budget;
  }

  // The step in t/tau. A row that is not ordinary is no longer good.
  double step(const CostRowSums& s) {
    const double spent = s.m + s.C, miss = missing(spent);
    if (kByValue && !(most_ < kInfinity)) most_ = s.most;
    good = !s.bad;
    settled_ = near_ && reaches(miss, s.S1);
    if (settled_) return 0;
    // In units in which the mean cost is about 1, as the bounds of halley_step assume.
    const double scale = static_cast<double>(n_) / s.total, n = static_cast<double>(n_);
    const double k = budget_ * terms_.unit * scale, few = std::min(k, n - k);
    good &= few > 0 && s.S1 * kDecided > std::min(spent, s.total);
    const CountSums<double> sums{spent * scale, (s.total - spent) * scale,
                                 miss * scale,  s.S1 * scale,
                                 s.S2 * scale,  s.S3 * scale,
                                 s.S4 * scale,  s.S5 * scale};
    double h = loose_step<C, ScalarArithmetic>(sums, k, n, few, good);
    if (std::fabs(h) * std::min(most_, 1e30) < 0.5) h = refined(h, sums);
    good &= std::fabs(h) < 50;
    return h;
  }

  bool goes_on(double h) {
    const bool done = C::full_support ? std::fabs(h) * most_ <= C::last_step : settled_;
    near_ = !C::full_support && std::fabs(h) <= Passes::kNear;
    return !done;
  }

 private:
  // Where the sum of a y is so many times the sum of a f, most entries are decided.
  static constexpr double kDecided = C::full_support ? 48 : 6;

  double missing(double spent) const { return spent - budget_ * terms_.unit; }
  void take_unit(double unit) { terms_.unit = static_cast<float>(unit); }

  double from_moments(Goal& goal) {
    const Row& cost = terms_.cost;
    float start = 0;
    float origin = 0;
    if (!kByValue) {
      const float first = n_ ? *fetch(x_, 0, 1, &start) : 0;
      origin = std::fabs(first) < kInf<float> ? first : finite_entry(x_, n_);
    }
    const double unit = kByValue ? unit_of(cost, n_) : 1;
    MomentSums m = moment_sums<kByValue>(x_, cost, n_, inside_, origin, static_cast<float>(unit));
    if (m.bad || !(budget_ > 1e-30 && budget_ > 1e-9 * m.w && budget_ < (1 - 1e-6) * m.w)) return kNan;
    goal.set(budget_, m.w, F_);
    if constexpr (kByValue) {
      // from the units of the first costs to those of the mean
      take_unit(power_below(m.w / static_cast<double>(n_)));
      const double own = terms_.unit, ratio = own / unit;
      most_ = m.most * ratio;
      m.w *= own, m.d *= own, m.dd *= own;
      m.ww *= ratio * ratio, m.wd *= ratio * ratio, m.www *= ratio * ratio * ratio;
      const Guess guess = guess_by_value(m, goal, tau_, F_);
      const double density = m.ww / own * Normal().pdf(goal.normal) / (own * guess.deviation);
      around_ = {guess.t * own, guess.deviation, density};
      return guess.t;
    }
    const double off = m.d / m.w, variance = std::max(m.dd / m.w - off * off, 0.0);
    const double deviation = std::sqrt(variance), z = goal.normal;
    around_ = {origin + off - z * deviation, deviation, m.w * Normal().pdf(z) / deviation};
    return goal.guess(origin + off, variance, tau_, F_);
  }

  // The threshold of a sample; NaN where it does not tell enough.
  double from_sample(Goal& goal) {
    float scores[kSampleMax], costs[kSampleMax];
    const int size = take_sample(x_, n_, scores);
    take_sample(terms_.cost, n_, costs);
    OrdinaryBudget part({scores, Dtype::kFloat, 1}, {costs, Dtype::kFloat, 1}, size, tau_, F_, nullptr);
    part.budget_ = budget_ * (static_cast<double>(size) / static_cast<double>(n_));
    double t = part.from_moments(goal);
    if (!(std::fabs(t) < 1e30)) return kNan;
    around_ = part.around_;
    around_.density *= static_cast<double>(n_) / static_cast<double>(size);
    terms_.unit = part.terms_.unit;
    // the largest cost is not known, so that no step counts as short before it is
    if (kByValue) most_ = kInfinity;
    for (int pass = 0; pass < 4; ++pass) {
      const double h = part.step(part.tails(split(t)));
      if (!part.good) return kNan;
      t += h * tau_;
      if (std::fabs(h) * part.most_ <= 0.1) break;
    }
    return t;
  }

  // How far the sum of a y may be from what is asked for: as little as the budget demands, and as little as
  // every y demands.
  bool reaches(double miss, double S1) const {
    const double goal = budget_ * terms_.unit, steep = F_.pdf(F_.median) * most_;
    return std::fabs(miss) <= std::min(4e-7 * goal, std::max(4e-7 * S1 / steep, 5e-8 * goal));
  }

  // Writes y, and returns whether it spends the budget as closely as promised.
  bool confirm(const Found<OrdinaryBudget>& found, Threshold& t) {
    if constexpr (!C::full_support) {
      t = Passes::written_;
      return !Passes::may_end_gap(found.sums);
    }
    t = split(t_);
    const double S1 = found.sums.S1;
    double left;
    if constexpr (Passes::kStores) {
      left = missing(this->stores() ? Passes::finish(found.moved) : Passes::write(t));
    } else {
      left = missing(Passes::write(t));
    }
    if (reaches(left, S1)) return true;
    // float noise, or a Taylor polynomial that is not exact enough; the odds are gone
    const double more = left / S1;
    t = split(t_ + more * tau_);
    return std::fabs(more) < Passes::kNear && reaches(missing(Passes::write(t)), S1);
  }

  double budget_ = 0;
  Around around_;
  double most_ = 1;  // the largest a: 1 by score
  bool settled_ = false;
};

}  // namespace khot::KHOT_ISA
