// From a threshold to y, and which rows may be computed in float.
#pragma once

#include <cmath>

#include "search/guess.h"

namespace khot::KHOT_ISA {

// Whether float carries the row. It does not carry temperatures at the ends of its exponent; nor log y where
// that has a larger error than z, as near where F leaves 0, and where log y is of the size of z^2; nor t
// itself, which is less certain than y where C is flat.
template <class C>
bool float_carries(const Spec& spec, const C& F, Dtype dtype, double tau) {
  return F.fits_float && dtype != Dtype::kDouble && tau > 1e-25 && tau < 1e25 &&
         spec.output != Output::kThreshold && (spec.output != Output::kLog || C::log_fits_float);
}

// Whether float carries the search for the threshold of the row to a few digits, and the gradients of the
// threshold.
template <class C>
bool float_carries_threshold(const Spec& spec, const C& F, Dtype dtype, double tau) {
  return C::full_support && F.fits_float && dtype != Dtype::kDouble && tau > 1e-25 && tau < 1e25 &&
         spec.output == Output::kThreshold;
}

// Writes `value` to every entry of out, but at_infinity where x is the given infinity.
template <class R>
KHOT_APART void fill_constant(const Spec& spec, void* out, Dtype dtype, const Row& x, double value,
                              double at_infinity, double infinity) {
  map<R>(x, spec.n, spec.inside, out, dtype, [=](Vec<R> v, int64_t, int) {
    return v == static_cast<R>(infinity) ? splat(static_cast<R>(at_infinity)) : splat(static_cast<R>(value));
  });
}

// Normal tails bend. log y is -(1 - F) above t, and has not the digits of z there, which matter from kBent
// tau above t on; and where no more than kLeastLeft is left to be chosen, those of t are too few.
template <class C>
constexpr bool kBends = C::full_support && !C::value_from_odds;
constexpr double kBent = 4.5, kLeastLeft = 4e-6;

// log y of float again, for the entries that are so far above t, with z^2/2 in double.
KHOT_APART inline void write_bent_logs(const Spec& spec, const Row& x, Threshold t, double tau, void* out) {
  const float least = static_cast<float>(t.hi + kBent * tau);
  const double scale = 1 / tau, round = Lanes<double>::kRound;
  auto value = [=](VecF v, VecF log_y) {
    if (!any(v > least)) return log_y;
    VecD z[2], whole[2], part[2];  // of the power of 1/2 that exp(-z^2/2) is
    halves(v, z[0], z[1]);
    for (int i = 0; i < 2; ++i) {
      z[i] = ((z[i] - t.hi) - t.lo) * scale;
      const VecD power = z[i] * z[i] * (0.5 * kLog2E);
      whole[i] = (power + round) - round, part[i] = power - whole[i];
    }
    const VecF halvings = join(whole[0], whole[1]), ratio = Normal::mills<float>(join(z[0], z[1]));
    const VecF e =
        exp2_held(-halvings) * exp2_held(-join(part[0], part[1])) * static_cast<float>(Normal::kRoot);
    const VecF tail = halvings < 126 ? e * ratio : VecF{};
    return v > least ? -(tail + 0.5f * tail * tail) : log_y;
  };
  map_beside<float>(x, Row{out, Dtype::kFloat, 1}, spec.n, spec.inside, out, Dtype::kFloat, value);
}

// Writes y or log y at the threshold t.
template <class R, class C>
KHOT_APART void apply(const Spec& spec, const C& F, const Row& x, Threshold t, double tau, void* out) {
  const bool log = spec.output == Output::kLog;
  if (std::isnan(t.hi)) return fill_constant<R>(spec, out, x.dtype, x, kNan, kNan, 0);
  const double none = log ? -kInfinity : 0, every = log ? 0 : 1;
  if (t.hi == kHuge) return fill_constant<R>(spec, out, x.dtype, x, none, every, kInfinity);
  if (t.hi == -kHuge) return fill_constant<R>(spec, out, x.dtype, x, every, none, -kInfinity);
  const R hi = static_cast<R>(t.hi), lo = static_cast<R>((t.hi - hi) + t.lo), scale = static_cast<R>(1 / tau);
  auto z = [=](Vec<R> v) { return ((v - hi) - lo) * scale; };
  if (log) {
    map<R>(x, spec.n, spec.inside, out, x.dtype,
           [=](Vec<R> v, int64_t, int) { return F.template log_value<R>(z(v)); });
  } else {
    map<R>(x, spec.n, spec.inside, out, x.dtype,
           [=](Vec<R> v, int64_t, int) { return F.template value<R>(z(v)); });
  }
}

}  // namespace khot::KHOT_ISA
