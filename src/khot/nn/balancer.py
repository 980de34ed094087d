"""Thresholds that balance the load of experts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from khot._core import arguments, rows
from khot._core.torch_internals import copy_each, is_exporting, zero_each
from khot._core.ways import by_rows
from khot._kernels.reference.count_distances import MANTISSA, OCTAVES, SCALE, window
from khot._ops.count_distances import count_distances
from khot.nn._bias import Biased
from khot.nn._groups import Groups
from khot.nn._inputs import check_width
from khot.nn._values import SEVERAL, describe
from khot.selection import topk

__all__ = ["QuantileBalancer"]

ABOVE = 16  # octaves above the last quantile of an expert: the next one may be larger
LOWEST, HIGHEST = OCTAVES, 255  # exponents at which the octaves of float32 numbers end
LARGEST = 0x69800000  # the bits of 2⁶⁴ times SCALE, by which a bias moves at most
ROUNDING = 2.0**-24  # the share of a float32 that is lost to it
BELOW = 2.0**12  # distances of its tokens that the largest bias may lie below 0: half of the digits are left
FEWEST_BINS, MOST_BINS = OCTAVES, OCTAVES << 10
ROUNDS, SOLVED = 100, 0.01  # of a cold start: updates at most, and the error of a load at which it ends
PATIENT, FASTEST = 20, 2.0**10  # the updates before it doubles steps of the same sign, and how far it does

_Self = TypeVar("_Self", bound="QuantileBalancer")


class QuantileBalancer(Biased):
    """Chooses k experts for each token, with a bias per expert that gives all experts the same load.

    A token gets the k experts with the largest biased scores s + b. The distance of an expert from a token
    says how much its bias has to rise for it to get the token, or, where this is negative, to fall for it to
    lose the token: cutoff − (s_e + b_e), with the (k+1)-th largest biased score as the cutoff of the experts
    that have the token, and the k-th as that of the others. Once per step of the optimizer, :meth:`update`
    moves every bias by a quantile of the distances of all tokens since the last update, so that the expert
    would have got its share k/E of these tokens, and subtracts the largest of the biases:

        b_e ← b_e + quantile(distances of e, k/E),    b ← b − max(b)

    (It may leave max(b) below 0 where the least of the biases cannot feel so small a number in float32.)
    Where all numbers between two distances are quantiles, the bias moves to the nearest. All experts move at
    once. So every second update measures the distances of a token from the middle of its two cutoffs:
    otherwise two experts that exchange tokens would exchange them again and again.

    The distances are counted in bins that follow the bits of a floating-point number: sign, exponent, and the
    first bits of the mantissa. The bins are finest around the cutoff. The first update covers all distances
    that float32 has, at a quarter of the resolution. For each of the next, every expert has 64 octaves of its
    own, up to 2¹⁶ times its last quantile, and an expert whose quantile lies outside of them begins again. So
    the scores may be of any kind and scale: logits, probabilities or log-probabilities. Prefer logits or
    log-probabilities to sharp probabilities, the softmax of logits with a deviation above 10: float32 rounds
    many of these to 1 or to 0, and biases cannot tell them apart. The counts are integers,
    so the biases are the same, bit for bit, for any number of processes, in any order, and for any number of
    micro-batches.

    A balancer that counted in several forward passes but was never updated warns once when it is switched to
    eval mode (with the model that it is a part of): its biases are still those it started with.

    Only the choice depends on the biases. Compute the weights of the experts from the scores without them.

    With ``groups``, a token chooses among the experts of its ``top_groups`` best groups. An expert of another
    group gets the token when both it and its group are good enough, and an expert that has the token loses it
    when one of them is not any more: its distance is the larger one of its own and half of what the sum of
    its group's two scores is from the cutoff of the groups.

    It counts in train mode, and only while gradients are enabled, so evaluation leaves no trace. Activation
    checkpointing computes a layer twice and so doubles all its counts, which changes no quantile; call
    :meth:`update` after the backward pass, when everything has been recomputed with the same biases.

    Args:
        num_experts: E, at least 2.
        k: how many experts a token gets, from 1 to E − 1.
        bins: how many bins, a power of two from 64 to 65,536. Half of them are for negative distances, and
            each half has 64 octaves. The default has 8 bins per octave, and 2 in the first update.
        ema: in [0, 1); the share of the old bias that an update keeps: a bias moves by 1 − ema times the
            quantile. 0 adapts fastest.
        groups: how many groups the experts form, each of E / groups neighbours.
        top_groups: how many groups a token may use, from 1 to ``groups``: those with the largest sums of
            their two best biased scores, of equal ones the first. None allows all. A score of −inf among the
            two closes the group; a token that may not use k experts then gets some of lowest index.

    Attributes:
        bias: (E,), a buffer in float32, ≤ 0, which stays in float32 when the model is cast. It is saved.
        updates: how many updates there were, a 0-dim buffer in int64. It is saved.
        octave: (E,), where the bins of each expert end, a buffer in int64: their last octave ends at 2 to the
            power of it less 147. 0 stands for the octaves of the first update. It is saved.
        counts: (bins + 1, E), a buffer in int64 that is not saved: the tokens since the last update by their
            distance. The last row has the tokens that the expert is closed to, by a score of −inf.
        load: (E,), a buffer in int64 that is not saved: how many tokens every expert got, of those that the
            last update counted, in all processes; activation checkpointing doubles it.

    Shape:
        scores: (..., E), of any floating-point dtype. −inf closes an expert to a token. A token with a NaN is
        not counted.

        mask: (...), bool; False where a token is padding, which is not counted.

        A DTensor has whole rows, sharded along other dims or replicated. Its indices are a DTensor, too.

        Returns the indices (..., k) of the experts, int64, the one with the largest biased score first. Of
        equal ones the lowest indices are chosen.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    ``DistributedDataParallel`` overwrites all buffers with those of the first process before a forward pass,
    also before one in eval mode. The biases are equal anyway, but counts would be lost. So pass it
    ``forward_sync_buffers=False`` (``broadcast_buffers=False`` before torch 2.13); or call the micro-batches
    of a step except the last in its ``no_sync()``, and do not evaluate between a forward pass and the update.

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
    updates: Tensor
    octave: Tensor
    counts: Tensor
    load: Tensor

    def __init__(
        self,
        num_experts: int,
        k: int,
        *,
        bins: int = 1024,
        ema: float = 0.0,
        groups: int = 1,
        top_groups: int | None = None,
    ) -> None:
        super().__init__()
        arguments.check_integer(num_experts, "num_experts", low=2)
        arguments.check_integer(k, "k", low=1, high=num_experts - 1)
        arguments.check_integer(bins, "bins", low=FEWEST_BINS, high=MOST_BINS)
        if bins & (bins - 1):
            raise ValueError(f"bins must be a power of two, but got {bins}")
        arguments.check_number(ema, "ema", low=0, high=math.nextafter(1, 0))
        self.num_experts, self.k, self.bins, self.ema = num_experts, k, bins, ema
        self._groups = Groups.of(groups, top_groups, num_experts, k)
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32))
        self.register_buffer("updates", torch.empty((), dtype=torch.int64))
        self.register_buffer("octave", torch.empty(num_experts, dtype=torch.int64))
        self.register_buffer(
            "counts", torch.empty(bins + 1, num_experts, dtype=torch.int64), persistent=False
        )
        self.register_buffer("load", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self._passes, self._warned = 0, False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all biases to 0, and forget what was counted."""
        self._reset_bias()

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        check_width(scores, self.num_experts, self, "scores")
        if arguments.is_dtensor(scores):
            return by_rows(1)(self._of_rows)(scores, mask)
        mask = self._mask(mask, scores)
        observes = self.training and torch.is_grad_enabled()
        if observes:
            if not torch.compiler.is_compiling():
                self._passes += 1
            elif not is_exporting():
                self._passes = SEVERAL  # counting would compile a new graph for each number
        with torch.no_grad():
            best = self._choose(scores, mask, observes)
        return best[..., : self.k]

    if TYPE_CHECKING:
        __call__ = forward

    def _of_rows(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """The forward pass of this process's part of a DTensor, with a mask that has one value per row."""
        return self.forward(scores, valid)

    def train(self: _Self, mode: bool = True) -> _Self:
        """As in ``torch.nn.Module``; warns about forgotten updates when training ends."""
        ends = self.training and not mode and self._passes >= SEVERAL
        if ends and not self._warned and arguments.has_data(self.updates) and int(self.updates) == 0:
            self._warned = True
            warnings.warn(
                f"{self} counted tokens in training but was never updated, so that its biases do not balance "
                "the load; call khot.nn.QuantileBalancer.update_all(model) once per step of the optimizer",
                UserWarning,
                stacklevel=2,
            )
        return super().train(mode)

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

        Balancers with the same arguments are updated together, which takes a GPU hardly longer than one.

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
        alike: dict[Any, list[tuple[QuantileBalancer, Tensor]]] = {}
        for each, total in zip(found, _totals(list(found), group), strict=True):
            kind = each.bins, each.num_experts, each.k, each.ema, total.device
            alike.setdefault(kind, []).append((each, total))
        for pairs in alike.values():
            balancers, totals = zip(*pairs, strict=True)
            _step(balancers, torch.stack(totals), 1 - balancers[0].ema)

    @torch.no_grad()
    def solve(self, scores: Tensor, mask: Tensor | None = None, group: Any = None) -> None:
        """Set the biases to those that balance these scores: a start that needs no updates.

        These are the best of at most 100 updates with the same scores. They end with a load that is at most
        1 %, or one token, above the share. The result does not depend on the present biases. What was counted
        is forgotten.

        Args:
            scores, mask: as in a forward pass; a batch of at least some tokens per expert.
            group: as for :meth:`update`, for processes that each have a part of the tokens.
        """
        check_width(scores, self.num_experts, self, "scores")
        arguments.check_input(scores, "scores")
        mask = self._mask(mask, scores)
        self._reset_bias()
        best, least = self.bias.clone(), math.inf
        pace, side = torch.ones_like(best, dtype=torch.float64), torch.zeros_like(best)
        for done in range(ROUNDS):
            self.counts.zero_()
            self._choose(scores, mask, True)
            (total,) = _totals([self], group)
            shares = _shares(total[:-1].sum(0), total[-1], self.k)
            load = total[: self.bins // 2].sum(0)
            over, share = torch.stack([(load - shares).amax(), shares.amax()]).tolist()
            if over < least:
                best, least = self.bias.clone(), over
            if least <= max(1, SOLVED * share):
                break
            last, side = side, (shares - load).sign()
            # without this, experts that outbid each other by little would go on for hundreds of updates
            pace = torch.where((side == last) & (done >= PATIENT), 2 * pace, 1.0).clamp(max=FASTEST)
            _step([self], total[None], pace)
        self.bias.copy_(best)
        self.updates.zero_()
        self.counts.zero_()

    def _mask(self, mask: Tensor | None, scores: Tensor) -> Tensor | None:
        if mask is None:
            return None
        return arguments.mask_rows(mask, scores[..., 0], -1).reshape(scores.shape[:-1])

    def _choose(self, scores: Tensor, mask: Tensor | None, observes: bool) -> Tensor:
        """The k best experts of each token; if this is to be counted, also the next one."""
        biased = (scores + self.bias).detach()  # in float32 or wider
        offered = biased
        groups: tuple[Tensor | None, ...] = (None, None, None)
        if not self._groups.all:
            sums = self._groups.sums(biased)
            closed = self._groups.closed(sums)
            offered = self._groups.offered(biased, closed)
            if observes:
                groups = sums, topk(sums, self._groups.top + 1).values, closed
        values, best = topk(offered, self.k + observes)
        if observes:
            count_distances(self.counts, biased, values, best, self.updates, self.octave, mask, *groups)
        return best

    def _reset_bias(self) -> None:
        super()._reset_bias()
        self.updates.zero_()
        self.octave.zero_()
        self.load.zero_()
        self.counts.zero_()  # they were counted with other biases

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("updates", "octave"):  # older states do not have them
            own = self.get_buffer(name)
            saved = state_dict.get(prefix + name, torch.zeros_like(own))
            if not saved.dim():  # older states have one octave for all experts
                saved = saved.expand(own.shape).clone()
            state_dict[prefix + name] = saved.to(torch.int64)  # which a cast of all the state has changed
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.counts.zero_()  # they were counted with other biases

    def extra_repr(self) -> str:
        groups = self._groups.describe()
        return describe(num_experts=self.num_experts, k=self.k, bins=self.bins, ema=self.ema, **groups)


def _totals(balancers: list[QuantileBalancer], group: Any) -> list[Tensor]:
    """The counts of each, over all processes of the group."""
    shards = rows.named(group)
    totals = [balancer.counts for balancer in balancers]
    if not isinstance(shards, rows.Shards) or not totals:
        return totals
    block = torch.cat([counts.flatten().to(totals[0].device) for counts in totals])
    for grid_dim in shards.groups:
        dist.all_reduce(block, group=grid_dim)
    parts = block.split([counts.numel() for counts in totals])
    return [part.view_as(counts).to(counts.device) for part, counts in zip(parts, totals, strict=True)]


def _step(balancers: Sequence[QuantileBalancer], counts: Tensor, part: float | Tensor) -> None:
    """An update of L balancers of one kind with these counts, (L, bins + 1, E), by this part of the
    quantiles."""
    bins = balancers[0].bins
    half = bins // 2
    before, octave, updates, load = (
        torch.stack([each.get_buffer(name) for each in balancers])
        for name in ("bias", "octave", "updates", "load")
    )
    below = counts[:, :-1].cumsum(1)
    available = below[:, -1]
    shares = _shares(available, counts[:, -1], balancers[0].k).unsqueeze(1)
    i = (below < shares).sum(1, keepdim=True).clamp(max=bins - 1)
    after = (below <= shares).sum(1, keepdim=True)  # the next bin that has any tokens, if i is filled exactly
    inside, reached = counts.gather(1, i), below.gather(1, i)
    fraction = ((shares - reached + inside) / inside.clamp(min=1)).clamp(0, 1)
    lowest, dropped = window(octave, bins)
    steps = torch.cat((i, i + 1, after), 1) - half
    bits = ((steps.abs() << dropped.unsqueeze(1)) + lowest.unsqueeze(1)).clamp(max=LARGEST).int()
    low, high, far = (bits.view(torch.float32).double() * steps.sign() / SCALE).split(1, 1)  # the lower edges
    inner = low + fraction * (high - low)
    # float32 is finest around 0: a bias that the bin leaves on either side of it starts from there
    wide = before.double()
    to_zero = -wide.unsqueeze(1)
    inner = torch.where((low < to_zero) & (to_zero < high), to_zero, inner)
    # all between the tokens of bin i and those of the next bin are quantiles
    nearest = torch.maximum(torch.minimum(far, high.clamp(min=0)), high)
    closed, counted = available == 0, available.any(-1)
    quantile = torch.where(reached == shares, nearest, inner).squeeze(1).masked_fill(closed, 0)
    bias = wide + part * quantile
    scale = torch.minimum(low.abs(), high.abs()).squeeze(1)
    bias = (bias - _excess(bias, scale, closed)).float()
    size = torch.maximum(steps[:, 0], ~steps[:, 0])  # of either sign
    end = (((size << dropped) + lowest) >> MANTISSA) + (1 + ABOVE)
    outside = (size == half - 1) | ((size == 0) & (octave > LOWEST))
    new = {
        "octave": torch.where(closed, octave, end.clamp(LOWEST, HIGHEST).masked_fill(outside, 0)),
        "updates": updates + counted,
        "load": torch.where(counted.unsqueeze(-1), below[:, half - 1], load),
    }
    copy_each([each.bias for each in balancers], torch.where(closed, before, bias).unbind())
    copy_each(
        [each.get_buffer(name) for name in new for each in balancers],
        [value for values in new.values() for value in values.unbind()],
    )
    zero_each([each.counts for each in balancers])


def _excess(bias: Tensor, scale: Tensor, closed: Tensor) -> Tensor:
    """What to subtract from all biases (L, E): the largest of them, because experts that fill up with tokens
    of tiny scores are exact around 0.

    A score of 1 and a bias of −1 are 0 together, and float32 has no bias between −1 and −1 + 2⁻²⁴. So whether
    this expert gets a token depends on how far the tiny scores and biases of the others lie from 0 and not
    from each other, and the largest bias may stay a little below 0 where the least does not feel it.
    """
    most, top = bias.masked_fill(closed, -math.inf).max(-1, keepdim=True)
    unfelt = (most <= 0) & (most > ROUNDING * bias.amin(-1, keepdim=True))
    return torch.where(unfelt, (most + BELOW * scale.gather(-1, top)).clamp(max=0), most)


def _shares(available: Tensor, shut: Tensor, k: int) -> Tensor:
    """How many tokens every expert should get, (..., E), in float64, of those it is open and closed to."""
    return even_shares((available + shut).amax(-1, keepdim=True) * k, available.double())


def even_shares(total: Tensor, most: Tensor) -> Tensor:
    """The same for all, min(s, most_j), with the sum ``total``; or ``most`` where that is not enough."""
    ordered = most.sort(-1).values
    others = torch.arange(most.shape[-1], 0, -1, device=most.device)  # that get more than all before them
    s = (total - ordered.cumsum(-1) + ordered) / others
    # s rises up to the first that it does not fill, and does not rise from there on
    return most.minimum(s.amax(-1, keepdim=True))
