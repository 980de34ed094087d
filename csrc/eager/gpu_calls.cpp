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

// Start one of the launches, whose results lie at these addresses.
bool start(const Step& step, c10::ArrayRef<const void*> inputs, c10::ArrayRef<const Number*> numbers,
           c10::ArrayRef<void*> results, const Queue& queue) {
  auto values = step.parameters.values;
  bool aligned = true;
  const auto put_address = [&](int place, const void* address) {
    aligned = aligned && (reinterpret_cast<uintptr_t>(address) & kAligned) == 0;
    if (place != Parameters::kNot) std::memcpy(&values[place], &address, sizeof address);
  };
  for (size_t i = 0; i < inputs.size(); ++i) put_address(step.inputs[i], inputs[i]);
  for (size_t i = 0; i < results.size(); ++i) put_address(step.results[i], results[i]);
  for (size_t i = 0; i < numbers.size(); ++i) {
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
  return aligned && gpu::start(*step.kernel, step.programs, values.data(), step.parameters.count, queue);
}

}  // namespace

Results run(const Prepared& prepared, at::IntArrayRef sizes, c10::Device device,
            c10::ArrayRef<const void*> inputs, c10::ArrayRef<const Number*> numbers, const Queue& queue) {
  Results results;
  results.first = empty(prepared.whole ? sizes : sizes.slice(0, sizes.size() - 1), device, prepared.dtype);
  c10::SmallVector<void*, 6> addresses{results.first.mutable_data_ptr()};
  if (prepared.kept_bytes > 0) results.kept = empty({prepared.kept_bytes / 8}, device, at::kDouble);
  if (prepared.scratch_bytes > 0) results.scratch = empty({prepared.scratch_bytes / 8}, device, at::kDouble);
  for (size_t i = 0; i < prepared.begins.size(); ++i) {
    void* const begin = (i < prepared.kept ? results.kept : results.scratch).mutable_data_ptr();
    addresses.push_back(static_cast<char*>(begin) + prepared.begins[i]);
  }
  for (const Step& step : prepared.steps) {
    if (!start(step, inputs, numbers, addresses, queue)) return {};
  }
  return results;
}

namespace {

// The result of a call; undefined if it is left to other ways. With a draw it is a sample from what the
// launch results in, with the gradient of that. The rows that the launch reads may have been made already.
Tensor solved(const Call& call, const Queue& queue, const Draw* draw = nullptr,
              const Tensors* rows = nullptr) {
  const auto prepared = find_or_miss(call.signature);
  if (prepared == nullptr) return Tensor();
  const Operator which = call.which();
  RECORD_FUNCTION(std::string("khot::") + kOperators[which].name, std::vector<c10::IValue>());
  const Tensor& x = call.inputs[0];
  const c10::DeviceGuard current(x.device());
  Tensors made;
  if (rows == nullptr) rows = before(call, queue, made);
  if (rows == nullptr) return Tensor();
  c10::SmallVector<const void*, 2> inputs;
  for (const Tensor& input : *rows) inputs.push_back(input.const_data_ptr());
  c10::SmallVector<const Number*, kMostNumbers> numbers;
  for (size_t i = 0; i < prepared->steps[0].numbers.size(); ++i) numbers.push_back(&call.numbers[i]);
  const Results results = run(*prepared, call.shape.sizes, x.device(), inputs, numbers, queue);
  if (!results.first.defined()) return Tensor();
  Tensor y = draw == nullptr ? results.first : draw->sample(results.first, queue);
  if (!y.defined() || !after(call, queue, *rows, y)) return Tensor();
  if (prepared->whole && (draw == nullptr || draw->rows == nullptr)) call.shape.put_back(y);
  bool wanted = x.requires_grad();
  for (const Number& number : call.numbers) {
    wanted = wanted || (number.given.defined() && number.given.requires_grad());
  }
  const bool differentiable = which != kTopkMask && which != kSelectable;
  if (differentiable && wanted && at::GradMode::is_enabled()) record(call, *prepared, results, y);
  return y;
}

// A sample by Pareto's design from the soft top-k that is asked for; for each row of `rows`, if there are
// some, from the same probabilities. Undefined if it is left to other ways.
Tensor sampled(PyObject* const* asked, PyObject* generator, PyObject* least, const Tensor* rows,
               Queue& queue) {
  Call given;
  if (driver().launch == nullptr || !read(kSoftTopk, asked, given)) return Tensor();
  const at::ScalarType dtype = given.inputs[0].scalar_type();
  const bool narrow = given.inputs[0].element_size() < 4;
  if (narrow) given.signature.dtype() = static_cast<int64_t>(at::kFloat);
  Draw draw;
  if (find_or_miss(given.signature) == nullptr || !draw.find(given.signature, generator, least, rows)) {
    return Tensor();
  }
  if (narrow) given.inputs[0] = given.inputs[0].to(at::kFloat);
  queue = queue_of(given.inputs[0].device());
  Tensor sample = solved(given, queue, &draw);
  // Gradients of many rows are summed in float before they get the dtype of the logits.
  return sample.defined() && narrow && rows == nullptr ? sample.to(dtype) : sample;
}

// The input times a sample for each of its rows, with the gradient that torch has of a product.
Tensor times(const Tensor& input, const Tensor& sample, const Queue& queue) {
  if (!input.is_contiguous() || input.scalar_type() != sample.scalar_type()) {
    return at::mul(input, sample.to(input.scalar_type()));
  }
  const c10::DeviceGuard current(input.device());
  Tensor result = product(input, sample, queue);
  if (!result.defined()) return at::mul(input, sample);
  const bool of_input = input.requires_grad(), of_sample = sample.requires_grad();
  if (at::GradMode::is_enabled() && (of_input || of_sample)) {
    const auto node = make_node<torch::autograd::generated::MulBackward0>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, sample));
    node->self_scalar_type = node->other_scalar_type = input.scalar_type();
    if (of_input) node->other_ = torch::autograd::SavedVariable(sample, false);
    if (of_sample) node->self_ = torch::autograd::SavedVariable(input, false);
    torch::autograd::set_history(result, node);
  }
  return result;
}

PyObject* wrapped_or_none(Tensor y) {
  if (!y.defined()) Py_RETURN_NONE;
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
  Tensor y = solved(given, queue_of(given.inputs[0].device()));
  return y.defined() ? THPVariable_Wrap(std::move(y)) : nullptr;
}

}  // namespace khot::gpu

namespace khot {

// missed(): whether the last call that was asked for is plain, but has no prepared launch.
PyObject* missed(PyObject*, PyObject* const*, Py_ssize_t) { return PyBool_FromLong(gpu::is_missed()); }

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
  if (find_or_miss(given.signature) == nullptr || find_or_miss(counting.signature) == nullptr) Py_RETURN_NONE;
  const c10::DeviceGuard current(x.device());
  const Queue queue = queue_of(x.device());
  Tensors made;
  const Tensors* const rows = before(given, queue, made);
  if (rows == nullptr) Py_RETURN_NONE;
  given.numbers[0].given = given.numbers[0].tensor = solved(counting, queue, nullptr, rows);
  if (!given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  return wrapped_or_none(solved(given, queue, nullptr, rows));
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
  Queue queue;
  return wrapped_or_none(sampled(asked, args[9], args[10], nullptr, queue));
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
  Queue queue;
  const Tensor sample = sampled(asked, Py_None, args[3], &input, queue);
  return wrapped_or_none(sample.defined() ? times(input, sample, queue) : Tensor());
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
