// The entry point of the forward pass (khot/_kernels/reference/soft_topk.py): which solver takes which row.
// The table in csrc/README.md says the same in words.
#pragma once

#include <cmath>

#include "soft_topk/apply.h"
#include "soft_topk/careful.h"
#include "soft_topk/in_double.h"
#include "soft_topk/lanes.h"
#include "soft_topk/ordinary.h"
#include "soft_topk/polish.h"
#include "soft_topk/wide.h"

namespace khot::KHOT_ISA {

// One row: the ordinary solver first, then the wide one, then the careful one, until one of them has an
// answer.
template <class C>
void forward_row(const Spec& spec, const C& F, const Row& x, double k, double tau, void* out, Goal& goal,
                 Threshold& t) {
  const bool log = spec.output == Output::kLog;
  auto in_float = [&] {
    OrdinarySolver<C> solver(x, spec.n, tau, F, spec.inside);
    {
      const FlushSubnormals flush;
      if (log ? solver.approach(k, goal, t, solver.kLastUnchecked) : solver.solve(k, goal, t, out))
        return true;
    }
    return WideSolver<C>(x, spec.n, tau, F, spec.inside, solver.spread()).solve(k, t, out, log);
  };
  auto threshold_in_float = [&] {
    if constexpr (C::full_support) {
      OrdinarySolver<C> solver(x, spec.n, tau, F, spec.inside);
      {
        const FlushSubnormals flush;
        if (!solver.approach(k, goal, t)) return false;
      }
      return polish(x, spec.n, tau, F, spec.inside, k, solver.slope(), t);
    }
    return false;
  };
  auto in_double = [&] {
    {
      const FlushSubnormals flush;
      if (!OrdinarySolver<C>(x, spec.n, tau, F, spec.inside).approach(k, goal, t)) return false;
    }
    return DoubleRow<C>(spec, F, x, k, tau).finish(t, out);
  };
  bool fast = false;
  if (!(tau > 0 && tau < kInfinity)) {
    t = {kNan, kNan};
  } else if (float_carries(spec, F, x.dtype, tau) && in_float()) {
    fast = true;
  } else if (float_carries_threshold(spec, F, x.dtype, tau) && threshold_in_float()) {
    return;
  } else if (x.dtype == Dtype::kDouble && DoubleRow<C>::suits(F, tau) && in_double()) {
    return;
  } else {
    t = CarefulSolver<C>(x, spec.n, tau, F, spec.inside).solve(k);
  }
  if (fast && log) {
    apply<float>(spec, F, x, t, tau, out);
  } else if (!fast && spec.output != Output::kThreshold) {
    apply<double>(spec, F, x, t, tau, out);
  }
}

// The rows [begin, end): short ones in groups, as many as a vector has lanes, and the others one by one. What
// a group gives back is solved one by one, too.
inline void forward(const Spec& spec, const ForwardRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    using C = decltype(F);
    if (begin == end) return;
    Goal goal;
    const bool threshold = spec.output == Output::kThreshold;
    FloatCopies copies(rows.x(begin).dtype, spec.n, 2);
    auto one = [&](int64_t i) {
      Threshold t;
      void* const out = copies.instead_of(rows.out(i), 1);
      forward_row(spec, F, copies.of(rows.x(i), 0), rows.k(i), rows.tau(i), out, goal, t);
      if (!threshold) copies.finish(rows.out(i), 1);
      rows.put(i, t);
    };
    // In double, lanes look for the threshold alone.
    const bool in_double = rows.x(begin).dtype == Dtype::kDouble;
    const bool together = spec.n > 0 && spec.n <= kShortRow && F.fits_float &&
                          (in_double ? C::full_support : C::log_fits_float || spec.output != Output::kLog);
    Spec search = spec;
    if (in_double) search.output = Output::kThreshold;
    LaneSolver<C> lanes(search, F);
    auto several = [&](int64_t first, bool* done) {
      {
        const FlushSubnormals flush;
        lanes.solve(rows, first, goal, done);
      }
      for (int64_t j = 0; search.output == Output::kThreshold && j < lanes.width; ++j) {
        if (!done[j]) continue;
        const int64_t i = first + j;
        Threshold t = lanes.threshold(j);
        const double k = rows.k(i), tau = rows.tau(i);
        done[j] = in_double ? DoubleRow<C>(spec, F, rows.x(i), k, tau).finish(t, rows.out(i))
                            : polish(rows.x(i), spec.n, tau, F, nullptr, k, lanes.slope(j), t);
        rows.put(i, t);
      }
    };
    each_row(together, begin, end, several, one);
  });
}

}  // namespace khot::KHOT_ISA
