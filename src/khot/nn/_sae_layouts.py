"""Sparse autoencoders from other libraries, and for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from khot._core import arguments
from khot._core.names import unknown
from khot._core.precision import at_least_single, widen
from khot.nn._sae_kinds import (
    KINDS,
    Kind,
    Layout,
    Scaling,
    Told,
    of_configuration,
    of_folder,
    of_layer,
    save,
)
from khot.nn.sae import TopKSAE

__all__ = ["sae_from_layout", "sae_to_layout"]

NONE = -1.0  # the threshold of a layer of dictionary_learning that has none yet


def sae_to_layout(
    sae: TopKSAE, layout: Layout | Any, *, folder: str | Path | None = None
) -> dict[str, Tensor]:
    """The state dict that another library has for the same sparse autoencoder.

    | layout                  | by default          | with `batch`   | with a threshold for each latent |
    |-------------------------|---------------------|----------------|----------------------------------|
    | `"saelens"`             | architecture `topk` | `jumprelu`     | `jumprelu`                       |
    | `"dictionary_learning"` | `AutoEncoderTopK`   | `BatchTopKSAE` | `JumpReluAutoEncoder`            |

    A transcoder has the architecture `jumprelu_transcoder` of SAELens, or `jumprelu_skip_transcoder`, for
    which it needs ``batch``.

    Instead of the name, a layer of one of these libraries gets the state, or a configuration says which layer
    it is for. The layer of the other library computes what this one computes in eval mode. With the name of a
    library, this is a layer for inference that has the library's defaults and our k. A layer or a
    configuration may say ``apply_b_dec_to_input=False``; the bias of the encoder then makes up for that.
    What only training needs is left out: the schedule of k, and how long latents have been idle.

    Args:
        sae: the autoencoder.
        layout: the name of the layout, or a layer of the library, or its configuration (an object or a dict).
        folder: None, or where to save the state and a configuration, with the name of a layout: SAELens reads
            such a folder with ``SAE.load_from_disk``, and dictionary_learning with
            ``utils.load_dictionary``. That of SAELens needs the package safetensors.

    Returns:
        Copies of the tensors, under the names and in the shapes of the layout.

    Raises:
        ValueError: an unknown layout, an autoencoder with ``batch`` that has no threshold yet, or a layer
            that cannot compute the same: one that selects otherwise, has other sizes, another k or one
            threshold where we have several, scales its inputs, or rescales its activations by lengths that
            differ; an autoencoder with ``signed`` or ``refine``, or a transcoder without ``batch``, which
            these libraries do not have.
        TypeError: something else than a :class:`khot.nn.TopKSAE`, or than a layout.
        ImportError: safetensors is missing.

    Example:
        >>> state = khot.nn.sae_to_layout(khot.nn.TopKSAE(16, 64, k=4), "saelens")
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'W_enc': (16, 64), 'b_enc': (64,), 'W_dec': (64, 16), 'b_dec': (16,)}
    """
    if not isinstance(sae, TopKSAE):
        raise TypeError(f"sae must be a khot.nn.TopKSAE, but got {type(sae).__name__}")
    if sae.signed:
        raise ValueError("sae must have signed=False: none of these layouts has latents that are negative")
    if sae.refine:
        raise ValueError("sae must have refine=0: the encoders of these layouts are linear maps")
    layer = layout if isinstance(layout, nn.Module) else None
    told = _target(sae, layout)
    if folder is not None and not isinstance(layout, str):
        raise ValueError(
            "folder must not be given with a layer or a configuration: the library saves its layers itself"
        )
    with torch.no_grad():
        state = _state(sae, told)
        if layer is not None:
            own = layer.state_dict()
            layer.load_state_dict(own | {name: x for name, x in state.items() if name != "group_sizes"})
    if folder is not None:
        save(Path(folder), told.kind, state, sae._count_of(1.0))
    return state


def sae_from_layout(
    source: Mapping[str, Tensor] | nn.Module | str | Path,
    layout: Layout | Any = None,
    *,
    k: float | None = None,
    batch: bool | None = None,
    rescale_acts_by_decoder_norm: bool | None = None,
    apply_b_dec_to_input: bool | None = None,
) -> TopKSAE:
    """A sparse autoencoder from another library.

    In eval mode it computes what the layer of the other library computes. Layers, folders and configurations
    tell all that this takes, except the k of layers with a threshold for each latent. What a state dict does
    not tell has to be given; what is given must not contradict what is told, except k. These are read:

    - of SAELens the architectures `topk`, `batchtopk`, `matryoshka_batchtopk`, `jumprelu`,
      `jumprelu_transcoder` and `jumprelu_skip_transcoder`;
    - of dictionary_learning `AutoEncoderTopK`, `BatchTopKSAE`, `MatryoshkaBatchTopKSAE` and
      `JumpReluAutoEncoder`.

    Args:
        source: a layer of one of these libraries; or a folder that it saved, a checkpoint among them; or a
            state dict, a mapping from names to tensors.
        layout: with a state dict, "saelens" or "dictionary_learning", or better the configuration of the
            layer, an object or a dict. Nothing, or the name, with a layer or a folder, which have their own.
        k: how many latents per input. States of dictionary_learning have it, unless each latent has a
            threshold. Where there are thresholds, eval mode does not depend on it; the loss does.
        batch: whether the layer selects by a threshold. The names in a state tell it, except that in
            dictionary_learning both ``BatchTopKSAE`` (True) and ``AutoEncoderTopK`` (False) have a threshold;
            there it need not be given if the threshold is −1, which stands for none yet.
        rescale_acts_by_decoder_norm: for SAELens, whether the layer selects by the activations times the
            lengths of the rows of its decoder: True by default while it trains, and False in what it saves
            for inference. It need not be given where it makes no difference: where all rows have the same
            length, which is 1 with ``topk_threshold``, or each latent has a threshold.
        apply_b_dec_to_input: whether the layer subtracts the bias of its decoder from its inputs: True by
            default in SAELens, and False for the layers of Gemma Scope and for ``JumpReluAutoEncoder``. It
            need not be given where that bias is 0, nor for the other layers of dictionary_learning.

    Returns:
        The layer, in train mode, with copies of the tensors, on their device and in their dtype. Where the
        other layer rescales, the lengths are multiplied into the encoder, and the rows of the decoder have
        length 1. Where it does not subtract the bias, the bias of the encoder makes up for that. Where a
        checkpoint of SAELens scales or whitens the inputs, this is multiplied into all tensors. A threshold
        for each latent stays that until the layer is trained.

    Raises:
        ValueError: an unknown layout, a name that is missing or unknown, tensors whose shapes do not fit, no
            k, an argument that has to be given or contradicts what is known, a layer that does not select, or
            one that scales each input in its own way.
        TypeError: another source, or something else than a floating-point tensor under one of the names.
        ImportError: a folder of SAELens needs the package safetensors.

    Example:
        >>> state = {"encoder.weight": torch.randn(64, 16), "encoder.bias": torch.zeros(64)}
        >>> state |= {"decoder.weight": torch.randn(16, 64), "b_dec": torch.zeros(16), "k": torch.tensor(4)}
        >>> khot.nn.sae_from_layout(state, "dictionary_learning")
        TopKSAE(in_features=16, latents=64, k=4)
    """
    flags = {
        "batch": batch,
        "rescale_acts_by_decoder_norm": rescale_acts_by_decoder_norm,
        "apply_b_dec_to_input": apply_b_dec_to_input,
    }
    arguments.check_flags(**{name: flag for name, flag in flags.items() if flag is not None})
    state, told = _source(source, layout, batch)
    kind = told.kind
    _agreed("batch", batch, bool(kind.threshold))
    ours = _tensors(state, told)
    k = _k(k, told, state)
    rescales = _agreed("rescale_acts_by_decoder_norm", rescale_acts_by_decoder_norm, told.rescales)
    subtracts = _agreed("apply_b_dec_to_input", apply_b_dec_to_input, told.subtracts)
    with torch.no_grad():
        if kind.layout == "saelens" and not kind.each and _rescales(ours["decoder"], kind, rescales):
            lengths = ours["decoder"].norm(dim=-1)
            ours["encoder"] = ours["encoder"] * lengths.unsqueeze(-1)
            ours["encoder_bias"] = ours["encoder_bias"] * lengths
            ours["decoder"] = ours["decoder"] / lengths.where(lengths > 0, 1).unsqueeze(-1)
        features = ours["encoder"].shape[1]
        if kind.transcodes:
            ours["bias"] = ours["encoder"].new_zeros(features)
        if not _subtracts(ours["bias"], subtracts):
            ours["encoder_bias"] = _shifted(ours["encoder_bias"], ours["encoder"], ours["bias"])
        if told.scaling is not None:
            ours |= _unscaled(ours, told.scaling)
        latents, outputs = ours["decoder"].shape
        made: dict[str, Any] = {"device": ours["decoder"].device, "dtype": ours["decoder"].dtype}
        if kind.transcodes:
            made |= {"out_features": outputs, "skip": "skip" in ours}
        widths = told.widths or None
        sae = TopKSAE(features, latents, k, batch=bool(kind.threshold), widths=widths, **made)
        if kind.threshold:
            ours["threshold"] = _threshold(state, kind, latents)
        sae.load_state_dict(ours, strict=False)
    return sae


def _source(source: Any, layout: Any, batch: bool | None) -> tuple[Mapping[str, Tensor], Told]:
    """A state dict, and what is known of the layer that it is of."""
    if isinstance(source, Mapping):
        if layout is None:
            raise ValueError(
                "layout must be given with a state dict: the configuration of its layer, or one of "
                f"{_layouts()}"
            )
        return source, _of_state(source, layout, batch) if isinstance(layout, str) else _configured(layout)
    if isinstance(source, nn.Module):
        return _checked(source.state_dict(), of_layer(source), layout)
    if isinstance(source, (str, Path)):
        return _checked(*of_folder(Path(source)), layout)
    raise TypeError(
        "source must be a layer of SAELens or dictionary_learning, a folder that one of them saved, or a "
        f"state dict, a mapping from names to tensors, but got {type(source).__name__}"
    )


def _checked(state: Mapping[str, Tensor], told: Told, layout: Any) -> tuple[Mapping[str, Tensor], Told]:
    """What a layer or a folder says, which a layout must not contradict."""
    if layout is not None and layout != told.kind.layout:
        raise ValueError(
            f"layout must be None or {told.kind.layout!r} with this layer or folder, which has a "
            f"configuration of its own, but got {layout!r}"
        )
    return state, told


def _of_state(state: Mapping[str, Tensor], layout: str, batch: bool | None) -> Told:
    """What a state dict says without a configuration."""
    _check_layout(layout)
    if layout == "saelens":
        name = "batchtopk" if "topk_threshold" in state else "jumprelu" if "threshold" in state else "topk"
        if name == "jumprelu" and "W_skip" in state:
            name = "jumprelu_skip_transcoder"
        elif name == "jumprelu" and _entry(state, "W_dec").shape[1:] != _entry(state, "W_enc").shape[:1]:
            name = "jumprelu_transcoder"
        kind = KINDS[name]
        return Told(kind, rescales=False if kind.each else None, subtracts=False if kind.transcodes else None)
    if "group_sizes" in state:
        sizes = torch.as_tensor(state["group_sizes"]).tolist()
        widths = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
        return Told(KINDS["MatryoshkaBatchTopKSAE"], widths=widths, rescales=False, subtracts=True)
    if "W_enc" in state:
        return Told(KINDS["JumpReluAutoEncoder"], rescales=False)
    if batch is None and "threshold" in state and bool((_entry(state, "threshold") >= 0).any()):
        raise ValueError(
            "batch must be given, because in the layout 'dictionary_learning' BatchTopKSAE (batch=True) and "
            "AutoEncoderTopK (batch=False) both have a threshold, and select differently"
        )
    return Told(KINDS["BatchTopKSAE" if batch else "AutoEncoderTopK"], rescales=False, subtracts=True)


def _configured(configuration: Any) -> Told:
    if not (isinstance(configuration, Mapping) or hasattr(configuration, "to_dict")):
        raise TypeError(
            f"layout must be one of {_layouts()}, or a configuration of one of these libraries, but got "
            f"{type(configuration).__name__}"
        )
    return of_configuration(configuration)


def _tensors(state: Mapping[str, Tensor], told: Told) -> dict[str, Tensor]:
    """Our tensors in a state, checked."""
    kind, ours = told.kind, {}
    for our, their, flipped in kind.names:
        x = _entry(state, their)
        dims = 1 if "bias" in our else 2
        if x.dim() != dims:
            raise ValueError(f"state[{their!r}] must have {dims} dims, but got shape {tuple(x.shape)}")
        ours[our] = x.detach().mT if flipped else x.detach()
    unknown = set(state) - {their for _, their, _ in kind.names} - {kind.threshold, *kind.others}
    if unknown:
        raise ValueError(
            f"state must be that of a {kind.name} of {kind.layout}, but it has other names, too: "
            f"{', '.join(map(repr, sorted(unknown)))}"
        )
    latents, outputs = ours["decoder"].shape
    features = ours["encoder"].shape[1] if kind.transcodes else outputs
    sizes = [("latents", latents, told.latents), ("features", features, told.features)]
    for name, size, wanted in (*sizes, ("outputs", outputs, told.outputs)):
        if wanted is not None and size != wanted:
            raise ValueError(f"state must have {wanted} {name}, as its configuration says, but it has {size}")
    shapes = {
        "encoder": (latents, features),
        "encoder_bias": (latents,),
        "decoder": (latents, outputs),
        "bias": (features,),
        "out_bias": (outputs,),
        "skip": (outputs, features),
    }
    for our, their, flipped in kind.names:
        shape = shapes[our]
        if tuple(ours[our].shape) != shape:
            raise ValueError(
                f"state[{their!r}] must have shape {shape[::-1] if flipped else shape} for {latents} latents "
                f"of {features} features, but got {tuple(state[their].shape)}"
            )
    return ours


def _k(k: float | None, told: Told, state: Mapping[str, Tensor]) -> float:
    if k is not None:
        return k
    if "k" in state:
        return int(state["k"])
    if told.k is not None:
        return told.k
    where = (
        "a layer with a threshold for each latent does not say how many an input has on average, as the "
        "loss of TopKSAE needs"
        if told.kind.each
        else f"state has none in the layout {told.kind.layout!r}"
    )
    raise ValueError(f"k must be given, because {where}")


def _agreed(name: str, given: bool | None, told: bool | None) -> bool | None:
    """An argument that must not contradict what is known."""
    if None not in (given, told) and given != told:
        raise ValueError(f"{name} must be {told} or not be given, because the layer is so, but got {given}")
    return given if told is None else told


def _rescales(decoder: Tensor, kind: Kind, known: bool | None) -> bool:
    """Whether a layer of SAELens multiplies its activations by the lengths of the rows."""
    if known is not None:
        return known
    lengths = _lengths(decoder)
    if _alike(lengths, 1.0 if kind.threshold else lengths.mean(), decoder.dtype):
        return False
    raise ValueError(
        "rescale_acts_by_decoder_norm must be given, because it changes the result where the rows of "
        f"state['W_dec'] have lengths from {lengths.min():.4g} to {lengths.max():.4g}: pass what the "
        "configuration of SAELens has, by default True while it trains, and False once it was saved for "
        "inference, or pass the configuration itself as layout"
    )


def _lengths(decoder: Tensor) -> Tensor:
    return widen(decoder.detach()).norm(dim=-1)


def _alike(lengths: Tensor, target: float | Tensor, dtype: torch.dtype) -> bool:
    # rows that were divided by their lengths are of length 1 up to a rounding of the lengths and of the rows
    tolerance = 2 * torch.finfo(dtype).eps + 1e-6
    return bool(((lengths - target).abs() <= tolerance * target).all())


def _subtracts(bias: Tensor, known: bool | None) -> bool:
    """Whether a layer subtracts the bias of its decoder from the inputs."""
    if known is not None or not bias.any():
        return known is not False
    raise ValueError(
        "apply_b_dec_to_input must be given, because state['b_dec'] is not 0: pass what the configuration "
        "has, by default True in SAELens, and False for Gemma Scope and for JumpReluAutoEncoder, or pass the "
        "configuration itself as layout"
    )


def _shifted(encoder_bias: Tensor, encoder: Tensor, shift: Tensor) -> Tensor:
    """The bias of an encoder whose inputs are smaller by a shift than they were."""
    # in float64, because what is added may be far larger than the sum
    return (encoder_bias.double() + encoder.double() @ shift.double()).to(encoder_bias.dtype)


def _unscaled(ours: dict[str, Tensor], scaling: Scaling) -> dict[str, Tensor]:
    """The tensors for inputs before a scaling, of those for inputs after it."""
    mean, matrix, inverse = (x.double().to(ours["bias"].device) for x in scaling)

    def times(x: Tensor, matrix: Tensor) -> Tensor:
        return x.double() * matrix if matrix.numel() == 1 else x.double() @ matrix

    folded = {
        "encoder": times(ours["encoder"], matrix.mT),
        "decoder": times(ours["decoder"], inverse),
        "bias": times(ours["bias"].unsqueeze(0), inverse).squeeze(0) + mean,
    }
    return {name: x.to(ours[name].dtype) for name, x in folded.items()}


def _threshold(state: Mapping[str, Tensor], kind: Kind, latents: int) -> Tensor:
    """The smallest activations that are selected: one, or one for each latent."""
    levels = at_least_single(_entry(state, kind.threshold).detach()).reshape(-1)
    if levels.numel() != (latents if kind.each else 1):
        raise ValueError(
            f"state[{kind.threshold!r}] must have {latents if kind.each else 1} entries, but got shape "
            f"{tuple(state[kind.threshold].shape)}"
        )
    levels = levels.to(at_least_single(state["b_dec"]).dtype)
    if bool((levels == levels[0]).all()):
        levels = levels[:1]
    # the others select what exceeds their threshold, and this layer what is not below its own
    above = torch.nextafter(levels, torch.full_like(levels, math.inf)).clamp(min=0)
    return torch.where(levels == NONE, levels, above) if kind.layout == "dictionary_learning" else above


def _target(sae: TopKSAE, layout: Any) -> Told:
    """What is known of the layer that a state is for, which has to be able to compute what sae computes."""
    level = sae.threshold
    if level is not None and bool((level < 0).any()):
        raise ValueError("sae must have a threshold: with batch=True it gets one in its first training step")
    several = level is not None and not bool((level == level[0]).all())
    if isinstance(layout, str):
        _check_layout(layout)
        names = {
            "saelens": ("topk", "jumprelu", "jumprelu"),
            "dictionary_learning": ("AutoEncoderTopK", "BatchTopKSAE", "JumpReluAutoEncoder"),
        }[layout]
        kind = KINDS[names[2 if several else 1 if sae.batch else 0]]
        if sae.out_shift is not None:
            if layout != "saelens" or not sae.batch:
                raise ValueError(
                    "layout must be 'saelens' and sae must have batch=True for a transcoder, but got "
                    f"{layout!r} and batch={sae.batch}"
                )
            kind = KINDS["jumprelu_transcoder" if sae.skip is None else "jumprelu_skip_transcoder"]
        without = kind.transcodes or kind.name == "JumpReluAutoEncoder"
        return Told(kind, rescales=False, subtracts=not without)
    told = of_layer(layout) if isinstance(layout, nn.Module) else _configured(layout)
    kind = told.kind
    if kind.transcodes != (sae.out_shift is not None) or ("skip" in kind.ours) != (sae.skip is not None):
        raise ValueError(
            "layout must be a transcoder, with a skip or not, if and only if sae is one, but got a "
            f"{kind.name} for {sae}"
        )
    if bool(kind.threshold) != sae.batch:
        how = "a threshold" if kind.threshold else "the k largest"
        raise ValueError(
            f"layout must select as sae with batch={sae.batch} does, but a {kind.name} takes {how}"
        )
    if several and not kind.each:
        raise ValueError(
            f"layout must have a threshold for each latent, as sae has, but a {kind.name} has only one"
        )
    if told.scaling is not None:
        raise ValueError("layout must not scale the inputs, because sae does not")
    given: dict[str, tuple[float | None, float]] = {
        "features": (told.features, sae.in_features),
        "latents": (told.latents, sae.latents),
        "outputs": (told.outputs, sae.out_features),
    }
    if not (kind.threshold or kind.others):  # which keeps its k in its configuration
        given["k"] = told.k, sae._count_of(1.0)
    for name, (theirs, own) in given.items():
        if theirs is not None and theirs != own:
            raise ValueError(f"layout must have {own} as its {name}, as sae does, but it has {theirs}")
    if told.rescales:
        lengths = _lengths(sae.decoder)
        if not _alike(lengths, 1.0 if kind.threshold else lengths.mean(), sae.decoder.dtype):
            raise ValueError(
                "layout must not have rescale_acts_by_decoder_norm=True, because the rows of sae.decoder "
                f"have lengths from {lengths.min():.4g} to {lengths.max():.4g}"
            )
    return told


def _state(sae: TopKSAE, told: Told) -> dict[str, Tensor]:
    kind = told.kind
    ours = {our: getattr(sae, our).detach().clone() for our, _, _ in kind.names}
    if told.subtracts is False:
        ours["encoder_bias"] = _shifted(ours["encoder_bias"], ours["encoder"], -sae.bias)
        if "skip" in ours:
            ours["out_bias"] = _shifted(ours["out_bias"], ours["skip"], -sae.bias)
    state = {their: ours[our].mT.contiguous() if flipped else ours[our] for our, their, flipped in kind.names}
    level = torch.tensor(NONE)
    if sae.threshold is not None:
        # the others select what exceeds their threshold, and this layer what is not below its own
        level = torch.nextafter(sae.threshold, torch.full_like(sae.threshold, -math.inf))
        level = level.expand(sae.latents).clone() if kind.each else level[0].clone()
    if kind.threshold or "threshold" in kind.others:
        state[kind.threshold or "threshold"] = level
    if "k" in kind.others:
        state["k"] = torch.tensor(sae._count_of(1.0), dtype=torch.int32)
    if "group_sizes" in kind.others:
        ends = (0, *told.widths, sae.latents)
        state["group_sizes"] = torch.tensor(ends).diff()
    return state


def _check_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise unknown("layout", layout, get_args(Layout))


def _layouts() -> str:
    return ", ".join(map(repr, get_args(Layout)))


def _entry(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(
            f"state must have {name!r}, but it has only {', '.join(map(repr, state)) or 'nothing'}"
        )
    arguments.check_input(state[name], f"state[{name!r}]")
    return state[name]
