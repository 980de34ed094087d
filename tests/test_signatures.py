"""One convention for all signatures: names, order, what is keyword-only, and what a type checker can see.

    function(input, k, dim=-1, *, tau=1.0, cdf=..., largest=True, mask=None, hard=False, ..., generator=None)

A parameter has the same meaning everywhere, and only the default None means "not given".
"""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, Literal, Union

import pytest

import khot
from calls import PUBLIC
from khot import cdfs

# what returns values instead of selecting: its fields are not options
RECORDS = {"khot.nn.Beams", "khot.nn.Routing", "khot.sampling.Design"}
CALLS = {name: call for name, call in PUBLIC.items() if name not in RECORDS}
# these have the signature of the function or class of torch that they replace
AS_TORCH = {
    "khot.nn.topk_attention": "torch.nn.functional.scaled_dot_product_attention",
    "khot.nn.TopKAttention": "torch.nn.MultiheadAttention",
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(CALLS[name]).parameters)


def positional(name: str) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters(name).values() if p.kind in kinds]


def having(*options: str) -> list[str]:
    return [name for name in CALLS if set(options) & set(parameters(name))]


def annotation(name: str, option: str) -> Any:
    call = CALLS[name]
    function: Any = call.__init__ if inspect.isclass(call) else call
    return typing.get_type_hints(inspect.unwrap(function))[option]


def members(hint: Any) -> list[Any]:
    """The types of a union, or the one type."""
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (Union, types.UnionType) else [hint]


# ------------------------------------------------------------------------------------ names and order

KEYWORD_ONLY = (
    *("adjust", "at_most", "by", "cdf", "descending", "design", "epsilon", "estimator", "generator"),
    *("group", "hard", "interpolation", "iterations", "largest", "learnable_k", "learnable_tau"),
    *("mask", "method", "normalize", "p", "phi", "reduction", "regularization", "rescale"),
    *("sample_shape", "seed", "tau", "top1_mode"),
)
# in khot.sampling a design stands where operators have k: sample(probs, design, dim, *, ...)
DESIGN_AS_K = {
    "khot.sampling.inclusion_probs",
    "khot.sampling.joint_inclusion_probs",
    "khot.sampling.sample",
}
OF_PROBABILITY = {"khot.nucleus_mask"}  # whose p is no norm, and stands where others have k


@pytest.mark.parametrize("option", KEYWORD_ONLY)
def test_options_are_keyword_only(option: str) -> None:
    elsewhere = {"design": DESIGN_AS_K, "largest": {"khot.topk"}, "p": OF_PROBABILITY}
    names = set(having(option)) - elsewhere.get(option, set())
    assert names  # or the option is misspelt here
    assert {name for name in names if option in positional(name)} == set()


@pytest.mark.parametrize("name", having("dim"))
def test_dim_counts_from_the_end_and_ends_the_positional_arguments(name: str) -> None:
    parameter = parameters(name)["dim"]
    of_weights = name == "khot.nn.prune_n_m"  # a layer sums over dim 1 of its weight
    assert parameter.default == (1 if of_weights else -1)
    assert annotation(name, "dim") == (int | None if name == "khot.quantile" else int)  # None: all entries
    after = positional(name)[positional(name).index("dim") + 1 :]
    # as in torch.quantile and torch.topk
    assert after in ([], ["largest", "sorted"] if name == "khot.topk" else ["keepdim"])


# what may stand between the tensor and dim, in this order
BETWEEN = (
    *("q_logits", "w", "cost", "budget", "targets", "relevance", "labels"),
    *("k", "p", "at", "count", "q", "alpha", "target", "weight", "design"),
)
FUNCTIONS = [
    name for name, call in CALLS.items() if inspect.isfunction(call) and not name.startswith("khot.nn.")
]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "dim" in parameters(name)])
def test_the_tensor_comes_first_then_k_then_dim(name: str) -> None:
    order = positional(name)
    if order[0] == "value":  # log_prob(value, logits, k), as log_prob(value) of torch
        order = order[1:]
    of_a_ranking = name.startswith("khot.losses.") and {"targets", "relevance", "labels"} & set(order)
    assert order[0] in (
        ("scores",)
        if of_a_ranking or name == "khot.conformal_quantile"
        else ("input", "logits", "probs", "p_logits")
    )
    between = order[1 : order.index("dim")]
    assert between == [option for option in BETWEEN if option in between]


def test_everything_on_rows_takes_dim() -> None:
    """The distributions have their event in the last dim, as torch's have, score_function its samples in the
    first, soft_assign matrices in the last two, and linear_topk vectors in the last, as torch's linear; all
    other functions work along any dim."""
    assert set(FUNCTIONS) - set(having("dim")) == {
        "khot.estimators.score_function",
        "khot.linear_topk",
        "khot.soft_assign",
    }


@pytest.mark.parametrize("name", [name for name in having("k") if inspect.isclass(CALLS[name])])
def test_the_k_of_a_class_is_positional(name: str) -> None:
    assert "k" in positional(name)


def test_there_is_one_name_for_hard_selections() -> None:
    assert having("straight_through", "st") == []
    for name in having("hard"):
        assert annotation(name, "hard") is bool


def test_no_parameter_has_an_abbreviated_or_a_second_name() -> None:
    as_torch = ["khot.distributions.LogitRelaxedKHot", "khot.distributions.RelaxedKHot"]
    assert having("x", "temperature", "axis", "sharpness", "K") == as_torch


def test_p_is_a_norm() -> None:
    assert having("p")
    for name in set(having("p")) - OF_PROBABILITY:
        assert annotation(name, "p") is float
        assert parameters(name)["p"].default == 2.0


def test_every_function_that_draws_takes_a_generator() -> None:
    drawing = {
        "khot.sample_khot",
        "khot.sampling.conditional_poisson.sample",
        "khot.sampling.gumbel_topk",
        "khot.sampling.sample",
        *(f"khot.estimators.{name}" for name in typing.get_args(khot.estimators.EstimatorName)),
        "khot.estimators.sample_khot",
        "khot.estimators.reinmax",  # for one-hot samples, so that sample_khot does not have it
    }
    assert set(having("generator")) == drawing
    for name in drawing:
        assert parameters(name)["generator"].default is None


# The public operators that select along a row but have no mask. Only removals are welcome.
WITHOUT_MASK = {"khot.linear_topk"}


def test_operators_take_a_mask() -> None:
    operators = {name for name in CALLS if name.count(".") == 1}
    assert operators - set(having("mask")) == WITHOUT_MASK
    for name in operators & set(having("mask")):
        assert parameters(name)["mask"].default is None


# ------------------------------------------------------------------------------------ defaults

# Here tau has an effect with some estimators only: given or not is a difference.
OPTIONAL_TAU = {"khot.estimators.sample_khot", "khot.nn.KHotGate", "khot.sample_khot"}


def test_none_stands_for_not_given() -> None:
    assert set(having("estimator")) == OPTIONAL_TAU
    for name in having("tau"):
        default = parameters(name)["tau"].default
        # an autoencoder without one selects hard, and pruning by scores has to be given one
        if name in OPTIONAL_TAU or name in ("khot.nn.TopKSAE", "khot.nn.prune_global"):
            assert default is None, name
        else:
            assert default == 1.0, name


# ------------------------------------------------------------------------------------ types

CHOICES = (
    *("adjust", "baseline", "cdf", "design", "estimator", "interpolation", "method", "phi"),
    *("reduction", "regularization", "schedule", "top1_mode"),
)


@pytest.mark.parametrize(
    "name, option", [(name, option) for option in CHOICES for name in having(option)], ids=str
)
def test_a_type_checker_sees_a_misspelt_choice(name: str, option: str) -> None:
    kinds = members(annotation(name, option))
    assert str not in kinds and Any not in kinds
    literals = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    assert len(literals) == 1
    rest = [kind for kind in kinds if kind not in literals and kind is not type(None)]
    assert rest == ([cdfs.CDF] if option == "cdf" else [])
    default = parameters(name)[option].default
    if default is not inspect.Parameter.empty:
        assert default is None or default in typing.get_args(literals[0])


def test_names_of_choices_are_those_of_the_tables() -> None:
    assert set(typing.get_args(khot.sampling.DesignName)) == set(khot.sampling.designs)
    for name in typing.get_args(cdfs.CDFName):
        assert isinstance(cdfs.resolve(name), cdfs.CDF)
    estimators = typing.get_args(khot.estimators.EstimatorName)
    assert set(estimators) == {
        name for name in khot.estimators.__all__ if f"khot.estimators.{name}" in PUBLIC
    } - {"sample_khot", "score_function", "reinmax"}
    for schedule in typing.get_args(khot.nn.ScheduleName):
        khot.nn.Anneal(1.0, 0.5, 2, schedule)


# ------------------------------------------------------------------------------------ layers


def test_layers_end_with_device_and_dtype() -> None:
    for name in having("device", "dtype"):
        assert list(parameters(name))[-2:] == ["device", "dtype"], name
        assert not {"device", "dtype"} & set(positional(name)), name


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("khot.nn.")])
def test_options_of_layers_are_keyword_only(name: str) -> None:
    """Arguments with a default are options, except dim, the n and m of a pattern n:m, the course of an
    Anneal, and the arguments that torch has before ours."""
    if name in AS_TORCH:
        return
    with_default = [
        option
        for option in positional(name)
        if parameters(name)[option].default is not inspect.Parameter.empty
    ]
    assert set(with_default) <= {"dim", "capacity", "layout", "schedule", "steps", "n", "m"}
