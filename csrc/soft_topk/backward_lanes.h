// The gradients of short rows in float, as many rows at once as a vector has lanes.
//
// The passes go row by row. Their sums are then gathered, one row per lane, and the per-row scalars of all
// rows computed together: row by row, the sums across lanes and these scalars would take longer than the
// passes.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "soft_topk/backward_decided.h"
#include "soft_topk/densities.h"

namespace khot::KHOT_ISA {

template <class C>
class LaneBackward {
 public:
  static constexpr int width = kWidth<float>;

  LaneBackward(const Spec& spec, const C& F)
      : spec_(spec), F_(F), n_(static_cast<int>(spec.n)), output_(spec.output) {}

  // Writes the gradients of the rows first, ..., first + width - 1. done[i] says whether those of row first +
  // i are written; float does not carry the others. What served the rows before is tried first.
  void run(const BackwardRows& rows, int64_t first, bool* done) {
    const FlushSubnormals flush;
    std::fill_n(done, width, false);
    int decided = 0;
    if constexpr (C::full_support) {
      if (decided_) decided = write_decided(rows, first, done);
      if (decided == width) return;
    }
    if constexpr (C::density_from_value) {
      if (output_ == Output::kValue && rows.y(first).data != nullptr && !by_scores_) {
        run<ValueDensity<C>>(rows, first, done, [&](int64_t row) { return rows.y(row); });
        by_scores_ = 4 * std::count(done, done + width, false) > width;
        if (!by_scores_) return;
      }
    }
    const auto scores = [&](int64_t row) { return rows.x(row); };
    if (output_ != Output::kLog) {
      run<ScoreDensity<float, C>>(rows, first, done, scores);
    } else if constexpr (C::log_fits_float) {
      run<LogDensity<float, C>>(rows, first, done, scores);
    }
    if constexpr (C::full_support) {
      decided_ = 2 * (decided + write_decided(rows, first, done)) > width;
    }
  }

 private:
  static bool fits_float(Threshold t, double tau) {
    return std::fabs(t.hi) < 1e38 && tau > 1e-25 && tau < 1e25;
  }

  // Zeros where only t is wanted.
  Row grad(const BackwardRows& rows, int64_t row) const {
    static constexpr double none = 0;
    return output_ == Output::kThreshold ? Row{&none, Dtype::kDouble, 0} : rows.grad(row);
  }

  template <class Density>
  KHOT_INLINE Density density(Threshold t, double tau, int j) const {
    if constexpr (std::is_constructible_v<Density, C, Threshold, double, FloatGap>) {
      return {F_, t, tau, gaps_[j]};
    } else {
      return {F_, t, tau};
    }
  }

  // The rows that are not done. source(row) is what Density takes f from.
  template <class Density, class Source>
  KHOT_PASS void run(const BackwardRows& rows, int64_t first, bool* done, Source source) {
    const Dtype dtype = rows.x(first).dtype;
    const bool direct = dtype == Dtype::kFloat;
    const float *grads[width], *kept[width];
    VecF f[width] = {}, fz[width] = {}, fv[width] = {}, fzv[width] = {}, y[width] = {};
    VecF tau{}, slope{}, grad_lo{};
    Threshold t[width] = {};
    bool fits[width] = {};
    for (int j = 0; j < width; ++j) {
      if (done[j]) continue;
      const double own_tau = rows.tau(first + j);
      if (Density::kMoments) t[j] = rows.threshold(first + j);
      fits[j] = fits_float(t[j], own_tau);
      const Density row = density<Density>(t[j], own_tau, j);
      if constexpr (Density::kMoments) slope[j] = static_cast<float>(row.slope(own_tau));
      tau[j] = static_cast<float>(own_tau);
      grad_lo[j] = static_cast<float>(rows.grad_lo(first + j));
      float* const keep = kept_ + j * kShortRow;
      const float* const x = fetch(source(first + j), 0, n_, Density::kKeeps ? x_ : keep);
      kept[j] = Density::kKeeps ? keep : x;
      const float* const g = grads[j] = fetch(grad(rows, first + j), 0, n_, grads_ + j * kShortRow);
      DensitySums<float> sums;
      vectors<float>(x, n_, Density::kPad, [&](VecF v, int i, int lanes) {
        const VecF now = row.density(v, beside(g, i, lanes), sums);
        if (Density::kKeeps) store(keep + i, now);
      });
      f[j] = sums.f, fz[j] = sums.fz, fv[j] = sums.fv, fzv[j] = sums.fzv, y[j] = sums.y;
    }
    const VecF mass = sums_of(f), y_sum = Density::kMoments ? VecF{} : sums_of(y), v_sum = sums_of(fv);
    const VecF safe = mass > static_cast<float>(kLeastMass<float>) ? mass : splat(1.0f);
    const VecF grad_k = (v_sum - grad_lo * tau) / safe;
    VecF grad_tau{};
    if (Density::kMoments) {
      const VecF z_mean = sums_of(fz) / safe;
      grad_tau = (v_sum * z_mean - sums_of(fzv)) * slope - grad_lo * z_mean;
    }
    for (int j = 0; j < width; ++j) {
      if (!fits[j]) continue;
      if (!Density::reliable(mass[j], y_sum[j], n_)) {
        // all entries may be outside of compact support; dL/dk is then found by itself (backward.h)
        const bool is_flat = !C::full_support && mass[j] == 0 && grad_lo[j] == 0;
        done[j] = is_flat && output_ == Output::kValue && !rows.keeps_numbers();
        if (done[j]) clear(rows.grad_x(first + j), dtype, n_);
        continue;
      }
      if (!(std::fabs(grad_k[j]) < kInf<float>)) continue;
      if (loses_products(mass[j], v_sum[j], Row{grads[j], Dtype::kFloat, 1}, n_, nullptr)) continue;
      done[j] = true;
      const Density row = density<Density>(t[j], tau[j], j);
      rows.put(first + j, row.of_k(grad_k[j]), grad_tau[j]);
      float* const target = direct ? static_cast<float*>(rows.grad_x(first + j)) : x_;
      const float offset = grad_k[j];  // dL/dx = f (v - mean)/tau + f grad_lo/sum f
      vectors<float>(grads[j], n_, 0.0f, [&](VecF v, int i, int lanes) {
        const VecF before = Density::kKeeps ? load(kept[j] + i) : beside(kept[j], i, lanes);
        store_beside(target, i, lanes, row.gradient(before, v, offset));
      });
      if (!direct) put(rows.grad_x(first + j), dtype, 0, n_, target);
    }
  }

  // Those of the rows that are not done, as far as all their entries are decided; how many these are.
  KHOT_APART int write_decided(const BackwardRows& rows, int64_t first, bool* done) {
    using Decided = DecidedRow<C>;
    const bool logs = output_ == Output::kLog, threshold = output_ == Output::kThreshold;
    const bool asked = rows.keeps_numbers();
    if (threshold && asked) return 0;
    if (std::find(done, done + width, false) == done + width) return 0;
    VecF ups[width], downs[width], largest[width], hi{}, taus = splat(1.0f);
    bool asks[width];
    for (int j = 0; j < width; ++j) {
      ups[j] = downs[j] = largest[j] = VecF{};
      const double tau = rows.tau(first + j);
      const Threshold t = rows.threshold(first + j);
      asks[j] = !done[j] && fits_float(t, tau) && (threshold || rows.grad_lo(first + j) == 0);
      if (!asks[j]) continue;
      const float *x = fetch(rows.x(first + j), 0, n_, x_), *g = fetch(grad(rows, first + j), 0, n_, grads_);
      Decided::template find_nearest<float>(x, g, n_, t, logs, ups[j], downs[j], largest[j]);
      hi[j] = static_cast<float>(t.hi), taus[j] = static_cast<float>(tau);
    }
    const auto least = [](VecF a, VecF b) { return a < b ? a : b; };
    const auto most_of = [](VecF a, VecF b) { return a > b ? a : b; };
    const VecF up = joined(ups, least), down = joined(downs, most_of), steepest = joined(largest, most_of);
    VecF away{};
    for (int j = 0; j < width; ++j) {
      if (!asks[j]) continue;
      gaps_[j] = FloatGap::around({up[j], down[j]}, rows.threshold(first + j), rows.tau(first + j));
      away[j] = gaps_[j].distance;
    }
    const VecF distance = away * taus, height = F_.template log_density<float>(away) - log<float>(taus);
    const IntF decided = Decided::template is_decided<float>(F_, distance, hi, taus);
    const IntF nothing = logs || threshold ? IntF{}
                                           : Decided::template is_nothing<float>(F_, distance, steepest, taus,
                                                                                 asked, Decided::kZero);
    const IntF low = logs ? Decided::template outweighs<float>(steepest, taus) : IntF{};
    // by float's exponent; but of t the densities tell only in which shares it follows the scores
    const IntF high = height > Decided::kZero;
    const IntF carries = threshold ? decided : logs && asked ? high & low : high | low;
    const IntF carried = decided & ~nothing & carries;
    bool left[width];
    const VecF most = threshold ? 1 / taus : exp<float>(height);
    for (int j = 0; j < width; ++j) left[j] = !carried[j], gaps_[j].most = most[j];
    const auto scores = [&](int64_t row) { return rows.x(row); };
    if (any(carried) && logs) run<RelativeDensity<C, true>>(rows, first, left, scores);
    if (any(carried) && !logs) run<RelativeDensity<C, false>>(rows, first, left, scores);
    int count = 0;
    for (int j = 0; j < width; ++j) {
      if (!decided[j] || !left[j] || (!carried[j] && !nothing[j])) continue;
      ++count, done[j] = true;
      if (carried[j]) continue;
      const int64_t i = first + j;
      double grad_k = 0, grad_tau = 0;
      if (asked) {
        const Decided row(spec_, F_, rows.x(i), rows.grad(i), rows.tau(i), rows.threshold(i));
        row.write_decided(distance[j], true, rows.grad_x(i), grad_k, grad_tau);
      } else {
        clear(rows.grad_x(i), rows.x(i).dtype, n_);
      }
      rows.put(i, grad_k, grad_tau);
    }
    return count;
  }

  Spec spec_;
  C F_;
  int n_;
  Output output_;
  bool by_scores_ = false;  // whether y had not the digits for f in the rows before
  bool decided_ = false;    // whether most of these had decided entries alone
  FloatGap gaps_[width];    // of decided rows
  alignas(KHOT_VECTOR_BYTES) float kept_[kShortRow * width], grads_[kShortRow * width], x_[kShortRow];
};

}  // namespace khot::KHOT_ISA
