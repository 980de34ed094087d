// The k-th largest key of a row, and the one after it.
#pragma once

#include "selection/order_statistics.h"

namespace khot::KHOT_ISA {

template <class I>
I kth_largest(const Ordered<I>& order, const I* keys, int64_t n, int64_t k) {
  static thread_local typename OrderStatistics<I>::Scratch scratch;
  return OrderStatistics<I>(order, scratch).kth_key(keys, n, k);
}

template <class I>
void Ordered<I>::neighbours(const I* keys, int64_t n, int64_t k, I& in, I& out) const {
  in = kth_largest(*this, keys, n, k);
  I below = kLeast;
  int64_t reached = 0;
  for (int64_t at = 0; at < n; at += kBlock) {
    const int size = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    I part = 0;
    for (int i = 0; i < size; ++i) {
      const I value = keys[at + i], chosen = -static_cast<I>(value >= in);  // -1 or 0, which saves a branch
      const I other = (value & ~chosen) | (kLeast & chosen);
      part -= chosen;
      below = other > below ? other : below;
    }
    reached += part;
  }
  out = reached > k || k == n ? in : below;
}

}  // namespace khot::KHOT_ISA
