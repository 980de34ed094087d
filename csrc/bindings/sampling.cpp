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
  Tensor out = empty(seed, Sizes{rows, n}, ScalarType::Double);
  double* const data = numbers_in(out);
  const uint64_t key = key_of(seed);
  // Long rows are drawn in parts and short rows together: no uniform depends on the others.
  const int64_t parts = (n + kGrain - 1) / kGrain;
  row_ranges(rows * parts, n, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kGrain;
      kernels().sampling.uniform(key, row, offset + first, std::min(kGrain, n - first),
                                 data + row * n + first);
    }
  });
  return out;
}

// Rows of logits or of probabilities, and how many of their units are selected.
struct Units {
  Shape of;
  int64_t n;
  Rows rows;
  RowScalars ks;

  Units(const Tensor& x, const Tensor& k) : of(x), n(of.n), rows(x, of.batch), ks(k, of.batch) {}
};

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
    kernels().sampling.order(entries, n, ks(row), key, row, work, out);
  });
}

std::tuple<Tensor, Tensor> pareto_sample(Tensor probs, Tensor seed, double least, double tolerance) {
  const Shape of(probs);
  const int64_t n = of.n;
  const Rows rows(probs, of.batch);
  const uint64_t key = key_of(seed);
  Tensor sample = empty(probs, of.sizes, ScalarType::Bool);
  Tensor drawn = empty(probs, Sizes{}, ScalarType::Bool);
  bool* const out = sample.mutable_data_ptr<bool>();
  std::atomic<bool> all{true};
  each_group(of.rows, n, rows_together(n), [&](int64_t first, int64_t count, double* work) {
    if (!all) return;
    Row group[kRowsTogether];
    for (int64_t j = 0; j < count; ++j) group[j] = rows(first + j);
    const std::unique_ptr<bool[]> chosen(new bool[count * (n + 1)]);
    if (!kernels().sampling.pareto(group, count, n, least, tolerance, key, first, work, chosen.get())) {
      all = false;
      return;
    }
    // without the phantoms
    for (int64_t j = 0; j < count; ++j) std::copy_n(&chosen[j * (n + 1)], n, out + (first + j) * n);
  });
  *drawn.mutable_data_ptr<bool>() = all;
  return {torch::stable::to(sample, probs.scalar_type()), drawn};
}

Tensor tournament(Tensor probs, Tensor seed) {
  const uint64_t key = key_of(seed);
  return sampled(probs, [&](const Row& entries, int64_t row, int64_t n, double* work, bool* out) {
    kernels().sampling.tournament(entries, n, key, row, work, out);
  });
}

Tensor random_tournament(Tensor probs, Tensor order, Tensor seed) {
  const uint64_t shuffle = key_of(order), key = key_of(seed);
  return sampled(probs, [&](const Row& entries, int64_t row, int64_t n, double* work, bool* out) {
    kernels().sampling.random_tournament(entries, n, shuffle, key, row, work, out);
  });
}

Tensor trials(Tensor z, Tensor k, Tensor which, Tensor seed) {
  const Units from(z, k);
  const int64_t n = from.n, draws = which.numel();
  const uint64_t key = key_of(seed);
  const Tensor dense = torch::stable::contiguous(which);
  const int64_t* const design = dense.const_data_ptr<int64_t>();
  Tensor chosen = empty(z, Sizes{draws, n}, ScalarType::Bool);
  bool* const out = chosen.mutable_data_ptr<bool>();
  each_row(draws, n, [&](int64_t row, double* work) {
    const int64_t of = design[row];
    kernels().sampling.trials(from.rows(of), n, from.ks(of), key, row, work, out + row * n);
  });
  return chosen;
}

std::tuple<Tensor, Tensor, Tensor> characteristic(Tensor z) {
  const Shape of(z);
  const int64_t n = of.n, m = kFrequencies;
  const Rows rows(z, of.batch);
  Tensor period = empty(z, of.batch), re = empty(z, of.with(m)), im = empty(z, of.with(m));
  double *const N = numbers_in(period), *const x = numbers_in(re), *const y = numbers_in(im);
  each_row(of.rows, n, [&](int64_t row, double* work) {
    N[row] = kernels().sampling.characteristic(rows(row), n, work, x + row * m, y + row * m);
  });
  return {period, re, im};
}

std::tuple<Tensor, Tensor, Tensor> inclusion(Tensor z, Tensor k) {
  const Units from(z, k);
  const int64_t n = from.n;
  Tensor prob = empty(z, from.of.batch), pi = empty(z, from.of.sizes), out = empty(z, from.of.sizes);
  double *const total = numbers_in(prob), *const x = numbers_in(pi), *const y = numbers_in(out);
  each_row(from.of.rows, n, [&](int64_t row, double* work) {
    total[row] =
        kernels().sampling.inclusion(from.rows(row), n, from.ks(row), work, x + row * n, y + row * n);
  });
  return {prob, pi, out};
}

Tensor covariance(Tensor z, Tensor k, Tensor u) {
  const Units from(z, k);
  const int64_t n = from.n;
  const Rows vectors(u, from.of.batch);
  Tensor result = empty(z, from.of.sizes);
  double* const out = numbers_in(result);
  each_row(from.of.rows, n, [&](int64_t row, double* work) {
    kernels().sampling.covariance(from.rows(row), vectors(row), n, from.ks(row), work, out + row * n);
  });
  return result;
}

// Calibrates groups of rows with `kernel`, which may write the numbers of iterations.
void calibrate_groups(decltype(SamplingKernels::calibrate) kernel, const Units& goals, double* theta,
                      double* iterations) {
  const int64_t n = goals.n;
  each_group(goals.of.rows, n, rows_together(n), [&](int64_t first, int64_t count, double* work) {
    Row row[kRowsTogether];
    double k[kRowsTogether];
    for (int64_t j = 0; j < count; ++j) row[j] = goals.rows(first + j), k[j] = goals.ks(first + j);
    kernel(row, k, count, n, work, theta + first * n, iterations == nullptr ? nullptr : iterations + first);
  });
}

std::tuple<Tensor, Tensor> calibrate(Tensor goal, Tensor k) {
  const Units goals(goal, k);
  Tensor theta = empty(goal, goals.of.sizes), iterations = empty(goal, goals.of.batch);
  calibrate_groups(kernels().sampling.calibrate, goals, numbers_in(theta), numbers_in(iterations));
  return {theta, iterations};
}

std::tuple<Tensor, Tensor> order_inclusion(Tensor z, Tensor k) {
  const Units from(z, k);
  const int64_t n = from.n;
  Tensor pi = empty(z, from.of.sizes), out = empty(z, from.of.sizes);
  double *const x = numbers_in(pi), *const y = numbers_in(out);
  each_row(from.of.rows, n, [&](int64_t row, double* work) {
    kernels().sampling.order_inclusion(from.rows(row), n, from.ks(row), work, x + row * n, y + row * n);
  });
  return {pi, out};
}

Tensor order_calibrate(Tensor goal, Tensor k) {
  const Units goals(goal, k);
  Tensor theta = empty(goal, goals.of.sizes);
  calibrate_groups(kernels().sampling.order_calibrate, goals, numbers_in(theta), nullptr);
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
