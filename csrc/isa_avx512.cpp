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
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx512
#define KHOT_VECTOR_BYTES 64
#include "rows.h"
#include "selection.h"

namespace khot {

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels{"AVX-512", avx512::forward, avx512::backward,
                                    avx512::topk_mask, avx512::magnitude, avx512::magnitude_backward};
  return kernels;
}

}  // namespace khot
#pragma GCC pop_options
#endif
