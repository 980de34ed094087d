"""A gate that learns which inputs a model needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from khot import estimators, masks, sampling
from khot._core import arguments, eager
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single, in_dtype, wide_dtype
from khot._core.torch_internals import without_modes
from khot._kernels.reference.order_sampling import LEAST
from khot.budgets import budget_mask, soft_budget
from khot.estimators import EstimatorName
from khot.nn._inputs import check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Value, current, describe, positive
from khot.nn.anneal import Anneal
from khot.sampling import DesignName

__all__ = ["KHotGate"]


class KHotGate(LeftSoft):
    """A learned mask that is the same for every example: it selects the k of n features that a model needs.

    In train mode every example is multiplied by its own k-hot sample, drawn from the learned logits by
    :func:`khot.sample_khot`. The model behind the gate therefore sees hard choices from the start, and the
    logits get a gradient. In eval mode the features with the k largest logits are selected. With ``k=None``
    the size is learned, too: add ``khot.losses.size_penalty(gate.probs, weight)`` to the loss. Eval mode then
    selects the features with a probability above ½.

    With a ``cost``, the features have prices, and k is a budget. In train mode every feature is then
    multiplied by its weight in :func:`khot.soft_budget`. The weights are soft, spend the budget exactly, and
    are the same for all examples. A logit rises where a feature lowers the loss by more, per unit of cost,
    than the others. In eval mode :func:`khot.budget_mask` selects the features with the largest logits that
    the budget pays for. Lower ``tau`` in the course of training, so that the weights become 0 or 1.

    Args:
        n: number of features.
        k: how many, in (0, n], a number or a module that gives one (:class:`khot.nn.Anneal`); or None. With a
            cost: what the selected features may cost together, at most the cost of all.
        cost: the price of each feature, ≥ 0: a tensor (n,) or a list; or None, if all count the same.
        tau: temperature > 0, for the estimators that have one (not for ``straight_through``, the default, and
            ``simple``), as for :func:`khot.sample_khot`; a number, a module that gives one, or None. With a
            cost it is that of :func:`khot.soft_budget`, 1 by default.
        estimator, design: how the samples are drawn and get their gradient, as for :func:`khot.sample_khot`.
            Not with a cost, which draws no samples.
        device, dtype: of the logits.

    Attributes:
        logits: the parameter, (n,); it starts from zeros, all features being equally likely.
        probs: σ_k(logits), with ``k=None`` σ(logits), with a cost the weights of train mode: (n,), in [0, 1],
            differentiable. For the estimators ``straight_through`` and ``second_order`` the probability of
            each feature to be in a sample.
        mask: the selection of eval mode, (n,), zeros and ones.
        cost: None, or a buffer that is not saved, (n,), in float64 (float32 on devices without it), which
            keeps this dtype when the model is cast.

    Shape:
        input: (..., n), of any floating-point dtype.

        output: the same, with 0 for the features that are not selected.

    Differentiable in the input, exactly for the given sample, and in train mode in the logits, as the
    estimator says.

    Raises:
        ValueError, TypeError: as :func:`khot.sample_khot` or :func:`khot.soft_budget`; also for an input that
            does not have n features, and for a cost with k=None, an estimator or a design.

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

        >>> gate = khot.nn.KHotGate(4, 3.0, cost=torch.tensor([1.0, 1.0, 2.0, 3.0]))
        >>> round((gate.probs * gate.cost).sum().item(), 5)
        3.0
    """

    n: int
    k: Value | None
    tau: Value | None
    estimator: EstimatorName
    design: DesignName | None
    logits: nn.Parameter
    cost: Tensor | None

    def __init__(
        self,
        n: int,
        k: Value | None,
        *,
        cost: Tensor | Sequence[float] | None = None,
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
        self._prices = None if cost is None else self._checked(cost)
        self._try()
        self.register_buffer("cost", None, persistent=False)
        self.logits = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All features equally likely."""
        nn.init.zeros_(self.logits)
        self._put_cost()

    @property
    def probs(self) -> Tensor:
        k = self._size()
        if self.cost is not None:
            return self._shares()
        return self.logits.sigmoid() if k is None else masks.sigmoid_topk(self.logits, k)

    @property
    def mask(self) -> Tensor:
        k, logits = self._size(), self.logits.detach()
        if self.cost is not None and k is not None:
            return budget_mask(logits, self.cost, k)
        return (logits > 0).to(logits.dtype) if k is None else masks.topk_mask(logits, k)

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self._prices is None and self.estimator == "straight_through":
            return self._gated(input)
        check_width(input, self.n, self)
        if not self.training:
            return input * in_dtype(self.mask, input.dtype)
        logits = self.logits
        self._note_step(logits)
        if self._prices is not None:
            sample = self._shares()
        else:
            tau = None if self.tau is None else current(self.tau)
            sample = self._sample(logits.expand(input.shape), self._size(), tau)
        return input * in_dtype(sample, input.dtype)

    if TYPE_CHECKING:
        __call__ = forward

    def _gated(self, input: Tensor) -> Tensor:
        """What :func:`khot.estimators.straight_through` gives of the logits for each example, with the
        probabilities computed once, since they are the same for all; times the input."""
        k = self._size()
        if eager.launching and not is_dynamo_compiling() and self.design in (None, "pareto"):
            logits = self._parameters.get("logits")  # several times as fast as the attribute, if it is there
            if logits is not None:
                plain = eager.gated(logits, k, input, LEAST)
                if plain is not None:
                    if logits.requires_grad and torch.is_grad_enabled():
                        self._note()
                    return plain
        logits = self.logits
        check_width(input, self.n, self)
        self._note_step(logits)
        x = at_least_single(logits)
        probs = x.sigmoid() if k is None else masks.sigmoid_topk(x, k)
        of_each = probs.detach().nan_to_num(nan=0.0).expand(input.shape).contiguous()
        sample = sampling.sample(of_each, self.design or "pareto")
        return input * in_dtype(sample + (probs - probs.detach()), input.dtype)

    def _note_step(self, logits: Tensor) -> None:
        if torch.is_grad_enabled() and logits.requires_grad and arguments.has_data(logits):
            self._note()

    def _outside(self) -> float:
        if not arguments.has_data(self.logits):
            return math.nan
        with torch.no_grad():
            probs = self.probs.double()
            rest = probs.masked_fill(self.mask > 0, 0)
            # at any tau, a budget may pay a part of one feature
            left = rest.sum() - (0 if self.cost is None else rest.max())
            return (left / probs.sum()).item()

    def _cure(self) -> str:
        if self.cost is not None:
            return super()._cure()
        return "train it longer, or with a larger learning rate of its logits"

    def _shares(self) -> Tensor:
        assert self.cost is not None and self.k is not None  # _checked
        tau = 1.0 if self.tau is None else current(self.tau)
        return soft_budget(self.logits, self.cost, current(self.k), tau=tau)

    def _checked(self, cost: Any) -> Tensor:
        """The prices in float64 on the CPU."""
        if self.k is None:
            raise ValueError("k must be a budget with a cost, but got None")
        for name, default in (("estimator", "straight_through"), ("design", None)):
            if getattr(self, name) != default:
                raise ValueError(f"{name} must not be given with a cost, but got {getattr(self, name)!r}")
        if not isinstance(cost, Tensor):
            if isinstance(cost, str) or not isinstance(cost, Sequence):
                raise TypeError(f"cost must be a tensor or a list of numbers, but got {type(cost).__name__}")
            for each in cost:
                arguments.check_number(each, "cost", low=0, high=sys.float_info.max)
        elif cost.is_meta or type(cost) not in (Tensor, nn.Parameter):
            raise ValueError("cost must have values: pass a list to make a gate without data")
        else:
            arguments.check_real(cost, "cost")
        with without_modes(), torch.device("cpu"):  # also where the layer is made without data
            prices = torch.as_tensor(cost, dtype=torch.float64).detach().cpu().clone()
            if prices.shape != (self.n,):
                raise ValueError(f"cost must have shape ({self.n},), but got {tuple(prices.shape)}")
            bad = ~((prices >= 0) & (prices < math.inf))
            if bool(bad.any()):
                raise ValueError(f"cost must be finite and >= 0, but got {prices[bad][0].item()}")
        return prices

    def _put_cost(self) -> None:
        """The prices, with or without data as the logits are, on their device."""
        if self._prices is not None:
            device = self.logits.device
            if device.type == "meta" or type(self.logits) is not nn.Parameter:
                self.cost = torch.empty(self.n, dtype=wide_dtype(device), device=device)
            else:
                self.cost = self._prices.to(device, wide_dtype(device))

    def _apply(self, fn: Any, recurse: bool = True) -> KHotGate:
        """Move the prices but do not cast them: a budget is not to change with the dtype of a model."""
        super()._apply(fn, recurse)
        self._put_cost()
        return self

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
        k, tau = (None if value is None else _known(value) for value in (self.k, self.tau))
        with without_modes(), torch.device("cpu"):
            if self._prices is not None:
                self._try_budget(k, tau)
                return
            if k is None and self.k is not None:
                k = 1  # in the range of all
            if tau is None and self.tau is not None:
                tau = 1.0
            self._sample(torch.zeros(1, self.n), k, tau, torch.Generator())

    def _try_budget(self, k: Scalar | None, tau: Scalar | None) -> None:
        assert self._prices is not None
        total = self._prices.sum().item()
        if k is not None and not 0 <= float(k) <= total:
            raise ValueError(f"k must lie in [0, {total}], the cost of all features, but got {float(k)}")
        soft_budget(torch.zeros(self.n).double(), self._prices, 0.0, tau=1.0 if tau is None else tau)

    def _size(self) -> Scalar | None:
        return None if self.k is None else current(self.k)

    def extra_repr(self) -> str:
        if self.cost is not None:
            return describe(n=self.n, k=self.k, cost=f"tensor {tuple(self.cost.shape)}", tau=self.tau)
        given = {name: value for name in ("tau", "design") if (value := getattr(self, name)) is not None}
        return describe(n=self.n, k=self.k, estimator=self.estimator, **given)


def _known(value: Value) -> Scalar | None:
    """What a layer that is being made can know of a value: the number of now, or the start of an Anneal that
    gets its steps later. None if that is nothing, for a module without data or one that needs such an Anneal.
    """
    if isinstance(value, Anneal) and value.steps is None:
        return value.start
    parts = value.modules() if isinstance(value, nn.Module) else ()
    if any(isinstance(part, Anneal) and part.steps is None for part in parts):
        return None
    number = current(value)
    return None if isinstance(number, Tensor) and not arguments.readable(number) else number
