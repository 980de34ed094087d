// Short rows, as of MoE routers: as many at once as a vector of floats has lanes, one row a lane.
//
// Row by row, sums across lanes and the scalar steps between passes would take longer than the passes.
// Transposed, a pass is a plain loop and a step is taken for all rows together. The method is that of fast.h;
// rows that are not ordinary are given back.
#pragma once

#include <cmath>

#include "fast.h"

namespace khot::KHOT_ISA {

// columns[i * width + j] = rows[j][i] for 4 rows j and count entries i; with kBack the other way.
template <bool kBack, class In>
KHOT_INLINE void transpose4(In* const* rows, float* columns, int count) {
  using V4 = float __attribute__((vector_size(16)));
  using I4 = int32_t __attribute__((vector_size(16)));
  constexpr int step = kWidth<float>;
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    V4 a, b, c, d;
    auto at = [&](int j) { return kBack ? columns + (i + j) * step : const_cast<float*>(rows[j]) + i; };
    auto to = [&](int j) { return kBack ? const_cast<float*>(rows[j]) + i : columns + (i + j) * step; };
    std::memcpy(&a, at(0), 16), std::memcpy(&b, at(1), 16), std::memcpy(&c, at(2), 16), std::memcpy(&d, at(3), 16);
    const V4 ab = __builtin_shuffle(a, b, I4{0, 4, 1, 5}), cd = __builtin_shuffle(c, d, I4{0, 4, 1, 5});
    const V4 AB = __builtin_shuffle(a, b, I4{2, 6, 3, 7}), CD = __builtin_shuffle(c, d, I4{2, 6, 3, 7});
    a = __builtin_shuffle(ab, cd, I4{0, 1, 4, 5}), b = __builtin_shuffle(ab, cd, I4{2, 3, 6, 7});
    c = __builtin_shuffle(AB, CD, I4{0, 1, 4, 5}), d = __builtin_shuffle(AB, CD, I4{2, 3, 6, 7});
    std::memcpy(to(0), &a, 16), std::memcpy(to(1), &b, 16), std::memcpy(to(2), &c, 16), std::memcpy(to(3), &d, 16);
  }
  for (; i < count; ++i) {
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBack) {
        rows[j][i] = columns[i * step + j];
      } else {
        columns[i * step + j] = rows[j][i];
      }
    }
  }
}

template <class C>
class LaneSolver {
 public:
  static constexpr int width = kWidth<float>;
  static constexpr bool logistic = std::is_same_v<C, Logistic>;

  LaneSolver(const Spec& spec, const C& F) : spec_(spec), F_(F), n_(static_cast<int>(spec.n)) {}

  // Solves and writes the rows from `first` on, `width` of them; ordinary[i] says whether row first + i was.
  void solve(const ForwardRows& rows, int64_t first, Goal& goal, bool* ordinary) {
    gather(rows, first);
    guess(goal);
    VecF h{};
    bool stored = false;
    IntF pending{};
    for (int pass = 0; pass < kPasses; ++pass) {
      const LaneSums sums = stored ? shift(h) : evaluate();
      h = step(sums);
      const VecF before = hi_, moved = lo_ + h * tau_;
      hi_ = before + moved;
      lo_ = (before - hi_) + moved;
      pending = good_ & (abs<float>(h) > kLast);
      stored = logistic && !any(good_ & (abs<float>(h) >= 1));
      if (!any(pending)) break;
    }
    good_ &= ~pending;
    // y itself has to have the sum that is asked for, or the row is given back
    const LaneSums written = stored ? finish(h) : write();
    const VecF left = static_cast<float>(n_) - k_, few = k_ < left ? k_ : left;
    const VecF miss = ((written.m - k_) - k_low_) + written.tails;
    good_ &= abs<float>(miss) <= 5e-7f * clamp_below<float>(few, 1.0f) + static_cast<float>(n_) * 0x1p-25f;
    scatter(rows, first, ordinary);
  }

 private:
  static constexpr int kPasses = 6;
  static constexpr float kLast = logistic ? FastSolver<C>::kLastStoring : FastSolver<C>::kLast;

  struct LaneSums {  // as FastSums
    VecF m{}, tails{}, S1{}, S2{}, S3{};
  };

  static KHOT_INLINE bool any(IntF mask) {
    int32_t seen = 0;
    for (int i = 0; i < width; ++i) seen |= mask[i];
    return seen != 0;
  }

  VecF* column(float* tile, int i) const { return reinterpret_cast<VecF*>(tile + i * width); }

  void gather(const ForwardRows& rows, int64_t first) {
    for (int j = 0; j < width; j += 4) {
      const float* p[4];
      for (int r = 0; r < 4; ++r) p[r] = fetch(rows.x(first + j + r), 0, n_, rows_ + (j + r) * kShort);
      transpose4<false>(p, x_ + j, n_);
    }
    const float n = static_cast<float>(n_);
    for (int j = 0; j < width; ++j) {
      k_all_[j] = rows.k(first + j);
      k_[j] = static_cast<float>(k_all_[j]), tau_[j] = static_cast<float>(rows.tau(first + j));
      k_low_[j] = static_cast<float>(k_all_[j] - k_[j]);
    }
    good_ = (k_ > 0) & (k_ < n) & (tau_ > 1e-25f) & (tau_ < 1e25f);
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

  LaneSums evaluate() {
    LaneSums s;
    if constexpr (logistic) {
      const VecF scale = scale_ * 1.44269504f, hi = hi_, lo = lo_;  // 1/log(2)
      ValueSums values;
      for (int i = 0; i < n_; ++i) {
        const VecF y = inverse_1p_exp2(((hi - *column(x_, i)) + lo) * scale);
        *column(y_, i) = y;
        values.add(y, i);
      }
      s = values.sums();
    } else {
      const VecF scale = scale_, hi = hi_, lo = lo_;
      const float median = static_cast<float>(F_.median);
      const C F = F_;
      IntF m{};
      BlockSum D;
      VecF S1{}, S2{};
      for (int i = 0; i < n_; ++i) {
        const VecF z = ((*column(x_, i) - hi) - lo) * scale;
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        m -= above;
        D.add(above ? -v.tail : v.tail, i);
        S1 += v.density;
        S2 += slope<C>(z, above, v);
      }
      s = {__builtin_convertvector(m, VecF), D.sum(), S1, S2, VecF{}};
    }
    return s;
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

  // Sums over stored y; y - 1 near 1, as y would be most of the sum and nothing of C - k.
  struct ValueSums {
    IntF m{};
    BlockSum tails;
    VecF f1{}, fy{}, ff{};
    KHOT_INLINE void add(VecF y, int i) {
      const VecF f = y - y * y;
      const IntF above = y > 0.5f;
      m -= above;
      tails.add(above ? y - 1 : y, i);
      f1 += f;
      fy += f * y;
      ff += f * f;
    }
    KHOT_INLINE LaneSums sums() const {
      return {__builtin_convertvector(m, VecF), tails.sum(), f1, f1 - 2 * fy, f1 - 6 * ff};
    }
  };

  // As FastSolver::shift.
  LaneSums shift(VecF h) {
    const VecF factor = exp<float>(-h), rest = 1 - factor;
    ValueSums values;
    for (int i = 0; i < n_; ++i) {
      const VecF y = *column(y_, i);
      const VecF moved = clamp_above<float>(divide<float>(y * factor, 1 - y * rest), 1.0f);
      *column(y_, i) = moved;
      values.add(moved, i);
    }
    return values.sums();
  }

  // The last step of stored y.
  LaneSums finish(VecF h) {
    IntF m{};
    BlockSum tails;
    for (int i = 0; i < n_; ++i) {
      const VecF y = moved(*column(y_, i), h);
      *column(y_, i) = y;
      const IntF above = y > 0.5f;
      m -= above;
      tails.add(above ? y - 1 : y, i);
    }
    return {__builtin_convertvector(m, VecF), tails.sum(), VecF{}, VecF{}, VecF{}};
  }

  LaneSums write() {
    const VecF scale = scale_, hi = hi_, lo = lo_;
    const C F = F_;
    IntF m{};
    BlockSum tails;
    for (int i = 0; i < n_; ++i) {
      const VecF y = F.template value<float>(((*column(x_, i) - hi) - lo) * scale);
      *column(y_, i) = y;
      const IntF above = y > 0.5f;
      m -= above;
      tails.add(above ? y - 1 : y, i);
    }
    return {__builtin_convertvector(m, VecF), tails.sum(), VecF{}, VecF{}, VecF{}};
  }

  // As FastSolver::step; lanes that are not ordinary leave good_ and do not move.
  VecF step(const LaneSums& s) {
    const float n = static_cast<float>(n_);
    const VecF count = s.m + s.tails, miss = ((s.m - k_) - k_low_) + s.tails, rest = n - count, left = n - k_;
    const VecF few = k_ < left ? k_ : left;
    good_ &= (count > 0) & (count < n) & (s.S1 > 1e-2f * clamp_above<float>(few, 1.0f));
    if (logistic) good_ &= s.S1 * 20 > s.m;  // y near 1 have lost digits that matter
    const VecF ratio = n * miss / (k_ * rest);
    const IntF small = abs<float>(ratio) < 0.5f;
    const VecF g = small ? log1p<float>(small ? ratio : VecF{}) : log<float>(1 + ratio);
    const VecF newton = g * count * rest / (n * s.S1);
    VecF h = newton;
    if constexpr (C::full_support) {
      const VecF bend = (1 / rest - 1 / count) * s.S1 + s.S2 / s.S1;
      h = newton / clamp_below<float>(1 - 0.5f * newton * bend, 0.5f);
    } else {
      good_ &= (abs<float>(miss) <= 3e-7f * clamp_below<float>(few, 1.0f)) | (abs<float>(newton) > kLast);
    }
    if constexpr (logistic) {
      VecF fine = h;
      for (int i = 0; i < 3; ++i) {
        fine += (miss - fine * (s.S1 - fine * (s.S2 / 2 - fine * s.S3 / 6))) /
                (s.S1 - fine * (s.S2 - fine * s.S3 / 2));
      }
      h = abs<float>(h) < 0.5f ? fine : h;
    }
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
    for (int j = 0; j < width; j += 4) {
      float* p[4];
      for (int r = 0; r < 4; ++r) {
        p[r] = direct ? static_cast<float*>(rows.out(first + j + r)) : rows_ + (j + r) * kShort;
      }
      transpose4<true>(p, y_ + j, n_);
      for (int r = 0; r < 4 && !direct; ++r) put(rows.out(first + j + r), dtype, 0, n_, p[r]);
    }
  }

  Spec spec_;
  C F_;
  int n_;
  double k_all_[width];
  VecF k_{}, k_low_{}, tau_{}, scale_{}, hi_{}, lo_{};
  IntF good_{};
  alignas(KHOT_VECTOR_BYTES) float x_[kShort * width], y_[kShort * width], rows_[kShort * width];
};

}  // namespace khot::KHOT_ISA
