// Rows side by side: column i of a tile holds entry i of as many rows as a vector of floats has lanes, one
// row per lane. A pass is then a plain loop over columns, and a step is taken for all rows together.
#pragma once

#include <algorithm>

#include "simd/passes.h"

namespace khot::KHOT_ISA {

KHOT_INLINE VecF* column(float* tile, int i) { return reinterpret_cast<VecF*>(tile + i * kWidth<float>); }

// Whether rows like this one may lie in a tile, in float.
inline bool fits_tile(const Row& row, int64_t n) {
  return n > 0 && n <= kShortRow && row.dtype != Dtype::kDouble;
}

// Takes the rows [begin, end): where `together`, as many at once as a vector of floats has lanes, by
// several(first, done), and the others by one(row). done[j] says whether row first + j needs no more.
template <class Several, class One>
KHOT_INLINE void each_row(bool together, int64_t begin, int64_t end, Several several, One one) {
  constexpr int width = kWidth<float>;
  int64_t i = begin;
  for (; together && i + width <= end; i += width) {
    bool done[width];
    several(i, done);
    for (int j = 0; j < width; ++j) {
      if (!done[j]) one(i + j);
    }
  }
  for (; i < end; ++i) one(i);
}

// Fills a tile with n entries from each p[j]; it has room for whole vectors of them. Its columns may also be
// a part of the rows of a matrix without more room, `step` entries apart: so many entries of each of n rows.
// These are no run of addresses, so that the part behind them is fetched ahead.
inline KHOT_APART void to_columns(const float* const* p, int n, float* tile, int64_t step = kWidth<float>,
                                  int lanes = kWidth<float>, bool room = true) {
  constexpr int width = kWidth<float>;
  for (int i = 0; i < n; i += width) {
    const int count = std::min(width, n - i), filled = room ? width : count;
    VecF v[width];
#pragma GCC unroll 16
    for (int j = 0; j < width; ++j) v[j] = count == width ? load(p[j] + i) : load_part(p[j] + i, count, 0.0f);
    transpose(v);
#pragma GCC unroll 16
    for (int j = 0; j < width; ++j) {
      if (!room) fetch_ahead<true>(tile + (i + j) * step, width);
      if (j < filled) store_beside(tile + (i + j) * step, 0, lanes, v[j]);
    }
  }
}

// Writes n entries of each row of a tile to p[j].
inline KHOT_APART void from_columns(const float* tile, int n, float* const* p, int64_t step = kWidth<float>,
                                    int lanes = kWidth<float>) {
  constexpr int width = kWidth<float>;
  for (int i = 0; i < n; i += width) {
    const int count = std::min(width, n - i);
    VecF v[width];
#pragma GCC unroll 16
    for (int j = 0; j < width; ++j) {
      if (step != width) fetch_ahead<false>(tile + (i + j) * step, width);
      v[j] = j < count ? beside(tile + (i + j) * step, 0, lanes) : VecF{};
    }
    transpose(v);
#pragma GCC unroll 16
    for (int j = 0; j < width; ++j)
      count == width ? store(p[j] + i, v[j]) : store_part(p[j] + i, count, v[j]);
  }
}

// Copies the columns of a matrix, whose rows are `step` entries apart, to rows of n entries, one behind the
// other, or with `back` these to the columns.
inline void turn(float* matrix, int64_t step, int64_t n, int64_t count, float* rows, bool back) {
  constexpr int width = kWidth<float>;
  const int length = static_cast<int>(n);
  for (int64_t i = 0; i < count; i += width) {
    const int lanes = static_cast<int>(std::min<int64_t>(width, count - i));
    float* p[width];
    for (int j = 0; j < width; ++j) p[j] = rows + std::min(i + j, count) * n;  // there is room for one more
    if (back) {
      to_columns(p, length, matrix + i, step, lanes, false);
    } else {
      from_columns(matrix + i, length, p, step, lanes);
    }
  }
}

// Fills a tile with n <= kShortRow entries of each row, which row(j) gives. The buffer has kShortRow floats
// for each row.
template <class At>
KHOT_INLINE void gather(At row, int n, float* buffer, float* tile) {
  constexpr int width = kWidth<float>;
  const float* p[width];
  for (int j = 0; j < width; ++j) p[j] = fetch(row(j), 0, n, buffer + j * kShortRow);
  to_columns(p, n, tile);
}

// Writes a tile to the rows, whose entries lie at out(j) and have this dtype.
template <class At>
KHOT_INLINE void scatter(At out, Dtype dtype, int n, float* buffer, float* tile) {
  constexpr int width = kWidth<float>;
  const bool direct = dtype == Dtype::kFloat;
  float* p[width];
  for (int j = 0; j < width; ++j) p[j] = direct ? static_cast<float*>(out(j)) : buffer + j * kShortRow;
  from_columns(tile, n, p);
  for (int j = 0; j < width && !direct; ++j) put(out(j), dtype, 0, n, p[j]);
}

// A float sum of up to 256 terms would lose digits. A sum of sums of 16 terms does not.
struct BlockSum {
  VecF whole{}, block{};
  KHOT_INLINE void add(VecF v, int i) {
    block += v;
    if (i % 16 == 15) whole += block, block = VecF{};
  }
  KHOT_INLINE VecF sum() const { return whole + block; }
};

// The same in blocks of 4, with the rounding errors of the sums of blocks, for terms of one sign.
struct ExactBlockSum {
  VecF whole{}, block{}, lost{};
  KHOT_INLINE void add(VecF v, int i) {
    block += v;
    if (i % 4 == 3) flush();
  }
  KHOT_INLINE void flush() {
    const VecF next = whole + block;
    lost += (whole - next) + block;  // exact, because the whole is the larger, but for the first blocks
    whole = next, block = VecF{};
  }
  KHOT_INLINE VecF rest() const { return block + lost; }  // of the sum, beside `whole`
};

// The same without blocks, so that whole + lost has nearly twice the digits of R, whatever the terms.
template <class R>
struct PairSum {
  Vec<R> whole{}, lost{};
  KHOT_INLINE void add(Vec<R> v, int /*i*/ = 0) {
    const Vec<R> next = whole + v, added = next - whole;
    lost += (whole - (next - added)) + (v - added);
    whole = next;
  }
  KHOT_INLINE Vec<R> rest() const { return lost; }
};

}  // namespace khot::KHOT_ISA
