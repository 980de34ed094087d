// khot::permutation_shares and its backward for the CPU: tensors in and out, blocks of entries shared among
// torch's threads. The schemas are defined in khot/_ops/permutation_shares.py.
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

struct Shares final : ShareRows {
  Shape of;
  int64_t levels, n;
  Rows scores;
  RowScalars taus, highs, lows;
  std::optional<Rows> grads;
  char *out_data = nullptr, *grad_data = nullptr;
  int64_t row_bytes;
  double *moved = nullptr, *turned = nullptr;  // of each block

  Shares(const Tensor& x, const Tensor& hi, const Tensor& lo, const Tensor& tau)
      : of(x),
        levels(hi.size(hi.dim() - 1)),
        n(of.n),
        scores(x, of.batch),
        taus(tau, of.batch),
        highs(hi, of.with(levels)),
        lows(lo, of.with(levels)),
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

template <class Serve>
void share_blocks_out(const Shares& rows, int64_t count, const Serve& serve) {
  row_ranges(count, std::min(kShareBlock, rows.n) * rows.levels, serve);
}

Tensor permutation_shares(Tensor x, Tensor hi, Tensor lo, Tensor tau, Text cdf, double shape) {
  Shares rows(x, hi, lo, tau);
  const ShareSpec spec{spec_of(cdf, shape, rows.n), rows.levels};
  Sizes sizes = rows.of.with(rows.levels - 1);
  sizes.push_back(rows.n);
  Tensor out = empty(x, sizes);
  rows.out_data = static_cast<char*>(out.mutable_data_ptr());
  share_blocks_out(rows, rows.of.rows * share_blocks(rows.n),
                   [&](int64_t begin, int64_t end) { kernels().shares(spec, rows, begin, end, false); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> permutation_shares_backward(Tensor grad, Tensor x, Tensor hi, Tensor lo,
                                                               Tensor tau, Text cdf, double shape) {
  Shares rows(x, hi, lo, tau);
  const ShareSpec spec{spec_of(cdf, shape, rows.n), rows.levels};
  rows.grads.emplace(grad, rows.of.with(rows.levels - 1), rows.n);
  Tensor grad_x = empty(x, rows.of.sizes), grad_tau = per_row(x, rows.of);
  Tensor grad_lo = empty(x, rows.of.with(rows.levels), ScalarType::Double);
  rows.grad_data = static_cast<char*>(grad_x.mutable_data_ptr());
  const int64_t blocks = share_blocks(rows.n), count = rows.of.rows * blocks;
  std::vector<double> moved(count * rows.levels), turned(count);
  rows.moved = moved.data(), rows.turned = turned.data();
  share_blocks_out(rows, count,
                   [&](int64_t begin, int64_t end) { kernels().shares(spec, rows, begin, end, true); });
  // in the order of the blocks, whatever thread did them
  double *dlo = numbers_in(grad_lo), *dtau = numbers_in(grad_tau);
  std::fill(dlo, dlo + rows.of.rows * rows.levels, 0.0);
  std::fill(dtau, dtau + rows.of.rows, 0.0);
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
