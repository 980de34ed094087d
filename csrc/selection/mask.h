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
  for (int64_t i = 0; i < n; ++i) out[i] = order.key(p[i]) >= cut.level ? order.one : I(0);
  // Of the entries at the level, only the first are selected.
  for (int64_t i = n, more = cut.reached - count; more > 0;) {
    const bool tie =
        out[--i] == order.one && order.key(x.step == 1 ? p[i] : *static_cast<const I*>(x.data)) == cut.level;
    if (tie) out[i] = 0, --more;
  }
}

inline void topk_mask(const Row& x, int64_t n, double k, void* out) {
  with_order(x.dtype, out, [&](auto order, auto* p) { write_mask(order, x, n, k, p); });
}

}  // namespace khot::KHOT_ISA
