// The careful solver: the threshold t of any row, with soft count C(t) = sum F((x_j - t)/tau) = k, in double.
//
// Order statistics around rank k bound t. Each evaluation of C and C' is followed by a Newton step on a
// function of C that is nearly linear in t there: a tail, a shifted F or normal law, or a power of the
// distance from the edge of a compact support. A step that leaves the bracket is replaced by the bracket's
// middle. In a gap so wide that both tails underflow, Newton solves log A = log B for the tails A above and B
// below t.
#pragma once

#include <algorithm>
#include <cmath>

#include "search/guard.h"
#include "search/guess.h"

namespace khot::KHOT_ISA {

struct Bracket {
  double low = -kInfinity, high = kInfinity;
  void tighten(Bracket o) {  // a bound that is NaN is ignored
    low = std::fmax(low, o.low);
    high = std::fmin(high, o.high);
  }
  void shift(double by) { low -= by, high -= by; }
};

struct Cut {  // the entries of rank ceil(k) and floor(k) + 1
  double last, next;
  double middle() const { return 0.5 * last + 0.5 * next; }
};

struct Sums {
  double m = 0;                           // the number of entries above: z > median
  double tail_above = 0, tail_below = 0;  // the sums of 1 - F over these and of F over the others
  double density_above = 0, density_below = 0;
  double next_above = kInfinity, next_below = -kInfinity;  // the nearest entry on each side, minus hi
  void operator+=(const Sums& o) {
    m += o.m, tail_above += o.tail_above, tail_below += o.tail_below;
    density_above += o.density_above, density_below += o.density_below;
    next_above = std::min(next_above, o.next_above), next_below = std::max(next_below, o.next_below);
  }
};

struct LogSums {  // tail_above, tail_below, density_above and density_below, relative to the nearest entries
  double A = 0, B = 0, fA = 0, fB = 0;
  void operator+=(const LogSums& o) { A += o.A, B += o.B, fA += o.fA, fB += o.fB; }
};

template <class C>
class CarefulSolver {
 public:
  CarefulSolver(const Row& row, int64_t n, double tau, const C& F, const Parallel* inside)
      : row_(row), size_(n), tau_(tau), F_(F), inside_(inside) {}

  // With the cut the search is short. It is known where another solver has selected it.
  KHOT_APART Threshold solve(double k, const Cut* cut = nullptr) {
    const Statistics stats = statistics<double>(row_, size_, inside_);
    const double k_free = k - stats.pinned;
    if (stats.nan || !(k_free >= 0 && k_free <= stats.free)) return {kNan, kNan};
    if (k_free == 0) return {kHuge, kHuge};
    if (k_free == stats.free) return {-kHuge, -kHuge};
    if (tau_ > kSteepest && !(stats.high - stats.low < kInfinity)) return {kNan, kNan};
    k_ = k_free, n_ = stats.free, pinned_ = stats.pinned, low_ = stats.low, high_ = stats.high;
    goal_.set(k_, n_, F_);
    double guess = goal_.guess(stats.mean, stats.variance, tau_, F_);
    Bracket bracket = order_bounds(low_, n_);
    bracket.tighten(order_bounds(high_, 1));
    if (cut != nullptr) {
      bracket.tighten(order_bounds(cut->last, std::ceil(k_)));
      bracket.tighten(order_bounds(cut->next, std::floor(k_) + 1));
      guess = cut->middle() - tau_ * F_.median;
    } else if (bracket.high - bracket.low > (C::full_support ? 64 : 8) * tau_) {
      guess = histogram_search(bracket);
    }
    if (!(guess >= bracket.low && guess <= bracket.high)) guess = 0.5 * bracket.low + 0.5 * bracket.high;
    return newton(guess, bracket);
  }

 private:
  // The largest tau for rows whose differences overflow: for smaller ones, they are infinite in tau, too.
  static constexpr double kSteepest = 1e290;
  static constexpr double kFaint = 1e-290;  // below, a sum of tails lacks those that are no double
  static constexpr double kFar = 1e12;  // in a window of more tau, bins of equal width take too many steps
  static constexpr int kHistograms = 5, kBins = 1024, kEvaluations = 60, kLogEvaluations = 4;

  KHOT_APART Bracket order_bounds(double value, double rank) const {
    const double pad = 1e-9 * tau_ + 1e-15 * std::fabs(value);
    Bracket b;
    if (rank > k_ && rank >= 1) b.low = value - tau_ * F_.icdf(std::max(k_ / rank, kTiny)) - pad;
    if (rank - 1 < k_ && rank <= n_) {
      const double share = (k_ - (rank - 1)) / (n_ - (rank - 1));  // k - rank may round
      b.high = value - tau_ * F_.icdf(std::min(std::max(share, kTiny), 1.0)) + pad;
    }
    return b;
  }

  struct Counts {
    int32_t bins[kBins + 2] = {};
    void operator+=(const Counts& o) {
      for (int i = 0; i < kBins + 2; ++i) bins[i] += o.bins[i];
    }
  };

  double histogram_search(Bracket& bracket) const {
    const double rank_high = std::ceil(k_), rank_low = std::floor(k_) + 1, log_tau = std::log(tau_);
    // A wide window, as where -1e30 stands for -inf, is cut into bins whose ends have equal ratios, down to
    // tau.
    auto fold = [log_tau](double v) {
      return v == 0 ? 0 : std::copysign(std::max(0.0, std::log(std::fabs(v)) - log_tau), v);
    };
    auto unfold = [log_tau](double v) {
      return v == 0 ? 0 : std::copysign(std::min(std::exp(std::fabs(v) + log_tau), kHuge), v);
    };
    double low = low_, high = high_;
    for (int step = 0; step < kHistograms; ++step) {
      const bool folded = !(high - low <= kFar * tau_);
      double bottom = folded ? fold(low) : low, top = folded ? fold(high) : high;
      top += 1e-12 * (top - bottom);  // the window is half open, and must contain the maximum
      const double width = (top - bottom) / kBins, inverse = 1 / width;
      if (!(inverse < kInfinity)) break;
      const Counts counts =
          reduce<double, Counts>(row_, size_, inside_, [=](Counts& c, const double* p, int count, int64_t) {
            int32_t bin[kBlock];
            // Infinite entries go to the outer bins.
            for (int i = 0; i < count; ++i) {
              double at = ((folded ? fold(p[i]) : p[i]) - bottom) * inverse + 1;
              at = at > 0 ? at : 0;
              at = at < kBins + 1 ? at : kBins + 1;
              bin[i] = static_cast<int32_t>(at);
            }
            for (int i = 0; i < count; ++i) ++c.bins[bin[i]];
          });
      double above = -pinned_, above_low = 0;
      int bin_high = -1, bin_low = -1;
      double after_high = 0;
      for (int i = kBins + 1; i >= 0; --i) {
        const double before = above;
        above += counts.bins[i];
        if (bin_high < 0 && above >= rank_high) bin_high = i, after_high = before;
        if (bin_low < 0 && above >= rank_low) bin_low = i, above_low = above;
        if (bin_low >= 0 && bin_high >= 0) break;
      }
      const double pad = 1e-6 * width + 1e-15 * std::max(std::fabs(bottom), std::fabs(top));
      top = bottom + bin_high * width + pad, bottom = bottom + (bin_low - 1) * width - pad;
      // fold() does not distinguish the numbers within tau of 0.
      low = std::max(low, folded ? unfold(bottom) - tau_ : bottom);
      high = std::min(high, folded ? unfold(top) + tau_ : top);
      if (high - low <= 4 * tau_ || above_low - after_high <= 2 || bin_high - bin_low >= 4) break;
    }
    bracket.low = std::fmax(bracket.low, order_bounds(low, rank_low).low);
    bracket.high = std::fmin(bracket.high, order_bounds(high, rank_high).high);
    return 0.5 * low + 0.5 * high - tau_ * F_.median;
  }

  Sums evaluate(double hi, double lo) const {
    const double median = F_.median, tau = tau_;
    const C F = F_;
    return reduce<double, Sums>(row_, size_, inside_, [=](Sums& sums, const double* p, int count, int64_t) {
      IntD m{};
      VecD A{}, B{}, fA{}, fB{}, up = splat(kInf<double>), down = -up;
      vectors<double>(p, count, -kInf<double>, [&](VecD x, int, int) {
        const VecD offset = x - hi, z = (offset - lo) / tau;
        const IntD above = z > median;
        const TailDensity<double> v = F.template split<double>(z, above);
        const VecD zero{};
        m -= above;
        A += above ? v.tail : zero;
        B += above ? zero : v.tail;
        fA += above ? v.density : zero;
        fB += above ? zero : v.density;
        up = (above & (offset < up)) ? offset : up;
        down = (~above & (offset > down)) ? offset : down;
      });
      for (int i = 0; i < kWidth<double>; ++i) sums.m += static_cast<double>(m[i]);
      sums.tail_above += sum<double>(A), sums.tail_below += sum<double>(B);
      sums.density_above += sum<double>(fA), sums.density_below += sum<double>(fB);
      sums.next_above = std::min<double>(sums.next_above, minimum<double>(up));
      sums.next_below = std::max<double>(sums.next_below, maximum<double>(down));
    });
  }

  // log B - log A for the sums A of 1 - F above and B of F below, and its slope. The tails are summed
  // relative to those of the nearest entries, which lie at up and down.
  void log_evaluate(double hi, double lo, double up, double down, double& log_ratio, double& slope) const {
    const C F = F_;
    const double tau = tau_;
    auto log_tail = [&](double z) {
      const VecD v = splat(z);
      return F.template log_tail<double>(v, v > F.median)[0];
    };
    const double log_up = log_tail((up - lo) / tau_), log_down = log_tail((down - lo) / tau_);
    const LogSums s = reduce<double, LogSums>(
        row_, size_, inside_, [=](LogSums& sums, const double* p, int count, int64_t) {
          VecD A{}, B{}, fA{}, fB{};
          vectors<double>(p, count, -kInfinity, [&](VecD x, int, int) {
            const VecD z = ((x - hi) - lo) / tau;
            const IntD above = z > F.median;
            const VecD reference = above ? splat(log_up) : splat(log_down);
            const VecD tail = exp<double>(F.template log_tail<double>(z, above) - reference);
            const VecD density = exp<double>(F.template log_density<double>(z) - reference);
            const VecD zero{};
            A += above ? tail : zero;
            B += above ? zero : tail;
            fA += above ? density : zero;
            fB += above ? zero : density;
          });
          sums.A += sum<double>(A), sums.B += sum<double>(B);
          sums.fA += sum<double>(fA), sums.fB += sum<double>(fB);
        });
    log_ratio = log_down - log_up + std::log(s.B) - std::log(s.A);
    slope = s.fA / s.A + s.fB / s.B;
  }

  // Makes hi + new_lo the new threshold, with the rounding error of the new hi as its lo. Returns by how much
  // hi moved.
  static double move(double& hi, double& lo, double new_lo) {
    const double s = hi + new_lo, moved = s - hi;
    lo = (hi - (s - moved)) + (new_lo - moved);
    hi = s;
    return moved;
  }

  Threshold newton(double guess, Bracket bounds) const {
    double hi = guess, lo = 0;
    bounds.shift(hi);
    Bracket seen;  // thresholds that were evaluated: C > k at low and C < k at high
    bool deep = false;
    double up = 0, down = 0;
    Guard<ScalarArithmetic> guard;
    const double settled = C::full_support ? 1e-8 : 1e-12;

    for (int i = 0; i < kEvaluations; ++i) {
      Sums s = evaluate(hi, lo);
      const double m = s.m - pinned_, excess = m - k_;
      const double Pk = s.tail_below + std::max(excess, 0.0), Qk = s.tail_above + std::max(-excess, 0.0);
      if (s.next_above < kInfinity) bounds.tighten(order_bounds(s.next_above, m));
      if (s.next_below > -kInfinity) bounds.tighten(order_bounds(s.next_below, m + 1));
      if (Pk > Qk) seen.low = std::max(seen.low, lo);
      if (Pk < Qk) seen.high = std::min(seen.high, lo);

      const Step next = newton_step(s, hi, lo, excess, Pk, Qk);
      const double step = next.by;
      double trial =
          std::fabs(step) < kInfinity ? std::min(std::max(lo + step, bounds.low), bounds.high) : kNan;
      // A step to an entry that is so many tau away that its rounding exceeds tau has two parts: to the
      // entry, and from there.
      const double jump = std::fabs(next.entry - lo);
      const bool jumps = jump > kFar * tau_ && std::fabs(trial - next.entry) * kFar <= jump;
      if (jumps) trial = next.entry;
      const double least = std::max(seen.low, bounds.low), most = std::min(seen.high, bounds.high);
      const double middle = 0.5 * least + 0.5 * most;
      const bool inside = trial > seen.low && trial < seen.high;
      if (guard.bisects(inside, most - least, std::fabs(Pk - Qk))) trial = middle;
      const double density = s.density_above + s.density_below,
                   noise = 1e-12 * std::max(1.0, std::min(k_, n_ - k_));
      const bool informed = std::fabs(Pk - Qk) <= 8 * density * std::fabs(step) / tau_ + noise;
      if (std::fabs(step) <= 1e-6 * tau_) trial = informed ? lo + step : middle;
      bool done = informed && std::fabs(step) <= settled * tau_;
      if constexpr (!C::full_support) {  // log y needs the digits of z, which is small where k is
        const double distance = s.next_below - (lo + step);
        if (k_ < 1e-6 && distance > 0) done = done && std::fabs(step) <= settled * distance;
      }
      const double gap_middle =
          0.5 * (std::min(s.next_above, kHuge / 4) + std::max(s.next_below, -kHuge / 4));
      if constexpr (C::full_support) {
        if (excess == 0 && (s.tail_above < kFaint || s.tail_below < kFaint)) {
          trial = gap_middle;
          deep = done = true;
        }
      } else if (excess == 0 && s.next_above - s.next_below >= tau_) {
        trial = gap_middle - 0.5 * tau_;
        done = true;
      }
      const double moved = move(hi, lo, trial);
      if (jumps && trial == next.entry) lo += tau_ * next.rest;
      bounds.shift(moved), seen.shift(moved);
      up = s.next_above - moved, down = s.next_below - moved;
      if (done) break;
    }
    for (int i = 0; C::full_support && deep && i < kLogEvaluations; ++i) {
      double log_ratio, slope;
      log_evaluate(hi, lo, up, down, log_ratio, slope);
      const double step = tau_ * log_ratio / slope;
      // Where even the logarithms have lost their digits, the middle of the gap is the best answer there is.
      if (!(lo + step > down && lo + step < up)) break;
      const double moved = move(hi, lo, lo + step);
      up -= moved, down -= moved;
      deep = std::fabs(step) > 1e-8 * tau_;
    }
    return {hi, lo};
  }

  // A step. It may be one to an entry, which lies at hi + entry, and from there by `rest`, in tau.
  struct Step {
    double by, entry = kNan, rest = 0;
  };

  Step newton_step(const Sums& s, double hi, double lo, double excess, double Pk, double Qk) const {
    const double m = k_ + excess, density = s.density_above + s.density_below;
    const double plain = (Pk - Qk) / density;
    const double few_limit = C::full_support ? 1 : 3;
    if ((Pk < few_limit && Qk < few_limit) || (!C::full_support && density == 0)) {
      const Step few =
          C::full_support ? Step{tail_step(s, lo, excess, Pk, Qk)} : edge_step(s, lo, excess, Pk, Qk);
      if (std::fabs(few.by) < kInfinity) return {tau_ * few.by, few.entry, few.rest};
    }
    const bool decided_above = s.tail_above < 1e-3 * s.tail_below && excess < 0;
    const bool decided_below = s.tail_below < 1e-3 * s.tail_above && excess > 0;
    const double base = decided_above ? m : 0, size = (decided_below ? m : n_) - base;
    if (std::fabs(Pk - Qk) <= 1e-4 * std::min(k_ - base, base + size - k_)) return {tau_ * plain};
    return {tau_ * many_step(s, hi, lo, m, base, size, density, Pk - Qk)};
  }

  double many_step(const Sums& s, double hi, double lo, double m, double base, double size, double density,
                   double miss) const {
    auto clamped = [](double share) { return std::min(std::max(share, kTiny), 1 - 1e-16); };
    const double share = clamped((m - base + s.tail_below - s.tail_above) / size);
    const double target = clamped((k_ - base) / size);
    if constexpr (C::full_support) {
      const double z = F_.icdf(share);
      return (z - F_.icdf(target)) * F_.pdf(z) * size / density;
    } else {
      const double count = k_ + miss;
      const double first = ((high_ - hi) - lo) / tau_, last = 1 - ((low_ - hi) - lo) / tau_;
      if (k_ <= n_ / 2 && first < 2) return first - first * std::pow(k_ / count, count / (density * first));
      if (k_ > n_ / 2 && last < 2) {
        return last * std::pow((n_ - k_) / (n_ - count), (n_ - count) / (density * last)) - last;
      }
      const Normal link;
      const double z = link.icdf(share);
      return (z - link.icdf(target)) * link.pdf(z) * size / density;
    }
  }

  double tail_step(const Sums& s, double lo, double excess, double Pk, double Qk) const {
    auto known = [](double c) { return std::isnan(c) ? 1.0 : std::min(c, kHuge); };
    const double like_up = s.tail_above / F_.cdf(-(s.next_above - lo) / tau_);
    const double like_down = s.tail_below / F_.cdf((s.next_below - lo) / tau_);
    const double c = std::fmax(excess > 0 ? 1 : known(like_down), excess < 0 ? 1 : known(like_up));
    const double zP = F_.icdf(std::max(Pk / c, kTiny)), zQ = F_.icdf(std::max(Qk / c, kTiny));
    return c * (zP - zQ) / (s.density_below / F_.pdf(zP) + s.density_above / F_.pdf(zQ));
  }

  // The step is in tau.
  Step edge_step(const Sums& s, double lo, double excess, double Pk, double Qk) const {
    const double up = (s.next_above - lo) / tau_, down = (s.next_below - lo) / tau_;
    const Step both{(Pk - Qk) / (s.density_below + s.density_above)};
    auto to_above = [&](double z) { return Step{up - z, s.next_above, -z}; };
    auto to_below = [&](double z) { return Step{down - z, s.next_below, -z}; };
    const bool none_above = s.tail_above == 0, none_below = s.tail_below == 0;
    if (excess > 0) {
      if (none_above) return to_above(F_.icdf(1 - std::min(Pk, 1.0)));
      if (!none_below) return both;
      return {(1 - up) * (std::pow(Pk / Qk, s.tail_above / (s.density_above * (1 - up))) - 1)};
    }
    if (excess < 0) {
      if (none_below) return to_below(F_.icdf(std::min(Qk, 1.0)));
      if (!none_above) return both;
      return {-down * (std::pow(Qk / Pk, s.tail_below / (s.density_below * down)) - 1)};
    }
    if (none_below)
      return to_below(F_.icdf(std::min(std::max(s.tail_above + s.density_above * down, 0.0), 1.0)));
    if (none_above) return {up - 1 + s.tail_below / (s.density_below + F_.pdf(1 - 1e-16))};
    return both;
  }

  Row row_;
  int64_t size_;
  double tau_;
  C F_;
  const Parallel* inside_;
  Goal goal_;
  double k_ = 0, n_ = 0, pinned_ = 0, low_ = 0, high_ = 0;
};

}  // namespace khot::KHOT_ISA
