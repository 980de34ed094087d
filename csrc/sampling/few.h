// Calibration of rows of few units, as those of routers, one row in each lane.
//
// Row by row, what does not depend on the number of units takes longest: sums across lanes, the frequencies,
// the logarithms of single numbers. Here nothing is summed across lanes, and instead of frequencies the
// elementary symmetric polynomials e_m of the odds give the probabilities. Their terms are positive, so that
// no digit is lost. The iteration is that of calibrate.h, and rows that are not ordinary are left to it.
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling/order.h"

namespace khot::KHOT_ISA {

constexpr int kFew = kFewUnits + 1;  // with a phantom
// A row is ordinary if its logits lie within this, so that no product of seventeen odds overflows, and if its
// variance is at least this, so that the integral ends within kFewEnd.
constexpr double kFewLogit = 12, kFewVariance = 1e-2, kFewEnd = 40;
// The integral, for calibration to 1e-8 rather than for the probabilities themselves: e^-26 is 5e-12, and the
// rule's error with such steps is less than 1e-10.
constexpr double kFewNegligible = 26, kFewStep = 0.45, kFewNormalStep = 0.85;

template <bool kOrder>
class FewRows {
 public:
  static constexpr int width = kWidth<double>;

  // Of rows with the same number k of units to select; lane j has the goal row(j).
  template <class At>
  FewRows(const At& row, int n, int k) : n_(n), k_(k) {
    double buffer[kFew];
    for (int j = 0; j < width; ++j) {
      const double* z = fetch(row(j), 0, n, buffer);
      for (int i = 0; i < n; ++i) own_[i][j] = z[i];
    }
  }

  // theta(j)[i] are the logits that have the goal's probabilities, if the result's lane j is not 0; the
  // number of iterations is in iterations().
  template <class At>
  IntD calibrate(const At& theta) {
    start();
    if (any(good_)) iterate();
    for (int j = 0; j < width; ++j) {
      for (int i = 0; i < n_ && good_[j] != 0; ++i) theta(j)[i] = theta_[i][j];
    }
    return good_;
  }
  double iterations(int j) const { return iterations_[j]; }

 private:
  using Units = VecD[kFew];

  KHOT_INLINE double size() const { return k_; }

  // A unit that is never selected keeps the logit -inf, and has odds of 0.
  KHOT_INLINE static VecD odds(VecD z) { return exp<double>(clamp_below<double>(z, -700)) * at_all(z); }
  KHOT_INLINE static VecD at_all(VecD z) { return z > -kInf<double> ? splat(1.0) : VecD{}; }

  struct Moments {
    VecD mean{}, variance{};
  };
  // Fills p_ and q_, of trials with logits z.
  Moments trials(const Units& z) {
    Moments m;
    for (int i = 0; i < n_; ++i) {
      const VecD w = odds(z[i]), q = 1 / (1 + w), p = w * q;
      p_[i] = p, q_[i] = q, m.mean += p, m.variance += p * q;
    }
    return m;
  }
  KHOT_INLINE VecD shift(const Moments& m) const {
    return clamp_above<double>(clamp_below<double>((m.mean - size()) / m.variance, -1), 1);
  }

  void start() {
    good_ = splat(1.0) > 0;
    for (int step = 0; step < kCentring; ++step) {
      const VecD by = shift(trials(own_));
      if (!any(abs<double>(by) > 0)) break;
      for (int i = 0; i < n_; ++i) own_[i] -= by;
      if (!any(!(abs<double>(by) <= kSettling))) break;
    }
    const Moments m = trials(own_);
    VecD free{};
    for (int i = 0; i < n_; ++i) {
      wanted_[i] = p_[i], weight_[i] = p_[i] * q_[i], free += at_all(own_[i]);
      good_ &= (abs<double>(own_[i]) <= kFewLogit) | (own_[i] == -kInf<double>);
    }
    good_ &= (m.variance >= kFewVariance) & (free > size()) & (abs<double>(m.mean - size()) <= kSettling);
    smooth_ = m.variance >= kHajek;
    const VecD scale = kOrder ? (m.variance >= kAdjusted ? 1 / (m.variance * m.variance) : VecD{})
                              : (smooth_ ? 1 / m.variance : VecD{});
    for (int i = 0; i < n_; ++i)
      theta_[i] = own_[i] + (kOrder ? weight_[i] : splat(1.0)) * (0.5 - wanted_[i]) * scale;
  }

  // What is beyond t on one side is negligible. Fills `widest` with the larger of itself and the variance
  // there.
  VecD end(double side, VecD enough, VecD variance, VecD& widest) {
    const double share = size() / n_;
    VecD t = square_root(2 * enough / variance);
    t = side * clamp_above<double>(t, kFewEnd);
    for (int step = 0;; ++step) {
      const VecD e = exp<double>(t), less = exp<double>(-share * t);
      VecD product = splat(1.0), mean{}, squares{};
      for (int i = 0; i < n_; ++i) {
        const VecD raised = q_[i] + p_[i] * e, r = p_[i] * e / raised;
        product *= raised * less, mean += r, squares += r * (1 - r);
      }
      const VecD D = log<double>(product), over = D - enough;
      const IntD there = (over >= 0) & (over <= kBeyond);
      if (step == kNewton || !any(good_ & ~there)) {
        widest = squares > widest ? squares : widest;
        good_ &= over >= 0;
        return t;
      }
      const VecD next = t - over / (mean - size());
      t = there ? t : side * clamp_above<double>(side * next, kFewEnd);
    }
  }

  // The coefficients c_ of order sampling (order.h), for logits that are centred.
  void coefficients(VecD variance) {
    VecD least = splat(1.0), widest = variance;
    for (int i = 0; i < n_; ++i) least = q_[i] < least ? q_[i] : least, c_[i] = VecD{};
    const VecD low = end(-1, kFewNegligible - log<double>(least), variance, widest);
    const VecD high = end(1, splat(kFewNegligible), variance, widest);
    const VecD step = clamp_above<double>(kFewNormalStep / square_root(widest), kFewStep);
    const VecD wanted = good_ ? (high - low) / step : VecD{};
    const int intervals = std::max(1, static_cast<int>(std::ceil(maximum<double>(wanted))));
    const VecD by = (high - low) / intervals;
    const double share = size() / n_;
    VecD e = exp<double>(low), more = exp<double>(share * low);
    const VecD e_by = exp<double>(by), more_by = exp<double>(share * by);
    for (int node = 0; node <= intervals; ++node, e *= e_by, more *= more_by) {
      VecD r[kFew], product = splat(1.0);
      for (int i = 0; i < n_; ++i) r[i] = 1 / (q_[i] + p_[i] * e), product *= r[i] * more;
      for (int i = 0; i < n_; ++i) c_[i] += product * r[i];
    }
    for (int i = 0; i < n_; ++i) c_[i] *= q_[i];
  }

  // yes_[i] / no_[i] are the odds of unit i in the design: without it, m of the others have the weight e_m,
  // and with coefficients e_m', the part of e_m(w (1 + c x)) that is linear in x.
  void inclusion() {
    VecD before[kFew + 1][kFew + 1], before_c[kFew + 1][kFew + 1], w[kFew];
    for (int m = 0; m <= k_; ++m) before[0][m] = splat(m == 0 ? 1.0 : 0.0), before_c[0][m] = VecD{};
    for (int i = 0; i < n_; ++i) {
      w[i] = odds(theta_[i]);
      for (int m = 0; m <= k_; ++m) {
        before[i + 1][m] = before[i][m], before_c[i + 1][m] = before_c[i][m];
        if (m == 0) continue;
        before[i + 1][m] += w[i] * before[i][m - 1];
        if (kOrder) before_c[i + 1][m] += w[i] * (before_c[i][m - 1] + c_[i] * before[i][m - 1]);
      }
    }
    VecD after[kFew + 1], after_c[kFew + 1];
    for (int m = 0; m <= k_; ++m) after[m] = before[0][m], after_c[m] = VecD{};
    for (int i = n_ - 1; i >= 0; --i) {
      VecD all{}, fewer{}, all_c{}, fewer_c{};  // e_k and e_(k-1)
      for (int m = 0; m <= k_; ++m) {
        all += before[i][m] * after[k_ - m];
        if (kOrder) all_c += before[i][m] * after_c[k_ - m] + before_c[i][m] * after[k_ - m];
        if (m == k_) continue;
        fewer += before[i][m] * after[k_ - 1 - m];
        if (kOrder) fewer_c += before[i][m] * after_c[k_ - 1 - m] + before_c[i][m] * after[k_ - 1 - m];
      }
      yes_[i] = w[i] * (kOrder ? fewer_c + c_[i] * fewer : fewer), no_[i] = kOrder ? all_c : all;
      for (int m = k_; m > 0; --m) {
        if (kOrder) after_c[m] += w[i] * (after_c[m - 1] + c_[i] * after[m - 1]);
        after[m] += w[i] * after[m - 1];
      }
    }
  }

  void iterate() {
    constexpr Accuracy accuracy = kOrder ? kOrderAccuracy : kExact;
    const VecD reached = smooth_ ? splat(accuracy.reached) : VecD{};
    Units residual, moves[kDepth], turns[kDepth];
    int kept = 0, next = 0;
    VecD before{};
    IntD pending = good_;
    for (int iteration = 1; iteration <= kIterations; ++iteration) {
      if (kOrder) {
        Moments m = trials(theta_);
        for (int tries = 0; tries < kCentring && any(good_ & ~near(m)); ++tries) {
          const VecD by = near(m) ? VecD{} : shift(m);
          for (int i = 0; i < n_; ++i) theta_[i] -= by;
          m = trials(theta_);
        }
        coefficients(m.variance);
      }
      inclusion();
      VecD error{}, left{};
      for (int i = 0; i < n_; ++i) {
        const VecD r = at_all(own_[i]) > 0 ? own_[i] - log<double>(yes_[i] / no_[i]) : VecD{};
        const VecD off = abs<double>(yes_[i] / (yes_[i] + no_[i]) - wanted_[i]), far = abs<double>(r);
        residual[i] = r, error = off > error ? off : error, left = far > left ? far : left;
        good_ &= (far < kFewLogit) & ((abs<double>(theta_[i]) < 2 * kFewLogit) | (at_all(own_[i]) == 0));
      }
      for (int j = 0; j < width; ++j) iterations_[j] += pending[j] != 0;
      const IntD arrived =
          (left <= kClose) & ((error <= accuracy.near) | (error * error <= reached * before));
      before = error;
      Units move;
      accelerate(residual, moves, turns, kept, next, move);
      for (int i = 0; i < n_; ++i) {
        move[i] = pending ? move[i] : VecD{};  // a row that has arrived stays
        theta_[i] += move[i];
      }
      pending &= good_ & ~arrived;
      if (!any(pending)) return;
      for (int i = 0; i < n_; ++i) moves[next][i] = move[i], turns[next][i] = residual[i];
      next = (next + 1) % kDepth, kept = std::min(kept + 1, kDepth);
    }
    good_ &= ~pending;
  }
  KHOT_INLINE IntD near(const Moments& m) const {
    const VecD off = m.mean - size();
    return off * off <= kOffCentre * kOffCentre * (m.variance + kSmall);
  }

  // The step of calibrate.h's fixed_point.
  void accelerate(const Units& residual, const Units* moves, Units* turns, int kept, int next, Units& move) {
    for (int i = 0; i < n_; ++i) move[i] = residual[i];
    if (kept == 0) return;
    VecD* const turn = turns[(next + kDepth - 1) % kDepth];
    for (int i = 0; i < n_; ++i) turn[i] = residual[i] - turn[i];
    VecD gram[kDepth][kDepth], gamma[kDepth], trace{};
    for (int a = 0; a < kept; ++a) {
      for (int b = 0; b < kept; ++b) gram[a][b] = VecD{};
      gamma[a] = VecD{};
      for (int i = 0; i < n_; ++i) {
        const VecD f = turns[a][i] * weight_[i];
        for (int b = 0; b < kept; ++b) gram[a][b] += f * turns[b][i];
        gamma[a] += f * residual[i];
      }
      trace += gram[a][a];
    }
    for (int a = 0; a < kept; ++a) gram[a][a] += kRidge * trace + std::numeric_limits<double>::min();
    solve(gram, gamma, kept);
    for (int a = 0; a < kept; ++a) {
      for (int i = 0; i < n_; ++i) move[i] -= gamma[a] * (moves[a][i] + turns[a][i]);
    }
  }
  KHOT_INLINE static bool any(IntD mask) { return khot::KHOT_ISA::any((IntF)mask); }

  int n_, k_;
  IntD good_, smooth_;
  Units own_, wanted_, weight_, theta_, p_, q_, c_, yes_, no_;
  double iterations_[width] = {};
};

// The calibration of `count` consecutive rows, whose theta lie behind each other; the numbers of iterations
// are of the conditional Poisson design only.
template <bool kOrder>
void calibrate_rows(const Row* goals, const double* k, int64_t count, int64_t n, double* scratch,
                    double* theta, double* iterations) {
  constexpr int width = FewRows<kOrder>::width;
  for (int64_t first = 0; first < count; first += width) {
    const int rows = static_cast<int>(std::min<int64_t>(width, count - first));
    const Row* const goal = goals + first;
    const double* const size = k + first;
    double* const to = theta + first * n;
    bool tried[width] = {}, done[width] = {};
    for (int j = 0; j < rows; ++j) {
      if (!tried[j] && n <= kFew && size[j] > 0 && size[j] < static_cast<double>(n) &&
          size[j] == std::floor(size[j])) {
        // with all rows of the same size; the lanes of the others repeat this one
        const auto together = [&](int i) { return i < rows && size[i] == size[j]; };
        double unused[kFew];
        FewRows<kOrder> lanes([&](int i) { return goal[together(i) ? i : j]; }, static_cast<int>(n),
                              static_cast<int>(size[j]));
        const IntD found = lanes.calibrate([&](int i) { return together(i) ? to + i * n : unused; });
        for (int i = 0; i < rows; ++i) {
          if (!together(i)) continue;
          tried[i] = true, done[i] = found[i] != 0;
          if (!kOrder) iterations[first + i] = lanes.iterations(i);
        }
      }
      if (done[j]) continue;
      if constexpr (kOrder) {
        order_calibrate_row(goal[j], n, size[j], scratch, to + j * n);
      } else {
        iterations[first + j] = calibrate_row(goal[j], n, size[j], scratch, to + j * n);
      }
    }
  }
}

}  // namespace khot::KHOT_ISA
