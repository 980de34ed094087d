// The sum of independent trials, and the trials given that sum, a row at a time: see
// khot/_kernels/reference/poisson_binomial.py, where the formulas are explained.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "passes.h"

namespace khot::KHOT_ISA {

constexpr int kTogether = 4;      // frequencies whose products are made at once
constexpr double kUnseen = 46;    // of V (1 - cos): e^-46 is less than a rounding error of P(S = k)
// of the calibration, as in khot/_kernels/reference/fixed_point.py
constexpr int kDepth = 3, kIterations = 40;
constexpr double kNear = 1e-13, kClose = 1e-3, kRidge = 1e-13;
constexpr int kCentring = 20;       // steps of at most 1
constexpr double kOffCentre = 0.3;  // in deviations of the sum, which lose nothing
constexpr double kSmall = 1e-6;     // a variance by which rounding is no deviation
constexpr double kTurn = 6.283185307179586476925;

KHOT_INLINE VecD reciprocal(VecD x) {
#if KHOT_VECTOR_BYTES == 64  // 14 bits, doubled twice: a third of what a division takes
  VecD r = (VecD)_mm512_maskz_rcp14_pd(0xff, (__m512d)x);
  r = r * (2 - x * r);
  return r * (2 - x * r);
#else
  return 1 / x;
#endif
}

// A row's probabilities, in whole vectors, filled up by trials that always fail.
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

// The frequencies 2 pi l/N, l < count, that P(S = k) needs; characteristic() adds E[e^(i omega S)].
struct Spectrum {
  double period;
  int count = 0;
  double less[kFrequenciesMost], sin[kFrequenciesMost];  // 1 - cos, in full accuracy, and sin
  double re[kFrequenciesMost], im[kFrequenciesMost];

  Spectrum(double variance, int64_t n) {
    const double all = static_cast<double>(2 * ((n + 1) / 2) + 1);
    period = std::min(2 * std::ceil(std::ceil(9 * std::sqrt(variance) + 8) / 2) + 1, all);
    for (int l = 0; l < kFrequenciesMost; ++l) {
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

  // P(S = k); re and im become those of the mixture's weights.
  double weigh(double k) {
    double total = 0;
    for (int l = 0; l < count; ++l) {
      const double angle = kTurn * (std::fmod(l * k, period) / period), c = std::cos(angle), s = std::sin(angle);
      const double scale = (l == 0 ? 1 : 2) / period, a = re[l], b = im[l];
      re[l] = scale * (a * c + b * s), im[l] = scale * (b * c - a * s);
      total += re[l];
    }
    for (int l = 0; l < count; ++l) re[l] /= total, im[l] /= total;
    return total;
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

// With v = 1/|q + p e^(i omega)|^2: r = p e^(i omega) (q + p e^(-i omega)) v, and 1 - r likewise.
inline double inclusion_of(const Trials& trials, int64_t n, double k, double* pi, double* out) {
  if (!(trials.variance >= 0)) {
    std::fill(pi, pi + n, trials.variance), std::fill(out, out + n, trials.variance);
    return trials.variance;
  }
  Spectrum f(trials.variance, n);
  f.characteristic(trials);
  const double prob = f.weigh(k);
  double twice[kFrequenciesMost], turned[kFrequenciesMost], back[kFrequenciesMost];
  for (int l = 0; l < f.count; ++l) {
    const double c = 1 - f.less[l];
    twice[l] = 2 * f.less[l], turned[l] = f.re[l] * c - f.im[l] * f.sin[l], back[l] = f.re[l] * c + f.im[l] * f.sin[l];
  }
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q;
    VecD plain{}, in{}, no{};
    for (int l = 0; l < f.count; ++l) {
      const VecD v = reciprocal(1 - twice[l] * pq);
      plain += f.re[l] * v, in += turned[l] * v, no += back[l] * v;
    }
    // rounding may leave -1e-17 of what is 0
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

// Cov u = Re sum_l a_l d_l (d_l . u) - delta (delta . u) + own u, with d_l = r_l - p = p q ((p - q)(1 - cos) + i sin) v,
// delta = pi - p = Re sum_l a_l d_l and own = Re sum_l a_l r_l (1 - r_l).
inline void covariance_row(const Row& z, const Row& u, int64_t n, double k, double* scratch, double* result) {
  const Trials trials(z, n, scratch);
  if (!(trials.variance >= 0)) return std::fill(result, result + n, trials.variance);
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
  double E[kFrequenciesMost], F[kFrequenciesMost], shift = 0;  // of a_l (d_l . u), times (1 - cos) and sin
  for (int l = 0; l < f.count; ++l) {
    VecD a{}, b{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD v = reciprocal(1 - (2 * f.less[l]) * (load<double>(trials.p + i) * load<double>(trials.q + i)));
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
      one += (f.re[l] * (2 - f.less[l])) * w, two += (f.re[l] * f.less[l]) * w, three += (f.im[l] * f.sin[l]) * w;
    }
    const VecD delta = g * e_mean - o_mean, own = 0.5 * (one - g * g * two) + g * three;
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth<double>, n - i));
    store_part<double>(result + i, lanes, pq * (g * e - o - shift * delta) + load<double>(even + i) * own);
  }
}

// x with A x = b, A symmetric and positive, both of which it overwrites.
inline void solve(double (*A)[kDepth], double* b, int size) {
  for (int i = 0; i < size; ++i) {
    for (int row = i + 1; row < size; ++row) {
      const double factor = A[row][i] / A[i][i];
      for (int j = i; j < size; ++j) A[row][j] -= factor * A[i][j];
      b[row] -= factor * b[i];
    }
  }
  for (int i = size; i-- > 0;) {
    for (int j = i + 1; j < size; ++j) b[i] -= A[i][j] * b[j];
    b[i] /= A[i][i];
  }
}

// theta with the inclusion probabilities of logits `goal`: see khot/_kernels/reference/fixed_point.py. Returns the iterations.
inline double calibrate_row(const Row& goal, int64_t n, double k, double* scratch, double* theta) {
  const int64_t length = Trials::padded(n);
  const Trials wanted(goal, n, scratch);
  double* free = scratch + 2 * length;
  const auto take = [&] { return std::exchange(free, free + length); };
  double *const own = take(), *const pi = take(), *const out = take(), *const residual = take(), *const work = take();
  take();  // the other half of work
  double *moves[kDepth], *turns[kDepth];
  for (int j = 0; j < kDepth; ++j) moves[j] = take(), turns[j] = take();
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double* p = fetch(goal, at, count, own + at);
    if (p != own + at) std::copy(p, p + count, own + at);
  }
  std::fill(own + n, own + length, -kInf<double>), std::fill(pi + n, pi + length, 0.0), std::fill(out + n, out + length, 1.0);
  std::copy(own, own + n, theta);
  const Row row{theta, Dtype::kDouble, 1};
  int kept = 0, next = 0;  // the newest of them is at next - 1, and its turn is still to be finished
  for (int iteration = 1;; ++iteration) {
    Trials trials(row, n, work);
    for (int tries = 0; tries < kCentring && std::fabs(trials.mean - k) > kOffCentre * std::sqrt(trials.variance + kSmall); ++tries) {
      const double shift = std::min(std::max((trials.mean - k) / trials.variance, -1.0), 1.0);
      for (int64_t i = 0; i < n; ++i) theta[i] -= shift;
      trials = Trials(row, n, work);
    }
    if (!(inclusion_of(trials, n, k, pi, out) > 0)) {
      std::fill(theta, theta + n, std::numeric_limits<double>::quiet_NaN());
      return iteration;
    }
    VecD far{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD yes = load<double>(pi + i), z = load<double>(own + i);
      const VecD r = z - (log<double>(yes) - log<double>(load<double>(out + i)));
      const VecD left = abs<double>(z) == kInf<double> ? VecD{} : r;
      store<double>(residual + i, left);
      const VecD error = abs<double>(yes - load<double>(wanted.p + i));
      far = (error > kNear) | (abs<double>(left) > kClose) ? splat(1.0) : far;
    }
    double gamma[kDepth] = {}, gram[kDepth][kDepth];
    if (kept > 0) {
      double* const turn = turns[(next + kDepth - 1) % kDepth];
      for (int64_t i = 0; i < length; ++i) turn[i] = residual[i] - turn[i];
      double trace = 0;
      for (int a = 0; a < kept; ++a) {
        VecD sums[kDepth + 1] = {};
        for (int64_t i = 0; i < length; i += kWidth<double>) {
          const VecD f = load<double>(turns[a] + i) * (load<double>(wanted.p + i) * load<double>(wanted.q + i));
          for (int b = 0; b < kept; ++b) sums[b] += f * load<double>(turns[b] + i);
          sums[kDepth] += f * load<double>(residual + i);
        }
        for (int b = 0; b < kept; ++b) gram[a][b] = sum<double>(sums[b]);
        gamma[a] = sum<double>(sums[kDepth]), trace += gram[a][a];
      }
      for (int a = 0; a < kept; ++a) gram[a][a] += kRidge * trace + std::numeric_limits<double>::min();
      solve(gram, gamma, kept);
    }
    double* const move = work;
    std::copy(residual, residual + length, move);
    for (int a = 0; a < kept; ++a) {
      for (int64_t i = 0; i < length; ++i) move[i] -= gamma[a] * (moves[a][i] + turns[a][i]);
    }
    for (int64_t i = 0; i < n; ++i) theta[i] += move[i];
    if (maximum<double>(far) == 0 || iteration == kIterations) return iteration;
    std::copy(move, move + length, moves[next]), std::copy(residual, residual + length, turns[next]);
    next = (next + 1) % kDepth, kept = std::min(kept + 1, kDepth);
  }
}

}  // namespace khot::KHOT_ISA
