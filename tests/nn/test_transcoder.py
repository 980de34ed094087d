"""TopKSAE with an output of its own: what it computes, how it starts, and the layouts that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import khot
from drawn import floats
from khot.nn import TopKSAE, fit_sae, loss_recovered, sae_from_layout, sae_to_layout, unexplained

D, OUT, N, K = 6, 9, 40, 3


def transcoder(**options: Any) -> TopKSAE:
    """One that has seen a batch, with a skip that does something."""
    torch.manual_seed(0)
    layer = TopKSAE(D, N, K, out_features=OUT, skip=True, **options)
    layer(floats(50, D) + 1, loss=True, target=3 * floats(50, OUT, seed=1) - 2)
    assert layer.skip is not None
    nn.init.normal_(layer.skip)
    nn.init.normal_(layer.encoder_bias, std=0.1)
    layer.idle.zero_()
    return layer


def by_definition(layer: TopKSAE, x: Tensor, count: int) -> Tensor:
    a = (x - layer.bias) @ layer.encoder.mT + layer.encoder_bias
    code = a * khot.topk_mask(a.abs() if layer.signed else a, count)
    code = code if layer.signed else code.relu()
    assert layer.out_bias is not None and layer.skip is not None
    return code @ layer.decoder + layer.out_bias + (x - layer.bias) @ layer.skip.mT


@pytest.mark.parametrize("signed", [False, True])
def test_output_loss_and_gradient_are_those_of_the_definition(signed: bool) -> None:
    layer, x, y = transcoder(signed=signed), floats(20, D, seed=2), floats(20, OUT, seed=3)
    torch.testing.assert_close(layer(x), by_definition(layer, x, K))
    torch.testing.assert_close(layer.eval()(x), by_definition(layer, x, K))
    layer.train().idle.zero_()
    error, wider = ((y - by_definition(layer, x, count)).square().mean() for count in (K, 5))
    parts = layer.loss_parts(x, "mse", target=y)
    torch.testing.assert_close((parts.error, parts.wider), (error.detach(), wider.detach()))
    want = error + 0.5 * wider
    torch.testing.assert_close(parts.loss, want)
    parameters = list(layer.parameters())
    grads = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (parts.loss, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "options", [{"batch": True}, {"tau": 0.1}, {"widths": [8, 16]}, {"dtype": torch.bfloat16}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    layer = TopKSAE(D, N, K, out_features=OUT, skip=True, **options)
    x, y = floats(20, D).to(layer.shift.dtype), floats(20, OUT, seed=1).to(layer.shift.dtype)
    layer.loss(x, target=y).backward()
    layer.idle.fill_(10**6)  # all of them learn from what is left
    assert layer.loss(x, target=y).isfinite()
    assert layer(x).shape == y.shape and layer.encode(x).shape == (20, N)
    again = TopKSAE(D, N, K, out_features=OUT, skip=True, **options)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.eval()(x), layer.eval()(x))


def test_with_the_input_as_target_the_loss_is_that_of_an_autoencoder() -> None:
    x = floats(30, D) + 2
    sae, layer = TopKSAE(D, N, K), TopKSAE(D, N, K, out_features=D)
    layer.load_state_dict(layer.state_dict() | sae.state_dict())
    for _ in range(2):
        torch.testing.assert_close(layer.loss(x, target=x), sae.loss(x))
    noisy = x + 0.1 * floats(30, D, seed=5)
    assert sae.loss(noisy, target=x) < sae.loss(noisy, target=-x)


def test_the_first_batch_sets_mean_and_spread() -> None:
    x, y = floats(500, D), 100 * floats(500, OUT, seed=1) + 7
    for centre in (True, False):
        layer = TopKSAE(D, N, K, out_features=OUT, centre=centre)
        layer(x)  # without a target nothing is known of the output
        assert layer.scaled is not None and not layer.scaled
        layer.loss(x, target=y)
        layer.loss(x, target=2 * y)
        ratio = (y - y.mean(0)).square().sum(-1).mean().sqrt() / (x - x.mean(0)).square().sum(
            -1
        ).mean().sqrt()
        torch.testing.assert_close(layer.lengths, ratio.expand(N))
        torch.testing.assert_close(layer.decoder.norm(dim=-1), ratio.expand(N))
        torch.testing.assert_close(layer.out_bias, y.mean(0) if centre else torch.zeros(OUT))
    given = TopKSAE(D, N, K, out_features=OUT)
    given.decoder, given.out_bias = floats(N, OUT), torch.ones(OUT)
    given.loss(x, target=y)
    torch.testing.assert_close(given.decoder, floats(N, OUT))
    torch.testing.assert_close(given.out_bias, torch.ones(OUT))


def sparse(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sparse sum of directions, and what a layer makes of it."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(count, 20, generator=generator) * (torch.rand(count, 20, generator=generator) < 0.1)
    x = z @ floats(20, D + 6, seed=90)
    return x, 50 * (z.square() @ floats(20, OUT, seed=91) + x @ floats(D + 6, OUT, seed=92) / 4) + 9


def test_fit_on_pairs() -> None:
    x, y = sparse(2000, 0)
    for batches in ((x, y), DataLoader(TensorDataset(x, y), 256)):
        torch.manual_seed(0)
        layer = TopKSAE(D + 6, 32, K, out_features=OUT, skip=True)
        record = fit_sae(layer, batches, 300, lr=3e-3)
        left = unexplained(layer, sparse(500, 1))
        whole = torch.cat((x, torch.ones(len(x), 1)), -1)
        linear = (y - whole @ torch.linalg.lstsq(whole, y).solution).square().mean() / y.var(0).mean()
        assert left < linear and abs(record[-1]["unexplained"] - left) < 0.5 * left
    assert torch.equal(unexplained(layer, [(x[:99], y[:99])]), unexplained(layer, (x[:99], y[:99])))


def test_loss_recovered_in_the_place_of_a_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, D), nn.Linear(D, OUT), nn.Linear(OUT, 9))
    layer = TopKSAE(D, N, K, out_features=OUT, skip=True)
    with torch.no_grad():
        assert layer.skip is not None
        layer.skip.copy_(model[1].weight)
    layer.decoder, layer.out_bias = torch.zeros(N, OUT), model[1].bias
    torch.testing.assert_close(
        loss_recovered(model, "1", layer, torch.randint(9, (4, 20))), torch.tensor(1.0)
    )


@pytest.mark.parametrize(
    "call, error, said",
    [
        (
            lambda: TopKSAE(D, N, K, out_features=OUT, refine=1),
            ValueError,
            "refine must be 0 with out_features",
        ),
        (lambda: TopKSAE(D, N, K, out_features=0), ValueError, "out_features must be at least 1"),
        (lambda: transcoder().loss(floats(3, D)), ValueError, "target must be given"),
        (
            lambda: transcoder().loss(floats(3, D), target=floats(3, D)),
            ValueError,
            r"target must have shape \(3, 9\), but got \(3, 6\)",
        ),
        (
            lambda: transcoder()(floats(3, D), target=floats(3, OUT)),
            ValueError,
            "target must be left out without a loss",
        ),
        (lambda: setattr(TopKSAE(D, N, K), "out_bias", torch.ones(D)), AttributeError, "set bias"),
        (lambda: fit_sae(transcoder(), floats(50, D), 1), TypeError, "activations must give pairs of inputs"),
        (
            lambda: fit_sae(transcoder(), (floats(50, D), floats(40, OUT)), 1),
            ValueError,
            "as many targets as inputs, 50, but got 40",
        ),
        (lambda: sae_to_layout(transcoder(), "saelens"), ValueError, "sae must have batch=True"),
        (
            lambda: sae_to_layout(transcoder(batch=True), {"architecture": "jumprelu_transcoder"}),
            ValueError,
            "layout must be a transcoder, with a skip or not",
        ),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


class Transcoder(nn.Module):
    """What the jumprelu_transcoder of SAELens computes, from its tensors."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.W_enc, self.b_enc = nn.Parameter(floats(D, N)), nn.Parameter(floats(N, seed=1))
        self.W_dec, self.b_dec = nn.Parameter(floats(N, OUT, seed=2)), nn.Parameter(floats(OUT, seed=3))
        self.threshold = nn.Parameter(floats(N, seed=4).abs())
        self.W_skip = nn.Parameter(floats(OUT, D, seed=5)) if skip else None

    def forward(self, x: Tensor) -> Tensor:
        a = x @ self.W_enc + self.b_enc
        output = (a.relu() * (a > self.threshold)) @ self.W_dec + self.b_dec
        return output if self.W_skip is None else output + x @ self.W_skip.T


@pytest.mark.parametrize("skip", [False, True])
def test_layouts_there_and_back(skip: bool, tmp_path: Any) -> None:
    other, x = Transcoder(skip), floats(50, D, seed=6)
    configuration = {"architecture": "jumprelu_skip_transcoder" if skip else "jumprelu_transcoder"}
    configuration |= {"d_in": D, "d_out": OUT, "d_sae": N, "apply_b_dec_to_input": False}
    for layout in ("saelens", configuration):
        layer = sae_from_layout(other.state_dict(), layout, k=K).eval()
        torch.testing.assert_close(layer(x), other(x))
        for name, value in sae_to_layout(layer, layout).items():
            torch.testing.assert_close(value, other.state_dict()[name])
    trained = transcoder(batch=True) if skip else TopKSAE(D, N, K, out_features=OUT, batch=True)
    trained.loss(floats(50, D) + 1, target=floats(50, OUT, seed=1))
    state = sae_to_layout(trained.eval(), "saelens", folder=tmp_path)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), trained(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sae_from_layout(tmp_path, k=K).eval()(x), trained(x), rtol=1e-4, atol=1e-4)
