// Launches of plain calls on a GPU: all is known of them but the addresses and the numbers of a call.
//
// Python makes a plan of them when a call of a kind comes again (khot/_kernels/triton/plans.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eager/launch.h"

namespace khot::gpu {

// The roles of an operator's arguments, in their order, as its call has them:
//   x  the rows, contiguous                w  a cost of each entry, or of each column
//   d  the dim of the rows, the last       m  a mask or None
//   k  how many, > 0, at most n            i  the same, an integer
//   t  a number > 0                        c  a CDF without a parameter
//   *  a choice: a name, a flag or a number, of which the launches depend
//   l  True, or False for rows that are negated      o  a choice, too: True, or False for ascending order
//   T  True   F  False   N  None: others are not plain
// Numbers (k, i, t) are those of Python or, of the same GPU, tensors with one for each row.
struct Described {
  const char *name, *roles;
};
constexpr Described kOperators[] = {
    {"soft_topk", "xkdtclmN*"},
    {"topk_mask", "xkdlmN"},
    {"soft_topk_magnitude", "xidt*FNN"},
    {"soft_budget", "xwtdtc**lmFN"},
    {"soft_rank", "xdtco**m"},
    {"soft_sort", "xdtco**m"},
    {"selectable", "xdt"},
    {"sizes", "xidt*FmN"},
    {"pareto_sample", "xd**"},
    {"topk", "x*d**"},
};

constexpr int kMostNumbers = 2, kMostChoices = 4;

// What decides a launch: the operator (negative: its backward), the device, the dtype, the number of rows,
// their length, the choices, how the numbers and the cost are given, and whether it is a launch for the
// gradients of numbers, where these have one of their own.
struct Signature {
  int64_t which = 0, device = 0, dtype = 0, rows = 0, n = 0;
  std::array<int64_t, kMostChoices> choices{};
  std::array<int64_t, kMostNumbers> numbers{};
  int64_t cost = 0, asked = 0;

  Signature() = default;
  Signature(int64_t which, const Tensor& x, int64_t n)
      : which(which),
        device(x.device().index()),
        dtype(static_cast<int64_t>(x.scalar_type())),
        rows(x.numel() / n),
        n(n) {}

  using Facts = std::array<int64_t, 7 + kMostChoices + kMostNumbers>;
  Facts facts() const {
    static_assert(sizeof(Facts) == sizeof(Signature));
    Facts all;
    std::memcpy(&all, this, sizeof all);
    return all;
  }
  bool operator==(const Signature& other) const { return facts() == other.facts(); }
};

constexpr int64_t backward_of(int64_t which) { return -1 - which; }

struct Hash {
  static uint64_t mixed(uint64_t hash, uint64_t value) {  // FNV-1a
    return (hash ^ value) * 0x100000001b3;
  }
  size_t operator()(const Signature& signature) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t fact : signature.facts()) hash = mixed(hash, static_cast<uint64_t>(fact));
    return hash ^ hash >> 29;
  }
};

// What an address of a launch points into (`Slot` in plans.py).
enum Slot : int8_t {
  kInput,   // the rows
  kSecond,  // a cost, or a seed
  kNumber,  // the first number, and the second behind it
  kGrad = kNumber + kMostNumbers,
  kFirst,    // of a gradient: the first result of the forward call
  kKept,     // the other results of the forward call
  kResult,   // the first result
  kScratch,  // everything else
  kSlots
};

// Where each of them begins in a call.
using Slots = std::array<const void*, kSlots>;

// The parameter at this place is an address, so many bytes behind the begin of its slot.
struct Address {
  int place;
  Slot slot;
  int64_t offset;
};

// The parameter at this place is one of the three of float32 whose sum is a number given by value.
struct Part {
  int place, number, part;
};

struct Step {
  std::shared_ptr<const Compiled> kernel;
  int64_t programs;
  Parameters parameters;
  std::vector<Address> addresses;
  std::vector<Part> parts;
};

struct Prepared {
  std::vector<Step> steps;
  at::ScalarType dtype;  // of the first result,
  bool whole;            // which has the shape of the rows, or is one number for each of them
  int64_t kept_bytes, scratch_bytes;
  std::vector<int64_t> pulls;  // where the gradient of each number lies in the scratch, or -1
  bool reads_first;            // whether the gradient reads the first result again
};

// Whether float32 holds both halves of a number; others are not passed by value.
inline bool by_value(double number) { return number > 1e-20 && number < 1e30; }

// The choices of a call, as Python has them.
using Choices = std::array<PyObject*, kMostChoices>;

// The launches of such calls; null if there are none, and at the first call of a kind: a plan takes longer
// than the ordinary way, and lengths of rows may have no end.
std::shared_ptr<const Prepared> find(const Signature& signature, const Choices& chosen);

// The launches of the gradient of such calls, which have a plan.
std::shared_ptr<const Prepared> find_backward(Signature signature, bool asked);

// The kernel of gpu_around.cpp as it was compiled, and how many rows, of what width, a program holds.
struct Around {
  std::shared_ptr<const Compiled> kernel;
  int64_t together, width;
};

inline std::unordered_map<int64_t, Around>& arounds() {
  static std::unordered_map<int64_t, Around> all;
  return all;
}

// All kernels and launches.
void forget();

// ------------------------------------------------------------------------------------------ choices

inline int64_t fact_of(double number) {
  int64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits ^ 3;
}

// A choice as a fact. Names, numbers and flags have different ones.
inline int64_t fact_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : name) hash = Hash::mixed(hash, static_cast<unsigned char>(letter));
  return static_cast<int64_t>(hash);
}

inline std::optional<int64_t> fact_of(PyObject* choice) {
  if (PyBool_Check(choice)) return choice == Py_True ? 1 : 2;
  if (PyUnicode_CheckExact(choice)) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(choice, &size);
    if (text == nullptr) PyErr_Clear();
    return text == nullptr ? std::nullopt : std::optional(fact_of(std::string_view(text, size)));
  }
  double number = 0;
  if (PyFloat_CheckExact(choice)) {
    number = PyFloat_AS_DOUBLE(choice);
  } else if (PyLong_CheckExact(choice)) {
    number = PyLong_AsDouble(choice);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return std::nullopt;
    }
  } else {
    return std::nullopt;
  }
  return fact_of(number);
}

// The choices of calls that have a plan, by their facts.
inline std::unordered_map<int64_t, pybind11::object>& choices() {
  static auto* const all = new std::unordered_map<int64_t, pybind11::object>;  // which outlives Python
  return *all;
}

// How a number is given: 0 by value, otherwise by its dtype and whether all rows have the same; or a cost, by
// its dtype and whether each entry has one, and not each column.
inline int64_t given_fact(at::ScalarType dtype, bool flag) {
  return static_cast<int64_t>(dtype) << 2 | (flag ? 3 : 2);
}

}  // namespace khot::gpu
