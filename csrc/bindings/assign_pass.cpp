// khot::assign_pass for the CPU: one sweep over the rows of a two-sided assignment, shared among torch's
// threads. The schema is defined in khot/_ops.
#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// Each part of the rows has sums of its own. How many there are does not depend on the number of threads, or
// results would; and the sums of all parts are not to be much larger than the scores.
constexpr int64_t kMostParts = 16, kPart = 1 << 15;

Tensor dense(const Tensor& t, ScalarType dtype, int64_t entries, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, "khot: ", name, " must have the dtype of x");
  STD_TORCH_CHECK(t.numel() == entries, "khot: ", name, " must have ", entries, " entries");
  return torch::stable::contiguous(t);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> assign_pass(Tensor x, Tensor k, Tensor r, Tensor c,
                                                               double tau, Text cdf, double /*shape*/,
                                                               int64_t steps, double tolerance, bool slopes,
                                                               bool values) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(x.dim() == 2 && (dtype == ScalarType::Float || dtype == ScalarType::Double),
                  "khot: x must be a matrix of dtype float32 or float64");
  const int64_t m = x.size(0), n = x.size(1);
  x = torch::stable::contiguous(x);
  k = dense(k, dtype, m, "k"), r = dense(r, dtype, m, "r"), c = dense(c, dtype, n, "c");
  const Sizes rows{m}, all{values ? m : 0, n}, width{slopes ? n + 3 : 3, n};
  Tensor moved = empty(x, rows), miss = empty(x, rows), density = empty(x, rows), y = empty(x, all);
  Tensor sums = empty(x, width, ScalarType::Double);
  const AssignPass pass{find("cdf", cdf, kCdfs),
                        to_dtype(dtype),
                        n,
                        x.const_data_ptr(),
                        k.const_data_ptr(),
                        r.const_data_ptr(),
                        c.const_data_ptr(),
                        tau,
                        tolerance,
                        steps,
                        slopes,
                        moved.mutable_data_ptr(),
                        miss.mutable_data_ptr(),
                        density.mutable_data_ptr(),
                        values ? y.mutable_data_ptr() : nullptr};
  STD_TORCH_CHECK(pass.cdf == Cdf::kLogistic || pass.cdf == Cdf::kLaplace || pass.cdf == Cdf::kNormal,
                  "khot: the columns of an assignment need a cdf with full support, not '", cdf, "'");

  const int64_t size = assign_sums(n, slopes);
  const int64_t parts =
      std::max<int64_t>(1, std::min({kMostParts, m * n / kPart, 2 * m / std::max<int64_t>(1, n)}));
  std::vector<double> partial(parts * size, 0.0);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[assign_scratch(n)]);
    for (int64_t part = begin; part < end; ++part) {
      kernels().assign(pass, m * part / parts, m * (part + 1) / parts, scratch.get(),
                       partial.data() + part * size);
    }
  });
  double* const total = sums.mutable_data_ptr<double>();
  std::copy_n(partial.data(), size, total);
  for (int64_t part = 1; part < parts; ++part) {
    const double* const more = partial.data() + part * size;
    for (int64_t i = 0; i < size; ++i) total[i] += more[i];
  }
  for (int64_t i = 0; slopes && i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) total[(i + 3) * n + j] = total[(j + 3) * n + i];
  }
  return {moved, miss, density, sums, y};
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) { m.impl("assign_pass", TORCH_BOX(&khot::assign_pass)); }
