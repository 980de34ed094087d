// What the kernels of the sorted Laplace count share: a row's order, and the decayed sums from which its
// counts follow. The method is that of khot/_kernels/reference/laplace.py, in one sort and a few sweeps, in
// double. One sweep per direction carries every sum that goes in that direction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One copy of these kernels serves all processors, and only the functions with KHOT_CLONES are compiled
// twice. Vectors are two registers wide where there is no AVX2.
#define KHOT_ISA laplace
#define KHOT_VECTOR_BYTES 32
#include "simd/math.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define KHOT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KHOT_CLONES
#endif

namespace khot::laplace {

constexpr double kHuge = std::numeric_limits<double>::max();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kFar = 1000;       // from this gap on, in tau, exp(-gap) is 0
constexpr int64_t kFewItems = 192;  // up to this length a comparison sort is faster than a radix sort
constexpr int kLanes = kWidth<double>;

template <class R>
using Bits = std::conditional_t<sizeof(R) == 4, uint32_t, uint64_t>;

// The keys, as unsigned integers, ascend where the scores descend. NaN of either sign comes first or last.
template <class R>
struct Item {
  Bits<R> key;
  int32_t index;
};

template <class R>
KHOT_INLINE Bits<R> to_key(R x) {
  constexpr Bits<R> top = Bits<R>(1) << (8 * sizeof(R) - 1);
  Bits<R> bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits & top ? bits : ~(bits | top);
}

template <class R>
KHOT_INLINE R from_key(Bits<R> key) {
  constexpr Bits<R> top = Bits<R>(1) << (8 * sizeof(R) - 1);
  const Bits<R> bits = key & top ? key : ~key & ~top;
  R x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The memory that the rows of one thread share, so that it is allocated once.
template <class R>
struct Workspace {
  std::vector<Item<R>> items, spare;
  std::vector<double> numbers;
  std::vector<int32_t> places;
  int64_t taken = 0, stride;

  // Arrays of `length` doubles, padded to whole vectors.
  Workspace(int64_t length, int arrays) : stride(length + 2 * kLanes) { numbers.resize(stride * arrays); }
  double* take() { return numbers.data() + stride * taken++; }
};

// order and y = x[order], which descends; equal entries keep their order. A radix sort by bytes, the least
// significant one first, which skips the bytes that all keys share (widened half precision has some).
template <class R>
void argsort_row(const R* x, int64_t n, Workspace<R>& work, int32_t* order, double* y) {
  work.items.resize(n);
  Item<R>* from = work.items.data();
  for (int64_t i = 0; i < n; ++i) from[i] = {to_key(x[i]), static_cast<int32_t>(i)};
  if (n <= kFewItems) {
    std::sort(from, from + n, [](const Item<R>& a, const Item<R>& b) {
      return a.key < b.key || (a.key == b.key && a.index < b.index);
    });
  } else {
    constexpr int kDigits = sizeof(R);
    work.spare.resize(n);
    Item<R>* to = work.spare.data();
    int32_t starts[kDigits][256] = {};
    for (int64_t i = 0; i < n; ++i) {
      for (int d = 0; d < kDigits; ++d) ++starts[d][from[i].key >> (8 * d) & 255];
    }
    for (int d = 0; d < kDigits; ++d) {
      int32_t* start = starts[d];
      if (start[from[0].key >> (8 * d) & 255] == n) continue;
      int32_t total = 0;
      for (int b = 0; b < 256; ++b) {
        const int32_t count = start[b];
        start[b] = total;
        total += count;
      }
      for (int64_t i = 0; i < n; ++i) to[start[from[i].key >> (8 * d) & 255]++] = from[i];
      std::swap(from, to);
    }
  }
  for (int64_t p = 0; p < n; ++p) order[p] = from[p].index, y[p] = from_key<R>(from[p].key);
}

inline bool has_nan(const double* y, int64_t n) {
  bool nan = false;
  for (int64_t p = 0; p < n; ++p) nan |= y[p] != y[p];
  return nan;
}

inline bool is_temperature(double tau) { return tau > 0 && tau < std::numeric_limits<double>::infinity(); }

// exp(-a) and log(a) in place, for whole vectors. Only these gain from wider vectors: all other loops wait
// for their recurrences.
KHOT_CLONES inline void each_exp_minus(double* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store<double>(a + i, exp_minus<double>(load<double>(a + i)));
}

KHOT_CLONES inline void each_log(double* a, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store<double>(a + i, log<double>(load<double>(a + i)));
}

// The distance in tau between neighbours, at most kFar.
KHOT_INLINE double gap_of(double above, double below, double tau) {
  const double g = above == below ? 0 : (above - below) / tau;  // 0 for equal infinities
  return g < kFar ? g : kFar;
}

// decay[p] = exp(-gap) for the gap between the entries p - 1 and p. decay[0] and decay[n] are 0, as nothing
// comes before the first entry or after the last one.
inline void decays(const double* y, int64_t n, double tau, double* decay) {
  for (int64_t p = 1; p < n; ++p) decay[p] = gap_of(y[p - 1], y[p], tau);
  decay[0] = kFar;
  for (int i = 0; i < kLanes; ++i) decay[n + i] = kFar;
  each_exp_minus(decay, n + 1);
}

// For each entry the sum of exp(-distance/tau) over the entries at and above it, and over those at and below
// it.
inline void masses(const double* decay, int64_t n, double* above, double* below) {
  double sum = 0;
  for (int64_t p = 0; p < n; ++p) above[p] = sum = decay[p] * sum + 1;
  sum = 0;
  for (int64_t p = n - 1; p >= 0; --p) below[p] = sum = decay[p + 1] * sum + 1;
}

// The finite entries of a sorted row are those with first <= p < last.
struct Finite {
  int64_t first = 0, last;
  Finite(const double* y, int64_t n) : last(n) {
    while (first < n && y[first] == std::numeric_limits<double>::infinity()) ++first;
    while (last > 0 && y[last - 1] == -std::numeric_limits<double>::infinity()) --last;
  }
  int64_t clamp(int64_t p) const { return std::min(std::max(p, first), last); }
};

// What a sweep has passed when it reaches an entry: sums over the entries before this one, in which d is
// their distance from it in tau and w what the sweep carries.
struct Passed {
  double ones = 0;       // of exp(-d)
  double sum = 0;        // of w exp(-d)
  double distances = 0;  // of d exp(-d)
};

// visit(p, passed) for all entries, from the first one down or from the last one up. A sum that visit does
// not read costs nothing.
template <bool kDown, class Visit>
KHOT_INLINE void sweep(const double* y, const double* decay, const double* w, int64_t n, double tau,
                       const Visit& visit) {
  Passed s;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t p = kDown ? i : n - 1 - i;
    if (i > 0) {
      const int64_t below = kDown ? p : p + 1;
      s.ones = decay[below] * (s.ones + 1);
      s.sum = decay[below] * (s.sum + w[kDown ? p - 1 : p + 1]);
      s.distances = gap_of(y[below - 1], y[below], tau) * s.ones + decay[below] * s.distances;
    }
    visit(p, s);
  }
}

// Spreads what was sent to each entry, up and down from there, and so gives dx. Returns what the distances
// add to dL/dtau, or 0 where that is not wanted.
template <bool kTau, class R>
double collect(const double* up, const double* down, const double* y, const double* decay,
               const int32_t* order, int64_t n, double tau, double* partial, R* dx) {
  double dtau = 0;
  sweep<true>(y, decay, down, n, tau, [&](int64_t p, const Passed& above) {
    partial[p] = above.sum + down[p];
    if (kTau) dtau -= up[p] * above.distances;
  });
  sweep<false>(y, decay, up, n, tau, [&](int64_t p, const Passed& below) {
    dx[order[p]] = static_cast<R>(std::isinf(y[p]) ? 0.0 : partial[p] + (below.sum + up[p]));
    if (kTau) dtau += down[p] * below.distances;
  });
  return dtau;
}

}  // namespace khot::laplace
