"""Sparse autoencoders in the layouts of other libraries: the same output before and after."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from khot.nn import Anneal, TopKSAE, sae_from_layout, sae_to_layout

D, N, K = 5, 12, 3
State = dict[str, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SAELens(nn.Module):
    """What SAELens computes with its defaults, from its tensors."""

    def __init__(self, k: int | None) -> None:
        super().__init__()
        self.W_enc, self.b_enc = nn.Parameter(normal(D, N)), nn.Parameter(normal(N, seed=1))
        self.W_dec, self.b_dec = nn.Parameter(normal(N, D, seed=2)), nn.Parameter(normal(D, seed=3))
        self.k = k
        if k is None:
            self.threshold = nn.Parameter(torch.full((N,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        a = (x - self.b_dec) @ self.W_enc + self.b_enc
        if self.k is None:
            code = a.relu() * (a > self.threshold)
        else:
            best = a.topk(self.k)
            code = torch.zeros_like(a).scatter(-1, best.indices, best.values.relu())
        return code @ self.W_dec + self.b_dec


class DictionaryLearning(nn.Module):
    """What dictionary_learning computes, from its tensors."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.batch = batch
        self.encoder, self.decoder = nn.Linear(D, N), nn.Linear(N, D, bias=False)
        self.b_dec = nn.Parameter(normal(D, seed=3))
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
each = pytest.mark.parametrize("layout, batch", LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def trained(batch: bool, k: float | Anneal = K, dtype: torch.dtype = torch.float32) -> TopKSAE:
    torch.manual_seed(0)
    sae = TopKSAE(D, N, k, batch=batch, dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(sae.parameters()):
            parameter += normal(*parameter.shape, seed=i) / 4
        sae(normal(20, D, seed=9).to(dtype))
    return sae.eval()


@each
@each_dtype
def test_there(layout: str, batch: bool, dtype: torch.dtype) -> None:
    sae, other, x = trained(batch, dtype=dtype), LAYERS[layout, batch]().to(dtype), normal(50, D).to(dtype)
    state = sae_to_layout(sae, layout)
    assert {name: (v.shape, v.is_contiguous()) for name, v in state.items()} == {
        name: (v.shape, True) for name, v in other.state_dict().items()
    }
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), sae(x))


@each
@each_dtype
def test_and_back(layout: str, batch: bool, dtype: torch.dtype) -> None:
    other, x = LAYERS[layout, batch]().to(dtype), normal(50, D).to(dtype)
    sae = sae_from_layout(other.state_dict(), layout, k=K, batch=batch)
    assert sae.training and all(p.dtype == dtype and p.requires_grad for p in sae.parameters())
    torch.testing.assert_close(sae.eval()(x), other(x))
    for name, value in sae_to_layout(sae, layout).items():
        torch.testing.assert_close(value.to(dtype), other.state_dict()[name].to(dtype), rtol=0, atol=0)


@each
def test_half_precision(layout: str, batch: bool) -> None:
    """No number changes; sums of half-precision numbers depend on their order, so that outputs may."""
    sae = trained(batch, dtype=torch.bfloat16)
    state = sae_to_layout(sae, layout)
    assert {x.dtype for name, x in state.items() if name not in ("k", "threshold")} == {torch.bfloat16}
    copy = sae_from_layout(state, layout, k=K, batch=batch)
    for name, value in sae.state_dict().items():
        assert name == "idle" or (
            value.equal(copy.state_dict()[name]) and value.dtype == copy.state_dict()[name].dtype
        )


@each
@each_dtype
def test_there_and_back_at_the_threshold_itself(layout: str, batch: bool, dtype: torch.dtype) -> None:
    """The activation that gave the threshold is selected by both, although theirs has to be exceeded."""
    sae = trained(batch, dtype=dtype)
    copy = sae_from_layout(sae_to_layout(sae, layout), layout, k=K, batch=batch).eval()
    for name, value in sae.state_dict().items():
        assert name == "idle" or value.equal(copy.state_dict()[name])
    if batch:
        a = sae._activations(normal(20, D, seed=9).to(dtype))
        level = sae_to_layout(sae, layout)["threshold"]
        assert sae.threshold is not None and (a == sae.threshold).any()
        assert (a > level).equal(a >= sae.threshold)
    with torch.no_grad():
        copy.encoder.zero_()
    assert sae.encoder.any()  # nothing is shared


def test_the_state_of_a_batch_top_k_autoencoder_of_saelens_in_training() -> None:
    state: State = SAELens(K).state_dict() | {"topk_threshold": torch.tensor(0.5, dtype=torch.float64)}
    sae, other, x = sae_from_layout(state, "saelens", k=K, batch=True).eval(), SAELens(None), normal(50, D)
    torch.testing.assert_close(sae(x), other(x))


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
    lens: State = SAELens(K).state_dict()
    with pytest.raises(ValueError, match=r"layout must be one of 'saelens', 'dictionary_learning'"):
        sae_to_layout(trained(False), "sae_lens")
    with pytest.raises(ValueError, match="layout must"):
        sae_from_layout(lens, "sae_lens", k=K)
    with pytest.raises(TypeError, match="sae must be"):
        sae_to_layout(nn.Linear(2, 2), "saelens")
    with pytest.raises(ValueError, match="k must be given"):
        sae_from_layout(lens, "saelens")
    with pytest.raises(ValueError, match="k must"):
        sae_from_layout(lens, "saelens", k=N + 1)
    with pytest.raises(ValueError, match=r"must have \'encoder\.weight\'"):
        sae_from_layout(lens, "dictionary_learning", k=K)
    with pytest.raises(ValueError, match="must have 'threshold'"):
        sae_from_layout(lens, "saelens", k=K, batch=True)
    with pytest.raises(ValueError, match="equal entries"):
        sae_from_layout(lens | {"threshold": torch.arange(float(N))}, "saelens", k=K, batch=True)
    with pytest.raises(TypeError, match="W_enc"):
        sae_from_layout(lens | {"W_enc": torch.ones(D, N).long()}, "saelens", k=K)
    with pytest.raises(ValueError, match="2 dims"):
        sae_from_layout(lens | {"W_enc": torch.ones(N)}, "saelens", k=K)
    for name, shape in {"W_enc": (N, D), "b_enc": (D,), "b_dec": (N,)}.items():
        with pytest.raises(ValueError, match=rf"state\['{name}'\] must have shape"):
            sae_from_layout(lens | {name: torch.ones(shape)}, "saelens", k=K)
    assert not math.isnan(sae_from_layout(lens, "saelens", k=2.5).k)
