// The k-th largest entry of a row without a sort, on floats as integers that have the same order.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd/passes.h"

namespace khot::KHOT_ISA {

// Floats are compared as integers of their size, their keys. Sign and magnitude become two's complement, so
// that -0 and 0 have the same key.
template <class I>
struct Ordered {
  Dtype dtype;
  I infinity, one, nan;         // the bits of these numbers
  I keep = static_cast<I>(-1);  // the bits of an entry that count: all, or for magnitudes all but the sign

  static constexpr I kMost = std::numeric_limits<I>::max(), kLeast = std::numeric_limits<I>::min();

  // of one number, or of a vector of them
  template <class V>
  static V key(V bits) {
    return bits < 0 ? static_cast<V>(-(bits & kMost)) : bits;
  }
  static I bits(I key) { return key < 0 ? static_cast<I>(-key | kLeast) : key; }

  I key_of_entry(I bits) const { return key(bits & keep); }

  // The number that a key stands for, and the key of a number after rounding to the dtype.
  double value(I key) const {
    const I stored_bits = bits(key);
    alignas(double) char stored[sizeof(double)] = {};  // bytes, since a float must not be read as an integer
    std::memcpy(stored, &stored_bits, sizeof(I));
    double buffer = 0;
    return *fetch(Row{stored, dtype, 1}, 0, 1, &buffer);
  }
  I key_of(double value) const {
    I stored_bits;
    alignas(double) char stored[sizeof(double)] = {};
    put(stored, dtype, 0, 1, &value);
    std::memcpy(&stored_bits, stored, sizeof(I));
    return key(stored_bits);
  }

  struct Counts {
    int64_t selectable = 0, pinned = 0;
    bool nan = false;
  };

  // Writes the keys of a row, and counts the entries above -inf (selectable) and those that are +inf
  // (pinned).
  Counts keys(const Row& row, int64_t n, I* out) const {
    const I* p = whole(row, n, out);
    Counts counts;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      // These have the width of the keys, so that the compiler vectorises the loop.
      I selectable = 0, pinned = 0, nans = 0;
      for (int i = 0; i < size; ++i) {
        const I value = key_of_entry(p[at + i]);
        selectable += value != -infinity;
        pinned += value == infinity;
        nans |= (value > infinity) | (value < -infinity);
        out[at + i] = value;
      }
      counts.selectable += selectable, counts.pinned += pinned, counts.nan |= nans != 0;
    }
    return counts;
  }

  // The entries of a row as integers. A row that repeats its first entry is written to out.
  static const I* whole(const Row& row, int64_t n, I* out) {
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 1 || n == 0) return p;
    std::fill(out, out + n, p[0]);
    return out;
  }

  struct Level {
    I level;          // at most the k-th largest key, and above the next one unless that is equal
    int64_t reached;  // how many keys are at least as large as level: k, or more where there are ties
  };

  // The level for the k-th largest of `keys`, which are overwritten.
  Level kth_largest(const Row& row, int64_t n, int64_t k, I* keys) const {
    if (n > kNarrow) {
      I sample[kSample];
      const int64_t drawn = std::min(kSample, n / 16);
      for (int64_t i = 0; i < drawn; ++i) sample[i] = keys[i * n / drawn];
      const double rank = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(drawn);
      Level common;
      if (is_common(sample, drawn, rank, keys, n, k, common)) return common;
      int64_t above = 0;
      const int64_t size = narrow(sample, drawn, rank, keys, n, above);
      if (above < k && k <= above + size) {
        const Level cut = search(keys, size, k - above);
        return {cut.level, above + cut.reached};
      }
      this->keys(row, n, keys);
    }
    return search(keys, n, k);
  }

  // The k-th largest key (in) and the one after it (out). Afterwards keys holds the keys of the row again.
  void neighbours(const Row& row, I* keys, int64_t n, int64_t k, I& in, I& out) const {
    const Level cut = kth_largest(row, n, k, keys);
    const I* p = whole(row, n, keys);
    I least = kMost, most = kLeast;
    for (int64_t i = 0; i < n; ++i) {
      const I value = keys[i] = key_of_entry(p[i]);
      const I chosen = -static_cast<I>(value >= cut.level);  // -1 or 0, which saves a branch
      const I above = (value & chosen) | (kMost & ~chosen), below = (value & ~chosen) | (kLeast & chosen);
      least = above < least ? above : least;
      most = below > most ? below : most;
    }
    in = least;
    out = cut.reached > k || k == n ? least : most;
  }

  static int64_t at_least(const I* keys, int64_t n, I level) {
    int64_t count = 0;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      I part = 0;
      for (int i = 0; i < size; ++i) part += keys[at + i] >= level;
      count += part;
    }
    return count;
  }

  // Moves the keys in [bottom, top) to the front, in their order, and returns their number.
  static int64_t gather(I* keys, int64_t n, I bottom, I top) {
    int64_t size = 0, i = 0;
    if constexpr (sizeof(I) == 4) {
      for (; i + kWidth<float> <= n; i += kWidth<float>) {
        IntF v;
        std::memcpy(&v, keys + i, sizeof(v));
        size += compress(keys + size, v, (v >= bottom) & (v < top));
      }
    }
    for (; i < n; ++i) {
      const I value = keys[i];
      keys[size] = value;
      size += (value >= bottom) & (value < top);
    }
    return size;
  }

  // The same, and turns the keys at the front into entries again.
  static int64_t entries(I* keys, int64_t n, I bottom, I top) {
    const int64_t size = gather(keys, n, bottom, top);
    for (int64_t i = 0; i < size; ++i) keys[i] = bits(keys[i]);
    return size;
  }

 private:
  static constexpr int64_t kNarrow = 1 << 12;  // more keys than this are narrowed down before the search
  static constexpr int64_t kSample = 1 << 11;  // the size of the sample of the longest rows

  static constexpr int64_t kTied = 16;  // so many equal keys of a sample, and the row is full of them
  static constexpr int kStill = 2;      // after so many bits that decide nothing, the range is looked at

  // Finds the level bit by bit, by counting. Branches on single keys would take longer than all the counting.
  // Where keys are equal no bit may decide anything: what the keys of the range have in common is skipped.
  static Level search(const I* keys, int64_t n, int64_t k) {
    using Bits = std::make_unsigned_t<I>;
    Level cut{kLeast, n};
    int64_t above = 0;  // keys above the range, which begins at the level and has 2^(bit + 1) values
    int still = 0;
    for (int bit = 8 * sizeof(I) - 1; bit >= 0 && cut.reached != k; --bit) {
      if (still == kStill) {
        I least = kMost, most = kLeast;
        const I top = static_cast<I>(static_cast<Bits>(cut.level) + ((Bits(2) << bit) - 1));
        for (int64_t i = 0; i < n; ++i) {
          const I value = keys[i], inside = -static_cast<I>((value >= cut.level) & (value <= top));
          const I low = (value & inside) | (kMost & ~inside), high = (value & inside) | (kLeast & ~inside);
          least = low < least ? low : least;
          most = high > most ? high : most;
        }
        if (least == most) return {least, cut.reached};
        const Bits differ = static_cast<Bits>(least) ^ static_cast<Bits>(most);
        while (!(differ >> bit & 1)) --bit;
        // the range of the least key with as many values as the keys need; its begin is a multiple of these
        const Bits offset = static_cast<Bits>(least) - static_cast<Bits>(kLeast);
        cut.level = static_cast<I>(static_cast<Bits>(kLeast) + (offset >> bit >> 1 << bit << 1));
        still = 0;
      }
      const I level = static_cast<I>(static_cast<Bits>(cut.level) + (Bits(1) << bit));
      const int64_t count = at_least(keys, n, level), within = cut.reached - above;
      if (count >= k) {
        cut = {level, count};
      } else {
        above = count;
      }
      still = cut.reached - above == within ? still + 1 : 0;
    }
    return cut;
  }

  // Whether the k-th largest key is one of many that are equal, as the zeros after a ReLU are.
  static bool is_common(const I* sample, int64_t size, double rank, const I* keys, int64_t n, int64_t k,
                        Level& level) {
    const int64_t place = std::min(std::max<int64_t>(1, static_cast<int64_t>(std::ceil(rank))), size);
    const I cut = search(sample, size, place).level;
    I value = kMost;
    for (int64_t i = 0; i < size; ++i) value = sample[i] >= cut && sample[i] < value ? sample[i] : value;
    int64_t ties = 0;
    for (int64_t i = 0; i < size; ++i) ties += sample[i] == value;
    if (ties < kTied) return false;
    const int64_t reached = at_least(keys, n, value);
    if (reached < k || (value != kMost && at_least(keys, n, value + 1) >= k)) return false;
    level = {value, reached};
    return true;
  }

  // Moves the keys of a range that, according to a sample, holds the k-th largest key to the front. Returns
  // their number, and in above the number of keys above the range.
  static int64_t narrow(const I* sample, int64_t size, double rank, I* keys, int64_t n, int64_t& above) {
    const double slack = 4 * std::sqrt(rank * (1 - rank / static_cast<double>(size))) + 4;
    const int64_t first = static_cast<int64_t>(rank - slack), last = static_cast<int64_t>(rank + slack);
    const I top = first > 0 ? search(sample, size, first).level : kMost;
    const I bottom = last < size ? search(sample, size, last).level : kLeast;
    above = at_least(keys, n, top);
    return gather(keys, n, bottom, top);
  }
};

constexpr Ordered<int32_t> kOrderedFloat{Dtype::kFloat, 0x7f800000, 0x3f800000, 0x7fc00000};
constexpr Ordered<int64_t> kOrderedDouble{Dtype::kDouble, 0x7ff0000000000000, 0x3ff0000000000000,
                                          0x7ff8000000000000};
constexpr Ordered<int16_t> kOrderedHalf{Dtype::kHalf, 0x7c00, 0x3c00, 0x7e00};
constexpr Ordered<int16_t> kOrderedBFloat16{Dtype::kBFloat16, 0x7f80, 0x3f80, 0x7fc0};

// call(order, p) with the order of the dtype and p as a pointer to its integers.
template <class Call>
void with_order(Dtype dtype, void* p, Call call) {
  switch (dtype) {
    case Dtype::kFloat:
      return call(kOrderedFloat, static_cast<int32_t*>(p));
    case Dtype::kDouble:
      return call(kOrderedDouble, static_cast<int64_t*>(p));
    case Dtype::kHalf:
      return call(kOrderedHalf, static_cast<int16_t*>(p));
    case Dtype::kBFloat16:
      return call(kOrderedBFloat16, static_cast<int16_t*>(p));
  }
}

}  // namespace khot::KHOT_ISA
