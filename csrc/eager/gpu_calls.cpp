// Plain calls on a GPU by prepared launches.
#include "eager/gpu_calls.h"

#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <cstring>
#include <string>
#include <vector>

namespace khot::gpu {

bool add(const Prepared& prepared, Slots slots, const Numbers& numbers, Launches& launches) {
  std::array<std::array<float, 3>, kMostNumbers> parts;
  for (int i = 0; i < kMostNumbers; ++i) {
    if (numbers[i].tensor.defined()) slots[kNumber + i] = numbers[i].tensor.const_data_ptr();
    double rest = numbers[i].value;
    for (float& part : parts[i]) {  // as khot/_kernels/triton/layout.py does
      part = static_cast<float>(rest);
      rest -= part;
    }
  }
  for (const Step& step : prepared.steps) {
    uint64_t* const values = launches.add(*step.kernel, step.programs, step.parameters);
    if (values == nullptr) return false;
    for (const Address& one : step.addresses) {
      const void* const address = static_cast<const char*>(slots[one.slot]) + one.offset;
      if ((reinterpret_cast<uintptr_t>(address) & kAligned) != 0) return false;
      std::memcpy(&values[one.place], &address, sizeof address);
    }
    for (const Part& one : step.parts) {
      std::memcpy(&values[one.place], &parts[one.number][one.part], sizeof(float));
    }
  }
  return true;
}

namespace {

// Whether a gradient of the call is asked for.
bool is_recorded(const Call& call) {
  if (call.which() == kTopkMask || call.which() == kSelectable || !at::GradMode::is_enabled()) return false;
  bool wanted = call.inputs[0].requires_grad();
  for (const Number& number : call.numbers) {
    wanted = wanted || (number.given.defined() && number.given.requires_grad());
  }
  return wanted;
}

// The result of a call whose launches are prepared, which are added; undefined if they cannot be. With a draw
// it is a sample from what the launch results in, with the gradient of that. The rows that the launch reads
// may have been made already.
Tensor solved(const Call& call, const Prepared& prepared, Launches& launches, const Draw* draw = nullptr,
              const Addresses* rows = nullptr) {
  const c10::Device device = launches.device();
  const at::IntArrayRef sizes = call.shape.sizes, own = prepared.whole ? sizes : call.shape.batch();
  const bool recorded = is_recorded(call), changed = draw != nullptr || is_changed_after(call);
  const bool again = recorded && (prepared.reads_first || (call.which() == kSoftSort && call.mask.defined()));
  const bool lasts = again || !changed;
  const int64_t kept_bytes = recorded ? 0 : prepared.kept_bytes;
  const int64_t first_bytes =
      lasts ? 0 : c10::multiply_integers(own) * static_cast<int64_t>(c10::elementSize(prepared.dtype));
  launches.reserve((rows == nullptr ? bytes_before(call) : 0) + Launches::rounded(first_bytes) + kept_bytes +
                   prepared.scratch_bytes + (draw == nullptr ? 0 : draw->bytes()));
  Addresses made;
  if (rows == nullptr) {
    if (!before(call, launches, made)) return Tensor();
    rows = &made;
  }
  Tensor first, kept;
  if (lasts) first = empty(own, device, prepared.dtype);
  if (recorded && prepared.kept_bytes > 0) kept = empty({prepared.kept_bytes / 8}, device, at::kDouble);
  Slots slots = slots_of(*rows);
  slots[kResult] = lasts ? first.mutable_data_ptr() : launches.take(first_bytes);
  slots[kKept] = kept.defined() ? kept.mutable_data_ptr() : launches.take(kept_bytes);
  slots[kScratch] = launches.take(prepared.scratch_bytes);
  if (!add(prepared, slots, call.numbers, launches)) return Tensor();
  Tensor y = first;
  if (draw != nullptr) {
    y = draw->sample(slots[kResult], sizes, device, launches);
    if (!y.defined()) return Tensor();
  } else if (changed) {
    y = empty(own, device, prepared.dtype);
    if (!after(call, launches, *rows, slots[kResult], y)) return Tensor();
  }
  if (prepared.whole && (draw == nullptr || draw->rows == nullptr)) call.shape.put_back(y);
  const bool multiplied = draw != nullptr && draw->multiplies;
  if (recorded) record(call, again ? first : Tensor(), kept, multiplied ? *draw->rows : Tensor(), y);
  return y;
}

// A sample by Pareto's design from the soft top-k that is asked for; for each row of `rows`, if there are
// some, from the same probabilities. Undefined if it is left to other ways.
struct Sampled {
  Call call;
  Draw draw;
  std::shared_ptr<const Prepared> prepared;

  bool read(PyObject* const* asked, PyObject* generator, PyObject* least, const Tensor* rows = nullptr) {
    if (driver().launch == nullptr || !gpu::read(kSoftTopk, asked, call)) return false;
    if (is_narrow()) call.signature.dtype = static_cast<int64_t>(at::kFloat);
    prepared = find(call.signature, call.choices);
    return prepared != nullptr && draw.find(call.signature, generator, least, rows);
  }
  bool is_narrow() const { return call.inputs[0].element_size() < 4; }

  Tensor add(Launches& launches) {
    RECORD_FUNCTION("khot::pareto_sample", std::vector<c10::IValue>());
    if (is_narrow()) call.inputs[0] = call.inputs[0].to(at::kFloat);
    return solved(call, *prepared, launches, &draw);
  }
};

// The input times a sample for each of its rows, with the gradient that torch has of a product.
Tensor times(const Tensor& input, const Tensor& sample, Launches& launches) {
  Tensor result;
  if (input.is_contiguous() && input.scalar_type() == sample.scalar_type()) {
    result = empty(input.sizes(), input.device(), input.scalar_type());
    if (!product(input, sample.const_data_ptr(), result, launches)) result = Tensor();
  }
  if (!launches.start()) return Tensor();
  if (!result.defined()) return at::mul(input, sample.to(input.scalar_type()));
  const auto node = make_node<torch::autograd::generated::MulBackward0>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, sample));
  node->self_scalar_type = node->other_scalar_type = input.scalar_type();
  node->other_ = torch::autograd::SavedVariable(sample, false);
  if (sample.requires_grad()) node->self_ = torch::autograd::SavedVariable(input, false);
  torch::autograd::set_history(result, node);
  return result;
}

// The result of launches once they are started, or None.
PyObject* started_or_none(Tensor y, Launches& launches) {
  if (!y.defined() || !launches.start()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(y));
}

}  // namespace

PyObject* call(Operator which, PyObject* const* args) {
  if (driver().launch == nullptr) return nullptr;
  Call given;
  if (!read(which, args, given)) return nullptr;
  const auto prepared = find(given.signature, given.choices);
  if (prepared == nullptr) return nullptr;
  const c10::DeviceGuard current(given.inputs[0].device());
  Launches launches(given.inputs[0].device());
  // what profilers see lasts until the launches are started, here and below
  RECORD_FUNCTION(std::string("khot::") + kOperators[which].name, std::vector<c10::IValue>());
  Tensor y = solved(given, *prepared, launches);
  return y.defined() && launches.start() ? THPVariable_Wrap(std::move(y)) : nullptr;
}

bool topk(PyObject* const* args, Tensor& values, Tensor& indices) {
  if (driver().launch == nullptr) return false;
  Call given;
  if (!read(kTopk, args, given) || given.shape.axis != -1) return false;
  const auto prepared = find(given.signature, given.choices);
  if (prepared == nullptr) return false;
  RECORD_FUNCTION("khot::topk", std::vector<c10::IValue>());
  const c10::Device device = given.inputs[0].device();
  const c10::DeviceGuard current(device);
  Launches launches(device);
  launches.reserve(bytes_before(given) + prepared->scratch_bytes);
  Addresses rows;
  if (!before(given, launches, rows)) return false;
  at::DimVector sizes = given.shape.sizes;
  sizes.back() = PyLong_AsLong(args[1]);
  values = empty(sizes, device, prepared->dtype), indices = empty(sizes, device, at::kLong);
  Slots slots = slots_of(rows);
  slots[kResult] = values.mutable_data_ptr(), slots[kKept] = indices.mutable_data_ptr();
  slots[kScratch] = launches.take(prepared->scratch_bytes);
  return add(*prepared, slots, given.numbers, launches) && launches.start();
}

}  // namespace khot::gpu

namespace khot {

// soft_topk_magnitude(input, k, dim, tau, p, rescale, mask, group)
KHOT_CALL(soft_topk_magnitude) {
  if (PyObject* const found = gpu::call(args[6] == Py_None ? gpu::kMagnitude : gpu::kSizes, args))
    return found;
  Py_RETURN_NONE;
}

// soft_topk_of_selectable(input, k, dim, tau, cdf, largest, mask, group, log): the soft top-k, of which a row
// with fewer entries that may be selected gets all of them
KHOT_CALL(soft_topk_of_selectable) {
  using namespace gpu;
  if (driver().launch == nullptr) Py_RETURN_NONE;
  Call given, counting;
  PyObject* const asked[] = {args[0], args[2], args[1]};
  if (!read(kSoftTopk, args, given) || given.negated || given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  if (!read(kSelectable, asked, counting)) Py_RETURN_NONE;
  const Tensor& x = given.inputs[0];
  given.signature.numbers[0] = given_fact(at::kDouble, x.numel() == given.shape.n);
  const auto prepared = find(given.signature, given.choices);
  const auto counts = find(counting.signature, counting.choices);
  if (prepared == nullptr || counts == nullptr) Py_RETURN_NONE;
  const c10::DeviceGuard current(x.device());
  Launches launches(x.device());
  RECORD_FUNCTION("khot::soft_topk", std::vector<c10::IValue>());
  Addresses rows;
  launches.reserve(bytes_before(given));
  if (!before(given, launches, rows)) Py_RETURN_NONE;
  given.numbers[0].given = given.numbers[0].tensor = solved(counting, *counts, launches, nullptr, &rows);
  if (!given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  return started_or_none(solved(given, *prepared, launches, nullptr, &rows), launches);
}

// sample_khot(logits, k, dim, estimator, design, tau, cdf, hard, mask, generator, least)
KHOT_CALL(sample_khot) {
  using namespace gpu;
  if (!named(args[3], "straight_through")) Py_RETURN_NONE;
  if ((args[4] != Py_None && !named(args[4], "pareto")) || args[5] != Py_None || args[7] != Py_True) {
    Py_RETURN_NONE;
  }
  static PyObject* const one = PyFloat_FromDouble(1);
  PyObject* const asked[] = {args[0], args[1], args[2], one, args[6], Py_True, args[8], Py_None, Py_False};
  Sampled sampled;
  if (!sampled.read(asked, args[9], args[10])) Py_RETURN_NONE;
  const Tensor& x = sampled.call.inputs[0];
  const c10::DeviceGuard current(x.device());
  const at::ScalarType dtype = x.scalar_type();
  Launches launches(x.device());
  RECORD_FUNCTION("khot::soft_topk", std::vector<c10::IValue>());
  Tensor sample = sampled.add(launches);
  if (!sample.defined() || !launches.start()) Py_RETURN_NONE;
  return THPVariable_Wrap(sample.scalar_type() == dtype ? std::move(sample) : sample.to(dtype));
}

// gated(logits, k, input, least): the input times, for each of its rows, a sample from the same logits (n,)
KHOT_CALL(gated) {
  using namespace gpu;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[2])) Py_RETURN_NONE;
  const Tensor &x = THPVariable_Unpack(args[0]), &input = THPVariable_Unpack(args[2]);
  if (x.dim() != 1 || !is_there(input) || input.device() != x.device() || input.numel() == 0) Py_RETURN_NONE;
  if (input.dim() == 0 || input.size(-1) != x.size(0)) Py_RETURN_NONE;
  if (!dtype_of(input) || input._fw_grad(0).defined()) Py_RETURN_NONE;
  static PyObject* const last = PyLong_FromLong(-1);
  static PyObject* const one = PyFloat_FromDouble(1);
  static PyObject* const cdf = PyUnicode_FromString("logistic");
  PyObject* const asked[] = {args[0], args[1], last, one, cdf, Py_True, Py_None, Py_None, Py_False};
  Sampled sampled;
  if (!sampled.read(asked, Py_None, args[3], &input)) Py_RETURN_NONE;
  const c10::DeviceGuard current(x.device());
  Launches launches(x.device());
  const bool constant = !input.requires_grad() || !at::GradMode::is_enabled();
  const bool alike = input.is_contiguous() && input.scalar_type() == sampled.draw.prepared->dtype;
  sampled.draw.multiplies = constant && alike;
  RECORD_FUNCTION("khot::soft_topk", std::vector<c10::IValue>());
  Tensor sample = sampled.add(launches);
  if (sample.defined() && !sampled.draw.multiplies) sample = times(input, sample, launches);
  return started_or_none(std::move(sample), launches);
}

}  // namespace khot
