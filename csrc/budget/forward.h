// The entry point of the soft budget (khot/_kernels/reference/soft_budget.py): which solver takes which row.
#pragma once

#include <cmath>

#include "budget/careful.h"
#include "budget/lanes.h"
#include "budget/near.h"
#include "budget/ordinary.h"
#include "soft_topk/apply.h"

namespace khot::KHOT_ISA {

// Writes y at the threshold t, in double.
inline void apply_budget(const BudgetSpec& spec, const BlockCdf& F, const Row& x, const Row& cost,
                         Threshold t, double tau, void* out) {
  if (std::isnan(t.hi)) return fill_constant<double>(spec, out, x.dtype, x, kNan, kNan, 0);
  const bool infinite = std::fabs(t.hi) == kHuge;
  if (infinite && !spec.by_value) {
    return t.hi > 0 ? fill_constant<double>(spec, out, x.dtype, x, 0, 1, kInfinity)
                    : fill_constant<double>(spec, out, x.dtype, x, 1, 0, -kInfinity);
  }
  // by value, free entries do not depend on t
  const Position<double> position(infinite ? Threshold{0, 0} : t, tau, spec.by_value);
  const double held = t.hi < 0 ? 1 : 0;
  chunks(spec.n, spec.inside, [&](int64_t begin, int64_t end, int64_t) {
    double from[kBlock], costs[kBlock], z[kWhole<double>], tails[kWhole<double>], y[kWhole<double>];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const double *p = fetch(x, at, count, from), *q = fetch(cost, at, count, costs);
      F.tails(position, p, q, count, z, tails, y);
      vectors<double>(p, count, 0.0, [&](VecD v, int i, int lanes) {
        const IntD finite = abs<double>(v) < kInfinity;
        const VecD w = finite ? beside(q, i, lanes) : VecD{}, tail = load(tails + i), one = splat(1.0);
        const VecD share = load(z + i) > F.median ? 1 - tail : tail, decided = v > 0 ? one : VecD{};
        const VecD chosen = infinite & finite & (w > 0) ? splat(held) : finite ? share : decided;
        store(y + i, chosen);
      });
      put(out, x.dtype, at, count, y);
    }
  });
}

template <bool kByValue, class C>
void budget_row(const BudgetSpec& spec, const C& F, const BlockCdf& careful, const Row& x, const Row& cost,
                double budget, double tau, void* out, Goal& goal, Threshold& t) {
  if (exact(kByValue) && float_carries(spec, F, x.dtype, tau)) {
    OrdinaryBudget<C, kByValue> ordinary(x, cost, spec.n, tau, F, spec.inside);
    auto solved = [&](bool leaves_wide) {
      const FlushSubnormals flush;
      return ordinary.solve(budget, spec.at_most, leaves_wide, goal, t, out);
    };
    const bool near = suits_near(spec, x, cost);
    if (solved(near)) return;
    if (near &&
        solve_near<kByValue>(spec, F, careful, x, cost, budget, tau, ordinary.around(), out, goal, t)) {
      return;
    }
    if (near && ordinary.is_wide() && solved(false)) return;
  }
  t = CarefulBudget(spec, careful, x, cost, tau).solve(budget);
  apply_budget(spec, careful, x, cost, t, tau, out);
}

template <bool kByValue, class C>
void budget_rows(const BudgetSpec& spec, const C& F, const BudgetRows& rows, int64_t begin, int64_t end) {
  Goal goal;
  const BlockCdf careful(F);
  auto one = [&](int64_t i) {
    Threshold t;
    budget_row<kByValue>(spec, F, careful, rows.x(i), rows.cost(i), rows.k(i), rows.tau(i), rows.out(i), goal,
                         t);
    rows.put(i, t);
  };
  if constexpr (LaneBudget<C, kByValue>::serves) {
    LaneBudget<C, kByValue> lanes(spec, F);
    auto several = [&](int64_t first, bool* done) {
      const FlushSubnormals flush;
      lanes.solve(rows, first, spec.at_most, done);
    };
    const bool together = begin < end && fits_tile(rows.x(begin), spec.n) && F.fits_float;
    return each_row(together, begin, end, several, one);
  }
  for (int64_t i = begin; i < end; ++i) one(i);
}

// The rows [begin, end): short ones in groups, as many as a vector has lanes, and the others one by one. What
// a group gives back is solved one by one, too.
inline void budget(const BudgetSpec& spec, const BudgetRows& rows, int64_t begin, int64_t end) {
  with_cdf(spec, [&](auto F) {
    spec.by_value ? budget_rows<true>(spec, general(F), rows, begin, end)
                  : budget_rows<false>(spec, general(F), rows, begin, end);
  });
}

}  // namespace khot::KHOT_ISA
