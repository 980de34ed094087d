// Calibration: the logits that have given inclusion probabilities, by a fixed point with Anderson
// acceleration (khot/_kernels/reference/fixed_point.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "sampling/poisson_binomial.h"

namespace khot::KHOT_ISA {

// As in the reference.
constexpr int kDepth = 3, kIterations = 40;
constexpr double kClose = 1e-3, kRidge = 1e-13;
constexpr double kHajek = 1;      // a variance from which on Hajek's formula is a better start
constexpr double kCertain = 700;  // a logit beyond which a probability is nearly the smallest double

constexpr int kCentring = 20;       // at most so many steps to where k are selected on average
constexpr double kFarthest = 30;    // a longer step would go by the odds of one side alone
constexpr double kSettling = 1e-9;  // the next step would be the square of this

// Solves A x = b for a symmetric positive A of numbers, or of one in each lane. b becomes x, and A is
// overwritten.
template <class T>
KHOT_INLINE void solve(T (*A)[kDepth], T* b, int size) {
  for (int i = 0; i < size; ++i) {
    for (int row = i + 1; row < size; ++row) {
      const T factor = A[row][i] / A[i][i];
      for (int j = i; j < size; ++j) A[row][j] -= factor * A[i][j];
      b[row] -= factor * b[i];
    }
  }
  for (int i = size; i-- > 0;) {
    for (int j = i + 1; j < size; ++j) b[i] -= A[i][j] * b[j];
    b[i] /= A[i][i];
  }
}

// How close the inclusion probabilities come. A step is the last one if the error before it is at most
// `near`, or if it leaves at most `reached` where it is as good as the step before it. With a small variance
// one step says little about the next.
struct Accuracy {
  double near, reached;
};
constexpr Accuracy kExact = {1e-13, 1e-14};

// Shifts the logits z until the trials select k on average, to rounding. What is unlikely on the two sides of
// 1/2 is summed on its own, so that no digit is lost where nearly everything is certain.
inline void centre(double* z, int64_t n, double k, double* scratch) {
  const Row row{z, Dtype::kDouble, 1};
  for (int step = 0; step < kCentring; ++step) {
    const Trials trials(row, n, scratch);
    VecD ups{}, unlikely[2] = {}, slope[2] = {};
    for (int64_t i = 0; i < trials.length; i += kWidth<double>) {
      const VecD p = load<double>(trials.p + i), q = load<double>(trials.q + i), pq = p * q, zero{};
      ups += p > q ? splat(1.0) : zero;
      unlikely[0] += p > q ? zero : p, unlikely[1] += p > q ? q : zero;
      slope[0] += p > q ? zero : pq, slope[1] += p > q ? pq : zero;
    }
    const double below = sum<double>(unlikely[0]), above = sum<double>(unlikely[1]);
    const double more = sum<double>(ups) - k;
    double shift;
    if (more == 0 && (below > 0) != (above > 0)) {  // k are certain, so that the others are impossible
      for (int64_t i = 0; i < n; ++i) z[i] = z[i] > 0 ? kInf<double> : -kInf<double>;
      return;
    }
    if (more == 0 && below > 0 && above > 0) {
      shift = std::log(below / above) / (sum<double>(slope[0]) / below + sum<double>(slope[1]) / above);
      shift = std::min(std::max(shift, -kFarthest), kFarthest);
    } else {
      shift = std::min(std::max((more + (below - above)) / trials.variance, -1.0), 1.0);
    }
    if (!(std::fabs(shift) > 0)) return;  // exact, or nothing is free
    for (int64_t i = 0; i < n; ++i) z[i] -= shift;
    if (std::fabs(shift) <= kSettling) return;
  }
}

// The trials of the logits z, after as many steps as bring their mean near k.
inline Trials centred(double* z, int64_t n, double k, double* scratch) {
  const Row row{z, Dtype::kDouble, 1};
  Trials trials(row, n, scratch);
  for (int tries = 0; tries < kCentring && !trials.near(k); ++tries) {
    const double shift = std::min(std::max((trials.mean - k) / trials.variance, -1.0), 1.0);
    for (int64_t i = 0; i < n; ++i) z[i] -= shift;
    trials = Trials(row, n, scratch);
  }
  return trials;
}

// Logits to start from and to arrive at: those of the given probabilities, which sum to k up to rounding.
// Beyond kCertain they are infinite, and behind the row come units that are never selected.
inline double* goal_of(const Row& goal, int64_t n, double k, double* own, double* scratch) {
  convert(goal, 0, n, own);
  std::fill(own + n, own + Trials::padded(n), -kInf<double>);
  centre(own, n, k, scratch);
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(own[i]) > kCertain) own[i] = std::copysign(kInf<double>, own[i]);
  }
  return own;
}

// With a tiny variance pi is nearly w times the sum of the other side's odds w (Swaps), so that the solution
// is nearly w = pi/sqrt(sum of pi). A start from w = pi would be wrong by many orders of magnitude.
inline void add_swaps(const Trials& wanted, int64_t n, double k, double* theta) {
  const Swaps swaps(wanted, n, k);
  if (!(swaps.apply && swaps.first[0] > 0 && swaps.first[1] > 0)) return;
  const double shift[2] = {-0.5 * std::log(swaps.first[0]), 0.5 * std::log(swaps.first[1])};
  for (int64_t i = 0; i < n; ++i) theta[i] += shift[Swaps::above(wanted, i)];
}

// Moves theta to where inclusion(trials, pi, out), which returns P(S = k), has the wanted probabilities.
// Returns the number of iterations. `free` has 5 + 2 kDepth arrays.
template <class Inclusion>
double fixed_point(const double* own, const Trials& wanted, int64_t n, double k, Accuracy accuracy,
                   double* free, double* theta, const Inclusion& inclusion) {
  const int64_t length = wanted.length;
  const double reached = wanted.variance >= kHajek ? accuracy.reached : 0;
  const auto take = [&] { return std::exchange(free, free + length); };
  double *const pi = take(), *const out = take(), *const residual = take(), *const work = take();
  take();  // work has room for two arrays
  double *moves[kDepth], *turns[kDepth];
  for (int j = 0; j < kDepth; ++j) moves[j] = take(), turns[j] = take();
  std::fill(pi + n, pi + length, 0.0), std::fill(out + n, out + length, 1.0);
  // The newest move is at next - 1. Its turn holds the residual before it until the next residual is known.
  int kept = 0, next = 0;
  double before = 0;
  for (int iteration = 1;; ++iteration) {
    const Trials trials = centred(theta, n, k, work);
    if (!(inclusion(trials, pi, out) > 0)) {
      std::fill(theta, theta + n, std::numeric_limits<double>::quiet_NaN());
      return iteration;
    }
    VecD errors{}, left{};
    for (int64_t i = 0; i < length; i += kWidth<double>) {
      const VecD yes = load<double>(pi + i), z = load<double>(own + i);
      const VecD r = z - (log<double>(yes) - log<double>(load<double>(out + i)));
      const VecD rest = abs<double>(z) == kInf<double> ? VecD{} : r;
      store<double>(residual + i, rest);
      const VecD error = abs<double>(yes - load<double>(wanted.p + i)), size = abs<double>(rest);
      errors = error > errors ? error : errors, left = size > left ? size : left;
    }
    const double error = maximum<double>(errors);
    const bool arrived =
        maximum<double>(left) <= kClose && (error <= accuracy.near || error * error <= reached * before);
    before = error;
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
    if (arrived || iteration == kIterations) return iteration;
    std::copy(move, move + length, moves[next]), std::copy(residual, residual + length, turns[next]);
    next = (next + 1) % kDepth, kept = std::min(kept + 1, kDepth);
  }
}

// Finds the logits theta whose conditional Poisson design has the inclusion probabilities sigmoid(goal).
// Returns the number of iterations.
inline double calibrate_row(const Row& goal, int64_t n, double k, double* scratch, double* theta) {
  const int64_t length = Trials::padded(n);
  double* const own = goal_of(goal, n, k, scratch, scratch + length);
  const Trials wanted(Row{own, Dtype::kDouble, 1}, n, scratch + length);
  std::copy(own, own + n, theta);
  if (wanted.variance >= kHajek) {
    for (int64_t i = 0; i < n; ++i) theta[i] += (0.5 - wanted.p[i]) / wanted.variance;
  } else {
    add_swaps(wanted, n, k, theta);
  }
  return fixed_point(own, wanted, n, k, kExact, scratch + 3 * length, theta,
                     [&](const Trials& trials, double* pi, double* out) {
                       return inclusion_of(Conditioned(trials, n, k), pi, out);
                     });
}

}  // namespace khot::KHOT_ISA
