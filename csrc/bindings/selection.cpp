// khot::masked, khot::topk, khot::topk_mask, khot::order_statistics, khot::weighted_quantiles,
// khot::soft_topk_magnitude and its backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

std::tuple<Tensor, Tensor> topk(Tensor x, int64_t k, bool largest, bool sorted) {
  const Shape shape(x);
  const Rows entries(x, shape.batch);
  STD_TORCH_CHECK(shape.n < int64_t{1} << 32, "khot: rows must be shorter than 2^32");
  STD_TORCH_CHECK(k >= 0 && k <= shape.n, "khot: k must lie in [0, n]");
  Tensor values = empty(x, shape.with(k)), indices = empty(x, shape.with(k), ScalarType::Long);
  const LargestRows found(entries, results_in(values), indices.mutable_data_ptr<int64_t>(), k);
  serve_whole<&Kernels::topk>(TopKSpec{shape.n, k, largest, sorted}, found, shape.rows);
  return {values, indices};
}

Tensor masked(Tensor x, Tensor mask, double fill) {
  const Tensor entries = torch::stable::contiguous(x), flags = torch::stable::contiguous(mask);
  const int64_t count = x.numel();
  STD_TORCH_CHECK(flags.numel() == count, "khot: a mask must have a flag for each entry");
  Tensor out = empty(x, sizes_of(x));
  const Dtype dtype = to_dtype(x.scalar_type());
  const int64_t bytes = size_of(dtype);
  const char* const from = static_cast<const char*>(entries.const_data_ptr());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    kernels().masked(dtype, from + begin * bytes, flags.const_data_ptr<bool>() + begin, end - begin, fill,
                     to + begin * bytes);
  });
  return out;
}

Tensor topk_mask(Tensor x, Tensor k) {
  const Shape shape(x);
  Tensor out = empty(x, shape.sizes);
  const HardRows rows(Rows(x, shape.batch), RowScalars(k, shape.batch), results_in(out));
  row_ranges(shape.rows, shape.n,
             [&](int64_t begin, int64_t end) { kernels().topk_mask(rows, shape.n, begin, end); });
  return out;
}

// What find(row, numbers, m, out) writes for each row x of m numbers.
template <class Find>
Tensor of_numbers(const Tensor& x, const Shape& shape, const Tensor& numbers, Find find) {
  const int64_t m = numbers.size(numbers.dim() - 1);
  Tensor out = empty(x, shape.with(m));
  const RowScalars given(numbers, shape.with(m));
  const Results results = results_in(out);
  row_ranges(shape.rows, shape.n, [&](int64_t begin, int64_t end) {
    std::vector<double> of_row(m);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t j = 0; j < m; ++j) of_row[j] = given(row * m + j);
      find(row, of_row.data(), m, results(row));
    }
  });
  return out;
}

Tensor order_statistics(Tensor x, Tensor k) {
  const Shape shape(x);
  const Rows entries(x, shape.batch);
  return of_numbers(x, shape, k, [&](int64_t row, const double* places, int64_t m, void* out) {
    kernels().order_statistics(entries(row), shape.n, places, m, out);
  });
}

Tensor weighted_quantiles(Tensor x, Tensor weights, Tensor level) {
  const Shape shape(x);
  const Rows entries(x, shape.batch), of_entries(weights, shape.batch, shape.n);
  return of_numbers(x, shape, level, [&](int64_t row, const double* levels, int64_t m, void* out) {
    kernels().weighted_quantiles(entries(row), of_entries(row), shape.n, levels, m, out);
  });
}

std::tuple<Tensor, Tensor, Tensor> soft_topk_magnitude(Tensor s, Tensor k, Tensor tau, double p,
                                                       bool is_signed) {
  const Shape shape(s);
  const Sizes& batch = shape.batch;
  Tensor y = empty(s, shape.sizes), hi = per_row(s, shape), lo = per_row(s, shape);
  const SelectionRows rows(Rows(s, batch), RowScalars(k, batch), RowScalars(tau, batch), results_in(y),
                           numbers_in(hi), numbers_in(lo));
  serve<&Kernels::magnitude>(MagnitudeSpec{p, is_signed, shape.n, nullptr}, rows, shape.rows);
  return {y, hi, lo};
}

struct MagnitudeGradients final : GradientRows<Rows, RowScalars, RowScalars, MagnitudeBackwardRows> {
  using Gradients = GradientRows<Rows, RowScalars, RowScalars, MagnitudeBackwardRows>;
  RowScalars ks;

  template <class... Given>
  explicit MagnitudeGradients(RowScalars ks, Given... given) : Gradients(given...), ks(std::move(ks)) {}
  double k(int64_t row) const override { return ks(row); }
};

std::tuple<Tensor, Tensor> soft_topk_magnitude_backward(Tensor grad, Tensor grad_lo, Tensor s, Tensor y,
                                                        Tensor k, Tensor hi, Tensor lo, Tensor tau, double p,
                                                        bool is_signed) {
  const Shape shape(s);
  const Sizes& batch = shape.batch;
  Tensor grad_s = empty(s, shape.sizes), grad_tau = empty(hi, batch);
  const Rows scores(s, batch);
  const MagnitudeGradients rows(RowScalars(k, batch), scores.dtype(), scores, RowScalars(tau, batch),
                                Rows(y, batch), Rows(grad, batch), RowScalars(grad_lo, batch),
                                RowScalars(hi, batch), RowScalars(lo, batch), results_in(grad_s), nullptr,
                                numbers_in(grad_tau));
  serve_whole<&Kernels::magnitude_backward>(MagnitudeSpec{p, is_signed, shape.n, nullptr}, rows, shape.rows);
  return {grad_s, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("topk", TORCH_BOX(&khot::topk));
  m.impl("masked", TORCH_BOX(&khot::masked));
  m.impl("topk_mask", TORCH_BOX(&khot::topk_mask));
  m.impl("order_statistics", TORCH_BOX(&khot::order_statistics));
  m.impl("weighted_quantiles", TORCH_BOX(&khot::weighted_quantiles));
  m.impl("soft_topk_magnitude", TORCH_BOX(&khot::soft_topk_magnitude));
  m.impl("soft_topk_magnitude_backward", TORCH_BOX(&khot::soft_topk_magnitude_backward));
}
