"""Sparse autoencoders in the state dicts of other libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from khot._core import arguments
from khot.nn.sae import TopKSAE

__all__ = ["sae_from_layout", "sae_to_layout"]

Layout = Literal["saelens", "dictionary_learning"]

# Our name, theirs, and whether theirs is the transpose.
NAMES: dict[Layout, tuple[tuple[str, str, bool], ...]] = {
    "saelens": (
        ("encoder", "W_enc", True),
        ("encoder_bias", "b_enc", False),
        ("decoder", "W_dec", False),
        ("bias", "b_dec", False),
    ),
    "dictionary_learning": (
        ("encoder", "encoder.weight", False),
        ("encoder_bias", "encoder.bias", False),
        ("decoder", "decoder.weight", True),
        ("bias", "b_dec", False),
    ),
}

# What else states have there.
OTHERS: dict[Layout, set[str]] = {
    "saelens": {"threshold", "topk_threshold"},
    "dictionary_learning": {"k", "threshold"},
}


def sae_to_layout(sae: TopKSAE, layout: Layout) -> dict[str, Tensor]:
    """The state dict that another library has for the same sparse autoencoder.

    | layout                  | for                                                                  |
    |-------------------------|----------------------------------------------------------------------|
    | `"saelens"`             | SAELens: its `topk` architecture; with `batch`, `jumprelu`           |
    | `"dictionary_learning"` | dictionary_learning: `AutoEncoderTopK`; with `batch`, `BatchTopKSAE` |

    The layer of the other library computes what this one computes in eval mode. For SAELens this is a layer
    for inference, ``TopKSAE`` or ``JumpReLUSAE``, whose configuration has its defaults, among them
    ``apply_b_dec_to_input=True``, ``normalize_activations="none"`` and
    ``rescale_acts_by_decoder_norm=False``, and our k. Its ``TopKTrainingSAE`` has
    ``rescale_acts_by_decoder_norm=True`` by default, and needs False, too, unless the rows of our decoder
    have the same length. What only training needs is left out: the schedule of k, and how long latents have
    been idle.

    Args:
        sae: the autoencoder.
        layout: the name of the layout.

    Returns:
        Copies of the tensors, under the names and in the shapes of the layout.

    Raises:
        ValueError: an unknown layout, or an autoencoder with ``batch`` that has no threshold yet.
        TypeError: something else than a :class:`khot.nn.TopKSAE`.

    Example:
        >>> state = khot.nn.sae_to_layout(khot.nn.TopKSAE(16, 64, k=4), "saelens")
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'W_enc': (16, 64), 'b_enc': (64,), 'W_dec': (64, 16), 'b_dec': (16,)}
    """
    if not isinstance(sae, TopKSAE):
        raise TypeError(f"sae must be a khot.nn.TopKSAE, but got {type(sae).__name__}")
    names = _names(layout)
    ours = {our: getattr(sae, our).detach().clone() for our, _, _ in names}
    state = {their: ours[our].mT.contiguous() if flipped else ours[our] for our, their, flipped in names}
    level = None
    if sae.threshold is not None:
        if sae.threshold < 0:
            raise ValueError(
                "sae must have a threshold: with batch=True it gets one in its first training step"
            )
        # the others select what is above their threshold, and this layer what is not below its own
        level = torch.nextafter(sae.threshold, torch.full_like(sae.threshold, -math.inf))
    if layout == "saelens":
        return state if level is None else state | {"threshold": level.repeat(sae.latents)}
    state["k"] = torch.tensor(sae._count_of(1.0), dtype=torch.int32)
    state["threshold"] = torch.tensor(-1.0) if level is None else level.squeeze(0)
    return state


def sae_from_layout(
    state: Mapping[str, Tensor],
    layout: Layout,
    *,
    k: float | None = None,
    batch: bool | None = None,
    rescale_acts_by_decoder_norm: bool | None = None,
) -> TopKSAE:
    """A sparse autoencoder from the state dict of another library.

    In eval mode it computes what the layer of the other library computes. The layouts are those of
    :func:`sae_to_layout`. What a state dict does not tell has to be given:

    Args:
        state: the state dict: a mapping from names to tensors.
        layout: the name of the layout.
        k: how many latents per input. ``"dictionary_learning"`` has it in the state.
        batch: whether the other layer selects by its threshold. ``"saelens"`` tells it by the name
            ``threshold``, one for each latent, which have to be equal, or ``topk_threshold`` while it trains.
            ``"dictionary_learning"`` has a threshold for both of its layers: give True for ``BatchTopKSAE``
            and False for ``AutoEncoderTopK``, unless the threshold is −1, which stands for none.
        rescale_acts_by_decoder_norm: for ``"saelens"``, whether its layer multiplies the activations by the
            lengths of the rows of its decoder, as its configuration says: True by default while it trains,
            and False in what it saves for inference. It makes no difference, and need not be given, if all
            rows have the same length, with a threshold length 1; nor if there is a ``threshold``, which only
            layers for inference have.

    Returns:
        The layer, in train mode, with copies of the tensors, on their device and in their dtype. Where the
        other layer rescales, the lengths are multiplied into the encoder, and the rows of the decoder have
        length 1.

    Raises:
        ValueError: an unknown layout, a name that is missing or unknown, tensors whose shapes do not fit, no
            k, thresholds that differ, or an argument that has to be given.
        TypeError: no mapping, or something else than a floating-point tensor under one of the names.

    Example:
        >>> state = {"encoder.weight": torch.randn(64, 16), "encoder.bias": torch.zeros(64)}
        >>> state |= {"decoder.weight": torch.randn(16, 64), "b_dec": torch.zeros(16), "k": torch.tensor(4)}
        >>> khot.nn.sae_from_layout(state, "dictionary_learning")
        TopKSAE(in_features=16, latents=64, k=4)
    """
    flags = {"batch": batch, "rescale_acts_by_decoder_norm": rescale_acts_by_decoder_norm}
    arguments.check_flags(**{name: flag for name, flag in flags.items() if flag is not None})
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping from names to tensors, but got {type(state).__name__}; load a file "
            "first, with torch.load or safetensors.torch.load_file, and take the state_dict() of a layer"
        )
    names = _names(layout)
    if rescale_acts_by_decoder_norm is not None and layout != "saelens":
        raise ValueError("rescale_acts_by_decoder_norm must not be given for a layout other than 'saelens'")
    ours = {}
    for our, their, flipped in names:
        x = _entry(state, their)
        dims = 1 if "bias" in our else 2
        if x.dim() != dims:
            raise ValueError(f"state[{their!r}] must have {dims} dims, but got shape {tuple(x.shape)}")
        ours[our] = x.mT if flipped else x
    unknown = set(state) - {their for _, their, _ in names} - OTHERS[layout]
    if unknown:
        raise ValueError(
            f"state must be of a top-k autoencoder in the layout {layout!r}, but it has other names, too: "
            f"{', '.join(map(repr, sorted(unknown)))}"
        )
    latents, features = ours["decoder"].shape
    wanted = {"encoder": (latents, features), "encoder_bias": (latents,), "bias": (features,)}
    for our, their, flipped in names:
        shape = wanted.get(our, (latents, features))
        if tuple(ours[our].shape) != shape:
            raise ValueError(
                f"state[{their!r}] must have shape {shape[::-1] if flipped else shape} for {latents} latents "
                f"of {features} features, but got {tuple(state[their].shape)}"
            )
    if k is None and layout == "dictionary_learning" and "k" in state:
        k = int(state["k"])
    if k is None:
        raise ValueError(f"k must be given, because state has none in the layout {layout!r}")
    if batch is None:
        batch = _selects_by_threshold(state, layout)
    if layout == "saelens" and _rescales(ours["decoder"], state, batch, rescale_acts_by_decoder_norm):
        lengths = ours["decoder"].norm(dim=-1)
        ours["encoder"] = ours["encoder"] * lengths.unsqueeze(-1)
        ours["encoder_bias"] = ours["encoder_bias"] * lengths
        ours["decoder"] = ours["decoder"] / lengths.where(lengths > 0, 1).unsqueeze(-1)
    sae = TopKSAE(
        features, latents, k, batch=batch, device=ours["decoder"].device, dtype=ours["decoder"].dtype
    )
    with torch.no_grad():
        sae.load_state_dict(ours, strict=False)
        if sae.threshold is not None:
            name = "topk_threshold" if "topk_threshold" in state else "threshold"
            levels = _entry(state, name).to(sae.threshold).reshape(-1)
            if bool((levels != levels[0]).any()):
                raise ValueError(
                    f"state[{name!r}] must have equal entries, because TopKSAE has one threshold"
                )
            level = torch.nextafter(levels[:1], torch.full_like(levels[:1], math.inf))
            sae.threshold.copy_(torch.where(levels[:1] == -1, levels[:1], level.clamp(min=0)))
    return sae


def _selects_by_threshold(state: Mapping[str, Tensor], layout: Layout) -> bool:
    """Whether the layer with this state has one, where the state tells it."""
    if layout == "saelens":
        return "threshold" in state or "topk_threshold" in state
    if "threshold" in state and bool((_entry(state, "threshold") >= 0).any()):
        raise ValueError(
            "batch must be given, because in the layout 'dictionary_learning' BatchTopKSAE (batch=True) and "
            "AutoEncoderTopK (batch=False) both have a threshold, and select differently"
        )
    return False


def _rescales(decoder: Tensor, state: Mapping[str, Tensor], batch: bool, given: bool | None) -> bool:
    """Whether the layer of SAELens with this state multiplies its activations by the lengths of the rows."""
    if "threshold" in state:
        return False
    if given is not None:
        return given
    lengths = decoder.detach().double().norm(dim=-1)
    target = 1.0 if batch else lengths.mean()
    # rows that were divided by their lengths are of length 1 up to a rounding of the lengths and of the rows
    tolerance = 2 * torch.finfo(decoder.dtype).eps + 1e-6
    if bool(((lengths - target).abs() <= tolerance * target).all()):
        return False
    raise ValueError(
        "rescale_acts_by_decoder_norm must be given, because it changes the result where the rows of "
        f"state['W_dec'] have lengths from {lengths.min():.4g} to {lengths.max():.4g}: pass what the "
        "configuration of SAELens has, by default True while it trains, and False once it was saved for "
        "inference"
    )


def _names(layout: Layout) -> tuple[tuple[str, str, bool], ...]:
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(map(repr, NAMES))}, but got {layout!r}")
    return NAMES[layout]


def _entry(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(
            f"state must have {name!r}, but it has only {', '.join(map(repr, state)) or 'nothing'}"
        )
    arguments.check_input(state[name], f"state[{name!r}]")
    return state[name]
