// khot::soft_count and khot::soft_count_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

using Counts = LevelRows<Rows, RowScalars, RowScalars>;

// The rows of counts at m levels each, which have the shape (*batch, m).
Counts counts_of(const Tensor& x, const Tensor& at, const Tensor& tau, const Shape& of) {
  const int64_t m = at.size(at.dim() - 1);
  return {m, {x, of.batch}, {tau, of.batch}, {at, of.with(m)}};
}

Tensor soft_count(Tensor x, Tensor at, Tensor tau, Text cdf, double shape, bool centred) {
  const Shape of(x);
  Counts rows = counts_of(x, at, tau, of);
  const CountSpec spec{spec_of(cdf, shape, of.n), rows.m, centred};
  Tensor out = empty(x, of.with(rows.m), ScalarType::Double);
  if (of.n == 0) return torch::stable::fill_(out, 0);
  rows.values = numbers_in(out);
  serve<&Kernels::soft_count>(spec, rows, of.rows);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> soft_count_backward(Tensor grad, Tensor x, Tensor at, Tensor tau, Text cdf,
                                                       double shape, bool centred) {
  const Shape of(x);
  Counts rows = counts_of(x, at, tau, of);
  const CountSpec spec{spec_of(cdf, shape, of.n), rows.m, centred};
  Tensor grad_x = empty(x, of.sizes);
  Tensor grad_at = empty(x, of.with(rows.m), ScalarType::Double);
  Tensor grad_tau = per_row(x, of);
  if (of.n == 0) {
    torch::stable::fill_(grad_at, 0), torch::stable::fill_(grad_tau, 0);
  } else {
    rows.grads.emplace(grad, of.with(rows.m));
    rows.values = numbers_in(grad_at), rows.dtau = numbers_in(grad_tau);
    rows.results = results_in(grad_x);
    serve<&Kernels::soft_count_backward>(spec, rows, of.rows);
  }
  if (at.scalar_type() != ScalarType::Double) grad_at = torch::stable::to(grad_at, at.scalar_type());
  return {grad_x, grad_at, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_count", TORCH_BOX(&khot::soft_count));
  m.impl("soft_count_backward", TORCH_BOX(&khot::soft_count_backward));
}
