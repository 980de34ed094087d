"""Thresholds that balance the load of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from khot._core import arguments, rows
from khot.nn._best import best_indices
from khot.nn._bias import Biased
from khot.nn._inputs import check_width
from khot.nn._two_sided import column_thresholds, even_shares
from khot.nn._values import describe

__all__ = ["QuantileBalancer"]

OCTAVES = 32  # from 2⁻²³ to 2⁹: a distance outside them counts in the first or the last bin
SMALLEST = 104 << 23  # the bits of 2⁻²³ as a float32
MANTISSA = 23  # bits
FEWEST_BINS, MOST_BINS = 2 * OCTAVES, 2 * OCTAVES << 10


class QuantileBalancer(Biased):
    """Chooses k experts for each token, with a bias per expert that gives all experts the same load.

    A token gets the k experts with the largest biased scores s + b. Let its cutoff be the (k+1)-th largest of
    them. An expert e gets the token if its distance, cutoff − (s_e + b_e), is negative. Once per step of the
    optimizer, :meth:`update` moves every bias by the k/E quantile of the distances of all tokens since the
    last update, so that the expert would have got its share k/E of these tokens, and subtracts the mean of
    the biases:

        b_e ← b_e + quantile(distances of e, k/E),    b ← b − mean(b)

    The distances are counted in bins that follow the bits of a floating-point number: sign, exponent, and the
    first bits of the mantissa. The bins are finest around the cutoff, so they need no bounds, whatever the
    scores are: logits, probabilities or log-probabilities. The counts are integers, so the biases are the
    same, bit for bit, for any number of processes, in any order, and for any number of micro-batches.

    Distances of more than 512 count as 512, and those of less than 2⁻²³ as 2⁻²³. So a bias that is further
    away takes several updates: one for every 512. If your scores are larger, such as logits times 10⁴, start
    with :meth:`solve`, or divide the scores by a power of two, which changes no choice.

    Only the choice depends on the biases. Compute the weights of the experts from the scores without them.

    It counts in train mode, and only while gradients are enabled, so evaluation leaves no trace. Activation
    checkpointing computes a layer twice and so doubles all its counts, which changes no quantile; call
    :meth:`update` after the backward pass, when everything has been recomputed with the same biases.

    Args:
        num_experts: E, at least 2.
        k: how many experts a token gets, from 1 to E − 1.
        bins: how many bins, a power of two from 64 to 65,536. Half of them are for negative distances, and
            each half has 32 octaves. The default has 16 bins per octave.
        ema: in [0, 1); the share of the old bias that an update keeps: a bias moves by 1 − ema times the
            quantile. 0 adapts fastest.

    Attributes:
        bias: (E,), a buffer in float32, which stays in float32 when the model is cast. It is saved.
        counts: (bins + 1, E), a buffer in int64 that is not saved: the tokens since the last update by their
            distance. The last row has the tokens that the expert is closed to, by a score of −inf.

    Shape:
        scores: (..., E), of any floating-point dtype. −inf closes an expert to a token. A token with a NaN is
        not counted.

        mask: (...), bool; False where a token is padding, which is not counted.

        Returns the indices (..., k) of the experts, int64, the one with the largest biased score first. Of
        equal ones the lowest indices are chosen.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    ``DistributedDataParallel`` overwrites all buffers with those of the first process before a forward pass,
    also before one in eval mode. The biases are equal anyway, but counts would be lost. So pass it
    ``broadcast_buffers=False``; or call the micro-batches of a step except the last in its ``no_sync()``, and
    do not evaluate between a forward pass and the update.

    Example:
        >>> balancer = khot.nn.QuantileBalancer(8, k=2)
        >>> scores = torch.randn(4096, 8) + torch.arange(8) / 2  # the last expert would be in most choices
        >>> for _ in range(5):
        ...     experts = balancer(scores)
        ...     balancer.update()
        >>> load = balancer.eval()(scores).flatten().bincount()
        >>> bool(load.max() < 1.05 * load.float().mean())
        True
    """

    num_experts: int
    k: int
    bins: int
    ema: float
    bias: Tensor
    counts: Tensor

    def __init__(self, num_experts: int, k: int, *, bins: int = 1024, ema: float = 0.0) -> None:
        super().__init__()
        arguments.check_integer(num_experts, "num_experts", low=2)
        arguments.check_integer(k, "k", low=1, high=num_experts - 1)
        arguments.check_integer(bins, "bins", low=FEWEST_BINS, high=MOST_BINS)
        if bins & (bins - 1):
            raise ValueError(f"bins must be a power of two, but got {bins}")
        arguments.check_number(ema, "ema", low=0, high=math.nextafter(1, 0))
        self.num_experts, self.k, self.bins, self.ema = num_experts, k, bins, ema
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32))
        self.register_buffer(
            "counts", torch.empty(bins + 1, num_experts, dtype=torch.int64), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all biases to 0, and forget what was counted."""
        self._reset_bias()

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        check_width(scores, self.num_experts, self, "scores")
        if mask is not None:
            mask = arguments.mask_rows(mask, scores[..., 0], -1).reshape(scores.shape[:-1])
        observes = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            biased = scores.to(torch.promote_types(scores.dtype, torch.float32)) + self.bias
            best = best_indices(biased, self.k + observes)
            if observes:
                self._observe(biased, best, mask)
        return best[..., : self.k]

    @torch.no_grad()
    def update(self, group: Any = None) -> None:
        """Move the biases by the quantiles of what was counted since the last update, and count from 0.

        Call it once per step of the optimizer. Without counts nothing changes.

        Args:
            group: the process group, or a tuple of them, whose processes have counted different tokens. Their
                counts are added by one all-reduce. None if there is one process only.
        """
        self.update_all([self], group)

    @staticmethod
    @torch.no_grad()
    def update_all(modules: nn.Module | Iterable[nn.Module], group: Any = None) -> None:
        """:meth:`update` for all balancers among the modules and their parts, by one all-reduce for all.

        Args:
            modules: a model, or several modules. All processes of the group must have the same balancers.
            group: as for :meth:`update`.
        """
        roots = [modules] if isinstance(modules, nn.Module) else list(modules)
        for each in roots:
            if not isinstance(each, nn.Module):
                raise TypeError(f"modules must be modules, but one of them is {type(each).__name__}")
        # a dict, because modules may share balancers, and because a set has no order
        found = dict.fromkeys(m for each in roots for m in each.modules() if isinstance(m, QuantileBalancer))
        shards = rows.named(group)
        totals = [balancer.counts for balancer in found]
        if isinstance(shards, rows.Shards) and found:
            block = torch.cat([counts.flatten().to(totals[0].device) for counts in totals])
            for grid_dim in shards.groups:
                dist.all_reduce(block, group=grid_dim)
            parts = block.split([counts.numel() for counts in totals])
            totals = [
                part.view_as(counts).to(counts.device) for part, counts in zip(parts, totals, strict=True)
            ]
        for balancer, total in zip(found, totals, strict=True):
            balancer._step(total)

    @torch.no_grad()
    def solve(self, scores: Tensor, mask: Tensor | None = None, group: Any = None) -> None:
        """Set the biases to those that balance these scores: a start that needs no updates.

        It solves the soft assignment of tokens to experts in which every token has the sum k and every expert
        the same load, at a temperature of 0.01 standard deviations of the scores, by Newton's method in
        float64. The result does not depend on the present biases. What was counted is forgotten.

        Args:
            scores, mask: as in a forward pass; a batch of at least some tokens per expert.
            group: as for :meth:`update`, for processes that each have a part of the tokens.
        """
        check_width(scores, self.num_experts, self, "scores")
        x = scores.double().reshape(-1, self.num_experts)
        known = ~x.isnan().any(-1)
        if mask is not None:
            known &= arguments.mask_rows(mask, scores[..., 0], -1).expand(scores.shape[:-1]).reshape(-1)
        self.bias.copy_(-column_thresholds(x[known], self.k, rows.named(group)))
        self.counts.zero_()

    def _observe(self, biased: Tensor, best: Tensor, mask: Tensor | None) -> None:
        """Count the tokens by their distances. ``best`` has the k + 1 best experts of each."""
        half = self.bins // 2
        cutoff = biased.gather(-1, best[..., self.k :])
        chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, best[..., : self.k], True)
        distance = (cutoff - biased).float().masked_fill(biased == cutoff, 0)  # ∞ − ∞ is NaN
        size = ((distance.abs().view(torch.int32) - SMALLEST) >> self._dropped()).clamp(0, half - 1)
        # by the choice and not by the sign: the negative bins are then the load even where scores are equal
        place = torch.where(chosen, half - 1 - size, half + size)
        place = place.masked_fill(biased == -math.inf, self.bins).long()
        counted = ~biased.isnan().any(-1)
        if mask is not None:
            counted = counted & mask
        ones = counted.long().unsqueeze(-1).expand_as(place)
        zeros = torch.zeros_like(self.counts)
        tokens = (-1, self.num_experts)
        seen = zeros.scatter_add(0, place.reshape(tokens), ones.reshape(tokens))
        self.counts.copy_(self.counts + seen)  # add_ would say nothing of vmap, which this cannot work in

    def _step(self, counts: Tensor) -> None:
        """An update with these counts."""
        below = counts[:-1].cumsum(0)
        available = below[-1]
        tokens = available + counts[-1]
        rank = even_shares((tokens.amax() * self.k).double(), available.double())
        i = (below < rank).sum(0, keepdim=True).clamp(max=self.bins - 1)
        inside = counts.gather(0, i)
        fraction = ((rank - below.gather(0, i) + inside) / inside.clamp(min=1)).clamp(0, 1)
        low, high = self._edge(i), self._edge(i + 1)
        step = torch.where(available > 0, (low + fraction * (high - low)).squeeze(0), 0)
        bias = self.bias.double() + (1 - self.ema) * step
        self.bias.copy_(torch.where(tokens > 0, (bias - bias.mean()).float(), self.bias))
        self.counts.zero_()

    def _edge(self, i: Tensor) -> Tensor:
        """The lower edge of bin i, in float64."""
        steps = i - self.bins // 2
        size = ((steps.abs() << self._dropped()) + SMALLEST).to(torch.int32).view(torch.float32).double()
        return size * steps.sign()

    def _dropped(self) -> int:
        """How many bits at the end of a mantissa make no difference to the bin."""
        return MANTISSA - (self.bins // FEWEST_BINS).bit_length() + 1

    def _reset_bias(self) -> None:
        super()._reset_bias()
        self.counts.zero_()  # they were counted with other biases

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.counts.zero_()  # they were counted with other biases

    def extra_repr(self) -> str:
        return describe(num_experts=self.num_experts, k=self.k, bins=self.bins, ema=self.ema)
