// Passes over a row: it is read in blocks, which are converted to the type of the computation, and reduced in
// chunks.
//
// Chunks have a fixed size and their sums are combined in order, so that results do not depend on how many
// threads shared the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "simd/vec.h"

namespace khot::KHOT_ISA {

constexpr int kBlock = 1024;  // entries converted at a time; sums of floats are float within a block
constexpr int64_t kChunk = int64_t{1} << 16;  // entries that a thread takes at a time

KHOT_INLINE float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

KHOT_INLINE uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // ties to even
}

// float16 by way of a multiplication, which handles subnormals.
KHOT_INLINE float from_half(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t out;
  std::memcpy(&out, &value, 4);
  if (magnitude >= 0x0f800000) out |= 0x7f800000;  // inf and NaN
  out |= static_cast<uint32_t>(bits & 0x8000) << 16;
  std::memcpy(&value, &out, 4);
  return value;
}

KHOT_INLINE uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or beyond
  if (bits < 0x38800000) {  // the result is subnormal: adding 1/2 leaves its digits in the low bits
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    uint32_t digits;
    std::memcpy(&digits, &magnitude, 4);
    return sign | static_cast<uint16_t>(digits - 0x3f000000);
  }
  return sign | static_cast<uint16_t>((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
}

// Entries [at, at + count) of the row, converted into the buffer.
template <class R>
KHOT_APART const R* convert(const Row& row, int64_t at, int64_t count, R* buffer) {
  const int64_t begin = row.step == 0 ? 0 : at;
  const int64_t some = row.step == 0 ? 1 : count;
  switch (row.dtype) {
    case Dtype::kFloat: {
      const float* p = static_cast<const float*>(row.data) + begin;
      for (int64_t i = 0; i < some; ++i) buffer[i] = static_cast<R>(p[i]);
      break;
    }
    case Dtype::kDouble: {
      const double* p = static_cast<const double*>(row.data) + begin;
      for (int64_t i = 0; i < some; ++i) buffer[i] = static_cast<R>(p[i]);
      break;
    }
    case Dtype::kHalf: {
      const uint16_t* p = static_cast<const uint16_t*>(row.data) + begin;
      for (int64_t i = 0; i < some; ++i) buffer[i] = from_half(p[i]);
      break;
    }
    case Dtype::kBFloat16: {
      const uint16_t* p = static_cast<const uint16_t*>(row.data) + begin;
      for (int64_t i = 0; i < some; ++i) buffer[i] = from_bfloat16(p[i]);
      break;
    }
  }
  if (row.step == 0) std::fill(buffer + 1, buffer + count, buffer[0]);
  return buffer;
}

// Entries [at, at + count) of the row: where they are if they are stored as R, otherwise converted into the
// buffer.
template <class R>
KHOT_INLINE const R* fetch(const Row& row, int64_t at, int count, R* buffer) {
  constexpr Dtype own = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
  if (row.dtype == own && row.step == 1) return static_cast<const R*>(row.data) + at;
  return convert(row, at, count, buffer);
}

// Writes values to the entries [at, at + count) of an array at p of type dtype.
template <class R>
KHOT_APART void put(void* p, Dtype dtype, int64_t at, int count, const R* values) {
  switch (dtype) {
    case Dtype::kFloat:
      for (int i = 0; i < count; ++i) static_cast<float*>(p)[at + i] = static_cast<float>(values[i]);
      break;
    case Dtype::kDouble:
      for (int i = 0; i < count; ++i) static_cast<double*>(p)[at + i] = static_cast<double>(values[i]);
      break;
    case Dtype::kHalf:
      for (int i = 0; i < count; ++i)
        static_cast<uint16_t*>(p)[at + i] = to_half(static_cast<float>(values[i]));
      break;
    case Dtype::kBFloat16:
      for (int i = 0; i < count; ++i) {
        static_cast<uint16_t*>(p)[at + i] = to_bfloat16(static_cast<float>(values[i]));
      }
      break;
  }
}

// Writes zeros to all entries of an array at p of n entries, of type dtype.
inline void clear(void* p, Dtype dtype, int64_t n) {
  const int size = dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
  std::memset(p, 0, n * size);
}

// Copies in float of rows of half precision, up to a length: these are converted once, and not in every pass,
// and passes may keep in the place of a result what the next one needs. Other rows stay where they are.
class FloatCopies {
 public:
  // There is room for so many at a time.
  FloatCopies(Dtype dtype, int64_t n, int count) : dtype_(dtype), n_(static_cast<int>(n)) {
    const bool half = dtype == Dtype::kHalf || dtype == Dtype::kBFloat16;
    if (half && n <= kLongest) floats_.resize(count * n);
  }

  Row of(const Row& row, int place) {
    return floats_.empty() ? row : Row{convert(row, 0, n_, room(place)), Dtype::kFloat, 1};
  }
  // Where the entries of a result are written first, and what brings them to it.
  void* instead_of(void* out, int place) { return floats_.empty() ? out : room(place); }
  void finish(void* out, int place) {
    if (!floats_.empty()) put(out, dtype_, 0, n_, room(place));
  }

 private:
  static constexpr int64_t kLongest = 1 << 15;
  float* room(int place) { return floats_.data() + int64_t{place} * n_; }

  Dtype dtype_;
  int n_;
  std::vector<float> floats_;
};

constexpr int64_t kSampleFrom = 65536;  // from this length on, a guess comes from a sample of the row
constexpr int kSampleBlocks = 16;
constexpr int kSampleMax = 16384;

// Copies a sample, which is evenly spaced blocks of the row, and returns its size.
inline int take_sample(const Row& row, int64_t n, float* sample) {
  const int size = n >= 8 * kSampleMax ? kSampleMax : kSampleMax / 4, block = size / kSampleBlocks;
  for (int i = 0; i < kSampleBlocks; ++i) {
    float* target = sample + i * block;
    const float* p = fetch(row, (n - block) / (kSampleBlocks - 1) * i, block, target);
    if (p != target) std::memcpy(target, p, block * sizeof(float));
  }
  return size;
}

// body(v, i, lanes) for the vectors v of a block. v begins at entry i and has so many lanes; the others hold
// pad.
template <class R, class Body>
KHOT_INLINE void vectors(const R* p, int count, R pad, Body body) {
  constexpr int width = kWidth<R>;
  int i = 0;
  for (; i + width <= count; i += width) body(load(p + i), i, width);
  if (i < count) body(load_part(p + i, count - i, pad), i, count - i);
}

// A vector of another row at the entries where a vector of the first row was taken, and one of the results
// there.
template <class R>
KHOT_INLINE Vec<R> beside(const R* p, int i, int lanes, R pad = 0) {
  return lanes == kWidth<R> ? load(p + i) : load_part(p + i, lanes, pad);
}
template <class R>
KHOT_INLINE void store_beside(R* p, int i, int lanes, Vec<R> v) {
  lanes == kWidth<R> ? store(p + i, v) : store_part(p + i, lanes, v);
}

// vectors(), with flush() after at most kGroup vectors and at the end.
constexpr int kGroup = 4;
template <class R, class Body, class Flush>
KHOT_INLINE void vectors(const R* p, int count, R pad, Body body, Flush flush) {
  constexpr int width = kWidth<R>;
  int i = 0;
  while (i + width <= count) {
    const int stop = std::min(count, i + kGroup * width);
    for (; i + width <= stop; i += width) body(load(p + i), i, width);
    flush();
  }
  if (i < count) {
    body(load_part(p + i, count - i, pad), i, count - i);
    flush();
  }
}

// A function of a chunk of a row, by its address, so that the code that goes through the chunks exists once.
struct ChunkBody {
  const void* context;
  void (*call)(const void* context, int64_t begin, int64_t end, int64_t chunk);
};

inline KHOT_APART void each_chunk(int64_t n, const Parallel* inside, ChunkBody body) {
  const int64_t count = (n + kChunk - 1) / kChunk;
  // The other threads have to do as this one does. A thread that is started here begins as this one is, and
  // stays so for whatever it does later.
  const bool flushing = FlushSubnormals::active();
  auto one = [&](int64_t i) {
    const auto flush = FlushSubnormals::exactly(flushing);
    body.call(body.context, i * kChunk, std::min(n, (i + 1) * kChunk), i);
  };
  if (inside == nullptr || count == 1) {
    for (int64_t i = 0; i < count; ++i) one(i);
  } else {
    const auto usual = FlushSubnormals::exactly(false);
    inside->run(count, &one, [](void* context, int64_t i) { (*static_cast<decltype(one)*>(context))(i); });
  }
}

// body(begin, end, chunk) for each chunk of n entries.
template <class Body>
void chunks(int64_t n, const Parallel* inside, const Body& body) {
  each_chunk(n, inside, {&body, [](const void* context, int64_t begin, int64_t end, int64_t i) KHOT_PASS {
                           (*static_cast<const Body*>(context))(begin, end, i);
                         }});
}

// Combines with += what sums_of(context, begin, end) gives for the chunks, in order.
template <class Sums>
KHOT_APART Sums reduce_chunks(int64_t n, const Parallel* inside, const void* context,
                              Sums (*sums_of)(const void* context, int64_t begin, int64_t end)) {
  std::vector<Sums> parts((n + kChunk - 1) / kChunk);
  chunks(n, inside, [&](int64_t begin, int64_t end, int64_t i) { parts[i] = sums_of(context, begin, end); });
  Sums total = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) total += parts[i];
  return total;
}

// body(sums, p, count, at) adds a block to the sums of a chunk. The sums of the chunks are combined with +=.
template <class R, class Sums, class Body>
Sums reduce(const Row& row, int64_t n, const Parallel* inside, const Body& body) {
  struct Context {
    const Row& row;
    const Body& body;
    static KHOT_PASS Sums sums_of(const void* context, int64_t begin, int64_t end) {
      const auto [row, body] = *static_cast<const Context*>(context);
      Sums sums{};
      R buffer[kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
        body(sums, fetch(row, at, count, buffer), count, at);
      }
      return sums;
    }
  };
  const Context context{row, body};
  if (n <= kChunk) return Context::sums_of(&context, 0, n);
  return reduce_chunks<Sums>(n, inside, &context, Context::sums_of);
}

// The same with a block q of another row beside p: body(sums, p, q, count).
template <class R, class Sums, class Body>
Sums reduce_beside(const Row& row, const Row& other, int64_t n, const Parallel* inside, const Body& body) {
  return reduce<R, Sums>(row, n, inside, [=](Sums& sums, const R* p, int count, int64_t at) {
    R buffer[kBlock];
    body(sums, p, fetch(other, at, count, buffer), count);
  });
}

// out[i] = value(x, i, lanes) for the vectors x of the row, which begin at entry i.
template <class R, class Value>
void map(const Row& row, int64_t n, const Parallel* inside, void* out, Dtype dtype, Value value) {
  constexpr Dtype own = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
  chunks(n, inside, [&](int64_t begin, int64_t end, int64_t) {
    R buffer[kBlock], results[kBlock + kWidth<R>];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const R* p = fetch(row, at, count, buffer);
      R* target = dtype == own ? static_cast<R*>(out) + at : results;
      vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
        store_beside(target, i, lanes, value(x, at + i, lanes));
      });
      if (dtype != own) put(out, dtype, at, count, results);
    }
  });
}

// out[i] = value(x, v) for the vectors x of the row and v of another row.
template <class R, class Value>
void map_beside(const Row& row, const Row& other, int64_t n, const Parallel* inside, void* out, Dtype dtype,
                Value value) {
  constexpr Dtype own = sizeof(R) == 4 ? Dtype::kFloat : Dtype::kDouble;
  chunks(n, inside, [&](int64_t begin, int64_t end, int64_t) {
    R from[kBlock], beside_it[kBlock], results[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - at));
      const R *p = fetch(row, at, count, from), *q = fetch(other, at, count, beside_it);
      R* const target = dtype == own ? static_cast<R*>(out) + at : results;
      const Value local = value;  // a local copy stays in registers, as no store can change it
      vectors<R>(p, count, R(0), [&](Vec<R> x, int i, int lanes) {
        store_beside(target, i, lanes, local(x, beside(q, i, lanes)));
      });
      if (dtype != own) put(out, dtype, at, count, results);
    }
  });
}

}  // namespace khot::KHOT_ISA
