// The hard mask: 1 for the k largest entries of a row, 0 for the others. Of equal entries the first are
// selected. Short rows are taken together, one per lane.
#pragma once

#include <algorithm>
#include <cmath>

#include "selection/groups.h"
#include "selection/kth_largest.h"
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

// Rows of up to kShortRow entries, as many as a vector of floats has lanes. The k-th largest key of each row
// is found bit by bit, from the highest on.
class MaskLanes {
 public:
  static constexpr int width = kWidth<float>;

  void write(const MaskRows& rows, int n, int64_t first) {
    gather([&](int j) { return rows.x(first + j); }, n, rows_, tile_);
    const IntF bad = read(rows, n, first);
    const IntF ties = search(n);
    if (any(ties)) {
      take_first(n);
    } else {
      for (int i = 0; i < n; ++i) keys(i) = (keys(i) >= level_) & kOrder.one;
    }
    if (any(bad)) {  // nothing is selected in these
      for (int i = 0; i < n; ++i) keys(i) |= bad & kOrder.nan;
    }
    scatter([&](int j) { return rows.out(first + j); }, rows.x(first).dtype, n, rows_, tile_);
  }

 private:
  static constexpr const Ordered<int32_t>& kOrder = kOrderedFloat;

  using Keys __attribute__((may_alias)) = IntF;  // they take the place of the entries, and the mask theirs
  Keys& keys(int i) { return *reinterpret_cast<Keys*>(tile_ + i * width); }

  // Replaces the entries by their keys, and returns the rows that have no mask.
  IntF read(const MaskRows& rows, int n, int64_t first) {
    IntF selectable{}, pinned{}, nan{}, bad{};
    for (int i = 0; i < n; ++i) {
      const IntF key = kOrder.key<IntF>(keys(i));
      selectable -= key != -kOrder.infinity;
      pinned -= key == kOrder.infinity;
      nan |= (key > kOrder.infinity) | (key < -kOrder.infinity);
      keys(i) = key;
    }
    for (int j = 0; j < width; ++j) {
      const double k = rows.k(first + j), rounded = std::floor(k + 0.5);
      const bool good = !nan[j] && k >= 0 && k <= selectable[j] && pinned[j] <= rounded;
      bad[j] = good ? 0 : -1;
      count_[j] = good ? static_cast<int32_t>(rounded) : 0;
    }
    return bad;
  }

  // Finds the level for the key of rank count, and returns the rows where more keys than that reach it.
  IntF search(int n) {
    IntF reached = splat_int(n);
    level_ = splat_int(kOrder.kLeast);
    for (int bit = 31; bit >= 0 && any(reached != count_); --bit) {
      const IntF trial = level_ ^ splat_int(static_cast<int32_t>(1u << bit));
      IntF here{};
      for (int i = 0; i < n; ++i) here -= keys(i) >= trial;
      const IntF up = here >= count_;
      level_ = up ? trial : level_, reached = up ? here : reached;
    }
    return reached != count_;
  }

  // Of the entries at the level, only the first are selected.
  void take_first(int n) {
    IntF left = count_;
    for (int i = 0; i < n; ++i) left += keys(i) > level_;
    for (int i = 0; i < n; ++i) {
      const IntF key = keys(i), tie = (key == level_) & (left > 0);
      left += tie;
      keys(i) = ((key > level_) | tie) & kOrder.one;
    }
  }

  static IntF splat_int(int32_t v) { return IntF{} + v; }

  IntF count_{}, level_{};
  alignas(KHOT_VECTOR_BYTES) float tile_[kShortRow * width], rows_[kShortRow * width];
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
