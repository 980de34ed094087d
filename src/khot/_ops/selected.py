"""Select rows of a matrix by their products, and sum what was selected: without the products in memory.

:func:`best_of_product` chooses, and has no derivative. :func:`selected_dot` and :func:`selected_sum` compute
with what was chosen. They and :func:`selected_outer` are the derivatives of one trilinear form,
Σ_bj w_bj ⟨v_b, M[i_bj]⟩, so that the derivatives of each are the other two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._core.precision import in_dtype, without_autocast
from khot._core.torch_internals import below_autograd, transforms_are_on
from khot._kernels.reference import product as products
from khot._kernels.reference import selected as kernels
from khot._kernels.reference.topk import exported_topk
from khot._ops.product import product
from khot._ops.topk import largest_entries

__all__ = ["Where", "best_of_product", "selected_dot", "selected_sum"]

#: Rows of the scores: an index of the batch, and the rows of its matrix; or all rows, which is (...,).
Where = tuple[Any, ...]

# On a CPU, 256 rows and their choice took 1.1 of the product alone at d = 512, and 64 rows 1.9, since they
# read the matrix more often. At d = 32 the scores are most of what is read, and 64 rows stay in the cache.
ROWS, ROWS_OF_NARROW, NARROW = 256, 64, 32
# A part has at most so many scores, 256 MB. On other devices it has about so many, because parts for a cache
# would have too many launches.
SCORES = 1 << 26


def best_of_product(
    input: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    adjust: Callable[[Where, Tensor], Tensor] | None = None,
    columns: Callable[[int], int] | None = None,
    watch: Callable[[Where, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest scores input · weight^T + bias of each row in descending order, and their indices.

    The scores are in float32, or in float64 if an argument is, whatever autocast says. They are computed for
    a part of the rows at a time and not kept. Neither result has a derivative: :func:`selected_dot` takes the
    scores as ``known`` and has theirs.

    Args:
        input: (*batch, B, d).
        weight: (*batch, n, d), or (n, d) for all.
        k: in [0, n].
        bias: None, or (*batch, n), or (n,) with a weight (n, d).
        adjust: a function of (where, scores) that returns the scores to choose from, which may be the given
            ones, changed in place. ``where`` indexes tensors of shape (*batch, B, ...): it is a tuple that
            ends with a slice of the rows, and the scores are those of these rows, (rows, n). Under a trace or
            a transform there is one part: ``where`` is (...,), and the scores have their whole shape. With
            one weight (n, d) for a batch, all rows of the batch count as one matrix (prod(batch)·B, d).
        columns: a function of the number of a part's last row + 1 that returns how many of the first rows of
            weight this row and those before it may select. The others are not multiplied, if there are at
            least k; in the one part under a trace or a transform they are, so that ``adjust`` has to
            exclude them.
        watch: a function of (where, scores, best) that sees the scores of each part after the choice, and may
            write to them, together with the k largest.

    Returns:
        (*batch, B, k) each; the indices in int64.
    """
    input, weight = input.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    if weight.dim() == 2 and input.dim() != 2:
        rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
        options: dict[str, Any] = {"adjust": adjust, "columns": columns, "watch": watch}
        scores, indices = best_of_product(rows, weight, k, bias, **options)
        return scores.view(*input.shape[:-1], k), indices.view(*input.shape[:-1], k)
    if adjust is None and columns is None and watch is None:
        scores, indices = _best_of_product(input, weight, bias, k)
        return scores, indices
    if torch.compiler.is_compiling() or transforms_are_on():
        whole = product(input, weight.mT)
        whole = whole if bias is None else whole + bias.unsqueeze(-2)
        return _chosen((...,), whole, k, adjust, watch)
    with torch.no_grad(), below_autograd():  # the latter also for forward mode
        return _in_parts(input, weight, bias, k, adjust, columns, watch)


def selected_dot(
    v: Tensor, M: Tensor, indices: Tensor, bias: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """The products of vectors with selected rows of a matrix: ⟨v[b], M[i]⟩ + bias[i] for i in indices[b].

    Differentiable in v, M and bias, in both modes and to any order, without the selected rows in memory.
    Gradients have the dtypes of their arguments; half precision is summed in float32.

    Args:
        v: (*batch, B, d).
        M: (*batch, n, d), or (n, d) for all.
        indices: (*batch, B, k), int64.
        bias: None, or (*batch, n), or (n,) with a matrix (n, d).
        known: None, or the products, if :func:`best_of_product` has computed them: then they are only
            differentiated.

    Returns:
        (*batch, B, k), in float32, or in float64 if v or M is.
    """
    known = None if known is None else known.detach()
    if M.dim() == 2 and v.dim() != 2:
        rows, d, k = math.prod(v.shape[:-1]), v.shape[-1], indices.shape[-1]
        flat = None if known is None else known.reshape(rows, k)
        return _dot(v.reshape(rows, d), M, indices.reshape(rows, k), bias, flat).view(indices.shape)
    result: Tensor = _dot(v, M, indices, bias, known)
    return result


def selected_sum(weights: Tensor, M: Tensor, indices: Tensor) -> Tensor:
    """Weighted sums of selected rows of a matrix: Σ_j weights[b, j] M[indices[b, j]].

    Differentiable in weights and M, in both modes and to any order, without the selected rows in memory.
    Gradients have the dtypes of their arguments; half precision is summed in float32.

    Args:
        weights: (*batch, B, k), of any floating-point dtype; they are rounded to that of M.
        M: (*batch, n, d), or (n, d) for all.
        indices: (*batch, B, k), int64.

    Returns:
        (*batch, B, d), of M's dtype.
    """
    weights = in_dtype(weights, M.dtype)
    if M.dim() == 2 and weights.dim() != 2:
        rows, k = math.prod(indices.shape[:-1]), indices.shape[-1]
        sums = _sum(weights.reshape(rows, k), M, indices.reshape(rows, k))
        return sums.view(*indices.shape[:-1], M.shape[-1])
    result: Tensor = _sum(weights, M, indices)
    return result


def _choose(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    with below_autograd():
        return _in_parts(x, weight, bias, k)


def _in_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    adjust: Callable[[Where, Tensor], Tensor] | None = None,
    columns: Callable[[int], int] | None = None,
    watch: Callable[[Where, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    n, count, batch = weight.shape[-2], x.shape[-2], x.shape[:-2]
    dtype = kernels.wide(x, weight)
    size = min(_rows_of_a_part(x, n), max(count, 1))
    buffer = x.new_empty(size * n, dtype=dtype)

    def choice(where: Where, stop: int) -> tuple[Tensor, Tensor]:
        part, matrix = x[where], weight[where[:-1]].mT
        added = None if bias is None else bias[where[:-1]]
        if columns is not None:
            m = min(max(columns(stop), k), n)
            matrix, added = matrix[:, :m], None if added is None else added[:m]
        shape = part.shape[0], matrix.shape[1]
        scores = _scores(part, matrix, added, buffer[: math.prod(shape)].view(shape))
        return _chosen(where, scores, k, adjust, watch)

    if not batch and count <= size:
        return choice((slice(0, count),), count)
    best = x.new_empty(*batch, count, k, dtype=dtype)
    indices = x.new_empty(*batch, count, k, dtype=torch.int64)
    for at in itertools.product(*map(range, batch)):
        for start in range(0, count, size):
            stop = min(start + size, count)
            where: Where = (*at, slice(start, stop))
            best[where], indices[where] = choice(where, stop)
    return best, indices


def _chosen(
    where: Where,
    scores: Tensor,
    k: int,
    adjust: Callable[[Where, Tensor], Tensor] | None,
    watch: Callable[[Where, Tensor, Tensor], None] | None,
) -> tuple[Tensor, Tensor]:
    scores = scores if adjust is None else adjust(where, scores)
    best, indices = largest_entries(scores, k, True, True)
    if watch is not None:
        watch(where, scores, best)
    return best, indices


def _rows_of_a_part(x: Tensor, n: int) -> int:
    rows = ROWS_OF_NARROW if x.shape[-1] <= NARROW else ROWS
    most = max(SCORES // max(n, 1), 1)
    return min(rows, most) if x.is_cpu else max(rows, most)


def _scores(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x @ matrix + bias in the dtype of out, and there if it can be written there."""
    if x.dtype == matrix.dtype == out.dtype:
        with without_autocast(x.device):
            if bias is not None and bias.dtype == out.dtype:
                return torch.addmm(bias, x, matrix, out=out)
            scores = torch.mm(x, matrix, out=out)
    elif x.dtype == matrix.dtype:
        scores = products.product(x, matrix)
    else:
        scores = products.product(x.to(out.dtype), matrix.to(out.dtype))
    return scores if bias is None else scores.add_(bias)


class _Choice(Rule):
    differentiable = False
    own_dims = (2, 2, 1)


def _fake_choice(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    dtype = kernels.wide(x, weight)
    best = x.new_empty(*x.shape[:-1], k, dtype=dtype)
    return best, torch.empty_like(best, dtype=torch.int64)


def _exported_choice(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    dtype = kernels.wide(x, weight)
    scores = x.to(dtype) @ weight.to(dtype).mT
    return exported_topk(scores if bias is None else scores + bias.unsqueeze(-2), k, True, True)


class _Sum(Rule):
    plain = True
    own_dims = (2, 2, 2)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        w, M, i = ctx.saved_tensors
        dw = in_dtype(_dot(grad, M, i, None, None), w.dtype) if ctx.needs_input_grad[0] else None
        dM = in_dtype(_outer(w, grad, i, M.shape[-2]), M.dtype) if ctx.needs_input_grad[1] else None
        return dw, dM, None

    @staticmethod
    def jvp(ctx: Any, dw: Tensor | None, dM: Tensor | None, _: None) -> Tensor:
        w, M, i = ctx.saved_tensors
        return _added([_sum(*factors, i) for factors in ((dw, M), (w, dM)) if None not in factors])


class _Dot(Rule):
    plain = True
    own_dims = (2, 2, 2, 1, 2)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        v, M, i, bias, _ = inputs
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return v, M, i

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        v, M, i = ctx.saved_tensors
        dv = in_dtype(_sum(in_dtype(grad, M.dtype), M, i), v.dtype) if ctx.needs_input_grad[0] else None
        dM = in_dtype(_outer(grad, v, i, M.shape[-2]), M.dtype) if ctx.needs_input_grad[1] else None
        dbias = None
        if ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            entries = (*i.shape[:-2], i.shape[-2] * i.shape[-1])
            sums = grad.new_zeros(shape).scatter_add(-1, i.reshape(entries), grad.reshape(entries))
            dbias = in_dtype(sums, dtype)
        return dv, dM, None, dbias, None

    @staticmethod
    def jvp(
        ctx: Any, dv: Tensor | None, dM: Tensor | None, _: None, dbias: Tensor | None, __: None
    ) -> Tensor:
        v, M, i = ctx.saved_tensors
        terms = [_dot(*factors, i, None, None) for factors in ((dv, M), (v, dM)) if None not in factors]
        if dbias is not None:
            terms.append(kernels.entries(dbias, i))
        return _added(terms).to(kernels.wide(v, M))


class _Outer(Rule):
    plain = True
    own_dims = (2, 2, 2)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.n = inputs[3]
        return inputs[:3]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        w, v, i = ctx.saved_tensors
        dw = in_dtype(_dot(v, grad, i, None, None), w.dtype) if ctx.needs_input_grad[0] else None
        dv = in_dtype(_sum(in_dtype(w, grad.dtype), grad, i), v.dtype) if ctx.needs_input_grad[1] else None
        return dw, dv, None, None

    @staticmethod
    def jvp(ctx: Any, dw: Tensor | None, dv: Tensor | None, *_: None) -> Tensor:
        w, v, i = ctx.saved_tensors
        return _added([_outer(*factors, i, ctx.n) for factors in ((dw, v), (w, dv)) if None not in factors])


def _added(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _fake_sum(w: Tensor, M: Tensor, i: Tensor) -> Tensor:
    return M.new_empty(*i.shape[:-1], M.shape[-1])


def _fake_dot(v: Tensor, M: Tensor, i: Tensor, bias: Tensor | None, known: Tensor | None) -> Tensor:
    return v.new_empty(i.shape, dtype=kernels.wide(v, M))


def _fake_outer(w: Tensor, v: Tensor, i: Tensor, n: int) -> Tensor:
    return v.new_empty(*i.shape[:-2], n, v.shape[-1], dtype=kernels.wide(w, v))


_best_of_product = define("best_of_product", _choose, _fake_choice, _Choice, decomposition=_exported_choice)
_sum = define("selected_sum", kernels.selected_sum, _fake_sum, _Sum, decomposition=kernels.gathered_sum)
_dot = define(
    "selected_dot",
    kernels.selected_dot,
    _fake_dot,
    _Dot,
    decomposition=kernels.gathered_dot,
    schema="(Tensor v, Tensor M, Tensor i, Tensor? bias, Tensor? known) -> Tensor",
)
_outer = define(
    "selected_outer", kernels.selected_outer, _fake_outer, _Outer, decomposition=kernels.gathered_outer
)
