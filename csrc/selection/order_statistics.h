// The k-th largest entries of a row, for several k at once. In a long row, a sample gives a range that holds
// them, and one pass over the row counts what is above the range and collects what is inside it. In a short
// row, the range is halved by counting. Counting takes vector instructions and no branch on a single entry.
//
// Entries that are equal to an end of the range are counted and not collected. A value that many entries
// share is mostly an end, because the sample contains it many times; so ties cost nothing.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "selection/groups.h"

namespace khot::KHOT_ISA {

template <class I>
class OrderStatistics {
  struct Wanted {
    int64_t k;
    I* out;
  };

 public:
  // Memory that is used again from row to row: allocating it would take longer than a short row does.
  struct Scratch {
    std::vector<Wanted> wanted;
    std::vector<I> keys, part, sample;
    typename Groups<I>::Scratch groups;
  };

  OrderStatistics(const Ordered<I>& order, Scratch& scratch) : order_(order), scratch_(scratch) {}

  // Writes the entries of the places k, which count from 1 for the largest; NaN where k is not in [1, n], and
  // everywhere if the row has a NaN.
  void operator()(const Row& row, int64_t n, const double* k, int64_t m, I* out) {
    std::vector<Wanted>& wanted = scratch_.wanted;
    wanted.clear();
    for (int64_t j = 0; j < m; ++j) {
      out[j] = order_.nan;
      if (k[j] >= 1 && k[j] <= static_cast<double>(n) && k[j] == std::floor(k[j])) {
        wanted.push_back({static_cast<int64_t>(k[j]), out + j});
      }
    }
    if (wanted.empty()) return;
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 0) n = 1;  // all entries are equal
    for (Wanted& w : wanted) w.k = std::min(w.k, n);
    std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.k < b.k; });
    Wanted* const first = wanted.data();
    Wanted* const last = first + wanted.size();
    const bool near_top = Groups<I>::suits(n, (last - 1)->k),
               near_bottom = Groups<I>::suits(n, n + 1 - first->k);
    const bool valid = near_top      ? by_groups(p, n, first, last, true)
                       : near_bottom ? by_groups(p, n, first, last, false)
                                     : select<false>(p, n, first, last);
    if (!valid) std::fill(out, out + m, order_.nan);
  }

  // The key of place k in [1, n] of n entries. Returns false for entries with a NaN.
  bool kth_entry(const I* p, int64_t n, int64_t k, I& key) {
    I bits = 0;
    Wanted wanted{k, &bits};
    if (!select<false>(p, n, &wanted, &wanted + 1)) return false;
    key = Ordered<I>::key(bits);
    return true;
  }

  // The k-th largest of n keys, which may also be those next to the keys of -inf and inf.
  I kth_key(const I* keys, int64_t n, int64_t k) {
    I bits = 0;
    Wanted wanted{k, &bits};
    select<true>(keys, n, &wanted, &wanted + 1);
    return Ordered<I>::key(bits);
  }

 private:
  // The range between two keys, and how many entries a pass found where.
  struct Range {
    I bottom, top;
    int64_t above = 0, at_top = 0, at_bottom = 0;
    std::vector<I> between{};
  };

  static constexpr int64_t kShort = 1 << 13;   // rows up to this length are not sampled
  static constexpr int64_t kFew = 16;          // so few keys are sorted
  static constexpr int64_t kSample = 1 << 14;  // the largest sample, of which 3 % are inside a range
  static constexpr int64_t kThin = 1 << 7;     // one entry of so many is in the sample

  template <bool kKeys>
  static I at(const I* p, int64_t i) {
    return kKeys ? p[i] : Ordered<I>::key(p[i]);
  }

  // Finds the wanted entries among the largest, or the smallest. Returns false for a row with NaN.
  bool by_groups(const I* p, int64_t n, Wanted* first, Wanted* last, bool largest) {
    Groups<I> groups(order_, scratch_.groups, largest);
    const int64_t count = largest ? (last - 1)->k : n + 1 - first->k;
    if (!groups.find(p, n, count)) return false;
    I* const keys = groups.keys();
    if (last - first > 1) {
      std::sort(keys, keys + count, std::greater<>());
    } else {
      keys[count - 1] = groups.last();
    }
    for (Wanted* w = first; w < last; ++w) {
      *w->out = Ordered<I>::bits(largest ? keys[w->k - 1] : static_cast<I>(-keys[n - w->k]));
    }
    return true;
  }

  // Finds the wanted entries among n entries, or among their keys if kKeys. Returns false for a row with NaN.
  template <bool kKeys>
  bool select(const I* p, int64_t n, Wanted* first, Wanted* last) {
    if (n <= kShort) return select_short<kKeys>(p, n, first, last);
    while (first < last) {
      // Places that are close together share a pass.
      Wanted* next = first + 1;
      while (next < last && next->k - first->k <= n / 256) ++next;
      Range range = sampled<kKeys>(p, n, first->k, (next - 1)->k);
      if (!pass<kKeys>(p, n, range)) return false;
      assign<kKeys>(p, n, range, first, next);
      first = next;
    }
    return true;
  }

  template <bool kKeys>
  bool select_short(const I* p, int64_t n, Wanted* first, Wanted* last) {
    const I* keys = p;
    if constexpr (!kKeys) {
      I* const copy = room(scratch_.keys, n);
      I nans = 0;
      for (int64_t i = 0; i < n; ++i) {
        const I value = copy[i] = at<kKeys>(p, i);
        nans |= (value > order_.infinity) | (value < -order_.infinity);
      }
      if (nans) return false;
      keys = copy;
    }
    I key = 0;
    int64_t reached = 0;  // how many entries are at least as large as the last one that was found
    for (Wanted* w = first; w < last; ++w) {
      if (w->k > reached) {
        key = w->k == reached + 1 && reached > 0 ? next_smaller(keys, n, key) : kth_largest(keys, n, w->k);
        if (w + 1 < last) {
          const Counts counts = count(keys, n, key);
          reached = counts.above + counts.equal;
        }
      }
      *w->out = Ordered<I>::bits(key);
    }
    return true;
  }

  // The k-th largest of n keys: a range that holds it shrinks around it. Every other step tries one of the
  // keys, which finds a value that many keys share; the steps between halve the range, which bounds their
  // number.
  I kth_largest(const I* keys, int64_t n, int64_t k) const {
    // the range, with both ends
    I low = static_cast<I>(-order_.infinity - 2), high = static_cast<I>(order_.infinity + 1);
    int64_t above = 0, reached = n;  // how many keys are above the range, and above or inside
    int64_t dropped = 0;             // how many of the keys above it are not in the array
    uint32_t noise = 1;
    for (bool guess = true; low < high; guess = !guess) {
      const int64_t inside = reached - above;
      if (inside <= kFew || inside <= n / 4) {
        I* const part = room(scratch_.part, inside + kSlots);
        n = Ordered<I>::gather(keys, n, low, high + 1, part);
        keys = part, dropped = above;
        if (n <= kFew) {
          I* const found = part + (k - dropped - 1);
          std::nth_element(part, found, part + n, std::greater<>());
          return *found;
        }
      }
      I level = static_cast<I>((low & high) + ((low ^ high) >> 1));
      if (guess) {
        noise = noise * 1664525u + 1013904223u;
        const I one = keys[static_cast<int64_t>((uint64_t{noise} * static_cast<uint64_t>(n)) >> 32)];
        if (low <= one && one <= high) level = one;
      }
      const Counts counts = count(keys, n, level);
      const int64_t more = dropped + counts.above, least = more + counts.equal;
      if (k <= more) {
        low = level + 1, reached = more;
      } else if (k > least) {
        high = level - 1, above = least;
      } else {
        return level;
      }
    }
    return low;
  }

  struct Counts {
    int64_t above = 0, equal = 0;
  };

  static Counts count(const I* keys, int64_t n, I level) {
    Counts counts;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
      // These have the width of the keys, so that the compiler vectorises the loop.
      I above = 0, equal = 0;
      for (int i = 0; i < size; ++i) {
        above += keys[begin + i] > level;
        equal += keys[begin + i] == level;
      }
      counts.above += above, counts.equal += equal;
    }
    return counts;
  }

  static I next_smaller(const I* keys, int64_t n, I level) {
    I most = Ordered<I>::kLeast;
    for (int64_t i = 0; i < n; ++i) {
      const I value = keys[i] < level ? keys[i] : Ordered<I>::kLeast;
      most = value > most ? value : most;
    }
    return most;
  }

  static I* room(std::vector<I>& buffer, int64_t size) {
    if (buffer.size() < static_cast<size_t>(size)) buffer.resize(static_cast<size_t>(size));
    return buffer.data();
  }

  // A range that, according to a sample, holds the places from k to l.
  template <bool kKeys>
  Range sampled(const I* p, int64_t n, int64_t k, int64_t l) {
    const int64_t size = std::min(kSample, n / kThin + 128), stride = n / size;
    I* const sample = room(scratch_.sample, size);
    // The places inside the strides vary, so that a period of the row does not show.
    uint32_t noise = 1;
    for (int64_t i = 0; i < size; ++i) {
      noise = noise * 1664525u + 1013904223u;
      sample[i] = at<kKeys>(p, i * stride + static_cast<int64_t>((uint64_t{noise} * stride) >> 32));
    }
    const double share = static_cast<double>(size) / static_cast<double>(n);
    auto slack = [&](double rank) {
      return 4 * std::sqrt(std::max(0.0, rank * (1 - rank / static_cast<double>(size)))) + 4;
    };
    const double upper = static_cast<double>(k) * share, lower = static_cast<double>(l) * share;
    const int64_t begin = static_cast<int64_t>(upper - slack(upper)),
                  end = static_cast<int64_t>(lower + slack(lower));
    Range range{Ordered<I>::kLeast, Ordered<I>::kMost};
    if (begin > 0) range.top = kth_largest(sample, size, begin);
    if (end < size) range.bottom = kth_largest(sample, size, end + 1);
    range.between.reserve(static_cast<size_t>(n / 16 + 2 * kBlock));
    return range;
  }

  // Counts and collects. Returns false if there is a NaN.
  template <bool kKeys>
  bool pass(const I* p, int64_t n, Range& range) const {
    const I bottom = range.bottom, top = range.top, infinity = order_.infinity;
    int64_t size = 0;
    std::vector<I>& between = range.between;
    I block[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - begin));
      // These have the width of the keys, so that the compiler vectorises the loop.
      I above = 0, at_top = 0, at_bottom = 0, nans = 0;
      for (int i = 0; i < count; ++i) {
        const I value = at<kKeys>(p, begin + i);
        block[i] = value;
        above += value > top;
        at_top += value == top;
        at_bottom += value == bottom;
        if constexpr (!kKeys) nans |= (value > infinity) | (value < -infinity);
      }
      if (nans) return false;
      range.above += above, range.at_top += at_top, range.at_bottom += at_bottom;
      if (bottom >= top) continue;
      if (between.size() < static_cast<size_t>(size + kBlock + kSlots)) {
        between.resize(std::max<size_t>({2 * between.size(), between.capacity(), kBlock + kSlots}));
      }
      size += Ordered<I>::gather(block, count, bottom + 1, top, between.data() + size);
    }
    if (bottom == top) range.at_bottom = 0;
    between.resize(size);
    return true;
  }

  static constexpr int64_t kSlots = 16;  // a whole vector is written at the end

  // Writes the wanted entries after a pass. Where the sample was wrong, another pass collects all that is on
  // the other side of the end.
  template <bool kKeys>
  void assign(const I* p, int64_t n, const Range& range, Wanted* first, Wanted* last) {
    const int64_t inside = range.above + range.at_top,
                  below = inside + static_cast<int64_t>(range.between.size()),
                  beyond = below + range.at_bottom;
    Wanted* from = first;
    for (; from < last && from->k <= range.above; ++from) {
    }
    if (from > first) retry<kKeys>(p, n, range.top, Ordered<I>::kMost, 0, first, from);
    for (; from < last && from->k <= inside; ++from) *from->out = Ordered<I>::bits(range.top);
    Wanted* to = from;
    for (; to < last && to->k <= below; ++to) to->k -= inside;
    if (to > from) {
      again(range.between, from, to);
    }
    for (from = to; from < last && from->k <= beyond; ++from) *from->out = Ordered<I>::bits(range.bottom);
    if (from < last) retry<kKeys>(p, n, Ordered<I>::kLeast, range.bottom, beyond, from, last);
  }

  template <bool kKeys>
  void retry(const I* p, int64_t n, I bottom, I top, int64_t before, Wanted* first, Wanted* last) {
    Range range{bottom, top};
    pass<kKeys>(p, n, range);
    for (Wanted* w = first; w < last; ++w) w->k -= before;
    again(range.between, first, last);
  }

  void again(const std::vector<I>& keys, Wanted* first, Wanted* last) {
    select<true>(keys.data(), static_cast<int64_t>(keys.size()), first, last);
  }

  const Ordered<I>& order_;
  Scratch& scratch_;
};

inline void order_statistics(const Row& x, int64_t n, const double* k, int64_t m, void* out) {
  with_order(x.dtype, out, [&](const auto& order, auto* p) {
    using Statistics = OrderStatistics<std::remove_reference_t<decltype(*p)>>;
    static thread_local typename Statistics::Scratch scratch;
    Statistics(order, scratch)(x, n, k, m, p);
  });
}

}  // namespace khot::KHOT_ISA
