// khot::uniform, khot::order_sample and khot::tournament for the CPU: shared among torch's threads, on which the
// numbers do not depend.
#include <memory>

#include "tensors.h"

namespace khot {
namespace {

uint64_t key_of(const Tensor& seed) { return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()); }

Tensor uniform(Tensor seed, int64_t rows, int64_t n, int64_t offset) {
  Tensor out = torch::stable::new_empty(seed, std::vector<int64_t>{rows, n}, ScalarType::Double);
  double* const data = out.mutable_data_ptr<double>();
  const uint64_t key = key_of(seed);
  // long rows in parts, short ones together
  const int64_t parts = (n + kGrain - 1) / kGrain, grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n));
  torch::stable::parallel_for(0, rows * parts, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kGrain;
      kernels().uniform(key, row, offset + first, std::min(kGrain, n - first), data + row * n + first);
    }
  });
  return out;
}

// one(x, row, scratch, out) for every row of x.
template <class One>
Tensor draw_rows(const Tensor& x, const std::vector<int64_t>& batch, const One& one) {
  const int64_t n = x.size(x.dim() - 1), grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n));
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Bool);
  const Rows rows(x, batch);
  bool* const data = out.mutable_data_ptr<bool>();
  torch::stable::parallel_for(0, product(batch), grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> work(new double[scratch(n)]);
    for (int64_t row = begin; row < end; ++row) one(rows(row), row, work.get(), data + row * n);
  });
  return out;
}

Tensor order_sample(Tensor theta, Tensor k, Tensor seed) {
  const std::vector<int64_t> batch = batch_of(theta);
  const int64_t n = theta.size(theta.dim() - 1);
  const Numbers ks(k, batch);
  const uint64_t key = key_of(seed);
  return draw_rows(theta, batch, [&](const Row& x, int64_t row, double* work, bool* out) {
    kernels().order(x, n, ks(row), key, row, work, out);
  });
}

Tensor tournament(Tensor probs, Tensor seed) {
  const int64_t n = probs.size(probs.dim() - 1);
  const uint64_t key = key_of(seed);
  return draw_rows(probs, batch_of(probs), [&](const Row& x, int64_t row, double* work, bool* out) {
    kernels().tournament(x, n, key, row, work, out);
  });
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("uniform", TORCH_BOX(&khot::uniform));
  m.impl("order_sample", TORCH_BOX(&khot::order_sample));
  m.impl("tournament", TORCH_BOX(&khot::tournament));
}
