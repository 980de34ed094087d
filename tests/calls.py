"""Every public function, layer and loss, with good arguments, and what each argument means: one table.

Each argument has a role, and each role has values that are always wrong, which `test_bad_input.py` passes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import khot
from khot import baselines, distributions, estimators, losses, sampling
from khot.sampling import conditional_poisson

__all__ = [
    "HUGE",
    "IN_TENSORS",
    "MASK",
    "PLACES",
    "PUBLIC",
    "RECORDS",
    "ROLES",
    "ROWS",
    "SCALARS",
    "TENSORS",
    "UNCHECKED",
    "Row",
    "X",
]

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
PUBLIC: dict[str, Callable[..., Any]] = {
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
# Options that are not checked: sources of randomness, shapes of draws, what torch itself checks; and offsets,
# which are in test_packed.py.
UNCHECKED = {
    *("offsets", "generator", "seed", "group", "sample_shape", "device", "dtype", "scale"),
    *("dropout_p", "dropout", "bias", "end", "chunk_size", "step_function"),
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
