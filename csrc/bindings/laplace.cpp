// khot::laplace_count and laplace_thresholds, their backwards and khot::decay_scan for the CPU: tensors in
// and out, rows shared among torch's threads. The schemas are defined in khot/_ops.
#include "laplace/laplace.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/sorted.h"

namespace khot {
namespace {

// The levels of each row: its own, the same for every row, or none. What there is for each level is in
// double; without levels it is in the dtype of the rows.
struct Levels {
  const SortedShape& rows;
  const bool given;
  const int64_t m;  // their number; without levels, that of the entries

  Levels(const std::optional<Tensor>& levels, const SortedShape& rows)
      : rows(rows), given(levels), m(levels ? levels->size(levels->dim() - 1) : rows.n) {
    if (!given) return;
    const bool shared = levels->dim() == 1;
    values_ = dense(*levels, shared ? Sizes{m} : rows.with(m), ScalarType::Double);
    if (m > 0) first_ = values_->const_data_ptr<double>(), stride_ = shared ? 0 : m;
  }
  const double* of(int64_t row) const { return given ? first_ + row * stride_ : nullptr; }
  ScalarType dtype() const { return given ? ScalarType::Double : rows.compute; }
  // body(a pointer to what the tensor holds for the levels), where rows are of R
  template <class R, class Body>
  void with_data(const Tensor& t, const Body& body) const {
    given ? body(static_cast<double*>(t.mutable_data_ptr())) : body(static_cast<R*>(t.mutable_data_ptr()));
  }

 private:
  std::optional<Tensor> values_;
  const double* first_ = &laplace::kNan;  // not null, even of no levels
  int64_t stride_ = 0;
};

std::tuple<Tensor, Tensor, Tensor> laplace_count(Tensor x, std::optional<Tensor> levels, Tensor tau,
                                                 bool descending) {
  const SortedShape shape(x);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Levels asked(levels, shape);
  const int64_t n = shape.n, m = asked.m;
  Tensor count = empty(x, shape.with(m), asked.dtype());
  Tensor order = empty(x, shape.sizes, ScalarType::Int);
  Tensor place = empty(x, shape.with(asked.given ? m : 0), ScalarType::Int);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    int32_t *index = order.mutable_data_ptr<int32_t>(), *j = place.mutable_data_ptr<int32_t>();
    asked.with_data<R>(count, [&](auto* to) {
      shape.share<R>(std::max(n, m), 6, [=, &taus, &asked](auto& work, int64_t row) {
        const int64_t i = row * n, k = row * m;
        laplace::count_row(from + i, n, asked.of(row), m, taus(row), descending, work, to + k, index + i,
                           j + k);
      });
    });
  });
  return {asked.given ? count : narrowed(count, x), order, place};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> laplace_thresholds(Tensor x, std::optional<Tensor> levels,
                                                              Tensor tau, bool descending) {
  const SortedShape shape(x);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Levels asked(levels, shape);
  const int64_t n = shape.n, m = asked.m;
  Tensor hi = empty(x, shape.with(asked.given ? m : 0), ScalarType::Double);
  Tensor lo = empty(x, shape.with(m), asked.dtype());
  Tensor order = empty(x, shape.sizes, ScalarType::Int);
  Tensor place = empty(x, shape.with(m), ScalarType::Int);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    double* h = asked.given ? hi.mutable_data_ptr<double>() : nullptr;
    int32_t *index = order.mutable_data_ptr<int32_t>(), *j = place.mutable_data_ptr<int32_t>();
    asked.with_data<R>(lo, [&](auto* to) {
      shape.share<R>(std::max(n, m), 5, [=, &taus, &asked](auto& work, int64_t row) {
        const int64_t i = row * n, k = row * m;
        laplace::thresholds_row(from + i, n, asked.of(row), m, taus(row), work, h ? h + k : nullptr, to + k,
                                index + i, j + k);
        if (!descending && !asked.given) std::reverse(to + k, to + k + m);
      });
    });
  });
  return {hi, asked.given ? lo : narrowed(lo, x), order, place};
}

// The gradients in x, the levels and tau. row_of(grad, scores, order, n, levels, places, m, tau, workspace,
// dx, dlevel) writes one row of the first two and returns the third.
template <class RowOf>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& order,
                                            const std::optional<Tensor>& levels, const Tensor& place,
                                            const Tensor& tau, const RowOf& row_of) {
  const SortedShape shape(x);
  const Tensor scores = dense(x, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  const Levels asked(levels, shape);
  const int64_t n = shape.n, m = asked.m;
  const Tensor incoming = dense(grad, shape.with(m), asked.dtype()),
               indices = dense(order, shape.sizes, ScalarType::Int),
               places = dense(place, shape.with(place.size(place.dim() - 1)), ScalarType::Int);
  Tensor dx = empty(x, shape.sizes, shape.compute);
  Tensor dlevels = empty(x, shape.with(asked.given ? m : 0), ScalarType::Double);
  Tensor dtau = empty(x, shape.batch, ScalarType::Double);
  for_dtype(shape.compute, [&](auto zero) {
    using R = decltype(zero);
    const R* from = scores.const_data_ptr<R>();
    R* to = dx.mutable_data_ptr<R>();
    const int32_t *index = indices.const_data_ptr<int32_t>(), *j = places.const_data_ptr<int32_t>();
    double *dl = dlevels.mutable_data_ptr<double>(), *dt = dtau.mutable_data_ptr<double>();
    asked.with_data<R>(incoming, [&](const auto* v) {
      shape.share<R>(std::max(n, m), 8, [=, &taus, &asked](auto& work, int64_t row) {
        const int64_t i = row * n, k = row * m;
        dt[row] =
            row_of(v + k, from + i, index + i, n, asked.of(row), j + k, m, taus(row), work, to + i, dl + k);
      });
    });
  });
  return {narrowed(dx, x), dlevels, dtau};
}

std::tuple<Tensor, Tensor, Tensor> laplace_count_backward(Tensor grad, Tensor x, Tensor order,
                                                          std::optional<Tensor> levels, Tensor place,
                                                          Tensor tau, bool want_tau, bool descending) {
  return backward(grad, x, order, levels, place, tau, [=](auto&&... row) {
    return want_tau ? laplace::count_backward_row<true>(descending, row...)
                    : laplace::count_backward_row<false>(descending, row...);
  });
}

std::tuple<Tensor, Tensor, Tensor> laplace_thresholds_backward(Tensor grad, Tensor x, Tensor order,
                                                               std::optional<Tensor> levels, Tensor place,
                                                               Tensor tau, bool want_tau, bool descending) {
  const int64_t n = x.size(x.dim() - 1);
  return backward(grad, x, order, levels, place, tau, [=](const auto* v, auto&&... row) {
    const auto row_of = [&](auto in_order) {
      return want_tau ? laplace::thresholds_backward_row<true>(in_order, row...)
                      : laplace::thresholds_backward_row<false>(in_order, row...);
    };
    return descending || levels ? row_of(v) : row_of(std::make_reverse_iterator(v + n));
  });
}

Tensor decay_scan(Tensor w, Tensor g, bool reverse) {
  const SortedShape shape(w.dim() >= g.dim() ? w : g);
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

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("decay_scan", TORCH_BOX(&khot::decay_scan));
  m.impl("laplace_count", TORCH_BOX(&khot::laplace_count));
  m.impl("laplace_count_backward", TORCH_BOX(&khot::laplace_count_backward));
  m.impl("laplace_thresholds", TORCH_BOX(&khot::laplace_thresholds));
  m.impl("laplace_thresholds_backward", TORCH_BOX(&khot::laplace_thresholds_backward));
}
