// Vectors of the instruction set that this translation unit is compiled for, and exp, log and sums on them.
//
// Included by isa_*.cpp only, inside their choice of instruction set: KHOT_ISA names the namespace, so that
// the copies do not meet in the linker, and KHOT_VECTOR_BYTES is the width of a register. GCC's vector types
// compile to NEON, SSE or AVX alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#define KHOT_INLINE inline __attribute__((always_inline))

namespace khot::KHOT_ISA {

using VecF = float __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using VecD = double __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using IntF = int32_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using IntD = int64_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));

// While it lives, results that would be subnormal are 0: each takes a hundred cycles, and the squares of small y
// are many. (On Arm they take no longer than others.)
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  explicit FlushSubnormals(bool on = true) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  static bool active() { return (_mm_getcsr() & _MM_FLUSH_ZERO_ON) != 0; }

 private:
  unsigned before_;
#else
  explicit FlushSubnormals(bool = true) {}
  ~FlushSubnormals() {}
  static bool active() { return false; }
#endif
};

template <class R>
struct Lanes;

template <>
struct Lanes<float> {
  using V = VecF;
  using I = IntF;  // also what comparisons give: -1 or 0 in each lane
  static constexpr int32_t kAbs = 0x7fffffff, kSqrtHalf = 0x3f3504f3, kOne = 0x3f800000;
  static constexpr int kMantissa = 23;
  static constexpr float kRound = 0x1.8p23f;         // adding it rounds to an integer in the low bits
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kExpEnd = 87;               // exp(-87) is the last that is not subnormal
};

template <>
struct Lanes<double> {
  using V = VecD;
  using I = IntD;
  static constexpr int64_t kAbs = 0x7fffffffffffffff, kSqrtHalf = 0x3fe6a09e667f3bcd, kOne = 0x3ff0000000000000;
  static constexpr int kMantissa = 52;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kExpEnd = 708;
};

template <class R>
using Vec = typename Lanes<R>::V;
template <class R>
using Int = typename Lanes<R>::I;
template <class R>
constexpr int kWidth = KHOT_VECTOR_BYTES / sizeof(R);
template <class R>
constexpr R kInf = std::numeric_limits<R>::infinity();

template <class R>
KHOT_INLINE Vec<R> splat(R value) {
  return value - Vec<R>{};
}

template <class R>
KHOT_INLINE Vec<R> load(const R* p) {
  Vec<R> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class R>
KHOT_INLINE void store(R* p, Vec<R> v) {
  std::memcpy(p, &v, sizeof(v));
}

// What lies so many entries beyond p, which need not exist: into the cache, to be read, or written with kWrite.
template <bool kWrite>
KHOT_INLINE void fetch_ahead(const float* p, int64_t entries) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + entries * 4), kWrite, 3);
}

#if KHOT_VECTOR_BYTES == 32 && defined(__AVX2__)
// -1 in the first count lanes.
template <class R>
KHOT_INLINE Int<R> first_lanes(int count) {
  Int<R> lane;
  for (int i = 0; i < kWidth<R>; ++i) lane[i] = i;
  return lane < count;
}
#endif

// The first count lanes from memory, pad in the others. By way of an array, parts would take longer than a row
// of a thousand should.
template <class R>
KHOT_INLINE Vec<R> load_part(const R* p, int count, R pad) {
#if KHOT_VECTOR_BYTES == 64
  const unsigned lanes_read = (1u << count) - 1;
  if constexpr (sizeof(R) == 4) {
    return (Vec<R>)_mm512_mask_loadu_ps((__m512)splat(pad), static_cast<__mmask16>(lanes_read), p);
  } else {
    return (Vec<R>)_mm512_mask_loadu_pd((__m512d)splat(pad), static_cast<__mmask8>(lanes_read), p);
  }
#elif KHOT_VECTOR_BYTES == 32 && defined(__AVX2__)
  const Int<R> mask = first_lanes<R>(count);
  if constexpr (sizeof(R) == 4) {
    return mask ? (Vec<R>)_mm256_maskload_ps(p, (__m256i)mask) : splat(pad);
  } else {
    return mask ? (Vec<R>)_mm256_maskload_pd(p, (__m256i)mask) : splat(pad);
  }
#endif
  R lanes[kWidth<R>];
  for (int i = 0; i < kWidth<R>; ++i) lanes[i] = pad;
  std::memcpy(lanes, p, count * sizeof(R));
  return load(lanes);
}

template <class R>
KHOT_INLINE void store_part(R* p, int count, Vec<R> v) {
#if KHOT_VECTOR_BYTES == 64
  const unsigned lanes_written = (1u << count) - 1;
  if constexpr (sizeof(R) == 4) return _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes_written), (__m512)v);
  if constexpr (sizeof(R) == 8) return _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lanes_written), (__m512d)v);
#elif KHOT_VECTOR_BYTES == 32 && defined(__AVX2__)
  if constexpr (sizeof(R) == 4) return _mm256_maskstore_ps(p, (__m256i)first_lanes<R>(count), (__m256)v);
  if constexpr (sizeof(R) == 8) return _mm256_maskstore_pd(p, (__m256i)first_lanes<R>(count), (__m256d)v);
#endif
  R lanes[kWidth<R>];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(R));
}

#if KHOT_VECTOR_BYTES == 64
// The lanes of v where mask is -1, one behind the other, to p, where a whole vector is written; their number.
KHOT_INLINE int compress(int32_t* p, IntF v, IntF mask) {
  const __mmask16 bits = _mm512_movepi32_mask((__m512i)mask);
  const IntF packed = (IntF)_mm512_maskz_compress_epi32(bits, (__m512i)v);
  std::memcpy(p, &packed, sizeof(packed));
  return __builtin_popcount(bits);
}
#endif

// Lane l from a, but from b where bit d of l is set; from lane l ^ d of those that are to be swapped.
template <int d, bool kSwapA, bool kSwapB, int... l>
KHOT_INLINE VecF pick(VecF a, VecF b, std::integer_sequence<int, l...>) {
  constexpr int width = sizeof...(l);
  return __builtin_shuffle(a, b, IntF{(l & d ? width + (kSwapB ? l ^ d : l) : kSwapA ? l ^ d : l)...});
}
template <int d, bool kSwapA, bool kSwapB>
KHOT_INLINE VecF pick(VecF a, VecF b) {
  return pick<d, kSwapA, kSwapB>(a, b, std::make_integer_sequence<int, kWidth<float>>());
}

// Rows become columns, of as many vectors as a vector has lanes.
template <int d = 1>
KHOT_INLINE void transpose(VecF* v) {
  if constexpr (d < kWidth<float>) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<float>; ++i) {
      if (i & d) continue;
      const VecF a = v[i], b = v[i + d];
      v[i] = pick<d, false, true>(a, b), v[i + d] = pick<d, true, false>(a, b);
    }
    transpose<2 * d>(v);
  }
}

// Lane l is the sum of v[l], of as many vectors as a vector has lanes.
template <int d = 1>
KHOT_INLINE VecF sums_of(VecF* v) {
  if constexpr (d < kWidth<float>) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<float> / (2 * d); ++i) {
      const VecF a = v[2 * i], b = v[2 * i + 1];
      v[i] = pick<d, false, false>(a, b) + pick<d, true, true>(a, b);
    }
    return sums_of<2 * d>(v);
  }
  return v[0];
}

template <class R>
KHOT_INLINE Vec<R> abs(Vec<R> v) {
  return (Vec<R>)((Int<R>)v & Lanes<R>::kAbs);
}

// These keep a NaN in v: every comparison with it is false.
template <class R>
KHOT_INLINE Vec<R> clamp_below(Vec<R> v, R low) {
#if KHOT_VECTOR_BYTES == 64  // one instruction, which gives the second of two where either is NaN
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm512_maskz_max_ps(0xffff, (__m512)splat(low), (__m512)v);
#endif
  return v < low ? splat(low) : v;
}

template <class R>
KHOT_INLINE Vec<R> clamp_above(Vec<R> v, R high) {
#if KHOT_VECTOR_BYTES == 64
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm512_maskz_min_ps(0xffff, (__m512)splat(high), (__m512)v);
#endif
  return v > high ? splat(high) : v;
}

// Lanes are added pairwise, halving the vector.
template <class R>
KHOT_INLINE R sum(Vec<R> v) {
#if KHOT_VECTOR_BYTES == 64  // by way of memory, four of these take longer than a row of 64
  const __m512d all = (__m512d)v;
  const __m256d half = _mm512_maskz_extractf64x4_pd(0xf, all, 0), rest = _mm512_maskz_extractf64x4_pd(0xf, all, 1);
  if constexpr (sizeof(R) == 4) {
    const __m256 eight = (__m256)half + (__m256)rest;
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
  } else {
    const __m256d four = half + rest;
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
  }
#endif
  R lanes[kWidth<R>];
  store(lanes, v);
  for (int half = kWidth<R> / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// A sum of floats that loses nothing that counts: a few terms at a time (flush) are added to a double.
struct LongSum {
  VecD total{};
  VecF part{};
  KHOT_INLINE void add(VecF v) { part += v; }
  KHOT_INLINE void flush() {
    using Half = float __attribute__((vector_size(KHOT_VECTOR_BYTES / 2)));
#if KHOT_VECTOR_BYTES == 64  // by way of memory, this takes as long as the terms
    const __m256d first = _mm512_maskz_extractf64x4_pd(0xf, (__m512d)part, 0);
    const __m256d second = _mm512_maskz_extractf64x4_pd(0xf, (__m512d)part, 1);
    total += (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)first) + (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)second);
    part = VecF{};
    return;
#endif
    Half low, high;
    std::memcpy(&low, &part, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&part) + sizeof(low), sizeof(high));
    total += __builtin_convertvector(low, VecD) + __builtin_convertvector(high, VecD);
    part = VecF{};
  }
};

template <class R>
KHOT_INLINE R minimum(Vec<R> v) {
  R least = v[0];
  for (int i = 1; i < kWidth<R>; ++i) least = v[i] < least ? v[i] : least;
  return least;
}

template <class R>
KHOT_INLINE R maximum(Vec<R> v) {
  return -minimum<R>(-v);
}

// a/b for finite b that is not 0, to within an ulp, and exactly 1 where a = b.
template <class R>
KHOT_INLINE Vec<R> divide(Vec<R> a, Vec<R> b) {
#if KHOT_VECTOR_BYTES == 64
  if constexpr (sizeof(R) == 4) {
    // from 14 bits by one step each of Newton and of correction: a third of what a division takes
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
  for (int i = static_cast<int>(N) - 2; i >= 0; --i) p = p * x + coefficients[i];
  return p;
}

// exp(r), where abs(r) <= log(2)/2. Single precision: Cephes' minimax; double: Taylor, cut at 4e-18.
KHOT_INLINE VecF exp_core(VecF r) {
  constexpr float kTerms[] = {0.5000000120f,     0.16666665459f,    4.1665795894e-2f,
                              8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
  return polynomial(r, kTerms) * (r * r) + r + 1;
}

KHOT_INLINE VecD exp_core(VecD r) {
  constexpr double kTerms[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                               1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                               1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  return polynomial(r, kTerms) * (r * r) + r + 1;
}

// exp(-a) for a >= 0; 0 where it would be subnormal, NaN for NaN.
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

// 2^v to within 2e-7 of itself, 2^126 from v = 126 on, and less than 2^-125 up to v = -126; NaN for NaN.
KHOT_INLINE VecF exp2_held(VecF v) {
  using L = Lanes<float>;
  // 2^r for abs(r) <= 1/2, interpolated at Chebyshev's nodes
  constexpr float kTerms[] = {1.000000075f,    0.693147188f,    0.2402210749f,
                              0.05550357114f, 0.009676031918f, 0.001339086336f};
#if KHOT_VECTOR_BYTES == 64  // half the instructions
  const VecF held = clamp_above<float>(v, 126);
  const VecF part = (VecF)_mm512_maskz_reduce_ps(0xffff, (__m512)held, _MM_FROUND_TO_NEAREST_INT);
  return (VecF)_mm512_maskz_scalef_ps(0xffff, (__m512)polynomial(part, kTerms), (__m512)(held - part));
#endif
  const VecF x = clamp_above<float>(clamp_below<float>(v, -126), 126);
  const VecF rounded = x + L::kRound;
  const VecF r = x - (rounded - L::kRound);
  return polynomial(r, kTerms) * (VecF)(((IntF)rounded << L::kMantissa) + L::kOne);
}

// 1/b to within two ulp, for normal b.
KHOT_INLINE VecF inverse(VecF b) {
#if KHOT_VECTOR_BYTES == 64
  const VecF r = (VecF)_mm512_maskz_rcp14_ps(0xffff, (__m512)b);
  return r * (2 - b * r);
#else
  return 1 / b;
#endif
}

// 1/(1 + e), for 0 <= e < 2^128 (at the end of which reciprocals are subnormal, and 0).
KHOT_INLINE VecF inverse_1p(VecF e) { return inverse(e + 1); }

template <class R>
KHOT_INLINE Vec<R> exp(Vec<R> x) {
  const Vec<R> e = exp_minus<R>(abs<R>(x));
  return x > 0 ? 1 / e : e;
}

// log((1 + s)/(1 - s)) = 2 artanh(s), for s^2 <= 1/9.
template <class R>
KHOT_INLINE Vec<R> twice_artanh(Vec<R> s) {
  constexpr int kTerms = sizeof(R) == 4 ? 7 : 16;
  const Vec<R> square = s * s;
  Vec<R> p = splat<R>(R(2) / (2 * kTerms + 1));
  for (int i = kTerms - 1; i > 0; --i) p = p * square + R(2) / (2 * i + 1);
  return p * square * s + 2 * s;
}

// log(1 + x), for -1/2 <= x <= 1, with full relative accuracy.
template <class R>
KHOT_INLINE Vec<R> log1p(Vec<R> x) {
  return twice_artanh<R>(x / (2 + x));
}

// log(x) for x >= 0, not subnormal; -inf for 0.
template <class R>
KHOT_INLINE Vec<R> log(Vec<R> x) {
  using L = Lanes<R>;
  const Int<R> exponent = ((Int<R>)x - L::kSqrtHalf) >> L::kMantissa;
  const Vec<R> mantissa = (Vec<R>)((Int<R>)x - (exponent << L::kMantissa));
  const Vec<R> e = __builtin_convertvector(exponent, Vec<R>);
  const Vec<R> core = twice_artanh<R>((mantissa - 1) / (mantissa + 1));
  const Vec<R> value = e * L::kLn2High + (e * L::kLn2Low + core);
  return x > 0 ? value : (x < 0) | (x != x) ? splat<R>(std::numeric_limits<R>::quiet_NaN()) : splat<R>(-kInf<R>);
}

}  // namespace khot::KHOT_ISA
