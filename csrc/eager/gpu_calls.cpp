// Plain calls on a GPU by prepared launches.
#include "eager/gpu_calls.h"

#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <cstring>
#include <string>
#include <vector>

namespace khot::gpu {
namespace {

// Add one of the launches, whose results lie at these addresses.
bool add(const Step& step, c10::ArrayRef<const void*> inputs, c10::ArrayRef<const Number*> numbers,
         c10::ArrayRef<void*> results, Launches& launches) {
  uint64_t* const values = launches.add(*step.kernel, step.programs, step.parameters);
  bool aligned = values != nullptr;
  const auto put_address = [&](int place, const void* address) {
    aligned = aligned && (reinterpret_cast<uintptr_t>(address) & kAligned) == 0;
    if (aligned && place != Parameters::kNot) std::memcpy(&values[place], &address, sizeof address);
  };
  for (size_t i = 0; i < inputs.size(); ++i) put_address(step.inputs[i], inputs[i]);
  for (size_t i = 0; i < results.size(); ++i) put_address(step.results[i], results[i]);
  for (size_t i = 0; aligned && i < numbers.size(); ++i) {
    const Numbered& given = step.numbers[i];
    if (!given.by_value) {
      put_address(given.places[0], numbers[i]->tensor.const_data_ptr());
      continue;
    }
    // as khot/_kernels/triton/layout.py does
    double rest = numbers[i]->value;
    for (const int place : given.places) {
      const float part = static_cast<float>(rest);
      if (place != Parameters::kNot) std::memcpy(&values[place], &part, sizeof part);
      rest -= part;
    }
  }
  return aligned;
}

}  // namespace

bool add(const Prepared& prepared, c10::ArrayRef<const void*> inputs, c10::ArrayRef<const Number*> numbers,
         const Results& results, Launches& launches) {
  c10::SmallVector<void*, 6> addresses{results.first};
  for (size_t i = 0; i < prepared.begins.size(); ++i) {
    void* const begin = i < prepared.kept ? results.kept : results.scratch;
    addresses.push_back(static_cast<char*>(begin) + prepared.begins[i]);
  }
  for (const Step& step : prepared.steps) {
    if (!add(step, inputs, numbers, addresses, launches)) return false;
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
  const bool again =
      recorded && (prepared.keeps_result || (call.which() == kSoftSort && call.mask.defined()));
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
  const Results results{lasts ? first.mutable_data_ptr() : launches.take(first_bytes),
                        kept.defined() ? kept.mutable_data_ptr() : launches.take(kept_bytes),
                        launches.take(prepared.scratch_bytes)};
  c10::SmallVector<const Number*, kMostNumbers> numbers;
  for (size_t i = 0; i < prepared.steps[0].numbers.size(); ++i) numbers.push_back(&call.numbers[i]);
  if (!add(prepared, *rows, numbers, results, launches)) return Tensor();
  Tensor y = first;
  if (draw != nullptr) {
    y = draw->sample(results.first, sizes, device, launches);
    if (!y.defined()) return Tensor();
  } else if (changed) {
    y = empty(own, device, prepared.dtype);
    if (!after(call, launches, *rows, results.first, y)) return Tensor();
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
    if (is_narrow()) call.signature.dtype() = static_cast<int64_t>(at::kFloat);
    prepared = find_or_miss(call.signature);
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

// One of the operators that are plain on a GPU alone.
PyObject* call_or_none(Operator which, PyObject* const* args, Py_ssize_t count) {
  const auto expected = static_cast<Py_ssize_t>(std::strlen(kOperators[which].roles));
  TORCH_CHECK_TYPE(count == expected, "khot: ", kOperators[which].name, " takes ", expected, " arguments");
  if (PyObject* const found = call(which, args)) return found;
  Py_RETURN_NONE;
}

}  // namespace

PyObject* call(Operator which, PyObject* const* args) {
  if (driver().launch == nullptr) return nullptr;
  Call given;
  if (!read(which, args, given)) return nullptr;
  const auto prepared = find_or_miss(given.signature);
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
  const auto prepared = find_or_miss(given.signature);
  if (prepared == nullptr) return false;
  RECORD_FUNCTION("khot::topk", std::vector<c10::IValue>());
  const c10::Device device = given.inputs[0].device();
  const c10::DeviceGuard current(device);
  Launches launches(device);
  launches.reserve(bytes_before(given));
  Addresses rows;
  if (!before(given, launches, rows)) return false;
  at::DimVector sizes = given.shape.sizes;
  sizes.back() = PyLong_AsLong(args[1]);
  values = empty(sizes, device, prepared->dtype), indices = empty(sizes, device, at::kLong);
  const Results results{values.mutable_data_ptr(), nullptr, indices.mutable_data_ptr()};
  return add(*prepared, rows, {}, results, launches) && launches.start();
}

}  // namespace khot::gpu

namespace khot {

// missed(): whether the last call that was asked for is plain, but has no prepared launch.
PyObject* missed(PyObject*, PyObject* const*, Py_ssize_t) { return PyBool_FromLong(gpu::is_missed()); }

// soft_rank(input, dim, tau, cdf, descending, method, regularization, mask)
KHOT_CALL(soft_rank) {
  HANDLE_TH_ERRORS
  return gpu::call_or_none(gpu::kSoftRank, args, count);
  END_HANDLE_TH_ERRORS
}

// soft_sort(input, dim, tau, cdf, descending, method, regularization, mask)
KHOT_CALL(soft_sort) {
  HANDLE_TH_ERRORS
  return gpu::call_or_none(gpu::kSoftSort, args, count);
  END_HANDLE_TH_ERRORS
}

// soft_topk_magnitude(input, k, dim, tau, p, rescale, mask, group)
KHOT_CALL(soft_topk_magnitude) {
  HANDLE_TH_ERRORS
  const bool masked = count == 8 && args[6] != Py_None;
  return gpu::call_or_none(masked ? gpu::kSizes : gpu::kMagnitude, args, count);
  END_HANDLE_TH_ERRORS
}

// soft_budget(input, cost, budget, dim, tau, cdf, by, at_most, largest, mask, hard, group)
KHOT_CALL(soft_budget) {
  HANDLE_TH_ERRORS
  return gpu::call_or_none(gpu::kBudget, args, count);
  END_HANDLE_TH_ERRORS
}

// selectable(input, dim, most)
KHOT_CALL(selectable) {
  HANDLE_TH_ERRORS
  return gpu::call_or_none(gpu::kSelectable, args, count);
  END_HANDLE_TH_ERRORS
}

// soft_topk_of_selectable(input, k, dim, tau, cdf, largest, mask, group, log): the soft top-k, of which a row
// with fewer entries that may be selected gets all of them
KHOT_CALL(soft_topk_of_selectable) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 9, "khot: soft_topk_of_selectable takes 9 arguments");
  using namespace gpu;
  if (driver().launch == nullptr) Py_RETURN_NONE;
  Call given, counting;
  PyObject* const asked[] = {args[0], args[2], args[1]};
  if (!read(kSoftTopk, args, given) || given.negated || given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  if (!read(kSelectable, asked, counting)) Py_RETURN_NONE;
  const Tensor& x = given.inputs[0];
  given.signature.number(0) = number_fact(at::kDouble, x.numel() == given.shape.n);
  const auto prepared = find_or_miss(given.signature), counts = find_or_miss(counting.signature);
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
  END_HANDLE_TH_ERRORS
}

// sample_khot(logits, k, dim, estimator, design, tau, cdf, hard, mask, generator, least)
KHOT_CALL(sample_khot) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 11, "khot: sample_khot takes 11 arguments");
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
  END_HANDLE_TH_ERRORS
}

// gated(logits, k, input, least): the input times, for each of its rows, a sample from the same logits (n,)
KHOT_CALL(gated) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "khot: gated takes 4 arguments");
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
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
