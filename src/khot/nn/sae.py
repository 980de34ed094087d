"""A sparse autoencoder with k latents per input."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import wide_dtype, widen, without_autocast
from khot._core.rows import Shards
from khot._ops.product import product
from khot._ops.selected import Where, best_of_product, selected_dot, selected_sum
from khot.cdfs import CDF, CDFName
from khot.nn._inputs import check_dtype, check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._state import Grouped, Steady, counts
from khot.nn._values import Value, current, describe, positive
from khot.selection import topk

__all__ = ["TopKSAE"]

WIDER, SHARE = 1.5, 0.5  # of k, and of the error with so many latents in the loss
PULL = 0.01  # on idle latents: tried on activations of other networks than docs/results/sparse-autoencoder
REVIVE = 50.0  # uses that a latent of average use would have had; tried as PULL was
UNKNOWN = -1.0  # no threshold is negative
MOVE = 0.02  # how far a training step moves the threshold: it is a mean over some 50 steps


class _Instead:
    """What a forward pass computes instead of the reconstruction, for the methods that are forward passes."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        self.work = work


class _Nearest:
    """The input of a batch for which each idle latent comes nearest to its selection.

    The pre-activations may come in parts. Where it can be read which latents are idle, only these are
    looked at.

    Attributes:
        idle: (n,), which latents are idle.
        columns: the indices of the latents that are looked at; None: all.
        looks: whether there is a latent to look at.
        distance, input, level: one entry for each of these: how far the latent is from its selection, the
            index of the input, and the smallest activation that is selected there; None before the first
            input.
    """

    distance: Tensor | None = None
    input: Tensor | None = None
    level: Tensor | None = None

    def __init__(self, idle: Tensor, whole: bool) -> None:
        self.idle = idle
        self.columns = idle.nonzero().squeeze(-1) if not whole and arguments.readable(idle) else None
        self.looks = self.columns is None or bool(self.columns.numel())

    def see(self, start: int, a: Tensor, level: Tensor) -> None:
        """Look at pre-activations, (..., n), of the inputs from ``start`` on, and at the smallest activation
        that is selected for each, (..., 1)."""
        if not self.looks or not a.numel():
            return
        level = level.expand(*a.shape[:-1], 1).reshape(-1, 1)
        a = a.reshape(-1, a.shape[-1])
        distance, at = (level - (a if self.columns is None else a[:, self.columns])).min(0)
        level, at = level.squeeze(-1)[at], at + start
        if self.distance is not None and self.input is not None and self.level is not None:
            nearer = distance < self.distance
            distance = torch.where(nearer, distance, self.distance)
            at, level = torch.where(nearer, at, self.input), torch.where(nearer, level, self.level)
        self.distance, self.input, self.level = distance, at, level


class TopKSAE(Grouped, LeftSoft):
    """A sparse autoencoder: it writes every input as a sum of at most k of n learned directions.

    With pre-activations a = W(x − b) + c and a selection y of k of them,

        code = y · max(a, 0),    reconstruction = Σ_i code_i D_i + b

    y is the hard top k, in train mode, too: what is trained is what is used. Its k values and their indices
    are the whole code, and decoding reads k rows of D instead of all. Train on :meth:`loss`, which is better
    than the mean squared error alone, in that the error of this code is lower in the end.

    With a ``tau``, y is ``khot.soft_topk(a, k, tau=tau)`` in train mode, so that latents just outside the top
    k get a gradient, too. Fewer latents then stay unused, but the error is larger. The soft selection is far
    from the hard one of eval mode unless ``tau`` is small beside the differences of the pre-activations: let
    an :class:`khot.nn.Anneal` lower it, or select ``hard``.

    Args:
        in_features: size of the inputs.
        latents: n, the number of directions.
        k: how many latents per input, in (0, n]; a number or a module that gives one
            (:class:`khot.nn.Anneal`).
        tau: None, or the temperature of the selection in train mode, > 0, in the units of the
            pre-activations; as ``k``.
        cdf: as for :func:`khot.soft_topk`, with a tau.
        hard: with a tau, select hard in train mode, too, with the gradient of the soft selection.
        batch: in train mode, select k·B latents for a batch of B inputs together, instead of k for each
            input, so that some inputs get more than others. In eval mode an input gets the latents with
            a ≥ ``threshold``, which are k on average, and its code does not depend on the other inputs.
        revive: a latent counts as idle when ``revive``·n/k training inputs in a row did not use it, so many
            that a latent of average use had been used ``revive`` times. Idle latents are pulled back in
            :meth:`loss`. A small number leaves fewer latents unused, and costs error where the inputs need
            few: on activations of a network for digits, whose 256 latents had errors of 1.7 to 1.8 % from
            300 down to 50, and 1.9 % at 30, with 48, 17 and 10 % unused. None: they are left alone, which
            has the smallest error where unused latents do no harm (docs/results/sparse-autoencoder).
        group: None, or the process group (a tuple of them for a grid) whose processes train one autoencoder,
            each with a part of the batch (docs/distributed). In train mode ``idle``, ``threshold``, the
            selection with ``batch`` and the pull on idle latents are then those of the whole batch, and all
            processes have to make the same calls. None: those of this process.
        widths: None, or numbers of latents below n, in ascending order. In :meth:`loss` the code then has to
            reconstruct the input with its first w latents alone, too, for each of these widths w, so that the
            first latents learn what is most common. ``code[..., :w] @ decoder[:w] + bias`` is what they say.
        device, dtype: of the parameters.

    Attributes:
        encoder, decoder: W and D, both (n, in_features); they start from the same random rows of length 1.
        encoder_bias, bias: c, (n,), and b, (in_features,); 0 at the start.
        idle: (n,), a buffer: how many inputs ago, in train mode, a latent was last used. An input uses a
            latent if a > 0 and y > ½.
        threshold: with ``batch``, (1,), a buffer, else None: the smallest activation that was selected, as a
            moving mean over the training steps. Its dtype is that of the parameters, but float32 for half
            precision. It is −1 before the first step; until then eval mode selects as train mode does. Every
            process of a data-parallel training has its own, unless buffers are broadcast.

    Shape:
        input: (..., in_features), of the parameters' dtype, or of one that torch promotes to it, as half
            precision to float32.

        loss: whether to return :meth:`loss` of the input instead.

        output: the reconstruction, of the input's shape, or with ``loss`` the loss, 0-dim.

    All other methods that compute with the parameters are forward passes, too: hooks of the module see them,
    and so does ``fully_shard``. ``DistributedDataParallel`` does not: train on ``model(x, loss=True)``.
    Where k latents are selected for each input (without ``batch`` and, in train mode, ``tau``), the n
    pre-activations of an input are not kept, and gradients are sums over the selected latents.
    Activation checkpointing changes neither the gradient nor the counts, unless ``torch.compile`` has
    compiled what it computes twice.

    Raises:
        ValueError, TypeError: an argument out of range.

    Sources: Gao et al. 2024 (top-k sparse autoencoders, an error with several k); Bussmann, Leask, Nanda 2024
    (``batch``); Bussmann, Nabeshima, Karvonen, Nanda 2025 (``widths``: Matryoshka autoencoders).

    Example:
        >>> sae = khot.nn.TopKSAE(16, 64, k=4)
        >>> x = torch.randn(8, 16)
        >>> loss = sae.loss(x)
        >>> values, indices = sae.eval().top(x)
        >>> values.shape
        torch.Size([8, 4])
        >>> torch.allclose(sae.decode(values, indices), sae(x))
        True
    """

    in_features: int
    latents: int
    hard: bool
    batch: bool
    revive: float | None
    widths: tuple[int, ...]
    k: Value
    tau: Value | None
    cdf: CDF
    encoder: nn.Parameter
    encoder_bias: nn.Parameter
    decoder: nn.Parameter
    bias: nn.Parameter

    idle: Tensor
    threshold: Tensor | None

    def __init__(
        self,
        in_features: int,
        latents: int,
        k: Value,
        *,
        tau: Value | None = None,
        cdf: CDFName | CDF = "logistic",
        hard: bool = False,
        batch: bool = False,
        revive: float | None = REVIVE,
        widths: Sequence[int] | None = None,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("latents", latents)):
            arguments.check_integer(size, name, low=1)
        arguments.check_flags(hard=hard, batch=batch)
        positive(k, "k")
        if not isinstance(k, nn.Module) and k > latents:
            raise ValueError(f"k must be at most the number of latents, {latents}, but got {k}")
        self.in_features, self.latents = in_features, latents
        if revive is not None:
            arguments.check_number(revive, "revive", low=0, high=math.inf)
            positive(revive, "revive")
        self.hard, self.batch, self.revive = hard, batch, revive
        self.widths = _check_widths(() if widths is None else widths, latents)
        self.k, self.tau = positive(k, "k"), None if tau is None else positive(tau, "tau")
        self.cdf = cdfs.resolve(cdf)
        self.group, self._pulled = group, Steady()
        self.encoder = nn.Parameter(torch.empty(latents, in_features, device=device, dtype=dtype))
        self.encoder_bias = nn.Parameter(torch.empty(latents, device=device, dtype=dtype))
        self.decoder = nn.Parameter(torch.empty(latents, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("idle", torch.empty(latents, dtype=torch.int64, device=device))
        # one element and not 0-dim: torch.compile does not write to a 0-dim float64 tensor on the CPU
        threshold = torch.empty(1, device=device, dtype=_single(self.encoder.dtype)) if batch else None
        self.register_buffer("threshold", threshold)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random directions of length 1, the same in encoder and decoder, and biases of 0."""
        nn.init.normal_(self.decoder)
        with torch.no_grad():
            self.decoder.div_(self.decoder.norm(dim=-1, keepdim=True))
            self.encoder.copy_(self.decoder)
        nn.init.zeros_(self.encoder_bias)
        nn.init.zeros_(self.bias)
        self.idle.zero_()
        if self.threshold is not None:
            self.threshold.fill_(UNKNOWN)

    def forward(self, input: Tensor, loss: bool = False) -> Tensor:
        asked: Any = loss
        if not isinstance(asked, bool | _Instead):
            raise TypeError(f"loss must be a bool, but got {type(loss).__name__}")
        work = self._loss if loss else self._reconstruct
        result: Tensor = (asked.work if isinstance(asked, _Instead) else work)(input)
        if self.training:
            self._pulled.until_backward_of(result)
        return result

    def loss(self, input: Tensor) -> Tensor:
        """What to train on, a 0-dim tensor: the mean squared error of the reconstruction with k latents, plus
        half of that with 1.5 k latents.

        The second error gives a gradient to latents that just missed the top k. On the activations of two
        small networks, the first one was smaller by 42 and 6 % than that of a top-k autoencoder by hand, and
        on sparse sums of random directions larger by 2 % (docs/results/sparse-autoencoder). There the inputs
        were centred and divided by the root of their mean square, which the layer leaves to you.

        Unless ``revive`` is None, every idle latent i is pulled towards its selection. Of the B inputs it
        takes the one for which it comes nearest to that, x, whose smallest selected activation is t (at
        least 0), and

            0.01/B · Σ_i max(t − a_i(x), 0)

        is added. Only the rows of ``encoder`` and ``encoder_bias`` that belong to idle latents get a gradient
        from it. Once a latent is selected, it learns from the errors as all others do.

        With ``widths``, the first and the second error are means over these widths and n, each of what the
        first latents of the code reconstruct alone.

        Latents that became idle since the last backward pass are pulled from the next one on.

        As in PyTorch, the mean over no inputs is NaN.
        """
        loss: Tensor = self(input, loss=True)
        return loss

    def _reconstruct(self, input: Tensor) -> Tensor:
        if self._is_dense():
            return self._decode(self._encode(input))
        values, indices = self._best(input, self._count_of(1.0))
        self._count(values > 0, indices)
        return self._decode(values, indices)

    def _loss(self, input: Tensor) -> Tensor:
        limit = (self.revive or 0.0) * self.latents / current(self.k)
        idle = self._pulled.read(self.idle, lambda: self.idle >= limit)  # before this batch
        nearest = None if self.revive is None else _Nearest(idle, whole=not self._shared().here)
        if self._is_dense():
            a = self._activations(input)
            near, far = self._code(a), self._code(a, WIDER)
            self._count(self._uses(a, near))
            self._follow(a, near)
            first, second = (self._error(input, y * a.relu()) for y in (near, far))
            if nearest is not None:
                nearest.see(0, a.detach(), self._smallest(a, near))
        else:
            m = self._count_of(1.0)
            values, indices = self._best(input, self._count_of(WIDER), m, nearest)
            self._count(values[..., :m] > 0, indices[..., :m])
            first, second = self._errors(input, values, indices, m)
        loss = first + SHARE * second
        return loss if nearest is None else loss + PULL * self._pull(input, nearest)

    def encode(self, input: Tensor) -> Tensor:
        """The code, (..., n), with at most k entries that are not 0; with a tau soft in train mode."""
        code: Tensor = self(input, _Instead(self._encode))
        return code

    def _encode(self, input: Tensor) -> Tensor:
        a = self._activations(input)
        y = self._code(a)
        self._count(self._uses(a, y))
        self._follow(a, y)
        return (y * a.relu()).to(self.encoder.dtype)

    def top(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The hard code as values and indices, both (..., m): its k largest entries in descending order.

        They are the latents of :meth:`encode` in eval mode; of equally large ones, those of lowest index.
        m = ⌊k + ½⌋. With ``batch``, m is the largest number of latents that an input of the batch has; the
        values of the other inputs end with zeros.
        """
        code: tuple[Tensor, Tensor] = self(input, _Instead(self._top))
        return code

    def _top(self, input: Tensor) -> tuple[Tensor, Tensor]:
        if not self.batch:
            values, indices = self._best(input, self._count_of(1.0))
            return values.to(self.encoder.dtype), indices
        a = self._activations(input)
        chosen = self._above(a)
        counts = (chosen != 0).sum(-1)
        scores = a.detach().masked_fill(chosen == 0, -math.inf)
        indices = topk(scores, int(counts.max()) if counts.numel() else 0).indices
        values = a.gather(-1, indices).relu() * chosen.gather(-1, indices)
        return values.to(self.encoder.dtype), indices

    def decode(self, code: Tensor, indices: Tensor | None = None) -> Tensor:
        """The reconstruction, (..., in_features), of a code (..., n), or of values (..., m) and indices."""
        output: Tensor = self(code, _Instead(functools.partial(self._decode, indices=indices)))
        return output

    def _decode(self, code: Tensor, indices: Tensor | None = None) -> Tensor:
        if indices is None:
            check_width(code, self.latents, self, "code")
            return F.linear(code.to(self.decoder.dtype), self.decoder.mT, self.bias)
        arguments.check_bool_or_real(code, "code")
        arguments.check_tensor(indices, "indices")
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"indices must have dtype torch.int64, but got {indices.dtype}")
        for name, x in (("code", code), ("indices", indices)):
            arguments.check_has_values(x, name, self.decoder)
        if code.shape != indices.shape or not code.dim():
            raise ValueError(
                f"code and indices must have the same shape (..., m), but got {tuple(code.shape)} and "
                f"{tuple(indices.shape)}"
            )
        return selected_sum(code, self.decoder, indices.long()) + self.bias

    def dead(self, inputs: int) -> Tensor:
        """The share of latents that none of the last ``inputs`` training inputs used: 0-dim, in [0, 1]."""
        arguments.check_integer(inputs, "inputs", low=1)
        return widen(self.idle >= inputs).mean()

    def _is_dense(self) -> bool:
        """Whether the code has to be a whole row: soft, of inputs together, or of a size that is not known.

        Under a trace sizes must not depend on values, as that of :meth:`top` does on a k that is a tensor.
        """
        if self.batch or (self.training and self.tau is not None):
            return True
        k = current(self.k)
        return isinstance(k, Tensor) and (torch.compiler.is_compiling() or not arguments.has_data(k))

    def _code(self, a: Tensor, wider: float = 1.0) -> Tensor:
        """The selection of ``wider`` times k latents."""
        if self.batch and not self.training and wider == 1:
            return self._above(a)
        rows = a.flatten() if self.batch else a
        k: Scalar = current(self.k) * wider
        if wider > 1:
            k = k.clamp(max=self.latents) if isinstance(k, Tensor) else min(k, self.latents)
        k = self._size(a, k) if self.batch else k
        group = self.group if self.batch and self.training else None
        if self.tau is None or not self.training:
            return masks.topk_mask(rows, k, group=group).view(a.shape)
        y = masks.soft_topk(rows, k, tau=current(self.tau), cdf=self.cdf, hard=self.hard, group=group)
        if wider == 1 and not self.hard:
            self._note(y)
        return y.view(a.shape)

    def _above(self, a: Tensor) -> Tensor:
        """The selection of eval mode with ``batch``: by the threshold, or together before there is one."""
        assert self.threshold is not None
        known = self.threshold >= 0
        chosen = (a >= self.threshold).to(a.dtype)
        if arguments.readable(known) and bool(known):
            return chosen
        # elsewhere the question would wait for the device, or cannot be asked
        together = masks.topk_mask(a.flatten(), self._size(a)).view(a.shape)
        return torch.where(known, chosen, together)

    def _follow(self, a: Tensor, y: Tensor) -> None:
        """Move the threshold, in train mode, towards the smallest activation that the batch selects."""
        if self.threshold is None or not counts(self):
            return
        a, y = a.detach(), y.detach()  # torch.export saves no program with a no_grad() inside
        if self.tau is not None and not self.hard:
            y = masks.topk_mask(a.flatten(), self._size(a), group=self.group).view(a.shape)
        level = self._lowest(torch.where(y > 0.5, a, math.inf)).clamp(min=0).to(self.threshold.dtype)
        moved = torch.where(self.threshold < 0, level, self.threshold.lerp(level, MOVE))
        # no latent was selected, or the batch has a NaN
        self.threshold.copy_(torch.where(level < math.inf, moved, self.threshold))

    def _error(self, input: Tensor, code: Tensor) -> Tensor:
        """The mean squared error of the reconstruction, or with widths the mean of theirs."""
        place = torch.arange(self.latents, device=code.device)
        codes = [code, *(code * (place < width) for width in self.widths)]
        return _mean([F.mse_loss(self._decode(each), input) for each in codes])

    def _errors(self, input: Tensor, values: Tensor, indices: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """:meth:`_error` of the first m of some values, and of all."""
        first, second = [], []
        for width in (self.latents, *self.widths):
            kept = values if width == self.latents else values * (indices < width)
            near = selected_sum(kept[..., :m], self.decoder, indices[..., :m]) + self.bias
            far = near + selected_sum(kept[..., m:], self.decoder, indices[..., m:])
            first.append(F.mse_loss(near, input))
            second.append(F.mse_loss(far, input))
        return _mean(first), _mean(second)

    def _smallest(self, a: Tensor, y: Tensor) -> Tensor:
        """The smallest activation that a selection has, (..., 1), or (1, ..., 1) if the batch shares it."""
        selected = torch.where(y.detach() > 0.5, a.detach(), math.inf)
        if self.batch:
            return self._lowest(selected).clamp(min=0).view((1,) * a.dim())
        return selected.amin(-1, keepdim=True).clamp(min=0)

    def _lowest(self, x: Tensor) -> Tensor:
        """The smallest entry that all processes have, 0-dim; ∞ if they have none."""
        lowest = x.amin() if x.numel() else x.new_full((), math.inf)
        return -self._shared().reduce([], [-lowest])[0].to(x.dtype)

    def _pull(self, input: Tensor, nearest: _Nearest) -> Tensor:
        """What idle latents lack to be selected for the input that is nearest to it, in sum, over B."""
        shared, inputs = self._shared(), input.reshape(-1, self.in_features)
        idle, columns, level = nearest.idle, nearest.columns, nearest.level
        if isinstance(shared, Shards):  # of all processes, the one with the nearest input pulls
            distance = nearest.distance
            if distance is None:
                distance = input.new_full((self.latents,), math.inf, dtype=_single(self.encoder.dtype))
            (distances,) = shared.reduce([shared.slots(distance)])
            idle = idle & (distances.argmin(-1) == shared.rank)
        if level is None:
            return input.new_zeros((), dtype=_single(self.encoder.dtype))
        centred = inputs[nearest.input] - self.bias.detach()
        encoder: Tensor = self.encoder
        encoder_bias: Tensor = self.encoder_bias
        if columns is not None:
            idle, encoder, encoder_bias = idle[columns], encoder[columns], encoder_bias[columns]
        lacking = level - (centred * encoder).sum(-1, dtype=level.dtype) - encoder_bias
        # nothing was selected where the level is infinite
        return torch.where(idle & (level < math.inf), lacking.relu(), 0).sum() / len(inputs)

    def _best(
        self, input: Tensor, count: int, m: int = 0, nearest: _Nearest | None = None
    ) -> tuple[Tensor, Tensor]:
        """The largest activations of each input and their indices, (..., count) each.

        ``nearest`` sees the pre-activations beside the m-th largest ones.
        """
        x, weight, bias = self._map(input)

        def watch(where: Where, scores: Tensor, best: Tensor) -> None:
            assert nearest is not None
            start = where[-1].start if isinstance(where[-1], slice) else 0
            nearest.see(start, scores, best[..., m - 1 : m].clamp(min=0))

        seen = watch if nearest is not None and nearest.looks and m else None
        best, indices = best_of_product(x, weight, count, bias, watch=seen)
        values = selected_dot(x, weight, indices, bias, known=best)
        return values.relu(), indices

    def _count_of(self, wider: float) -> int:
        """``wider`` times k latents, as a whole number."""
        return min(math.floor(float(current(self.k)) * wider + 0.5), self.latents)

    def _activations(self, input: Tensor) -> Tensor:
        x, weight, bias = self._map(input)
        if x.dtype != bias.dtype:
            return product(x, weight.mT) + bias
        with without_autocast(input.device):
            return F.linear(x, weight, bias)

    def _map(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The (input, weight, bias) of the linear map that computes the pre-activations."""
        check_width(input, self.in_features, self)
        check_dtype(input, self.encoder, self)
        if input.dtype == self.encoder.dtype != _single(input.dtype):
            # in float32 from the product on, of which near ties decide, and of numbers that are not rounded
            return input, self.encoder, self.encoder_bias - product(self.bias, self.encoder.mT)
        centred = (input - self.bias).to(torch.promote_types(self.encoder.dtype, torch.float32))
        return centred, self.encoder.to(centred.dtype), self.encoder_bias.to(centred.dtype)

    def _size(self, a: Tensor, k: Scalar | None = None) -> Scalar:
        """How many latents a whole batch gets, k for each input."""
        k, inputs, shared = current(self.k) if k is None else k, a[..., 0].numel(), self._shared()
        if shared.here and not torch.compiler.is_compiling():
            return k * inputs
        # a number would fix the size of the batch in a trace
        (total,) = shared.reduce([torch.full((), inputs, dtype=wide_dtype(a.device), device=a.device)])
        return k * total

    @staticmethod
    def _uses(a: Tensor, y: Tensor) -> Tensor:
        return (a > 0) & (y > 0.5)

    def _count(self, used: Tensor, indices: Tensor | None = None) -> None:
        """Count the inputs since a latent was used, (..., n), or (..., m) at indices."""
        if not counts(self):
            return
        inputs = torch.full((), math.prod(used.shape[:-1]), device=used.device)
        if indices is None:
            times = used.reshape(-1, self.latents).any(0).long()
        else:  # the sizes do not depend on values
            times = torch.zeros_like(self.idle).scatter_add(0, indices.flatten(), used.flatten().long())
        inputs, times = self._shared().reduce([inputs, times])
        self._pulled.write(self.idle, torch.where(times > 0, 0, self.idle + inputs.long()))

    def _cure(self) -> str:
        return f"{super()._cure()}, set hard=True, or leave out tau"

    def _apply(self, fn: Any, recurse: bool = True) -> TopKSAE:
        threshold = self.threshold
        super()._apply(fn, recurse)
        if threshold is not None and self.threshold is not None:
            dtype = _single(self.threshold.dtype)
            if dtype != self.threshold.dtype:  # half precision has too few digits for a moving mean
                self.threshold = threshold.to(self.threshold.device, dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = prefix + "threshold"
        level = state_dict.get(name)
        if self.threshold is None:
            if level is not None:
                args[-1].append(
                    f"{name!r} belongs to a TopKSAE with batch=True, and this one has batch=False: make it "
                    "with batch=True, or delete the name from the state for one with k latents per input"
                )
        elif level is None:  # states of khot 0.1 have none
            state_dict[name] = torch.full_like(self.threshold, UNKNOWN)
        else:  # assign=True would take it as it is
            state_dict[name] = level.to(_single(level.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        soft = {} if self.tau is None else {"tau": self.tau, "cdf": self.cdf}
        values = describe(in_features=self.in_features, latents=self.latents, k=self.k, **soft)
        values += ", hard=True" * self.hard + ", batch=True" * self.batch
        values += "" if self.revive == REVIVE else f", revive={self.revive}"
        return f"{values}, widths={self.widths}" if self.widths else values


def _single(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def _mean(errors: list[Tensor]) -> Tensor:
    return errors[0] if len(errors) == 1 else torch.stack(errors).mean()


def _check_widths(widths: Sequence[int], latents: int) -> tuple[int, ...]:
    if isinstance(widths, (str, bytes)) or not isinstance(widths, Sequence):
        raise TypeError(f"widths must be a sequence of integers, but got {type(widths).__name__}")
    for width in widths:
        arguments.check_integer(width, "widths", low=1, high=latents - 1)
    if any(a >= b for a, b in itertools.pairwise(widths)):
        raise ValueError(f"widths must be in ascending order, but got {list(widths)}")
    return tuple(widths)
