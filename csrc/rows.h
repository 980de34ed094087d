// Forward and backward of a range of rows: khot/_kernels/reference/soft_topk.py for one instruction set.
#pragma once

#include <cmath>

#include "fast.h"
#include "lanes.h"
#include "pull.h"
#include "solver.h"
#include "wide.h"

namespace khot::KHOT_ISA {

template <class R, class C>
void fill_constant(const Spec& spec, void* out, Dtype dtype, const Row& x, double value, double at_infinity,
                   double infinity) {
  map<R>(x, spec.n, spec.inside, out, dtype, [=](Vec<R> v, int64_t, int) {
    return v == static_cast<R>(infinity) ? splat(static_cast<R>(at_infinity)) : splat(static_cast<R>(value));
  });
}

template <class R, class C>
void apply(const Spec& spec, const C& F, const Row& x, Threshold t, double tau, void* out) {
  const bool log = spec.output == Output::kLog;
  if (std::isnan(t.hi)) return fill_constant<R, C>(spec, out, x.dtype, x, kNan, kNan, 0);
  const double none = log ? -kInfinity : 0, every = log ? 0 : 1;
  if (t.hi == kHuge) return fill_constant<R, C>(spec, out, x.dtype, x, none, every, kInfinity);
  if (t.hi == -kHuge) return fill_constant<R, C>(spec, out, x.dtype, x, every, none, -kInfinity);
  const R hi = static_cast<R>(t.hi), lo = static_cast<R>((t.hi - hi) + t.lo), scale = static_cast<R>(1 / tau);
  auto z = [=](Vec<R> v) { return ((v - hi) - lo) * scale; };
  if (log) {
    map<R>(x, spec.n, spec.inside, out, x.dtype, [=](Vec<R> v, int64_t, int) { return F.template log_value<R>(z(v)); });
  } else {
    map<R>(x, spec.n, spec.inside, out, x.dtype, [=](Vec<R> v, int64_t, int) { return F.template value<R>(z(v)); });
  }
}

// CDFs whose log y has no error in float but that of z.
template <class C>
constexpr bool kKeepsLogarithms = std::is_same_v<C, Logistic> || std::is_same_v<C, Laplace>;

// Whether float carries the row. Not temperatures at the ends of its exponent, and not log y where its error
// is not that of z: near where F leaves 0, and where log y goes as the square of z. Nor where t itself is wanted,
// which is less certain than y where C is flat.
template <class C>
bool fits_float(const Spec& spec, const C& F, Dtype dtype, double tau) {
  return F.fits_float && dtype != Dtype::kDouble && tau > 1e-25 && tau < 1e25 && spec.output != Output::kThreshold &&
         (spec.output != Output::kLog || kKeepsLogarithms<C>);
}

template <class C>
void forward_row(const Spec& spec, const C& F, const Row& x, double k, double tau, void* out, Goal& goal, Threshold& t) {
  const bool log = spec.output == Output::kLog;
  auto in_float = [&] {
    {
      const FlushSubnormals flush;
      if (FastSolver<C>(x, spec.n, tau, F, spec.inside).solve(k, goal, t, log ? nullptr : out)) return true;
    }
    return WideSolver<C>(x, spec.n, tau, F, spec.inside).solve(k, t, out, log);
  };
  bool fast = false;
  if (!(tau > 0 && tau < kInfinity)) {
    t = {kNan, kNan};
  } else if (fits_float(spec, F, x.dtype, tau) && in_float()) {
    fast = true;
  } else {
    t = Solver<C>(x, spec.n, tau, F, spec.inside).solve(k);
  }
  if (fast && log) {
    apply<float>(spec, F, x, t, tau, out);
  } else if (!fast && spec.output != Output::kThreshold) {
    apply<double>(spec, F, x, t, tau, out);
  }
}

struct GradientSums {
  double f = 0, fz = 0, fv = 0, fzv = 0, y = 0;
  void operator+=(const GradientSums& o) { f += o.f, fz += o.fz, fv += o.fv, fzv += o.fzv, y += o.y; }
};

enum class Pulled { kAll, kUnclear, kNothing };  // or the densities are too small, or all 0: then nothing is written

// The gradients of y, or with v = 0 of t alone, from the x or the y that Pull is made of.
template <class Pull>
Pulled backward_fast(const Spec& spec, const Pull& pull, const Row& x, const Row& grad, double grad_lo, double tau,
                   void* grad_x, double& grad_k, double& grad_tau) {
  using R = typename Pull::Real;
  constexpr bool in_float = std::is_same_v<R, float>;
  constexpr Dtype own_dtype = in_float ? Dtype::kFloat : Dtype::kDouble;
  const FlushSubnormals flush(in_float);
  // f is kept in the result between the passes, if the row is short enough to be in the cache still
  const bool own = x.dtype == own_dtype, keep = own && spec.n <= (1 << 20) / static_cast<int64_t>(sizeof(R));
  R* const kept = keep ? static_cast<R*>(grad_x) : nullptr;
  const GradientSums s = reduce<R, GradientSums>(
      x, spec.n, spec.inside, [=](GradientSums& sums, const R* p, int count, int64_t at) {
        R buffer[kBlock];
        const R* g = fetch(grad, at, count, buffer);
        PullSums<R> parts;
        vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int lanes) {
          const bool whole = lanes == kWidth<R>;
          const Vec<R> f = pull.density(v, whole ? load(g + i) : load_part(g + i, lanes, R(0)), parts);
          if (keep) whole ? store(kept + at + i, f) : store_part(kept + at + i, lanes, f);
        });
        sums.f += sum<R>(parts.f), sums.fz += sum<R>(parts.fz);
        sums.fv += sum<R>(parts.fv), sums.fzv += sum<R>(parts.fzv), sums.y += sum<R>(parts.y);
      });
  if (!Pull::reliable(s.f, s.y)) return s.f == 0 ? Pulled::kNothing : Pulled::kUnclear;
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
        const Vec<R> f = keep ? v : pull.density(v);
        const Vec<R> value = f * pull.scale * ((whole ? load(g + i) : load_part(g + i, lanes, R(0))) - offset);
        whole ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!own) put(grad_x, x.dtype, at, count, results);
    }
  });
  return Pulled::kAll;
}

// The same of log y, whose gradient is v f/F in place of v f; false where the densities are too small.
template <class C>
bool backward_fast_log(const Spec& spec, const C& F, const Row& x, const Row& grad, double grad_lo, double tau,
                       Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  const FlushSubnormals flush;
  const PullOf<float, C> pull(F, t, tau);
  auto turn = [=](VecF v, VecF z, VecF& f) {
    const VecF u = v * C::log_slope(z, f);
    return abs<float>(z) < kInf<float> ? u : VecF{};
  };
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
          const VecF z = pull.standardized(v);
          VecF f;
          const VecF u = turn(load_grad(g, i, lanes), z, f);
          f_sum += f;
          fz += f > 0 ? f * z : VecF{};
          u_sum.add(u);
          uz.add(u != 0 ? u * z : VecF{});
        };
        vectors<float>(p, count, -kInf<float>, add, [&] { u_sum.flush(), uz.flush(); });
        sums.f += sum<float>(f_sum), sums.fz += sum<float>(fz);
        sums.fv += sum<double>(u_sum.total), sums.fzv += sum<double>(uz.total);
      });
  // u do not fade with f, and their rounding errors would be divided by a small sum
  if (!(s.f > 1e-2 * std::sqrt(static_cast<double>(spec.n)))) return false;
  const double z_mean = s.fz / s.f;
  grad_k = s.fv / s.f - (grad_lo == 0 ? 0 : grad_lo * tau / s.f);
  grad_tau = (s.fv * z_mean - s.fzv) / tau - grad_lo * z_mean;
  const float offset = static_cast<float>(s.fv / s.f - grad_lo * tau / s.f);
  const bool own = x.dtype == Dtype::kFloat;
  chunks(spec.n, spec.inside, [&](int64_t begin, int64_t end, int64_t) {
    float from[kBlock], incoming[kBlock], results[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const float *p = fetch(x, at, count, from), *g = fetch(grad, at, count, incoming);
      float* const target = own ? static_cast<float*>(grad_x) + at : results;
      vectors<float>(p, count, 0.0f, [&](VecF v, int i, int lanes) {
        VecF f;
        const VecF u = turn(load_grad(g, i, lanes), pull.standardized(v), f), value = (u - f * offset) * pull.scale;
        lanes == kWidth<float> ? store(target + i, value) : store_part(target + i, lanes, value);
      });
      if (!own) put(grad_x, x.dtype, at, count, results);
    }
  });
  return true;
}

struct Top {
  double log_f = -kInfinity;
  void operator+=(const Top& o) { log_f = std::max(log_f, o.log_f); }
};

struct CarefulSums {
  double mass = 0, wz = 0, v = 0, u = 0, uz = 0;
  void operator+=(const CarefulSums& o) { mass += o.mass, wz += o.wz, v += o.v, u += o.u, uz += o.uz; }
};

struct Edges {  // of the gap around t, minus hi
  double up = kInfinity, down = -kInfinity;
  void operator+=(const Edges& o) { up = std::min(up, o.up), down = std::max(down, o.down); }
};

struct EdgeSums {
  double up_count = 0, up = 0, down_count = 0, down = 0;
  void operator+=(const EdgeSums& o) {
    up_count += o.up_count, up += o.up, down_count += o.down_count, down += o.down;
  }
};

// dL/dk for compact support where no entry has f > 0, as _gap_grad_k of the reference.
inline double gap_gradient(const Spec& spec, const Row& x, const Row& grad, Threshold t) {
  const Edges edges = reduce<double, Edges>(x, spec.n, spec.inside, [=](Edges& e, const double* p, int count, int64_t) {
    VecD up = splat(kInfinity), down = splat(-kInfinity);
    vectors<double>(p, count, kNan, [&](VecD v, int, int) {
      const VecD offset = v - t.hi;
      up = (offset > t.lo) & (offset < up) ? offset : up;
      down = (offset <= t.lo) & (offset > down) ? offset : down;
    });
    e += {-maximum<double>(-up), maximum<double>(down)};
  });
  const EdgeSums s = reduce<double, EdgeSums>(x, spec.n, spec.inside, [=](EdgeSums& e, const double* p, int count, int64_t at) {
    double buffer[kBlock];
    const double* g = fetch(grad, at, count, buffer);
    VecD up_count{}, up{}, down_count{}, down{};
    vectors<double>(p, count, kNan, [&](VecD x, int i, int lanes) {
      const VecD offset = x - t.hi, v = lanes == kWidth<double> ? load(g + i) : load_part(g + i, lanes, 0.0);
      const IntD above = offset == edges.up, below = offset == edges.down;
      up_count += above ? splat(1.0) : VecD{}, up += above ? v : VecD{};
      down_count += below ? splat(1.0) : VecD{}, down += below ? v : VecD{};
    });
    e += {sum<double>(up_count), sum<double>(up), sum<double>(down_count), sum<double>(down)};
  });
  const double mean = 0.5 * s.up / s.up_count;
  return spec.output == Output::kValue ? mean + 0.5 * s.down / s.down_count : mean;
}

// The gradients of any output, in double, with weights relative to the largest density: for log y, and where the
// densities are too small.
template <class C>
void backward_careful(const Spec& spec, const C& F, const Row& x, const Row& grad, double grad_lo, double tau,
                      Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  using R = double;
  auto standardize = [=](VecD v) { return ((v - t.hi) - t.lo) / tau; };
  const Output output = spec.output;

  // the cotangent u = v dout/dz, and v weighted by dout/dF, for weights relative to exp(top)
  struct Cotangent {
    VecD u, share;
  };
  auto cotangent = [=](VecD z, VecD log_f, VecD weight, VecD v, double top) -> Cotangent {
    if (output == Output::kThreshold) return {VecD{}, VecD{}};
    if (output == Output::kValue) return {v * exp<R>(log_f), v * weight};
    const VecD log_F = F.template log_value<R>(z);
    const IntD still = (log_F == -kInfinity) | (v == 0);  // y = 0 exactly: nothing moves
    const VecD rate = still ? VecD{} : -log_F;
    const VecD u = v * exp<R>(log_f + rate), share = v * exp<R>(log_f + rate - top);
    return {still ? VecD{} : u, still ? VecD{} : share};
  };
  auto load_grad = [](const double* g, int i, int lanes) {
    return lanes == kWidth<R> ? load(g + i) : load_part(g + i, lanes, 0.0);
  };

  const double top = reduce<R, Top>(x, spec.n, spec.inside, [=](Top& s, const R* p, int count, int64_t) {
                       VecD most = splat(-kInfinity);
                       vectors<R>(p, count, -kInfinity, [&](VecD v, int, int) {
                         const VecD log_f = F.template log_density<R>(standardize(v));
                         most = log_f > most ? log_f : most;
                       });
                       s.log_f = std::max(s.log_f, maximum<R>(most));
                     }).log_f;
  const double base = std::max(top, -kHuge);
  const CarefulSums s = reduce<R, CarefulSums>(x, spec.n, spec.inside, [=](CarefulSums& sums, const R* p, int count, int64_t at) {
    double buffer[kBlock];
    const double* g = output == Output::kThreshold ? nullptr : fetch(grad, at, count, buffer);
    VecD mass{}, wz{}, v_sum{}, u_sum{}, uz{};
    vectors<R>(p, count, -kInfinity, [&](VecD v, int i, int lanes) {
      const VecD z = standardize(v), log_f = F.template log_density<R>(z);
      const VecD bounded = clamp_above<R>(clamp_below<R>(z, -1e300), 1e300);
      const VecD weight = exp<R>(log_f - base);
      const Cotangent c = cotangent(z, log_f, weight, g == nullptr ? VecD{} : load_grad(g, i, lanes), base);
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
  const double z_mean = live ? s.wz / s.mass : 0;
  grad_k = live ? s.v / s.mass : 0;
  if (live && grad_lo != 0) grad_k -= grad_lo * std::exp(std::log(tau) - std::log(s.mass) - top);
  grad_tau = (s.u * z_mean - s.uz) / tau - grad_lo * z_mean;
  if (!C::full_support && !live && output != Output::kThreshold) grad_k = gap_gradient(spec, x, grad, t);

  const double spread = live ? (grad_lo - s.u / tau) / s.mass : 0;
  chunks(spec.n, spec.inside, [&](int64_t begin, int64_t end, int64_t) {
    double from[kBlock], incoming[kBlock], results[kBlock + kWidth<R>];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const double* p = fetch(x, at, count, from);
      const double* g = output == Output::kThreshold ? nullptr : fetch(grad, at, count, incoming);
      vectors<R>(p, count, -kInfinity, [&](VecD v, int i, int lanes) {
        const VecD z = standardize(v), log_f = F.template log_density<R>(z);
        const VecD weight = exp<R>(log_f - base);
        const Cotangent c = cotangent(z, log_f, weight, g == nullptr ? VecD{} : load_grad(g, i, lanes), base);
        store(results + i, c.u / tau + weight * spread);
      });
      put(grad_x, x.dtype, at, count, results);
    }
  });
}

template <class C>
void backward_row(const Spec& spec, const C& F, const Row& x, const Row& y, const Row& grad, double grad_lo, double tau,
                  Threshold t, void* grad_x, double& grad_k, double& grad_tau) {
  grad_k = grad_tau = 0;
  if (!(std::fabs(t.hi) < kHuge)) {  // nothing selected, or everything; or NaN
    const double value = std::isnan(t.hi) ? kNan : 0;
    grad_k = grad_tau = value;
    return fill_constant<double, C>(spec, grad_x, x.dtype, x, value, value, 0);
  }
  const bool fast = fits_float(spec, F, x.dtype, tau);
  if constexpr (kKeepsLogarithms<C>) {
    if (fast && spec.output == Output::kLog &&
        backward_fast_log(spec, F, x, grad, grad_lo, tau, t, grad_x, grad_k, grad_tau)) {
      return;
    }
  }
  if (fast && spec.output == Output::kValue) {
    if constexpr (PullOfOutput<C>::serves) {
      const PullOfOutput<C> pull(F, t, tau);
      if (y.data != nullptr &&
          backward_fast(spec, pull, y, grad, grad_lo, tau, grad_x, grad_k, grad_tau) == Pulled::kAll) {
        return;
      }
    }
    const PullOf<float, C> pull(F, t, tau);
    const Pulled pulled = backward_fast(spec, pull, x, grad, grad_lo, tau, grad_x, grad_k, grad_tau);
    if (pulled == Pulled::kAll) return;
    if (!C::full_support && pulled == Pulled::kNothing) {
      grad_k = gap_gradient(spec, x, grad, t);
      return fill_constant<float, C>(spec, grad_x, x.dtype, x, 0, 0, 0);
    }
  }
  if (spec.output != Output::kLog && tau > 1e-100 && tau < 1e100) {
    const double none = 0;
    const Row v = spec.output == Output::kThreshold ? Row{&none, Dtype::kDouble, 0} : grad;
    const PullOf<double, C> pull(F, t, tau);
    if (backward_fast(spec, pull, x, v, grad_lo, tau, grad_x, grad_k, grad_tau) == Pulled::kAll) return;
  }
  backward_careful(spec, F, x, grad, grad_lo, tau, t, grad_x, grad_k, grad_tau);
}

template <class Call>
void with_cdf(const Spec& spec, Call call) {
  switch (spec.cdf) {
    case Cdf::kLogistic:
      return call(Logistic());
    case Cdf::kLaplace:
      return call(Laplace());
    case Cdf::kNormal:
      return call(Normal());
    case Cdf::kUniform:
      return call(Uniform(2));
    case Cdf::kPower:
      return call(Power(spec.power));
  }
}

inline void forward(const Spec& spec, const ForwardRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    Goal goal;
    auto one = [&](int64_t i) {
      Threshold t;
      forward_row(spec, F, rows.x(i), rows.k(i), rows.tau(i), rows.out(i), goal, t);
      rows.put(i, t);
    };
    int64_t i = begin;
    constexpr int width = LaneSolver<C>::width;
    if (spec.n > 0 && spec.n <= kShort && spec.output == Output::kValue && end - begin >= width &&
        rows.x(begin).dtype != Dtype::kDouble && F.fits_float) {
      LaneSolver<C> lanes(spec, F);
      bool ordinary[width];
      for (; i + width <= end; i += width) {
        {
          const FlushSubnormals flush;
          lanes.solve(rows, i, goal, ordinary);
        }
        for (int j = 0; j < width; ++j) {
          if (!ordinary[j]) one(i + j);
        }
      }
    }
    for (; i < end; ++i) one(i);
  });
}

inline void backward(const Spec& spec, const BackwardRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    auto one = [&](int64_t i) {
      double grad_k, grad_tau;
      backward_row(spec, F, rows.x(i), rows.y(i), rows.grad(i), rows.grad_lo(i), rows.tau(i), rows.threshold(i),
                   rows.grad_x(i), grad_k, grad_tau);
      rows.put(i, grad_k, grad_tau);
    };
    int64_t i = begin;
    constexpr int width = ShortPull<C>::width;
    if (spec.n > 0 && spec.n <= kShort && spec.output == Output::kValue && end - begin >= width &&
        rows.x(begin).dtype != Dtype::kDouble && F.fits_float) {
      ShortPull<C> together(spec, F);
      bool done[width];
      for (; i + width <= end; i += width) {
        together.pull(rows, i, done);
        for (int j = 0; j < width; ++j) {
          if (!done[j]) one(i + j);
        }
      }
    }
    for (; i < end; ++i) one(i);
  });
}

}  // namespace khot::KHOT_ISA
