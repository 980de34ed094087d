// The wide solver: scores that spread far beyond tau, or with tails so long that the moments tell nothing
// about the threshold. It lies, to within a few tau, between the entries of rank k and k + 1, which are
// selected first. Most other entries are then often so far from these two that their y is 0 or 1 for certain,
// and the search goes on without them.
#pragma once

#include <cmath>

#include "selection/kth_largest.h"
#include "selection/rank_by_counts.h"
#include "soft_topk/careful.h"
#include "soft_topk/gap.h"
#include "soft_topk/ordinary.h"

namespace khot::KHOT_ISA {

struct Cut {  // the entries of rank ceil(k) and floor(k) + 1
  double last, next;
  double middle() const { return 0.5 * last + 0.5 * next; }
};

// What is left of a row without the entries that are certain to be selected or not. n is 0 where k has no
// threshold.
struct Remainder {
  Row row;
  int64_t n = 0;
  double k, few;          // few is min(k, n - k) over the entries of the whole row that may be selected
  double guess;           // of the threshold, without the CDF's median
  Cut cut;                // NaN where the entries of rank k and k + 1 were not asked for
  double density = kNan;  // the entries about the threshold, per unit of a score, where they were counted
};

// What is left of a row within `reach` of the entries of rank k and k + 1.
template <class Order, class I>
KHOT_APART Remainder reduced(const Order& order, const Row& row, int64_t n, double k, double reach,
                             I* scratch) {
  const auto counts = order.keys(row, n, scratch);
  const double pinned = static_cast<double>(counts.pinned),
               selectable = static_cast<double>(counts.selectable);
  if (counts.nan || !(k > pinned && k < selectable)) return {};
  const double rank = std::ceil(k);
  I last, next;
  order.neighbours(scratch, n, static_cast<int64_t>(rank), last, next);
  if (rank > k) next = last;
  const Cut cut{order.value(last), order.value(next)};
  const I bottom = std::min(order.key_of(cut.next - reach), next) - 1;
  const I top = std::max(order.key_of(cut.last + reach), last) + 1;
  const int64_t above = order.at_least(scratch, n, top), size = order.at_least(scratch, n, bottom) - above;
  const double few = std::min(k - pinned, selectable - k);
  if (size > n / 4) return {row, n, k, few, cut.middle(), cut};
  order.entries(scratch, n, bottom, top);
  return {{scratch, row.dtype, 1}, size, k - static_cast<double>(above), few, cut.middle(), cut};
}

template <class C>
class WideSolver {
 public:
  WideSolver(const Row& row, int64_t n, double tau, const C& F, const Parallel* inside, Spread spread)
      : row_(row), n_(n), tau_(tau), F_(F), inside_(inside), spread_(spread) {}

  // Below so many tau, the last digit of one double is small enough for t.
  static constexpr double kSingle = 1e9;

  // Returns whether there is a threshold that float carries. Then out holds y, unless t alone is wanted, for
  // which out is room.
  KHOT_APART bool solve(double k, Threshold& t, void* out, bool t_alone) const {
    // Beyond this distance from the two entries, F or 1 - F is less than 2e-9 k/n: t differs from them by at
    // most the quantile that belongs to 1/n, or to the distance of k from the nearest integer.
    const double rank = std::ceil(k), off = rank == k ? 1 : std::min(rank - k, k - (rank - 1));
    const double far = 2 * std::log(static_cast<double>(n_) / off) + 20, reach = tau_ * C::tail_reach(far);
    Remainder rest;
    if (!reduced_by_counts(k, reach, out, rest)) {
      with_order(row_.dtype, out,
                 [&](auto order, auto* scratch) { rest = reduced(order, row_, n_, k, reach, scratch); });
    }
    if (rest.n == 0) return false;
    OrdinarySolver<C> whole(row_, n_, tau_, F_, inside_), part(rest.row, rest.n, tau_, F_, inside_);
    const double guess = rest.guess - tau_ * F_.median;
    const bool all = rest.n == n_;
    bool decided = false;
    if constexpr (C::value_from_odds) decided = rest.density * tau_ * C::decided_ratio < k;
    if (lies_in_gap(rest, t)) return t_alone || whole.write_whole(rest.cut.last, k, rest.few, out);
    bool found = false;
    if (std::fabs(guess) < kSingle * tau_) {
      if (all && whole.refine(guess, k, rest.few, t, t_alone ? nullptr : out, decided)) return true;
      found = !(all && t_alone) && part.refine(guess, rest.k, rest.few, t, nullptr);
    }
    if (!found) {
      const auto exact = FlushSubnormals::exactly(false);
      t = careful_threshold(rest.row, rest.n, rest.k, tau_, F_, inside_, guess);
    }
    if (!(std::fabs(t.hi) < kHuge)) return false;
    if (t_alone) return true;
    return rest.n * 16 > n_ ? whole.write(t, k, rest.few, out)
                            : whole.template write<true>(t, k, rest.few, out);
  }

 private:
  // Whether the entries at the cut are ends of a gap so wide that all y are 0 or 1; then t is in it.
  bool lies_in_gap(const Remainder& rest, Threshold& t) const {
    if constexpr (C::full_support) {
      const auto [last, next] = rest.cut;
      if (!(last - next > 2 * kDeep<C> * tau_)) return false;
      t = in_gap(last, next, tau_ * off_middle<C>(rest.row, rest.n, nullptr, last, next, tau_));
      return true;
    }
    return false;
  }

  // What is left where a few counts lead to the entries; not for infinite scores, nor near the ends.
  bool reduced_by_counts(double k, double reach, void* scratch, Remainder& rest) const {
    const double n = static_cast<double>(n_);
    const bool suits = row_.dtype == Dtype::kFloat && row_.step == 1 && n_ >= 64 && n_ <= 1 << 15;
    if (!suits || scratch == nullptr || !(k > 1 && k < n - 1)) return false;
    const int rank = static_cast<int>(std::ceil(k));
    RankByCounts around(static_cast<const float*>(row_.data), static_cast<int>(n_), rank);
    if (!(spread_.variance >= 0) || !around.bracket(spread_.mean, std::sqrt(spread_.variance))) return false;
    const double few = std::min(k, n - k), place = around.place(k);
    if (std::fabs(place) < kInfinity && around.within(reach) > n_ / 4) {
      rest = {row_, n_, k, few, place, {kNan, kNan}, around.density()};
      return true;
    }
    Cut cut;
    const int kept = around.keep(reach, static_cast<float*>(scratch));
    if (!around.neighbours(cut.last, cut.next)) return false;
    if (rank > k) cut.next = cut.last;
    if (kept > n_ / 4) {
      rest = {row_, n_, k, few, cut.middle(), cut};
    } else {
      rest = {{scratch, row_.dtype, 1}, kept, k - around.above(), few, cut.middle(), cut};
    }
    return true;
  }

  Row row_;
  int64_t n_;
  double tau_;
  C F_;
  const Parallel* inside_;
  Spread spread_;
};

}  // namespace khot::KHOT_ISA
