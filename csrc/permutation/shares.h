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

// What a block of entries has of the places before a threshold, and what is left of them: F and 1 - F, both
// to the last digit.
template <class R>
struct Halves {
  static constexpr int kRoom = static_cast<int>(kShareBlock) + kWidth<R>;
  R below[kRoom], rest[kRoom];

  void fill(int count, R value) {
    std::fill(below, below + count, value), std::fill(rest, rest + count, 1 - value);
  }
};

// F of a block of floats at a threshold and its rise between two, or f and z. The results have room for one
// vector more.
template <class C>
struct FloatLevel {
  using R = float;
  const C& F;

  // Whether the rise is a product. A difference of floats near 1 would lose the digits of a small share.
  static constexpr bool has_rise = C::rise_is_product;

  void values(Threshold t, double tau, const float* x, int count, Halves<float>& y) const {
    const Level<float, C> at(F, t, tau);
    vectors<float>(x, count, 0, [&](VecF v, int i, int) {
      VecF rest;
      store(y.below + i, at.value(v, rest)), store(y.rest + i, rest);
    });
  }
  // F at the lower threshold minus F at the upper one, where `share` is 1 - exp(-z) of their distance z.
  void rise(const Halves<float>& upper, const Halves<float>& lower, float share, int count,
            float* out) const {
    vectors<float>(lower.below, count, 0, [&](VecF below, int i, int lanes) {
      const VecF rise =
          C::rise(load(upper.below + i), load(upper.rest + i), below, load(lower.rest + i), share);
      store_beside(out, i, lanes, rise);
    });
  }
  void densities(Threshold t, double tau, const float* x, int count, float* f, float* z) const {
    const Level<float, C> at(F, t, tau);
    vectors<float>(x, count, 0, [&](VecF v, int i, int) {
      VecF here;
      store(f + i, at.density(v, here)), store(z + i, here);
    });
  }
};

// The same of doubles.
class DoubleLevel {
 public:
  using R = double;

  template <class C>
  explicit DoubleLevel(const C& F) : F_(F) {}
  bool fits_float() const { return F_.fits_float; }

  void values(Threshold t, double tau, const double* x, int count, Halves<double>& halves) const {
    double z[kRoom], f[kRoom], *const y = halves.below;
    F_.tails(Position<double>(t, tau, false), x, x, count, z, y, f);
    for (int i = 0; i < count; ++i) {
      if (z[i] > F_.median) y[i] = 1 - y[i];
      if (x[i] != x[i]) y[i] = kNan;
    }
  }
  void rise(const Halves<double>& upper, const Halves<double>& lower, double /*share*/, int count,
            double* out) const {
    for (int i = 0; i < count; ++i) out[i] = lower.below[i] - upper.below[i];
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
KHOT_PASS void shares_of(const At& F, const ShareSpec& spec, const ShareRows& rows, const ShareBlock& block) {
  R buffer[kShareBlock], results[kShareBlock];
  Halves<R> values[2], *above = &values[0], *now = &values[1];
  const double tau = rows.tau(block.row);
  const Row x = rows.x(block.row);
  const bool own = x.dtype == (sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble);
  const R* const p = fetch(x, block.begin, block.count, buffer);
  Threshold last{kInfinity, 0};
  above->fill(block.count, 0);
  for (int64_t j = 1; j < spec.levels; ++j) {
    const Threshold t = rows.level(block.row, j);
    double share = 1;
    if (at_an_end(t)) {
      now->fill(block.count, t.hi > 0 ? 0 : 1);
    } else {
      F.values(t, tau, p, block.count, *now);
      if (!at_an_end(last)) share = -std::expm1(((t.hi - last.hi) + (t.lo - last.lo)) / tau);
    }
    void* const out = rows.out(block.row, j - 1);
    R* const target = own ? static_cast<R*>(out) + block.begin : results;
    F.rise(*above, *now, static_cast<R>(share), block.count, target);
    if (!own) put(out, x.dtype, block.begin, block.count, results);
    std::swap(above, now);
    last = t;
  }
}

// dL/dx of the block; dL/dt and dL/dtau as far as its entries go.
template <class At, class R = typename At::R>
KHOT_PASS void shares_gradients(const At& F, const ShareSpec& spec, const ShareRows& rows,
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
inline void shares(const ShareSpec& spec, const ShareRows& rows, int64_t begin, int64_t end, bool backward) {
  const FlushSubnormals flush(rows.x(0).dtype != Dtype::kDouble);
  with_cdf(spec, [&](auto F) {
    const DoubleLevel wide(F);
    for (int64_t i = begin; i < end; ++i) {
      const ShareBlock block = share_block(spec, i);
      const bool in_float = wide.fits_float() && shares_in_float(spec, rows, block.row);
      const FloatLevel<decltype(F)> narrow{F};
      if (backward) {
        in_float ? shares_gradients(narrow, spec, rows, block, i)
                 : shares_gradients(wide, spec, rows, block, i);
      } else if constexpr (narrow.has_rise) {
        in_float ? shares_of(narrow, spec, rows, block) : shares_of(wide, spec, rows, block);
      } else {
        shares_of(wide, spec, rows, block);
      }
    }
  });
}

}  // namespace khot::KHOT_ISA
