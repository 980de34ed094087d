// The gradients of the soft budget (khot/_kernels/reference/soft_budget.py). With f = f(z), the incoming
// gradient v, D = sum w a f and m = (sum a f v - grad_lo tau)/D:
//
//   dL/dx = f (v - w m)/tau     dL/dB = m     dL/dw = -m y, less t dL/dx by value
//   dL/dtau = (m sum w f z - sum f v z)/tau
#pragma once

#include <algorithm>
#include <cmath>

#include "budget/backward_lanes.h"
#include "budget/block_cdf.h"
#include "budget/weights.h"
#include "soft_topk/apply.h"
#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

class BudgetBackward {
 public:
  BudgetBackward(const BudgetSpec& spec, const BlockCdf& F, const BudgetBackwardRows& rows, int64_t row)
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
      return each<double>([](const Block<double>&, int, VecD, VecD& dx, VecD& dw) { dx = dw = splat(kNan); });
    }
    infinite_ = std::fabs(t_.hi) == kHuge;
    fixed_ = infinite_ || (spec_.at_most && t_.hi == 0 && t_.lo == 0);
    if (infinite_) t_ = {0, 0};
    if (exact(spec_.by_value) && !fixed_ && float_carries(spec_, F_, x_.dtype, tau_) &&
        std::fabs(t_.hi) < 1e30) {
      const FlushSubnormals flush;
      if (ordinary<float>(grad_budget, grad_tau)) return;
    }
    if (ordinary<double>(grad_budget, grad_tau)) return;
    if (!F_.full_support && flat_) return in_gap(grad_budget, grad_tau);
    careful(grad_budget, grad_tau);
  }

 private:
  // The entries of a block: costs, with 0 for an infinite score, z, F, f and, in careful(), log f.
  template <class R>
  struct Block {
    R w[kWhole<R>], z[kWhole<R>], y[kWhole<R>], f[kWhole<R>], log_f[kWhole<R>];
  };

  // Where t is infinite, entries are decided, except by value those that cost nothing.
  template <class R>
  KHOT_APART void entries(const R* x, const R* w, int count, Block<R>& b) const {
    F_.tails(Position<R>(t_, tau_, spec_.by_value, F_.full_support), x, w, count, b.z, b.y, b.f);
    const R median = static_cast<R>(F_.median);
    const bool held = infinite_;
    const Int<R> by_value = spec_.by_value ? ~Int<R>{} : Int<R>{};
    vectors<R>(x, count, kInf<R>, [&](Vec<R> v, int i, int lanes) {
      const Int<R> finite = abs<R>(v) < kInf<R>;
      const Vec<R> z = load(b.z + i), tail = load(b.y + i), costs = finite ? beside(w, i, lanes) : Vec<R>{};
      const Int<R> counts = held ? finite & by_value & (costs == 0) : finite;
      store(b.w + i, costs);
      // where z overflows, f is 0, and its product with z has to be 0, too
      if constexpr (sizeof(R) == 8) store(b.z + i, clamp_above<R>(clamp_below<R>(z, -1e280), 1e280));
      store(b.f + i, counts ? load(b.f + i) : Vec<R>{});
      const Vec<R> y = z > median ? 1 - tail : tail, decided = v > 0 ? splat<R>(1) : Vec<R>{};
      store(b.y + i, finite ? y : decided);
    });
  }

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
    const Row cost = cost_, grad = grad_;
    const Position<R> position(t_, tau_, spec_.by_value);
    const Sums s =
        reduce<R, Sums>(x_, spec_.n, spec_.inside, [&](Sums& sums, const R* p, int count, int64_t at) {
          R costs[kBlock], incoming[kBlock];
          Block<R> b;
          entries(p, fetch(cost, at, count, costs), count, b);
          const R* g = fetch(grad, at, count, incoming);
          Vec<R> mass{}, mean{}, moment{}, pull{};
          vectors<R>(g, count, R(0), [&](Vec<R> v, int i, int lanes) {
            const Vec<R> w = load(b.w + i), z = load(b.z + i), f = load(b.f + i), wf = w * f, fv = f * v;
            mass += wf * position.a(w);
            mean += fv * position.a(w);
            moment += wf * z;
            pull += fv * z;
            if (keep) {
              store_beside(kept_f + at, i, lanes, f);
              store_beside(kept_y + at, i, lanes, load(b.y + i));
            }
          });
          sums += {static_cast<double>(sum<R>(mass)), static_cast<double>(sum<R>(mean)),
                   static_cast<double>(sum<R>(moment)), static_cast<double>(sum<R>(pull))};
        });
    const double pushed = grad_lo_ == 0 ? 0 : grad_lo_ * tau_;
    double price = 0;
    if (!fixed_) {
      flat_ = s.mass == 0;
      if (!(s.mass > kLeastMass<R> && s.mass < 1 / kLeastMass<R>)) return false;
      price = (s.mean - pushed) / s.mass;
      if (in_float && !(std::fabs(price) < 1e30 && std::fabs(s.moment) + std::fabs(s.pull) < kInfinity))
        return false;
    }
    grad_budget = price;
    grad_tau = ((price == 0 ? 0 : price * s.moment) - s.pull) / tau_;
    const R m = static_cast<R>(price), scale = static_cast<R>(1 / tau_), t = static_cast<R>(t_.hi + t_.lo);
    const Int<R> by_value = position.by_value;
    const bool rests = in_float && spec_.by_value && !fixed_;  // as in LaneBudgetBackward
    const R lo = rests ? static_cast<R>((left_of(m, kept_f) - pushed) / s.mass) : 0;
    auto gradients = [=](Vec<R> f, Vec<R> y, Vec<R> w, Vec<R> v, Vec<R>& dx, Vec<R>& dw) {
      dx = f * ((v - w * m) - w * lo) * scale;
      dw = -m * y - (by_value ? t * dx : Vec<R>{});
    };
    if (keep) {
      chunks(spec_.n, spec_.inside, [&](int64_t begin, int64_t end, int64_t) {
        R from[kBlock], costs[kBlock], incoming[kBlock];
        for (int64_t at = begin; at < end; at += kBlock) {
          const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
          const R *p = fetch(x_, at, count, from), *q = fetch(cost, at, count, costs),
                  *g = fetch(grad, at, count, incoming);
          vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
            const Vec<R> f = beside(kept_f + at, i, lanes), y = beside(kept_y + at, i, lanes);
            const Vec<R> w = x > -kInf<R> ? beside(q, i, lanes) : Vec<R>{};
            Vec<R> dx, dw;
            gradients(f, y, w, beside(g, i, lanes), dx, dw);
            store_beside(kept_f + at, i, lanes, dx);
            store_beside(kept_y + at, i, lanes, dw);
          });
        }
      });
    } else {
      each<R>([=](const Block<R>& b, int i, Vec<R> v, Vec<R>& dx, Vec<R>& dw) {
        gradients(load(b.f + i), load(b.y + i), load(b.w + i), v, dx, dw);
        if (m == 0) dw = by_value ? -t * dx : Vec<R>{};
      });
    }
    return true;
  }

  // By value: the sum of a f (v - w m).
  template <class R>
  double left_of(R m, const R* kept_f) const {
    const Row cost = cost_, grad = grad_;
    return reduce<R, double>(x_, spec_.n, spec_.inside, [&](double& left, const R* p, int count, int64_t at) {
      R costs[kBlock], incoming[kBlock];
      const R *q = fetch(cost, at, count, costs), *g = fetch(grad, at, count, incoming);
      Block<R> b;
      if (!kept_f) entries(p, q, count, b);
      const R* f = kept_f ? kept_f + at : b.f;
      Vec<R> total{};
      vectors<R>(p, count, -kInf<R>, [&](Vec<R> x, int i, int lanes) {
        const Vec<R> w = x > -kInf<R> ? beside(q, i, lanes) : Vec<R>{};
        total += w * beside(f, i, lanes) * (beside(g, i, lanes) - w * m);
      });
      left += static_cast<double>(sum<R>(total));
    });
  }

  // Writes dL/dx and dL/dw, which value(b, i, v, dx, dw) computes for the vector of a block that begins at i.
  template <class R, class Value>
  void each(Value value, bool logs = false) {
    constexpr Dtype own = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
    const bool own_x = x_.dtype == own, own_cost = cost_.dtype == own;
    chunks(spec_.n, spec_.inside, [&](int64_t begin, int64_t end, int64_t) {
      R from[kBlock], costs[kBlock], incoming[kBlock], dxs[kBlock], dws[kWhole<R>];
      Block<R> b;
      for (int64_t at = begin; at < end; at += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
        const R *p = fetch(x_, at, count, from), *q = fetch(cost_, at, count, costs),
                *g = fetch(grad_, at, count, incoming);
        R *const to_x = own_x ? static_cast<R*>(grad_x_) + at : dxs, *const to_cost =
                                                                         own_cost
                                                                             ? static_cast<R*>(grad_cost_) +
                                                                                   at
                                                                             : dws;
        entries(p, q, count, b);
        if constexpr (sizeof(R) == 8) {
          if (logs) F_.log_densities(b.z, count, b.log_f);
        }
        vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
          Vec<R> dx, dw;
          value(b, i, beside(g, i, lanes), dx, dw);
          dw = x == -kInf<R> ? Vec<R>{} : dw;
          store_beside(to_x, i, lanes, dx);
          store_beside(to_cost, i, lanes, dw);
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
  struct EdgeSums {
    double pull = 0, up = 0, down = 0;  // of f v z, and of a v at the ends of the gap
    void operator+=(const EdgeSums& o) { pull += o.pull, up += o.up, down += o.down; }
  };
  struct CarefulSums {
    double mass = 0, mean = 0, moment = 0;  // with weights relative to the largest density
    double u = 0, uz = 0;                   // of a f v and f v z
    void operator+=(const CarefulSums& o) {
      mass += o.mass, mean += o.mean, moment += o.moment, u += o.u, uz += o.uz;
    }
  };

  // body(parts, x, b, i, v) for all vectors of the row. With `logs`, b has log f, too.
  template <class S, class Parts, class Body, class Put>
  S collect(bool logs, Parts start, Body body, Put put_parts) const {
    const Row cost = cost_, grad = grad_;
    return reduce<double, S>(x_, spec_.n, spec_.inside, [&](S& sums, const double* p, int count, int64_t at) {
      double costs[kBlock], incoming[kBlock];
      Block<double> b;
      entries(p, fetch(cost, at, count, costs), count, b);
      if (logs) F_.log_densities(b.z, count, b.log_f);
      const double* g = fetch(grad, at, count, incoming);
      Parts parts = start;
      vectors<double>(p, count, -kInfinity,
                      [&](VecD x, int i, int lanes) { body(parts, x, b, i, beside(g, i, lanes)); });
      put_parts(sums, parts);
    });
  }

  // No entry that costs something has a density: t lies in a gap of compact support, and dL/dB is the limit
  // of smooth CDFs, of which the entries next to the gap have w f in common.
  void in_gap(double& grad_budget, double& grad_tau) {
    using Entries = Block<double>;
    const Position<double> position(t_, tau_, spec_.by_value);
    const double tau = tau_, median = F_.median;
    auto leaves = [=](VecD x, VecD a) { return (x - tau) / a; };
    auto enters = [=](VecD x, VecD a) { return x / a; };
    auto counts = [](VecD x, VecD w) { return (abs<double>(x) < kInfinity) & (w > 0); };
    struct Ends {
      EdgeLanes up{splat(kInfinity)}, down{splat(kInfinity)};
    };
    const BudgetGap gap = collect<BudgetGap>(
        false, Ends{},
        [=](Ends& ends, VecD x, const Entries& b, int i, VecD) {
          const VecD w = load(b.w + i);
          const IntD here = counts(x, w), above = load(b.z + i) > median;
          const VecD a = position.a(here ? w : splat(1.0));
          ends.up.add(leaves(x, a), w, a, here & above);
          ends.down.add(-enters(x, a), w, a, here & ~above);
        },
        [](BudgetGap& s, const Ends& ends) { s += {ends.up.least(1), ends.down.least(-1)}; });
    struct Parts {
      VecD pull{}, up{}, down{};
    };
    const EdgeSums s = collect<EdgeSums>(
        false, Parts{},
        [=](Parts& parts, VecD x, const Entries& b, int i, VecD v) {
          const VecD zero{}, w = load(b.w + i), z = load(b.z + i);
          const IntD here = counts(x, w), above = z > median;
          const VecD a = position.a(here ? w : splat(1.0));
          parts.pull += load(b.f + i) * v * z;
          parts.up += here & above & (leaves(x, a) == gap.up.level) ? a * v : zero;
          parts.down += here & ~above & (enters(x, a) == gap.down.level) ? a * v : zero;
        },
        [](EdgeSums& s, const Parts& a) {
          s += {sum<double>(a.pull), sum<double>(a.up), sum<double>(a.down)};
        });
    const double above = gap.up.wa > 0 ? s.up / gap.up.wa : 0,
                 below = gap.down.wa > 0 ? s.down / gap.down.wa : 0;
    const double price = gap.share() * above + (1 - gap.share()) * below;
    grad_budget = price;
    grad_tau = -s.pull / tau_;
    const double t = t_.hi + t_.lo;
    each<double>([=](const Entries& b, int i, VecD v, VecD& dx, VecD& dw) {
      dx = load(b.f + i) * v / tau;
      dw = -price * load(b.y + i) - (position.by_value ? t * dx : VecD{});
    });
  }

  void careful(double& grad_budget, double& grad_tau) {
    using Entries = Block<double>;
    const Position<double> position(t_, tau_, spec_.by_value);
    const double tau = tau_;
    auto finite = [](VecD x) { return abs<double>(x) < kInfinity; };
    struct Most {
      VecD most;
    };
    const double top = collect<Largest>(
                           true, Most{splat(-kInfinity)},
                           [=](Most& m, VecD x, const Entries& b, int i, VecD) {
                             const IntD counts = finite(x) & (load(b.w + i) > 0);
                             const VecD log_f = counts ? load(b.log_f + i) : splat(-kInfinity);
                             m.most = log_f > m.most ? log_f : m.most;
                           },
                           [](Largest& s, const Most& m) { s += {maximum<double>(m.most)}; })
                           .log_f;
    const double base = std::max(top, -kHuge);
    struct Parts {
      VecD mass{}, mean{}, moment{}, u{}, uz{};
    };
    const CarefulSums s = collect<CarefulSums>(
        true, Parts{},
        [=](Parts& a, VecD x, const Entries& b, int i, VecD v) {
          const VecD zero{}, w = load(b.w + i), z = load(b.z + i), log_f = load(b.log_f + i),
                             each = position.a(w);
          const IntD free = finite(x);
          const VecD weight = free ? exp<double>(log_f - base) : zero, f = free ? exp<double>(log_f) : zero;
          const VecD counted = w > 0 ? weight : zero;
          a.mass += w * each * counted;
          a.mean += free ? each * v * clamp_above<double>(weight, 1e300) : zero;
          a.moment += w * counted * z;
          a.u += each * f * v;
          a.uz += f * v * z;
        },
        [](CarefulSums& s, const Parts& a) {
          s += {sum<double>(a.mass), sum<double>(a.mean), sum<double>(a.moment), sum<double>(a.u),
                sum<double>(a.uz)};
        });
    const bool live = s.mass != 0;
    if (!F_.full_support && !live) return in_gap(grad_budget, grad_tau);
    const double through_t = grad_lo_ - s.u / tau_, spread = live ? through_t / s.mass : 0;
    double price = live ? s.mean / s.mass : 0;
    if (live && grad_lo_ != 0) price -= grad_lo_ * std::exp(std::log(tau_) - std::log(s.mass) - top);
    grad_budget = price;
    grad_tau = -s.uz / tau_ - (live ? spread * s.moment : 0);
    const double t = t_.hi + t_.lo;
    each<double>(
        [=](const Entries& b, int i, VecD v, VecD& dx, VecD& dw) {
          const VecD zero{}, w = load(b.w + i), log_f = load(b.log_f + i);
          const VecD weight = w > 0 ? exp<double>(log_f - base) : zero;
          dx = load(b.f + i) * v / tau + spread * w * weight;
          dw = -price * load(b.y + i) - (position.by_value ? t * dx : zero);
        },
        true);
  }

  BudgetSpec spec_;
  BlockCdf F_;
  Row x_, cost_, grad_;
  double grad_lo_, tau_;
  Threshold t_;
  void *grad_x_, *grad_cost_;
  bool flat_ = false;                      // whether no entry that costs something has a density
  bool infinite_ = false, fixed_ = false;  // whether t is infinite, and whether it depends on anything
};

inline void budget_backward_rows(const BudgetSpec& spec, const BlockCdf& F, const BudgetBackwardRows& rows,
                                 int64_t begin, int64_t end) {
  auto one = [&](int64_t i) {
    double grad_budget, grad_tau;
    BudgetBackward(spec, F, rows, i).run(grad_budget, grad_tau);
    rows.put(i, grad_budget, grad_tau);
  };
  LaneBudgetBackward lanes(spec, F);
  const bool together = exact(spec.by_value) && !spec.at_most && begin < end && F.fits_float &&
                        fits_tile(rows.x(begin), spec.n) && fits_tile(rows.cost(begin), spec.n);
  each_row(together, begin, end, [&](int64_t first, bool* done) { lanes.run(rows, first, done); }, one);
}

// The rows [begin, end).
inline void budget_backward(const BudgetSpec& spec, const BudgetBackwardRows& rows, int64_t begin,
                            int64_t end) {
  with_cdf(spec, [&](auto F) {
    const auto same = general(F);
    budget_backward_rows(spec, BlockCdf(same), rows, begin, end);
  });
}

}  // namespace khot::KHOT_ISA
