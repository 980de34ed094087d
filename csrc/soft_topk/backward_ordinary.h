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

// The gradients of y or, with v = 0, of t alone; or those of log y in double. x is what Density takes f from.
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
  const bool own = x.dtype == own_dtype;
  const bool keep = Density::kKeeps && own && spec.n <= (1 << 20) / static_cast<int64_t>(sizeof(R));
  R* const kept = keep ? static_cast<R*>(grad_x) : nullptr;
  const GradientSums s = reduce<R, GradientSums>(
      x, spec.n, spec.inside, [=](GradientSums& sums, const R* p, int count, int64_t at) {
        R buffer[kBlock];
        const R* g = fetch(grad, at, count, buffer);
        DensitySums<R> parts;
        vectors<R>(p, count, Density::kPad, [&](Vec<R> v, int i, int lanes) {
          const bool whole = lanes == kWidth<R>;
          const Vec<R> now = density.density(v, whole ? load(g + i) : load_part(g + i, lanes, R(0)), parts);
          if (keep) whole ? store(kept + at + i, now) : store_part(kept + at + i, lanes, now);
        });
        sums.f += sum<R>(parts.f), sums.fz += sum<R>(parts.fz);
        sums.fv += sum<R>(parts.fv), sums.fzv += sum<R>(parts.fzv), sums.y += sum<R>(parts.y);
      });
  if (!Density::reliable(s.f, s.y, spec.n)) return s.f == 0 ? Gradients::kFlat : Gradients::kUnreliable;
  const double v_mean = s.fv / s.f, z_mean = s.fz / s.f;
  grad_k = v_mean - (grad_lo == 0 ? 0 : grad_lo * tau / s.f);
  grad_tau = (s.fv * z_mean - s.fzv) / tau - grad_lo * z_mean;
  // dL/dx = f (v - mean)/tau + f grad_lo/sum f
  const R offset = static_cast<R>(v_mean - grad_lo * tau / s.f);
  const Row source = keep ? Row{grad_x, own_dtype, 1} : x;
  chunks(spec.n, spec.inside, [&](int64_t begin, int64_t end, int64_t) {
    R from[kBlock], incoming[kBlock], results[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const R* p = fetch(source, at, count, from);
      const R* g = fetch(grad, at, count, incoming);
      R* const target = own ? static_cast<R*>(grad_x) + at : results;
      vectors<R>(p, count, R(0), [&](Vec<R> v, int i, int lanes) {
        const bool whole = lanes == kWidth<R>;
        const Vec<R> kept = keep ? v : density.kept(v);
        const Vec<R> value =
            density.gradient(kept, whole ? load(g + i) : load_part(g + i, lanes, R(0)), offset);
        whole ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!own) put(grad_x, x.dtype, at, count, results);
    }
  });
  return Gradients::kWritten;
}

// The gradients of log y in float, in which f/F takes the place of f. Returns false where the densities are
// too small, and then nothing is written.
template <class C>
bool backward_ordinary_log(const Spec& spec, const C& F, const Row& x, const Row& grad, double grad_lo,
                           double tau, Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  const FlushSubnormals flush;
  const LogDensity<float, C> density(F, t, tau);
  // The states are kept in the place of the result between the passes, as in backward_ordinary().
  const bool own = x.dtype == Dtype::kFloat, keep = own && spec.n <= 1 << 18;
  float* const kept = keep ? static_cast<float*>(grad_x) : nullptr;
  auto load_grad = [](const float* g, int i, int lanes) {
    return lanes == kWidth<float> ? load(g + i) : load_part(g + i, lanes, 0.0f);
  };
  const GradientSums s = reduce<float, GradientSums>(
      x, spec.n, spec.inside, [=](GradientSums& sums, const float* p, int count, int64_t at) {
        float buffer[kBlock];
        const float* g = fetch(grad, at, count, buffer);
        VecF f_sum{}, fz{};
        LongSum u_sum, uz;
        auto add = [&](VecF v, int i, int lanes) {
          const VecF z = density.standardized(v), now = density.state(z);
          if (keep)
            lanes == kWidth<float> ? store(kept + at + i, now) : store_part(kept + at + i, lanes, now);
          VecF f;
          const VecF u = load_grad(g, i, lanes) * C::log_slope(now, f);
          f_sum += f;
          fz += f > 0 ? f * z : VecF{};
          u_sum.add(u);
          uz.add(u != 0 ? u * z : VecF{});
        };
        vectors<float>(p, count, -kInf<float>, add, [&] { u_sum.flush(), uz.flush(); });
        sums.f += sum<float>(f_sum), sums.fz += sum<float>(fz);
        sums.fv += sum<double>(u_sum.total), sums.fzv += sum<double>(uz.total);
      });
  if (!density.reliable(s.f, 0, spec.n)) return false;
  const double z_mean = s.fz / s.f;
  grad_k = s.fv / s.f - (grad_lo == 0 ? 0 : grad_lo * tau / s.f);
  grad_tau = (s.fv * z_mean - s.fzv) / tau - grad_lo * z_mean;
  const float offset = static_cast<float>(s.fv / s.f - grad_lo * tau / s.f);
  const Row source = keep ? Row{grad_x, Dtype::kFloat, 1} : x;
  chunks(spec.n, spec.inside, [&](int64_t begin, int64_t end, int64_t) {
    float from[kBlock], incoming[kBlock], results[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const float *p = fetch(source, at, count, from), *g = fetch(grad, at, count, incoming);
      float* const target = own ? static_cast<float*>(grad_x) + at : results;
      vectors<float>(p, count, 0.0f, [&](VecF v, int i, int lanes) {
        const VecF kept = keep ? v : density.state(density.standardized(v)),
                   value = density.gradient(kept, load_grad(g, i, lanes), offset);
        lanes == kWidth<float> ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!own) put(grad_x, x.dtype, at, count, results);
    }
  });
  return true;
}

}  // namespace khot::KHOT_ISA
