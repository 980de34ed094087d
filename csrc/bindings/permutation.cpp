// khot::permutation_shares and its backward for the CPU: tensors in and out, blocks of entries shared among
// torch's threads. The schemas are defined in khot/_ops/permutation_shares.py.
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/text.h"
#include "bindings/threads.h"

namespace khot {
namespace {

Sizes with(Sizes batch, int64_t more) {
  batch.push_back(more);
  return batch;
}

struct Shares final : ShareRows {
  int64_t levels, n;
  Rows scores;
  RowScalars taus, highs, lows;
  std::optional<Rows> grads;
  char *out_data = nullptr, *grad_data = nullptr;
  int64_t row_bytes;
  double *moved = nullptr, *turned = nullptr;  // of each block

  Shares(const Tensor& x, const Tensor& hi, const Tensor& lo, const Tensor& tau, const Sizes& batch)
      : levels(hi.size(hi.dim() - 1)),
        n(x.size(x.dim() - 1)),
        scores(x, batch),
        taus(tau, batch),
        highs(hi, with(batch, levels)),
        lows(lo, with(batch, levels)),
        row_bytes(n * size_of(scores.dtype())) {}
  Row x(int64_t row) const override { return scores(row); }
  double tau(int64_t row) const override { return taus(row); }
  Threshold level(int64_t row, int64_t j) const override {
    const double hi = highs(row * levels + j), most = std::numeric_limits<double>::max();
    if (hi == most) return {std::numeric_limits<double>::infinity(), 0};
    if (hi == -most) return {-std::numeric_limits<double>::infinity(), 0};
    return {hi, lows(row * levels + j)};
  }
  void* out(int64_t row, int64_t place) const override {
    return out_data + (row * (levels - 1) + place) * row_bytes;
  }
  Row grad(int64_t row, int64_t place) const override { return (*grads)(row * (levels - 1) + place); }
  void* grad_x(int64_t row) const override { return grad_data + row * row_bytes; }
  void put(int64_t block, int64_t j, double value) const override { moved[block * levels + j] = value; }
  void put_tau(int64_t block, double value) const override { turned[block] = value; }
};

ShareSpec to_spec(const std::string& cdf, double shape, const Shares& rows) {
  return {{find("cdf", cdf, kCdfs), shape, Output::kValue, rows.n, nullptr}, rows.levels};
}

template <class Serve>
void share_blocks_out(const Shares& rows, int64_t count, const Serve& serve) {
  row_ranges(count, std::min(kShareBlock, rows.n) * rows.levels, serve);
}

Tensor permutation_shares(Tensor x, Tensor hi, Tensor lo, Tensor tau, Text cdf, double shape) {
  const Sizes batch = batch_of(x);
  Shares rows(x, hi, lo, tau, batch);
  const ShareSpec spec = to_spec(cdf, shape, rows);
  Tensor out = empty(x, with(with(batch, rows.levels - 1), rows.n));
  rows.out_data = static_cast<char*>(out.mutable_data_ptr());
  share_blocks_out(rows, product(batch) * share_blocks(rows.n),
                   [&](int64_t begin, int64_t end) { kernels().shares(spec, rows, begin, end, false); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> permutation_shares_backward(Tensor grad, Tensor x, Tensor hi, Tensor lo,
                                                               Tensor tau, Text cdf, double shape) {
  const Sizes batch = batch_of(x);
  Shares rows(x, hi, lo, tau, batch);
  const ShareSpec spec = to_spec(cdf, shape, rows);
  rows.grads.emplace(grad, with(batch, rows.levels - 1), rows.n);
  Tensor grad_x = empty(x, x.sizes());
  Tensor grad_lo = empty(x, with(batch, rows.levels), ScalarType::Double);
  Tensor grad_tau = empty(x, batch, ScalarType::Double);
  rows.grad_data = static_cast<char*>(grad_x.mutable_data_ptr());
  const int64_t blocks = share_blocks(rows.n), count = product(batch) * blocks;
  std::vector<double> moved(count * rows.levels), turned(count);
  rows.moved = moved.data(), rows.turned = turned.data();
  share_blocks_out(rows, count,
                   [&](int64_t begin, int64_t end) { kernels().shares(spec, rows, begin, end, true); });
  // in the order of the blocks, whatever thread did them
  double *dlo = grad_lo.mutable_data_ptr<double>(), *dtau = grad_tau.mutable_data_ptr<double>();
  std::fill(dlo, dlo + product(batch) * rows.levels, 0.0);
  std::fill(dtau, dtau + product(batch), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    double* const row = dlo + i / blocks * rows.levels;
    for (int64_t j = 0; j < rows.levels; ++j) row[j] += moved[i * rows.levels + j];
    dtau[i / blocks] += turned[i];
  }
  return {grad_x, grad_lo, grad_tau};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("permutation_shares", TORCH_BOX(&khot::permutation_shares));
  m.impl("permutation_shares_backward", TORCH_BOX(&khot::permutation_shares_backward));
}
