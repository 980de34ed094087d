"""Routers: which tokens go to which experts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, topk
from khot._core import arguments
from khot._core.precision import wide_dtype, widen
from khot.cdfs import CDF
from khot.nn.values import Value, current, describe, positive

__all__ = ["ExpertChoiceRouter", "Router", "Routing", "TokenChoiceRouter"]


class Routing(NamedTuple):
    """What a router decided, and how the load lies.

    Attributes:
        weights: (..., n, experts), of the tokens' dtype; a mixture is Σ_e weights_e · expert_e(token).
        selection: (..., n, experts) in [0, 1]; the k-hot mask, soft or hard, that the weights come from.
        load: (experts,); the share of the tokens that each expert gets.
        entropy: of the load, as a share of an even one's: 1 is balanced, 0 is a single expert.
        dropped: the share of the tokens that no expert takes.

    All but the weights are in float32, or float64 for such tokens, and differentiable.
    """

    weights: Tensor
    selection: Tensor
    load: Tensor
    entropy: Tensor
    dropped: Tensor


class Router(nn.Module):
    """What the routers share: the scores, log softmax(Wx) over the experts, and the report of the load.

    Shape:
        input: tokens (..., n, dim), of any floating-point dtype.

        mask: (..., n), bool; False where a token is padding. It goes to no expert and is not counted.
    """

    dim: int
    num_experts: int
    tau: Value
    cdf: CDF
    weight: nn.Parameter

    def __init__(
        self,
        dim: int,
        num_experts: int,
        tau: Value,
        cdf: str | CDF,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if num_experts < 2:
            raise ValueError(f"num_experts must be at least 2, but got {num_experts}")
        self.dim, self.num_experts = dim, num_experts
        self.tau, self.cdf = positive(tau, "tau"), cdfs.resolve(cdf)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Routing:
        arguments.check_input(input)
        if mask is not None:
            mask = arguments.mask_rows(mask, input[..., 0], -1)
            input = input.masked_fill(~mask.unsqueeze(-1), 0)
        # float32 at least, whatever autocast says: near ties decide who gets a token
        wide = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            x = input.to(wide)
            selection, weights = self._route(x, F.linear(x, self.weight.to(wide)).log_softmax(-1), mask)
        if mask is None:
            tokens = torch.full((), selection[..., 0].numel(), dtype=wide, device=x.device)
            missing = (1 - selection.sum(-1)).clamp(min=0)
        else:
            tokens = mask.sum().to(wide)
            missing = (mask.to(wide) - selection.sum(-1)).clamp(min=0)
        tokens = tokens.clamp(min=1)
        load = selection.flatten(0, -2).sum(0) / tokens
        share = load / load.sum().clamp(min=torch.finfo(wide).tiny)
        entropy = torch.special.entr(share).sum() / math.log(self.num_experts)
        return Routing(weights.to(input.dtype), selection, load, entropy, missing.sum() / tokens)

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Selection and weights of (..., n, experts) scores."""
        raise NotImplementedError


class ExpertChoiceRouter(Router):
    """Each expert chooses its tokens, so that all get equally many.

    With the probabilities p = softmax(Wx) of the experts for a token, every expert takes the k tokens of its
    row for which it is most probable, k = capacity · n / experts:

        selection = soft_topk(log p, k, over the tokens),   weights = selection · p

    Soft in train mode, hard in eval mode. A token may get no expert (:attr:`Routing.dropped`) or several, and
    who gets one depends on the other tokens of its row, later ones included: not for autoregressive models.

    Args:
        dim: size of a token.
        num_experts: at least 2.
        capacity: how many experts a token gets on average, > 0; a number or a module that gives one
            (:class:`khot.nn.Anneal`). n counts the tokens that are not padding, and k is at least 1 and at
            most n.
        tau: temperature of the selection, > 0, in the units of log p; as capacity.
        cdf: as for :func:`khot.soft_topk`. With compact support (``"uniform"``) most of the selection is
            exactly 0 in train mode, too.
        device, dtype: of the parameters.

    Shape:
        input: tokens (..., n, dim), of any floating-point dtype; mask: (..., n), bool, False where a token
        is padding.

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
        dim: int,
        num_experts: int,
        capacity: Value = 2.0,
        *,
        tau: Value = 1.0,
        cdf: str | CDF = "logistic",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts, tau, cdf, device, dtype)
        self.capacity = positive(capacity, "capacity")
        self.reset_parameters()

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = scores.mT  # tokens last
        if mask is None:
            n = torch.full(rows.shape[:-2], rows.shape[-1], dtype=wide_dtype(rows.device), device=rows.device)
        else:
            n, mask = widen(mask.sum(-1)), mask.unsqueeze(-2)
        k = torch.minimum((current(self.capacity) * n / self.num_experts).clamp(min=1), n).unsqueeze(-1)
        if self.training:
            selection = topk.soft_topk(rows, k, tau=current(self.tau), cdf=self.cdf, mask=mask)
        else:
            selection = topk.topk_mask(rows, k, mask=mask)
        return selection.mT, selection.mT * scores.exp()

    def extra_repr(self) -> str:
        return describe(
            dim=self.dim, num_experts=self.num_experts, capacity=self.capacity, tau=self.tau, cdf=self.cdf
        )


class TokenChoiceRouter(Router):
    """Each token chooses its experts, k of them, the same number for all or a learned one for each.

    With the scores s = Wx of the experts:

        selection = soft_topk(s, k, over the experts),   weights = softmax(s + log selection)

    Soft in train mode; in eval mode hard, a softmax over the k best.

    Args:
        dim: size of a token.
        num_experts: at least 2.
        k: how many experts a token gets, from 1 to ``num_experts``; a number or a module that gives one
            (:class:`khot.nn.Anneal`).
        learnable_k: learn how many from the token, k = 1 + (experts − 1)·σ(⟨u, x⟩ + b), from the number
            ``k`` for all on. Unless the loss has a price on it, such as ``routing.selection.sum(-1).mean()``,
            k tends to grow.
        tau: temperature of the selection, > 0, in the units of the scores; as k.
        cdf: as for :func:`khot.soft_topk`. With compact support (``"uniform"``) most of the selection is
            exactly 0 in train mode, too.
        device, dtype: of the parameters.

    Shape:
        input: tokens (..., n, dim), of any floating-point dtype; mask: (..., n), bool, False where a token
        is padding.

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

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: Value,
        *,
        learnable_k: bool = False,
        tau: Value = 1.0,
        cdf: str | CDF = "logistic",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts, tau, cdf, device, dtype)
        if not isinstance(k, nn.Module):
            arguments.check_number(k, "k", low=1, high=num_experts)
        self.k = _CountOfToken(dim, num_experts, k, device, dtype) if learnable_k else k
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``; a learned k is again the same for all tokens."""
        super().reset_parameters()
        if isinstance(self.k, _CountOfToken):
            self.k.reset_parameters()

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        k = self.k(x) if isinstance(self.k, _CountOfToken) else current(self.k)
        if self.training:
            log_y = topk.log_soft_topk(scores, k, tau=current(self.tau), cdf=self.cdf)
        else:
            log_y = topk.topk_mask(scores, k).log()
        selection, weights = log_y.exp(), (scores + log_y).softmax(-1)
        if mask is not None:
            padding = ~mask.unsqueeze(-1)
            selection, weights = selection.masked_fill(padding, 0), weights.masked_fill(padding, 0)
        return selection, weights

    def extra_repr(self) -> str:
        return describe(dim=self.dim, num_experts=self.num_experts, k=self.k, tau=self.tau, cdf=self.cdf)


class _CountOfToken(nn.Module):
    """How many experts a token gets, 1 + (experts − 1)·σ(⟨u, x⟩ + b); at first the same for all."""

    num_experts: int
    init: float
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        dim: int,
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
        self.weight = nn.Parameter(torch.empty(1, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log((self.init - 1) / (self.num_experts - self.init)))

    def forward(self, x: Tensor) -> Tensor:
        logit = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).squeeze(-1)
        return 1 + (self.num_experts - 1) * logit.sigmoid()

    def extra_repr(self) -> str:
        return f"init={self.init}"
