"""The router of large language models: the k best experts of each token, as indices and weights."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._core import arguments
from khot._core.precision import in_dtype, without_autocast
from khot._core.torch_internals import save_in_exports
from khot.nn._groups import Groups
from khot.nn._router import evenness, tokens_of
from khot.nn._values import describe
from khot.nn.balancer import QuantileBalancer
from khot.selection import topk

__all__ = ["TopKRouter", "TopKRouting"]

Scores = Literal["softmax", "sigmoid"]
TINY = 1e-20  # as DeepSeek-V3 adds to a sum of sigmoids


class TopKRouting(NamedTuple):
    """What a :class:`TopKRouter` decided, and how the load is distributed.

    Attributes:
        topk_weights: (..., n, k), of the tokens' dtype; the weights of the experts, 0 where there is none.
        indices: (..., n, k), int64; the experts of each token, the best first. ``num_experts``, one more than
            the last expert, stands for none: padding, and what a ``capacity`` dropped.
        logits: (..., n, experts), in float32 (in float64 for tokens of that dtype).
        load: (experts,); for each expert, the share of the tokens that it gets.
        entropy: of the load, divided by that of an even load: 1 is balanced, 0 is a single expert.
        dropped: the share of all choices that the capacity dropped.
        z_loss: the mean over the tokens of (log Σ exp logits)², for those who add it to their loss to keep
            the logits small (Zoph et al. 2022).

    ``topk_weights``, ``logits`` and ``z_loss`` are differentiable.
    """

    topk_weights: Tensor
    indices: Tensor
    logits: Tensor
    load: Tensor
    entropy: Tensor
    dropped: Tensor
    z_loss: Tensor


save_in_exports(TopKRouting, "khot.nn.TopKRouting")


class TopKRouter(nn.Module):
    """Each token goes to its k best experts, in train mode as in eval mode, as in large language models.

    With the logits Wx of the experts, in float32 whatever the dtype of the tokens:

        scores = softmax(logits) or σ(logits),   indices = the k largest,   weights = scores[indices]

    Nothing of shape (tokens, experts) is made but the logits, the scores, and what a balancer counts. The
    gradient reaches W through the weights, as in the models below. For a soft choice in small mixtures, see
    :class:`khot.nn.TokenChoiceRouter`.

    ==============================  ====================================================================
    model                           router
    ==============================  ====================================================================
    Mixtral                         ``TopKRouter(d, E, k)``, and ``jitter=`` its ``router_jitter_noise``
    Qwen-MoE, OLMoE                 ``TopKRouter(d, E, k, normalize=config.norm_topk_prob)``
    DeepSeek-V3                     ``TopKRouter(d, E, k, scores="sigmoid", groups=G, top_groups=M, scale=c)``
    ==============================  ====================================================================

    with DeepSeek-V3's ``n_group``, ``topk_group`` and ``routed_scaling_factor`` for G, M and c.

    Args:
        in_features: size of a token.
        num_experts: E, at least 2.
        k: how many experts a token gets, from 1 to E.
        scores: "softmax" or "sigmoid".
        normalize: divide the k weights of a token by their sum, which makes those of "softmax" a softmax
            over the k chosen experts alone.
        scale: a factor for the weights, > 0.
        jitter: in [0, 1); in train mode, the router sees each number of a token times a random one between
            1 − jitter and 1 + jitter.
        capacity: how many tokens an expert takes at most, in units of its even share k·n/E of all n tokens of
            the call; the tokens that come later in the order of the call are dropped. None: any number.
        groups: how many groups the experts form, each of E / groups neighbours.
        top_groups: how many groups a token may use, from 1 to ``groups``: those with the largest sums of
            their two best scores, of equal ones the first. None allows all.
        balancer: a :class:`khot.nn.QuantileBalancer` for these experts, k and groups, or None. The choice is
            then that of the largest biased scores (logits for "softmax"), and the weights have no bias. Call
            the balancer's ``update`` once per step of the optimizer.
        device, dtype: of the parameter.

    Attributes:
        weight: (E, in_features), the parameter W.

    Shape:
        input: tokens (..., n, in_features), of any floating-point dtype; mask: (..., n), bool, False where a
        token is padding, which goes to no expert and is not counted; k: None, or how many experts each token
        gets, integers from 0 to the layer's k that broadcast to (..., n), not with a balancer. A token then
        gets its best experts, their weights are normalised among themselves, and the other places have the
        index E and the weight 0.

        output: :class:`TopKRouting`, for experts of the form ``experts(x, indices, topk_weights)``, or for
        :class:`khot.nn.MixtureOfExperts`.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Sources: Shazeer et al. 2017; Lepikhin et al. 2021 (capacity); DeepSeek-AI 2024 (groups, sigmoid).

    Example:
        >>> balancer = khot.nn.QuantileBalancer(8, k=2)
        >>> router = khot.nn.TopKRouter(16, num_experts=8, k=2, balancer=balancer)
        >>> x = torch.randn(4, 100, 16)
        >>> for _ in range(8):
        ...     routing = router(x)
        ...     balancer.update()
        >>> routing.indices.shape, bool(router(x).load.max() < 1.05 * 2 / 8)
        (torch.Size([4, 100, 2]), True)
        >>> torch.allclose(routing.topk_weights.sum(-1), torch.tensor(1.0))
        True
    """

    in_features: int
    num_experts: int
    k: int
    scores: Scores
    weight: nn.Parameter
    balancer: QuantileBalancer | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        jitter: float = 0.0,
        capacity: float | None = None,
        groups: int = 1,
        top_groups: int | None = None,
        balancer: QuantileBalancer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.check_integer(in_features, "in_features", low=0)
        arguments.check_integer(num_experts, "num_experts", low=2)
        arguments.check_integer(k, "k", low=1, high=num_experts)
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be 'softmax' or 'sigmoid', but got {scores!r}")
        arguments.check_flags(normalize=normalize)
        arguments.check_number(scale, "scale", low=math.ulp(0.0), high=sys.float_info.max)
        arguments.check_number(jitter, "jitter", low=0, high=math.nextafter(1, 0))
        if capacity is not None:
            arguments.check_number(capacity, "capacity", low=0, high=math.inf)
        self.in_features, self.num_experts, self.k = in_features, num_experts, k
        self.scores, self.normalize, self.scale = scores, normalize, scale
        self.jitter, self.capacity = jitter, capacity
        self._groups = Groups.of(groups, top_groups, num_experts, k)
        if balancer is not None:
            self._check(balancer)
            balancer = balancer.to(device)  # None is where it is
        self.balancer = balancer
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=dtype))
        self._reset_weight()  # a balancer keeps the biases that it has

    def reset_parameters(self) -> None:
        """As in ``torch.nn.Linear``; all biases are 0."""
        self._reset_weight()
        if self.balancer is not None:
            self.balancer.reset_parameters()

    def _reset_weight(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, input: Tensor, mask: Tensor | None = None, *, k: Tensor | None = None) -> TopKRouting:
        input, mask, padding = tokens_of(self, input, mask)
        others = None if k is None else self._others(k, input)
        wide = torch.promote_types(input.dtype, torch.float32)
        with without_autocast(input.device):
            x = in_dtype(input, wide)
            if self.training and self.jitter:
                x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = F.linear(x, in_dtype(self.weight, wide))
        scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)
        indices = self._choose(scores if self.scores == "sigmoid" else logits, mask)
        weights = scores.gather(-1, indices)
        if others is not None:
            weights = weights.masked_fill(others, 0)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        if self.scale != 1:
            weights = weights * self.scale
        sizes, dropped = logits.logsumexp(-1).square(), logits.new_zeros(())
        # which choices are none; without padding and a capacity all are taken, and their number is known
        lost = None if padding is None else padding.unsqueeze(-1)
        if others is not None:
            lost = others if lost is None else others | lost
        tokens: int | Tensor = max(1, sizes.numel())
        if lost is None:  # autograd has kept these, and they may be some columns of more
            indices = indices.clone(memory_format=torch.contiguous_format)
        else:
            indices = indices.masked_fill(lost, self.num_experts)
        if mask is not None:
            tokens, sizes = mask.sum().to(wide).clamp(min=1), sizes * mask
        count = self._counts(indices, lost is not None)
        if self.capacity is not None:
            if not isinstance(tokens, Tensor):
                tokens = torch.full((), tokens, dtype=wide, device=x.device)
            each, wanted = (self.k, tokens) if others is None else (1, count.sum().to(wide).clamp(min=1))
            most = (self.capacity * each * wanted / self.num_experts).ceil()
            beyond = self._beyond(indices, most)
            if lost is None:
                lost, dropped = beyond, beyond.sum().to(wide) / max(1, indices.numel())
            else:
                lost, choices = beyond | lost, count.sum()
                # padding is lost, but not dropped
                dropped = (lost.sum() - (indices.numel() - choices)).to(wide) / choices.clamp(min=1)
            indices, count = indices.masked_fill_(lost, self.num_experts), count.minimum(most)
        if lost is not None:
            weights = weights.masked_fill(lost, 0)
        load = in_dtype(count, wide) / tokens
        weights = in_dtype(weights, input.dtype)
        return TopKRouting(weights, indices, logits, load, evenness(load), dropped, sizes.sum() / tokens)

    if TYPE_CHECKING:
        __call__ = forward

    def _others(self, k: Tensor, input: Tensor) -> Tensor:
        """Which of the places of each token, best first, are beyond its own k, (..., n, k)."""
        if self.balancer is not None:
            raise ValueError("k must be None with a balancer, whose biases are for the k of the layer")
        each = arguments.per_row(k, "k", input, low=0, high=self.k, integer=True)
        return torch.arange(self.k, device=input.device) >= each.expand(input.shape[:-1]).unsqueeze(-1)

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.balancer is not None:
            indices: Tensor = self.balancer(scores, mask)
            return indices
        scores = scores.detach()
        if not self._groups.all:
            scores = self._groups.offered(scores, self._groups.closed(self._groups.sums(scores)))
        return topk(scores, self.k).indices

    def _counts(self, indices: Tensor, some_lost: bool) -> Tensor:
        """How many tokens each expert gets, in int64; whether some indices may stand for none."""
        chosen = indices.flatten()
        zeros = chosen.new_zeros(self.num_experts + some_lost)
        counts = zeros.scatter_add(0, chosen, torch.ones_like(chosen))
        return counts[:-1] if some_lost else counts

    def _beyond(self, indices: Tensor, most: Tensor) -> Tensor:
        """Which choices are not among the first ``most`` of their expert."""
        experts = indices.flatten()
        ordered, order = experts.sort(stable=True)
        first = torch.searchsorted(ordered, ordered)  # where the choices of the same expert begin
        place = torch.arange(ordered.shape[0], device=ordered.device) - first
        return torch.empty_like(experts, dtype=torch.bool).scatter(0, order, place >= most).view_as(indices)

    def _check(self, balancer: object) -> None:
        if not isinstance(balancer, QuantileBalancer):
            raise TypeError(f"balancer must be a QuantileBalancer or None, but got {type(balancer).__name__}")
        if (balancer.num_experts, balancer.k, balancer._groups) != (self.num_experts, self.k, self._groups):
            raise ValueError(
                f"balancer must have the experts, k and groups of the router, {self._describe()}, but got "
                f"{balancer}"
            )

    def _describe(self) -> str:
        return describe(num_experts=self.num_experts, k=self.k, **self._groups.describe())

    def extra_repr(self) -> str:
        more = {"normalize": (self.normalize, True), "scale": (self.scale, 1), "jitter": (self.jitter, 0)}
        changed = {name: value for name, (value, usual) in more.items() if value != usual}
        if self.capacity is not None:
            changed["capacity"] = self.capacity
        rest = describe(scores=self.scores, **changed)
        return f"in_features={self.in_features}, {self._describe()}, {rest}"
