#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
#define KHOT_ISA baseline
#define KHOT_VECTOR_BYTES 16
#include "draws.h"
#include "rows.h"
#include "selection.h"
#include "trials.h"

namespace khot {

const Kernels& baseline_kernels() {
  static constexpr Kernels kernels{"baseline", baseline::forward, baseline::backward,
                                    baseline::topk_mask, baseline::magnitude, baseline::magnitude_backward,
                                    baseline::uniform_row, baseline::order_row, baseline::tournament_row,
                                    baseline::characteristic_row, baseline::inclusion_row, baseline::covariance_row,
                                    baseline::calibrate_row};
  return kernels;
}

}  // namespace khot
