// khot::soft_budget and khot::soft_budget_backward for the CPU: tensors in and out, rows shared among torch's
// threads. The schemas are defined in khot/_ops.
#include <limits>
#include <string>
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/text.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// In units of the rounding of the costs' dtype, as in khot/_kernels/reference/soft_budget.py.
constexpr double kSlack = 4;

double rounding_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kDouble:
      return 0x1p-52;
    case Dtype::kFloat:
      return 0x1p-23;
    case Dtype::kHalf:
      return 0x1p-10;
    case Dtype::kBFloat16:
      return 0x1p-7;
  }
  return 0;
}

BudgetSpec to_spec(const std::string& cdf, double shape, const std::string& by, bool at_most, int64_t n,
                   const Tensor& cost) {
  STD_TORCH_CHECK(by == "score" || by == "value", "khot: unknown by '", by,
                  "': the CPU kernels know score, value");
  return {{find("cdf", cdf, kCdfs), shape, Output::kValue, n, nullptr},
          by == "value",
          at_most,
          kSlack * rounding_of(to_dtype(cost.scalar_type()))};
}

struct Forward final : BudgetRows {
  Rows scores, costs;
  RowScalars budgets, taus;
  char* out_data;
  int64_t row_bytes;
  double *hi, *lo;

  Forward(const Tensor& x, const Tensor& cost, const Tensor& budget, const Tensor& tau,
          const std::vector<int64_t>& batch)
      : scores(x, batch), costs(cost, batch, x.size(x.dim() - 1)), budgets(budget, batch), taus(tau, batch) {}
  Row x(int64_t row) const override { return scores(row); }
  Row cost(int64_t row) const override { return costs(row); }
  double budget(int64_t row) const override { return budgets(row); }
  double tau(int64_t row) const override { return taus(row); }
  void* out(int64_t row) const override { return out_data + row * row_bytes; }
  void put(int64_t row, Threshold t) const override { hi[row] = t.hi, lo[row] = t.lo; }
};

std::tuple<Tensor, Tensor, Tensor> soft_budget(Tensor x, Tensor cost, Tensor budget, Tensor tau, Text cdf,
                                               double shape, Text by, bool at_most) {
  const std::vector<int64_t> batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  const BudgetSpec spec = to_spec(cdf, shape, by, at_most, n, cost);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  Tensor hi = torch::stable::new_empty(x, batch, ScalarType::Double);
  Tensor lo = torch::stable::new_empty(x, batch, ScalarType::Double);
  Forward rows(x, cost, budget, tau, batch);
  rows.out_data = static_cast<char*>(out.mutable_data_ptr());
  rows.row_bytes = n * size_of(rows.scores.dtype());
  rows.hi = hi.mutable_data_ptr<double>(), rows.lo = lo.mutable_data_ptr<double>();
  share(spec, product(batch), [&](const BudgetSpec& spec, int64_t begin, int64_t end) {
    kernels().budget(spec, rows, begin, end);
  });
  return {out, hi, lo};
}

struct Backward final : BudgetBackwardRows {
  Rows scores, costs, incoming;
  RowScalars incoming_lo, taus, his, los;
  char *x_data, *cost_data;
  int64_t x_bytes, cost_bytes;
  double *dbudget, *dtau;

  Backward(const Tensor& grad, const Tensor& grad_lo, const Tensor& x, const Tensor& cost, const Tensor& hi,
           const Tensor& lo, const Tensor& tau, const std::vector<int64_t>& batch)
      : scores(x, batch),
        costs(cost, batch, x.size(x.dim() - 1)),
        incoming(grad, batch),
        incoming_lo(grad_lo, batch),
        taus(tau, batch),
        his(hi, batch),
        los(lo, batch) {}
  Row x(int64_t row) const override { return scores(row); }
  Row cost(int64_t row) const override { return costs(row); }
  Row grad(int64_t row) const override { return incoming(row); }
  double grad_lo(int64_t row) const override { return incoming_lo(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold threshold(int64_t row) const override { return {his(row), los(row)}; }
  void* grad_x(int64_t row) const override { return x_data + row * x_bytes; }
  void* grad_cost(int64_t row) const override { return cost_data + row * cost_bytes; }
  void put(int64_t row, double grad_budget, double grad_tau) const override {
    dbudget[row] = grad_budget, dtau[row] = grad_tau;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> soft_budget_backward(Tensor grad, Tensor grad_lo, Tensor x,
                                                                Tensor cost, Tensor hi, Tensor lo, Tensor tau,
                                                                Text cdf, double shape, Text by,
                                                                bool at_most) {
  const std::vector<int64_t> batch = batch_of(x);
  const int64_t n = x.size(x.dim() - 1);
  const BudgetSpec spec = to_spec(cdf, shape, by, at_most, n, cost);
  Tensor grad_x = torch::stable::new_empty(x, x.sizes());
  Tensor grad_cost = torch::stable::new_empty(cost, x.sizes());
  Tensor grad_budget = torch::stable::new_empty(hi, batch);
  Tensor grad_tau = torch::stable::new_empty(hi, batch);
  Backward rows(grad, grad_lo, x, cost, hi, lo, tau, batch);
  rows.x_data = static_cast<char*>(grad_x.mutable_data_ptr());
  rows.cost_data = static_cast<char*>(grad_cost.mutable_data_ptr());
  rows.x_bytes = n * size_of(rows.scores.dtype()), rows.cost_bytes = n * size_of(rows.costs.dtype());
  rows.dbudget = grad_budget.mutable_data_ptr<double>(), rows.dtau = grad_tau.mutable_data_ptr<double>();
  share(spec, product(batch), [&](const BudgetSpec& spec, int64_t begin, int64_t end) {
    kernels().budget_backward(spec, rows, begin, end);
  });
  return {grad_x, grad_cost, grad_budget, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("soft_budget", TORCH_BOX(&khot::soft_budget));
  m.impl("soft_budget_backward", TORCH_BOX(&khot::soft_budget_backward));
}
