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
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx512
#define KHOT_VECTOR_BYTES 64
#include "simd/isa.h"

namespace khot {

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = avx512::table("AVX-512");
  return kernels;
}

}  // namespace khot
#pragma GCC pop_options
#endif
