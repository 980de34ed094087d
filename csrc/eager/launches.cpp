// What the ordinary way tells khot._eager of the kernels of a GPU, and has it start.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "eager/calls.h"
#include "eager/plain.h"
#include "eager/prepared.h"

namespace khot {

// use_driver(launch, stream, hooks, unused, device, again, around, plan): what starts kernels; see
// `gpu::Driver`.
KHOT_CALL(use_driver) {
  using c10::DispatchKey;
  gpu::Driver next;
  next.launch = reinterpret_cast<gpu::Launch>(PyLong_AsVoidPtr(args[0]));
  next.unused = static_cast<int>(PyLong_AsLong(args[3]));
  if (PyErr_Occurred()) return nullptr;
  TORCH_CHECK_VALUE(next.unused >= 0 && next.unused <= 4, "khot: unused must lie in [0, 4]");
  if (named(args[4], "cpu")) {  // for tests, which have no other device
    next.device = c10::DeviceType::CPU;
    next.keys = c10::DispatchKeySet(
        {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU});
  } else {
    next.keys = c10::DispatchKeySet({DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                     DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA});
  }
  const auto kept = [](PyObject* given) { return pybind11::reinterpret_borrow<pybind11::object>(given); };
  next.stream = kept(args[1]), next.hooks = kept(args[2]);
  next.again = kept(args[5]), next.around = kept(args[6]), next.plan = kept(args[7]);
  gpu::driver() = std::move(next);
  gpu::forget();
  Py_RETURN_NONE;
}

// remember(table, arguments, function, threads, shared, types): how launches with such arguments are started.
// The types are those of the arguments in Triton's words.
KHOT_CALL(remember) {
  TORCH_CHECK_TYPE(PyTuple_CheckExact(args[5]), "khot: types must be a tuple");
  gpu::Arguments arguments;
  auto kernel = std::make_shared<gpu::Compiled>();
  const int64_t table = PyLong_AsLongLong(args[0]);
  kernel->function = PyLong_AsVoidPtr(args[2]);
  kernel->threads = static_cast<unsigned>(PyLong_AsUnsignedLong(args[3]));
  kernel->shared = static_cast<unsigned>(PyLong_AsUnsignedLong(args[4]));
  if (PyErr_Occurred()) return nullptr;
  if (!arguments.read(args[1]) || PyTuple_GET_SIZE(args[5]) != arguments.count) Py_RETURN_FALSE;
  for (int i = 0; i < arguments.count; ++i) {
    PyObject* const type = PyTuple_GET_ITEM(args[5], i);
    using gpu::Passed;
    using Kind = gpu::Argument::Kind;
    const Kind kind = arguments.given[i].kind;
    const bool pointer =
        PyUnicode_CheckExact(type) && PyUnicode_GET_LENGTH(type) > 1 && PyUnicode_READ_CHAR(type, 0) == '*';
    if (named(type, "constexpr")) {
      kernel->passed.push_back(Passed::kNot);
    } else if (kind == Kind::kPointer && pointer) {
      kernel->passed.push_back(Passed::kPointer);
    } else if (kind == Kind::kInteger && named(type, "i32")) {
      kernel->passed.push_back(Passed::kInt32);
    } else if (kind == Kind::kInteger && named(type, "i64")) {
      kernel->passed.push_back(Passed::kInt64);
    } else if (kind == Kind::kReal && named(type, "fp32")) {
      kernel->passed.push_back(Passed::kFloat32);
    } else {
      Py_RETURN_FALSE;
    }
  }
  gpu::tables()[table][arguments.key()] = std::move(kernel);
  Py_RETURN_TRUE;
}

// start(table, programs, arguments): whether a remembered kernel was started.
KHOT_CALL(start) {
  gpu::Arguments arguments;
  if (gpu::driver().launch == nullptr) Py_RETURN_FALSE;
  const int64_t table = PyLong_AsLongLong(args[0]), programs = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  if (!arguments.read(args[2])) Py_RETURN_FALSE;
  const auto kernel = gpu::compiled(table, arguments);  // also if another thread forgets it
  if (kernel == nullptr) Py_RETURN_FALSE;
  const c10::Device device = arguments.first->device();
  const c10::DeviceGuard guard(device);
  gpu::Launches one(device);
  const gpu::Parameters parameters(*kernel, arguments.given.data());
  if (one.add(*kernel, programs, parameters) != nullptr && one.start()) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

namespace gpu {

namespace {

constexpr size_t kMostKnown = 4096;  // then all are forgotten

// What is known of the calls of a kind, of which there was one: whether there was a plan, and what it made.
struct Known {
  std::shared_ptr<const Prepared> prepared;
  bool is_planned = false;
};

std::unordered_map<Signature, Known, Hash>& known() {
  static std::unordered_map<Signature, Known, Hash> all;
  return all;
}

// A launch of a plan, (table, programs, arguments, addresses, parts); nothing if it cannot be made again.
std::optional<Step> step_of(pybind11::handle launch) {
  using Found = std::tuple<int64_t, int64_t, pybind11::tuple, std::vector<std::array<int64_t, 3>>,
                           std::vector<std::array<int, 3>>>;
  const auto [table, programs, given, addresses, parts] = launch.cast<Found>();
  Arguments arguments;
  if (!arguments.read(given.ptr())) return std::nullopt;
  const auto kernel = compiled(table, arguments);
  if (kernel == nullptr) return std::nullopt;  // it is left to Triton
  Step step{kernel, programs, Parameters(*kernel, arguments.given.data()), {}, {}};
  for (const auto& [at, slot, offset] : addresses) {
    if (!arguments.given[at].aligned() || (offset & static_cast<int64_t>(kAligned)) != 0) return std::nullopt;
    const int place = step.parameters.places[at];
    if (place != Parameters::kNot) step.addresses.push_back({place, static_cast<Slot>(slot), offset});
  }
  for (const auto& [at, number, part] : parts) {
    const int place = step.parameters.places[at];
    if (place != Parameters::kNot) step.parts.push_back({place, number, part});
  }
  return step;
}

// What the plan of khot/_kernels/triton/plans.py makes; null if there is none.
std::shared_ptr<const Prepared> prepared_by(pybind11::handle plan) {
  if (plan.is_none()) return nullptr;
  using Found =
      std::tuple<pybind11::tuple, at::ScalarType, bool, int64_t, int64_t, std::vector<int64_t>, bool>;
  const auto [launches, dtype, whole, kept, scratch, pulls, reads_first] = plan.cast<Found>();
  Prepared made{{}, dtype, whole, kept, scratch, pulls, reads_first};
  for (const pybind11::handle launch : launches) {
    auto step = step_of(launch);
    if (!step) return nullptr;
    made.steps.push_back(std::move(*step));
  }
  return std::make_shared<const Prepared>(std::move(made));
}

// How a number or a cost is given, from its fact: its dtype, and a flag; or None.
pybind11::object given_as(int64_t fact) {
  if (fact == 0) return pybind11::none();
  return pybind11::make_tuple(static_cast<at::ScalarType>(fact >> 2), (fact & 1) != 0);
}

// What Python plans for calls with this signature.
pybind11::object plan_of(const Signature& signature, const pybind11::tuple& chosen) {
  const bool backward = signature.which < 0;
  const int64_t which = backward ? backward_of(signature.which) : signature.which;
  const Described& described = kOperators[which];
  pybind11::list numbers;
  for (const char* role = described.roles; *role != 0; ++role) {
    if (std::strchr("kit", *role) == nullptr) continue;
    numbers.append(given_as(signature.numbers[numbers.size()]));
  }
  const c10::Device device(driver().device, static_cast<c10::DeviceIndex>(signature.device));
  return driver().plan(described.name, backward, device, static_cast<at::ScalarType>(signature.dtype),
                       signature.rows, signature.n, chosen, pybind11::tuple(numbers),
                       given_as(signature.cost), signature.asked != 0);
}

// The launches that Python plans, which are known from here on; null if there is no plan.
std::shared_ptr<const Prepared> planned(const Signature& signature, const pybind11::list& chosen) {
  Known found{nullptr, true};
  try {
    found.prepared = prepared_by(plan_of(signature, pybind11::tuple(chosen)));
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return nullptr;  // the ordinary way has the error, if it is one there, too
  }
  known()[signature] = found;
  return found.prepared;
}

}  // namespace

void forget() {
  tables().clear();
  known().clear();
  arounds().clear();
}

std::shared_ptr<const Prepared> find(const Signature& signature, const Choices& chosen) {
  const auto [found, is_new] = known().try_emplace(signature);
  if (is_new && known().size() > kMostKnown) known().clear();
  if (is_new || found->second.is_planned) return is_new ? nullptr : found->second.prepared;
  pybind11::list given;
  for (int i = 0; i < kMostChoices && signature.choices[i] != 0; ++i) {
    given.append(pybind11::reinterpret_borrow<pybind11::object>(chosen[i]));
    choices()[signature.choices[i]] = given[i];
  }
  return planned(signature, given);
}

std::shared_ptr<const Prepared> find_backward(Signature signature, bool asked) {
  signature.which = backward_of(signature.which);
  signature.asked = asked ? 1 : 0;
  const auto found = known().find(signature);
  if (found != known().end()) return found->second.prepared;
  pybind11::list given;
  for (int i = 0; i < kMostChoices && signature.choices[i] != 0; ++i) {
    given.append(choices().at(signature.choices[i]));
  }
  return planned(signature, given);
}

}  // namespace gpu

// forget(): all kernels and launches.
PyObject* forget(PyObject* const*) {
  gpu::forget();
  Py_RETURN_NONE;
}

}  // namespace khot
