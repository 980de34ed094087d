// The threshold t of a soft budget for any row, sum w F((x - t a)/tau) = B, in double: a bracket, a histogram
// of the costs where the scores spread far wider than tau, and Newton's method on log P = log Q.
//
// P - Q is sum w y - B without cancellation: P is what rejected entries spend and Q is what selected ones do
// not. By value log P - log Q is far from linear, as its slopes carry the costs, so that no step is taken
// that leaves the bracket, and a bracket that does not shrink is bisected (search/guard.h). The edge cases
// are those of khot/_kernels/reference/soft_budget.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/block_cdf.h"
#include "budget/weights.h"
#include "search/guard.h"

namespace khot::KHOT_ISA {

class CarefulBudget {
 public:
  CarefulBudget(const BudgetSpec& spec, const BlockCdf& F, const Row& x, const Row& cost, double tau)
      : spec_(spec), F_(F), x_(x), cost_(cost), tau_(tau) {}

  // From a guess of the threshold, if there is one.
  KHOT_APART Threshold solve(double budget, double guess = kNan) {
    if (!(tau_ > 0 && tau_ < kInfinity)) return {kNan, kNan};
    const Costs costs = add_up();
    const double slack = spec_.slack * (costs.free.value() + costs.pinned.value());
    left_ = costs.pinned.minus(budget), left_ = {-left_.whole, -left_.lost};
    if (costs.bad != 0 || !(left_.value() >= -slack)) return {kNan, kNan};
    if (!spec_.at_most && !(left_.value() <= costs.free.value() + slack)) return {kNan, kNan};
    most_ = spec_.by_value ? costs.most : 1, scores_ = costs.scores;
    if (spec_.at_most) {
      const SpendSums s = evaluate({0, 0});
      if (s.spent.minus(left_).value() + s.excess <= s.lacking) return {0, 0};
    }
    rest_ = costs.free.minus(left_).value();
    const bool nothing = left_.value() <= 0, counts = spec_.slack == 0;  // costs of 1 are summed exactly
    if (counts && nothing) return {kHuge, kHuge};
    // what is left of the costs to rounding is not a share that could be spent
    if (rest_ <= (counts ? 0 : 16 * 0x1p-52 * costs.free.value())) return {-kHuge, -kHuge};
    if (nothing) return {kHuge, kHuge};
    if (counts && tau_ > kSteepest && !(scores_.high - scores_.low < kInfinity)) return {kNan, kNan};
    return newton(guess);
  }

 private:
  static constexpr int kEvaluations = 128, kHistograms = 4, kBins = 1024;
  static constexpr double kFarthest = 1e300;  // by value, where it is multiplied by costs
  // The largest tau for rows whose differences overflow: for smaller ones, they are infinite in tau, too.
  static constexpr double kSteepest = 1e290;
  static constexpr double kFaint = 1e-290;  // below, a sum of tails lacks those that are no double
  // From a step on that moves no z by more than this, the error that is left is its square.
  static constexpr double kLastStep = 1e-8;
  static constexpr double kSure = 1e-9;  // a larger miss of the logarithms is none of rounding

  struct Range {
    double low = kInfinity, high = -kInfinity;
    void operator+=(const Range& o) { low = std::min(low, o.low), high = std::max(high, o.high); }
  };

  struct Costs {
    Pair free, pinned;         // of finite entries, and of those that are +inf
    double bad = 0, most = 0;  // how many are bad, and the largest of finite entries
    Range scores;              // of the finite entries that cost something
    void operator+=(const Costs& o) {
      free += o.free, pinned += o.pinned, bad += o.bad, most = std::max(most, o.most), scores += o.scores;
    }
  };

  // The sums of a pass at t.
  struct SpendSums {
    Pair spent;                               // w over the entries above: z > median
    double lacking = 0, excess = 0;           // w (1 - F) over these, and w F over the others
    double slope_above = 0, slope_below = 0;  // w a f
    double steep = 0;                         // the largest a f
    double rounded = 0;                       // w where 1 - F is the difference of numbers near 1
    void operator+=(const SpendSums& o) {
      spent += o.spent, lacking += o.lacking, excess += o.excess;
      slope_above += o.slope_above, slope_below += o.slope_below;
      steep = std::max(steep, o.steep), rounded += o.rounded;
    }
  };

  Costs add_up() const {
    return reduce_beside<double, Costs>(
        x_, cost_, spec_.n, spec_.inside, [=](Costs& sums, const double* p, const double* q, int count) {
          PairSum<double> free, pinned;
          VecD bad{}, most{}, low = splat(kInfinity), high = -low;
          const VecD one = splat(1.0), zero{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = beside(q, i, lanes);
            const IntD there = x != -kInfinity;
            const IntD wrong = (x != x) | (there & ~((w >= 0) & (w < kInfinity)));
            const VecD own = abs<double>(x) < kInfinity ? w : zero;
            bad += wrong ? one : zero;
            free.add(own);
            pinned.add(x == kInfinity ? w : zero);
            most = own > most ? own : most;
            low = (own > 0) & (x < low) ? x : low;
            high = (own > 0) & (x > high) ? x : high;
          });
          sums += {total(free),
                   total(pinned),
                   sum<double>(bad),
                   maximum<double>(most),
                   {minimum<double>(low), maximum<double>(high)}};
        });
  }

  SpendSums evaluate(Threshold t) const {
    const Position<double> position(t, tau_, spec_.by_value);
    const BlockCdf F = F_;
    return reduce_beside<double, SpendSums>(
        x_, cost_, spec_.n, spec_.inside, [=](SpendSums& sums, const double* p, const double* q, int count) {
          double z[kWhole<double>], tails[kWhole<double>], densities[kWhole<double>];
          F.tails(position, p, q, count, z, tails, densities);
          PairSum<double> spent;
          VecD lacking{}, excess{}, slope_above{}, slope_below{}, steep{}, rounded{};
          const VecD zero{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = abs<double>(x) < kInfinity ? beside(q, i, lanes) : zero;
            const IntD above = load(z + i) > F.median;
            const VecD rate = w > 0 ? position.a(w) * load(densities + i) : zero;
            const VecD tail = w > 0 ? w * load(tails + i) : zero, slope = w * rate;
            spent.add(above ? w : zero);
            lacking += above ? tail : zero;
            excess += above ? zero : tail;
            slope_above += above ? slope : zero;
            slope_below += above ? zero : slope;
            steep = rate > steep ? rate : steep;
            rounded += above & (rate > 0) ? w : zero;
          });
          sums += {total(spent),
                   sum<double>(lacking),
                   sum<double>(excess),
                   sum<double>(slope_above),
                   sum<double>(slope_below),
                   maximum<double>(steep),
                   sum<double>(rounded)};
        });
  }

  struct LogSum {  // w (1 - F) or w F adds up to total e^top, and w a f to slope e^top
    double top = -kInfinity, total = 0, slope = 0;
    void operator+=(LogSum o) {
      if (o.top > top) std::swap(*this, o);
      if (o.top == -kInfinity) return;
      const double share = std::exp(o.top - top);
      total += o.total * share, slope += o.slope * share;
    }
    double log() const { return top + std::log(total); }
  };
  struct LogSums {
    LogSum above, below;
    void operator+=(const LogSums& o) { above += o.above, below += o.below; }
  };

  // What evaluate() sums, where tails underflow.
  LogSums evaluate_logs(Threshold t) const {
    const Position<double> position(t, tau_, spec_.by_value);
    const BlockCdf F = F_;
    return reduce_beside<double, LogSums>(
        x_, cost_, spec_.n, spec_.inside, [=](LogSums& sums, const double* p, const double* q, int count) {
          double place[kWhole<double>], tails[kWhole<double>], rates[kWhole<double>];
          position.put(p, q, count, place);
          F.log_tails(place, count, tails, rates);
          const VecD never = splat(-kInfinity);
          VecD most[2] = {never, never}, totals[2] = {}, slopes[2] = {};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = beside(q, i, lanes);
            const IntD counts = (abs<double>(x) < kInfinity) & (w > 0), above = load(place + i) > F.median;
            const VecD held = counts ? w : splat(1.0), tail = log_apart(held) + load(tails + i);
            store(tails + i, counts ? tail : never);
            store(rates + i, position.a(held) * exp<double>(load(rates + i)));
            most[0] = counts & above & (tail > most[0]) ? tail : most[0];
            most[1] = counts & ~above & (tail > most[1]) ? tail : most[1];
          });
          const double tops[2] = {maximum<double>(most[0]), maximum<double>(most[1])};
          for (int i = 0; i < count; i += kWidth<double>) {
            const IntD above = load(place + i) > F.median, here = load(tails + i) > never;
            const VecD top = above ? splat(tops[0]) : splat(tops[1]), zero{};
            const VecD part = here ? exp<double>(load(tails + i) - top) : zero;
            const VecD slope = here ? part * load(rates + i) : zero;
            totals[0] += above ? part : zero, totals[1] += above ? zero : part;
            slopes[0] += above ? slope : zero, slopes[1] += above ? zero : slope;
          }
          sums.above += {tops[0], sum<double>(totals[0]), sum<double>(slopes[0])};
          sums.below += {tops[1], sum<double>(totals[1]), sum<double>(slopes[1])};
        });
  }

  // The least and the greatest threshold at which an entry that costs something lies at z, with room for the
  // rounding of so many digits.
  Range levels(double z, double digits) const {
    const double offset = tau_ * z, room = digits * (std::fabs(offset) + tau_);
    if (!spec_.by_value) {  // it is that of an end of the row
      const auto [low, high] = scores_;
      return {(low - offset) - (digits * std::fabs(low) + room),
              (high - offset) + (digits * std::fabs(high) + room)};
    }
    return reduce_beside<double, Range>(
        x_, cost_, spec_.n, spec_.inside, [=](Range& range, const double* p, const double* q, int count) {
          VecD low = splat(kInfinity), high = -low;
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = beside(q, i, lanes);
            const IntD counts = (abs<double>(x) < kInfinity) & (w > 0);
            const VecD scale = 1 / (counts ? w : splat(1.0));
            const VecD pad = digits * abs<double>(x) + room;
            const VecD least = ((x - offset) - pad) * scale, most = ((x - offset) + pad) * scale;
            low = counts & (least < low) ? least : low;
            high = counts & (most > high) ? most : high;
          });
          range += {minimum<double>(low), maximum<double>(high)};
        });
  }

  // Levels are those of the median, and under compact support where y leaves 1 or 0.
  BudgetGap neighbours(Threshold t) const {
    const Position<double> position(t, tau_, spec_.by_value);
    const double median = F_.median, tau = tau_, end = tau * (F_.full_support ? median : 1),
                 start = tau * (F_.full_support ? median : 0);
    return reduce_beside<double, BudgetGap>(
        x_, cost_, spec_.n, spec_.inside, [=](BudgetGap& gap, const double* p, const double* q, int count) {
          EdgeLanes up{splat(kInfinity)}, down{splat(kInfinity)};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
            const VecD w = beside(q, i, lanes);
            const IntD counts = (abs<double>(x) < kInfinity) & (w > 0);
            const VecD a = position.a(counts ? w : splat(1.0)), off = position.offset(x, a);
            const IntD above = off / tau > median;
            up.add((off - end) / a, w, a, counts & above);
            down.add((start - off) / a, w, a, counts & ~above);
          });
          gap += {up.least(1), down.least(-1)};
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
    const int last = 1 + static_cast<int>(std::clamp<int64_t>(spec_.n, 32, kBins));
    for (int step = 0; step < kHistograms && range.high - range.low > 2 * tau_; ++step) {
      const double bottom = range.low, width = (range.high - range.low) * (1 + 1e-12) / (last - 1);
      const double inverse = 1 / width;
      if (!(inverse < kInfinity && width < kInfinity && width > 0)) break;
      const Bins bins = reduce_beside<double, Bins>(
          x_, cost_, spec_.n, spec_.inside, [=](Bins& b, const double* p, const double* q, int count) {
            int32_t bin[kBlock];
            double cost[kBlock];
            for (int i = 0; i < count; ++i) {
              double at = ((p[i] - offset) / (by_value ? q[i] : 1) - bottom) * inverse + 1;
              at = at > 0 ? at : 0;
              at = at < last ? at : last;
              bin[i] = static_cast<int32_t>(at);
              cost[i] = std::fabs(p[i]) < kInfinity ? q[i] : 0;
            }
            for (int i = 0; i < count; ++i) b.spent[bin[i]] += cost[i];
          });
      double spent = 0;
      int i = last;
      for (; i > 0; --i) {
        spent += bins.spent[i];
        if (spent >= left_.whole) break;
      }
      if (i == 0 || i == last) break;
      range.low = bottom + (i - 1) * width, range.high = bottom + i * width;
      if (!(width < 1e-3 * kFarthest)) break;
    }
    return 0.5 * range.low + 0.5 * range.high;
  }

  // Numbers whose size matters by its ratio to tau, where it is larger, and by its difference otherwise.
  double fold(double v) const {
    const double ratio = std::log(std::fabs(v)) - std::log(tau_) + std::log(most_);
    return std::copysign(ratio < 700 ? std::log1p(std::exp(ratio)) : ratio, v);
  }
  double unfold(double v) const {
    const double ratio = std::fabs(v) < 700 ? std::log(std::expm1(std::fabs(v))) : std::fabs(v);
    return std::copysign(std::exp(ratio + std::log(tau_) - std::log(most_)), v);
  }

  // A point between the two, for a bisection.
  Threshold between(Threshold low, Threshold high) const {
    const bool far = low.hi < 0 ? (high.hi > 0 || low.hi < 4 * high.hi) : high.hi > 4 * low.hi;
    const double linear = 0.5 * low.hi + 0.5 * high.hi;
    const Threshold middle{far ? unfold(0.5 * fold(low.hi) + 0.5 * fold(high.hi)) : linear, 0};
    if (less(low, middle) && less(middle, high)) return middle;
    return moved(low, 0.5 * distance(low, high));
  }

  static double distance(Threshold from, Threshold to) { return (to.hi - from.hi) + (to.lo - from.lo); }
  static bool less(Threshold a, Threshold b) { return distance(a, b) > 0; }
  static Threshold moved(Threshold t, double by) {
    const Pair sum = Pair{t.hi, t.lo}.plus({by, 0});
    return {sum.whole, sum.lost};
  }

  // What a pass tells about the root.
  struct Verdict {
    double miss;       // log P - log Q or, under compact support, P - Q
    double tolerance;  // what rounding may make of a miss of 0
    double step;       // Newton's, which may be NaN or infinite
    double doubt;      // by how much a y is wrong, if the slopes tell
  };

  Verdict judge(Threshold t, const SpendSums& s, double over, double P, double Q) const {
    constexpr double eps = 0x1p-52;
    const double plain = (P - Q) / (s.slope_above + s.slope_below), doubt = std::fabs(plain) * s.steep;
    if (!F_.full_support) return {P - Q, eps * (2 * (P + Q) + s.rounded), tau_ * plain, doubt};
    if (P >= kFaint && Q >= kFaint) {
      const double ratio = (P - Q) / Q, depth = std::log(std::min(P, Q) / (left_.value() + rest_));
      const double miss = std::fabs(ratio) < 0.5 ? std::log1p(ratio) : std::log(P) - std::log(Q);
      return {miss, 4 * eps * (1 + std::fabs(depth)), tau_ * miss / (s.slope_below / P + s.slope_above / Q),
              std::fabs(miss) <= kSure ? doubt : kInfinity};
    }
    const LogSums logs = evaluate_logs(t);
    LogSum below = logs.below, above = logs.above;
    if (over != 0) (over < 0 ? above : below) += {std::log(std::fabs(over)), 1};
    const double log_P = below.log(), log_Q = above.log(), miss = log_P - log_Q;
    const double rate = below.slope / below.total + above.slope / above.total;
    if (over == 0 || std::isfinite(miss)) {
      return {miss, 16 * eps * std::fabs(std::min(log_P, log_Q)), tau_ * miss / rate, kInfinity};
    }
    // Squares of z overflow, and the next entry is so far that it alone makes up for what is missing.
    const BudgetGap around = neighbours(t);
    return {miss, 0, over > 0 ? around.up.level : around.down.level, kInfinity};
  }

  // Whether rounding this distance between thresholds changes no y.
  bool near(double distance) const { return std::fabs(distance) * most_ <= 4 * tau_; }

  // Thresholds between which the root lies.
  struct Between {
    Threshold low, high;
    bool has(Threshold t) const { return std::isfinite(t.hi) && less(low, t) && less(t, high); }
    double width() const { return distance(low, high); }
  };

  Between ends() const {
    const double all = left_.value() + rest_, share = left_.value() / all;
    // a tail may be so small that a share near 1 has lost its digits
    const double z = F_.full_support && left_.value() > rest_ ? -F_.icdf(std::max(rest_ / all, kTiny))
                                                              : F_.icdf(std::max(share, kTiny));
    const Range range = levels(z, 16 * 0x1p-52);
    return {{spec_.at_most ? std::max(held(range.low), 0.0) : held(range.low), 0}, {held(range.high), 0}};
  }

  double held(double v) const {
    const double most = spec_.by_value ? kFarthest : kHuge;
    return std::min(std::max(v, -most), most);
  }

  // The trial where no entry moves on one side of t: the entry at the edge of what moves makes up for the
  // rest alone, or less than that is missing. Where nothing moves at all, no root lies before that edge.
  // Returns whether the trial is the root, to rounding.
  bool to_edge(Threshold t, const SpendSums& s, const Verdict& now, double P, double Q, Between& root,
               Threshold& trial) const {
    const bool still = s.slope_above + s.slope_below == 0, up = still ? now.miss > 0 : s.slope_above > 0;
    const BudgetGap around = neighbours(t);
    const BudgetEdge edge = up ? around.up : around.down;
    const double y = std::min((up ? P : Q) / edge.w, 1.0);
    const Threshold end = moved(t, edge.level);
    if (still && up && y <= 0x1p-50) {
      trial = end;
      return near(edge.level);
    }
    // but for the rounding of the distance
    const Threshold before_end = moved(end, (up ? -4 : 4) * 0x1p-52 * std::fabs(edge.level));
    if (still && root.has(before_end)) (up ? root.low : root.high) = before_end;
    const Threshold bound = moved(end, tau_ * (up ? 1 - F_.icdf(1 - y) : -F_.icdf(y)) / edge.a());
    if (root.has(bound)) trial = bound;
    return false;
  }

  Threshold newton(double guess) const {
    Between root = ends();
    Threshold t{guess, 0};
    if (!std::isfinite(guess)) {
      const Range centres = levels(F_.median, 0);
      t.hi = histogram_search({held(centres.low), held(centres.high)});
    }
    if (!root.has(t)) t = between(root.low, root.high);
    Threshold best = t;
    double best_miss = kInfinity, before = kNan;
    bool tried = false, alone = true;
    Guard<ScalarArithmetic> guard;
    for (int count = 1; count <= kEvaluations; ++count) {
      const SpendSums s = evaluate(t);
      const double over = s.spent.minus(left_).value();
      Threshold gap{kNan, kNan};
      if (over == 0 && std::min(s.lacking, s.excess) < (F_.full_support ? kFaint : 0x1p-1074)) {
        const BudgetGap around = neighbours(t);
        gap = moved(t, around.middle());
        if (!F_.full_support && around.down.level <= around.up.level) {
          if (tried || near(around.middle())) return gap;
          t = gap, tried = true;  // from afar, its distance is rounded
          continue;
        }
      }
      const double P = s.excess + std::max(over, 0.0), Q = s.lacking + std::max(-over, 0.0);
      const Verdict now = judge(t, s, over, P, Q);
      const bool lost = F_.full_support && !std::isfinite(now.miss);  // squares of z overflow
      if (lost && over == 0) return gap;
      const double size = std::fabs(now.miss), step = now.step;
      // every y is known, and rounding keeps the miss up
      const bool settled = size >= 0.5 * best_miss && now.doubt <= 1e-14;
      if (size < best_miss) best = t, best_miss = size;
      if (size <= now.tolerance) return F_.full_support && std::isfinite(step) ? moved(t, step) : t;
      if (settled) return best;
      if (F_.full_support && std::fabs(step) * most_ <= kLastStep * tau_) return moved(t, step);
      if (now.miss > 0) root.low = t;
      if (now.miss < 0) root.high = t;
      // no z differs, but those of entries at the end of a support, which may be small
      if (root.width() * most_ <= (F_.full_support ? 0x1p-54 : 0x1p-90) * tau_) return t;
      Threshold trial = moved(t, step);
      // steps that become shorter by the same ratio, as on a power of t, lead to a limit
      const double ratio = step / before;
      before = step;
      if (ratio > 0.2 && ratio < 0.95) {
        const Threshold limit = moved(t, step / (1 - ratio));
        if (root.has(limit)) trial = limit, before = kNan;
      }
      if (lost && !root.has(trial)) {  // the root is as near to that end as the next entry
        const double nearer = std::sqrt(root.width()) * std::sqrt(tau_);
        trial = now.miss > 0 ? moved(root.high, -nearer) : moved(root.low, nearer);
      }
      if (F_.full_support) {
        // from the middle of a gap, the entries next to it are as far away
        if (!tried && root.has(gap)) trial = gap, tried = true;
      } else if (s.slope_above == 0 || s.slope_below == 0) {
        const bool still = s.slope_above + s.slope_below == 0;
        if ((still || alone) && to_edge(t, s, now, P, Q, root, trial)) return trial;
        alone = !alone;
      }
      if (guard.bisects(root.has(trial), root.width(), size)) {
        trial = between(root.low, root.high);
        if (!root.has(trial)) return t;
        before = kNan;
      }
      t = trial;
    }
    return best;
  }

  BudgetSpec spec_;
  BlockCdf F_;
  Row x_, cost_;
  double tau_;
  Pair left_;                   // the budget for the finite entries
  double rest_ = 0, most_ = 1;  // what it leaves of the sum of their costs, and the largest a
  Range scores_;
};

}  // namespace khot::KHOT_ISA
