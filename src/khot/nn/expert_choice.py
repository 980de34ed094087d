"""A router in which the experts choose their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from khot import masks
from khot._core.arguments import Scalar
from khot._core.precision import wide_dtype, widen
from khot.cdfs import CDF, CDFName
from khot.nn._router import Router
from khot.nn._values import Value, current, describe, positive

__all__ = ["ExpertChoiceRouter"]


class ExpertChoiceRouter(Router):
    """Each expert chooses its tokens, so that all experts get equally many.

    With the probabilities p = softmax(Wx) of the experts for a token, every expert takes the k tokens of the
    row for which its probability is largest, k = capacity · n / experts:

        selection = soft_topk(log p, k, over the tokens),   weights = selection · p

    Soft in train mode, hard in eval mode. A token may get no expert (:attr:`Routing.dropped`) or several.
    Which ones it gets depends on the other tokens of its row, later ones included, so that this router is not
    for autoregressive models.

    Args:
        in_features: size of a token.
        num_experts: at least 2.
        capacity: how many experts a token gets on average, > 0; a number or a module that gives one
            (:class:`khot.nn.Anneal`). n counts the tokens that are not padding, and k is at least 1 and at
            most n.
        tau: temperature of the selection, > 0, in the units of log p; as capacity.
        cdf: as for :func:`khot.soft_topk`. With compact support (``"uniform"``) most of the selection is
            exactly 0 in train mode, too.
        device, dtype: of the parameters.

    Shape:
        input: tokens (..., n, in_features), of any floating-point dtype; mask: (..., n), bool, False where a
        token is padding.

        output: :class:`Routing`.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Sources: Zhou et al. 2022 (expert choice); Sander et al. 2023, section 6 (soft).

    Example:
        >>> router = khot.nn.ExpertChoiceRouter(16, num_experts=4, capacity=2.0).eval()
        >>> routing = router(torch.randn(3, 10, 16))
        >>> routing.selection.sum(-2)
        tensor([[5., 5., 5., 5.],
                [5., 5., 5., 5.],
                [5., 5., 5., 5.]])
        >>> routing.load
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    capacity: Value

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        capacity: Value = 2.0,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_experts, tau, cdf, device, dtype)
        self.capacity = positive(capacity, "capacity")
        self.reset_parameters()

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = scores.mT  # tokens last
        capacity, n = current(self.capacity), rows.shape[-1]
        k: Scalar
        if mask is None and not (isinstance(capacity, Tensor) or torch.compiler.is_compiling()):
            k = min(max(capacity * n / self.num_experts, 1), n)
        else:  # in a trace, a number would fix the number of tokens
            if mask is None:
                tokens = torch.full(rows.shape[:-2], n, dtype=wide_dtype(rows.device), device=rows.device)
            else:
                tokens, mask = widen(mask.sum(-1)), mask.unsqueeze(-2)
            k = torch.minimum((capacity * tokens / self.num_experts).clamp(min=1), tokens).unsqueeze(-1)
        if self.training:
            selection = masks.soft_topk(rows, k, tau=current(self.tau), cdf=self.cdf, mask=mask)
            self._note(selection)
        else:
            selection = masks.topk_mask(rows, k, mask=mask)
        return selection.mT, selection.mT * scores.exp()

    def extra_repr(self) -> str:
        return describe(
            in_features=self.in_features,
            num_experts=self.num_experts,
            capacity=self.capacity,
            tau=self.tau,
            cdf=self.cdf,
        )
