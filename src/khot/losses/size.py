"""The price of a learned size."""

from __future__ import annotations

from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import wide_dtype
from khot._core.ways import by_rows
from khot.losses._reduction import Reduction, check_reduction, reduce, with_entries

__all__ = ["size_penalty"]


@by_rows(0, loss=True)
def size_penalty(
    probs: Tensor,
    weight: Scalar,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    offsets: Tensor | None = None,
) -> Tensor:
    """The price of a subset whose size is learned, averaged over the batch.

        L = λ Σ_i π_i

    Σπ is the expected size of a sample with the inclusion probabilities π. An entry is therefore selected
    only if it lowers the loss by more than λ, like the regularisation parameter of the lasso.

    Args:
        probs: inclusion probabilities in [0, 1], such as ``logits.sigmoid()``.
        weight: λ ≥ 0; a number or a tensor that broadcasts with the batch shape (the shape of probs without
            ``dim``).
        dim: the dimension along which the entries lie.
        mask: bool, broadcastable to probs; True where an entry has a price. Entries under False are ignored,
            even NaN.
        reduction: ``"mean"`` over the rows that have entries, ``"sum"`` or ``"none"``. As in PyTorch, the
            mean over no rows is NaN.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        A number ≥ 0 of the probabilities' dtype, with ``"none"`` the batch shape; differentiable in probs and
        weight.

    Raises:
        ValueError: weight < 0, or a weight that does not broadcast with the batch shape; an unknown
            reduction.
        TypeError: probs that are not a floating-point tensor, a mask that is not a bool one.
        IndexError: dim out of range.

    Source: Wijk, Vinuesa, Azizpour 2025, section 2.3.

    Example:
        >>> khot.losses.size_penalty(torch.tensor([0.5, 1.0, 0.25]), 0.1)
        tensor(0.1750)
    """
    arguments.check_input(probs, "probs")
    x = arguments.rows(probs, dim, mask, fill=0.0)
    weight = arguments.per_row(weight, "weight", x, low=0)
    price = weight * x.sum(-1, dtype=wide_dtype(x.device))  # a sum in half precision may overflow
    return reduce(price, with_entries(probs, dim, mask), check_reduction(reduction), probs.dtype)
