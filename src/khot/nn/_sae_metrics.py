"""How good a sparse autoencoder is: what it leaves unexplained, and what a model loses by it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._core import arguments
from khot._core.precision import wide_dtype
from khot.nn._modes import in_mode
from khot.nn.sae import TopKSAE

__all__ = [
    "Activations",
    "batches_of",
    "check_sae",
    "is_whole",
    "loss_recovered",
    "rows_of",
    "share",
    "unexplained",
]

ROOM = 2**22  # pre-activations at a time

Pair = tuple[Tensor, Tensor]
Activations = Tensor | Pair | Iterable[Tensor] | Iterable[Sequence[Tensor]]


def check_sae(sae: Any) -> None:
    if not isinstance(sae, TopKSAE):
        raise TypeError(f"sae must be a khot.nn.TopKSAE, but got {type(sae).__name__}")


def batches_of(activations: Any, sae: TopKSAE) -> Iterator[Pair]:
    """The batches of an iterable as :func:`rows_of`, on the device of the autoencoder."""
    if not isinstance(activations, Iterable):
        raise TypeError(
            f"activations must be a tensor or an iterable of tensors, but got {type(activations).__name__}"
        )
    for batch in activations:
        x, y = rows_of(batch, sae, "give")
        here = x.to(sae.shift.device)
        yield here, here if y is x else y.to(sae.shift.device)


def rows_of(activations: Any, sae: TopKSAE, how: str = "be") -> Pair:
    """Activations as rows (N, in_features), and what the outputs are compared with: the same, or a
    transcoder's targets (N, out_features)."""
    if sae.out_shift is not None:
        if not isinstance(activations, (tuple, list)) or len(activations) != 2:
            raise TypeError(
                f"activations must {how} pairs of inputs and targets for a TopKSAE with out_features or "
                f"skip, but got {type(activations).__name__}"
            )
        x, y = (
            _rows(each, size)
            for each, size in zip(activations, (sae.in_features, sae.out_features), strict=True)
        )
        if len(x) != len(y):
            raise ValueError(f"activations must have as many targets as inputs, {len(x)}, but got {len(y)}")
        return x, y
    if not isinstance(activations, Tensor) and how == "give":
        raise TypeError(
            f"activations must give tensors, but gave a {type(activations).__name__}; of the tuples of a "
            "DataLoader, pass on the tensor: (x for x, *_ in loader)"
        )
    x = _rows(activations, sae.in_features)
    return x, x


def _rows(activations: Any, size: int) -> Tensor:
    arguments.check_input(activations, "activations")
    if not activations.dim() or activations.shape[-1] != size:
        raise ValueError(f"activations must have shape (..., {size}), but got {tuple(activations.shape)}")
    return activations.detach().reshape(-1, size)


def is_whole(activations: Any, sae: TopKSAE) -> bool:
    """Whether it is all there is, and not an iterable of batches."""
    one = sae.out_shift is None
    return isinstance(activations, Tensor if one else tuple)


def share(rest: Tensor, spread: Tensor) -> Tensor:
    """What is left, as a share of how far vectors are spread; NaN of vectors that are all the same."""
    return (rest / spread).where(spread > 0, math.nan)


def unexplained(sae: TopKSAE, activations: Activations) -> Tensor:
    """The share of the variance of activations that an autoencoder leaves unexplained, in eval mode.

        Σ ‖x − reconstruction‖² / Σ ‖x − mean‖²

    where the mean is that of these activations. Vectors that were not trained on tell more. The autoencoder
    is left as it was, each of its parts in its own mode.

    Args:
        sae: the autoencoder.
        activations: (..., in_features), of which it takes a part at a time, or an iterable of such batches.
            For a transcoder, a tuple of inputs and targets, or an iterable of pairs of these; x above is then
            the target.

    Returns:
        A 0-dim tensor, in float64 if the device has it: 0 if all is explained, 1 for the mean alone, and more
        if that is worse; NaN if all activations are the same, or there are none.

    Raises:
        ValueError, TypeError: an argument out of range.

    Example:
        >>> sae = khot.nn.TopKSAE(16, 64, k=4)
        >>> khot.nn.unexplained(sae, torch.randn(100, 16)).shape
        torch.Size([])
    """
    check_sae(sae)
    parts: Any = activations
    if is_whole(activations, sae):
        size = max(1, ROOM // sae.latents)
        inputs, targets = rows_of(activations, sae)
        parts = inputs.split(size)
        if targets is not inputs:
            parts = zip(parts, targets.split(size), strict=True)
    device = sae.shift.device
    wide: dict[str, Any] = {"dtype": wide_dtype(device), "device": device}
    rest, spread, count = torch.zeros((), **wide), torch.zeros((), **wide), 0
    origin, mean = torch.zeros(sae.out_features, **wide), torch.zeros(sae.out_features, **wide)
    with in_mode(False, sae), torch.no_grad():
        for given, x in batches_of(parts, sae):
            out, x = sae(given).to(**wide), x.to(**wide)
            rest = rest + (x - out).square().sum()
            if not len(x):
                continue
            if not count:
                origin = x[0]  # all that is equal to it is exactly 0 from here on
            x = x - origin
            count, new = count + len(x), x.mean(0)
            step = new - mean
            spread = spread + (x - new).square().sum() + step.square().sum() * len(x) * (1 - len(x) / count)
            mean = mean + step * (len(x) / count)
    return share(rest, spread)


def loss_recovered(
    model: nn.Module,
    hook: str | nn.Module,
    sae: TopKSAE,
    tokens: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Tensor:
    """How much of a model's loss is recovered when reconstructions take the place of its activations.

        (zeroed − reconstructed) / (zeroed − original)

    where these are the losses with zeros, with reconstructions, and with the activations themselves. Model
    and autoencoder are left as they were, each of their parts in its own mode.

    Args:
        model: any module; it is called as ``model(tokens)``, in eval mode.
        hook: the submodule whose output the autoencoder reconstructs, or its name in
            ``model.named_modules()``. Of a tuple it reconstructs the first entry. A transcoder gets the
            first argument of this submodule, and computes its output.
        sae: the autoencoder, of activations of this output's last dim.
        tokens: what the model is called with; by default (batch, length) tokens of a language model.
        loss: a function of the model's output and of the tokens. By default the cross-entropy of the next
            token, from the logits (batch, length, vocabulary) that the model returns, alone, as ``logits`` of
            an object, or first of a tuple.

    Returns:
        A 0-dim tensor: 1 if nothing is lost, and 0 if the reconstructions are as bad as zeros.

    Raises:
        ValueError, TypeError: an argument out of range.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9))
        >>> sae = khot.nn.TopKSAE(16, 64, k=4)
        >>> khot.nn.loss_recovered(model, "1", sae, torch.randint(9, (4, 20))).shape
        torch.Size([])
    """
    check_sae(sae)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but got {type(model).__name__}")
    place = _place(model, hook)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be None or a function, but got {type(loss).__name__}")
    judge = _next_token if loss is None else loss
    transcodes = sae.out_shift is not None
    changes: tuple[Callable[[Any, Tensor], Tensor] | None, ...] = (
        lambda given, y: torch.zeros_like(y),
        lambda given, y: sae(given[0] if transcodes else y).to(y.dtype),
        None,
    )
    found = []
    with in_mode(False, model), in_mode(False, sae), torch.no_grad():
        for change in changes:
            handle = None if change is None else place.register_forward_hook(_replace(change))
            try:
                found.append(judge(model(tokens), tokens))
            finally:
                if handle is not None:
                    handle.remove()
    zeroed, reconstructed, original = found
    return (zeroed - reconstructed) / (zeroed - original)


def _place(model: nn.Module, hook: Any) -> nn.Module:
    modules = dict(model.named_modules())
    if isinstance(hook, str):
        if hook not in modules:
            names = ", ".join(map(repr, itertools.islice(modules, 1, 9)))
            raise ValueError(f"hook must name a submodule of model, such as {names}, but got {hook!r}")
        return modules[hook]
    if not any(module is hook for module in modules.values()):
        raise ValueError(f"hook must be a submodule of model or its name, but got {type(hook).__name__}")
    return hook


def _replace(change: Callable[[Any, Tensor], Tensor]) -> Callable[[nn.Module, Any, Any], Any]:
    def replaced(module: nn.Module, given: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(given, output[0]), *output[1:])
        return change(given, output)

    return replaced


def _next_token(output: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
