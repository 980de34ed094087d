// Where the k largest (or smallest) entries of a row are, for k that is small beside n: the search of the
// top-k, of the hard mask and of order statistics near the ends.
//
// A row falls into more than k groups, and its k largest entries lie in the k groups with the largest maxima.
// So there is one pass for the maxima, a level that k of these reach, or a few more, and a look at the groups
// that reach it. No row is a bad one: sorted rows cost a longer look, and where many entries are equal those
// at the level are taken from the left.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "selection/ordered.h"

namespace khot::KHOT_ISA {

// Vectors in which entries of a row are compared: floats and doubles as they are, half precision and keys as
// integers. (An attribute cannot depend on a parameter of a template.)
template <class I>
struct Integers;
template <>
struct Integers<int16_t> {
  using V = int16_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));
};
template <>
struct Integers<int32_t> {
  using V = IntF;
  using Number = float;
};
template <>
struct Integers<int64_t> {
  using V = IntD;
  using Number = double;
};

template <class I>
struct Compared {
  using V = typename Integers<I>::V;
  static V of(V bits, I sign) { return Ordered<I>::key(bits ^ sign); }
  static V bound(I key) { return V{} + key; }
};
template <>
struct Compared<int32_t> {
  using V = VecF;
  static V of(IntF bits, int32_t sign) { return (V)(bits ^ sign); }
  static V bound(int32_t key) { return (V)(IntF{} + Ordered<int32_t>::bits(key)); }
};
template <>
struct Compared<int64_t> {
  using V = VecD;
  static V of(IntD bits, int64_t sign) { return (V)(bits ^ sign); }
  static V bound(int64_t key) { return (V)(IntD{} + Ordered<int64_t>::bits(key)); }
};

template <class I>
class Groups {
  using Keys = typename Integers<I>::V;

 public:
  // Memory that is used again from row to row: allocating it would take longer than a short row does.
  struct Scratch {
    std::vector<I> maxima, keys;
    std::vector<int32_t> places;  // the lower half of each
  };

  // Whether this is faster than to search the whole row for the k-th largest entry.
  static bool suits(int64_t n, int64_t k) { return n <= kAll || (k <= n / 16 && n < int64_t{1} << 32); }

  Groups(const Ordered<I>& order, Scratch& scratch, bool largest)
      : order_(order), scratch_(scratch), sign_(largest ? 0 : Ordered<I>::kLeast) {}

  // Finds k entries: the largest, or the smallest, and of equal ones the first. Returns false for a row with
  // NaN.
  bool find(const I* p, int64_t n, int64_t k) {
    if (!collect(p, n, k)) return false;
    reduce(k);
    return true;
  }

  // The same where the k-th largest key is known.
  void find_above(const I* p, int64_t n, int64_t k, I level) {
    size_ = 0;
    look(p, 0, n, static_cast<I>(level + 1));
    take_level(p, n, k, level);
  }

  // What was found: keys (of the negatives of the entries, where these are the smallest) and places. Equal
  // keys are in the order of their places.
  I* keys() const { return scratch_.keys.data(); }
  int64_t place(int64_t j) const { return static_cast<uint32_t>(scratch_.places[j]); }

  // The least key that was found.
  I last() const {
    const I* const keys = scratch_.keys.data();
    I least = keys[0];
    for (int64_t j = 1; j < size_; ++j) least = keys[j] < least ? keys[j] : least;
    return least;
  }

 private:
  static constexpr int64_t kWide = KHOT_VECTOR_BYTES / sizeof(I);
  static constexpr int64_t kAll = 128;  // rows up to this length have no groups

  static typename Compared<I>::V load(const I* p, I sign) {
    Keys bits;
    std::memcpy(&bits, p, sizeof(bits));
    return Compared<I>::of(bits, sign);
  }

  // Whether a comparison holds in some lane. The lanes of half precision are half as wide as any() reads.
  static bool some(IntF mask) { return any(sizeof(I) == 2 ? mask != 0 : mask); }

  I key(I bits) const { return Ordered<I>::key(static_cast<I>(bits ^ sign_)); }

  // Space for so many more, and a whole vector behind them.
  void room(int64_t more) {
    const size_t size = static_cast<size_t>(size_ + more + kWide);
    if (scratch_.keys.size() >= size) return;
    scratch_.keys.resize(std::max(2 * scratch_.keys.size(), size));
    scratch_.places.resize(scratch_.keys.size());
  }

  // Collects k entries or more, the k largest among them. Returns false for entries with a NaN.
  bool collect(const I* p, int64_t n, int64_t k) {
    size_ = 0;
    if (n <= kAll) {
      if (has_nan(p, n)) return false;
      look(p, 0, n, static_cast<I>(-order_.infinity));
      return true;
    }
    // groups of 4 to 64 entries, up to 16 of them for each of the k
    const int64_t most_deep = std::min<int64_t>(64, n / kWide),
                  deep = std::max<int64_t>(4, std::min(most_deep, n / (16 * k)) / 4 * 4), high = deep * kWide,
                  strips = n / high, rest = strips * high;
    if (scratch_.maxima.size() < static_cast<size_t>((strips + 1) * kWide)) {
      scratch_.maxima.resize((strips + 1) * kWide);
    }
    I* const maxima = scratch_.maxima.data();
    if (!largest_of_groups(p, strips, deep, maxima)) return false;
    if (has_nan(p + rest, n - rest)) return false;
    const int64_t few = std::min(n - rest, kWide);
    int64_t groups = strips * kWide;
    // The entries behind the last strip are one group, or where they are needed as many as a vector has
    // lanes.
    for (int64_t c = 0; c < few; ++c) {
      I most = key(p[rest + c]);
      for (int64_t i = rest + c + kWide; i < n; i += kWide) most = std::max(most, key(p[i]));
      maxima[groups++] = most;
    }
    const auto level = level_of(maxima, groups, k, k / 4 + kWide / 2);
    // Where many groups have the same maximum, what is at the level is taken afterwards.
    const bool tied = level.reached > k + k / 4 + kWide / 2;
    const I least = static_cast<I>(level.level + tied);
    for (int64_t s = 0; s < strips; ++s) {
      Keys v;
      std::memcpy(&v, maxima + s * kWide, sizeof(v));
      if (some((IntF)(v >= least))) look(p, s * high, (s + 1) * high, least);
    }
    look(p, rest, n, least);
    if (size_ < k) take_level(p, n, k, level.level);
    return true;
  }

  bool has_nan(const I* p, int64_t n) const {
    I size = 0;
    for (int64_t i = 0; i < n; ++i) size = std::max<I>(size, p[i] & Ordered<I>::kMost);
    return size > order_.infinity;
  }

  // Group c of a strip has the entries in lane c of so many vectors. Returns false for entries with a NaN.
  KHOT_PASS bool largest_of_groups(const I* p, int64_t strips, int64_t deep, I* maxima) const {
    const I sign = sign_;
    Keys size{};
    for (int64_t s = 0; s < strips; ++s, p += deep * kWide) {
      auto most = load(p, sign);
      for (int64_t d = 0; d < deep; d += 4) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; ++j) {
          const auto v = load(p + (d + j) * kWide, sign);
          most = v > most ? v : most;
          Keys here;
          std::memcpy(&here, p + (d + j) * kWide, sizeof(here));
          here &= Ordered<I>::kMost;
          size = here > size ? here : size;
        }
      }
      Keys found = (Keys)most;
      if constexpr (sizeof(I) > 2) found = Ordered<I>::key(found);
      std::memcpy(maxima + s * kWide, &found, sizeof(found));
    }
    I largest = 0;
    for (int64_t c = 0; c < kWide; ++c) largest = std::max<I>(largest, size[c]);
    return largest <= order_.infinity;
  }

  struct Level {
    I level;
    int64_t reached;
  };

  // A level that at least k of n keys reach, and at most k + more unless it is the k-th largest key itself.
  static Level level_of(const I* keys, int64_t n, int64_t k, int64_t more) {
    I low = keys[0], high = keys[0];
    for (int64_t i = 1; i < n; ++i) low = std::min(low, keys[i]), high = std::max(high, keys[i]);
    int64_t reached = n;
    for (int step = 0; low < high && reached > k + more; ++step) {
      const I level = between(low, high, step);
      const int64_t count = Ordered<I>::at_least(keys, n, level);
      if (count >= k) {
        low = level, reached = count;
      } else {
        high = level - 1;
      }
    }
    return {low, reached};
  }

  // A key in (low, high]. To halve the keys ends after as many steps as these have bits. To halve the numbers
  // is mostly faster, where these have both signs or a few of them are almost zero.
  static I between(I low, I high, int step) {
    if constexpr (sizeof(I) > 2) {
      using Number = typename Integers<I>::Number;
      const auto number = [](I key) {
        const I bits = Ordered<I>::bits(key);
        Number value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
      };
      const Number half = number(low) / 2 + number(high) / 2;
      if (step < kByNumber && std::isfinite(half)) {
        I bits;
        std::memcpy(&bits, &half, sizeof(bits));
        return std::min(std::max<I>(Ordered<I>::key(bits), low + 1), high);
      }
    }
    const I half = static_cast<I>((low & high) + ((low ^ high) >> 1));
    return half + 1;
  }
  static constexpr int kByNumber = 10;

  // Collects the entries [begin, end) that are at least so large.
  KHOT_PASS void look(const I* p, int64_t begin, int64_t end, I least) {
    room(end - begin);
    I* const keys = scratch_.keys.data();
    int32_t* const places = scratch_.places.data();
    const I sign = sign_;
    int64_t size = size_, i = begin;
    const auto one = [&](int64_t at) {
      const I value = Ordered<I>::key(static_cast<I>(p[at] ^ sign));
      keys[size] = value, places[size] = static_cast<int32_t>(at);  // without a branch
      size += value >= least;
    };
    const auto bound = Compared<I>::bound(least);
    for (; i + 4 * kWide <= end; i += 4 * kWide) {
      IntF reached[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) reached[j] = (IntF)(load(p + i + j * kWide, sign) >= bound);
      if (!some(reached[0] | reached[1] | reached[2] | reached[3])) continue;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int64_t at = i + j * kWide;
        if constexpr (sizeof(I) == 4) {
          IntF bits;
          std::memcpy(&bits, p + at, sizeof(bits));
          const IntF value = Ordered<I>::key(bits ^ sign);
          compress(places + size, lanes() + static_cast<int32_t>(at), reached[j]);
          size += compress(keys + size, value, reached[j]);
        } else if (some(reached[j])) {
          for (int64_t c = 0; c < kWide; ++c) one(at + c);
        }
      }
    }
    for (; i < end; ++i) one(i);
    size_ = size;
  }

  static IntF lanes() {
    IntF lane;
    for (int c = 0; c < kWidth<float>; ++c) lane[c] = c;
    return lane;
  }

  // Collects the first entries that have this key, until there are k in all.
  void take_level(const I* p, int64_t n, int64_t k, I level) {
    room(k - size_);
    for (int64_t at = 0; at < n && size_ < k; at += kFewTied) {
      const int64_t end = std::min(at + kFewTied, n);
      I ties = 0;
      for (int64_t i = at; i < end; ++i) ties += key(p[i]) == level;
      for (int64_t i = at; ties > 0 && size_ < k; ++i) {
        if (key(p[i]) != level) continue;
        scratch_.keys[size_] = level, scratch_.places[size_++] = static_cast<int32_t>(i);
        --ties;
      }
    }
  }
  static constexpr int64_t kFewTied = 256;

  // Keeps the k largest of what was found, of equal ones the first.
  void reduce(int64_t k) {
    if (size_ == k) return;
    I* const keys = scratch_.keys.data();
    int32_t* const places = scratch_.places.data();
    const Level cut = level_of(keys, size_, k, 0);
    int64_t ties = cut.reached - k, from = size_;
    // the last of those that are equal are left out
    for (; ties > 0; ties -= keys[from] == cut.level) --from;
    int64_t size = 0;
    for (int64_t j = 0; j < size_; ++j) {
      const I value = keys[j];
      keys[size] = value, places[size] = places[j];
      size += value > cut.level || (value == cut.level && j < from);
    }
    size_ = size;
  }

  const Ordered<I>& order_;
  Scratch& scratch_;
  I sign_;
  int64_t size_ = 0;
};

}  // namespace khot::KHOT_ISA
