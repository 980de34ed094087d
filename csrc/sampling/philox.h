// Philox 4x32-10: uniforms that depend only on a seed, a row and a column
// (khot/_kernels/reference/philox.py).
#pragma once

#include <algorithm>

#include "simd/vec.h"

namespace khot::KHOT_ISA {

using Word =
    uint64_t __attribute__((vector_size(KHOT_VECTOR_BYTES)));  // only the lower 32 bits of each count

constexpr uint64_t kWord = 0xffffffff;
constexpr int kGroups = 2;  // vectors that are computed together, since each waits for its products
constexpr int kBlocks = kGroups * KHOT_VECTOR_BYTES / 8;
constexpr int kUniforms = 2 * kBlocks;

// The product of 32-bit numbers, in 64 bits.
KHOT_INLINE Word multiply(Word a, uint32_t b) {
#if !defined(__x86_64__)
  return (a & kWord) * b;
#elif KHOT_VECTOR_BYTES == 64
  return (Word)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif KHOT_VECTOR_BYTES == 32
  return (Word)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (Word)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#endif
}

// (x + 1/2)/2^52 exactly, where x is the upper 52 of 64 bits.
KHOT_INLINE VecD midpoint(Word high, Word low) {
  const Word x = (high << 32 | (low & kWord)) >> 12;
  return (VecD)(x | 0x3ff0000000000000) - 0x1.fffffffffffffp-1;  // 1 + x/2^52 minus (1 - 1/2^53)
}

// Writes kUniforms uniforms, from the column 2 * block on.
KHOT_INLINE void uniforms(uint64_t seed, uint64_t row, uint64_t block, double* out) {
  constexpr int kLanes = kBlocks / kGroups;
  Word a[kGroups], b[kGroups], c[kGroups], d[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    a[g] = block + g * kLanes - Word{}, c[g] = row - Word{};
    for (int i = 0; i < kLanes; ++i) a[g][i] += i;
    b[g] = a[g] >> 32, d[g] = c[g] >> 32;
  }
  uint32_t k = static_cast<uint32_t>(seed), m = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      const Word p = multiply(a[g], 0xD2511F53), q = multiply(c[g], 0xCD9E8D57);
      a[g] = q >> 32 ^ b[g] ^ k, b[g] = q;
      c[g] = p >> 32 ^ d[g] ^ m, d[g] = p;
    }
    k += 0x9E3779B9, m += 0xBB67AE85;
  }
  for (int g = 0; g < kGroups; ++g) {
    const VecD even = midpoint(b[g], a[g]), odd = midpoint(d[g], c[g]);
    double* to = out + 2 * g * kLanes;
    for (int i = 0; i < kLanes; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
  }
}

// Writes the uniforms of the columns first, ..., first + n - 1.
inline void uniform_row(uint64_t seed, uint64_t row, uint64_t first, int64_t n, double* out) {
  int64_t skip = first % 2;
  for (uint64_t block = first / 2; n > 0; block += kBlocks) {
    const int64_t count = std::min<int64_t>(n, kUniforms - skip);
    if (count == kUniforms) {
      uniforms(seed, row, block, out);
    } else {
      double some[kUniforms];
      uniforms(seed, row, block, some);
      std::memcpy(out, some + skip, count * sizeof(double));
    }
    out += count, n -= count, skip = 0;
  }
}

}  // namespace khot::KHOT_ISA
