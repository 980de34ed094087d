// Elementary functions of vectors: division, exp, log and what they are made of.
#pragma once

#include <cmath>

#include "simd/vec.h"

namespace khot::KHOT_ISA {

// a/b for finite b other than 0, to within an ulp, and exactly 1 where a = b.
template <class R>
KHOT_INLINE Vec<R> divide(Vec<R> a, Vec<R> b) {
#if KHOT_VECTOR_BYTES == 64
  if constexpr (sizeof(R) == 4) {
    // One step of Newton and one of correction, from 14 bits, take a third of the time of a division.
    Vec<R> r = (Vec<R>)_mm512_maskz_rcp14_ps(0xffff, (__m512)b);
    r = r * (2 - b * r);
    const Vec<R> q = a * r;
    return q + r * (a - q * b);
  }
#endif
  return a / b;
}

template <class V, class R, size_t N>
KHOT_INLINE V polynomial(V x, const R (&coefficients)[N]) {
  V p = coefficients[N - 1] - V{};
#pragma GCC unroll 32
  for (int i = static_cast<int>(N) - 2; i >= 0; --i) p = p * x + coefficients[i];
  return p;
}

// exp(r) for abs(r) <= log(2)/2. In single precision the minimax polynomial of Cephes, in double the Taylor
// polynomial with an error of 4e-18.
KHOT_INLINE VecF exp_core(VecF r) {
  constexpr float kTerms[] = {0.5000000120f,    0.16666665459f,   4.1665795894e-2f,
                              8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
  return polynomial(r, kTerms) * (r * r) + r + 1;
}

KHOT_INLINE VecD exp_core(VecD r) {
  constexpr double kTerms[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                               1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                               1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  return polynomial(r, kTerms) * (r * r) + r + 1;
}

// exp(-a) for a >= 0. It is 0 where it would be subnormal, and NaN for NaN.
template <class R>
KHOT_INLINE Vec<R> exp_minus(Vec<R> a) {
  using L = Lanes<R>;
  const Vec<R> x = -clamp_above<R>(a, L::kExpEnd);
  const Vec<R> rounded = x * static_cast<R>(1.44269504088896340736) + L::kRound;
  const Vec<R> whole = rounded - L::kRound;
  const Vec<R> r = (x - whole * L::kLn2High) - whole * L::kLn2Low;
  const Vec<R> scale = (Vec<R>)(((Int<R>)rounded << L::kMantissa) + L::kOne);
  return a > L::kExpEnd ? Vec<R>{} : exp_core(r) * scale;
}

// 2^v with a relative error of at most 2e-7 for -126 <= v <= 126; 2^126 for larger v, less than 2^-125 for
// smaller v, and NaN for NaN.
KHOT_INLINE VecF exp2_held(VecF v) {
  using L = Lanes<float>;
  // 2^r for abs(r) <= 1/2, interpolated at Chebyshev's nodes
  constexpr float kTerms[] = {1.000000075f,   0.693147188f,    0.2402210749f,
                              0.05550357114f, 0.009676031918f, 0.001339086336f};
#if KHOT_VECTOR_BYTES == 64  // AVX-512 can do it in half the instructions
  const VecF held = clamp_above<float>(v, 126);
  const VecF part = (VecF)_mm512_maskz_reduce_ps(0xffff, (__m512)held, _MM_FROUND_TO_NEAREST_INT);
  return (VecF)_mm512_maskz_scalef_ps(0xffff, (__m512)polynomial(part, kTerms), (__m512)(held - part));
#endif
  const VecF x = clamp_above<float>(clamp_below<float>(v, -126), 126);
  const VecF rounded = x + L::kRound;
  const VecF r = x - (rounded - L::kRound);
  return polynomial(r, kTerms) * (VecF)(((IntF)rounded << L::kMantissa) + L::kOne);
}

// 1/b to within two ulp, for b that is not subnormal.
KHOT_INLINE VecF inverse(VecF b) {
#if KHOT_VECTOR_BYTES == 64
  const VecF r = (VecF)_mm512_maskz_rcp14_ps(0xffff, (__m512)b);
  return r * (2 - b * r);
#else
  return 1 / b;
#endif
}

// 1/b to within 4e-4, for b that is not subnormal.
KHOT_INLINE VecF rough_inverse(VecF b) {
#if KHOT_VECTOR_BYTES == 64
  return (VecF)_mm512_maskz_rcp14_ps(0xffff, (__m512)b);
#elif defined(KHOT_AVX2)
  return (VecF)_mm256_rcp_ps((__m256)b);
#else
  return 1 / b;
#endif
}

// sqrt(v) for v >= 0.
KHOT_INLINE VecF square_root(VecF v) {
#if KHOT_VECTOR_BYTES == 64
  return (VecF)_mm512_maskz_sqrt_ps(0xffff, (__m512)v);
#elif defined(KHOT_AVX2)
  return (VecF)_mm256_sqrt_ps((__m256)v);
#else
#pragma GCC unroll 8
  for (int i = 0; i < kWidth<float>; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

KHOT_INLINE VecD square_root(VecD v) {
#pragma GCC unroll 8
  for (int i = 0; i < kWidth<double>; ++i) v[i] = std::sqrt(v[i]);
  return v;
}

// 1/(1 + e) for 0 <= e < 2^128. From e = 2^126 on the result may be flushed to 0, as it is subnormal.
KHOT_INLINE VecF inverse_1p(VecF e) { return inverse(e + 1); }

// 2^v for abs(v) <= 1000 with a relative error of 1e-10, where a threshold needs more digits than float has,
// but not all digits of double. The polynomials interpolate at Chebyshev's nodes.
KHOT_INLINE VecD exp2_close(VecD v) {
#if KHOT_VECTOR_BYTES == 64  // 2^(v/8) from a table, and a polynomial for abs(r) <= 1/16
  constexpr double kEighths[] = {1.0,
                                 1.0905077326652577,
                                 1.1892071150027210,
                                 1.2968395546510096,
                                 1.4142135623730951,
                                 1.5422108254079408,
                                 1.6817928305074290,
                                 1.8340080864093424};
  constexpr double kTerms[] = {1.0, 0.693147174201654194, 0.240226506224572376, 0.0555106194821901848,
                               0.00961888125834299995};
  constexpr double kRound = 0x1.8p49;  // adding it rounds to a multiple of 1/8
  const VecD rounded = v + kRound, near = rounded - kRound;
  const VecD root = (VecD)_mm512_maskz_permutexvar_pd(0xff, (__m512i)rounded, (__m512d)load(kEighths));
  return (VecD)_mm512_maskz_scalef_pd(0xff, (__m512d)(polynomial(v - near, kTerms) * root), (__m512d)near);
#else  // a polynomial for abs(r) <= 1/2
  using L = Lanes<double>;
  constexpr double kTerms[] = {0.999999999959561751,    0.693147180556832414,    0.240226512134980927,
                               0.0555041090632586661,   0.00961802561331803425,  0.00133334784736854153,
                               0.000154697292141182971, 0.0000153037007113656939};
  const VecD rounded = v + L::kRound;
  const VecD r = v - (rounded - L::kRound);
  return polynomial(r, kTerms) * (VecD)(((IntD)rounded << L::kMantissa) + L::kOne);
#endif
}

// 1/b to within a few ulp, for b that is not subnormal.
KHOT_INLINE VecD inverse_close(VecD b) {
#if KHOT_VECTOR_BYTES == 64
  const VecD r = (VecD)_mm512_maskz_rcp14_pd(0xff, (__m512d)b), e = 1 - b * r;
  return r + r * (e + e * e);
#else
  return 1 / b;
#endif
}

template <class R>
KHOT_INLINE Vec<R> exp(Vec<R> x) {
  const Vec<R> e = exp_minus<R>(abs<R>(x));
  return x > 0 ? 1 / e : e;
}

// log((1 + s)/(1 - s)) = 2 artanh(s) for s^2 <= 1/9.
template <class R>
KHOT_INLINE Vec<R> twice_artanh(Vec<R> s) {
  constexpr int kTerms = sizeof(R) == 4 ? 7 : 16;
  const Vec<R> square = s * s;
  Vec<R> p = splat<R>(R(2) / (2 * kTerms + 1));
#pragma GCC unroll 16
  for (int i = kTerms - 1; i > 0; --i) p = p * square + R(2) / (2 * i + 1);
  return p * square * s + 2 * s;
}

// log(1 + x) for -1/2 <= x <= 1, with full relative accuracy.
template <class R>
KHOT_INLINE Vec<R> log1p(Vec<R> x) {
  return twice_artanh<R>(divide<R>(x, 2 + x));
}

// The same for 0 <= x <= 1 in float, by a minimax polynomial, without a division.
KHOT_INLINE VecF log1p_of_share(VecF x) {
  constexpr float kTerms[] = {0.99999994f,   -0.499994934f, 0.333190978f,   -0.24842982f,  0.191060051f,
                              -0.136632428f, 0.0782259107f, -0.0295052137f, 0.00523268804f};
  return x * polynomial(x, kTerms);
}

// log(x) for x >= 0 that is not subnormal. It is -inf for 0 and NaN for x < 0.
template <class R>
KHOT_INLINE Vec<R> log(Vec<R> x) {
  using L = Lanes<R>;
  const Int<R> exponent = ((Int<R>)x - L::kSqrtHalf) >> L::kMantissa;
  const Vec<R> mantissa = (Vec<R>)((Int<R>)x - (exponent << L::kMantissa));
  const Vec<R> e = __builtin_convertvector(exponent, Vec<R>);
  const Vec<R> core = twice_artanh<R>((mantissa - 1) / (mantissa + 1));
  const Vec<R> value = e * L::kLn2High + (e * L::kLn2Low + core);
  return x > 0                ? value
         : (x < 0) | (x != x) ? splat<R>(std::numeric_limits<R>::quiet_NaN())
                              : splat<R>(-kInf<R>);
}

// sin(x) and cos(x) for abs(x) <= pi/2, to within 2e-16: Taylor's polynomials.
KHOT_INLINE void sin_cos(VecD x, VecD& sin, VecD& cos) {
  constexpr int kTerms = 11;
  const VecD square = x * x;
  sin = cos = splat(1.0);
  for (int i = kTerms; i > 0; --i) {
    sin = 1 - sin * square * (1.0 / (2 * i * (2 * i + 1)));
    cos = 1 - cos * square * (1.0 / (2 * i * (2 * i - 1)));
  }
  sin *= x;
}

}  // namespace khot::KHOT_ISA
