// The search for a threshold in float, of one row (search/row.h) or of short rows side by side, one per lane
// (search/lanes.h): steps from a guess until one is so short that it is the last.
#pragma once

namespace khot::KHOT_ISA {

// Where a search has ended.
template <class Rows>
struct Found {
  typename Rows::Sums sums;                // of the last pass
  typename Rows::Arithmetic::Value moved;  // by how much t has moved since the pass that stored odds, in tau
};

// What `rows` has to have: good, the rows that this search suits, of which those are left at the end whose
// threshold it has found; evaluate(), the sums at t; step(sums), the step to the next trial, in tau; move(h),
// which takes it; goes_on(h), whether it was not the last; and, with kStores, stores(), whether evaluate()
// stores odds, and shift(h), the sums at t from those that it stored at t - h tau.
template <class Rows>
KHOT_INLINE Found<Rows> find(Rows& rows) {
  using A = typename Rows::Arithmetic;
  typename Rows::Sums sums = rows.evaluate();
  typename A::Value moved = A::splat(0);
  typename A::Mask pending = A::none();
  for (int trial = 1;; ++trial) {
    const typename A::Value h = rows.step(sums);
    rows.move(h);
    moved += h;
    const bool stored = Rows::kStores && rows.stores();
    const typename A::Mask far = stored ? A::abs(moved) >= 1 : A::none();  // odds may overflow
    pending = rows.good & (rows.goes_on(h) | far);
    if (!A::any(pending) || trial == Rows::kTrials) break;
    if constexpr (Rows::kStores) {
      if (stored && !A::any(rows.good & far)) {
        sums = rows.shift(moved);
        continue;
      }
    }
    moved = A::splat(0);
    sums = rows.evaluate();
  }
  rows.good = rows.good & A::otherwise(pending);
  return {sums, moved};
}

}  // namespace khot::KHOT_ISA
