// The projection of a row onto a permutahedron, and its gradients. The method and its differences to an entry
// of the same block are those of khot/_kernels/reference/permutahedron.py; here adjacent violators are pooled
// one after the other, in O(n) after the sort, in double.
#pragma once

#include "laplace/rows.h"

namespace khot::permutahedron {

using laplace::each_exp_minus;
using laplace::has_nan;
using laplace::is_temperature;
using laplace::kFar;
using laplace::kNan;
using laplace::Workspace;

// Scores in tau and entries of w count as infinite from these numbers on, as in the reference.
constexpr double kFarScore = 1e280, kFarWeight = 1e276;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kArrays = 5;  // how many arrays of doubles a row needs

inline double bounded(double x, double most) { return x > most ? most : x < -most ? -most : x; }

// z in tau. An infinite score is farther than any other.
inline double score(double z, double tau) {
  return std::isinf(z) ? std::copysign(2 * kFarScore, z) : bounded(z / tau, kFarScore);
}

// order and y = x[order], which descends. Rows that descend already are not sorted.
template <class R>
void descending_row(const R* x, int64_t n, Workspace<R>& work, int32_t* order, double* y) {
  int64_t p = 1;
  while (p < n && x[p - 1] >= x[p]) ++p;
  if (p < n || (n == 1 && x[0] != x[0])) return laplace::argsort_row(x, n, work, order, y);
  for (p = 0; p < n; ++p) order[p] = static_cast<int32_t>(p), y[p] = x[p];
}

// The same for a row of w, in which a large number stands for an infinite one.
template <class S>
void weights_row(const S* w, int64_t n, Workspace<S>& work, int32_t* order, double* sorted) {
  descending_row(w, n, work, order, sorted);
  for (int64_t p = 0; p < n; ++p) sorted[p] = bounded(sorted[p], kFarWeight);  // a NaN stays
}

// Blocks of "l2": v = mean(u - w), less that difference at the block's first place.
struct Mean {
  double sum, value;
  void single() { sum = value = 0; }
  // Appends a block of b places, whose first place has the given differences to that of this one.
  void append(const Mean& last, int64_t a, int64_t b, double du, double dw) {
    sum += last.sum + static_cast<double>(b) * (du - dw);
    value = sum / static_cast<double>(a + b);
  }
};

// Blocks of "kl": v = log sum e^u - log sum e^w. No sum overflows, because u and w descend.
struct LogRatio {
  double u, w, value;
  void single() { u = w = 1, value = 0; }
  void append(const LogRatio& last, int64_t, int64_t, double du, double dw) {
    u += last.u * std::exp(du), w += last.w * std::exp(dw);
    value = std::log(u / w);
  }
};

// Pools the row, and calls done(start, stop, value) for each block.
template <class Block, class Done>
void pool(const double* u, const double* w, int64_t n, std::vector<int32_t>& starts,
          std::vector<Block>& blocks, const Done& done) {
  starts.resize(n + 1), blocks.resize(n);
  int64_t top = -1;  // the last block
  for (int64_t i = 0; i < n; ++i) {
    Block now;
    now.single();
    int64_t start = i;
    while (top >= 0) {
      const int64_t before = starts[top];
      const double du = u[start] - u[before], dw = w[start] - w[before];
      if (blocks[top].value - now.value > du - dw) break;
      Block& joined = blocks[top];
      joined.append(now, start - before, i + 1 - start, du, dw);
      now = joined;
      start = before;
      --top;
    }
    ++top;
    starts[top] = static_cast<int32_t>(start);
    blocks[top] = now;
  }
  if (n > 0) starts[top + 1] = static_cast<int32_t>(n);
  for (int64_t b = 0; b <= top; ++b) done(starts[b], starts[b + 1], blocks[b].value);
}

// w descends. Writes y and the places: the order of z, and at which place the block of each place starts.
template <class R>
void project_row(const R* z, const double* w, int64_t n, double tau, bool kl, Workspace<R>& work, R* y,
                 int32_t* order, int32_t* start) {
  double* u = work.take();
  descending_row(z, n, work, order, u);
  if (has_nan(u, n) || has_nan(w, n) || !is_temperature(tau)) {
    std::fill(y, y + n, static_cast<R>(kNan));
    for (int64_t p = 0; p < n; ++p) start[p] = static_cast<int32_t>(p);
    return;
  }
  for (int64_t p = 0; p < n; ++p) u[p] = score(u[p], tau);
  const auto write = [=](int64_t from, int64_t to, double value) {
    // An infinite w makes the mean of its block infinite, and two of opposite signs leave no mean.
    double base = w[from] - value;
    if (w[from] >= kFarWeight) base += kInf;
    if (w[kl ? from : to - 1] <= -kFarWeight) base -= kInf;
    for (int64_t p = from; p < to; ++p) {
      y[order[p]] = static_cast<R>((u[p] - u[from]) + base);
      start[p] = static_cast<int32_t>(from);
    }
  };
  if (kl) {
    thread_local std::vector<LogRatio> blocks;
    pool(u, w, n, work.places, blocks, write);
  } else {
    thread_local std::vector<Mean> blocks;
    pool(u, w, n, work.places, blocks, write);
  }
}

// a[p] becomes e^a[p] over the sum of these in the block of p; a is at most 0.
inline void shares(double* a, const int32_t* start, int64_t n) {
  for (int64_t p = 0; p < n; ++p) a[p] = a[p] > -kFar ? -a[p] : kFar;
  each_exp_minus(a, n);
  for (int64_t from = 0, to; from < n; from = to) {
    double sum = 0;
    for (to = from; to < n && start[to] == start[from]; ++to) sum += a[to];
    for (int64_t p = from; p < to; ++p) a[p] /= sum;
  }
}

// weight_of(p) is w at the place p of its descending order. dw may be null. Returns dL/dtau.
template <class R, class S, class WeightOf>
double project_backward_row(const R* grad, const R* z, const WeightOf& weight_of, const int32_t* order,
                            const int32_t* w_order, const int32_t* start, int64_t n, double tau, bool kl,
                            Workspace<R>& work, R* dz, S* dw) {
  double *a = work.take(), *share = work.take(), *of_w = work.take(), *g = work.take();
  for (int64_t p = 0; p < n; ++p) {
    const double first = z[order[start[p]]], here = z[order[p]];
    a[p] = std::isinf(here) ? 0.0 : bounded((here - (std::isinf(first) ? 0.0 : first)) / tau, kFarScore);
    g[p] = grad[order[p]];
  }
  if (kl) {
    std::copy(a, a + n, share);
    shares(share, start, n);
    if (dw != nullptr) {
      for (int64_t p = 0; p < n; ++p) {
        of_w[p] = bounded(weight_of(p), kFarWeight) - bounded(weight_of(start[p]), kFarWeight);
      }
      shares(of_w, start, n);
    }
  }
  double dtau = 0;
  for (int64_t from = 0, to; from < n; from = to) {
    double sum = 0;
    for (to = from; to < n && start[to] == start[from]; ++to) sum += g[to];
    const double mean = sum / static_cast<double>(to - from);
    for (int64_t p = from; p < to; ++p) {
      const double du = std::isinf(z[order[p]]) ? 0.0 : (g[p] - (kl ? share[p] * sum : mean)) / tau;
      dtau -= du * a[p];
      dz[order[p]] = static_cast<R>(du);
      if (dw == nullptr) continue;
      const bool still = std::fabs(weight_of(p)) >= kFarWeight;
      dw[w_order[p]] = static_cast<S>(still ? 0.0 : kl ? of_w[p] * sum : mean);
    }
  }
  return dtau;
}

}  // namespace khot::permutahedron
