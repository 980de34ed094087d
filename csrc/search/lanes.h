// The passes of a search over short rows, as many at once as a vector of floats has lanes, one row per lane:
// for the soft top-k and for the soft budget (search/terms.h).
//
// Row by row, the sums across lanes and the scalar steps between passes would take longer than the passes.
// Transposed, a pass is a plain loop and a step is taken for all rows together. The method is that of
// search/row.h.
#pragma once

#include <cmath>
#include <type_traits>

#include "search/row.h"
#include "simd/tile.h"

namespace khot::KHOT_ISA {

// The costs of a tile, where entries have some.
template <class Terms>
struct CostTile {
  alignas(KHOT_VECTOR_BYTES) float a_[kShortRow * kWidth<float>];
  KHOT_INLINE VecF a(int i) const { return *reinterpret_cast<const VecF*>(a_ + i * kWidth<float>); }
};
template <>
struct CostTile<Unit> {
  KHOT_INLINE VecF a(int /*i*/) const { return splat(1.0f); }
};

// The rows, without the CDF.
template <class Sums>
class LaneTile : public CostTile<Sums> {
 public:
  using Terms = Sums;
  static constexpr int width = kWidth<float>;

  IntF good{};

 protected:
  explicit LaneTile(int64_t n) : n_(static_cast<int>(n)) {}

  int n_;
  const float *from_ = nullptr, *to_ = nullptr;  // the first row and its result, where these are in float
  // The sum of a y that is asked for is goal_ + goal_low_. Where one_ is 1, y - 1 is summed in the place of
  // y: where most y are near 1, these ones would take the digits of the sum.
  VecF goal_{}, goal_low_{}, one_{};
  VecF tau_{}, scale_{}, hi_{}, lo_{};  // scale_ is 1/tau
  alignas(KHOT_VECTOR_BYTES) float x_[kShortRow * width], y_[kShortRow * width], rows_[kShortRow * width];
};

template <class C, class Tile>
class LanePasses : public Tile {
 protected:
  using Terms = typename Tile::Terms;
  using Tile::hi_, Tile::lo_, Tile::x_, Tile::y_;
  using Tile::n_, Tile::from_, Tile::to_, Tile::goal_, Tile::goal_low_, Tile::one_, Tile::tau_, Tile::scale_;

 public:
  using Arithmetic = LaneArithmetic;
  using Tile::width;

  struct Sums {
    VecF miss, S1{}, S2{}, S3{}, S4{}, S5{};  // by how much the sum of a y misses, and sums as in RowSums
    // With sums_tails_: by how much the sum of a over the entries above the median misses, the sums of
    // a (1 - F) over these and of a F over the others, and that of a f over those above.
    VecF extra{}, above{}, below{}, f_above{};
  };

  template <class Spec>
  LanePasses(const Spec& spec, const C& F) : Tile(spec), F_(F) {}

  // Whether a pass stores the odds, from which shift() and finish() go on.
  static constexpr bool kStores = C::value_from_odds && !Terms::by_value;
  static constexpr bool stores() { return kStores; }

  // The sums at hi + lo. It stores the odds or, under compact support, y.
  Sums evaluate() {
    const VecF hi = hi_;
    if constexpr (kSumsTails) {
      if (sums_tails_) return evaluate_tails();
    }
    if constexpr (C::value_from_odds) {
      const VecF scale = scale_ * static_cast<float>(kLog2E), lo = lo_ * scale;
      return sum_values([=](int i, VecF a) {
        fetch_ahead<false>(from_, (n_ + i) * width);
        const VecF e = exp2_held(offset_below<Terms>(*column(x_, i), hi, a) * scale + lo * u<Terms>(a));
        if constexpr (kStores) *column(y_, i) = e;
        return C::from_odds(e);
      });
    } else {
      const VecF scale = scale_, lo = lo_ * scale;
      const float median = static_cast<float>(F_.median);
      const C F = F_;
      IntF m{};
      BlockSums D;
      auto sums = derivative_sums<C, Terms>(F);
      for (int i = 0; i < n_; ++i) {
        // one operation rounds less than two
        const VecF a = this->a(i), z = offset<Terms>(*column(x_, i), hi, a) * scale - lo * u<Terms>(a);
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        if constexpr (!Terms::weighted) m -= above;
        sums.add(z, above, v, a);
        if constexpr (C::full_support) {
          D.add(Terms::weighted ? a * (above ? 1 - v.tail : v.tail) : above ? -v.tail : v.tail, i);
        } else {
          const VecF y = F.template value<float>(z);
          D.add(Terms::weighted ? a * y : above ? y - 1 : y, i);
          *column(y_, i) = y;
        }
      }
      return with(sums, missing(__builtin_convertvector(m, VecF) - static_cast<float>(n_) * one_, D));
    }
  }

  // The sums at t, from the odds that were stored at t - h tau.
  Sums shift(VecF h) {
    const VecF factor = exp<float>(h);
    if constexpr (kStores) {
      if (sums_tails_) return sum_tails([=](int i) { return tail_of_odds(*column(y_, i) * factor); });
    }
    return sum_values([=](int i, VecF) { return C::from_odds(*column(y_, i) * factor); });
  }

  KHOT_INLINE void move(VecF h) {
    const VecF before = hi_, next = lo_ + h * tau_;
    hi_ = before + next;
    lo_ = (before - hi_) + next;
  }

 protected:
  // Under compact support a few costs may be undecided, or none, beside many that are paid in full.
  using BlockSums = std::conditional_t<C::full_support || !Terms::weighted, ExactBlockSum, PairSum<float>>;

  // Whether passes sum the tails on both sides apart. Then small sums keep their digits: those of a y lose
  // them where a f is small beside them.
  static constexpr bool kSumsTails = C::full_support;
  bool sums_tails_ = false;

  struct Tail {
    VecF z;  // or y
    IntF above;
    TailDensity<float> v;
  };

  KHOT_INLINE Tail tail_at(VecF z) const {
    const IntF above = z > static_cast<float>(F_.median);
    return {z, above, F_.template split<float>(z, above)};
  }

  static KHOT_INLINE Tail tail_of_odds(VecF e) {
    const IntF above = e < 1;
    if constexpr (std::is_same_v<C, Logistic>) {
      const VecF y = C::from_odds(e), tail = above ? e * y : y;
      return {y, above, {tail, tail - tail * tail}};
    } else {
      VecF rest;
      const VecF y = C::from_odds(e, rest), tail = above ? rest : y;
      return {VecF{}, above, {tail, tail}};
    }
  }

  KHOT_APART Sums evaluate_tails() {
    const VecF hi = hi_;
    if constexpr (kStores) {
      const VecF scale = scale_ * static_cast<float>(kLog2E), lo = lo_ * scale;
      return sum_tails([=](int i) {
        const VecF e = exp2_held((hi - *column(x_, i)) * scale + lo);
        *column(y_, i) = e;
        return tail_of_odds(e);
      });
    } else {
      const VecF scale = scale_, lo = lo_ * scale;
      return sum_tails([=, this](int i) {
        const VecF a = this->a(i);
        return tail_at(offset<Terms>(*column(x_, i), hi, a) * scale - lo * u<Terms>(a));
      });
    }
  }

  template <class At>
  KHOT_INLINE Sums sum_tails(At at) {
    IntF m{};
    PairSum<float> costs;  // of the entries above the median
    Sums s{VecF{}};
    BlockSums rest;
    auto sums = derivative_sums<C, Terms>(F_);
    for (int i = 0; i < n_; ++i) {
      const Tail t = at(i);
      const VecF a = this->a(i), tail = a * t.v.tail;
      if constexpr (Terms::weighted) {
        costs.add(t.above ? a : VecF{});
      } else {
        m -= t.above;
      }
      s.above += t.above ? tail : VecF{};
      s.below += t.above ? VecF{} : tail;
      s.f_above += t.above ? a * u<Terms>(a) * t.v.density : VecF{};
      rest.add(t.above ? -tail : tail, i);
      if constexpr (std::is_same_v<C, Logistic> && !Terms::by_value) {
        sums.add(t.v.density, t.z, a);
      } else {
        sums.add(t.z, t.above, t.v, a);
      }
    }
    sums.put(s, [](VecF v) { return v; });
    const VecF counted = __builtin_convertvector(m, VecF) - static_cast<float>(n_) * one_;
    const VecF whole = Terms::weighted ? costs.whole : counted;
    s.extra = (whole - goal_) + (costs.lost - goal_low_);
    s.miss = (s.extra + rest.whole) + rest.rest();
    return s;
  }

  // Leaves y where it is expected, and returns by how much the sum of a y misses.
  VecF finish(VecF moved) {
    if constexpr (kStores) {
      const VecF factor = exp<float>(moved);
      const auto write_by = [&](auto value) {
        return write_values([=](int i, VecF) {
          const VecF e = *column(y_, i);
          return e < kNever ? value(e * factor) : VecF{};
        });
      };
      if (sums_tails_) return write_by([](VecF e) { return rounded_value<C>(e); });
      return write_by([](VecF e) { return C::from_odds(e); });
    }
    return write();
  }

  VecF write() {
    if constexpr (kStores && !Terms::weighted) {
      const VecF scale = scale_ * static_cast<float>(kLog2E), hi = hi_, lo = lo_ * scale;
      return write_values([=](int i, VecF) {
        const VecF e = exp2_held((hi - *column(x_, i)) * scale + lo);
        return e < kNever ? rounded_value<C>(e) : VecF{};
      });
    }
    const VecF scale = scale_, hi = hi_, lo = lo_ * scale;
    const C F = F_;
    return write_values([=](int i, VecF a) {
      return F.template value<float>(offset<Terms>(*column(x_, i), hi, a) * scale - lo * u<Terms>(a));
    });
  }

  struct Middle {
    VecF hi, lo;
  };

  // Under compact support: the middle of the gap that t lies in, for the rows that are still `decided`, which
  // are those where every entry that has a weight is chosen or not. The search may have ended at an end of
  // the gap, where rounding leaves an entry a little undecided. chosen(in, a) takes which of the entries of a
  // column are, and their weights.
  template <class Chosen>
  KHOT_INLINE Middle gap_middle(IntF& decided, Chosen chosen) {
    VecF low = splat(-kInf<float>), high = splat(kInf<float>);
    for (int i = 0; i < n_; ++i) {
      const VecF x = *column(x_, i), y = *column(y_, i), a = this->a(i);
      const IntF counts = Terms::weighted ? a > 0 : ~IntF{};
      const IntF out = (y <= 1e-6f) & counts, in = (y >= 1 - 1e-6f) & counts;
      decided &= out | in | ~counts;
      low = out & (x > low) ? x : low;
      high = in & (x < high) ? x : high;
      chosen(in, a);
    }
    decided &= (high - low >= tau_) & (high - low < kInf<float>);
    const VecF between = 0.5f * low + 0.5f * high, hi = between - 0.5f * tau_;
    const VecF lost = 0.5f * ((low - between) + (high - between));
    return {hi, lost + ((between - hi) - 0.5f * tau_)};
  }

  C F_;

 private:
  // By how much the sum of a y misses what is asked for. The sum, less n where one_ is 1, is whole + rest.
  VecF missing(VecF whole, const BlockSums& rest) const {
    return ((whole - goal_) + rest.whole) + (rest.rest() - goal_low_);
  }

  template <class Value>
  KHOT_INLINE Sums sum_values(Value value) {
    BlockSums total;
    auto sums = derivative_sums<C, Terms>(F_);
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      const VecF a = this->a(i), y = value(i, a);
      total.add(Terms::weighted ? a * y : y - one, i);
      sums.add(y, a);
    }
    return with(sums, missing(VecF{}, total));
  }

  template <class Derivatives>
  static KHOT_INLINE Sums with(const Derivatives& sums, VecF miss) {
    Sums s{miss};
    sums.put(s, [](VecF v) { return v; });
    return s;
  }

  template <class Value>
  KHOT_INLINE VecF write_values(Value value) {
    BlockSums total;
    const VecF one = one_;
    for (int i = 0; i < n_; ++i) {
      fetch_ahead<true>(to_, (n_ + i) * width);
      const VecF a = this->a(i), y = value(i, a);
      *column(y_, i) = y;
      total.add(Terms::weighted ? a * y : y - one, i);
    }
    return missing(VecF{}, total);
  }
};

}  // namespace khot::KHOT_ISA
