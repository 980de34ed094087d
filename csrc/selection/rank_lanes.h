// The entries of rank k and k + 1 of short rows, one row per lane, by a sorting network of which no more is
// computed than they need. It takes as long whatever the entries are.
#pragma once

#include <algorithm>
#include <utility>

#include "simd/tile.h"

namespace khot::KHOT_ISA {

KHOT_INLINE VecF lesser(VecF a, VecF b) {
#if KHOT_VECTOR_BYTES == 64
  return (VecF)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(KHOT_AVX2)
  return (VecF)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
KHOT_INLINE VecF greater(VecF a, VecF b) {
#if KHOT_VECTOR_BYTES == 64
  return (VecF)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(KHOT_AVX2)
  return (VecF)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

class RankLanes {
 public:
  static constexpr int width = kWidth<float>, kRun = 16;

  // Sorts as much of the n columns of x as the ranks from `low` to `high` need, which count from 1 for the
  // largest. p and q are room for kShortRow columns each.
  KHOT_APART RankLanes(float* x, int n, int low, int high, float* p, float* q) : n_(n) {
    low = std::max(low, 1), high = std::min(high, n);
    top_ = high <= n - low + 1;  // from the end that is nearer, by signs
    const int need = top_ ? high : n - low + 1;
    int cap = kRun;
    while (cap < need) cap *= 2;
    int count = 0;
    for (int i = 0; i < n; i += kRun, ++count)
      first_runs(x, n, i, top_ ? 0 : static_cast<int>(0x80000000u), p);
    int length = kRun;
    while (count > 1) {
      const int kept = std::min(2 * length, cap), pairs = count / 2;
      for (int i = 0; i < pairs; ++i) {
        merge(p + 2 * i * length * width, p + (2 * i + 1) * length * width, length, q + i * kept * width,
              kept);
      }
      if (count % 2 != 0) {
        std::copy_n(p + (count - 1) * length * width, length * width, q + pairs * kept * width);
        std::fill_n(q + (pairs * kept + length) * width, (kept - length) * width, -kInf<float>);
      }
      count = (count + 1) / 2, length = kept;
      std::swap(p, q);
    }
    sorted_ = p;
  }

  // The entry of the rank; +inf before the first and -inf after the last.
  KHOT_INLINE VecF at(int rank) const {
    if (rank < 1) return splat(kInf<float>);
    if (rank > n_) return splat(-kInf<float>);
    return top_ ? *column(sorted_, rank - 1) : -*column(sorted_, n_ - rank);
  }
  KHOT_APART VecF at(const int* ranks, int offset) const {
    VecF v;
    for (int j = 0; j < width; ++j) {
      const int rank = ranks[j] + offset;
      v[j] = rank < 1    ? kInf<float>
             : rank > n_ ? -kInf<float>
             : top_      ? sorted_[(rank - 1) * width + j]
                         : -sorted_[(n_ - rank) * width + j];
    }
    return v;
  }

 private:
  struct Net {
    int a[63] = {}, b[63] = {};
  };
  // Batcher's odd-even merge sort of 16.
  static constexpr Net net() {
    Net net;
    int size = 0;
    for (int p = 1; p < kRun; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int j = k % p; j + k < kRun; j += 2 * k) {
          for (int i = 0; i < k && i + j + k < kRun; ++i) {
            if ((i + j) / (2 * p) == (i + j + k) / (2 * p))
              net.a[size] = i + j, net.b[size] = i + j + k, ++size;
          }
        }
      }
    }
    return net;
  }

  static KHOT_INLINE void order(VecF& a, VecF& b) {
    const VecF high = greater(a, b);
    b = lesser(a, b), a = high;
  }
  template <size_t... I>
  static KHOT_INLINE void sort(VecF* v, std::index_sequence<I...>) {
    constexpr Net kNet = net();
    (order(v[kNet.a[I]], v[kNet.b[I]]), ...);
  }
  // Sorts a bitonic run.
  static KHOT_INLINE void tidy(VecF* v) {
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < kRun; ++i) {
        if ((i & step) == 0) order(v[i], v[i + step]);
      }
    }
  }

  static KHOT_APART void first_runs(float* x, int n, int i, int sign, float* to) {
    VecF v[kRun];
    const IntF flip = IntF{} + sign;
    if (i + kRun <= n) {
#pragma GCC unroll 16
      for (int j = 0; j < kRun; ++j) v[j] = (VecF)((IntF)*column(x, i + j) ^ flip);
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < kRun; ++j) {
        v[j] = i + j < n ? (VecF)((IntF)*column(x, i + j) ^ flip) : splat(-kInf<float>);
      }
    }
    sort(v, std::make_index_sequence<63>());
#pragma GCC unroll 16
    for (int j = 0; j < kRun; ++j) *column(to, i + j) = v[j];
  }

  static KHOT_APART void tidy_run(float* p) {
    VecF v[kRun];
#pragma GCC unroll 16
    for (int j = 0; j < kRun; ++j) v[j] = *column(p, j);
    tidy(v);
#pragma GCC unroll 16
    for (int j = 0; j < kRun; ++j) *column(p, j) = v[j];
  }

  // The upper or the lower half of two runs together, sorted.
  template <bool kUpper>
  static KHOT_APART void half_of(float* a, float* b, float* to) {
    VecF v[kRun];
#pragma GCC unroll 16
    for (int j = 0; j < kRun; ++j) {
      const VecF own = *column(a, j), other = *column(b, kRun - 1 - j);
      v[j] = kUpper ? greater(own, other) : lesser(own, other);
    }
    tidy(v);
#pragma GCC unroll 16
    for (int j = 0; j < kRun; ++j) *column(to, j) = v[j];
  }

  static KHOT_APART void merge(float* a, float* b, int length, float* to, int kept) {
    if (length == kRun) {
      half_of<true>(a, b, to);
      if (kept > length) half_of<false>(a, b, to + kRun * width);
      return;
    }
    for (int i = 0; i < length; ++i) {
      const VecF u = *column(a, i), v = *column(b, length - 1 - i);
      *column(to, i) = greater(u, v);
      if (kept > length) *column(to, length + i) = lesser(u, v);
    }
    for (int step = length / 2; step >= kRun; step /= 2) {
      for (int base = 0; base < kept; base += 2 * step) {
        for (int i = base; i < base + step; ++i) {
          VecF u = *column(to, i), v = *column(to, i + step);
          order(u, v);
          *column(to, i) = u, *column(to, i + step) = v;
        }
      }
    }
    for (int i = 0; i < kept; i += kRun) tidy_run(to + i * width);
  }

  int n_;
  bool top_ = true;
  float* sorted_ = nullptr;
};

}  // namespace khot::KHOT_ISA
