// The hard mask: 1 for the k largest entries of a row, 0 for the others. Of equal entries the first are
// selected. Short rows are taken together, one per lane.
#pragma once

#include <algorithm>
#include <cmath>

#include "selection/groups.h"
#include "selection/kth_largest.h"
#include "selection/rank_lanes.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// Replaces the keys [begin, end) by 1 where they reach the level, and by 0 elsewhere.
template <class I>
void mark(I* keys, int64_t begin, int64_t end, I level, I one) {
  for (int64_t i = begin; i < end; ++i) keys[i] = -static_cast<I>(keys[i] >= level) & one;
}

// The mask of a row whose k-th largest entry is finite, for k that is small beside n. Returns false for every
// other row.
template <class I>
bool mask_by_groups(const Ordered<I>& order, const Row& x, int64_t n, double k, I* out) {
  const int64_t count = static_cast<int64_t>(k);
  if (x.step != 1 || !(k >= 1 && k <= static_cast<double>(n)) || static_cast<double>(count) != k ||
      !Groups<I>::suits(n, count)) {
    return false;
  }
  static thread_local typename Groups<I>::Scratch scratch;
  Groups<I> groups(order, scratch, true);
  if (!groups.find(static_cast<const I*>(x.data), n, count)) return false;
  const I last = groups.last();
  if (last == -order.infinity || last == order.infinity) return false;
  std::fill(out, out + n, I(0));
  for (int64_t j = 0; j < count; ++j) out[groups.place(j)] = order.one;
  return true;
}

template <class I>
void write_mask(const Ordered<I>& order, const Row& x, int64_t n, double k, I* out) {
  if (mask_by_groups(order, x, n, k, out)) return;
  const auto counts = order.keys(x, n, out);
  const double rounded = std::floor(k + 0.5);
  if (counts.nan || !(k >= 0 && k <= static_cast<double>(counts.selectable)) ||
      static_cast<double>(counts.pinned) > rounded) {
    std::fill(out, out + n, order.nan);
    return;
  }
  const int64_t count = static_cast<int64_t>(rounded);
  if (count == 0) return std::fill(out, out + n, I(0));
  const I level = kth_largest(order, out, n, count);
  if (Ordered<I>::at_least(out, n, level) == count) return mark(out, 0, n, level, order.one);
  // Of the entries at the level, only the first are selected: those before `end`.
  int64_t left = count - Ordered<I>::at_least(out, n, level + 1), end = 0;
  for (;;) {
    const int64_t next = std::min<int64_t>(end + kBlock, n);
    I ties = 0;
    for (int64_t i = end; i < next; ++i) ties += out[i] == level;
    if (ties >= left) break;
    left -= ties, end = next;
  }
  while (left > 0) left -= out[end++] == level;
  mark(out, 0, end, level, order.one);
  mark(out, end, n, static_cast<I>(level + 1), order.one);
}

// Rows of up to kShortRow entries, as many as a vector of floats has lanes.
class MaskLanes {
 public:
  static constexpr int width = kWidth<float>;

  void write(const MaskRows& rows, int n, int64_t first) {
    gather([&](int j) { return rows.x(first + j); }, n, rows_, tile_);
    const IntF bad = read(rows, n, first), ties = search(n, bad);
    const VecF one = splat(1.0f), nan = splat(static_cast<float>(kNan));
    VecF left = any(ties) ? left_for_ties(n) : VecF{};
    for (int i = 0; i < n; ++i) {
      VecF& x = *column(tile_, i);
      const IntF tie = ties & (x == level_), taken = tie ? left > 0 : x >= level_;
      left -= tie ? one : VecF{};
      x = bad ? nan : taken ? one : VecF{};
    }
    scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n, rows_, tile_);
  }

 private:
  // How many entries each row selects, and the rows that have no mask.
  IntF read(const MaskRows& rows, int n, int64_t first) {
    IntF selectable{}, pinned{}, nan{}, bad{};
    for (int i = 0; i < n; ++i) {
      const VecF x = *column(tile_, i);
      selectable -= x != -kInf<float>, pinned -= x == kInf<float>, nan |= x != x;
    }
    for (int j = 0; j < width; ++j) {
      const double k = rows.k(first + j), rounded = std::floor(k + 0.5);
      const bool good = !nan[j] && k >= 0 && k <= selectable[j] && pinned[j] <= rounded;
      bad[j] = good ? 0 : -1;
      count_[j] = good ? static_cast<int>(rounded) : 0;
    }
    return bad;
  }

  // Finds the least entry that is selected, and returns the rows in which more than the others are as large.
  IntF search(int n, IntF bad) {
    int low = n + 1, high = 0;
    for (int j = 0; j < width; ++j) {
      if (!bad[j]) low = std::min(low, count_[j]), high = std::max(high, count_[j]);
    }
    level_ = splat(kInf<float>);
    if (high == 0) return IntF{};
    const RankLanes sorted(tile_, n, low, high, sorted_, rows_);
    level_ = low == high ? sorted.at(low) : sorted.at(count_, 0);
    IntF reached{};
    for (int i = 0; i < n; ++i) reached -= *column(tile_, i) >= level_;
    IntF ties{};
    for (int j = 0; j < width; ++j) ties[j] = !bad[j] && reached[j] != count_[j] ? -1 : 0;
    return ties;
  }

  // How many of the entries at the level are selected, of which the first are.
  VecF left_for_ties(int n) {
    IntF above{};
    for (int i = 0; i < n; ++i) above -= *column(tile_, i) > level_;
    VecF left;
    for (int j = 0; j < width; ++j) left[j] = static_cast<float>(count_[j] - above[j]);
    return left;
  }

  int count_[width];
  VecF level_{};
  alignas(KHOT_VECTOR_BYTES) float tile_[kShortRow * width], rows_[kShortRow * width],
      sorted_[kShortRow * width];
};

// The rows [begin, end).
inline void topk_mask(const MaskRows& rows, int64_t n, int64_t begin, int64_t end) {
  int64_t i = begin;
  if (n > 0 && n <= kShortRow && end - i >= MaskLanes::width && rows.x(i).dtype != Dtype::kDouble) {
    MaskLanes lanes;
    for (; i + MaskLanes::width <= end; i += MaskLanes::width) lanes.write(rows, static_cast<int>(n), i);
  }
  for (; i < end; ++i) {
    with_order(rows.x(i).dtype, rows.out(i),
               [&](auto order, auto* p) { write_mask(order, rows.x(i), n, rows.k(i), p); });
  }
}

}  // namespace khot::KHOT_ISA
