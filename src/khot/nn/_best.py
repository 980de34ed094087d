"""The k largest entries as indices, with the ties of the hard mask."""

from __future__ import annotations

import torch
from torch import Tensor

from khot import masks
from khot._core import arguments
from khot.nn._export import to_onnx
from khot.nn._values import available

__all__ = ["best_indices", "order"]


def best_indices(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest entries along the last dim, the largest first, equal ones by index.

    They are the entries of :func:`khot.topk_mask`, which ``torch.topk`` does not promise: of equal entries it
    returns any, in any order. In a row with fewer than k entries above −inf, some of the others come last.
    """
    if arguments.readable(x):
        # without ties they are torch.topk's, at half the cost; on a GPU the question would wait for it
        values, indices = x.topk(min(k + 1, x.shape[-1]))
        if bool((values[..., :-1] > values[..., 1:]).all()):
            return indices[..., :k]
    return order(x, masks.topk_mask(x, available(k, x)), k)


def order(x: Tensor, chosen: Tensor, m: int) -> Tensor:
    """The indices of the chosen entries, sorted, then some of the others, m in all."""
    x = x.masked_fill(chosen == 0, -torch.inf)
    if to_onnx():  # whose topk returns equal entries by index
        return x.topk(m).indices
    indices = x.topk(m, sorted=False).indices.sort(-1).values
    return indices.gather(-1, x.gather(-1, indices).sort(stable=True, dim=-1, descending=True).indices)
