// The guard of every search for a threshold: when a trial is not taken, and the bracket around the threshold
// is halved instead.
#pragma once

#include "search/arithmetic.h"

namespace khot::KHOT_ISA {

template <class A>
class Guard {
 public:
  using Value = typename A::Value;
  using Mask = typename A::Mask;

  // Whether the next trial has to be the middle of the bracket: the trial that a step leads to is not inside
  // of it, or in three trials the bracket has not become half as wide, nor the miss an eighth. It is called
  // once a trial.
  KHOT_INLINE Mask bisects(Mask inside, Value width, Value miss) {
    if (++trials_ % 3 != 0) return A::otherwise(inside);
    const Mask slow = trials_ > 3 ? stalls(width, width_, miss, miss_) : A::none();
    width_ = width, miss_ = miss;
    return A::otherwise(inside) | slow;
  }

 private:
  static KHOT_APART Mask stalls(Value width, Value last_width, Value miss, Value last_miss) {
    // an infinite miss has not become smaller, although it is no more than an eighth of another
    const Mask misses = (miss > A::splat(0.125) * last_miss) | (miss == A::splat(A::kInfinite));
    return (width > A::splat(0.5) * last_width) & misses;
  }

  int trials_ = 0;
  Value width_{}, miss_{};
};

// The nearest trials on both sides of a threshold.
template <class A>
class Enclosure {
 public:
  using Value = typename A::Value;
  using Mask = typename A::Mask;

  Value low{}, high{};

  Enclosure() = default;
  KHOT_INLINE Enclosure(Value low, Value high) : low(low), high(high) {}

  // Adds a trial. What is summed falls with t, and misses its goal by so much there.
  KHOT_INLINE void add(Value t, Value miss) {
    low = miss > 0 ? t : low;
    high = miss < 0 ? t : high;
  }
  // Whether the next trial has to be the middle, and not this one.
  KHOT_INLINE Mask bisects(Value next, Value miss) {
    return guard_.bisects((next > low) & (next < high), high - low, A::abs(miss));
  }
  KHOT_INLINE Value middle() const { return typename A::Real(0.5) * low + typename A::Real(0.5) * high; }

 private:
  Guard<A> guard_;
};

}  // namespace khot::KHOT_ISA
