// What newer processors of x86-64 have.
#include "simd/standard.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx512
#define KHOT_VECTOR_BYTES 64
#define KHOT_NAME "AVX-512"
#include "simd/isa.h"
#pragma GCC pop_options
#endif
