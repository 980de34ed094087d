// The standard headers are included before the instruction set is chosen: the linker may merge their inline
// functions with those of other files, which must run on any processor.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx2
#define KHOT_AVX2
#define KHOT_VECTOR_BYTES 32
#include "simd/isa.h"

namespace khot {

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = avx2::table("AVX2");
  return kernels;
}

}  // namespace khot
#pragma GCC pop_options
#endif
