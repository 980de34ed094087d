"""Every layer under activation checkpointing: what is computed twice is counted once, and read as before."""

from __future__ import annotations

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


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_layer_without_checkpointing(name: str, use_reentrant: bool, passes: int) -> None:
    def twice(layer: nn.Module, inputs: list[Tensor]) -> Any:
        return checkpoint(layer, *inputs, use_reentrant=use_reentrant)

    want = trained(name, passes, lambda layer, inputs: layer(*inputs))
    if use_reentrant and name == "QuantileBalancer":
        pytest.skip("no gradient passes through it, so that nothing is computed again")
    want.pop("balancer.load", None)  # what is computed twice counts twice
    if use_reentrant and any("bias" in key for key in want) and passes > 1:
        # the second passes, which count, come in the opposite order, and the last batch sets the biases
        want = {key: value for key, value in want.items() if "bias" not in key}
    got = trained(name, passes, twice)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


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
