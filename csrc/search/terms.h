// What a search sums over a row: every entry once, or every entry with what it costs.
//
// An entry has the weight a in the sums and lies at z = (x - t u)/tau. Both are the constant 1 for counts, so
// that the compiler leaves them out. A budget has costs a, where u is 1 by score and a by value.
#pragma once

#include <cmath>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

struct Unit {
  static constexpr bool weighted = false, by_value = false;

  // The weights of a block of entries.
  struct Block {
    Block(const Unit&, int64_t /*at*/, int /*count*/) {}
    KHOT_INLINE void fetch_ahead(int /*i*/, int64_t /*entries*/) const {}
    KHOT_INLINE VecF given(int /*i*/, int /*lanes*/) const { return splat(1.0f); }
    KHOT_INLINE VecF a(int /*i*/, int /*lanes*/) const { return splat(1.0f); }
  };
};

template <bool kByValue>
struct Cost {
  static constexpr bool weighted = true, by_value = kByValue;

  Row cost;
  float unit = 1;  // a = w unit: by value, products of costs must not overflow

  class Block {
   public:
    Block(const Cost& terms, int64_t at, int count)
        : p_(fetch(terms.cost, at, count, buffer_)), unit_(terms.unit) {}
    KHOT_INLINE void fetch_ahead(int i, int64_t entries) const {
      if (entries != 0) khot::KHOT_ISA::fetch_ahead<false>(p_ + i, entries);
    }
    KHOT_INLINE VecF given(int i, int lanes) const { return beside(p_, i, lanes); }
    KHOT_INLINE VecF a(int i, int lanes) const {
      return kByValue ? given(i, lanes) * unit_ : given(i, lanes);
    }

   private:
    float buffer_[kBlock];
    const float* p_;
    float unit_;
  };
};

template <class Terms>
KHOT_INLINE VecF u(VecF a) {
  return Terms::by_value ? a : splat(1.0f);
}

// x - t u, where `hi` is t but for its last digits: by value, it has to be rounded once.
template <class Terms>
KHOT_INLINE VecF offset(VecF x, VecF hi, VecF a) {
  return Terms::by_value ? fused<float>(-hi, a, x) : x - hi;
}
template <class Terms>
KHOT_INLINE VecF offset_below(VecF x, VecF hi, VecF a) {  // the same with the other sign
  return Terms::by_value ? fused<float>(hi, a, -x) : hi - x;
}

// The sums of a u f and of its derivatives along t, by value: the weight of each has one more factor a than
// that of the last.
template <class C>
class ByValueSums {
 public:
  explicit ByValueSums(const C& F) : derivatives_(F.derivatives()) {}
  KHOT_INLINE void add(VecF y, VecF a) { add_entry(VecF{}, y, C::density_of(y), a); }
  KHOT_INLINE void add(VecF z, IntF above, TailDensity<float> v, VecF a) {
    add_entry(z, above ? 1 - v.tail : v.tail, v.density, a);
  }
  template <class Sums, class Total>
  KHOT_INLINE void put(Sums& s, Total total) const {
    s.S1 += total(sums_[0]);
    if constexpr (kCurve > 0) s.S2 += total(sums_[1]);
    if constexpr (kCurve > 1) s.S3 += total(sums_[2]);
    if constexpr (kCurve > 2) s.S4 += total(sums_[3]), s.S5 += total(sums_[4]);
  }

 private:
  static constexpr int kCurve = C::Derivatives::kCurve;

  KHOT_INLINE void add_entry(VecF z, VecF y, VecF f, VecF a) {
    VecF d[kCurve + 1], weight = a * a;
    derivatives_.curve(z, y, f, d);
    sums_[0] += weight * f;
#pragma GCC unroll 4
    for (int i = 0; i < kCurve; ++i) {
      weight *= a;
      sums_[i + 1] += weight * d[i];
    }
  }

  typename C::Derivatives derivatives_;
  VecF sums_[kCurve + 1] = {};
};

template <class C, class Terms>
KHOT_INLINE auto derivative_sums(const C& F) {
  if constexpr (Terms::by_value) {
    return ByValueSums<C>(F);
  } else {
    return F.derivatives();
  }
}

}  // namespace khot::KHOT_ISA
