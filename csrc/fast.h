// Ordinary rows: many undecided entries, so that log(C/(n - C)) is nearly linear in t, and a few steps of
// Halley's kind from a good guess end the search. Rows that are not so are left to the general solver.
//
// All in float.
#pragma once

#include <algorithm>
#include <cmath>

#include "solver.h"

namespace khot::KHOT_ISA {

constexpr int64_t kSampleFrom = 65536;  // rows at least this long are guessed from a sample
constexpr int kSampleBlocks = 16;
constexpr int kSampleMax = 16384;

// Rows mostly lie one behind the other, and the processor sees one coming too late: up to this length, each fetches
// the next one into the cache.
constexpr int64_t kAhead = 4096;

constexpr float kNever = 0x1p126f;  // the largest odds exp(-z) that are stored, which stand for any beyond: y = 0

struct FastSums {
  double m = 0, C = 0;  // the count is m + C: entries above, and tails F or F - 1; or all in C
  double S1 = 0;        // sum of f
  double S2 = 0, S3 = 0, S4 = 0, S5 = 0;  // of its derivatives, where they are of use
  void operator+=(const FastSums& o) {
    m += o.m, C += o.C, S1 += o.S1, S2 += o.S2, S3 += o.S3, S4 += o.S4, S5 += o.S5;
  }
};

// Sums from which those of f and its derivatives follow.
template <class C>
struct Derivatives {
  VecF f{};
  KHOT_INLINE void add(VecF /*z*/, IntF /*above*/, TailDensity<float> v) { f += v.density; }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    s.S1 += total(f);
  }
};

template <>
struct Derivatives<Logistic> {  // polynomials in y
  VecF f1{}, fy{}, ff{}, ffy{}, fff{};
  KHOT_INLINE void add(VecF y) { add(y - y * y, y); }
  KHOT_INLINE void add(VecF f, VecF y) {
    const VecF square = f * f;
    f1 += f;
    fy += f * y;
    ff += square;
    ffy += square * y;
    fff += square * f;
  }
  KHOT_INLINE void add(VecF /*z*/, IntF above, TailDensity<float> v) { add(v.density, above ? 1 - v.tail : v.tail); }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    const auto S1 = total(f1), bend = S1 - 2 * total(fy), square = total(ff);
    s.S1 += S1;
    s.S2 += bend;                                   // f' = f (1 - 2y)
    s.S3 += S1 - 6 * square;                        // f'' = f (1 - 6f)
    s.S4 += bend - 12 * (square - 2 * total(ffy));  // f''' = f' (1 - 12f)
    s.S5 += S1 - 30 * square + 120 * total(fff);    // f'''' = f (1 - 30f + 120f^2)
  }
};

template <>
struct Derivatives<Laplace> {  // up to signs f itself, but for the kinks that entries near t bring
  VecF f1{}, bend{}, ff{};
  KHOT_INLINE void add(VecF y) {
    const VecF rest = 1 - y;
    const IntF above = y > 0.5f;
    add(above ? rest : y, above);
  }
  KHOT_INLINE void add(VecF /*z*/, IntF above, TailDensity<float> v) { add(v.density, above); }
  KHOT_INLINE void add(VecF f, IntF above) {
    f1 += f;
    bend += above ? -f : f;
    ff += f * f;
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    // f'' = f less as much as there is of entries at t in a unit of tau: sum f is this with an error by the
    // curvature of their density, and 4 sum f^2 with a quarter of that error
    const auto S1 = total(f1), S2 = total(bend), dense = (16 * total(ff) - S1) * (1.0f / 3);
    s.S1 += S1;
    s.S2 += S2;
    s.S3 += S1 - dense;
    s.S4 += S2;
    s.S5 += S1;
  }
};

template <>
struct Derivatives<Normal> {  // f times Hermite's polynomials
  VecF f0{}, f1{}, f2{}, f3{}, f4{};  // sums of f z^i
  KHOT_INLINE void add(VecF z, IntF /*above*/, TailDensity<float> v) {
    const VecF near = clamp_above<float>(clamp_below<float>(z, -Normal::kEnd), Normal::kEnd);  // beyond, f = 0
    const VecF square = near * near, bent = v.density * square;
    f0 += v.density;
    f1 += v.density * near;
    f2 += bent;
    f3 += bent * near;
    f4 += bent * square;
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    const auto m0 = total(f0), m1 = total(f1), m2 = total(f2);
    s.S1 += m0;
    s.S2 -= m1;
    s.S3 += m2 - m0;
    s.S4 += 3 * m1 - total(f3);
    s.S5 += total(f4) - 6 * m2 + 3 * m0;
  }
};

template <>
struct Derivatives<Power> {  // f = e z^(e-1) for e up to 3, where 0 < z < 1; entries that enter or leave that are not seen
  int e;
  VecF f{}, inner{}, inside{};
  KHOT_INLINE void add(VecF z, IntF /*above*/, TailDensity<float> v) {
    const IntF within = v.density > 0;
    f += v.density;
    inner += within ? z : VecF{};
    inside += within ? splat(1.0f) : VecF{};
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    s.S1 += total(f);
    if (e == 2) s.S2 += 2 * total(inside);
    if (e == 3) s.S2 += 6 * total(inner), s.S3 += 6 * total(inside);
  }
};

template <class C>
KHOT_INLINE Derivatives<C> derivatives(const C& F) {
  if constexpr (std::is_same_v<C, Power>) {
    return {F.whole};
  } else {
    return {};
  }
}

// y from the odds exp(-z), which are less than 2^128.
template <class C>
KHOT_INLINE VecF from_odds(VecF e) {
  if constexpr (std::is_same_v<C, Logistic>) return inverse_1p(e);
  return e < 1 ? 1 - e * 0.5f : inverse(e) * 0.5f;
}

// The step h in t/tau that takes the count from k + miss to k, by its Taylor polynomial of fifth degree and
// Newton's method from a step that is near.
template <class T>
KHOT_INLINE T refined(T h, T miss, T S1, T S2, T S3, T S4, T S5) {
  for (int i = 0; i < 2; ++i) {
    const T left = miss - h * (S1 - h * (S2 / 2 - h * (S3 / 6 - h * (S4 / 24 - h * (S5 / 120)))));
    h += left / (S1 - h * (S2 - h * (S3 / 2 - h * (S4 / 6 - h * (S5 / 24)))));
  }
  return h;
}

template <class C>
class FastSolver {
 public:
  static constexpr bool logistic = std::is_same_v<C, Logistic>;
  static constexpr bool storing = logistic || std::is_same_v<C, Laplace>;

  // From a step h (in tau) on, the error left by it is below 1e-7: h^6/720 times a mean of the sixth derivative
  // with five, h^2/2 where f has a kink. Where F has one only a step of no length is safe.
  static constexpr double kLast = logistic ? 0.25 : !C::full_support ? 1e-7 : storing ? 3e-4 : 0.15;

  // Such a step is known only by y itself, which is written from a step like this one on.
  static constexpr double kNear = 0.01;

  // Of a sum of y as large as so many sums of f, float has lost digits that matter.
  static constexpr double kDecided = logistic ? 16 : 6;

  // Log y is written by others, and has no sum to be checked by: its last step has to be shorter.
  static constexpr double kLastUnseen = std::min(kLast, 1e-4);

  FastSolver(const Row& row, int64_t n, double tau, const C& F, const Parallel* inside)
      : row_(row), n_(n), next_(n <= kAhead ? n : 0), tau_(tau), F_(F), inside_(inside) {}

  // Whether the row was ordinary. Then t is the threshold, and out, unless null, holds y, whose sum is as near
  // to k as promised.
  bool solve(double k, Goal& goal, Threshold& t, void* out) {
    if (!(k > 0 && k < static_cast<double>(n_)) || !(tau_ > 1e-25 && tau_ < 1e25)) return false;
    few_ = std::min(k, static_cast<double>(n_) - k);
    double guess = kNan;
    if (n_ >= kSampleFrom) guess = from_sample(k, goal);
    if (!wide_ && !(std::fabs(guess) < 1e30)) guess = from_moments(row_, n_, k, goal);
    if (wide_) return false;
    return refine(guess, k, few_, t, out);
  }

  // The same from a guess; few = min(k, n - k), of what may be selected.
  bool refine(double guess, double k, double few, Threshold& t, void* out) {
    if (!(std::fabs(guess) < 1e30)) return false;
    few_ = few;
    if (out == nullptr) return solve_reading(guess, k, kLastUnseen, t);
    if constexpr (!C::full_support) return solve_writing(guess, k, out, t);
    if constexpr (storing) {
      if (row_.dtype == Dtype::kFloat) return solve_storing(guess, k, static_cast<float*>(out), t);
    }
    return solve_reading(guess, k, kLast, t) && reaches(write(t, out), k);
  }

  // Whether the sum of y, which is written, is as near to k as promised.
  bool write(Threshold t, double k, double few, void* out) {
    few_ = few;
    return reaches(write(t, out), k);
  }

 private:
  static constexpr double kWide = 16;  // in tau: scores that deviate by more are left to WideSolver
  static constexpr int kPasses = std::is_same_v<C, Power> ? 12 : 8;

  static Threshold split(double t) {
    const double hi = static_cast<double>(static_cast<float>(t));
    return {hi, t - hi};
  }

  // Half of what is promised: sums of floats are not exact either. And y that are all small round by less.
  bool reaches(double total, double k) const {
    return std::fabs(total - k) <= 5e-7 * std::max(1.0, few_) + std::min(static_cast<double>(n_) * 0x1p-25, k * 0x1p-23);
  }

  bool solve_reading(double t, double k, double last, Threshold& result) const {
    for (int pass = 0; pass < kPasses; ++pass) {
      const double h = refined_step(sum_tails(row_, n_, inside_, split(t)), k, static_cast<double>(n_));
      if (!(std::fabs(h) < 50)) return false;
      t += h * tau_;
      if (std::fabs(h) <= last) {
        result = split(t);
        return true;
      }
    }
    return false;
  }

  bool solve_writing(double t, double k, void* out, Threshold& result) const {
    double h = kInfinity;
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool near = std::fabs(h) <= kNear;
      const FastSums sums = sum_tails(row_, n_, inside_, split(t), near ? out : nullptr);
      h = refined_step(sums, k, static_cast<double>(n_));
      if (!(std::fabs(h) < 50)) return false;
      if (near && std::fabs(h) <= kLast) {
        result = split(t);
        return reaches(sums.m + sums.C, k);
      }
      t += h * tau_;
    }
    return false;
  }

  // The first pass stores the odds e = exp(-z), which a move of t multiplies by a constant: no more exponentials.
  bool solve_storing(double t, double k, float* out, Threshold& result) const {
    FastSums sums = evaluate(split(t), out);
    double moved = 0;  // since then, in tau
    for (int pass = 0; pass < kPasses; ++pass) {
      const double h = sums.S1 * kDecided > sums.C ? refined_step(sums, k, static_cast<double>(n_)) : kNan;
      if (!(std::fabs(h) < 50)) return false;
      t += h * tau_, moved += h;
      const bool near = std::fabs(moved) < 1;  // or else e may overflow
      if (near && std::fabs(h) <= kLast) {
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

  // False where an entry is not finite.
  bool moments(const Row& row, int64_t n, double& mean, double& variance) const {
    float start = 0;
    const float origin = *fetch(row, 0, 1, &start);
    const Moments sums = reduce<float, Moments>(row, n, inside_, [origin](Moments& s, const float* p, int count, int64_t) {
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

  // The threshold of evenly spaced blocks of the row; NaN where they do not tell.
  double from_sample(double k, Goal& goal) {
    float sample[kSampleMax];
    const int size = n_ >= 8 * kSampleMax ? kSampleMax : kSampleMax / 4, block = size / kSampleBlocks;
    for (int i = 0; i < kSampleBlocks; ++i) {
      float* target = sample + i * block;
      const float* p = fetch(row_, (n_ - block) / (kSampleBlocks - 1) * i, block, target);
      if (p != target) std::memcpy(target, p, block * sizeof(float));
    }
    const double share = static_cast<double>(size) / static_cast<double>(n_), sample_k = k * share;
    if (!(sample_k >= 8 && sample_k <= size - 8)) return kNan;
    const Row row{sample, Dtype::kFloat, 1};
    double t = from_moments(row, size, sample_k, goal);
    for (int pass = 0; pass < 4; ++pass) {
      const double h = step(sum_tails(row, size, nullptr, split(t)), sample_k, size);
      if (!(std::fabs(h) < 50)) return kNan;
      t += h * tau_;
      if (std::fabs(h) <= 0.1) break;
    }
    return t;
  }

  // The odds at t, stored, and the sums of y.
  FastSums evaluate(Threshold t, float* out) const {
    const float hi = static_cast<float>(t.hi), scale = static_cast<float>(kLog2E / tau_);
    const float lo = static_cast<float>(t.lo * kLog2E / tau_);
    const float* const start = static_cast<const float*>(row_.data);
    const int64_t next = next_;
    return sum_values(row_, -kInf<float>, [=](VecF x, int64_t at, int lanes) {
      fetch_ahead<false>(start + at, next);
      const VecF e = exp2_held((hi - x) * scale + lo);
      lanes == kWidth<float> ? store(out + at, e) : store_part(out + at, lanes, e);
      return from_odds<C>(e);
    });
  }

  // The sums for stored odds, at t + h tau.
  FastSums shift(double h, const float* out) const {
    const float factor = static_cast<float>(std::exp(h));
    return sum_values(Row{out, Dtype::kFloat, 1}, kNever, [=](VecF e, int64_t, int) { return from_odds<C>(e * factor); });
  }

  struct Total {
    double sum = 0;
    void operator+=(const Total& o) { sum += o.sum; }
  };

  // Stored odds become y at t + h tau, with their sum.
  double finish(double h, float* out) const {
    const float factor = static_cast<float>(std::exp(h));
    const int64_t next = next_;
    return reduce<float, Total>(Row{out, Dtype::kFloat, 1}, n_, inside_, [=](Total& s, const float* p, int count, int64_t at) {
      LongSum total;
      auto add = [&](VecF e, int i, int lanes) {
        fetch_ahead<true>(out + at + i, next);
        const VecF y = e < kNever ? from_odds<C>(e * factor) : VecF{};
        total.add(y);
        lanes == kWidth<float> ? store(out + at + i, y) : store_part(out + at + i, lanes, y);
      };
      vectors<float>(p, count, kNever, add, [&] { total.flush(); });
      s.sum += sum<double>(total.total);
    }).sum;
  }

  // value(x, i, lanes): y of the entries from i on
  template <class Value>
  FastSums sum_values(const Row& row, float pad, Value value) const {
    return reduce<float, FastSums>(row, n_, inside_, [=](FastSums& s, const float* p, int count, int64_t at) {
      const Value local = value;  // nothing that is stored can change it, so that it stays in registers
      LongSum total;
      Derivatives<C> sums;
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

  // y at t, written in the row's dtype; the sum before any rounding to half precision.
  double write(Threshold t, void* out) const {
    const float hi = static_cast<float>(t.hi), lo = static_cast<float>((t.hi - hi) + t.lo);
    const float scale = static_cast<float>(1 / tau_);
    const C F = F_;
    const bool own = row_.dtype == Dtype::kFloat;
    const Dtype dtype = row_.dtype;
    return reduce<float, Total>(row_, n_, inside_, [=](Total& s, const float* p, int count, int64_t at) {
      float results[kBlock];
      float* const target = own ? static_cast<float*>(out) + at : results;
      LongSum total;
      auto add = [&](VecF x, int i, int lanes) {
        const VecF y = F.template value<float>(((x - hi) - lo) * scale);
        total.add(y);
        lanes == kWidth<float> ? store(target + i, y) : store_part(target + i, lanes, y);
      };
      vectors<float>(p, count, -kInf<float>, add, [&] { total.flush(); });
      s.sum += sum<double>(total.total);
      if (!own) put(out, dtype, at, count, results);
    }).sum;
  }

  // y is written, too, unless out is null.
  FastSums sum_tails(const Row& row, int64_t n, const Parallel* inside, Threshold t, void* out = nullptr) const {
    const float hi = static_cast<float>(t.hi), lo = static_cast<float>(t.lo), scale = static_cast<float>(1 / tau_);
    const float median = static_cast<float>(F_.median);
    const C F = F_;
    const Dtype dtype = row.dtype;
    const bool own = dtype == Dtype::kFloat;
    return reduce<float, FastSums>(row, n, inside, [=](FastSums& s, const float* p, int count, int64_t at) {
      float results[kBlock];
      float* const target = own && out != nullptr ? static_cast<float*>(out) + at : results;
      IntF m{};
      LongSum D;
      Derivatives<C> sums = derivatives(F);
      auto add = [&](VecF x, int i, int lanes) {
        const VecF z = ((x - hi) - lo) * scale;
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        m -= above;
        sums.add(z, above, v);
        if constexpr (C::full_support) {
          D.add(above ? -v.tail : v.tail);
        } else {
          const VecF y = F.template value<float>(z);
          D.add(above ? y - 1 : y);
          if (out != nullptr) lanes == kWidth<float> ? store(target + i, y) : store_part(target + i, lanes, y);
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

  // The step in t/tau to C = k; NaN where the row is not ordinary.
  static double step(const FastSums& s, double k, double n) {
    const double count = s.m + s.C, miss = (s.m - k) + s.C;
    if (!(count > 0 && count < n && s.S1 > 1e-2 * std::min({k, n - k, 1.0}))) return kNan;
    const double g = std::log1p(n * miss / (k * (n - count)));  // log(C/(n - C)) - log(k/(n - k))
    const double newton = g * count * (n - count) / (n * s.S1);
    if (!C::full_support) {  // y = z^e: small errors in z are large ones in the sum where y is small
      const bool off = std::fabs(miss) > 3e-7 * std::max(1.0, std::min(k, n - k));
      return off && std::fabs(newton) <= kLast ? kNan : newton;
    }
    const double bend = (1 / (n - count) - 1 / count) * s.S1 + s.S2 / s.S1;
    return newton / std::max(1 - 0.5 * newton * bend, 0.5);
  }

  static double refined_step(const FastSums& s, double k, double n) {
    const double h = step(s, k, n);
    return std::fabs(h) < 0.5 ? refined(h, (s.m - k) + s.C, s.S1, s.S2, s.S3, s.S4, s.S5) : h;
  }

  Row row_;
  int64_t n_, next_;
  double tau_;
  C F_;
  const Parallel* inside_;
  double few_ = 0;  // min(k, n - k), of what may be selected
  bool wide_ = false;
};

}  // namespace khot::KHOT_ISA
