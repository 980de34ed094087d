// What a search computes between its passes, for one row in double or for one row per lane in float.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd/math.h"

namespace khot::KHOT_ISA {

// One row, in double.
struct ScalarArithmetic {
  using Real = double;
  using Value = double;
  using Mask = bool;
  static constexpr Real kInfinite = kInf<Real>;
  static Value splat(double v) { return v; }
  static Mask none() { return false; }
  static Mask otherwise(Mask m) { return !m; }
  static bool any(Mask m) { return m; }
  static Value abs(Value v) { return std::fabs(v); }
  static Value at_least(Value v, double low) { return std::max(v, low); }
  static Value at_most(Value v, double high) { return std::min(v, high); }
  static Value divide(Value a, Value b) { return a / b; }
  static Value log1p(Value x, Mask /*good*/) { return std::log1p(x); }
  // (1/rest - 1/count) S1
  static Value curvature(Value count, Value rest, Value S1) { return (1 / rest - 1 / count) * S1; }
};

// One row per lane, in float.
struct LaneArithmetic {
  using Real = float;
  using Value = VecF;
  using Mask = IntF;
  static constexpr Real kInfinite = kInf<Real>;
  static KHOT_INLINE Value splat(float v) { return khot::KHOT_ISA::splat(v); }
  static KHOT_INLINE Mask none() { return Mask{}; }
  static KHOT_INLINE Mask otherwise(Mask m) { return ~m; }
  static KHOT_INLINE bool any(Mask m) { return khot::KHOT_ISA::any(m); }
  static KHOT_INLINE Value abs(Value v) { return khot::KHOT_ISA::abs<float>(v); }
  static KHOT_INLINE Value at_least(Value v, float low) { return clamp_below<float>(v, low); }
  static KHOT_INLINE Value at_most(Value v, float high) { return clamp_above<float>(v, high); }
  static KHOT_INLINE Value divide(Value a, Value b) { return khot::KHOT_ISA::divide<float>(a, b); }
  static KHOT_INLINE Value log1p(Value x, Mask good) {
    const IntF small = abs(x) < 0.5f;
    const VecF g = khot::KHOT_ISA::log1p<float>(small ? x : VecF{});
    if (!any(good & ~small)) return g;
    return small ? g : log<float>(1 + x);
  }
  // The same as above with one division where two would be needed, since divisions count here.
  static KHOT_INLINE Value curvature(Value count, Value rest, Value S1) {
    return divide((count - rest) * S1, count * rest);
  }
};

}  // namespace khot::KHOT_ISA
