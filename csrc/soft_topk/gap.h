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

// The sums of the tails on each side of a gap: of exponentials over the tail of one entry at the end, of
// normal tails over the density there; and with the distances from the ends as weights.
struct TailWeights {
  double above = 0, below = 0, away_above = 0, away_below = 0;
  void operator+=(const TailWeights& o) {
    above += o.above, below += o.below, away_above += o.away_above, away_below += o.away_below;
  }
};

// How far above the middle of the gap between the entries `up` and `down` t is, in tau: there, what those
// above lack of 1 is what the others have. Steps of Newton's method, of which exponentials need one.
template <class C>
KHOT_APART double off_middle(const Row& x, int64_t n, const Parallel* inside, double up, double down,
                             double tau) {
  constexpr bool bends = !C::value_from_odds;
  const double half = (0.5 * up - 0.5 * down) / tau, scale = 1 / tau;
  double moved = 0;
  for (int trial = 0; trial < (bends ? 5 : 1); ++trial) {
    const double to_up = half - moved, to_down = half + moved;
    const TailWeights s = reduce<double, TailWeights>(
        x, n, inside, [=](TailWeights& sums, const double* p, int count, int64_t) {
          VecD above{}, below{}, away_above{}, away_below{};
          vectors<double>(p, count, -kInfinity, [&](VecD v, int, int) {
            const IntD in = v >= up;
            const VecD a = (in ? v - up : down - v) * scale, end = in ? splat(to_up) : splat(to_down);
            VecD weight = exp_minus<double>(bends ? (end + 0.5 * a) * a : a);
            if constexpr (bends) {
              weight *= C::template mills<double>(end + a);
              const VecD away = weight > 0 ? weight * a : VecD{};
              away_above += in ? away : VecD{}, away_below += in ? VecD{} : away;
            }
            above += in ? weight : VecD{}, below += in ? VecD{} : weight;
          });
          sums += {sum<double>(above), sum<double>(below), sum<double>(away_above), sum<double>(away_below)};
        });
    double step = 0.5 * std::log(s.below / s.above);
    if constexpr (bends) {
      const double mean = s.away_above / s.above + s.away_below / s.below;
      step = 2 * (step - half * moved) / (2 * half + 2 / half + mean);
    }
    moved += step;
    if (!(std::fabs(step) > 1e-9)) break;
  }
  return moved;
}

// The threshold so far above the middle of a gap, in units of a score.
inline Threshold in_gap(double up, double down, double off) {
  const double sum = up + down, part = sum - up, lost = (up - (sum - part)) + (down - part);
  return {0.5 * sum, 0.5 * lost + off};
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
  t = in_gap(up, down, off * tau);
  return std::fabs(t.hi) < kInfinity && std::fabs(t.lo) < kInfinity;
}

}  // namespace khot::KHOT_ISA
