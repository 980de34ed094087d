// What the kernels use of the standard library. An isa_*.cpp includes it before it chooses its instruction
// set: the linker may merge the inline functions in it with those of other files, which must run on any
// processor.
#pragma once

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

#include "kernels.h"
