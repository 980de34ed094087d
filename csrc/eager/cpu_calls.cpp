// Other plain calls on the CPU: the top-k and the hard mask.
#include <ATen/ops/scatter.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>

#include <cmath>
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
KHOT_CALL(topk) {
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
}

// ---------------------------------------------------------------------------------- the hard mask

// topk_mask(input, k, dim, largest, mask, group)
KHOT_CALL(topk_mask) {
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
  const HardRows rows(scores, Listed{nullptr, *k}, scores.results_in(y.mutable_data_ptr()));
  const int64_t n = x.size(-1), count_of_rows = x.numel() / n;
  served->kernels.topk_mask(rows, n, 0, count_of_rows);
  if (!has_results(y)) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(y));
}

}  // namespace khot
