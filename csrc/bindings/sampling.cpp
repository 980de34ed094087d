// The operators of sampling for the CPU: tensors in and out, rows shared among torch's threads. The schemas
// are defined in khot/_ops, the reference kernels in khot/_kernels/reference (philox.py, draws.py,
// halving.py, poisson_binomial.py, fixed_point.py, order_sampling.py).
#include <atomic>
#include <memory>
#include <tuple>

#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

uint64_t key_of(const Tensor& seed) { return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()); }

Tensor uniform(Tensor seed, int64_t rows, int64_t n, int64_t offset) {
  Tensor out = empty(seed, std::vector<int64_t>{rows, n}, ScalarType::Double);
  double* const data = numbers_in(out);
  const uint64_t key = key_of(seed);
  // Long rows are drawn in parts and short rows together: no uniform depends on the others.
  const int64_t parts = (n + kGrain - 1) / kGrain;
  row_ranges(rows * parts, n, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kGrain;
      sampling_kernels().uniform(key, row, offset + first, std::min(kGrain, n - first),
                                 data + row * n + first);
    }
  });
  return out;
}

// some(first, count, scratch) for groups of so many rows. They do not depend on the number of threads.
template <class Some>
void each_group(int64_t rows, int64_t n, int64_t together, const Some& some) {
  row_ranges((rows + together - 1) / together, together * n, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> work(new double[scratch_size(n)]);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * together;
      some(first, std::min(together, rows - first), work.get());
    }
  });
}

// one(row, scratch) for every row.
template <class One>
void each_row(int64_t rows, int64_t n, const One& one) {
  each_group(rows, n, 1, [&](int64_t row, int64_t, double* work) { one(row, work); });
}

// Samples of these rows: one(entries, row, n, scratch, out) writes one of them.
template <class One>
Tensor sampled(const Tensor& x, const One& one) {
  const Shape of(x);
  const Rows rows(x, of.batch);
  Tensor chosen = empty(x, of.sizes, ScalarType::Bool);
  bool* const out = chosen.mutable_data_ptr<bool>();
  each_row(of.rows, of.n,
           [&](int64_t row, double* work) { one(rows(row), row, of.n, work, out + row * of.n); });
  return chosen;
}

Tensor order_sample(Tensor theta, Tensor k, Tensor seed) {
  const RowScalars ks(k, Shape(theta).batch);
  const uint64_t key = key_of(seed);
  return sampled(theta, [&](const Row& entries, int64_t row, int64_t n, double* work, bool* out) {
    sampling_kernels().order(entries, n, ks(row), key, row, work, out);
  });
}

// Writes `value` as 0 or 1 of the given dtype.
void put(Dtype dtype, void* out, int64_t i, bool value) {
  switch (dtype) {
    case Dtype::kFloat:
      static_cast<float*>(out)[i] = value;
      break;
    case Dtype::kDouble:
      static_cast<double*>(out)[i] = value;
      break;
    case Dtype::kHalf:
      static_cast<uint16_t*>(out)[i] = value ? 0x3c00 : 0;
      break;
    case Dtype::kBFloat16:
      static_cast<uint16_t*>(out)[i] = value ? 0x3f80 : 0;
  }
}

std::tuple<Tensor, Tensor> pareto_sample(Tensor probs, Tensor seed, double least, double tolerance) {
  const Shape of(probs);
  const int64_t n = of.n;
  const Rows rows(probs, of.batch);
  const uint64_t key = key_of(seed);
  Tensor sample = empty(probs, of.sizes);
  Tensor drawn = empty(probs, std::vector<int64_t>{}, ScalarType::Bool);
  void* const out = sample.mutable_data_ptr();
  std::atomic<bool> all{true};
  each_group(of.rows, n, rows_together(n), [&](int64_t first, int64_t count, double* work) {
    if (!all) return;
    Row group[kRowsTogether];
    for (int64_t j = 0; j < count; ++j) group[j] = rows(first + j);
    const std::unique_ptr<bool[]> chosen(new bool[count * (n + 1)]);
    if (!sampling_kernels().pareto(group, count, n, least, tolerance, key, first, work, chosen.get())) {
      all = false;
      return;
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < n; ++i) put(rows.dtype(), out, (first + j) * n + i, chosen[j * (n + 1) + i]);
    }
  });
  *drawn.mutable_data_ptr<bool>() = all;
  return {sample, drawn};
}

Tensor tournament(Tensor probs, Tensor seed) {
  const uint64_t key = key_of(seed);
  return sampled(probs, [&](const Row& entries, int64_t row, int64_t n, double* work, bool* out) {
    sampling_kernels().tournament(entries, n, key, row, work, out);
  });
}

Tensor random_tournament(Tensor probs, Tensor order, Tensor seed) {
  const uint64_t shuffle = key_of(order), key = key_of(seed);
  return sampled(probs, [&](const Row& entries, int64_t row, int64_t n, double* work, bool* out) {
    sampling_kernels().random_tournament(entries, n, shuffle, key, row, work, out);
  });
}

Tensor trials(Tensor z, Tensor k, Tensor which, Tensor seed) {
  const Shape of(z);
  const int64_t n = of.n, draws = which.numel();
  const Rows rows(z, of.batch);
  const RowScalars ks(k, of.batch);
  const uint64_t key = key_of(seed);
  const Tensor dense = torch::stable::contiguous(which);
  const int64_t* const design = dense.const_data_ptr<int64_t>();
  Tensor chosen = empty(z, std::vector<int64_t>{draws, n}, ScalarType::Bool);
  bool* const out = chosen.mutable_data_ptr<bool>();
  each_row(draws, n, [&](int64_t row, double* work) {
    sampling_kernels().trials(rows(design[row]), n, ks(design[row]), key, row, work, out + row * n);
  });
  return chosen;
}

std::tuple<Tensor, Tensor, Tensor> characteristic(Tensor z) {
  const Shape of(z);
  const int64_t n = of.n;
  const Rows rows(z, of.batch);
  Tensor period = empty(z, of.batch), re = empty(z, of.with(kFrequencies));
  Tensor im = empty(z, of.with(kFrequencies));
  double *const N = numbers_in(period), *const x = numbers_in(re);
  double* const y = numbers_in(im);
  each_row(of.rows, n, [&](int64_t row, double* work) {
    N[row] =
        sampling_kernels().characteristic(rows(row), n, work, x + row * kFrequencies, y + row * kFrequencies);
  });
  return {period, re, im};
}

std::tuple<Tensor, Tensor, Tensor> inclusion(Tensor z, Tensor k) {
  const Shape of(z);
  const int64_t n = of.n;
  const Rows rows(z, of.batch);
  const RowScalars ks(k, of.batch);
  Tensor prob = empty(z, of.batch), pi = empty(z, of.sizes);
  Tensor out = empty(z, of.sizes);
  double *const total = numbers_in(prob), *const x = numbers_in(pi);
  double* const y = numbers_in(out);
  each_row(of.rows, n, [&](int64_t row, double* work) {
    total[row] = sampling_kernels().inclusion(rows(row), n, ks(row), work, x + row * n, y + row * n);
  });
  return {prob, pi, out};
}

Tensor covariance(Tensor z, Tensor k, Tensor u) {
  const Shape of(z);
  const int64_t n = of.n;
  const Rows rows(z, of.batch), vectors(u, of.batch);
  const RowScalars ks(k, of.batch);
  Tensor result = empty(z, of.sizes);
  double* const out = numbers_in(result);
  each_row(of.rows, n, [&](int64_t row, double* work) {
    sampling_kernels().covariance(rows(row), vectors(row), n, ks(row), work, out + row * n);
  });
  return result;
}

// The rows of a group and their sizes.
struct Goals {
  Row row[kRowsTogether];
  double k[kRowsTogether];

  Goals(const Rows& rows, const RowScalars& ks, int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; ++j) row[j] = rows(first + j), k[j] = ks(first + j);
  }
};

std::tuple<Tensor, Tensor> calibrate(Tensor goal, Tensor k) {
  const Shape of(goal);
  const int64_t n = of.n;
  const Rows rows(goal, of.batch);
  const RowScalars ks(k, of.batch);
  Tensor theta = empty(goal, of.sizes), iterations = empty(goal, of.batch);
  double *const out = numbers_in(theta), *const count = numbers_in(iterations);
  each_group(of.rows, n, rows_together(n), [&](int64_t first, int64_t some, double* work) {
    const Goals goals(rows, ks, first, some);
    sampling_kernels().calibrate(goals.row, goals.k, some, n, work, out + first * n, count + first);
  });
  return {theta, iterations};
}

std::tuple<Tensor, Tensor> order_inclusion(Tensor z, Tensor k) {
  const Shape of(z);
  const int64_t n = of.n;
  const Rows rows(z, of.batch);
  const RowScalars ks(k, of.batch);
  Tensor pi = empty(z, of.sizes), out = empty(z, of.sizes);
  double *const x = numbers_in(pi), *const y = numbers_in(out);
  each_row(of.rows, n, [&](int64_t row, double* work) {
    sampling_kernels().order_inclusion(rows(row), n, ks(row), work, x + row * n, y + row * n);
  });
  return {pi, out};
}

Tensor order_calibrate(Tensor goal, Tensor k) {
  const Shape of(goal);
  const int64_t n = of.n;
  const Rows rows(goal, of.batch);
  const RowScalars ks(k, of.batch);
  Tensor theta = empty(goal, of.sizes);
  double* const out = numbers_in(theta);
  each_group(of.rows, n, rows_together(n), [&](int64_t first, int64_t some, double* work) {
    const Goals goals(rows, ks, first, some);
    sampling_kernels().order_calibrate(goals.row, goals.k, some, n, work, out + first * n, nullptr);
  });
  return theta;
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("uniform", TORCH_BOX(&khot::uniform));
  m.impl("order_sample", TORCH_BOX(&khot::order_sample));
  m.impl("pareto_sample", TORCH_BOX(&khot::pareto_sample));
  m.impl("tournament", TORCH_BOX(&khot::tournament));
  m.impl("random_tournament", TORCH_BOX(&khot::random_tournament));
  m.impl("trials", TORCH_BOX(&khot::trials));
  m.impl("characteristic", TORCH_BOX(&khot::characteristic));
  m.impl("inclusion", TORCH_BOX(&khot::inclusion));
  m.impl("covariance", TORCH_BOX(&khot::covariance));
  m.impl("calibrate", TORCH_BOX(&khot::calibrate));
  m.impl("order_inclusion", TORCH_BOX(&khot::order_inclusion));
  m.impl("order_calibrate", TORCH_BOX(&khot::order_calibrate));
}
