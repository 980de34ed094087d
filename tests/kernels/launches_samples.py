"""Samples without Python: run by `test_native.py` with `launches.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils.checkpoint import checkpoint

import khot
import recorded
from answers import answers
from kernels.launching import (
    COST,
    device,
    of_operators,
    ordinary,
    prepare,
    same,
    same_launch,
    scores,
    seen,
    takes_the_ordinary_way,
    with_gradient,
)
from khot._kernels.triton import launch

__all__ = ["device", "seen"]  # fixtures

Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def nothing_is_prepared() -> None:
    launch.forget()


#: Plain samples of rows (..., 32), with a generator.
SAMPLES: dict[str, Call] = {
    "default": lambda x, **g: khot.sample_khot(x, 3, **g),
    "design": lambda x, **g: khot.sample_khot(x, 2.5, design="pareto", cdf="laplace", **g),
    "k of each row": lambda x, **g: khot.sample_khot(x, x.new_full(x.shape[:-1], 4), **g),
    "masked": lambda x, **g: khot.sample_khot(x, 3, mask=COST[0] > 0.3, **g),
    "columns": lambda x, **g: khot.sample_khot(x, 1.5, 0, **g),
    "float16": lambda x, **g: khot.sample_khot(x.half(), 3, **g).float(),
    "bfloat16, masked": lambda x, **g: khot.sample_khot(x.bfloat16(), 3, mask=COST[0] > 0.3, **g).float(),
}
every_sample = pytest.mark.parametrize("name", SAMPLES)


def with_state(call: Call, x: Tensor, given: bool) -> tuple[list[Tensor], Tensor]:
    """The sample, its gradient, and the state of the generator after it."""
    torch.manual_seed(5)
    generator = Generator().manual_seed(6)
    options: dict[str, Any] = {"generator": generator} if given else {}
    found = with_gradient(lambda x: call(x, **options), x, scores(*x.shape).flip(0))
    return found, generator.get_state() if given else torch.get_rng_state()


@every_sample
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32)], ids=str)
def test_samples_are_those_of_the_ordinary_way(
    name: str, shape: tuple[int, ...], seen: list[recorded.Launch]
) -> None:
    call, x = SAMPLES[name], scores(*shape)
    for given in (False, True):
        seen.clear()
        with ordinary():
            wanted, state = with_state(call, x, given)
        theirs = list(seen)
        for _ in range(2):  # the gradient of columns is prepared by the second call
            with_state(call, x, given)
        seen.clear()
        with answers("sample_khot") as answered:
            found, after = with_state(call, x, given)
        assert answered == [True]
        assert same(found, wanted) and torch.equal(after, state)
        # the soft top-k, two of the draw, and the gradient, which comes in other strides for columns
        own = of_operators(seen)
        assert len(own) == len(theirs) == 4 and all(map(same_launch, own[:3], theirs))
        y = found[0]
        assert set(y.unique().tolist()) <= {0, 1} and not y.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_samples_of_probabilities(dtype: torch.dtype, seen: list[recorded.Launch]) -> None:
    """Also those of ``k=None``, which are NaN only where a logit is."""
    probs = torch.sigmoid(scores(6, 32)).to(dtype)
    probs[1, 3] = torch.nan
    for name, call in (
        ("sample", lambda g: khot.sampling.sample(probs, generator=g)),
        ("size", lambda g: khot.sample_khot(probs, generator=g)),
        ("second order", lambda g: khot.sample_khot(probs[2:], 3, estimator="second_order", generator=g)),
    )[: 2 if dtype == torch.float64 else 3]:  # nothing is written in the place of float64's soft top-k
        with ordinary():
            one = Generator().manual_seed(1)
            wanted = call(one)
        call(Generator())
        with answers("pareto") as answered:
            other = Generator().manual_seed(1)
            found = call(other)
        assert answered == [True], name
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7)) and found.dtype == wanted.dtype
        assert torch.equal(one.get_state(), other.get_state())
        assert found.isnan().sum() == {"sample": 32, "size": 1, "second order": 0}[name]


def gate(dtype: torch.dtype = torch.float32, k: float | None = 3) -> khot.nn.KHotGate:
    layer = khot.nn.KHotGate(32, k, dtype=dtype)
    layer.load_state_dict({"logits": scores(32)})
    return layer


def gated(layer: khot.nn.KHotGate, x: Tensor, **more: Any) -> list[Tensor]:
    """The output, the gradients of the input and the logits, and the state of torch's generator."""
    torch.manual_seed(5)
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    given = (leaf, layer.logits)
    grads = torch.autograd.grad(y, given, scores(*more.get("batch", ()), *x.shape).flip(0).to(y.dtype), **{
        name: value for name, value in more.items() if name != "batch"
    })  # fmt: skip
    return [y.detach(), *grads, torch.get_rng_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32), (32,)], ids=str)
def test_gates_draw_from_one_row_of_logits(
    shape: tuple[int, ...], dtype: torch.dtype, seen: list[recorded.Launch]
) -> None:
    layer, x = gate(dtype), scores(*shape).to(dtype)
    with ordinary():
        wanted = gated(layer, x)
    gated(layer, x)
    seen.clear()
    with answers("gated") as answered:
        found = gated(layer, x)
    assert answered == [True] and same(found, wanted)
    assert len(of_operators(seen)) == 4  # the soft top-k of one row, its gradient, and two of the draw
    assert (found[0] != 0).sum() == 3 * x[..., 0].numel()
    layer.logits.data[4] = torch.nan
    with answers("gated") as answered:
        assert layer(x).isnan().all() and answered == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32), (32,)], ids=str)
def test_gates_of_constants_are_one_node(
    shape: tuple[int, ...], dtype: torch.dtype, seen: list[recorded.Launch]
) -> None:
    """A column too large for its dtype shows that the gradient is multiplied as torch multiplies it."""
    layer, x = gate(dtype), scores(*shape).to(dtype)
    x[..., 3] = 1e38 if dtype == torch.float32 else 6e4

    def results() -> list[Tensor]:
        torch.manual_seed(5)
        y = layer(x)
        grads = torch.autograd.grad(y, layer.logits, scores(*shape).flip(0).to(dtype) * 20, retain_graph=True)
        batch = torch.stack([scores(*shape), scores(*shape).flip(0)]).to(dtype)
        grads += torch.autograd.grad(y, layer.logits, batch, is_grads_batched=True)
        return [y.detach(), *grads, torch.get_rng_state()]

    with ordinary():
        wanted = results()
    results()
    with answers("gated") as answered:
        found = results()
        y = layer(x)
    assert answered == [True] * 2 and same([found[0], found[-1]], [wanted[0], wanted[-1]])
    assert torch.equal(found[1].nan_to_num(7), wanted[1].nan_to_num(7))
    assert torch.allclose(found[2], wanted[2], rtol=1e-3 if dtype == torch.float16 else 1e-5, equal_nan=True)
    if dtype == torch.float32:
        assert y.grad_fn is not None and y.grad_fn.name() == "khot::soft_topk_backward"
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gates_follow_what_becomes_of_their_logits(seen: list[recorded.Launch]) -> None:
    """Also where they are no parameter of the layer's own."""
    layer, x = gate(), scores(6, 32)
    gated(layer, x)
    torch.nn.utils.parametrize.register_parametrization(layer, "logits", torch.nn.Tanh())
    given = layer.parametrizations.logits.original
    with ordinary():
        torch.manual_seed(5)
        wanted = torch.autograd.grad(layer(x).sum(), given)[0]
    torch.manual_seed(5)
    assert torch.allclose(torch.autograd.grad(layer(x).sum(), given)[0], wanted)
    layer = gate()
    layer.logits = torch.nn.Parameter(torch.full((32,), -5.0).index_fill_(0, torch.arange(4), 9.0))
    layer.k = 4
    y = layer(x)
    assert ((y != 0).sum(-1) == 4).all() and (y[:, :4] != 0).all()


def test_gradients_of_many_rows_are_summed_in_float(seen: list[recorded.Launch]) -> None:
    layer, x = gate(torch.float16), scores(6, 32)
    x[1::2] = -x[::2]  # so that the large ones cancel
    with ordinary():
        wanted = gated(layer, 1e6 * x)
    gated(layer, x)
    with answers("gated") as answered:
        found = gated(layer, 1e6 * x)
    assert answered == [True] and same(found[:2], wanted[:2])
    assert torch.equal(found[2].isfinite(), wanted[2].isfinite())


@pytest.mark.parametrize("make", [gate, lambda: khot.nn.SoftTopK(3)], ids=["gate", "soft top-k"])
def test_layers_in_checkpoints(make: Callable[[], torch.nn.Module], seen: list[recorded.Launch]) -> None:
    layer, x = make(), scores(6, 32)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        checkpoint(lambda x: layer(x) * 1, leaf, use_reentrant=False).sum().backward()
        assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_other_gates_take_the_ordinary_way(seen: list[recorded.Launch]) -> None:
    layer, x = gate(), scores(6, 32)
    gated(layer, x)
    for other, input in ((gate(k=None), x), (gate(), x[:5]), (layer.double(), x)):
        with answers("gated") as answered:
            y = other(input)
        assert answered == [False]
        if other.logits.dtype == torch.float32:  # nothing is written in the place of float64's soft top-k
            assert set((y / input).detach().round(decimals=4).unique().tolist()) <= {0, 1}


def test_other_samples_take_the_ordinary_way(seen: list[recorded.Launch]) -> None:
    x = scores(6, 32)
    prepare(SAMPLES["default"], x)
    takes_the_ordinary_way(
        "sample_khot",
        [
            lambda: khot.sample_khot(x, 3, design="pivotal"),
            lambda: khot.sample_khot(x, 3, estimator="gumbel", tau=2.0),
            lambda: khot.sample_khot(x, 3, estimator="second_order"),
            lambda: khot.sample_khot(x.double(), 3),
            lambda: khot.sample_khot(x[:, ::2], 3),
            lambda: khot.sample_khot(x[:5], 3),  # nothing is prepared for it
            lambda: khot.sample_khot(x, 3, cdf=khot.cdfs.Power(1.5)),
        ],
        [
            (lambda: khot.sample_khot(x, 33), "k must lie in"),
            (lambda: khot.sample_khot(x, 3, tau=2.0), "tau has no effect"),
            (lambda: khot.sample_khot(x, 3, hard=1), "hard must be a bool"),  # type: ignore[arg-type]
            (lambda: khot.sample_khot(x, 3, mask=COST), "mask must have dtype"),
            (lambda: khot.sample_khot(x, 3, estimator="other"), "estimator"),  # type: ignore[arg-type]
            (lambda: khot.sample_khot(x, 3, generator=5), "generator|Generator"),  # type: ignore[arg-type]
        ],
    )


def test_launches_lie_within_what_profiles_show(seen: list[recorded.Launch]) -> None:
    x, layer = scores(6, 32), gate()
    calls = [lambda: khot.soft_topk(x, 3), lambda: khot.sample_khot(x, 3), lambda: layer(x)]
    for call in calls * 3:
        call()
    run = recorded.running()

    def watched() -> int:
        with torch.profiler.record_function("launch"):
            return run()

    recorded.run_instead(watched)
    for call in calls:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            call()
        within = [event.cpu_parent for event in profile.function_events or [] if event.name == "launch"]
        assert within and {parent.name for parent in within if parent} == {"khot::soft_topk"}
        assert None not in within
