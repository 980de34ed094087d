// The gap between the last entry that is chosen and the next, where it is so wide that all y are 0 or 1.
#pragma once

#include <algorithm>
#include <cmath>

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

struct Edges {  // the nearest entry on each side of t
  double up = kInfinity, down = -kInfinity;
  void operator+=(const Edges& o) { up = std::min(up, o.up), down = std::max(down, o.down); }
};

inline Edges edges_around(const Row& x, int64_t n, const Parallel* inside, Threshold t) {
  return reduce<double, Edges>(x, n, inside, [=](Edges& e, const double* p, int count, int64_t) {
    VecD up = splat(kInfinity), down = splat(-kInfinity);
    vectors<double>(p, count, kNan, [&](VecD v, int, int) {
      const VecD offset = v - t.hi;
      up = (offset > t.lo) & (v < up) ? v : up;
      down = (offset <= t.lo) & (v > down) ? v : down;
    });
    e += {-maximum<double>(-up), maximum<double>(down)};
  });
}

// The tails on each side of a gap, over that of an entry at its end, or over its density.
struct TailWeights {
  double above = 0, below = 0;
  void operator+=(const TailWeights& o) { above += o.above, below += o.below; }
};

// How far above the middle of the gap between the entries `up` and `down` t is, in tau: there, what those
// above lack of 1 is what the others have. Steps of Newton's method, of which exponentials need one.
template <class C>
KHOT_APART double off_middle(const Row& x, int64_t n, const Parallel* inside, double up, double down,
                             double tau) {
  constexpr bool bends = !C::value_from_odds;
  const double half = (0.5 * up - 0.5 * down) / tau, scale = 1 / tau;
  double moved = 0;
  for (int trial = 0; trial < (bends ? 3 : 1); ++trial) {
    const double to_up = half - moved, to_down = half + moved;
    const TailWeights s = reduce<double, TailWeights>(
        x, n, inside, [=](TailWeights& sums, const double* p, int count, int64_t) {
          VecD above{}, below{};
          vectors<double>(p, count, -kInfinity, [&](VecD v, int, int) {
            const IntD in = v >= up;
            const VecD a = (in ? v - up : down - v) * scale, end = in ? splat(to_up) : splat(to_down);
            VecD weight = exp_minus<double>(bends ? (end + 0.5 * a) * a : a);
            if constexpr (bends) weight *= C::template mills<double>(end + a);
            above += in ? weight : VecD{}, below += in ? VecD{} : weight;
          });
          sums.above += sum<double>(above), sums.below += sum<double>(below);
        });
    const double left = std::log(s.below / s.above);
    moved += bends ? (left - 2 * half * moved) / (2 * (half + 1 / half)) : 0.5 * left;
  }
  return moved;
}

// Below, a sum of densities lacks those that are no double.
constexpr double kFaint = 1e-290;

// Moves t, between entries that are all decided, to the middle of their gap or, under full support, to where
// their tails weigh the same. Returns whether there is such a gap.
template <class C>
bool balance(const Row& x, int64_t n, const Parallel* inside, double tau, Threshold& t) {
  const auto [up, down] = edges_around(x, n, inside, t);
  double off = -0.5;
  if constexpr (C::full_support) {
    off = off_middle<C>(x, n, inside, up, down, tau);
  } else if (!((up - t.hi) - t.lo > 0.5 * tau)) {
    return false;  // an entry is undecided
  }
  t.lo = (0.5 * (up - t.hi) + 0.5 * (down - t.hi)) + off * tau;
  return std::fabs(t.lo) < kInfinity;
}

}  // namespace khot::KHOT_ISA
