// What each entry has of the places between falling thresholds, P_ij = F((x_j - t_i)/tau) - F((x_j -
// t_(i-1))/tau), and the gradients (khot/_kernels/reference/permutation.py).
//
// A block of entries meets all thresholds in turn, so that F is computed once for each entry of the matrix.
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/block_cdf.h"
#include "counting/count.h"

namespace khot::KHOT_ISA {

// F, or f and z, of a block of floats at one threshold. The passes around them exist once for all CDFs. The
// results have room for one vector more.
class FloatLevel {
 public:
  using R = float;

  // F has to outlive it.
  template <class C>
  explicit FloatLevel(const C& F) : self_(&F), values_(values_of<C>), densities_(densities_of<C>) {}

  void values(Threshold t, double tau, const float* x, int count, float* y) const {
    values_(self_, t, tau, x, count, y);
  }
  void densities(Threshold t, double tau, const float* x, int count, float* f, float* z) const {
    densities_(self_, t, tau, x, count, f, z);
  }

 private:
  template <class C>
  static KHOT_PASS void values_of(const void* self, Threshold t, double tau, const float* x, int count,
                                  float* y) {
    const Level<float, C> at(*static_cast<const C*>(self), t, tau);
    vectors<float>(x, count, 0, [&](VecF v, int i, int) { store(y + i, at.value(v)); });
  }
  template <class C>
  static KHOT_PASS void densities_of(const void* self, Threshold t, double tau, const float* x, int count,
                                     float* f, float* z) {
    const Level<float, C> at(*static_cast<const C*>(self), t, tau);
    vectors<float>(x, count, 0, [&](VecF v, int i, int) {
      VecF here;
      store(f + i, at.density(v, here)), store(z + i, here);
    });
  }

  const void* self_;
  void (*values_)(const void*, Threshold, double, const float*, int, float*);
  void (*densities_)(const void*, Threshold, double, const float*, int, float*, float*);
};

// The same of doubles.
class DoubleLevel {
 public:
  using R = double;

  template <class C>
  explicit DoubleLevel(const C& F) : F_(F) {}
  bool fits_float() const { return F_.fits_float; }

  void values(Threshold t, double tau, const double* x, int count, double* y) const {
    double z[kRoom], f[kRoom];
    F_.tails(Position<double>(t, tau, false), x, x, count, z, y, f);
    for (int i = 0; i < count; ++i) {
      if (z[i] > F_.median) y[i] = 1 - y[i];
      if (x[i] != x[i]) y[i] = kNan;
    }
  }
  void densities(Threshold t, double tau, const double* x, int count, double* f, double* z) const {
    double tail[kRoom];
    F_.tails(Position<double>(t, tau, false), x, x, count, z, tail, f);
    for (int i = 0; i < count; ++i) {
      if (!(std::fabs(x[i]) < kInfinity)) f[i] = x[i] != x[i] ? kNan : 0;
    }
  }

 private:
  static constexpr int kRoom = static_cast<int>(kShareBlock) + kWidth<double>;
  BlockCdf F_;
};

// The entries of one row that a call computes.
struct ShareBlock {
  int64_t row, begin;
  int count;
};

inline ShareBlock share_block(const ShareSpec& spec, int64_t index) {
  const int64_t blocks = share_blocks(spec.n), begin = index % blocks * kShareBlock;
  return {index / blocks, begin, static_cast<int>(std::min(kShareBlock, spec.n - begin))};
}

inline bool at_an_end(Threshold t) { return std::fabs(t.hi) == kInfinity; }

template <class At, class R = typename At::R>
KHOT_APART void shares_of(const At& F, const ShareSpec& spec, const ShareRows& rows,
                          const ShareBlock& block) {
  constexpr int kRoom = static_cast<int>(kShareBlock) + kWidth<R>;
  R buffer[kShareBlock], values[2][kRoom], results[kRoom];
  const Row x = rows.x(block.row);
  const bool own = x.dtype == (sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble);
  const R* const p = fetch(x, block.begin, block.count, buffer);
  R *before = values[0], *now = values[1];
  std::fill(before, before + block.count, R(0));
  for (int64_t j = 1; j < spec.levels; ++j) {
    const Threshold t = rows.level(block.row, j);
    if (at_an_end(t)) {
      std::fill(now, now + block.count, R(t.hi > 0 ? 0 : 1));
    } else {
      F.values(t, rows.tau(block.row), p, block.count, now);
    }
    void* const out = rows.out(block.row, j - 1);
    R* const target = own ? static_cast<R*>(out) + block.begin : results;
    for (int i = 0; i < block.count; ++i) target[i] = now[i] - before[i];
    if (!own) put(out, x.dtype, block.begin, block.count, results);
    std::swap(before, now);
  }
}

// dL/dx of the block; dL/dt and dL/dtau as far as its entries go.
template <class At, class R = typename At::R>
KHOT_APART void shares_gradients(const At& F, const ShareSpec& spec, const ShareRows& rows,
                                 const ShareBlock& block, int64_t index) {
  constexpr int64_t kTogether = 8;  // thresholds whose gradients are added in R
  constexpr int kRoom = static_cast<int>(kShareBlock) + kWidth<R>;
  R buffer[kShareBlock], f[kRoom], z[kRoom], part[kRoom], grads[2][kShareBlock];
  double total[kShareBlock], turned = 0;
  const double tau = rows.tau(block.row);
  const int count = block.count;
  const Row x = rows.x(block.row);
  const R* const p = fetch(x, block.begin, count, buffer);
  const R* above = fetch(rows.grad(block.row, 0), block.begin, count, grads[0]);
  std::fill(total, total + count, 0.0);
  std::fill(part, part + kRoom, R(0));
  auto flush = [&] {
    for (int i = 0; i < count; ++i) total[i] += static_cast<double>(part[i]), part[i] = 0;
  };
  for (int64_t j = 1; j + 1 < spec.levels; ++j) {
    const R* const below = fetch(rows.grad(block.row, j), block.begin, count, grads[j % 2]);
    const Threshold t = rows.level(block.row, j);
    double moved = 0;
    if (!at_an_end(t)) {
      F.densities(t, tau, p, count, f, z);
      Vec<R> f_sum{}, fz_sum{};
      vectors<R>(f, count, R(0), [&](Vec<R> density, int i, int lanes) {
        const bool full = lanes == kWidth<R>;
        const Vec<R> up = full ? load(above + i) : load_part(above + i, lanes, R(0)),
                     down = full ? load(below + i) : load_part(below + i, lanes, R(0)),
                     along = density * (up - down);
        f_sum += along;
        fz_sum += density != 0 ? along * load(z + i) : Vec<R>{};  // z may be infinite
        store(part + i, load(part + i) + along);
      });
      moved = static_cast<double>(sum<R>(f_sum));
      turned += static_cast<double>(sum<R>(fz_sum));
    }
    rows.put(index, j, -moved / tau);
    above = below;
    if (j % kTogether == 0) flush();
  }
  flush();
  for (int i = 0; i < count; ++i) total[i] /= tau;
  put(rows.grad_x(block.row), x.dtype, block.begin, count, total);
  rows.put_tau(index, -turned / tau);
}

inline bool shares_in_float(const ShareSpec& spec, const ShareRows& rows, int64_t row) {
  const double tau = rows.tau(row);
  bool fits = rows.x(row).dtype != Dtype::kDouble && tau > 1e-25 && tau < 1e25;
  for (int64_t j = 1; fits && j + 1 < spec.levels; ++j) {
    const double t = rows.level(row, j).hi;
    fits = std::fabs(t) == kInfinity || (std::fabs(t) < 1e30 && std::fabs(t / tau) < 1e30);
  }
  return fits;
}

// The blocks [begin, end) of all rows: the shares, or their gradients.
inline KHOT_APART void each_share_block(const ShareSpec& spec, const ShareRows& rows, int64_t begin,
                                        int64_t end, const FloatLevel& narrow, const DoubleLevel& wide,
                                        bool backward) {
  const FlushSubnormals flush(rows.x(0).dtype != Dtype::kDouble);
  for (int64_t i = begin; i < end; ++i) {
    const ShareBlock block = share_block(spec, i);
    if (wide.fits_float() && shares_in_float(spec, rows, block.row)) {
      backward ? shares_gradients(narrow, spec, rows, block, i) : shares_of(narrow, spec, rows, block);
    } else {
      backward ? shares_gradients(wide, spec, rows, block, i) : shares_of(wide, spec, rows, block);
    }
  }
}

inline void shares(const ShareSpec& spec, const ShareRows& rows, int64_t begin, int64_t end, bool backward) {
  with_cdf(spec, [&](auto F) {
    each_share_block(spec, rows, begin, end, FloatLevel(F), DoubleLevel(F), backward);
  });
}

}  // namespace khot::KHOT_ISA
