// The passes of a search over one row, in float, and what the search knows between them: for the soft top-k
// and for the soft budget (search/terms.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "search/guess.h"
#include "search/search.h"
#include "search/step.h"
#include "search/terms.h"

namespace khot::KHOT_ISA {

// Rows mostly lie one behind the other, and the processor's prefetcher notices the next row too late. Up to
// this length, the passes over a row fetch the next one into the cache.
constexpr int64_t kAhead = 4096;

// The largest odds exp(-z) that are stored. They stand for all larger odds, and y = 0.
constexpr float kNever = 0x1p126f;

// Beyond so many tau, F and 1 - F are nothing in float, under CDFs with tails.
template <class C>
constexpr float kDeep = C::value_from_odds ? 80.0f : 12.9f;

struct RowSums {
  // The sum of a y is m + C. Either m is the sum of a over the entries above and C sums a F or, for these,
  // a (F - 1); or m is 0.
  double m = 0, C = 0;
  double S1 = 0, S2 = 0, S3 = 0, S4 = 0, S5 = 0;  // the sums of a u f and of its derivatives along t
  double away = 0;                                // under compact support, the sum of a u min(F, 1 - F)
  void operator+=(const RowSums& o) {
    m += o.m, C += o.C, S1 += o.S1, S2 += o.S2, S3 += o.S3, S4 += o.S4, S5 += o.S5, away += o.away;
  }
};

struct CostRowSums : RowSums {
  double total = 0, most = 0;  // the sum of a, and the largest
  bool bad = false;            // an entry or its cost does not suit this search
  void operator+=(const CostRowSums& o) {
    RowSums::operator+=(o);
    total += o.total, most = std::max(most, o.most), bad |= o.bad;
  }
};

// y from the odds against it, with no larger error near 1 than that of rounding it.
template <class C>
KHOT_INLINE VecF rounded_value(VecF e) {
  const VecF y = C::from_odds(e);
  if constexpr (std::is_same_v<C, Logistic>) return e < 1 ? 1 - e * y : y;
  return y;
}

template <class C, class Terms>
class RowPasses {
 public:
  using Arithmetic = ScalarArithmetic;
  using Sums = std::conditional_t<Terms::weighted, CostRowSums, RowSums>;

  static constexpr int kTrials = 8 + C::extra_passes;
  static constexpr bool kStores = C::value_from_odds && !Terms::by_value;

  bool good = true;

  RowPasses(const Terms& terms, const Row& x, int64_t n, double tau, const C& F, const Parallel* inside)
      : terms_(terms), x_(x), n_(n), next_(n <= kAhead ? n : 0), tau_(tau), F_(F), inside_(inside) {}

  bool stores() const { return stores_; }

  Sums evaluate() {
    const Threshold at = split(t_);
    if constexpr (C::value_from_odds) {
      if constexpr (kStores) {
        if (stores_) return seen(odds<true>(at, static_cast<float*>(out_)));
      }
      if (reads_odds_) {
        const Sums sums = odds<false>(at, nullptr);
        if (Terms::weighted || enough(sums)) return seen(sums);
      }
    }
    if (near_) written_ = at;
    return seen(tails(at, near_ ? out_ : nullptr));
  }

  // The sums at t, from the odds that were stored at t - h tau.
  Sums shift(double h) {
    const float factor = static_cast<float>(std::exp(h));
    Sums sums = sum_values<false>(Row{out_, Dtype::kFloat, 1}, kNever,
                                  [=](VecF e, VecF, int64_t, int) { return C::from_odds(e * factor); });
    if constexpr (Terms::weighted) sums.total = total_;
    return sums;
  }

  void move(double h) { t_ += h * tau_; }

 protected:
  // Where F has a kink, only y itself tells whether a step was the last. It is written from a step of this
  // length on.
  static constexpr double kNear = 0.01;

  void start(double t, void* out, bool stores, bool reads_odds) {
    t_ = t, out_ = out;
    stores_ = stores, reads_odds_ = reads_odds;
    good = true, near_ = false;
  }

  static Threshold split(double t) {
    const double hi = static_cast<double>(static_cast<float>(t));
    return {hi, t - hi};
  }

  // Whether, under compact support, all entries are next to decided, so that t may be the end of a gap. It
  // has to be the middle then, which other solvers find.
  static bool may_end_gap(const RowSums& s) { return !C::full_support && s.away <= kNear * s.S1; }

  // Whether a sum of y has the digits that matter; otherwise most entries are decided.
  static bool enough(const RowSums& sums) {
    if constexpr (C::value_from_odds) return sums.S1 * C::decided_ratio > sums.C;
    return false;
  }

  // The sums at t, from the odds, which are stored in out with kStores. These sums of y take less time than
  // sums of tails, which leave float more digits.
  template <bool kStores>
  Sums odds(Threshold t, float* out) const {
    const VecF hi = splat(static_cast<float>(t.hi));
    const float scale = static_cast<float>(kLog2E / tau_), lo = static_cast<float>(t.lo * kLog2E / tau_);
    const float* const start = static_cast<const float*>(x_.data);
    const int64_t next = next_;
    return sum_values<true>(x_, -kInf<float>, [=](VecF x, VecF a, int64_t at, int lanes) {
      if (kStores) fetch_ahead<false>(start + at, next);
      const VecF e = exp2_held(offset_below<Terms>(x, hi, a) * scale + lo * u<Terms>(a));
      if (kStores) store_beside(out + at, 0, lanes, e);
      return C::from_odds(e);
    });
  }

  // The sums at t, from the tails of F. It also writes y, unless out is null.
  Sums tails(Threshold t, void* out = nullptr) const {
    const VecF hi = splat(static_cast<float>(t.hi));
    const float lo = static_cast<float>(t.lo / tau_), scale = static_cast<float>(1 / tau_);
    const float median = static_cast<float>(F_.median);
    const C F = F_;
    const Terms terms = terms_;
    const Dtype dtype = x_.dtype;
    const bool own = dtype == Dtype::kFloat;
    return reduce<float, Sums>(x_, n_, inside_, [=](Sums& s, const float* p, int count, int64_t at) {
      float results[kBlock];
      float* const target = own && out != nullptr ? static_cast<float*>(out) + at : results;
      const typename Terms::Block costs(terms, at, count);
      Costs seen;
      IntF m{};
      LongSum D;
      VecF away{};
      auto sums = derivative_sums<C, Terms>(F);
      auto add = [&](VecF x, int i, int lanes) {
        const VecF a = costs.a(i, lanes), z = offset<Terms>(x, hi, a) * scale - lo * u<Terms>(a);
        const IntF above = z > median;
        const TailDensity<float> v = F.template split<float>(z, above);
        if constexpr (Terms::weighted) {
          seen.add(x, costs.given(i, lanes), a);
        } else {
          m -= above;
        }
        sums.add(z, above, v, a);
        if constexpr (C::full_support) {
          D.add(Terms::weighted ? a * (above ? 1 - v.tail : v.tail) : above ? -v.tail : v.tail);
        } else {
          const VecF y = F.template value<float>(z);
          D.add(Terms::weighted ? a * y : above ? y - 1 : y);
          away += a * u<Terms>(a) * v.tail;
          if (out != nullptr) store_beside(target, i, lanes, y);
        }
      };
      vectors<float>(p, count, -kInf<float>, add, [&] { D.flush(), seen.flush(); });
      int32_t above_count = 0;
      for (int i = 0; i < kWidth<float>; ++i) above_count += m[i];
      s.m += above_count;
      s.C += sum<double>(D.total);
      s.away += sum<float>(away);
      sums.put(s, sum<float>);
      seen.put(s);
      if (!C::full_support && !own && out != nullptr) put(out, dtype, at, count, results);
    });
  }

  // Replaces the odds that were stored at t - h tau by y at t, and returns the sum of a y.
  double finish(double h) const {
    const float factor = static_cast<float>(std::exp(h));
    return write_values(Row{out_, Dtype::kFloat, 1}, kNever,
                        [=](VecF e, VecF) { return e < kNever ? C::from_odds(e * factor) : VecF{}; });
  }

  // Writes y at t in the row's dtype, and returns the sum of a y before any rounding to half precision. With
  // kAround, entries of which nothing is left in float are only compared with t.
  template <bool kAround = false>
  double write(Threshold t) const {
    const float top = static_cast<float>(t.hi), scale = static_cast<float>(1 / tau_);
    const float lo = static_cast<float>(((t.hi - top) + t.lo) / tau_);
    const VecF hi = splat(top);
    const C F = F_;
    // Beyond these, y is 0 or 1.
    const float low = static_cast<float>(t.hi - 1.1 * kDeep<C> * tau_),
                high = static_cast<float>(t.hi + C::tail_reach(18) * tau_);
    if constexpr (kStores && !Terms::weighted) {
      const float per = static_cast<float>(kLog2E / tau_);
      const float rest = static_cast<float>(((t.hi - top) + t.lo) * (kLog2E / tau_));
      return write_values(x_, -kInf<float>, [=](VecF x, VecF) {
        if (kAround && !any((x >= low) & (x <= high))) return x < hi ? VecF{} : splat(1.0f);
        const VecF e = exp2_held((hi - x) * per + rest);
        return e < kNever ? rounded_value<C>(e) : VecF{};
      });
    }
    return write_values(x_, -kInf<float>, [=](VecF x, VecF a) {
      if (kAround && !any((x >= low) & (x <= high))) return x < hi ? VecF{} : splat(1.0f);
      return F.template value<float>(offset<Terms>(x, hi, a) * scale - lo * u<Terms>(a));
    });
  }

  // Writes 1 for the entries from `last` on and 0 for the others, and returns how many are 1.
  double write_whole(double last) const {
    const VecF least = splat(static_cast<float>(last));
    return write_values(x_, -kInf<float>, [=](VecF x, VecF) { return x >= least ? splat(1.0f) : VecF{}; });
  }

  Terms terms_;
  Row x_;
  int64_t n_, next_;
  double tau_;
  C F_;
  const Parallel* inside_;

  double t_ = 0;
  void* out_ = nullptr;
  bool stores_ = false, reads_odds_ = false;
  bool near_ = false;    // under compact support, whether the next pass writes y
  Threshold written_{};  // where the last pass that did so was

 private:
  // What a pass finds of costs.
  struct Costs {
    VecF most{};
    IntF bad{};
    LongSum total;
    KHOT_INLINE void add(VecF x, VecF given, VecF a) {
      bad |= ~((given >= 0) & (given < kInf<float>)) | ~(x < kInf<float>);
      const VecF there = x > -kInf<float> ? a : VecF{};
      total.add(there);
      most = there > most ? there : most;
    }
    KHOT_INLINE void flush() {
      if constexpr (Terms::weighted) total.flush();
    }
    KHOT_INLINE void put(Sums& s) const {
      if constexpr (Terms::weighted) {
        s.total += sum<double>(total.total);
        s.most = std::max<double>(s.most, maximum<float>(most));
        s.bad |= any(bad);
      }
    }
  };

  const Sums& seen(const Sums& sums) {
    if constexpr (Terms::weighted) total_ = sums.total;
    return sums;
  }

  // The sums of a pass. value(x, a, i, lanes) is y of the entries from i on. What there is to know of costs
  // is found with kFirst only.
  template <bool kFirst, class Value>
  Sums sum_values(const Row& row, float pad, Value value) const {
    const C F = F_;
    const Terms terms = terms_;
    const int64_t next = next_;
    return reduce<float, Sums>(row, n_, inside_, [=](Sums& s, const float* p, int count, int64_t at) {
      const Value local = value;  // a local copy stays in registers, as no store can change it
      const typename Terms::Block costs(terms, at, count);
      Costs seen;
      LongSum total;
      auto sums = derivative_sums<C, Terms>(F);
      auto add = [&](VecF x, int i, int lanes) {
        if (kFirst) costs.fetch_ahead(i, next);
        const VecF a = costs.a(i, lanes), y = local(x, a, at + i, lanes);
        if constexpr (kFirst && Terms::weighted) seen.add(x, costs.given(i, lanes), a);
        total.add(a * y);
        sums.add(y, a);
      };
      vectors<float>(p, count, pad, add, [&] {
        total.flush();
        if (kFirst) seen.flush();
      });
      s.C += sum<double>(total.total);
      sums.put(s, sum<float>);
      if (kFirst) seen.put(s);
    });
  }

  struct Total {
    double sum = 0;
    void operator+=(const Total& o) { sum += o.sum; }
  };

  // Writes value(x, a) for the entries of `from`, and returns the sum of a y.
  template <class Value>
  double write_values(const Row& from, float pad, Value value) const {
    const Terms terms = terms_;
    const bool own = x_.dtype == Dtype::kFloat;
    const Dtype dtype = x_.dtype;
    void* const out = out_;
    const int64_t next = own ? next_ : 0;
    return reduce<float, Total>(from, n_, inside_,
                                [=](Total& s, const float* p, int count, int64_t at) {
                                  const Value local = value;
                                  float results[kBlock];
                                  float* const target = own ? static_cast<float*>(out) + at : results;
                                  const typename Terms::Block costs(terms, at, count);
                                  LongSum total;
                                  auto add = [&](VecF x, int i, int lanes) {
                                    fetch_ahead<true>(target + i, next);
                                    const VecF a = costs.a(i, lanes), y = local(x, a);
                                    total.add(a * y);
                                    store_beside(target, i, lanes, y);
                                  };
                                  vectors<float>(p, count, pad, add, [&] { total.flush(); });
                                  s.sum += sum<double>(total.total);
                                  if (!own) put(out, dtype, at, count, results);
                                })
        .sum;
  }

  double total_ = 0;  // of the costs
};

}  // namespace khot::KHOT_ISA
