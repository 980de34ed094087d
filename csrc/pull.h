// The gradients of y: what they are made of, and in float those of short rows, as many at once as a vector has lanes.
//
// With z = (x - t)/tau, f = f(z) and v the incoming gradient, sums of f, fz, fv and fzv give all that a row needs.
#pragma once

#include <cmath>

#include "cdfs.h"
#include "passes.h"

namespace khot::KHOT_ISA {

// Of f over a row: below, their products with v and z lose digits.
template <class R>
constexpr double kLeastMass = sizeof(R) == 4 ? 1e-20 : 1e-100;

template <class R>
struct PullSums {
  Vec<R> f{}, fz{}, fv{}, fzv{}, y{};
};

template <class R, class C>
struct PullOf {
  using Real = R;
  C F;
  R hi, lo, scale;

  PullOf(const C& F, Threshold t, double tau)
      : F(F), hi(static_cast<R>(t.hi)), lo(static_cast<R>((t.hi - hi) + t.lo)), scale(static_cast<R>(1 / tau)) {}

  KHOT_INLINE Vec<R> standardized(Vec<R> x) const { return ((x - hi) - lo) * scale; }

  // f, which is added to the sums with its products.
  KHOT_INLINE Vec<R> density(Vec<R> x, Vec<R> v, PullSums<R>& sums) const {
    const Vec<R> z = standardized(x), f = F.template density<R>(z);
    const Vec<R> fz = f > 0 ? f * z : Vec<R>{};  // z may be infinite
    sums.f += f;
    sums.fz += fz;
    sums.fv += f * v;
    sums.fzv += fz * v;
    return f;
  }
  KHOT_INLINE Vec<R> density(Vec<R> x) const { return F.template density<R>(standardized(x)); }

  static bool reliable(double mass, double /*y*/) { return mass > kLeastMass<R>; }
};

// The same of y in place of x, in float, which needs no exponentials; fz and fzv are left out, and so is d/dtau.
template <class C>
struct PullOfOutput {
  using Real = float;
  static constexpr bool serves = std::is_same_v<C, Logistic> || std::is_same_v<C, Laplace>;
  float scale;

  PullOfOutput(const C&, Threshold, double tau) : scale(static_cast<float>(1 / tau)) {}

  KHOT_INLINE VecF density(VecF y, VecF v, PullSums<float>& sums) const {
    const VecF f = density(y);
    sums.f += f;
    sums.fv += f * v;
    sums.y += y;
    return f;
  }
  KHOT_INLINE VecF density(VecF y) const {
    const VecF rest = 1 - y;
    return std::is_same_v<C, Logistic> ? y * rest : rest < y ? rest : y;
  }

  // Of a y near 1 the rounding error is as large in f. Of all of them together it is less than a millionth.
  static bool reliable(double mass, double y) { return mass > kLeastMass<float> && 16 * mass > y; }
};

// Row by row, the sums across lanes and the numbers a row would take longer than the passes.
template <class C>
class ShortPull {
 public:
  static constexpr int width = kWidth<float>;

  ShortPull(const Spec& spec, const C& F) : F_(F), n_(static_cast<int>(spec.n)) {}

  // Writes the gradients of the rows from `first` on, `width` of them; done[i] says whether those of first + i.
  void pull(const BackwardRows& rows, int64_t first, bool* done) {
    if constexpr (PullOfOutput<C>::serves) {
      if (rows.y(first).data != nullptr) {
        return pull<PullOfOutput<C>>(rows, first, done, [&](int64_t row) { return rows.y(row); });
      }
    }
    pull<PullOf<float, C>>(rows, first, done, [&](int64_t row) { return rows.x(row); });
  }

 private:
  // source(row): what Pull is made of
  template <class Pull, class Source>
  void pull(const BackwardRows& rows, int64_t first, bool* done, Source source) {
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
      const Pull row(F_, t, own_tau);
      tau[j] = static_cast<float>(own_tau), scale[j] = row.scale;
      grad_lo[j] = static_cast<float>(rows.grad_lo(first + j));
      const float* x = fetch(source(first + j), 0, n_, x_);
      const float* g = grads[j] = fetch(rows.grad(first + j), 0, n_, grads_ + j * kShort);
      PullSums<float> sums;
      vectors<float>(x, n_, -kInf<float>, [&](VecF v, int i, int lanes) {
        const bool whole = lanes == width;
        store(f_ + j * kShort + i, row.density(v, whole ? load(g + i) : load_part(g + i, lanes, 0.0f), sums));
      });
      f[j] = sums.f, fz[j] = sums.fz, fv[j] = sums.fv, fzv[j] = sums.fzv, y[j] = sums.y;
    }
    const VecF mass = sums_of(f), y_sum = sums_of(y), v_sum = sums_of(fv);
    const VecF safe = mass > static_cast<float>(kLeastMass<float>) ? mass : splat(1.0f);
    const VecF v_mean = v_sum / safe, z_mean = sums_of(fz) / safe, through_t = grad_lo * tau / safe;
    const VecF grad_k = v_mean - through_t, grad_tau = (v_sum * z_mean - sums_of(fzv)) / tau - grad_lo * z_mean;
    for (int j = 0; j < width; ++j) {
      done[j] = fits[j] && Pull::reliable(mass[j], y_sum[j]);
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

  C F_;
  int n_;
  alignas(KHOT_VECTOR_BYTES) float f_[kShort * width], grads_[kShort * width], x_[kShort];
};

}  // namespace khot::KHOT_ISA
