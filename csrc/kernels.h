// What the operators (library.cpp) and the rows' kernels (one copy an instruction set) know of each other.
#pragma once

#include <cstdint>

namespace khot {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };
enum class Cdf { kLogistic, kLaplace, kNormal, kUniform, kPower };
enum class Output { kValue, kLog, kThreshold };

// Rows up to this length are solved several at once, in groups that begin at a multiple of kLanesMost.
constexpr int64_t kShort = 256;
constexpr int64_t kLanesMost = 16;

// Runs body(context, i) for every i < count, in any order and perhaps at once.
struct Parallel {
  void (*run)(int64_t count, void* context, void (*body)(void* context, int64_t i));
};

// A row of a tensor; step 0 repeats its first entry.
struct Row {
  const void* data;
  Dtype dtype;
  int64_t step;
};

struct Spec {
  Cdf cdf;
  double power;  // p of kPower
  Output output;
  int64_t n;
  const Parallel* inside;  // parallel work inside a row; null where rows already run in parallel
};

struct Threshold {
  double hi, lo;
};

// One call serves the consecutive rows [begin, end), which the getters below describe.
struct ForwardRows {
  virtual Row x(int64_t row) const = 0;
  virtual double k(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual void* out(int64_t row) const = 0;  // of x's dtype
  virtual void put(int64_t row, Threshold t) const = 0;

 protected:
  ~ForwardRows() = default;
};

struct BackwardRows {
  virtual Row x(int64_t row) const = 0;
  virtual Row y(int64_t row) const = 0;  // of float; its data are null where it is not at hand, or d/dtau is wanted
  virtual Row grad(int64_t row) const = 0;
  virtual double grad_lo(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual Threshold threshold(int64_t row) const = 0;
  virtual void* grad_x(int64_t row) const = 0;  // of x's dtype
  virtual void put(int64_t row, double grad_k, double grad_tau) const = 0;

 protected:
  ~BackwardRows() = default;
};

// Top-k in magnitude of s >= 0; see khot/_kernels/reference/selection.py.
struct Magnitude {
  double k, tau, p;
  Threshold gamma;  // the value of the pooled block
};

struct Kernels {
  const char* isa;
  void (*forward)(const Spec& spec, const ForwardRows& rows, int64_t begin, int64_t end);
  void (*backward)(const Spec& spec, const BackwardRows& rows, int64_t begin, int64_t end);
  // One row each; out, y and grad_s are of the dtype of the scores.
  void (*topk_mask)(const Row& x, int64_t n, double k, void* out);
  void (*magnitude)(const Row& s, int64_t n, Magnitude& problem, void* y);
  double (*magnitude_backward)(const Row& grad, double grad_lo, const Row& s, const Row& y, int64_t n,
                               const Magnitude& problem, void* grad_s);  // the gradient in tau
  // Uniforms of a row, for the columns first, ..., first + n - 1; see khot/_kernels/reference/philox.py.
  void (*uniform)(uint64_t seed, uint64_t row, uint64_t first, int64_t n, double* out);
  // Draws from a row; see khot/_kernels/reference/draws.py.
  void (*order)(const Row& theta, int64_t n, double k, uint64_t seed, uint64_t row, double* scratch, bool* out);
  void (*tournament)(const Row& probs, int64_t n, uint64_t seed, uint64_t row, double* scratch, bool* out);
  // Of trials with logits z: E[e^(i omega S)], with its period; P(S = k), pi and 1 - pi; covariance times u.
  double (*characteristic)(const Row& z, int64_t n, double* scratch, double* re, double* im);
  double (*inclusion)(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out);
  void (*covariance)(const Row& z, const Row& u, int64_t n, double k, double* scratch, double* result);
  double (*calibrate)(const Row& goal, int64_t n, double k, double* scratch, double* theta);
};

constexpr int kFrequencies = 26, kFrequenciesMost = 28;  // that of poisson_binomial.py, and room for whole groups
// Numbers that the kernels of a row of sampling may work in.
constexpr int64_t scratch(int64_t n) { return 16 * n + 512; }

const Kernels& baseline_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

}  // namespace khot
