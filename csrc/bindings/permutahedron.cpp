// khot::permutahedron and its backward for the CPU: tensors in and out, rows shared among torch's threads.
// The schemas are defined in khot/_ops/permutahedron.py.
#include <string>
#include <tuple>

#include "bindings/names.h"
#include "bindings/sorted.h"
#include "permutahedron/project.h"

namespace khot {
namespace {

bool is_kl(const std::string& regularization) {
  STD_TORCH_CHECK(regularization == "l2" || regularization == "kl", "khot: unknown regularization '",
                  regularization, "': the CPU kernels know l2, kl");
  return regularization == "kl";
}

// The rows of w for the rows of z: n numbers that all rows share, or a row for each.
struct Weights {
  bool shared;
  ScalarType compute;
  Tensor dense_rows;

  Weights(const Tensor& w, const SortedShape& shape)
      : shared(product(sizes_of(w)) == shape.n && w.dim() > 0 && w.size(w.dim() - 1) == shape.n),
        compute(compute_of(w)),
        dense_rows(dense(w, shared ? sizes_of(w) : shape.sizes, compute)) {}
  int64_t at(int64_t row, int64_t n) const { return shared ? 0 : row * n; }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> project(Tensor z, Tensor w, Tensor tau, Text regularization) {
  const bool kl = is_kl(regularization);
  const SortedShape shape(z);
  const int64_t n = shape.n;
  const Weights weights(w, shape);
  const Tensor scores = dense(z, shape.sizes, shape.compute);
  const RowScalars taus(tau, shape.batch);
  Tensor y = empty(z, shape.sizes, shape.compute);
  Tensor order = empty(z, shape.sizes, ScalarType::Int), w_order = empty(z, shape.sizes, ScalarType::Int),
         start = empty(z, shape.sizes, ScalarType::Int);
  int32_t *index = order.mutable_data_ptr<int32_t>(), *w_index = w_order.mutable_data_ptr<int32_t>(),
          *first = start.mutable_data_ptr<int32_t>();
  for_dtype(weights.compute, [&](auto w_zero) {
    using S = decltype(w_zero);
    const S* given = weights.dense_rows.template const_data_ptr<S>();
    // Weights that all rows share are sorted once.
    laplace::Workspace<S> common(n, 1);
    std::vector<int32_t> common_order(weights.shared ? n : 0);
    double* common_w = common.take();
    if (weights.shared) permutahedron::weights_row(given, n, common, common_order.data(), common_w);
    for_dtype(shape.compute, [&](auto zero) {
      using R = decltype(zero);
      const R* from = scores.const_data_ptr<R>();
      R* to = y.mutable_data_ptr<R>();
      row_ranges(shape.rows, n, [&](int64_t begin, int64_t end) {
        laplace::Workspace<R> work(n, permutahedron::kArrays);
        laplace::Workspace<S> of_w(n, 1);
        for (int64_t row = begin; row < end; ++row) {
          const int64_t at = row * n;
          work.taken = of_w.taken = 0;
          double* sorted = weights.shared ? common_w : of_w.take();
          if (weights.shared) {
            std::copy(common_order.begin(), common_order.end(), w_index + at);
          } else {
            permutahedron::weights_row(given + at, n, of_w, w_index + at, sorted);
          }
          permutahedron::project_row(from + at, sorted, n, taus(row), kl, work, to + at, index + at,
                                     first + at);
        }
      });
    });
  });
  return {narrowed(y, z), order, w_order, start};
}

std::tuple<Tensor, Tensor, Tensor> project_backward(Tensor grad, Tensor z, Tensor w, Tensor tau, Tensor order,
                                                    Tensor w_order, Tensor start, Text regularization,
                                                    bool want_w) {
  const bool kl = is_kl(regularization);
  const SortedShape shape(z);
  const int64_t n = shape.n;
  const Weights weights(w, shape);
  const Tensor scores = dense(z, shape.sizes, shape.compute),
               incoming = dense(grad, shape.sizes, shape.compute);
  const Tensor indices = dense(order, shape.sizes, ScalarType::Int),
               w_indices = dense(w_order, shape.sizes, ScalarType::Int),
               starts = dense(start, shape.sizes, ScalarType::Int);
  const RowScalars taus(tau, shape.batch);
  Tensor dz = empty(z, shape.sizes, shape.compute);
  Tensor dw = empty(z, want_w ? shape.sizes : Sizes{0}, weights.compute);
  Tensor dtau = empty(z, shape.batch, ScalarType::Double);
  const int32_t *index = indices.const_data_ptr<int32_t>(), *w_index = w_indices.const_data_ptr<int32_t>(),
                *first = starts.const_data_ptr<int32_t>();
  double* dt = dtau.mutable_data_ptr<double>();
  for_dtype(weights.compute, [&](auto w_zero) {
    using S = decltype(w_zero);
    const S* given = weights.dense_rows.template const_data_ptr<S>();
    S* to_w = want_w ? dw.mutable_data_ptr<S>() : nullptr;
    for_dtype(shape.compute, [&](auto zero) {
      using R = decltype(zero);
      const R *from = scores.const_data_ptr<R>(), *v = incoming.const_data_ptr<R>();
      R* to = dz.mutable_data_ptr<R>();
      shape.share<R>(
          n, permutahedron::kArrays, [=, &taus, &weights](laplace::Workspace<R>& work, int64_t row) {
            const int64_t at = row * n;
            const S* row_w = given + weights.at(row, n);
            const int32_t* places = w_index + at;
            const auto weight_of = [=](int64_t p) { return static_cast<double>(row_w[places[p]]); };
            work.taken = 0;
            dt[row] = permutahedron::project_backward_row(v + at, from + at, weight_of, index + at, places,
                                                          first + at, n, taus(row), kl, work, to + at,
                                                          to_w == nullptr ? nullptr : to_w + at);
          });
    });
  });
  return {narrowed(dz, z), dw, dtau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("permutahedron", TORCH_BOX(&khot::project));
  m.impl("permutahedron_backward", TORCH_BOX(&khot::project_backward));
}
