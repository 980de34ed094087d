"""The reference kernels of sums over selected rows of a matrix, and of products with them.

They are the three derivatives of one trilinear form, Σ_bj w_bj ⟨v_b, M[i_bj]⟩, and so are the operators of
torch's ``embedding_bag``, which keep none of the selected rows. ``gathered_…`` are the same in operations
that have every derivative, and that every format has; they keep the selected rows.

The batch dims of the indices are those of the other arguments, or M has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core.precision import in_dtype, without_autocast
from khot._core.torch_internals import bag_gradient, bag_products, bag_sums

__all__ = [
    "entries",
    "gathered",
    "gathered_dot",
    "gathered_outer",
    "gathered_sum",
    "selected_dot",
    "selected_outer",
    "selected_sum",
    "wide",
]


def selected_sum(w: Tensor, M: Tensor, i: Tensor) -> Tensor:
    """Σ_j w_bj M[i_bj], (*batch, B, d), of weights (*batch, B, k) and M (*batch, n, d) of one dtype."""
    if torch.compiler.is_compiling():
        return gathered_sum(w, M, i)
    if not w.numel() or not M.numel():
        return M.new_zeros(*i.shape[:-1], M.shape[-1])
    matrix, rows = _as_one(M, i)
    with without_autocast(w.device):
        sums = bag_sums(w.reshape(rows.shape), matrix, rows)
    return sums.view(*i.shape[:-1], M.shape[-1])


def selected_dot(
    v: Tensor, M: Tensor, i: Tensor, bias: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """⟨v_b, M[i_bj]⟩ + bias[i_bj], (*batch, B, k), in float32 at least, of vectors (*batch, B, d).

    They are ``known`` if that is not None.
    """
    dtype = wide(v, M)
    compiling = torch.compiler.is_compiling()
    if known is not None and not compiling:
        return known.to(dtype, copy=True)
    # few products of half precision take less time than a wider copy of the matrix
    few = M.dtype != dtype and i.numel() < math.prod(M.shape[:-1])
    if compiling or few or not i.numel() or not M.numel():
        return gathered_dot(v, M, i, bias, known)
    matrix, rows = _as_one(M, i)
    vectors = in_dtype(v.reshape(-1, v.shape[-1]), dtype)
    products = bag_products(vectors, in_dtype(matrix, dtype), rows).view(i.shape)
    return products if bias is None else products + entries(bias, i)


def selected_outer(w: Tensor, v: Tensor, i: Tensor, n: int) -> Tensor:
    """The matrix (*batch, n, d) that has in each row m the sum of w_bj v_b over all bj with i_bj = m: in
    float32 at least, because half precision has too few digits to add up many terms."""
    if torch.compiler.is_compiling():
        return gathered_outer(w, v, i, n)
    dtype, batch, d = wide(w, v), i.shape[:-2], v.shape[-1]
    if not w.numel() or not d:
        return v.new_zeros(*batch, n, d, dtype=dtype)
    rows = _rows(batch, n, i).reshape(-1, i.shape[-1])
    weights, vectors = in_dtype(w.reshape(rows.shape), dtype), in_dtype(v.reshape(-1, d), dtype)
    return bag_gradient(weights, vectors, rows, math.prod(batch) * n).view(*batch, n, d)


def gathered(M: Tensor, i: Tensor) -> Tensor:
    """M[i], (*batch, B, k, d)."""
    rows = _rows(M.shape[:-2], M.shape[-2], i).flatten()
    # a fifth of the time of an index in brackets
    return M.flatten(0, -2).index_select(0, rows).view(*i.shape, M.shape[-1])


def gathered_sum(w: Tensor, M: Tensor, i: Tensor) -> Tensor:
    with without_autocast(w.device):
        return (w.unsqueeze(-2) @ gathered(M, i)).squeeze(-2)


def gathered_dot(
    v: Tensor, M: Tensor, i: Tensor, bias: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    dtype = wide(v, M)
    with without_autocast(v.device):
        products = (gathered(M, i).to(dtype) @ v.to(dtype).unsqueeze(-1)).squeeze(-1)
    products = products if bias is None else products + entries(bias, i)
    # products that a mask has made infinite have no derivative
    return products if known is None else torch.where(known.isfinite(), products, known.to(dtype))


def gathered_outer(w: Tensor, v: Tensor, i: Tensor, n: int) -> Tensor:
    batch, d, dtype = i.shape[:-2], v.shape[-1], wide(w, v)
    terms = w.to(dtype).unsqueeze(-1) * v.to(dtype).unsqueeze(-2)
    rows = _rows(batch, n, i).reshape(-1)
    sums = terms.new_zeros(math.prod(batch) * n, d).index_add(0, rows, terms.reshape(rows.shape[0], d))
    return sums.view(*batch, n, d)


def wide(a: Tensor, b: Tensor) -> torch.dtype:
    """The dtype of sums and products of a and b: float32 at least."""
    return torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)


def _rows(batch: torch.Size, n: int, i: Tensor) -> Tensor:
    """The indices as rows of one matrix: the n rows of each matrix of the batch, one below the other."""
    if not batch:
        return i
    starts = torch.arange(math.prod(batch), device=i.device, dtype=i.dtype) * n
    return i + starts.view(*batch, 1, 1)


def _as_one(M: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """One matrix with all rows of M, and the indices (rows, k) into it."""
    if M.dim() == i.dim() == 2:
        return M, i
    batch, rows = M.shape[:-2], (math.prod(i.shape[:-1]), i.shape[-1])
    shared = all(size == 1 or step == 0 for size, step in zip(batch, M.stride(), strict=False))
    if shared:  # as what torch.vmap does not map
        return M[(0,) * len(batch)], i.reshape(rows)
    return M.reshape(-1, M.shape[-1]), _rows(batch, M.shape[-2], i).reshape(rows)


def entries(bias: Tensor, i: Tensor) -> Tensor:
    """bias[i] of a bias (*batch, n)."""
    if bias.dim() == 1:
        return bias[i]
    return bias.gather(-1, i.flatten(-2)).view(i.shape)
