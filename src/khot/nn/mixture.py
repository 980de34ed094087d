"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from khot._core.arguments import has_data
from khot.nn._router import Router, Routing
from khot.nn.topk_router import TopKRouter, TopKRouting

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """The weighted sum of the experts' outputs for each token.

        y = Σ_e weights_e · expert_e(x)

    With a soft selection every expert computes every token. With a hard one, in eval mode, each expert
    computes only the tokens selected for it. The same holds in train mode if the ``cdf`` of the router has
    compact support. (Under ``torch.compile`` and ``torch.vmap`` and in exports, which need sizes that do not
    depend on values, every expert computes all tokens, with the same result.)

    To train with a hard selection, take a :class:`khot.nn.TopKRouter`, whose experts compute their own tokens
    in both modes.

    Args:
        router: a :class:`khot.nn.BalancedRouter` or a :class:`khot.nn.ExpertChoiceRouter`, which give all
            experts the same load, or a :class:`khot.nn.TopKRouter` or :class:`khot.nn.TokenChoiceRouter`,
            which do so with a ``balancer``.
        experts: one module per expert of the router, each from tokens (..., in_features) to (..., any size).

    Shape:
        input: tokens (..., n, in_features); mask: (..., n), bool, False where a token is padding, whose
        output is 0.

        Returns (output, routing): output (..., n, size) of the experts' dtype, and what the router gave, a
        :class:`khot.nn.Routing` or :class:`khot.nn.TopKRouting`, with the load of the experts.

    Raises:
        ValueError: another number of experts than the router has; an input of another width.

    Sources: as for the routers.

    Example:
        >>> router = khot.nn.TokenChoiceRouter(16, num_experts=4, k=2)
        >>> mixture = khot.nn.MixtureOfExperts(router, [torch.nn.Linear(16, 8) for _ in range(4)])
        >>> output, routing = mixture(torch.randn(3, 10, 16))
        >>> output.shape, routing.load.shape
        (torch.Size([3, 10, 8]), torch.Size([4]))
    """

    router: Router | TopKRouter
    experts: nn.ModuleList

    def __init__(self, router: Router | TopKRouter, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)
        if len(self.experts) != router.num_experts:
            raise ValueError(
                f"experts must be {router.num_experts}, as the router has, but got {len(self.experts)}"
            )

    def forward(self, input: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Routing | TopKRouting]:
        routing = self.router(input, mask)
        if mask is not None:
            input = input.masked_fill(~mask.unsqueeze(-1), 0)  # 0 · NaN is not 0
        if isinstance(routing, TopKRouting):
            known = has_data(routing.indices)
            return (self._to_chosen if known else self._to_all_that_may_be)(input, routing), routing
        soft = isinstance(self.router, Router) and self.router.training and self.router.cdf.full_support
        if soft or not has_data(routing.selection):
            return self._to_all(input, routing.weights), routing
        return self._to_selected(input, routing), routing

    def _to_all(self, x: Tensor, weights: Tensor) -> Tensor:
        outputs = [expert(x) for expert in self.experts]
        shares = [w.unsqueeze(-1) for w in weights.unbind(-1)]
        return torch.stack([w.to(y.dtype) * y for w, y in zip(shares, outputs, strict=True)]).sum(0)

    def _to_all_that_may_be(self, x: Tensor, routing: TopKRouting) -> Tensor:
        """Every expert for all tokens, with weights of 0 for those that are not chosen."""
        dense = x.new_zeros(*x.shape[:-1], len(self.experts) + 1)
        weights = dense.scatter_add(-1, routing.indices, routing.topk_weights)
        return self._to_all(x, weights[..., :-1])

    def _to_selected(self, x: Tensor, routing: Routing) -> Tensor:
        selection, weights = routing.selection.flatten(0, -2), routing.weights.flatten(0, -2)
        parts = [selected.nonzero().squeeze(-1) for selected in selection.unbind(-1)]
        shares = [w[i] for w, i in zip(weights.unbind(-1), parts, strict=True)]
        return self._sum(x, parts, shares)

    def _to_chosen(self, x: Tensor, routing: TopKRouting) -> Tensor:
        k = routing.indices.shape[-1]
        experts, order = routing.indices.flatten().sort(stable=True)
        sizes = experts.bincount(minlength=len(self.experts) + 1).tolist()
        parts = (order // k).split(sizes)[:-1]
        shares = routing.topk_weights.flatten()[order].split(sizes)[:-1]
        return self._sum(x, list(parts), list(shares))

    def _sum(self, x: Tensor, parts: list[Tensor], shares: list[Tensor]) -> Tensor:
        """The sum of what each expert makes of its part of the tokens, times its weights."""
        tokens = x.flatten(0, -2)
        output: Tensor | None = None
        for expert, i, w in zip(self.experts, parts, shares, strict=True):
            y: Tensor = expert(tokens[i])
            if output is None:
                output = y.new_zeros(tokens.shape[0], y.shape[-1])
            output.index_add_(0, i, w.unsqueeze(-1).to(y.dtype) * y)
        assert output is not None
        return output.unflatten(0, x.shape[:-1])
