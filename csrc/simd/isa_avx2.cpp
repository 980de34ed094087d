// What most processors of x86-64 have.
#include "simd/standard.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define KHOT_ISA avx2
#define KHOT_AVX2
#define KHOT_VECTOR_BYTES 32
#define KHOT_NAME "AVX2"
#include "simd/isa.h"
#pragma GCC pop_options
#endif
