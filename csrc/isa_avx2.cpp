#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

// The standard headers stay outside: their inline functions may be merged with those of other files, which
// must run on any processor.
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx2
#define KHOT_VECTOR_BYTES 32
#include "rows.h"
#include "selection.h"

namespace khot {

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels{"AVX2", avx2::forward, avx2::backward,
                                    avx2::topk_mask, avx2::magnitude, avx2::magnitude_backward};
  return kernels;
}

}  // namespace khot
#pragma GCC pop_options
#endif
