// The ordinary solver of the soft budget: rows in which many costs are undecided. A guess from weighted
// moments, or from a sample, and a few steps of Halley's kind, as in soft_topk/ordinary.h, with passes in
// float. Rows that are not like this are given back to the careful solver.
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/weights.h"
#include "soft_topk/ordinary.h"

namespace khot::KHOT_ISA {

// What a pass at a threshold finds, in the costs' units a = w s: s = 1 by score.
struct BudgetSums {
  double total = 0, spent = 0;  // the sums of a and of a y
  double S[5] = {};             // the sums of a f and of its derivatives along t
  double most = 0;              // the largest a
  bool bad = false;             // an entry does not suit this solver
  void operator+=(const BudgetSums& o) {
    total += o.total, spent += o.spent, most = std::max(most, o.most), bad |= o.bad;
    for (int i = 0; i < 5; ++i) S[i] += o.S[i];
  }
};

// The vectors that one pass adds up.
template <class C>
struct BudgetAdder {
  typename C::Derivatives derivatives;
  LongSum spent;
  VecF S[C::Derivatives::kCurve + 1] = {};

  explicit BudgetAdder(const C& F) : derivatives(F.derivatives()) {}
  // The entry lies at z = (x - t u)/tau and costs a.
  KHOT_INLINE void add(VecF z, VecF y, VecF f, VecF a, VecF u) {
    spent.add(a * y);
    VecF d[C::Derivatives::kCurve + 1];
    derivatives.curve(z, y, f, d);
    VecF weight = a * u;
    S[0] += weight * f;
#pragma GCC unroll 4
    for (int i = 0; i < C::Derivatives::kCurve; ++i) {
      weight *= u;
      S[i + 1] += weight * d[i];
    }
  }
  KHOT_INLINE void put(BudgetSums& s) const {
    s.spent += sum<double>(spent.total);
    for (int i = 0; i <= C::Derivatives::kCurve; ++i) s.S[i] += sum<float>(S[i]);
  }
};

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
  return reduce<float, MomentSums>(
      x, n, inside, [=](MomentSums& sums, const float* p, int count, int64_t at) {
        float buffer[kBlock];
        const float* q = fetch(cost, at, count, buffer);
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

struct Spent {
  double sum = 0;
  void operator+=(const Spent& o) { sum += o.sum; }
};

template <class C>
class OrdinaryBudget {
 public:
  OrdinaryBudget(const BudgetSpec& spec, const C& F, const Row& x, const Row& cost, double tau)
      : spec_(spec),
        F_(F),
        x_(x),
        cost_(cost),
        n_(spec.n),
        next_(n_ <= kAhead ? n_ : 0),
        tau_(tau),
        stores_(C::value_from_odds && !spec.by_value && x.dtype == Dtype::kFloat) {}

  // Returns whether the row was ordinary. Then t is the threshold, and out holds y.
  bool solve(double budget, Goal& goal, Threshold& t, void* out) {
    if (!(budget > 0 && budget < kInfinity)) return false;
    out_ = out;
    budget_ = budget;
    if (spec_.at_most) {
      if (spec_.by_value) unit_ = unit_of(cost_, n_);
      const BudgetSums s = evaluate(split(0), false);
      const double miss = s.spent - budget_ * unit_;
      if (s.bad || !(std::fabs(miss) > 1e-5 * s.spent)) return false;
      if (miss < 0) {
        t = {0, 0};
        return std::fabs(write(t)) < kInfinity;
      }
    }
    double guess = kNan;
    if (n_ >= kSampleFrom) guess = from_sample(goal);
    if (!(std::fabs(guess) < 1e30) && !from_moments(x_, cost_, n_, budget, goal, guess)) return false;
    if (!refine(guess, t)) return false;
    t.hi *= unit_, t.lo *= unit_;  // by value, t a = (t s) w for a = w s
    return !spec_.at_most || t.hi + t.lo > 0;
  }

 private:
  static constexpr int kPasses = 8 + C::extra_passes;
  // From a step of this length on, a pass under compact support writes y.
  static constexpr double kNear = 0.01;
  // Where the sum of a y is so many times the sum of a f, most entries are decided.
  static constexpr double kDecided = C::full_support ? 16 : 6;

  static Threshold split(double t) {
    const double hi = static_cast<double>(static_cast<float>(t));
    return {hi, t - hi};
  }

  // ---- the guess

  bool from_moments(const Row& x, const Row& cost, int64_t n, double budget, Goal& goal, double& guess) {
    float start = 0;
    float origin = 0;
    if (!spec_.by_value) {
      const float first = *fetch(x, 0, 1, &start);
      origin = std::fabs(first) < kInf<float> ? first : finite_entry<float>(x, n);
    }
    const double unit = spec_.by_value ? unit_of(cost, n) : 1;
    const float s = static_cast<float>(unit);
    const Parallel* const inside = n == n_ ? spec_.inside : nullptr;
    MomentSums m = spec_.by_value ? moment_sums<true>(x, cost, n, inside, origin, s)
                                  : moment_sums<false>(x, cost, n, inside, origin, s);
    if (m.bad || !(budget > 1e-30 && budget > 1e-9 * m.w && budget < (1 - 1e-6) * m.w)) return false;
    goal.set(budget, m.w, F_);
    if (spec_.by_value) {
      // from the units of the first costs to those of the mean
      unit_ = power_below(m.w / static_cast<double>(n));
      const double ratio = unit_ / unit;
      most_ = m.most * ratio;
      m.w *= unit_, m.d *= unit_, m.dd *= unit_;
      m.ww *= ratio * ratio, m.wd *= ratio * ratio, m.www *= ratio * ratio * ratio;
      guess = guess_by_value(m, goal, tau_, F_);
    } else {
      const double off = m.d / m.w, variance = std::max(m.dd / m.w - off * off, 0.0);
      guess = goal.guess(origin + off, variance, tau_, F_);
    }
    return std::fabs(guess) < 1e30;
  }

  // The threshold of a sample, which is evenly spaced blocks of the row; NaN where it does not tell enough.
  double from_sample(Goal& goal) {
    float scores[kSampleMax], costs[kSampleMax];
    const int size = n_ >= 8 * kSampleMax ? kSampleMax : kSampleMax / 4, block = size / kSampleBlocks;
    for (int i = 0; i < kSampleBlocks; ++i) {
      const int64_t at = (n_ - block) / (kSampleBlocks - 1) * i;
      for (auto [row, target] : {std::pair(x_, scores + i * block), std::pair(cost_, costs + i * block)}) {
        const float* p = fetch(row, at, block, target);
        if (p != target) std::memcpy(target, p, block * sizeof(float));
      }
    }
    const double share = static_cast<double>(size) / static_cast<double>(n_);
    OrdinaryBudget part(spec_, F_, {scores, Dtype::kFloat, 1}, {costs, Dtype::kFloat, 1}, tau_);
    part.n_ = size, part.next_ = 0, part.spec_.inside = nullptr, part.budget_ = budget_ * share;
    double t;
    if (!part.from_moments(part.x_, part.cost_, size, part.budget_, goal, t)) return kNan;
    unit_ = part.unit_;
    if (spec_.by_value)
      most_ = kInfinity;  // the largest cost is not known, so that no step counts as short before it is
    for (int pass = 0; pass < 4; ++pass) {
      const double h = part.step_to(part.evaluate(split(t), false));
      if (!(std::fabs(h) < 50)) return kNan;
      t += h * tau_;
      if (std::fabs(h) * part.most_ <= 0.1) break;
    }
    return t;
  }

  // ---- the search

  // How far the sum of a y may be from what is asked for: as little as the budget demands, and as little as
  // every y demands.
  bool reaches(double miss, double S1) const {
    const double goal = budget_ * unit_, steep = F_.pdf(F_.median) * most_;
    return std::fabs(miss) <= std::min(4e-7 * goal, std::max(4e-7 * S1 / steep, 5e-8 * goal));
  }

  bool refine(double t, Threshold& result) {
    double moved = 0;  // by how much t has moved since odds were stored, in tau
    double h = kInfinity;
    BudgetSums s;
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool near = std::fabs(h) <= kNear;
      if (stores_ && pass > 0 && std::fabs(moved) < 1) {
        s = shift(moved, s.total);
      } else {
        s = evaluate(split(t), near);
        moved = 0;
      }
      if (s.bad) return false;
      if (spec_.by_value && pass == 0) most_ = s.most;
      const double miss = s.spent - budget_ * unit_;
      if (!C::full_support && near && reaches(miss, s.S[0])) {
        result = split(t);
        return true;
      }
      h = step_to(s);
      if (!(std::fabs(h) < 50)) return false;
      t += h * tau_, moved += h;
      if (C::full_support && std::fabs(h) * most_ <= C::last_step && (!stores_ || std::fabs(moved) < 1)) {
        const double left = (stores_ ? finish(moved) : write(split(t))) - budget_ * unit_;
        if (reaches(left, s.S[0])) {
          result = split(t);
          return true;
        }
        // float noise, or a Taylor polynomial that is not exact enough; the odds are gone
        const double more = left / s.S[0];
        t += more * tau_;
        result = split(t);
        return std::fabs(more) < kNear && reaches(write(result) - budget_ * unit_, s.S[0]);
      }
    }
    return false;
  }

  // The step in t/tau; NaN where the row is not ordinary.
  double step_to(const BudgetSums& s) const {
    // In units in which the mean cost is about 1, as the bounds of halley_step assume.
    const double scale = static_cast<double>(n_) / s.total, k = budget_ * unit_ * scale,
                 n = static_cast<double>(n_), few = std::min(k, n - k), most = most_;
    if (!(few > 0) || !(s.S[0] * kDecided > std::min(s.spent, s.total))) return kNan;
    const CountSums<double> sums{s.spent * scale,
                                 (s.total - s.spent) * scale,
                                 (s.spent - budget_ * unit_) * scale,
                                 s.S[0] * scale,
                                 s.S[1] * scale,
                                 s.S[2] * scale,
                                 s.S[3] * scale,
                                 s.S[4] * scale};
    bool good = true;
    double h = loose_step(sums, k, n, few, good);
    if (good && std::fabs(h) * std::min(most, 1e30) < 0.5) h = refined(h, sums);
    return good ? h : kNan;
  }

  // halley_step without its bound on what a step under compact support may miss: reaches() has one.
  static double loose_step(const CountSums<double>& s, double k, double n, double few, bool& good) {
    if constexpr (C::full_support) {
      return halley_step<C, ScalarArithmetic>(s, k, n, few, good);
    } else {
      good &= s.count > 0 && s.rest > 0 && s.S1 > 1e-2 * std::min(few, 1.0);
      return std::log1p(n * s.miss / (k * s.rest)) * s.count * s.rest / (n * s.S1);
    }
  }

  // ---- the passes

  // The sums at t. Odds are stored in out, or y with `writing`.
  BudgetSums evaluate(Threshold t, bool writing) {
    const Position<float> position(t, tau_, spec_.by_value);
    const float median = static_cast<float>(F_.median), unit = static_cast<float>(unit_);
    const float scale = static_cast<float>(kLog2E / tau_), lo = static_cast<float>(t.lo * kLog2E / tau_);
    const C F = F_;
    const Row cost = cost_;
    const bool own = x_.dtype == Dtype::kFloat;
    const bool storing = stores_ && out_ != nullptr;
    const bool write = !C::full_support && writing && out_ != nullptr;
    void* const out = out_;
    const Dtype dtype = x_.dtype;
    const float* const start = static_cast<const float*>(x_.data);
    const float* const cost_start = static_cast<const float*>(cost_.data);
    const int64_t next = next_;
    return reduce<float, BudgetSums>(
        x_, n_, spec_.inside, [=](BudgetSums& sums, const float* p, int count, int64_t at) {
          float buffer[kBlock], results[kBlock];
          const float* q = fetch(cost, at, count, buffer);
          float* const target = own && (storing || write) ? static_cast<float*>(out) + at : results;
          BudgetAdder<C> adder(F);
          LongSum total;
          VecF most{};
          IntF bad{};
          auto add = [&](VecF x, int i, int lanes) {
            const bool whole = lanes == kWidth<float>;
            if (next != 0) {
              fetch_ahead<false>(start + at + i, next);
              fetch_ahead<false>(cost_start + at + i, next);
            }
            const VecF given = beside(q, i, lanes), a = given * unit, u = position.a(a);
            bad |= ~((given >= 0) & (given < kInf<float>)) | ~(x < kInf<float>);
            const VecF there = x > -kInf<float> ? a : VecF{};
            total.add(there);
            most = there > most ? there : most;
            VecF z{}, y, f;
            if constexpr (C::value_from_odds) {
              const VecF e = exp2_held(fused<float>(splat(position.hi), u, -x) * scale + lo * u);
              if (storing) whole ? store(target + i, e) : store_part(target + i, lanes, e);
              y = C::from_odds(e);
              f = C::density_of(y);
            } else {
              z = position(x, a);
              const IntF above = z > median;
              const TailDensity<float> v = F.template split<float>(z, above);
              y = above ? 1 - v.tail : v.tail, f = v.density;
              if constexpr (!C::full_support) {
                y = F.template value<float>(z);
                if (write) whole ? store(target + i, y) : store_part(target + i, lanes, y);
              }
            }
            adder.add(z, y, f, a, u);
          };
          vectors<float>(p, count, -kInf<float>, add, [&] { adder.spent.flush(), total.flush(); });
          adder.put(sums);
          sums.total += sum<double>(total.total);
          sums.bad |= any(bad);
          sums.most = std::max<double>(sums.most, maximum<float>(most));
          if (write && !own) put(out, dtype, at, count, results);
        });
  }

  // The sums at t + h tau, from the odds that were stored at t.
  BudgetSums shift(double h, double total) {
    BudgetSums s;
    if constexpr (C::value_from_odds) {
      const float factor = static_cast<float>(std::exp(h));
      const C F = F_;
      const Row cost = cost_;
      s = reduce<float, BudgetSums>(Row{out_, Dtype::kFloat, 1}, n_, spec_.inside,
                                    [=](BudgetSums& sums, const float* p, int count, int64_t at) {
                                      float buffer[kBlock];
                                      const float* q = fetch(cost, at, count, buffer);
                                      BudgetAdder<C> adder(F);
                                      auto add = [&](VecF e, int i, int lanes) {
                                        const VecF y = C::from_odds(e * factor);
                                        adder.add(VecF{}, y, C::density_of(y), beside(q, i, lanes),
                                                  splat(1.0f));
                                      };
                                      vectors<float>(p, count, kNever, add, [&] { adder.spent.flush(); });
                                      adder.put(sums);
                                    });
    }
    s.total = total;
    return s;
  }

  // Writes y for the entries of `from`, and returns the sum of a y.
  template <class Value>
  double write_values(const Row& from, float pad, Value value) {
    const Row cost = cost_;
    const bool own = x_.dtype == Dtype::kFloat;
    const Dtype dtype = x_.dtype;
    void* const out = out_;
    const int64_t next = next_;
    const float unit = static_cast<float>(unit_);
    return reduce<float, Spent>(from, n_, spec_.inside,
                                [=](Spent& s, const float* p, int count, int64_t at) {
                                  const Value local = value;
                                  float buffer[kBlock], results[kBlock];
                                  const float* q = fetch(cost, at, count, buffer);
                                  float* const target = own ? static_cast<float*>(out) + at : results;
                                  LongSum total;
                                  auto add = [&](VecF x, int i, int lanes) {
                                    if (own) fetch_ahead<true>(target + i, next);
                                    const VecF a = beside(q, i, lanes) * unit;
                                    const VecF y = local(x, a);
                                    total.add(a * y);
                                    lanes == kWidth<float> ? store(target + i, y)
                                                           : store_part(target + i, lanes, y);
                                  };
                                  vectors<float>(p, count, pad, add, [&] { total.flush(); });
                                  s.sum += sum<double>(total.total);
                                  if (!own) put(out, dtype, at, count, results);
                                })
        .sum;
  }

  // Replaces the odds that were stored at t by y at t + h tau.
  double finish(double h) {
    if constexpr (C::value_from_odds) {
      const float factor = static_cast<float>(std::exp(h));
      return write_values(Row{out_, Dtype::kFloat, 1}, kNever,
                          [=](VecF e, VecF) { return e < kNever ? C::from_odds(e * factor) : VecF{}; });
    }
    return kNan;
  }

  double write(Threshold t) {
    const Position<float> position(t, tau_, spec_.by_value);
    const C F = F_;
    return write_values(x_, -kInf<float>,
                        [=](VecF x, VecF a) { return F.template value<float>(position(x, a)); });
  }

  BudgetSpec spec_;
  C F_;
  Row x_, cost_;
  int64_t n_, next_;
  double tau_, budget_ = 0;
  double unit_ = 1, most_ = 1;  // s, and the largest a
  void* out_ = nullptr;
  bool stores_;  // whether a pass stores odds in the place of y
};

}  // namespace khot::KHOT_ISA
