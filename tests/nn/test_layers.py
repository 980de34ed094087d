"""What every layer owes to torch.nn's habits: one table, and the same checks for each of its rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import khot
from drawn import normal as scores
from khot import nn as layers


@dataclass(frozen=True)
class Layer:
    """One row. ``inputs`` are float64 or integer; the first is what the layer's dtype follows."""

    name: str
    make: Callable[..., nn.Module]  # takes device and dtype if it owns parameters
    inputs: tuple[Tensor, ...]
    owns_parameters: bool = True
    gives_indices: bool = False  # of any dtype of inputs, and without gradients
    random: bool = False  # in train mode: what tells one result from another then looks at eval mode


def _annealed() -> nn.Module:
    return khot.nn.SoftTopK(2, tau=khot.nn.Anneal(1.0, 0.1, steps=4))


def _values(end: float) -> khot.nn.Anneal:
    return khot.nn.Anneal(3.0, end, steps=4)


def _pruned(shares: dict[str, Any], **kw: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4, **kw), nn.Tanh(), nn.Linear(4, 3, **kw))
    khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], 0.6, tau=0.5, **shares)
    return model


def _pruned_n_m(**kw: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4, **kw), nn.Tanh(), nn.Linear(4, 3, **kw))
    for i, m in ((0, 3), (2, 4)):
        khot.nn.prune_n_m(model[i], "weight", 2, m, tau=0.5)
    return model


def _mixture(router: str, **kw: Any) -> nn.Module:
    experts = [nn.Linear(5, 3, **kw) for _ in range(4)]
    options = {} if router == "TopKRouter" else {"tau": 0.5}
    return khot.nn.MixtureOfExperts(getattr(khot.nn, router)(5, 4, 2, **options, **kw), experts)


TOKENS, FEW, ROWS = (scores(2, 7, 5),), (scores(7, 5),), (scores(3, 6),)
QUERIES = (scores(2, 5, 6), scores(2, 9, 6, seed=1), torch.arange(18).view(2, 9) % 4)
PLAIN: dict[str, Any] = {"owns_parameters": False}
LAYERS = [
    Layer(
        "SoftTopK-learned",
        lambda **kw: layers.SoftTopK(2.5, 0, tau=0.7, learnable_tau=True, learnable_k=True, **kw),
        (scores(6, 3),),
    ),
    Layer("SoftTopK-annealed", _annealed, ROWS, **PLAIN),
    Layer(
        "TopKAttention",
        lambda **kw: layers.TopKAttention(8, 2, 3, tau=0.5, **kw),
        (scores(5, 2, 8), scores(6, 2, 8, seed=1), scores(6, 2, 8, seed=2)),
    ),
    Layer("KHotGate", lambda **kw: layers.KHotGate(6, 2.5, **kw), ROWS, random=True),
    Layer(
        "KHotGate-prices",
        lambda **kw: layers.KHotGate(6, 2.5, cost=[1.0, 0.5, 2, 1, 0, 3], tau=0.5, **kw),
        ROWS,
    ),
    Layer("KHotGate-learned", lambda **kw: layers.KHotGate(6, None, **kw), ROWS, random=True),
    Layer("ExpertChoiceRouter", lambda **kw: layers.ExpertChoiceRouter(5, 3, 1.5, tau=0.5, **kw), TOKENS),
    Layer("TokenChoiceRouter", lambda **kw: layers.TokenChoiceRouter(5, 4, 2, tau=0.5, **kw), TOKENS),
    Layer(
        "TokenChoiceRouter-learned",
        lambda **kw: layers.TokenChoiceRouter(5, 4, 2, learnable_k=True, tau=0.5, **kw),
        TOKENS,
    ),
    Layer("BalancedRouter", lambda **kw: layers.BalancedRouter(5, 4, 2, tau=0.5, **kw), TOKENS),
    Layer("TopKRouter", lambda **kw: layers.TopKRouter(5, 4, 2, **kw), TOKENS),
    Layer(
        "TopKRouter-groups",
        lambda **kw: layers.TopKRouter(
            5, 8, 2, scores="sigmoid", groups=4, top_groups=2, scale=2.5, capacity=1.0, **kw
        ),
        TOKENS,
    ),
    Layer("MixtureOfExperts-balanced", lambda **kw: _mixture("BalancedRouter", **kw), TOKENS),
    Layer("MixtureOfExperts-expert choice", lambda **kw: _mixture("ExpertChoiceRouter", **kw), FEW),
    Layer("MixtureOfExperts-top k", lambda **kw: _mixture("TopKRouter", **kw), TOKENS),
    Layer("MixtureOfExperts-token choice", lambda **kw: _mixture("TokenChoiceRouter", **kw), TOKENS),
    Layer("SoftKNN", lambda: layers.SoftKNN(3, 4, tau=layers.Anneal(1.0, 0.1, steps=4)), QUERIES, **PLAIN),
    Layer("SoftKNN-learned", lambda **kw: layers.SoftKNN(3, 4, tau=0.7, learnable_tau=True, **kw), QUERIES),
    Layer(
        "QuantileBalancer",
        lambda: layers.QuantileBalancer(6, 2, bins=64),
        (scores(2, 7, 6),),
        **PLAIN,
        gives_indices=True,
    ),
    Layer(
        "TokenChoiceRouter-balanced",
        lambda **kw: layers.TokenChoiceRouter(
            5, 4, 2, tau=0.5, balancer=layers.QuantileBalancer(4, 2, bins=64), **kw
        ),
        TOKENS,
    ),
    Layer("TopKSAE", lambda **kw: layers.TopKSAE(5, 12, 2.5, tau=0.5, **kw), TOKENS),
    Layer("TopKSAE-hard", lambda **kw: layers.TopKSAE(5, 12, 3, **kw), TOKENS),
    Layer(
        "TopKSAE-batch", lambda **kw: layers.TopKSAE(5, 12, 3, tau=0.5, hard=True, batch=True, **kw), TOKENS
    ),
    Layer(
        "TopKSAE-transcoder",
        lambda **kw: layers.TopKSAE(5, 12, 3, tau=0.5, out_features=4, skip=True, **kw),
        TOKENS,
    ),
    Layer("Anneal", lambda: layers.Anneal(1.0, 0.1, steps=4), (), **PLAIN),
    *(
        Layer(
            f"TopKSAE{'-batch' * batch}-annealed",
            lambda batch=batch, **kw: layers.TopKSAE(5, 12, _values(2), tau=_values(0.5), batch=batch, **kw),
            TOKENS,
        )
        for batch in (False, True)
    ),
    Layer(
        "KHotGate-annealed",
        lambda **kw: layers.KHotGate(6, _values(2), tau=_values(1), estimator="gumbel", **kw),
        ROWS,
        random=True,
    ),
    *(
        Layer(f"prune_global{name}", lambda shares=shares, **kw: _pruned(shares, **kw), FEW)
        for name, shares in {
            "": {},
            "-shares": {"min_share": 0.3, "max_share": 0.5},
            "-cost": {"cost": [3, 1]},
            "-score": {"by": "score"},
        }.items()
    ),
    Layer("prune_n_m", _pruned_n_m, (scores(7, 6),)),
]
each_layer = pytest.mark.parametrize("row", LAYERS, ids=lambda row: row.name)
each_with_inputs = pytest.mark.parametrize("row", [r for r in LAYERS if r.inputs], ids=lambda row: row.name)
# pruned models keep the scores of half precision weights in single, and schedules do not start anew
each_with_parameters = pytest.mark.parametrize(
    "row",
    [r for r in LAYERS if r.owns_parameters and r.name != "prune_global-score"],
    ids=lambda row: row.name,
)
# containers leave it to their parts, as those of torch.nn do
each_with_own_parameters = pytest.mark.parametrize(
    "row",
    [r for r in LAYERS if r.owns_parameters and not re.match("MixtureOfExperts|prune|.*annealed", r.name)],
    ids=lambda row: row.name,
)


@pytest.mark.parametrize(
    "make",
    [
        lambda k: khot.nn.SoftTopK(k),
        lambda k: khot.nn.TokenChoiceRouter(3, 4, k),
        lambda k: khot.nn.TokenChoiceRouter(3, 4, k, balancer=khot.nn.QuantileBalancer(4, 2)),
        lambda k: khot.nn.TokenChoiceRouter(3, 4, k, learnable_k=True),
        lambda k: khot.nn.BalancedRouter(3, 4, k),
        lambda k: khot.nn.ExpertChoiceRouter(3, 4, k),
        lambda k: khot.nn.SoftKNN(k, 2),
        lambda k: khot.nn.TopKAttention(4, 1, k),
        lambda k: khot.nn.KHotGate(4, k),
    ],
)
def test_other_types_of_numbers(make: Callable[[Any], nn.Module]) -> None:
    for two in (np.int64(2), np.float32(2), torch.tensor(2), torch.tensor(2.0)):
        assert make(two).state_dict().keys() == make(2).state_dict().keys()


def test_every_layer_is_in_the_table() -> None:
    classes = {n for n in khot.nn.__all__ if isinstance(getattr(khot.nn, n), type)}
    layers = {n for n in classes if issubclass(getattr(khot.nn, n), nn.Module)}
    assert layers == {row.name.partition("-")[0] for row in LAYERS} - {"prune_global", "prune_n_m"}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def make(row: Layer, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = row.make(dtype=dtype) if row.owns_parameters else row.make()
    return layer.train(not row.random)


def inputs(row: Layer, dtype: torch.dtype, requires_grad: bool = False) -> list[Tensor]:
    moved = [x.to(dtype) if x.is_floating_point() else x for x in row.inputs]
    return [x.detach().requires_grad_(requires_grad and x.is_floating_point()) for x in moved]


def moved_on(row: Layer) -> nn.Module:
    """A layer whose state is no longer that of a new one."""
    layer = make(row)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * scores(*parameter.shape, seed=5)
    for module in layer.modules():
        if isinstance(module, khot.nn.Anneal):
            module.step()
    return layer


def assert_same(a: nn.Module, b: nn.Module, row: Layer) -> None:
    for training in (True, False)[row.random :]:
        torch.testing.assert_close(
            first(a.train(training)(*row.inputs)), first(b.train(training)(*row.inputs)), rtol=0, atol=0
        )


@each_with_parameters
def test_makes_parameters_where_it_is_told(row: Layer) -> None:
    layer = row.make(device="meta", dtype=torch.bfloat16)
    assert list(layer.parameters())
    assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in layer.parameters())


@each_with_own_parameters
def test_reset_parameters(row: Layer) -> None:
    layer = moved_on(row)
    torch.manual_seed(0)
    layer.reset_parameters()  # type: ignore[operator]
    assert_same(layer, make(row), row)


#: Names of layers that are traced as others are: what they have of their own is computed before or after.
ALIKE = re.compile(
    "-shares|-cost|-score|Experts-(bal|exp|tok)|(Router|KNN)-learned|(SAE|SAE-batch|Attention)-annealed|transcoder"
)


@pytest.mark.parametrize(
    "row", [r for r in LAYERS if r.inputs and not ALIKE.search(r.name)], ids=lambda row: row.name
)
def test_compiles_whole(row: Layer) -> None:
    seen: list[Tensor] = []
    for training in (True, False):
        if training and row.random:
            continue  # a sample looks at its probabilities
        layer = make(row).train(training)
        other = copy.deepcopy(layer)
        eager, traced = inputs(row, torch.float64, True), inputs(row, torch.float64, True)
        want = first(layer(*eager))
        if any(torch.equal(want, other) for other in seen):
            continue  # the mode changes nothing
        seen.append(want.detach())
        torch.compiler.reset()
        got = first(torch.compile(other, fullgraph=True, backend="aot_eager")(*traced))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(dict(other.named_buffers()), dict(layer.named_buffers()))
        if want.requires_grad:
            weight = scores(*want.shape, seed=3)
            (want * weight).sum().backward()
            (got * weight).sum().backward()
            torch.testing.assert_close([x.grad for x in traced], [x.grad for x in eager])
            grads = ([p.grad for p in each.parameters() if p.grad is not None] for each in (other, layer))
            torch.testing.assert_close(*grads)


# of hard selections the gradient is another's, and balancers move with each step
@pytest.mark.parametrize(
    "row",
    [
        r
        for r in LAYERS
        if r.inputs and not (r.random or re.search("-hard|-batch$|alanced|Balancer|-score", r.name))
    ],
    ids=lambda row: row.name,
)
def test_gradients(row: Layer) -> None:
    layer, given = make(row), inputs(row, torch.float64, True)
    layer(*given)  # the first batch may set what those after it have
    names, parameters = zip(*layer.named_parameters(), strict=True) if row.owns_parameters else ((), ())

    def f(*leaves: Tensor) -> Tensor:
        of_layer = dict(zip(names, leaves[len(given) :], strict=True))
        return first(torch.func.functional_call(layer, of_layer, leaves[: len(given)]))

    leaves = (*given, *(p.detach().clone().requires_grad_() for p in parameters))
    torch.autograd.gradcheck(f, leaves, fast_mode=True)


@each_with_inputs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(row: Layer, dtype: torch.dtype) -> None:
    layer = make(row, torch.float32)
    rounded = copy.deepcopy(layer).to(dtype)
    exact = copy.deepcopy(rounded).double()
    got = first(rounded(*inputs(row, dtype, True)))
    assert got.dtype == (torch.int64 if row.gives_indices else dtype)
    want = first(exact(*[x.double() if x.is_floating_point() else x for x in inputs(row, dtype)]))
    # a few roundings per step, of numbers around 1
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=8 * torch.finfo(dtype).eps)
    if row.gives_indices:
        return
    got.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in rounded.parameters())


@each_with_inputs
def test_autocast(row: Layer) -> None:
    layer = make(row, torch.float32)
    want = first(layer(*inputs(row, torch.float32)))
    given = inputs(row, torch.float32, True)
    with torch.autocast("cpu", torch.bfloat16):
        got = first(layer(*given))
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps)
    if row.gives_indices:
        return
    got.sum().backward()
    assert all(x.grad is None or x.grad.dtype == torch.float32 for x in given)


@each_layer
def test_repr_tells_the_arguments(row: Layer) -> None:
    assert "=" in repr(make(row))


#: Of these, inputs have any width.
ANY_WIDTH = {"SoftTopK", "SoftKNN"}
NAMES = {"QuantileBalancer": "scores", "TopKAttention": "query"}  # of the first input, elsewhere input


# before broadcasting hides the error
@pytest.mark.parametrize(
    "row",
    [r for r in LAYERS if r.inputs and r.name[0].isupper() and r.name.partition("-")[0] not in ANY_WIDTH],
    ids=lambda row: row.name,
)
def test_an_input_of_another_width_is_named(row: Layer) -> None:
    given, *others = row.inputs
    for width in (1, given.shape[-1] - 1, given.shape[-1] + 1, 2 * given.shape[-1]):
        name = NAMES.get(row.name.partition("-")[0], "input")
        assert_width_is_named(make(row), name, given, width, lambda layer, x: layer(x, *others))


def assert_width_is_named(
    layer: nn.Module, name: str, good: Tensor, width: int, call: Callable[[Any, Tensor], object]
) -> None:
    bad = torch.zeros(*good.shape[:-1], width, dtype=good.dtype)
    said = f"{name} must have shape (..., {good.shape[-1]}) for this "
    for training in (True, False):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}") as info:
            call(layer.train(training), bad)
        assert str(info.value).endswith(f", but got shape {tuple(bad.shape)}")


@pytest.mark.parametrize("width", [1, 7, 9, 16])
def test_other_inputs_of_another_width_are_named(width: int) -> None:
    good = torch.zeros(3, 3, 8)
    attention, sae = khot.nn.TopKAttention(8, 2, 2, batch_first=True), khot.nn.TopKSAE(8, 16, 4)
    cases: dict[str, tuple[nn.Module, Callable[[Any, Tensor], object]]] = {
        "key": (attention, lambda layer, x: layer(good, x, good)),
        "value": (attention, lambda layer, x: layer(good, good, x)),
        "code": (khot.nn.TopKSAE(5, 8, 4), khot.nn.TopKSAE.decode),
    }
    for name, (layer, call) in cases.items():
        assert_width_is_named(layer, name, good, width, call)
    for call in (khot.nn.TopKSAE.encode, khot.nn.TopKSAE.top):
        assert_width_is_named(sae, "input", good, width, call)
    knn = khot.nn.SoftKNN(2, 3)
    for find in (knn, knn.predict):
        with pytest.raises(ValueError, match=rf"equally many features .* \(3, 8\) and \(5, {width}\)"):
            find(good[0], torch.zeros(5, width), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"query and key .* \(3, 3, 8\) and \(3, 3, {width}\)"):
        khot.nn.topk_attention(good, torch.zeros(3, 3, width), good, 2)
    with pytest.raises(ValueError, match=rf"key and value .* \(3, 3, 8\) and \(3, {width}, 8\)"):
        khot.nn.topk_attention(good, good, torch.zeros(3, width, 8), 2)
    with pytest.raises(
        ValueError, match=rf"the same shape \(\.\.\., m\), but got \(3, {width}\) and \(3, 4\)"
    ):
        sae.decode(torch.zeros(3, width), torch.zeros(3, 4).long())
