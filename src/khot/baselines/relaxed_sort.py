"""Permutation matrices whose rows are softmaxes, and top-k masks from their first rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot.baselines._rows import at_dim, prepare

__all__ = ["neuralsort_permutation", "neuralsort_topk", "softsort_permutation", "softsort_topk"]


def neuralsort_permutation(input: Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The matrix that sorts a row in descending order, relaxed to one whose rows are softmaxes (NeuralSort).

    Row i of P is the softmax of ((n + 1 − 2i) x_j − Σ_l |x_j − x_l|)/τ over the entries j.

    Defects: rows sum to 1, but columns do not. An infinite score gives NaN. O(n²) time and memory, even for
    one row of the matrix.

    Args:
        input: scores, of any floating-point dtype.
        dim: the dimension to sort along.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``).

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by (n, n), places by entries, as from
        ``khot.soft_permutation(input, descending=True)``. Differentiable in input and tau.

    Raises:
        ValueError: tau ≤ 0.
        TypeError, IndexError: as for :func:`khot.soft_permutation`.

    Source: Grover, Wang, Zweig, Ermon 2019.

    Example:
        >>> khot.baselines.neuralsort_permutation(torch.tensor([1.0, 3.0, 2.0]))
        tensor([[0.0132, 0.7214, 0.2654],
                [0.2119, 0.2119, 0.5761],
                [0.7214, 0.0132, 0.2654]])
    """
    x, _, tau = prepare(input, 0, dim, tau)
    return at_dim(_neuralsort(x, tau, x.shape[-1]).to(input.dtype), input, dim)


def softsort_permutation(input: Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The matrix that sorts a row in descending order, relaxed to one whose rows are softmaxes (SoftSort).

    Row i of P is the softmax of −|s_i − x_j|/τ over the entries j, where s is the sorted row.

    Defects: rows sum to 1, but columns do not: of close entries, the middle ones are selected more than once,
    and the outer ones less. An infinite score gives NaN. O(n²) time and memory.

    Args:
        input, dim, tau: as for :func:`neuralsort_permutation`.

    Returns, raises: as for :func:`neuralsort_permutation`.

    Source: Prillo, Eisenschlos 2020, with the distance |·|.

    Example:
        >>> khot.baselines.softsort_permutation(torch.tensor([1.0, 3.0, 2.0]))
        tensor([[0.0900, 0.6652, 0.2447],
                [0.2119, 0.2119, 0.5761],
                [0.6652, 0.0900, 0.2447]])
    """
    x, _, tau = prepare(input, 0, dim, tau)
    return at_dim(_softsort(x, tau, x.shape[-1]).to(input.dtype), input, dim)


def neuralsort_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The sum of the first k rows of :func:`neuralsort_permutation`.

    Defects: entries exceed 1, and their order may differ from that of the scores; k is an integer; others as
    for :func:`neuralsort_permutation`.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Grover, Wang, Zweig, Ermon 2019; used so by Xie et al. 2020, appendix C.

    Example:
        >>> khot.baselines.neuralsort_topk(torch.tensor([1.0, 3.0, 2.0]), 2)
        tensor([0.2252, 0.9333, 0.8415])
    """
    return _first_rows(_neuralsort, input, k, dim, tau)


def softsort_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The sum of the first k rows of :func:`softsort_permutation`.

    Defects: entries exceed 1, and their order may differ from that of the scores; k is an integer; others as
    for :func:`softsort_permutation`, in O(nk) time and memory and a sort.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Prillo, Eisenschlos 2020.

    Example:
        >>> khot.baselines.softsort_topk(torch.tensor([1.0, 3.0, 2.0]), 2)
        tensor([0.3020, 0.8772, 0.8208])
    """
    return _first_rows(_softsort, input, k, dim, tau)


def _neuralsort(x: Tensor, tau: Tensor, rows: int) -> Tensor:
    """The first rows of the matrix: (*batch, rows, n)."""
    n = x.shape[-1]
    spread = (x.unsqueeze(-1) - x.unsqueeze(-2)).abs().sum(-1)
    scale = n - 1 - 2 * torch.arange(rows, device=x.device).unsqueeze(-1)
    return torch.softmax((scale * x.unsqueeze(-2) - spread.unsqueeze(-2)) / tau.unsqueeze(-1), -1)


def _softsort(x: Tensor, tau: Tensor, rows: int) -> Tensor:
    """The first rows of the matrix: (*batch, rows, n)."""
    s = x.sort(-1, descending=True).values[..., :rows].unsqueeze(-1)
    return torch.softmax(-(s - x.unsqueeze(-2)).abs() / tau.unsqueeze(-1), -1)


def _first_rows(
    permutation: Callable[[Tensor, Tensor, int], Tensor], input: Tensor, k: Any, dim: int, tau: Scalar
) -> Tensor:
    x, k, tau = prepare(input, k, dim, tau, integer=True)
    most = int(k.max()) if k.numel() else 0
    selected = torch.arange(most, device=x.device) < k
    y = (permutation(x, tau, most) * selected.unsqueeze(-1)).sum(-2)
    return arguments.unrows(y.to(input.dtype), input, dim)
