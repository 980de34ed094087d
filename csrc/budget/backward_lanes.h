// The gradients of short rows under a budget in float, as many rows at once as a vector has lanes, as in
// soft_topk/backward_lanes.h: the passes go row by row, and their sums, one row per lane, give the per-row
// scalars of all rows together.
#pragma once

#include "budget/block_cdf.h"
#include "budget/weights.h"
#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

class LaneBudgetBackward {
 public:
  static constexpr int width = kWidth<float>;

  LaneBudgetBackward(const BudgetSpec& spec, const BlockCdf& F)
      : F_(F), n_(static_cast<int>(spec.n)), by_value_(spec.by_value) {}

  // Writes the gradients of the rows first, ..., first + width - 1. done[i] says whether those of row first +
  // i are written; float does not carry the others.
  KHOT_PASS void run(const BudgetBackwardRows& rows, int64_t first, bool* done) {
    const FlushSubnormals flush;
    const float *costs[width], *grads[width];
    VecF mass[width], mean[width], moment[width], pull[width], tau, grad_lo;
    float scale[width], level[width];
    bool fits[width];
    const float median = static_cast<float>(F_.median);
    for (int j = 0; j < width; ++j) {
      const Threshold t = rows.threshold(first + j);
      const double own_tau = rows.tau(first + j);
      tau[j] = static_cast<float>(own_tau), scale[j] = static_cast<float>(1 / own_tau);
      grad_lo[j] = static_cast<float>(rows.grad_lo(first + j));
      level[j] = static_cast<float>(t.hi + t.lo);
      const Position<float> position(t, own_tau, by_value_, F_.full_support);
      const float* x = fetch(rows.x(first + j), 0, n_, x_);
      const float* w = costs[j] = fetch(rows.cost(first + j), 0, n_, costs_ + j * kShortRow);
      const float* g = grads[j] = fetch(rows.grad(first + j), 0, n_, grads_ + j * kShortRow);
      float *const f = f_ + j * kShortRow, *const y = y_ + j * kShortRow;
      IntF infinite{};
      mass[j] = mean[j] = moment[j] = pull[j] = VecF{};
      F_.tails(position, x, w, n_, z_, y, f);
      vectors<float>(x, n_, 0.0f, [&](VecF score, int i, int lanes) {
        const VecF a = beside(w, i, lanes), v = beside(g, i, lanes), z = load(z_ + i), tail = load(y + i);
        const IntF absent = score == -kInf<float>;
        infinite |= ~(score < kInf<float>);
        store(y + i, absent ? VecF{} : z > median ? 1 - tail : tail);
        const VecF density = absent ? VecF{} : load(f + i), af = a * density, fv = density * v;
        store(f + i, density);
        mass[j] += af * position.a(a);
        mean[j] += fv * position.a(a);
        moment[j] += af * z;
        pull[j] += fv * z;
      });
      fits[j] = std::fabs(t.hi) < 1e30 && own_tau > 1e-25 && own_tau < 1e25 && !any(infinite);
    }
    const VecF total = sums_of(mass), moments = sums_of(moment), pulls = sums_of(pull);
    constexpr float least = static_cast<float>(kLeastMass<float>);
    const IntF carried = (total > least) & (total < 1 / least);
    const VecF price = (sums_of(mean) - grad_lo * tau) / (carried ? total : splat(1.0f));
    const VecF grad_tau = (price * moments - pulls) / tau;
    const IntF good =
        carried & (abs<float>(price) < 1e30f) & (abs<float>(moments) + abs<float>(pulls) < kInf<float>);
    // By value, dL/dw has t times what is left of v - w m, which is only rounding where one entry moves.
    VecF rest{};
    if (by_value_) {
      VecF off[width];
      for (int j = 0; j < width; ++j) {
        const float *const f = f_ + j * kShortRow, *const w = costs[j];
        const float m = price[j];
        off[j] = VecF{};
        vectors<float>(grads[j], n_, 0.0f, [&](VecF v, int i, int lanes) {
          const VecF a = beside(w, i, lanes);
          off[j] += a * load(f + i) * (v - a * m);
        });
      }
      rest = (sums_of(off) - grad_lo * tau) / (carried ? total : splat(1.0f));
    }
    const Dtype dtype = rows.x(first).dtype, cost_dtype = rows.cost(first).dtype;
    const bool direct = dtype == Dtype::kFloat, direct_cost = cost_dtype == Dtype::kFloat;
    for (int j = 0; j < width; ++j) {
      done[j] = fits[j] && good[j];
      if (!done[j]) continue;
      rows.put(first + j, price[j], grad_tau[j]);
      float *const to_x = direct ? static_cast<float*>(rows.grad_x(first + j)) : x_,
                   *const to_cost = direct_cost ? static_cast<float*>(rows.grad_cost(first + j)) : dw_;
      const float *const f = f_ + j * kShortRow, *const y = y_ + j * kShortRow;
      const float factor = scale[j], m = price[j], lo = rest[j], t = level[j];
      const IntF by_value = by_value_ ? ~IntF{} : IntF{};
      vectors<float>(grads[j], n_, 0.0f, [&](VecF v, int i, int lanes) {
        const VecF w = beside(costs[j], i, lanes), dx = load(f + i) * ((v - w * m) - w * lo) * factor;
        const VecF dw = -m * load(y + i) - (by_value ? t * dx : VecF{});
        store_beside(to_x, i, lanes, dx);
        store_beside(to_cost, i, lanes, dw);
      });
      if (!direct) put(rows.grad_x(first + j), dtype, 0, n_, to_x);
      if (!direct_cost) put(rows.grad_cost(first + j), cost_dtype, 0, n_, to_cost);
    }
  }

 private:
  BlockCdf F_;
  int n_;
  bool by_value_;
  alignas(KHOT_VECTOR_BYTES) float f_[kShortRow * width], y_[kShortRow * width], costs_[kShortRow * width],
      grads_[kShortRow * width], x_[kShortRow], z_[kShortRow], dw_[kShortRow];
};

}  // namespace khot::KHOT_ISA
