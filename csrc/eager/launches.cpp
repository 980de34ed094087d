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

// use_driver(launch, stream, hooks, unused, device, again, around): what starts kernels; see `gpu::Driver`.
KHOT_CALL(use_driver) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 7, "khot: use_driver takes 7 arguments");
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
  next.stream = Py_NewRef(args[1]);
  next.hooks = Py_NewRef(args[2]);
  next.again = Py_NewRef(args[5]);
  next.around = Py_NewRef(args[6]);
  std::swap(gpu::driver(), next);
  Py_XDECREF(next.stream);
  Py_XDECREF(next.hooks);
  Py_XDECREF(next.again);
  Py_XDECREF(next.around);
  gpu::forget();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// remember(table, arguments, function, threads, shared, types): how launches with such arguments are started.
// The types are those of the arguments in Triton's words.
KHOT_CALL(remember) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && PyTuple_CheckExact(args[5]), "khot: remember takes 6 arguments");
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
  END_HANDLE_TH_ERRORS
}

// start(table, programs, arguments): whether a remembered kernel was started.
KHOT_CALL(start) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "khot: start takes 3 arguments");
  gpu::Arguments arguments;
  if (gpu::driver().launch == nullptr) Py_RETURN_FALSE;
  const int64_t table = PyLong_AsLongLong(args[0]), programs = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const auto kernels = gpu::tables().find(table);
  if (kernels == gpu::tables().end() || !arguments.read(args[2])) Py_RETURN_FALSE;
  const auto found = kernels->second.find(arguments.key());
  if (found == kernels->second.end()) Py_RETURN_FALSE;
  const std::shared_ptr<const gpu::Compiled> kernel = found->second;  // also if another thread forgets it
  const c10::Device device = arguments.first->device();
  const c10::DeviceGuard guard(device);
  gpu::Launches one(device);
  const gpu::Parameters parameters(*kernel, arguments.given.data());
  if (one.add(*kernel, programs, parameters) != nullptr && one.start()) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

namespace gpu {

void forget() {
  tables().clear();
  prepared().clear();
  arounds().clear();
}

namespace {

using Places = std::vector<int>;

// A launch that was made, and places among its arguments, or -1: of the inputs; of the results; of each
// number its pointer, its stride, and its parts by value; and of a cost its pointer and its strides, or
// nothing.
struct Made {
  Arguments arguments;
  std::shared_ptr<const Compiled> kernel;
  int64_t programs = 0;
  Places inputs, results, cost;
  std::vector<Places> numbers;

  const Argument& at(int place) const {
    TORCH_CHECK_INDEX(place >= 0 && place < arguments.count, "khot: there is no argument ", place);
    return arguments.given[place];
  }

  // (table, programs, arguments, (inputs, results, numbers, cost)); false if its kernel is not remembered.
  bool read(PyObject* launch) {
    TORCH_CHECK_TYPE(PyTuple_CheckExact(launch) && PyTuple_GET_SIZE(launch) == 4,
                     "khot: a launch is a tuple of 4");
    const auto kernels = tables().find(pybind11::cast<int64_t>(PyTuple_GET_ITEM(launch, 0)));
    programs = pybind11::cast<int64_t>(PyTuple_GET_ITEM(launch, 1));
    if (kernels == tables().end() || !arguments.read(PyTuple_GET_ITEM(launch, 2))) return false;
    const auto found = kernels->second.find(arguments.key());
    if (found == kernels->second.end()) return false;
    kernel = found->second;
    std::tie(inputs, results, numbers, cost) =
        pybind11::cast<std::tuple<Places, Places, std::vector<Places>, Places>>(
            pybind11::handle(PyTuple_GET_ITEM(launch, 3)));
    TORCH_CHECK_VALUE(numbers.size() <= kMostNumbers, "khot: prepare takes fewer numbers");
    return true;
  }

  // As it is made again, and how its numbers and its cost are given; nothing for a launch that cannot be.
  std::optional<Step> step(const Tensor& x, Signature& signature) const {
    Step step{kernel, programs, Parameters(*kernel, arguments.given.data()), {}, {}, {}};
    std::array<bool, kMostArguments> placed{};
    const auto place_of = [&](int place) {
      if (place < 0) return static_cast<int>(Parameters::kNot);
      at(place);
      placed[place] = true;
      return static_cast<int>(step.parameters.places[place]);
    };
    for (const int place : inputs) step.inputs.push_back(place_of(place));
    for (const int place : results) step.results.push_back(place_of(place));
    for (size_t i = 0; i < numbers.size(); ++i) {
      const Places& places = numbers[i];
      Numbered number{{}, true};
      if (places[0] >= 0 && at(places[0]).kind == Argument::Kind::kPointer) {
        const int64_t stride = at(places[1]).integer;
        number = {{place_of(places[0])}, false};
        signature.number(static_cast<int>(i)) = number_fact(at(places[0]).dtype, stride == 0);
      } else {
        for (size_t part = 2; part < places.size(); ++part) number.places.push_back(place_of(places[part]));
      }
      step.numbers.push_back(std::move(number));
    }
    if (!cost.empty()) {
      const int64_t row = at(cost[1]).integer, column = at(cost[2]).integer;
      if (column != 1 || (row != 0 && row != x.size(-1))) return std::nullopt;
      signature.cost() = cost_fact(at(cost[0]).dtype, row != 0);
    }
    for (int i = 0; i < arguments.count; ++i) {
      // what was an address must be one of the call's own, and aligned
      const Argument& argument = arguments.given[i];
      if (argument.kind == Argument::Kind::kPointer && !(placed[i] && argument.aligned()))
        return std::nullopt;
    }
    return step;
  }
};

}  // namespace
}  // namespace gpu

// prepare(operator, backward, x, choices, launches, given): let plain calls with contiguous rows like those
// of x make these launches of remembered kernels (`Made`). `given` has, of a backward launch, what its inputs
// are; the bytes of all results, 0 for one that lies where the one before does; which numbers a forward
// launch passes on; whether its first result is read again; how many of the others are; which results of a
// backward launch are gradients of numbers; and whether it is made for these alone (prepared.h).
KHOT_CALL(prepare) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && THPVariable_Check(args[2]) && PyTuple_CheckExact(args[3]) &&
                       PyTuple_CheckExact(args[4]) && PyTuple_GET_SIZE(args[4]) > 0,
                   "khot: prepare takes 6 arguments");
  using namespace gpu;
  const Tensor& x = THPVariable_Unpack(args[2]);
  int64_t which = -1;
  for (size_t i = 0; i < std::size(kOperators); ++i) {
    if (named(args[0], kOperators[i].name)) which = static_cast<int64_t>(i);
  }
  TORCH_CHECK_VALUE(which >= 0, "khot: prepare knows no such operator");
  Signature signature(args[1] == Py_True ? backward_of(which) : which, x, x.size(-1));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); ++i) {
    PyObject* const choice = PyTuple_GET_ITEM(args[3], i);
    const auto fact = fact_of(choice);
    TORCH_CHECK_TYPE(fact && i < kMostChoices, "khot: prepare knows no such choice");
    signature.choice(static_cast<int>(i)) = *fact;
    choices()[*fact] = pybind11::reinterpret_borrow<pybind11::object>(choice);
  }
  std::vector<Made> launches(PyTuple_GET_SIZE(args[4]));
  for (size_t i = 0; i < launches.size(); ++i) {
    if (!launches[i].read(PyTuple_GET_ITEM(args[4], i))) Py_RETURN_FALSE;
  }
  const auto [sources, bytes, passed_on, keeps_result, kept, pulls, asked] =
      pybind11::cast<std::tuple<Places, std::vector<int64_t>, Places, bool, int, Places, bool>>(
          pybind11::handle(args[5]));
  const Made& first = launches[0];
  TORCH_CHECK_VALUE(!bytes.empty() && bytes.size() == first.results.size(), "khot: prepare needs results");
  auto made = std::make_shared<Prepared>();
  made->dtype = first.at(first.results[0]).dtype;
  made->whole = bytes[0] == x.numel() * static_cast<int64_t>(c10::elementSize(made->dtype));
  made->kept = static_cast<size_t>(kept);
  for (size_t i = 1; i < bytes.size(); ++i) {
    int64_t& end = i <= made->kept ? made->kept_bytes : made->scratch_bytes;
    made->begins.push_back(bytes[i] == 0 && i > 1 ? made->begins.back() : end);
    end += (bytes[i] + 15) / 16 * 16;
  }
  for (const Made& launch : launches) {
    auto step = launch.step(x, signature);
    if (!step) Py_RETURN_FALSE;
    made->steps.push_back(std::move(*step));
  }
  for (const int result : pulls) {
    TORCH_CHECK_INDEX(result < static_cast<int>(bytes.size()), "khot: there is no result ", result);
    const bool of_rows = result > 0 && bytes[result] == x.numel() / x.size(-1) * 8 &&
                         first.at(first.results[result]).dtype == at::kDouble;
    made->pulls.push_back(of_rows ? result : -1);
  }
  signature.asked() = asked;
  made->sources = sources;
  made->passed_on = passed_on;
  made->keeps_result = keeps_result;
  if (prepared().size() >= kMostPrepared) prepared().clear();
  prepared()[signature] = std::move(made);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget(): all kernels and launches.
PyObject* forget(PyObject*, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  gpu::forget();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
