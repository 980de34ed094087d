// khot::soft_count and khot::soft_count_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include "bindings/soft_count.h"

#include <optional>
#include <string>
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/text.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// The rows of counts at m levels each, which have the shape (*batch, m).
struct Counts {
  Sizes shape;
  LevelRows<Rows, RowScalars, RowScalars> rows;

  Counts(const Tensor& x, const Tensor& at, const Tensor& tau, const Sizes& batch)
      : Counts(x, at, tau, batch, at.size(at.dim() - 1)) {}

 private:
  Counts(const Tensor& x, const Tensor& at, const Tensor& tau, const Sizes& batch, int64_t m)
      : shape(batch), rows(m, Rows(x, batch), RowScalars(tau, batch), RowScalars(at, with(m))) {}
  const Sizes& with(int64_t m) {
    shape.push_back(m);
    return shape;
  }
};

CountSpec to_spec(const std::string& cdf, double shape, int64_t n, int64_t levels, bool centred) {
  return {{find("cdf", cdf, kCdfs), shape, Output::kValue, n, nullptr}, levels, centred};
}

Tensor soft_count(Tensor x, Tensor at, Tensor tau, Text cdf, double shape, bool centred) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  Counts counts(x, at, tau, batch);
  auto& rows = counts.rows;
  const CountSpec spec = to_spec(cdf, shape, n, rows.m, centred);
  Tensor out = empty(x, counts.shape, ScalarType::Double);
  if (n == 0) return torch::stable::fill_(out, 0);
  rows.values = out.mutable_data_ptr<double>();
  count_rows(spec, rows, product(batch));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> soft_count_backward(Tensor grad, Tensor x, Tensor at, Tensor tau, Text cdf,
                                                       double shape, bool centred) {
  const Sizes batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  Counts counts(x, at, tau, batch);
  auto& rows = counts.rows;
  const CountSpec spec = to_spec(cdf, shape, n, rows.m, centred);
  Tensor grad_x = empty(x, x.sizes());
  Tensor grad_at = empty(x, counts.shape, ScalarType::Double);
  Tensor grad_tau = empty(x, batch, ScalarType::Double);
  if (n == 0) {
    torch::stable::fill_(grad_at, 0), torch::stable::fill_(grad_tau, 0);
  } else {
    rows.grads.emplace(grad, counts.shape);
    rows.values = grad_at.mutable_data_ptr<double>(), rows.dtau = grad_tau.mutable_data_ptr<double>();
    rows.results = results_in(grad_x);
    count_rows_backward(spec, rows, product(batch));
  }
  if (at.scalar_type() != ScalarType::Double) grad_at = torch::stable::to(grad_at, at.scalar_type());
  return {grad_x, grad_at, grad_tau};
}

}  // namespace

void count_rows(const CountSpec& spec, const CountRows& rows, int64_t count) {
  share(spec, count, [&](const CountSpec& spec, int64_t begin, int64_t end) {
    kernels().soft_count(spec, rows, begin, end);
  });
}

void count_rows_backward(const CountSpec& spec, const CountRows& rows, int64_t count) {
  share(spec, count, [&](const CountSpec& spec, int64_t begin, int64_t end) {
    kernels().soft_count_backward(spec, rows, begin, end);
  });
}

}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_count", TORCH_BOX(&khot::soft_count));
  m.impl("soft_count_backward", TORCH_BOX(&khot::soft_count_backward));
}
