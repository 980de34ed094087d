// What stands on the k-th largest entry: the hard mask, and top-k in magnitude (khot/kernels/selection.py, where
// the formulas are explained).
#pragma once

#include <algorithm>
#include <cmath>

#include "solver.h"

namespace khot::KHOT_ISA {

// Floats in the order of integers of their size: sign and magnitude, with one 0 and not two.
template <class I>
struct Ordered {
  I infinity, one, nan;  // as they are stored

  static I key(I bits) { return bits < 0 ? static_cast<I>(-(bits & std::numeric_limits<I>::max())) : bits; }
  static I bits(I key) { return key < 0 ? static_cast<I>(-key | std::numeric_limits<I>::min()) : key; }

  struct Counts {
    int64_t selectable = 0, pinned = 0;
    bool nan = false;
  };

  // The keys of a row, and how many of them are what.
  Counts keys(const Row& row, int64_t n, I* out) const {
    const I* p = whole(row, n, out);
    Counts counts;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kBlock, n - at));
      I selectable = 0, pinned = 0, nans = 0;  // of as many bits as the keys, so that lanes match
      for (int i = 0; i < size; ++i) {
        const I value = key(p[at + i]);
        selectable += value != -infinity;
        pinned += value == infinity;
        nans |= (value > infinity) | (value < -infinity);
        out[at + i] = value;
      }
      counts.selectable += selectable, counts.pinned += pinned, counts.nan |= nans != 0;
    }
    return counts;
  }

  // The entries of a row as stored; those of one that repeats a number are written out.
  static const I* whole(const Row& row, int64_t n, I* out) {
    const I* p = static_cast<const I*>(row.data);
    if (row.step == 1 || n == 0) return p;
    std::fill(out, out + n, p[0]);
    return out;
  }

  void topk_mask(const Row& x, int64_t n, double k, I* out) const {
    const Counts counts = keys(x, n, out);
    const double rounded = std::floor(k + 0.5);
    if (counts.nan || !(k >= 0 && k <= static_cast<double>(counts.selectable)) ||
        static_cast<double>(counts.pinned) > rounded) {
      std::fill(out, out + n, nan);
      return;
    }
    const int64_t count = static_cast<int64_t>(rounded);
    if (count == 0) return std::fill(out, out + n, I(0));
    const Cut cut = kth_largest(x, n, count, out);
    const I* p = whole(x, n, out);
    for (int64_t i = 0; i < n; ++i) out[i] = key(p[i]) >= cut.level ? one : I(0);
    // of those at the level, the last are too many
    for (int64_t i = n, more = cut.reached - count; more > 0;) {
      const bool tie = out[--i] == one && key(x.step == 1 ? p[i] : *static_cast<const I*>(x.data)) == cut.level;
      if (tie) out[i] = 0, --more;
    }
  }

  struct Cut {
    I level;          // at most the k-th largest key, and more than the next one, unless that is the same
    int64_t reached;  // how many keys are at least as large: k, or more where there are ties
  };

  // Of keys in `keys`, which are lost.
  Cut kth_largest(const Row& row, int64_t n, int64_t k, I* keys) const {
    if (n > kNarrow) {
      int64_t above = 0;
      const int64_t size = narrow(keys, n, k, above);
      if (above < k && k <= above + size) {
        const Cut cut = search(keys, size, k - above);
        return {cut.level, above + cut.reached};
      }
      this->keys(row, n, keys);
    }
    return search(keys, n, k);
  }

  // The k-th largest key, and the one after it; the keys are lost.
  void neighbours(const Row& row, I* keys, int64_t n, int64_t k, I& in, I& out) const {
    const Cut cut = kth_largest(row, n, k, keys);
    const I* p = whole(row, n, keys);
    I least = std::numeric_limits<I>::max(), most = std::numeric_limits<I>::min();
    for (int64_t i = 0; i < n; ++i) {
      const I value = key(p[i]);
      least = std::min(least, value >= cut.level ? value : std::numeric_limits<I>::max());
      most = std::max(most, value < cut.level ? value : std::numeric_limits<I>::min());
    }
    in = least;
    out = cut.reached > k || k == n ? least : most;
  }

 private:
  static constexpr int64_t kNarrow = 1 << 14;  // keys that are more are too many to be counted for each bit
  static constexpr int64_t kSample = 1 << 11;

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

  // Bit by bit: branches on single keys would take longer than all the counting.
  static Cut search(const I* keys, int64_t n, int64_t k) {
    using Bits = std::make_unsigned_t<I>;
    Cut cut{std::numeric_limits<I>::min(), n};
    for (int bit = 8 * sizeof(I) - 1; bit >= 0 && cut.reached != k; --bit) {
      const I level = static_cast<I>(static_cast<Bits>(cut.level) + (Bits(1) << bit));
      const int64_t count = at_least(keys, n, level);
      if (count >= k) cut = {level, count};
    }
    return cut;
  }

  // Moves the keys in a range that a sample says holds the k-th largest to the front; their number, and that of the
  // keys above.
  static int64_t narrow(I* keys, int64_t n, int64_t k, int64_t& above) {
    I sample[kSample];
    for (int64_t i = 0; i < kSample; ++i) sample[i] = keys[i * n / kSample];
    const double rank = static_cast<double>(k) / static_cast<double>(n) * kSample;
    const double slack = 4 * std::sqrt(rank * (1 - rank / kSample)) + 4;
    const int64_t first = static_cast<int64_t>(rank - slack), last = static_cast<int64_t>(rank + slack);
    const I top = first > 0 ? search(sample, kSample, first).level : std::numeric_limits<I>::max();
    const I bottom = last < kSample ? search(sample, kSample, last).level : std::numeric_limits<I>::min();
    int64_t size = 0;
    above = at_least(keys, n, top);
    for (int64_t i = 0; i < n; ++i) {
      const I value = keys[i];
      keys[size] = value;
      size += (value >= bottom) & (value < top);
    }
    return size;
  }
};

constexpr Ordered<int32_t> kOrderedFloat{0x7f800000, 0x3f800000, 0x7fc00000};
constexpr Ordered<int64_t> kOrderedDouble{0x7ff0000000000000, 0x3ff0000000000000, 0x7ff8000000000000};
constexpr Ordered<int16_t> kOrderedHalf{0x7c00, 0x3c00, 0x7e00};
constexpr Ordered<int16_t> kOrderedBFloat16{0x7f80, 0x3f80, 0x7fc0};

// call(the order of the dtype, a pointer to its integers)
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

inline void topk_mask(const Row& x, int64_t n, double k, void* out) {
  with_order(x.dtype, out, [&](auto order, auto* p) { order.topk_mask(x, n, k, p); });
}

// w^e, e = q - 1 = 1/(p - 1), and the closed forms.
struct Exponent {
  double p, e;
  int whole;  // e where that is an integer, as for p = 2 and 4/3, else 0
  explicit Exponent(double p) : p(p), e(1 / (p - 1)), whole(Power(p).whole) {}

  double lower(double w) const {  // w^(e-1)
    if (whole == 0) return std::pow(w, e - 1);
    double product = 1;
    for (int i = 1; i < whole; ++i) product *= w;
    return product;
  }
  double raise(double w) const { return whole == 0 ? std::pow(w, e) : lower(w) * w; }
  double slope(double w) const { return e * lower(w); }
  double root(double y) const { return p == 2 ? y : std::pow(y, p - 1); }

  // v with v + tau v^(p-1) = s, and s - v.
  double alone(double s, double tau, double& drop) const {
    if (p == 2) {
      drop = s * (tau / (1 + tau));
      return s / (1 + tau);
    }
    const double c = std::min(tau * std::pow(std::max(s, 0.0), p - 2), 1e300);
    double b = std::min(1 / c, 1.0);
    for (int i = 0; i < 12; ++i) {  // from above the root of a convex function, as in the reference
      const double power = lower(b), step = (power * b + c * b - 1) / (e * power + c);
      b -= step;
      if (std::fabs(step) <= 1e-17 * b) break;
    }
    b = std::min(std::max(b, 0.0), 1.0);
    drop = s * std::min(c * b, 1.0);
    return s * raise(b);
  }
};

struct Block {  // an entry's place
  double w, y;
  bool alone, inside;
  Block(double s, const Magnitude& m, const Exponent& power) {
    const double offset = (s - m.gamma.hi) - m.gamma.lo;
    w = (offset < 0 ? 0 : offset) / m.tau;
    y = w == 0 ? 0 : power.raise(w);
    alone = y >= m.gamma.hi + m.gamma.lo && s >= 0;
    inside = y > 0 && !alone;
  }
};

struct BlockSums {
  double alone = 0, total = 0, slope = 0;
  void operator+=(const BlockSums& o) { alone += o.alone, total += o.total, slope += o.slope; }
};

// gamma in anchor - [drop, gap], where (k - #alone) gamma = sum of Y over the block.
inline void solve_block(const Row& s, int64_t n, Magnitude& m, const Exponent& power, double anchor, double drop,
                        double gap) {
  double low = -drop, high = -gap;
  m.gamma = {anchor, 0.5 * low + 0.5 * high};
  for (int step = 0; step < 60; ++step) {
    const BlockSums sums = reduce<double, BlockSums>(s, n, nullptr, [&](BlockSums& sums, const double* p, int count, int64_t) {
      for (int i = 0; i < count; ++i) {
        const Block block(p[i], m, power);
        sums.alone += block.alone;
        if (block.inside) sums.total += block.y, sums.slope += power.slope(block.w) / m.tau;
      }
    });
    const double left = m.k - sums.alone, G = left * (m.gamma.hi + m.gamma.lo) - sums.total;
    if (G < 0) low = m.gamma.lo;
    if (G > 0) high = m.gamma.lo;
    const double move = -G / (left + sums.slope);
    const bool tiny = std::fabs(move) <= 1e-15 * drop;
    double trial = m.gamma.lo + move;
    if (!((trial > low && trial < high) || tiny)) trial = 0.5 * low + 0.5 * high;
    const bool done = tiny || high - low <= 1e-16 * drop;
    const double sum = m.gamma.hi + trial, moved = sum - m.gamma.hi;
    m.gamma = {sum, (m.gamma.hi - (sum - moved)) + (trial - moved)};
    low -= moved, high -= moved;
    if (done) break;
  }
}

inline void magnitude(const Row& s, int64_t n, Magnitude& m, void* y) {
  const Exponent power(m.p);
  bool bad = false, every = false;
  double in = 0, out = 0;
  with_order(s.dtype, y, [&](auto order, auto* keys) {
    const auto counts = order.keys(s, n, keys);
    const double selectable = static_cast<double>(counts.selectable);
    bad = counts.nan || !(m.k >= 0 && m.k <= selectable && m.k == std::floor(m.k)) ||
          !(m.tau > 0 && m.tau < kInfinity) || static_cast<double>(counts.pinned) > m.k;
    every = m.k == selectable;
    if (bad || m.k == 0) return;
    decltype(order.one) ends[2];
    order.neighbours(s, keys, n, static_cast<int64_t>(m.k), ends[0], ends[1]);
    for (auto& end : ends) end = order.bits(end);
    alignas(double) char stored[sizeof(ends)];
    std::memcpy(stored, ends, sizeof(ends));  // or else the compiler may take reads of floats for no reads of these
    double buffer[2];
    const Row row{stored, s.dtype, 1};
    const double* values = fetch(row, 0, 2, buffer);
    in = values[0], out = every ? 0 : values[1];
  });
  if (bad) {
    m.gamma = {kNan, kNan};
    return with_order(s.dtype, y, [&](auto order, auto* p) { std::fill(p, p + n, order.nan); });
  }
  if (m.k == 0) {
    m.gamma = {kHuge, kHuge};
    return with_order(s.dtype, y, [&](auto, auto* p) { std::fill(p, p + n, 0); });
  }
  double drop;
  const double alone = power.alone(in, m.tau, drop), gap = in - out;
  if (gap < drop) {
    solve_block(s, n, m, power, in, drop, gap);
  } else {
    m.gamma = {alone == kInfinity ? out + 1 : 0.5 * alone + 0.5 * out, 0};
  }
  double buffer[kBlock], results[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double* p = fetch(s, at, count, buffer);
    for (int i = 0; i < count; ++i) {
      const Block block(p[i], m, power);
      results[i] = block.alone ? power.alone(p[i], m.tau, drop) : block.y;
    }
    put(y, s.dtype, at, count, results);
  }
}

struct Rates {  // dv/ds and -dv/dtau of an entry that is alone, dY/ds of one that is pooled
  Block block;
  double own, fall, rate;
  Rates(double s, double y, const Magnitude& m, const Exponent& power) : block(s, m, power) {
    const double nothing = std::isnan(y) ? y : 0;
    own = rate = nothing;
    double root = 1;  // y^(p-1)
    if (block.alone && s < kInfinity && (y > 0 || m.p == 2)) {
      if (y == 0) y = 1;
      root = power.root(y);
      own = 1 / (1 + m.tau * (m.p - 1) * (root / y));
    }
    fall = own * (s > 0 ? root : 0);
    if (block.inside) rate = power.slope(block.w) / m.tau;
  }
};

struct RateSums {
  double alone = 0, mass = 0, moment = 0, pull = 0, tau = 0;
  void operator+=(const RateSums& o) {
    alone += o.alone, mass += o.mass, moment += o.moment, pull += o.pull, tau += o.tau;
  }
};

inline double magnitude_backward(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                                 const Magnitude& m, void* grad_s) {
  const Exponent power(m.p);
  const RateSums sums = reduce<double, RateSums>(s, n, nullptr, [&](RateSums& sums, const double* p, int count, int64_t at) {
    double y_buffer[kBlock], v_buffer[kBlock];
    const double *ys = fetch(y, at, count, y_buffer), *v = fetch(grad, at, count, v_buffer);
    for (int i = 0; i < count; ++i) {
      const Rates r(p[i], ys[i], m, power);
      const double w = r.block.inside || std::isnan(r.block.w) ? r.block.w : 0;
      sums.alone += r.block.alone;
      sums.mass += r.rate;
      sums.moment += r.rate * w;
      sums.pull -= r.rate * v[i];
      sums.tau -= v[i] * (r.fall + r.rate * w);
    }
  });
  const double pull = sums.mass != 0 ? (grad_lo + sums.pull) / (m.k - sums.alone + sums.mass) : 0;
  double buffer[kBlock], y_buffer[kBlock], v_buffer[kBlock], results[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - at));
    const double *p = fetch(s, at, count, buffer), *ys = fetch(y, at, count, y_buffer),
                 *v = fetch(grad, at, count, v_buffer);
    for (int i = 0; i < count; ++i) {
      const Rates r(p[i], ys[i], m, power);
      results[i] = r.own * v[i] + r.rate * (v[i] + pull);
    }
    put(grad_s, s.dtype, at, count, results);
  }
  return sums.tau - pull * sums.moment;
}

}  // namespace khot::KHOT_ISA
