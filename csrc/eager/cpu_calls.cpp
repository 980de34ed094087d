// Other plain calls on the CPU: the top-k, the hard mask, ranks, sorts and the Pareto sample.
#include <ATen/ops/scatter.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/Generator.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "eager/calls.h"
#include "eager/plain.h"
#include "kernels.h"

namespace khot {
namespace {

// ---------------------------------------------------------------------------------- the top-k

using Found = std::tuple<Tensor, Tensor>;  // the values and the indices

Found largest(const Tensor& x, const TopKSpec& spec) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = spec.k;
  Tensor values = at::empty(sizes, x.options()), indices = at::empty(sizes, x.options().dtype(at::kLong));
  const Tensor dense = x.contiguous();
  const Rows entries(dense, *dtype_of(x));
  const Results results{static_cast<char*>(values.mutable_data_ptr()), spec.k * x.element_size()};
  const LargestRows rows(entries, results, indices.mutable_data_ptr<int64_t>(), spec.k);
  served->topk(spec, rows, x.numel() / spec.n);
  return {values, indices};
}

class TopK : public torch::autograd::Function<TopK> {
 public:
  static Variables forward(Context* context, const Tensor& x, c10::function_ref<Found()> find) {
    const auto [values, indices] = find();
    context->mark_non_differentiable({indices});
    context->save_for_backward({indices});
    context->saved_data["n"] = x.size(-1);
    return {values, indices};
  }

  // In operations that can be differentiated and mapped, as khot/_ops/topk.py has it.
  static Variables backward(Context* context, const Variables& grads) {
    c10::DimVector sizes(grads[0].sizes());
    sizes.back() = context->saved_data["n"].toInt();
    const Tensor indices = context->get_saved_variables()[0];
    return {at::zeros(sizes, grads[0].options()).scatter(-1, indices, grads[0]), Tensor()};
  }
};

Found with_gradient(const Tensor& x, c10::function_ref<Found()> find) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return find();
  Variables results = TopK::apply(x, find);
  return {std::move(results[0]), std::move(results[1])};
}

}  // namespace

// topk(input, k, dim, largest, sorted)
PyObject* topk(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "khot: topk takes 5 arguments");
  if (!PyLong_CheckExact(args[1]) || !PyBool_Check(args[3]) || !PyBool_Check(args[4])) Py_RETURN_NONE;
  Tensor values, indices;
  if (gpu::topk(args, values, indices)) {
    const Found found(values, indices);
    std::tie(values, indices) = with_gradient(THPVariable_Unpack(args[0]), [&] { return found; });
  } else {
    const Tensor* found = rows_of(args[0], args[2], kAny);
    if (found == nullptr) Py_RETURN_NONE;
    const Tensor& x = *found;
    int overflow = 0;
    const long k = PyLong_AsLongAndOverflow(args[1], &overflow);
    const TopKSpec spec{x.size(-1), k, args[3] == Py_True, args[4] == Py_True};
    if (overflow != 0 || k < 1 || k > spec.n || spec.n >= int64_t{1} << 32) Py_RETURN_NONE;
    RECORD_FUNCTION("khot::topk", std::vector<c10::IValue>());
    const pybind11::gil_scoped_release others_may_run;
    std::tie(values, indices) = with_gradient(x, [&] { return largest(x, spec); });
  }
  PyObject* const first = THPVariable_Wrap(std::move(values));
  PyObject* const second = THPVariable_Wrap(std::move(indices));
  return Py_BuildValue("(NN)", first, second);
  END_HANDLE_TH_ERRORS
}

namespace {

// ---------------------------------------------------------------------------------- the hard mask

// Whether a row has no result: then all of it is NaN.
bool starts_with_nan(const char* row, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat:
      return std::isnan(*reinterpret_cast<const float*>(row));
    case Dtype::kDouble:
      return std::isnan(*reinterpret_cast<const double*>(row));
    case Dtype::kHalf:
      return std::isnan(static_cast<float>(*reinterpret_cast<const at::Half*>(row)));
    default:
      return std::isnan(static_cast<float>(*reinterpret_cast<const at::BFloat16*>(row)));
  }
}

}  // namespace

// topk_mask(input, k, dim, largest, mask, group)
PyObject* topk_mask(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "khot: topk_mask takes 6 arguments");
  if (args[3] != Py_True || args[4] != Py_None || args[5] != Py_None) Py_RETURN_NONE;
  if (PyObject* const there = gpu::call(gpu::kTopkMask, args)) return there;
  const Tensor* found = rows_of(args[0], args[2], kMost);
  if (found == nullptr) Py_RETURN_NONE;
  const auto k = number(args[1]);
  if (!k || !(*k > 0 && *k <= found->size(-1))) Py_RETURN_NONE;

  RECORD_FUNCTION("khot::topk_mask", std::vector<c10::IValue>());
  const Tensor x = found->contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  const Rows scores(x, *dtype_of(x));
  const HardRows rows(scores, Same{*k}, scores.results_in(y.mutable_data_ptr()));
  const int64_t n = x.size(-1), count_of_rows = x.numel() / n;
  served->kernels.topk_mask(rows, n, 0, count_of_rows);
  for (int64_t row = 0; row < count_of_rows; ++row) {
    if (starts_with_nan(static_cast<const char*>(rows.out(row)), scores.dtype)) Py_RETURN_NONE;
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

namespace {

// ---------------------------------------------------------------------------------- ranks and sorts

// The tensor, temperature and dtype of a soft rank or sort that needs no gradient.
struct Ranked {
  const Tensor* x = nullptr;
  Dtype dtype;
  double tau;
  bool descending;
};

// (input, dim, tau, cdf, descending, method, regularization, mask)
Ranked ranked(PyObject* const* args) {
  if (cdf_of(args[3]) != Cdf::kLaplace || !PyBool_Check(args[4]) || !named(args[5], "count") ||
      !named(args[6], "l2") || args[7] != Py_None) {
    return {};
  }
  const Tensor* x = rows_of(args[0], args[1], kMost);
  const auto tau = number(args[2]);
  if (x == nullptr || !tau || !(*tau > 0 && std::isfinite(*tau))) return {};
  if ((at::GradMode::is_enabled() && x->requires_grad()) || x->element_size() < 4) return {};
  return {x, *dtype_of(*x), *tau, args[4] == Py_True};
}

}  // namespace

PyObject* soft_rank(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "khot: soft_rank takes 8 arguments");
  if (PyObject* const there = gpu::call(gpu::kSoftRank, args)) return there;
  const Ranked call = ranked(args);
  if (call.x == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::laplace_count", std::vector<c10::IValue>());
  const Tensor x = call.x->contiguous();
  Tensor rank = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  served->laplace_rank(call.dtype, x.const_data_ptr(), x.numel() / n, n, call.tau, call.descending,
                       rank.mutable_data_ptr());
  return THPVariable_Wrap(std::move(rank));
  END_HANDLE_TH_ERRORS
}

PyObject* soft_sort(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "khot: soft_sort takes 8 arguments");
  if (PyObject* const there = gpu::call(gpu::kSoftSort, args)) return there;
  const Ranked call = ranked(args);
  if (call.x == nullptr) Py_RETURN_NONE;
  RECORD_FUNCTION("khot::laplace_thresholds", std::vector<c10::IValue>());
  const Tensor x = call.x->contiguous();
  Tensor sorted = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1);
  served->laplace_sort(call.dtype, x.const_data_ptr(), x.numel() / n, n, call.tau, call.descending,
                       sorted.mutable_data_ptr());
  return THPVariable_Wrap(std::move(sorted));
  END_HANDLE_TH_ERRORS
}

namespace {

// ---------------------------------------------------------------------------------- the Pareto sample

// What the kernel refuses must not have used up a random number.
template <class R>
bool probabilities(const R* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(p[i] >= 0 && p[i] <= 1)) return false;
  }
  return true;
}

template <class R>
void draw(const Tensor& probs, Dtype dtype, double least, double tolerance, uint64_t seed, Tensor& sample) {
  const int64_t n = probs.size(-1), rows = probs.numel() / n;
  const Rows from(probs, dtype);
  R* to = sample.mutable_data_ptr<R>();
  const std::unique_ptr<double[]> work(new double[scratch_size(n)]);
  const int64_t together = rows_together(n);
  const std::unique_ptr<bool[]> chosen(new bool[together * (n + 1)]);
  Row group[kRowsTogether];
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t count = std::min(together, rows - first);
    for (int64_t j = 0; j < count; ++j) group[j] = from(first + j);
    TORCH_CHECK(
        served->sampling.pareto(group, count, n, least, tolerance, seed, first, work.get(), chosen.get()),
        "khot: a row was refused that may be drawn");
    for (int64_t j = 0; j < count; ++j, to += n) std::copy_n(chosen.get() + j * (n + 1), n, to);
  }
}

}  // namespace

// pareto(probs, dim, generator, least)
PyObject* pareto(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "khot: pareto takes 4 arguments");
  if (PyObject* const there = gpu::pareto(args)) return there;
  const Tensor* found = rows_of(args[0], args[1], kMost);
  const auto least = number(args[3]);
  if (found == nullptr || !least || found->element_size() < 4) Py_RETURN_NONE;
  std::optional<at::Generator> generator;
  if (args[2] != Py_None) {
    if (!THPGenerator_Check(args[2])) Py_RETURN_NONE;
    generator = THPGenerator_Unwrap(args[2]);
    if (!generator->device().is_cpu()) Py_RETURN_NONE;
  }
  const Tensor probs = found->contiguous();
  const int64_t n = probs.size(-1);
  const bool wide = probs.scalar_type() == at::kDouble;
  if (wide ? !probabilities(probs.const_data_ptr<double>(), probs.numel())
           : !probabilities(probs.const_data_ptr<float>(), probs.numel())) {
    Py_RETURN_NONE;
  }
  Tensor seed = empty({}, probs.device(), at::kLong);
  draw_seed(seed, generator);
  const uint64_t key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  RECORD_FUNCTION("khot::pareto_sample", std::vector<c10::IValue>());
  Tensor sample = at::empty(probs.sizes(), probs.options());
  if (wide) {
    draw<double>(probs, Dtype::kDouble, *least, n * std::numeric_limits<double>::epsilon(), key, sample);
  } else {
    draw<float>(probs, Dtype::kFloat, *least, n * std::numeric_limits<float>::epsilon(), key, sample);
  }
  return THPVariable_Wrap(std::move(sample));
  END_HANDLE_TH_ERRORS
}

}  // namespace khot
