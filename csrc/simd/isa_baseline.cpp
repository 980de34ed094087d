// What every processor of the architecture has: SSE2 on x86-64, NEON on
// aarch64.
#include "simd/standard.h"

#define KHOT_ISA baseline
#define KHOT_VECTOR_BYTES 16
#define KHOT_NAME "baseline"
#include "simd/isa.h"
