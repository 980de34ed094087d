// What a plain call does to its rows before and after the launch of its operator: a launch of one kernel
// (khot/_kernels/triton/around.py), where the ordinary way makes operations of torch.
#include <cstring>
#include <limits>
#include <optional>

#include "eager/gpu_calls.h"

namespace khot::gpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What becomes of an entry (`HOW` in around.py).
enum class How : int8_t { kFill, kSizes, kSigns, kRanks, kProduct, kPlaces };
constexpr const char* kHow[] = {"fill", "sizes", "signs", "ranks", "product", "places"};

// Where the entries of rows lie: row r begins at r / inner * outer + r % inner * row. The tensor is one of
// theirs, by its type; no entries without one.
struct Spread {
  const Tensor* tensor = nullptr;
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
  Spread found{&t, static_cast<const char*>(t.const_data_ptr())};
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
Spread given(const Tensor& t, const Call& call, Tensor& held) {
  const Tensor& x = call.inputs[0];
  if (const auto found = spread(t, x.sizes(), call.shape.axis)) return *found;
  const at::AutoDispatchBelowADInplaceOrView below;
  held = t.expand(x.sizes()).contiguous();
  return *spread(held, x.sizes(), call.shape.axis);
}

// Those of rows one after another, in the other order if they are reversed.
Spread rows_of(const Tensor& t, int64_t n, bool reversed = false) {
  const char* const data = static_cast<const char*>(t.const_data_ptr());
  return {&t, data + (reversed ? (n - 1) * t.element_size() : 0), 1, n, 0, reversed ? -1 : 1};
}

struct Work {
  How how = How::kFill;
  Spread v, mask, other;
  double sign = 1, fill = 0;
  bool reversed = false;  // whether the result is written in the other order
};

int8_t type_of(const Tensor* x) { return x == nullptr ? -1 : static_cast<int8_t>(x->scalar_type()); }

// The kernel, which Python has compiled when it is first asked for.
const Around& around(const Work& work, int64_t n, const Tensor& out, const Tensor* second) {
  int8_t width = 0;
  while (width < 10 && int64_t{1} << width < n) ++width;
  const Tensor* const tensors[] = {work.v.tensor, work.mask.tensor, work.other.tensor, &out, second};
  const int8_t facts[] = {static_cast<int8_t>(work.how), width,
                          out.device().index(),          type_of(tensors[0]),
                          type_of(tensors[1]),           type_of(tensors[2]),
                          type_of(tensors[3]),           type_of(tensors[4])};
  int64_t key = 0;
  static_assert(sizeof facts == sizeof key);
  std::memcpy(&key, facts, sizeof key);
  const auto known = arounds().find(key);
  if (known != arounds().end()) return known->second;
  pybind11::tuple wrapped(std::size(tensors));
  for (size_t i = 0; i < std::size(tensors); ++i) {
    wrapped[i] = tensors[i] == nullptr
                     ? pybind11::object(pybind11::none())
                     : pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensors[i]->detach()));
  }
  const auto made = pybind11::reinterpret_borrow<pybind11::object>(driver().around)(
      kHow[static_cast<int>(work.how)], n, wrapped);
  const auto found = made.cast<pybind11::tuple>();
  Around result{nullptr, found[2].cast<int64_t>(), found[3].cast<int64_t>()};
  const auto kernels = tables().find(found[0].cast<int64_t>());
  Arguments arguments;
  if (kernels != tables().end() && arguments.read(found[1].ptr())) {
    const auto kernel = kernels->second.find(arguments.key());
    if (kernel != kernels->second.end()) result.kernel = kernel->second;
  }
  return arounds()[key] = std::move(result);
}

bool start(const Work& work, const Shape& shape, Tensor& out, const Queue& queue, Tensor* second = nullptr) {
  if (!queue) return false;
  const Around found = around(work, shape.n, out, second);  // a copy, also if another thread forgets it
  if (found.kernel == nullptr) return false;
  std::array<Argument, 22> arguments;
  int count = 0;
  const auto pass = [&](int64_t value) { arguments[count++].integer = value; };
  const auto point = [&](const void* address) { arguments[count++].pointer = address; };
  for (const Spread* each : {&work.v, &work.mask, &work.other}) {
    point(each->data);
    for (const int64_t value : {each->inner, each->outer, each->row, each->column}) pass(value);
  }
  const int64_t last = work.reversed ? shape.n - 1 : 0, rows = out.numel() / shape.n;
  point(static_cast<char*>(out.mutable_data_ptr()) + last * out.element_size());
  pass(work.reversed ? -1 : 1);
  point(second == nullptr ? nullptr : second->mutable_data_ptr());
  pass(rows);
  pass(shape.n);
  arguments[count++].real = work.sign;
  arguments[count++].real = work.fill;
  const Parameters parameters(*found.kernel, arguments.data());
  const int64_t chunks = (shape.n + found.width - 1) / found.width;
  const int64_t programs = (rows + found.together - 1) / found.together * chunks;
  return gpu::start(*found.kernel, programs, parameters.values.data(), parameters.count, queue);
}

Tensor rows_like(const Tensor& x, at::IntArrayRef sizes) { return empty(sizes, x.device(), x.scalar_type()); }

// Whether what the launch reads is made before it.
bool is_changed(const Call& call) {
  return call.mask.defined() || call.negated || !call.shape.is_dense(call.inputs[0]);
}

}  // namespace

const Tensors* before(const Call& call, const Queue& queue, Tensors& rows) {
  if (!is_changed(call)) return &call.inputs;
  rows = call.inputs;
  const Tensor& x = call.inputs[0];
  Tensor held_x, held_mask;
  Work work;
  work.v = given(x, call, held_x);
  if (call.mask.defined()) work.mask = given(call.mask, call, held_mask);
  work.sign = call.negated ? -1 : 1;
  work.fill = call.which() == kSoftSort && call.reversed ? kInfinity : -kInfinity;
  if (call.which() == kSizes) {
    work.how = How::kSizes;
    work.other = work.v;
  }
  rows[0] = rows_like(x, call.shape.sizes);
  if (call.which() != kBudget || !call.mask.defined()) {
    return start(work, call.shape, rows[0], queue) ? &rows : nullptr;
  }
  work.other = *spread(call.inputs[1], x.sizes(), -1);
  rows[1] = rows_like(call.inputs[1], call.shape.sizes);
  return start(work, call.shape, rows[0], queue, &rows[1]) ? &rows : nullptr;
}

bool after(const Call& call, const Queue& queue, const Tensors& rows, Tensor& result) {
  const bool masked = call.mask.defined(), sorts = call.which() == kSoftSort;
  if (!masked && !call.reversed) return true;
  Work work;
  Tensor held;
  if (call.which() == kSizes) {
    work.how = How::kSigns;
    work.other = given(call.inputs[0], call, held);
  } else if (call.which() == kSoftRank && masked) {
    work.how = How::kRanks;
    work.other = rows_of(rows[0], call.shape.n);
  } else if (sorts && masked) {
    work.how = How::kPlaces;
  } else if (!sorts) {
    return true;
  }
  Tensor held_mask;
  if (work.how != How::kSigns && masked) work.mask = given(call.mask, call, held_mask);
  work.v = rows_of(result, call.shape.n, call.reversed);
  Tensor made = rows_like(result, call.shape.sizes);
  if (!start(work, call.shape, made, queue)) return false;
  result = std::move(made);
  return true;
}

bool before_gradient(const Call& call, const Queue& queue, const Tensor& result, Tensor& grad) {
  const bool masked = call.mask.defined(), sorts = call.which() == kSoftSort;
  Work work;
  Tensor held, held_grad, held_mask;
  if (call.which() == kSizes) {
    work.how = How::kSigns;
    work.other = given(call.inputs[0], call, held);
  } else if (call.which() == kSoftRank && masked) {
    work.how = How::kProduct;
  } else if (sorts && masked) {
    work.how = How::kPlaces;
    work.other = rows_of(result, call.shape.n, call.reversed);
  } else if (!call.reversed && call.shape.is_dense(grad) &&
             (reinterpret_cast<uintptr_t>(grad.const_data_ptr()) & kAligned) == 0) {
    return true;
  }
  if (work.how == How::kProduct || work.how == How::kPlaces) work.mask = given(call.mask, call, held_mask);
  work.v = given(grad, call, held_grad);
  work.reversed = call.reversed;
  Tensor made = rows_like(grad, call.shape.sizes);
  if (!start(work, call.shape, made, queue)) return false;
  grad = std::move(made);
  return true;
}

bool after_gradient(const Call& call, const Queue& queue, Tensor& grad) {
  if (call.mask.defined() || call.negated) {
    Work work;
    Tensor held_x, held_mask;
    work.v = rows_of(grad, call.shape.n);
    if (call.mask.defined()) work.mask = given(call.mask, call, held_mask);
    work.sign = call.negated ? -1 : 1;
    if (call.which() == kSizes) {
      work.how = How::kSizes;
      work.other = given(call.inputs[0], call, held_x);
    }
    if (!start(work, call.shape, grad, queue)) return false;
  }
  call.shape.put_back(grad);
  return true;
}

Tensor repeated(const Tensor& row, at::IntArrayRef sizes, const Queue& queue) {
  Work work;
  work.v = *spread(row, sizes, -1);
  Shape shape;
  shape.n = row.size(-1);
  Tensor made = rows_like(row, sizes);
  return start(work, shape, made, queue) ? made : Tensor();
}

Tensor product(const Tensor& a, const Tensor& b, const Queue& queue) {
  Work work;
  Shape shape;
  shape.n = a.size(-1);
  work.how = How::kProduct, work.v = rows_of(a, shape.n), work.other = rows_of(b, shape.n);
  Tensor made = rows_like(a, a.sizes());
  return start(work, shape, made, queue) ? made : Tensor();
}

}  // namespace khot::gpu
