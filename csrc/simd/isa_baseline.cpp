// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KHOT_ISA baseline
#define KHOT_VECTOR_BYTES 16
#include "simd/isa.h"

namespace khot {

const Kernels& baseline_kernels() {
  static constexpr Kernels kernels = baseline::table("baseline");
  return kernels;
}

}  // namespace khot
