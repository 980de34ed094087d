// The gradients of y and log y in rows of which no entry is near t, so that all densities are small: with
// weights relative to the largest of them. Where even that, divided by tau, is 0 in the row's dtype, so are
// dL/dx and dL/dtau of y. In log y entries below t move with their score, by f/F.
#pragma once

#include <algorithm>
#include <cmath>

#include "soft_topk/backward_ordinary.h"

namespace khot::KHOT_ISA {

template <class C>
class DecidedRow {
 public:
  DecidedRow(const Spec& spec, const C& F, const Row& x, const Row& grad, double tau, Threshold t)
      : spec_(spec),
        F_(F),
        x_(x),
        grad_(grad),
        tau_(tau),
        t_(t),
        in_double_(x.dtype == Dtype::kDouble),
        log_(spec.output == Output::kLog) {}

  // The entries that are nearest to t, and the size of the largest incoming gradient, for log y of those
  // below t.
  struct Nearest {
    Edges at;
    double steepest = 0;
    void operator+=(const Nearest& o) { at += o.at, steepest = std::max(steepest, o.steepest); }
    double distance(Threshold t) const { return std::min(at.up - t.hi - t.lo, t.hi - at.down + t.lo); }
  };
  // The same of what comes to each lane.
  template <class R>
  static KHOT_INLINE void find_nearest(const R* p, const R* g, int count, Threshold t, bool log, Vec<R>& up,
                                       Vec<R>& down, Vec<R>& steepest) {
    const R hi = static_cast<R>(t.hi), lo = static_cast<R>((t.hi - hi) + t.lo);
    up = splat(kInf<R>), down = -up, steepest = Vec<R>{};
    vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int lanes) {
      const Vec<R> off = (v - hi) - lo, own = abs<R>(beside(g, i, lanes));
      const Vec<R> size = own < kInf<R> ? own : splat(kInf<R>);  // not NaN, which would be lost
      up = (off > 0) & (v < up) ? v : up;
      down = (off <= 0) & (v > down) ? v : down;
      const Int<R> counts = log ? (off < 0) & (off > -kInf<R>) : Int<R>{} == 0;
      steepest = counts & (size > steepest) ? size : steepest;
    });
  }

  // Whether all entries are so far from t that F is as good as an exponential.
  template <class R>
  static KHOT_INLINE Int<R> is_decided(const C& F, Vec<R> distance, Vec<R> hi, Vec<R> tau) {
    const Vec<R> least = distance - static_cast<R>(1e-6) * (distance + abs<R>(hi));
    return (least > 0) & (F.template log_density<R>(least / tau) <= -40);
  }
  // Whether f/tau times a gradient is less than e^end; if dL/dtau is asked for, with (z + 1)^2.
  template <class R>
  static KHOT_INLINE Int<R> is_nothing(const C& F, Vec<R> distance, Vec<R> steepest, Vec<R> tau, bool asked,
                                       R end) {
    const Vec<R> z = distance / tau, sizes = log<R>(steepest + static_cast<R>(1e-30)) - log<R>(tau);
    const Vec<R> moments = asked ? 2 * log1p<R>(z) : Vec<R>{};
    const Int<R> finite = steepest < kInf<R>;
    return finite & (F.template log_density<R>(z) + moments + sizes < end);
  }
  static constexpr float kZero = -87.3f;  // e to its power is next to no normal number of float
  // Whether the gradients of log y below t are so large that those above t are nothing beside them.
  template <class R>
  static KHOT_INLINE Int<R> outweighs(Vec<R> steepest, Vec<R> tau) {
    return steepest / tau > static_cast<R>(1e-20);
  }

  // Whether the row's dtype carries such gradients, and they are written. The numbers are left at 0 unless
  // they are asked for.
  KHOT_APART bool write(void* grad_x, bool asked, double& grad_k, double& grad_tau) const {
    grad_k = grad_tau = 0;
    const Nearest about = in_double_ ? nearest<double>() : nearest<float>();
    const VecD distance = splat(about.distance(t_)), steepest = splat(about.steepest), tau = splat(tau_);
    if (!is_decided<double>(F_, distance, splat(t_.hi), tau)[0]) return false;
    const bool low = log_ && outweighs<double>(steepest, tau)[0];
    const bool nothing =
        log_ ? low && !asked
             : is_nothing<double>(F_, distance, steepest, tau, asked, in_double_ ? -750 : kZero)[0];
    if (!log_ && nothing && !asked) {
      clear(grad_x, x_.dtype, spec_.n);
      return true;
    }
    const double height = F_.template log_density<double>(distance / tau_)[0] - std::log(tau_);
    const bool high = height > kZero;
    const bool carried = !log_ ? high && !nothing : asked ? high && low : high || low;
    if (in_double_ || !carried) return write_decided(distance[0], nothing, grad_x, grad_k, grad_tau);
    FloatGap gap = FloatGap::around(about.at, t_, tau_);
    gap.most = static_cast<float>(std::exp(height));
    return log_ ? write_in_float<true>(gap, 0, grad_x, grad_k, grad_tau)
                : write_in_float<false>(gap, 0, grad_x, grad_k, grad_tau);
  }

  // The same with the numbers, for rows that are decided. `nothing` says that what all densities add to the
  // gradients is. The distance that weights are relative to need not be the least, but where it is many tau
  // even float's rounding of it is.
  KHOT_APART bool write_decided(double about, bool nothing, void* grad_x, double& grad_k,
                                double& grad_tau) const {
    const double least = nothing && !in_double_ && !log_ ? nearest<double>().distance(t_) : about;
    const double top = F_.template log_density<double>(splat(least / tau_))[0];
    const double height = top - std::log(tau_), most = std::exp(height);
    // near the end of the exponent
    if (!nothing && height <= -690) return false;
    const double inner = log_ ? most : 1, outer = log_ ? 1 : most;
    const Sums s = sums(least, inner);
    const double offset = s.u / s.w;
    grad_k = offset / inner;
    if (nothing && !log_) {
      clear(grad_x, x_.dtype, spec_.n);
      return true;
    }
    grad_tau = outer * (offset * s.wz - s.uz);
    map_beside<double>(x_, grad_, spec_.n, spec_.inside, grad_x, x_.dtype, [&](VecD v, VecD g) {
      const VecD d = (v - t_.hi) - t_.lo, own = weight(abs<double>(d), least);
      return outer * (pulled(d, own, g, inner) - own * offset);
    });
    return true;
  }

  // Whether dL/dx is written where t alone is wanted, whose incoming gradient is shared by weight.
  KHOT_APART bool share(double grad_lo, void* grad_x) const {
    const Nearest about = nearest<float>();
    if (!is_decided<double>(F_, splat(about.distance(t_)), splat(t_.hi), splat(tau_))[0]) return false;
    FloatGap gap = FloatGap::around(about.at, t_, tau_);
    gap.most = static_cast<float>(1 / tau_);
    double grad_k, grad_tau;
    return write_in_float<false>(gap, grad_lo, grad_x, grad_k, grad_tau);
  }

 private:
  template <bool kLog>
  bool write_in_float(const FloatGap& gap, double grad_lo, void* grad_x, double& grad_k,
                      double& grad_tau) const {
    const RelativeDensity<C, kLog> density(F_, t_, tau_, gap);
    return backward_ordinary(spec_, density, x_, grad_, grad_lo, tau_, grad_x, grad_k, grad_tau) ==
           Gradients::kWritten;
  }

  struct Sums {
    double w = 0, u = 0, wz = 0, uz = 0;
    void operator+=(const Sums& o) { w += o.w, u += o.u, wz += o.wz, uz += o.uz; }
  };

  template <class R>
  Nearest nearest() const {
    return reduce<R, Nearest>(x_, spec_.n, spec_.inside, [&](Nearest& s, const R* p, int count, int64_t at) {
      R buffer[kBlock];
      Vec<R> up, down, steepest;
      find_nearest<R>(p, fetch(grad_, at, count, buffer), count, t_, log_, up, down, steepest);
      s += {{minimum<R>(up), maximum<R>(down)}, maximum<R>(steepest)};
    });
  }

  // f at a distance relative to f at the least.
  VecD weight(VecD distance, double least) const {
    const double scale = 1 / tau_;
    const VecD more = (distance - least) * scale;
    const VecD a = C::value_from_odds ? more : more * (0.5 * (distance + least) * scale);
    return exp<double>(-a);
  }

  // The incoming gradient by the weight or, for log y, by f/(F tau).
  KHOT_INLINE VecD pulled(VecD d, VecD own, VecD incoming, double inner) const {
    const VecD u = own * incoming * inner;
    if (!log_) return u;
    const VecD below = incoming * (C::template hazard_below<double>(-d / tau_) / tau_);
    return abs<double>(d) < kInf<double> ? (d < 0 ? below : u) : VecD{};
  }

  Sums sums(double least, double inner) const {
    const double hi = t_.hi, lo = t_.lo, scale = 1 / tau_;
    return reduce<double, Sums>(
        x_, spec_.n, spec_.inside, [&](Sums& s, const double* p, int count, int64_t at) {
          double buffer[kBlock];
          const double* g = fetch(grad_, at, count, buffer);
          VecD w{}, u{}, wz{}, uz{};
          vectors<double>(p, count, -kInf<double>, [&](VecD v, int i, int lanes) {
            const VecD d = (v - hi) - lo, own = weight(abs<double>(d), least), incoming = beside(g, i, lanes);
            const VecD z = d * scale, own_u = pulled(d, own, incoming, inner);
            w += own, u += own_u;
            wz += own > 0 ? own * z : VecD{}, uz += own_u != 0 ? own_u * z : VecD{};
          });
          s.w += sum<double>(w), s.u += sum<double>(u), s.wz += sum<double>(wz), s.uz += sum<double>(uz);
        });
  }

  const Spec& spec_;
  const C& F_;
  Row x_, grad_;
  double tau_;
  Threshold t_;
  bool in_double_, log_;
};

}  // namespace khot::KHOT_ISA
