"""A router in which the tokens choose their experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import masks
from khot._core import arguments
from khot.cdfs import CDF, CDFName
from khot.nn._router import Router
from khot.nn._values import Value, current, describe, number
from khot.nn.balancer import QuantileBalancer

__all__ = ["TokenChoiceRouter"]


class TokenChoiceRouter(Router):
    """Each token chooses its k experts; k is the same for all tokens, or learned for each token.

    With the scores s = Wx of the experts:

        selection = soft_topk(s, k, over the experts),   weights = softmax(s + log selection)

    Soft in train mode; in eval mode hard, a softmax over the k best. With a ``balancer`` the selection is
    that of s + bias, and the weights are still computed from s.

    Args:
        in_features: size of a token.
        num_experts: at least 2.
        k: how many experts a token gets, from 1 to ``num_experts``; a number or a module that gives one
            (:class:`khot.nn.Anneal`).
        learnable_k: learn k as a function of the token, k = 1 + (experts − 1)·σ(⟨u, x⟩ + b), which starts as
            the number ``k`` for all tokens. k tends to grow unless the loss has a term for it, such as
            ``routing.selection.sum(-1).mean()``.
        tau: temperature of the selection, > 0, in the units of the scores; as k.
        cdf: as for :func:`khot.soft_topk`. With compact support (``"uniform"``) most of the selection is
            exactly 0 in train mode, too.
        balancer: a :class:`khot.nn.QuantileBalancer` for these experts and this k, which has to be a number,
            or None. The router shows it the scores in the balancer's train mode; call its ``update`` once per
            step of the optimizer. To train with a hard selection, take a :class:`khot.nn.TopKRouter`.
        device, dtype: of the parameters.

    Shape:
        input: tokens (..., n, in_features), of any floating-point dtype; mask: (..., n), bool, False where a
        token is padding.

        output: :class:`Routing`. The weights of a token sum to 1.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Sources: Shazeer et al. 2017 (hard); Sander et al. 2023, section 6 (soft).

    Example:
        >>> router = khot.nn.TokenChoiceRouter(16, num_experts=4, k=2).eval()
        >>> routing = router(torch.randn(3, 10, 16))
        >>> bool((routing.selection.sum(-1) == 2).all())
        True
        >>> round(routing.load.sum().item(), 4)  # each token counts for two experts
        2.0
    """

    k: Value | _CountOfToken | int
    balancer: QuantileBalancer | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Value,
        *,
        learnable_k: bool = False,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        balancer: QuantileBalancer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_experts, tau, cdf, device, dtype)
        arguments.check_flags(learnable_k=learnable_k)
        k = number(k, "k", low=1, high=num_experts)
        self.k = _CountOfToken(in_features, num_experts, k, device, dtype) if learnable_k else k
        if balancer is not None:
            _check_balancer(balancer, num_experts, self.k)
            balancer = balancer.to(device)  # None is where it is
        self.balancer = balancer
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``; a learned k is again the same for all tokens, and all biases are 0."""
        super().reset_parameters()
        if isinstance(self.k, _CountOfToken):
            self.k.reset_parameters()
        if self.balancer is not None:
            self.balancer.reset_parameters()

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(self.k, _CountOfToken):
            k = self.k(x)
            unknown = k.isnan()  # the operators would raise an error, but a NaN has to stay in its row
            k, scores = k.masked_fill(unknown, 1), scores.masked_fill(unknown.unsqueeze(-1), math.nan)
        else:
            k = current(self.k)
        biased = scores
        if self.balancer is not None:
            if self.balancer.training:
                self.balancer(scores, mask)
            biased = scores + self.balancer.bias
        if self.training:
            log_y = masks.log_soft_topk(biased, k, tau=current(self.tau), cdf=self.cdf)
        else:
            log_y = masks.topk_mask(biased, k).log()
        selection, weights = log_y.exp(), (scores + log_y).softmax(-1)
        if self.training:
            self._note(selection)
        if mask is not None:
            padding = ~mask.unsqueeze(-1)
            selection, weights = selection.masked_fill(padding, 0), weights.masked_fill(padding, 0)
        return selection, weights

    def extra_repr(self) -> str:
        return describe(
            in_features=self.in_features, num_experts=self.num_experts, k=self.k, tau=self.tau, cdf=self.cdf
        )


def _check_balancer(balancer: object, num_experts: int, k: object) -> None:
    if not isinstance(balancer, QuantileBalancer):
        raise TypeError(f"balancer must be a QuantileBalancer or None, but got {type(balancer).__name__}")
    if balancer.num_experts != num_experts or isinstance(k, nn.Module) or balancer.k != k:
        of_router = type(k).__name__ if isinstance(k, nn.Module) else k
        raise ValueError(
            f"balancer must have the experts and the fixed k of the router, num_experts={num_experts} and "
            f"k={of_router}, but got num_experts={balancer.num_experts} and k={balancer.k}"
        )
    if not balancer._groups.all:
        raise ValueError(f"balancer must have no groups, which khot.nn.TopKRouter takes, but got {balancer}")


class _CountOfToken(nn.Module):
    """How many experts a token gets, 1 + (experts − 1)·σ(⟨u, x⟩ + b); at first the same for all."""

    num_experts: int
    init: float
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        init: Value,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if isinstance(init, nn.Module):
            raise TypeError(f"k must be a number if it is learned, but got {type(init).__name__}")
        if init in (1, num_experts):
            raise ValueError(f"k must lie inside (1, {num_experts}) if it is learned, but got {init}")
        self.num_experts, self.init = num_experts, init
        self.weight = nn.Parameter(torch.empty(1, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log((self.init - 1) / (self.num_experts - self.init)))

    def forward(self, x: Tensor) -> Tensor:
        logit = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).squeeze(-1)
        return 1 + (self.num_experts - 1) * logit.sigmoid()

    def extra_repr(self) -> str:
        return f"init={self.init}"
