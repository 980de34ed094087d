// The gradients of y in rows of which no entry is near t, so that all densities are small: with weights
// relative to the largest of them. Where even that, divided by tau, is 0 in float, so are dL/dx and dL/dtau.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

template <class C>
class DecidedRow {
 public:
  DecidedRow(const Spec& spec, const C& F, const Row& x, const Row& grad, double tau, Threshold t)
      : spec_(spec), F_(F), x_(x), grad_(grad), tau_(tau), t_(t) {}

  // Whether float carries such gradients, and they are written. The numbers are left at 0 unless they are
  // asked for.
  KHOT_APART bool write(void* grad_x, bool asked, double& grad_k, double& grad_tau) const {
    grad_k = grad_tau = 0;
    const Nearest about = nearest<float>();
    const double error = 1e-6 * (about.distance + std::fabs(t_.hi)), least = about.distance - error;
    if (!(least > 0) || log_density(least) > -40)
      return false;  // from here on F is as good as an exponential
    if (!asked && is_nothing(least, about.steepest)) return clear(grad_x);
    const Nearest found = nearest<double>();
    const double top = log_density(found.distance), steep = top - std::log(tau_);
    const bool nothing = is_nothing(found.distance, found.steepest);
    if (!nothing && steep <= -80) return false;  // near the end of float's exponent
    const Sums s = sums(found.distance);
    grad_k = s.wv / s.w;
    if (nothing) return clear(grad_x);
    const double factor = std::exp(top) / tau_, offset = grad_k;
    grad_tau = factor * (s.wv * (s.wz / s.w) - s.wzv);
    map_beside<double>(x_, grad_, spec_.n, spec_.inside, grad_x, x_.dtype, [&](VecD v, VecD g) {
      return weight(abs<double>((v - t_.hi) - t_.lo), found.distance) * (factor * (g - offset));
    });
    return true;
  }

 private:
  // Of the entry that is nearest to t, and of the largest incoming gradient, their sizes.
  struct Nearest {
    double distance = kInfinity, steepest = 0;
    void operator+=(const Nearest& o) {
      distance = std::min(distance, o.distance), steepest = std::max(steepest, o.steepest);
    }
  };
  struct Sums {
    double w = 0, wv = 0, wz = 0, wzv = 0;
    void operator+=(const Sums& o) { w += o.w, wv += o.wv, wz += o.wz, wzv += o.wzv; }
  };

  template <class R>
  Nearest nearest() const {
    const R hi = static_cast<R>(t_.hi), lo = static_cast<R>((t_.hi - hi) + t_.lo);
    return reduce<R, Nearest>(x_, spec_.n, spec_.inside, [&](Nearest& s, const R* p, int count, int64_t at) {
      R buffer[kBlock];
      const R* g = fetch(grad_, at, count, buffer);
      Vec<R> least = splat(kInf<R>), most{};
      vectors<R>(p, count, -kInf<R>, [&](Vec<R> v, int i, int lanes) {
        const Vec<R> d = abs<R>((v - hi) - lo), size = abs<R>(beside(g, i, lanes));
        least = d < least ? d : least;
        most = size > most ? size : most;
      });
      s.distance = std::min<double>(s.distance, minimum<R>(least));
      s.steepest = std::max<double>(s.steepest, maximum<R>(most));
    });
  }

  double log_density(double distance) const {
    return F_.template log_density<double>(splat(distance / tau_))[0];
  }

  // Whether f (z + 1)^2/tau times a gradient is 0 in float.
  bool is_nothing(double distance, double steepest) const {
    const double z = distance / tau_;
    return log_density(distance) + 2 * std::log1p(z) - std::log(tau_) + std::log(steepest + 1e-30) < -105;
  }

  bool clear(void* grad_x) const {
    std::memset(grad_x, 0, spec_.n * (x_.dtype == Dtype::kFloat ? 4 : 2));
    return true;
  }

  // f at a distance relative to f at the least.
  VecD weight(VecD distance, double least) const {
    const double scale = 1 / tau_;
    const VecD more = (distance - least) * scale;
    const VecD a = C::value_from_odds ? more : more * (0.5 * (distance + least) * scale);
    return a < 80 ? exp2_close(clamp_above<double>(a, 90) * -kLog2E) : VecD{};
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
};

}  // namespace khot::KHOT_ISA
