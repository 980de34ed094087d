// khot::uniform for the CPU: shared among torch's threads, on which the numbers do not depend.
#include "tensors.h"

namespace khot {
namespace {

Tensor uniform(Tensor seed, int64_t rows, int64_t n, int64_t offset) {
  Tensor out = torch::stable::new_empty(seed, std::vector<int64_t>{rows, n}, ScalarType::Double);
  const uint64_t key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  double* const data = out.mutable_data_ptr<double>();
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

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) { m.impl("uniform", TORCH_BOX(&khot::uniform)); }
