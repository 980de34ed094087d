// khot::laplace_count, laplace_rank, laplace_sort and laplace_thresholds, their backwards and
// khot::decay_scan for the CPU: tensors in and out, rows shared among torch's threads. The schemas are
// defined in khot/_ops.
#include "laplace/laplace.h"

#include <tuple>
#include <vector>

#include "bindings/soft_count.h"
#include "bindings/soft_topk.h"
#include "bindings/sorted.h"

namespace khot {
namespace {

// Runs row_of(scores, n, tau, workspace, out, order) on every row, and returns out and the order of the
// entries.
template <class RowOf>
std::tuple<Tensor, Tensor> of_rows(const Tensor& x, const Tensor& tau, int arrays, const RowOf& row_of) {
  const Shape shape(x);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  Tensor out = empty(x, shape.sizes, shape.compute);
  Tensor order = empty(x, shape.sizes, ScalarType::Int);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    R* to = out.mutable_data_ptr<R>();
    int32_t* index = order.mutable_data_ptr<int32_t>();
    const int64_t n = shape.n;
    shape.share<R>(n, arrays, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      const int64_t at = row * n;
      row_of(from + at, n, taus(row), work, to + at, index + at);
    });
  });
  return {narrowed(out, x), order};
}

// The gradients in x and tau of what of_rows returned. row_of(grad, scores, order, n, tau, workspace, dx)
// writes one row of the first and returns the second.
template <class RowOf>
std::tuple<Tensor, Tensor> of_rows_backward(const Tensor& grad, const Tensor& x, const Tensor& order,
                                            const Tensor& tau, int arrays, const RowOf& row_of) {
  const Shape shape(x);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Tensor incoming = dense(grad, shape.sizes, shape.compute),
               indices = dense(order, shape.sizes, ScalarType::Int);
  Tensor dx = empty(x, shape.sizes, shape.compute);
  Tensor dtau = empty(x, shape.batch, ScalarType::Double);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R *from = scores.const_data_ptr<R>(), *v = incoming.const_data_ptr<R>();
    R* to = dx.mutable_data_ptr<R>();
    const int32_t* index = indices.const_data_ptr<int32_t>();
    double* dt = dtau.mutable_data_ptr<double>();
    const int64_t n = shape.n;
    shape.share<R>(n, arrays, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      const int64_t at = row * n;
      dt[row] = row_of(v + at, from + at, index + at, n, taus(row), work, to + at);
    });
  });
  return {narrowed(dx, x), dtau};
}

std::tuple<Tensor, Tensor> laplace_rank(Tensor x, Tensor tau) {
  return of_rows(x, tau, 2, [](auto&&... row) { laplace::rank_row(row...); });
}

std::tuple<Tensor, Tensor> laplace_rank_backward(Tensor grad, Tensor x, Tensor order, Tensor tau) {
  return of_rows_backward(grad, x, order, tau, 5,
                          [](auto&&... row) { return laplace::rank_backward_row(row...); });
}

std::tuple<Tensor, Tensor> laplace_sort(Tensor x, Tensor tau, bool descending) {
  return of_rows(x, tau, 6, [=](auto* from, int64_t n, double t, auto& work, auto* to, int32_t* index) {
    laplace::sort_row(from, n, t, descending, work, to, index);
  });
}

std::tuple<Tensor, Tensor> laplace_sort_backward(Tensor grad, Tensor x, Tensor order, Tensor tau,
                                                 bool descending, bool want_tau) {
  return of_rows_backward(
      grad, x, order, tau, 6,
      [=](auto* v, auto* from, const int32_t* index, int64_t n, double t, auto& work, auto* to) {
        return laplace::sort_backward_row(v, from, index, n, t, descending, want_tau, work, to);
      });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> laplace_thresholds(Tensor x, Tensor levels, Tensor tau) {
  const Shape shape(x);
  const int64_t n = shape.n, m = levels.size(levels.dim() - 1);
  const bool shared = levels.dim() == 1;  // the same levels for every row
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Tensor asked = dense(levels, shared ? Sizes{m} : shape.with(m), ScalarType::Double);
  Tensor hi = empty(asked, shape.with(m)), lo = empty(asked, shape.with(m));
  Tensor order = empty(x, shape.sizes, ScalarType::Int);
  Tensor place = empty(x, shape.with(m), ScalarType::Int);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    const double* level = asked.const_data_ptr<double>();
    double *h = hi.mutable_data_ptr<double>(), *l = lo.mutable_data_ptr<double>();
    int32_t *index = order.mutable_data_ptr<int32_t>(), *j = place.mutable_data_ptr<int32_t>();
    shape.share<R>(std::max(n, m), 5, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      laplace::thresholds_row(from + row * n, n, level + (shared ? 0 : row * m), m, taus(row), work,
                              h + row * m, l + row * m, index + row * n, j + row * m);
    });
  });
  return {hi, lo, order, place};
}

std::tuple<Tensor, Tensor, Tensor> laplace_thresholds_backward(Tensor grad, Tensor x, Tensor order, Tensor hi,
                                                               Tensor lo, Tensor place, Tensor tau) {
  const Shape shape(x);
  const int64_t n = shape.n, m = hi.size(hi.dim() - 1);
  const Sizes levels = shape.with(m);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Tensor incoming = dense(grad, levels, ScalarType::Double),
               indices = dense(order, shape.sizes, ScalarType::Int);
  const Tensor high = dense(hi, levels, ScalarType::Double), low = dense(lo, levels, ScalarType::Double);
  const Tensor places = dense(place, levels, ScalarType::Int);
  Tensor dx = empty(x, shape.sizes, shape.compute);
  Tensor dlevels = empty(hi, levels), dtau = empty(hi, shape.batch);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    R* to = dx.mutable_data_ptr<R>();
    const int32_t *index = indices.const_data_ptr<int32_t>(), *j = places.const_data_ptr<int32_t>();
    const double* v = incoming.const_data_ptr<double>();
    const double *h = high.const_data_ptr<double>(), *l = low.const_data_ptr<double>();
    double *dl = dlevels.mutable_data_ptr<double>(), *dt = dtau.mutable_data_ptr<double>();
    shape.share<R>(n, 6, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      const int64_t i = row * n, k = row * m;
      dt[row] = laplace::thresholds_backward_row(v + k, from + i, index + i, n, h + k, l + k, j + k, m,
                                                 taus(row), work, to + i, dl + k);
    });
  });
  return {narrowed(dx, x), dlevels, dtau};
}

std::tuple<Tensor, Tensor, Tensor> laplace_count(Tensor x, Tensor levels, Tensor tau) {
  const Shape shape(x);
  const int64_t n = shape.n, m = levels.size(levels.dim() - 1);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Tensor asked = dense(levels, shape.with(m), ScalarType::Double);
  Tensor count = empty(asked, shape.with(m));
  Tensor order = empty(x, shape.sizes, ScalarType::Int);
  Tensor place = empty(x, shape.with(m), ScalarType::Int);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    const double* level = asked.const_data_ptr<double>();
    double* c = count.mutable_data_ptr<double>();
    int32_t *index = order.mutable_data_ptr<int32_t>(), *j = place.mutable_data_ptr<int32_t>();
    shape.share<R>(std::max(n, m), 6, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      const int64_t i = row * n, k = row * m;
      laplace::count_row(from + i, n, level + k, m, taus(row), work, c + k, index + i, j + k);
    });
  });
  return {count, order, place};
}

std::tuple<Tensor, Tensor, Tensor> laplace_count_backward(Tensor grad, Tensor x, Tensor order, Tensor levels,
                                                          Tensor place, Tensor tau) {
  const Shape shape(x);
  const int64_t n = shape.n, m = levels.size(levels.dim() - 1);
  const Sizes wide = shape.with(m);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Tensor incoming = dense(grad, wide, ScalarType::Double),
               asked = dense(levels, wide, ScalarType::Double);
  const Tensor indices = dense(order, shape.sizes, ScalarType::Int),
               places = dense(place, wide, ScalarType::Int);
  Tensor dx = empty(x, shape.sizes, shape.compute);
  Tensor dlevels = empty(asked, wide), dtau = empty(asked, shape.batch);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    R* to = dx.mutable_data_ptr<R>();
    const int32_t *index = indices.const_data_ptr<int32_t>(), *j = places.const_data_ptr<int32_t>();
    const double *v = incoming.const_data_ptr<double>(), *level = asked.const_data_ptr<double>();
    double *dl = dlevels.mutable_data_ptr<double>(), *dt = dtau.mutable_data_ptr<double>();
    shape.share<R>(std::max(n, m), 8, [=, &taus](laplace::Workspace<R>& work, int64_t row) {
      const int64_t i = row * n, k = row * m;
      dt[row] = laplace::count_backward_row(v + k, from + i, index + i, n, level + k, j + k, m, taus(row),
                                            work, to + i, dl + k);
    });
  });
  return {narrowed(dx, x), dlevels, dtau};
}

Tensor decay_scan(Tensor w, Tensor g, bool reverse) {
  const Shape shape(w.dim() >= g.dim() ? w : g);
  const Tensor weights = dense(w, shape.sizes, ScalarType::Double),
               gaps = dense(g, shape.sizes, ScalarType::Double);
  Tensor out = empty(weights, shape.sizes);
  const double *from = weights.const_data_ptr<double>(), *gap = gaps.const_data_ptr<double>();
  double* to = out.mutable_data_ptr<double>();
  const int64_t n = shape.n;
  shape.share<double>(n, 0, [=](laplace::Workspace<double>&, int64_t row) {
    laplace::scan_row(from + row * n, gap + row * n, n, reverse, to + row * n);
  });
  return out;
}

// row_of(scores, n, workspace, out, order) on every row of a small contiguous tensor.
template <class RowOf>
void small_rows(Dtype dtype, const void* x, int64_t rows, int64_t n, int arrays, void* out,
                const RowOf& row_of) {
  std::vector<int32_t> order(n);
  for_dtype(dtype == Dtype::kDouble ? ScalarType::Double : ScalarType::Float, [&](auto zero) {
    using R = decltype(zero);
    laplace::Workspace<R> work(n, arrays);
    for (int64_t at = 0; at < rows * n; at += n) {
      row_of(static_cast<const R*>(x) + at, n, work, static_cast<R*>(out) + at, order.data());
    }
  });
}

void small_rank(Dtype dtype, const void* x, int64_t rows, int64_t n, double tau, void* out) {
  small_rows(dtype, x, rows, n, 2, out, [=](auto* from, int64_t n, auto& work, auto* to, int32_t* order) {
    laplace::rank_row(from, n, tau, work, to, order);
  });
}

void small_sort(Dtype dtype, const void* x, int64_t rows, int64_t n, double tau, bool descending, void* out) {
  small_rows(dtype, x, rows, n, 6, out, [=](auto* from, int64_t n, auto& work, auto* to, int32_t* order) {
    laplace::sort_row(from, n, tau, descending, work, to, order);
  });
}

}  // namespace
}  // namespace khot

extern "C" __attribute__((visibility("default"))) const void* khot_served() {
  static const khot::Served served{khot::kernels(),     khot::sampling_kernels(), khot::forward_rows,
                                   khot::backward_rows, khot::count_rows,         khot::count_rows_backward,
                                   khot::small_rank,    khot::small_sort};
  return &served;
}

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("decay_scan", TORCH_BOX(&khot::decay_scan));
  m.impl("laplace_count", TORCH_BOX(&khot::laplace_count));
  m.impl("laplace_count_backward", TORCH_BOX(&khot::laplace_count_backward));
  m.impl("laplace_rank", TORCH_BOX(&khot::laplace_rank));
  m.impl("laplace_rank_backward", TORCH_BOX(&khot::laplace_rank_backward));
  m.impl("laplace_sort", TORCH_BOX(&khot::laplace_sort));
  m.impl("laplace_sort_backward", TORCH_BOX(&khot::laplace_sort_backward));
  m.impl("laplace_thresholds", TORCH_BOX(&khot::laplace_thresholds));
  m.impl("laplace_thresholds_backward", TORCH_BOX(&khot::laplace_thresholds_backward));
}
