// The k largest (or smallest) entries of a row with their indices; of equal entries the first are taken.
//
// Where k is small beside n, groups.h finds them; otherwise the order statistics find the k-th largest entry,
// and one more pass collects what is above it. Short rows are taken together, one per lane.
#pragma once

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "selection/groups.h"
#include "selection/order_statistics.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// A key and an index, the greatest first: the largest key, and of equal ones the lowest index.
struct WidePlace {
  int64_t key, last;  // minus the index
  bool operator>(const WidePlace& other) const {
    return key > other.key || (key == other.key && last > other.last);
  }
};

template <class I>
class Largest {
  using Place = std::conditional_t<sizeof(I) == 8, WidePlace, int64_t>;

 public:
  // Memory that is used again from row to row: allocating it would take longer than a short row does.
  struct Scratch {
    std::vector<Place> found;
    typename OrderStatistics<I>::Scratch order;
  };

  Largest(const Ordered<I>& order, Scratch& scratch, bool largest, bool sorted)
      : order_(order),
        scratch_(scratch),
        search_(order, scratch.order),
        groups_(order, scratch.order.groups, largest),
        largest_(largest),
        sorted_(sorted) {}

  // Writes the k entries and their indices.
  void operator()(const Row& row, int64_t n, int64_t k, I* values, int64_t* indices) {
    if (k == 0) return;
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 0) {  // all entries are equal
      for (int64_t j = 0; j < k; ++j) values[j] = p[0], indices[j] = j;
      return;
    }
    Place* const found = find(p, n, k) ? places(k) : places_beside_nan(p, n, k);
    if (sorted_) std::sort(found, found + k, std::greater<>());
    for (int64_t j = 0; j < k; ++j) indices[j] = index(found[j]), values[j] = p[indices[j]];
  }

 private:
  // Returns false for a row with NaN.
  bool find(const I* p, int64_t n, int64_t k) {
    if (Groups<I>::suits(n, k)) return groups_.find(p, n, k);
    I level;
    if (!search_.kth_entry(p, n, largest_ ? k : n + 1 - k, level)) return false;
    groups_.find_above(p, n, k, largest_ ? level : static_cast<I>(-level));
    return true;
  }

  Place* room(int64_t size) {
    if (scratch_.found.size() < static_cast<size_t>(size)) scratch_.found.resize(static_cast<size_t>(size));
    return scratch_.found.data();
  }

  // The places of what was found.
  Place* places(int64_t k) {
    Place* const found = room(k);
    for (int64_t j = 0; j < k; ++j) found[j] = place(groups_.keys()[j], groups_.place(j));
    return found;
  }

  // Those of a row in which NaN is above inf.
  Place* places_beside_nan(const I* p, int64_t n, int64_t k) {
    Place* const found = room(n);
    for (int64_t i = 0; i < n; ++i) {
      const bool nan = (p[i] & Ordered<I>::kMost) > order_.infinity;
      const I key = nan ? static_cast<I>(order_.infinity + 1) : Ordered<I>::key(p[i]);
      found[i] = place(largest_ ? key : static_cast<I>(-key), i);
    }
    std::nth_element(found, found + k - 1, found + n, std::greater<>());
    return found;
  }

  static Place place(I key, int64_t i) {
    if constexpr (sizeof(I) == 8) {
      return {key, -i};
    } else {  // an index has 32 bits
      return static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(key)) << 32 |
                                  (0xffffffffu - static_cast<uint32_t>(i)));
    }
  }
  static int64_t index(const Place& place) {
    if constexpr (sizeof(I) == 8) {
      return -place.last;
    } else {
      return 0xffffffffu - static_cast<uint32_t>(place);
    }
  }

  const Ordered<I>& order_;
  Scratch& scratch_;
  OrderStatistics<I> search_;
  Groups<I> groups_;
  bool largest_, sorted_;
};

// As many rows of up to kShortRow entries as a vector of floats has lanes. The few largest entries of each
// row so far are kept in order, and an entry is inserted where it belongs.
class LargestLanes {
 public:
  static constexpr int width = kWidth<float>;
  static constexpr int64_t kMost = 16;  // more entries than this are faster found one row at a time

  void write(const TopKSpec& spec, const TopKRows& rows, int64_t first) {
    const int n = static_cast<int>(spec.n), k = static_cast<int>(spec.k);
    gather([&](int j) { return rows.x(first + j); }, n, rows_, tile_);
    search(n, k, spec.largest ? 0 : -1);
    for (int j = 0; j < width; ++j) {
      const Row x = rows.x(first + j);
      int64_t* const indices = rows.indices(first + j);
      for (int q = 0; q < k; ++q) indices[q] = place_[q][j];
      const auto copy = [&](auto bits) {
        using I = decltype(bits);
        for (int q = 0; q < k; ++q) {
          static_cast<I*>(rows.values(first + j))[q] =
              static_cast<const I*>(x.data)[x.step == 0 ? 0 : place_[q][j]];
        }
      };
      x.dtype == Dtype::kFloat ? copy(int32_t{}) : copy(int16_t{});
    }
  }

 private:
  static constexpr const Ordered<int32_t>& kOrder = kOrderedFloat;
  using Keys __attribute__((may_alias)) = IntF;

  KHOT_PASS void search(int n, int k, int32_t flip) {
    for (int q = 0; q < k; ++q) best_[q] = IntF{} + kOrder.kLeast, place_[q] = IntF{};
    for (int i = 0; i < n; ++i) {
      const IntF bits = *reinterpret_cast<const Keys*>(tile_ + i * width), size = bits & kOrder.kMost;
      const IntF number = (bits < 0 ? -size : size);
      const IntF key = (size > kOrder.infinity ? IntF{} + (kOrder.infinity + 1) : number) ^ flip;
      IntF here = key > best_[k - 1];
      if (!any(here)) continue;
      const IntF at = IntF{} + i;
      for (int q = k - 1; q > 0; --q) {
        const IntF before = key > best_[q - 1];
        best_[q] = here ? (before ? best_[q - 1] : key) : best_[q];
        place_[q] = here ? (before ? place_[q - 1] : at) : place_[q];
        here = before;
      }
      best_[0] = here ? key : best_[0], place_[0] = here ? at : place_[0];
    }
  }

  IntF best_[kMost], place_[kMost];
  alignas(KHOT_VECTOR_BYTES) float tile_[kShortRow * width], rows_[kShortRow * width];
};

// The rows [begin, end).
inline void topk(const TopKSpec& spec, const TopKRows& rows, int64_t begin, int64_t end) {
  if (begin >= end) return;
  int64_t i = begin;
  const Dtype dtype = rows.x(begin).dtype;
  if (spec.k > 0 && spec.k <= LargestLanes::kMost && spec.n <= kShortRow && dtype != Dtype::kDouble &&
      end - i >= LargestLanes::width) {
    LargestLanes lanes;
    for (; i + LargestLanes::width <= end; i += LargestLanes::width) lanes.write(spec, rows, i);
  }
  with_order(dtype, nullptr, [&](const auto& order, auto* p) {
    using I = std::remove_reference_t<decltype(*p)>;
    static thread_local typename Largest<I>::Scratch scratch;
    Largest<I> largest(order, scratch, spec.largest, spec.sorted);
    for (; i < end; ++i) {
      largest(rows.x(i), spec.n, spec.k, static_cast<I*>(rows.values(i)), rows.indices(i));
    }
  });
}

}  // namespace khot::KHOT_ISA
