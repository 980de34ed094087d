"""A sparse autoencoder with k latents per input."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import at_least_single, in_dtype, wide_dtype, widen, without_autocast
from khot._ops.product import product
from khot._ops.selected import best_of_product, selected_dot, selected_sum
from khot._ops.topk import largest_entries
from khot.cdfs import CDF, CDFName
from khot.nn._inputs import check_dtype, check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._lent import Lent
from khot.nn._state import Grouped, Settled, Steady, counts
from khot.nn._values import Value, available, current, describe, positive
from khot.selection import topk

__all__ = ["LossParts", "TopKSAE"]

Loss = Literal["log", "mse"]

WIDER, SHARE = 1.5, 0.5  # of k, and of the error with so many latents in the loss
# Where a batch selects together, so many times k latents of each input are looked at first, unless there are
# few latents: whole rows took 0.7 to 0.85 of the time with 512 of them, and 1.8 with 2,048.
CANDIDATES, MANY = 4.0, 1024
AGAIN, WEIGHT = 2.0, 0.3  # of k idle latents in what the others leave, and of that error in the loss
REVIVE = 50.0  # uses that a latent of average use would have had
UNKNOWN = -1.0  # no threshold is negative
MOVE = 0.02  # how far a training step moves the threshold: it is a mean over some 50 steps
# Adam moves every number by the same amount. A step counts twice for the encoder, whose parameter is half of
# it, and turns a direction the more, the shorter its parameter is. Lengths grow, so that it turns less later.
GAIN, START = 2.0, 0.3
EFFECTIVE = "encoder", "decoder", "bias", "out_bias"  # what is computed from parameters and can be assigned
ENOUGH = 8  # inputs, from whose mean it can be seen that the bias is not there


class LossParts(NamedTuple):
    """The loss of a :class:`khot.nn.TopKSAE` and its terms, all 0-dim. Only the loss has a gradient.

    Attributes:
        loss: what to minimise: the logarithm of error + ½ wider + 0.3 idle, or with "mse" this sum itself.
        error: E(k), the mean squared error with k latents.
        wider: E(1.5 k), that with half as many more.
        idle: A, that of what the idle latents make of the rest; 0 if none is idle.
        used: how many latents an input uses, on average over the batch.
    """

    loss: Tensor
    error: Tensor
    wider: Tensor
    idle: Tensor
    used: Tensor


class _Instead:
    """What a forward pass computes instead of the reconstruction, for the methods that are forward passes."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        self.work = work


class _Idle:
    """For each input of a batch the idle latents whose scores are largest: pre-activations or magnitudes.

    The scores may come in parts. Where it can be read which latents are idle, only these are
    looked at.

    Attributes:
        busy: (n,), which latents are not idle.
        columns: the indices of the latents that are looked at; None: all.
        count: how many are chosen for each input.
        values, indices: the pre-activations of what was chosen, or 0 where fewer are idle, and their indices,
            (..., count); from :meth:`take` on.
    """

    values: Tensor
    indices: Tensor

    def __init__(self, busy: Tensor, count: int) -> None:
        self.busy = busy
        self.columns = (~busy).nonzero().squeeze(-1) if arguments.readable(busy) else None
        self.count = count if self.columns is None else min(count, len(self.columns))
        self._parts: list[tuple[Tensor, Tensor]] = []

    def see(self, scores: Tensor) -> None:
        """Look at scores, (..., n), without gradient, and write to them."""
        every = self.columns is None
        scores = scores.masked_fill_(self.busy, -math.inf) if every else scores[..., self.columns]
        values, indices = largest_entries(scores, self.count, True, True)
        self._parts.append((values, indices if self.columns is None else self.columns[indices]))

    def take(self, shape: torch.Size, values: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Choose for inputs of this shape; ``values`` computes pre-activations, whose scores it is given, at
        given indices, differentiably."""
        one = len(self._parts) == 1
        known, self.indices = (
            (part[0] if one else torch.cat(part)).view(*shape, self.count)
            for part in zip(*self._parts, strict=True)
        )
        self.values = values(known, self.indices).masked_fill(~(known > -math.inf), 0)


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
            that a latent of average use had been used ``revive`` times. In :meth:`loss`, idle latents learn
            what the others leave. None: they are left alone.
        centre: whether the first training batch sets the bias to its mean. With False it starts at 0, which
            is right for inputs with the mean 0; there is a warning if the first training batch that this
            layer sees has its mean far from the bias.
        group: None, or the process group (a tuple of them for a grid) whose processes train one autoencoder,
            each with a part of the batch (docs/distributed). In train mode ``idle``, ``threshold``, the first
            mean, the selection with ``batch`` and the logarithm of :meth:`loss` are then those of the whole
            batch, and all processes have to make the same calls. None: those of this process.
        signed: whether latents may be negative: y selects the k pre-activations of largest magnitude, and the
            code is y · a, so that one latent serves a direction and its opposite. ``threshold`` is one of
            magnitudes then.
        refine: how often the code is selected again. Each time, the pre-activations become
            a ← code + W(x − reconstruction), of which the k largest are the next code, so that latents that
            overlap no longer claim the same part of the input (iterative hard thresholding). It takes about
            1.5 times as long for each, keeps all n pre-activations of an input, and has no layout of other
            libraries, whose encoders are linear maps. All but the last selection are hard and take k latents
            for each input.
        widths: None, or numbers of latents below n, in ascending order. In :meth:`loss` the code then has to
            reconstruct the input with its first w latents alone, too, for each of these widths w, so that the
            first latents learn what is most common. ``code[..., :w] @ decoder[:w] + bias`` is what they say.
        out_features: None, or the size of an output that is something else than the input, such as that of a
            layer whose input this is: the layer is then a transcoder, and :meth:`loss` needs a ``target``.
            The output is Σ_i code_i D_i + out_bias. Not with ``refine``.
        skip: whether the output has a linear part besides, S(x − b); with ``out_features`` left out it is of
            the size of the input.
        device, dtype: of the parameters.

    Attributes:
        encoder, decoder: W and D, both (n, in_features); they start from the same random rows of length 1.
            Training turns the rows of D and does not change their lengths. In a transcoder D is
            (n, out_features) and starts from rows of its own, and the first training batch sets their lengths
            to the spread of the targets over that of the inputs.
        encoder_bias, bias: c, (n,), and b, (in_features,); 0 before the first training batch.
        raw_encoder, raw_decoder, shift: the parameters that ``encoder``, ``decoder`` and ``bias`` are
            computed from: W = 2 · raw_encoder, D_i = lengths_i · raw_decoder_i / ‖raw_decoder_i‖ and
            b = mean + shift. To set one of the three, assign a tensor, as in ``sae.bias = x.mean(0)``: what
            is written into the tensors that they return is lost. The next time that one of the three is read,
            in a forward pass in eager mode or in ``state_dict()``, there is a warning. On a GPU, and for
            tensors of more than 4 million numbers, it does not notice what is written through ``.data``, as
            in ``sae.encoder.data.mul_(2)``, or through NumPy. A state dict that has the three instead of the
            parameters, as that of khot 0.1, is read, too.
        out_bias, skip: the bias of a transcoder's output, (out_features,), which the first training batch
            sets to the mean of the targets, as ``centre`` says; and S, a parameter (out_features,
            in_features) that starts at 0. None where they are not there. ``out_bias`` is computed from the
            parameter ``out_shift`` and the buffer ``out_mean``, as ``bias`` is, and ``scaled``, (1,), says
            whether there was such a batch, or ``decoder`` or ``out_bias`` was assigned.
        lengths, mean, centred: buffers: the lengths of D's rows, (n,); the mean of the first training batch,
            (in_features,); and whether there was one, or the bias was assigned, (1,).
        idle: (n,), a buffer: how many inputs ago, in train mode, a latent was last used. An input uses a
            latent if a > 0 (with ``signed``, if a ≠ 0) and y > ½. It may be written to. On a GPU the loss
            sees what is written through ``.data`` after the next backward pass, and all else at once.
        threshold: with ``batch``, (1,), a buffer, else None: the smallest activation that was selected, as a
            moving mean over the training steps. Its dtype is that of the parameters, but float32 for half
            precision. It is −1 before the first step; until then eval mode selects as train mode does. Every
            process of a data-parallel training has its own, unless buffers are broadcast. An autoencoder from
            elsewhere (:func:`khot.nn.sae_from_layout`) may have one for each latent, (n,); training moves all
            of them towards the same.

    Shape:
        input: (..., in_features), of the parameters' dtype, or of one that torch promotes to it, as half
            precision to float32.

        loss: whether to return :meth:`loss` of the input instead: False, or its ``kind``, or True for "log".

        target: with ``loss``, as for :meth:`loss`.

        output: the reconstruction, of the input's shape, or (..., out_features), or with ``loss`` the loss,
        0-dim.

    All other methods that compute with the parameters are forward passes, too: hooks of the module see them,
    and so does ``fully_shard``. ``DistributedDataParallel`` does not: train on ``model(x, loss=True)``.
    Where the selection is hard (in train mode without ``tau``) and not refined, the n pre-activations of an
    input are not kept, and gradients are sums over the selected latents. With ``batch``, this is so in train
    mode on a CPU, from 1,024 latents on.
    Activation checkpointing changes neither the gradient nor the counts, unless ``torch.compile`` has
    compiled what it computes twice.

    Raises:
        ValueError, TypeError: an argument out of range.

    Sources: Blumensath, Davies 2009 (``refine``: iterative hard thresholding); Gao et al. 2024 (top-k sparse
    autoencoders, an error with several k); Bussmann, Leask, Nanda 2024
    (``batch``); Bussmann, Nabeshima, Karvonen, Nanda 2025 (``widths``: Matryoshka autoencoders); Dunefsky,
    Chlenski, Nanda 2024 (transcoders); Paulo, Shabalin, Belrose 2025 (``skip``).

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
    out_features: int
    latents: int
    hard: bool
    batch: bool
    signed: bool
    refine: int
    revive: float | None
    widths: tuple[int, ...]
    k: Value
    tau: Value | None
    cdf: CDF
    centre: bool
    raw_encoder: nn.Parameter
    encoder_bias: nn.Parameter
    raw_decoder: nn.Parameter
    shift: nn.Parameter
    out_shift: nn.Parameter | None
    skip: nn.Parameter | None

    lengths: Tensor
    mean: Tensor
    centred: Tensor
    out_mean: Tensor | None
    scaled: Tensor | None
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
        centre: bool = True,
        signed: bool = False,
        refine: int = 0,
        out_features: int | None = None,
        skip: bool = False,
        group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.check_flags(hard=hard, batch=batch, centre=centre, signed=signed, skip=skip)
        transcodes = skip or out_features is not None
        self.out_features = in_features if out_features is None else out_features
        sizes = {"in_features": in_features, "latents": latents, "out_features": self.out_features}
        for name, size in sizes.items():
            arguments.check_integer(size, name, low=1)
        positive(k, "k")
        if not isinstance(k, nn.Module) and k > latents:
            raise ValueError(f"k must be at most the number of latents, {latents}, but got {k}")
        self.in_features, self.latents = in_features, latents
        if revive is not None:
            arguments.check_number(revive, "revive", low=0, high=math.inf)
            positive(revive, "revive")
        self.hard, self.batch, self.revive, self.centre = hard, batch, revive, centre
        arguments.check_integer(refine, "refine", low=0)
        if refine and transcodes:
            raise ValueError(
                "refine must be 0 with out_features or skip, because it encodes what is left of the input, "
                f"but got {refine}"
            )
        self.signed, self.refine = signed, refine
        self.widths = _check_widths(() if widths is None else widths, latents)
        self.k, self.tau = positive(k, "k"), None if tau is None else positive(tau, "tau")
        self.cdf = cdfs.resolve(cdf)
        self.group, self._steady, self._settled, self._compared = group, Steady(), Settled(), False
        self._lent = Lent()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.raw_encoder = nn.Parameter(torch.empty(latents, in_features, **made))
        self.encoder_bias = nn.Parameter(torch.empty(latents, **made))
        self.raw_decoder = nn.Parameter(torch.empty(latents, self.out_features, **made))
        self.shift = nn.Parameter(torch.empty(in_features, **made))
        of_output = torch.empty(self.out_features, **made)
        self.out_shift = nn.Parameter(of_output) if transcodes else None
        self.skip = nn.Parameter(torch.empty(self.out_features, in_features, **made)) if skip else None
        wide: dict[str, Any] = {"device": device, "dtype": _single(self.shift.dtype)}
        self.register_buffer("lengths", torch.empty(latents, **wide))
        self.register_buffer("mean", torch.empty(in_features, **made))
        # one element and not 0-dim: torch.compile does not write to a 0-dim float64 tensor on the CPU
        self.register_buffer("centred", torch.empty(1, dtype=torch.int64, device=device))
        if transcodes:
            self.register_buffer("out_mean", torch.empty_like(of_output))
            self.register_buffer("scaled", torch.empty_like(self.centred))
        else:  # torch.export does not take buffers that are None
            self.out_mean = self.scaled = None
        self.register_buffer("idle", torch.empty(latents, dtype=torch.int64, device=device))
        self.register_buffer("threshold", torch.empty(1, **wide) if batch else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random directions of length 1, the same in the encoder and the decoder of one space, and biases of
        0."""
        nn.init.normal_(self.raw_decoder)
        with torch.no_grad():
            self.raw_decoder.div_(self.raw_decoder.norm(dim=-1, keepdim=True))
            if self.out_shift is None:
                self.raw_encoder.copy_(self.raw_decoder / GAIN)
            else:
                nn.init.normal_(self.raw_encoder)
                self.raw_encoder.div_(GAIN * self.raw_encoder.norm(dim=-1, keepdim=True))
            self.raw_decoder.mul_(START)
        self.lengths.fill_(1)
        nn.init.zeros_(self.encoder_bias)
        nn.init.zeros_(self.shift)
        for value in (self.out_shift, self.skip):
            if value is not None:
                nn.init.zeros_(value)
        for buffer in (self.mean, self.centred, self.out_mean, self.scaled, self.idle):
            if buffer is not None:
                buffer.zero_()
        if self.threshold is not None:
            self.threshold.fill_(UNKNOWN)

    @property
    def encoder(self) -> Tensor:
        return self._lend("encoder", self._encoder)

    @encoder.setter
    def encoder(self, encoder: Tensor) -> None:
        self._assign({"encoder": encoder})

    @property
    def decoder(self) -> Tensor:
        return self._lend("decoder", self._decoder)

    @decoder.setter
    def decoder(self, decoder: Tensor) -> None:
        self._assign({"decoder": decoder})

    @property
    def bias(self) -> Tensor:
        return self._lend("bias", self._bias)

    @bias.setter
    def bias(self, bias: Tensor) -> None:
        self._assign({"bias": bias})

    @property
    def out_bias(self) -> Tensor | None:
        return None if self.out_shift is None else self._lend("out_bias", self._out_bias)

    @out_bias.setter
    def out_bias(self, out_bias: Tensor) -> None:
        if self.out_shift is None:
            raise AttributeError("out_bias is there with out_features or skip; without them, set bias")
        self._assign({"out_bias": out_bias})

    def _encoder(self) -> Tensor:
        return GAIN * self.raw_encoder

    def _decoder(self) -> Tensor:
        return (self.raw_decoder * self._stretch().unsqueeze(-1)).to(self.raw_decoder.dtype)

    def _bias(self) -> Tensor:
        return self.mean + self.shift

    def _out_bias(self) -> Tensor:
        """What the output is without a code."""
        if self.out_mean is None or self.out_shift is None:
            return self._bias()
        return self.out_mean + self.out_shift

    def _lend(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """A value for the user, who may write into it."""
        value = compute()
        if not torch.compiler.is_compiling():
            self._lent.tell(type(self).__name__)
            self._lent.lend(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in EFFECTIVE:  # torch would register a Parameter or a module under the name
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @torch.no_grad()
    def _assign(self, effective: dict[str, Tensor]) -> None:
        for name, value in effective.items():
            arguments.check_input(value, name, distributed=True)
            self._lent.take(name)
        own = self.state_dict()
        for name, value in self._raw(effective).items():
            if value.shape != own[name].shape:
                (given,) = effective
                raise ValueError(
                    f"{given} must have shape {tuple(own[name].shape)}, but got {tuple(value.shape)}"
                )
            own[name].copy_(value)

    def _raw(self, effective: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries of a state that make what is effective so."""
        raw = {}
        if "encoder" in effective:
            raw["raw_encoder"] = effective["encoder"] / GAIN
        if "decoder" in effective:
            # The parameter is D itself, so that its lengths have a ratio of exactly 1.
            raw["raw_decoder"] = effective["decoder"].contiguous()
            raw["lengths"] = _lengths(raw["raw_decoder"])
        for name, before in (("bias", ""), ("out_bias", "out_")):
            if name in effective:
                raw[f"{before}shift"] = effective[name]
                raw[f"{before}mean"] = torch.zeros_like(effective[name])
        if "bias" in effective:
            raw["centred"] = torch.ones_like(self.centred)
        if self.scaled is not None and {"decoder", "out_bias"} & set(effective):
            raw["scaled"] = torch.ones_like(self.scaled)
        return raw

    def _stretch(self, indices: Tensor | None = None) -> Tensor:
        """What a row of ``raw_decoder`` is multiplied with in D, (n,), or of the shape of indices."""
        if indices is None:
            return _ratio(self.lengths, self.raw_decoder)
        if torch.compiler.is_compiling() or 2 * indices.numel() >= self.latents:
            return _ratio(self.lengths, self.raw_decoder).gather(0, indices.flatten()).view(indices.shape)
        return _ratio(self.lengths[indices], self.raw_decoder[indices])  # the other rows are not read

    def forward(self, input: Tensor, loss: bool | Loss = False, *, target: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            self._lent.tell(type(self).__name__)
        asked: Any = loss
        if isinstance(asked, _Instead):
            work = asked.work
        elif asked is False:
            if target is not None:
                raise ValueError("target must be left out without a loss, but got a tensor")
            work = self._reconstruct
        else:
            kind: Any = "log" if asked is True else asked
            _check_kind(kind, "loss")
            work = functools.partial(self._loss, kind=kind, target=target)
        result: Tensor = work(input)
        if self.training:
            self._steady.until_backward_of(result.loss if isinstance(result, LossParts) else result)
        return result

    def loss(self, input: Tensor, kind: Loss = "log", *, target: Tensor | None = None) -> Tensor:
        """What to train on, a 0-dim tensor, whose dtype is float32 at least.

        With E(m), the mean squared error of the reconstruction with the m best latents, and A, that of what
        the idle latents make of the rest x − reconstruction of each input x,

            loss = log(E(k) + ½ E(1.5 k) + 0.3 A)

        E(1.5 k) gives a gradient to latents that just missed the top k. A, which is left out unless some
        latent is idle, is the mean square of Σ_i a_i D_i − rest over the 2 k idle latents i of largest
        pre-activations a_i, which may be negative here; the rest has no gradient. Which latents are idle is
        read before the batch; those that became idle since the last backward pass count from the next one on.

        The logarithm divides the gradient by the error. Adam divides it by its root mean square over about a
        thousand steps. Without the logarithm, the large errors of the first steps would keep the next
        thousand short. With it the loss has no unit: it falls by 0.7 where the error halves, whatever the
        scale of the inputs, and may be negative. Do not add it to other losses, and do not minimise it by
        plain gradient descent, whose steps would grow as the error falls.
        Where the error is 0, it is the logarithm of the smallest normal number, and has no gradient.

        With ``widths``, E(m) is the mean over these widths and n of the errors of what the first latents of
        the code reconstruct alone.

        Args:
            input: as for the layer.
            kind: "log", or "mse" for E(k) + ½ E(1.5 k) + 0.3 A itself, to add it to other losses.
            target: what the output is compared with in the place of x, (..., out_features); a transcoder
                needs one. None: the input.

        As in PyTorch, the mean over no inputs is NaN.
        """
        _check_kind(kind, "kind")
        loss: Tensor = self(input, loss=kind, target=target)
        return loss

    def loss_parts(self, input: Tensor, kind: Loss = "log", *, target: Tensor | None = None) -> LossParts:
        """:meth:`loss`, to minimise, with the terms that it consists of, to look at: :class:`LossParts`.

        With a ``group``, the terms are those of this process.
        """
        _check_kind(kind, "kind")
        work = functools.partial(self._loss_parts, kind=kind, target=target)
        parts: LossParts = self(input, _Instead(work))
        return parts

    def _reconstruct(self, input: Tensor) -> Tensor:
        if self._is_dense(input):
            output = self._decode(self._encode(input))
        else:
            self._centre(input)
            ((weights, indices),), _ = self._selected(input, (1.0,))
            output = selected_sum(weights, self.raw_decoder, indices) + self._out_bias()
        return output if self.skip is None else output + self._skipped(input)

    def _skipped(self, input: Tensor) -> Tensor:
        assert self.skip is not None
        return F.linear(in_dtype(input - self._bias(), self.skip.dtype), self.skip)

    def _loss(self, input: Tensor, kind: Loss, target: Tensor | None) -> Tensor:
        loss, *_ = self._terms(input, kind, target)
        return loss

    def _loss_parts(self, input: Tensor, kind: Loss, target: Tensor | None) -> LossParts:
        loss, first, second, third, used = self._terms(input, kind, target)
        third = torch.zeros_like(first) if third is None else third
        number = at_least_single(used).sum(-1).mean()
        return LossParts(loss, first.detach(), second.detach(), third.detach(), number)

    def _aim(self, input: Tensor, target: Tensor | None) -> Tensor:
        """What the output is compared with."""
        if target is None:
            if self.out_shift is not None:
                raise ValueError("target must be given for a loss with out_features or skip, but got None")
            return input
        arguments.check_input(target, "target")
        shape = (*input.shape[:-1], self.out_features)
        if target.shape != shape:
            raise ValueError(f"target must have shape {shape}, but got {tuple(target.shape)}")
        return target

    def _terms(
        self, input: Tensor, kind: Loss, target: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """The loss and its three terms, the last of which may be None, and which latents each input uses."""
        self._check(input)
        aim = self._aim(input, target)
        self._centre(input)
        self._scale(input, aim)
        if self.skip is not None:
            aim = at_least_single(aim) - at_least_single(self._skipped(input))
        busy = self._busy()  # before this batch
        if self._is_dense(input):
            a = self._activations(input)
            scores, values = self._scores(a), self._values(a)
            near, far = self._code(scores), self._code(scores, WIDER)
            used = self._uses(scores, near)
            self._count(used)
            self._follow(scores, near)
            rest, first = self._error(aim, near * values)
            _, second = self._error(aim, far * values)
            again = None if busy is None else self._again(a, busy)
        else:
            others = None if busy is None else _Idle(busy, self._count_of(AGAIN))
            parts, used = self._selected(input, (1.0, WIDER), others)
            rest, first, second = self._errors(aim, *parts)
            again = None if others is None else self._sum(others.values, others.indices)
        loss, third = first + SHARE * second, None
        if busy is not None and again is not None:
            error = F.mse_loss(at_least_single(again), rest.detach())
            third = error if arguments.readable(busy) else error.masked_fill(busy.all(), 0)
            loss = loss + WEIGHT * third
        return loss if kind == "mse" else self._log(loss, input), first, second, third, used

    def _log(self, loss: Tensor, input: Tensor) -> Tensor:
        """The logarithm of a loss, whose gradient is divided by the loss of the whole batch."""
        smallest = torch.finfo(loss.dtype).tiny
        shared = self._shared()
        if shared.here:
            return loss.clamp(min=smallest).log()
        inputs = math.prod(input.shape[:-1])
        sums = [loss.detach() * inputs if inputs else torch.zeros_like(loss), torch.full_like(loss, inputs)]
        total, count = shared.reduce(sums)
        whole = (total / count).clamp(min=smallest)
        return whole.log() + (loss - loss.detach()) / whole

    def _busy(self) -> Tensor | None:
        """Which latents are not idle, (n,); None if it is known that no idle one is to learn."""
        if self.revive is None:
            return None
        limit = self._limit()
        busy = self._steady.read(self.idle, lambda: self.idle < limit)
        return None if arguments.readable(busy) and busy.all() else busy

    def _limit(self) -> Scalar:
        """After how many inputs without use a latent counts as idle."""
        return (REVIVE if self.revive is None else self.revive) * self.latents / current(self.k)

    def _again(self, a: Tensor, busy: Tensor) -> Tensor:
        """What the idle latents of largest pre-activations, (..., n), make together."""
        scores = self._scores(a.detach()).masked_fill(busy, -math.inf)
        chosen = masks.topk_mask(scores, available(current(self.k) * AGAIN, scores))
        return self._decode(chosen * a) - self._out_bias()

    def _centre(self, input: Tensor) -> None:
        """Set ``mean``, in the first forward pass of train mode, and warn if the bias is far from it."""
        if not counts(self):
            return
        self._check(input)
        x = input.detach().reshape(-1, self.in_features)
        if self.centre and not self._is_set(self.centred):
            sums = at_least_single(x).sum(0)
            total, inputs = self._shared().reduce([sums, sums.new_full((), x.shape[0])])
            mean = total / inputs
            fits = mean.isfinite().all()  # not that of no inputs
            self.mean.copy_(torch.where(fits & (self.centred == 0), mean.to(self.mean.dtype), self.mean))
            self._settled.write(self.centred, self.centred.logical_or(fits))
        if self._compared or not arguments.readable(x) or x.shape[0] < ENOUGH:
            return
        self._compared = True
        x = at_least_single(x)
        mean = x.mean(0)
        far = (mean - self._bias().detach()).norm()
        spread = (x - mean).square().sum(-1).mean().sqrt()
        if far > spread:
            warnings.warn(
                f"the mean of the inputs is {far:.3g} from the bias of this TopKSAE, and they are "
                f"{spread:.3g} from their mean: the latents have to learn the mean first. Set sae.bias = "
                "x.mean(0), or, if it was trained on inputs that were centred or scaled, do so here, too",
                stacklevel=2,
            )

    def _is_set(self, flag: Tensor) -> bool:
        return bool(flag) if arguments.readable(flag) else self._settled(flag)

    @torch.no_grad()
    def _scale(self, input: Tensor, target: Tensor) -> None:
        """Set a transcoder's ``out_mean`` and ``lengths``, in the first loss of train mode."""
        if self.scaled is None or self.out_mean is None or not counts(self) or self._is_set(self.scaled):
            return
        sums = []
        for x in (input, target):
            x = widen(x.detach()).reshape(-1, x.shape[-1])
            sums += [x.sum(0), x.square().sum()]
        *found, count = self._shared().reduce([*sums, sums[1].new_full((), len(x))])
        means = [total / count for total in found[::2]]
        spreads = [
            (square / count - mean.square().sum()).clamp(min=0).sqrt()
            for mean, square in zip(means, found[1::2], strict=True)
        ]
        ratio = spreads[1] / spreads[0]
        fits = (ratio > 0) & (ratio < math.inf) & (self.scaled == 0)
        self.lengths.copy_(torch.where(fits, ratio.to(self.lengths.dtype), self.lengths))
        if self.centre:
            self.out_mean.copy_(torch.where(fits, means[1].to(self.out_mean.dtype), self.out_mean))
        self._settled.write(self.scaled, self.scaled.logical_or(fits))

    def encode(self, input: Tensor) -> Tensor:
        """The code, (..., n), with at most k entries that are not 0; with a tau soft in train mode."""
        code: Tensor = self(input, _Instead(self._encode))
        return code

    def _encode(self, input: Tensor) -> Tensor:
        self._centre(input)
        a = self._activations(input)
        scores = self._scores(a)
        y = self._code(scores)
        self._count(self._uses(scores, y))
        self._follow(scores, y)
        return (y * self._values(a)).to(self.shift.dtype)

    def top(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The hard code as values and indices, both (..., m): its k largest entries in descending order, with
        ``signed`` of their magnitudes.

        They are the latents of :meth:`encode` in eval mode; of equally large ones, those of lowest index.
        m = ⌊k + ½⌋. With ``batch``, m is the largest number of latents that an input of the batch has; the
        values of the other inputs end with zeros.
        """
        code: tuple[Tensor, Tensor] = self(input, _Instead(self._top))
        return code

    def _top(self, input: Tensor) -> tuple[Tensor, Tensor]:
        if not self.batch and not self.refine:
            values, indices = self._best(input, self._count_of(1.0))
            return values.to(self.shift.dtype), indices
        a = self._activations(input)
        scores = self._scores(a).detach()
        if not self.batch:
            indices = topk(scores, self._count_of(1.0)).indices
            return self._values(a.gather(-1, indices)).to(self.shift.dtype), indices
        chosen = self._above(scores)
        counts = (chosen != 0).sum(-1)
        scores = scores.masked_fill(chosen == 0, -math.inf)
        indices = topk(scores, int(counts.max()) if counts.numel() else 0).indices
        values = self._values(a.gather(-1, indices)) * chosen.gather(-1, indices)
        return values.to(self.shift.dtype), indices

    def decode(self, code: Tensor, indices: Tensor | None = None) -> Tensor:
        """The output, (..., out_features), of a code (..., n), or of values (..., m) and indices; that of a
        transcoder without what ``skip`` adds."""
        output: Tensor = self(code, _Instead(functools.partial(self._decode, indices=indices)))
        return output

    def _decode(self, code: Tensor, indices: Tensor | None = None) -> Tensor:
        if indices is None:
            check_width(code, self.latents, self, "code")
            code = (code * self._stretch()).to(self.shift.dtype)
            return F.linear(code, self.raw_decoder.mT, self._out_bias())
        arguments.check_bool_or_real(code, "code")
        arguments.check_tensor(indices, "indices")
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"indices must have dtype torch.int64, but got {indices.dtype}")
        for name, x in (("code", code), ("indices", indices)):
            arguments.check_has_values(x, name, self.raw_decoder)
        if code.shape != indices.shape or not code.dim():
            raise ValueError(
                f"code and indices must have the same shape (..., m), but got {tuple(code.shape)} and "
                f"{tuple(indices.shape)}"
            )
        return self._sum(code, indices.long()) + self._out_bias()

    def _sum(self, values: Tensor, indices: Tensor) -> Tensor:
        """Σ_j values_j D[indices_j]."""
        return selected_sum(values * self._stretch(indices), self.raw_decoder, indices)

    def dead(self, inputs: int) -> Tensor:
        """The share of latents that none of the last ``inputs`` training inputs used: 0-dim, in [0, 1]."""
        arguments.check_integer(inputs, "inputs", low=1)
        return widen(self.idle >= inputs).mean()

    def _is_dense(self, input: Tensor) -> bool:
        """Whether the code has to be a whole row: soft, refined, of inputs together, or of a size that is not
        known.

        Under a trace sizes must not depend on values, as that of :meth:`top` does on a k that is a tensor,
        and that of what a batch selects together on the inputs.
        """
        if self.refine or (self.training and self.tau is not None):
            return True
        if self.batch:
            readable = all(map(arguments.readable, (input, self.raw_encoder)))
            return not (self.training and readable and self.latents >= MANY)
        k = current(self.k)
        return isinstance(k, Tensor) and (torch.compiler.is_compiling() or not arguments.has_data(k))

    def _scores(self, a: Tensor) -> Tensor:
        """What decides which pre-activations are selected."""
        return a.abs() if self.signed else a

    def _values(self, a: Tensor) -> Tensor:
        """The entries that selected pre-activations have in the code."""
        return a if self.signed else a.relu()

    def _code(self, scores: Tensor, wider: float = 1.0) -> Tensor:
        """The selection of ``wider`` times k latents."""
        if self.batch and not self.training and wider == 1:
            return self._above(scores)
        rows = scores.flatten() if self.batch else scores
        k: Scalar = current(self.k) * wider
        if wider > 1:
            k = k.clamp(max=self.latents) if isinstance(k, Tensor) else min(k, self.latents)
        k = self._size(scores, k) if self.batch else k
        group = self.group if self.batch and self.training else None
        if self.tau is None or not self.training:
            return masks.topk_mask(rows, k, group=group).view(scores.shape)
        y = masks.soft_topk(rows, k, tau=current(self.tau), cdf=self.cdf, hard=self.hard, group=group)
        if wider == 1 and not self.hard:
            self._note(y)
        return y.view(scores.shape)

    def _above(self, scores: Tensor) -> Tensor:
        """The selection of eval mode with ``batch``: by the threshold, or together before there is one."""
        assert self.threshold is not None
        known = (self.threshold >= 0).all()
        chosen = (scores >= self.threshold).to(scores.dtype)
        if arguments.readable(known) and bool(known):
            return chosen
        # elsewhere the question would wait for the device, or cannot be asked
        together = masks.topk_mask(scores.flatten(), self._size(scores)).view(scores.shape)
        return torch.where(known, chosen, together)

    def _follow(self, scores: Tensor, y: Tensor) -> None:
        """Move the threshold, in train mode, towards the smallest score that the batch selects."""
        if self.threshold is None or not counts(self):
            return
        scores, y = scores.detach(), y.detach()  # torch.export saves no program with a no_grad() inside
        if self.tau is not None and not self.hard:
            y = masks.topk_mask(scores.flatten(), self._size(scores), group=self.group).view(scores.shape)
        level = self._lowest(torch.where(y > 0.5, scores, math.inf)).clamp(min=0).to(self.threshold.dtype)
        moved = torch.where(self.threshold < 0, level, self.threshold.lerp(level, MOVE))
        # no latent was selected, or the batch has a NaN
        self.threshold.copy_(torch.where(level < math.inf, moved, self.threshold))

    def _error(self, aim: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """What a code leaves of the aim, and its mean square, or with widths the mean of theirs."""
        place = torch.arange(self.latents, device=code.device)
        codes = [code, *(code * (place < width) for width in self.widths)]
        rests = [at_least_single(aim) - at_least_single(self._decode(each)) for each in codes]
        return rests[0], _mean([rest.square().mean() for rest in rests])

    def _errors(
        self, aim: Tensor, near: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_error` of some weights of rows of ``raw_decoder`` and their indices, and the second result
        with more of them, too."""
        rests, first, second = [], [], []
        centred = at_least_single(aim) - at_least_single(self._out_bias())
        for width in (self.latents, *self.widths):
            sums = [
                selected_sum(w if width == self.latents else w * (at < width), self.raw_decoder, at)
                for w, at in (near, more)
            ]
            rests.append(centred - sums[0])
            first.append(rests[-1].square().mean())
            second.append((rests[-1] - sums[1]).square().mean())
        return rests[0], _mean(first), _mean(second)

    def _selected(
        self, input: Tensor, shares: Sequence[float], idle: _Idle | None = None
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The rows of ``raw_decoder`` that make the reconstruction, as weights and indices: of the k selected
        latents of each input, counted, and of those that are selected beyond them where k is multiplied by
        the second of the shares; and which of the k are used. Weights may be 0."""
        if self.batch:
            return self._selected_together(input, shares, idle)
        m = self._count_of(1.0)
        values, indices = self._best(input, self._count_of(shares[-1]), idle)
        used = self._are_used(values[..., :m])
        self._count(used, indices[..., :m])
        # of all at once: that of many is that of the whole decoder
        weights = values * self._stretch(indices)
        if len(shares) == 1:
            return [(weights, indices)], used
        sizes = [m, indices.shape[-1] - m]
        near, far = zip(weights.split(sizes, -1), indices.split(sizes, -1), strict=True)
        # or every sum, and every gradient of one, would make copies of its own
        return [(w.contiguous(), at.contiguous()) for w, at in (near, far)], used

    def _selected_together(
        self, input: Tensor, shares: Sequence[float], idle: _Idle | None
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """:meth:`_selected` of the batch, from the largest pre-activations of each input."""
        x, weight, bias = self._map(input)
        count = min(math.ceil(float(current(self.k)) * CANDIDATES), self.latents)
        watch = None if idle is None else (lambda where, scores, best: idle.see(scores))
        while True:
            best, indices = best_of_product(x, weight, count, bias, adjust=self._adjust(), watch=watch)
            chosen = [self._code(best, share) for share in shares]
            # an input whose candidates were all selected may have more of them
            short = chosen[-1][..., -1].any().float()
            if count == self.latents or not self._shared().reduce([], [short])[0]:
                break
            count, watch = min(2 * count, self.latents), None
        self._follow(best, chosen[0])
        counts = [(y != 0).sum(-1) for y in chosen]  # those of an input come first
        m = int(counts[-1].max()) if counts[-1].numel() else 0
        values = self._values(self._dot(x, weight, indices[..., :m], bias, best[..., :m]))
        if idle is not None:
            idle.take(x.shape[:-1], lambda known, at: self._dot(x, weight, at, bias, known))
        near, far = chosen[0][..., :m], chosen[-1][..., :m]
        used = self._are_used(values) & (near > 0.5)
        self._count(used, indices[..., :m])
        start = int(counts[0].min()) if counts[0].numel() else 0
        parts = [
            (values * near, indices[..., :m]),
            ((values * (far - near))[..., start:], indices[..., start:m]),
        ][: len(shares)]
        stretch = self._stretch(torch.cat([at for _, at in parts], -1))
        stretches = stretch.split([at.shape[-1] for _, at in parts], -1)
        return [(w * each, at) for (w, at), each in zip(parts, stretches, strict=True)], used

    def _lowest(self, x: Tensor) -> Tensor:
        """The smallest entry that all processes have, 0-dim; ∞ if they have none."""
        lowest = x.amin() if x.numel() else x.new_full((), math.inf)
        return -self._shared().reduce([], [-lowest])[0].to(x.dtype)

    def _best(self, input: Tensor, count: int, idle: _Idle | None = None) -> tuple[Tensor, Tensor]:
        """The largest activations of each input and their indices, (..., count) each.

        ``idle`` sees the scores.
        """
        x, weight, bias = self._map(input)
        watch = None if idle is None else (lambda where, scores, best: idle.see(scores))
        best, indices = best_of_product(x, weight, count, bias, adjust=self._adjust(), watch=watch)
        values = self._dot(x, weight, indices, bias, best)
        if idle is not None:
            idle.take(x.shape[:-1], lambda known, at: self._dot(x, weight, at, bias, known))
        return self._values(values), indices

    def _adjust(self) -> Callable[[Any, Tensor], Tensor] | None:
        """What :func:`best_of_product` chooses by, where it is not the products themselves."""
        return (lambda where, products: products.abs_()) if self.signed else None

    def _dot(self, x: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, best: Tensor) -> Tensor:
        """The pre-activations at indices, of which ``best`` are the scores."""
        return selected_dot(x, weight, indices, bias, known=None if self.signed else best)

    def _count_of(self, wider: float) -> int:
        """``wider`` times k latents, as a whole number."""
        return min(math.floor(float(current(self.k)) * wider + 0.5), self.latents)

    def _activations(self, input: Tensor) -> Tensor:
        x, weight, bias = self._map(input)
        with without_autocast(input.device):
            a = product(x, weight.mT) + bias if x.dtype != bias.dtype else F.linear(x, weight, bias)
            for _ in range(self.refine):
                scores = self._scores(a)
                code = self._values(a) * masks.topk_mask(scores, available(current(self.k), scores))
                rest = at_least_single(input) - at_least_single(self._decode(code))
                a = code + F.linear(GAIN * rest, self.raw_encoder.to(rest.dtype))
        return a

    def _check(self, input: Tensor) -> None:
        check_width(input, self.in_features, self)
        check_dtype(input, self.shift, self)

    def _map(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The (input, weight, bias) of the linear map that computes the pre-activations."""
        self._check(input)
        if input.dtype == self.shift.dtype != _single(input.dtype):
            # in float32 from the product on, of which near ties decide, and of numbers that are not rounded
            encoder = self._encoder()
            return input, encoder, self.encoder_bias - product(self._bias(), encoder.mT)
        centred = in_dtype(input - self._bias(), _single(self.shift.dtype))
        weight, bias = (in_dtype(x, centred.dtype) for x in (self.raw_encoder, self.encoder_bias))
        return GAIN * centred, weight, bias  # the gain goes to the inputs, which are fewer

    def _size(self, a: Tensor, k: Scalar | None = None) -> Scalar:
        """How many latents a whole batch gets, k for each input."""
        k, inputs, shared = current(self.k) if k is None else k, a[..., 0].numel(), self._shared()
        if shared.here and not torch.compiler.is_compiling():
            return k * inputs
        # a number would fix the size of the batch in a trace
        (total,) = shared.reduce([torch.full((), inputs, dtype=wide_dtype(a.device), device=a.device)])
        return k * total

    def _are_used(self, values: Tensor) -> Tensor:
        """Which entries of a code are used."""
        return (values.abs() if self.signed else values) > 0

    @staticmethod
    def _uses(scores: Tensor, y: Tensor) -> Tensor:
        return (scores > 0) & (y > 0.5)

    def _count(self, used: Tensor, indices: Tensor | None = None) -> None:
        """Count the inputs since a latent was used, (..., n), or (..., m) at indices."""
        if not counts(self):
            return
        if indices is None:
            ever = used.reshape(-1, self.latents).any(0)
        else:  # the sizes do not depend on values: what is not used counts for a latent after the last one
            places = indices.masked_fill(~used, self.latents).flatten()
            ever = used.new_zeros(self.latents + 1).scatter_(0, places, True)[:-1]
        inputs, shared = math.prod(used.shape[:-1]), self._shared()
        if shared.here:
            idle = self.idle + inputs
        else:
            of_all, times = shared.reduce([torch.full((), inputs, device=used.device), ever.long()])
            idle, ever = self.idle + of_all.long(), times > 0
        self._steady.write(self.idle, idle.masked_fill(ever, 0))

    def _cure(self) -> str:
        return f"{super()._cure()}, set hard=True, or leave out tau"

    def _apply(self, fn: Any, recurse: bool = True) -> TopKSAE:
        before = {name: self._buffers[name] for name in ("lengths", "threshold")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            after = self._buffers[name]
            if value is not None and after is not None and after.dtype != _single(after.dtype):
                # half precision has too few digits for a moving mean, and for what keeps lengths as they are
                setattr(self, name, value.to(after.device, _single(after.dtype)))
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self._lent.tell(type(self).__name__)
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names = [name for name in EFFECTIVE if prefix + name in state_dict]
        given = {name: state_dict.pop(prefix + name) for name in names}  # up to khot 0.1
        state_dict.update({prefix + name: value for name, value in self._raw(given).items()})
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
        elif level.shape != self.threshold.shape and level.shape in ((1,), (self.latents,)):
            self.threshold = self.threshold.new_empty(level.shape)  # one for each latent, or one for all
        for name in (prefix + "lengths", prefix + "threshold"):
            if isinstance(state_dict.get(name), Tensor):  # assign=True would take it as it is
                state_dict[name] = at_least_single(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        soft = {} if self.tau is None else {"tau": self.tau, "cdf": self.cdf}
        out = {} if self.out_shift is None else {"out_features": self.out_features}
        values = describe(in_features=self.in_features, latents=self.latents, k=self.k, **out, **soft)
        values += ", hard=True" * self.hard + ", batch=True" * self.batch + ", signed=True" * self.signed
        values += f", refine={self.refine}" if self.refine else ""
        values += "" if self.skip is None else ", skip=True"
        values += "" if self.revive == REVIVE else f", revive={self.revive}"
        values += "" if self.centre else ", centre=False"
        return f"{values}, widths={self.widths}" if self.widths else values


def _single(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def _lengths(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=_single(rows.dtype))


def _ratio(lengths: Tensor, rows: Tensor) -> Tensor:
    """What gives rows these lengths; 0 of a row of zeros, which has no direction, and so no gradient."""
    own = _lengths(rows)
    number = torch.finfo(own.dtype)
    # what is less than tiny becomes ∞, in one operation
    return lengths / F.threshold(own, number.tiny * (1 - number.eps), math.inf)


def _check_kind(kind: Loss, name: str) -> None:
    if kind not in get_args(Loss):
        raise unknown(name, kind, get_args(Loss))


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
