"""Every layer under activation checkpointing: what is computed twice is counted once, and read as before."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import khot
import modes


class Loss(nn.Module):
    """The loss of a sparse autoencoder of whose latents some are idle, and a number that depends on it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.sae = khot.nn.TopKSAE(5, 12, 2, revive=2, dtype=torch.float64, **options)
        with torch.no_grad():
            self.sae.encoder_bias[6:] = -1

    def forward(self, x: Tensor) -> Tensor:
        return self.sae(x, loss=True).exp().log()


MORE: dict[str, Callable[[], nn.Module]] = {
    "loss": Loss,
    "loss-batch": lambda: Loss(batch=True),
    "loss-tau": lambda: Loss(tau=0.2),
    "loss-widths": lambda: Loss(batch=True, tau=0.2, widths=[4]),
}
NAMES = [*MORE, *(name for name, row in modes.ROWS.items() if row.inputs)]


def trained(name: str, passes: int, call: Callable[[nn.Module, list[Tensor]], Any]) -> dict[str, Any]:
    """Results, gradients and state of three steps, each of so many passes and then a backward pass."""
    torch.manual_seed(0)
    layer = MORE[name]() if name in MORE else modes.make(name)
    inputs = (modes._SCORES(2, 7, 5),) if name in MORE else modes.ROWS[name].inputs
    seen: dict[str, Any] = {}
    torch.manual_seed(1)
    for step in range(3):
        results, given = [], []
        for i in range(passes):
            scale = 1 + step + i / 2
            moved = [(x.roll(step + i, 0) * scale if x.is_floating_point() else x) for x in inputs]
            given.append([x.requires_grad_(x.is_floating_point()) for x in moved])
            result = call(layer, given[-1])
            results.append(result if isinstance(result, Tensor) else result[0])
        layer.zero_grad()
        loss = sum(result.square().sum() for result in results if result.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
        khot.nn.QuantileBalancer.update_all(layer)
        seen[f"results {step}"] = [result.detach() for result in results]
        seen[f"gradients {step}"] = [p.grad for p in layer.parameters()]
        seen[f"gradients of inputs {step}"] = [x.grad for each in given for x in each]
    seen |= dict(layer.named_buffers())
    for n, module in layer.named_modules():
        if "_seen" in module.__dict__:
            seen[f"passes of {n}"] = module._seen.passes
        if isinstance(module, khot.nn.Anneal):
            seen[f"reads of {n}"] = module._reads
    return seen


def around(regions: str, layer: nn.Module) -> Callable[..., Any]:
    """A layer within regions, the outermost first.

    r and n are checkpointing with ``use_reentrant=True`` and ``False``, c keeps saved tensors elsewhere, and
    b and a compute something before and after what is within.
    """
    call: Callable[..., Any] = layer
    for region in reversed(regions):
        call = functools.partial(REGIONS[region], call)
    return call


def before(call: Callable[..., Any], *inputs: Tensor) -> Any:
    return call(*(x.exp().log() if x.is_floating_point() else x for x in inputs))


def after(call: Callable[..., Any], *inputs: Tensor) -> Tensor:
    result = call(*inputs)
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.exp().log() if first.is_floating_point() else first


def elsewhere(call: Callable[..., Any], *inputs: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return call(*inputs)


REGIONS: dict[str, Callable[..., Any]] = {
    "r": functools.partial(checkpoint, use_reentrant=True),
    "n": functools.partial(checkpoint, use_reentrant=False),
    "c": elsewhere,
    "b": before,
    "a": after,
}


def assert_equals_the_layer_without_checkpointing(name: str, regions: str, passes: int) -> None:
    if "r" in regions and name == "QuantileBalancer":
        pytest.skip("no gradient passes through it, so that nothing is computed again")
    plain = "".join(region for region in regions if region in "ba")
    want = trained(name, passes, lambda layer, inputs: around(plain, layer)(*inputs))
    if "n" in regions:
        want.pop("balancer.load", None)  # what is computed twice counts twice
    if "r" in regions and any("bias" in key for key in want) and passes > 1:
        # the second passes, which count, come in the opposite order, and the last batch sets the biases
        want = {key: value for key, value in want.items() if not key.endswith("bias")}
    got = trained(name, passes, lambda layer, inputs: around(regions, layer)(*inputs))
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("regions", ["r", "n"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_layer_without_checkpointing(name: str, regions: str, passes: int) -> None:
    assert_equals_the_layer_without_checkpointing(name, regions, passes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_equals_it_in_nested_regions(name: str, seed: int) -> None:
    """Checkpointing within checkpointing, hooks for saved tensors within it, and work around both."""
    draw = random.Random(f"{name} {seed}")
    regions = "na" + "".join(draw.choice("nnrcba") for _ in range(draw.randint(0, 2))) + draw.choice("nc")
    assert_equals_the_layer_without_checkpointing(name, regions, draw.randint(1, 2))


@pytest.mark.parametrize("regions, times", [("r", 1), ("n", 2), ("na", 2), ("nan", 3)])
def test_how_often_balancers_count(regions: str, times: int) -> None:
    """Their counts are multiples of what they would be, and so is the load. No quantile changes."""
    draw = random.Random(regions)
    experts = draw.randint(4, 9)
    plain = khot.nn.TokenChoiceRouter(5, experts, 2, balancer=khot.nn.QuantileBalancer(experts, 2))
    other = copy.deepcopy(plain)
    for seed in range(4):
        for i in range(draw.randint(1, 3)):
            x = modes._SCORES(draw.randint(1, 40), 5, seed=9 * seed + i).float().requires_grad_()
            plain(x)[0].square().sum().backward()
            result = around(regions, other)(x)
            (result if isinstance(result, Tensor) else result[0]).square().sum().backward()
        assert plain.balancer is not None and other.balancer is not None
        assert plain.balancer.counts.any()
        assert torch.equal(other.balancer.counts, times * plain.balancer.counts)
        for router in (plain, other):
            khot.nn.QuantileBalancer.update_all(router)
        assert torch.equal(other.balancer.bias, plain.balancer.bias)
        assert torch.equal(other.balancer.load, times * plain.balancer.load)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_regions_without_gradients_count_only_if_they_are_computed_with_them(use_reentrant: bool) -> None:
    x = modes._SCORES(30, 5)
    sae = khot.nn.TopKSAE(5, 12, 2, batch=True, dtype=torch.float64)
    router = khot.nn.BalancedRouter(5, 4, 2, dtype=torch.float64)
    balanced = khot.nn.TokenChoiceRouter(5, 4, 2, balancer=khot.nn.QuantileBalancer(4, 2)).double()
    for layer in (sae, router, balanced):
        checkpoint(layer, x, use_reentrant=use_reentrant)
    assert sae.threshold is not None and balanced.balancer is not None
    assert (sae.threshold >= 0).all()
    assert router.bias.any() == balanced.balancer.counts.any() == (not use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_layers_count_each_time(use_reentrant: bool) -> None:
    """And read what the first time has written, which changes the gradient that idle latents get."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, x = Loss(batch=True), torch.randn(14, 5, dtype=torch.float64, requires_grad=True)
    assert plain.sae.threshold is not None
    with torch.no_grad():
        plain.sae.idle.fill_(11)  # of the 12 from which on they learn
        plain.sae.threshold.fill_(0.1)
    other = copy.deepcopy(plain)
    twice = copy.deepcopy(plain)
    plain(x).backward()
    checkpoint(torch.compile(other, backend="eager"), x, use_reentrant=use_reentrant).backward()
    for _ in range(2):
        twice.zero_grad()
        twice(x).backward()
    for name, state in other.named_buffers():
        torch.testing.assert_close(state, twice.get_buffer(name))
    assert (other.sae.idle > plain.sae.idle).any() and (other.sae.threshold != plain.sae.threshold).all()
    got, want = other.sae.raw_encoder.grad, plain.sae.raw_encoder.grad
    assert not torch.allclose(got, want)
    torch.testing.assert_close(got, twice.sae.raw_encoder.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_routers_keep_the_biases_of_the_first_pass(use_reentrant: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    router = khot.nn.BalancedRouter(5, 4, 2, tau=0.5, dtype=torch.float64)
    first, last = copy.deepcopy(router), copy.deepcopy(router)
    batches = [torch.randn(20, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(router, backend="eager")
    loss = torch.zeros((), dtype=torch.float64)
    for x in batches:
        loss = loss + checkpoint(compiled, x, use_reentrant=use_reentrant)[0].square().sum()
    loss.backward()
    first(batches[0])
    last(batches[-1])
    torch.testing.assert_close(router.bias, first.bias)
    assert not torch.allclose(router.bias, last.bias, atol=1e-2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_checkpointing_of_several_passes_raises(use_reentrant: bool) -> None:
    for layer in (Loss(), khot.nn.BalancedRouter(5, 4, 2, dtype=torch.float64)):
        torch.compiler.reset()

        def call(x: Tensor, layer: nn.Module = layer) -> Any:
            result = checkpoint(layer, x, use_reentrant=use_reentrant)
            return result if isinstance(result, Tensor) else result[0]

        compiled = torch.compile(call, backend="aot_eager")
        x = torch.randn(14, 5, dtype=torch.float64, requires_grad=True)
        results = [compiled(x).square().sum() for _ in range(2)]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(results).backward()  # type: ignore[union-attr]


def test_some_latents_are_pulled() -> None:
    """Without which the test above says little of the state that the loss reads."""
    torch.manual_seed(0)
    layer = Loss()
    assert isinstance(layer.sae, khot.nn.TopKSAE)
    for _ in range(3):
        layer(torch.randn(14, 5, dtype=torch.float64)).backward()
    idle = layer.sae.idle >= 2 * 12 / 2
    assert idle.any() and layer.sae.raw_encoder.grad is not None and layer.sae.raw_encoder.grad[idle].any()


def test_what_others_write_is_read_at_once() -> None:
    sae, x = Loss().sae, torch.randn(14, 5, dtype=torch.float64)
    before = sae.loss(x)
    sae(x)
    sae.idle.fill_(100)
    sae(x)  # it writes, too, after the other
    sae.idle.fill_(100)
    assert sae.loss(x) > before
    sae.load_state_dict(sae.state_dict() | {"idle": torch.zeros(12, dtype=torch.int64)})
    torch.testing.assert_close(sae.loss(x), before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("after", ["loss", "forward", "loss in eval mode", "nothing"])
@pytest.mark.parametrize("how", ["data", "numpy", "detach"])
def test_what_others_write_without_a_count_is_read_at_once(how: str, after: str, seed: int) -> None:
    """As it is read by a copy, which knows nothing of earlier passes."""
    torch.manual_seed(seed)
    sae, x = Loss().sae, torch.randn(14, 5, dtype=torch.float64)
    assert isinstance(sae, khot.nn.TopKSAE)
    sae(x)
    for _ in range(2):
        sae.loss(x)  # no backward pass follows, so that the next one does not renew what it reads
        if after == "loss in eval mode":
            sae.eval().loss(x)
            sae.train()
        idle = torch.randint(30, (12,))
        {"data": sae.idle.data, "numpy": sae.idle.numpy(), "detach": sae.idle.detach()}[how][:] = (
            idle.numpy() if how == "numpy" else idle
        )
        if after == "forward":
            sae(x)
        other = copy.deepcopy(sae)
        assert sae.loss(x).equal(other.loss(x))
