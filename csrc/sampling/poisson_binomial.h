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
constexpr int kMostTerms = 24;         // of a power series that replaces a sum over frequencies
constexpr double kUnseenTerm = 1e-17;  // terms that sum to less do not count
// Below this variance the sum over frequencies loses the relative accuracy of the small probabilities, and
// the terms of Swaps after the second are below rounding.
constexpr double kNearlyCertain = 1e-4;
constexpr double kOffCentre = 0.3;  // an offset of so many standard deviations of the sum loses no digits
constexpr double kSmall = 1e-6;     // a variance that covers rounding errors of the mean

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
  // Of n trials whose p and q are known; there is room behind them.
  Trials(double* p, double* q, int64_t n) : length(padded(n)), p(p), q(q) {
    std::fill(p + n, p + length, 0.0), std::fill(q + n, q + length, 1.0);
    VecD total{}, sum{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD yes = load<double>(p + i);
      total += yes, sum += yes * load<double>(q + i);
    }
    mean = khot::KHOT_ISA::sum<double>(total);
    variance = khot::KHOT_ISA::sum<double>(sum);
  }
  // Whether the mean is so near k that P(S = k) loses no digits.
  bool near(double k) const { return std::fabs(mean - k) <= kOffCentre * std::sqrt(variance + kSmall); }
  static int64_t padded(int64_t n) { return (n + kWidth<double> - 1) / kWidth<double> * kWidth<double>; }
};

// The frequencies 2 pi l/N, l < count, that P(S = k) needs. characteristic() computes E[e^(i omega S)] at
// these.
struct Spectrum {
  static constexpr int kRoom = (kMostFrequencies + 7) / 8 * 8;  // in whole vectors
  double period;
  int count = 0;
  double less[kRoom], sin[kRoom];  // 1 - cos, without cancellation, and sin
  double re[kRoom], im[kRoom];

  Spectrum(double variance, int64_t n) {
    const double all = static_cast<double>(2 * ((n + 1) / 2) + 1);
    period = std::min(2 * std::ceil(std::ceil(9 * std::sqrt(variance) + 8) / 2) + 1, all);
    for (int l = 0; l < kRoom; l += kWidth<double>) {
      VecD order, s, c;
      for (int j = 0; j < kWidth<double>; ++j) order[j] = l + j;
      // Beyond half a period they do not count.
      sin_cos(clamp_above<double>(order * (0.5 * kTurn / period), 0.25 * kTurn), s, c);
      store<double>(less + l, 2 * s * s), store<double>(sin + l, 2 * s * c);
      store<double>(re + l, VecD{}), store<double>(im + l, VecD{});
    }
    while (count < kFrequencies && 2 * count < period && variance * less[count] <= kUnseen) ++count;
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

  // P(S = k) of n trials with this mean, by turning from one frequency to the next.
  double pmf(double k, double mean, int64_t n) const {
    // Beyond half a period lie aliases of sizes whose probability is below rounding.
    if (k < 0 || k > static_cast<double>(n) || std::fabs(k - mean) >= 0.5 * period) return 0;
    const double angle = kTurn * (std::fmod(k, period) / period), c = std::cos(angle), s = std::sin(angle);
    double total = 0.5, x = 1, y = 0;
    for (int l = 1; l < count; ++l) {
      const double old = x;
      x = old * c - y * s, y = old * s + y * c;
      total += re[l] * x + im[l] * y;
    }
    return 2 * total / period;
  }

  // Returns P(S = k), and turns re and im into the weights a_l of the mixture over frequencies.
  double weigh(double k) {
    const int64_t turn = static_cast<int64_t>(k) % static_cast<int64_t>(period);
    VecD sum{};
    for (int l = 0; l < kRoom; l += kWidth<double>) {
      VecD half, s, c;  // half the angle, less pi/2
      for (int j = 0; j < kWidth<double>; ++j) {
        const int64_t turns = (l + j) * turn % static_cast<int64_t>(period);
        half[j] = kTurn * (0.5 * static_cast<double>(turns) / period - 0.25);
      }
      sin_cos(half, s, c);
      const VecD cosine = 2 * s * s - 1, sine = -2 * s * c;
      const VecD a = load<double>(re + l), b = load<double>(im + l);
      VecD scale = splat(2 / period);
      if (l == 0) scale[0] = 1 / period;
      const VecD real = scale * (a * cosine + b * sine);
      store<double>(re + l, real), store<double>(im + l, scale * (b * cosine - a * sine));
      sum += real;
    }
    const double total = khot::KHOT_ISA::sum<double>(sum);
    for (int l = 0; l < count; ++l) re[l] /= total, im[l] /= total;
    return total;
  }
};

// Sums over the frequencies of a weight times v = 1/|q + p e^(i omega)|^2 = 1/(1 - 2 (1 - cos) p q). With
// many random trials the weights fall so quickly that a few powers of 4 p q serve instead, one set for all
// trials.
struct Powers {
  int terms = 0;                               // 0 if there are too many
  double ratio[kMostFrequencies];              // of v's geometric series
  double power[kMostTerms][kMostFrequencies];  // ratio^m

  explicit Powers(const Spectrum& f) {
    double left[kMostFrequencies], rest = 0;
    for (int l = 0; l < f.count; ++l) {
      ratio[l] = 0.5 * f.less[l];
      left[l] = (std::fabs(f.re[l]) + std::fabs(f.im[l])) / (1 - ratio[l]);
      rest += left[l], power[0][l] = 1;
    }
    int m = 0;
    while (rest > kUnseenTerm) {
      if (++m == kMostTerms) return;
      rest = 0;
      for (int l = 0; l < f.count; ++l) {
        power[m][l] = power[m - 1][l] * ratio[l];
        rest += (m + 1) * left[l] * power[m][l];  // as the square of v has it
      }
    }
    terms = m;
  }
  // The coefficients of sum_l weight_l v_l.
  void expand(const double* weight, int count, double* coefficients) const {
    for (int m = 0; m < terms; ++m) {
      double total = 0;
      for (int l = 0; l < count; ++l) total += weight[l] * power[m][l];
      coefficients[m] = total;
    }
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

// Trials, given that k of them succeed: with a tiny variance by swaps, otherwise as a mixture.
struct Conditioned {
  const Trials& trials;
  int64_t n;
  Swaps swaps;
  Spectrum f;
  double prob = 0;  // P(S = k)

  Conditioned(const Trials& trials, int64_t n, double k)
      : trials(trials), n(n), swaps(trials, n, k), f(trials.variance, n) {
    if (!(trials.variance >= 0)) {
      prob = trials.variance;
    } else if (swaps.apply) {
      prob = std::exp(swaps.log_likeliest) * swaps.total;
    } else {
      f.characteristic(trials);
      prob = f.weigh(k);
    }
  }
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
inline double inclusion_of(const Conditioned& given, double* pi, double* out) {
  const Trials& trials = given.trials;
  const Spectrum& f = given.f;
  const int64_t n = given.n;
  if (!(trials.variance >= 0)) {
    std::fill(pi, pi + n, trials.variance), std::fill(out, out + n, trials.variance);
    return given.prob;
  }
  if (const Swaps& swaps = given.swaps; swaps.apply) {
    for (int64_t i = 0; i < n; ++i) {
      const bool up = Swaps::above(trials, i);
      const double w = Swaps::odds(trials, i), rest = swaps.first[up] - w;
      const double one = swaps.first[!up], two = swaps.second[!up];
      const double unlikely = w * (one + two * rest) / swaps.total;
      const double likely = (1 + one * rest + two * (swaps.second[up] - w * rest)) / swaps.total;
      pi[i] = std::min(up ? likely : unlikely, 1.0), out[i] = std::min(up ? unlikely : likely, 1.0);
    }
    return given.prob;
  }
  double twice[kMostFrequencies], turned[kMostFrequencies], back[kMostFrequencies];
  for (int l = 0; l < f.count; ++l) {
    const double c = 1 - f.less[l];
    twice[l] = 2 * f.less[l], turned[l] = f.re[l] * c - f.im[l] * f.sin[l],
    back[l] = f.re[l] * c + f.im[l] * f.sin[l];
  }
  const Powers powers(f);
  double plain_at[kMostTerms], in_at[kMostTerms], no_at[kMostTerms];
  powers.expand(f.re, f.count, plain_at), powers.expand(turned, f.count, in_at);
  powers.expand(back, f.count, no_at);
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q, x = 4 * pq;
    VecD plain{}, in{}, no{};
    for (int m = powers.terms; m-- > 0;) {
      plain = plain * x + plain_at[m], in = in * x + in_at[m], no = no * x + no_at[m];
    }
    for (int l = 0; l < f.count && powers.terms == 0; ++l) {
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
  return given.prob;
}

inline double inclusion_row(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out) {
  const Trials trials(z, n, scratch);
  return inclusion_of(Conditioned(trials, n, k), pi, out);
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
inline void covariance_of(const Conditioned& given, const Row& u, double* scratch, double* result) {
  const Trials& trials = given.trials;
  const Spectrum& f = given.f;
  const int64_t n = given.n;
  if (!(trials.variance >= 0)) return std::fill(result, result + n, trials.variance);
  if (given.swaps.apply) return swapped_covariance(trials, given.swaps, u, n, result);
  const int64_t length = trials.length;
  double *const even = scratch, *const odd = even + length;
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
  const Powers powers(f);
  VecD odds[kMostTerms] = {}, evens[kMostTerms] = {};
  for (int64_t i = 0; i < length && powers.terms > 0; i += kTogether * kWidth<double>) {
    VecD x[kTogether], a[kTogether], b[kTogether];
    for (int j = 0; j < kTogether; ++j) {
      const int64_t at = i + j * kWidth<double>;
      const bool inside = at < length;
      x[j] = inside ? 4 * load<double>(trials.p + at) * load<double>(trials.q + at) : VecD{};
      a[j] = inside ? load<double>(odd + at) : VecD{}, b[j] = inside ? load<double>(even + at) : VecD{};
    }
    for (int m = 0; m < powers.terms; ++m) {
      odds[m] += (a[0] + a[1]) + (a[2] + a[3]), evens[m] += (b[0] + b[1]) + (b[2] + b[3]);
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) a[j] *= x[j], b[j] *= x[j];
    }
  }
  double odd_sum[kMostTerms], even_sum[kMostTerms];
  for (int m = 0; m < powers.terms; ++m) {
    odd_sum[m] = sum<double>(odds[m]), even_sum[m] = sum<double>(evens[m]);
  }
  for (int l = 0; l < f.count; ++l) {
    double odd_v = 0, even_v = 0;
    for (int m = 0; m < powers.terms; ++m) {
      odd_v += odd_sum[m] * powers.power[m][l], even_v += even_sum[m] * powers.power[m][l];
    }
    if (powers.terms == 0) {
      VecD a{}, b{};
      for (int64_t i = 0; i < length; i += kWidth<double>) {
        const VecD v =
            reciprocal(1 - (2 * f.less[l]) * (load<double>(trials.p + i) * load<double>(trials.q + i)));
        a += load<double>(odd + i) * v, b += load<double>(even + i) * v;
      }
      odd_v = sum<double>(a), even_v = sum<double>(b);
    }
    const double re = f.less[l] * odd_v, im = f.sin[l] * even_v;
    const double along = f.re[l] * re - f.im[l] * im;
    shift += along;
    E[l] = along * f.less[l], F[l] = (f.re[l] * im + f.im[l] * re) * f.sin[l];
  }
  // The first four are multiplied by v and summed over the frequencies, the others by the square of v.
  constexpr int kSums = 7;
  double weight[kSums][kMostFrequencies], series[kSums][kMostTerms];
  for (int l = 0; l < f.count; ++l) {
    const double re = f.re[l] * f.less[l], im = f.im[l] * f.sin[l];
    weight[0][l] = E[l], weight[1][l] = F[l], weight[2][l] = re, weight[3][l] = im;
    weight[4][l] = f.re[l] * (2 - f.less[l]), weight[5][l] = re, weight[6][l] = im;
  }
  for (int j = 0; j < kSums; ++j) {
    powers.expand(weight[j], f.count, series[j]);
    for (int m = 0; m < powers.terms && j >= 4; ++m) series[j][m] *= m + 1;
  }
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q, g = p - q;
    const VecD x = 4 * pq;
    VecD sums[kSums] = {};
    for (int m = powers.terms; m-- > 0;) {
#pragma GCC unroll 7
      for (int j = 0; j < kSums; ++j) sums[j] = sums[j] * x + series[j][m];
    }
    for (int l = 0; l < f.count && powers.terms == 0; ++l) {
      const VecD v = reciprocal(1 - (2 * f.less[l]) * pq), w = v * v;
#pragma GCC unroll 7
      for (int j = 0; j < kSums; ++j) sums[j] += weight[j][l] * (j < 4 ? v : w);
    }
    const VecD e = sums[0], o = sums[1], e_mean = sums[2], o_mean = sums[3];
    const VecD one = sums[4], two = sums[5], three = sums[6];
    const VecD delta = g * e_mean - o_mean, own = 0.5 * (one - g * g * two) + g * three;
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth<double>, n - i));
    store_part<double>(result + i, lanes, pq * (g * e - o - shift * delta) + load<double>(even + i) * own);
  }
}

inline void covariance_row(const Row& z, const Row& u, int64_t n, double k, double* scratch, double* result) {
  const Trials trials(z, n, scratch);
  covariance_of(Conditioned(trials, n, k), u, scratch + 2 * trials.length, result);
}

}  // namespace khot::KHOT_ISA
