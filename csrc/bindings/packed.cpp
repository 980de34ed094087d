// khot::packed_soft_topk, its backward and khot::packed_topk_mask for the CPU: rows of different lengths,
// which lie one behind the other in one tensor, row i from offsets[i] to offsets[i + 1].
//
// Rows are sorted by their lengths. The kernels know rows of one length, wherever they lie, so that those of
// one length are a run, which they serve without a copy. What is left of short rows, after as many as fill
// the lanes of a vector, goes forward in mixed runs: copied side by side, with -inf behind the shorter ones.
// No result depends on the number of threads. What is wrong with offsets, or with the k of a row without
// entries, is said by khot/_core/packed.py, which `refused` asks to.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/names.h"
#include "bindings/tensors.h"
#include "bindings/threads.h"

namespace khot {
namespace {

// The rows from begin to end in the order of their lengths, served as rows of n entries.
struct Run {
  int64_t begin, end, n;
  bool mixed;
};

// Packed rows, and the order of their lengths.
class Packed {
 public:
  explicit Packed(const Tensor& offsets) : starts_(offsets.size(0)) {
    const Tensor dense = torch::stable::contiguous(offsets);
    const auto read = [&](const auto* from) { std::copy(from, from + starts_.size(), starts_.begin()); };
    if (offsets.scalar_type() == ScalarType::Int) {
      read(dense.const_data_ptr<int32_t>());
    } else {
      read(dense.const_data_ptr<int64_t>());
    }
  }

  // Whether the rows cover so many values.
  bool cover(int64_t count) const {
    return starts_.front() == 0 && starts_.back() == count && std::is_sorted(starts_.begin(), starts_.end());
  }

  // Sorts the rows, but for those that serve(row, start, length) serves as they come.
  template <class Serve>
  void sort(const Serve& serve) {
    std::vector<int64_t> left;
    left.reserve(rows());
    int64_t longest = 0;
    for (int64_t row = 0; row < rows(); ++row) {
      const int64_t n = length_of(row);
      if (serve(row, starts_[row], n)) continue;
      left.push_back(row);
      longest = std::max(longest, n);
    }
    const int64_t count = static_cast<int64_t>(left.size());
    if (longest > 4 * count + 1024) {
      std::stable_sort(left.begin(), left.end(),
                       [&](int64_t a, int64_t b) { return length_of(a) < length_of(b); });
      order_ = std::move(left);
      return;
    }
    std::vector<int64_t> place(longest + 2);  // by counting, as the lengths are not many more than the rows
    for (int64_t row : left) ++place[length_of(row) + 1];
    std::partial_sum(place.begin(), place.end(), place.begin());
    order_.resize(count);
    for (int64_t row : left) order_[place[length_of(row)]++] = row;
  }

  int64_t rows() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t row(int64_t i) const { return order_[i]; }  // of the i-th in the order
  int64_t start(int64_t i) const { return starts_[order_[i]]; }
  int64_t length(int64_t i) const { return starts_[order_[i] + 1] - start(i); }

  // Runs of the rows in the order; `mixed` if those may be.
  std::vector<Run> runs(bool mixed) const {
    std::vector<Run> found;
    const int64_t count = static_cast<int64_t>(order_.size());
    for (int64_t i = 0; i < count;) {
      const int64_t n = length(i);
      int64_t end = i + 1;
      while (end < count && length(end) == n) ++end;
      const bool short_rows = mixed && n <= kShortRow && end < count;
      const int64_t whole = end - (short_rows ? (end - i) % kMostLanes : 0);
      if (whole > i) found.push_back({i, whole, n, false});
      if (whole < end) {
        // fewer rows than lanes take as long one by one
        const int64_t last = whole + kMostLanes - 1;
        const bool fill = last < count && length(last) <= kShortRow;
        found.push_back(fill ? Run{whole, last + 1, length(last), true} : Run{whole, end, n, false});
      }
      i = found.back().end;
    }
    return found;
  }

 private:
  int64_t length_of(int64_t row) const { return starts_[row + 1] - starts_[row]; }

  std::vector<int64_t> starts_, order_;
};

// Packed values of a dtype.
struct Values {
  const char* data;
  Dtype dtype;
  explicit Values(const Tensor& t)
      : data(static_cast<const char*>(t.const_data_ptr())), dtype(to_dtype(t.scalar_type())) {}
  int64_t bytes() const { return size_of(dtype); }
  const char* at(int64_t start) const { return data + start * bytes(); }
};

// Places for the rows of a mixed run, or for their results.
class Copies {
 public:
  Copies(const Run& run, const Values& values)
      : values_(values), bytes_(run.n * values.bytes()), room_(kMostLanes * bytes_) {}

  char* at(int64_t j) { return room_.data() + j * bytes_; }
  void take(int64_t j, int64_t start, int64_t length) {
    const int64_t own = length * values_.bytes();
    std::memcpy(at(j), values_.at(start), own);
    if (values_.dtype == Dtype::kFloat) {
      fill(j, own, -std::numeric_limits<float>::infinity());
    } else {
      fill(j, own, static_cast<uint16_t>(values_.dtype == Dtype::kHalf ? 0xFC00 : 0xFF80));
    }
  }

 private:
  template <class T>
  void fill(int64_t j, int64_t from, T value) {
    std::fill(reinterpret_cast<T*>(at(j) + from), reinterpret_cast<T*>(at(j) + bytes_), value);
  }

  const Values& values_;
  int64_t bytes_;
  std::vector<char> room_;
};

// serve(run) for all runs, in parallel; what rows are long enough to be shared themselves comes one by one.
template <class Serve>
void each(const std::vector<Run>& runs, const Serve& serve) {
  std::vector<Run> parts, shared;
  for (const Run& run : runs) {
    if (run.n >= kLongRow) {
      shared.push_back(run);
      continue;
    }
    const int64_t rows = std::max<int64_t>(1, kGrain / run.n / kMostLanes) * kMostLanes;
    for (int64_t i = run.begin; i < run.end; i += rows) {
      parts.push_back({i, std::min(run.end, i + rows), run.n, run.mixed});
    }
  }
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) serve(parts[begin]);
  });
  for (const Run& run : shared) serve(run);
}

struct Scores final : ForwardRows {
  const Packed& packed;
  const Values& values;
  const RowScalars &ks, &taus;
  char* results;
  double *hi, *lo;
  Copies *copies = nullptr, *made = nullptr;
  int64_t first = 0;

  Scores(const Packed& packed, const Values& values, const RowScalars& ks, const RowScalars& taus,
         char* results, double* hi, double* lo)
      : packed(packed), values(values), ks(ks), taus(taus), results(results), hi(hi), lo(lo) {}
  Row x(int64_t i) const override {
    return {copies ? copies->at(i - first) : values.at(packed.start(i)), values.dtype, 1};
  }
  double k(int64_t i) const override { return ks(packed.row(i)); }
  double tau(int64_t i) const override { return invertible(taus(packed.row(i))); }
  void* out(int64_t i) const override { return made ? made->at(i - first) : result(i); }
  void put(int64_t i, Threshold t) const override { hi[packed.row(i)] = t.hi, lo[packed.row(i)] = t.lo; }
  char* result(int64_t i) const { return results + packed.start(i) * values.bytes(); }
};

template <class T>
bool all_finite(const T* x, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] - x[i];
  return sum == 0;
}

// Whether no entry of a row is infinite or NaN, as far as a look at floats says.
bool are_finite(const Values& values, int64_t start, int64_t n) {
  if (values.dtype == Dtype::kFloat) return all_finite(reinterpret_cast<const float*>(values.at(start)), n);
  return values.dtype == Dtype::kDouble && all_finite(reinterpret_cast<const double*>(values.at(start)), n);
}

template <class T>
void fill_row(char* to, int64_t n, double value) {
  std::fill(reinterpret_cast<T*>(to), reinterpret_cast<T*>(to) + n, static_cast<T>(value));
}

// In the place of a result, which has one dimension.
Tensor refused(const Tensor& x) { return empty(x, Sizes{0, 0}); }

std::tuple<Tensor, Tensor, Tensor> packed_soft_topk(Tensor x, Tensor offsets, Tensor k, Tensor tau, Text cdf,
                                                    double shape, Text output) {
  Packed packed(offsets);
  const int64_t rows = packed.rows();
  const Sizes batch{rows};
  Spec spec{find("cdf", cdf, kCdfs), shape, find("output", output, kOutputs), 0, nullptr};
  const Tensor dense = torch::stable::contiguous(x);
  const Values values(dense);
  if (!packed.cover(x.size(0))) return {refused(x), refused(x), refused(x)};
  Tensor y = empty(x, sizes_of(x)), hi = empty(x, batch, ScalarType::Double), lo = empty(hi, batch);
  double *const h = numbers_in(hi), *const l = numbers_in(lo);
  const RowScalars ks(k, batch), taus(tau, batch);
  char* const results = static_cast<char*>(y.mutable_data_ptr());
  constexpr double kEnd = std::numeric_limits<double>::max();
  // The lanes give back rows of which none or all are selected, one by one.
  packed.sort([&](int64_t row, int64_t start, int64_t n) {
    const double k = ks(row);
    const bool none = k == 0, all = k == static_cast<double>(n), served = (none || all) && taus(row) > 0;
    if (n > 0 && !(served && are_finite(values, start, n))) return false;
    h[row] = l[row] = !served ? std::nan("") : none ? kEnd : -kEnd;
    const double share = spec.output == Output::kLog ? std::log(none ? 0.0 : 1.0) : none ? 0.0 : 1.0;
    char* const to = results + start * values.bytes();
    values.dtype == Dtype::kFloat ? fill_row<float>(to, n, share) : fill_row<double>(to, n, share);
    return true;
  });
  each(packed.runs(values.dtype != Dtype::kDouble), [&](const Run& run) {
    Scores scores(packed, values, ks, taus, results, h, l);
    Spec own = spec;
    own.n = run.n;
    if (run.n >= kLongRow) own.inside = &kInside;
    if (!run.mixed) return kernels().forward(own, scores, run.begin, run.end);
    Copies copies(run, values), made(run, values);
    scores.copies = &copies, scores.made = &made, scores.first = run.begin;
    for (int64_t i = run.begin; i < run.end; ++i) {
      copies.take(i - run.begin, packed.start(i), packed.length(i));
    }
    kernels().forward(own, scores, run.begin, run.end);
    for (int64_t i = run.begin; i < run.end; ++i) {
      std::memcpy(scores.result(i), made.at(i - run.begin), packed.length(i) * values.bytes());
    }
  });
  if (std::any_of(h, h + rows, [](double t) { return std::isnan(t); })) return {refused(x), hi, lo};
  return {y, hi, lo};
}

struct Gradients final : BackwardRows {
  const Packed& packed;
  const Values &values, &grads;
  const std::optional<Values>& outputs;
  const RowScalars& taus;
  const double *hi, *lo;
  char* results;
  double *dk, *dtau;

  Gradients(const Packed& packed, const Values& values, const Values& grads,
            const std::optional<Values>& outputs, const RowScalars& taus, const double* hi, const double* lo,
            char* results, double* dk, double* dtau)
      : packed(packed),
        values(values),
        grads(grads),
        outputs(outputs),
        taus(taus),
        hi(hi),
        lo(lo),
        results(results),
        dk(dk),
        dtau(dtau) {}
  Row x(int64_t i) const override { return {values.at(packed.start(i)), values.dtype, 1}; }
  Row y(int64_t i) const override {
    return {outputs ? outputs->at(packed.start(i)) : nullptr, Dtype::kFloat, 1};
  }
  Row grad(int64_t i) const override { return {grads.at(packed.start(i)), values.dtype, 1}; }
  double grad_lo(int64_t) const override { return 0; }
  double tau(int64_t i) const override { return invertible(taus(packed.row(i))); }
  Threshold threshold(int64_t i) const override { return {hi[packed.row(i)], lo[packed.row(i)]}; }
  void* grad_x(int64_t i) const override { return results + packed.start(i) * values.bytes(); }
  bool keeps_numbers() const override { return true; }
  void put(int64_t i, double grad_k, double grad_tau) const override {
    dk[packed.row(i)] = grad_k, dtau[packed.row(i)] = grad_tau;
  }
};

std::tuple<Tensor, Tensor, Tensor> packed_soft_topk_backward(Tensor grad, Tensor x, Tensor offsets, Tensor hi,
                                                             Tensor lo, Tensor tau, Text cdf, double shape,
                                                             Text output, std::optional<Tensor> y) {
  Packed packed(offsets);
  const Sizes batch{packed.rows()};
  Spec spec{find("cdf", cdf, kCdfs), shape, find("output", output, kOutputs), 0, nullptr};
  const Tensor scores = torch::stable::contiguous(x), incoming = torch::stable::contiguous(grad);
  const Values values(scores), grads(incoming);
  std::optional<Values> outputs;
  if (y && y->scalar_type() == ScalarType::Float) outputs.emplace(*y);
  Tensor grad_x = empty(x, sizes_of(x)), grad_k = empty(hi, batch), grad_tau = empty(hi, batch);
  double *const dk = numbers_in(grad_k), *const dtau = numbers_in(grad_tau);
  const RowScalars taus(tau, batch);
  packed.sort([&](int64_t row, int64_t, int64_t n) {
    if (n == 0) dk[row] = dtau[row] = 0;
    return n == 0;
  });
  const Gradients gradients(packed, values, grads, outputs, taus, hi.const_data_ptr<double>(),
                            lo.const_data_ptr<double>(), static_cast<char*>(grad_x.mutable_data_ptr()), dk,
                            dtau);
  each(packed.runs(false), [&](const Run& run) {
    Spec own = spec;
    own.n = run.n;
    if (run.n >= kLongRow) own.inside = &kInside;
    kernels().backward(own, gradients, run.begin, run.end);
  });
  return {grad_x, grad_k, grad_tau};
}

struct Hard final : MaskRows {
  const Packed& packed;
  const Values& values;
  const RowScalars& ks;
  char* results;

  Hard(const Packed& packed, const Values& values, const RowScalars& ks, char* results)
      : packed(packed), values(values), ks(ks), results(results) {}
  Row x(int64_t i) const override { return {values.at(packed.start(i)), values.dtype, 1}; }
  double k(int64_t i) const override { return ks(packed.row(i)); }
  void* out(int64_t i) const override { return results + packed.start(i) * values.bytes(); }
};

Tensor packed_topk_mask(Tensor x, Tensor offsets, Tensor k) {
  Packed packed(offsets);
  if (!packed.cover(x.size(0))) return refused(x);
  const RowScalars ks(k, Sizes{packed.rows()});
  const Tensor dense = torch::stable::contiguous(x);
  const Values values(dense);
  Tensor y = empty(x, sizes_of(x));
  const Hard rows(packed, values, ks, static_cast<char*>(y.mutable_data_ptr()));
  bool possible = true;
  packed.sort([&](int64_t row, int64_t, int64_t n) {
    possible = possible && (n > 0 || ks(row) == 0);
    return n == 0;
  });
  if (!possible) return refused(x);
  each(packed.runs(false), [&](const Run& run) { kernels().topk_mask(rows, run.n, run.begin, run.end); });
  return y;
}

}  // namespace
}  // namespace khot

STABLE_TORCH_LIBRARY_IMPL(khot, CPU, m) {
  m.impl("packed_soft_topk", TORCH_BOX(&khot::packed_soft_topk));
  m.impl("packed_soft_topk_backward", TORCH_BOX(&khot::packed_soft_topk_backward));
  m.impl("packed_topk_mask", TORCH_BOX(&khot::packed_topk_mask));
}
