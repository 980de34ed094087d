// Order sampling with Pareto variables: its inclusion probabilities, and the parameters for given ones, one
// row at a time. The formulas are explained in khot/_kernels/reference/order_sampling.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling/calibrate.h"

namespace khot::KHOT_ISA {

// As in the reference.
constexpr double kNegligible = 40, kStep = 0.4, kNormalStep = 0.75, kLargest = 600, kSettled = 1e-10;
constexpr double kAdjusted = 2.5;
constexpr int kNewton = 6;
constexpr Accuracy kOrderAccuracy = {1e-7, 1e-9};
constexpr double kBeyond = 2;  // an end of the integral may lie so far beyond what is negligible
constexpr int kNodes = 4;      // nodes of the quadrature that are computed together

// A product of positive numbers, whose exponent is kept apart, so that it neither overflows nor vanishes.
struct Product {
  VecD mantissa;
  IntD exponent;

  Product() : mantissa(splat(1.0)), exponent() {}  // an implicit one would not know the instruction set
  KHOT_INLINE void times(VecD x) {
    using L = Lanes<double>;
    const IntD bits = (IntD)(mantissa * x);
    exponent += (bits - L::kOne) >> L::kMantissa;
    mantissa = (VecD)((bits & ((int64_t{1} << L::kMantissa) - 1)) | L::kOne);
  }
  double log() const {
    const VecD logs = khot::KHOT_ISA::log<double>(mantissa);
    return sum<double>(logs) + 0.693147180559945309417 * sum<double>(__builtin_convertvector(exponent, VecD));
  }
};

// The random units of a row, of which k are selected, as trials at the odds e^t: p e^t/(q + p e^t). What is
// certain is left out of k, and has p = 0 here; its coefficient is 0.
struct RandomUnits {
  int64_t length, count = 0;
  double k, variance, least = 1;  // the least 1 - p
  double *p, *q;
  const double* rest;  // 1 - p, also of what is certain

  RandomUnits(const Trials& trials, int64_t n, double size, double* scratch)
      : length(trials.length),
        k(size),
        variance(trials.variance),
        p(scratch),
        q(scratch + length),
        rest(trials.q) {
    for (int64_t i = 0; i < length; ++i) {
      const bool certain = trials.q[i] == 0, random = !certain && trials.p[i] > 0;
      k -= certain, count += random;
      p[i] = certain ? 0 : trials.p[i], q[i] = certain ? 1 : trials.q[i];
      least = std::min(least, q[i]);
    }
  }
  bool settled() const { return !(k > 0) || k >= static_cast<double>(count) || variance < kSettled; }
  KHOT_INLINE VecD raised(int64_t i, VecD e) const { return load<double>(q + i) + load<double>(p + i) * e; }

  // D(t), and the mean and the variance of the size there
  struct At {
    double D, mean, variance;
  };
  At at(double t) const {
    const VecD e = splat(std::exp(t));
    Product product;
    VecD mean{}, squares{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD x = raised(i, e), r = load<double>(p + i) * e * reciprocal(x);
      product.times(x), mean += r, squares += r * (1 - r);
    }
    return {product.log() - k * t, sum<double>(mean), sum<double>(squares)};
  }

  // t on one side, beyond which D exceeds `enough`, and in `widest` the variance there if it is larger
  double end(int side, double enough, double& widest) const {
    double t = std::min(side * std::sqrt(2 * enough / variance), kLargest);
    At a = at(t);
    for (int step = 0; step < kNewton && !(a.D >= enough && a.D <= enough + kBeyond); ++step) {
      t = std::min(t - (a.D - enough) / (a.mean - k), kLargest);
      a = at(t);
    }
    widest = std::max(widest, a.variance);
    return t;
  }
};

// The coefficients c of the units, up to one factor, by the trapezoidal rule.
inline void coefficients(const RandomUnits& units, double* c) {
  double widest = units.variance;
  // Where a unit is likely, its part of the integrand is small around 0, and the lower tail matters more.
  const double low = units.end(-1, kNegligible - std::log(units.least), widest);
  const double high = units.end(1, kNegligible, widest);
  const double step = std::min(kStep, kNormalStep / std::sqrt(widest));
  const int64_t intervals = std::max<int64_t>(1, static_cast<int64_t>(std::ceil((high - low) / step)));
  // abs(log(q + p e^t)) is at most abs(t), so that so many factors neither overflow nor vanish
  const double longest = std::max(std::max(-low, high), 1e-3);
  const int64_t together = std::max<int64_t>(1, static_cast<int64_t>(kLargest / longest)) * kWidth<double>;
  std::fill(c, c + units.length, 0.0);
  for (int64_t first = 0; first <= intervals; first += kNodes) {
    VecD e[kNodes], weight[kNodes];
    double t[kNodes];
    Product product[kNodes];
    for (int j = 0; j < kNodes; ++j) {
      const int64_t node = std::min(first + j, intervals);
      t[j] = low + (high - low) * (static_cast<double>(node) / static_cast<double>(intervals));
      e[j] = splat(std::exp(t[j]));
    }
    for (int64_t at = 0; at < units.length; at += together) {
      const int64_t end = std::min(at + together, units.length);
      VecD part[kNodes];
      for (int j = 0; j < kNodes; ++j) part[j] = splat(1.0);
      for (int64_t i = at; i < end; i += kWidth<double>) {
#pragma GCC unroll 4
        for (int j = 0; j < kNodes; ++j) part[j] *= units.raised(i, e[j]);
      }
      for (int j = 0; j < kNodes; ++j) product[j].times(part[j]);
    }
    for (int j = 0; j < kNodes; ++j) {
      weight[j] = splat(first + j > intervals ? 0 : std::exp(units.k * t[j] - product[j].log()));
    }
    for (int64_t i = 0; i < units.length; i += kWidth<double>) {
      VecD total = load<double>(c + i);
#pragma GCC unroll 4
      for (int j = 0; j < kNodes; ++j) total += weight[j] * reciprocal(units.raised(i, e[j]));
      store<double>(c + i, total);
    }
  }
  for (int64_t i = 0; i < units.length; ++i) c[i] *= units.rest[i];
}

// pi and 1 - pi: those of the conditional Poisson design with the same parameters, and Cov c/(c . pi) more.
// Returns P(S = k) of the trials. `scratch` has kOrderArrays arrays.
constexpr int kOrderArrays = 4;
inline double order_inclusion_of(const Trials& trials, int64_t n, double k, double* scratch, double* pi,
                                 double* out) {
  const Conditioned given(trials, n, k);
  const double prob = inclusion_of(given, pi, out);
  if (!(prob > 0)) return prob;
  const int64_t length = trials.length;
  double *const c = scratch, *const more = c + length, *const rest = more + length;
  const RandomUnits units(trials, n, k, rest);
  if (units.settled()) return prob;
  coefficients(units, c);
  covariance_of(given, {c, Dtype::kDouble, 1}, rest, more);
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += c[i] * pi[i];
  for (int64_t i = 0; i < n; ++i) {
    const double change = more[i] / mean;
    pi[i] = std::min(std::max(pi[i] + change, 0.0), 1.0);
    out[i] = std::min(std::max(out[i] - change, 0.0), 1.0);
  }
  return prob;
}

// The same for logits z that are centred.
inline void order_inclusion_row(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out) {
  const Trials trials(z, n, scratch);
  if (!(order_inclusion_of(trials, n, k, scratch + 2 * trials.length, pi, out) > 0)) {
    std::fill(pi, pi + n, std::numeric_limits<double>::quiet_NaN());
    std::fill(out, out + n, std::numeric_limits<double>::quiet_NaN());
  }
}

// Finds the parameters theta of order sampling that have the inclusion probabilities sigmoid(goal).
inline void order_calibrate_row(const Row& goal, int64_t n, double k, double* scratch, double* theta) {
  const int64_t length = Trials::padded(n);
  double* const own = goal_of(goal, n, k, scratch, scratch + length);
  const Trials wanted(Row{own, Dtype::kDouble, 1}, n, scratch + length);
  std::copy(own, own + n, theta);
  if (wanted.variance < kSettled) return add_swaps(wanted, n, k, theta);
  if (wanted.variance >= kAdjusted) {
    const double scale = 1 / (wanted.variance * wanted.variance);
    for (int64_t i = 0; i < n; ++i) theta[i] += wanted.p[i] * wanted.q[i] * (0.5 - wanted.p[i]) * scale;
  }
  double* const free = scratch + 3 * length;
  fixed_point(own, wanted, n, k, kOrderAccuracy, free + kOrderArrays * length, theta,
              [&](const Trials& trials, double* pi, double* out) {
                return order_inclusion_of(trials, n, k, free, pi, out);
              });
}

}  // namespace khot::KHOT_ISA
