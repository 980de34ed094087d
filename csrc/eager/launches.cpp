// What the ordinary way tells khot._eager of the kernels of a GPU, and has it start.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "eager/calls.h"
#include "eager/plain.h"
#include "eager/prepared.h"

namespace khot {

// use_driver(launch, stream, hooks, unused, device, again): what starts kernels; see `gpu::Driver`.
KHOT_CALL(use_driver) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "khot: use_driver takes 6 arguments");
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
  std::swap(gpu::driver(), next);
  Py_XDECREF(next.stream);
  Py_XDECREF(next.hooks);
  Py_XDECREF(next.again);
  gpu::tables().clear();
  gpu::prepared().clear();
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
  const gpu::Parameters parameters(*kernel, arguments.given.data());
  if (gpu::start(*kernel, programs, parameters.values.data(), parameters.count, device)) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// prepare(operator, backward, x, choices, table, programs, arguments, given): let plain calls with contiguous
// rows like those of x make this launch of a remembered kernel. `given` has places among the arguments: of
// the inputs; what these are, for a backward launch; of the results; the bytes of all results but the first;
// of each number its pointer, its stride, and its parts by value; of a cost its pointer and its strides, or
// nothing; which numbers a forward launch passes on; whether its first result is read again; how many of the
// others are; which results of a backward launch are gradients of numbers; and whether it is made for these
// alone (prepared.h).
KHOT_CALL(prepare) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8 && THPVariable_Check(args[2]) && PyTuple_CheckExact(args[3]),
                   "khot: prepare takes 8 arguments");
  using namespace gpu;
  const Tensor& x = THPVariable_Unpack(args[2]);
  int64_t which = -1;
  for (size_t i = 0; i < std::size(kOperators); ++i) {
    if (named(args[0], kOperators[i].name)) which = static_cast<int64_t>(i);
  }
  TORCH_CHECK_VALUE(which >= 0, "khot: prepare knows no such operator");
  Signature signature(args[1] == Py_True ? backward_of(which) : which, x);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); ++i) {
    PyObject* const choice = PyTuple_GET_ITEM(args[3], i);
    const auto fact = fact_of(choice);
    TORCH_CHECK_TYPE(fact && i < kMostChoices, "khot: prepare knows no such choice");
    signature.choice(static_cast<int>(i)) = *fact;
    choices()[*fact] = pybind11::reinterpret_borrow<pybind11::object>(choice);
  }
  const int64_t table = PyLong_AsLongLong(args[4]), programs = PyLong_AsLongLong(args[5]);
  if (PyErr_Occurred()) return nullptr;
  const auto kernels = tables().find(table);
  Arguments arguments;
  if (kernels == tables().end() || !arguments.read(args[6])) Py_RETURN_FALSE;
  const auto kernel = kernels->second.find(arguments.key());
  if (kernel == kernels->second.end()) Py_RETURN_FALSE;

  using Places = std::vector<int>;
  const auto [inputs, sources, results, bytes, numbers, cost, passed_on, keeps_result, kept, pulls, asked] =
      pybind11::cast<std::tuple<Places, Places, Places, std::vector<int64_t>, std::vector<Places>, Places,
                                Places, bool, int, Places, bool>>(pybind11::handle(args[7]));
  auto made = std::make_shared<Prepared>();
  made->kernel = kernel->second;
  made->programs = programs;
  made->parameters = Parameters(*kernel->second, arguments.given.data());
  std::array<bool, kMostArguments> placed{};
  const auto at = [&](int place) -> const Argument& {
    TORCH_CHECK_INDEX(place >= 0 && place < arguments.count, "khot: there is no argument ", place);
    return arguments.given[place];
  };
  const auto place_of = [&](int place) {
    at(place);
    placed[place] = true;
    return static_cast<int>(made->parameters.places[place]);
  };
  using Kind = Argument::Kind;
  for (const int place : inputs) made->inputs.push_back(place_of(place));
  for (const int place : results) made->results.push_back(place_of(place));
  TORCH_CHECK_VALUE(!results.empty() && bytes.size() == results.size(), "khot: prepare needs results");
  made->dtype = at(results[0]).dtype;
  made->whole = bytes[0] == x.numel() * static_cast<int64_t>(c10::elementSize(made->dtype));
  made->kept = static_cast<size_t>(kept);
  for (size_t i = 1; i < bytes.size(); ++i) {
    int64_t& end = i <= made->kept ? made->kept_bytes : made->scratch_bytes;
    made->begins.push_back(end);
    end += (bytes[i] + 15) / 16 * 16;
  }
  TORCH_CHECK_VALUE(numbers.size() <= kMostNumbers, "khot: prepare takes fewer numbers");
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Places& places = numbers[i];
    Numbered number{{}, true};
    if (places[0] >= 0 && at(places[0]).kind == Kind::kPointer) {
      const int64_t stride = at(places[1]).integer;
      number = {{place_of(places[0])}, false};
      signature.number(static_cast<int>(i)) = number_fact(at(places[0]).dtype, stride == 0);
    } else {
      for (size_t part = 2; part < places.size(); ++part) number.places.push_back(place_of(places[part]));
    }
    made->numbers.push_back(std::move(number));
  }
  if (!cost.empty()) {
    const int64_t row = at(cost[1]).integer, column = at(cost[2]).integer;
    if (column != 1 || (row != 0 && row != x.size(-1))) Py_RETURN_FALSE;
    signature.cost() = cost_fact(at(cost[0]).dtype, row != 0);
  }
  for (const int result : pulls) {
    TORCH_CHECK_INDEX(result < static_cast<int>(results.size()), "khot: there is no result ", result);
    const bool of_rows =
        result > 0 && bytes[result] == x.numel() / x.size(-1) * 8 && at(results[result]).dtype == at::kDouble;
    made->pulls.push_back(of_rows ? result : -1);
  }
  signature.asked() = asked;
  made->sources = sources;
  made->passed_on = passed_on;
  made->keeps_result = keeps_result;
  for (int i = 0; i < arguments.count; ++i) {
    // what was an address must be one of the call's own, and aligned
    const Argument& argument = arguments.given[i];
    if (argument.kind == Kind::kPointer && !(placed[i] && argument.aligned())) Py_RETURN_FALSE;
  }
  if (prepared().size() >= kMostPrepared) prepared().clear();
  prepared()[signature] = std::move(made);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget(): all kernels and launches.
PyObject* forget(PyObject*, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  gpu::tables().clear();
  gpu::prepared().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
