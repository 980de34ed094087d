"""Pruning: the selection is the magnitude operator's, shared by all layers, and its gradient is right."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import khot
from drawn import normal as scores
from khot.nn import Anneal, _pruning_groups, _pruning_selection, make_permanent, prune_global, prune_magnitude


def mlp(**kw: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5, dtype=torch.float64), nn.ReLU(), nn.Linear(5, 3, dtype=torch.float64)
    )


def pruned(amount: Any = 0.6, tau: Any = 0.8, p: float = 2.0) -> nn.Sequential:
    model = mlp()
    prune_global([(model[0], "weight"), (model[2], "weight")], amount, tau=tau, p=p)
    return model


@pytest.mark.parametrize(
    "cost", [None, [2.0, 1.0, 3.0], [torch.full((4, 1), 2.0), 1.0, torch.full((4,), 3.0)]]
)
def test_tied_weights_count_once(cost: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3)))
    for i, layer in enumerate(model):
        layer.weight.data = scores(4, 4, seed=i)
    plain = copy.deepcopy(model)
    model[2].weight = model[0].weight
    prune_global([(layer, "weight") for layer in model], 0.5, cost=cost)
    prune_global([(plain[0], "weight"), (plain[1], "weight")], 0.5, cost=None if cost is None else [5.0, 1.0])
    x = scores(3, 4, seed=5)
    for train in (True, False):
        model.train(train), plain.train(train)
        assert torch.equal(model[0].weight, model[2].weight)
        first = plain[0](x)
        want = plain[0](plain[1](first))
        got = model(x)
        torch.testing.assert_close(got, want)
        pairs = ((got, model), (want, plain))
        slopes = (torch.autograd.grad(y.sum(), m[0].parametrizations.weight.original) for y, m in pairs)
        torch.testing.assert_close(*slopes)
    if cost is None:
        assert sum(int((model[i].weight == 0).sum()) for i in (0, 1)) == 16
    kept = model[0].weight.detach()
    make_permanent(model)
    assert torch.equal(model[0].weight, kept) and model[0].weight is model[2].weight


def by_hand(x: Tensor, w: list[Tensor], b: list[Tensor], k: int, tau: Any, p: float = 2.0) -> Tensor:
    row = torch.cat([w[0].flatten(), w[1].flatten()])
    row = khot.soft_topk_magnitude(row, k, tau=tau, p=p, rescale=True)
    hidden = F.linear(x, row[:30].view(5, 6), b[0]).relu()
    return F.linear(hidden, row[30:].view(3, 5), b[1])


@pytest.fixture
def selections() -> Any:
    """How often the operator was called."""
    with mock.patch.object(
        _pruning_selection, "soft_topk_magnitude", side_effect=khot.soft_topk_magnitude, autospec=True
    ) as operator:
        yield operator


@pytest.mark.parametrize("p", [2.0, 1.5])
def test_one_parameter(p: float) -> None:
    layer = nn.Linear(6, 5, dtype=torch.float64)
    original, bias = layer.weight, layer.bias
    w = original.detach().clone()
    assert prune_magnitude(layer, "weight", 0.7, tau=0.3, p=p) is layer
    want = khot.soft_topk_magnitude(w.flatten(), 9, tau=0.3, p=p, rescale=True).view(5, 6)
    torch.testing.assert_close(layer.weight, want, rtol=0, atol=0)
    assert layer.parametrizations.weight.original is original and layer.bias is bias

    hard = layer.eval().weight
    torch.testing.assert_close(hard, w * khot.topk_mask(w.abs().flatten(), 9).view(5, 6), rtol=0, atol=0)
    assert (hard == 0).sum() == 21
    hard.sum().backward()
    torch.testing.assert_close(original.grad, (hard != 0).double())


@pytest.mark.parametrize(("amount", "zeros"), [(0, 0), (7, 7), (30, 30), (0.0, 0), (0.25, 8), (1.0, 30)])
def test_amount(amount: float, zeros: int) -> None:
    layer = prune_magnitude(
        nn.Linear(6, 5), "weight", amount
    ).eval()  # 0.25 * 30 rounds to 8, as torch's does
    assert (layer.weight == 0).sum() == zeros


@pytest.mark.parametrize("p", [2.0, 1.5])
def test_global_is_one_row_and_its_gradient_crosses_layers(p: float) -> None:
    model, x = pruned(p=p), scores(4, 6)
    w = [model[i].parametrizations.weight.original.detach().clone().requires_grad_() for i in (0, 2)]
    want = by_hand(x, w, [model[0].bias, model[2].bias], 18, 0.8, p)
    got = model(x)
    torch.testing.assert_close(got, want)
    # the first layer's loss alone: its gradient reaches the weights of the second through the threshold
    for loss in (got.square().sum(), model[0](x).square().sum()):
        model.zero_grad()
        loss.backward()
    reach = model[2].parametrizations.weight.original.grad
    assert reach is not None and (reach != 0).any()
    model.zero_grad()
    model(x).square().sum().backward()
    want.square().sum().backward()
    for i, layer in enumerate((model[0], model[2])):
        torch.testing.assert_close(layer.parametrizations.weight.original.grad, w[i].grad)


def test_one_selection_a_forward_pass(selections: mock.Mock) -> None:
    model, x = pruned(), scores(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # gradients accumulate over two passes, each with a graph of its own
        selections.reset_mock()
        optimizer.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
        assert selections.call_count == 2
        optimizer.step()
    selections.reset_mock()
    (model(x).sum() + model(2 * x).sum()).backward()  # two passes, one backward
    assert selections.call_count == 2


def test_an_annealed_tau_is_not_stale_either() -> None:
    tau, amount = Anneal(2.0, 0.1, 1), Anneal(0.2, 0.8, 1)
    model = pruned(amount, tau)
    model[0].weight.detach()
    tau.step(), amount.step()
    want = pruned(0.8, 0.1)[2].weight
    torch.testing.assert_close(model[2].weight, want)
    assert (torch.cat([model[i].eval().weight.flatten() for i in (0, 2)]) == 0).sum() == 36
    assert {"0.parametrizations.weight.0.tau.taken", "2.parametrizations.weight.0.amount.taken"} <= set(
        model.state_dict()
    )


def test_a_model_that_was_left_half_way_is_freed() -> None:
    model = pruned()
    model[0].weight.sum()
    freed = weakref.ref(model[2].parametrizations.weight.original)
    del model
    gc.collect()
    assert freed() is None


def test_make_permanent() -> None:
    model, x = pruned(0.9), scores(4, 6)
    originals = [model[i].parametrizations.weight.original for i in (0, 2)]
    want = copy.deepcopy(model).eval()(x)
    assert make_permanent(model) is model
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    assert type(model[0]) is nn.Linear and not parametrize.is_parametrized(model[0])
    assert model[0].weight is originals[0] and model[2].weight is originals[1]
    assert sum(int((w == 0).sum()) for w in originals) == 40  # round(0.9 · 45), to even
    assert set(model.state_dict()) == set(mlp().state_dict())


SHARES = r"amount must keep {} to {} of the 30 entries, .* but it keeps {}$"
OF_PRICES, PAIRS = (
    r"^min_share and max_share must be 0 and 1",
    r"must be pairs \(module, name\), such as \[\(m",
)
REFUSED: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "prune_magnitude": [
        *(({"amount": amount}, ValueError, "^amount must") for amount in (-1, 31, 1.5, -0.1)),
        ({"amount": True}, TypeError, "^amount must"),
        ({"tau": 0}, ValueError, "^tau must"),
        ({"p": 4}, ValueError, "^p must"),
        ({"name": "wait"}, AttributeError, "wait"),
    ],
    "prune_n_m": [
        ({"n": 3, "m": 2}, ValueError, "^n must"),
        ({"n": -1}, ValueError, "^n must"),
        ({"n": 1.5}, TypeError, "^n must"),
        ({"m": 0}, ValueError, "^m must"),
        ({"m": 4}, ValueError, "^m must divide the size of 'weight' along dim 1, which is 6, but got 4"),
        ({"tau": 0}, ValueError, "^tau must"),
        ({"dim": 2}, IndexError, "^dim must"),
        ({"name": "wait"}, AttributeError, "wait"),
    ],
    "prune_global": [
        ({"parameters": []}, ValueError, "^parameters must"),
        ({"parameters": "twice"}, ValueError, "^parameters must"),
        *(({"parameters": wrong}, TypeError, PAIRS) for wrong in (nn.Linear(3, 3), [nn.Linear(3, 3)])),
        *(({"parameters": [wrong]}, TypeError, PAIRS) for wrong in (torch.ones(3), (nn.Linear(3, 3), 1), ())),
        ({"by": "scores"}, ValueError, r"^by must be one of .* did you mean 'score'"),
        ({"by": "score", "tau": 0.5, "p": 1.5}, ValueError, r"^p must be 2 with by='score', but got 1\.5"),
        ({"by": "score"}, ValueError, r"^tau must be given with by='score', .*Anneal\(100 \* r, r, steps\)"),
        ({"min_share": -0.1}, ValueError, "^min_share must"),
        ({"min_share": 1.1}, ValueError, "^min_share must"),
        ({"min_share": math.nan}, ValueError, "^min_share must"),
        ({"min_share": "a lot"}, TypeError, "^min_share must"),
        ({"max_share": 1.5}, ValueError, "^max_share must"),
        ({"min_share": 0.5, "max_share": 0.4}, ValueError, "^max_share must"),
        ({"amount": 0.9, "min_share": 0.2}, ValueError, SHARES.format(6, 30, 3)),
        ({"amount": 15, "max_share": 0.4}, ValueError, SHARES.format(0, 12, 15)),
        ({"cost": [1, 1]}, ValueError, r"^cost must have one entry per parameter, 1, but got 2"),
        *(({"cost": wrong}, TypeError, r"^cost must be a list") for wrong in (3.0, torch.ones(1), "1")),
        *(({"cost": [wrong]}, ValueError, r"^cost must be finite") for wrong in (-1, math.inf, math.nan)),
        ({"cost": ["a"]}, TypeError, r"^cost must be a real number"),
        ({"cost": [torch.ones(6).bool()]}, TypeError, r"^cost must be a real"),
        ({"cost": [-2 * torch.ones(6)]}, ValueError, r"^cost must be finite and >= 0, but got -2"),
        ({"cost": [torch.ones(4)]}, ValueError, r"^cost must broadcast to 'weight' of shape \(5, 6\)"),
        *(({"cost": [1], name: 0.5}, ValueError, OF_PRICES) for name in ("min_share", "max_share")),
        ({"cost": [2], "amount": 61}, ValueError, r"^amount must lie in \[0, 60\], but got 61"),
        ({"cost": [2], "amount": 1.1}, ValueError, r"^amount must lie in \[0, 1\]"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    layer, prune = nn.Linear(6, 5), getattr(khot.nn, name)
    pair: dict[str, Any] = {"module": layer, "name": "weight"}
    good = pair | ({"n": 1, "m": 3} if name == "prune_n_m" else {"amount": 0.5})
    if name == "prune_global":
        good = {"parameters": [(layer, "weight")], "amount": 0.5}
    for changed, error, message in REFUSED[name]:
        if changed.get("parameters") == "twice":
            changed = {"parameters": good["parameters"] * 2}
        with pytest.raises(error, match=message):
            prune(**good | changed)
        assert not parametrize.is_parametrized(layer), changed
    with pytest.raises(ValueError, match="module must"):
        make_permanent(layer)
    prune(**good | ({"min_share": 0.2} if name == "prune_global" else {}))
    said = {
        "prune_magnitude": "amount=0.5, tau=1.0, p=2.0)",
        "prune_n_m": "n=1, m=3, dim=1, tau=1.0)",
        "prune_global": "amount=0.5, tau=1.0, p=2.0, min_share=0.2, max_share=1.0)",
    }
    assert said[name] in repr(layer)
    with pytest.raises(ValueError, match="must"):
        prune(**good)


class Pause:
    """Equal to every other, but only after the other threads had a turn."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        time.sleep(1e-4)
        return True


def test_threads_may_share_a_model_in_eval_mode() -> None:
    """As a server does. Threads used to take one another's parts of a selection, which was a KeyError."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).requires_grad_(False)
    prune_global([(layer, "weight") for layer in model], 0.5)
    model.eval()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    want, start = model(x), threading.Barrier(8)

    def serve() -> bool:
        start.wait()
        return all(torch.equal(model(x), want) for _ in range(10))

    with (
        mock.patch.object(_pruning_groups.Group, "_state", lambda self, hard: (hard, Pause())),
        ThreadPoolExecutor(8) as pool,
    ):
        assert [future.result() for future in [pool.submit(serve) for _ in range(8)]] == [True] * 8


def test_threads_may_train_at_the_same_time() -> None:
    """Each thread has its own graph, and its backward pass leaves the others' selections alone."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    prune_global([(layer, "weight") for layer in model], 0.5, tau=0.5)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    originals = [layer.parametrizations.weight.original for layer in model]
    want = torch.autograd.grad(model(x).square().sum(), originals)

    def train() -> bool:
        for _ in range(20):
            got = torch.autograd.grad(model(x).square().sum(), originals)
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(train) for _ in range(4)]] == [True] * 4


# ------------------------------------------------------------------------- several losses, and stale parts

MEMBERS = (0, 2)


class Learned(nn.Module):
    """A temperature that is trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.raw


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("p", [2.0, 1.5])
@pytest.mark.parametrize("tau", [0.8, "learned"])
@pytest.mark.parametrize("order", [(0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_losses_of_members_one_after_the_other(
    passes: int, order: tuple[int, int], tau: Any, p: float, training: bool
) -> None:
    """The sum of their gradients is that of the sum of the losses; ``passes`` times, with retain_graph."""

    def grads(separate: bool) -> list[Tensor]:
        model = pruned(tau=Learned() if tau == "learned" else tau, p=p).train(training)
        losses = {i: (model[i].weight.square() * (2 + i)).sum() for i in MEMBERS}
        for left in reversed(range(passes)):
            for loss in [losses[i] for i in order] if separate else [losses[0] + losses[2]]:
                loss.backward(retain_graph=left > 0)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    want = grads(separate=False)
    assert len(want) == 2 + (tau == "learned" and training)
    torch.testing.assert_close(grads(separate=True), want)


def test_a_backward_pass_uses_the_weights_of_its_forward_pass() -> None:
    """Also the second one, after a step of the optimizer."""
    model, other = pruned(), pruned()
    first, second = (model[i].weight.square().sum() for i in MEMBERS)
    optimizer = torch.optim.SGD([model[i].parametrizations.weight.original for i in MEMBERS], lr=0.5)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    other[2].weight.square().sum().backward()
    for i in MEMBERS:
        torch.testing.assert_close(
            model[i].parametrizations.weight.original.grad, other[i].parametrizations.weight.original.grad
        )


def test_second_derivatives_of_members() -> None:
    w = [pruned()[i].parametrizations.weight.original.detach().clone().requires_grad_() for i in MEMBERS]
    row = khot.soft_topk_magnitude(torch.cat([x.flatten() for x in w]), 18, tau=0.8, rescale=True)
    model = pruned()
    originals = [model[i].parametrizations.weight.original for i in MEMBERS]

    def second(loss: Tensor, leaves: list[Tensor], retain_graph: bool) -> list[Tensor]:
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return list(
            torch.autograd.grad(sum(g.square().sum() for g in first), leaves, retain_graph=retain_graph)
        )

    weights = [model[i].weight for i in MEMBERS]
    for ours, theirs in zip(weights, (row[:30], row[30:]), strict=True):
        got = second(ours.pow(3).sum(), originals, retain_graph=False)
        torch.testing.assert_close(got, second(theirs.pow(3).sum(), w, retain_graph=True))


CHANGES: dict[str, Any] = {
    "no_grad": lambda x: x.mul_(2),
    "data": lambda x: x.data.mul_(2),
    "new data": lambda x: setattr(x, "data", x.data * 2),
    "detached": lambda x: x.detach().mul_(2),
    "numpy": lambda x: x.detach().numpy().__imul__(2),
    "one entry": lambda x: x.data.view(-1)[0].add_(5),
    "init": lambda x: nn.init.ones_(x),
    "foreach": lambda x: torch._foreach_mul_([x.detach()], 2.0),
    "exchanged": lambda x: x.data.copy_(x.data.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("order", [(0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_part_that_was_not_accessed_follows_its_original(
    change: Any, order: tuple[int, int], training: bool, grad: bool
) -> None:
    model = pruned().train(training)
    with torch.set_grad_enabled(grad):
        model[order[0]].weight.detach()
    with torch.no_grad():
        change(model[order[1]].parametrizations.weight.original)
    with torch.set_grad_enabled(grad):
        got = model[order[1]].weight
    want = copy.deepcopy(model)
    torch.testing.assert_close(got, want[order[1]].weight, rtol=0, atol=0)
    assert got.requires_grad == grad
