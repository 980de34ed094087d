// The gradients of short rows in float, as many rows at once as a vector has lanes.
//
// The passes go row by row. Their sums are then gathered, one row per lane, and the per-row scalars of all
// rows computed together: row by row, the sums across lanes and these scalars would take longer than the
// passes.
#pragma once

#include <cmath>

#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

template <class C>
class LaneBackward {
 public:
  static constexpr int width = kWidth<float>;

  LaneBackward(const Spec& spec, const C& F)
      : F_(F), n_(static_cast<int>(spec.n)), threshold_(spec.output == Output::kThreshold) {}

  // Writes the gradients of the rows first, ..., first + width - 1. done[i] says whether those of row first +
  // i are written; float does not carry the others.
  void run(const BackwardRows& rows, int64_t first, bool* done) {
    if constexpr (C::density_from_value) {
      if (rows.y(first).data != nullptr) {
        return run<ValueDensity<C>>(rows, first, done, [&](int64_t row) { return rows.y(row); });
      }
    }
    run<ScoreDensity<float, C>>(rows, first, done, [&](int64_t row) { return rows.x(row); });
  }

 private:
  // source(row) is what Density takes f from.
  template <class Density, class Source>
  void run(const BackwardRows& rows, int64_t first, bool* done, Source source) {
    const FlushSubnormals flush;
    const Dtype dtype = rows.x(first).dtype;
    const bool direct = dtype == Dtype::kFloat;
    const float* grads[width];
    VecF f[width], fz[width], fv[width], fzv[width], y[width], tau, grad_lo;
    float scale[width];
    bool fits[width];
    for (int j = 0; j < width; ++j) {
      const Threshold t = rows.threshold(first + j);
      const double own_tau = rows.tau(first + j);
      fits[j] = std::fabs(t.hi) < 1e38 && own_tau > 1e-25 && own_tau < 1e25;
      const Density row(F_, t, own_tau);
      tau[j] = static_cast<float>(own_tau), scale[j] = row.scale;
      grad_lo[j] = static_cast<float>(rows.grad_lo(first + j));
      const float* x = fetch(source(first + j), 0, n_, x_);
      const double none = 0;  // the gradient of y where only t is wanted
      const Row grad = threshold_ ? Row{&none, Dtype::kDouble, 0} : rows.grad(first + j);
      const float* g = grads[j] = fetch(grad, 0, n_, grads_ + j * kShortRow);
      DensitySums<float> sums;
      vectors<float>(x, n_, -kInf<float>, [&](VecF v, int i, int lanes) {
        const bool whole = lanes == width;
        store(f_ + j * kShortRow + i,
              row.density(v, whole ? load(g + i) : load_part(g + i, lanes, 0.0f), sums));
      });
      f[j] = sums.f, fz[j] = sums.fz, fv[j] = sums.fv, fzv[j] = sums.fzv, y[j] = sums.y;
    }
    const VecF mass = sums_of(f), y_sum = sums_of(y), v_sum = sums_of(fv);
    const VecF safe = mass > static_cast<float>(kLeastMass<float>) ? mass : splat(1.0f);
    const VecF v_mean = v_sum / safe, z_mean = sums_of(fz) / safe, through_t = grad_lo * tau / safe;
    const VecF grad_k = v_mean - through_t,
               grad_tau = (v_sum * z_mean - sums_of(fzv)) / tau - grad_lo * z_mean;
    for (int j = 0; j < width; ++j) {
      done[j] = fits[j] && Density::reliable(mass[j], y_sum[j]);
      if (!done[j]) continue;
      rows.put(first + j, grad_k[j], grad_tau[j]);
      float* const target = direct ? static_cast<float*>(rows.grad_x(first + j)) : x_;
      const float factor = scale[j], offset = grad_k[j];  // dL/dx = f (v - mean)/tau + f grad_lo/sum f
      vectors<float>(grads[j], n_, 0.0f, [&](VecF v, int i, int lanes) {
        const VecF value = load(f_ + j * kShortRow + i) * factor * (v - offset);
        lanes == width ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!direct) put(rows.grad_x(first + j), dtype, 0, n_, target);
    }
  }

  C F_;
  int n_;
  bool threshold_;
  alignas(KHOT_VECTOR_BYTES) float f_[kShortRow * width], grads_[kShortRow * width], x_[kShortRow];
};

}  // namespace khot::KHOT_ISA
