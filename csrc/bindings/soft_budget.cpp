// khot::soft_budget and khot::soft_budget_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// As in khot/_kernels/reference/soft_budget.py.
constexpr double kSummed = 4, kMost = 0x1p-10;
constexpr double kRounding[] = {0x1p-23, 0x1p-52, 0x1p-10, 0x1p-7};  // of each Dtype

// The share of the sum of n costs by which a budget may exceed it.
double slack_of(int64_t n, Dtype dtype) {
  const double eps = kRounding[static_cast<int>(dtype)], kept = std::min(eps, 0x1p-23);
  return kSummed * eps + std::min(0.5 * kept * static_cast<double>(n), kMost);
}

BudgetSpec to_spec(const std::string& cdf, double shape, const std::string& by, bool at_most, int64_t n,
                   const Tensor& cost) {
  STD_TORCH_CHECK(by == "score" || by == "value", "khot: unknown by '", by,
                  "': the CPU kernels know score, value");
  return {spec_of(cdf, shape, n), by == "value", at_most, slack_of(n, to_dtype(cost.scalar_type()))};
}

std::tuple<Tensor, Tensor, Tensor> soft_budget(Tensor x, Tensor cost, Tensor budget, Tensor tau, Text cdf,
                                               double shape, Text by, bool at_most) {
  const Shape of(x);
  const BudgetSpec spec = to_spec(cdf, shape, by, at_most, of.n, cost);
  Tensor out = empty(x, of.sizes), hi = per_row(x, of), lo = per_row(x, of);
  const PricedRows<Rows, RowScalars> rows(Rows(cost, of.batch, of.n), Rows(x, of.batch),
                                          RowScalars(budget, of.batch), RowScalars(tau, of.batch),
                                          results_in(out), numbers_in(hi), numbers_in(lo));
  serve<&Kernels::budget>(spec, rows, of.rows);
  return {out, hi, lo};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> soft_budget_backward(Tensor grad, Tensor grad_lo, Tensor x,
                                                                Tensor cost, Tensor hi, Tensor lo, Tensor tau,
                                                                Text cdf, double shape, Text by,
                                                                bool at_most) {
  const Shape of(x);
  const BudgetSpec spec = to_spec(cdf, shape, by, at_most, of.n, cost);
  Tensor grad_x = empty(x, of.sizes), grad_cost = empty(cost, of.sizes);
  Tensor grad_budget = empty(hi, of.batch), grad_tau = empty(hi, of.batch);
  const Rows scores(x, of.batch);
  const PricedGradients<Rows, RowScalars> rows(
      Rows(cost, of.batch, of.n), results_in(grad_cost), scores.dtype(), scores, RowScalars(tau, of.batch),
      std::nullopt, Rows(grad, of.batch), RowScalars(grad_lo, of.batch), RowScalars(hi, of.batch),
      RowScalars(lo, of.batch), results_in(grad_x), numbers_in(grad_budget), numbers_in(grad_tau));
  serve<&Kernels::budget_backward>(spec, rows, of.rows);
  return {grad_x, grad_cost, grad_budget, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_budget", TORCH_BOX(&khot::soft_budget));
  m.impl("soft_budget_backward", TORCH_BOX(&khot::soft_budget_backward));
}
