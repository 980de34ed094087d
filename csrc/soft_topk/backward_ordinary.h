// The gradients of one row from sums of f, in float where that carries the row and otherwise in double.
#pragma once

#include <cmath>

#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

struct GradientSums {
  double f = 0, fz = 0, fv = 0, fzv = 0, y = 0;
  void operator+=(const GradientSums& o) { f += o.f, fz += o.fz, fv += o.fv, fzv += o.fzv, y += o.y; }
};

// kUnreliable: the densities are too small. kFlat: all densities are 0.
enum class Gradients { kWritten, kUnreliable, kFlat };

// The gradients of y, of log y or, with v = 0, of t alone. x is what Density takes f from.
// The gradients are written only if the densities are large enough.
template <class Density>
Gradients backward_ordinary(const Spec& spec, const Density& density, const Row& x, const Row& grad,
                            double grad_lo, double tau, void* grad_x, double& grad_k, double& grad_tau) {
  using R = typename Density::Real;
  constexpr bool in_float = std::is_same_v<R, float>;
  constexpr Dtype own_dtype = in_float ? Dtype::kFloat : Dtype::kDouble;
  const FlushSubnormals flush(in_float);
  // What the gradients are made of is kept in the place of the result between the passes, if the row is so
  // short that it is still in the cache then.
  const bool keep =
      Density::kKeeps && x.dtype == own_dtype && spec.n <= (1 << 20) / static_cast<int64_t>(sizeof(R));
  R* const kept = keep ? static_cast<R*>(grad_x) : nullptr;
  const GradientSums s = reduce<R, GradientSums>(
      x, spec.n, spec.inside, [=](GradientSums& sums, const R* p, int count, int64_t at) {
        R buffer[kBlock];
        const R* g = fetch(grad, at, count, buffer);
        typename Density::Sums parts;
        auto add = [&](Vec<R> v, int i, int lanes) {
          const Vec<R> now = density.density(v, beside(g, i, lanes), parts);
          if (keep) store_beside(kept + at, i, lanes, now);
        };
        if constexpr (Density::Sums::kLong) {
          vectors<R>(p, count, Density::kPad, add, [&] { parts.flush(); });
        } else {
          vectors<R>(p, count, Density::kPad, add);
        }
        sums.f += sum<R>(parts.f), sums.fz += sum<R>(parts.fz), sums.y += sum<R>(parts.y);
        sums.fv += parts.v_total(), sums.fzv += parts.zv_total();
      });
  if (!Density::reliable(s.f, s.y, spec.n)) return s.f == 0 ? Gradients::kFlat : Gradients::kUnreliable;
  if (in_float && loses_products(s.f, s.fv, grad, spec.n, spec.inside)) return Gradients::kUnreliable;
  const double v_mean = s.fv / s.f, z_mean = s.fz / s.f;
  if (in_float && !(std::fabs(v_mean) < 1e38)) return Gradients::kUnreliable;
  grad_k = density.of_k(v_mean) - (grad_lo == 0 ? 0 : grad_lo * tau / s.f);
  if constexpr (Density::kMoments) {
    grad_tau = (s.fv * z_mean - s.fzv) * density.slope(tau) - grad_lo * z_mean;
  }
  // dL/dx = f (v - mean)/tau + f grad_lo/sum f
  const R offset = static_cast<R>(v_mean - grad_lo * tau / s.f);
  const Row source = keep ? Row{grad_x, own_dtype, 1} : x;
  map_beside<R>(source, grad, spec.n, spec.inside, grad_x, x.dtype,
                [=](Vec<R> v, Vec<R> g) { return density.gradient(keep ? v : density.kept(v), g, offset); });
  return Gradients::kWritten;
}

}  // namespace khot::KHOT_ISA
