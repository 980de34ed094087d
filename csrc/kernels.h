// The interface between the bindings, which know tensors, and the kernels, which know rows. There is one copy
// of the kernels per instruction set, and `Kernels` is the table of its entry points.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace khot {

// A subnormal tau counts as the least normal number: 1/tau would be infinite. This changes only rows whose
// scores differ by less than 1e-305. It is known by its bits, as it may compare as 0 (FlushSubnormals).
inline double invertible(double tau) {
  int64_t bits;
  std::memcpy(&bits, &tau, 8);
  return bits > 0 && bits < int64_t{1} << 52 ? std::numeric_limits<double>::min() : tau;
}

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };
enum class Cdf { kLogistic, kLaplace, kNormal, kUniform, kPower };
enum class Output { kValue, kLog, kThreshold };

// The names under which the operators are asked for a CDF or an output. A name that is not here is an error,
// and the bindings raise it before any work is shared among threads.
template <class Choice>
struct Named {
  const char* name;
  Choice choice;
};
constexpr Named<Cdf> kCdfs[] = {{"logistic", Cdf::kLogistic},
                                {"laplace", Cdf::kLaplace},
                                {"normal", Cdf::kNormal},
                                {"uniform", Cdf::kUniform},
                                {"power", Cdf::kPower}};
constexpr Named<Output> kOutputs[] = {
    {"y", Output::kValue}, {"log", Output::kLog}, {"threshold", Output::kThreshold}};

// Rows up to this length are solved several at once, in groups that begin at a multiple of kMostLanes.
constexpr int64_t kShortRow = 256;
constexpr int64_t kMostLanes = 16;

// Runs body(context, i) for every i < count, in any order and perhaps at the same time.
struct Parallel {
  void (*run)(int64_t count, void* context, void (*body)(void* context, int64_t i));
};

// One row of a tensor. With step 0 its first entry is repeated, as in an expanded tensor.
struct Row {
  const void* data;
  Dtype dtype;
  int64_t step;
};

struct Spec {
  Cdf cdf;
  double power;  // p of Cdf::kPower
  Output output;
  int64_t n;
  const Parallel* inside;  // how one row is shared among threads; null where the rows already run in parallel
};

struct Threshold {
  double hi, lo;
};

// What the forward kernel reads and writes, row by row. One call serves the consecutive rows [begin, end). No
// interface of this file owns what implements it.
struct ForwardRows {
  virtual Row x(int64_t row) const = 0;
  virtual double k(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual void* out(int64_t row) const = 0;  // of x's dtype
  virtual void put(int64_t row, Threshold t) const = 0;
};

struct BackwardRows {
  virtual Row x(int64_t row) const = 0;
  // In float32. Its data are null where y was not given or dL/dtau is wanted.
  virtual Row y(int64_t row) const = 0;
  virtual Row grad(int64_t row) const = 0;
  virtual double grad_lo(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual Threshold threshold(int64_t row) const = 0;
  virtual void* grad_x(int64_t row) const = 0;  // of x's dtype
  virtual bool keeps_numbers() const = 0;       // whether put() does anything
  virtual void put(int64_t row, double grad_k, double grad_tau) const = 0;
};

// The soft budget (khot/_kernels/reference/soft_budget.py): sum w F((x - t a)/tau) = B with a = 1, or a = w
// by value.
struct BudgetSpec : Spec {
  bool by_value, at_most;
  // A budget that differs from the sum of the costs by so much, relative to it, equals it. 0 for counts.
  double slack;
};

struct BudgetRows : ForwardRows {  // k() is the budget
  virtual Row cost(int64_t row) const = 0;
};

struct BudgetBackwardRows : BackwardRows {  // y() is not asked for, and grad_k is that of the budget
  virtual Row cost(int64_t row) const = 0;
  virtual void* grad_cost(int64_t row) const = 0;  // of the dtype of the costs
};

// The soft count at `levels` levels of each row (khot/_kernels/reference/soft_count.py).
struct CountSpec : Spec {
  int64_t levels;
  bool centred;  // F is shifted to its median, so that a score counts itself as 1/2
};

struct CountRows {
  virtual Row x(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual double level(int64_t row, int64_t j) const = 0;
  virtual double grad(int64_t row, int64_t j) const = 0;  // backward only, as the two below
  virtual void* grad_x(int64_t row) const = 0;            // of x's dtype
  virtual void put_tau(int64_t row, double grad_tau) const = 0;
  virtual void put(int64_t row, int64_t j, double result) const = 0;  // the count, or dL/dlevel
};

// The Fenchel-Young losses of rows of which the thresholds are known, and their gradients
// (khot/_kernels/reference/fenchel_young.py).
struct LossRows {
  virtual Row x(int64_t row) const = 0;
  virtual Row target(int64_t row) const = 0;
  virtual double k(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual Threshold threshold(int64_t row) const = 0;
  virtual double share(int64_t row) const = 0;  // backward only, as the three below
  virtual double grad(int64_t row) const = 0;
  virtual double loss(int64_t row) const = 0;
  virtual void* grad_x(int64_t row) const = 0;  // of x's dtype
  virtual void put(int64_t row, double loss, double share) const = 0;
  virtual void put_tau(int64_t row, double grad_tau) const = 0;
};

// What each entry has of the places between `levels` falling thresholds
// (khot/_kernels/reference/permutation.py), computed in blocks of entries.
struct ShareSpec : Spec {
  int64_t levels;  // the ends, at +inf and -inf, included
};
constexpr int64_t kShareBlock = 512;
constexpr int64_t share_blocks(int64_t n) { return (n + kShareBlock - 1) / kShareBlock; }

struct ShareRows {
  virtual Row x(int64_t row) const = 0;
  virtual double tau(int64_t row) const = 0;
  virtual Threshold level(int64_t row, int64_t j) const = 0;
  virtual void* out(int64_t row, int64_t place) const = 0;  // of x's dtype
  virtual Row grad(int64_t row, int64_t place) const = 0;   // backward only, as the rest
  virtual void* grad_x(int64_t row) const = 0;              // of x's dtype
  virtual void put(int64_t block, int64_t j, double grad_level) const = 0;
  virtual void put_tau(int64_t block, double grad_tau) const = 0;
};

// Top-k in magnitude of s >= 0, or of |x| with the signs of x. The formulas are explained in
// khot/_kernels/reference/magnitude.py.
struct MagnitudeSpec {
  double p;
  bool is_signed;  // the rows are x, y has its signs, and the gradients are those of x
  int64_t n;
  const Parallel* inside;
};

struct MagnitudeBackwardRows : BackwardRows {  // y() has x's dtype, and gamma is the threshold
  virtual double k(int64_t row) const = 0;
};

struct MaskRows {
  virtual Row x(int64_t row) const = 0;
  virtual double k(int64_t row) const = 0;
  virtual void* out(int64_t row) const = 0;  // of x's dtype
};

// The k largest entries with their indices (khot/_kernels/reference/topk.py).
struct TopKSpec {
  int64_t n, k;
  bool largest, sorted;
};

struct TopKRows {
  virtual Row x(int64_t row) const = 0;
  virtual void* values(int64_t row) const = 0;  // of x's dtype
  virtual int64_t* indices(int64_t row) const = 0;
};

// One sweep over the rows of a two-sided assignment (khot/_kernels/reference/assign_pass.py). x, k, r, c and
// what is written are of one dtype, kFloat or kDouble, and contiguous. `sums` are in double.
struct AssignPass {
  Cdf cdf;
  Dtype dtype;
  int64_t n;
  const void *x, *k, *r, *c;  // (m, n), m, m and n entries; an r of NaN is not known
  double tau, tolerance;
  int64_t steps;                         // how often the threshold of a row may move
  bool slopes;                           // whether the n x n part of the sums is wanted
  void *r_out, *miss, *density, *value;  // m entries each, but (m, n) of value, which is null if not wanted
};
// In doubles: the sums are Σ y, Σ f, Σ f miss/Σ_j f and, if slopes are wanted, Σ f f^T/Σ_j f above its
// diagonal.
constexpr int64_t assign_sums(int64_t n, bool slopes) { return (slopes ? n + 3 : 3) * n; }
constexpr int64_t assign_scratch(int64_t n) { return 39 * (n + 16) + 16; }

// Rows of at most kFewUnits units are calibrated kRowsTogether at a time, and longer ones one by one.
constexpr int64_t kFewUnits = 16, kRowsTogether = 8;
constexpr int64_t rows_together(int64_t n) { return n <= kFewUnits ? kRowsTogether : 1; }

// The kernels of sampling, one row per call, but for the ones that calibrate.
struct SamplingKernels {
  // The uniforms of one row in the columns first, ..., first + n - 1 (khot/_kernels/reference/philox.py).
  void (*uniform)(uint64_t seed, uint64_t row, uint64_t first, int64_t n, double* out);
  // Draws from one row (khot/_kernels/reference/draws.py).
  void (*order)(const Row& theta, int64_t n, double k, uint64_t seed, uint64_t row, double* scratch,
                bool* out);
  // Of `count` rows, at most rows_together(n), from row `first` on, n + 1 entries of out for each.
  bool (*pareto)(const Row* probs, int64_t count, int64_t n, double least, double tolerance, uint64_t seed,
                 uint64_t first, double* scratch, bool* out);
  void (*tournament)(const Row& probs, int64_t n, uint64_t seed, uint64_t row, double* scratch, bool* out);
  void (*random_tournament)(const Row& probs, int64_t n, uint64_t order, uint64_t seed, uint64_t row,
                            double* scratch, bool* out);
  // k of the units, as independent trials with logits z given their sum (khot/_kernels/reference/halving.py).
  void (*trials)(const Row& z, int64_t n, double k, uint64_t seed, uint64_t row, double* scratch, bool* out);
  // Of independent trials with logits z and their sum S: E[e^(i omega S)], returning the period; P(S = k), pi
  // and 1 - pi; the covariance times u; and the logits of at most rows_together(n) rows that have given
  // inclusion probabilities, and the numbers of iterations (khot/_kernels/reference/poisson_binomial.py and
  // fixed_point.py).
  double (*characteristic)(const Row& z, int64_t n, double* scratch, double* re, double* im);
  double (*inclusion)(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out);
  void (*covariance)(const Row& z, const Row& u, int64_t n, double k, double* scratch, double* result);
  void (*calibrate)(const Row* goals, const double* k, int64_t count, int64_t n, double* scratch,
                    double* theta, double* iterations);
  // Of order sampling: pi and 1 - pi, and the parameters that have given inclusion probabilities
  // (khot/_kernels/reference/order_sampling.py).
  void (*order_inclusion)(const Row& z, int64_t n, double k, double* scratch, double* pi, double* out);
  void (*order_calibrate)(const Row* goals, const double* k, int64_t count, int64_t n, double* scratch,
                          double* theta, double* iterations);
};

struct Kernels {
  const char* isa;
  void (*forward)(const Spec& spec, const ForwardRows& rows, int64_t begin, int64_t end);
  void (*backward)(const Spec& spec, const BackwardRows& rows, int64_t begin, int64_t end);
  void (*budget)(const BudgetSpec& spec, const BudgetRows& rows, int64_t begin, int64_t end);
  void (*budget_backward)(const BudgetSpec& spec, const BudgetBackwardRows& rows, int64_t begin, int64_t end);
  void (*soft_count)(const CountSpec& spec, const CountRows& rows, int64_t begin, int64_t end);
  void (*soft_count_backward)(const CountSpec& spec, const CountRows& rows, int64_t begin, int64_t end);
  void (*fenchel_young)(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end);
  void (*fenchel_young_backward)(const Spec& spec, const LossRows& rows, int64_t begin, int64_t end);
  // The blocks [begin, end) of all rows: the shares, or their gradients.
  void (*shares)(const ShareSpec& spec, const ShareRows& rows, int64_t begin, int64_t end, bool backward);
  // Adds the sums of the rows [begin, end).
  void (*assign)(const AssignPass& pass, int64_t begin, int64_t end, double* scratch, double* sums);
  void (*topk_mask)(const MaskRows& rows, int64_t n, int64_t begin, int64_t end);
  // Of so many entries those under the mask, and `fill`, 0 or infinite, in the place of the others.
  void (*masked)(Dtype dtype, const void* x, const bool* mask, int64_t count, double fill, void* out);
  // Copies `count` columns of n floats, of a matrix whose rows are `step` apart, to rows one behind the
  // other, or with `back` these to the columns. There has to be room for one more row.
  void (*turn)(float* matrix, int64_t step, int64_t n, int64_t count, float* rows, bool back);
  void (*topk)(const TopKSpec& spec, const TopKRows& rows, int64_t begin, int64_t end);
  // The m entries of one row of the places k, which count from 1 for the largest. out has the row's dtype.
  void (*order_statistics)(const Row& x, int64_t n, const double* k, int64_t m, void* out);
  // The m entries of one row up to which the weights sum to these levels of all of them.
  void (*weighted_quantiles)(const Row& x, const Row& weights, int64_t n, const double* levels, int64_t m,
                             void* out);
  // rows.put() takes gamma.
  void (*magnitude)(const MagnitudeSpec& spec, const ForwardRows& rows, int64_t begin, int64_t end);
  void (*magnitude_backward)(const MagnitudeSpec& spec, const MagnitudeBackwardRows& rows, int64_t begin,
                             int64_t end);
  SamplingKernels sampling;
};

// The number of frequencies in poisson_binomial.py, and that number rounded up to whole groups.
constexpr int kFrequencies = 26, kMostFrequencies = 28;
// How many doubles a sampling kernel may use as scratch space for a row of n entries.
constexpr int64_t scratch_size(int64_t n) { return 20 * n + 512; }

// What khot._eager takes from khot._C.
struct Served {
  const Kernels& kernels;
  // The soft top-k of so many rows, which are shared among torch's threads, and its gradients.
  void (*soft_topk)(const Spec& spec, const ForwardRows& rows, int64_t count);
  void (*soft_topk_backward)(const Spec& spec, const BackwardRows& rows, int64_t count);
  // The same of the soft count.
  void (*soft_count)(const CountSpec& spec, const CountRows& rows, int64_t count);
  void (*soft_count_backward)(const CountSpec& spec, const CountRows& rows, int64_t count);
  // The k largest entries of so many rows.
  void (*topk)(const TopKSpec& spec, const TopKRows& rows, int64_t count);
};

// The copies, of which x86-64 has all and other architectures the first.
namespace baseline {
const Kernels& kernels();
}  // namespace baseline
namespace avx2 {
const Kernels& kernels();
}  // namespace avx2
namespace avx512 {
const Kernels& kernels();
}  // namespace avx512

// The kernels of the best instruction set that the processor has and the environment variable KHOT_KERNELS
// allows.
const Kernels& kernels();

// Raises an error for a CDF that the calling switch does not handle. Names are checked in the bindings, so
// this is reached only when a CDF was added to the enumeration and forgotten in that switch.
[[noreturn]] void unknown_cdf(Cdf cdf);

}  // namespace khot
