// One sweep over the rows of a two-sided assignment: the threshold of each row for given thresholds of the
// columns, and the sums over rows that a step of Newton's method in the columns' thresholds needs. The
// formulas are explained in khot/_kernels/reference/assign_pass.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cdfs.h"
#include "kernels.h"
#include "search/guard.h"
#include "simd/math.h"

namespace khot::KHOT_ISA {

// As in khot/_kernels/reference/assign_pass.py.
constexpr double kPlain = 0.25, kLeap = 16;
constexpr int kAssignBlock = 32;  // rows whose densities are kept in the cache for the product
constexpr int kSorted = 8;        // up to this k, the guess of a threshold is taken from the largest scores

// out += the product g^T g for `rows` rows of g, on and above the diagonal. `wide` is a multiple of 4.
template <class R, int kVectors>
KHOT_INLINE void overlap_tile(const R* g, int rows, int64_t wide, int64_t i, int64_t j, int64_t n,
                              double* out) {
  constexpr int W = kWidth<R>;
  Vec<R> part[4][kVectors] = {};
  for (int row = 0; row < rows; ++row, g += wide) {
    Vec<R> right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load<R>(g + j + v * W);
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
      const Vec<R> left = splat<R>(g[i + a]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) part[a][v] += left * right[v];
    }
  }
  for (int a = 0; a < 4 && i + a < n; ++a) {
    R lanes[kVectors * W];
    for (int v = 0; v < kVectors; ++v) store<R>(lanes + v * W, part[a][v]);
    double* to = out + (i + a) * n + j;
    const int64_t count = n - j < kVectors * W ? n - j : kVectors * W;
    for (int64_t l = 0; l < count; ++l) to[l] += lanes[l];
  }
}

template <class R>
void overlap(const R* g, int rows, int64_t wide, int64_t n, double* out) {
  constexpr int W = kWidth<R>;
  for (int64_t i = 0; i < n; i += 4) {
    int64_t j = i / W * W;
    for (; j + 2 * W <= wide && j + W < n; j += 2 * W) overlap_tile<R, 2>(g, rows, wide, i, j, n, out);
    for (; j < n; j += W) overlap_tile<R, 1>(g, rows, wide, i, j, n, out);
  }
}

// A threshold for a row of which nothing is known: between its k-th and its next largest score, or the mean.
template <class R>
R assign_guess(const R* u, int64_t n, R k) {
  const int whole = k < kSorted ? static_cast<int>(k) : kSorted;  // k > 0
  if (whole < kSorted) {
    R top[kSorted + 1];
    for (int i = 0; i <= whole; ++i) top[i] = -kInf<R>;
    for (int64_t j = 0; j < n; ++j) {
      const R value = u[j];
      if (!(value > top[whole])) continue;
      int i = whole;
      for (; i > 0 && value > top[i - 1]; --i) top[i] = top[i - 1];
      top[i] = value;
    }
    const R next = top[whole], least = static_cast<R>(whole) == k ? top[whole - 1] : next;
    if (next > -kInf<R>) return next + (least - next) / 2;
  }
  R total = 0, count = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (u[j] > -kInf<R>) total += u[j], count += 1;
  }
  return count > 0 ? total / count : R(0);
}

// By how much the threshold of a row moves, in tau. `below` and `above` are the sums of the tails on both
// sides of the threshold, `spare` is the number of scores above it less k, and miss = spare + below - above.
template <class R>
R assign_move(R k, R n, R spare, R below, R above, R density, R upper, R miss) {
  R move = miss / density;
  const bool in_gap = spare == 0;
  if (std::fabs(move) <= R(kPlain) && !(in_gap && std::fabs(miss) > R(kPlain) * (below + above))) return move;
  if (in_gap) {
    move = (std::log(below) - std::log(above)) / ((density - upper) / below + upper / above);
  } else {
    const R got = k + miss, left = n - got;
    move = (std::log(got / left) - std::log(k / (n - k))) * (got * left) / (n * density);
  }
  const R leap = R(kLeap);
  if (!(std::fabs(move) <= leap)) move = miss > 0 ? leap : -leap;
  return move;
}

template <class R, class F>
void assign_typed(const AssignPass& pass, const F& cdf, int64_t begin, int64_t end, double* scratch,
                  double* sums) {
  constexpr int W = kWidth<R>, kUnit = W < 4 ? 4 : W;
  constexpr R kRounding = 4 * std::numeric_limits<R>::epsilon();
  constexpr R kLeast = sizeof(R) == 4 ? R(1e-30) : R(1e-290);  // less density than this gives no direction
  const FlushSubnormals flush;
  const int64_t n = pass.n, wide = (n + kUnit - 1) / kUnit * kUnit;
  R* at = reinterpret_cast<R*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  R* const c = at;
  R *const u = c + wide, *const y = u + wide, *const f = y + wide;
  R *const loads = f + wide, *const slopes = loads + wide, *const through = slopes + wide;
  R* const g = through + wide;
  for (int64_t j = 0; j < wide; ++j) {
    c[j] = j < n ? static_cast<const R*>(pass.c)[j] : R(0);
    u[j] = -kInf<R>;
    loads[j] = slopes[j] = through[j] = 0;
  }
  const R tau = static_cast<R>(pass.tau), inverse_tau = 1 / tau, tolerance = static_cast<R>(pass.tolerance);
  int kept = 0;

  const auto empty = [&] {
    for (int64_t j = 0; j < n; ++j) {
      sums[j] += loads[j], sums[n + j] += slopes[j], sums[2 * n + j] += through[j];
    }
    for (int64_t j = 0; j < wide; ++j) loads[j] = slopes[j] = through[j] = 0;
    if (pass.slopes) overlap<R>(g, kept, wide, n, sums + 3 * n);
    kept = 0;
  };

  for (int64_t row = begin; row < end; ++row) {
    const R* const x = static_cast<const R*>(pass.x) + row * n;
    int64_t j = 0;
    for (; j + W <= n; j += W) store<R>(u + j, load<R>(x + j) - load<R>(c + j));
    for (; j < n; ++j) u[j] = x[j] - c[j];
    const R k = static_cast<const R*>(pass.k)[row];
    R r = static_cast<const R*>(pass.r)[row];
    if (r != r) r = assign_guess<R>(u, n, k);

    R miss, density;
    Enclosure<ScalarArithmetic> between(-kInf<double>, kInf<double>);
    for (int64_t step = 0;; ++step) {
      Vec<R> lower_tails{}, upper_tails{}, densities{}, upper_densities{}, counts{};
      for (j = 0; j < wide; j += W) {
        const Vec<R> z = (load<R>(u + j) - r) * inverse_tau;
        const Int<R> up = z > 0;
        const TailDensity<R> t = cdf.template split<R>(z, up);
        const Vec<R> none{};
        lower_tails += up ? none : t.tail;
        upper_tails += up ? t.tail : none;
        densities += t.density;
        upper_densities += up ? t.density : none;
        counts += up ? splat<R>(1) : none;
        store<R>(y + j, up ? 1 - t.tail : t.tail);
        store<R>(f + j, t.density);
      }
      const R below = sum<R>(lower_tails), above = sum<R>(upper_tails), spare = sum<R>(counts) - k;
      density = sum<R>(densities);
      miss = spare + (below - above);
      if (step >= pass.steps || !(std::fabs(miss) > tolerance * density + kRounding * std::fabs(spare))) {
        break;
      }
      between.add(r, miss);
      R next = r + tau * assign_move<R>(k, static_cast<R>(n), spare, below, above, density,
                                        sum<R>(upper_densities), miss);
      if (next == r) break;
      if (between.bisects(next, miss)) next = static_cast<R>(between.middle());
      if (!(std::fabs(next) < kInf<R>)) break;
      r = next;
    }
    static_cast<R*>(pass.r_out)[row] = r;
    static_cast<R*>(pass.miss)[row] = miss;
    static_cast<R*>(pass.density)[row] = density;

    const bool moves = density > kLeast;
    R share = moves ? miss / density : R(0);
    share = share > 1 ? R(1) : share < -1 ? R(-1) : share;
    const R root = moves ? 1 / std::sqrt(density) : R(0);
    R* const g_row = g + kept * wide;
    for (j = 0; j < wide; j += W) {
      const Vec<R> fj = load<R>(f + j);
      store<R>(loads + j, load<R>(loads + j) + load<R>(y + j));
      store<R>(slopes + j, load<R>(slopes + j) + fj);
      store<R>(through + j, load<R>(through + j) + fj * share);
      store<R>(g_row + j, fj * root);
    }
    if (pass.value != nullptr) std::memcpy(static_cast<R*>(pass.value) + row * n, y, n * sizeof(R));
    if (++kept == kAssignBlock) empty();
  }
  if (kept > 0) empty();
}

inline void assign_rows(const AssignPass& pass, int64_t begin, int64_t end, double* scratch, double* sums) {
  const auto run = [&](const auto& cdf) {
    if (pass.dtype == Dtype::kFloat) {
      assign_typed<float>(pass, cdf, begin, end, scratch, sums);
    } else {
      assign_typed<double>(pass, cdf, begin, end, scratch, sums);
    }
  };
  switch (pass.cdf) {
    case Cdf::kLogistic:
      return run(Logistic());
    case Cdf::kLaplace:
      return run(Laplace());
    case Cdf::kNormal:
      return run(Normal());
    default:  // no column has a threshold under a compact support
      unknown_cdf(pass.cdf);
  }
}

}  // namespace khot::KHOT_ISA
