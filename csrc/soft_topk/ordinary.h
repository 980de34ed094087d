// The ordinary solver: rows with many undecided entries, so that log(C/(n - C)) is nearly linear in t, and a
// few steps of Halley's kind from a good guess end the search. The passes are in float. Rows that are not
// like this are given back, and the wide or the careful solver takes them.
#pragma once

#include <algorithm>
#include <cmath>

#include "search/row.h"

namespace khot::KHOT_ISA {

struct Spread {
  double mean = kNan, variance = kNan;
};

template <class C>
class OrdinarySolver : public RowPasses<C, Unit> {
  using Passes = RowPasses<C, Unit>;
  using Passes::stores_, Passes::near_, Passes::split;
  using Passes::x_, Passes::n_, Passes::tau_, Passes::F_, Passes::inside_, Passes::t_, Passes::out_;

 public:
  using Passes::good;

  OrdinarySolver(const Row& row, int64_t n, double tau, const C& F, const Parallel* inside)
      : Passes({}, row, n, tau, F, inside) {}

  // The mean and the variance of a row of finite entries, where they were computed; otherwise NaN.
  Spread spread() const { return spread_; }

  // Returns whether the row was ordinary. Then t is the threshold, and out, unless it is null, holds y, whose
  // sum is as near to k as promised.
  bool solve(double k, Goal& goal, Threshold& t, void* out) {
    const double guess = first_guess(k, goal);
    return !wide_ && refine(guess, k, few_, t, out);
  }

  // Finds a threshold without y, by steps until one is at most `last`, in tau.
  bool approach(double k, Goal& goal, Threshold& t, double last = C::last_step) {
    const double guess = first_guess(k, goal);
    return !wide_ && search(guess, k, last, C::value_from_odds, t, nullptr);
  }

  // What is written at a threshold of approach() has no sum that could be checked, as log y, so that the last
  // step has to be shorter.
  static constexpr double kLastUnchecked =
      C::full_support ? std::min(0.4 * C::last_step, 0.1) : std::min(C::last_step, 1e-4);

  // The same from a guess. few is min(k, n - k) over the entries that may be selected; `decided` says that
  // most of them are.
  KHOT_APART bool refine(double guess, double k, double few, Threshold& t, void* out, bool decided = false) {
    few_ = few;
    return search(guess, k, out == nullptr ? kLastUnchecked : C::last_step, false, t, out, decided);
  }

  // Writes y and returns whether its sum is as near to k as promised; kAround is for rows of which most y are
  // 0 or 1.
  template <bool kAround = false>
  bool write(Threshold t, double k, double few, void* out) {
    k_ = k, few_ = few, out_ = out;
    return reaches(Passes::template write<kAround>(t));
  }

  // The same where all y are 0 or 1.
  bool write_whole(double last, double k, double few, void* out) {
    k_ = k, few_ = few, out_ = out;
    return reaches(Passes::write_whole(last));
  }

  // The step in t/tau to a count of k. A row that is not ordinary is no longer good.
  double step(const RowSums& s) {
    const CountSums<double> sums = count_sums(s);
    const double n = static_cast<double>(n_);
    good = !stores_ || Passes::enough(s);
    const double h = refined_step<C, ScalarArithmetic>(sums, k_, n, std::min(k_, n - k_), good);
    good &= std::fabs(h) < 50;
    return h;
  }

  bool goes_on(double h) {
    const bool done = std::fabs(h) <= last_ && (C::full_support || out_ == nullptr || near_);
    near_ = !C::full_support && std::fabs(h) <= Passes::kNear;
    return !done;
  }

 private:
  // Rows whose scores have a larger standard deviation, in tau, are left to WideSolver: from about there on
  // it takes less time. Passes over odds are cheap, but where few entries are chosen, or few left, moments
  // say little of where these lie.
  double widest() const {
    if (!C::value_from_odds) return 12;
    return few_ * 100 >= static_cast<double>(n_) ? 24 : 12;
  }

  // NaN where the row is not for this solver.
  double first_guess(double k, Goal& goal) {
    if (!(k > 0 && k < static_cast<double>(n_)) || !(tau_ > 1e-25 && tau_ < 1e25)) return kNan;
    k_ = k, few_ = std::min(k, static_cast<double>(n_) - k);
    double guess = kNan;
    if (n_ >= kSampleFrom) guess = from_sample(goal);
    if (!wide_ && !(std::fabs(guess) < 1e30)) guess = from_moments(goal);
    return guess;
  }

  bool search(double guess, double k, double last, bool reads_odds, Threshold& t, void* out,
              bool decided = false) {
    if (!(std::fabs(guess) < 1e30)) return false;
    k_ = k, last_ = last;
    // Where most y are near 1, their sums lack the digits of what is left to it. Tails have them.
    const bool by_odds = few_ * 12 >= k && !decided;
    const bool stores = by_odds && Passes::kStores && out != nullptr && x_.dtype == Dtype::kFloat;
    Passes::start(guess, out, stores, reads_odds && by_odds);
    const Found<OrdinarySolver> found = find(*this);
    if (!good || Passes::may_end_gap(found.sums)) return false;
    t = split(t_);
    if (out == nullptr) return true;
    if constexpr (!C::full_support) {
      t = Passes::written_;
      return reaches(found.sums.m + found.sums.C);
    }
    if constexpr (Passes::kStores) {
      if (stores) return reaches(Passes::finish(found.moved));
    }
    return reaches(Passes::write(t));
  }

  // The tolerance is half of what is promised, since this sum of floats has an error of its own. The second
  // term allows for the rounding of y, which is less where all y are small.
  bool reaches(double total) const {
    return std::fabs(total - k_) <=
           5e-7 * std::max(1.0, few_) + std::min(static_cast<double>(n_) * 0x1p-25, k_ * 0x1p-23);
  }

  struct Moments {
    double first = 0, second = 0;
    void operator+=(const Moments& o) { first += o.first, second += o.second; }
  };

  double from_moments(Goal& goal) {
    double k = k_, count = static_cast<double>(n_), mean, variance;
    if (moments(mean, variance)) {
      spread_ = {mean, variance};
    } else {
      const Statistics stats = statistics(x_, n_, inside_);
      k -= stats.pinned, count = stats.free;
      if (stats.nan || !(k > 0 && k < count)) return kNan;
      mean = stats.mean, variance = stats.variance;
    }
    few_ = std::min(k, count - k);
    const double most = widest() * tau_;
    wide_ = !(variance <= most * most);
    goal.set(k, count, F_);
    return goal.guess(mean, variance, tau_, F_);
  }

 public:
  // Returns false where an entry is not finite.
  bool moments(double& mean, double& variance) const {
    float start = 0;
    const float origin = *fetch(x_, 0, 1, &start);
    const Moments sums =
        reduce<float, Moments>(x_, n_, inside_, [origin](Moments& s, const float* p, int count, int64_t) {
          VecF first{}, second{};
          vectors<float>(p, count, origin, [&](VecF x, int, int) {
            const VecF d = x - origin;
            first += d;
            second += d * d;
          });
          s.first += sum<float>(first), s.second += sum<float>(second);
        });
    const double count = static_cast<double>(n_), off = sums.first / count;
    mean = origin + off;
    variance = std::max(sums.second / count - off * off, 0.0);
    return std::fabs(sums.first) + sums.second < kInfinity;
  }

 private:
  // The threshold of a sample; NaN where it does not tell enough.
  double from_sample(Goal& goal) {
    float sample[kSampleMax];
    const int size = take_sample(x_, n_, sample);
    OrdinarySolver part({sample, Dtype::kFloat, 1}, size, tau_, F_, nullptr);
    part.k_ = k_ * (static_cast<double>(size) / static_cast<double>(n_));
    if (!(part.k_ >= 8 && part.k_ <= size - 8)) return kNan;
    double t = part.from_moments(goal);
    wide_ = part.wide_;
    for (int pass = 0; pass < 4; ++pass) {
      const double h = part.rough_step(part.tails(split(t)));
      if (!(std::fabs(h) < 50)) return kNan;
      t += h * tau_;
      if (std::fabs(h) <= 0.1) break;
    }
    return t;
  }

  double rough_step(const RowSums& s) const {
    const double n = static_cast<double>(n_);
    bool good = true;
    const double h = halley_step<C, ScalarArithmetic>(count_sums(s), k_, n, std::min(k_, n - k_), good);
    return good ? h : kNan;
  }

  CountSums<double> count_sums(const RowSums& s) const {
    const double count = s.m + s.C;
    return {count, static_cast<double>(n_) - count, (s.m - k_) + s.C, s.S1, s.S2, s.S3, s.S4, s.S5};
  }

  double k_ = 0, few_ = 0;  // few_: min(k, n - k) over the entries that may be selected
  double last_ = 0;
  Spread spread_;
  bool wide_ = false;
};

}  // namespace khot::KHOT_ISA
