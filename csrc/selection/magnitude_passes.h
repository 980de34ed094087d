// The passes of the search of selection/magnitude_ordinary.h, over one row or over short rows side by side,
// one per lane.
#pragma once

#include <algorithm>

#include "selection/pooled.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// The sums over one row, of all lanes.
struct MagnitudeTotals {
  double alone = 0, inside = 0, value = 0, slope = 0;
  bool bad = false;  // whether an entry is infinite or NaN
  void operator+=(const MagnitudeTotals& o) {
    alone += o.alone, inside += o.inside, value += o.value, slope += o.slope, bad |= o.bad;
  }
};

// What a pass finds: add(s) takes a vector of magnitudes. lanes() is the result for rows side by side. For
// one row, put() adds what was found in a block to the totals, and of() is their result, the same in all
// lanes.
struct SquaresPass {
  using Totals = MagnitudeTotals;
  VecF squares{};
  KHOT_INLINE void add(VecF s) {
    const VecF selectable = clamp_below<float>(s, 0);
    squares += selectable * selectable;
  }
  KHOT_INLINE VecF lanes() const { return squares; }
  KHOT_INLINE void put(Totals& t) const { t.value += sum<float>(squares); }
  static VecF of(const Totals& t) { return splat(static_cast<float>(t.value)); }
};

// The entries that are alone, and over the block the sums of q^e and q^(e-1).
struct RampSums {
  VecF alone{}, value{}, slope{};
};
template <int e>
struct RampPass {
  using Totals = MagnitudeTotals;
  VecF gamma, inverse_width;
  RampSums sums{};
  KHOT_INLINE void add(VecF s) {
    const VecF q = (s - gamma) * inverse_width, one = splat(1.0f), none{};
    const IntF alone = q >= 1, inside = (q > 0) & (q < 1);
    sums.alone += alone ? one : none;
    if constexpr (e == 1) {
      sums.value += inside ? q : none;
      sums.slope += inside ? one : none;
    } else {
      const VecF held = inside ? q : none, square = held * held;
      sums.value += square * held;
      sums.slope += square;
    }
  }
  KHOT_INLINE RampSums lanes() const { return sums; }
  KHOT_INLINE void put(Totals& t) const {
    t.alone += sum<float>(sums.alone), t.value += sum<float>(sums.value), t.slope += sum<float>(sums.slope);
  }
  static RampSums of(const Totals& t) {
    return {splat(static_cast<float>(t.alone)), splat(static_cast<float>(t.value)),
            splat(static_cast<float>(t.slope))};
  }
};

// The same in double, with counts as integers. Where y is written, only the counts are needed.
struct CloseSums {
  Doubles alone{}, inside{}, value{}, slope{};
  bool bad = false;
};
template <int e>
struct ClosePass {
  using Totals = MagnitudeTotals;
  Pooled<e> now;
  IntF alone{}, inside{};
  Doubles value{}, slope{};
  KHOT_INLINE void add(VecF s) {
    const Doubles wide = widen(count(s) ? VecF{} : s);
    const Doubles q = now.above(wide) * now.inverse_width;
    if constexpr (e == 1) {
      value += q;
    } else {
      const Doubles square = q * q;
      value += square * q;
      slope += square;
    }
  }
  KHOT_INLINE VecF y(VecF s) { return now.value(s, count(s)); }
  KHOT_INLINE CloseSums lanes() const {
    const auto wide = [](IntF counts) { return widen(__builtin_convertvector(counts, VecF)); };
    return {wide(alone), wide(inside), value, slope};
  }
  KHOT_INLINE void put(Totals& t) const {
    t.alone += total(alone), t.inside += total(inside), t.value += total(value), t.slope += total(slope);
  }
  static CloseSums of(const Totals& t) {
    return {spread(t.alone), spread(t.inside), spread(t.value), spread(t.slope), t.bad};
  }

 private:
  KHOT_INLINE IntF count(VecF s) {
    const IntF is_alone = now.edges.is_alone(s);
    alone -= is_alone;
    inside -= now.edges.is_inside(s);
    return is_alone;
  }
};

// The least entry from the edge on, and the greatest below it.
struct GapPass {
  struct Totals {
    float in = kInf<float>, out = 0;
    void operator+=(const Totals& o) { in = std::min(in, o.in), out = std::max(out, o.out); }
  };
  VecF edge, in = splat(kInf<float>), out{};
  KHOT_INLINE void add(VecF s) {
    const IntF above = s >= edge;
    in = above & (s < in) ? s : in;
    out = ~above & (s > out) ? s : out;
  }
  KHOT_INLINE GapPass lanes() const { return *this; }
  KHOT_INLINE void put(Totals& t) const { t += {minimum<float>(in), maximum<float>(out)}; }
  static GapPass of(const Totals& t) { return {VecF{}, splat(t.in), splat(t.out)}; }
};

// Rows side by side in a tile.
class MagnitudeTile {
 public:
  MagnitudeTile(float* x, float* y, int n, bool is_signed) : x_(x), y_(y), n_(n), signs_(is_signed) {}

  template <class Pass>
  KHOT_INLINE auto run(Pass&& pass) const {
    for (int i = 0; i < n_; ++i) pass.add(signs_.without(*column(x_, i)));
    return pass.lanes();
  }
  template <int e>
  KHOT_INLINE CloseSums write(ClosePass<e>&& pass) const {
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i);
      *column(y_, i) = signs_.apply(pass.y(signs_.without(x)), x);
    }
    return pass.lanes();
  }

 private:
  float *x_, *y_;
  int n_;
  Signs<float> signs_;
};

class MagnitudeRow {
 public:
  MagnitudeRow(const Row& x, void* y, int64_t n, bool is_signed, const Parallel* inside)
      : x_(x), y_(y), n_(n), signs_(is_signed), inside_(inside) {}

  template <class Pass>
  auto run(const Pass& pass) const {
    using Totals = typename Pass::Totals;
    const Signs<float> signs = signs_;
    return Pass::of(
        reduce<float, Totals>(x_, n_, inside_, [=, &pass](Totals& t, const float* p, int count, int64_t) {
          Pass local = pass;  // a local copy stays in registers
          vectors<float>(p, count, 0.0f, [&](VecF x, int, int) { local.add(signs.without(x)); });
          local.put(t);
        }));
  }
  template <int e>
  CloseSums write(const ClosePass<e>& pass) const {
    using Totals = MagnitudeTotals;
    const bool own = x_.dtype == Dtype::kFloat;
    const Signs<float> signs = signs_;
    return ClosePass<e>::of(
        reduce<float, Totals>(x_, n_, inside_, [=, &pass](Totals& t, const float* p, int count, int64_t at) {
          ClosePass<e> local = pass;
          float results[kBlock];
          float* const target = own ? static_cast<float*>(y_) + at : results;
          IntF bad{};
          vectors<float>(p, count, 0.0f, [&](VecF x, int i, int lanes) {
            const VecF s = signs.without(x), y = signs.apply(local.y(s), x);
            bad |= ~(s < kInf<float>);
            store_beside(target, i, lanes, y);
          });
          local.put(t);
          if (any(bad)) t.bad = true;
          if (!own) put(y_, x_.dtype, at, count, results);
        }));
  }

 private:
  Row x_;
  void* y_;
  int64_t n_;
  Signs<float> signs_;
  const Parallel* inside_;
};

}  // namespace khot::KHOT_ISA
