// The entries under a mask, and a number in the place of the others.
#pragma once

#include "kernels.h"
#include "simd/vec.h"

namespace khot::KHOT_ISA {

template <class I>
KHOT_PASS void keep(const void* from, const bool* mask, int64_t count, I fill, void* to) {
  const I* const x = static_cast<const I*>(from);
  I* const out = static_cast<I*>(to);
  const uint8_t* const flags = reinterpret_cast<const uint8_t*>(mask);  // the loop is vectorised with these
  for (int64_t i = 0; i < count; ++i) {
    const I kept = static_cast<I>(-(flags[i] != 0));
    out[i] = (x[i] & kept) | (fill & ~kept);
  }
}

// `fill` is 0 or infinite.
inline void masked(Dtype dtype, const void* x, const bool* mask, int64_t count, double fill, void* out) {
  // the bits of a dtype with a sign bit, whose infinity has these bits
  auto bits = [fill](auto sign, auto infinite) {
    return fill == 0 ? 0 : fill < 0 ? sign | infinite : infinite;
  };
  switch (dtype) {
    case Dtype::kFloat:
      return keep(x, mask, count, static_cast<int32_t>(bits(0x80000000u, 0x7f800000u)), out);
    case Dtype::kDouble:
      return keep(x, mask, count, static_cast<int64_t>(bits(uint64_t{1} << 63, uint64_t{0x7ff} << 52)), out);
    case Dtype::kHalf:
      return keep(x, mask, count, static_cast<int16_t>(bits(0x8000u, 0x7c00u)), out);
    case Dtype::kBFloat16:
      return keep(x, mask, count, static_cast<int16_t>(bits(0x8000u, 0x7f80u)), out);
  }
}

}  // namespace khot::KHOT_ISA
