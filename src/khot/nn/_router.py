"""What the routers have in common: scores, report of the load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs
from khot._core import arguments
from khot._core.precision import in_dtype, without_autocast
from khot._core.torch_internals import save_in_exports
from khot.cdfs import CDF, CDFName
from khot.nn._inputs import check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Value, positive

__all__ = ["Router", "Routing", "evenness", "tokens_of"]


class Routing(NamedTuple):
    """What a router decided, and how the load is distributed.

    Attributes:
        weights: (..., n, experts), of the tokens' dtype; a mixture is Σ_e weights_e · expert_e(token).
        selection: (..., n, experts) in [0, 1]; the k-hot mask, soft or hard, that the weights come from.
        load: (experts,); for each expert, the share of the tokens that it gets.
        entropy: of the load, divided by that of an even load: 1 is balanced, 0 is a single expert.
        dropped: the share of the tokens that no expert gets.

    All but the weights are in float32 (in float64 for tokens of that dtype), and differentiable.
    """

    weights: Tensor
    selection: Tensor
    load: Tensor
    entropy: Tensor
    dropped: Tensor


save_in_exports(Routing, "khot.nn.Routing")


def tokens_of(router: Any, input: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tokens (..., n, in_features) of a router, 0 where they are padding, the mask (..., n), and its
    opposite, which are both None if there is no padding."""
    check_width(input, router.in_features, router)
    if input.dim() < 2:
        raise ValueError(
            f"input must have shape (..., n, {router.in_features}) for this {type(router).__name__}, but got "
            f"shape {tuple(input.shape)}"
        )
    if mask is None:
        return input, None, None
    mask = arguments.mask_rows(mask, input[..., 0], -1)
    padding = ~mask
    return input.masked_fill(padding.unsqueeze(-1), 0), mask, padding


def evenness(load: Tensor) -> Tensor:
    """The entropy of a load (experts,), divided by that of an even one."""
    # an idle expert adds nothing, and has no gradient: that of p log p is infinite at 0
    load = load.clamp(min=torch.finfo(load.dtype).tiny)
    return torch.special.entr(load / load.sum()).sum() / math.log(load.shape[0])


class Router(LeftSoft):
    """The base of the routers: the scores, log softmax(Wx) over the experts, and the report of the load.

    Shape:
        input: tokens (..., n, in_features), of any floating-point dtype.

        mask: (..., n), bool; False where a token is padding. Padding goes to no expert and is not counted.
    """

    in_features: int
    num_experts: int
    tau: Value
    cdf: CDF
    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        tau: Value,
        cdf: CDFName | CDF,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        arguments.check_integer(in_features, "in_features", low=0)
        arguments.check_integer(num_experts, "num_experts", low=2)
        self.in_features, self.num_experts = in_features, num_experts
        self.tau, self.cdf = positive(tau, "tau"), cdfs.resolve(cdf)
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Routing:
        input, mask, _ = tokens_of(self, input, mask)
        wide = torch.promote_types(input.dtype, torch.float32)
        with without_autocast(input.device):
            x = in_dtype(input, wide)
            scores = F.linear(x, in_dtype(self.weight, wide)).log_softmax(-1)
            selection, weights = self._route(x, scores, mask)
        of_token = selection.sum(-1)
        tokens: int | Tensor
        if mask is None:
            tokens, missing = max(1, of_token.numel()), (1 - of_token).clamp(min=0)
        else:
            tokens, missing = mask.sum().to(wide).clamp(min=1), (mask.to(wide) - of_token).clamp(min=0)
        load = selection.flatten(0, -2).sum(0) / tokens
        weights = in_dtype(weights, input.dtype)
        return Routing(weights, selection, load, evenness(load), missing.sum() / tokens)

    if TYPE_CHECKING:
        __call__ = forward

    def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Selection and weights for scores (..., n, experts)."""
        raise NotImplementedError
