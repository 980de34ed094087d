// The gradients of y in rows of which no entry is near t, so that all densities are small: with weights
// relative to the largest of them. Where even that, divided by tau, is 0 in the row's dtype, so are dL/dx and
// dL/dtau.
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

template <class C>
class DecidedRow {
 public:
  DecidedRow(const Spec& spec, const C& F, const Row& x, const Row& grad, double tau, Threshold t)
      : spec_(spec), F_(F), x_(x), grad_(grad), tau_(tau), t_(t), in_double_(x.dtype == Dtype::kDouble) {}

  // Of the entry that is nearest to t, and of the largest incoming gradient, their sizes.
  struct Nearest {
    double distance = kInfinity, steepest = 0;
    void operator+=(const Nearest& o) {
      distance = std::min(distance, o.distance), steepest = std::max(steepest, o.steepest);
    }
  };
  // The same of what comes to each lane.
  template <class R>
  static KHOT_INLINE void find_nearest(const R* p, const R* g, int count, Threshold t, Vec<R>& distance,
                                       Vec<R>& steepest) {
    const R hi = static_cast<R>(t.hi), lo = static_cast<R>((t.hi - hi) + t.lo);
    distance = splat(kInf<R>), steepest = Vec<R>{};
    vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int lanes) {
      const Vec<R> d = abs<R>((v - hi) - lo), own = abs<R>(beside(g, i, lanes));
      const Vec<R> size = own < kInf<R> ? own : splat(kInf<R>);  // not NaN, which would be lost
      distance = d < distance ? d : distance;
      steepest = size > steepest ? size : steepest;
    });
  }

  // Whether all entries are so far from t that F is as good as an exponential.
  template <class R>
  static KHOT_INLINE Int<R> is_decided(const C& F, Vec<R> distance, Vec<R> hi, Vec<R> tau) {
    const Vec<R> least = distance - static_cast<R>(1e-6) * (distance + abs<R>(hi));
    return (least > 0) & (F.template log_density<R>(least / tau) <= -40);
  }
  // Whether f (z + 1)^2/tau times a gradient is less than e^end.
  template <class R>
  static KHOT_INLINE Int<R> is_nothing(const C& F, Vec<R> distance, Vec<R> steepest, Vec<R> tau, R end) {
    const Vec<R> z = distance / tau, sizes = log<R>(steepest + static_cast<R>(1e-30)) - log<R>(tau);
    const Int<R> finite = steepest < kInf<R>;
    return finite & (F.template log_density<R>(z) + 2 * log1p<R>(z) + sizes < end);
  }
  static constexpr float kZero = -105;  // e to its power is 0 in float

  // Whether the row's dtype carries such gradients, and they are written. The numbers are left at 0 unless
  // they are asked for.
  KHOT_APART bool write(void* grad_x, bool asked, double& grad_k, double& grad_tau) const {
    grad_k = grad_tau = 0;
    const Nearest about = in_double_ ? nearest<double>() : nearest<float>();
    const VecD distance = splat(about.distance), steepest = splat(about.steepest), tau = splat(tau_);
    if (!is_decided<double>(F_, distance, splat(t_.hi), tau)[0]) return false;
    const bool nothing = is_nothing<double>(F_, distance, steepest, tau, in_double_ ? -750 : kZero)[0];
    if (asked || !nothing) return write_decided(about.distance, nothing, grad_x, grad_k, grad_tau);
    clear(grad_x, x_.dtype, spec_.n);
    return true;
  }

  // The same with the numbers, for rows that are decided. The distance that weights are relative to need not
  // be the least, but where it is many tau even float's rounding of it is.
  KHOT_APART bool write_decided(double about, bool nothing, void* grad_x, double& grad_k,
                                double& grad_tau) const {
    const double least = nothing && !in_double_ ? nearest<double>().distance : about;
    const double top = F_.template log_density<double>(splat(least / tau_))[0];
    // near the end of the exponent
    if (!nothing && top - std::log(tau_) <= (in_double_ ? -690 : -80)) return false;
    const Sums s = sums(least);
    grad_k = s.wv / s.w;
    if (nothing) {
      clear(grad_x, x_.dtype, spec_.n);
      return true;
    }
    const double factor = std::exp(top) / tau_, offset = grad_k;
    grad_tau = factor * (s.wv * (s.wz / s.w) - s.wzv);
    map_beside<double>(x_, grad_, spec_.n, spec_.inside, grad_x, x_.dtype, [&](VecD v, VecD g) {
      return weight(abs<double>((v - t_.hi) - t_.lo), least) * (factor * (g - offset));
    });
    return true;
  }

 private:
  struct Sums {
    double w = 0, wv = 0, wz = 0, wzv = 0;
    void operator+=(const Sums& o) { w += o.w, wv += o.wv, wz += o.wz, wzv += o.wzv; }
  };

  template <class R>
  Nearest nearest() const {
    return reduce<R, Nearest>(x_, spec_.n, spec_.inside, [&](Nearest& s, const R* p, int count, int64_t at) {
      R buffer[kBlock];
      Vec<R> distance, steepest;
      find_nearest<R>(p, fetch(grad_, at, count, buffer), count, t_, distance, steepest);
      s += {minimum<R>(distance), maximum<R>(steepest)};
    });
  }

  // f at a distance relative to f at the least.
  VecD weight(VecD distance, double least) const {
    const double scale = 1 / tau_;
    const VecD more = (distance - least) * scale;
    const VecD a = C::value_from_odds ? more : more * (0.5 * (distance + least) * scale);
    return exp<double>(-a);
  }

  Sums sums(double least) const {
    const double hi = t_.hi, lo = t_.lo, scale = 1 / tau_;
    return reduce<double, Sums>(
        x_, spec_.n, spec_.inside, [&](Sums& s, const double* p, int count, int64_t at) {
          double buffer[kBlock];
          const double* g = fetch(grad_, at, count, buffer);
          VecD w{}, wv{}, wz{}, wzv{};
          vectors<double>(p, count, -kInf<double>, [&](VecD v, int i, int lanes) {
            const VecD d = (v - hi) - lo, own = weight(abs<double>(d), least), incoming = beside(g, i, lanes);
            const VecD own_z = own > 0 ? own * (d * scale) : VecD{};
            w += own, wv += own * incoming, wz += own_z, wzv += own_z * incoming;
          });
          s.w += sum<double>(w), s.wv += sum<double>(wv), s.wz += sum<double>(wz), s.wzv += sum<double>(wzv);
        });
  }

  const Spec& spec_;
  const C& F_;
  Row x_, grad_;
  double tau_;
  Threshold t_;
  bool in_double_;
};

}  // namespace khot::KHOT_ISA
