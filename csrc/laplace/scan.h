// The recurrence of decayed sums on its own, which the differentiable Laplace operators are built from.
#pragma once

#include <cmath>
#include <cstdint>

namespace khot::laplace {

// out_i = exp(-g_i) (out_(i-1) + w_(i-1)); with reverse, from the other end.
inline void scan_row(const double* w, const double* g, int64_t n, bool reverse, double* out) {
  double sum = 0;
  if (n == 0) return;
  if (reverse) {
    out[n - 1] = 0;
    for (int64_t i = n - 1; i > 0; --i) out[i - 1] = sum = std::exp(-g[i]) * (sum + w[i]);
  } else {
    out[0] = 0;
    for (int64_t i = 1; i < n; ++i) out[i] = sum = std::exp(-g[i]) * (sum + w[i - 1]);
  }
}

}  // namespace khot::laplace
