"""Copies of pruned models, of their parts, and tied weights: what happens to one leaves the others alone."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from khot.nn import make_permanent, prune_global, prune_magnitude, prune_n_m
from pruned import GROUPS, KINDS, linear, mix_scores, together

pytestmark = pytest.mark.filterwarnings("ignore:all entries of parameters")

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


class Halved(nn.Module):
    """Somebody else's parametrisation."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return 2 * x


def plain(seed: int) -> nn.Sequential:
    """Three layers, one of them deeper in the tree, some with a parametrisation of somebody else's."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), inner, nn.Linear(8, 4))
    for layer in linear(model):
        if random.Random(seed).random() < 0.5:
            parametrize.register_parametrization(layer, "bias", Halved())
    return model


each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_group = pytest.mark.parametrize("kind", GROUPS.values(), ids=GROUPS)


# ------------------------------------------------------------------------------------------------ copies


def from_inside(model: nn.Module) -> nn.Module:
    """The copy begins at a parametrisation, which knows its module."""
    return copy.deepcopy([linear(model)[-1].parametrizations, model])[1]  # type: ignore[return-value]


COPIES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    copy.deepcopy,
    lambda model: AveragedModel(model).module,
    lambda model: copy.deepcopy({"layers": linear(model), "model": model})["model"],  # type: ignore[return-value]
    from_inside,
)


def removed_by_torch(model: nn.Module) -> None:
    values = {
        (layer, name): getattr(layer, name).detach().clone()
        for layer in linear(model)
        for name in getattr(layer, "parametrizations", ())
    }
    for (layer, name), value in values.items():
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
        with torch.no_grad():
            getattr(layer, name).copy_(value)


def one_more(model: nn.Module) -> None:
    """Another parameter of each layer is pruned, if it is plain, or has its parametrisation removed."""
    for layer in linear(model):
        if not parametrize.is_parametrized(layer, "bias"):
            prune_magnitude(layer, "bias", 0)
        elif isinstance(layer.parametrizations["bias"][0], Halved):
            parametrize.remove_parametrizations(layer, "bias")


ACTIONS: tuple[Callable[[nn.Module], Any], ...] = (make_permanent, removed_by_torch, one_more)


@pytest.mark.parametrize("seed", range(4))
@each_kind
def test_what_is_done_to_a_copy_is_not_done_to_the_others(kind: Any, seed: int) -> None:
    """Copies of copies, also of those that something was done to, in a random order."""
    rng = random.Random(seed)
    family = [plain(seed)]
    kind(family[0])
    want = family[0].eval()(X).detach()
    for _ in range(3):
        family.append(rng.choice(COPIES)(rng.choice(family)))
    rng.shuffle(family)
    for each in list(family):
        rng.choice(ACTIONS)(each)
        family.append(copy.deepcopy(rng.choice(family)))
        for other in family:
            torch.testing.assert_close(other(X), want, rtol=0, atol=1e-6)
    for each in family:
        if any(parametrize.is_parametrized(layer, "weight") for layer in linear(each)):
            make_permanent(each)
            assert {layer.weight.grad_fn for layer in linear(each)} == {None}


@each_kind
def test_a_copy_learns_by_itself(kind: Any) -> None:
    model = plain(0)
    kind(model)
    twin = copy.deepcopy(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        twin(X).square().sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(torch.equal(a, b) for a, b in zip(twin.parameters(), before, strict=True))
    assert not set(map(id, twin.modules())) & set(map(id, model.modules()))
    model.load_state_dict(twin.state_dict())
    torch.testing.assert_close(model.eval()(X), twin.eval()(X), rtol=0, atol=0)


@each_kind
def test_a_class_of_its_own_changes_nothing_else(kind: Any) -> None:
    model = plain(1)
    kind(model)
    for each in (model, copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        for layer in linear(each):
            assert type(layer).__name__ == "ParametrizedLinear" and type(layer).__bases__ == (nn.Linear,)
            assert parametrize.type_before_parametrizations(layer) is nn.Linear
            with pytest.raises(RuntimeError, match="only supported through state_dict"):
                pickle.dumps(layer)
    assert len({type(layer) for layer in linear(model) + linear(copy.deepcopy(model))}) == 6
    assert repr(copy.deepcopy(model)) == repr(model)


@pytest.mark.parametrize("seed", range(3))
@each_group
def test_a_copy_without_those_that_it_was_pruned_with_says_so(kind: Any, seed: int) -> None:
    """It has no hidden copies of the others, and what it was copied from goes on."""
    model, rng = plain(seed), random.Random(seed)
    kind(model)
    want = model.eval()(X)
    alone = copy.deepcopy(rng.choice(linear(model)))
    assert not any(isinstance(module, nn.Sequential) for module in alone.modules())
    uses: list[Callable[[], object]] = [
        lambda: alone(torch.randn(2, alone.in_features)),
        lambda: alone.train()(torch.randn(2, alone.in_features)),
        lambda: make_permanent(alone),
        lambda: copy.deepcopy(alone).weight,
    ]
    rng.shuffle(uses)
    for use in uses:
        with pytest.raises(
            RuntimeError, match=r"was copied without others of the . parameters.*make_permanent"
        ):
            use()
    torch.testing.assert_close(model(X), want, rtol=0, atol=0)
    make_permanent(model)
    one = copy.deepcopy(linear(model)[0])
    assert torch.equal(one(X), linear(model)[0](X))


def test_a_copy_of_all_that_was_pruned_together_is_whole() -> None:
    model = plain(3)
    together(model)
    layers = copy.deepcopy(nn.ModuleList(linear(model)))
    assert torch.equal(layers[0].eval()(X), linear(model)[0].eval()(X))  # type: ignore[operator]
    make_permanent(layers)
    zeros = sum(int((layer.weight == 0).sum()) for layer in linear(layers))
    assert zeros == sum(layer.weight.numel() for layer in linear(layers)) // 2


# ------------------------------------------------------------------------------- removed, and added later


@pytest.mark.parametrize("again", [False, True], ids=["removed", "pruned again"])
@pytest.mark.parametrize("which", range(3))
@each_group
def test_a_parametrisation_that_torch_removed_from_one_is_missed_by_the_others(
    kind: Any, which: int, again: bool
) -> None:
    model = plain(1)
    kind(model)
    layers = linear(model.eval())
    parametrize.remove_parametrizations(layers[which], "weight")
    others = [layer for i, layer in enumerate(layers) if i != which]
    if again:
        prune_magnitude(layers[which], "weight", 0.5)
    match = "is pruned with the others no more.*make_permanent.*leave_parametrized=False"
    uses: list[Callable[[], object]] = [lambda: make_permanent(model)]
    uses += [] if again else [lambda: others[0].weight, lambda: others[1](X), lambda: model(X)]
    for use in uses:
        with pytest.raises(RuntimeError, match=match):
            use()
    for layer in others:  # as the message says
        for name in list(layer.parametrizations):
            parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    together(nn.ModuleList(others))
    model(X)


@each_kind
def test_what_was_added_to_a_pruned_parameter_stays(kind: Any) -> None:
    model = plain(4)
    kind(model)
    parametrize.register_parametrization(linear(model)[0], "weight", Halved())
    want = model.eval()(X)
    make_permanent(copy.deepcopy(model))
    torch.testing.assert_close(make_permanent(model)(X), want, rtol=0, atol=0)
    assert [type(each) for each in linear(model)[0].parametrizations["weight"]] == [Halved]


# ------------------------------------------------------------------------------------------ tied weights


class Language(nn.Module):
    """An embedding and its decoder have one tensor."""

    def __init__(self, seed: int, deep: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.middle = nn.Embedding(8, 12), nn.Linear(12, 12)
        self.decoder = nn.Sequential(nn.Identity(), nn.Linear(12, 8)) if deep else nn.Linear(12, 8)
        self.last.weight = self.embedding.weight

    @property
    def last(self) -> nn.Linear:
        return linear(self.decoder)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.embedding(x)).relu())


TOKENS = torch.arange(8)
PRUNINGS: dict[str, Callable[[Language, nn.Module], object]] = {
    "alone": lambda model, user: prune_magnitude(user, "weight", 0.5),
    "with others": lambda model, user: prune_global([(model.middle, "weight"), (user, "weight")], 0.5),
    "score": lambda model, user: prune_global(
        [(user, "weight"), (model.middle, "weight")], 0.5, by="score", tau=1.0
    ),
    "n of m": lambda model, user: prune_n_m(user, "weight", 2, 4),
}
each_pruning = pytest.mark.parametrize("prune", PRUNINGS.values(), ids=PRUNINGS)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("user", ["embedding", "last"])
@each_pruning
def test_one_user_of_a_tied_weight_is_not_made_permanent(prune: Any, user: str, deep: bool) -> None:
    model = Language(0, deep)
    prune(model, getattr(model, user))
    mix_scores(model.eval())
    want, state = model(TOKENS).detach(), copy.deepcopy(model.state_dict())
    other = "embedding.weight" if user == "last" else f"decoder{'.1' * deep}.weight"
    with pytest.raises(ValueError, match=f"'{other}' is the same tensor as the pruned 'weight'"):
        make_permanent(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    free = model.last if user == "embedding" else model.embedding
    free.weight = nn.Parameter(free.weight.detach().clone())  # as the message says
    torch.testing.assert_close(make_permanent(model)(TOKENS), want)


@pytest.mark.parametrize("prune", [PRUNINGS["alone"], PRUNINGS["n of m"]], ids=["alone", "n of m"])
def test_nothing_is_refused_where_nothing_changes(prune: Any) -> None:
    """The users are pruned alike, or their common tensor has the zeros already."""
    model = Language(1, False)
    prune(model, model.embedding)
    prune(model, model.last)
    want = model.eval()(TOKENS)
    torch.testing.assert_close(make_permanent(model)(TOKENS), want)
    assert model.last.weight is model.embedding.weight
    prune(model, model.embedding)
    torch.testing.assert_close(make_permanent(model)(TOKENS), want)


def test_users_that_are_pruned_in_two_ways_are_refused() -> None:
    model = Language(3, True)
    prune_magnitude(model.embedding, "weight", 0.5)
    prune_magnitude(model.last, "weight", 0.25)
    with pytest.raises(ValueError, match=r"is the same tensor as .* and is pruned in another way"):
        make_permanent(model)
    assert parametrize.is_parametrized(model.embedding) and parametrize.is_parametrized(model.last)


def test_a_user_within_the_given_modules_is_missed() -> None:
    cell = nn.RNNCell(6, 6)
    cell.weight_hh = cell.weight_ih
    with pytest.raises(ValueError, match="'weight_hh' of a RNNCell is the same tensor as 'weight_ih'"):
        prune_magnitude(cell, "weight_ih", 0.5)
    assert not parametrize.is_parametrized(cell)
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("matrix", model[0].weight)
    with pytest.raises(ValueError, match=r"'0.weight' of a Sequential is the same tensor as 'matrix'"):
        prune_global([(model, "matrix")], 0.5)
    prune_global([(model, "matrix"), (model[0], "weight")], 0.5)
    assert torch.equal(model.matrix, model[0].weight)


def test_a_copy_of_one_user_of_a_tied_weight_has_all_entries() -> None:
    model = Language(4, False)
    prune_global([(model.embedding, "weight"), (model.last, "weight")], 0.5)
    want = model.eval().last.weight.detach()
    alone = copy.deepcopy(model.last)
    assert torch.equal(alone.weight, want) and torch.equal(make_permanent(alone).weight, want)
    assert torch.equal(model.last.weight, want)
