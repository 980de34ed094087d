// khot::fenchel_young and khot::fenchel_young_backward for the CPU: tensors in and out, rows shared among
// torch's threads. The schemas are defined in khot/_ops.
#include <limits>
#include <optional>
#include <tuple>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// Numbers that are not asked for may be left out.
struct Losses final : LossRows {
  Losses(const Tensor& x, const Tensor& target, const Tensor& tau, const Shape& of)
      : scores(x, of.batch), targets(target, of.batch, of.n), taus{{tau, of.batch}} {}
  Row x(int64_t row) const override { return scores(row); }
  Row target(int64_t row) const override { return targets(row); }
  double k(int64_t row) const override { return (*ks)(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold threshold(int64_t row) const override { return {(*his)(row), (*los)(row)}; }
  double share(int64_t row) const override { return (*shares)(row); }
  double grad(int64_t row) const override { return (*grads)(row); }
  double loss(int64_t row) const override { return (*losses)(row); }
  void* grad_x(int64_t row) const override { return gradients(row); }
  void put(int64_t row, double loss, double share) const override {
    loss_out[row] = loss, share_out[row] = share;
  }
  void put_tau(int64_t row, double grad_tau) const override { tau_out[row] = grad_tau; }

  Rows scores, targets;
  Invertible<RowScalars> taus;
  std::optional<RowScalars> ks, his, los, shares, grads, losses;
  Results gradients{};
  double *loss_out = nullptr, *share_out = nullptr, *tau_out = nullptr;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> fenchel_young(Tensor x, Tensor target, Tensor k, Tensor tau,
                                                         Text cdf, double shape) {
  const Shape of(x);
  Tensor loss = per_row(x, of), share_out = per_row(x, of), hi = per_row(x, of), lo = per_row(x, of);
  Losses rows(x, target, tau, of);
  rows.ks.emplace(k, of.batch);
  rows.loss_out = numbers_in(loss), rows.share_out = numbers_in(share_out);
  rows.his.emplace(hi, of.batch), rows.los.emplace(lo, of.batch);
  if (of.n == 0) {  // of nothing, only k = 0 can be met
    for (int64_t row = 0; row < of.rows; ++row) {
      const bool met = rows.k(row) == 0;
      rows.put(row, met ? 0 : std::nan(""), met ? 0 : std::nan(""));
      numbers_in(hi)[row] = numbers_in(lo)[row] = met ? std::numeric_limits<double>::max() : std::nan("");
    }
    return {loss, share_out, hi, lo};
  }
  // The loss is least at the threshold, so that of floats as many digits as y needs are enough.
  const bool in_double = x.scalar_type() == ScalarType::Double;
  std::optional<Tensor> y;
  if (!in_double) y = empty(x, of.sizes);
  const Spec spec = spec_of(cdf, shape, of.n, in_double ? Output::kThreshold : Output::kValue);
  const SelectionRows search(rows.scores, *rows.ks, rows.taus, y ? results_in(*y) : Results{}, numbers_in(hi),
                             numbers_in(lo));
  serve<&Kernels::forward>(spec, search, of.rows);
  serve<&Kernels::fenchel_young>(spec, rows, of.rows);
  return {loss, share_out, hi, lo};
}

std::tuple<Tensor, Tensor> fenchel_young_backward(Tensor grad, Tensor x, Tensor target, Tensor share_in,
                                                  Tensor loss, Tensor hi, Tensor lo, Tensor tau, Text cdf,
                                                  double shape) {
  const Shape of(x);
  Tensor grad_x = empty(x, of.sizes), grad_tau = per_row(x, of);
  if (of.n == 0) return {grad_x, torch::stable::fill_(grad_tau, 0)};
  Losses rows(x, target, tau, of);
  rows.shares.emplace(share_in, of.batch), rows.grads.emplace(grad, of.batch);
  rows.losses.emplace(loss, of.batch);
  rows.his.emplace(hi, of.batch), rows.los.emplace(lo, of.batch);
  rows.gradients = results_in(grad_x), rows.tau_out = numbers_in(grad_tau);
  serve<&Kernels::fenchel_young_backward>(spec_of(cdf, shape, of.n, Output::kValue), rows, of.rows);
  return {grad_x, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("fenchel_young", TORCH_BOX(&khot::fenchel_young));
  m.impl("fenchel_young_backward", TORCH_BOX(&khot::fenchel_young_backward));
}
