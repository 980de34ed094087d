"""What changes the state of a module: one table for all that takes a module, and for the methods of layers.

A row lists what its call is documented to change. All else has to be as it was, also after an exception:
the modes of all parts, parameters and their gradients, ``requires_grad``, buffers, hooks, classes, names,
settings, the state of random numbers, and whether gradients are enabled.
"""

from __future__ import annotations

import importlib
import inspect
import random
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import khot
import khot.lightning
import khot.transformers
import modes
from khot.nn import (
    Anneal,
    QuantileBalancer,
    TopKSAE,
    make_permanent,
    prune_global,
    prune_magnitude,
    prune_n_m,
)

balance = khot.transformers.balance
D, N, K = 6, 16, 3
HOOKS = [
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
]  # fmt: skip
PUBLIC = [
    "khot", "khot.nn", "khot.losses", "khot.estimators", "khot.distributions", "khot.sampling",
    "khot.baselines", "khot.transformers", "khot.lightning", "khot.sklearn",
]  # fmt: skip


# ------------------------------------------------------------------------------------ what a state is


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)
    return type(a) is type(b) and bool(a == b)


def parts(roots: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for i, root in enumerate(roots):
        for name, module in root.named_modules():
            yield f"{i}.{name}", module


def state_of(roots: list[nn.Module]) -> dict[str, dict[Any, Any]]:
    """Everything that may be noticed of modules, by kind."""
    found: dict[str, dict[Any, Any]] = {}
    for name, module in parts(roots):
        found.setdefault("modes", {})[module] = module.training
        found.setdefault("class", {})[module] = type(module)
        found.setdefault("names", {})[name] = module
        own = {k: v for k, v in vars(module).items() if k[0] != "_" and k != "training"}
        found.setdefault("settings", {})[module] = (
            module.extra_repr(),
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in own.items()},
        )
        found.setdefault("hooks", {})[module] = [[*getattr(module, each).items()] for each in HOOKS]
        for n, p in module._parameters.items():
            found.setdefault("names", {})[f"{name}.{n}"] = id(p)
            if p is not None:
                found.setdefault("parameters", {})[id(p)] = p.detach().clone()
                found.setdefault("gradients", {})[id(p)] = None if p.grad is None else p.grad.clone()
                found.setdefault("requires_grad", {})[id(p)] = p.requires_grad
        for n, b in module._buffers.items():
            found.setdefault(f"buffer {n}", {})[module] = None if b is None else b.clone()
    found["random numbers"] = {0: torch.get_rng_state(), 1: random.getstate()}
    found["gradients enabled"] = {0: torch.is_grad_enabled(), 1: torch.is_inference_mode_enabled()}
    return found


def changes(before: dict[str, dict[Any, Any]], after: dict[str, dict[Any, Any]]) -> set[str]:
    """Kinds that differ. Parts and parameters that have come or gone differ in their names only."""
    found = {"names"} if before["names"].keys() != after["names"].keys() else set()
    for kind, values in before.items():
        now = after.get(kind, {})
        if any(key in now and not equal(value, now[key]) for key, value in values.items()):
            found.add(kind)
    return found


def disturb(roots: list[nn.Module], training: bool | None, seed: int) -> None:
    """Modes, gradients, frozen parameters and hooks as no training leaves them."""
    draw = random.Random(seed)
    for _, module in parts(roots):
        module.training = draw.random() < 0.5 if training is None else training
        if draw.random() < 0.3:
            module.register_forward_hook(lambda *_: None)
        if isinstance(module, TopKSAE):
            module.idle.fill_(7)  # so that a count shows, also where all latents are used
    parameters = [p for root in roots for p in root.parameters() if p.is_leaf]
    for p in parameters:
        if draw.random() < 0.5:
            p.grad = torch.full_like(p, 0.5)
    if len(parameters) > 2:
        draw.choice(parameters).requires_grad_(False)


# ------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Row:
    """A call: ``make`` gives the modules that it may touch, and the call itself.

    ``changes`` must change, ``may`` can, and nothing else. With ``raises`` the call has to fail. Before
    it all parts are in the mode ``training``, and where that is None in modes at random.
    """

    name: str  # in khot
    make: Callable[[], tuple[list[nn.Module], Callable[[], Any]]]
    changes: Collection[str] = ()
    may: Collection[str] = ()
    raises: type[BaseException] | None = None
    training: bool | None = None
    case: str = ""


class Stop(Exception):
    pass


def stop(*_: Any) -> Any:
    raise Stop


def x(count: int = 60, seed: int = 0) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) + 1


def broken() -> Iterator[Tensor]:
    yield x()
    raise Stop


def sae(**options: Any) -> TopKSAE:
    return TopKSAE(D, N, options.pop("k", K), **options)


def annealed(**options: Any) -> TopKSAE:
    return sae(k=Anneal(6.0, K), **options)


def lasting(**options: Any) -> TopKSAE:
    return sae(k=Anneal(6.0, K, 20), **options)


class Model(nn.Module):
    """It has an autoencoder in it, a norm with moving means, a part that occurs twice, and a balancer."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.embed, self.norm = nn.Embedding(9, D), nn.BatchNorm1d(D)
        self.block = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))
        self.again, self.sae, self.head = self.block, annealed(batch=True), nn.Linear(D, 9)
        self.balancer = QuantileBalancer(D, 2, bins=64)
        self.sae.k.steps = 9  # type: ignore[union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, D)
        hidden = self.again(self.block(hidden))
        hidden = hidden.gather(-1, self.balancer(hidden)).sum(-1, keepdim=True) + hidden
        if self.fails:
            raise Stop
        return self.head(self.sae(hidden))


TOKENS = torch.arange(36).view(4, 9) % 9


def on(
    of: Callable[[], Any], call: Callable[[Any], Any], before: Callable[[Any], Any] = lambda _: None
) -> Any:
    """Makes a row's module, which ``before`` prepares, and its call of it."""

    def make() -> tuple[list[nn.Module], Callable[[], Any]]:
        layer = of()
        before(layer)
        return [layer], lambda: call(layer)

    return make


def recovering(fails: bool = False, inside: bool = True, **options: Any) -> Any:
    def make() -> tuple[list[nn.Module], Callable[[], Any]]:
        model = Model(fails)
        judged = model.sae if inside else lasting()
        return [model, judged], lambda: khot.nn.loss_recovered(model, "block", judged, TOKENS, **options)

    return make


def in_context(context: Callable[[], Any], call: Callable[[TopKSAE], Any]) -> Callable[[TopKSAE], Any]:
    def called(layer: TopKSAE) -> None:
        with context():
            call(layer)

    return called


def to_eval_and_stop(layer: TopKSAE) -> Any:
    def callback(row: dict[str, float]) -> None:
        layer.eval()
        if row["step"] > 3:
            raise Stop

    return khot.nn.fit_sae(layer, x(), 9, every=1, callback=callback)


def with_other_checkpoint(layer: TopKSAE) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sae.pt"
        state = torch.get_rng_state()
        khot.nn.fit_sae(lasting(batch=layer.batch), x(), 2, checkpoint=file)
        torch.set_rng_state(state)
        khot.nn.fit_sae(layer, x(), 3, checkpoint=file)


COUNTED = {"buffer mean", "buffer centred", "buffer idle"}
FITTED = {"parameters", "gradients", "buffer taken"} | COUNTED
FOLLOWED = {"buffer threshold"}
fit = khot.nn.fit_sae

batched = lambda: annealed(batch=True)  # noqa: E731
WITH_LENGTH = FITTED | FOLLOWED | {"settings"}  # the length of the schedule
FITS = {
    "": (sae, lambda s: fit(s, x(), 3), FITTED - {"buffer taken"}, None),
    "annealed": (batched, lambda s: fit(s, x(), 3, average=0.5), WITH_LENGTH, None),
    "no_grad": (lasting, in_context(torch.no_grad, lambda s: fit(s, x(), 9)), FITTED, None),
    "inference_mode": (lasting, in_context(torch.inference_mode, lambda s: fit(s, x(), 9)), FITTED, None),
    "the callback": (batched, to_eval_and_stop, WITH_LENGTH, Stop),
    "later batches": (lasting, lambda s: fit(s, broken(), 3), FITTED, Stop),
    "an argument": (annealed, lambda s: fit(s, x(), 3, lr=-1.0), (), ValueError),
    "activations": (annealed, lambda s: fit(s, x()[:, :4], 3), (), ValueError),
    "first batch": (annealed, lambda s: fit(s, [x()[:, :4]], 3), (), ValueError),
    "no batch": (annealed, lambda s: fit(s, [], 3), (), ValueError),
    "checkpoint": (annealed, with_other_checkpoint, (), ValueError),
    "a wait": (lambda: sae(k=Anneal(6.0, K, wait=5)), lambda s: fit(s, x(), 3), (), ValueError),
}
ROWS = [
    *(
        Row("nn.fit_sae", on(make, call), changed, raises=error, case=case)
        for case, (make, call, changed, error) in FITS.items()
    ),
    Row(
        "nn.fit_sae",
        on(annealed, lambda s: fit(s, x() * torch.nan, 3)),
        raises=FloatingPointError,
        case="not finite",
        may=COUNTED | {"gradients"},  # a forward pass was made
    ),
    *(
        Row("nn.unexplained", on(lasting, lambda s, z=z: khot.nn.unexplained(s, z())), raises=error)
        for z, error in ((x, None), (broken, Stop), (lambda: x()[:, 1:], ValueError))
    ),
    Row("nn.loss_recovered", recovering()),
    Row("nn.loss_recovered", recovering(inside=False), case="outside"),
    Row("nn.loss_recovered", recovering(fails=True), raises=Stop, case="the model"),
    Row("nn.loss_recovered", recovering(loss=stop), raises=Stop, case="the loss"),
]


# ------------------------------------------------------------------------------------------- pruning

# how a parametrisation is told from a plain parameter, whichever class it has
PARAMETRISED = {"class", "names"}


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def both(model: Any, amount: Any = 0.5, second: str = "weight", **options: Any) -> None:
    prune_global([(model[0], "weight"), (model[2], second)], amount, **options)


def plain(model: Any) -> None:
    """Nothing is pruned before."""


for name, error, case, call, before in (
    ("prune_magnitude", None, "", lambda m: prune_magnitude(m[0], "weight", 0.5), plain),
    ("prune_magnitude", ValueError, "", lambda m: prune_magnitude(m[0], "weight", 1.5), plain),
    ("prune_global", None, "", both, plain),
    ("prune_global", None, "score", lambda m: both(m, Anneal(0.0, 0.5, 9), by="score", tau=0.1), plain),
    ("prune_global", ValueError, "", lambda m: both(m, 1.5), plain),
    ("prune_global", ValueError, "the second", both, lambda m: prune_magnitude(m[2], "weight", 0.5)),
    ("prune_global", AttributeError, "no parameter", lambda m: both(m, second="scale"), plain),
    ("prune_n_m", None, "", lambda m: prune_n_m(m[0], "weight"), plain),
    ("prune_n_m", ValueError, "", lambda m: prune_n_m(m[2], "weight", 2, 3), plain),
    ("make_permanent", None, "", make_permanent, both),
    ("make_permanent", ValueError, "", make_permanent, plain),
):
    changed = PARAMETRISED | ({"parameters"} if name == "make_permanent" else set())
    sets = ((), ()) if error else (changed, {"hooks"})
    ROWS.append(Row(f"nn.{name}", on(pair, call, before), *sets, error, case=case))


# ----------------------------------------------------------------------------- layers of other libraries


class AutoEncoderTopK(nn.Module):
    """Has what dictionary_learning's layer of that name has."""

    activation_dim, dict_size = D, N

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, N), nn.Linear(N, D, bias=False)
        self.b_dec = nn.Parameter(torch.ones(D))
        self.register_buffer("k", torch.tensor(K + 1, dtype=torch.int))
        self.register_buffer("threshold", torch.tensor(-1.0))


def to_layer(**options: Any) -> Any:
    def make() -> tuple[list[nn.Module], Callable[[], Any]]:
        layer, target = sae(**options), AutoEncoderTopK()
        return [layer, target], lambda: khot.nn.sae_to_layout(layer, target)

    return make


def mixtral() -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads)
    return transformers.MixtralForCausalLM(config)


ROWS += [
    Row("nn.sae_to_layout", on(sae, lambda s: khot.nn.sae_to_layout(s, "saelens"))),
    Row("nn.sae_to_layout", to_layer(), {"parameters", "buffer k"}, case="to a layer"),
    Row("nn.sae_to_layout", to_layer(batch=True), raises=ValueError, case="to another layer"),
    Row(
        "nn.sae_from_layout", on(AutoEncoderTopK, khot.nn.sae_from_layout), may={"random numbers"}
    ),  # a layer is made
    Row(
        "nn.sae_from_layout",
        on(AutoEncoderTopK, partial(khot.nn.sae_from_layout, batch=True)),
        raises=ValueError,
    ),
    Row("transformers.balance", on(mixtral, balance), PARAMETRISED),  # of the routers
    Row("transformers.balance", on(mixtral, lambda m: balance(m, bins=3)), raises=ValueError, case="bins"),
    Row("transformers.balance", on(mixtral, lambda m: balance(m, ema=2.0)), raises=ValueError, case="ema"),
    Row("transformers.unbalance", on(mixtral, khot.transformers.unbalance, balance), PARAMETRISED),
    Row("transformers.unbalance", on(mixtral, khot.transformers.unbalance), raises=ValueError),
]


# ------------------------------------------------------------------------------ balancers and callbacks

SCORES = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def counted() -> QuantileBalancer:
    balancer = QuantileBalancer(6, 2, bins=64)
    balancer(SCORES * torch.linspace(0.1, 4, 6))
    balancer.update()
    balancer(SCORES * torch.linspace(0.1, 4, 6) + torch.arange(6))
    return balancer


class Mixed(nn.Module):
    """A balancer, and schedules of which one has no length."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer, self.tau, self.k = counted(), Anneal(1.0, 0.1), Anneal(3.0, 2.0, 9)
        self.norm = nn.BatchNorm1d(3)
        self.log_dict = lambda found: None


def trainer() -> Any:
    return types.SimpleNamespace(estimated_stepping_batches=7, global_step=0, log_every_n_steps=1)


def by_lightning(call: str, callback: Any, **values: Any) -> Any:
    def make() -> tuple[list[nn.Module], Callable[[], Any]]:
        model, made, runs = Mixed(), callback(), trainer()
        vars(runs).update(values)
        return [model], lambda: getattr(made, call)(runs, model)

    return make


def by_transformers(call: str, callback: Any, **values: Any) -> Any:
    def make() -> tuple[list[nn.Module], Callable[[], Any]]:
        model = Mixed()
        state: Any = types.SimpleNamespace(max_steps=7, log_history=[{}])
        vars(state).update(values)
        return [model], lambda: getattr(callback(), call)(None, state, None, model=model, logs={})

    return make


UPDATED = frozenset(f"buffer {name}" for name in ("bias", "updates", "load", "counts"))
OCTAVE = {"buffer octave"}
STEPPED = {"buffer taken"}
LENGTH = {"settings"}

ROWS += [
    *(
        Row(f"nn.QuantileBalancer.{name}", on(counted, call), UPDATED, OCTAVE)
        for name, call in {
            "update": lambda b: b.update(),
            "update_all": QuantileBalancer.update_all,
            "solve": lambda b: b.solve(SCORES),
            "reset_parameters": lambda b: b.reset_parameters(),
        }.items()
    ),
    Row(
        "nn.QuantileBalancer.update_all",
        on(counted, lambda b: QuantileBalancer.update_all([b, 3])),  # type: ignore[list-item]
        raises=TypeError,
    ),
    *(
        Row("nn.QuantileBalancer.solve", on(counted, lambda b, g=given: b.solve(*g)), raises=ValueError)
        for given in ((SCORES[:, 1:],), (SCORES, SCORES > 0))
    ),
]
for kind, library, start, step in (
    ("lightning", by_lightning, "on_fit_start", "on_train_batch_end"),
    ("transformers", by_transformers, "on_train_begin", "on_step_end"),
):
    place = importlib.import_module(f"khot.{kind}")
    moved = {"global_step": 1}
    unknown = {"estimated_stepping_batches": float("inf"), "max_steps": -1}
    anneal, balancer = f"{kind}.AnnealCallback", f"{kind}.BalancerCallback"
    ROWS += [
        Row(f"{anneal}.{start}", library(start, place.AnnealCallback), LENGTH),
        Row(f"{anneal}.{start}", library(start, place.AnnealCallback, **unknown), raises=ValueError),
        Row(f"{anneal}.{step}", library(step, place.AnnealCallback, **moved), STEPPED),
        Row(f"{balancer}.{step}", library(step, place.BalancerCallback, **moved), UPDATED, may=OCTAVE),
    ]
ROWS += [
    Row(f"{kind}.{name}.{call}", library(call, getattr(importlib.import_module(f"khot.{kind}"), name)))
    for kind, library, name, call in (
        ("lightning", by_lightning, "AnnealCallback", "on_train_start"),
        ("lightning", by_lightning, "BalancerCallback", "on_train_start"),
        ("transformers", by_transformers, "BalancerCallback", "on_log"),
    )
]


# ------------------------------------------------------------------------------------ methods of layers


def inputs_of(name: str) -> tuple[Tensor, ...]:
    return modes.ROWS[name].inputs


def written(name: str) -> tuple[set[str], bool]:
    """What a forward pass in train mode writes, and whether also without gradients."""
    if name.startswith("TopKSAE"):
        return set(COUNTED | (FOLLOWED if "batch" in name else set())), True
    if name.startswith("KHotGate") and name != "KHotGate-prices":
        return {"random numbers"}, True
    if name == "BalancedRouter" or name == "MixtureOfExperts-balanced":
        return {"buffer bias"}, False
    if name == "QuantileBalancer" or name == "TokenChoiceRouter-balanced":
        return {"buffer counts"}, False
    return set(), False


for name in modes.ROWS:
    public = name.partition("-")[0]
    path = f"nn.{public}.forward"
    writes, always = written(name)

    given = inputs_of(name)
    short = (z[..., :-2] if z.is_floating_point() else z for z in given[:1])
    run, frozen, fail, narrow = (
        on(partial(modes.make, name), call)
        for call in (
            lambda layer, given=given: layer(*given),
            torch.no_grad()(lambda layer, given=given: layer(*given)),
            lambda layer, given=given: layer(*given, "no such argument", object()),
            lambda layer, given=(*short, "mask"): layer(*given),
        )
    )
    ROWS += [
        Row(path, run, writes, case=f"{name} train", training=True),
        Row(path, run, case=f"{name} eval", training=False),
        Row(path, frozen, writes if always else (), case=f"{name} train, no_grad", training=True),
        Row(path, fail, raises=TypeError, case=f"{name} too many", training=True),
    ]
    if given:
        ROWS.append(Row(path, narrow, raises=Exception, case=f"{name} narrow", training=True))


dropping = on(
    lambda: khot.nn.TopKAttention(D, 2, 3, tau=0.5, dropout=0.2), lambda layer: layer(x(), x(), x())
)
jittering = on(
    lambda: khot.nn.TopKRouter(D, 4, 2, jitter=0.1, balancer=QuantileBalancer(4, 2, bins=64)),
    lambda layer: layer(x()),
)
RANDOM = {"random numbers"}
ROWS += [
    Row("nn.TopKAttention.forward", dropping, RANDOM, case="dropout", training=True),
    Row("nn.TopKAttention.forward", dropping, case="dropout in eval mode", training=False),
    Row("nn.TopKRouter.forward", jittering, RANDOM | {"buffer counts"}, case="jitter", training=True),
    Row("nn.TopKRouter.forward", jittering, case="jitter in eval mode", training=False),
]

METHODS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "loss": (lambda s: s.loss(*inputs_of("TopKSAE")), set(COUNTED)),
    "loss_parts": (lambda s: s.loss_parts(*inputs_of("TopKSAE")), set(COUNTED)),
    "encode": (lambda s: s.encode(*inputs_of("TopKSAE")), set(COUNTED)),
    "top": (lambda s: s.top(*inputs_of("TopKSAE")), set()),
    "decode": (lambda s: s.decode(torch.ones(2, 12, dtype=torch.float64)), set()),
    "dead": (lambda s: s.dead(3), set()),
}
for method, (call, writes) in METHODS.items():
    for mode in (True, False):
        ROWS.append(
            Row(
                f"nn.TopKSAE.{method}",
                on(partial(modes.make, "TopKSAE"), call),
                writes if mode else (),
                case="train" if mode else "eval",
                training=mode,
            )
        )
    ROWS.append(
        Row(
            f"nn.TopKSAE.{method}",
            on(partial(modes.make, "TopKSAE"), lambda s, method=method: getattr(s, method)("no tensor")),
            raises=Exception,
            training=True,
        )
    )


def judged(layer: Any) -> Tensor:
    query, template, label = inputs_of("SoftKNN-learned")
    return layer.loss(query, label[:, :5], template, label)


def predicted(layer: Any) -> Tensor:
    query, template, label = inputs_of("SoftKNN-learned")
    return layer.predict(query[0], template[0], label[0])


ROWS += [
    Row("nn.Anneal.step", on(partial(modes.make, "Anneal"), lambda a: a.step()), STEPPED),
    *(
        Row(f"nn.SoftKNN.{call.__name__}", on(partial(modes.make, "SoftKNN-learned"), run), training=mode)
        for call, run in ((khot.nn.SoftKNN.loss, judged), (khot.nn.SoftKNN.predict, predicted))
        for mode in (True, False)
    ),
    *(
        Row(
            f"nn.TopKSAE.{name}",
            on(sae, lambda s, name=name: setattr(s, name, torch.ones_like(getattr(s, name)))),
            {"parameters"} | more,
            case="assigned",
        )
        for name, more in (
            ("encoder", set()),
            ("decoder", {"buffer lengths"}),
            ("bias", {"buffer centred"}),
        )
    ),
    *(
        Row(
            f"nn.TopKSAE.{name}",
            on(sae, lambda s, name=name: setattr(s, name, torch.ones(2))),
            raises=ValueError,
            case="assigned",
        )
        for name in ("encoder", "decoder", "bias")
    ),
]
# a name of the table of layers for each class, whose methods train and reset_parameters are tried
OF_CLASS = {name.partition("-")[0]: name for name in modes.ROWS if name[0].isupper()}
OWN_STATE = {"parameters", "random numbers"}
for public, name in OF_CLASS.items():
    kind = getattr(khot.nn, public)
    ROWS.append(
        Row(
            f"nn.{public}.train",
            on(partial(modes.make, name), lambda layer: layer.eval()),
            {"modes"},
            training=True,
        )
    )
    if hasattr(kind, "reset_parameters") and public != "QuantileBalancer":
        buffers = {name for name, _ in modes.make(name).named_buffers()}
        ROWS.append(
            Row(
                f"nn.{public}.reset_parameters",
                on(partial(modes.make, name), lambda layer: layer.reset_parameters()),
                may=OWN_STATE | {f"buffer {each.rpartition('.')[2]}" for each in buffers},
            )
        )


# ------------------------------------------------------------------------------------------ the tests

ids = [f"{row.name} {row.case} {'raises' * bool(row.raises)}".strip() for row in ROWS]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_call_changes_what_it_says(row: Row) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        roots, call = row.make()
        disturb(roots, row.training, seed)
        before = state_of(roots)
        if row.raises is None:
            call()
        else:
            with pytest.raises(row.raises):
                call()
        found = changes(before, state_of(roots))
        assert {*row.changes} <= found <= {*row.changes, *row.may}, (seed, found)


def takes_a_module(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, nn.Module):
        return True
    return any(takes_a_module(each) for each in typing.get_args(hint))


def has_to_be_there() -> Iterator[str]:
    """Public functions that take a module, and methods of layers and of callbacks."""
    for place in PUBLIC:
        module = importlib.import_module(place)
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found):
                hints = typing.get_type_hints(found)
                if any(takes_a_module(hint) for of, hint in hints.items() if of != "return"):
                    yield f"{place}.{name}"
            if not isinstance(found, type):
                continue
            for owner in found.__mro__:
                for method, value in vars(owner).items():
                    value = getattr(value, "__func__", value)
                    ours = owner.__module__.startswith("khot") and inspect.isfunction(value)
                    if not ours or method.startswith("_") or method == "extra_repr":
                        continue
                    hints = typing.get_type_hints(value)
                    layer = place == "khot.nn" and issubclass(found, nn.Module)
                    if layer or name.endswith("Callback") or any(map(takes_a_module, hints.values())):
                        yield f"{place}.{name}.{method}"


def test_whatever_takes_a_module_is_in_the_table() -> None:
    missing = set(has_to_be_there()) - {f"khot.{row.name}" for row in ROWS}
    assert not missing, sorted(missing)
