// The ordinary solver: rows with many undecided entries, so that log(C/(n - C)) is nearly linear in t, and a
// few steps of Halley's kind from a good guess end the search. The passes are in float. Rows that are not
// like this are given back, and the wide or the careful solver takes them.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/guess.h"
#include "soft_topk/step.h"

namespace khot::KHOT_ISA {

// Rows mostly lie one behind the other, and the processor's prefetcher notices the next row too late. Up to
// this length, the passes over a row fetch the next one into the cache.
constexpr int64_t kAhead = 4096;

// The largest odds exp(-z) that are stored. They stand for all larger odds, and y = 0.
constexpr float kNever = 0x1p126f;

struct OrdinarySums {
  // The count is m + C. Either m is the number of entries above and C sums F or, for these, F - 1; or m is 0.
  double m = 0, C = 0;
  double S1 = 0, S2 = 0, S3 = 0, S4 = 0, S5 = 0;  // the sums of f and its derivatives (cdf_derivatives.h)
  void operator+=(const OrdinarySums& o) {
    m += o.m, C += o.C, S1 += o.S1, S2 += o.S2, S3 += o.S3, S4 += o.S4, S5 += o.S5;
  }
};

template <class C>
class OrdinarySolver {
 public:
  OrdinarySolver(const Row& row, int64_t n, double tau, const C& F, const Parallel* inside)
      : row_(row), n_(n), next_(n <= kAhead ? n : 0), tau_(tau), F_(F), inside_(inside) {}

  // Returns whether the row was ordinary. Then t is the threshold, and out, unless it is null, holds y, whose
  // sum is as near to k as promised.
  bool solve(double k, Goal& goal, Threshold& t, void* out) {
    const double guess = first_guess(k, goal);
    return !wide_ && refine(guess, k, few_, t, out);
  }

  // Finds a threshold without y, by steps until one is at most `last`, in tau.
  bool approach(double k, Goal& goal, Threshold& t, double last = C::last_step) {
    const double guess = first_guess(k, goal);
    if (wide_ || !(std::fabs(guess) < 1e30)) return false;
    return solve_reading<C::value_from_odds>(guess, k, last, t);
  }

  // The sum of f at the threshold that approach() found.
  double slope() const { return slope_; }

  // What is written at a threshold of approach() has no sum that could be checked, as log y, so that the last
  // step has to be shorter.
  static constexpr double kLastUnchecked =
      C::full_support ? std::min(0.4 * C::last_step, 0.1) : std::min(C::last_step, 1e-4);

  // The same from a guess. few is min(k, n - k) over the entries that may be selected.
  KHOT_APART bool refine(double guess, double k, double few, Threshold& t, void* out) {
    if (!(std::fabs(guess) < 1e30)) return false;
    few_ = few;
    if (out == nullptr) return solve_reading(guess, k, kLastUnchecked, t);
    if constexpr (!C::full_support) return solve_writing(guess, k, out, t);
    if constexpr (C::value_from_odds) {
      if (row_.dtype == Dtype::kFloat) return solve_storing(guess, k, static_cast<float*>(out), t);
    }
    return solve_reading(guess, k, C::last_step, t) && reaches(write(t, out), k);
  }

  // Writes y and returns whether its sum is as near to k as promised.
  bool write(Threshold t, double k, double few, void* out) {
    few_ = few;
    return reaches(write(t, out), k);
  }

 private:
  // Rows whose scores have a larger standard deviation, in tau, are left to WideSolver.
  static constexpr double kWide = 16;
  static constexpr int kPasses = 8 + C::extra_passes;

  // Where F has a kink, only y itself tells whether a step was the last. It is written from a step of this
  // length on.
  static constexpr double kNear = 0.01;

  // NaN where the row is not for this solver.
  double first_guess(double k, Goal& goal) {
    if (!(k > 0 && k < static_cast<double>(n_)) || !(tau_ > 1e-25 && tau_ < 1e25)) return kNan;
    few_ = std::min(k, static_cast<double>(n_) - k);
    double guess = kNan;
    if (n_ >= kSampleFrom) guess = from_sample(k, goal);
    if (!wide_ && !(std::fabs(guess) < 1e30)) guess = from_moments(row_, n_, k, goal);
    return guess;
  }

  static Threshold split(double t) {
    const double hi = static_cast<double>(static_cast<float>(t));
    return {hi, t - hi};
  }

  // The tolerance is half of what is promised, since this sum of floats has an error of its own. The second
  // term allows for the rounding of y, which is less where all y are small.
  bool reaches(double total, double k) const {
    return std::fabs(total - k) <=
           5e-7 * std::max(1.0, few_) + std::min(static_cast<double>(n_) * 0x1p-25, k * 0x1p-23);
  }

  // Sums of y from the odds take less time than sums of tails, which leave float more digits.
  template <bool kOdds = false>
  bool solve_reading(double t, double k, double last, Threshold& result) {
    for (int pass = 0; pass < kPasses; ++pass) {
      OrdinarySums sums;
      if constexpr (kOdds) sums = read(split(t));
      if (!(kOdds && enough(sums))) sums = sum_tails(row_, n_, inside_, split(t));
      const double h = step_to(sums, k, static_cast<double>(n_));
      if (!(std::fabs(h) < 50)) return false;
      t += h * tau_;
      if (std::fabs(h) <= last) {
        result = split(t);
        slope_ = slope_after(h, count_sums(sums, k, static_cast<double>(n_)));
        return true;
      }
    }
    return false;
  }

  // Whether a sum of y has the digits that matter; otherwise most entries are decided.
  static bool enough(const OrdinarySums& sums) {
    if constexpr (C::value_from_odds) return sums.S1 * C::decided_ratio > sums.C;
    return false;
  }

  bool solve_writing(double t, double k, void* out, Threshold& result) const {
    double h = kInfinity;
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool near = std::fabs(h) <= kNear;
      const OrdinarySums sums = sum_tails(row_, n_, inside_, split(t), near ? out : nullptr);
      h = step_to(sums, k, static_cast<double>(n_));
      if (!(std::fabs(h) < 50)) return false;
      if (near && std::fabs(h) <= C::last_step) {
        result = split(t);
        return reaches(sums.m + sums.C, k);
      }
      t += h * tau_;
    }
    return false;
  }

  // The first pass stores the odds exp(-z). A move of t multiplies them by a constant, so that the later
  // passes need no exponentials.
  bool solve_storing(double t, double k, float* out, Threshold& result) const {
    OrdinarySums sums = evaluate(split(t), out);
    double moved = 0;  // by how much t has moved since then, in tau
    for (int pass = 0; pass < kPasses; ++pass) {
      const double h = enough(sums) ? step_to(sums, k, static_cast<double>(n_)) : kNan;
      if (!(std::fabs(h) < 50)) return false;
      t += h * tau_, moved += h;
      const bool near = std::fabs(moved) < 1;  // otherwise the odds may overflow
      if (near && std::fabs(h) <= C::last_step) {
        result = split(t);
        return reaches(finish(moved, out), k);
      }
      if (!near) moved = 0;
      sums = near ? shift(moved, out) : evaluate(split(t), out);
    }
    return false;
  }

  double from_moments(const Row& row, int64_t n, double k, Goal& goal) {
    double count = static_cast<double>(n), mean, variance;
    if (!moments(row, n, mean, variance)) {
      const Statistics stats = statistics<float>(row, n, inside_);
      k -= stats.pinned, count = stats.free;
      if (stats.nan || !(k > 0 && k < count)) return kNan;
      mean = stats.mean, variance = stats.variance;
    }
    if (n == n_) few_ = std::min(k, count - k);
    wide_ = !(variance <= kWide * kWide * tau_ * tau_);
    goal.set(k, count, F_);
    return goal.guess(mean, variance, tau_, F_);
  }

  struct Moments {
    double first = 0, second = 0;
    void operator+=(const Moments& o) { first += o.first, second += o.second; }
  };

  // Returns false where an entry is not finite.
  bool moments(const Row& row, int64_t n, double& mean, double& variance) const {
    float start = 0;
    const float origin = *fetch(row, 0, 1, &start);
    const Moments sums =
        reduce<float, Moments>(row, n, inside_, [origin](Moments& s, const float* p, int count, int64_t) {
          VecF first{}, second{};
          vectors<float>(p, count, origin, [&](VecF x, int, int) {
            const VecF d = x - origin;
            first += d;
            second += d * d;
          });
          s.first += sum<float>(first), s.second += sum<float>(second);
        });
    const double count = static_cast<double>(n), off = sums.first / count;
    mean = origin + off;
    variance = std::max(sums.second / count - off * off, 0.0);
    return std::fabs(sums.first) + sums.second < kInfinity;
  }

  // The threshold of a sample; NaN where it does not tell enough.
  double from_sample(double k, Goal& goal) {
    float sample[kSampleMax];
    const int size = take_sample(row_, n_, sample);
    const double share = static_cast<double>(size) / static_cast<double>(n_), sample_k = k * share;
    if (!(sample_k >= 8 && sample_k <= size - 8)) return kNan;
    const Row row{sample, Dtype::kFloat, 1};
    double t = from_moments(row, size, sample_k, goal);
    for (int pass = 0; pass < 4; ++pass) {
      const double h = rough_step_to(sum_tails(row, size, nullptr, split(t)), sample_k, size);
      if (!(std::fabs(h) < 50)) return kNan;
      t += h * tau_;
      if (std::fabs(h) <= 0.1) break;
    }
    return t;
  }

  // Stores the odds at t and returns the sums.
  OrdinarySums evaluate(Threshold t, float* out) const {
    const float hi = static_cast<float>(t.hi), scale = static_cast<float>(kLog2E / tau_);
    const float lo = static_cast<float>(t.lo * kLog2E / tau_);
    const float* const start = static_cast<const float*>(row_.data);
    const int64_t next = next_;
    return sum_values(row_, -kInf<float>, [=](VecF x, int64_t at, int lanes) {
      fetch_ahead<false>(start + at, next);
      const VecF e = exp2_held((hi - x) * scale + lo);
      lanes == kWidth<float> ? store(out + at, e) : store_part(out + at, lanes, e);
      return C::from_odds(e);
    });
  }

  // The same sums, and nothing is stored.
  OrdinarySums read(Threshold t) const {
    const float hi = static_cast<float>(t.hi), scale = static_cast<float>(kLog2E / tau_);
    const float lo = static_cast<float>(t.lo * kLog2E / tau_);
    return sum_values(row_, -kInf<float>,
                      [=](VecF x, int64_t, int) { return C::from_odds(exp2_held((hi - x) * scale + lo)); });
  }

  // The sums at t + h tau, from the odds that were stored at t.
  OrdinarySums shift(double h, const float* out) const {
    const float factor = static_cast<float>(std::exp(h));
    return sum_values(Row{out, Dtype::kFloat, 1}, kNever,
                      [=](VecF e, int64_t, int) { return C::from_odds(e * factor); });
  }

  struct Total {
    double sum = 0;
    void operator+=(const Total& o) { sum += o.sum; }
  };

  // Replaces the odds that were stored at t by y at t + h tau, and returns the sum of y.
  double finish(double h, float* out) const {
    const float factor = static_cast<float>(std::exp(h));
    const int64_t next = next_;
    return reduce<float, Total>(Row{out, Dtype::kFloat, 1}, n_, inside_,
                                [=](Total& s, const float* p, int count, int64_t at) {
                                  LongSum total;
                                  auto add = [&](VecF e, int i, int lanes) {
                                    fetch_ahead<true>(out + at + i, next);
                                    const VecF y = e < kNever ? C::from_odds(e * factor) : VecF{};
                                    total.add(y);
                                    lanes == kWidth<float> ? store(out + at + i, y)
                                                           : store_part(out + at + i, lanes, y);
                                  };
                                  vectors<float>(p, count, kNever, add, [&] { total.flush(); });
                                  s.sum += sum<double>(total.total);
                                })
        .sum;
  }

  // The sums of a pass. value(x, i, lanes) is y of the entries from i on.
  template <class Value>
  OrdinarySums sum_values(const Row& row, float pad, Value value) const {
    return reduce<float, OrdinarySums>(
        row, n_, inside_, [=](OrdinarySums& s, const float* p, int count, int64_t at) {
          const Value local = value;  // a local copy stays in registers, as no store can change it
          LongSum total;
          typename C::Derivatives sums;
          auto add = [&](VecF x, int i, int lanes) {
            const VecF y = local(x, at + i, lanes);
            total.add(y);
            sums.add(y);
          };
          vectors<float>(p, count, pad, add, [&] { total.flush(); });
          s.C += sum<double>(total.total);
          sums.put(s, sum<float>);
        });
  }

  // Writes y at t in the row's dtype, and returns its sum before any rounding to half precision.
  double write(Threshold t, void* out) const {
    const float hi = static_cast<float>(t.hi), scale = static_cast<float>(1 / tau_);
    const float lo = static_cast<float>(((t.hi - hi) + t.lo) / tau_);
    const C F = F_;
    const bool own = row_.dtype == Dtype::kFloat;
    const Dtype dtype = row_.dtype;
    return reduce<float, Total>(row_, n_, inside_,
                                [=](Total& s, const float* p, int count, int64_t at) {
                                  float results[kBlock];
                                  float* const target = own ? static_cast<float*>(out) + at : results;
                                  LongSum total;
                                  auto add = [&](VecF x, int i, int lanes) {
                                    const VecF y = F.template value<float>((x - hi) * scale - lo);
                                    total.add(y);
                                    lanes == kWidth<float> ? store(target + i, y)
                                                           : store_part(target + i, lanes, y);
                                  };
                                  vectors<float>(p, count, -kInf<float>, add, [&] { total.flush(); });
                                  s.sum += sum<double>(total.total);
                                  if (!own) put(out, dtype, at, count, results);
                                })
        .sum;
  }

  // The sums of a pass. It also writes y, unless out is null.
  OrdinarySums sum_tails(const Row& row, int64_t n, const Parallel* inside, Threshold t,
                         void* out = nullptr) const {
    const float hi = static_cast<float>(t.hi), lo = static_cast<float>(t.lo / tau_),
                scale = static_cast<float>(1 / tau_);
    const float median = static_cast<float>(F_.median);
    const C F = F_;
    const Dtype dtype = row.dtype;
    const bool own = dtype == Dtype::kFloat;
    return reduce<float, OrdinarySums>(
        row, n, inside, [=](OrdinarySums& s, const float* p, int count, int64_t at) {
          float results[kBlock];
          float* const target = own && out != nullptr ? static_cast<float*>(out) + at : results;
          IntF m{};
          LongSum D;
          typename C::Derivatives sums = F.derivatives();
          auto add = [&](VecF x, int i, int lanes) {
            const VecF z = (x - hi) * scale - lo;
            const IntF above = z > median;
            const TailDensity<float> v = F.template split<float>(z, above);
            m -= above;
            sums.add(z, above, v);
            if constexpr (C::full_support) {
              D.add(above ? -v.tail : v.tail);
            } else {
              const VecF y = F.template value<float>(z);
              D.add(above ? y - 1 : y);
              if (out != nullptr)
                lanes == kWidth<float> ? store(target + i, y) : store_part(target + i, lanes, y);
            }
          };
          vectors<float>(p, count, -kInf<float>, add, [&] { D.flush(); });
          int32_t above_count = 0;
          for (int i = 0; i < kWidth<float>; ++i) above_count += m[i];
          s.m += above_count;
          s.C += sum<double>(D.total);
          sums.put(s, sum<float>);
          if (!C::full_support && !own && out != nullptr) put(out, dtype, at, count, results);
        });
  }

  static CountSums<double> count_sums(const OrdinarySums& s, double k, double n) {
    const double count = s.m + s.C;
    return {count, n - count, (s.m - k) + s.C, s.S1, s.S2, s.S3, s.S4, s.S5};
  }

  // The step in t/tau to a count of k; NaN where the row is not ordinary.
  static double step_to(const OrdinarySums& s, double k, double n) {
    bool good = true;
    const double h = refined_step<C, ScalarArithmetic>(count_sums(s, k, n), k, n, std::min(k, n - k), good);
    return good ? h : kNan;
  }
  static double rough_step_to(const OrdinarySums& s, double k, double n) {
    bool good = true;
    const double h = halley_step<C, ScalarArithmetic>(count_sums(s, k, n), k, n, std::min(k, n - k), good);
    return good ? h : kNan;
  }

  Row row_;
  int64_t n_, next_;
  double tau_;
  C F_;
  const Parallel* inside_;
  double few_ = 0;  // min(k, n - k) over the entries that may be selected
  double slope_ = 0;
  bool wide_ = false;
};

}  // namespace khot::KHOT_ISA
