// The sum of independent trials, and the trials given that sum, one row at a time. The formulas are explained
// in khot/_kernels/reference/poisson_binomial.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd/math.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

constexpr int kTogether = 4;  // frequencies whose products are computed together
// Frequencies with a larger V (1 - cos) change P(S = k) by less than a rounding error.
constexpr double kUnseen = 46;
constexpr double kTurn = 6.283185307179586476925;
// Below this variance the sum over frequencies loses the relative accuracy of the small probabilities, and
// the terms of Swaps after the second are below rounding.
constexpr double kNearlyCertain = 1e-4;

KHOT_INLINE VecD reciprocal(VecD x) {
#if KHOT_VECTOR_BYTES == 64  // two steps of Newton from 14 bits take a third of the time of a division
  VecD r = (VecD)_mm512_maskz_rcp14_pd(0xff, (__m512d)x);
  r = r * (2 - x * r);
  return r * (2 - x * r);
#else
  return 1 / x;
#endif
}

// The probabilities p of a row and q = 1 - p, padded to whole vectors by trials that always fail.
struct Trials {
  int64_t length;
  double *p, *q;
  double mean, variance;

  Trials(const Row& z, int64_t n, double* scratch) : length(padded(n)), p(scratch), q(p + length) {
    double buffer[kBlock];
    VecD total{}, sum{};
    for (int64_t at = 0; at < n; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      vectors<double>(fetch(z, at, count, buffer), count, -kInf<double>, [&](VecD x, int i, int) {
        const VecD e = exp_minus<double>(abs<double>(x)), likely = 1 / (1 + e), unlikely = e * likely;
        const VecD yes = x > 0 ? likely : unlikely, no = x > 0 ? unlikely : likely;
        store<double>(p + at + i, yes), store<double>(q + at + i, no);
        total += yes, sum += yes * no;
      });
    }
    mean = khot::KHOT_ISA::sum<double>(total);
    variance = khot::KHOT_ISA::sum<double>(sum);
  }
  static int64_t padded(int64_t n) { return (n + kWidth<double> - 1) / kWidth<double> * kWidth<double>; }
};

// The frequencies 2 pi l/N, l < count, that P(S = k) needs. characteristic() computes E[e^(i omega S)] at
// these.
struct Spectrum {
  double period;
  int count = 0;
  double less[kMostFrequencies], sin[kMostFrequencies];  // 1 - cos, without cancellation, and sin
  double re[kMostFrequencies], im[kMostFrequencies];

  Spectrum(double variance, int64_t n) {
    const double all = static_cast<double>(2 * ((n + 1) / 2) + 1);
    period = std::min(2 * std::ceil(std::ceil(9 * std::sqrt(variance) + 8) / 2) + 1, all);
    for (int l = 0; l < kMostFrequencies; ++l) {
      const double half = 0.5 * kTurn * l / period, s = std::sin(half);
      less[l] = 2 * s * s, sin[l] = 2 * s * std::cos(half);
      re[l] = im[l] = 0;
      if (count == l && l < kFrequencies && 2 * l < period && variance * less[l] <= kUnseen) ++count;
    }
  }

  void characteristic(const Trials& t) {
    for (int first = 0; first < count; first += kTogether) {
      VecD x[kTogether], y[kTogether];
      for (int l = 0; l < kTogether; ++l) x[l] = splat(1.0), y[l] = VecD{};
      for (int64_t i = 0; i < t.length; i += kWidth<double>) {
        const VecD p = load<double>(t.p + i);
#pragma GCC unroll 4
        for (int l = 0; l < kTogether; ++l) {
          const VecD a = 1 - p * less[first + l], b = p * sin[first + l], old = x[l];
          x[l] = old * a - y[l] * b, y[l] = old * b + y[l] * a;
        }
      }
      for (int l = 0; l < kTogether && first + l < count; ++l) {
        double u = 1, v = 0;
        for (int lane = 0; lane < kWidth<double>; ++lane) {
          const double a = x[l][lane], b = y[l][lane], old = u;
          u = old * a - v * b, v = old * b + v * a;
        }
        re[first + l] = u, im[first + l] = v;
      }
    }
  }

  // Returns P(S = k), and turns re and im into the weights a_l of the mixture over frequencies.
  double weigh(double k) {
    double total = 0;
    for (int l = 0; l < count; ++l) {
      const double angle = kTurn * (std::fmod(l * k, period) / period), c = std::cos(angle),
                   s = std::sin(angle);
      const double scale = (l == 0 ? 1 : 2) / period, a = re[l], b = im[l];
      re[l] = scale * (a * c + b * s), im[l] = scale * (b * c - a * s);
      total += re[l];
    }
    for (int l = 0; l < count; ++l) re[l] /= total, im[l] /= total;
    return total;
  }
};

// The trials of a row with a tiny variance, seen as what differs from the likeliest outcome, which selects
// the units with p > 1/2. Given the size, as many of these are left out as others are taken in their place.
// The weight of m such swaps is e_m(a) e_m(b): a and b are the odds of the unlikely outcomes, above and below
// 1/2, and e_m the elementary symmetric polynomials. Every term is positive, so that no digit is lost.
struct Swaps {
  bool apply = false;
  double first[2] = {}, second[2] = {};  // e_1 and e_2, below and above 1/2
  double total = 1, log_likeliest = 0;   // the weight of all outcomes, and log of the likeliest's probability

  Swaps(const Trials& t, int64_t n, double k) {
    if (!(t.variance < kNearlyCertain)) return;
    double square[2] = {};
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool up = above(t, i);
      const double w = odds(t, i);
      first[up] += w, square[up] += w * w, count += up;
      log_likeliest -= std::log1p(w);
    }
    for (int side = 0; side < 2; ++side) second[side] = 0.5 * (first[side] * first[side] - square[side]);
    total = 1 + first[0] * first[1] + second[0] * second[1];
    apply = static_cast<double>(count) == k;
  }
  static bool above(const Trials& t, int64_t i) { return t.p[i] > t.q[i]; }
  static double odds(const Trials& t, int64_t i) { return above(t, i) ? t.q[i] / t.p[i] : t.p[i] / t.q[i]; }
};

inline double characteristic_row(const Row& z, int64_t n, double* scratch, double* re, double* im) {
  const Trials trials(z, n, scratch);
  Spectrum spectrum(trials.variance, n);
  spectrum.characteristic(trials);
  std::copy(spectrum.re, spectrum.re + kFrequencies, re);
  std::copy(spectrum.im, spectrum.im + kFrequencies, im);
  return spectrum.period;
}

// pi and 1 - pi are means over frequencies with the weights a_l of r = p e^(i omega) (q + p e^(-i omega)) v
// and of 1 - r, where v = 1/|q + p e^(i omega)|^2. Returns P(S = k).
inline double inclusion_of(const Trials& trials, int64_t n, double k, double* pi, double* out) {
  if (!(trials.variance >= 0)) {
    std::fill(pi, pi + n, trials.variance), std::fill(out, out + n, trials.variance);
    return trials.variance;
  }
  if (const Swaps swaps(trials, n, k); swaps.apply) {
    for (int64_t i = 0; i < n; ++i) {
      const bool up = Swaps::above(trials, i);
      const double w = Swaps::odds(trials, i), rest = swaps.first[up] - w;
      const double one = swaps.first[!up], two = swaps.second[!up];
      const double unlikely = w * (one + two * rest) / swaps.total;
      const double likely = (1 + one * rest + two * (swaps.second[up] - w * rest)) / swaps.total;
      pi[i] = std::min(up ? likely : unlikely, 1.0), out[i] = std::min(up ? unlikely : likely, 1.0);
    }
    return std::exp(swaps.log_likeliest) * swaps.total;
  }
  Spectrum f(trials.variance, n);
  f.characteristic(trials);
  const double prob = f.weigh(k);
  double twice[kMostFrequencies], turned[kMostFrequencies], back[kMostFrequencies];
  for (int l = 0; l < f.count; ++l) {
    const double c = 1 - f.less[l];
    twice[l] = 2 * f.less[l], turned[l] = f.re[l] * c - f.im[l] * f.sin[l],
    back[l] = f.re[l] * c + f.im[l] * f.sin[l];
  }
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q;
    VecD plain{}, in{}, no{};
    for (int l = 0; l < f.count; ++l) {
      const VecD v = reciprocal(1 - twice[l] * pq);
      plain += f.re[l] * v, in += turned[l] * v, no += back[l] * v;
    }
    // Rounding may turn 0 into -1e-17.
    const VecD yes = clamp_above<double>(clamp_below<double>(p * (p * plain + q * in), 0), 1);
    const VecD rest = clamp_above<double>(clamp_below<double>(q * (q * plain + p * no), 0), 1);
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth<double>, n - i));
    store_part<double>(pi + i, lanes, q == 0 ? splat(1.0) : yes);
    store_part<double>(out + i, lanes, p == 0 ? splat(1.0) : rest);
  }
  return prob;
}

inline double inclusion_row(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out) {
  return inclusion_of(Trials(z, n, scratch), n, k, pi, out);
}

// Cov u is the derivative of pi along u. The logarithm of the odds grows at the rate u below 1/2, -u above.
inline void swapped_covariance(const Trials& trials, const Swaps& swaps, const Row& u, int64_t n,
                               double* result) {
  double buffer[kBlock], along[2] = {}, square[2] = {};  // sum w u' and sum w^2 u', with u' that rate
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double* x = fetch(u, at, count, buffer);
    for (int64_t i = at; i < at + count; ++i) {
      const bool up = Swaps::above(trials, i);
      const double w = Swaps::odds(trials, i), rate = up ? -x[i - at] : x[i - at];
      result[i] = rate;
      along[up] += w * rate, square[up] += w * w * rate;
    }
  }
  double more[2];  // the derivatives of e_2
  for (int side = 0; side < 2; ++side) more[side] = swaps.first[side] * along[side] - square[side];
  const double growth = (along[0] * swaps.first[1] + swaps.first[0] * along[1] + more[0] * swaps.second[1] +
                         swaps.second[0] * more[1]) /
                        swaps.total;
  for (int64_t i = 0; i < n; ++i) {
    const bool up = Swaps::above(trials, i);
    const double w = Swaps::odds(trials, i), rest = swaps.first[up] - w, rate = result[i];
    const double one = swaps.first[!up], two = swaps.second[!up];
    const double change =
        (rate - growth) * (one + two * rest) + along[!up] + more[!up] * rest + two * (along[up] - w * rate);
    result[i] = (up ? -w : w) * change / swaps.total + 0.0;  // without -0
  }
}

// Cov u = Re sum_l a_l d_l (d_l . u) - delta (delta . u) + own u, with d_l = r_l - p = p q ((p - q)(1 - cos)
// + i sin) v, delta = pi - p = Re sum_l a_l d_l and own = Re sum_l a_l r_l (1 - r_l).
inline void covariance_row(const Row& z, const Row& u, int64_t n, double k, double* scratch, double* result) {
  const Trials trials(z, n, scratch);
  if (!(trials.variance >= 0)) return std::fill(result, result + n, trials.variance);
  if (const Swaps swaps(trials, n, k); swaps.apply) {
    swapped_covariance(trials, swaps, u, n, result);
    return;
  }
  Spectrum f(trials.variance, n);
  f.characteristic(trials);
  f.weigh(k);
  const int64_t length = trials.length;
  double *const even = trials.q + length, *const odd = even + length;
  double buffer[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    vectors<double>(fetch(u, at, count, buffer), count, 0.0, [&](VecD x, int i, int) {
      const VecD p = load<double>(trials.p + at + i), q = load<double>(trials.q + at + i);
      store<double>(even + at + i, p * q * x), store<double>(odd + at + i, p * q * x * (p - q));
    });
  }
  // E and F are the real and imaginary parts of a_l (d_l . u), times 1 - cos and sin. shift sums the real
  // parts.
  double E[kMostFrequencies], F[kMostFrequencies], shift = 0;
  for (int l = 0; l < f.count; ++l) {
    VecD a{}, b{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD v =
          reciprocal(1 - (2 * f.less[l]) * (load<double>(trials.p + i) * load<double>(trials.q + i)));
      a += load<double>(odd + i) * v, b += load<double>(even + i) * v;
    }
    const double re = f.less[l] * sum<double>(a), im = f.sin[l] * sum<double>(b);
    const double along = f.re[l] * re - f.im[l] * im;
    shift += along;
    E[l] = along * f.less[l], F[l] = (f.re[l] * im + f.im[l] * re) * f.sin[l];
  }
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q, g = p - q;
    VecD e{}, o{}, e_mean{}, o_mean{}, one{}, two{}, three{};
    for (int l = 0; l < f.count; ++l) {
      const VecD v = reciprocal(1 - (2 * f.less[l]) * pq), w = v * v;
      e += E[l] * v, o += F[l] * v;
      e_mean += (f.re[l] * f.less[l]) * v, o_mean += (f.im[l] * f.sin[l]) * v;
      one += (f.re[l] * (2 - f.less[l])) * w, two += (f.re[l] * f.less[l]) * w,
          three += (f.im[l] * f.sin[l]) * w;
    }
    const VecD delta = g * e_mean - o_mean, own = 0.5 * (one - g * g * two) + g * three;
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth<double>, n - i));
    store_part<double>(result + i, lanes, pq * (g * e - o - shift * delta) + load<double>(even + i) * own);
  }
}

}  // namespace khot::KHOT_ISA
