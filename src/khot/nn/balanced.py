"""A router in which tokens choose experts that all get the same load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import masks
from khot.assignment import soft_assign
from khot.cdfs import CDF, CDFName
from khot.nn._bias import Biased
from khot.nn._router import Router
from khot.nn._state import Grouped, observes
from khot.nn._values import Value, current, describe, number

__all__ = ["BalancedRouter"]


class BalancedRouter(Biased, Grouped, Router):
    """Each token chooses its k experts, and all experts get the same load, in every batch.

    With the probabilities p = softmax(Wx) of the experts for a token, and one bias b_e per expert:

        selection = soft_assign(log p, k),   weights = selection · p

    In train mode the sum of the selection over the experts is k for every token, and its sum over the n
    tokens is k·n/experts for every expert. These are all tokens of the call that are not padding, whatever
    the leading dims are, because experts work for the whole batch. (:class:`khot.nn.ExpertChoiceRouter`
    balances each row by itself.) So the selection of a token depends on the others in train mode.

    In eval mode it does not: the selection is ``topk_mask(log p + b, k)`` with the biases that balanced the
    last batch in train mode, so that the router is fit for autoregressive models. The load of another batch
    is then about even, the more so the smaller ``tau`` is: the biases balance a selection that is as soft as
    that of train mode.

    Args:
        in_features: size of a token.
        num_experts: at least 2.
        k: how many experts a token gets, from 1 to ``num_experts``; a number or a module that gives one
            (:class:`khot.nn.Anneal`).
        tau: temperature of the selection, > 0, in the units of log p; as k.
        cdf: as for :func:`khot.soft_assign`, of full support.
        group: None, or the process group (a tuple of them for a grid) whose processes each have a part of the
            tokens. In train mode all tokens of the group are then balanced together, and all processes have
            to make the same calls. None: each process balances its own tokens.
        device, dtype: of the parameters.

    Attributes:
        bias: (num_experts,), a buffer in float32, which stays in float32 when the model is cast. It is saved.
            Each forward pass in train mode sets it while gradients are enabled. The next one starts from it,
            which saves time but does not change the result. Activation checkpointing is therefore safe.
        group: as given; it may be set later, and is not saved.

    Shape:
        input: tokens (..., n, in_features), of any floating-point dtype; mask: (..., n), bool, False where a
        token is padding.

        output: :class:`Routing`.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Without a group, each process has biases of its own; ``DistributedDataParallel`` copies those of the first
    process to all others before each forward pass. With a group they are the same on all.

    Example:
        >>> router = khot.nn.BalancedRouter(16, num_experts=4, k=2)
        >>> routing = router(torch.randn(3, 10, 16))
        >>> routing.load
        tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<DivBackward0>)
        >>> routing = router.eval()(torch.randn(3, 10, 16))
        >>> bool((routing.selection.sum(-1) == 2).all())
        True
    """

    k: Value

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Value,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_experts, tau, cdf, device, dtype)
        if not self.cdf.full_support:
            raise ValueError(f"cdf must have full support, such as 'logistic' or 'normal', but got {cdf!r}")
        k = number(k, "k", low=1, high=num_experts)
        self.k, self.group = k, group
        self.register_buffer("bias", torch.empty(num_experts, device=device, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``; all biases are 0."""
        super().reset_parameters()
        self._reset_bias()

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        k = current(self.k)
        if mask is not None:
            mask = mask.unsqueeze(-1)
        if not self.training:
            selection = masks.topk_mask(scores + self.bias, k)
            if mask is not None:
                selection = selection.masked_fill(~mask, 0)
            return selection, selection * scores.exp()
        y, bias = soft_assign(
            scores.flatten(0, -2),
            k,
            tau=current(self.tau),
            cdf=self.cdf,
            mask=None if mask is None else mask.flatten(0, -2),
            bias=self.bias,
            return_bias=True,
            group=self.group,
        )
        if observes(self):
            # a batch without tokens says nothing, nor does an expert that is closed, or a NaN
            (selected,) = self._shared().reduce([y.detach().sum()])
            known = bias.isfinite() & (selected > 0)
            self.bias.copy_(torch.where(known, bias, self.bias))
        self._note(y)
        selection = y.view_as(scores)
        return selection, selection * scores.exp()

    def extra_repr(self) -> str:
        return describe(
            in_features=self.in_features, num_experts=self.num_experts, k=self.k, tau=self.tau, cdf=self.cdf
        )
