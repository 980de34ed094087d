// The gradients of the soft budget (khot/_kernels/reference/soft_budget.py). With f = f(z), the incoming
// gradient v, D = sum w a f and m = (sum a f v - grad_lo tau)/D:
//
//   dL/dx = f (v - w m)/tau     dL/dB = m     dL/dw = -m y, less t dL/dx by value
//   dL/dtau = (m sum w f z - sum f v z)/tau
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/backward_lanes.h"
#include "budget/weights.h"
#include "soft_topk/apply.h"
#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

template <class C, bool kByValue>
class BudgetBackward {
 public:
  BudgetBackward(const BudgetSpec& spec, const C& F, const BudgetBackwardRows& rows, int64_t row)
      : spec_(spec),
        F_(F),
        x_(rows.x(row)),
        cost_(rows.cost(row)),
        grad_(rows.grad(row)),
        grad_lo_(rows.grad_lo(row)),
        tau_(rows.tau(row)),
        t_(rows.threshold(row)),
        grad_x_(rows.grad_x(row)),
        grad_cost_(rows.grad_cost(row)) {}

  void run(double& grad_budget, double& grad_tau) {
    if (std::isnan(t_.hi) || !(tau_ > 0)) {
      grad_budget = grad_tau = kNan;
      return each<double>([](VecD, VecD, VecD, VecD& dx, VecD& dw) { dx = dw = splat(kNan); });
    }
    infinite_ = std::fabs(t_.hi) == kHuge;
    fixed_ = infinite_ || (spec_.at_most && t_.hi == 0 && t_.lo == 0);
    if (infinite_) t_ = {0, 0};
    if (kExact<kByValue> && !fixed_ && float_carries(spec_, F_, x_.dtype, tau_) && std::fabs(t_.hi) < 1e30) {
      const FlushSubnormals flush;
      if (ordinary<float>(grad_budget, grad_tau)) return;
    }
    if (ordinary<double>(grad_budget, grad_tau)) return;
    careful(grad_budget, grad_tau);
  }

 private:
  template <class R>
  struct Entry {
    Vec<R> f, y, z, w;  // w = 0 where x is infinite
  };

  template <class R>
  struct At {
    Position<R, kByValue> position;
    C F;
    R median;
    bool held;  // t is infinite: entries are decided, except by value those that cost nothing

    At(const BudgetBackward& b)
        : position(b.t_, b.tau_), F(b.F_), median(static_cast<R>(b.F_.median)), held(b.infinite_) {}
    KHOT_INLINE Entry<R> operator()(Vec<R> x, Vec<R> given) const {
      const Int<R> finite = abs<R>(x) < kInf<R>;
      const Vec<R> w = finite ? given : Vec<R>{}, z = position(x, w);
      const Int<R> above = z > median;
      const TailDensity<R> v = F.template split<R>(z, above);
      const Int<R> counts = held ? finite & (kByValue ? w == 0 : (w != w)) : finite;
      return {counts ? v.density : Vec<R>{}, above ? 1 - v.tail : v.tail, finite ? z : Vec<R>{}, w};
    }
  };

  struct Sums {
    double mass = 0, mean = 0, moment = 0, pull = 0;  // of w a f, a f v, w f z and f v z
    void operator+=(const Sums& o) { mass += o.mass, mean += o.mean, moment += o.moment, pull += o.pull; }
  };

  // Returns false where the densities are too small for R, and then nothing is written.
  template <class R>
  bool ordinary(double& grad_budget, double& grad_tau) {
    constexpr bool in_float = sizeof(R) == 4;
    constexpr Dtype own = in_float ? Dtype::kFloat : Dtype::kDouble;
    // f and y are kept in the place of the results between the passes, if the row is still in the cache then.
    const bool keep = x_.dtype == own && cost_.dtype == own && spec_.n <= (1 << 18);
    R *const kept_f = keep ? static_cast<R*>(grad_x_) : nullptr, *const kept_y =
                                                                     keep ? static_cast<R*>(grad_cost_)
                                                                          : nullptr;
    const At<R> entry(*this);
    const Row cost = cost_, grad = grad_;
    const Sums s =
        reduce<R, Sums>(x_, spec_.n, spec_.inside, [=](Sums& sums, const R* p, int count, int64_t at) {
          R costs[kBlock], incoming[kBlock];
          const R *q = fetch(cost, at, count, costs), *g = fetch(grad, at, count, incoming);
          const At<R> local = entry;
          Vec<R> mass{}, mean{}, moment{}, pull{};
          vectors<R>(p, count, -kInf<R>, [&](Vec<R> x, int i, int lanes) {
            const Entry<R> e = local(x, beside(q, i, lanes));
            const Vec<R> v = beside(g, i, lanes), wf = e.w * e.f, fv = e.f * v;
            mass += kByValue ? wf * e.w : wf;
            mean += kByValue ? fv * e.w : fv;
            moment += wf * e.z;
            pull += fv * e.z;
            if (keep) {
              const bool whole = lanes == kWidth<R>;
              whole ? store(kept_f + at + i, e.f) : store_part(kept_f + at + i, lanes, e.f);
              whole ? store(kept_y + at + i, e.y) : store_part(kept_y + at + i, lanes, e.y);
            }
          });
          sums += {static_cast<double>(sum<R>(mass)), static_cast<double>(sum<R>(mean)),
                   static_cast<double>(sum<R>(moment)), static_cast<double>(sum<R>(pull))};
        });
    double price = 0;
    if (!fixed_) {
      if (!(s.mass > kLeastMass<R> && s.mass < 1 / kLeastMass<R>)) return false;
      price = (s.mean - (grad_lo_ == 0 ? 0 : grad_lo_ * tau_)) / s.mass;
      if (in_float && !(std::fabs(price) < 1e30 && std::fabs(s.moment) + std::fabs(s.pull) < kInfinity))
        return false;
    }
    grad_budget = price;
    grad_tau = ((price == 0 ? 0 : price * s.moment) - s.pull) / tau_;
    const R m = static_cast<R>(price), scale = static_cast<R>(1 / tau_), t = static_cast<R>(t_.hi + t_.lo);
    auto gradients = [=](Vec<R> f, Vec<R> y, Vec<R> w, Vec<R> v, Vec<R>& dx, Vec<R>& dw) {
      dx = f * (v - w * m) * scale;
      dw = -m * y;
      if constexpr (kByValue) dw -= t * dx;
    };
    if (keep) {
      chunks(spec_.n, spec_.inside, [&](int64_t begin, int64_t end, int64_t) {
        R from[kBlock], costs[kBlock], incoming[kBlock];
        for (int64_t at = begin; at < end; at += kBlock) {
          const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
          const R *p = fetch(x_, at, count, from), *q = fetch(cost, at, count, costs),
                  *g = fetch(grad, at, count, incoming);
          vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
            const bool whole = lanes == kWidth<R>;
            const Vec<R> f = beside(kept_f + at, i, lanes), y = beside(kept_y + at, i, lanes);
            const Vec<R> w = x > -kInf<R> ? beside(q, i, lanes) : Vec<R>{};
            Vec<R> dx, dw;
            gradients(f, y, w, beside(g, i, lanes), dx, dw);
            whole ? store(kept_f + at + i, dx) : store_part(kept_f + at + i, lanes, dx);
            whole ? store(kept_y + at + i, dw) : store_part(kept_y + at + i, lanes, dw);
          });
        }
      });
    } else {
      each<R>([=](Vec<R> x, Vec<R> w, Vec<R> v, Vec<R>& dx, Vec<R>& dw) {
        const Entry<R> e = entry(x, w);
        gradients(e.f, e.y, e.w, v, dx, dw);
        if (m == 0) dw = kByValue ? -t * dx : Vec<R>{};
      });
    }
    return true;
  }

  // Writes dL/dx and dL/dw, which value(x, w, v, dx, dw) computes.
  template <class R, class Value>
  void each(Value value) {
    constexpr Dtype own = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
    const bool own_x = x_.dtype == own, own_cost = cost_.dtype == own;
    chunks(spec_.n, spec_.inside, [&](int64_t begin, int64_t end, int64_t) {
      R from[kBlock], costs[kBlock], incoming[kBlock], dxs[kBlock], dws[kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
        const R *p = fetch(x_, at, count, from), *q = fetch(cost_, at, count, costs),
                *g = fetch(grad_, at, count, incoming);
        R *const to_x = own_x ? static_cast<R*>(grad_x_) + at : dxs, *const to_cost =
                                                                         own_cost
                                                                             ? static_cast<R*>(grad_cost_) +
                                                                                   at
                                                                             : dws;
        vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
          const bool whole = lanes == kWidth<R>;
          Vec<R> dx, dw;
          value(x, beside(q, i, lanes), beside(g, i, lanes), dx, dw);
          dw = x == -kInf<R> ? Vec<R>{} : dw;
          whole ? store(to_x + i, dx) : store_part(to_x + i, lanes, dx);
          whole ? store(to_cost + i, dw) : store_part(to_cost + i, lanes, dw);
        });
        if (!own_x) put(grad_x_, x_.dtype, at, count, dxs);
        if (!own_cost) put(grad_cost_, cost_.dtype, at, count, dws);
      }
    });
  }

  // ---- rows whose densities all underflow, or where no entry has one

  struct Largest {
    double log_f = -kInfinity;
    void operator+=(const Largest& o) { log_f = std::max(log_f, o.log_f); }
  };
  struct Edges {  // the levels where the entries next to a gap of compact support leave it
    double up = kInfinity, down = -kInfinity;
    void operator+=(const Edges& o) { up = std::min(up, o.up), down = std::max(down, o.down); }
  };
  struct CarefulSums {
    double mass = 0, mean = 0, moment = 0;          // with weights relative to the largest density
    double u = 0, uz = 0;                           // of a f v and f v z
    double up = 0, up_v = 0, down = 0, down_v = 0;  // of w a and a v at the edges
    void operator+=(const CarefulSums& o) {
      mass += o.mass, mean += o.mean, moment += o.moment, u += o.u, uz += o.uz;
      up += o.up, up_v += o.up_v, down += o.down, down_v += o.down_v;
    }
  };

  // body(sums, x, w, v, finite) for all vectors of the row.
  template <class S, class Parts, class Body, class Put>
  S collect(Parts start, Body body, Put put_parts) const {
    const Row cost = cost_, grad = grad_;
    return reduce<double, S>(x_, spec_.n, spec_.inside, [=](S& sums, const double* p, int count, int64_t at) {
      double costs[kBlock], incoming[kBlock];
      const double *q = fetch(cost, at, count, costs), *g = fetch(grad, at, count, incoming);
      Parts parts = start;
      vectors<double>(p, count, -kInfinity, [&](VecD x, int i, int lanes) {
        const IntD finite = abs<double>(x) < kInfinity;
        body(parts, x, finite ? beside(q, i, lanes) : VecD{}, beside(g, i, lanes), finite);
      });
      put_parts(sums, parts);
    });
  }

  void careful(double& grad_budget, double& grad_tau) {
    const C F = F_;
    const Position<double, kByValue> position(t_, tau_);
    const double tau = tau_;
    struct Most {
      VecD most;
    };
    const double top =
        collect<Largest>(
            Most{splat(-kInfinity)},
            [=](Most& m, VecD x, VecD w, VecD, IntD finite) {
              const IntD counts = finite & (w > 0);
              const VecD log_f = counts ? F.template log_density<double>(position(x, w)) : splat(-kInfinity);
              m.most = log_f > m.most ? log_f : m.most;
            },
            [](Largest& s, const Most& m) { s.log_f = std::max(s.log_f, maximum<double>(m.most)); })
            .log_f;
    const double base = std::max(top, -kHuge);
    Edges edges;
    const double median = F_.median;
    auto leaves = [=](VecD x, VecD w) { return kByValue ? (x - tau) / (w > 0 ? w : splat(1.0)) : x - tau; };
    auto enters = [=](VecD x, VecD w) { return kByValue ? x / (w > 0 ? w : splat(1.0)) : x; };
    if constexpr (!C::full_support) {
      struct Ends {
        VecD up, down;
      };
      edges = collect<Edges>(
          Ends{splat(kInfinity), splat(-kInfinity)},
          [=](Ends& e, VecD x, VecD w, VecD, IntD finite) {
            const IntD counts = finite & (w > 0), above = position(x, w) > median;
            const VecD up = leaves(x, w), down = enters(x, w);
            e.up = counts & above & (up < e.up) ? up : e.up;
            e.down = counts & ~above & (down > e.down) ? down : e.down;
          },
          [](Edges& s, const Ends& e) { s += {minimum<double>(e.up), maximum<double>(e.down)}; });
    }
    struct Parts {
      VecD mass{}, mean{}, moment{}, u{}, uz{}, up{}, up_v{}, down{}, down_v{};
    };
    const CarefulSums s = collect<CarefulSums>(
        Parts{},
        [=](Parts& a, VecD x, VecD w, VecD v, IntD finite) {
          const VecD unit = splat(1.0), zero{}, each = kByValue ? w : unit;
          const VecD z = finite ? position(x, w) : zero;
          const VecD log_f = F.template log_density<double>(z);
          const VecD weight = finite ? exp<double>(log_f - base) : zero,
                     f = finite ? exp<double>(log_f) : zero;
          const VecD counted = w > 0 ? weight : zero;
          a.mass += w * each * counted;
          a.mean += finite ? each * v * clamp_above<double>(weight, 1e300) : zero;
          a.moment += w * counted * z;
          a.u += each * f * v;
          a.uz += f * v * z;
          if constexpr (!C::full_support) {
            const IntD counts = finite & (w > 0), above = z > median;
            const IntD up = counts & above & (leaves(x, w) == edges.up),
                       down = counts & ~above & (enters(x, w) == edges.down);
            a.up += up ? w * each : zero, a.up_v += up ? each * v : zero;
            a.down += down ? w * each : zero, a.down_v += down ? each * v : zero;
          }
        },
        [](CarefulSums& s, const Parts& a) {
          s += {sum<double>(a.mass), sum<double>(a.mean), sum<double>(a.moment),
                sum<double>(a.u),    sum<double>(a.uz),   sum<double>(a.up),
                sum<double>(a.up_v), sum<double>(a.down), sum<double>(a.down_v)};
        });
    const bool live = s.mass != 0;
    const double through_t = grad_lo_ - s.u / tau_, spread = live ? through_t / s.mass : 0;
    double price = live ? s.mean / s.mass : 0;
    if (live && grad_lo_ != 0) price -= grad_lo_ * std::exp(std::log(tau_) - std::log(s.mass) - top);
    if (!C::full_support && !live) {
      price = 0.5 * (s.up > 0 ? s.up_v / s.up : 0) + 0.5 * (s.down > 0 ? s.down_v / s.down : 0);
    }
    grad_budget = price;
    grad_tau = -s.uz / tau_ - (live ? spread * s.moment : 0);
    const double t = t_.hi + t_.lo;
    each<double>([=](VecD x, VecD given, VecD v, VecD& dx, VecD& dw) {
      const IntD finite = abs<double>(x) < kInfinity;
      const VecD zero{}, w = finite ? given : zero, z = finite ? position(x, w) : zero;
      const VecD log_f = F.template log_density<double>(z);
      const VecD weight = finite & (w > 0) ? exp<double>(log_f - base) : zero,
                 f = finite ? exp<double>(log_f) : zero;
      dx = f * v / tau + spread * w * weight;
      const VecD share = F.template value<double>(z);
      dw = -price * (x == kInfinity ? splat(1.0) : share);
      if constexpr (kByValue) dw -= t * dx;
    });
  }

  BudgetSpec spec_;
  C F_;
  Row x_, cost_, grad_;
  double grad_lo_, tau_;
  Threshold t_;
  void *grad_x_, *grad_cost_;
  bool infinite_ = false, fixed_ = false;  // whether t is infinite, and whether it depends on anything
};

template <class C, bool kByValue>
void budget_backward_rows(const BudgetSpec& spec, const C& F, const BudgetBackwardRows& rows, int64_t begin,
                          int64_t end) {
  auto one = [&](int64_t i) {
    double grad_budget, grad_tau;
    BudgetBackward<C, kByValue>(spec, F, rows, i).run(grad_budget, grad_tau);
    rows.put(i, grad_budget, grad_tau);
  };
  int64_t i = begin;
  constexpr int width = LaneBudgetBackward<C, kByValue>::width;
  if (kExact<kByValue> && !spec.at_most && spec.n > 0 && spec.n <= kShortRow && end - begin >= width &&
      rows.x(begin).dtype != Dtype::kDouble && rows.cost(begin).dtype != Dtype::kDouble && F.fits_float) {
    LaneBudgetBackward<C, kByValue> lanes(spec, F);
    bool done[width];
    for (; i + width <= end; i += width) {
      lanes.run(rows, i, done);
      for (int j = 0; j < width; ++j) {
        if (!done[j]) one(i + j);
      }
    }
  }
  for (; i < end; ++i) one(i);
}

// The rows [begin, end).
inline void budget_backward(const BudgetSpec& spec, const BudgetBackwardRows& rows, int64_t begin,
                            int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    if (spec.by_value) {
      budget_backward_rows<C, true>(spec, F, rows, begin, end);
    } else {
      budget_backward_rows<C, false>(spec, F, rows, begin, end);
    }
  });
}

}  // namespace khot::KHOT_ISA
