// Draws of k units, one row at a time: order sampling and the pivotal tournament
// (khot/_kernels/reference/draws.py).
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling/few.h"
#include "sampling/philox.h"
#include "selection/kth_largest.h"
#include "simd/math.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

// Numbers that have the order of theta - logit U, with which the largest are selected. A unit whose theta is
// NaN comes last.
inline void order_keys(const Row& theta, int64_t n, uint64_t seed, uint64_t row, int64_t* keys) {
  double buffer[kBlock], u[kBlock + kWidth<double>];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double* p = fetch(theta, at, count, buffer);
    uniform_row(seed, row, at, count, u);
    vectors<double>(p, count, 0.0, [&](VecD x, int i, int) {
      const VecD v = load<double>(u + i), key = x - log<double>(v / (1 - v));
      const IntD bits = Ordered<int64_t>::key((IntD)(key == key ? key : splat(-kInf<double>)));
      std::memcpy(keys + at + i, &bits, sizeof(bits));
    });
  }
}

// Selects the units of the k largest keys; of equal keys the first are selected.
inline void order_row(const Row& theta, int64_t n, double size, uint64_t seed, uint64_t row, double* scratch,
                      bool* out) {
  const int64_t k = static_cast<int64_t>(size);
  if (k <= 0 || k >= n) return std::fill(out, out + n, k > 0);
  int64_t* const keys = reinterpret_cast<int64_t*>(scratch);
  order_keys(theta, n, seed, row, keys);
  const int64_t level = kth_largest(kOrderedDouble, keys, n, k);
  int64_t ties = k - Ordered<int64_t>::at_least(keys, n, level + 1);
  for (int64_t i = 0; i < n; ++i) {
    const bool tie = keys[i] == level && ties > 0;
    out[i] = tie || keys[i] > level;
    ties -= tie;
  }
}

// Draws of order sampling with given inclusion probabilities (khot/sampling/_designs/pareto.py): theta by
// the adjustment's formula where d, the sum of p (1 - p), is at least `least`, otherwise by calibration. A
// phantom unit makes the sum of p an integer, up to `tolerance`. Returns false, and draws nothing, where a p
// is no probability.
inline bool pareto_rows(const Row* probs, int64_t rows, int64_t n, double least, double tolerance,
                        uint64_t seed, uint64_t first, double* scratch, bool* out) {
  const int64_t room = n + 1 + kWidth<double>;
  double* const logits = scratch;              // of each row, with its phantom
  double* const theta = logits + rows * room;  // of the rows that are calibrated, behind each other
  double* const rest = theta + rows * (n + 1);
  double sizes[kRowsTogether], goals[kRowsTogether] = {};
  Row logit[kRowsTogether] = {};
  int64_t calibrated[kRowsTogether], count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double buffer[kBlock], total = 0, d = 0;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int part = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      const double* p = fetch(probs[row], at, part, buffer);
      for (int i = 0; i < part; ++i) {
        if (!(p[i] >= 0 && p[i] <= 1)) return false;
        total += p[i], d += p[i] - p[i] * p[i];
      }
    }
    const bool whole = std::fabs(total - std::nearbyint(total)) <= tolerance;
    const double phantom = whole ? 0 : std::ceil(total) - total;
    d += phantom - phantom * phantom;
    const bool formula = d >= least;
    const double scale = formula ? 1 / (d * d) : 0;
    const auto adjusted = [&](VecD p) {
      const VecD odds = p / (1 - p), z = log<double>(odds) + (p - p * p) * (0.5 - p) * scale;
      return p <= 0 ? splat(-kInf<double>) : p >= 1 ? splat(kInf<double>) : z;
    };
    double* const to = logits + row * room;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int part = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      const double* p = fetch(probs[row], at, part, buffer);
      vectors<double>(p, part, 0.0, [&](VecD x, int i, int) { store<double>(to + at + i, adjusted(x)); });
    }
    to[n] = adjusted(splat(phantom))[0];
    sizes[row] = std::nearbyint(total + phantom);
    if (formula) continue;
    goals[count] = sizes[row], logit[count] = {to, Dtype::kDouble, 1}, calibrated[count++] = row;
  }
  calibrate_rows<true>(logit, goals, count, n + 1, rest, theta, nullptr);
  for (int64_t i = 0; i < count; ++i) std::copy_n(theta + i * (n + 1), n + 1, logits + calibrated[i] * room);
  for (int64_t row = 0; row < rows; ++row)
    order_row({logits + row * room, Dtype::kDouble, 1}, n + 1, sizes[row], seed, first + row, rest,
              out + row * (n + 1));
  return true;
}

// One round of duels between neighbours: whether the first of a pair goes on, whether the pair has more than
// 1 in all, and what goes on to the next round.
inline void duels(const double* x, const double* u, int64_t pairs, uint8_t* first, uint8_t* over,
                  double* next) {
  for (int64_t i = 0; i < pairs; ++i) {
    const double a = x[2 * i], total = a + x[2 * i + 1], one = total > 1 ? 1.0 : 0.0;
    first[i] = u[i] * std::fabs(total - 2 * one) < std::fabs(a - one);
    over[i] = total > 1;
    next[i] = total - one;
  }
}

// The unit of a pair that went on gets the result of the later rounds, the other one gets `over`.
inline void results(const uint8_t* later, const uint8_t* first, const uint8_t* over, int64_t pairs,
                    uint8_t* out) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint8_t differ = later[i] ^ over[i], x = (differ & first[i]) ^ over[i];
    out[2 * i] = x, out[2 * i + 1] = x ^ differ;
  }
}

inline void tournament_row(const Row& probs, int64_t n, uint64_t seed, uint64_t row, double* scratch,
                           bool* out) {
  int64_t pairs[64], rounds = 0, total = 0;
  for (int64_t m = n; m > 1; m = pairs[rounds++]) total += pairs[rounds] = (m + 1) / 2;
  double *x = scratch, *u = x + 2 * total + 1;
  uint8_t* first = reinterpret_cast<uint8_t*>(u + total);
  uint8_t *over = first + total, *later = over + total, *now = later + n + 1;
  convert(probs, 0, n, x);
  uniform_row(seed, row, 0, total, u);
  int64_t m = n;
  for (int64_t r = 0; r < rounds; m = pairs[r++]) {
    if (m % 2) x[m] = 0;
    duels(x, u, pairs[r], first, over, x + 2 * pairs[r]);
    x += 2 * pairs[r], u += pairs[r], first += pairs[r], over += pairs[r];
  }
  later[0] = n > 0 && x[0] > 0.5;  // this is 0 or 1, up to rounding
  for (int64_t r = rounds; r-- > 0; std::swap(later, now)) {
    first -= pairs[r], over -= pairs[r];
    results(later, first, over, pairs[r], now);
  }
  std::copy(later, later + n, out);
}

// The units in the order of uniforms of their own, by a bucket for each and the few exchanges that this
// leaves. `keys` are the uniforms, and room for them in order.
inline void shuffle(int64_t n, double* keys, double* sorted, int32_t* starts, int32_t* units) {
  const double buckets = static_cast<double>(n);
  const auto bucket = [&](int64_t i) { return std::min(static_cast<int64_t>(keys[i] * buckets), n - 1); };
  std::fill(starts, starts + n + 1, 0);
  for (int64_t i = 0; i < n; ++i) ++starts[bucket(i) + 1];
  for (int64_t i = 0; i < n; ++i) starts[i + 1] += starts[i];
  for (int64_t i = 0; i < n; ++i) {
    const int32_t to = starts[bucket(i)]++;
    sorted[to] = keys[i], units[to] = static_cast<int32_t>(i);
  }
  for (int64_t i = 1; i < n; ++i) {
    const double key = sorted[i];
    const int32_t unit = units[i];
    int64_t to = i;
    for (; to > 0 && sorted[to - 1] > key; --to) sorted[to] = sorted[to - 1], units[to] = units[to - 1];
    sorted[to] = key, units[to] = unit;
  }
}

// The tournament between neighbours in an order drawn by the seed `order`.
inline void random_tournament_row(const Row& probs, int64_t n, uint64_t order, uint64_t seed, uint64_t row,
                                  double* scratch, bool* out) {
  double *const p = scratch, *const keys = p + n, *const sorted = keys + n, *const work = sorted + n;
  int32_t* const units = reinterpret_cast<int32_t*>(work);
  double* const rest = work + n / 2 + 1;
  uniform_row(order, row, 0, n, keys);
  shuffle(n, keys, sorted, reinterpret_cast<int32_t*>(rest), units);
  convert(probs, 0, n, p);
  for (int64_t i = 0; i < n; ++i) keys[i] = p[units[i]];
  bool* const chosen = reinterpret_cast<bool*>(sorted);
  tournament_row({keys, Dtype::kDouble, 1}, n, seed, row, rest, chosen);
  for (int64_t i = 0; i < n; ++i) out[units[i]] = chosen[i];
}

}  // namespace khot::KHOT_ISA
