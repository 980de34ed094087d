// The soft count: C(b) = sum F((x_j - b)/tau) at one or more levels b of a row, and its gradients
// (khot/_kernels/reference/soft_count.py).
//
// The row is read once per level forward. Backward it is read once for all levels, in blocks. The passes are
// in float where that carries the row, with sums in double. Short rows with one level are taken together, one
// per lane.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/tile.h"
#include "soft_topk/apply.h"

namespace khot::KHOT_ISA {

// F and f as functions of x, at one level; with S = Vec<R> there is a level for each lane.
template <class R, class C, class S = R>
struct Level {
  C F;
  S hi{}, lo{}, scale{}, scale_low{};
  R shift;

  Level(const C& F, bool centred) : F(F), shift(static_cast<R>(centred ? F.median : 0.0)) {}
  Level(const C& F, Threshold level, double tau, bool centred = false) : Level(F, centred) {
    put(level, tau, hi, lo, scale, scale_low);
  }
  void put(int lane, double level, double tau) {
    R high, low, steep, steep_low;
    put({level, 0}, tau, high, low, steep, steep_low);
    hi[lane] = high, lo[lane] = low, scale[lane] = steep, scale_low[lane] = steep_low;
  }

  KHOT_INLINE Vec<R> value(Vec<R> x) const {
    if constexpr (kOdds) {
      return C::from_odds(exp2_held(-scaled(x)));
    } else if constexpr (C::full_support) {
      return F.template value<R>(scaled(x));
    } else {
      return F.template value<R>(scaled(x) + shift);
    }
  }
  // F, and 1 - F to the last digit.
  KHOT_INLINE VecF value(VecF x, VecF& rest) const {
    static_assert(kOdds);
    return C::from_odds(exp2_held(-scaled(x)), rest);
  }
  // f, which is NaN where x is; and z, without the shift.
  KHOT_INLINE Vec<R> density(Vec<R> x, Vec<R>& z) const {
    z = scaled(x) * static_cast<R>(1 / factor());
    Vec<R> at = z;
    if constexpr (!C::full_support) at += shift;
    const Vec<R> f = F.template density<R>(at);
    return z != z ? z : f;
  }

 private:
  static constexpr bool kOdds = C::value_from_odds && sizeof(R) == 4;
  static constexpr double factor() { return kOdds ? kLog2E : 1; }
  // The level and 1/tau are pairs of floats: an error of one float would be the same in every term, so that
  // it would not average out in the sum.
  static void put(Threshold level, double tau, R& hi, R& lo, R& scale, R& scale_low) {
    hi = static_cast<R>(level.hi);
    lo = static_cast<R>((level.hi - static_cast<double>(hi) + level.lo) * factor() / tau);
    scale = static_cast<R>(factor() / tau);
    scale_low = static_cast<R>(factor() / tau - static_cast<double>(scale));
  }
  KHOT_INLINE Vec<R> scaled(Vec<R> x) const {
    const Vec<R> d = x - hi, far = d * scale;
    if constexpr (sizeof(R) == 8) return far;
    return far + (abs<R>(far) < R(1e30) ? d * scale_low - lo : Vec<R>{});
  }
};

template <class C>
bool count_in_float(const Spec& spec, const C& F, Dtype dtype, double tau, double level) {
  return float_carries(spec, F, dtype, tau) && std::fabs(level) < 1e30 && std::fabs(level / tau) < 1e30;
}

struct CountTotal {
  double sum = 0;
  void operator+=(const CountTotal& o) { sum += o.sum; }
};

template <class R, class C>
double count_row(const CountSpec& spec, const C& F, const Row& x, double tau, double level) {
  const Level<R, C> at(F, {level, 0}, tau, spec.centred);
  return reduce<R, CountTotal>(x, spec.n, spec.inside,
                               [=](CountTotal& s, const R* p, int count, int64_t) {
                                 if constexpr (sizeof(R) == 4) {
                                   LongSum total;
                                   auto add = [&](Vec<R> v, int, int) { total.add(at.value(v)); };
                                   vectors<R>(p, count, -kInf<R>, add, [&] { total.flush(); });
                                   s.sum += sum<double>(total.total);
                                 } else {
                                   Vec<R> total{};
                                   vectors<R>(p, count, -kInf<R>,
                                              [&](Vec<R> v, int, int) { total += at.value(v); });
                                   s.sum += sum<R>(total);
                                 }
                               })
      .sum;
}

struct Infinities {
  double up = 0, down = 0;
  bool nan = false;
  void operator+=(const Infinities& o) { up += o.up, down += o.down, nan |= o.nan; }
};

// At an infinite level only the infinite scores, or all but these, count. Where F is centred, a score counts
// itself as 1/2.
inline double count_at_infinity(const CountSpec& spec, const Row& x, double level) {
  const Infinities found = reduce<double, Infinities>(
      x, spec.n, spec.inside, [](Infinities& s, const double* p, int count, int64_t) {
        for (int i = 0; i < count; ++i) {
          s.up += p[i] == kInfinity, s.down += p[i] == -kInfinity, s.nan |= p[i] != p[i];
        }
      });
  const double share = spec.centred ? 0.5 : 1;
  if (found.nan) return kNan;
  return level > 0 ? found.up * share : static_cast<double>(spec.n) - found.down * share;
}

// Rows of up to kShortRow entries with one level each, as many as a vector of floats has lanes.
template <class C>
class CountLanes {
 public:
  static constexpr int width = kWidth<float>;

  // Calls group(lanes, i) for groups of rows that begin at i, and one(i) for single rows: where that returned
  // false, at the end, and where rows are long or have several levels.
  template <class Group, class One>
  static KHOT_INLINE void each(const CountSpec& spec, const C& F, const CountRows& rows, int64_t begin,
                               int64_t end, Group group, One one) {
    CountLanes lanes(spec, F);
    auto several = [&](int64_t first, bool* done) { std::fill(done, done + width, group(lanes, first)); };
    each_row(spec.levels == 1 && begin < end && fits_tile(rows.x(begin), spec.n), begin, end, several, one);
  }

  CountLanes(const CountSpec& spec, const C& F)
      : spec_(spec), n_(static_cast<int>(spec.n)), at_(F, spec.centred) {
    std::fill(tau_, tau_ + width, kNan);  // which no tau equals
  }

  // Counts the rows first, ..., first + width - 1. Returns false, with nothing done, where float does not
  // carry all of them.
  bool count(const CountRows& rows, int64_t first) {
    if (!take(rows, first)) return false;
    ExactBlockSum total;
    for (int i = 0; i < n_; ++i) total.add(at_.value(*column(x_, i)), i);
    total.flush();
    for (int j = 0; j < width; ++j) {
      rows.put(first + j, 0, static_cast<double>(total.whole[j]) + static_cast<double>(total.lost[j]));
    }
    return true;
  }

  // The same for the gradients.
  bool gradients(const CountRows& rows, int64_t first) {
    if (!take(rows, first)) return false;
    double slope[width];
    VecF factor;
    for (int j = 0; j < width; ++j) slope[j] = rows.grad(first + j, 0);
    for (int j = 0; j < width; ++j) slope[j] /= tau_[j], factor[j] = static_cast<float>(slope[j]);
    if (any(abs<float>(factor) > 1e30f)) return false;
    BlockSum f_sum, fz_sum;
    for (int i = 0; i < n_; ++i) {
      VecF z;
      const VecF f = at_.density(*column(x_, i), z);
      f_sum.add(f, i), fz_sum.add(f != 0 ? f * z : VecF{}, i);
      *column(y_, i) = f * factor;
    }
    scatter([&](int j) { return rows.grad_x(first + j); }, rows.x(first).dtype, n_, rows_, y_);
    const VecF f = f_sum.sum(), fz = fz_sum.sum();
    for (int j = 0; j < width; ++j) {
      rows.put(first + j, 0, -slope[j] * static_cast<double>(f[j]));
      rows.put_tau(first + j, -slope[j] * static_cast<double>(fz[j]));
    }
    return true;
  }

 private:
  bool take(const CountRows& rows, int64_t first) {
    for (int j = 0; j < width; ++j) {
      const double tau = rows.tau(first + j), level = rows.level(first + j, 0);
      if (level == level_[j] && tau == tau_[j]) continue;  // as in most calls
      if (!count_in_float(spec_, at_.F, rows.x(first + j).dtype, tau, level)) return false;
      at_.put(j, level, tau);
      level_[j] = level, tau_[j] = tau;
    }
    gather([&](int j) { return rows.x(first + j); }, n_, rows_, x_);
    return true;
  }

  CountSpec spec_;
  int n_;
  Level<float, C, VecF> at_;
  double level_[width] = {}, tau_[width];  // those of at_
  alignas(KHOT_VECTOR_BYTES) float x_[kShortRow * width], y_[kShortRow * width], rows_[kShortRow * width];
};

// The rows [begin, end).
inline void soft_count(const CountSpec& spec, const CountRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    const FlushSubnormals flush(rows.x(begin).dtype != Dtype::kDouble);
    auto one = [&](int64_t i) {
      const Row x = rows.x(i);
      const double tau = rows.tau(i);
      for (int64_t j = 0; j < spec.levels; ++j) {
        const double level = rows.level(i, j);
        if (!(tau > 0 && tau < kInfinity) || level != level) {
          rows.put(i, j, kNan);
        } else if (std::fabs(level) == kInfinity) {
          rows.put(i, j, count_at_infinity(spec, x, level));
        } else if (count_in_float(spec, F, x.dtype, tau, level)) {
          rows.put(i, j, count_row<float, C>(spec, F, x, tau, level));
        } else {
          rows.put(i, j, count_row<double, C>(spec, F, x, tau, level));
        }
      }
    };
    CountLanes<C>::each(
        spec, F, rows, begin, end, [&](CountLanes<C>& lanes, int64_t i) { return lanes.count(rows, i); },
        one);
  });
}

struct CountGradients {
  double f = 0, fz = 0;
  void operator+=(const CountGradients& o) { f += o.f, fz += o.fz; }
};

// One level: writes dL/dx, and returns the sums of f and fz.
template <class R, class C>
CountGradients count_gradients_row(const CountSpec& spec, const C& F, const Row& x, double tau, double level,
                                   double grad, void* grad_x) {
  constexpr Dtype own_dtype = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
  const Level<R, C> at(F, {level, 0}, tau, spec.centred);
  const R factor = static_cast<R>(grad / tau);
  const bool own = x.dtype == own_dtype;
  return reduce<R, CountGradients>(x, spec.n, spec.inside,
                                   [=](CountGradients& sums, const R* p, int count, int64_t begin) {
                                     R results[kBlock];
                                     R* const target = own ? static_cast<R*>(grad_x) + begin : results;
                                     Vec<R> f_sum{}, fz_sum{};
                                     vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int lanes) {
                                       Vec<R> z;
                                       const Vec<R> f = at.density(v, z), value = f * factor;
                                       f_sum += f;
                                       fz_sum += f != 0 ? f * z : Vec<R>{};  // z may be infinite
                                       store_beside(target, i, lanes, value);
                                     });
                                     sums.f += sum<R>(f_sum), sums.fz += sum<R>(fz_sum);
                                     if (!own) put(grad_x, x.dtype, begin, count, results);
                                   });
}

// Several levels: a block of the row meets all levels in turn. Their sum is in double, because there may be
// as many levels as entries; only a few of them are added in float.
template <class R, class C>
void count_gradients_levels(const CountSpec& spec, const C& F, const Row& x, double tau, const double* levels,
                            const double* grads, void* grad_x, CountGradients* sums) {
  constexpr int64_t kTogether = 8;
  std::vector<Level<R, C>> at;
  at.reserve(spec.levels);
  for (int64_t j = 0; j < spec.levels; ++j) at.emplace_back(F, Threshold{levels[j], 0}, tau, spec.centred);
  R buffer[kBlock], part[kBlock + kWidth<R>];
  double total[kBlock];
  for (int64_t begin = 0; begin < spec.n; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, spec.n - begin));
    const R* p = fetch(x, begin, count, buffer);
    std::fill(total, total + count, 0.0);
    for (int64_t first = 0; first < spec.levels; first += kTogether) {
      std::fill(part, part + kBlock + kWidth<R>, R(0));
      for (int64_t j = first; j < std::min(spec.levels, first + kTogether); ++j) {
        const Level<R, C> level = at[j];
        const R factor = static_cast<R>(grads[j] / tau);
        Vec<R> f_sum{}, fz_sum{};
        vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int) {
          Vec<R> z;
          const Vec<R> f = level.density(v, z);
          f_sum += f;
          fz_sum += f != 0 ? f * z : Vec<R>{};
          store(part + i, load(part + i) + f * factor);
        });
        sums[j].f += sum<R>(f_sum), sums[j].fz += sum<R>(fz_sum);
      }
      for (int i = 0; i < count; ++i) total[i] += static_cast<double>(part[i]);
    }
    put(grad_x, x.dtype, begin, count, total);
  }
}

inline void soft_count_backward(const CountSpec& spec, const CountRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    const FlushSubnormals flush(rows.x(begin).dtype != Dtype::kDouble);
    std::vector<double> levels(spec.levels), grads(spec.levels);
    std::vector<CountGradients> sums(spec.levels);
    auto one = [&](int64_t i) {
      const Row x = rows.x(i);
      const double tau = rows.tau(i);
      bool in_float = true, good = tau > 0 && tau < kInfinity;
      for (int64_t j = 0; j < spec.levels; ++j) {
        levels[j] = rows.level(i, j), grads[j] = rows.grad(i, j), sums[j] = {};
        if (std::fabs(levels[j]) == kInfinity) levels[j] = grads[j] = 0;  // nothing moves there
        in_float &= count_in_float(spec, F, x.dtype, tau, levels[j]) && !(std::fabs(grads[j] / tau) > 1e30);
        good &= levels[j] == levels[j];
      }
      if (!good) {
        fill_constant<double>(spec, rows.grad_x(i), x.dtype, x, kNan, kNan, 0);
        for (int64_t j = 0; j < spec.levels; ++j) rows.put(i, j, kNan);
        rows.put_tau(i, kNan);
        return;
      }
      const auto write = [&](auto zero) {
        using R = decltype(zero);
        void* const out = rows.grad_x(i);
        if (spec.levels == 1) {
          sums[0] = count_gradients_row<R, C>(spec, F, x, tau, levels[0], grads[0], out);
        } else {
          count_gradients_levels<R, C>(spec, F, x, tau, levels.data(), grads.data(), out, sums.data());
        }
      };
      in_float ? write(0.0f) : write(0.0);
      double grad_tau = 0;
      for (int64_t j = 0; j < spec.levels; ++j) {
        rows.put(i, j, -grads[j] * sums[j].f / tau);
        grad_tau -= grads[j] * sums[j].fz / tau;
      }
      rows.put_tau(i, grad_tau);
    };
    CountLanes<C>::each(
        spec, F, rows, begin, end, [&](CountLanes<C>& lanes, int64_t i) { return lanes.gradients(rows, i); },
        one);
  });
}

}  // namespace khot::KHOT_ISA
