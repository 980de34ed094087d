"""Sparse autoencoders of SAELens and dictionary_learning themselves, trained a little, there and back.

The packages are the extra `sae`; without them these tests are skipped.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from khot.nn import TopKSAE, sae_from_layout, sae_to_layout

D, N, K, STEPS, BATCH = 16, 48, 4, 300, 64

# what importing and training with the packages warns of is theirs
pytestmark = pytest.mark.filterwarnings("ignore")


def vectors(count: int, seed: int = 0) -> Tensor:
    """Neither centred nor scaled."""
    directions = torch.randn(24, D, generator=torch.Generator().manual_seed(9))
    random = torch.Generator().manual_seed(seed)
    which = torch.rand(count, 24, generator=random).topk(3).indices
    code = torch.zeros(count, 24).scatter(1, which, torch.rand(count, 3, generator=random) + 0.5)
    return 2 * code @ directions + 1.5 + 0.02 * torch.randn(count, D, generator=random)


def batches() -> Iterator[Tensor]:
    return (vectors(BATCH, seed) for seed in itertools.count(1))


X = vectors(200)


def same(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-5 of the largest number."""
    scale = want.detach().abs().max()
    torch.testing.assert_close(got / scale, want.detach() / scale, rtol=0, atol=1e-5)


def lens_trained(folder: Path, architecture: str, **options: Any) -> Any:
    """A layer of SAELens after some steps of its trainer, which leaves a checkpoint in the folder."""
    lens = pytest.importorskip("sae_lens")
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    made = getattr(lens, f"{architecture}TrainingSAE")
    torch.manual_seed(0)
    layer = made(getattr(lens, f"{architecture}TrainingSAEConfig")(d_in=D, d_sae=N, **options))
    config = SAETrainerConfig(
        total_training_samples=STEPS * BATCH,
        train_batch_size_samples=BATCH,
        lr=3e-3,
        lr_end=3e-3,
        dead_feature_window=50,
        checkpoint_path=str(folder),
        n_checkpoints=1,
        logger=LoggingConfig(log_to_wandb=False),
    )
    trainer = SAETrainer(config, layer, batches())
    trainer.activation_scaler.estimate_scaling_factor = quick(
        trainer.activation_scaler.estimate_scaling_factor
    )
    trainer.activation_scaler.estimate_whitening = quick(trainer.activation_scaler.estimate_whitening)
    return trainer.fit().eval()


def quick(estimate: Any) -> Any:
    return lambda **given: estimate(**given | {"n_batches_for_norm_estimate": 20})


OPTIONS: dict[str, dict[str, Any]] = {
    "TopK": {"k": K},
    "TopK, plain": {"k": K, "rescale_acts_by_decoder_norm": False, "apply_b_dec_to_input": False},
    "BatchTopK": {"k": K},
    "MatryoshkaBatchTopK": {"k": K, "matryoshka_widths": [12, 24, N]},
    "JumpReLU": {"l0_coefficient": 0.05, "apply_b_dec_to_input": False},
    "JumpReLU, subtracted": {"l0_coefficient": 0.05},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_layers_of_saelens(case: str, tmp_path: Path) -> None:
    lens, architecture = pytest.importorskip("sae_lens"), case.partition(",")[0]
    layer = lens_trained(tmp_path, architecture, **OPTIONS[case])
    layer.save_inference_model(tmp_path / "inference")
    used = lens.SAE.load_from_disk(tmp_path / "inference")  # which is what people use
    with torch.no_grad():
        want, code = used(X), used.encode(X)
    # it has learned something
    assert (want - X).square().sum() < 0.3 * (X - X.mean(0)).square().sum()

    k = {} if "k" in OPTIONS[case] else {"k": K}
    needs_k = {"k": K} if architecture != "TopK" else {}
    read = {
        "layer": sae_from_layout(layer, **k),
        "state and configuration": sae_from_layout(layer.state_dict(), layer.cfg, **k),
        "configuration as a dict": sae_from_layout(layer.state_dict(), layer.cfg.to_dict(), **k),
        "inference": sae_from_layout(used, **needs_k),
        "folder": sae_from_layout(tmp_path / "inference", **needs_k),
    }
    layer.save_model(tmp_path / "training")
    read["folder of training"] = sae_from_layout(tmp_path / "training", **k)
    for sae in read.values():
        sae.eval()
        assert sae.batch == (architecture != "TopK")
        same(sae(X), want)
        same(sae.encode(X), code)
    if architecture == "MatryoshkaBatchTopK":
        assert read["layer"].widths == (12, 24)

    # and back: into the layer for inference, into a new one by its configuration, and into a folder
    sae = read["layer"]
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.zero_()
    state = sae_to_layout(sae, used)
    same(used(X), want)
    fresh = type(used)(dataclasses.replace(used.cfg))
    fresh.load_state_dict(state)
    same(fresh(X), want)
    sae_to_layout(sae, "saelens", folder=tmp_path / "ours")
    same(lens.SAE.load_from_disk(tmp_path / "ours")(X), want)


@pytest.mark.parametrize("case", ["TopK", "BatchTopK", "JumpReLU"])
@pytest.mark.parametrize("how", ["expected_average_only_in", "covariance_whitening"])
def test_checkpoints_of_saelens_on_scaled_inputs(case: str, how: str, tmp_path: Path) -> None:
    """What scales the inputs lies beside the layer until its training ends; the result has it folded in."""
    lens = pytest.importorskip("sae_lens")
    layer = lens_trained(tmp_path, case, **OPTIONS[case], normalize_activations=how)
    (checkpoint,) = (path for path in tmp_path.iterdir() if not path.name.startswith("final"))
    from sae_lens.training.activation_scaler import ActivationScaler

    scaler = ActivationScaler()
    scaler.load(checkpoint / "activation_scaler.json")
    middle = getattr(lens, f"{case}TrainingSAE").load_from_disk(checkpoint)
    assert middle.cfg.normalize_activations == how
    with pytest.raises(ValueError, match="take the folder of a checkpoint"):
        sae_from_layout(middle, k=K)
    middle.save_inference_model(tmp_path / "inference")
    used = lens.SAE.load_from_disk(tmp_path / "inference")
    with torch.no_grad():
        want = scaler.unscale(used(scaler.scale(X)))
    same(sae_from_layout(checkpoint, k=K).eval()(X), want)
    # the trainer has folded it into the layer that it returns
    layer.save_inference_model(tmp_path / "end")
    if case == "TopK":
        same(sae_from_layout(layer).eval()(X), lens.SAE.load_from_disk(tmp_path / "end")(X))


def test_layers_of_saelens_in_training_from_ours() -> None:
    lens = pytest.importorskip("sae_lens")
    torch.manual_seed(0)
    for batch, architecture in ((False, "TopK"), (True, "BatchTopK")):
        sae = fitted(TopKSAE(D, N, K, batch=batch))
        made = getattr(lens, f"{architecture}TrainingSAE")
        layer = made(getattr(lens, f"{architecture}TrainingSAEConfig")(d_in=D, d_sae=N, k=K))
        sae_to_layout(sae, layer)  # it rescales; rows of length 1 allow it
        sae.eval()
        if batch:
            assert sae.threshold is not None
            torch.testing.assert_close(layer.topk_threshold.float(), sae.threshold[0])
            same(sae_from_layout(layer).eval()(X), sae(X))
        else:
            same(layer(X), sae(X))
    with pytest.raises(ValueError, match="select as sae with batch=True"):
        sae_to_layout(sae, lens.TopKSAE(lens.TopKSAEConfig(d_in=D, d_sae=N, k=K)))
    with pytest.raises(ValueError, match="must select latents"):
        sae_from_layout(lens.StandardSAE(lens.StandardSAEConfig(d_in=D, d_sae=N)), k=K)


def fitted(sae: TopKSAE) -> TopKSAE:
    optimizer = torch.optim.Adam(sae.parameters(), lr=3e-3)
    for x in itertools.islice(batches(), STEPS):
        optimizer.zero_grad()
        sae.loss(x).backward()
        optimizer.step()
    return sae


def learned(name: str) -> tuple[Any, dict[str, Any]]:
    """A layer of dictionary_learning after some steps of its trainer, and its configuration."""
    pytest.importorskip("dictionary_learning")
    import importlib

    file, trainer, options = TRAINERS[name]
    module = importlib.import_module(f"dictionary_learning.trainers.{file}")
    common: dict[str, Any] = {"steps": STEPS, "activation_dim": D, "dict_size": N, "layer": 0, "lm_name": ""}
    common |= {"lr": 3e-3, "seed": 0, "device": "cpu"}
    made = getattr(module, trainer)(**common, **options)
    for step, x in zip(range(STEPS), batches(), strict=False):
        made.update(step, x)
    return made.ae.eval(), made.config


LEVELS = {"k": K, "threshold_start_step": 20, "threshold_beta": 0.95, "warmup_steps": 10}
TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AutoEncoderTopK": ("top_k", "TopKTrainer", LEVELS),
    "BatchTopKSAE": ("batch_top_k", "BatchTopKTrainer", LEVELS),
    "MatryoshkaBatchTopKSAE": (
        "matryoshka_batch_top_k",
        "MatryoshkaBatchTopKTrainer",
        LEVELS | {"group_fractions": [0.25, 0.25, 0.5]},
    ),
    "JumpReluAutoEncoder": (
        "jumprelu",
        "JumpReluTrainer",
        {"target_l0": 4.0, "sparsity_penalty": 0.1, "warmup_steps": 10, "sparsity_warmup_steps": 50},
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_layers_of_dictionary_learning(name: str, tmp_path: Path) -> None:
    import json

    layer, configuration = learned(name)
    with torch.no_grad():
        want, code = layer(X), layer.encode(X)
    assert (want - X).square().sum() < 0.3 * (X - X.mean(0)).square().sum()
    torch.save(layer.state_dict(), tmp_path / "ae.pt")
    (tmp_path / "config.json").write_text(json.dumps({"trainer": configuration}), encoding="utf-8")
    k = {"k": K} if name == "JumpReluAutoEncoder" else {}
    read = {
        "layer": sae_from_layout(layer, **k),
        "folder": sae_from_layout(tmp_path, **k),
        "state and configuration": sae_from_layout(layer.state_dict(), configuration, **k),
        "the whole configuration": sae_from_layout(layer.state_dict(), {"trainer": configuration}, **k),
    }
    for sae in read.values():
        sae.eval()
        assert sae.batch == (name != "AutoEncoderTopK") and sae.k == K
        same(sae(X), want)
        same(sae.encode(X), code)
    if name == "MatryoshkaBatchTopKSAE":
        assert read["layer"].widths == read["folder"].widths == (12, 24)
    told = {
        "AutoEncoderTopK": {"batch": False},
        "BatchTopKSAE": {"batch": True},
        "MatryoshkaBatchTopKSAE": {},
        "JumpReluAutoEncoder": {"k": K, "apply_b_dec_to_input": False},
    }[name]
    same(sae_from_layout(layer.state_dict(), "dictionary_learning", **told).eval()(X), want)

    sae = read["layer"]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    sae_to_layout(sae, layer)
    same(layer(X), want)
    if name != "MatryoshkaBatchTopKSAE":  # which is a BatchTopKSAE once it is trained
        sae_to_layout(sae, "dictionary_learning", folder=tmp_path / "ours")
        found = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))
        assert found["trainer"]["dict_class"] == name
        made = type(layer).from_pretrained(tmp_path / "ours" / "ae.pt")
        same(made(X), want)


def test_a_layer_in_which_groups_are_switched_off() -> None:
    pytest.importorskip("dictionary_learning")
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE

    layer = MatryoshkaBatchTopKSAE(D, N, K, [12, 12, 24])
    layer.active_groups = 2
    with pytest.raises(ValueError, match="active_groups must be 3"):
        sae_from_layout(layer)


def test_an_autoencoder_of_dictionary_learning_without_a_selection() -> None:
    dictionary = pytest.importorskip("dictionary_learning")
    layer: nn.Module = dictionary.AutoEncoder(D, N)
    with pytest.raises(TypeError, match="but got AutoEncoder"):
        sae_from_layout(layer)
