// Kernels of a GPU that Triton has compiled, started without a line of Python.
//
// Triton's own way from a kernel's arguments to the driver takes longer than a short row takes the device.
// Here a compiled kernel is found by what Triton specialises it for, and given to the driver's launch
// function, whose address comes from Python (khot/_kernels/triton/native.py): neither a build nor an import
// needs CUDA.
//
// Every function that starts a kernel says whether it did. If not, nothing was started, and the caller takes
// the ordinary way, which raises the errors. All tables are read and written with the GIL held.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace khot::gpu {

using at::Tensor;

// cuLaunchKernel, as the driver declares it.
using Launch = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                       void** extra);

// What starts kernels, once Python has named it.
struct Driver {
  Launch launch = nullptr;
  pybind11::object stream;  // called with the index of a device: its current stream, a number
  pybind11::object hooks;   // where Triton keeps the hooks that it tells of launches
  pybind11::object again;   // see `pulled_again` in gpu_gradient.cpp
  pybind11::object around;  // has the kernel of gpu_around.cpp compiled
  pybind11::object plan;    // says what calls of a kind launch (khot/_kernels/triton/plans.py)
  int unused = 0;           // pointers that Triton passes after the kernel's parameters, null for our kernels
  c10::DeviceType device = c10::DeviceType::CUDA;
  c10::DispatchKeySet keys;  // of plain tensors there
};

inline Driver& driver() {
  static auto* const only = new Driver;  // which outlives Python
  return *only;
}

inline bool is_there(const Tensor& x) {
  return driver().launch != nullptr && x.device().type() == driver().device &&
         driver().keys.has_all(x.key_set());
}

constexpr int kMostArguments = 48;
constexpr int64_t kLarge = int64_t{1} << 31;  // from here on an integer has 64 bits
constexpr int64_t kLargest = int64_t{1} << 60;
constexpr uintptr_t kAligned = 15;  // Triton compiles for pointers that are multiples of 16

struct Argument {
  enum class Kind : int8_t { kNone, kInteger, kReal, kPointer };
  Kind kind = Kind::kNone;
  at::ScalarType dtype = at::ScalarType::Undefined;
  union {
    int64_t integer = 0;
    double real;
    const void* pointer;
  };
  bool aligned() const { return (reinterpret_cast<uintptr_t>(pointer) & kAligned) == 0; }
};

// How the compiled kernel takes an argument: not at all if it was compiled for it.
enum class Passed : int8_t { kNot, kPointer, kInt32, kInt64, kFloat32 };

struct Compiled {
  void* function;
  unsigned threads, shared;
  std::vector<Passed> passed;
};

using Key = std::string;

inline void extend(Key& key, int64_t value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// The kernels of one source with the same constants (`Variant` in khot/_kernels/triton/launch.py), by what
// Triton compiles them for; and the same of all sources, by their number.
using Table = std::unordered_map<Key, std::shared_ptr<const Compiled>>;

inline std::unordered_map<int64_t, Table>& tables() {
  static std::unordered_map<int64_t, Table> all;
  return all;
}

// The arguments of a launch.
struct Arguments {
  int count = 0;
  std::array<Argument, kMostArguments> given;
  const Tensor* first = nullptr;

  // False for what only the ordinary way knows. A tuple's members are arguments of their own, as they are to
  // Triton.
  bool read(PyObject* tuple) {
    count = 0;
    return read_members(tuple) && first != nullptr;
  }

  Key key() const {
    Key result;
    result.reserve((count + 1) * sizeof(int64_t));
    extend(result, first->device().index());
    for (int i = 0; i < count; ++i) extend(result, kind_of(given[i]));
    return result;
  }

 private:
  bool read_members(PyObject* tuple) {
    if (!PyTuple_Check(tuple)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* const value = PyTuple_GET_ITEM(tuple, i);
      if (PyTuple_Check(value)) {
        if (!read_members(value)) return false;
      } else if (count == kMostArguments || !read(value, given[count++])) {
        return false;
      }
    }
    return true;
  }

  bool read(PyObject* value, Argument& found) {
    if (value == Py_None) {
      found.kind = Argument::Kind::kNone;
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      found.kind = Argument::Kind::kInteger;
      found.integer = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0 && std::abs(found.integer) < kLargest;
    } else if (PyFloat_CheckExact(value)) {
      found.kind = Argument::Kind::kReal;
      found.real = PyFloat_AS_DOUBLE(value);
    } else {
      if (!THPVariable_CheckExact(value)) return false;
      const Tensor& x = THPVariable_Unpack(value);
      if (!is_there(x) || (first != nullptr && x.device() != first->device())) return false;
      if (first == nullptr) first = &x;
      found.kind = Argument::Kind::kPointer;
      found.dtype = x.scalar_type();
      found.pointer = x.data_ptr();
    }
    return true;
  }

  // At least as fine as what Triton distinguishes: integers that are 1, small, large, or multiples of 16; and
  // pointers by their type and alignment. The kind is in the low bits, which no two kinds share.
  static int64_t kind_of(const Argument& argument) {
    switch (argument.kind) {
      case Argument::Kind::kNone:
        return 0;
      case Argument::Kind::kReal:
        return 1;
      case Argument::Kind::kInteger: {
        const bool common = argument.integer > 1 && argument.integer < kLarge;
        const int64_t told = common ? (argument.integer & kAligned) | 32 : argument.integer;
        return static_cast<int64_t>(static_cast<uint64_t>(told) << 2) | 2;
      }
      case Argument::Kind::kPointer: {
        const int64_t rest = static_cast<int64_t>(reinterpret_cast<uintptr_t>(argument.pointer) & kAligned);
        return ((static_cast<int64_t>(argument.dtype) << 4 | rest) << 2) | 3;
      }
    }
    return 0;
  }
};

// The kernel of a table for such arguments; null if there is none.
inline std::shared_ptr<const Compiled> compiled(int64_t table, const Arguments& arguments) {
  const auto kernels = tables().find(table);
  if (kernels == tables().end()) return nullptr;
  const auto found = kernels->second.find(arguments.key());
  return found == kernels->second.end() ? nullptr : found->second;
}

// Whether nothing is to be told of launches. Triton's hooks are lists of functions, unless somebody has put
// another function there.
inline bool unwatched() {
  static PyObject* const names[] = {PyUnicode_InternFromString("launch_enter_hook"),
                                    PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* const calls = PyUnicode_InternFromString("calls");
  for (PyObject* name : names) {
    const auto hook =
        pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(driver().hooks.ptr(), name));
    if (hook && hook.is_none()) continue;
    const auto list =
        pybind11::reinterpret_steal<pybind11::object>(hook ? PyObject_GetAttr(hook.ptr(), calls) : nullptr);
    if (!list || !PyList_CheckExact(list.ptr())) {
      PyErr_Clear();
      return false;
    }
    if (PyList_GET_SIZE(list.ptr()) != 0) return false;
  }
  return true;
}

inline std::optional<void*> current_stream(c10::Device device) {
  const auto index = pybind11::reinterpret_steal<pybind11::object>(PyLong_FromLong(device.index()));
  const auto stream =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_CallOneArg(driver().stream.ptr(), index.ptr()));
  void* const found = stream ? PyLong_AsVoidPtr(stream.ptr()) : nullptr;
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return found;
}

// What the driver gets for the parameters of a kernel: each in a place of its own, and null pointers at the
// end.
struct Parameters {
  std::array<uint64_t, kMostArguments + 4> values{};
  int count = 0;

  // Where each argument went; kNot if the kernel was compiled for it.
  static constexpr int8_t kNot = -1;
  std::array<int8_t, kMostArguments> places;

  Parameters() = default;
  Parameters(const Compiled& kernel, const Argument* given) {
    for (size_t i = 0; i < kernel.passed.size(); ++i) {
      places[i] = kernel.passed[i] == Passed::kNot ? kNot : static_cast<int8_t>(count++);
      if (places[i] != kNot) write(kernel.passed[i], given[i], &values[places[i]]);
    }
    count += driver().unused;
  }

  static void write(Passed how, const Argument& argument, uint64_t* place) {
    if (how == Passed::kInt32) {
      const int32_t number = static_cast<int32_t>(argument.integer);
      std::memcpy(place, &number, sizeof number);
    } else if (how == Passed::kFloat32) {
      const float number = static_cast<float>(argument.real);
      std::memcpy(place, &number, sizeof number);
    } else {
      std::memcpy(place, &argument.pointer, sizeof(void*));  // or 64 bits of a number
    }
  }
};

// Where launches go: the current stream of a device; nowhere if somebody is to be told of them.
using Queue = std::optional<void*>;

inline Queue queue_of(c10::Device device) { return unwatched() ? current_stream(device) : std::nullopt; }

// The launches of a call, which are started together when all of them are known, and the memory in which they
// leave something for each other: one allocation, which lives as long. Their device is the current one.
class Launches {
 public:
  explicit Launches(c10::Device device) : device_(device), queue_(queue_of(device)) {}

  c10::Device device() const { return device_; }

  static int64_t rounded(int64_t bytes) { return (bytes + kAligned) / (kAligned + 1) * (kAligned + 1); }

  // Memory for what is taken next, of so many bytes, each part of which is rounded.
  void reserve(int64_t bytes) {
    if (bytes == 0) return;
    memory_.push_back(c10::GetAllocator(device_.type())->allocate(bytes));
    next_ = static_cast<char*>(memory_.back().get());
  }
  void* take(int64_t bytes) { return std::exchange(next_, next_ + rounded(bytes)); }

  // A tensor without dimensions in such memory.
  Tensor take_integer() {
    constexpr size_t bytes = sizeof(int64_t);
    c10::Storage place(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(take(bytes), device_), nullptr,
                       false);
    const auto key = c10::computeDispatchKey(at::kLong, c10::kStrided, device_);
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(place), c10::DispatchKeySet(key),
                                                           caffe2::TypeMeta::Make<int64_t>());
    made.unsafeGetTensorImpl()->set_sizes_contiguous({});
    return made;
  }

  // A tensor that a launch reads, until it is started.
  const Tensor& hold(Tensor tensor) {
    held_.push_back(std::move(tensor));
    return held_.back();
  }

  // One more, with parameters that may be changed; null if it cannot be started.
  uint64_t* add(const Compiled& kernel, int64_t programs, const Parameters& parameters) {
    if (programs < 0 || programs >= kLarge || !queue_) return nullptr;
    One& launch = launches_.emplace_back();
    launch.function = kernel.function, launch.threads = kernel.threads, launch.shared = kernel.shared;
    launch.programs = static_cast<unsigned>(programs);
    launch.count = parameters.count;
    std::copy_n(parameters.values.begin(), parameters.count, launch.values.begin());
    return launch.values.data();
  }

  // False, if the driver makes an error. The GIL is held, but not while the driver is called, which may wait
  // for room in its queue.
  bool start() {
    bool well = true;
    PyThreadState* const others_may_run = PyEval_SaveThread();
    for (One& launch : launches_) {
      std::array<void*, kMostArguments + 4> parameters;
      for (int i = 0; i < launch.count; ++i) parameters[i] = &launch.values[i];
      well = well && (launch.programs == 0 ||
                      driver().launch(launch.function, launch.programs, 1, 1, launch.threads, 1, 1,
                                      launch.shared, *queue_, parameters.data(), nullptr) == 0);
    }
    PyEval_RestoreThread(others_may_run);
    launches_.clear();
    return well;
  }

 private:
  struct One {
    void* function;
    unsigned programs, threads, shared;
    int count;
    std::array<uint64_t, kMostArguments + 4> values;
    One() {}  // NOLINT: what is not read is not written
  };

  c10::Device device_;
  Queue queue_;
  c10::SmallVector<One, 4> launches_;
  c10::SmallVector<at::DataPtr, 2> memory_;
  c10::SmallVector<Tensor, 2> held_;
  char* next_ = nullptr;
};

}  // namespace khot::gpu
