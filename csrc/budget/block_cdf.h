// A CDF whose functions take blocks of entries, so that the passes around them exist once and not once per
// CDF.
#pragma once

#include "budget/weights.h"
#include "cdfs.h"

namespace khot::KHOT_ISA {

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
        log_tails_(log_tails_of<C>),
        log_densities_(log_densities_of<C>),
        icdf_([](const void* self, double y) { return static_cast<const C*>(self)->icdf(y); }) {}

  // For the entries of a block: z as Position::put() does, f, and 1 - F above the median or F elsewhere.
  void tails(const Position<float>& at, const float* x, const float* w, int count, float* z, float* tail,
             float* f) const {
    tails_float_(self_, at, x, w, count, z, tail, f);
  }
  void tails(const Position<double>& at, const double* x, const double* w, int count, double* z, double* tail,
             double* f) const {
    tails_double_(self_, at, x, w, count, z, tail, f);
  }
  // With full support: the logarithms of these tails, and of f in units of the tail. Far out, log f and the
  // logarithm of the tail have no digits left for their difference.
  void log_tails(const double* z, int count, double* tail, double* rate) const {
    log_tails_(self_, z, count, tail, rate);
  }
  void log_densities(const double* z, int count, double* f) const { log_densities_(self_, z, count, f); }
  double icdf(double y) const { return icdf_(self_, y); }

 private:
  template <class R>
  using Tails = void(const void* self, const Position<R>& at, const R* x, const R* w, int count, R* z,
                     R* tail, R* f);
  using LogTails = void(const void* self, const double* z, int count, double* tail, double* rate);
  using LogDensities = void(const void* self, const double* z, int count, double* f);

  template <class R, class C>
  static KHOT_PASS void tails_of(const void* self, const Position<R>& at, const R* x, const R* w, int count,
                                 R* z, R* tail, R* f) {
    const C F = *static_cast<const C*>(self);
    const Position<R> position = at;
    const R median = static_cast<R>(F.median);
    vectors<R>(x, count, kInf<R>, [&](Vec<R> v, int i, int lanes) {
      const Vec<R> here = abs<R>(v) < kInf<R> ? position(v, beside(w, i, lanes)) : Vec<R>{};
      const TailDensity<R> part = F.template split<R>(here, here > median);
      store(z + i, here), store(tail + i, part.tail), store(f + i, part.density);
    });
  }
  template <class C>
  static KHOT_PASS void log_tails_of(const void* self, const double* z, int count, double* tail,
                                     double* rate) {
    if (!C::full_support) return;
    const C F = *static_cast<const C*>(self);
    for (int i = 0; i < count; i += kWidth<double>) {
      const VecD at = load(z + i), log_tail = F.template log_tail<double>(at, at > F.median);
      const VecD log_f = F.template log_density<double>(at);
      store(tail + i, log_tail);
      // 1 - F above the median is F on the other side
      store(rate + i, F.template log_hazard<double>(-abs<double>(at), log_f, log_tail));
    }
  }
  template <class C>
  static KHOT_PASS void log_densities_of(const void* self, const double* z, int count, double* f) {
    const C F = *static_cast<const C*>(self);
    for (int i = 0; i < count; i += kWidth<double>) {
      store(f + i, F.template log_density<double>(load(z + i)));
    }
  }

  const void* self_;
  Tails<float>* tails_float_;
  Tails<double>* tails_double_;
  LogTails* log_tails_;
  LogDensities* log_densities_;
  double (*icdf_)(const void*, double);
};

}  // namespace khot::KHOT_ISA
