// The entry point of the forward pass (khot/_kernels/reference/soft_topk.py): which solver takes which row.
// The table in csrc/README.md says the same in words.
#pragma once

#include <cmath>
#include <memory>

#include "soft_topk/apply.h"
#include "soft_topk/careful.h"
#include "soft_topk/in_double.h"
#include "soft_topk/lanes.h"
#include "soft_topk/ordinary.h"
#include "soft_topk/wide.h"

namespace khot::KHOT_ISA {

// The same row in float; where that would take digits of z, less one of its entries.
inline Row in_float(const Row& x, int64_t n, double tau, const Parallel* inside, void* copy, double& origin) {
  double first;
  const double size = std::fabs(origin = *fetch(x, 0, 1, &first));
  if (!(size > 1e4 * tau && size < kHuge)) origin = 0;
  map<double>(x, n, inside, copy, Dtype::kFloat,
              [origin = origin](VecD v, int64_t, int) { return v - origin; });
  return {copy, Dtype::kFloat, 1};
}

// One row: the ordinary solver first, then the wide one, then the careful one, until one of them has an
// answer. What the first two find is given the digits of double where float has not those that are wanted.
template <class C>
void forward_row(const Spec& spec, const C& F, const Row& x, double k, double tau, void* out, Goal& goal,
                 Threshold& t) {
  const bool log = spec.output == Output::kLog;
  // room: for the result, or for as many numbers of the dtype of the row
  auto search = [&](const Row& row, void* room, bool t_alone, double last) {
    const FlushSubnormals flush;
    OrdinarySolver<C> ordinary(row, spec.n, tau, F, spec.inside);
    if (t_alone ? ordinary.approach(k, goal, t, last) : ordinary.solve(k, goal, t, room)) return true;
    return WideSolver<C>(row, spec.n, tau, F, spec.inside, ordinary.spread()).solve(k, t, room, t_alone);
  };
  auto in_double = [&] {
    const bool is_double = x.dtype == Dtype::kDouble, threshold = spec.output == Output::kThreshold;
    const std::unique_ptr<double[]> own(threshold ? new double[spec.n] : nullptr);
    auto* room = static_cast<float*>(threshold ? own.get() : out);
    double origin = 0;
    const Row row = is_double ? in_float(x, spec.n, tau, spec.inside, room, origin) : x;
    const bool found =
        search(row, is_double ? room + spec.n : room, true, C::full_support ? C::last_step : 1e-3);
    t.hi += origin;
    return found && DoubleRow<C>(spec, F, x, k, tau).finish(t, out);
  };
  const double left = std::ceil(k) - k;  // where all but this may be chosen, of however many entries
  const bool by_float = float_carries(spec, F, x.dtype, tau) &&
                        !(kBends<C> && log && (k < C::least_logged || (left > 0 && left < kLeastLeft)));
  if (!(tau > 0 && tau < kInfinity)) {
    t = {kNan, kNan};
  } else if (by_float ? search(x, out, log, OrdinarySolver<C>::kLastUnchecked)
                      : float_may_search(F, tau) && in_double()) {
    if (by_float && log) {
      apply<float>(spec, F, x, t, tau, out);
      const bool finite = std::fabs(t.hi) < kHuge;
      if (kBends<C> && x.dtype == Dtype::kFloat && finite) write_bent_logs(spec, x, t, tau, out);
    }
    return;
  } else {
    t = careful_threshold(x, spec.n, k, tau, F, spec.inside);
  }
  if (spec.output != Output::kThreshold) apply<double>(spec, F, x, t, tau, out);
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
    const bool together = spec.n > 0 && spec.n <= kShortRow && F.fits_float;
    // Where y does not follow from float, lanes look for the threshold alone.
    Spec search = spec;
    if (rows.x(begin).dtype == Dtype::kDouble || (spec.output == Output::kLog && !C::log_fits_float))
      search.output = Output::kThreshold;
    LaneSolver<C> lanes(search, F);
    auto several = [&](int64_t first, bool* done) {
      {
        const FlushSubnormals flush;
        lanes.solve(rows, first, goal, done);
      }
      const bool finds_t = search.output == Output::kThreshold;
      const bool bends = kBends<C> && search.output == Output::kLog;
      for (int64_t j = 0; (finds_t || bends) && j < lanes.width; ++j) {
        if (!done[j]) continue;
        const int64_t i = first + j;
        Threshold t = lanes.threshold(j);
        if (bends) {
          if (lanes.is_bent(j)) write_bent_logs(spec, rows.x(i), t, rows.tau(i), rows.out(i));
          continue;
        }
        done[j] = DoubleRow<C>(spec, F, rows.x(i), rows.k(i), rows.tau(i)).finish(t, rows.out(i));
        rows.put(i, t);
      }
    };
    each_row(together, begin, end, several, one);
  });
}

}  // namespace khot::KHOT_ISA
