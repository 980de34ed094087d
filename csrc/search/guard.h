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
    return A::otherwise(inside) | (++trials_ % 3 == 0 ? stalls(width, miss) : A::none());
  }

 private:
  KHOT_APART Mask stalls(Value width, Value miss) {
    const Mask slow = (width > A::splat(0.5) * width_) & (miss > A::splat(0.125) * miss_);
    width_ = width, miss_ = miss;
    return trials_ > 3 ? slow : A::none();
  }

  int trials_ = 0;
  Value width_{}, miss_{};
};

}  // namespace khot::KHOT_ISA
