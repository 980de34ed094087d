// The hard mask: 1 for the k largest entries of a row, 0 for the others. Of equal entries the first are
// selected.
#pragma once

#include <algorithm>
#include <cmath>

#include "selection/kth_largest.h"

namespace khot::KHOT_ISA {

template <class I>
void write_mask(const Ordered<I>& order, const Row& x, int64_t n, double k, I* out) {
  const auto counts = order.keys(x, n, out);
  const double rounded = std::floor(k + 0.5);
  if (counts.nan || !(k >= 0 && k <= static_cast<double>(counts.selectable)) ||
      static_cast<double>(counts.pinned) > rounded) {
    std::fill(out, out + n, order.nan);
    return;
  }
  const int64_t count = static_cast<int64_t>(rounded);
  if (count == 0) return std::fill(out, out + n, I(0));
  const auto cut = order.kth_largest(x, n, count, out);
  const I* p = order.whole(x, n, out);
  if (cut.reached == count) {
    for (int64_t i = 0; i < n; ++i) out[i] = order.key(p[i]) >= cut.level ? order.one : I(0);
    return;
  }
  // Of the entries at the level, only the first are selected: those before `end`.
  const auto sum = [&](int64_t from, int64_t to, auto counts_here) {
    I total = 0;
    for (int64_t i = from; i < to; ++i) total += counts_here(order.key(p[i]));
    return static_cast<int64_t>(total);
  };
  int64_t left = count, end = 0;
  for (int64_t at = 0; at < n; at += kBlock) {
    left -= sum(at, std::min<int64_t>(at + kBlock, n), [&](I key) { return key > cut.level; });
  }
  for (;;) {
    const int64_t next = std::min<int64_t>(end + kBlock, n);
    const int64_t ties = sum(end, next, [&](I key) { return key == cut.level; });
    if (ties >= left) break;
    left -= ties, end = next;
  }
  while (left > 0) left -= order.key(p[end++]) == cut.level;
  for (int64_t i = 0; i < end; ++i) out[i] = order.key(p[i]) >= cut.level ? order.one : I(0);
  for (int64_t i = end; i < n; ++i) out[i] = order.key(p[i]) > cut.level ? order.one : I(0);
}

inline void topk_mask(const Row& x, int64_t n, double k, void* out) {
  with_order(x.dtype, out, [&](auto order, auto* p) { write_mask(order, x, n, k, p); });
}

}  // namespace khot::KHOT_ISA
