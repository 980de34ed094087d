// Draws of k units as independent trials, given that k of them succeed, by halves, one row at a time
// (khot/_kernels/reference/halving.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "sampling/calibrate.h"
#include "sampling/philox.h"

namespace khot::KHOT_ISA {

// As in the reference.
constexpr double kWholeDraws = 4;  // the variance up to which whole draws are tried
constexpr int kBuckets = 64;  // of logits, kFine to a unit, in whose order units go to the two halves in turn
constexpr double kFine = 4;

// Trials with the probabilities p, each row's uniforms being taken one after another, until a size is
// accepted: accept(size) is a probability.
struct Attempts {
  uint64_t seed, row, column = 0;
  double* u;

  template <class Accept>
  int64_t until(const Accept& accept, const double* p, int64_t n, bool* hit) {
    for (;;) {
      uniform_row(seed, row, column, n + 1, u);
      column += (n + 2) / 2 * 2;
      int64_t size = 0;
      for (int64_t i = 0; i < n; ++i) size += hit[i] = u[i] < p[i];
      if (u[n] < accept(size)) return size;
    }
  }
};

inline int bucket_of(double z) {
  return static_cast<int>(std::min(std::max(std::floor(kFine * z) + kBuckets / 2, 0.0), kBuckets - 1.0));
}

// The units in the order of the buckets of z.
inline void in_order(const double* z, int64_t n, int32_t* units) {
  int64_t starts[kBuckets + 1] = {};
  for (int64_t i = 0; i < n; ++i) ++starts[bucket_of(z[i]) + 1];
  for (int j = 0; j < kBuckets; ++j) starts[j + 1] += starts[j];
  for (int64_t i = 0; i < n; ++i) units[starts[bucket_of(z[i])]++] = static_cast<int32_t>(i);
}

// out stays empty where the trials cannot select k.
inline void trials_row(const Row& logits, int64_t n, double k, uint64_t seed, uint64_t row, double* scratch,
                       bool* out) {
  std::fill(out, out + n, false);
  double* free = scratch;
  const auto take = [&](int64_t count) {
    const auto own = free;
    free += Trials::padded(count) + kWidth<double>;
    return own;
  };
  double *const first = take(n), *const z = take(n), *const work = take(n);
  take(n);  // work has room for p and q, each padded
  double *const likely = take(n), *const u = take(n + 2);
  int32_t *const units = reinterpret_cast<int32_t*>(take(n)), *const others =
                                                                  reinterpret_cast<int32_t*>(take(n));
  bool* const hit = reinterpret_cast<bool*>(take(n));
  convert(logits, 0, n, first);
  if (!centred(first, n, k, work).near(k)) return;
  in_order(first, n, units);
  for (int64_t i = 0; i < n; ++i) z[i] = first[units[i]];
  Attempts attempts{seed, row, 0, u};
  const auto choose = [&](const int32_t* of, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[of[i]] = hit[i];
  };
  for (int64_t m = n;;) {
    const Trials all = centred(z, m, k, work);
    if (all.variance <= kWholeDraws) {
      attempts.until([&](int64_t size) { return static_cast<double>(size) == k ? 1.0 : 0.0; }, all.p, m, hit);
      return choose(units, m);
    }
    // Every second unit is drawn now, and the others keep their place in front.
    const int64_t half = m / 2, rest = m - half;
    double *const p = all.p, *const q = all.q;
    for (int64_t i = 0; i < half; ++i) likely[i] = p[2 * i + 1], others[i] = units[2 * i + 1];
    for (int64_t i = 0; i < rest; ++i) {
      z[i] = z[2 * i], units[i] = units[2 * i], p[i] = p[2 * i], q[i] = q[2 * i];
    }
    const Trials left(p, q, rest);
    Spectrum spectrum(left.variance, rest);
    spectrum.characteristic(left);
    const auto chance = [&](double size) { return spectrum.pmf(size, left.mean, rest); };
    // The mode is next to the mean (Darroch 1964).
    const double most = std::max(chance(std::floor(left.mean)), chance(std::ceil(left.mean)));
    const auto accept = [&](int64_t size) { return chance(k - static_cast<double>(size)) / most; };
    k -= static_cast<double>(attempts.until(accept, likely, half, hit));
    choose(others, half);
    m = rest;
    // The half that was drawn moved k by about one standard deviation.
    const double shift = std::min(std::max((left.mean - k) / left.variance, -1.0), 1.0);
    for (int64_t i = 0; i < m; ++i) z[i] -= shift;
  }
}

}  // namespace khot::KHOT_ISA
