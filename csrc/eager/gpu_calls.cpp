// Plain calls on a GPU by prepared launches.
#include "eager/gpu_calls.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/where.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace khot::gpu {
namespace {

// A new tensor like x. The way through torch's dispatcher takes longer than the allocation.
Tensor empty(at::IntArrayRef sizes, const Tensor& x, at::ScalarType dtype) {
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, x.device());
  return at::detail::empty_generic(sizes, c10::GetAllocator(x.device().type()), c10::DispatchKeySet(key),
                                   dtype, std::nullopt);
}

}  // namespace

Results run(const Prepared& prepared, const Tensor& x, c10::ArrayRef<const void*> inputs,
            c10::ArrayRef<const Number*> numbers) {
  Results results;
  auto values = prepared.parameters.values;
  bool aligned = true;
  const auto put_address = [&](int place, const void* address) {
    aligned = aligned && (reinterpret_cast<uintptr_t>(address) & kAligned) == 0;
    if (place != Parameters::kNot) std::memcpy(&values[place], &address, sizeof address);
  };
  for (size_t i = 0; i < inputs.size(); ++i) put_address(prepared.inputs[i], inputs[i]);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Numbered& given = prepared.numbers[i];
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
  if (!aligned) return {};
  results.first = empty(prepared.whole ? x.sizes() : x.sizes().slice(0, x.dim() - 1), x, prepared.dtype);
  put_address(prepared.results[0], results.first.mutable_data_ptr());
  if (prepared.kept_bytes > 0) results.kept = empty({prepared.kept_bytes / 8}, x, at::kDouble);
  if (prepared.scratch_bytes > 0) results.scratch = empty({prepared.scratch_bytes / 8}, x, at::kDouble);
  for (size_t i = 0; i < prepared.begins.size(); ++i) {
    void* const begin = (i < prepared.kept ? results.kept : results.scratch).mutable_data_ptr();
    put_address(prepared.results[i + 1], static_cast<char*>(begin) + prepared.begins[i]);
  }
  const bool started = aligned && gpu::start(*prepared.kernel, prepared.programs, values.data(),
                                             prepared.parameters.count, x.device());
  return started ? results : Results{};
}

namespace {

// The result of a call; undefined if it is left to other ways.
Tensor solved(Operator which, Call& call) {
  const auto prepared = find(call.signature);
  if (prepared == nullptr) return Tensor();
  RECORD_FUNCTION(std::string("khot::") + kOperators[which].name, std::vector<c10::IValue>());
  Tensor& x = call.inputs[0];
  const bool differentiable = which != kTopkMask && which != kSelectable;
  if (!differentiable && x.requires_grad()) x = x.detach();
  const c10::DeviceGuard current(x.device());
  if (call.negated) x = at::neg(x);
  if (call.mask != nullptr) {
    x = at::where(*call.mask, x, at::Scalar(-std::numeric_limits<double>::infinity()));
  }
  c10::SmallVector<const void*, 2> inputs;
  for (const Tensor& input : call.inputs) inputs.push_back(input.const_data_ptr());
  c10::SmallVector<const Number*, kMostNumbers> numbers;
  for (size_t i = 0; i < prepared->numbers.size(); ++i) numbers.push_back(&call.numbers[i]);
  const Results results = run(*prepared, x, inputs, numbers);
  if (!results.first.defined()) return Tensor();
  bool wanted = x.requires_grad();
  for (const Number& number : call.numbers) {
    wanted = wanted || (number.given.defined() && number.given.requires_grad());
  }
  if (differentiable && wanted && at::GradMode::is_enabled()) record(call, *prepared, results);
  return results.first;
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
  Tensor y = solved(which, given);
  if (!y.defined()) return nullptr;
  return THPVariable_Wrap(given.reversed ? at::flip(y, {-1}) : std::move(y));
}

}  // namespace khot::gpu

namespace khot {

// soft_topk_magnitude(input, k, dim, tau, p, rescale, mask, group)
KHOT_CALL(soft_topk_magnitude) {
  HANDLE_TH_ERRORS
  return gpu::call_or_none(gpu::kMagnitude, args, count);
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
  if (driver().launch == nullptr || args[6] != Py_None) Py_RETURN_NONE;
  Call given, counting;
  PyObject* const asked[] = {args[0], args[2], args[1]};
  if (!read(kSoftTopk, args, given) || given.negated || given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  if (!read(kSelectable, asked, counting)) Py_RETURN_NONE;
  given.signature.number(0) = number_fact(at::kDouble, given.inputs[0].numel() == given.inputs[0].size(-1));
  if (find(given.signature) == nullptr) Py_RETURN_NONE;
  given.numbers[0].given = given.numbers[0].tensor = solved(kSelectable, counting);
  if (!given.numbers[0].tensor.defined()) Py_RETURN_NONE;
  Tensor y = solved(kSoftTopk, given);
  if (!y.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
