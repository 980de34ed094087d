// khot::topk, khot::topk_mask, khot::order_statistics, khot::soft_topk_magnitude and its backward for the
// CPU: tensors in and out, rows shared among torch's threads. The schemas are defined in khot/_ops.
#include "bindings/selection.h"

#include <tuple>

#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

std::tuple<Tensor, Tensor> topk(Tensor x, int64_t k, bool largest, bool sorted) {
  Sizes shape = batch_of(x);
  const Rows entries(x, shape);
  const int64_t n = x.size(x.dim() - 1), rows = product(shape);
  STD_TORCH_CHECK(n < int64_t{1} << 32, "khot: rows must be shorter than 2^32");
  STD_TORCH_CHECK(k >= 0 && k <= n, "khot: k must lie in [0, n]");
  shape.push_back(k);
  Tensor values = empty(x, shape), indices = empty(x, shape, ScalarType::Long);
  const LargestRows found(entries, results_in(values), indices.mutable_data_ptr<int64_t>(), k);
  topk_rows({n, k, largest, sorted}, found, rows);
  return {values, indices};
}

Tensor topk_mask(Tensor x, Tensor k) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  Tensor out = empty(x, x.sizes());
  const HardRows rows(Rows(x, batch), RowScalars(k, batch), results_in(out));
  row_ranges(product(batch), n,
             [&](int64_t begin, int64_t end) { kernels().topk_mask(rows, n, begin, end); });
  return out;
}

Tensor order_statistics(Tensor x, Tensor k) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1), m = k.size(k.dim() - 1);
  Sizes shape = batch;
  shape.push_back(m);
  Tensor out = empty(x, shape);
  const Rows entries(x, batch);
  const RowScalars ks(k, shape);
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t bytes = m * size_of(entries.dtype());
  row_ranges(product(batch), n, [&](int64_t begin, int64_t end) {
    std::vector<double> places(m);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t j = 0; j < m; ++j) places[j] = ks(row * m + j);
      kernels().order_statistics(entries(row), n, places.data(), m, data + row * bytes);
    }
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> soft_topk_magnitude(Tensor s, Tensor k, Tensor tau, double p,
                                                       bool is_signed) {
  const Sizes batch = batch_of(s);
  const int64_t n = s.size(s.dim() - 1);
  Tensor y = empty(s, s.sizes());
  Tensor hi = empty(s, batch, ScalarType::Double);
  Tensor lo = empty(s, batch, ScalarType::Double);
  const SelectionRows rows(Rows(s, batch), RowScalars(k, batch), RowScalars(tau, batch), results_in(y),
                           hi.mutable_data_ptr<double>(), lo.mutable_data_ptr<double>());
  share(MagnitudeSpec{p, is_signed, n, nullptr}, product(batch),
        [&](const MagnitudeSpec& spec, int64_t begin, int64_t end) {
          kernels().magnitude(spec, rows, begin, end);
        });
  return {y, hi, lo};
}

struct MagnitudeGradients final : MagnitudeBackwardRows {
  Rows scores, values, incoming;
  RowScalars incoming_lo, ks, his, los, taus;
  char* grads;
  int64_t row_bytes;
  double* grad_taus;

  MagnitudeGradients(const Tensor& grad, const Tensor& grad_lo, const Tensor& s, const Tensor& y,
                     const Tensor& k, const Tensor& hi, const Tensor& lo, const Tensor& tau,
                     const Sizes& batch)
      : scores(s, batch),
        values(y, batch),
        incoming(grad, batch),
        incoming_lo(grad_lo, batch),
        ks(k, batch),
        his(hi, batch),
        los(lo, batch),
        taus(tau, batch) {}
  Row s(int64_t row) const override { return scores(row); }
  Row y(int64_t row) const override { return values(row); }
  Row grad(int64_t row) const override { return incoming(row); }
  double grad_lo(int64_t row) const override { return incoming_lo(row); }
  double k(int64_t row) const override { return ks(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold gamma(int64_t row) const override { return {his(row), los(row)}; }
  void* grad_s(int64_t row) const override { return grads + row * row_bytes; }
  void put(int64_t row, double grad_tau) const override { grad_taus[row] = grad_tau; }
};

std::tuple<Tensor, Tensor> soft_topk_magnitude_backward(Tensor grad, Tensor grad_lo, Tensor s, Tensor y,
                                                        Tensor k, Tensor hi, Tensor lo, Tensor tau, double p,
                                                        bool is_signed) {
  const Sizes batch = batch_of(s);
  const int64_t n = s.size(s.dim() - 1);
  Tensor grad_s = empty(s, s.sizes());
  Tensor grad_tau = empty(hi, batch);
  MagnitudeGradients rows(grad, grad_lo, s, y, k, hi, lo, tau, batch);
  rows.grads = static_cast<char*>(grad_s.mutable_data_ptr());
  rows.row_bytes = n * size_of(rows.scores.dtype());
  rows.grad_taus = grad_tau.mutable_data_ptr<double>();
  const MagnitudeSpec spec{p, is_signed, n, nullptr};
  row_ranges(product(batch), n,
             [&](int64_t begin, int64_t end) { kernels().magnitude_backward(spec, rows, begin, end); });
  return {grad_s, grad_tau};
}

}  // namespace

void topk_rows(const TopKSpec& spec, const TopKRows& rows, int64_t count) {
  row_ranges(count, spec.n, [&](int64_t begin, int64_t end) { kernels().topk(spec, rows, begin, end); });
}

}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("topk", TORCH_BOX(&khot::topk));
  m.impl("topk_mask", TORCH_BOX(&khot::topk_mask));
  m.impl("order_statistics", TORCH_BOX(&khot::order_statistics));
  m.impl("soft_topk_magnitude", TORCH_BOX(&khot::soft_topk_magnitude));
  m.impl("soft_topk_magnitude_backward", TORCH_BOX(&khot::soft_topk_magnitude_backward));
}
