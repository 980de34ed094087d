"""A gate that learns which inputs a model needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from khot import estimators, topk
from khot.nn.values import Value, current, describe, positive

__all__ = ["KHotGate"]


class KHotGate(nn.Module):
    """A learned mask, the same for every example: which k of n features does a model need?

    In train mode every example is multiplied by a k-hot sample of its own, drawn from the learned logits by
    :func:`khot.sample_khot`: the model behind the gate sees hard choices from the start, and the logits get a
    gradient. In eval mode the k largest logits choose. With ``k=None`` the size is learned, too: put a price
    on it, ``khot.losses.size_penalty(gate.probs, weight)``; eval mode then chooses what has a probability
    above ½.

    Args:
        n: number of features.
        k: how many, in (0, n], a number or a module that gives one (:class:`khot.nn.Anneal`); or None.
        estimator, design: how the samples are drawn and get their gradient, as for :func:`khot.sample_khot`.
        device, dtype: of the logits.

    Attributes:
        logits: the parameter, (n,); it starts from zeros, all features being equally likely.
        probs: σ_k(logits), with ``k=None`` σ(logits): (n,), in [0, 1], differentiable. For the estimators
            ``straight_through`` and ``second_order`` the probability of each feature to be in a sample.
        mask: the choice of eval mode, (n,), zeros and ones.

    Shape:
        input: (..., n), of any floating-point dtype.

        output: the same, the features that are not chosen 0.

    Differentiable in the input, exactly for the sample drawn, and in the logits as the estimator says, in
    train mode only.

    Raises:
        ValueError, TypeError: as :func:`khot.sample_khot`; also for an input without n features.

    Source: Wijk, Vinuesa, Azizpour 2025, sections 2.3 and 4.

    Example:
        >>> gate = khot.nn.KHotGate(8, k=3, design="pivotal")
        >>> gate(torch.ones(4, 8)).sum(-1)
        tensor([3., 3., 3., 3.], grad_fn=<SumBackward1>)
        >>> optimizer = torch.optim.Adam(gate.parameters(), lr=0.2)
        >>> worth = torch.arange(8.0)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     (-gate(worth.expand(64, 8)).sum()).backward()
        ...     optimizer.step()
        >>> gate.eval().mask
        tensor([0., 0., 0., 0., 0., 1., 1., 1.])
    """

    n: int
    k: Value | None
    estimator: str
    design: str | None
    logits: nn.Parameter

    def __init__(
        self,
        n: int,
        k: Value | None,
        estimator: str = "straight_through",
        design: str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if n < 1:
            raise ValueError(f"n must be at least 1, but got {n}")
        self.n, self.k = n, None if k is None else positive(k, "k")
        self.estimator, self.design = estimator, design
        # a draw that nobody sees: what is wrong with the arguments is found here, and in the operator's words
        self._sample(torch.zeros(1, n), torch.Generator())
        self.logits = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All features equally likely."""
        nn.init.zeros_(self.logits)

    @property
    def probs(self) -> Tensor:
        k = self._size()
        return self.logits.sigmoid() if k is None else topk.sigmoid_topk(self.logits, k)

    @property
    def mask(self) -> Tensor:
        k = self._size()
        logits = self.logits.detach()
        return (logits > 0).to(logits.dtype) if k is None else topk.topk_mask(logits, k)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != (self.n,):
            raise ValueError(f"input must be (..., {self.n}), but got {tuple(input.shape)}")
        mask = self._sample(self.logits.expand(input.shape)) if self.training else self.mask
        return input * mask.to(input.dtype)

    def _sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return estimators.sample_khot(
            logits, self._size(), estimator=self.estimator, design=self.design, generator=generator
        )

    def _size(self) -> float | Tensor | None:
        return None if self.k is None else current(self.k)

    def extra_repr(self) -> str:
        values = describe(n=self.n, k=self.k, estimator=self.estimator)
        return values + (f", design={self.design!r}" if self.design is not None else "")
