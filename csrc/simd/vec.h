// Vectors of the instruction set that this translation unit is compiled for: how to load, store, shuffle and
// sum them.
//
// The including file defines KHOT_ISA, which names the namespace, so that the linker does not merge the
// copies for different instruction sets, and KHOT_VECTOR_BYTES, the width of a register. GCC's vector types
// compile to NEON, SSE or AVX alike. KHOT_AVX2 says that all of AVX2 may be used. __AVX2__ would not: in C++
// it is not defined where a pragma chooses the instruction set, before GCC 13. Functions on vectors are in
// simd/math.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#define KHOT_INLINE inline __attribute__((always_inline))
// Of a function that many others call, one copy is enough. In a pass over a row, everything is inlined but
// such functions, at any level of optimization.
#define KHOT_APART __attribute__((noinline))
#define KHOT_PASS __attribute__((noinline, flatten))

namespace khot::KHOT_ISA {

using VecF = float __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using VecD = double __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using IntF = int32_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));
using IntD = int64_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));

// While it lives, results that would be subnormal are 0. A subnormal result takes a hundred cycles on x86,
// and the squares of small y are often subnormal. (On Arm they take no longer than other results.)
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  explicit FlushSubnormals(bool on = true) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON);
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  // Also switches it off, where the thread has it on.
  static FlushSubnormals exactly(bool on) {
    const unsigned before = _mm_getcsr(), rest = before & ~static_cast<unsigned>(_MM_FLUSH_ZERO_ON);
    _mm_setcsr(on ? rest | _MM_FLUSH_ZERO_ON : rest);
    return FlushSubnormals(before);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  static bool active() { return (_mm_getcsr() & _MM_FLUSH_ZERO_ON) != 0; }

 private:
  explicit FlushSubnormals(unsigned before) : before_(before) {}
  unsigned before_;
#else
  explicit FlushSubnormals(bool = true) {}
  static FlushSubnormals exactly(bool) { return FlushSubnormals(); }
  ~FlushSubnormals() {}
  static bool active() { return false; }
#endif
};

template <class R>
struct Lanes;

template <>
struct Lanes<float> {
  using V = VecF;
  using I = IntF;  // a comparison also gives this type, with -1 or 0 in each lane
  static constexpr int32_t kAbs = 0x7fffffff, kSqrtHalf = 0x3f3504f3, kOne = 0x3f800000;
  static constexpr int kMantissa = 23;
  static constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which is then in the low bits
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kExpEnd = 87;  // exp(-88) is subnormal
};

template <>
struct Lanes<double> {
  using V = VecD;
  using I = IntD;
  static constexpr int64_t kAbs = 0x7fffffffffffffff, kSqrtHalf = 0x3fe6a09e667f3bcd,
                           kOne = 0x3ff0000000000000;
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

// Whether fused() rounds once. SSE2 has no fused multiply-add.
#if defined(__SSE2__) && KHOT_VECTOR_BYTES == 16
constexpr bool kFused = false;
#else
constexpr bool kFused = true;
#endif

template <class R>
KHOT_INLINE Vec<R> splat(R value) {
  return value - Vec<R>{};
}

// a b + c, where the result has to be rounded once, or in double nearly so. Elsewhere compilers contract a *
// b + c, but not at every level of optimisation, and where there are two products they may choose either.
template <class R>
KHOT_INLINE Vec<R> fused(Vec<R> a, Vec<R> b, Vec<R> c) {
#if KHOT_VECTOR_BYTES == 64
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  if constexpr (sizeof(R) == 8) return (Vec<R>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(KHOT_AVX2)
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  if constexpr (sizeof(R) == 8) return (Vec<R>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  if constexpr (!kFused) {
    const Vec<R> product = a * b, sum = product + c;
    if constexpr (sizeof(R) == 4) return sum;
    // In double, Dekker's rounding error of the product; it overflows where a factor is huge.
    constexpr R kSplit = 134217729;  // 2^27 + 1
    const Vec<R> p = a * kSplit, q = b * kSplit, high = p - (p - a), low = a - high, upper = q - (q - b),
                 lower = b - upper;
    const Vec<R> lost = ((high * upper - product) + high * lower + low * upper) + low * lower;
    return lost - lost == 0 ? sum + lost : sum;
  }
  Vec<R> v;
  for (int i = 0; i < kWidth<R>; ++i) v[i] = std::fma(a[i], b[i], c[i]);
  return v;
#endif
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

// Asks the cache for what lies so many entries beyond p, to be read or, with kWrite, written. It need not
// exist.
template <bool kWrite>
KHOT_INLINE void fetch_ahead(const float* p, int64_t entries) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + entries * 4), kWrite, 3);
}

#if defined(KHOT_AVX2)
// -1 in the first count lanes.
template <class R>
KHOT_INLINE Int<R> first_lanes(int count) {
  Int<R> lane;
  for (int i = 0; i < kWidth<R>; ++i) lane[i] = i;
  return lane < count;
}
#endif

// The first count lanes from memory, and pad in the others. Masked loads are used where there are some:
// copying by way of an array would cost a noticeable share of a row of a thousand entries.
template <class R>
KHOT_INLINE Vec<R> load_part(const R* p, int count, R pad) {
#if KHOT_VECTOR_BYTES == 64
  const unsigned lanes_read = (1u << count) - 1;
  if constexpr (sizeof(R) == 4) {
    return (Vec<R>)_mm512_mask_loadu_ps((__m512)splat(pad), static_cast<__mmask16>(lanes_read), p);
  } else {
    return (Vec<R>)_mm512_mask_loadu_pd((__m512d)splat(pad), static_cast<__mmask8>(lanes_read), p);
  }
#elif defined(KHOT_AVX2)
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
  if constexpr (sizeof(R) == 4)
    return _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes_written), (__m512)v);
  if constexpr (sizeof(R) == 8)
    return _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lanes_written), (__m512d)v);
#elif defined(KHOT_AVX2)
  if constexpr (sizeof(R) == 4) return _mm256_maskstore_ps(p, (__m256i)first_lanes<R>(count), (__m256)v);
  if constexpr (sizeof(R) == 8) return _mm256_maskstore_pd(p, (__m256i)first_lanes<R>(count), (__m256d)v);
#endif
  R lanes[kWidth<R>];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(R));
}

#if defined(KHOT_AVX2)
// For each set of lanes, one per byte: the lanes of the set, the lowest first.
struct LanesOfSets {
  uint64_t of[256];
};
constexpr LanesOfSets lanes_of_sets() {
  LanesOfSets lanes{};
  for (int set = 0; set < 256; ++set) {
    for (uint64_t lane = 0, at = 0; lane < 8; ++lane) {
      if (set >> lane & 1) lanes.of[set] |= lane << at, at += 8;
    }
  }
  return lanes;
}
inline constexpr LanesOfSets kLanesOfSets = lanes_of_sets();
#endif

// Writes the lanes of v where mask is -1 to p, without gaps, and returns their number. A whole vector is
// written.
KHOT_INLINE int compress(int32_t* p, IntF v, IntF mask) {
#if KHOT_VECTOR_BYTES == 64
  const __mmask16 bits = _mm512_movepi32_mask((__m512i)mask);
  const IntF packed = (IntF)_mm512_maskz_compress_epi32(bits, (__m512i)v);
  std::memcpy(p, &packed, sizeof(packed));
  return __builtin_popcount(bits);
#elif defined(KHOT_AVX2)
  const int bits = _mm256_movemask_ps((__m256)mask);
  const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLanesOfSets.of[bits])));
  const IntF packed = (IntF)_mm256_permutevar8x32_epi32((__m256i)v, from);
  std::memcpy(p, &packed, sizeof(packed));
  return __builtin_popcount(bits);
#endif
  int size = 0;
  for (int i = 0; i < kWidth<float>; ++i) p[size] = v[i], size -= mask[i];
  return size;
}

// Lane l comes from a, or from b where bit d of l is set; with kSwapA or kSwapB, from lane l ^ d of that
// vector.
template <int d, bool kSwapA, bool kSwapB, int... l>
KHOT_INLINE VecF pick(VecF a, VecF b, std::integer_sequence<int, l...>) {
  constexpr int width = sizeof...(l);
  return __builtin_shuffle(a, b, IntF{(l & d ? width + (kSwapB ? l ^ d : l) : kSwapA ? l ^ d : l)...});
}
template <int d, bool kSwapA, bool kSwapB>
KHOT_INLINE VecF pick(VecF a, VecF b) {
  return pick<d, kSwapA, kSwapB>(a, b, std::make_integer_sequence<int, kWidth<float>>());
}

// Turns the rows of a square into columns: v has as many vectors as a vector has lanes.
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

// Lane l of the result is what join makes of the lanes of v[l]. v has as many vectors as a vector has lanes,
// and is overwritten.
template <int d = 1, class Join>
KHOT_INLINE VecF joined(VecF* v, Join join) {
  if constexpr (d < kWidth<float>) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<float> / (2 * d); ++i) {
      const VecF a = v[2 * i], b = v[2 * i + 1];
      v[i] = join(pick<d, false, false>(a, b), pick<d, true, true>(a, b));
    }
    return joined<2 * d>(v, join);
  }
  return v[0];
}
KHOT_INLINE VecF sums_of(VecF* v) {
  return joined(v, [](VecF a, VecF b) { return a + b; });
}

template <class R>
KHOT_INLINE Vec<R> abs(Vec<R> v) {
  return (Vec<R>)((Int<R>)v & Lanes<R>::kAbs);
}

// These keep a NaN in v: every comparison with it is false.
template <class R>
KHOT_INLINE Vec<R> clamp_below(Vec<R> v, R low) {
#if KHOT_VECTOR_BYTES == 64  // a single instruction, which returns its second operand where either is NaN
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm512_maskz_max_ps(0xffff, (__m512)splat(low), (__m512)v);
  if constexpr (sizeof(R) == 8) return (Vec<R>)_mm512_maskz_max_pd(0xff, (__m512d)splat(low), (__m512d)v);
#endif
  return v < low ? splat(low) : v;
}

template <class R>
KHOT_INLINE Vec<R> clamp_above(Vec<R> v, R high) {
#if KHOT_VECTOR_BYTES == 64
  if constexpr (sizeof(R) == 4) return (Vec<R>)_mm512_maskz_min_ps(0xffff, (__m512)splat(high), (__m512)v);
  if constexpr (sizeof(R) == 8) return (Vec<R>)_mm512_maskz_min_pd(0xff, (__m512d)splat(high), (__m512d)v);
#endif
  return v > high ? splat(high) : v;
}

// The sum of the lanes, which are added pairwise: each step halves the vector.
template <class R>
KHOT_INLINE R sum(Vec<R> v) {
#if KHOT_VECTOR_BYTES == 64  // by way of memory, four such sums would take longer than a row of 64 entries
  const __m512d all = (__m512d)v;
  const __m256d half = _mm512_maskz_extractf64x4_pd(0xf, all, 0),
                rest = _mm512_maskz_extractf64x4_pd(0xf, all, 1);
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

// A vector of floats as two of doubles, and back.
KHOT_INLINE void halves(VecF v, VecD& first, VecD& second) {
#if KHOT_VECTOR_BYTES == 64  // by way of memory, this would take as long as what it is for
  first = (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)_mm512_maskz_extractf64x4_pd(0xf, (__m512d)v, 0));
  second = (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)_mm512_maskz_extractf64x4_pd(0xf, (__m512d)v, 1));
#elif defined(KHOT_AVX2)
  first = (VecD)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  second = (VecD)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  using Half = float __attribute__((vector_size(KHOT_VECTOR_BYTES / 2)));
  Half low, high;
  std::memcpy(&low, &v, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
  first = __builtin_convertvector(low, VecD), second = __builtin_convertvector(high, VecD);
#endif
}
KHOT_INLINE VecF join(VecD first, VecD second) {
#if KHOT_VECTOR_BYTES == 64
  const __m512d low = _mm512_castpd256_pd512((__m256d)_mm512_maskz_cvtpd_ps(0xff, (__m512d)first));
  return (VecF)_mm512_maskz_insertf64x4(0xff, low, (__m256d)_mm512_maskz_cvtpd_ps(0xff, (__m512d)second), 1);
#elif defined(KHOT_AVX2)
  return (VecF)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)first)),
                                    _mm256_cvtpd_ps((__m256d)second), 1);
#else
  using Half = float __attribute__((vector_size(KHOT_VECTOR_BYTES / 2)));
  const Half low = __builtin_convertvector(first, Half), high = __builtin_convertvector(second, Half);
  VecF v;
  std::memcpy(&v, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&v) + sizeof(low), &high, sizeof(high));
  return v;
#endif
}

// An accurate sum of floats: after every few terms, flush() adds their float sum to a sum in double.
struct LongSum {
  VecD total{};
  VecF part{};
  KHOT_INLINE void add(VecF v) { part += v; }
  KHOT_INLINE void flush() {
    VecD first, second;
    halves(part, first, second);
    total += first + second;
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

// Whether mask is -1 in some lane.
KHOT_INLINE bool any(IntF mask) {
#if KHOT_VECTOR_BYTES == 64
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(KHOT_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#endif
  int32_t seen = 0;
  for (int i = 0; i < kWidth<float>; ++i) seen |= mask[i];
  return seen != 0;
}

}  // namespace khot::KHOT_ISA
