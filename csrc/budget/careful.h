// The threshold t of a soft budget for any row, sum w F((x - t a)/tau) = B, in double: a bracket, a histogram
// of the costs where the scores spread far wider than tau, and Newton's method on log P = log Q.
//
// P - Q is sum w y - B without cancellation: P is what rejected entries spend and Q is what selected ones do
// not. The edge cases are those of khot/_kernels/reference/soft_budget.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/block_cdf.h"
#include "budget/weights.h"

namespace khot::KHOT_ISA {

class CarefulBudget {
 public:
  CarefulBudget(const BudgetSpec& spec, const BlockCdf& F, const Row& x, const Row& cost, double tau)
      : spec_(spec), F_(F), x_(x), cost_(cost), tau_(tau) {}

  KHOT_APART Threshold solve(double budget) {
    if (!(tau_ > 0 && tau_ < kInfinity)) return {kNan, kNan};
    const Costs costs = add_up();
    const double slack = spec_.slack * (costs.free + costs.pinned);
    double left = budget - costs.pinned;
    if (costs.bad != 0 || !(left >= -slack)) return {kNan, kNan};
    if (!spec_.at_most && !(left <= costs.free + slack)) return {kNan, kNan};
    left = std::max(left, 0.0);
    if (spec_.at_most) {
      const SpendSums s = evaluate({0, 0});
      if (s.spent - s.lacking + s.excess <= left) return {0, 0};
    }
    if (left >= costs.free) return {-kHuge, -kHuge};
    if (left == 0) return {kHuge, kHuge};
    left_ = left, free_ = costs.free;
    return newton();
  }

 private:
  static constexpr int kEvaluations = 128, kLogEvaluations = 8, kHistograms = 4, kBins = 1024;
  static constexpr double kFarthest = 1e300;
  static constexpr double kClose = 1e-9;  // a miss, relative to what can be missed, that only lo has to mend

  struct Costs {
    double free = 0, pinned = 0, bad = 0;  // of finite entries, of those that are +inf; how many are bad
    void operator+=(const Costs& o) { free += o.free, pinned += o.pinned, bad += o.bad; }
  };

  // The sums of a pass at t.
  struct SpendSums {
    double spent = 0;                         // w over the entries above: z > median
    double lacking = 0, excess = 0;           // w (1 - F) over these, and w F over the others
    double slope_above = 0, slope_below = 0;  // w a f
    void operator+=(const SpendSums& o) {
      spent += o.spent, lacking += o.lacking, excess += o.excess;
      slope_above += o.slope_above, slope_below += o.slope_below;
    }
  };

  Costs add_up() const {
    const Row cost = cost_;
    return reduce<double, Costs>(x_, spec_.n, spec_.inside,
                                 [=](Costs& sums, const double* p, int count, int64_t at) {
                                   double buffer[kBlock];
                                   const double* q = fetch(cost, at, count, buffer);
                                   VecD free{}, pinned{}, bad{};
                                   const VecD one = splat(1.0);
                                   vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
                                     const VecD w = beside(q, i, lanes);
                                     const IntD there = x != -kInfinity;
                                     const IntD wrong = (x != x) | (there & ~((w >= 0) & (w < kInfinity)));
                                     bad += wrong ? one : VecD{};
                                     free += abs<double>(x) < kInfinity ? w : VecD{};
                                     pinned += x == kInfinity ? w : VecD{};
                                   });
                                   sums += {sum<double>(free), sum<double>(pinned), sum<double>(bad)};
                                 });
  }

  SpendSums evaluate(Threshold t) const {
    const Position<double> position(t, tau_, spec_.by_value);
    const BlockCdf F = F_;
    const Row cost = cost_;
    return reduce<double, SpendSums>(
        x_, spec_.n, spec_.inside, [=](SpendSums& sums, const double* p, int count, int64_t at) {
          double buffer[kBlock], z[kWhole<double>], tails[kWhole<double>], densities[kWhole<double>];
          const double* q = fetch(cost, at, count, buffer);
          F.tails(position, p, q, count, z, tails, densities);
          VecD spent{}, lacking{}, excess{}, slope_above{}, slope_below{};
          const VecD zero{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = abs<double>(x) < kInfinity ? beside(q, i, lanes) : zero;
            const IntD above = load(z + i) > F.median;
            const VecD tail = w > 0 ? w * load(tails + i) : zero,
                       slope = w > 0 ? w * position.a(w) * load(densities + i) : zero;
            spent += above ? w : zero;
            lacking += above ? tail : zero;
            excess += above ? zero : tail;
            slope_above += above ? slope : zero;
            slope_below += above ? zero : slope;
          });
          sums += {sum<double>(spent), sum<double>(lacking), sum<double>(excess), sum<double>(slope_above),
                   sum<double>(slope_below)};
        });
  }

  struct Range {
    double low = kInfinity, high = -kInfinity;
    void operator+=(const Range& o) { low = std::min(low, o.low), high = std::max(high, o.high); }
  };

  // The least and the greatest threshold at which an entry that costs something lies at z.
  Range levels(double z) const {
    const double offset = tau_ * z;
    const Position<double> position({0, 0}, tau_, spec_.by_value);
    const Row cost = cost_;
    return reduce<double, Range>(x_, spec_.n, spec_.inside,
                                 [=](Range& range, const double* p, int count, int64_t at) {
                                   double buffer[kBlock];
                                   const double* q = fetch(cost, at, count, buffer);
                                   VecD low = splat(kInfinity), high = -low;
                                   vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
                                     const VecD w = beside(q, i, lanes);
                                     const IntD counts = (abs<double>(x) < kInfinity) & (w > 0);
                                     const VecD level = (x - offset) / position.a(counts ? w : splat(1.0));
                                     low = counts & (level < low) ? level : low;
                                     high = counts & (level > high) ? level : high;
                                   });
                                   range += {minimum<double>(low), maximum<double>(high)};
                                 });
  }

  // The levels next to t: the least one of the entries above and the greatest one of the others. Under
  // compact support they are where y leaves 1 or 0.
  Range neighbours(Threshold t) const {
    const Position<double> position(t, tau_, spec_.by_value);
    const double median = F_.median, end = F_.full_support ? median : 1, start = F_.full_support ? median : 0;
    const double tau = tau_;
    const Row cost = cost_;
    return reduce<double, Range>(x_, spec_.n, spec_.inside,
                                 [=](Range& range, const double* p, int count, int64_t at) {
                                   double buffer[kBlock];
                                   const double* q = fetch(cost, at, count, buffer);
                                   VecD up = splat(kInfinity), down = -up;
                                   vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
                                     const VecD w = beside(q, i, lanes);
                                     const IntD counts = (abs<double>(x) < kInfinity) & (w > 0);
                                     const IntD above = position(x, w) > median;
                                     const VecD a = position.a(counts ? w : splat(1.0));
                                     const VecD leaves = (x - end * tau) / a, enters = (x - start * tau) / a;
                                     up = counts & above & (leaves < up) ? leaves : up;
                                     down = counts & ~above & (enters > down) ? enters : down;
                                   });
                                   range += {minimum<double>(up), maximum<double>(down)};
                                 });
  }

  struct Bins {
    double spent[kBins + 2] = {};
    void operator+=(const Bins& o) {
      for (int i = 0; i < kBins + 2; ++i) spent[i] += o.spent[i];
    }
  };

  // Narrows the range of the levels at the median to a few tau around the level down to which the budget pays
  // if every entry is taken whole. It bounds nothing: it is a guess.
  double histogram_search(Range range) const {
    const double offset = tau_ * F_.median;
    const bool by_value = spec_.by_value;
    const Row cost = cost_;
    for (int step = 0; step < kHistograms && range.high - range.low > 2 * tau_; ++step) {
      const double bottom = range.low, width = (range.high - range.low) * (1 + 1e-12) / kBins;
      const double inverse = 1 / width;
      if (!(inverse < kInfinity && width < kInfinity && width > 0)) break;
      const Bins bins = reduce<double, Bins>(
          x_, spec_.n, spec_.inside, [=](Bins& b, const double* p, int count, int64_t at) {
            double buffer[kBlock];
            const double* q = fetch(cost, at, count, buffer);
            for (int i = 0; i < count; ++i) {
              if (!(std::fabs(p[i]) < kInfinity && q[i] > 0)) continue;
              double bin = ((p[i] - offset) / (by_value ? q[i] : 1) - bottom) * inverse + 1;
              bin = bin > 0 ? bin : 0;
              bin = bin < kBins + 1 ? bin : kBins + 1;
              b.spent[static_cast<int>(bin)] += q[i];
            }
          });
      double spent = 0;
      int i = kBins + 1;
      for (; i > 0; --i) {
        spent += bins.spent[i];
        if (spent >= left_) break;
      }
      if (i == 0 || i == kBins + 1) break;
      range.low = bottom + (i - 1) * width, range.high = bottom + i * width;
      if (!(width < 1e-3 * kFarthest)) break;
    }
    return 0.5 * range.low + 0.5 * range.high;
  }

  // A point between the two: the middle, or the middle of their bits where one is far larger than the other.
  static double between(double low, double high) {
    const double middle = 0.5 * low + 0.5 * high;
    const bool far = low < 0 ? (high > 0 || low < 4 * high) : high > 4 * low;
    if (!far) return middle;
    auto key = [](double v) {
      int64_t bits;
      const double size = std::fabs(v);
      std::memcpy(&bits, &size, 8);
      return v >= 0 ? bits : -bits;
    };
    const int64_t a = key(low), b = key(high), half = (a & b) + ((a ^ b) >> 1);
    const int64_t size = half < 0 ? -half : half;
    double value;
    std::memcpy(&value, &size, 8);
    value = half < 0 ? -value : value;
    return std::fabs(value) < kInfinity ? value : middle;
  }

  // Makes hi + lo the threshold, with the rounding error of the new hi as its lo. Returns by how much hi
  // moved.
  static double move(Threshold& t, double lo) {
    const double hi = t.hi + lo, part = hi - t.hi, before = t.hi;
    t = {hi, (before - (hi - part)) + (lo - part)};
    return hi - before;
  }

  Threshold newton() const {
    const double share = std::min(std::max(left_ / free_, kTiny), 1 - 1e-16);
    const Range ends = levels(F_.icdf(share)), centres = levels(F_.median);
    auto held = [](double v) { return std::min(std::max(v, -kFarthest), kFarthest); };
    double low = held(ends.low), high = held(ends.high);
    const double pad = 1e-14 * std::max(std::fabs(low), std::fabs(high)) + (spec_.by_value ? 0 : 1e-9 * tau_);
    low -= pad, high += pad;
    if (spec_.at_most) low = std::max(low, 0.0);
    Threshold t{histogram_search({held(centres.low), held(centres.high)}), 0};
    if (!(t.hi > low && t.hi < high)) t = {0.5 * low + 0.5 * high, 0};
    low -= t.hi, high -= t.hi;  // from here on, bounds are relative to t.hi, and have digits that it has not
    Threshold best = t;
    const double scale = std::max(std::min(left_, free_ - left_), 1e-13 * left_);
    const double noise = std::max(1e-14 * scale, 8 * 0x1p-52 * left_);  // below it, rounding keeps a miss up
    double best_miss = kInfinity, span = kInfinity;
    for (int count = 1; count <= kEvaluations; ++count) {
      const SpendSums s = evaluate(t);
      double over = s.spent - left_;
      if (std::fabs(over) <= 8 * 0x1p-52 * std::max(s.spent, left_)) over = 0;
      const double P = s.excess + std::max(over, 0.0), Q = s.lacking + std::max(-over, 0.0), miss = P - Q;
      const bool nothing =
          F_.full_support ? s.lacking < kTiny || s.excess < kTiny : s.lacking == 0 && s.excess == 0;
      if (over == 0 && nothing) {
        const Range gap = neighbours(t);
        // with no entry on one side of the gap, nothing or everything is paid for, but for rounding
        if (gap.high == -kInfinity) return {-kHuge, -kHuge};
        if (gap.low == kInfinity) return {kHuge, kHuge};
        const double middle = 0.5 * gap.low + 0.5 * gap.high;
        return F_.full_support ? log_newton({middle, 0}) : Threshold{middle, 0};
      }
      const bool settled = std::fabs(miss) <= noise && std::fabs(miss) >= 0.5 * best_miss;
      if (std::fabs(miss) < best_miss) best = t, best_miss = std::fabs(miss);
      if (settled || std::fabs(miss) <= 1e-15 * scale) break;
      if (miss > 0) low = std::max(low, t.lo);
      if (miss < 0) high = std::min(high, t.lo);
      double step = tau_ * miss / (s.slope_above + s.slope_below);
      if (F_.full_support) {
        const double logs = tau_ * (std::log(P) - std::log(Q)) / (s.slope_below / P + s.slope_above / Q);
        if (std::fabs(logs) < kInfinity) step = logs;
      }
      double trial = t.lo + step;
      const bool close = std::fabs(miss) <= kClose * scale;
      // a bracket that has not become half as wide in three evaluations is bisected
      const bool slow = count % 3 == 0 && high - low > 0.5 * span && !close;
      if (count % 3 == 0) span = high - low;
      const double room = close ? 8 * 0x1p-52 * std::fabs(t.hi) : 0;  // bounds were seen from another hi
      if (!(trial > low - room && trial < high + room) || slow) {
        trial = between(t.hi + low, t.hi + high) - t.hi;
        if (!(trial > low && trial < high)) trial = 0.5 * low + 0.5 * high;
        if (!(trial > low && trial < high)) break;
      }
      if (close) {  // another hi would round the products with the costs anew
        t.lo = trial;
      } else {
        const double moved = move(t, trial);
        low -= moved, high -= moved;
      }
    }
    return best;
  }

  struct LogSums {  // of w (1 - F) and w a f over the entries above, and of w F and w a f over the others
    double top[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
    double total[4] = {};
    void operator+=(const LogSums& o) {
      for (int i = 0; i < 4; ++i) top[i] = std::max(top[i], o.top[i]), total[i] += o.total[i];
    }
  };

  // Newton's method on log P = log Q in a gap so wide that tails underflow.
  Threshold log_newton(Threshold t) const {
    const BlockCdf F = F_;
    const Row cost = cost_;
    for (int i = 0; i < kLogEvaluations; ++i) {
      const Position<double> position(t, tau_, spec_.by_value);
      LogSums tops;
      auto pass = [&](bool add) {
        const LogSums known = tops;
        return reduce<double, LogSums>(
            x_, spec_.n, spec_.inside, [=](LogSums& sums, const double* p, int count, int64_t at) {
              double buffer[kBlock], place[kWhole<double>], tails[kWhole<double>], densities[kWhole<double>];
              const double* q = fetch(cost, at, count, buffer);
              position.put(p, q, count, place);
              F.logs(place, count, tails, densities);
              VecD most[4], total[4];
              for (int j = 0; j < 4; ++j) most[j] = splat(-kInfinity), total[j] = VecD{};
              vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
                const VecD w = beside(q, i, lanes);
                const IntD counts = (abs<double>(x) < kInfinity) & (w > 0);
                const VecD log_w = log_apart(counts ? w : splat(1.0));
                const IntD above = load(place + i) > F.median;
                const VecD tail = log_w + load(tails + i);
                const VecD slope = log_w + load(densities + i) + (position.by_value ? log_w : VecD{});
                for (int j = 0; j < 4; ++j) {
                  const IntD here = counts & (j < 2 ? above : ~above);
                  const VecD v = here ? (j % 2 == 0 ? tail : slope) : splat(-kInfinity);
                  most[j] = v > most[j] ? v : most[j];
                  if (add) total[j] += here ? exp<double>(v - known.top[j]) : VecD{};
                }
              });
              for (int j = 0; j < 4; ++j) {
                sums.top[j] = std::max(sums.top[j], maximum<double>(most[j]));
                sums.total[j] += sum<double>(total[j]);
              }
            });
      };
      tops = pass(false);
      const LogSums sums = pass(true);
      double logs[4];
      for (int j = 0; j < 4; ++j) logs[j] = tops.top[j] + std::log(sums.total[j]);
      const double rate = std::exp(logs[1] - logs[0]) + std::exp(logs[3] - logs[2]);
      const double step = tau_ * (logs[2] - logs[0]) / rate;
      if (!(std::fabs(step) < kInfinity)) break;
      move(t, t.lo + step);
      if (std::fabs(step) <= 1e-12 * tau_) break;
    }
    return t;
  }

  BudgetSpec spec_;
  BlockCdf F_;
  Row x_, cost_;
  double tau_;
  double left_ = 0, free_ = 0;  // the budget for the finite entries, and the sum of their costs
};

}  // namespace khot::KHOT_ISA
