// The gradients of y in float: what they are made of, and those of short rows, as many at once as a vector has lanes.
//
// With z = (x - t)/tau, f = f(z) and v the incoming gradient, sums of f, fz, fv and fzv give all that a row needs.
#pragma once

#include <cmath>

#include "cdfs.h"
#include "passes.h"

namespace khot::KHOT_ISA {

constexpr float kLeastMass = 1e-20f;  // of f over a row: below, float has lost it

struct PullSums {
  VecF f{}, fz{}, fv{}, fzv{};
};

template <class C>
struct PullOf {
  C F;
  float hi, lo, scale;

  PullOf(const C& F, Threshold t, double tau)
      : F(F),
        hi(static_cast<float>(t.hi)),
        lo(static_cast<float>((t.hi - hi) + t.lo)),
        scale(static_cast<float>(1 / tau)) {}

  KHOT_INLINE VecF standardized(VecF x) const { return ((x - hi) - lo) * scale; }

  // f, which is added to the sums with its products.
  KHOT_INLINE VecF density(VecF x, VecF v, PullSums& sums) const {
    const VecF z = standardized(x), f = F.template density<float>(z);
    const VecF fz = f > 0 ? f * z : VecF{};  // z may be infinite
    sums.f += f;
    sums.fz += fz;
    sums.fv += f * v;
    sums.fzv += fz * v;
    return f;
  }
};

// Row by row, the sums across lanes and the numbers a row would take longer than the passes.
template <class C>
class ShortPull {
 public:
  static constexpr int width = kWidth<float>;

  ShortPull(const Spec& spec, const C& F) : F_(F), n_(static_cast<int>(spec.n)) {}

  // Writes the gradients of the rows from `first` on, `width` of them; done[i] says whether those of first + i.
  void pull(const BackwardRows& rows, int64_t first, bool* done) {
    const FlushSubnormals flush;
    const Dtype dtype = rows.x(first).dtype;
    const bool direct = dtype == Dtype::kFloat;
    const float* grads[width];
    VecF f[width], fz[width], fv[width], fzv[width], tau, grad_lo;
    float scale[width];
    bool fits[width];
    for (int j = 0; j < width; ++j) {
      const Threshold t = rows.threshold(first + j);
      const double own_tau = rows.tau(first + j);
      fits[j] = std::fabs(t.hi) < 1e38 && own_tau > 1e-25 && own_tau < 1e25;
      const PullOf<C> row(F_, t, own_tau);
      tau[j] = static_cast<float>(own_tau), scale[j] = row.scale;
      grad_lo[j] = static_cast<float>(rows.grad_lo(first + j));
      const float* x = fetch(rows.x(first + j), 0, n_, x_);
      const float* g = grads[j] = fetch(rows.grad(first + j), 0, n_, grads_ + j * kShort);
      PullSums sums;
      vectors<float>(x, n_, -kInf<float>, [&](VecF v, int i, int lanes) {
        const bool whole = lanes == width;
        store(f_ + j * kShort + i, row.density(v, whole ? load(g + i) : load_part(g + i, lanes, 0.0f), sums));
      });
      f[j] = sums.f, fz[j] = sums.fz, fv[j] = sums.fv, fzv[j] = sums.fzv;
    }
    const VecF mass = sums_of(f), safe = mass > kLeastMass ? mass : splat(1.0f), v_sum = sums_of(fv);
    const VecF v_mean = v_sum / safe, z_mean = sums_of(fz) / safe, through_t = grad_lo * tau / safe;
    const VecF grad_k = v_mean - through_t, grad_tau = (v_sum * z_mean - sums_of(fzv)) / tau - grad_lo * z_mean;
    for (int j = 0; j < width; ++j) {
      done[j] = fits[j] && mass[j] > kLeastMass;
      if (!done[j]) continue;
      rows.put(first + j, grad_k[j], grad_tau[j]);
      float* const target = direct ? static_cast<float*>(rows.grad_x(first + j)) : x_;
      const float factor = scale[j], offset = grad_k[j];  // dL/dx = f (v - mean)/tau + f grad_lo/sum f
      vectors<float>(grads[j], n_, 0.0f, [&](VecF v, int i, int lanes) {
        const VecF value = load(f_ + j * kShort + i) * factor * (v - offset);
        lanes == width ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!direct) put(rows.grad_x(first + j), dtype, 0, n_, target);
    }
  }

 private:
  C F_;
  int n_;
  alignas(KHOT_VECTOR_BYTES) float f_[kShort * width], grads_[kShort * width], x_[kShort];
};

}  // namespace khot::KHOT_ISA
