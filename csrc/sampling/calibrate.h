// Calibration: the logits with given inclusion probabilities, by a fixed point with Anderson acceleration
// (khot/_kernels/reference/fixed_point.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "sampling/poisson_binomial.h"

namespace khot::KHOT_ISA {

// As in the reference.
constexpr int kDepth = 3, kIterations = 40;
constexpr double kNear = 1e-13, kClose = 1e-3, kRidge = 1e-13;
constexpr int kCentring = 20;       // at most so many steps, each of at most 1
constexpr double kOffCentre = 0.3;  // an offset of so many standard deviations of the sum loses no digits
constexpr double kCertain = 700;    // a logit beyond which a probability is nearly the smallest double
constexpr double kSmall = 1e-6;     // a variance that covers rounding errors of the mean

// Solves A x = b for a symmetric positive A. b becomes x, and A is overwritten.
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

// Finds the logits theta whose conditional Poisson design has the inclusion probabilities sigmoid(goal).
// Returns the number of iterations.
inline double calibrate_row(const Row& goal, int64_t n, double k, double* scratch, double* theta) {
  const int64_t length = Trials::padded(n);
  const Trials wanted(goal, n, scratch);
  double* free = scratch + 2 * length;
  const auto take = [&] { return std::exchange(free, free + length); };
  double *const own = take(), *const pi = take(), *const out = take(), *const residual = take(),
                *const work = take();
  take();  // work has room for two arrays
  double *moves[kDepth], *turns[kDepth];
  for (int j = 0; j < kDepth; ++j) moves[j] = take(), turns[j] = take();
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double* p = fetch(goal, at, count, own + at);
    if (p != own + at) std::copy(p, p + count, own + at);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(own[i]) > kCertain) own[i] = std::copysign(kInf<double>, own[i]);
  }
  std::fill(own + n, own + length, -kInf<double>), std::fill(pi + n, pi + length, 0.0),
      std::fill(out + n, out + length, 1.0);
  std::copy(own, own + n, theta);
  // With a tiny variance pi is nearly w times the sum of the other side's odds w (Swaps), so that the
  // solution is nearly w = pi/sqrt(sum of pi). A start from w = pi would be wrong by many orders of
  // magnitude.
  const Swaps swaps(wanted, n, k);
  if (swaps.apply && swaps.first[0] > 0 && swaps.first[1] > 0) {
    const double shift[2] = {-0.5 * std::log(swaps.first[0]), 0.5 * std::log(swaps.first[1])};
    for (int64_t i = 0; i < n; ++i) theta[i] += shift[Swaps::above(wanted, i)];
  }
  const Row row{theta, Dtype::kDouble, 1};
  // The newest move is at next - 1. Its turn holds the residual before it until the next residual is known.
  int kept = 0, next = 0;
  for (int iteration = 1;; ++iteration) {
    Trials trials(row, n, work);
    for (int tries = 0;
         tries < kCentring && std::fabs(trials.mean - k) > kOffCentre * std::sqrt(trials.variance + kSmall);
         ++tries) {
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
          const VecD f =
              load<double>(turns[a] + i) * (load<double>(wanted.p + i) * load<double>(wanted.q + i));
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
