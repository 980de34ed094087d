// The threshold of one level, in closed form, between two neighbours of a sorted row.
#pragma once

#include "laplace/rows.h"

namespace khot::laplace {

// The finite entries of a sorted row are those with first <= p < last.
struct Finite {
  int64_t first = 0, last;
  Finite(const double* y, int64_t n) : last(n) {
    while (first < n && y[first] == std::numeric_limits<double>::infinity()) ++first;
    while (last > 0 && y[last - 1] == -std::numeric_limits<double>::infinity()) --last;
  }
  int64_t clamp(int64_t p) const { return std::min(std::max(p, first), last); }
};

// t in the segment with j entries above it: C(t) = j - a e^(-alpha)/2 + b e^(-beta)/2, where alpha and beta
// are the distances in tau from t to its neighbours. big is the larger one of a e^(-alpha) and b e^(-beta):
// it is the smaller one plus 2|j - level|, and computed without cancellation where level is not j.
struct Segment {
  double a, b, lack, root, big;
  Segment(int64_t j, double level, const Finite& finite, const double* above, const double* below,
          const double* decay)
      : a(j > finite.first ? above[j - 1] : 0),
        b(j < finite.last ? below[j] : 0),
        lack(static_cast<double>(j) - level),
        root(std::sqrt(lack * lack + a * b * decay[j])),
        big(std::fabs(lack) + root) {}
  // exp((t - neighbour)/tau) for the nearer neighbour, if there is one.
  double ratio() const { return (lack > 0 ? big : b) / (lack > 0 ? a : big); }
};

}  // namespace khot::laplace
