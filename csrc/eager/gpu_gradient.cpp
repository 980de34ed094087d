// The gradients of plain calls on a GPU: a node of autograd that makes a prepared launch.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "eager/gpu_calls.h"

namespace khot::gpu {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What the gradient of a call is computed from.
struct Saved {
  Call call;
  Tensor result, kept;          // the first result of the launch if it is read again, and others
  Tensor factor;                // of the call's result, if there is one
  std::vector<int64_t> wanted;  // whether a gradient of the rows, and of each number, is
};

// The gradients of the rows and the numbers by prepared launches; empty if there are none.
variable_list pulled(const Saved& saved, const Tensor& grad) {
  const Call& call = saved.call;
  const Tensor& x = call.inputs[0];
  const bool asked = saved.wanted[1] != 0 || saved.wanted[2] != 0;
  const auto prepared = find_backward(call.signature, asked);
  if (prepared == nullptr) return {};
  for (size_t i = 0; i < kMostNumbers; ++i) {
    if (saved.wanted[1 + i] && (i >= prepared->pulls.size() || prepared->pulls[i] < 0)) return {};
  }
  const c10::DeviceGuard current(x.device());
  Launches launches(x.device());
  launches.reserve(bytes_before(call) + bytes_before_gradient(call, grad) +
                   (asked ? 0 : prepared->scratch_bytes));
  Addresses rows;
  if (!before(call, launches, rows)) return {};
  Tensor first = empty(call.shape.sizes, x.device(), prepared->dtype), scratch;
  if (asked) scratch = empty({prepared->scratch_bytes / 8}, x.device(), at::kDouble);
  Slots slots = slots_of(rows);
  slots[kGrad] = before_gradient(call, launches, saved.result, grad);
  if (slots[kGrad] == nullptr) return {};
  if (saved.result.defined()) slots[kFirst] = saved.result.const_data_ptr();
  if (saved.kept.defined()) slots[kKept] = saved.kept.const_data_ptr();
  slots[kResult] = first.mutable_data_ptr();
  slots[kScratch] = asked ? scratch.mutable_data_ptr() : launches.take(prepared->scratch_bytes);
  if (!add(*prepared, slots, call.numbers, launches)) return {};
  if (!after_gradient(call, launches, first) || !launches.start()) return {};
  variable_list grads(1 + kMostNumbers);
  grads[0] = std::move(first);
  for (int i = 0; i < kMostNumbers; ++i) {
    if (!saved.wanted[1 + i]) continue;
    const Tensor of_rows = scratch.narrow(0, prepared->pulls[i] / 8, x.numel() / call.shape.n);
    const Tensor& given = call.numbers[i].given;
    grads[1 + i] = at::sum_to(of_rows.view(call.shape.batch()), given.sizes()).to(given.scalar_type());
  }
  return grads;
}

// The gradients in operations that can be differentiated and mapped: Python makes the call in the ordinary
// way.
variable_list pulled_again(const Saved& saved, const Tensor& grad) {
  const Call& call = saved.call;
  const Described& described = kOperators[call.which()];
  pybind11::list given, asked;  // the arguments, and which of them
  variable_list grads(1 + kMostNumbers);
  c10::SmallVector<int, 1 + kMostNumbers> places;
  int input = 0, number = 0, choice = 0;
  const auto ask = [&](int place) {
    if (!saved.wanted[place]) return;
    asked.append(given.size() - 1);
    places.push_back(place);
  };
  const auto wrapped = [](const Tensor& x) {
    return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x));
  };
  for (const char* role = described.roles; *role != 0; ++role) {
    if (*role == 'x' || *role == 'w') {
      given.append(wrapped(call.inputs[input++]));
      if (*role == 'x') ask(0);
    } else if (*role == 'k' || *role == 'i' || *role == 't') {
      const Number& one = call.numbers[number++];
      if (one.given.defined()) {
        given.append(wrapped(saved.wanted[number] ? one.given : one.tensor));
        ask(number);
      } else {
        given.append(one.value);
      }
    } else if (*role == 'c' || *role == 'o' || *role == '*') {
      given.append(choices().at(call.signature.choices[choice++]));
    } else if (*role == 'd') {
      given.append(call.shape.axis);
    } else if (*role == 'l') {
      given.append(!call.negated);
    } else if (*role == 'T' || *role == 'F') {
      given.append(*role == 'T');
    } else if (*role == 'm' && call.mask.defined()) {
      given.append(wrapped(call.mask));
    } else {
      given.append(pybind11::none());
    }
  }
  const auto results = driver().again(described.name, given, asked, wrapped(grad)).cast<pybind11::tuple>();
  for (size_t i = 0; i < places.size(); ++i) grads[places[i]] = THPVariable_Unpack(results[i].ptr());
  return grads;
}

variable_list gradient(const Saved& saved, const Tensor& given) {
  if (!given.defined()) return variable_list(1 + kMostNumbers);
  const Tensor& x = saved.call.inputs[0];
  // of a sample that has more rows than x
  const Tensor grad = at::sum_to(saved.factor.defined() ? given * saved.factor : given, x.sizes());
  const bool direct = !at::GradMode::is_enabled() && plain_state() && is_there(grad) && is_there(x) &&
                      grad.scalar_type() == x.scalar_type() && grad.sizes() == x.sizes() &&
                      !grad._fw_grad(0).defined();
  const pybind11::gil_scoped_acquire alone;
  if (!direct) return pulled_again(saved, grad);
  RECORD_FUNCTION(std::string("khot::") + kOperators[saved.call.which()].name + "_backward",
                  std::vector<c10::IValue>());
  variable_list grads = pulled(saved, grad);
  return grads.empty() ? pulled_again(saved, grad) : grads;
}

// In the place of torch::autograd::Function, whose contexts and lists take as long as the launch.
struct Node : torch::autograd::Node {
  Signature signature;
  int64_t axis = -1;
  bool negated = false, ascending = false;
  std::array<double, kMostNumbers> values{};
  // the inputs; the mask; the numbers, where they are tensors; the result; its factor
  std::vector<SavedVariable> given;
  size_t inputs = 1;
  Tensor result, kept;  // of the launch; the result if it is not that of the call

  std::string name() const override {
    return std::string("khot::") + kOperators[signature.which].name + "_backward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& one : given) one.reset_data();
    result.reset();
    kept.reset();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradient(unpacked(), grads[0]);
  }

  std::vector<int64_t> wanted() const {
    std::vector<int64_t> found;
    for (const torch::autograd::Edge& edge : next_edges()) found.push_back(edge.is_valid());
    return found;
  }

  // From the tensors in the order of `given`.
  template <class Next>
  Saved unpacked(const Next& next) const {
    Saved saved;
    Call& call = saved.call;
    call.signature = signature, call.negated = negated, call.ascending = ascending;
    for (size_t i = 0; i < inputs; ++i) call.inputs.push_back(next());
    call.shape = Shape(call.inputs[0], axis);
    call.mask = next();
    for (int i = 0; i < kMostNumbers; ++i) {
      Number& number = call.numbers[i];
      number.value = values[i];
      number.given = next();
      if (number.given.defined()) number.tensor = for_launch(number.given, call.shape.batch());
    }
    saved.result = next();
    saved.factor = next();
    return saved;
  }

  Saved unpacked() {
    const auto self = getptr();
    size_t at = 0;
    Saved saved = unpacked([&] { return given[at++].unpack(self); });
    if (result.defined()) saved.result = result;
    saved.kept = kept;
    saved.wanted = wanted();
    return saved;
  }

  // Compiled autograd: the gradient is one function, of which it looks into nothing.
  std::vector<int64_t> facts() const {
    const Signature::Facts own = signature.facts();
    std::vector<int64_t> found(own.begin(), own.end());
    for (const int64_t fact : {axis, int64_t{negated}, int64_t{ascending}, static_cast<int64_t>(inputs)}) {
      found.push_back(fact);
    }
    return found;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    for (const int64_t fact : facts()) args.collect(fact);
    for (const double value : values) args.collect(value);
    args.collect(given, true);
    args.collect(result);
    args.collect(kept);
  }

  static variable_list apply_functional(const variable_list& grads, const std::vector<c10::IValue>& args) {
    torch::dynamo::autograd::PackedArgs packed(args);
    Node node;
    const auto facts = packed.unpack<std::vector<int64_t>>();
    const auto end = facts.end() - 4;
    std::memcpy(static_cast<void*>(&node.signature), facts.data(), sizeof node.signature);
    node.axis = end[0], node.negated = end[1] != 0, node.ascending = end[2] != 0;
    node.inputs = static_cast<size_t>(end[3]);
    const auto values = packed.unpack<std::vector<double>>();
    std::copy(values.begin(), values.end(), node.values.begin());
    Saved saved = node.unpacked([&] { return packed.unpack<Tensor>(); });
    const auto result = packed.unpack<Tensor>();
    if (result.defined()) saved.result = result;
    saved.kept = packed.unpack<Tensor>();
    saved.wanted = packed.unpack<std::vector<int64_t>>();
    return gradient(saved, grads[0]);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    for (SavedVariable& one : given) swapped.before(one);
    swapped.before(result);
    swapped.before(kept);
    torch::dynamo::autograd::PackedArgs packed;
    packed.pack(facts());
    packed.pack(std::vector<double>(values.begin(), values.end()));
    const auto self = getptr();
    for (SavedVariable& one : given) packed.pack(one.unpack(self));
    packed.pack(result);
    packed.pack(kept);
    packed.pack(wanted());
    const std::vector<c10::IValue> args = packed.vec();
    const auto metadata =
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::
            pack(torch::dynamo::autograd::get_input_metadata(next_edges()));
    std::vector<at::TypePtr> schema;
    for (const c10::IValue& value : args) {
      schema.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
    }
    const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string function =
        python->bind_function(swapped.get_py_compiler(), name(), apply_functional, schema,
                              /*is_custom_function=*/true, /*is_traceable=*/false);
    variable_list results =
        python->call_function(swapped.get_py_compiler(), "apply_functional", function, grads, args, metadata);
    for (SavedVariable& one : given) swapped.after(one);
    swapped.after(result);
    swapped.after(kept);
    return results;
  }
};

}  // namespace

void record(const Call& call, const Tensor& first, const Tensor& kept, const Tensor& factor, Tensor& y) {
  const auto node = make_node<Node>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(call.inputs[0], call.numbers[0].given, call.numbers[1].given));
  node->signature = call.signature;
  node->axis = call.shape.axis, node->negated = call.negated, node->ascending = call.ascending;
  node->inputs = call.inputs.size();
  node->given.reserve(call.inputs.size() + kMostNumbers + 3);
  for (const Tensor& input : call.inputs) node->given.emplace_back(input, false);
  node->given.emplace_back(call.mask, false);
  for (int i = 0; i < kMostNumbers; ++i) {
    node->values[i] = call.numbers[i].value;
    node->given.emplace_back(call.numbers[i].given, false);
  }
  node->kept = kept;
  torch::autograd::set_history(y, node);
  const bool own = y.is_same(first);
  if (!own) node->result = first;
  node->given.emplace_back(own ? y : Tensor(), true);
  node->given.emplace_back(factor, false);
}

}  // namespace khot::gpu
