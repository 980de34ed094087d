// The gradients of top-k in magnitude for p = 2 and 4/3, of float32 and half precision. Entries are compared
// with the ends of the pooled block in float, which is exact, and everything that is summed is summed in
// double.
#pragma once

#include <cmath>
#include <vector>

#include "selection/magnitude_ordinary.h"

namespace khot::KHOT_ISA {

template <int e>
class OrdinaryMagnitudeBackward {
 public:
  explicit OrdinaryMagnitudeBackward(const Magnitude& m)
      : m_(m), now_(spread(m.gamma.hi), spread(m.gamma.lo), spread(m.tau)), signs_(m.is_signed) {}

  static bool serves(const Magnitude& m, Dtype dtype) {
    return dtype != Dtype::kDouble && m.gamma.hi > 1e-25 && m.gamma.hi < 1e25 && m.tau > 1e-6 && m.tau < 1e6;
  }

  // Writes dL/ds and returns dL/dtau.
  double run(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n, void* grad_s) const {
    // For p = 4/3 the slopes of y are kept between the passes, in the place of the result where they fit.
    std::vector<float> space(e == 1 || s.dtype == Dtype::kFloat ? 0 : n);
    float* const slopes = space.empty() ? static_cast<float*>(grad_s) : space.data();
    const Sums sums = reduce<float, Sums>(
        s, n, nullptr,
        [&](Sums& sums, const float* p, int count, int64_t at) { add(p, grad, y, count, at, slopes, sums); });
    // dY/ds = e/tau w^(e-1), with w = (s - gamma)/tau, of a pooled entry. gamma takes its share of each.
    const double rate = e / m_.tau, mass = rate * sums.lower;
    const double shift = mass != 0 ? (grad_lo - rate * sums.lower_v) / (m_.k - sums.alone + mass) : 0;
    write(e == 1 ? s : Row{slopes, Dtype::kFloat, 1}, s, grad, n, shift, grad_s);
    return -sums.fall_v - rate * (sums.power_v + shift * sums.power);
  }

 private:
  // Over the block, the sums of w^(e-1) and w^e and of these times v; and the number of entries that are
  // alone, and their sum of v times -dy/dtau.
  struct Sums {
    double alone = 0, lower = 0, power = 0, lower_v = 0, power_v = 0, fall_v = 0;
    void operator+=(const Sums& o) {
      alone += o.alone, lower += o.lower, power += o.power;
      lower_v += o.lower_v, power_v += o.power_v, fall_v += o.fall_v;
    }
  };

  static KHOT_INLINE VecF part(const float* p, int i, int lanes) {
    return lanes == kWidth<float> ? load(p + i) : load_part(p + i, lanes, 0.0f);
  }

  // c = y^(1/3) and dy/ds = 3 c^2/(3 c^2 + tau), of entries that are alone.
  static KHOT_INLINE void unpooled_slope(VecF y, const Doubles& tau, Doubles& c, Doubles& slope) {
    const VecF near = cube_root(y), square = 3 * near * near;
    const Doubles wide = widen(near), whole = widen(y), inverse_square = widen(inverse(square)),
                  inverse_sum = widen(inverse(square + narrow(tau)));
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      c.half[h] = cube_root(whole.half[h], wide.half[h], inverse_square.half[h]);
      const VecD triple = 3 * c.half[h] * c.half[h], sum = triple + tau.half[h], r = inverse_sum.half[h];
      slope.half[h] = triple * (r * (2 - sum * r));
    }
  }

  // Adds to the sums, and for p = 4/3 writes the slopes, those of pooled entries with a minus.
  void add(const float* p, const Row& grad, const Row& y, int count, int64_t at, float* slopes,
           Sums& sums) const {
    float grads[kBlock], values[kBlock];
    const float *g = fetch(grad, at, count, grads), *ys = fetch(y, at, count, values);
    const Pooled<e> now = now_;  // a local copy stays in registers
    const FloatSigns signs = signs_;
    const VecD rate = splat(-e / m_.tau);
    IntF alone_count{}, inside_count{};
    Doubles lower{}, power{}, lower_v{}, power_v{}, fall_v{};
    vectors<float>(p, count, 0.0f, [&](VecF x, int i, int lanes) {
      const VecF s = signs.without(x), v = signs.apply(part(g, i, lanes), x);
      const IntF alone = now.edges.is_alone(s), inside = now.edges.is_inside(s),
                 moves = alone & (s < kInf<float>);
      alone_count -= alone;
      inside_count -= inside;
      const Doubles block = widen(inside ? s : VecF{}), wide_v = widen(v);
      Doubles slope{};
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const VecD w = now.above(block, h) * now.inverse_tau.half[h];
        const VecD square = w * w, whole = e == 1 ? w : square * w;
        power.half[h] += whole;
        power_v.half[h] += whole * wide_v.half[h];
        if (e == 1) continue;
        lower.half[h] += square;
        lower_v.half[h] += square * wide_v.half[h];
        slope.half[h] = square * rate;
      }
      if constexpr (e == 1) {
        const Doubles block_v = widen(inside ? v : VecF{}), own_v = widen(moves ? v : VecF{}),
                      size = widen(moves ? signs.without(part(ys, i, lanes)) : VecF{});
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          lower_v.half[h] += block_v.half[h];
          fall_v.half[h] += own_v.half[h] * size.half[h];
        }
      } else {
        VecF kept = narrow(slope);
        if (any(moves)) {
          const VecF value = signs.without(part(ys, i, lanes));
          const IntF known = moves & (value > 0);
          const Doubles own_v = widen(known ? v : VecF{});
          Doubles c, own;
          unpooled_slope(known ? value : splat(1.0f), now.tau, c, own);
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) fall_v.half[h] += own.half[h] * c.half[h] * own_v.half[h];
          kept = known ? narrow(own) : kept;
        }
        lanes == kWidth<float> ? store(slopes + at + i, kept) : store_part(slopes + at + i, lanes, kept);
      }
    });
    sums.alone += total(alone_count);
    sums.lower += e == 1 ? total(inside_count) : total(lower);
    sums.power += total(power), sums.lower_v += total(lower_v), sums.power_v += total(power_v);
    sums.fall_v += e == 1 ? total(fall_v) / (1 + m_.tau) : total(fall_v);
  }

  // `from` has the entries for p = 2 and the slopes for p = 4/3.
  void write(const Row& from, const Row& s, const Row& grad, int64_t n, double shift, void* grad_s) const {
    float kept[kBlock], grads[kBlock], sizes[kBlock], results[kBlock];
    const bool direct = s.dtype == Dtype::kFloat;
    const Pooled<e> now = now_;
    const FloatSigns signs = signs_;
    const VecD rate = splat(1 / m_.tau);
    for (int64_t at = 0; at < n; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      const float *p = fetch(from, at, count, kept), *g = fetch(grad, at, count, grads);
      // the slopes do not tell the signs of x
      const float* xs = e == 1 || !m_.is_signed ? p : fetch(s, at, count, sizes);
      float* const target = direct ? static_cast<float*>(grad_s) + at : results;
      vectors<float>(p, count, 0.0f, [&](VecF kept, int i, int lanes) {
        const VecF x = e == 1 ? kept : part(xs, i, lanes), v = signs.apply(part(g, i, lanes), x);
        VecF value{};
        Doubles block = widen(v);
        if constexpr (e == 1) {
          const VecF s = signs.without(x);
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) block.half[h] = (block.half[h] + shift) * rate;
          const IntF moves = now.edges.is_alone(s) & (s < kInf<float>);
          value = now.edges.is_inside(s) ? narrow(block) : moves ? v * now.factor : VecF{};
        } else {
          const Doubles slope = widen(kept);
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) block.half[h] = (block.half[h] + shift) * -slope.half[h];
          value = kept < 0 ? narrow(block) : v * kept;
        }
        const VecF result = signs.apply(value, x);
        lanes == kWidth<float> ? store(target + i, result) : store_part(target + i, lanes, result);
      });
      if (!direct) put(grad_s, s.dtype, at, count, results);
    }
  }

  Magnitude m_;
  Pooled<e> now_;
  FloatSigns signs_;
};

}  // namespace khot::KHOT_ISA
