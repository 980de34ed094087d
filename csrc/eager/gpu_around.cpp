// What a plain call does to its rows before and after the launch of its operator: a launch of one kernel
// (khot/_kernels/triton/around.py), where the ordinary way makes operations of torch.
#include <cstring>
#include <limits>
#include <optional>

#include "eager/gpu_calls.h"

namespace khot::gpu {
namespace {

int64_t bytes_like(const Tensor& x) { return Launches::rounded(x.numel() * x.element_size()); }

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What becomes of an entry (`HOW` in around.py).
enum class How : int8_t { kFill, kSizes, kSigns, kRanks, kProduct, kPlaces };
constexpr const char* kHow[] = {"fill", "sizes", "signs", "ranks", "product", "places"};

// Where the entries of rows lie: row r begins at r / inner * outer + r % inner * row. There are none without
// a type.
struct Spread {
  at::ScalarType dtype = at::ScalarType::Undefined;
  const char* data = nullptr;
  int64_t inner = 1, outer = 0, row = 0, column = 0;
};

// Those of a tensor that broadcasts with such sizes, of rows along an axis; none if they are further apart.
std::optional<Spread> spread(const Tensor& t, at::IntArrayRef sizes, int64_t axis) {
  const auto dims = static_cast<int64_t>(sizes.size());
  const auto distance = [&](int64_t dim) -> int64_t {
    const int64_t own = dim - dims + t.dim();
    return own < 0 || t.size(own) == 1 ? 0 : t.stride(own);
  };
  Spread found{t.scalar_type(), static_cast<const char*>(t.const_data_ptr())};
  found.column = distance(dims + axis);
  int groups = 0;
  int64_t outer = 1;  // how many rows, in the dimensions that are not among the inner ones
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    if (dim == dims + axis || sizes[dim] == 1) continue;
    const int64_t step = distance(dim);
    if (groups == 0) {
      found.inner = sizes[dim], found.row = step, groups = 1;
    } else if (groups == 1 && step == found.inner * found.row) {
      found.inner *= sizes[dim];
    } else if (groups == 1) {
      outer = sizes[dim], found.outer = step, groups = 2;
    } else if (step == outer * found.outer) {
      outer *= sizes[dim];
    } else {
      return std::nullopt;
    }
  }
  return found;
}

// Those of an argument of a call, or of a gradient of its result. A copy is held.
Spread given(const Tensor& t, const Call& call, Launches& launches) {
  const Tensor& x = call.inputs[0];
  if (const auto found = spread(t, x.sizes(), call.shape.axis)) return *found;
  const at::AutoDispatchBelowADInplaceOrView below;
  return *spread(launches.hold(t.expand(x.sizes()).contiguous()), x.sizes(), call.shape.axis);
}

// Those of rows one after another.
Spread rows_at(const void* begin, at::ScalarType dtype, int64_t n) {
  return {dtype, static_cast<const char*>(begin), 1, n, 0, 1};
}

Spread rows_of(const Tensor& t, int64_t n) { return rows_at(t.const_data_ptr(), t.scalar_type(), n); }

struct Written {
  at::ScalarType dtype = at::ScalarType::Undefined;
  void* data = nullptr;
};

struct Work {
  How how = How::kFill;
  Spread v, mask, other;
  Written out, second;
  double sign = 1, fill = 0;
};

// The kernel, which Python has compiled when it is first asked for.
const Around& around(const Work& work, int64_t n, c10::Device device) {
  int8_t width = 0;
  while (width < 10 && int64_t{1} << width < n) ++width;
  const at::ScalarType types[] = {work.v.dtype, work.mask.dtype, work.other.dtype, work.out.dtype,
                                  work.second.dtype};
  int8_t facts[sizeof(int64_t)] = {static_cast<int8_t>(work.how), width, device.index()};
  static_assert(std::size(facts) == 3 + std::size(types));
  for (size_t i = 0; i < std::size(types); ++i) facts[3 + i] = static_cast<int8_t>(types[i]);
  int64_t key = 0;
  std::memcpy(&key, facts, sizeof key);
  const auto known = arounds().find(key);
  if (known != arounds().end()) return known->second;
  pybind11::tuple named(std::size(types));
  for (size_t i = 0; i < std::size(types); ++i) {
    const bool none = types[i] == at::ScalarType::Undefined;
    named[i] = none ? pybind11::object(pybind11::none()) : pybind11::cast(types[i]);
  }
  const auto made = driver().around(kHow[static_cast<int>(work.how)], n, device, named);
  const auto found = made.cast<pybind11::tuple>();
  Around result{nullptr, found[2].cast<int64_t>(), found[3].cast<int64_t>()};
  Arguments arguments;
  if (arguments.read(found[1].ptr())) result.kernel = compiled(found[0].cast<int64_t>(), arguments);
  return arounds()[key] = std::move(result);
}

bool add(const Work& work, int64_t n, int64_t rows, Launches& launches) {
  const Around& found = around(work, n, launches.device());
  if (found.kernel == nullptr) return false;
  std::array<Argument, 21> arguments;
  int count = 0;
  const auto pass = [&](int64_t value) { arguments[count++].integer = value; };
  const auto point = [&](const void* address) { arguments[count++].pointer = address; };
  for (const Spread* each : {&work.v, &work.mask, &work.other}) {
    point(each->data);
    for (const int64_t value : {each->inner, each->outer, each->row, each->column}) pass(value);
  }
  point(work.out.data);
  point(work.second.data);
  pass(rows);
  pass(n);
  arguments[count++].real = work.sign;
  arguments[count++].real = work.fill;
  const Parameters parameters(*found.kernel, arguments.data());
  const int64_t chunks = (n + found.width - 1) / found.width;
  const int64_t programs = (rows + found.together - 1) / found.together * chunks;
  return launches.add(*found.kernel, programs, parameters) != nullptr;
}

bool add(const Work& work, const Call& call, Launches& launches) {
  return add(work, call.shape.n, call.signature.rows, launches);
}

Written written(Tensor& made) { return {made.scalar_type(), made.mutable_data_ptr()}; }

Written taken(const Tensor& like, Launches& launches) {
  return {like.scalar_type(), launches.take(bytes_like(like))};
}

// Whether what the launch reads is made before it.
bool is_changed(const Call& call) {
  return call.mask.defined() || call.negated || !call.shape.is_dense(call.inputs[0]);
}

// How the gradient of the result becomes the one that the launch reads; nothing if it is that.
std::optional<How> change_of(const Call& call, const Tensor& grad) {
  const bool masked = call.mask.defined();
  if (call.which() == kSizes) return How::kSigns;
  if (call.which() == kSoftRank && masked) return How::kProduct;
  if (call.which() == kSoftSort && masked) return How::kPlaces;
  const bool aligned = (reinterpret_cast<uintptr_t>(grad.const_data_ptr()) & kAligned) == 0;
  if (aligned && call.shape.is_dense(grad)) return std::nullopt;
  return How::kFill;
}

// What entries that take no part become.
double fill_of(const Call& call) { return call.ascending ? kInfinity : -kInfinity; }

}  // namespace

int64_t bytes_before(const Call& call) {
  if (!is_changed(call)) return 0;
  const bool both = call.which() == kBudget && call.mask.defined();
  // a cost of each column becomes one of each entry
  const int64_t cost = both ? call.inputs[0].numel() * call.inputs[1].element_size() : 0;
  return bytes_like(call.inputs[0]) + Launches::rounded(cost);
}

int64_t bytes_before_gradient(const Call& call, const Tensor& grad) {
  return change_of(call, grad) ? bytes_like(grad) : 0;
}

bool before(const Call& call, Launches& launches, Addresses& rows) {
  for (const Tensor& input : call.inputs) rows.push_back(input.const_data_ptr());
  if (!is_changed(call)) return true;
  const Tensor& x = call.inputs[0];
  Work work;
  work.v = given(x, call, launches);
  if (call.mask.defined()) work.mask = given(call.mask, call, launches);
  work.sign = call.negated ? -1 : 1;
  work.fill = fill_of(call);
  if (call.which() == kSizes) {
    work.how = How::kSizes;
    work.other = work.v;
  }
  work.out = taken(x, launches);
  rows[0] = work.out.data;
  if (call.which() == kBudget && call.mask.defined()) {
    const Tensor& cost = call.inputs[1];
    work.other = *spread(cost, x.sizes(), -1);
    work.second = {cost.scalar_type(), launches.take(x.numel() * cost.element_size())};
    rows[1] = work.second.data;
  }
  return add(work, call, launches);
}

bool is_changed_after(const Call& call) {
  const bool ranks = call.which() == kSoftRank || call.which() == kSoftSort;
  return call.which() == kSizes || (call.mask.defined() && ranks);
}

bool after(const Call& call, Launches& launches, const Addresses& rows, const void* first, Tensor& result) {
  const int64_t n = call.shape.n;
  Work work;
  if (call.which() == kSizes) {
    work.how = How::kSigns;
    work.other = given(call.inputs[0], call, launches);
  } else if (call.which() == kSoftRank) {
    work.how = How::kRanks;
    work.fill = fill_of(call);
    work.other = rows_at(rows[0], call.inputs[0].scalar_type(), n);
  } else {
    work.how = How::kPlaces;
  }
  if (work.how != How::kSigns) work.mask = given(call.mask, call, launches);
  work.v = rows_at(first, result.scalar_type(), n);
  work.out = written(result);
  return add(work, call, launches);
}

const void* before_gradient(const Call& call, Launches& launches, const Tensor& result, const Tensor& grad) {
  const auto change = change_of(call, grad);
  if (!change) return grad.const_data_ptr();
  Work work;
  work.how = *change;
  if (work.how == How::kSigns) work.other = given(call.inputs[0], call, launches);
  if (work.how == How::kPlaces) work.other = rows_of(result, call.shape.n);
  if (work.how == How::kProduct || work.how == How::kPlaces) work.mask = given(call.mask, call, launches);
  work.v = given(grad, call, launches);
  work.out = taken(grad, launches);
  return add(work, call, launches) ? work.out.data : nullptr;
}

bool after_gradient(const Call& call, Launches& launches, Tensor& grad) {
  if (call.mask.defined() || call.negated) {
    Work work;
    work.v = rows_of(grad, call.shape.n);
    if (call.mask.defined()) work.mask = given(call.mask, call, launches);
    work.sign = call.negated ? -1 : 1;
    if (call.which() == kSizes) {
      work.how = How::kSizes;
      work.other = given(call.inputs[0], call, launches);
    }
    work.out = written(grad);
    if (!add(work, call, launches)) return false;
  }
  call.shape.put_back(grad);
  return true;
}

bool repeat(const void* row, at::ScalarType dtype, int64_t n, int64_t rows, void* made, Launches& launches) {
  Work work;
  work.v = rows_at(row, dtype, n);
  work.v.outer = 0;
  work.out = {dtype, made};
  return add(work, n, rows, launches);
}

bool product(const Tensor& a, const void* b, Tensor& made, Launches& launches) {
  const int64_t n = a.size(-1);
  Work work;
  work.how = How::kProduct, work.v = rows_of(a, n), work.other = rows_at(b, a.scalar_type(), n);
  work.out = written(made);
  return add(work, n, a.numel() / n, launches);
}

}  // namespace khot::gpu
