// Samples by Pareto's design on a GPU: a seed from torch's generator, as the ordinary way takes one, and
// prepared launches.
#include <torch/csrc/Generator.h>

#include <limits>

#include "eager/gpu_calls.h"

namespace khot::gpu {
namespace {

double epsilon(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "khot", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::epsilon());
  });
}

}  // namespace

bool Draw::find(const Signature& like, PyObject* given_generator, PyObject* least, const Tensor* of) {
  Signature signature;
  signature.device = like.device, signature.dtype = like.dtype;
  signature.rows = like.rows, signature.n = like.n;
  rows = of;
  if (rows != nullptr) signature.rows = rows->numel() / rows->size(-1);
  signature.which = kParetoSample;
  const auto formula = fact_of(least);
  if (!formula) return false;
  signature.choices[0] = *formula;
  const auto dtype = static_cast<at::ScalarType>(signature.dtype);
  const double tolerance = static_cast<double>(signature.n) * epsilon(dtype);
  signature.choices[1] = fact_of(tolerance);
  const pybind11::float_ other(tolerance);
  const Choices choices{least, other.ptr()};
  prepared = gpu::find(signature, choices);
  if (given_generator == Py_None) return prepared != nullptr;
  if (!THPGenerator_Check(given_generator)) return false;
  generator = THPGenerator_Unwrap(given_generator);
  const c10::Device device(driver().device, static_cast<c10::DeviceIndex>(signature.device));
  return prepared != nullptr && generator->device() == device;
}

int64_t Draw::bytes() const {
  const int64_t each = rows == nullptr ? 0 : rows->numel() * c10::elementSize(prepared->dtype);
  return prepared->kept_bytes + prepared->scratch_bytes + Launches::rounded(sizeof(int64_t)) +
         Launches::rounded(each) * (multiplies ? 2 : 1);
}

Tensor Draw::sample(const void* probs, at::IntArrayRef sizes, c10::Device device, Launches& launches) const {
  if (rows != nullptr) {
    const int64_t n = rows->size(-1);
    void* const each = launches.take(rows->numel() * c10::elementSize(prepared->dtype));
    if (!repeat(probs, prepared->dtype, n, rows->numel() / n, each, launches)) return Tensor();
    probs = each;
    sizes = rows->sizes();
  }
  Tensor made = empty(sizes, device, prepared->dtype), seed = launches.take_integer();
  void* const first = multiplies ? launches.take(rows->nbytes()) : made.mutable_data_ptr();
  Slots slots{};
  slots[kInput] = probs, slots[kSecond] = seed.const_data_ptr();
  slots[kResult] = first, slots[kKept] = launches.take(prepared->kept_bytes);
  slots[kScratch] = launches.take(prepared->scratch_bytes);
  if (!add(*prepared, slots, {}, launches)) return Tensor();
  if (multiplies && !product(*rows, first, made, launches)) return Tensor();
  draw_seed(seed, generator);
  return made;
}

}  // namespace khot::gpu

namespace khot {

// pareto(probs, dim, generator, least)
KHOT_CALL(pareto) {
  using namespace gpu;
  if (driver().launch == nullptr) Py_RETURN_NONE;
  const Tensor* const probs = rows_in(args[0], args[1]);
  if (probs == nullptr || !is_there(*probs) || !probs->is_contiguous()) Py_RETURN_NONE;
  Draw draw;
  if (!draw.find(Signature(kParetoSample, *probs, probs->size(-1)), args[2], args[3])) Py_RETURN_NONE;
  const c10::DeviceGuard current(probs->device());
  Launches launches(probs->device());
  launches.reserve(draw.bytes());
  RECORD_FUNCTION("khot::pareto_sample", std::vector<c10::IValue>());
  Tensor sample = draw.sample(probs->const_data_ptr(), probs->sizes(), probs->device(), launches);
  if (!sample.defined() || !launches.start()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(sample));
}

}  // namespace khot
