// The gradients of one row in double, whatever its densities.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/in_double.h"

namespace khot::KHOT_ISA {

struct EdgeSums {
  double up_count = 0, up = 0, down_count = 0, down = 0;
  // How far t follows each edge: half the way, or all of it where rounding has left no entry on the other
  // side.
  double up_part() const { return up_count == 0 ? 0 : down_count == 0 ? 1 : 0.5; }
  double down_part() const { return down_count == 0 ? 0 : up_count == 0 ? 1 : 0.5; }
  double up_mean() const { return up_count == 0 ? 0 : up / up_count; }
  double down_mean() const { return down_count == 0 ? 0 : down / down_count; }
  void operator+=(const EdgeSums& o) {
    up_count += o.up_count, up += o.up, down_count += o.down_count, down += o.down;
  }
};

// The edges of the gap of compact support that t lies in, how many entries there are at each, and the sums of
// v over them.
struct Gap {
  Edges at;
  EdgeSums sums;
};

inline Gap gap_around(const Spec& spec, const Row& x, const Row& grad, Threshold t) {
  const Edges edges = edges_around(x, spec.n, spec.inside, t);
  const EdgeSums s = reduce_beside<double, EdgeSums>(
      x, grad, spec.n, spec.inside, [=](EdgeSums& e, const double* p, const double* g, int count) {
        VecD up_count{}, up{}, down_count{}, down{};
        vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
          const VecD v = beside(g, i, lanes);
          const IntD finite = abs<double>(x) < kInfinity;
          const IntD above = finite & (x == edges.up), below = finite & (x == edges.down);
          up_count += above ? splat(1.0) : VecD{}, up += above ? v : VecD{};
          down_count += below ? splat(1.0) : VecD{}, down += below ? v : VecD{};
        });
        e += {sum<double>(up_count), sum<double>(up), sum<double>(down_count), sum<double>(down)};
      });
  return {edges, s};
}

// dL/dk where no entry has f > 0: the mean of v over the entries at both edges of the gap, as in
// khot/_kernels/reference/soft_topk.py. Rejected entries have log y = -inf.
inline double gap_gradient(const Spec& spec, const EdgeSums& s) {
  const double mean = s.up_part() * s.up_mean();
  return spec.output == Output::kValue ? mean + s.down_part() * s.down_mean() : mean;
}

// The gradients under compact support where no entry has f > 0. Those of y and of its logarithm are 0, and t
// = (up + down)/2 - tau/2, because the support is (0, 1).
inline void backward_in_gap(const Spec& spec, const Row& x, const Row& grad, double grad_lo, Threshold t,
                            void* grad_x, bool asked, double& grad_k, double& grad_tau) {
  grad_k = grad_tau = 0;
  if (grad_lo == 0 && !asked) return clear(grad_x, x.dtype, spec.n);
  const auto [at, edges] = gap_around(spec, x, grad, t);
  if (spec.output != Output::kThreshold) grad_k = gap_gradient(spec, edges);
  if (grad_lo == 0) return clear(grad_x, x.dtype, spec.n);
  grad_tau = -edges.up_part() * grad_lo;
  const double up = edges.up_count > 0 ? at.up : kNan, at_up = edges.up_part() * grad_lo / edges.up_count,
               down = edges.down_count > 0 ? at.down : kNan,
               at_down = edges.down_part() * grad_lo / edges.down_count;
  map<double>(x, spec.n, spec.inside, grad_x, x.dtype, [=](VecD score, int64_t /*i*/, int /*lanes*/) {
    return score == up ? splat(at_up) : score == down ? splat(at_down) : VecD{};
  });
}

struct LargestDensity {
  double log_f = -kInfinity;
  void operator+=(const LargestDensity& o) { log_f = std::max(log_f, o.log_f); }
};

struct CarefulSums {
  double mass = 0, wz = 0, v = 0, u = 0, uz = 0;
  void operator+=(const CarefulSums& o) { mass += o.mass, wz += o.wz, v += o.v, u += o.u, uz += o.uz; }
};

// The gradients of any output (grad is 0 where that is the threshold), in double, with weights relative to
// the largest density. It serves rows whose densities are too small for the ordinary kernel.
template <class C>
KHOT_APART void backward_careful(const Spec& spec, const C& F, const Row& x, const Row& grad, double grad_lo,
                                 double tau, Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  using R = double;
  auto standardize = [=](VecD v) { return ((v - t.hi) - t.lo) / tau; };
  const Output output = spec.output;

  // u = v dout/dz, and v dout/dF times the weight f/exp(top).
  struct Cotangent {
    VecD u, share;
  };
  auto cotangent = [=](VecD z, VecD log_f, VecD weight, VecD v, double top) -> Cotangent {
    if (output == Output::kThreshold) return {VecD{}, VecD{}};
    if (output == Output::kValue) return {v * exp<R>(log_f), v * weight};
    // where y is exactly 0, the derivative is 0
    const VecD log_F = F.template log_value<R>(z);
    const IntD still = (log_F == -kInfinity) | (v == 0);
    const VecD log_rate = still ? VecD{} : F.template log_hazard<R>(z, log_f, log_F);
    const VecD u = v * exp<R>(log_rate), share = v * exp<R>(log_rate - top);
    return {still ? VecD{} : u, still ? VecD{} : share};
  };
  const LargestDensity largest = reduce<R, LargestDensity>(
      x, spec.n, spec.inside, [=](LargestDensity& s, const R* p, int count, int64_t) {
        VecD most = splat(-kInfinity);
        vectors<R>(p, count, -kInfinity, [&](VecD v, int, int) {
          const VecD log_f = F.template log_density<R>(standardize(v));
          most = log_f > most ? log_f : most;
        });
        s.log_f = std::max(s.log_f, maximum<R>(most));
      });
  const double top = largest.log_f;
  const double base = std::max(top, -kHuge);
  const CarefulSums s = reduce_beside<R, CarefulSums>(
      x, grad, spec.n, spec.inside, [=](CarefulSums& sums, const R* p, const R* g, int count) {
        VecD mass{}, wz{}, v_sum{}, u_sum{}, uz{};
        vectors<R>(p, count, -kInfinity, [&](VecD v, int i, int lanes) {
          const VecD z = standardize(v), log_f = F.template log_density<R>(z);
          const VecD bounded = clamp_above<R>(clamp_below<R>(z, -1e300), 1e300);
          const VecD weight = exp<R>(log_f - base);
          const Cotangent c = cotangent(z, log_f, weight, beside(g, i, lanes), base);
          mass += weight;
          wz += weight * bounded;
          v_sum += c.share;
          u_sum += c.u;
          uz += c.u * bounded;
        });
        sums.mass += sum<R>(mass), sums.wz += sum<R>(wz), sums.v += sum<R>(v_sum);
        sums.u += sum<R>(u_sum), sums.uz += sum<R>(uz);
      });

  const bool live = s.mass != 0;
  if (!C::full_support && !live) {
    return backward_in_gap(spec, x, grad, grad_lo, t, grad_x, true, grad_k, grad_tau);
  }
  const double z_mean = live ? s.wz / s.mass : 0;
  grad_k = live ? s.v / s.mass : 0;
  if (live && grad_lo != 0) grad_k -= grad_lo * std::exp(std::log(tau) - std::log(s.mass) - top);
  grad_tau = (s.u * z_mean - s.uz) / tau - grad_lo * z_mean;
  const double spread = live ? (grad_lo - s.u / tau) / s.mass : 0;
  map_beside<R>(x, grad, spec.n, spec.inside, grad_x, x.dtype, [=](VecD score, VecD v) {
    const VecD z = standardize(score), log_f = F.template log_density<R>(z), weight = exp<R>(log_f - base);
    return cotangent(z, log_f, weight, v, base).u / tau + weight * spread;
  });
}

}  // namespace khot::KHOT_ISA
