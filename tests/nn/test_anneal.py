"""An Anneal whose step() was forgotten says so, and no other does. (Warnings are errors in these tests.)"""

from __future__ import annotations

import copy

import pytest
import torch

import khot
from khot.nn import Anneal, SoftTopK
from khot.nn.anneal import SEVERAL

FORGOTTEN = (
    r"^Anneal\(1.0, 0.1, steps=100, schedule='exponential'\) was used for training but never stepped, so "
    r"that its value is still 1.0; call its step\(\) once per training step$"
)


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), SoftTopK(2, tau=Anneal(1.0, 0.1, 100)))


def train(model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.zeros(3, 4))


def test_a_forgotten_step_warns_once() -> None:
    net = model()
    train(net, SEVERAL)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        net.eval()
    train(net.train(), SEVERAL)
    net.eval()


def test_an_anneal_that_is_stepped_is_silent() -> None:
    net = model()
    train(net, SEVERAL)
    net[1].tau.step()
    net.eval()


def test_trying_a_layer_out_is_silent() -> None:
    net = model()
    train(net, SEVERAL - 1)
    net.eval()


def test_evaluation_does_not_count() -> None:
    net = model().eval()
    train(net, 3 * SEVERAL)
    net.train().eval()


def test_training_that_was_resumed_is_silent() -> None:
    before, net = model(), model()
    before[1].tau.step()
    net.load_state_dict(before.state_dict())
    train(net, SEVERAL)
    net.eval()


def test_a_shared_anneal_and_a_copy_warn_once_each() -> None:
    tau = Anneal(1.0, 0.1, 100)
    net = torch.nn.Sequential(SoftTopK(2, tau=tau), SoftTopK(2, tau=tau))
    train(net, SEVERAL)
    other = copy.deepcopy(net)
    for each in (net, other):
        with pytest.warns(UserWarning, match=FORGOTTEN) as caught:
            each.eval()
        assert len(caught) == 1


def test_on_the_meta_device_nothing_is_read() -> None:
    net = model().to("meta")
    for _ in range(SEVERAL):
        net(torch.zeros(3, 4, device="meta"))
    net.eval()


def test_pruning_with_a_forgotten_step_warns() -> None:
    layer = khot.nn.prune_magnitude(torch.nn.Linear(4, 4), "weight", 0.5, tau=Anneal(1.0, 0.1, 100))
    train(layer, SEVERAL)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        layer.eval()


def test_compiled_training_counts_and_compiles_once() -> None:
    torch._dynamo.reset()
    net, graphs = model(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, fullgraph=True, backend=backend)
    train(compiled, SEVERAL)
    assert len(graphs) == 1
    with pytest.warns(UserWarning, match=FORGOTTEN):
        net.eval()


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(
        ValueError, match="schedule must be one of 'linear', 'cosine', 'exponential', but got 'exp'"
    ):
        Anneal(1.0, 0.1, 100, "exp")  # type: ignore[arg-type]
