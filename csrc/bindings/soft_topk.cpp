// khot::soft_topk and khot::soft_topk_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include "bindings/soft_topk.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/text.h"
#include "bindings/threads.h"

namespace khot {
namespace {

Spec to_spec(const std::string& cdf, double shape, const std::string& output, int64_t n) {
  return {find("cdf", cdf, kCdfs), shape, find("output", output, kOutputs), n, nullptr};
}

struct Forward final : ForwardRows {
  Rows scores;
  RowScalars ks, taus;
  char* out_data = nullptr;
  int64_t row_bytes = 0;
  double *hi, *lo;

  Forward(const Tensor& x, const Tensor& k, const Tensor& tau, const Sizes& batch, double* hi, double* lo)
      : scores(x, batch), ks(k, batch), taus(tau, batch), hi(hi), lo(lo) {}
  Row x(int64_t row) const override { return scores(row); }
  double k(int64_t row) const override { return ks(row); }
  double tau(int64_t row) const override { return invertible(taus(row)); }
  void* out(int64_t row) const override { return out_data + row * row_bytes; }
  void put(int64_t row, Threshold t) const override { hi[row] = t.hi, lo[row] = t.lo; }
};

std::tuple<Tensor, Tensor, Tensor> soft_topk(Tensor x, Tensor k, Tensor tau, Text cdf, double shape,
                                             Text output) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  const Spec spec = to_spec(cdf, shape, output, n);
  Sizes out_sizes = batch;
  out_sizes.push_back(spec.output == Output::kThreshold ? 0 : n);
  Tensor out = empty(x, out_sizes);
  Tensor hi = empty(x, batch, ScalarType::Double);
  Tensor lo = empty(x, batch, ScalarType::Double);

  if (n == 0) {  // there is nothing to select from, so that only k = 0 can be met
    const RowScalars ks(k, batch);
    double *h = hi.mutable_data_ptr<double>(), *l = lo.mutable_data_ptr<double>();
    for (int64_t row = 0; row < product(batch); ++row) {
      h[row] = l[row] = ks(row) == 0 ? std::numeric_limits<double>::max() : std::nan("");
    }
    return {out, hi, lo};
  }
  Forward rows(x, k, tau, batch, hi.mutable_data_ptr<double>(), lo.mutable_data_ptr<double>());
  rows.out_data = static_cast<char*>(out.mutable_data_ptr());
  rows.row_bytes = n * size_of(rows.scores.dtype());
  forward_rows(spec, rows, product(batch));
  return {out, hi, lo};
}

struct Backward final : BackwardRows {
  Rows scores, incoming;
  std::optional<Rows> outputs;
  RowScalars incoming_lo, taus, his, los;
  char* out_data;
  int64_t row_bytes;
  double *dk, *dtau;

  Backward(const Tensor& grad, const Tensor& grad_lo, const Tensor& x, const Tensor& hi, const Tensor& lo,
           const Tensor& tau, const std::optional<Tensor>& y, const Sizes& batch)
      : scores(x, batch),
        incoming(grad, batch),
        incoming_lo(grad_lo, batch),
        taus(tau, batch),
        his(hi, batch),
        los(lo, batch) {
    if (y && y->scalar_type() == ScalarType::Float) outputs.emplace(*y, batch);
  }
  Row x(int64_t row) const override { return scores(row); }
  Row y(int64_t row) const override { return outputs ? (*outputs)(row) : Row{nullptr, Dtype::kFloat, 1}; }
  Row grad(int64_t row) const override { return incoming(row); }
  double grad_lo(int64_t row) const override { return incoming_lo(row); }
  double tau(int64_t row) const override { return invertible(taus(row)); }
  Threshold threshold(int64_t row) const override { return {his(row), los(row)}; }
  void* grad_x(int64_t row) const override { return out_data + row * row_bytes; }
  void put(int64_t row, double grad_k, double grad_tau) const override {
    dk[row] = grad_k, dtau[row] = grad_tau;
  }
};

std::tuple<Tensor, Tensor, Tensor> soft_topk_backward(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi,
                                                      Tensor lo, Tensor tau, Text cdf, double shape,
                                                      Text output, std::optional<Tensor> y) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  const Spec spec = to_spec(cdf, shape, output, n);
  Tensor grad_x = empty(x, x.sizes());
  Tensor grad_k = empty(hi, batch);
  Tensor grad_tau = empty(hi, batch);

  if (n == 0) return {grad_x, torch::stable::fill_(grad_k, 0), torch::stable::fill_(grad_tau, 0)};
  Backward rows(grad, grad_lo, x, hi, lo, tau, y, batch);
  rows.out_data = static_cast<char*>(grad_x.mutable_data_ptr());
  rows.row_bytes = n * size_of(rows.scores.dtype());
  rows.dk = grad_k.mutable_data_ptr<double>(), rows.dtau = grad_tau.mutable_data_ptr<double>();
  backward_rows(spec, rows, product(batch));
  return {grad_x, grad_k, grad_tau};
}

}  // namespace

void forward_rows(const Spec& spec, const ForwardRows& rows, int64_t count) {
  share(spec, count,
        [&](const Spec& spec, int64_t begin, int64_t end) { kernels().forward(spec, rows, begin, end); });
}

void backward_rows(const Spec& spec, const BackwardRows& rows, int64_t count) {
  share(spec, count,
        [&](const Spec& spec, int64_t begin, int64_t end) { kernels().backward(spec, rows, begin, end); });
}

}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_topk", TORCH_BOX(&khot::soft_topk));
  m.impl("soft_topk_backward", TORCH_BOX(&khot::soft_topk_backward));
}
