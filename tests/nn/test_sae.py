"""TopKSAE: the formula by hand, the hard code as values and indices, and the latents that nobody uses."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from drawn import normal as scores
from khot._core import arguments
from khot._ops import selected
from khot.nn import Anneal, TopKSAE
from largest import Largest


def make(
    k: float | Anneal = 3, dtype: torch.dtype = torch.float64, tau: float | None = 0.2, **kw: object
) -> TopKSAE:
    torch.manual_seed(0)
    sae = TopKSAE(5, 12, k, tau=tau, dtype=dtype, **{"centre": False} | kw)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter += 0.1 * scores(*parameter.shape, seed=3).to(dtype)
    return sae


def activations(sae: TopKSAE, x: Tensor) -> Tensor:
    return (x - sae.bias) @ sae.encoder.mT + sae.encoder_bias


def by_sign(a: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """What the selection goes by, and the entries that selected pre-activations have in the code."""
    return (a.abs(), a) if signed else (a, a.clamp(min=0))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_is_the_formula_in_training(batch: bool, cdf: str, signed: bool) -> None:
    sae, x = make(cdf=cdf, batch=batch, signed=signed), scores(2, 7, 5)
    by, a = by_sign(activations(sae, x), signed)
    rows, k = (by.flatten(), 3 * 14) if batch else (by, 3)
    code = khot.soft_topk(rows, k, tau=0.2, cdf=cdf).view(a.shape) * a
    torch.testing.assert_close(sae.encode(x), code)
    torch.testing.assert_close(sae(x), code @ sae.decoder + sae.bias)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7, 5)])
def test_eval_is_the_hard_operator_dense_and_sparse(
    batch: bool, shape: tuple[int, ...], signed: bool
) -> None:
    sae, x = make(batch=batch, signed=signed).eval(), scores(*shape)
    by, a = by_sign(activations(sae, x), signed)
    rows, k = (by.flatten(), 3 * a[..., 0].numel()) if batch else (by, 3)
    code = khot.topk_mask(rows, k).view(a.shape) * a
    torch.testing.assert_close(sae.encode(x), code)
    torch.testing.assert_close(sae(x), code @ sae.decoder + sae.bias)

    values, indices = sae.top(x)
    assert values.shape == indices.shape and values.shape[:-1] == shape[:-1]
    assert values.shape[-1] == (3 if not batch else khot.topk_mask(rows, k).view(a.shape).sum(-1).max())
    assert (by_sign(values, signed)[0].diff(dim=-1) <= 0).all()
    torch.testing.assert_close(torch.zeros_like(code).scatter(-1, indices, values), code)
    torch.testing.assert_close(sae.decode(values, indices), sae(x))


def by_hand(
    sae: TopKSAE,
    x: Tensor,
    k: float = 3,
    tau: float | None = None,
    hard: bool = False,
    batch: bool = False,
    signed: bool = False,
    widths: Sequence[int] = (),
    idle: Sequence[int] = (),
) -> Tensor:
    """The mean squared error, and half of that with more latents, of all widths; and how well idle latents,
    those of the largest activations, which may be negative, reconstruct what the first code leaves."""
    rows = x.double().reshape(-1, 5)
    W, c, D, b = (p.double() for p in (sae.encoder, sae.encoder_bias, sae.decoder, sae.bias))
    a = (rows - b) @ W.mT + c
    by, values = by_sign(a, signed)
    want, rests = torch.zeros((), dtype=torch.float64), []
    for share, size in ((0.5, min(1.5 * k, 12)), (1, k)):
        whole, own = (by.flatten(), size * len(rows)) if batch else (by, size)
        if tau is None:
            y = khot.topk_mask(whole.detach(), own)
        else:
            y = khot.soft_topk(whole, own, tau=tau, hard=hard)
        code = y.view(a.shape) * values
        rests = [rows - code[:, :width] @ D[:width] - b for width in (12, *widths)]
        want = want + share * torch.stack([rest.square().mean() for rest in rests]).mean()
    if idle:
        few = torch.tensor(idle)
        best = few[by[:, few].topk(min(round(2 * k), len(few))).indices]
        again = torch.zeros_like(a).scatter(-1, best, a.gather(-1, best)) @ D
        want = want + 0.3 * (again - rests[0].detach()).square().mean()
    return want


IDLE = (1, 5, 8)
LOSSES: list[dict[str, Any]] = [
    *(
        {"k": k, "tau": tau, "batch": b}
        for k in (1, 2, 3, 9.6, 12)
        for tau in (None, 0.2)
        for b in (False, True)
    ),
    *(
        {"idle": IDLE, **each}
        for each in ({}, {"k": 1}, {"batch": True}, {"tau": 0.2}, {"k": 12}, {"k": 0.4})
    ),
    *({"widths": widths} for widths in ([1], [4, 7, 11], (6,))),
    *({"widths": [4, 7, 11], **each} for each in ({"batch": True}, {"tau": 0.2}, {"k": 0.4})),
    *({"widths": [1], **each} for each in ({"batch": True}, {"k": 12})),
    {"tau": 0.2, "hard": True, "batch": True, "widths": (6,)},
    # those that are chosen come from several parts
    *(
        {"k": 4, "idle": range(2, 9), "parts": True, **each}
        for each in ({}, {"widths": [3]}, {"k": 1}, {"dtype": torch.bfloat16}, {"signed": True})
    ),
]


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_the_loss_is_the_formula(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"k": 3, "tau": None} | options
    made = {name: v for name, v in options.items() if name not in ("idle", "parts")}
    given = {name: v for name, v in options.items() if name not in ("parts", "dtype")}
    if "parts" in options:
        monkeypatch.setattr(selected, "ROWS_OF_NARROW", 7)
    idle, dtype = list(options.get("idle", ())), options.get("dtype", torch.float64)
    sae = make(**made, revive=99.5 * options["k"] / 12)  # after 100 inputs without use
    with torch.no_grad():
        sae.encoder_bias[idle] -= torch.linspace(1, 5, len(idle))
    sae.idle[2], sae.idle[idle] = 99, 100
    x = scores(3, 13, 5).to(dtype)

    def loss(*kind: str) -> Tensor:
        return copy.deepcopy(sae).loss(x, *kind)  # which counts what is used

    one = copy.deepcopy(sae)
    mse, got = by_hand(sae, x, **given), one.loss(x)
    if dtype == torch.bfloat16:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), mse.log(), rtol=0, atol=0.01)
        return
    torch.testing.assert_close(got, mse.log())
    torch.testing.assert_close(loss("mse"), mse)
    for kind, want in (("mse", mse), (True, mse.log())):
        torch.testing.assert_close(copy.deepcopy(sae)(x, loss=kind), want)
    grads = [torch.autograd.grad(y, list(s.parameters())) for y, s in ((got, one), (mse.log(), sae))]
    torch.testing.assert_close(*grads)
    # the trace depends on whether all latents are selected, and each takes seconds
    if options in ({"k": 3, "tau": None, "idle": IDLE}, {"k": 12, "tau": None, "batch": False}) or (
        len(options.get("widths", ())) > 1 and options["k"] == 3
    ):
        torch.compiler.reset()
        compiled = torch.compile(copy.deepcopy(sae).loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), got)


def test_nested_widths_do_not_change_the_code() -> None:
    x = scores(2, 7, 5)
    torch.testing.assert_close(make(widths=[4, 7, 11])(x), make()(x))


def with_idle(inputs: int | None = 100, **options: object) -> TopKSAE:
    """One of whose latents 1, 5 and 8 are idle, after so many inputs without use."""
    k = float(options.get("k", 3))  # type: ignore[arg-type]
    revive = None if inputs is None else (inputs - 0.5) * k / 12
    sae = make(**{"tau": None, "revive": revive} | options)
    sae.idle[[1, 5, 8]] = 100
    sae.idle[2] = 99
    return sae


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({}, True), ({}, False), ({"batch": True}, False), ({"tau": 0.2}, False)],
    ids=str,
)
def test_without_idle_latents_the_loss_is_the_same(options: dict[str, object], compiled: bool) -> None:
    losses = []
    for inputs in (None, 101):
        sae = with_idle(inputs, **options)
        losses.append((torch.compile(sae.loss, backend="eager") if compiled else sae.loss)(scores(7, 5)))
        losses[-1].backward()
        losses += [p.grad for p in sae.parameters()]
    torch.testing.assert_close(losses[: len(losses) // 2], losses[len(losses) // 2 :])


@pytest.mark.parametrize("features, latents", [(1, 3), (7, 2)])
def test_revives_in_small_autoencoders(features: int, latents: int) -> None:
    torch.manual_seed(0)
    sae = TopKSAE(features, latents, 1, revive=1)
    for _ in range(3):
        loss = sae.loss(torch.randn(4, features))
        loss.backward()
    assert loss.isfinite()


def test_the_loss_of_idle_latents_under_transforms() -> None:
    sae, x = with_idle(), scores(7, 5)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        state = {n: b.clone() for n, b in sae.named_buffers()} | parameters
        return torch.func.functional_call(Loss(sae), {f"sae.{n}": v for n, v in state.items()}, (x,))

    got = torch.func.grad(loss)({n: p.detach() for n, p in sae.named_parameters()})
    sae.loss(x).backward()
    torch.testing.assert_close(got, {n: p.grad for n, p in sae.named_parameters()})


class Loss(torch.nn.Module):
    def __init__(self, sae: TopKSAE) -> None:
        super().__init__()
        self.sae = sae

    def forward(self, x: Tensor) -> Tensor:
        return self.sae.loss(x)


@pytest.mark.parametrize("options", [{}, {"batch": True}, {"tau": 0.2}, {"signed": True}], ids=str)
def test_calls_count_only_their_own_latents_and_only_in_training(options: dict[str, object]) -> None:
    x = scores(1, 2, 5)
    given = {"tau": None} | options
    a, code = activations(make(**given), x), make(**given).eval().encode(x)
    rows, k = (a.flatten(), 6) if "batch" in options else (a, 3)
    used = code != 0 if "tau" not in options else (khot.soft_topk(rows, k, tau=0.2) > 0.5) & (a > 0)
    idle = torch.where(used.flatten(0, -2).any(0), 0, 2)
    assert 0 < (idle == 0).sum() < 12
    for call in ("forward", "encode", "loss"):
        sae = make(**given).eval()
        getattr(sae, call)(x)
        assert (sae.idle == 0).all()
        getattr(sae.train(), call)(x)
        assert sae.idle.equal(idle)


@pytest.mark.parametrize(
    ("options", "call", "idle"),
    [
        ({"widths": [100]}, "loss", 0),
        ({"widths": [100]}, "loss", 50),
        ({"batch": True}, "forward", 50),
        ({"batch": True}, "loss", 50),
    ],
)
def test_no_pre_activations_of_all_inputs_are_made(
    options: dict[str, Any], call: str, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "ROWS_OF_NARROW", 16)
    sae = TopKSAE(5, 4096, 8, **options)
    sae.idle[:idle] = 10**6
    with Largest() as largest:
        getattr(sae, call)(scores(64, 5).float()).square().mean().backward()
    assert largest.numel <= 4096 * 16


@pytest.mark.parametrize(
    "options", [{}, {"widths": [4]}, {"k": 0.4}, {"k": 2.5}, {"k": 12}, {"signed": True}], ids=str
)
def test_a_batch_selects_together_what_whole_rows_would(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one input has nearly all that is selected, more than its first candidates, and with ties."""
    monkeypatch.setattr(khot.nn.sae, "MANY", 1)
    for case in range(3):
        sae = make(**{"k": 1, "tau": None, "batch": True} | options)  # type: ignore[arg-type]
        dense, x = copy.deepcopy(sae), scores(2, 7, 5)
        if case == 1:
            x[1, 3] *= 50
        if case == 2:
            x = x.sign()
            with torch.no_grad():
                for layer in (sae, dense):
                    layer.encoder = layer.encoder.round()
                    layer.encoder_bias.zero_()
                    layer.shift.zero_()
        dense._is_dense = lambda input: True  # type: ignore[method-assign]
        for call in (sae.__call__, sae.loss):
            other = getattr(dense, call.__name__ if call.__name__ == "loss" else "__call__")
            got, want = call(x), other(x)
            torch.testing.assert_close(got, want)
            grads = [
                torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
                for y, layer in ((got, sae), (want, dense))
            ]
            torch.testing.assert_close(*grads)
            torch.testing.assert_close(dict(sae.named_buffers()), dict(dense.named_buffers()))


@pytest.mark.parametrize(
    ("options", "times", "signed"),
    # each pair of two of them
    [
        ({}, 1, False),
        ({}, 3, True),
        ({"batch": True}, 1, True),
        ({"batch": True}, 3, False),
        ({"tau": 0.2}, 1, False),
        ({"tau": 0.2}, 3, True),
    ],
    ids=str,
)
def test_a_refined_code_is_selected_again_from_what_is_left(
    options: dict[str, object], times: int, signed: bool
) -> None:
    torch.compiler.reset()  # each case is a program of its own, of which few are kept
    sae = make(**{"tau": None, "refine": times, "signed": signed} | options)  # type: ignore[arg-type]
    x = scores(2, 7, 5)
    a = activations(sae, x)
    for _ in range(times):
        by, values = by_sign(a, signed)
        code = torch.zeros_like(a)
        for row in itertools.product(range(2), range(7)):
            for i in by[row].topk(3).indices:
                code[(*row, i)] = values[(*row, i)]
        a = code + (x - code @ sae.decoder - sae.bias) @ sae.encoder.mT
    by, values = by_sign(a, signed)
    rows, k = (by.flatten(), 3 * 14) if "batch" in options else (by, 3)
    soft = khot.soft_topk(rows, k, tau=0.2) if "tau" in options else khot.topk_mask(rows, k)
    code = soft.view(a.shape) * values
    torch.testing.assert_close(sae.encode(x), code)
    torch.testing.assert_close(sae(x), code @ sae.decoder + sae.bias)
    grads = [torch.autograd.grad(y.square().sum(), list(sae.parameters())) for y in (sae.encode(x), code)]
    torch.testing.assert_close(*grads)
    sae.eval()
    torch.testing.assert_close(sae.decode(*sae.top(x)), sae(x))
    torch.testing.assert_close(torch.compile(sae, backend="eager", fullgraph=True)(x), sae(x))


CALLS = {
    "encode": TopKSAE.encode,
    "forward": TopKSAE.__call__,
    "top": lambda sae, x: sae.decode(*sae.top(x)),
}


def trained(k: float | Anneal = 3, steps: int = 300, inputs: int = 64, **kw: object) -> TopKSAE:
    """One with a threshold, in eval mode."""
    sae = make(k, **{"tau": None, "batch": True} | kw)
    for seed in range(steps):
        sae.encode(scores(inputs, 5, seed=seed + 100).to(sae.shift.dtype))
    return sae.eval()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", [{}, {"tau": 0.2}, {"tau": 0.2, "hard": True}], ids=str)
def test_in_eval_mode_a_code_does_not_depend_on_its_neighbours(options: dict[str, object], call: str) -> None:
    sae, x = trained(steps=3, **options), scores(4, 9, 5)
    x[1] *= 0.01
    want = CALLS[call](sae, x)
    torch.testing.assert_close(CALLS[call](sae, x[2]), want[2])
    torch.testing.assert_close(CALLS[call](sae, x[1, 3]), want[1, 3])
    torch.testing.assert_close(CALLS[call](sae, x.flip(0, 1)), want.flip(0, 1))


@pytest.mark.parametrize("options", [{}, {"tau": 0.1}, {"tau": 0.1, "hard": True}], ids=str)
@pytest.mark.parametrize("k", [0.7, 2, 3])
def test_in_eval_mode_inputs_get_k_latents_on_average(k: float, options: dict[str, object]) -> None:
    sae = trained(k, **options)
    code = sae.encode(scores(20_000, 5))
    assert abs((code > 0).double().sum(-1).mean() - k) < 0.05 * k  # 300 levels of 64 inputs each
    values, indices = sae.top(scores(20_000, 5))
    torch.testing.assert_close(torch.zeros_like(code).scatter(-1, indices, values), code)
    torch.testing.assert_close(sae(scores(20_000, 5)), sae.decode(code))


@pytest.mark.parametrize("call", ["encode", "forward", "loss"])
@pytest.mark.parametrize("options", [{}, {"tau": 0.2}, {"tau": 0.2, "hard": True}], ids=str)
def test_the_threshold_follows_the_smallest_selected_activation(
    options: dict[str, object], call: str
) -> None:
    sae, want = make(**{"tau": None, "batch": True} | options), None
    assert sae.threshold is not None and sae.threshold == -1
    for seed in range(4):
        x = scores(2, 7, 5, seed=seed)
        level = activations(sae, x).detach().flatten().sort(descending=True).values[3 * 14 - 1].clamp(min=0)
        want = level if want is None else want + 0.02 * (level - want)
        getattr(sae, call)(x)
        torch.testing.assert_close(sae.threshold[0], want)
        getattr(sae.eval(), call)(x + 1)
        torch.testing.assert_close(sae.train().threshold[0], want)
    assert not sae.threshold.requires_grad
    sae.reset_parameters()
    assert sae.threshold == -1


def test_the_threshold_is_not_negative_and_survives_a_nan() -> None:
    sae = make(12, tau=None, batch=True)  # all latents, of which many are negative
    sae(scores(7, 5))
    assert sae.threshold == 0
    sae = make(tau=None, batch=True)
    for x in (scores(7, 5), torch.full((7, 5), math.nan, dtype=torch.float64), scores(0, 5)):
        sae.encode(x)
        assert sae.threshold is not None and 0 < sae.threshold < math.inf
    sae = make(0.01, tau=None, batch=True)  # k·B rounds to no latent
    sae(scores(7, 5))
    assert sae.threshold == -1


def test_the_threshold_is_saved_and_old_states_select_as_before() -> None:
    sae, other, x = trained(steps=3), make(tau=None, batch=True).eval(), scores(7, 5)
    state = sae.state_dict()
    assert "threshold" not in make(tau=None).state_dict()
    together = khot.topk_mask(activations(sae, x).flatten(), 21).view(7, 12) * activations(sae, x).relu()
    other.load_state_dict(state)
    torch.testing.assert_close(other.encode(x), sae.encode(x))
    assert not sae.encode(x).equal(together)
    del state["threshold"]
    other.load_state_dict(state)
    assert other.threshold == -1 and "threshold" not in state
    torch.testing.assert_close(other.encode(x), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_the_threshold_keeps_its_digits_in_half_precision(dtype: torch.dtype, cast: bool) -> None:
    sae = (
        make(dtype=torch.float64, tau=None, batch=True).to(dtype)
        if cast
        else make(dtype=dtype, tau=None, batch=True)
    )
    wide = dtype if dtype == torch.float64 else torch.float32
    assert sae.threshold is not None and sae.threshold.dtype == wide
    for seed in range(50):
        sae.encode(scores(7, 5, seed=seed).to(dtype))
    exact = sae.threshold.double()
    assert dtype in (torch.float32, torch.float64) or sae.threshold.to(dtype).double() != exact
    for half in (torch.float16, torch.bfloat16):
        sae.to(half)
        assert sae.shift.dtype == half and sae.threshold.dtype == torch.float32
        torch.testing.assert_close(sae.threshold.double(), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_threshold_keeps_its_digits_when_a_state_is_assigned(dtype: torch.dtype) -> None:
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in trained(steps=3).state_dict().items()}
    sae = make(tau=None, batch=True)
    sae.load_state_dict(state, assign=True)
    assert sae.shift.dtype == dtype and sae.threshold is not None and sae.threshold.dtype == torch.float32
    assert sae.threshold.equal(state["threshold"].float()) and state["threshold"].dtype == dtype
    before = sae.threshold.clone()
    x = sae.bias.detach() + 1.02 * scores(64, 5, seed=102).to(dtype)  # the same level, nearly
    sae.encode(x)
    assert not sae.threshold.equal(before)  # a change that half precision rounds away


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_with_a_threshold_needs_a_layer_with_one(nested: bool) -> None:
    other, state = torch.nn.Sequential(make(tau=None)), torch.nn.Sequential(trained(steps=1)).state_dict()
    layer = other if nested else other[0]
    name = "0.threshold" if nested else "threshold"
    state = state if nested else trained(steps=1).state_dict()
    with pytest.raises(RuntimeError, match=f"'{name}' belongs to a TopKSAE with batch=True.*make it with"):
        layer.load_state_dict(state)
    del state[name]
    layer.load_state_dict(state)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_threshold_works_when_compiled_and_exported(training: bool, steps: int) -> None:
    x = scores(7, 5)
    eager, compiled, exported = (trained(steps=steps).train(training) for _ in range(3))
    want = eager(x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(compiled, backend="aot_eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.export.export(exported, (x,)).module()(x), want)
    torch.testing.assert_close(compiled.threshold, eager.threshold)


@pytest.mark.parametrize("batch", [False, True])
def test_idle_counts_the_inputs_since_a_latent_was_used(batch: bool) -> None:
    sae, idle = make(batch=batch), torch.zeros(12, dtype=torch.int64)
    for seed in range(6):
        x = scores(2, 2, 5, seed=seed)
        a = activations(sae, x)  # of 4 inputs
        rows, k = (a.flatten(), 12) if batch else (a, 3)
        used = (khot.soft_topk(rows, k, tau=0.2).view(a.shape) > 0.5) & (a > 0)
        for latent in range(12):
            idle[latent] = 0 if used[..., latent].any() else idle[latent] + 4
        sae.train()(x)
        assert sae.idle.equal(idle)
    assert len(idle.unique()) > 2
    for inputs in (1, 4, 5, 24, 25):
        assert sae.dead(inputs) == (idle >= inputs).double().mean()
    sae.eval()(x)
    assert sae.idle.equal(idle)
    sae.reset_parameters()
    assert (sae.idle == 0).all()


def test_starts_with_directions_of_length_one_tied() -> None:
    sae = TopKSAE(5, 12, 3)
    torch.testing.assert_close(sae.decoder.norm(dim=-1), torch.ones(12))
    torch.testing.assert_close(sae.decoder, sae.encoder)
    assert (sae.bias == 0).all() and (sae.encoder_bias == 0).all()


@pytest.mark.parametrize("call", ["forward", "encode", "loss"])
@pytest.mark.parametrize("options", [{}, {"batch": True}, {"tau": 0.2}, {"dtype": torch.bfloat16}], ids=str)
def test_the_bias_is_the_mean_of_the_first_training_batch(options: dict[str, object], call: str) -> None:
    sae = make(**{"tau": None, "centre": True} | options)
    dtype, shift = sae.shift.dtype, sae.shift.detach().clone()
    first = (scores(2, 7, 5) + 3).to(dtype)
    sae.eval()
    getattr(sae, call)(first)
    sae.train()
    sae.top(first)
    for nothing in (first[:0], torch.full_like(first, math.nan)):
        getattr(sae, call)(nothing)
    assert not sae.centred and (sae.mean == 0).all()
    got = getattr(sae, call)(first)
    assert sae.centred
    mean = first.double().mean((0, 1)).to(dtype)
    torch.testing.assert_close(sae.mean, mean)
    torch.testing.assert_close(sae.bias, mean + shift)
    other = make(**{"tau": None, "centre": True} | options)
    other.load_state_dict(sae.state_dict())
    other.idle.zero_()
    torch.testing.assert_close(getattr(other, call)(first), got)  # the mean was there before the pass
    for layer in (sae, other):
        getattr(layer, call)((scores(2, 7, 5, seed=1) - 3).to(dtype))
        torch.testing.assert_close(layer.mean, mean)
    sae.reset_parameters()
    assert not sae.centred and (sae.mean == 0).all()


def test_the_first_mean_is_not_asked_for_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it cannot be read whether there is one, as on a GPU."""
    sae, plain = (TopKSAE(5, 12, 3, dtype=torch.float64) for _ in range(2))
    x = scores(20, 5) + 3
    spoiled = torch.cat([x, torch.full((1, 5), math.inf)])
    monkeypatch.setattr(arguments, "readable", lambda *_, **__: False)
    sums: list[Tensor] = []
    finite = Tensor.isfinite  # which nothing else in a pass asks for
    monkeypatch.setattr(Tensor, "isfinite", lambda x: sums.append(x) or finite(x))
    sae(spoiled)
    sae(x[:0])
    assert not sae.centred
    for _ in range(20):
        sae(x)
    assert len(sums) == 8 and sae.centred
    torch.testing.assert_close(sae.bias, x.mean(0))
    for renew in (
        lambda: sae.load_state_dict(plain.state_dict()),
        lambda: sae.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True),
        sae.reset_parameters,
    ):
        renew()
        sae(x + 1)
        torch.testing.assert_close(sae.bias, (x + 1).mean(0))
        for _ in range(9):
            sae(x)
        torch.testing.assert_close(sae.bias, (x + 1).mean(0))
    again = copy.deepcopy(sae)
    again.centred.zero_()
    sae.centred.zero_()
    for layer in (again, sae):
        layer(x + 2)
        torch.testing.assert_close(layer.bias, (x + 2).mean(0))


def test_without_centre_the_bias_starts_at_zero() -> None:
    sae = TopKSAE(5, 12, 3, centre=False)
    sae.loss(scores(7, 5).float())
    assert (sae.bias == 0).all() and "centre=False" in repr(sae)


def test_warns_of_inputs_whose_mean_is_far_from_the_bias() -> None:
    x = scores(50, 5) + 3
    sae = make(tau=None)
    sae.eval()(x)
    with pytest.warns(UserWarning, match=r"mean of the inputs is 6\.\d+ from the bias.*they are 2\.\d+ from"):
        sae.train().loss(x)
    sae.loss(x)  # and says so once
    make(tau=None, centre=True).loss(x)
    sae = make(tau=None)
    sae.bias = x.mean(0)
    sae.loss(x)
    make(tau=None).loss(x[:2])  # too few to know


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoder_decoder_and_bias_can_be_assigned(dtype: torch.dtype) -> None:
    sae = make(tau=None, dtype=dtype, centre=True)
    given = {"encoder": scores(12, 5, seed=5), "decoder": scores(5, 12, seed=6).mT, "bias": scores(5, seed=7)}
    given["decoder"][3] = 0
    for name, value in given.items():
        setattr(sae, name, value.to(dtype))
        assert getattr(sae, name).equal(value.to(dtype)) and getattr(sae, name).dtype == dtype
    assert sae.centred and [*dict(sae.named_parameters())] == [
        "raw_encoder", "encoder_bias", "raw_decoder", "shift"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"bias must have shape \(5,\), but got \(12,\)"):
        sae.bias = torch.zeros(12)
    sae.loss(scores(7, 5).to(dtype)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sae.parameters())
    assert sae.decoder[3].equal(torch.zeros(5, dtype=dtype)) and sae.bias.equal(given["bias"].to(dtype))


@pytest.mark.parametrize("name", ["encoder", "decoder", "bias"])
def test_what_may_be_assigned(name: str) -> None:
    sae = TopKSAE(5, 12, 3)
    before, value = {n: v.clone() for n, v in sae.state_dict().items()}, torch.randn(getattr(sae, name).shape)
    for wrong, got in ((1.0, "float"), (torch.nn.Linear(5, 12), "Linear"), (value.long(), "int64")):
        with pytest.raises(TypeError, match=f"{name} must .* but got .*{got}"):
            setattr(sae, name, wrong)
        torch.testing.assert_close(dict(sae.state_dict()), before, rtol=0, atol=0)
    setattr(sae, name, torch.nn.Parameter(value))
    torch.testing.assert_close(getattr(sae, name), value)
    assert list(sae.state_dict()) == list(before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_state_of_version_0_1_is_read(dtype: torch.dtype, assign: bool) -> None:
    """It had the matrices and the bias themselves, with rows of any length."""
    state = {"encoder": scores(12, 5), "encoder_bias": scores(12, seed=1), "decoder": scores(12, 5, seed=2)}
    state = {name: v.to(dtype) for name, v in (state | {"bias": scores(5, seed=3)}).items()}
    nested, x = torch.nn.Sequential(make(tau=None, dtype=dtype, centre=True)), scores(7, 5).to(dtype)
    nested.load_state_dict(
        {f"0.{name}": v for name, v in state.items()} | {"0.idle": torch.arange(12)}, assign=assign
    )
    sae = nested[0]
    for name, value in state.items():
        assert getattr(sae, name).equal(value)
    a = (x - state["bias"]).double() @ state["encoder"].double().mT + state["encoder_bias"].double()
    code = khot.topk_mask(a, 3) * a.relu()
    want = code @ state["decoder"].double() + state["bias"].double()
    error = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(sae.eval()(x).double(), want, rtol=error, atol=error)
    sae.train().loss(x + 1)
    assert sae.bias.equal(state["bias"])  # it has been trained before
    lengths = state["decoder"].norm(dim=-1).to(sae.lengths.dtype)
    torch.testing.assert_close(sae.lengths, lengths, rtol=0.01, atol=0)


@pytest.mark.parametrize("latents", [6, 100])
def test_directions_of_zeros_have_no_gradient(latents: int) -> None:
    """Also those of length 1 whose parameter was set to 0, as pruning does, or is too small to divide by."""
    sae = TopKSAE(5, latents, 6)
    with torch.no_grad():
        sae.raw_decoder.mul_(torch.where(torch.arange(latents) % 2 == 0, 0, 1e-42).unsqueeze(-1))
    sae.loss(scores(7, 5).float()).backward()
    assert (sae.decoder == 0).all() and (sae.raw_decoder.grad == 0).all()


def test_training_keeps_the_lengths_of_the_directions() -> None:
    torch.manual_seed(0)
    sae = TopKSAE(16, 64, 4)
    sae.decoder = sae.decoder.detach() * torch.linspace(0.5, 2, 64).unsqueeze(-1)
    optimizer, before = torch.optim.Adam(sae.parameters(), lr=1e-2), sae.decoder.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        sae.loss(torch.randn(64, 16)).backward()
        optimizer.step()
    torch.testing.assert_close(sae.decoder.norm(dim=-1), torch.linspace(0.5, 2, 64))
    assert ((sae.decoder - before).norm(dim=-1) > 0.01).all()
    half = copy.deepcopy(sae).bfloat16()
    assert half.lengths.dtype == torch.float32 and half.lengths.equal(sae.lengths)


def test_the_log_has_no_unit_and_is_finite_without_error() -> None:
    grads, x = [], scores(40, 5)
    for scale in (1, 1000):
        sae = make(tau=None)
        with torch.no_grad():
            sae.encoder_bias.mul_(scale)
            sae.shift.mul_(scale)
        loss = sae.loss(scale * x)
        loss.backward()
        grads += [loss - 2 * math.log(scale), sae.raw_encoder.grad, scale * sae.encoder_bias.grad]
    torch.testing.assert_close(grads[:3], grads[3:])
    sae = TopKSAE(5, 12, 3)
    x = torch.ones(8, 5)  # the bias, which is their mean
    loss = sae.loss(x)
    loss.backward()
    assert loss == math.log(torch.finfo(torch.float32).tiny) and sae.loss(x, "mse") == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in sae.parameters())


@pytest.mark.parametrize("options", [{}, {"batch": True}, {"tau": 0.2, "hard": True}], ids=str)
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast", "bfloat16 under autocast"])
def test_half_precision_does_not_change_the_choice(how: str, options: dict[str, object]) -> None:
    """The code is that of the same numbers in float64, whose mean is far from 0 as that of activations is."""
    torch.manual_seed(0)
    dtype = {"float16": torch.float16, "autocast": torch.float32}.get(how, torch.bfloat16)
    sae = TopKSAE(64, 512, 16, revive=None, dtype=torch.float64, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        sae.bias = 3 * torch.randn(64)
        sae.encoder_bias.copy_(0.1 * torch.randn(512))
    sae = sae.to(dtype)
    x = (torch.randn(300, 64) + sae.bias.detach().float()).to(dtype)
    exact = copy.deepcopy(sae).double()
    for training in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
            code = sae.train(training).encode(x)
            values, indices = sae.eval().top(x)
        assert code.dtype == values.dtype == dtype
        want = exact.train(training).encode(x.double())
        # of the 4,800 latents, float32 may choose one differently by a near tie
        assert ((code != 0) != (want != 0)).sum() <= 2
        torch.testing.assert_close(code.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    if not options:
        assert (indices != exact.eval().top(x.double())[1]).float().mean() < 2e-3


def test_gradients_in_half_precision() -> None:
    sae, x = make(dtype=torch.bfloat16, tau=None), scores(40, 5).bfloat16().requires_grad_()
    exact, given = copy.deepcopy(sae).double(), x.detach().double().requires_grad_()
    sae.loss(x).backward()
    exact.loss(given).backward()
    for got, want in zip((x, *sae.parameters()), (given, *exact.parameters()), strict=True):
        assert got.grad is not None and want.grad is not None and got.grad.dtype == torch.bfloat16
        error = (got.grad.double() - want.grad).norm() / want.grad.norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps


def test_an_ensemble_in_training_counts_for_each_model() -> None:
    """Under vmap the buffers have to be mapped over, too."""
    skeleton, saes, x = make(), [make(), make(), make()], scores(3, 7, 5)
    for i, sae in enumerate(saes):
        sae.raw_encoder.data.mul_(i + 1)
    state = {n: torch.stack([sae.state_dict()[n] for sae in saes]) for n in saes[0].state_dict()}
    got = torch.vmap(lambda s, x: torch.func.functional_call(skeleton, s, (x,)))(state, x)
    for i, sae in enumerate(saes):
        torch.testing.assert_close(got[i], sae(x[i]))
        assert state["idle"][i].equal(sae.idle)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"batch": True}, {"tau": 0.2}], ids=str)
def test_an_empty_batch(options: dict[str, object], training: bool) -> None:
    sae, x = make(**{"tau": None} | options).train(training), scores(0, 2, 5)
    assert sae(x).shape == (0, 2, 5) and sae.encode(x).shape == (0, 2, 12)
    values, indices = sae.top(x)
    assert values.shape == indices.shape == (0, 2, 0 if "batch" in options else 3)
    assert sae.decode(values, indices).shape == (0, 2, 5)
    sae.idle += 1000
    loss = sae.loss(x)
    assert loss.isnan()  # as a mean of nothing is in torch
    loss.backward()
    assert (sae.idle == 1000).all() and (sae.threshold is None or sae.threshold == -1)


def test_an_input_of_another_dtype() -> None:
    sae, x = make(tau=None, dtype=torch.float32), scores(7, 5)
    for call in (sae, sae.loss, sae.encode, sae.top):
        with pytest.raises(TypeError, match=r"input must have dtype torch\.float32.*got torch\.float64"):
            call(x)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(sae(x.to(dtype)), sae(x.to(dtype).float()))
    half, code = make(tau=None, dtype=torch.bfloat16), sae.encode(x.float())
    with pytest.raises(TypeError, match=r"input must have dtype torch\.bfloat16"):
        half(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert half(x.float()).isfinite().all()
    torch.testing.assert_close(sae.decode(code.half()), sae.decode(code.half().float()))
    torch.testing.assert_close(torch.compile(sae, backend="eager", fullgraph=True)(x.float()), sae(x.float()))


def test_refuses() -> None:
    for inputs, error in ((0, ValueError), (-1, ValueError), (0.5, TypeError), ("9", TypeError)):
        with pytest.raises(error, match="inputs must"):
            make().dead(inputs)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_mean_of_several_states(use_buffers: bool) -> None:
    sae = TopKSAE(4, 8, k=2)
    averaged = torch.optim.swa_utils.AveragedModel(sae, use_buffers=use_buffers)
    inputs = 3 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        sae.loss(inputs).backward()
        averaged.update_parameters(sae)
    if not use_buffers:
        averaged.module.bias = inputs.mean(0)
    torch.testing.assert_close(averaged.module.bias, inputs.mean(0))
    torch.testing.assert_close(averaged.module.eval()(inputs), sae.eval()(inputs))
