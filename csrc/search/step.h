// The step from one trial threshold to the next, for one row in double or for one row per lane in float.
//
// log(C/(n - C)) is nearly linear in t, and a step of Halley's kind goes to where it is log(k/(n - k)).
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "search/arithmetic.h"
#include "search/guard.h"

namespace khot::KHOT_ISA {

// What a pass has found for each row: the count, n less the count, by how much the count misses k, and the
// sums of f and of its derivatives.
template <class T>
struct CountSums {
  T count, rest, miss, S1, S2, S3, S4, S5;
};

// The sum of f after a step of h.
template <class T>
KHOT_INLINE T slope_after(T h, const CountSums<T>& s) {
  return s.S1 - h * (s.S2 - h * (s.S3 / 2 - h * (s.S4 / 6 - h * (s.S5 / 24))));
}

// The step h in t/tau that takes the count from k + miss to k, by its Taylor polynomial of fifth degree and
// Newton's method from a step that is near.
template <class T>
KHOT_INLINE T refined(T h, const CountSums<T>& s) {
  for (int i = 0; i < 2; ++i) {
    const T left = s.miss - h * (s.S1 - h * (s.S2 / 2 - h * (s.S3 / 6 - h * (s.S4 / 24 - h * (s.S5 / 120)))));
    h += left / slope_after(h, s);
  }
  return h;
}

// The step in t/tau to a count of k, where few = min(k, n - k). Rows that this kind of step does not suit
// leave `good`, and what is returned for them means nothing. n is one number for all rows, or one for each.
template <class C, class A, class T = typename A::Value, class R = typename A::Real, class N>
KHOT_INLINE T halley_step(const CountSums<T>& s, T k, N n, T few, typename A::Mask& good) {
  good &= (s.count > 0) & (s.rest > 0) & (s.S1 > R(1e-2) * A::at_most(few, 1));
  const T S1 = good ? s.S1 : A::splat(1), rest = good ? s.rest : A::splat(1), count = good ? s.count : rest;
  // log(C/(n - C)) - log(k/(n - k))
  const T g = A::log1p(A::divide(n * s.miss, k * rest), good);
  const T newton = A::divide(g * count * rest, n * S1);
  if constexpr (C::full_support) {
    const T bend = A::curvature(count, rest, S1) + A::divide(s.S2, S1);
    return A::divide(newton, A::at_least(1 - R(0.5) * newton * bend, R(0.5)));
  } else {
    // y = z^e: where y is small, small errors in z are large errors in the sum of y, which no further step
    // removes.
    good &= (A::abs(s.miss) <= R(5e-7) * A::at_least(few, 1)) | (A::abs(newton) > R(C::last_step));
    return newton;
  }
}

// The same without the bound on what a step under compact support may miss.
template <class C, class A, class T = typename A::Value, class R = typename A::Real, class N>
KHOT_INLINE T loose_step(const CountSums<T>& s, T k, N n, T few, typename A::Mask& good) {
  if constexpr (C::full_support) {
    return halley_step<C, A>(s, k, n, few, good);
  } else {
    good &= (s.count > 0) & (s.rest > 0) & (s.S1 > R(1e-2) * A::at_most(few, 1));
    const T g = A::log1p(A::divide(n * s.miss, k * s.rest), good);
    return A::divide(g * s.count * s.rest, n * s.S1);
  }
}

// The same as halley_step, refined where it is short.
template <class C, class A, class T = typename A::Value, class R = typename A::Real, class N>
KHOT_INLINE T refined_step(const CountSums<T>& s, T k, N n, T few, typename A::Mask& good) {
  const T h = halley_step<C, A>(s, k, n, few, good);
  return A::abs(h) < R(0.5) ? refined(h, s) : h;
}

// The steps of several rows, one per lane, under a CDF of compact support, whose f may sum to nothing while
// the count is far from k, or where all entries are decided. A step is not much longer than its miss asks
// for, and where trials lie on both sides of the threshold, it ends between them.
class CompactSteps {
 public:
  struct Search {
    VecF k, left, few;  // the count that is asked for, n less it, and the smaller of the two
  };

  // usual: about the sum of f at the threshold.
  void start(VecF usual) {
    usual_ = usual, moved_ = VecF{}, between_ = {splat(-kInf<float>), splat(kInf<float>)};
  }

  // plain(sums): the step that is not guarded.
  template <class Plain>
  KHOT_INLINE VecF step(const Search& at, CountSums<VecF> s, Plain plain) {
    auto at_most = [](VecF v, VecF high) { return v < high ? v : high; };
    auto at_least = [](VecF v, VecF low) { return v > low ? v : low; };
    between_.add(moved_, s.miss);
    const VecF miss = s.miss, size = abs<float>(miss), longest = 0.5f + 1.5f * size / usual_;
    // As entries leave 0 like z^e, the miss has a root of order e there, which a plain step only approaches.
    const VecF bend = s.miss * s.S2 / (s.S1 * s.S1);
    const IntF multiple = (bend > 0.45f) & (size < 0.5f);
    const VecF to_multiple = s.miss / (s.S1 * (1 - at_most(bend, splat(0.75f))));

    s.miss = at_most(at_least(s.miss, -0.9f * at.k), 0.9f * at.left);
    s.count = at.k + s.miss, s.rest = at.left - s.miss;
    s.S1 = at_least(s.S1, 0.02f * clamp_below<float>(at.few, 1.0f));
    VecF h = plain(s);
    h = at_most(at_least(multiple ? to_multiple : h, -longest), longest);
    const IntF bisects = between_.bisects(moved_ + h, miss);
    // Close to the threshold, the sign of the miss is only rounding, and the bracket does not count.
    h = bisects & (abs<float>(h) > 0.01f) ? between_.middle() - moved_ : h;
    moved_ += h;
    return h;
  }

 private:
  // In units of tau, as t may have no digits for less.
  VecF usual_{}, moved_{};
  Enclosure<LaneArithmetic> between_;
};

}  // namespace khot::KHOT_ISA
