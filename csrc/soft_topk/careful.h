// The careful solver: the threshold t of any row, in double, by the solver of the soft budget with costs
// of 1.
#pragma once

#include "budget/careful.h"

namespace khot::KHOT_ISA {

// From a guess of the threshold, if there is one.
template <class C>
KHOT_APART Threshold careful_threshold(const Row& x, int64_t n, double k, double tau, const C& F,
                                       const Parallel* inside, double guess = kNan) {
  const double one = 1;
  const auto same = general(F);
  BudgetSpec spec{};
  spec.n = n, spec.inside = inside;
  return CarefulBudget(spec, BlockCdf(same), x, Row{&one, Dtype::kDouble, 0}, tau).solve(k, guess);
}

}  // namespace khot::KHOT_ISA
