"""Hostile input: what no function takes, at every argument of every public function, layer and loss.

Each argument has a role, and each role has values that are always wrong: a tensor in a dtype or layout that
one cannot compute with, a string instead of a number, a list instead of a name. The answer is a TypeError, a
ValueError or (for ``dim``) an IndexError that names the argument, from the call that got the value: for an
argument of a constructor, from the constructor. A function or an argument without a row here fails a test.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import khot
from khot import baselines, distributions, estimators, losses, sampling
from khot.sampling import conditional_poisson
from operators import FIRST

PLACES = {
    "khot": khot,
    "khot.baselines": baselines,
    "khot.distributions": distributions,
    "khot.estimators": estimators,
    "khot.losses": losses,
    "khot.nn": khot.nn,
    "khot.sampling": sampling,
    "khot.sampling.conditional_poisson": conditional_poisson,
}
PUBLIC = {
    f"{place}.{name}": getattr(module, name)
    for place, module in PLACES.items()
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or inspect.isclass(getattr(module, name))
}
del PUBLIC["khot.show_config"]  # it takes no argument
# These hold values and check none.
RECORDS = {
    "khot.nn.Beams",
    "khot.nn.LossParts",
    "khot.nn.Routing",
    "khot.nn.TopKRouting",
    "khot.sampling.Design",
}
# These take a module, and tensors only as its parameters; or a state dict, which their own tests spoil.
OF_MODULES = {
    "khot.nn.make_permanent",
    "khot.nn.prune_global",
    "khot.nn.prune_magnitude",
    "khot.nn.prune_n_m",
    "khot.nn.sae_from_layout",
    "khot.nn.sae_to_layout",
}
# Options that are not checked: sources of randomness, shapes of draws, what torch itself checks; and offsets,
# which are in test_packed.py.
UNCHECKED = {
    *(
        "offsets",
        "generator",
        "seed",
        "group",
        "sample_shape",
        "device",
        "dtype",
        "scale",
        "dropout_p",
        "dropout",
        "bias",
    ),
    *("end", "chunk_size", "step_function"),
}

X = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.25, 1.0, -2.0, 0.0]])
PROBS = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.9, 0.1, 0.6, 0.4]])
MASK = torch.tensor([[True, True, False, True], [True, True, True, True]])
TWO_OF_FOUR = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
ORDER = torch.tensor([[1, 3, 0, 2], [2, 3, 0, 1]])
N = 4


@dataclass(frozen=True)
class Row:
    """A call, and good arguments for it, by keyword.

    Attributes:
        roles: the roles of arguments whose names mean something else elsewhere.
        fine: values that are hostile elsewhere, but not here.
    """

    call: Callable[..., Any]
    good: dict[str, Any]
    roles: dict[str, str] = field(default_factory=dict)
    fine: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __call__(self, **changed: Any) -> Any:
        torch.manual_seed(0)
        return self.call(**{**self.good, **changed})


# --------------------------------------------------------------------------------------------- the roles

ROLES = {
    **dict.fromkeys(("input", "logits", "probs", "p_logits", "q_logits", "loss", "log_prob"), "scores"),
    "scores": "scores",
    **dict.fromkeys(("targets", "relevance", "labels"), "target"),
    **dict.fromkeys(("query", "key", "template", "embedding", "start", "state", "code"), "scores"),
    **dict.fromkeys(("label", "query_label", "target", "indices"), "index"),
    **dict.fromkeys(("mask", "attn_mask"), "mask"),
    **dict.fromkeys(("k", "top_k", "count"), "count"),
    **dict.fromkeys(("tau", "epsilon", "temperature"), "positive"),
    **dict.fromkeys(
        ("estimator", "design", "reduction", "baseline", "adjust", "schedule", "interpolation", "phi"),
        "name",
    ),
    **dict.fromkeys(("guess", "method", "regularization"), "name"),
    "w": "values",
    **dict.fromkeys(("num_experts", "in_features", "latents", "num_classes", "n", "length"), "size"),
    **dict.fromkeys(("iterations", "rounds", "steps"), "size"),
    **dict.fromkeys(("p", "rho"), "share"),
    "step": "number",
    "value": "binary",
    "label_smoothing": "share",
    "at": "level",
    "weight": "weight",
    "cdf": "cdf",
    "dim": "dim",
    "capacity": "positive",
    "total": "positive",
    **dict.fromkeys(("q", "alpha"), "quantile"),
    **dict.fromkeys(("cost", "weights"), "cost"),
    "budget": "budget",
    "by": "name",
}
# What a tensor in each role may also be: the call then gives the same as for the good tensor.
TENSORS: dict[str, tuple[str, ...]] = {
    "scores": (),
    "mask": ("bool",),
    "index": ("int64",),
    "binary": ("bool", "int64"),
    "target": ("bool", "int64"),
    "values": ("int64",),
    "count": ("int64",),
    "positive": ("int64",),
    "weight": ("int64",),
    "level": ("int64",),
    "quantile": ("int64",),
    "cost": ("int64",),
    "budget": ("int64",),
}
# Where a number that is refused is refused in a tensor, too.
IN_TENSORS = ("count", "positive", "quantile", "budget")
HUGE = 10**400  # no float
NOT_NUMBERS: tuple[Any, ...] = ("2", None, [2], [1.0], (2,), True, 2j, math.nan, object())
NOT_NAMES: tuple[Any, ...] = (["x"], 3, None, "x", ("pareto",), torch.ones(2), 1j)
SCALARS: dict[str, tuple[Any, ...]] = {
    "count": (*NOT_NUMBERS, math.inf, -math.inf, -1, -0.5, N + 1, N + 0.5, HUGE),
    "positive": (*NOT_NUMBERS, 0, -1, -0.5, math.inf, -math.inf, HUGE),
    "scores": (1.0,),
    "mask": (True, 1, "mask"),
    "weight": (*NOT_NUMBERS, -1),
    "level": NOT_NUMBERS,
    "share": (*NOT_NUMBERS, 2 + 0j, torch.ones(2), -1, 1.1, 5, math.inf, HUGE),
    "quantile": (*NOT_NUMBERS, -1, 5, math.inf),
    "number": (*NOT_NUMBERS, math.inf),
    "budget": (*NOT_NUMBERS, math.inf, -math.inf, -1, N + 1),
    "size": ("2", None, [2], 2j, -1, 0, 1.5, math.nan, math.inf),
    "widths": ("2", 2, [0], [N], [2, 2], [2.0], [None], [math.nan], torch.tensor([2])),
    "times": ("2", None, [2], 2j, -1, 1.5, math.nan, math.inf, True),
    "integer": ("2", None, [2], 2j, -1, N + 1, 1.5, math.nan, math.inf, True),
    "cdf": (
        3,
        "logistc",
        "Logistic",
        "",
        ["logistic"],
        None,
        1j,
        torch.ones(2),
        khot.cdfs.Normal,
        torch.sigmoid,
    ),
    "dim": (5, -5, "x", 1.5, None, [0], (0, 1), True, torch.tensor(0), HUGE),
    "dim type": ("x", 1.5, None, [0], True),
    "name": NOT_NAMES,
    "balancer": (True, 2, "x", torch.ones(3), nn.Linear(2, 2), khot.nn.QuantileBalancer),
}

# ------------------------------------------------------------------------------------------- the calls

BEAMS = {
    "step": lambda x, h: (h.float() @ torch.ones(4, N), h.float()),
    "embedding": torch.ones(N, 3),
    "start": torch.zeros(3),
    "state": torch.ones(2, 4),
    "k": 2,
    "epsilon": 1.0,
}
OF_BEAMS = {"k": "integer", "step": "function", "start": "target", "state": "target"}
QUERIES = {"query": torch.randn(2, 3), "template": torch.randn(4, 3), "label": torch.tensor([0, 1, 1, 0])}
TOKENS = {"input": torch.randn(2, 5, 4), "mask": torch.ones(2, 5, dtype=torch.bool)}
ATTENDED = {"query": torch.randn(2, 3, 4), "key": torch.randn(2, 5, 4), "value": torch.randn(2, 5, 4)}

# What an argument gets that has no default, or None. What a function needs otherwise stands in ODD,
# ODD_ROLES and FINE; rows of classes and methods are below.
GOOD = {
    **dict.fromkeys(("input", "logits", "scores", "p_logits", "q_logits", "loss", "log_prob"), X),
    **dict.fromkeys(("value", "targets", "relevance", "labels"), TWO_OF_FOUR),
    **dict.fromkeys(("at", "budget", "count", "q", "weight"), 1.0),
    **dict.fromkeys(("k", "grades"), 2),
    "probs": PROBS,
    "mask": MASK,
    "target": ORDER,
    "capacity": 2.0,
    "alpha": 1.0,
    "cost": torch.ones(N),
    "w": torch.tensor([2.0, 1.0, 3.0, 0.0]),
}


WHOLE = {"iterations": 5, "epsilon": 1.0}  # few, and a number that is an integer, too


def good(call: Callable[..., Any], **odd: Any) -> dict[str, Any]:
    found, signature = {}, inspect.signature(call).parameters
    odd = {name: value for name, value in (WHOLE | odd).items() if name in signature}
    for name, parameter in signature.items():
        value = odd.get(name, parameter.default)
        if name not in odd and value in (None, inspect.Parameter.empty):
            value = GOOD.get(name)
        if name in odd or not (value is None or name in UNCHECKED or isinstance(value, bool)):
            found[name] = value
    return found


def of(
    call: Callable[..., Any], odd: dict[str, Any], roles: dict[str, str] | None = None, **fine: Any
) -> Row:
    """The row of a call with its defaults and what is good elsewhere, but for what is ``odd``."""
    return Row(call, good(call, **odd), roles or {}, fine)


PROJECTION = {"method": "projection", "regularization": "kl"}
ODD: dict[str, dict[str, Any]] = {
    "khot.soft_assign": {
        "input": torch.randn(2 * N, N), "k": 1.0, "total": 2.0 * N, "mask": torch.ones(2 * N, N).bool(),
    },
    "khot.linear_topk": {"weight": X, "bias": X[..., 0]},
    "khot.soft_budget": {"by": "value"},
    "khot.budget_mask": {"by": "value"},
    "khot.sparse_topk": {"p": 1.5},
    "khot.quantile by weights": {"weights": torch.ones(N)},
    "khot.nucleus_mask": {"p": 1.0},
    "khot.k_support_negentropy": {"input": PROBS},
    "khot.soft_topk_sum": {"phi": "abs"},
    "khot.project_permutahedron": {"p": 1.5},
    "khot.soft_quantile": {"interpolation": "linear"},
    "khot.soft_rank by projection": PROJECTION,
    "khot.soft_sort by projection": PROJECTION,
    "khot.sample_khot": {"estimator": "second_order", "design": "systematic", "tau": 1.0},
    "khot.baselines.root_finding_topk": {"method": "newton", "guess": "zero"},
    "khot.estimators.sample_khot": {"estimator": "gumbel", "tau": 1.0},
    "khot.estimators.straight_through": {"design": "systematic"},
    "khot.estimators.second_order": {"design": "systematic"},
    "khot.estimators.score_function": {"baseline": "leave_one_out"},
    "khot.sampling.sample": {"adjust": "exact"},
    "khot.sampling.joint_inclusion_probs": {"design": "systematic"},
    "khot.losses.ndcg_loss": {"k": 2.0},
    "khot.losses.recall_at_k_loss": {"k": 2.0},
    "khot.losses.hit_at_k_loss": {"k": 2.0},
    "khot.losses.precision_at_k_loss": {"k": 2.0},
}  # fmt: skip
ODD_ROLES: dict[str, dict[str, str]] = {
    **{f"khot.{n}": {"k": "integer"} for n in ("topk", "sorted_soft_topk", "baselines.sorted_sinkhorn_topk")},
    **{f"khot.{n}": {"k": "integer"} for n in ("soft_permutation", "log_soft_permutation")},
    "khot.linear_topk": {"k": "integer", "weight": "scores", "bias": "scores"},
    "khot.baselines.pav_topk": {"p": "name"},
    "khot.nucleus_mask": {"p": "quantile"},
    "khot.losses.log_rank_loss": {"grades": "size"},
    **{
        f"khot.losses.{n}_loss": {"k": "positive"}
        for n in ("ndcg", "recall_at_k", "precision_at_k", "hit_at_k")
    },
}
FINE: dict[str, dict[str, tuple[Any, ...]]] = {
    "khot.soft_assign": {"total": (HUGE,)},  # refused as the infinity that it is as a float
    "khot.budget_mask": {"budget": (N + 1, math.inf)},
    **{f"khot.quantile{name}": {"dim": (None,)} for name in ("", " by weights")},
    **{f"khot.{n}": {"k": (None,)} for n in ("soft_permutation", "log_soft_permutation")},
    **{f"khot.estimators.{n}": {"k": (None,)} for n in ("straight_through", "second_order")},
    "khot.sample_khot": {"k": (None,)},
    "khot.baselines.root_finding_topk": {"guess": (None,)},
    "khot.estimators.imle": {"step": (math.inf,)},
    "khot.estimators.ncpss": {"rounds": (0,)},
}
FUNCTIONS = [name for name, call in PUBLIC.items() if inspect.isfunction(call) and ".nn." not in name]
FUNCTIONS = [name for name in FUNCTIONS if ".distributions." not in name]
ROWS: dict[str, Row] = {
    **{
        name: of(PUBLIC[name.partition(" ")[0]], ODD.get(name, {}), ODD_ROLES.get(name), **FINE.get(name, {}))
        for name in (*FUNCTIONS, *(name for name in ODD if " by " in name))
    },
    # distributions: constructors, then what takes a tensor
    **{
        f"khot.distributions.{name}": Row(
            getattr(distributions, name), {"k": 2, "logits": X, "design": "sampford"}
        )
        for name in ("KHot", "KHotStraightThrough")
    },
    "khot.distributions.KHot by probs": Row(distributions.KHot, {"k": 2, "probs": PROBS}),
    "khot.distributions.ConditionalPoisson": Row(distributions.ConditionalPoisson, {"k": 2, "logits": X}),
    **{
        f"khot.distributions.{name}": Row(
            getattr(distributions, name), {"temperature": 1.0, "k": 2, "logits": X}
        )
        for name in ("RelaxedKHot", "LogitRelaxedKHot")
    },
    "khot.distributions.PlackettLuce": Row(
        distributions.PlackettLuce, {"k": 2, "logits": X}, {"k": "integer"}
    ),
    "khot.distributions.PlackettLuce.log_prob": Row(
        distributions.PlackettLuce(4, X, validate_args=True).log_prob, {"value": ORDER}, {"value": "index"}
    ),
    "khot.distributions.KHot.log_prob": Row(
        distributions.KHot(2, logits=X, design="sampford", validate_args=True).log_prob,
        {"value": TWO_OF_FOUR},
    ),
    "khot.distributions.ConditionalPoisson.log_prob": Row(
        distributions.ConditionalPoisson(2, X, validate_args=True).log_prob, {"value": TWO_OF_FOUR}
    ),
    **{
        f"khot.distributions.{name}.log_prob": Row(
            getattr(distributions, name)(1.0, 2, X, validate_args=True).log_prob,
            {"value": value},
            {"value": "scores"},
        )
        for name, value in (("RelaxedKHot", PROBS), ("LogitRelaxedKHot", X))
    },
    **{
        f"khot.distributions.{p}.enumerate_support": Row(
            getattr(distributions, p)(2, logits=X).enumerate_support, {}
        )
        for p in ("KHot", "KHotStraightThrough", "ConditionalPoisson", "PlackettLuce")
    },
    "khot.distributions.k_hot": Row(
        distributions.k_hot(2).check, {"value": TWO_OF_FOUR}, fine={"value": ("meta",)}
    ),
    "khot.distributions.capped_simplex": Row(
        distributions.capped_simplex(2).check, {"value": PROBS}, {"value": "scores"}
    ),
    # losses
    "khot.losses.TopKCrossEntropyLoss": of(
        losses.TopKCrossEntropyLoss,
        {"m": 3, "ignore_index": 1, "top1_mode": "softmax"},
        {"k": "integer", "dim": "dim type", "top1_mode": "name", "m": "size", "ignore_index": "dim type"},
        k=(N + 1,),  # the number of classes is not known yet
    ),
    "khot.losses.TopKCrossEntropyLoss.forward": Row(
        losses.TopKCrossEntropyLoss(2), {"input": X, "label": torch.tensor([0, 1]), "mask": MASK}
    ),
    "khot.losses.FenchelYoungTopKLoss": of(
        losses.FenchelYoungTopKLoss, {"k": 2.0}, {"dim": "dim type"}, k=(N + 0.5, N + 1)
    ),
    "khot.losses.FenchelYoungTopKLoss.forward": Row(
        losses.FenchelYoungTopKLoss(2),
        {"input": X, "target": TWO_OF_FOUR, "mask": MASK},
        {"target": "target"},
    ),
    # layers
    "khot.nn.Anneal": of(
        khot.nn.Anneal,
        {"start": 1.0, "end": 2.0, "steps": 3, "wait": 1, "schedule": "linear"},
        {"start": "number", "end": "number", "wait": "times"},
    ),
    "khot.nn.SoftTopK": of(khot.nn.SoftTopK, {}, {"k": "positive", "dim": "dim type"}),
    "khot.nn.SoftTopK.forward": Row(khot.nn.SoftTopK(1), {"input": X, "mask": MASK}),
    "khot.nn.SoftTopK.forward in eval mode": Row(khot.nn.SoftTopK(1).eval(), {"input": X, "mask": MASK}),
    "khot.nn.KHotGate": of(
        khot.nn.KHotGate,
        {"n": N, "tau": 1.0, "estimator": "second_order", "design": "systematic", "cost": None},
        **dict.fromkeys(("k", "tau", "design"), (None,)),
    ),
    "khot.nn.KHotGate.forward": Row(khot.nn.KHotGate(N, 2, design="systematic"), {"input": X}),
    "khot.nn.KHotGate.forward in eval mode": Row(khot.nn.KHotGate(N, 2).eval(), {"input": X}),
    "khot.nn.SoftKNN": of(  # more than there are: all
        khot.nn.SoftKNN, {"num_classes": 3}, k=(N + 0.5, N + 1, math.inf)
    ),
    "khot.nn.SoftKNN.forward": Row(
        khot.nn.SoftKNN(2, 2), {**QUERIES, "mask": torch.ones(2, 4, dtype=torch.bool)}
    ),
    "khot.nn.SoftKNN.loss": Row(
        khot.nn.SoftKNN(2, 2).loss,
        {**QUERIES, "query_label": torch.tensor([0, 1]), "mask": torch.ones(2, 4, dtype=torch.bool)},
    ),
    "khot.nn.SoftKNN.predict": Row(khot.nn.SoftKNN(2, 2).predict, QUERIES),
    **{
        f"khot.nn.{name}": of(
            getattr(khot.nn, name),
            {"in_features": 4, "num_experts": 3, **more},
            {"balancer": "balancer"},
            in_features=(0,),
        )
        for name, more in {
            "TokenChoiceRouter": {"k": 2, "balancer": None},
            "ExpertChoiceRouter": {"capacity": 1.0},
            "BalancedRouter": {"k": 2},
        }.items()
    },
    "khot.nn.TopKRouter": of(
        khot.nn.TopKRouter,
        {
            "in_features": 4,
            "num_experts": 6,
            "jitter": 0.1,
            "capacity": 1.0,
            "scale": 1.0,
            "groups": 3,
            "top_groups": 2,
            "balancer": None,
        },
        {
            **dict.fromkeys(("k", "groups", "top_groups"), "size"),
            "balancer": "balancer",
            "jitter": "share",
            "scores": "name",
            "scale": "positive",
        },
        in_features=(0,),
        capacity=(0, None, math.inf),
        top_groups=(None,),
    ),
    "khot.nn.TopKRouter.forward": Row(khot.nn.TopKRouter(4, 5, N), {**TOKENS, "k": 2}),
    "khot.nn.TokenChoiceRouter.forward": Row(khot.nn.TokenChoiceRouter(4, 3, 2), TOKENS),
    "khot.nn.ExpertChoiceRouter.forward": Row(khot.nn.ExpertChoiceRouter(4, 3), TOKENS),
    "khot.nn.BalancedRouter.forward": Row(khot.nn.BalancedRouter(4, 3, 2), TOKENS),
    "khot.nn.BalancedRouter.forward in eval mode": Row(khot.nn.BalancedRouter(4, 3, 2).eval(), TOKENS),
    "khot.nn.QuantileBalancer": of(
        khot.nn.QuantileBalancer,
        {"num_experts": N, "bins": 64, "ema": 0.5, "groups": 2, "top_groups": 2},
        {"ema": "share", **dict.fromkeys(("k", "bins", "groups", "top_groups"), "size")},
        top_groups=(None,),
    ),
    "khot.nn.QuantileBalancer.forward": Row(
        khot.nn.QuantileBalancer(N, 2), {"scores": X, "mask": MASK[:, 0]}, {"scores": "scores"}
    ),
    "khot.nn.QuantileBalancer.solve": Row(
        khot.nn.QuantileBalancer(N, 2).solve, {"scores": X, "mask": MASK[:, 0]}, {"scores": "scores"}
    ),
    "khot.nn.MixtureOfExperts.forward": Row(
        khot.nn.MixtureOfExperts(khot.nn.TokenChoiceRouter(4, 3, 2), [nn.Linear(4, 2) for _ in range(3)]),
        TOKENS,
    ),
    **{
        f"khot.nn.TopKSAE{name}": of(
            khot.nn.TopKSAE,
            {"in_features": 3, "latents": N, "tau": 1.0, "revive": 9, "widths": [2], **more},
            {"revive": "positive", "widths": "widths", "refine": "times", "out_features": "size"},
            **dict.fromkeys(("revive", "widths", "out_features"), (None,)),
        )
        for name, more in {"": {"refine": 1}, " as a transcoder": {"out_features": 5}}.items()
    },
    "khot.nn.TopKSAE.forward of a transcoder": Row(
        khot.nn.TopKSAE(4, 6, 2, out_features=4),
        {"input": X, "loss": "mse", "target": X},
        {"loss": "name", "target": "scores"},
    ),
    "khot.nn.TopKSAE.forward": Row(khot.nn.TopKSAE(4, 6, 2), {"input": X, "loss": "mse"}, {"loss": "name"}),
    "khot.nn.TopKSAE.forward in eval mode": Row(
        khot.nn.TopKSAE(4, 6, 2).eval(), {"input": X, "loss": "log"}, {"loss": "name"}
    ),
    "khot.nn.TopKSAE.loss": Row(khot.nn.TopKSAE(4, 6, 2).loss, {"input": X, "kind": "log"}, {"kind": "name"}),
    "khot.nn.TopKSAE.loss_parts": Row(
        khot.nn.TopKSAE(4, 6, 2).loss_parts, {"input": X, "kind": "log"}, {"kind": "name"}
    ),
    "khot.nn.fit_sae": of(
        partial(khot.nn.fit_sae, khot.nn.TopKSAE(4, 6, 2)),
        {
            "activations": X,
            "steps": 1,
            "batch_size": 2,
            "lr": 1e-3,
            "average": 0.5,
            "every": 1,
            "save_every": 1,
            "callback": None,
            "checkpoint": None,
        },
        {
            **dict.fromkeys(("batch_size", "every", "save_every"), "size"),
            **dict.fromkeys(("decay", "average"), "share"),
            **dict.fromkeys(("callback", "checkpoint"), "function"),
            "activations": "scores",
            "lr": "number",
            "kind": "name",
        },
        average=(None,),
    ),
    "khot.nn.unexplained": Row(
        partial(khot.nn.unexplained, khot.nn.TopKSAE(4, 6, 2)), {"activations": X}, {"activations": "scores"}
    ),
    "khot.nn.loss_recovered": Row(
        partial(khot.nn.loss_recovered, nn.Sequential(nn.Embedding(4, 4))),
        {"hook": "0", "sae": khot.nn.TopKSAE(4, 6, 2), "tokens": torch.tensor([[0, 1, 2]]), "loss": None},
        dict.fromkeys(("hook", "sae", "tokens", "loss"), "function"),
    ),
    "khot.nn.TopKSAE.encode": Row(khot.nn.TopKSAE(4, 6, 2).encode, {"input": X}),
    "khot.nn.TopKSAE.top": Row(khot.nn.TopKSAE(4, 6, 2).top, {"input": X}),
    "khot.nn.TopKSAE.decode": Row(
        khot.nn.TopKSAE(4, 6, 2).decode,
        {"code": torch.ones(2, 3), "indices": torch.ones(2, 3).long()},
        {"code": "target"},
    ),
    "khot.nn.TopKSAE.decode a whole code": Row(khot.nn.TopKSAE(4, 6, 2).decode, {"code": torch.ones(2, 6)}),
    "khot.nn.sae_from_layout": Row(
        khot.nn.sae_from_layout,
        {
            "source": khot.nn.sae_to_layout(khot.nn.TopKSAE(4, 6, 2), "dictionary_learning"),
            "layout": "dictionary_learning",
            "k": 2,
        },
        dict.fromkeys(("source", "layout", "k"), "function"),
    ),
    "khot.nn.topk_attention": of(
        khot.nn.topk_attention,
        {**ATTENDED, "top_k": 2.0, "attn_mask": torch.ones(3, 5, dtype=torch.bool)},
        {"value": "scores"},
        top_k=(N + 0.5, N + 1, math.inf),
        attn_mask=(None,),
    ),
    "khot.nn.topk_attention candidates": of(
        khot.nn.topk_attention,
        {**ATTENDED, "top_k": 2.0, "candidates": 4},
        {"value": "scores", "candidates": "size"},
        candidates=(None,),
    ),
    "khot.nn.topk_attention gap": of(
        partial(khot.nn.topk_attention, hard=True),
        {**ATTENDED, "top_k": 2.0, "gap": 1.0},
        {"value": "scores", "gap": "share"},
        gap=(None, 1.1, 5),
        top_k=(N + 0.5, N + 1, math.inf),
    ),
    "khot.nn.selected_attention": of(
        khot.nn.selected_attention,
        {**ATTENDED, "indices": torch.zeros(2, 3, 2).long(), "attn_mask": torch.ones(3, 2).bool()},
        {"value": "scores"},
        attn_mask=(None,),
    ),
    "khot.nn.TopKAttention": of(
        khot.nn.TopKAttention,
        {"embed_dim": 4, "num_heads": 2, "top_k": 2, "gap": 1.0},
        {"top_k": "positive", "embed_dim": "size", "num_heads": "size", "gap": "share"},
        gap=(None, 1.1, 5),
    ),
    "khot.nn.TopKAttention.forward": Row(
        khot.nn.TopKAttention(4, 2, 2, batch_first=True), ATTENDED, {"value": "scores"}
    ),
    "khot.nn.soft_beam_search": Row(khot.nn.soft_beam_search, {**BEAMS, "length": 3}, OF_BEAMS),
    "khot.nn.soft_beam_loss": Row(
        khot.nn.soft_beam_loss, {**BEAMS, "target": torch.tensor([[1, 2], [3, 0]]), "rho": 0.5}, OF_BEAMS
    ),
}


OF_OPERATORS = [getattr(khot, op.name) for op in FIRST]


def parameters(row: Row) -> Mapping[str, inspect.Parameter]:
    call = row.call.forward if isinstance(row.call, nn.Module) else row.call
    return inspect.signature(call).parameters


def role(row: Row, name: str) -> str:
    return row.roles.get(name) or ROLES[name]


def flags(call: Callable[..., Any]) -> list[str]:
    """The arguments that are True or False, or None where that means not given."""
    annotations = {name: str(p.annotation) for name, p in inspect.signature(call).parameters.items()}
    return [name for name, of in annotations.items() if of in ("bool", "bool | None")]


def flags_of(row: Row) -> list[str]:
    return flags(row.call.forward if isinstance(row.call, nn.Module) else row.call)


def takes_none(row: Row, name: str) -> bool:
    """Whether None is the default of the argument, and means that it is not given."""
    parameter = parameters(row).get(name)
    return parameter is not None and parameter.default is None


# ------------------------------------------------------------------------------------------- the tensors


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor(list(x) if x.dim() > 1 else [x.reshape(-1)], layout=layout)


def of_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(1, -1)


HOSTILE: dict[str, Callable[[Tensor], Any]] = {
    "float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda x: x.to(torch.float8_e5m2),
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: of_rows(x).to_sparse_csr(),
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "mkldnn": lambda x: (x if x.dim() else of_rows(x)).float().to_mkldnn(),
    "float32": lambda x: x.float(),
    "bool": lambda x: x.bool(),
    "int64": lambda x: x.long(),
    "complex64": lambda x: x.to(torch.complex64),
    "NumPy array": lambda x: x.numpy(),
    "list": lambda x: x.tolist() if x.dim() else [x.item()],
    "None": lambda x: None,
    "string": lambda x: "scores",
}


def as_tensor(value: Any) -> Tensor:
    """The good value as a tensor."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def by_row(cases: Iterable[tuple[str, Any]]) -> pytest.MarkDecorator:
    """One test for all cases of a row, because thousands of tests cost more than what they do."""
    grouped: dict[str, list[Any]] = {}
    for name, case in cases:
        grouped.setdefault(name, []).append(case)
    params = [pytest.param(ROWS[name], found, id=name) for name, found in grouped.items()]
    return pytest.mark.parametrize("row, cases", params)


def tensor_cases() -> Iterator[tuple[str, tuple[str, str]]]:
    """Pairs of an argument and a kind of tensor."""
    for name, row in ROWS.items():
        for argument, good in row.good.items():
            allowed = TENSORS.get(role(row, argument))
            in_a_constructor = inspect.isclass(row.call) and not isinstance(good, Tensor)
            if role(row, argument) != "function" and allowed is not None and not in_a_constructor:
                kinds = [kind for kind in HOSTILE if kind != "None" or not takes_none(row, argument)]
                kinds = [kind for kind in kinds if kind != "float32" or argument == "mask"]
                names = parameters(row)
                if "offsets" in names and argument == next(iter(names)):  # rows of different lengths
                    kinds.remove("jagged")
                yield from ((name, (argument, kind)) for kind in kinds)


def meta_cases() -> Iterator[tuple[str, str]]:
    for name, row in ROWS.items():
        for argument, good in row.good.items():
            is_tensor = not inspect.isclass(row.call) or isinstance(good, Tensor)
            what = role(row, argument)
            fine = row.fine.get(argument, ())
            if what in TENSORS and what != "scores" and is_tensor and "meta" not in fine:
                yield name, argument


def scalar_cases() -> Iterator[tuple[str, tuple[str, Any]]]:
    """Pairs of an argument and a value."""
    for name, row in ROWS.items():
        for argument in row.good:
            fine = [*row.fine.get(argument, ()), *((None,) if takes_none(row, argument) else ())]
            if row.call not in OF_OPERATORS:
                fine.append(HUGE)
            for value in SCALARS.get(role(row, argument), ()):
                if not any(value is v or (isinstance(value, (int, float)) and value == v) for v in fine):
                    yield name, (argument, value)


def check_each(check: Callable[[Any], None], values: Iterable[Any]) -> None:
    found = []
    for value in values:
        try:
            check(value)
        except (Exception, pytest.fail.Exception) as error:
            found.append(f"{value!r}: {error!r}")
    assert not found, "\n".join(found)


def ways(row: Row, argument: str) -> list[dict[str, Any]]:
    """The good arguments; and without a mask, where an operator may take a shorter way."""
    shorter = "mask" in row.good and argument != "mask" and row.call in OF_OPERATORS
    return [row.good, {**row.good, "mask": None}] if shorter else [row.good]


def typename(value: Any) -> str:
    return type(value).__name__


def assert_refused(row: Row, argument: str, value: Any, errors: tuple[type[Exception], ...]) -> None:
    for good in ways(row, argument):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(Exception) as info:  # noqa: PT011, its type and message are asserted
                row(**{**good, argument: value})
        assert_named(info.value, argument, value, errors)


def assert_named(error: Exception, argument: str, value: Any, errors: tuple[type[Exception], ...]) -> None:
    message = str(error)
    assert type(error) in errors, repr(error)
    assert re.match(rf"{argument} must ", message), message
    # the value, its type, or what is wrong with a part of it
    if isinstance(value, Tensor):
        said = ["Tensor", "but got tensor(", f"{value.dtype}", "layout", "nested", "but got meta"]
    else:
        parts = (value, *value) if isinstance(value, (list, tuple)) else (value,)
        said = [each(part) for part in parts for each in (str, typename)]
    assert any(word in message for word in said) or "but got 1 values" in message, message
    assert "INTERNAL ASSERT" not in message and not re.search(r"/\w+/|\.cpp|\.cc|\.h:", message), message


def test_every_public_call_has_a_row() -> None:
    rows = {name.partition(" ")[0] for name in ROWS}
    rows |= {name.rpartition(".")[0] for name in rows}
    assert set(PUBLIC) - RECORDS - OF_MODULES <= rows


def test_every_layer_and_loss_has_a_row_for_its_forward() -> None:
    for name, call in PUBLIC.items():
        if inspect.isclass(call) and issubclass(call, nn.Module) and name != "khot.nn.Anneal":
            assert f"{name}.forward" in ROWS, name


@pytest.mark.parametrize("name", ROWS)
def test_every_argument_has_a_good_value(name: str) -> None:
    row = ROWS[name]
    optional = {"probs", "logits", "adjust", "baseline", "design", "estimator", "indices", "cost"}
    optional |= {"weights", "out_features", "target", "refine"}  # of which some exclude others
    optional |= {"candidates", "gap"}  # which hard=True and a larger top_k exclude, or hard=False
    assert set(parameters(row)) - set(row.good) - UNCHECKED - set(flags_of(row)) - optional <= {
        "key_padding_mask",
        "attn_mask",
        "p",
    }
    row()


@by_row(tensor_cases())
def test_tensors_that_one_cannot_compute_with(row: Row, cases: list[tuple[str, str]]) -> None:
    def check(case: tuple[str, str]) -> None:
        argument, kind = case
        good = as_tensor(row.good[argument])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a layout is in beta
            value = HOSTILE[kind](good)
        if kind in TENSORS[role(row, argument)] or (good.dtype == torch.bool and kind == "bool"):
            torch.testing.assert_close(row(**{argument: value}), row(**{argument: good}))
        else:
            assert_refused(row, argument, value, (TypeError, ValueError))

    check_each(check, cases)


@by_row(meta_cases())
def test_meta_tensors_where_values_are_needed(row: Row, cases: list[str]) -> None:
    """The other arguments have values."""

    def check(argument: str) -> None:
        assert_refused(row, argument, as_tensor(row.good[argument]).to("meta"), (ValueError,))

    check_each(check, cases)


@by_row(scalar_cases())
def test_scalars_that_no_argument_takes(row: Row, cases: list[tuple[str, Any]]) -> None:
    def check(case: tuple[str, Any]) -> None:
        argument, value = case
        what = role(row, argument)
        of_type = str if what == "cdf" else numbers.Real
        errors: tuple[type[Exception], ...] = (TypeError, ValueError)
        # a tuple may be a pair of bounds
        if what not in ("name", "widths", "balancer") and not isinstance(value, tuple):
            if not isinstance(value, of_type) or isinstance(value, bool):
                errors = (TypeError,)
            elif argument == "dim" and isinstance(value, int):
                errors = (IndexError,)
        assert_refused(row, argument, value, errors)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and value != HUGE
        checked = what in IN_TENSORS and "tensor" not in row.fine.get(argument, ())
        if is_number and checked and not inspect.isclass(row.call):
            with pytest.raises(ValueError, match=rf"^{argument} must .*got .*{float(value):g}"):
                row(**{argument: torch.tensor(float(value))})

    check_each(check, cases)


# ---------------------------------------------------------------------------------------------- the flags

NOT_FLAGS = ("False", "", 0, 1, None, 0.0, [True], MASK, torch.tensor(True), np.bool_(True))


@by_row((name, flag) for name, row in ROWS.items() for flag in flags_of(row))
def test_flags_that_are_not_bool(row: Row, cases: list[str]) -> None:
    """As in torch, which does not take 0 and 1 or NumPy's bool either. A call without a mask may take a
    shorter way."""

    def check(case: tuple[str, Any]) -> None:
        flag, value = case
        for good in ways(row, flag):
            with pytest.raises(TypeError) as info:
                row.call(**{**good, flag: value})
            assert str(info.value) == f"{flag} must be a bool, but got {type(value).__name__}"

    taken = {flag: takes_none(row, flag) for flag in cases}
    check_each(check, [(flag, v) for flag in cases for v in NOT_FLAGS if v is not None or not taken[flag]])


def test_every_flag_has_a_row() -> None:
    """Those of public functions and constructors, and of the methods of public classes."""
    calls = dict(PUBLIC)
    for name, call in PUBLIC.items():
        if inspect.isclass(call):
            methods = inspect.getmembers(call, inspect.isfunction)
            ours = [m for m in methods if m[1].__module__.startswith("khot") and not m[0].startswith("_")]
            calls |= {f"{name}.{method}": function for method, function in ours}
    wanted = {(name, flag) for name, call in calls.items() if name not in RECORDS for flag in flags(call)}
    wanted = {(name, flag) for name, flag in wanted if not name.endswith(".train")}  # torch checks its mode
    have = {(name.partition(" ")[0], flag) for name, row in ROWS.items() for flag in flags_of(row)}
    assert len(wanted) > 50
    assert wanted - have == set()


@pytest.mark.parametrize(
    "flag, call",
    [
        ("keepdim", lambda: khot.quantile(X, 0.5, -1, MASK)),
        ("keepdim", lambda: khot.soft_quantile(X, 0.5, -1, MASK)),
        ("keepdim", lambda: khot.soft_median(X, -1, MASK)),
        ("validate_args", lambda: distributions.ConditionalPoisson(2, X, MASK)),
        ("is_causal", lambda: khot.nn.topk_attention(*ATTENDED.values(), 2, None, 0.0, MASK)),
        ("bias", lambda: khot.nn.TopKAttention(4, 2, 2, 0.0, MASK)),
        ("need_weights", lambda: khot.nn.TopKAttention(4, 2, 2)(*ATTENDED.values(), None, MASK)),
    ],
)
def test_a_mask_in_the_place_of_a_flag_is_named(flag: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=f"^{flag} must be a bool, but got Tensor$"):
        call()
