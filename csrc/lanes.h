// Short rows, as of MoE routers: as many at once as a vector of floats has lanes, one row a lane.
//
// Row by row, sums across lanes and the scalar steps between passes would take longer than the passes.
// Transposed, a pass is a plain loop and a step is taken for all rows together. The method is that of fast.h;
// rows that are not ordinary are given back.
#pragma once

#include <cmath>

#include "fast.h"

namespace khot::KHOT_ISA {

template <class C>
class LaneSolver {
 public:
  static constexpr int width = kWidth<float>;
  static constexpr bool storing = FastSolver<C>::storing;

  LaneSolver(const Spec& spec, const C& F) : spec_(spec), F_(F), n_(static_cast<int>(spec.n)) {}

  // Solves and writes the rows from `first` on, `width` of them; ordinary[i] says whether row first + i was.
  void solve(const ForwardRows& rows, int64_t first, Goal& goal, bool* ordinary) {
    gather(rows, first);
    from_ = static_cast<const float*>(rows.x(first).data), to_ = static_cast<const float*>(rows.out(first));
    guess(goal);
    LaneSums sums = evaluate();
    VecF moved{};  // since the odds were stored, in tau
    IntF pending = good_;
    for (int pass = 0; pass < kPasses; ++pass) {
      const VecF h = step(sums);
      const VecF before = hi_, next = lo_ + h * tau_;
      hi_ = before + next;
      lo_ = (before - hi_) + next;
      moved += h;
      const IntF far = storing ? abs<float>(moved) >= 1 : IntF{};  // stored odds may overflow
      pending = good_ & ((abs<float>(h) > kLast) | far);
      if (!any(pending)) break;
      sums = again(any(good_ & far), moved);
    }
    good_ &= ~pending;
    // y itself has to have the sum that is asked for, or the row is given back
    const VecF miss = result(moved, sums);
    const VecF allowed = 5e-7f * clamp_below<float>(few_, 1.0f) + static_cast<float>(n_) * 0x1p-25f;
    good_ &= abs<float>(miss) <= allowed;
    scatter(rows, first, ordinary);
  }

 private:
  static constexpr int kPasses = std::is_same_v<C, Power> ? 10 : 6;  // its steps overshoot where f is next to 0
  static constexpr float kLast = FastSolver<C>::kLast;

  struct LaneSums {
    VecF miss, S1{}, S2{}, S3{}, S4{}, S5{};  // of the count from k; the others as FastSums
  };

  static KHOT_INLINE bool any(IntF mask) {
    int32_t seen = 0;
    for (int i = 0; i < width; ++i) seen |= mask[i];
    return seen != 0;
  }

  VecF* column(float* tile, int i) const { return reinterpret_cast<VecF*>(tile + i * width); }

  void gather(const ForwardRows& rows, int64_t first) {
    const float* p[width];
    for (int j = 0; j < width; ++j) p[j] = fetch(rows.x(first + j), 0, n_, rows_ + j * kShort);
    for (int i = 0; i < n_; i += width) {
      const int count = std::min(width, n_ - i);
      VecF v[width];
#pragma GCC unroll 16
      for (int j = 0; j < width; ++j) v[j] = count == width ? load(p[j] + i) : load_part(p[j] + i, count, 0.0f);
      transpose(v);
#pragma GCC unroll 16
      for (int j = 0; j < width; ++j) *column(x_, i + j) = v[j];
    }
    for (int j = 0; j < width; ++j) {
      k_all_[j] = rows.k(first + j);
      tau_[j] = static_cast<float>(rows.tau(first + j));
      // y - 1 is summed in place of y where most are near 1, as 1 would be most of the sum and nothing of C - k
      one_[j] = 2 * k_all_[j] > n_;
      const double sum = k_all_[j] - (one_[j] ? n_ : 0);
      k_[j] = static_cast<float>(k_all_[j]);
      left_[j] = static_cast<float>(n_ - k_all_[j]);
      sum_[j] = static_cast<float>(sum), sum_low_[j] = static_cast<float>(sum - sum_[j]);
    }
    few_ = k_ < left_ ? k_ : left_;
    good_ = (few_ > 0) & (tau_ > 1e-25f) & (tau_ < 1e25f);
    scale_ = 1 / tau_;
  }

  void guess(Goal& goal) {
    const VecF origin = *column(x_, 0);
    VecF first{}, second{};
    for (int i = 0; i < n_; ++i) {
      const VecF d = *column(x_, i) - origin;
      first += d;
      second += d * d;
    }
    const VecF off = first / static_cast<float>(n_), variance = second / static_cast<float>(n_) - off * off;
    good_ &= abs<float>(first) + second < kInf<float>;  // else an entry is not finite, and NaN below
    // Goal::guess in units of tau, which do not overflow where the row is ordinary
    const float noise = static_cast<float>(F_.variance);
    const VecF total = noise + clamp_below<float>(variance * scale_, 0) * scale_;
    VecF own{}, normal{}, deviation{};
    for (int j = 0; j < width; ++j) {
      if (!good_[j]) continue;
      goal.set(k_all_[j], n_, F_);
      own[j] = static_cast<float>(goal.own), normal[j] = static_cast<float>(goal.normal);
      deviation[j] = std::sqrt(total[j]);
    }
    const VecF quantile = normal + (own - normal) * (noise / total);
    hi_ = origin + (off - tau_ * (static_cast<float>(F_.mean) + quantile * deviation));
    lo_ = VecF{};
  }

  LaneSums again(bool far, VecF& moved) {
    if constexpr (storing) {
      if (!far) return shift(moved);
    }
    moved = VecF{};
    return evaluate();
  }

  // By how much the sum of y, which is in its place then, misses k.
  VecF result(VecF moved, const LaneSums& last) {
    if constexpr (storing) return finish(moved);
    if constexpr (C::full_support) return write();
    return last.miss;  // the last step had no length
  }

  // At hi + lo, perhaps with the odds stored, from which shift() and finish() go on, as in FastSolver.
  LaneSums evaluate() {
    if constexpr (storing) {
      const VecF scale = scale_ * static_cast<float>(kLog2E), hi = hi_, lo = lo_ * scale;
      return sum_values([=](int i) {
        fetch_ahead<false>(from_, (n_ + i) * width);
        const VecF e = exp2_held((hi - *column(x_, i)) * scale + lo);
        *column(y_, i) = e;
        return from_odds<C>(e);
      });
    } else {
      const VecF scale = scale_, hi = hi_, lo = lo_;
      const float median = static_cast<float>(F_.median);
      const C F = F_;
      IntF m{};
      BlockSum D;
      Derivatives<C> sums = derivatives(F);
      for (int i = 0; i < n_; ++i) {
        const VecF z = ((*column(x_, i) - hi) - lo) * scale;
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

  // A float sum of up to 256 terms loses digits; of sums of 16 terms it does not.
  struct BlockSum {
    VecF whole{}, block{};
    KHOT_INLINE void add(VecF v, int i) {
      block += v;
      if (i % 16 == 15) whole += block, block = VecF{};
    }
    KHOT_INLINE VecF sum() const { return whole + block; }
  };

  // The count, less n where one_, is whole + rest; by how much the count misses k.
  VecF missing(VecF whole, const BlockSum& rest) const { return ((whole - sum_) - sum_low_) + rest.sum(); }

  template <class Value>
  KHOT_INLINE LaneSums sum_values(Value value) {
    BlockSum count;
    Derivatives<C> sums;
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      const VecF y = value(i);
      count.add(y - one, i);
      sums.add(y);
    }
    return with(sums, missing(VecF{}, count));
  }

  static KHOT_INLINE LaneSums with(const Derivatives<C>& sums, VecF miss) {
    LaneSums s{miss};
    sums.put(s, [](VecF v) { return v; });
    return s;
  }

  LaneSums shift(VecF h) {
    const VecF factor = exp<float>(h);
    return sum_values([=](int i) { return from_odds<C>(*column(y_, i) * factor); });
  }

  // y in place of the odds.
  VecF finish(VecF h) {
    const VecF factor = exp<float>(h);
    return write_values([=](int i) { return from_odds<C>(*column(y_, i) * factor); });
  }

  VecF write() {
    const VecF scale = scale_, hi = hi_, lo = lo_;
    const C F = F_;
    return write_values([=](int i) { return F.template value<float>(((*column(x_, i) - hi) - lo) * scale); });
  }

  template <class Value>
  KHOT_INLINE VecF write_values(Value value) {
    BlockSum count;
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      fetch_ahead<true>(to_, (n_ + i) * width);
      const VecF y = value(i);
      *column(y_, i) = y;
      count.add(y - one, i);
    }
    return missing(VecF{}, count);
  }

  // As FastSolver::step; lanes that are not ordinary leave good_ and do not move.
  VecF step(const LaneSums& s) {
    const float n = static_cast<float>(n_);
    const VecF miss = s.miss, count = k_ + miss, rest = left_ - miss;
    good_ &= (count > 0) & (rest > 0) & (s.S1 > 1e-2f * clamp_above<float>(few_, 1.0f));
    if (storing) good_ &= s.S1 * static_cast<float>(FastSolver<C>::kDecided) > k_;
    const VecF safe = good_ ? s.S1 : splat(1.0f), below = good_ ? rest : splat(1.0f), above = good_ ? count : below;
    const VecF ratio = divide<float>(n * miss, k_ * below);
    const IntF small = abs<float>(ratio) < 0.5f;
    VecF g = log1p<float>(small ? ratio : VecF{});
    if (any(good_ & ~small)) g = small ? g : log<float>(1 + ratio);
    const VecF newton = divide<float>(g * above * below, n * safe);
    VecF h = newton;
    if constexpr (C::full_support) {
      const VecF bend = divide<float>((above - below) * safe, above * below) + divide<float>(s.S2, safe);
      h = divide<float>(newton, clamp_below<float>(1 - 0.5f * newton * bend, 0.5f));
    } else {
      good_ &= (abs<float>(miss) <= 3e-7f * clamp_below<float>(few_, 1.0f)) | (abs<float>(newton) > kLast);
    }
    h = abs<float>(h) < 0.5f ? refined(h, miss, s.S1, s.S2, s.S3, s.S4, s.S5) : h;
    good_ &= abs<float>(h) < 50;
    return good_ ? h : VecF{};
  }

  void scatter(const ForwardRows& rows, int64_t first, bool* ordinary) {
    for (int j = 0; j < width; ++j) {
      ordinary[j] = good_[j] != 0;
      if (ordinary[j]) rows.put(first + j, {hi_[j], lo_[j]});
    }
    const Dtype dtype = rows.x(first).dtype;
    const bool direct = dtype == Dtype::kFloat;
    float* p[width];
    for (int j = 0; j < width; ++j) p[j] = direct ? static_cast<float*>(rows.out(first + j)) : rows_ + j * kShort;
    for (int i = 0; i < n_; i += width) {
      const int count = std::min(width, n_ - i);
      VecF v[width];
#pragma GCC unroll 16
      for (int j = 0; j < width; ++j) v[j] = *column(y_, i + j);
      transpose(v);
#pragma GCC unroll 16
      for (int j = 0; j < width; ++j) count == width ? store(p[j] + i, v[j]) : store_part(p[j] + i, count, v[j]);
    }
    for (int j = 0; j < width && !direct; ++j) put(rows.out(first + j), dtype, 0, n_, p[j]);
  }

  Spec spec_;
  C F_;
  int n_;
  const float *from_, *to_;
  double k_all_[width];
  VecF k_{}, left_{}, few_{}, one_{}, sum_{}, sum_low_{}, tau_{}, scale_{}, hi_{}, lo_{};
  IntF good_{};
  alignas(KHOT_VECTOR_BYTES) float x_[kShort * width], y_[kShort * width], rows_[kShort * width];
};

}  // namespace khot::KHOT_ISA
