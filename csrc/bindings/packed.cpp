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
  int64_t sorted() const { return static_cast<int64_t>(order_.size()); }
  int64_t row(int64_t i) const { return order_[i]; }  // of the i-th in the order
  int64_t start(int64_t i) const { return starts_[order_[i]]; }
  int64_t length(int64_t i) const { return starts_[order_[i] + 1] - start(i); }

  // Runs of the rows in the order; `mixed` if those may be.
  std::vector<Run> runs(bool mixed) const {
    std::vector<Run> found;
    const int64_t count = sorted();
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

// Where the rows of packed values are, in the order of their lengths; or copies of some of them, side by
// side.
struct Placed {
  const Packed* packed;
  char* data;
  Dtype dtype;
  int64_t first = 0, bytes = 0;  // of copies: the first of the rows, and the bytes of each

  char* at(int64_t i) const {
    return data + (bytes > 0 ? (i - first) * bytes : packed->start(i) * size_of(dtype));
  }
};

struct PackedRows : Placed {
  Row operator()(int64_t i) const { return {at(i), dtype, 1}; }
};

struct PackedResults : Placed {
  void* operator()(int64_t i) const { return at(i); }
};

struct PackedNumbers {
  const Packed* packed;
  const RowScalars* each;  // null stands for zeros
  double operator()(int64_t i) const { return each == nullptr ? 0 : (*each)(packed->row(i)); }
};

PackedRows rows_in(const Packed& packed, const Tensor& values) {
  return {{&packed, static_cast<char*>(const_cast<void*>(values.const_data_ptr())),
           to_dtype(values.scalar_type())}};
}

PackedResults made_in(const Packed& packed, Tensor& values) { return {rows_in(packed, values)}; }

// Numbers of the rows in their order go to these places of the rows as they came; not those that sort()
// served.
void put_back(const Packed& packed, const std::vector<double>& numbers, double* out) {
  for (int64_t i = 0; i < packed.sorted(); ++i) out[packed.row(i)] = numbers[i];
}

template <class T>
void fill_row(char* to, int64_t n, double value) {
  std::fill(reinterpret_cast<T*>(to), reinterpret_cast<T*>(to) + n, static_cast<T>(value));
}

// Room for the rows of a mixed run side by side, filled with -inf.
std::vector<char> room_for(const Run& run, Dtype dtype) {
  std::vector<char> room(kMostLanes * run.n * size_of(dtype));
  if (dtype == Dtype::kFloat) {
    fill_row<float>(room.data(), kMostLanes * run.n, -std::numeric_limits<float>::infinity());
  } else {
    fill_row<uint16_t>(room.data(), kMostLanes * run.n, dtype == Dtype::kHalf ? 0xFC00 : 0xFF80);
  }
  return room;
}

Spec spec_of(const Spec& any, const Run& run) {
  Spec spec = any;
  spec.n = run.n;
  if (run.n >= kLongRow) spec.inside = &kInside;
  return spec;
}

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

template <class T>
bool all_finite(const T* x, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] - x[i];
  return sum == 0;
}

// Whether no entry of a row is infinite or NaN, as far as a look at floats says.
bool are_finite(const char* row, Dtype dtype, int64_t n) {
  if (dtype == Dtype::kFloat) return all_finite(reinterpret_cast<const float*>(row), n);
  return dtype == Dtype::kDouble && all_finite(reinterpret_cast<const double*>(row), n);
}

// In the place of a result, which has one dimension.
Tensor refused(const Tensor& x) { return empty(x, Sizes{0, 0}); }

std::tuple<Tensor, Tensor, Tensor> packed_soft_topk(Tensor x, Tensor offsets, Tensor k, Tensor tau, Text cdf,
                                                    double shape, Text output) {
  Packed packed(offsets);
  const int64_t rows = packed.rows();
  const Sizes batch{rows};
  const Spec spec = spec_of(cdf, shape, 0, find("output", output, kOutputs));
  const Tensor dense = torch::stable::contiguous(x);
  if (!packed.cover(x.size(0))) return {refused(x), refused(x), refused(x)};
  Tensor y = empty(x, sizes_of(x)), hi = empty(x, batch, ScalarType::Double), lo = empty(hi, batch);
  double *const h = numbers_in(hi), *const l = numbers_in(lo);
  const RowScalars ks(k, batch), taus(tau, batch);
  const PackedRows scores = rows_in(packed, dense);
  const PackedResults results = made_in(packed, y);
  const int64_t bytes = size_of(scores.dtype);
  constexpr double kEnd = std::numeric_limits<double>::max();
  // The lanes give back rows of which none or all are selected, one by one.
  packed.sort([&](int64_t row, int64_t start, int64_t n) {
    const double k = ks(row);
    const bool none = k == 0, all = k == static_cast<double>(n), served = (none || all) && taus(row) > 0;
    if (n > 0 && !(served && are_finite(scores.data + start * bytes, scores.dtype, n))) return false;
    h[row] = l[row] = !served ? std::nan("") : none ? kEnd : -kEnd;
    const double share = spec.output == Output::kLog ? std::log(none ? 0.0 : 1.0) : none ? 0.0 : 1.0;
    char* const to = results.data + start * bytes;
    scores.dtype == Dtype::kFloat ? fill_row<float>(to, n, share) : fill_row<double>(to, n, share);
    return true;
  });
  std::vector<double> his(rows), los(rows);
  const auto problem = [&](const PackedRows& from, const PackedResults& to) {
    return SelectionRows(from, PackedNumbers{&packed, &ks}, Invertible<PackedNumbers>{{&packed, &taus}}, to,
                         his.data(), los.data());
  };
  each(packed.runs(scores.dtype != Dtype::kDouble), [&](const Run& run) {
    const Spec own = spec_of(spec, run);
    if (!run.mixed) return kernels().forward(own, problem(scores, results), run.begin, run.end);
    std::vector<char> room = room_for(run, scores.dtype), made(room.size());
    const Placed copies{&packed, room.data(), scores.dtype, run.begin, run.n * bytes};
    Placed found = copies;
    found.data = made.data();
    for (int64_t i = run.begin; i < run.end; ++i) {
      std::memcpy(copies.at(i), scores.at(i), packed.length(i) * bytes);
    }
    kernels().forward(own, problem({copies}, {found}), run.begin, run.end);
    for (int64_t i = run.begin; i < run.end; ++i) {
      std::memcpy(results.at(i), found.at(i), packed.length(i) * bytes);
    }
  });
  put_back(packed, his, h), put_back(packed, los, l);
  if (std::any_of(h, h + rows, [](double t) { return std::isnan(t); })) return {refused(x), hi, lo};
  return {y, hi, lo};
}

std::tuple<Tensor, Tensor, Tensor> packed_soft_topk_backward(Tensor grad, Tensor x, Tensor offsets, Tensor hi,
                                                             Tensor lo, Tensor tau, Text cdf, double shape,
                                                             Text output, std::optional<Tensor> y) {
  Packed packed(offsets);
  const int64_t rows = packed.rows();
  const Sizes batch{rows};
  const Spec spec = spec_of(cdf, shape, 0, find("output", output, kOutputs));
  const Tensor dense = torch::stable::contiguous(x), incoming = torch::stable::contiguous(grad);
  const PackedRows scores = rows_in(packed, dense);
  std::optional<PackedRows> outputs;
  if (y && y->scalar_type() == ScalarType::Float) outputs = rows_in(packed, *y);
  Tensor grad_x = empty(x, sizes_of(x)), grad_k = empty(hi, batch), grad_tau = empty(hi, batch);
  double *const dk = numbers_in(grad_k), *const dtau = numbers_in(grad_tau);
  packed.sort([&](int64_t row, int64_t, int64_t n) {
    if (n == 0) dk[row] = dtau[row] = 0;
    return n == 0;
  });
  const RowScalars taus(tau, batch), his(hi, batch), los(lo, batch);
  std::vector<double> dks(rows), dtaus(rows);
  const GradientRows gradients(scores.dtype, scores, Invertible<PackedNumbers>{{&packed, &taus}}, outputs,
                               std::optional<PackedRows>(rows_in(packed, incoming)),
                               PackedNumbers{&packed, nullptr}, PackedNumbers{&packed, &his},
                               PackedNumbers{&packed, &los}, made_in(packed, grad_x), dks.data(),
                               dtaus.data());
  each(packed.runs(false),
       [&](const Run& run) { kernels().backward(spec_of(spec, run), gradients, run.begin, run.end); });
  put_back(packed, dks, dk), put_back(packed, dtaus, dtau);
  return {grad_x, grad_k, grad_tau};
}

Tensor packed_topk_mask(Tensor x, Tensor offsets, Tensor k) {
  Packed packed(offsets);
  if (!packed.cover(x.size(0))) return refused(x);
  const RowScalars ks(k, Sizes{packed.rows()});
  const Tensor dense = torch::stable::contiguous(x);
  Tensor y = empty(x, sizes_of(x));
  const HardRows rows(rows_in(packed, dense), PackedNumbers{&packed, &ks}, made_in(packed, y));
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
