// khot::soft_topk and khot::soft_topk_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

std::tuple<Tensor, Tensor, Tensor> soft_topk(Tensor x, Tensor k, Tensor tau, Text cdf, double shape,
                                             Text output) {
  const Shape of(x);
  const Sizes& batch = of.batch;
  const Spec spec = spec_of(cdf, shape, of.n, find("output", output, kOutputs));
  Tensor out = empty(x, of.with(spec.output == Output::kThreshold ? 0 : of.n));
  Tensor hi = per_row(x, of), lo = per_row(x, of);

  if (of.n == 0) {  // there is nothing to select from, so that only k = 0 can be met
    const RowScalars ks(k, batch);
    double *h = numbers_in(hi), *l = numbers_in(lo);
    for (int64_t row = 0; row < of.rows; ++row) {
      h[row] = l[row] = ks(row) == 0 ? std::numeric_limits<double>::max() : std::nan("");
    }
    return {out, hi, lo};
  }
  const SelectionRows rows(Rows(x, batch), RowScalars(k, batch), Invertible<RowScalars>{{tau, batch}},
                           results_in(out), numbers_in(hi), numbers_in(lo));
  serve<&Kernels::forward>(spec, rows, of.rows);
  return {out, hi, lo};
}

std::tuple<Tensor, Tensor, Tensor> soft_topk_backward(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi,
                                                      Tensor lo, Tensor tau, Text cdf, double shape,
                                                      Text output, std::optional<Tensor> y) {
  const Shape of(x);
  const Sizes& batch = of.batch;
  const Spec spec = spec_of(cdf, shape, of.n, find("output", output, kOutputs));
  Tensor grad_x = empty(x, of.sizes), grad_k = empty(hi, batch), grad_tau = empty(hi, batch);

  if (of.n == 0) return {grad_x, torch::stable::fill_(grad_k, 0), torch::stable::fill_(grad_tau, 0)};
  const Rows scores(x, batch);
  std::optional<Rows> outputs;
  if (y && y->scalar_type() == ScalarType::Float) outputs.emplace(*y, batch);
  const GradientRows rows(scores.dtype(), scores, Invertible<RowScalars>{{tau, batch}}, outputs,
                          std::optional<Rows>(std::in_place, grad, batch), RowScalars(grad_lo, batch),
                          RowScalars(hi, batch), RowScalars(lo, batch), results_in(grad_x),
                          numbers_in(grad_k), numbers_in(grad_tau));
  serve<&Kernels::backward>(spec, rows, of.rows);
  return {grad_x, grad_k, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_topk", TORCH_BOX(&khot::soft_topk));
  m.impl("soft_topk_backward", TORCH_BOX(&khot::soft_topk_backward));
}
