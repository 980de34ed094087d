// The entries that may be selected, and -inf in the place of the others.
#pragma once

#include <cstring>

#include "simd/vec.h"

namespace khot::KHOT_ISA {

typedef signed char Bytes __attribute__((vector_size(KHOT_VECTOR_BYTES / 4)));  // one for each lane of floats

template <class I>
KHOT_PASS void keep_selectable(const void* from, const bool* mask, int64_t count, I never, void* to) {
  const I* const x = static_cast<const I*>(from);
  I* const out = static_cast<I*>(to);
  int64_t i = 0;
  if constexpr (sizeof(I) == 4) {
    for (; i + kWidth<float> <= count; i += kWidth<float>) {
      Bytes flags;
      IntF v;
      std::memcpy(&flags, mask + i, sizeof flags);
      std::memcpy(&v, x + i, sizeof v);
      v = __builtin_convertvector(flags, IntF) != 0 ? v : IntF{} + never;
      std::memcpy(out + i, &v, sizeof v);
    }
  }
  for (; i < count; ++i) out[i] = mask[i] ? x[i] : never;
}

inline void selectable(Dtype dtype, const void* x, const bool* mask, int64_t count, void* out) {
  switch (dtype) {
    case Dtype::kFloat:
      return keep_selectable<int32_t>(x, mask, count, static_cast<int32_t>(0xff800000), out);
    case Dtype::kDouble:
      return keep_selectable<int64_t>(x, mask, count, static_cast<int64_t>(0xfff0000000000000), out);
    case Dtype::kHalf:
      return keep_selectable<int16_t>(x, mask, count, static_cast<int16_t>(0xfc00), out);
    case Dtype::kBFloat16:
      return keep_selectable<int16_t>(x, mask, count, static_cast<int16_t>(0xff80), out);
  }
}

}  // namespace khot::KHOT_ISA
