// The lane solver: short rows, as those of MoE routers, as many at once as a vector of floats has lanes, one
// row per lane.
//
// Row by row, the sums across lanes and the scalar steps between passes would take longer than the passes.
// Transposed, a pass is a plain loop and a step is taken for all rows together. The method is that of the
// ordinary solver, and rows that are not ordinary are given back.
#pragma once

#include <cmath>

#include "simd/tile.h"
#include "soft_topk/ordinary.h"

namespace khot::KHOT_ISA {

template <class C>
class LaneSolver {
 public:
  static constexpr int width = kWidth<float>;

  LaneSolver(const Spec& spec, const C& F)
      : spec_(spec),
        F_(F),
        n_(static_cast<int>(spec.n)),
        last_(static_cast<float>(spec.output == Output::kLog ? OrdinarySolver<C>::kLastUnchecked
                                                             : C::last_step)) {}

  // Solves and writes the rows first, ..., first + width - 1. ordinary[i] says whether row first + i was
  // ordinary.
  void solve(const ForwardRows& rows, int64_t first, Goal& goal, bool* ordinary) {
    gather(rows, first);
    from_ = static_cast<const float*>(rows.x(first).data), to_ = static_cast<const float*>(rows.out(first));
    guess(goal);
    LaneSums sums = evaluate();
    VecF moved{};  // by how much t has moved since the odds were stored, in tau
    IntF pending = good_;
    for (int pass = 0; pass < kPasses; ++pass) {
      const VecF h = step(sums);
      const VecF before = hi_, next = lo_ + h * tau_;
      hi_ = before + next;
      lo_ = (before - hi_) + next;
      moved += h;
      const IntF far = C::value_from_odds ? abs<float>(moved) >= 1 : IntF{};  // the odds may overflow
      pending = good_ & ((abs<float>(h) > last_) | far);
      if (!any(pending)) break;
      sums = again(any(good_ & far), moved);
    }
    good_ &= ~pending;
    if (spec_.output == Output::kThreshold) {  // what is wanted is threshold()
      for (int j = 0; j < width; ++j) ordinary[j] = good_[j] != 0;
      return;
    }
    if (spec_.output == Output::kLog) {
      write_logs();
      return scatter(rows, first, ordinary);
    }
    if constexpr (!C::full_support) take_middle();
    // A row whose y does not have the sum that is asked for is given back.
    const VecF miss = result(moved, sums);
    const VecF allowed = 5e-7f * clamp_below<float>(few_, 1.0f) + free_ * 0x1p-25f;
    good_ &= abs<float>(miss) <= allowed;
    scatter(rows, first, ordinary);
  }

  // The threshold of row first + j, where that was ordinary.
  Threshold threshold(int j) const { return {hi_[j], lo_[j]}; }
  // The sum of f there.
  double slope(int j) const { return slope_[j]; }

 private:
  static constexpr int kPasses = C::full_support ? 9 : 12;

  struct LaneSums {
    VecF miss, S1{}, S2{}, S3{}, S4{}, S5{};  // by how much the count misses k, and sums as in OrdinarySums
  };

  void gather(const ForwardRows& rows, int64_t first) {
    khot::KHOT_ISA::gather([&](int j) { return rows.x(first + j); }, n_, rows_, x_);
    for (int j = 0; j < width; ++j) {
      k_all_[j] = rows.k(first + j);
      tau_[j] = static_cast<float>(rows.tau(first + j));
      // Where most y are near 1, y - 1 is summed instead of y: otherwise these ones would take the digits of
      // the sum.
      one_[j] = 2 * k_all_[j] > n_;
      const double sum = k_all_[j] - (one_[j] ? n_ : 0);
      k_[j] = static_cast<float>(k_all_[j]);
      sum_[j] = static_cast<float>(sum), sum_low_[j] = static_cast<float>(sum - sum_[j]);
    }
    good_ = (k_ > 0) & (tau_ > 1e-25f) & (tau_ < 1e25f);
    scale_ = 1 / tau_;
  }

  // Sums of the entries that may be selected: all, or where some are -inf the others.
  struct Moments {
    VecF origin, first{}, second{};  // of the deviations from the origin
  };

  Moments moments() {
    Moments m{*column(x_, 0)};
    for (int i = 0; i < n_; ++i) {
      const VecF d = *column(x_, i) - m.origin;
      m.first += d;
      m.second += d * d;
    }
    free_ = splat(static_cast<float>(n_));
    const IntF finite = abs<float>(m.first) + m.second < kInf<float>;
    return any(good_ & ~finite) ? moments_of_selectable() : m;
  }

  KHOT_APART Moments moments_of_selectable() {
    Moments m{splat(-kInf<float>)};
    free_ = VecF{};
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i);
      const IntF out = x == -kInf<float>;
      m.origin = m.origin == -kInf<float> ? x : m.origin;
      const VecF d = out ? VecF{} : x - m.origin;
      m.first += d;
      m.second += d * d;
      free_ += out ? VecF{} : splat(1.0f);
    }
    good_ &= abs<float>(m.first) + m.second < kInf<float>;  // otherwise an entry is +inf or NaN
    return m;
  }

  void guess(Goal& goal) {
    const auto [origin, first, second] = moments();
    for (int j = 0; j < width; ++j) left_[j] = static_cast<float>(free_[j] - k_all_[j]);
    few_ = k_ < left_ ? k_ : left_;
    good_ &= few_ > 0;
    const VecF off = first / free_, variance = second / free_ - off * off;
    // Goal::guess in units of tau, in which an ordinary row does not overflow.
    const float noise = static_cast<float>(F_.variance);
    const VecF total = noise + clamp_below<float>(variance * scale_, 0) * scale_;
    VecF own{}, normal{}, deviation{};
    for (int j = 0; j < width; ++j) {
      if (!good_[j]) continue;
      goal.set(k_all_[j], free_[j], F_);
      own[j] = static_cast<float>(goal.own), normal[j] = static_cast<float>(goal.normal);
      deviation[j] = std::sqrt(total[j]);
    }
    if constexpr (!C::full_support) {
      guard_.start(few_ / deviation);
    }
    const VecF quantile = normal + (own - normal) * (noise / total);
    hi_ = origin + (off - tau_ * (static_cast<float>(F_.mean) + quantile * deviation));
    lo_ = VecF{};
  }

  LaneSums again(bool far, VecF& moved) {
    if constexpr (C::value_from_odds) {
      if (!far) return shift(moved);
    }
    moved = VecF{};
    return evaluate();
  }

  // Leaves y where it is expected, and returns by how much its sum misses k.
  VecF result(VecF moved, const LaneSums& last) {
    if constexpr (C::value_from_odds) return finish(moved);
    if constexpr (C::full_support) return write();
    return last.miss;  // y is that of the last pass, as the last step had no length
  }

  // The sums at hi + lo. With value_from_odds it stores the odds, from which shift() and finish() go on, as
  // in OrdinarySolver.
  LaneSums evaluate() {
    if constexpr (C::value_from_odds) {
      const VecF scale = scale_ * static_cast<float>(kLog2E), hi = hi_, lo = lo_ * scale;
      return sum_values([=](int i) {
        fetch_ahead<false>(from_, (n_ + i) * width);
        const VecF e = exp2_held((hi - *column(x_, i)) * scale + lo);
        *column(y_, i) = e;
        return C::from_odds(e);
      });
    } else {
      const VecF scale = scale_, hi = hi_, lo = lo_ * scale;
      const float median = static_cast<float>(F_.median);
      const C F = F_;
      IntF m{};
      ExactBlockSum D;
      typename C::Derivatives sums = F.derivatives();
      for (int i = 0; i < n_; ++i) {
        const VecF z = (*column(x_, i) - hi) * scale - lo;  // one operation rounds less than two
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        m -= above;
        sums.add(z, above, v);
        if constexpr (C::full_support) {
          D.add(above ? -v.tail : v.tail, i);
        } else {
          const VecF y = F.template value<float>(z);
          D.add(above ? y - 1 : y, i);
          *column(y_, i) = y;
        }
      }
      return with(sums, missing(__builtin_convertvector(m, VecF) - static_cast<float>(n_) * one_, D));
    }
  }

  // By how much the count misses k. The count, less n where one_ is 1, is whole + rest.
  VecF missing(VecF whole, const ExactBlockSum& rest) const {
    return ((whole - sum_) + rest.whole) + ((rest.block + rest.lost) - sum_low_);
  }

  template <class Value>
  KHOT_INLINE LaneSums sum_values(Value value) {
    ExactBlockSum count;
    typename C::Derivatives sums;
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      const VecF y = value(i);
      count.add(y - one, i);
      sums.add(y);
    }
    return with(sums, missing(VecF{}, count));
  }

  static KHOT_INLINE LaneSums with(const typename C::Derivatives& sums, VecF miss) {
    LaneSums s{miss};
    sums.put(s, [](VecF v) { return v; });
    return s;
  }

  LaneSums shift(VecF h) {
    const VecF factor = exp<float>(h);
    return sum_values([=](int i) { return C::from_odds(*column(y_, i) * factor); });
  }

  // Replaces the odds by y.
  VecF finish(VecF h) {
    const VecF factor = exp<float>(h);
    return write_values([=](int i) {
      const VecF e = *column(y_, i);
      return e < kNever ? C::from_odds(e * factor) : VecF{};
    });
  }

  VecF write() {
    const VecF scale = scale_, hi = hi_, lo = lo_ * scale;
    const C F = F_;
    return write_values([=](int i) { return F.template value<float>((*column(x_, i) - hi) * scale - lo); });
  }

  void write_logs() {
    if constexpr (C::log_fits_float) {
      const VecF scale = scale_, hi = hi_, lo = lo_;
      for (int i = 0; i < n_; ++i) {
        fetch_ahead<true>(to_, (n_ + i) * width);
        *column(y_, i) = F_.template log_value<float>(((*column(x_, i) - hi) - lo) * scale);
      }
    }
  }

  template <class Value>
  KHOT_INLINE VecF write_values(Value value) {
    ExactBlockSum count;
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      fetch_ahead<true>(to_, (n_ + i) * width);
      const VecF y = value(i);
      *column(y_, i) = y;
      count.add(y - one, i);
    }
    return missing(VecF{}, count);
  }

  // The step in t/tau. Rows that are not ordinary leave good_ and do not move.
  VecF step(const LaneSums& s) {
    const CountSums<VecF> sums{k_ + s.miss, left_ - s.miss, s.miss, s.S1, s.S2, s.S3, s.S4, s.S5};
    // these sums have more digits than those that the ratio is for
    if constexpr (C::value_from_odds) good_ &= s.S1 * static_cast<float>(3 * C::decided_ratio) > k_;
    VecF h;
    if constexpr (C::full_support) {
      h = refined_step<C, LaneArithmetic>(sums, k_, free_, few_, good_);
    } else {
      h = guard_.step({k_, left_, few_, hi_, tau_, scale_}, sums, [&](const CountSums<VecF>& s) {
        return refined_step<C, LaneArithmetic>(s, k_, free_, few_, good_);
      });
    }
    good_ &= abs<float>(h) < 50;
    slope_ = slope_after(h, sums);
    return good_ ? h : VecF{};
  }

  // Where all entries are decided, every t between two of them gives this count; the threshold is their
  // middle. The search may have ended at an end of the gap, where rounding leaves an entry a little
  // undecided.
  void take_middle() {
    VecF low = splat(-kInf<float>), high = splat(kInf<float>);
    IntF decided = good_;
    for (int j = 0; j < width; ++j) decided[j] &= k_all_[j] == std::floor(k_all_[j]) ? -1 : 0;
    if (!any(decided)) return;
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), y = *column(y_, i), end = x - tau_;
      const IntF out = y <= 1e-6f, in = y >= 1 - 1e-6f;
      decided &= out | in;
      low = out & (x > low) ? x : low;
      high = in & (end < high) ? end : high;
    }
    const VecF middle = 0.5f * low + 0.5f * high;
    decided &= (low < middle) & (middle < high);
    hi_ = decided ? middle : hi_, lo_ = decided ? VecF{} : lo_;
  }

  void scatter(const ForwardRows& rows, int64_t first, bool* ordinary) {
    for (int j = 0; j < width; ++j) {
      ordinary[j] = good_[j] != 0;
      if (ordinary[j]) rows.put(first + j, {hi_[j], lo_[j]});
    }
    khot::KHOT_ISA::scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n_, rows_, y_);
  }

  Spec spec_;
  C F_;
  int n_;
  float last_;
  const float *from_, *to_;
  double k_all_[width];
  VecF k_{}, free_{}, left_{}, few_{}, one_{}, sum_{}, sum_low_{}, tau_{}, scale_{}, hi_{}, lo_{}, slope_{};
  Guard guard_;  // of compact support
  IntF good_{};
  alignas(KHOT_VECTOR_BYTES) float x_[kShortRow * width], y_[kShortRow * width], rows_[kShortRow * width];
};

}  // namespace khot::KHOT_ISA
