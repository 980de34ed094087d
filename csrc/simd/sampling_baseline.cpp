// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
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

#define KHOT_ISA baseline
#define KHOT_VECTOR_BYTES 16
#include "simd/sampling.h"

namespace khot {

const SamplingKernels& baseline_sampling() {
  static constexpr SamplingKernels kernels = baseline::sampling_table();
  return kernels;
}

}  // namespace khot
