"""A gate that learns which inputs a model needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from khot import estimators, topk
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.torch_internals import without_modes
from khot.estimators import EstimatorName
from khot.nn._inputs import check_width
from khot.nn._values import Value, current, describe, positive
from khot.sampling import DesignName

__all__ = ["KHotGate"]


class KHotGate(nn.Module):
    """A learned mask that is the same for every example: it selects the k of n features that a model needs.

    In train mode every example is multiplied by its own k-hot sample, drawn from the learned logits by
    :func:`khot.sample_khot`. The model behind the gate therefore sees hard choices from the start, and the
    logits get a gradient. In eval mode the features with the k largest logits are selected. With ``k=None``
    the size is learned, too: add ``khot.losses.size_penalty(gate.probs, weight)`` to the loss. Eval mode then
    selects the features with a probability above ½.

    Args:
        n: number of features.
        k: how many, in (0, n], a number or a module that gives one (:class:`khot.nn.Anneal`); or None.
        tau: temperature > 0, for the estimators that have one, as for :func:`khot.sample_khot`; a number, a
            module that gives one, or None.
        estimator, design: how the samples are drawn and get their gradient, as for :func:`khot.sample_khot`.
        device, dtype: of the logits.

    Attributes:
        logits: the parameter, (n,); it starts from zeros, all features being equally likely.
        probs: σ_k(logits), with ``k=None`` σ(logits): (n,), in [0, 1], differentiable. For the estimators
            ``straight_through`` and ``second_order`` the probability of each feature to be in a sample.
        mask: the selection of eval mode, (n,), zeros and ones.

    Shape:
        input: (..., n), of any floating-point dtype.

        output: the same, with 0 for the features that are not selected.

    Differentiable in the input, exactly for the given sample, and in train mode in the logits, as the
    estimator says.

    Raises:
        ValueError, TypeError: as :func:`khot.sample_khot`; also for an input that does not have n features.

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
    tau: Value | None
    estimator: EstimatorName
    design: DesignName | None
    logits: nn.Parameter

    def __init__(
        self,
        n: int,
        k: Value | None,
        *,
        tau: Value | None = None,
        estimator: EstimatorName = "straight_through",
        design: DesignName | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.check_integer(n, "n", low=1)
        self.n, self.k = n, None if k is None else positive(k, "k")
        self.tau = None if tau is None else positive(tau, "tau")
        self.estimator, self.design = estimator, design
        self._try()
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
        check_width(input, self.n, self)
        if not self.training:
            return input * self.mask.to(input.dtype)
        tau = None if self.tau is None else current(self.tau)
        return input * self._sample(self.logits.expand(input.shape), self._size(), tau).to(input.dtype)

    def _sample(
        self,
        logits: Tensor,
        k: Scalar | None,
        tau: Scalar | None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return estimators.sample_khot(
            logits, k, estimator=self.estimator, design=self.design, tau=tau, generator=generator
        )

    def _try(self) -> None:
        """Draw once and discard it, so that bad arguments raise at construction.

        The draw is on the CPU and real, also where the layer is made on the meta device or of fake tensors.
        """
        numbers = [None if value is None else current(value) for value in (self.k, self.tau)]
        # the value of a module that has no data is not known yet; 1 is a good one
        k, tau = (1 if isinstance(x, Tensor) and not arguments.readable(x) else x for x in numbers)
        with without_modes(), torch.device("cpu"):
            self._sample(torch.zeros(1, self.n), k, tau, torch.Generator())

    def _size(self) -> Scalar | None:
        return None if self.k is None else current(self.k)

    def extra_repr(self) -> str:
        given = {name: value for name in ("tau", "design") if (value := getattr(self, name)) is not None}
        return describe(n=self.n, k=self.k, estimator=self.estimator, **given)
