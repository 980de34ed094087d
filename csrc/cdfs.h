// The five CDFs F with density f of khot/cdfs.py: on vectors, for the passes over a row, and on double
// scalars, for what is computed once per row.
//
// A kernel asks what a CDF is like, by the traits below, and not which CDF it is (but for assign/pass.h,
// which lists those that it takes). A new CDF is a struct here with all of these traits, a case in with_cdf,
// and a value of Cdf with its name in kernels.h. One with f > 0 everywhere is symmetric around 0 and derives
// most of its functions from FullSupport. Where log_fits_float, value_from_odds, rise_is_product or
// density_from_value is false, the functions that it speaks of are not needed.
//
//   pdf(z), icdf(y)     f and the quantile of F in double, for numbers of a row
//   full_support        f > 0 everywhere; otherwise f > 0 on (0, 1) only
//   median, mean, variance
//   fits_float          float carries F: an error of z is not magnified
//   log_fits_float      log F and f/F in float are off by no more than the digits of z are, in units of
//                       1 + abs(log F). A pass over the scores (float or double) then keeps log_state(z),
//                       from which log_slope(state, f) has f/F and f; a state of 0 has zeros. hazard_below(a)
//                       is f/F so far below the median that 1 - F is 1
//   least_logged        with log_fits_float: for smaller k, float's tails have not the digits for log F
//   value_from_odds     from_odds(exp(-z)) is y, so that a move of t needs no new exponentials
//   rise_is_product     with value_from_odds: from_odds(odds, rest) is y, and `rest` is 1 - y, both to the
//                       last digit; and rise() is F(b) - F(a) for a < b, which are given as y and 1 - y, and
//                       `share` = 1 - exp(a - b), without a difference of numbers that are nearly equal
//   decided_ratio       with value_from_odds: where the sum of y is so many times the sum of f, most entries
//                       are decided, and float has lost digits that matter
//   density_from_value  density_of(y) is f
//   last_step           after a step of this length, in tau, the error left in y is below 1e-7: it is that of
//                       the Taylor polynomial of which Derivatives has the terms
//   surplus(z)          omega*(z) - max(z, 0), where omega has the quantile for its derivative, and omega* F
//   potential(y)        omega(y), which is 0 where y is 0, and highest_potential() where y is 1
//   extra_passes        how many more passes than usual the search may need
//   rough_icdf(odds, z) a quantile of F, for a guess: odds = y/(1 - y) and z = log(odds)
//   tail_reach(a)       beyond this many tau, F or 1 - F is about e^-a or less
//   Derivatives         what one pass collects about f (cdf_derivatives.h); derivatives() is an empty one
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "cdf_derivatives.h"
#include "kernels.h"
#include "simd/math.h"

namespace khot::KHOT_ISA {

constexpr double kLog2E = 1.44269504088896340736;  // 1/log(2)
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// log in double is so long that a call is little beside it. This is not for functions that are compiled for
// several instruction sets (target_clones): a vector would be passed to it in another way than it expects.
KHOT_APART inline VecD log_apart(VecD x) { return log<double>(x); }
template <class R>
KHOT_INLINE Vec<R> log_called(Vec<R> x) {
  if constexpr (sizeof(R) == 8) return log_apart(x);
  return log<R>(x);
}

// The standard normal quantile to three digits, for 0 < y < 1.
inline double rough_normal_quantile(double y) {
  if (y > 0.5) return -rough_normal_quantile(1 - y);
  const double t = std::sqrt(-2 * std::log(y));
  return (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))) -
         t;
}

// The standard normal quantile. Formula 26.2.23 of Abramowitz and Stegun has an error below 5e-4 in both
// tails, and each of Halley's steps raises the error to its third power.
KHOT_APART inline double normal_quantile(double y) {
  if (y > 0.5) return -normal_quantile(1 - y);
  if (!(y > 0)) return y == 0 ? -std::numeric_limits<double>::infinity() : kNan;
  double z = rough_normal_quantile(y);
  for (int i = 0; i < 2; ++i) {
    const double density = std::exp(-0.5 * z * z) * 0.39894228040143267794;
    const double miss = (0.5 * std::erfc(-z * 0.70710678118654752440) - y) / density;
    z -= miss / (1 + 0.5 * z * miss);
  }
  return z;
}

// What the CDFs that are symmetric around 0 with f > 0 everywhere have in common. F is the derived struct,
// with tail_density, log_lower (the logarithm of the tail) and log_pdf of abs(z).
template <class F>
struct FullSupport {
  static constexpr bool full_support = true, fits_float = true;
  static constexpr double median = 0, mean = 0, least_logged = 0;
  static constexpr int extra_passes = 0;

  template <class R>
  KHOT_INLINE TailDensity<R> split(Vec<R> z, Int<R> /*above*/) const {
    return F::template tail_density<R>(abs<R>(z));
  }
  // The same in double with a relative error of 1e-10.
  KHOT_INLINE TailDensity<double> split_close(VecD z) const { return F::tail_density_close(abs<double>(z)); }
  static KHOT_INLINE TailDensity<double> tail_density_close(VecD a) {
    return F::template tail_density<double>(a);
  }
  template <class R>
  KHOT_INLINE Vec<R> value(Vec<R> z) const {
    const Vec<R> tail = F::template tail_density<R>(abs<R>(z)).tail;
    return z > 0 ? 1 - tail : tail;
  }
  template <class R>
  KHOT_INLINE Vec<R> density(Vec<R> z) const {
    return F::template tail_density<R>(abs<R>(z)).density;
  }
  template <class R>
  KHOT_INLINE Vec<R> log_value(Vec<R> z) const {
    const Vec<R> a = abs<R>(z);
    return z > 0 ? log1p<R>(-F::template tail_density<R>(a).tail) : F::template log_lower<R>(a);
  }
  template <class R>
  KHOT_INLINE Vec<R> log_density(Vec<R> z) const {
    return F::template log_pdf<R>(abs<R>(z));
  }
  // log(f/F), where F is not 0, from the two logarithms.
  template <class R>
  KHOT_INLINE Vec<R> log_hazard(Vec<R> /*z*/, Vec<R> log_f, Vec<R> log_F) const {
    return log_f - log_F;
  }
  // That of exponential tails.
  template <class R>
  static KHOT_INLINE Vec<R> hazard_below(Vec<R> /*a*/) {
    return splat<R>(1);
  }
  template <class R>
  KHOT_INLINE Vec<R> log_tail(Vec<R> z, Int<R> /*above*/) const {
    return F::template log_lower<R>(abs<R>(z));
  }
  static constexpr double highest_potential() { return 0; }
};

// y log(y), which is 0 where y is.
KHOT_INLINE VecD times_log(VecD y) {
  const VecD product = y * log_apart(y);
  return y > 0 ? product : VecD{};
}

struct Logistic : FullSupport<Logistic> {
  static constexpr double variance = 3.28986813369645287294;  // pi^2/3
  static constexpr bool log_fits_float = true, value_from_odds = true, density_from_value = true;
  static constexpr bool rise_is_product = true;
  static constexpr double decided_ratio = 48;
  // The error after a step h of the fifth-degree polynomial is h^6/720 times a mean of the sixth derivative.
  static constexpr double last_step = 0.25;
  static constexpr double tail_reach(double a) { return a; }
  using Derivatives = LogisticDerivatives;
  KHOT_INLINE Derivatives derivatives() const { return {}; }

  template <class R>
  static KHOT_INLINE TailDensity<R> tail_density(Vec<R> a) {
    const Vec<R> e = exp_minus<R>(a);
    const Vec<R> tail = divide<R>(e, 1 + e);
    return {tail, tail - tail * tail};
  }
  static KHOT_INLINE TailDensity<double> tail_density_close(VecD a) {
    const VecD e = exp2_close(clamp_below<double>(a * -kLog2E, -1000)), tail = e * inverse_close(1 + e);
    return {tail, tail - tail * tail};
  }
  // f = e/(1 + e)^2, and 0 where that is below 1e-37.
  template <class R>
  KHOT_INLINE Vec<R> density(Vec<R> z) const {
    if constexpr (sizeof(R) == 8) {
      return tail_density<R>(abs<R>(z)).density;
    } else {
      const VecF e = exp2_held(z * -static_cast<float>(kLog2E)), y = inverse_1p(e), f = e * y * y;
      return f > 1e-37f ? f : VecF{};
    }
  }
  template <class R>
  KHOT_INLINE Vec<R> log_value(Vec<R> z) const {
    return (z > 0 ? Vec<R>{} : z) - surplus<R>(z);
  }
  static KHOT_INLINE VecF log_state(VecF z) { return exp2_held(z * -static_cast<float>(kLog2E)); }
  static KHOT_INLINE VecF log_slope(VecF e, VecF& f) {
    const VecF y = inverse_1p(e), square = e * y * y;
    f = square > 1e-37f ? square : VecF{};
    return e < 1 ? e * y : 1 - y;
  }
  // exp(-abs(z)), with the sign of z.
  static KHOT_INLINE VecD log_state(VecD z) {
    const VecD e = exp_minus<double>(abs<double>(z));
    return z > 0 ? e : -e;
  }
  static KHOT_INLINE VecD log_slope(VecD state, VecD& f) {
    const VecD e = abs<double>(state), tail = e / (1 + e);
    f = tail - tail * tail;
    return (IntD)state < 0 ? 1 - tail : tail;
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_lower(Vec<R> a) {
    return -a - log1p<R>(exp_minus<R>(a));
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_pdf(Vec<R> a) {
    return -a - 2 * log1p<R>(exp_minus<R>(a));
  }

  static KHOT_INLINE VecF from_odds(VecF odds) { return inverse_1p(odds); }
  static KHOT_INLINE VecF from_odds(VecF odds, VecF& rest) {
    const VecF y = inverse_1p(odds);
    rest = odds < 1 ? odds * y : 1 - y;
    return y;
  }
  static KHOT_INLINE VecF rise(VecF /*a*/, VecF a_rest, VecF b, VecF /*b_rest*/, float share) {
    return b * a_rest * share;
  }
  template <class V>
  static KHOT_INLINE V density_of(V y) {
    return y * (1 - y);
  }

  template <class R>
  KHOT_INLINE Vec<R> surplus(Vec<R> z) const {
    const Vec<R> a = abs<R>(z);
    if constexpr (sizeof(R) == 8) {
      return log1p<R>(exp_minus<R>(a));
    } else {
      return a > 87 ? VecF{} : log1p_of_share(exp2_held(a * -static_cast<float>(kLog2E)));
    }
  }
  KHOT_INLINE VecD potential(VecD y) const { return times_log(y) + times_log(1 - y); }
  double pdf(double z) const {
    const double e = std::exp(-std::fabs(z));
    return e / ((1 + e) * (1 + e));
  }
  double icdf(double y) const { return std::log(y) - std::log1p(-y); }
  KHOT_INLINE VecF rough_icdf(VecF /*odds*/, VecF z) const { return z; }
};

struct Laplace : FullSupport<Laplace> {
  static constexpr double variance = 2;
  static constexpr bool log_fits_float = true, value_from_odds = true, density_from_value = true;
  static constexpr bool rise_is_product = true;
  static constexpr double decided_ratio = 48;
  // f has a kink, so that the error after a step h is of the size of h^2/2.
  static constexpr double last_step = 3e-4;
  static constexpr double tail_reach(double a) { return a; }
  using Derivatives = LaplaceDerivatives;
  KHOT_INLINE Derivatives derivatives() const { return {}; }
  static constexpr double kLog2 = 0.69314718055994530942;

  template <class R>
  static KHOT_INLINE TailDensity<R> tail_density(Vec<R> a) {
    const Vec<R> half = exp_minus<R>(a) / 2;
    return {half, half};
  }
  static KHOT_INLINE TailDensity<double> tail_density_close(VecD a) {
    const VecD half = 0.5 * exp2_close(clamp_below<double>(a * -kLog2E, -1000));
    return {half, half};
  }
  // f, with the sign of z.
  template <class V>
  static KHOT_INLINE V log_state(V z) {
    using R = std::remove_reference_t<decltype(z[0])>;
    const V f = tail_density<R>(abs<R>(z)).density;
    return z > 0 ? f : -f;
  }
  template <class V>
  static KHOT_INLINE V log_slope(V state, V& f) {
    using R = std::remove_reference_t<decltype(state[0])>;
    f = abs<R>(state);
    return (Int<R>)state < 0 ? splat<R>(1) : divide<R>(f, 1 - f);
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_lower(Vec<R> a) {
    return -a - static_cast<R>(kLog2);
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_pdf(Vec<R> a) {
    return -a - static_cast<R>(kLog2);
  }

  static KHOT_INLINE VecF from_odds(VecF odds) { return odds < 1 ? 1 - odds * 0.5f : inverse(odds) * 0.5f; }
  static KHOT_INLINE VecF from_odds(VecF odds, VecF& rest) {
    const VecF less = 0.5f * (odds < 1 ? odds : inverse(odds)), more = 1 - less;
    rest = odds < 1 ? less : more;
    return odds < 1 ? more : less;
  }
  // Where 0 lies between the two, with s = exp(a) and r = exp(-b), it is 1 - (s + r)/2, and rs = 1 - share.
  static KHOT_INLINE VecF rise(VecF a, VecF a_rest, VecF b, VecF b_rest, float share) {
    const VecF across = 0.5f * share + 2 * (0.5f - a) * (0.5f - b_rest);
    return b <= 0.5f ? b * share : a > 0.5f ? a_rest * share : across;
  }
  template <class V>
  static KHOT_INLINE V density_of(V y) {
    const V rest = 1 - y;
    return rest < y ? rest : y;
  }

  template <class R>
  KHOT_INLINE Vec<R> surplus(Vec<R> z) const {
    return exp_minus<R>(abs<R>(z)) / 2;
  }
  KHOT_INLINE VecD potential(VecD y) const {
    const VecD less = y < 0.5 ? y : 1 - y;
    return (times_log(2 * less) - 2 * less) / 2;
  }
  double pdf(double z) const { return std::exp(-std::fabs(z)) / 2; }
  double icdf(double y) const { return y > 0.5 ? -std::log(2 * (1 - y)) : std::log(2 * y); }
  KHOT_INLINE VecF rough_icdf(VecF odds, VecF z) const {
    const VecF less = odds < 1 ? odds : inverse(odds);  // 2 min(y, 1 - y) = 2 less/(1 + less)
    const VecF a = abs<float>(z) + log1p<float>(less) - static_cast<float>(kLog2);
    return z < 0 ? -a : a;
  }
};

struct Normal : FullSupport<Normal> {
  static constexpr double variance = 1;
  static constexpr bool log_fits_float = true, value_from_odds = false, density_from_value = false;
  static constexpr bool rise_is_product = false;
  static constexpr double last_step = 0.15;  // as for the logistic
  static constexpr double least_logged = 1e-16;
  static constexpr double kRoot = 0.39894228040143267794;  // 1/sqrt(2 pi)
  static double tail_reach(double a) { return 2 * std::sqrt(a); }
  using Derivatives = NormalDerivatives;
  KHOT_INLINE Derivatives derivatives() const { return {}; }

  // The Mills ratio M(a) = (1 - Phi(a))/phi(a). (a + 3/2) M(a) is nearly a polynomial in (a - 5)/(a + 5), and
  // those below interpolate it at Chebyshev's nodes with relative errors of 2e-16 and, in float, 1.5e-7.
  template <class R>
  static KHOT_INLINE Vec<R> mills(Vec<R> a) {
    if constexpr (sizeof(R) == 8) return mills_apart(a);
    return mills_inline<R>(a);
  }
  static KHOT_APART VecD mills_apart(VecD a) { return mills_inline<double>(a); }
  template <class R>
  static KHOT_INLINE Vec<R> mills_inline(Vec<R> a) {
    constexpr double kTerms[] = {
        1.25325268064955247,      -0.409284920369224052,    0.223252281706877402,    -0.076300727553944753,
        -0.00619981121507899012,  0.0321600733379138351,    -0.0267575803615791184,  0.0133667921538693192,
        -0.00392612428285258843,  0.000187820804079843275,  0.000381309303757019339, -0.000133165801535498686,
        -0.000016478337378783385, 0.0000211082468259921145, -1.02220349159413379e-6, -2.95587908946676958e-6,
        4.16708492249091452e-7,   4.24463342572372312e-7,   -7.9084546577124268e-8,  -5.73779755061995461e-8,
        1.09914657439360064e-8,   4.98911271683873154e-9,   -8.8859206852651427e-10};
    constexpr float kFewTerms[] = {1.25325274f,     -0.40928492f,    0.223251656f,    -0.0763002262f,
                                   -0.00619253144f, 0.0321541801f,   -0.0267885979f,  0.0133924522f,
                                   -0.00386651303f, 0.000136353949f, 0.000328907947f, -8.34415114e-05f};
    a = clamp_above<R>(a, R(sizeof(R) == 8 ? 1e300 : 1e30));  // for a = inf the quotient would be inf/inf
    const Vec<R> r = divide<R>(a - 5, a + 5), width = a + R(1.5);
    if constexpr (sizeof(R) == 8) {
      return polynomial(r, kTerms) / width;
    } else {
      return divide<R>(polynomial(r, kFewTerms), width);
    }
  }
  template <class R>
  static KHOT_INLINE TailDensity<R> tail_density(Vec<R> a) {
    constexpr R root = R(kRoot);
    if constexpr (sizeof(R) == 8) {
      const Vec<R> density = exp_minus<R>(a * a / 2) * root;
      return {density * mills<R>(a), density};
    } else {
      // The tail is exp(-a^2/2) times a polynomial in 1/(a + 3), fitted for the least error in units of the
      // tail to the power 3/5. The error is at most 2.4e-8; relative to the tail it is 2e-7 where that is
      // 1e-3, and 3e-6 where that is 1e-6.
      constexpr float kTerms[] = {0.401340127f, 1.103687525f,  4.695775509f, -5.841536999f,
                                  75.84059906f, -157.6013947f, 100.3295059f};
      const VecF near = clamp_above<float>(a, NormalDerivatives::kEnd),
                 e = exp2_held(near * near * static_cast<float>(-kLog2E / 2));
      const VecF power = a > NormalDerivatives::kEnd ? VecF{} : e, r = inverse(near + 3);
      // rounding must not make it more than 1/2, where F and 1 - F would change places at 0
      return {clamp_above<float>(power * (r * polynomial(r, kTerms)), 0.5f), power * root};
    }
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_pdf(Vec<R> a) {
    constexpr R kRest = R(0.91893853320467274178);
    if constexpr (sizeof(R) == 8) return -a * a / 2 - kRest;  // squares of equal a round alike
    return a * (R(-0.5) * a) - kRest;                         // which overflows later
  }
  template <class R>
  static KHOT_INLINE Vec<R> log_lower(Vec<R> a) {
    return log_pdf<R>(a) + log_called<R>(mills<R>(a));
  }
  template <class R>
  KHOT_INLINE Vec<R> log_value(Vec<R> z) const {
    const Vec<R> a = abs<R>(z), ratio = mills<R>(a), log_f = log_pdf<R>(a),
                 tail = exp_minus<R>(-log_f) * ratio;
    return z > 0 ? log1p<R>(-tail) : log_f + log_called<R>(ratio);
  }
  // z itself, but for 0.
  template <class V>
  static KHOT_INLINE V log_state(V z) {
    using R = std::remove_reference_t<decltype(z[0])>;
    return z == 0 ? splat<R>(R(1e-30)) : z;
  }
  template <class V>
  static KHOT_INLINE V log_slope(V z, V& f) {
    using R = std::remove_reference_t<decltype(z[0])>;
    const V a = abs<R>(z), ratio = mills<R>(a);
    f = z == 0 ? V{} : tail_density<R>(a).density;
    const V hazard = divide<R>(z > 0 ? f : splat<R>(1), z > 0 ? 1 - f * ratio : ratio);
    return z == 0 ? V{} : hazard;
  }
  template <class R>
  static KHOT_INLINE Vec<R> hazard_below(Vec<R> a) {
    return 1 / mills<R>(a);
  }
  // Far below the median, the squares in log f - log F would round off everything else.
  template <class R>
  KHOT_INLINE Vec<R> log_hazard(Vec<R> z, Vec<R> log_f, Vec<R> log_F) const {
    return z > 0 ? log_f - log_F : -log_called<R>(mills<R>(abs<R>(z)));
  }

  template <class R>
  KHOT_INLINE Vec<R> surplus(Vec<R> z) const {
    const Vec<R> a = clamp_above<R>(abs<R>(z), R(1e30));
    return exp_minus<R>(-log_pdf<R>(a)) * (1 - a * mills<R>(a));
  }
  KHOT_APART VecD potential(VecD y) const {
    for (int i = 0; i < kWidth<double>; ++i) y[i] = y[i] > 0 && y[i] < 1 ? -pdf(normal_quantile(y[i])) : 0;
    return y;
  }
  double pdf(double z) const { return std::exp(-0.5 * z * z) * kRoot; }
  double icdf(double y) const { return normal_quantile(y); }
  // By a power of the odds (Shore 1982), with an error below 0.03 up to 3.5.
  KHOT_INLINE VecF rough_icdf(VecF /*odds*/, VecF z) const {
    const VecF a = 5.5556f * (1 - exp<float>(-0.1186f * abs<float>(z)));
    return z < 0 ? -a : a;
  }
};

// 1/tau; not rounded down under compact support, where a distance of tau has to be 1 or more in tau, so that
// the entries at the ends of a gap are decided.
template <class R>
R inverse_of(double tau, bool full_support) {
  const R scale = static_cast<R>(1 / tau);
  return full_support || scale * tau >= 1 ? scale : std::nextafter(scale, std::numeric_limits<R>::infinity());
}

// F(z) = clip(z, 0, 1)^e, e = 1/(p - 1).
template <bool kUniform>
struct ClippedPower {
  static constexpr bool full_support = false, log_fits_float = false, value_from_odds = false;
  static constexpr double least_logged = 0;
  static constexpr bool density_from_value = false, rise_is_product = false;
  static constexpr double last_step = 1e-7;  // F has a kink, so that only a step of no length is safe
  static constexpr int extra_passes = kUniform ? 0 : 4;  // steps overshoot where f is close to 0
  static constexpr double tail_reach(double) { return 1; }
  using Derivatives = std::conditional_t<kUniform, DensitySum, PowerDerivatives>;
  KHOT_INLINE Derivatives derivatives() const {
    if constexpr (kUniform) {
      return {};
    } else {
      return {whole};
    }
  }

  double e = 1, median = 0.5, mean = 0.5, variance = 1.0 / 12;
  int whole = 1;           // e where that is an integer, otherwise 0
  bool fits_float = true;  // relative errors of z are multiplied by e

  explicit ClippedPower(double p) {
    if constexpr (!kUniform) {
      e = 1 / (p - 1);
      median = std::pow(0.5, p - 1);
      mean = e / (e + 1);
      variance = e / (e + 2) - mean * mean;
      const double nearest = std::round(e);
      whole = std::fabs(e - nearest) < 1e-14 * e ? static_cast<int>(nearest) : 0;
      fits_float = whole != 0 && whole <= 3;
    }
  }

  template <class R>
  KHOT_INLINE TailDensity<R> split(Vec<R> z, Int<R> above) const {
    Vec<R> F, f;
    both<R>(z, F, f);
    return {above ? 1 - F : F, f};
  }
  template <class R>
  KHOT_INLINE Vec<R> value(Vec<R> z) const {
    Vec<R> F, f;
    both<R>(z, F, f);
    return F;
  }
  template <class R>
  KHOT_INLINE Vec<R> density(Vec<R> z) const {
    Vec<R> F, f;
    both<R>(z, F, f);
    return f;
  }
  template <class R>
  KHOT_INLINE Vec<R> log_value(Vec<R> z) const {
    const Vec<R> inside = clamp_above<R>(clamp_below<R>(z, R(0)), R(1));
    const Vec<R> value = static_cast<R>(e) * log_called<R>(inside);
    return inside == 1 ? Vec<R>{} : value;
  }
  template <class R>
  KHOT_INLINE Vec<R> log_density(Vec<R> z) const {
    const Int<R> outside = (z <= 0) | (z >= 1);
    const Vec<R> base = outside ? splat<R>(1) : z;
    const Vec<R> value = static_cast<R>(e - 1) * log_called<R>(base) + static_cast<R>(std::log(e));
    return outside ? splat<R>(-kInf<R>) : value;
  }
  template <class V>
  static KHOT_INLINE V log_state(V z) {
    return z;
  }
  template <class V>
  KHOT_INLINE V log_slope(V z, V& f) const {
    using R = std::remove_reference_t<decltype(z[0])>;
    f = density<R>(z);
    return (z > 0) & (z < 1) ? static_cast<R>(e) / z : V{};
  }
  template <class R>
  KHOT_INLINE Vec<R> log_hazard(Vec<R> /*z*/, Vec<R> log_f, Vec<R> log_F) const {
    return log_f - log_F;
  }
  template <class R>
  KHOT_INLINE Vec<R> log_tail(Vec<R> z, Int<R> above) const {
    return log_called<R>(split<R>(z, above).tail);
  }

  template <class R>
  KHOT_INLINE Vec<R> surplus(Vec<R> z) const {
    const Vec<R> inside = clamp_above<R>(clamp_below<R>(z, R(0)), R(1));
    return inside * (value<R>(z) / static_cast<R>(e + 1) - 1);
  }
  KHOT_INLINE VecD potential(VecD y) const {
    const VecD power = exp_minus<double>(log_apart(y) / -mean);  // p = 1/mean
    return y > 0 ? power * mean : VecD{};
  }
  double highest_potential() const { return mean; }
  double pdf(double z) const { return z <= 0 || z >= 1 ? 0 : e * std::pow(z, e - 1); }
  double icdf(double y) const { return std::pow(y, 1 / e); }
  KHOT_INLINE VecF rough_icdf(VecF odds, VecF z) const {
    const VecF y = odds < 1 ? divide<float>(odds, 1 + odds) : inverse_1p(inverse(odds));
    if constexpr (kUniform) return y;
    return exp<float>(static_cast<float>(1 / e) * (z - log1p<float>(odds < 1e30f ? odds : splat(1e30f))));
  }

 private:
  template <class R>
  KHOT_INLINE void both(Vec<R> z, Vec<R>& F, Vec<R>& f) const {
    const Vec<R> inside = clamp_above<R>(clamp_below<R>(z, R(0)), R(1));
    const Int<R> within = (z > 0) & (z < 1);
    if constexpr (kUniform) {
      F = inside;
      f = within ? splat<R>(1) : Vec<R>{};
    } else {
      Vec<R> lower = splat<R>(1);  // z^(e-1)
      if (sizeof(R) == 4) {  // float serves up to e = 3 only, and needs no loop inside the loop over the row
        const Vec<R> twice = whole > 1 ? inside : lower;
        lower = whole > 2 ? inside * inside : twice;
      } else if (whole != 0) {
        for (int i = 1; i < whole; ++i) lower *= inside;
      } else {
        lower = exp_minus<R>(static_cast<R>(1 - e) * log_called<R>(inside));
      }
      F = within ? lower * inside : inside;
      f = within ? static_cast<R>(e) * lower : Vec<R>{};
    }
  }
};

using Uniform = ClippedPower<true>;
using Power = ClippedPower<false>;

// The same CDF for passes in which the traits of the uniform one gain little: fewer types, less code.
template <class C>
const C& general(const C& F) {
  return F;
}
inline Power general(const Uniform&) { return Power(2); }

// call(F) with the CDF that is asked for.
template <class Call>
void with_cdf(const Spec& spec, Call call) {
  switch (spec.cdf) {
    case Cdf::kLogistic:
      return call(Logistic());
    case Cdf::kLaplace:
      return call(Laplace());
    case Cdf::kNormal:
      return call(Normal());
    case Cdf::kUniform:
      return call(Uniform(2));
    case Cdf::kPower:
      return call(Power(spec.power));
  }
  unknown_cdf(spec.cdf);
}

}  // namespace khot::KHOT_ISA
