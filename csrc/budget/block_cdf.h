// A CDF whose functions take blocks of entries, so that the passes around them exist once and not once per
// CDF.
#pragma once

#include "cdfs.h"
#include "simd/passes.h"

namespace khot::KHOT_ISA {

// Arrays of a block have room for whole vectors.
template <class R>
constexpr int kWhole = kBlock + kWidth<R>;

class BlockCdf {
 public:
  static constexpr bool log_fits_float = false;
  bool full_support, fits_float;
  double median;

  // F has to outlive it.
  template <class C>
  explicit BlockCdf(const C& F)
      : full_support(C::full_support),
        fits_float(F.fits_float),
        median(F.median),
        self_(&F),
        tails_float_(tails_of<float, C>),
        tails_double_(tails_of<double, C>),
        logs_(logs_of<C>),
        icdf_([](const void* self, double y) { return static_cast<const C*>(self)->icdf(y); }) {}

  // f, and 1 - F above the median or F elsewhere.
  void tails(const float* z, int count, float* tail, float* f) const {
    tails_float_(self_, z, count, tail, f);
  }
  void tails(const double* z, int count, double* tail, double* f) const {
    tails_double_(self_, z, count, tail, f);
  }
  // The logarithms of both.
  void logs(const double* z, int count, double* tail, double* f) const { logs_(self_, z, count, tail, f); }
  double icdf(double y) const { return icdf_(self_, y); }

 private:
  template <class R>
  using OfBlock = void(const void* self, const R* z, int count, R* tail, R* f);

  template <class R, class C>
  static KHOT_PASS void tails_of(const void* self, const R* z, int count, R* tail, R* f) {
    const C F = *static_cast<const C*>(self);
    const R median = static_cast<R>(F.median);
    for (int i = 0; i < count; i += kWidth<R>) {
      const Vec<R> at = load(z + i);
      const TailDensity<R> v = F.template split<R>(at, at > median);
      store(tail + i, v.tail), store(f + i, v.density);
    }
  }
  template <class C>
  static KHOT_PASS void logs_of(const void* self, const double* z, int count, double* tail, double* f) {
    const C F = *static_cast<const C*>(self);
    for (int i = 0; i < count; i += kWidth<double>) {
      const VecD at = load(z + i);
      store(tail + i, F.template log_tail<double>(at, at > F.median));
      store(f + i, F.template log_density<double>(at));
    }
  }

  const void* self_;
  OfBlock<float>* tails_float_;
  OfBlock<double>*tails_double_, *logs_;
  double (*icdf_)(const void*, double);
};

}  // namespace khot::KHOT_ISA
