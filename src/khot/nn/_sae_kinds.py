"""The sparse autoencoders of other libraries that select: how they keep their tensors, and what their layers,
configurations and folders say of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "Kind", "Layout", "Scaling", "Told", "of_configuration", "of_folder", "of_layer", "save"]

Layout = Literal["saelens", "dictionary_learning"]
Names = tuple[tuple[str, str, bool], ...]  # our name, theirs, and whether theirs is the transpose

MATRICES: Names = (
    ("encoder", "W_enc", True),
    ("encoder_bias", "b_enc", False),
    ("decoder", "W_dec", False),
    ("bias", "b_dec", False),
)
# They do not subtract a bias from the inputs, and b_dec is that of the outputs.
TRANSCODER: Names = (
    ("encoder", "W_enc", True),
    ("encoder_bias", "b_enc", False),
    ("decoder", "W_dec", False),
    ("out_bias", "b_dec", False),
)
SKIP = ("skip", "W_skip", False)
LINEAR: Names = (
    ("encoder", "encoder.weight", False),
    ("encoder_bias", "encoder.bias", False),
    ("decoder", "decoder.weight", True),
    ("bias", "b_dec", False),
)

# Files in the folders that the libraries save.
LENS_CONFIGURATION, LENS_STATE = "cfg.json", "sae_weights.safetensors"
LENS_FACTOR, LENS_WHITENING = "activation_scaler.json", "activation_whitening.safetensors"
CONFIGURATION, STATE = "config.json", "ae.pt"
# SAELens reads configurations without a version as those of version 5, which had other names.
LENS_VERSION = "6.0.0"
SCALED = "expected_average_only_in", "covariance_whitening"  # outside of the layer, and alike for all inputs


@dataclass(frozen=True)
class Kind:
    """A sparse autoencoder of another library.

    Attributes:
        name: what its library calls it: an architecture of SAELens, or a class of dictionary_learning.
        layout: the library.
        names: of its tensors.
        threshold: the name of what pre-activations have to exceed to be selected; empty if the k largest are.
        each: whether every latent has a threshold of its own.
        others: what else its state may have.
    """

    name: str
    layout: Layout
    names: Names
    threshold: str = ""
    each: bool = False
    others: tuple[str, ...] = ()

    @property
    def ours(self) -> set[str]:
        """Our names of its tensors."""
        return {our for our, _, _ in self.names}

    @property
    def transcodes(self) -> bool:
        return "out_bias" in self.ours


KINDS = {
    kind.name: kind
    for kind in (
        Kind("topk", "saelens", MATRICES),
        Kind("jumprelu", "saelens", MATRICES, "threshold", each=True),
        Kind("jumprelu_transcoder", "saelens", TRANSCODER, "threshold", each=True),
        Kind("jumprelu_skip_transcoder", "saelens", (*TRANSCODER, SKIP), "threshold", each=True),
        Kind("batchtopk", "saelens", MATRICES, "topk_threshold"),
        Kind("matryoshka_batchtopk", "saelens", MATRICES, "topk_threshold"),
        Kind("AutoEncoderTopK", "dictionary_learning", LINEAR, others=("k", "threshold")),
        Kind("BatchTopKSAE", "dictionary_learning", LINEAR, "threshold", others=("k",)),
        Kind(
            "MatryoshkaBatchTopKSAE",
            "dictionary_learning",
            MATRICES,
            "threshold",
            others=("k", "group_sizes"),
        ),
        Kind("JumpReluAutoEncoder", "dictionary_learning", MATRICES, "threshold", each=True),
    )
}


class Scaling(NamedTuple):
    """The inputs that a layer gets, (x − mean) @ matrix, and its reconstructions, z @ inverse + mean."""

    mean: Tensor
    matrix: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Told:
    """What is known of a layer, besides its state; None: nothing.

    Attributes:
        kind: what it is.
        k: how many latents an input gets.
        features, latents, outputs: its sizes.
        widths: of nested reconstructions, without that of all latents.
        rescales: whether it selects by activations times the lengths of the rows of its decoder.
        subtracts: whether it subtracts the bias of its decoder from the inputs.
        scaling: what happens to the inputs and the reconstructions outside of it.
    """

    kind: Kind
    k: float | None = None
    features: int | None = None
    latents: int | None = None
    outputs: int | None = None
    widths: tuple[int, ...] = ()
    rescales: bool | None = None
    subtracts: bool | None = None
    scaling: Scaling | None = None


def of_configuration(configuration: Any, scaling: Scaling | None = None) -> Told:
    """What a configuration says: one of SAELens or dictionary_learning, or a dict that was made of it."""
    if not isinstance(configuration, Mapping):
        configuration = configuration.to_dict()
    if "architecture" in configuration:
        return _of_saelens(configuration, scaling)
    trainer = configuration.get("trainer", configuration)
    if not isinstance(trainer, Mapping) or "dict_class" not in trainer:
        raise ValueError(
            "a configuration must have 'architecture', as those of SAELens from version 6 on, or "
            "'dict_class', as those of dictionary_learning, but this one has only "
            f"{', '.join(map(repr, configuration))}"
        )
    kind = _kind(trainer["dict_class"], "dictionary_learning")
    sizes = trainer.get("group_sizes") or ()
    return Told(
        kind,
        k=trainer.get("k"),
        features=trainer.get("activation_dim"),
        latents=trainer.get("dict_size"),
        widths=_sums(sizes),
        rescales=False,
        subtracts=not kind.each,  # as the library loads a JumpReluAutoEncoder
    )


def _of_saelens(configuration: Mapping[str, Any], scaling: Scaling | None) -> Told:
    kind = _kind(configuration["architecture"], "saelens")
    inputs = configuration.get("normalize_activations", "none")
    if inputs != "none" and kind.transcodes:
        raise ValueError(
            f"normalize_activations must be 'none' in the configuration of a transcoder, but it is {inputs!r}"
        )
    if inputs in SCALED and scaling is None:
        raise ValueError(
            f"the inputs must be scaled, as normalize_activations={inputs!r} in the configuration says, "
            "but by what is not there: take the folder of a checkpoint, which has it, or call the layer's "
            "fold_activation_norm_scaling_factor or fold_activation_whitening first"
        )
    if inputs != "none" and inputs not in SCALED:
        raise ValueError(
            f"normalize_activations must be one of 'none', {', '.join(map(repr, SCALED))} in the "
            f"configuration, but it is {inputs!r}, which scales each input in its own way, as no TopKSAE does"
        )
    reshaped = configuration.get("reshape_activations", "none")
    if reshaped != "none":
        raise ValueError(
            f"reshape_activations must be 'none' in the configuration, but it is {reshaped!r}: flatten the "
            "last two dims of the inputs yourself, and pass the state with a configuration that says 'none'"
        )
    latents = configuration.get("d_sae")
    return Told(
        kind,
        k=None if kind.each else configuration.get("k"),
        features=configuration.get("d_in"),
        latents=latents,
        outputs=configuration.get("d_out") if kind.transcodes else None,
        widths=tuple(width for width in configuration.get("matryoshka_widths") or () if width != latents),
        rescales=False if kind.each else configuration.get("rescale_acts_by_decoder_norm"),
        subtracts=configuration.get("apply_b_dec_to_input"),
        scaling=scaling if inputs in SCALED else None,
    )


def of_layer(layer: nn.Module) -> Told:
    """What a layer of SAELens or dictionary_learning says."""
    configuration = getattr(layer, "cfg", None)
    if hasattr(configuration, "to_dict"):
        return of_configuration(configuration)
    named = [KINDS[each.__name__] for each in type(layer).__mro__ if each.__name__ in KINDS]
    if not named:
        raise TypeError(
            "a layer must be of SAELens, with its configuration as cfg, or of dictionary_learning, one of "
            f"{_listed('dictionary_learning')}, but got {type(layer).__name__}"
        )
    groups = getattr(layer, "group_sizes", None)
    if groups is not None and layer.active_groups != len(groups):
        raise ValueError(
            f"active_groups must be {len(groups)}, the number of groups of the layer, but it is "
            f"{layer.active_groups}"
        )
    return Told(
        named[0],
        features=getattr(layer, "activation_dim", None),
        latents=getattr(layer, "dict_size", None),
        widths=() if groups is None else _sums(groups.tolist()),
        rescales=False,
        subtracts=getattr(layer, "apply_b_dec_to_input", True),
    )


def of_folder(path: Path) -> tuple[Mapping[str, Tensor], Told]:
    """The state in a folder that one of the libraries saved, on the CPU, and what its configuration says."""
    if (path / LENS_CONFIGURATION).is_file():
        told = of_configuration(_json(path / LENS_CONFIGURATION), _scaling(path))
        return _safetensors().load_file(path / LENS_STATE), told
    if (path / CONFIGURATION).is_file():
        told = of_configuration(_json(path / CONFIGURATION))
        return torch.load(path / STATE, map_location="cpu", weights_only=True), told
    raise ValueError(
        f"a folder must have {LENS_CONFIGURATION} and {LENS_STATE}, as SAELens saves them, or "
        f"{CONFIGURATION} and {STATE}, as dictionary_learning does, but got {str(path)!r}"
    )


def _scaling(path: Path) -> Scaling | None:
    """What happens to the inputs before the layer of a checkpoint, if its folder has that."""
    if (path / LENS_WHITENING).is_file():
        found = _safetensors().load_file(path / LENS_WHITENING)
        return Scaling(found["mean"], found["matrix"], found["inverse_matrix"])
    if not (path / LENS_FACTOR).is_file():
        return None
    factor = _json(path / LENS_FACTOR)["scaling_factor"]
    if factor is None:
        return None
    scale = torch.tensor(factor, dtype=torch.float64).reshape(1, 1)
    return Scaling(torch.zeros(1, dtype=torch.float64), scale, 1 / scale)


def save(folder: Path, kind: Kind, state: dict[str, Tensor], k: int) -> None:
    """Write a state and its configuration, so that the library can load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    latents, outputs = _shape(kind, state)
    if kind.layout == "saelens":
        configuration: dict[str, Any] = {
            "architecture": kind.name,
            "d_in": state["W_enc"].shape[0],
            "d_sae": latents,
            "dtype": str(state["W_dec"].dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": not kind.transcodes,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": {"sae_lens_version": LENS_VERSION},
        }
        if kind.transcodes:
            configuration["d_out"] = outputs
        if not kind.threshold:
            configuration |= {"k": k, "rescale_acts_by_decoder_norm": False}
        _safetensors().save_file({name: x.cpu() for name, x in state.items()}, folder / LENS_STATE)
        text, name = json.dumps(configuration), LENS_CONFIGURATION
    else:
        trainer = {"dict_class": kind.name, "activation_dim": outputs, "dict_size": latents, "k": k}
        torch.save({name: x.cpu() for name, x in state.items()}, folder / STATE)
        text, name = json.dumps({"trainer": trainer}), CONFIGURATION
    (folder / name).write_text(text, encoding="utf-8")


def _shape(kind: Kind, state: Mapping[str, Tensor]) -> tuple[int, int]:
    """The numbers of latents and of outputs of a state."""
    ((name, flipped),) = ((their, flipped) for our, their, flipped in kind.names if our == "decoder")
    rows, columns = state[name].shape
    return (columns, rows) if flipped else (rows, columns)


def _kind(name: Any, layout: Layout) -> Kind:
    name = getattr(name, "__name__", name)
    if name not in KINDS or KINDS[name].layout != layout:
        raise ValueError(
            f"the autoencoder must select latents, as {_listed(layout)} do, but the configuration says "
            f"{name!r}"
        )
    return KINDS[name]


def _listed(layout: Layout) -> str:
    return ", ".join(repr(kind.name) for kind in KINDS.values() if kind.layout == layout)


def _sums(sizes: Any) -> tuple[int, ...]:
    """Where groups of latents end, but for the last."""
    return tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "folders of SAELens need the package safetensors: pip install safetensors"
        ) from error
