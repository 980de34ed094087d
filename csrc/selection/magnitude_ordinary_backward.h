// The gradients of top-k in magnitude for p = 2 and 4/3, of float32 and half precision. Entries are compared
// with the ends of the pooled block in float, which is exact, and everything that is summed is summed in
// double.
//
// As in the search, a row is taken by itself or, where it is short, together with others, one per lane.
#pragma once

#include <cmath>
#include <vector>

#include "selection/pooled.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// One row of such a problem.
struct Magnitude {
  double k, tau, p;
  bool is_signed;
  Threshold gamma;  // the value of the pooled block
};

// The sums of a row in double, or of a row per lane. Over the block, those of w^(e-1) and w^e, with
// w = (s - gamma)/tau, and of these times v; and the number of entries that are alone, and their sum of v
// times -dy/dtau.
template <class T>
struct MagnitudeSums {
  T alone{}, lower{}, power{}, lower_v{}, power_v{}, fall_v{};

  void operator+=(const MagnitudeSums& o) {
    alone += o.alone, lower += o.lower, power += o.power;
    lower_v += o.lower_v, power_v += o.power_v, fall_v += o.fall_v;
  }
  // dY/ds = rate w^(e-1) of a pooled entry, with rate = e/tau. gamma takes its share of each: all gradients
  // over the block are shifted by this.
  KHOT_INLINE T shift(T k, T rate, T grad_lo) const {
    const T mass = rate * lower;
    return where_not_zero(mass, (grad_lo - rate * lower_v) / (k - alone + mass));
  }
  KHOT_INLINE T grad_tau(T rate, T shift) const { return -fall_v - rate * (power_v + shift * power); }
};

// What an entry adds to the sums, and its gradient.
template <int e>
class MagnitudeSlopes {
 public:
  // What a pass over vectors of entries counts and sums.
  struct Parts {
    IntF alone{}, inside{};
    Doubles lower{}, power{}, lower_v{}, power_v{}, fall_v{};
  };

  MagnitudeSlopes(const Pooled<e>& now, bool is_signed)
      : now_(now), signs_(is_signed), own_rate_(1 / (1 + now.tau)) {}

  // Returns what the gradient needs again: x for p = 2, and for p = 4/3 the slope of y, of a pooled entry
  // with a minus. y() gives the vector of y.
  template <class Y>
  KHOT_INLINE VecF add(VecF x, VecF grad, Y y, Parts& parts) const {
    const VecF s = signs_.without(x), v = signs_.apply(grad, x);
    const IntF alone = now_.edges.is_alone(s), inside = now_.edges.is_inside(s),
               moves = alone & (s < kInf<float>);
    parts.alone -= alone;
    parts.inside -= inside;
    const Doubles block = widen(inside ? s : VecF{}), wide_v = widen(v);
    const Doubles w = now_.above(block) * now_.inverse_tau, square = w * w, whole = power<e>(w);
    parts.power += whole;
    parts.power_v += whole * wide_v;
    if constexpr (e == 1) {
      const Doubles block_v = widen(inside ? v : VecF{}), own_v = widen(moves ? v : VecF{}),
                    size = widen(moves ? signs_.without(y()) : VecF{});
      parts.lower_v += block_v;
      parts.fall_v += own_v * size;
      return x;
    } else {
      parts.lower += square;
      parts.lower_v += square * wide_v;
      VecF kept = narrow(square * (-e * now_.inverse_tau));
      if (any(moves)) {
        const VecF value = signs_.without(y());
        const IntF known = moves & (value > 0);
        const Doubles own_v = widen(known ? v : VecF{});
        Doubles c, own;
        unpooled_slope(known ? value : splat(1.0f), now_.tau, c, own);
        parts.fall_v += own * c * own_v;
        kept = known ? narrow(own) : kept;
      }
      return kept;
    }
  }

  // alone and inside are counts.
  KHOT_INLINE MagnitudeSums<Doubles> sums(const Parts& parts, const Doubles& alone,
                                          const Doubles& inside) const {
    return {alone,         e == 1 ? inside : parts.lower,
            parts.power,   parts.lower_v,
            parts.power_v, e == 1 ? parts.fall_v * own_rate_ : parts.fall_v};
  }

  KHOT_INLINE VecF gradient(VecF kept, VecF x, VecF grad, const Doubles& shift) const {
    const VecF v = signs_.apply(grad, x);
    VecF value{};
    const Doubles shifted = widen(v) + shift;
    if constexpr (e == 1) {
      const VecF s = signs_.without(x), block = narrow(shifted * now_.inverse_tau);
      const IntF moves = now_.edges.is_alone(s) & (s < kInf<float>);
      value = now_.edges.is_inside(s) ? block : moves ? v * now_.factor : VecF{};
    } else {
      value = kept < 0 ? narrow(shifted * -widen(kept)) : v * kept;
    }
    return signs_.apply(value, x);
  }

 private:
  // c = y^(1/3) and dy/ds = 3 c^2/(3 c^2 + tau), of entries that are alone.
  static KHOT_INLINE void unpooled_slope(VecF y, const Doubles& tau, Doubles& c, Doubles& slope) {
    const VecF near = cube_root(y), square = 3 * near * near;
    c = cube_root(widen(y), widen(near), widen(inverse(square)));
    const Doubles triple = 3 * c * c, sum = triple + tau, r = widen(inverse(square + narrow(tau)));
    slope = triple * (r * (2 - sum * r));
  }

  Pooled<e> now_;
  Signs<float> signs_;
  Doubles own_rate_;
};

// Whether the kernels of this file serve a row.
inline bool serves_backward(const Threshold& gamma, double tau) {
  return gamma.hi > 1e-25 && gamma.hi < 1e25 && tau > 1e-6 && tau < 1e6;
}

// One row.
template <int e>
class MagnitudeBackwardRow {
 public:
  explicit MagnitudeBackwardRow(const Magnitude& m)
      : m_(m), slopes_(Pooled<e>(spread(m.gamma.hi), spread(m.gamma.lo), spread(m.tau)), m.is_signed) {}

  // Writes dL/ds and returns dL/dtau.
  double run(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n, void* grad_s) const {
    // For p = 4/3 the slopes of y are kept between the passes, in the place of the result where they fit.
    std::vector<float> space(e == 1 || s.dtype == Dtype::kFloat ? 0 : n);
    float* const kept = space.empty() ? static_cast<float*>(grad_s) : space.data();
    const auto sums = reduce<float, MagnitudeSums<double>>(
        s, n, nullptr, [&](MagnitudeSums<double>& sums, const float* p, int count, int64_t at) {
          sums += add(p, grad, y, count, at, kept);
        });
    const double rate = e / m_.tau, shift = sums.shift(m_.k, rate, grad_lo);
    write(e == 1 ? s : Row{kept, Dtype::kFloat, 1}, s, grad, n, spread(shift), grad_s);
    return sums.grad_tau(rate, shift);
  }

 private:
  MagnitudeSums<double> add(const float* p, const Row& grad, const Row& y, int count, int64_t at,
                            float* kept) const {
    float grads[kBlock], values[kBlock];
    const float *g = fetch(grad, at, count, grads), *ys = fetch(y, at, count, values);
    const MagnitudeSlopes<e> slopes = slopes_;  // a local copy stays in registers
    typename MagnitudeSlopes<e>::Parts parts;
    vectors<float>(p, count, 0.0f, [&](VecF x, int i, int lanes) {
      const VecF slope = slopes.add(x, beside(g, i, lanes), [&] { return beside(ys, i, lanes); }, parts);
      if (e == 1) return;
      store_beside(kept + at, i, lanes, slope);
    });
    const MagnitudeSums<Doubles> sums = slopes.sums(parts, Doubles{}, Doubles{});
    return {total(parts.alone),  e == 1 ? total(parts.inside) : total(sums.lower),
            total(sums.power),   total(sums.lower_v),
            total(sums.power_v), total(sums.fall_v)};
  }

  // `from` has what add() has kept.
  void write(const Row& from, const Row& s, const Row& grad, int64_t n, const Doubles& shift,
             void* grad_s) const {
    float kept[kBlock], grads[kBlock], sizes[kBlock], results[kBlock];
    const bool direct = s.dtype == Dtype::kFloat;
    const MagnitudeSlopes<e> slopes = slopes_;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      const float *p = fetch(from, at, count, kept), *g = fetch(grad, at, count, grads);
      // the slopes do not tell the signs of x
      const float* xs = e == 1 || !m_.is_signed ? p : fetch(s, at, count, sizes);
      float* const target = direct ? static_cast<float*>(grad_s) + at : results;
      vectors<float>(p, count, 0.0f, [&](VecF kept, int i, int lanes) {
        const VecF x = e == 1 ? kept : beside(xs, i, lanes);
        store_beside(target, i, lanes, slopes.gradient(kept, x, beside(g, i, lanes), shift));
      });
      if (!direct) put(grad_s, s.dtype, at, count, results);
    }
  }

  Magnitude m_;
  MagnitudeSlopes<e> slopes_;
};

// Short rows, one per lane.
template <int e>
class MagnitudeBackwardLanes {
 public:
  static constexpr int width = kWidth<float>;
  // The length from which on rows one by one are as fast: the processor fetches one row sooner than many.
  static constexpr int kMost = e == 1 ? 48 : 64;

  // Writes the gradients of the rows first, ..., first + width - 1. done[j] says whether those of row first +
  // j are right.
  void run(const MagnitudeSpec& spec, const MagnitudeBackwardRows& rows, int64_t first, bool* done) {
    const int n = static_cast<int>(spec.n);
    gather([&](int j) { return rows.x(first + j); }, n, rows_, x_);
    gather([&](int j) { return rows.y(first + j); }, n, rows_, kept_);
    gather([&](int j) { return rows.grad(first + j); }, n, rows_, grad_);
    Doubles k{}, hi{}, lo{}, tau{}, grad_lo{};
    for (int j = 0; j < width; ++j) {
      const Threshold gamma = rows.threshold(first + j);
      const double own_tau = rows.tau(first + j);
      done[j] = serves_backward(gamma, own_tau);
      k.set(j, rows.k(first + j)), grad_lo.set(j, rows.grad_lo(first + j));
      hi.set(j, done[j] ? gamma.hi : 1), lo.set(j, done[j] ? gamma.lo : 0), tau.set(j, done[j] ? own_tau : 1);
    }
    const MagnitudeSlopes<e> slopes(Pooled<e>(hi, lo, tau), spec.is_signed);
    typename MagnitudeSlopes<e>::Parts parts;
    for (int i = 0; i < n; ++i) {
      VecF* const kept = column(kept_, i);
      *kept = slopes.add(*column(x_, i), *column(grad_, i), [&] { return *kept; }, parts);
    }
    const Doubles alone = widen(__builtin_convertvector(parts.alone, VecF)),
                  inside = widen(__builtin_convertvector(parts.inside, VecF));
    const MagnitudeSums<Doubles> sums = slopes.sums(parts, alone, inside);
    const Doubles rate = e / tau, shift = sums.shift(k, rate, grad_lo), grad_tau = sums.grad_tau(rate, shift);
    for (int i = 0; i < n; ++i) {
      VecF* const kept = column(kept_, i);
      *kept = slopes.gradient(*kept, *column(x_, i), *column(grad_, i), shift);
    }
    for (int j = 0; j < width; ++j) {
      if (done[j]) rows.put(first + j, 0, grad_tau[j]);
    }
    scatter([&](int j) { return rows.grad_x(first + j); }, rows.x(first).dtype, n, rows_, kept_);
  }

 private:
  alignas(KHOT_VECTOR_BYTES) float x_[kMost * width], kept_[kMost * width], grad_[kMost * width],
      rows_[kShortRow * width];
};

}  // namespace khot::KHOT_ISA
