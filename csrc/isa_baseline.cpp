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
#include "rows.h"
#include "selection.h"

namespace khot {

const Kernels& baseline_kernels() {
  static constexpr Kernels kernels{"baseline", baseline::forward, baseline::backward,
                                    baseline::topk_mask, baseline::magnitude, baseline::magnitude_backward};
  return kernels;
}

}  // namespace khot
