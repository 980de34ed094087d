"""A soft top-k as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs, masks
from khot._core import arguments, eager
from khot.cdfs import CDF, CDFName
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Positive, Value, available, current, describe, positive

__all__ = ["SoftTopK"]


class SoftTopK(LeftSoft):
    """A k-hot mask of the largest entries: :func:`khot.soft_topk` in train mode, hard in eval mode.

    Args:
        k: how many, > 0; a number or a module that gives one (:class:`khot.nn.Anneal`). A row with fewer
            entries that may be selected gets all of them.
        dim: the dimension to select along.
        tau: temperature > 0; as k.
        cdf: as for :func:`khot.soft_topk`.
        learnable_tau: learn the temperature, which starts at ``tau``, as softplus of a parameter.
        learnable_k: learn how many, starting at ``k``, as softplus of a parameter. It is a count and not a
            share of the entries: it is the same for rows of any length. A row with fewer entries gets all of
            them and gives k no gradient. k tends to grow unless the loss has a term for it, such as
            ``layer.k()``. With such a term it becomes too small in front of weights that learn as well,
            because larger weights make up for a smaller selection: take ``hard=True``, or
            :class:`khot.nn.KHotGate` with ``k=None``.
        hard: return the hard mask in train mode, too, with the gradient of the soft one.
        soft_eval: return the soft mask in eval mode, too.
        device, dtype: of the parameters, if there are any.

    Attributes:
        k, tau: the given numbers or modules; learned ones are modules, which return their value when called.

    Shape:
        input: scores of any shape and floating-point dtype.

        mask: bool, broadcastable to the input; True where an entry may be selected.

        output: the input's shape and dtype, in [0, 1]; each row sums to k. In eval mode exactly
        :func:`khot.topk_mask`: zeros and ⌊k + ½⌋ ones, without a gradient.

    Differentiable in input, k and tau: exactly; with ``hard`` the gradient is a surrogate.

    Raises:
        ValueError, TypeError, IndexError: as :func:`khot.soft_topk`.

    Example:
        >>> select = khot.nn.SoftTopK(2, tau=0.5)
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> select(scores)
        tensor([0.2689, 0.9526, 0.7311, 0.0474])
        >>> select.eval()(scores)
        tensor([0., 1., 1., 0.])
    """

    k: Value | Positive
    tau: Value | Positive
    dim: int
    cdf: CDF
    hard: bool
    soft_eval: bool

    def __init__(
        self,
        k: Value,
        dim: int = -1,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        learnable_tau: bool = False,
        learnable_k: bool = False,
        hard: bool = False,
        soft_eval: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        k, tau = positive(k, "k"), positive(tau, "tau")
        arguments.check_dim_type(dim)
        arguments.check_flags(
            learnable_tau=learnable_tau, learnable_k=learnable_k, hard=hard, soft_eval=soft_eval
        )
        self.k = Positive(k, "k", device, dtype) if learnable_k else k
        self.tau = Positive(tau, "tau", device, dtype) if learnable_tau else tau
        self.dim, self.cdf = dim, cdfs.resolve(cdf)
        self.hard, self.soft_eval = hard, soft_eval

    def reset_parameters(self) -> None:
        """Back to the k and tau that the layer was made with."""
        for value in (self.k, self.tau):
            if isinstance(value, Positive):
                value.reset_parameters()

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        soft = self.training or self.soft_eval
        if soft and not self.hard and eager.launching and not is_dynamo_compiling():
            k, tau = current(self.k), current(self.tau)
            plain = eager.soft_topk_of_selectable(input, k, self.dim, tau, self.cdf, True, mask, None, False)
            if plain is not None:
                if self.training and not self.soft_eval:
                    self._note(plain)
                return plain
        x = arguments.rows(input, self.dim, mask)
        k = available(current(self.k), x)
        if self.training or self.soft_eval:
            y = masks.soft_topk(x, k, tau=current(self.tau), cdf=self.cdf, hard=self.hard)
            if self.training and not (self.hard or self.soft_eval):
                self._note(y)
        else:
            y = masks.topk_mask(x, k)
        return arguments.unrows(y, input, self.dim)

    if TYPE_CHECKING:
        __call__ = forward

    def _cure(self) -> str:
        return f"{super()._cure()}, or set hard=True"

    def extra_repr(self) -> str:
        values = describe(k=self.k, dim=self.dim, tau=self.tau, cdf=self.cdf)
        return values + ", hard=True" * self.hard + ", soft_eval=True" * self.soft_eval
