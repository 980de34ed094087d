"""What is written into a pruned weight is lost, and the next use says so."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import pruned
from khot.nn import _handed_out, make_permanent, prune_n_m

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    pruned.KINDS[kind](model)
    return model


@pytest.fixture(autouse=True)
def _nothing_from_another_test() -> None:
    _handed_out._thread.watch.given.clear()


KINDS = ("one by one", "together", "score", "cost", "n of m")
each_kind = pytest.mark.parametrize("kind", KINDS)


def add(w: Tensor) -> None:
    w.data += 1


def replace(w: Tensor) -> None:
    w.data = torch.zeros_like(w)


RAISE: dict[str, Callable[[Tensor], object]] = {
    "data +=": add,
    "data =": replace,
    "data.mul_": lambda w: w.data.mul_(2),
    "data.copy_": lambda w: w.data.copy_(torch.full_like(w, 3)),
    "init of data": lambda w: nn.init.ones_(w.data),
    "NaN": lambda w: w.data.fill_(torch.nan),
    "fewer rows": lambda w: setattr(w, "data", w.data[:1]),
}
WARN: dict[str, Callable[[Tensor], object]] = {
    "init": lambda w: nn.init.xavier_uniform_(w),
    "detached": lambda w: w.detach().add_(1),
    "no_grad": lambda w: torch.no_grad()(w.mul_)(2),
    "foreach": lambda w: torch._foreach_mul_([w.detach()], 2.0),
    "one row": lambda w: w.detach()[0].zero_(),
}
WRITES = RAISE | WARN
USES: dict[str, Callable[[nn.Sequential, nn.Linear], object]] = {
    "the weight": lambda model, layer: layer.weight,
    "the model": lambda model, layer: model(X.to(layer.bias.dtype)),
    "another weight": lambda model, layer: model[0].weight if layer is model[2] else model[2].weight,
    "make_permanent": lambda model, layer: make_permanent(model),
    "make_permanent of another": lambda model, layer: make_permanent(model_of("one by one")),
}


@each_kind
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_lost_is_said_once_at_the_next_use(write: str, kind: str, seed: int) -> None:
    rng = random.Random(f"{write} {kind} {seed}")
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
    model = model_of(kind, dtype, seed).train(rng.random() < 0.5)
    layer = model[rng.choice([0, 2])]
    layer.weight.detach()
    with torch.set_grad_enabled(rng.random() < 0.5):
        WRITES[write](layer.weight)
    use = rng.choice(list(USES.values()))
    match = r"the pruned 'weight' of a Linear is lost.* parametrizations\.weight\.original,.*make_permanent"
    if write in RAISE:
        with pytest.raises(RuntimeError, match=match):
            use(model, layer)
    else:
        with pytest.warns(UserWarning, match=match) as caught:
            use(model, layer)
        assert len(caught) == 1
    if not any(map(parametrize.is_parametrized, model)):
        return
    for _ in range(2):
        model(X.to(dtype))
    make_permanent(model)


def each_way_of_use(model: nn.Sequential) -> None:
    x = X.to(model[0].bias.dtype)
    weights = [layer.weight for layer in (model[0], model[2])]
    copies = [w.detach().clone().mul_(2) for w in weights]
    assert all(w.numpy(force=True).size for w in weights if w.dtype != torch.bfloat16) and copies
    with parametrize.cached():
        model(x), model(x)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    model(x).square().sum().backward()
    torch.func.functional_call(model, dict(model.named_parameters()), x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(2)
    model[2].parametrizations.weight.original.data += 1
    copy.deepcopy(model)(x)
    with torch.inference_mode():
        model(x)
    nn.Parameter(model[0].weight.detach().clone()).data.mul_(2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: model(x), range(6)))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_no_false_alarm(kind: str, dtype: torch.dtype, training: bool) -> None:
    """Warnings are errors here."""
    model = model_of(kind, dtype).train(training)
    for _ in range(2):
        each_way_of_use(model)
    with torch.no_grad():
        model[2].parametrizations.weight.original.fill_(torch.nan)
    for _ in range(2):
        model(X.to(dtype))


def test_what_came_to_a_backward_pass_was_used_as_it_was_written() -> None:
    layer = prune_n_m(nn.Linear(8, 4), "weight", 2, 4)
    want = 3 * layer.weight.detach()
    w = layer.weight
    w.data = 3 * w.data  # as in training with quantised weights
    y = F.linear(X, w)
    y.sum().backward()
    torch.testing.assert_close(y, F.linear(X, want))
    del w, y
    layer(X)


@each_kind
@pytest.mark.parametrize("write", RAISE)
def test_a_weight_that_is_held_is_looked_at_as_long_as_it_is(write: str, kind: str) -> None:
    """It may be written into after others were asked for."""
    model = model_of(kind).eval()
    w = model[0].weight
    model(X), model[2].weight
    RAISE[write](w)
    del w
    with pytest.raises(RuntimeError, match="is lost"):
        model(X)


@each_kind
def test_no_memory_is_kept(kind: str) -> None:
    """Of the weights, one at most; after a backward pass none; and nothing of a model that is gone."""

    def kept() -> int:
        return len(_handed_out._thread.watch.given)

    model = model_of(kind)
    for _ in range(3):
        loss = model(X).sum()
        assert kept() == 1
        loss.backward()
        assert kept() == 0
        with torch.no_grad():
            model(X)
        assert kept() == 1
    held = [model[0].weight for _ in range(20)]
    assert kept() <= _handed_out.MOST + 1
    del held, loss
    freed = [weakref.ref(model[i].parametrizations.weight.original) for i in (0, 2)]
    del model
    gc.collect()
    assert [each() for each in freed] == [None, None] and kept() == 0


@each_kind
def test_traced_and_transformed_weights_are_not_watched(kind: str) -> None:
    torch.compiler.reset()
    model = model_of(kind).eval()
    before = len(_handed_out._thread.watch.given)
    want = model(X)
    _handed_out._thread.watch.given.clear()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(X), want)
    exported = torch.export.export(model, (X,))
    torch.testing.assert_close(exported.module()(X), want)
    state = {name: torch.stack([p, p]) for name, p in model.state_dict().items()}
    torch.vmap(lambda s: torch.func.functional_call(model, s, X))(state)
    model.to("meta")(X.to("meta"))
    assert len(_handed_out._thread.watch.given) == before == 0
