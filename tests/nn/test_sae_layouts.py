"""Sparse autoencoders in the layouts of other libraries: the same output before and after."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawn import floats
from khot.nn import Anneal, TopKSAE, sae_from_layout, sae_to_layout

D, N, K = 5, 12, 3
State = dict[str, Tensor]


class SAELens(nn.Module):
    """What SAELens computes with its defaults, from its tensors; with ``rescale`` while it trains."""

    def __init__(self, k: int | None, rescale: bool = False) -> None:
        super().__init__()
        self.rescale = rescale
        self.W_enc, self.b_enc = nn.Parameter(floats(D, N)), nn.Parameter(floats(N, seed=1))
        self.W_dec, self.b_dec = nn.Parameter(floats(N, D, seed=2)), nn.Parameter(floats(D, seed=3))
        self.k = k
        if k is None:
            self.threshold = nn.Parameter(torch.full((N,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        a = (x - self.b_dec) @ self.W_enc + self.b_enc
        if self.rescale:
            a = a * self.W_dec.norm(dim=-1)
        if self.k is None:
            code = a.relu() * (a > self.threshold)
        else:
            best = a.topk(self.k)
            code = torch.zeros_like(a).scatter(-1, best.indices, best.values.relu())
        if self.rescale:
            code = code / self.W_dec.norm(dim=-1)
        return code @ self.W_dec + self.b_dec


class DictionaryLearning(nn.Module):
    """What dictionary_learning computes, from its tensors."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.batch = batch
        self.encoder, self.decoder = nn.Linear(D, N), nn.Linear(N, D, bias=False)
        self.b_dec = nn.Parameter(floats(D, seed=3))
        self.register_buffer("k", torch.tensor(K, dtype=torch.int))
        self.register_buffer("threshold", torch.tensor(0.3 if batch else -1.0))

    def forward(self, x: Tensor) -> Tensor:
        a = self.encoder(x - self.b_dec).relu()
        if self.batch:
            return self.decoder(a * (a > self.threshold)) + self.b_dec
        best = a.topk(int(self.k))
        return self.decoder(torch.zeros_like(a).scatter(-1, best.indices, best.values)) + self.b_dec


LAYERS: dict[tuple[str, bool], Callable[[], nn.Module]] = {
    ("saelens", False): lambda: SAELens(K),
    ("saelens", True): lambda: SAELens(None),
    ("dictionary_learning", False): lambda: DictionaryLearning(False),
    ("dictionary_learning", True): lambda: DictionaryLearning(True),
}
TOLD: dict[tuple[str, bool], dict[str, bool]] = {  # what a state does not tell
    ("saelens", False): {"rescale_acts_by_decoder_norm": False, "apply_b_dec_to_input": True},
    ("saelens", True): {"apply_b_dec_to_input": True},
    ("dictionary_learning", False): {"batch": False},
    ("dictionary_learning", True): {"batch": True},
}
each = pytest.mark.parametrize("layout, batch", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def trained(batch: bool, k: float | Anneal = K, dtype: torch.dtype = torch.float32) -> TopKSAE:
    torch.manual_seed(0)
    sae = TopKSAE(D, N, k, batch=batch, dtype=dtype)
    sae.decoder = sae.decoder.detach() * torch.linspace(0.5, 2, N, dtype=dtype).unsqueeze(-1)
    with torch.no_grad():
        for i, parameter in enumerate(sae.parameters()):
            parameter += floats(*parameter.shape, seed=i) / 4
        sae(floats(20, D, seed=9).to(dtype))
    return sae.eval()


def assert_same(sae: TopKSAE, copy: TopKSAE) -> None:
    for name in ("encoder", "encoder_bias", "decoder", "bias", "threshold"):
        value, other = getattr(sae, name), getattr(copy, name)
        assert other is None if value is None else value.equal(other) and value.dtype == other.dtype
    assert copy.centred


@each
@each_dtype
def test_there(layout: str, batch: bool, dtype: torch.dtype) -> None:
    sae, other, x = trained(batch, dtype=dtype), LAYERS[layout, batch]().to(dtype), floats(50, D).to(dtype)
    state = sae_to_layout(sae, layout)
    assert {name: (v.shape, v.is_contiguous()) for name, v in state.items()} == {
        name: (v.shape, True) for name, v in other.state_dict().items()
    }
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), sae(x))


@each
@each_dtype
def test_and_back(layout: str, batch: bool, dtype: torch.dtype) -> None:
    other, x = LAYERS[layout, batch]().to(dtype), floats(50, D).to(dtype)
    sae = sae_from_layout(other.state_dict(), layout, k=K, **TOLD[layout, batch])
    assert sae.training and all(p.dtype == dtype and p.requires_grad for p in sae.parameters())
    torch.testing.assert_close(sae.eval()(x), other(x))
    for name, value in sae_to_layout(sae, layout).items():
        torch.testing.assert_close(value.to(dtype), other.state_dict()[name].to(dtype), rtol=0, atol=0)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_there_and_back_at_the_threshold_itself(layout: str, batch: bool, dtype: torch.dtype) -> None:
    """The activation that gave the threshold is selected by both, although theirs has to be exceeded. In half
    precision no number changes; but sums depend on their order there, so that outputs may."""
    sae = trained(batch, dtype=dtype)
    state = sae_to_layout(sae, layout)
    assert {x.dtype for name, x in state.items() if name not in ("k", "threshold")} == {dtype}
    copy = sae_from_layout(state, layout, k=K, **TOLD[layout, batch]).eval()
    assert_same(sae, copy)
    if batch and dtype != torch.bfloat16:
        a = sae._activations(floats(20, D, seed=9).to(dtype))
        level = sae_to_layout(sae, layout)["threshold"]
        assert sae.threshold is not None and (a == sae.threshold).any()
        assert (a > level).equal(a >= sae.threshold)
    with torch.no_grad():
        copy.raw_encoder.zero_()
    assert sae.encoder.any()  # nothing is shared


def in_training(batch: bool, length: float | None = None) -> tuple[State, nn.Module]:
    """A state of SAELens in training, with rows of its decoder of that length, and what it means."""
    other = SAELens(None if batch else K, rescale=True)
    with torch.no_grad():
        other.W_dec[3] = 0
        if length is not None:
            other.W_dec.copy_(floats(N, D, seed=2))
            other.W_dec.mul_(length / other.W_dec.norm(dim=-1, keepdim=True))
    state: State = other.state_dict()
    if batch:
        state["topk_threshold"] = state.pop("threshold")[0].double()
    return state, other


@pytest.mark.parametrize("batch", [False, True])
def test_a_state_of_saelens_in_training(batch: bool) -> None:
    state, other = in_training(batch)
    x = floats(50, D)
    with torch.no_grad():
        want = other(x)
    want = torch.where(want.isnan(), 0, want)
    with pytest.raises(ValueError, match=r"rescale_acts_by_decoder_norm must be given.*lengths from 0 to"):
        sae_from_layout(state, "saelens", k=K, apply_b_dec_to_input=True)
    state["W_dec"][3] = 1e-3
    told = {"k": K, "apply_b_dec_to_input": True}
    sae = sae_from_layout(state, "saelens", rescale_acts_by_decoder_norm=True, **told).eval()
    assert sae.batch == batch
    torch.testing.assert_close(sae(x), other(x))
    other.rescale = False
    plain = sae_from_layout(state, "saelens", rescale_acts_by_decoder_norm=False, **told).eval()
    torch.testing.assert_close(plain(x), other(x))
    assert (sae(x) - plain(x)).square().sum() > 0.01 * x.square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, length", [(False, 1), (False, 0.1), (True, 1)])
def test_where_rescaling_makes_no_difference_it_need_not_be_told(
    batch: bool, length: float, dtype: torch.dtype
) -> None:
    state, other = in_training(batch, length)
    rounded = {name: v.to(dtype) if name != "topk_threshold" else v for name, v in state.items()}
    sae = sae_from_layout(rounded, "saelens", k=K, apply_b_dec_to_input=True).eval()
    assert sae.encoder.equal(rounded["W_enc"].mT)
    if dtype == torch.float32:
        torch.testing.assert_close(sae(floats(50, D)), other(floats(50, D)))


def test_the_threshold_of_batch_top_k_in_training_counts_rescaled_activations() -> None:
    state, _ = in_training(True, length=0.5)
    with pytest.raises(ValueError, match="rescale_acts_by_decoder_norm must"):
        sae_from_layout(state, "saelens", k=K)


def test_a_row_of_zeros_stays_one() -> None:
    state, _ = in_training(False)
    told = {"rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": True}
    sae = sae_from_layout(state, "saelens", k=K, **told)
    assert (sae.decoder[3] == 0).all() and sae(floats(50, D)).isfinite().all()


def test_a_state_of_saelens_with_a_threshold_selects_by_it() -> None:
    """Layers with that name never rescale."""
    other, x = SAELens(None), floats(50, D)
    told = {"k": K, "apply_b_dec_to_input": True}
    sae = sae_from_layout(other.state_dict(), "saelens", **told).eval()
    assert sae.batch
    torch.testing.assert_close(sae(x), other(x))
    with pytest.raises(ValueError, match="rescale_acts_by_decoder_norm must be False"):
        sae_from_layout(other.state_dict(), "saelens", rescale_acts_by_decoder_norm=True, **told)


def test_a_state_of_dictionary_learning_with_a_threshold_has_to_be_told() -> None:
    for batch in (False, True):
        other, x = DictionaryLearning(batch), floats(50, D)
        other.threshold.fill_(0.3)
        with pytest.raises(ValueError, match=r"batch must be given.*BatchTopKSAE \(batch=True\)"):
            sae_from_layout(other.state_dict(), "dictionary_learning")
        sae = sae_from_layout(other.state_dict(), "dictionary_learning", batch=batch).eval()
        torch.testing.assert_close(sae(x), other(x))


def test_the_way_there_to_a_layer_in_training() -> None:
    """It must not rescale, or the rows of the decoder need one length."""
    sae, x = trained(False), floats(50, D)
    other = SAELens(K, rescale=False)
    other.load_state_dict(sae_to_layout(sae, "saelens"))
    torch.testing.assert_close(other(x), sae(x))
    with torch.no_grad():
        sae.decoder = 3 * sae.decoder / sae.decoder.norm(dim=-1, keepdim=True)
    other = SAELens(K, rescale=True)
    other.load_state_dict(sae_to_layout(sae, "saelens"))
    torch.testing.assert_close(other(x), sae(x))


def test_the_number_of_latents() -> None:
    state: State = DictionaryLearning(False).state_dict()
    assert sae_from_layout(state, "dictionary_learning").k == K
    assert sae_from_layout(state, "dictionary_learning", k=2).k == 2
    k = Anneal(6, 2, 2, "linear")
    sae = trained(False, k)
    for wanted in (6, 4, 2):
        got = sae_to_layout(sae, "dictionary_learning")["k"]
        assert got == wanted and got.dtype == torch.int32 and not got.dim()
        k.step()


def test_a_threshold_that_is_not_known_yet() -> None:
    state: State = DictionaryLearning(True).state_dict() | {"threshold": torch.tensor(-1.0)}
    sae = sae_from_layout(state, "dictionary_learning", batch=True)
    assert sae.threshold == -1
    for layout in ("saelens", "dictionary_learning"):
        with pytest.raises(ValueError, match="threshold"):
            sae_to_layout(sae, layout)


def test_refuses() -> None:
    for options in ({"signed": True}, {"refine": 1}):
        (name,) = options
        with pytest.raises(ValueError, match=f"sae must have {name}="):
            sae_to_layout(TopKSAE(5, 12, 3, **options), "saelens")  # type: ignore[arg-type]
    lens: State = in_training(False, length=1)[0]
    lens["b_dec"].zero_()
    with pytest.raises(ValueError, match=r"layout must be one of 'saelens', 'dictionary_learning'"):
        sae_to_layout(trained(False), "sae_lens")
    with pytest.raises(ValueError, match="layout must"):
        sae_from_layout(lens, "sae_lens", k=K)
    with pytest.raises(ValueError, match="layout must be given with a state dict"):
        sae_from_layout(lens, k=K)
    for layout in (3, nn.Linear):
        with pytest.raises(TypeError, match="layout must be one of"):
            sae_from_layout(lens, layout, k=K)
        with pytest.raises(TypeError, match="layout must be one of"):
            sae_to_layout(trained(False), layout)
    with pytest.raises(TypeError, match="sae must be"):
        sae_to_layout(nn.Linear(2, 2), "saelens")
    with pytest.raises(ValueError, match="k must be given"):
        sae_from_layout(lens, "saelens")
    with pytest.raises(ValueError, match="k must"):
        sae_from_layout(lens, "saelens", k=N + 1)
    with pytest.raises(ValueError, match=r"must have \'encoder\.weight\'"):
        sae_from_layout({"b_dec": lens["b_dec"]}, "dictionary_learning", k=K)
    with pytest.raises(ValueError, match="batch must be False or not be given"):
        sae_from_layout(lens, "saelens", k=K, batch=True)
    with pytest.raises(ValueError, match="batch must be True or not be given"):
        sae_from_layout(lens | {"threshold": torch.ones(N)}, "saelens", k=K, batch=False)
    with pytest.raises(ValueError, match="must have 12 entries"):
        sae_from_layout(lens | {"threshold": torch.ones(N + 1)}, "saelens", k=K)
    with pytest.raises(ValueError, match="a threshold for each latent does not say how many"):
        sae_from_layout(lens | {"threshold": torch.ones(N)}, "saelens")
    with pytest.raises(TypeError, match="source must be a layer of SAELens"):
        sae_from_layout([lens], "saelens", k=K)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a layer must be of SAELens.*but got Linear"):
        sae_from_layout(nn.Linear(D, N))
    with pytest.raises(ValueError, match=r"a folder must have cfg\.json and sae_weights"):
        sae_from_layout("sae.safetensors", k=K)
    with pytest.raises(ValueError, match=r"other names, too: 'W_skip', 'b_dec_out'"):
        sae_from_layout(lens | {"b_dec_out": torch.zeros(D), "W_skip": torch.zeros(D, D)}, "saelens", k=K)
    theirs = DictionaryLearning(False).state_dict()
    with pytest.raises(ValueError, match="rescale_acts_by_decoder_norm must be False"):
        sae_from_layout(theirs, "dictionary_learning", rescale_acts_by_decoder_norm=True)
    with pytest.raises(ValueError, match="apply_b_dec_to_input must be True"):
        sae_from_layout(theirs, "dictionary_learning", apply_b_dec_to_input=False)
    with pytest.raises(TypeError, match="W_enc"):
        sae_from_layout(lens | {"W_enc": torch.ones(D, N).long()}, "saelens", k=K)
    with pytest.raises(ValueError, match="2 dims"):
        sae_from_layout(lens | {"W_enc": torch.ones(N)}, "saelens", k=K)
    for name, shape in {"W_enc": (N, D), "b_enc": (D,), "b_dec": (N,)}.items():
        with pytest.raises(ValueError, match=rf"state\['{name}'\] must have shape"):
            sae_from_layout(lens | {name: torch.ones(shape)}, "saelens", k=K)
    assert not math.isnan(sae_from_layout(lens, "saelens", k=2.5).k)


CONFIGURATION: dict[str, Any] = {"architecture": "topk", "d_in": D, "d_sae": N, "k": K}


def configuration(**other: object) -> dict[str, Any]:
    return CONFIGURATION | other


@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize("rescales", [True, False])
def test_a_configuration_tells_what_a_state_does_not(rescales: bool, subtracts: bool) -> None:
    other, x = SAELens(K, rescale=rescales), floats(50, D)
    state = other.state_dict()
    told = configuration(rescale_acts_by_decoder_norm=rescales, apply_b_dec_to_input=subtracts)
    with torch.no_grad():
        want = other(x if subtracts else x + other.b_dec)  # which it subtracts again
    sae = sae_from_layout(state, told).eval()
    assert sae.k == K and not sae.batch
    torch.testing.assert_close(sae(x), want)
    with pytest.raises(ValueError, match=f"rescale_acts_by_decoder_norm must be {rescales}"):
        sae_from_layout(state, told, rescale_acts_by_decoder_norm=not rescales)
    with pytest.raises(ValueError, match=f"apply_b_dec_to_input must be {subtracts}"):
        sae_from_layout(state, told, apply_b_dec_to_input=not subtracts)
    assert sae_from_layout(state, told, k=2).k == 2
    # and back: a layer in which the rows have one length may rescale
    with torch.no_grad():
        sae.decoder = sae.decoder / sae.decoder.norm(dim=-1, keepdim=True)
    other.load_state_dict(sae_to_layout(sae, told))
    with torch.no_grad():
        torch.testing.assert_close(other(x if subtracts else x + other.b_dec), sae(x))


@pytest.mark.parametrize("subtracts", [True, False])
def test_thresholds_of_single_latents(subtracts: bool) -> None:
    """As in JumpReLU autoencoders, Gemma Scope among them."""
    other, x = SAELens(None), floats(50, D)
    with torch.no_grad():
        other.threshold.copy_(torch.linspace(-0.5, 2, N))
        want = other(x if subtracts else x + other.b_dec)
    state = other.state_dict()
    sae = sae_from_layout(state, "saelens", k=K, apply_b_dec_to_input=subtracts).eval()
    torch.testing.assert_close(sae(x), want)
    values, indices = sae.top(x)
    torch.testing.assert_close(sae.decode(values, indices), want)
    assert sae.threshold is not None and sae.threshold.shape == (N,)
    again = copy.deepcopy(sae)
    fresh = TopKSAE(D, N, K, batch=True)
    fresh.load_state_dict(sae.state_dict())
    for same in (again, fresh.eval()):
        torch.testing.assert_close(same(x), want)
    # a state with one threshold is read by a layer with many, as one with many by a layer with one
    fresh.load_state_dict(trained(True).state_dict())
    assert fresh.threshold is not None and fresh.threshold.shape == (1,)

    back = sae_to_layout(sae, configuration(architecture="jumprelu", apply_b_dec_to_input=subtracts))
    torch.testing.assert_close(back["threshold"], state["threshold"].clamp(min=0), rtol=0, atol=1e-30)
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        torch.testing.assert_close(back[name], state[name])
    named = sae_to_layout(sae, "dictionary_learning")
    assert set(named) == {"W_enc", "b_enc", "W_dec", "b_dec", "threshold"}
    theirs = sae_from_layout(named, "dictionary_learning", k=K, apply_b_dec_to_input=False).eval()
    torch.testing.assert_close(theirs(x), want)
    with pytest.raises(ValueError, match="a BatchTopKSAE has only one"):
        sae_to_layout(sae, {"dict_class": "BatchTopKSAE", "activation_dim": D, "dict_size": N, "k": K})


def test_training_moves_thresholds_of_single_latents_together() -> None:
    other = SAELens(None)
    with torch.no_grad():
        other.threshold.copy_(torch.linspace(0, 2, N))
    sae = sae_from_layout(other.state_dict(), "saelens", k=K, apply_b_dec_to_input=True)
    before = sae.threshold.clone()  # type: ignore[union-attr]
    for seed in range(400):
        sae(floats(64, D, seed=seed))
    after = sae.threshold
    assert after is not None and after.std() < 0.01 * before.std()
    single = trained(True)
    single.train()
    for seed in range(400):
        single(floats(64, D, seed=seed))
    assert single.threshold is not None and single.threshold.shape == (1,)


def test_what_a_bias_of_zero_need_not_be_told() -> None:
    other = SAELens(None)
    with torch.no_grad():
        other.b_dec.zero_()
    sae = sae_from_layout(other.state_dict(), "saelens", k=K).eval()
    torch.testing.assert_close(sae(floats(50, D)), other(floats(50, D)))
    with torch.no_grad():
        other.b_dec[0] = 1
    with pytest.raises(ValueError, match="apply_b_dec_to_input must be given"):
        sae_from_layout(other.state_dict(), "saelens", k=K)


def test_nested_widths_of_states() -> None:
    other, x = SAELens(None), floats(50, D)
    state = {name: value for name, value in other.state_dict().items() if name != "threshold"}
    level = torch.tensor(0.5)
    with torch.no_grad():
        want = other(x)
    groups = state | {"k": torch.tensor(K), "threshold": level, "group_sizes": torch.tensor([2, 3, 7])}
    sae = sae_from_layout(groups, "dictionary_learning").eval()
    assert sae.widths == (2, 5) and sae.batch and sae.k == K
    torch.testing.assert_close(sae(x), want)
    told = configuration(architecture="matryoshka_batchtopk", matryoshka_widths=[2, 5, N])
    told |= {"rescale_acts_by_decoder_norm": False, "apply_b_dec_to_input": True}
    sae = sae_from_layout(state | {"topk_threshold": level.double()}, told).eval()
    assert sae.widths == (2, 5)
    torch.testing.assert_close(sae(x), want)
    assert sae_to_layout(sae, told)["topk_threshold"].shape == ()
    back = sae_to_layout(sae, {"dict_class": "MatryoshkaBatchTopKSAE", "group_sizes": [2, 3, 7]})
    assert back["group_sizes"].tolist() == [2, 3, 7]


def test_a_configuration_that_is_refused() -> None:
    sae, state = trained(False), SAELens(K).state_dict()
    for wrong, message in (
        ({"architecture": "gated"}, "must select latents, as 'topk'"),
        ({"normalize_activations": "layer_norm"}, "scales each input in its own way"),
        ({"normalize_activations": "expected_average_only_in"}, "take the folder of a checkpoint"),
        ({"reshape_activations": "hook_z"}, "reshape_activations must be 'none'"),
        ({"architecture": "AutoEncoderTopK"}, "must select latents"),
    ):
        told = configuration(**wrong)
        with pytest.raises(ValueError, match=message):
            sae_from_layout(state, told)
        with pytest.raises(ValueError, match=message):
            sae_to_layout(sae, told)
    with pytest.raises(ValueError, match="must have 'architecture'"):
        sae_from_layout(state, {"k": 3})
    with pytest.raises(ValueError, match="state must have 13 latents"):
        sae_from_layout(state, configuration(d_sae=13), apply_b_dec_to_input=True)
    for wrong, message in (
        ({"d_sae": 13}, "layout must have 12 as its latents"),
        ({"d_in": 13}, "layout must have 5 as its features"),
        ({"k": 2}, "layout must have 3 as its k"),
        ({"architecture": "jumprelu"}, "layout must select as sae with batch=False does"),
        ({"rescale_acts_by_decoder_norm": True}, "layout must not have rescale_acts_by_decoder_norm=True"),
    ):
        with pytest.raises(ValueError, match=message):
            sae_to_layout(sae, configuration(**wrong))
    with pytest.raises(ValueError, match="folder must not be given"):
        sae_to_layout(sae, configuration(), folder="nowhere")


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("layout", ["saelens", "dictionary_learning"])
def test_folders(layout: str, batch: bool, tmp_path: Path) -> None:
    if layout == "saelens":
        pytest.importorskip("safetensors")
    sae, x = trained(batch), floats(50, D)
    state = sae_to_layout(sae, layout, folder=tmp_path / "deep" / "folder")
    assert state.keys() == sae_to_layout(sae, layout).keys()
    k = {"k": K} if layout == "saelens" and batch else {}
    again = sae_from_layout(str(tmp_path / "deep" / "folder"), **k).eval()
    torch.testing.assert_close(again(x), sae(x))
    assert_same(sae, again)
    with pytest.raises(ValueError, match=f"layout must be None or '{layout}'"):
        sae_from_layout(tmp_path / "deep" / "folder", "another")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        sae_to_layout(trained(False), "saelens", folder=tmp_path)
