// Floats as integers that have the same order, by which entries are selected.
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
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 0 && n > 0) {  // it repeats its first entry
      std::fill(out, out + n, p[0]);
      p = out;
    }
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

  // The k-th largest of the keys of a row (in) and the one after it (out). It is defined in kth_largest.h.
  void neighbours(const I* keys, int64_t n, int64_t k, I& in, I& out) const;

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

  // Copies the keys in [bottom, top) to out, in their order, and returns their number. A whole vector is
  // written at the end, and out may be the keys.
  static int64_t gather(const I* keys, int64_t n, I bottom, I top, I* out) {
    int64_t size = 0, i = 0;
    if constexpr (sizeof(I) == 4) {
      for (; i + kWidth<float> <= n; i += kWidth<float>) {
        IntF v;
        std::memcpy(&v, keys + i, sizeof(v));
        size += compress(out + size, v, (v >= bottom) & (v < top));
      }
    }
    for (; i < n; ++i) {
      const I value = keys[i];
      out[size] = value;
      size += (value >= bottom) & (value < top);
    }
    return size;
  }

  // Moves the keys in [bottom, top) to the front, as the entries that they stand for.
  static int64_t entries(I* keys, int64_t n, I bottom, I top) {
    const int64_t size = gather(keys, n, bottom, top, keys);
    for (int64_t i = 0; i < size; ++i) keys[i] = bits(keys[i]);
    return size;
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
