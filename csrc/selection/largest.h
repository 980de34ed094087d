// The k largest (or smallest) entries of a row with their indices; of equal entries the first are taken.
//
// A row falls into more than k groups, and its k largest entries lie in the k groups with the largest maxima.
// So there is one pass for the maxima, the k-th largest of these, and a look into the groups that reach it.
// No row is a bad one. Where k is too large for that, the order statistics find the k-th largest entry, and
// one more pass collects what is above it. Short rows are taken together, one per lane.
#pragma once

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

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

// A vector of keys. (An attribute cannot depend on a parameter of a template.)
template <class I>
struct KeyLanes;
template <>
struct KeyLanes<int16_t> {
  using V = int16_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));
};
template <>
struct KeyLanes<int32_t> {
  using V = IntF;
};
template <>
struct KeyLanes<int64_t> {
  using V = IntD;
};

template <class I>
class Largest {
  using Place = std::conditional_t<sizeof(I) == 8, WidePlace, int64_t>;
  using Keys = typename KeyLanes<I>::V;

 public:
  // Memory that is used again from row to row: allocating it would take longer than a short row does.
  struct Scratch {
    std::vector<I> keys, maxima;
    std::vector<Place> found;
    typename OrderStatistics<I>::Scratch order;
  };

  Largest(const Ordered<I>& order, Scratch& scratch, bool largest, bool sorted)
      : order_(order),
        scratch_(scratch),
        search_(order, scratch.order),
        flip_(largest ? 0 : -1),
        sorted_(sorted) {}

  // Writes the k entries and their indices.
  void operator()(const Row& row, int64_t n, int64_t k, I* values, int64_t* indices) {
    if (k == 0) return;
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 0) {  // all entries are equal
      for (int64_t j = 0; j < k; ++j) values[j] = p[0], indices[j] = j;
      return;
    }
    size_ = 0;
    if (!collect<false>(p, n, k)) {  // a row with NaN, whose keys are made to count as the largest
      if (scratch_.keys.size() < static_cast<size_t>(n)) scratch_.keys.resize(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) scratch_.keys[i] = key_or_nan(p[i]);
      collect<true>(scratch_.keys.data(), n, k);
    }
    Place* const found = scratch_.found.data();
    if (size_ > k) std::nth_element(found, found + (k - 1), found + size_, std::greater<>());
    if (sorted_) std::sort(found, found + k, std::greater<>());
    for (int64_t j = 0; j < k; ++j) {
      const int64_t i = index(found[j]);
      values[j] = p[i], indices[j] = i;
    }
  }

 private:
  static constexpr int64_t kWide = KHOT_VECTOR_BYTES / sizeof(I);
  static constexpr int64_t kAll = 128;  // rows up to this length are not searched, but ordered

  // NaN is above the key of inf, and its complement is not the least number.
  I key_or_nan(I bits) const {
    const I size = bits & Ordered<I>::kMost;
    return (size > order_.infinity ? static_cast<I>(order_.infinity + 1) : Ordered<I>::key(bits)) ^ flip_;
  }

  template <bool kKeys>
  I key(const I* p, int64_t i) const {
    return kKeys ? p[i] : static_cast<I>(Ordered<I>::key(p[i]) ^ flip_);
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

  // Space for so many more places.
  Place* room(int64_t more) {
    std::vector<Place>& found = scratch_.found;
    if (found.size() < static_cast<size_t>(size_ + more)) {
      found.resize(std::max(2 * found.size(), static_cast<size_t>(size_ + more)));
    }
    return found.data();
  }

  // Collects k entries or more, the k largest among them. Returns false for entries with a NaN.
  template <bool kKeys>
  bool collect(const I* p, int64_t n, int64_t k) {
    if (n <= kAll) {
      Place* const found = room(n);
      for (int64_t i = 0; i < n; ++i) found[i] = place(kKeys ? p[i] : key_or_nan(p[i]), i);
      size_ = n;
      return true;
    }
    // groups of 4 to 64 entries, 4 to 16 of them for each of the k
    const int64_t deep =
        std::min({int64_t{64}, n / kWide, std::max(n / (16 * k), std::min<int64_t>(4, n / (4 * k)))});
    if (deep < 4 || n / (deep * kWide) * kWide < 2 * k) return collect_above<kKeys>(p, n, k);
    const int64_t strips = n / (deep * kWide), groups = strips * kWide;
    if (scratch_.maxima.size() < static_cast<size_t>(groups)) scratch_.maxima.resize(groups);
    I* const maxima = scratch_.maxima.data();
    if (!largest_of_groups<kKeys>(p, strips, deep, maxima)) return false;
    if constexpr (!kKeys) {  // the entries behind the last strip
      I size = 0;
      for (int64_t i = groups * deep; i < n; ++i) size = std::max<I>(size, p[i] & Ordered<I>::kMost);
      if (size > order_.infinity) return false;
    }
    const I level = search_.kth_key(maxima, groups, k);
    // Where many groups have the same maximum, what is at the level is taken afterwards.
    const bool tied = Ordered<I>::at_least(maxima, groups, level) > k + k / 4 + kWide;
    const I least = static_cast<I>(level + tied);
    for (int64_t s = 0; s < strips; ++s) {
      if (!reaches(maxima + s * kWide, least)) continue;
      for (int64_t c = 0; c < kWide; ++c) {
        if (maxima[s * kWide + c] >= least) look<kKeys>(p, s * deep * kWide + c, kWide, deep, least);
      }
    }
    look<kKeys>(p, groups * deep, 1, n - groups * deep, least);
    if (size_ < k) take_level<kKeys>(p, n, k, level);
    return true;
  }

  // Group c of a strip has the entries in lane c of so many vectors.
  template <bool kKeys>
  KHOT_PASS bool largest_of_groups(const I* p, int64_t strips, int64_t deep, I* maxima) const {
    Keys size{};
    for (int64_t s = 0; s < strips; ++s) {
      Keys most = Keys{} + Ordered<I>::kLeast;
#pragma GCC unroll 4
      for (int64_t d = 0; d < deep; ++d) {
        Keys v;
        std::memcpy(&v, p + (s * deep + d) * kWide, sizeof(v));
        if constexpr (!kKeys) {
          const Keys here = v & Ordered<I>::kMost;
          size = here > size ? here : size;
          v = (v < 0 ? -here : here) ^ flip_;
        }
        most = v > most ? v : most;
      }
      std::memcpy(maxima + s * kWide, &most, sizeof(most));
    }
    I largest = 0;
    for (int64_t c = 0; c < kWide; ++c) largest = std::max<I>(largest, size[c]);
    return largest <= order_.infinity;
  }

  static bool reaches(const I* maxima, I least) {
    Keys v;
    std::memcpy(&v, maxima, sizeof(v));
    return any((IntF)(v >= least));
  }

  // Collects the entries of a group that are at least so large.
  template <bool kKeys>
  void look(const I* p, int64_t first, int64_t step, int64_t count, I least) {
    Place* const found = room(count + 1);
    int64_t size = size_;
    for (int64_t i = first, d = 0; d < count; ++d, i += step) {
      const I value = key<kKeys>(p, i);
      found[size] = place(value, i);  // without a branch, which would be mispredicted
      size += value >= least;
    }
    size_ = size;
  }

  // Collects the first entries that have this key, until there are k in all.
  template <bool kKeys>
  void take_level(const I* p, int64_t n, int64_t k, I level) {
    Place* const found = room(k - size_);
    for (int64_t at = 0; at < n && size_ < k; at += kFewTied) {
      const int64_t end = std::min(at + kFewTied, n);
      I ties = 0;
      for (int64_t i = at; i < end; ++i) ties += key<kKeys>(p, i) == level;
      if (ties == 0) continue;
      for (int64_t i = at; i < end && size_ < k; ++i) {
        const I value = key<kKeys>(p, i);
        if (value == level) found[size_++] = place(value, i);
      }
    }
  }
  static constexpr int64_t kFewTied = 256;

  // The same by the k-th largest entry.
  template <bool kKeys>
  bool collect_above(const I* p, int64_t n, int64_t k) {
    I level;
    if constexpr (kKeys) {
      level = search_.kth_key(p, n, k);
    } else {
      if (!search_.kth_entry(p, n, flip_ ? n + 1 - k : k, level)) return false;
      level ^= flip_;
    }
    if (level < Ordered<I>::kMost) look<kKeys>(p, 0, 1, n, static_cast<I>(level + 1));
    take_level<kKeys>(p, n, k, level);
    return true;
  }

  const Ordered<I>& order_;
  Scratch& scratch_;
  OrderStatistics<I> search_;
  I flip_;
  bool sorted_;
  int64_t size_ = 0;
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
