"""Bad input at every argument of every public function, layer and loss.

A tensor in a dtype or layout that one cannot compute with, a string instead of a number, a list instead of a
name: the answer is a TypeError, a ValueError or (for ``dim``) an IndexError that names the argument, from the
call that got the value: for an argument of a constructor, from the constructor. A function or an argument
without a row in `calls.py` fails a test.
"""

from __future__ import annotations

import inspect
import numbers
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import khot
from calls import HUGE, IN_TENSORS, MASK, PUBLIC, RECORDS, ROLES, ROWS, SCALARS, TENSORS, UNCHECKED, Row, X
from khot._core.names import OTHER_NAMES
from operators import FIRST

# These take a module, and tensors only as its parameters; or a state dict, which their own tests spoil.
OF_MODULES = {
    "khot.nn.make_permanent",
    "khot.nn.prune_global",
    "khot.nn.prune_magnitude",
    "khot.nn.prune_n_m",
    "khot.nn.sae_from_layout",
    "khot.nn.sae_to_layout",
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


# ------------------------------------------------------------------------------------------- the messages

ROW, THIRD = torch.ones(3), torch.tensor([True, False, True, False])
SAE: Any = khot.nn.TopKSAE(3, 5, k=2)
SAID: list[tuple[str, type[Exception], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    ("; did you mean 'projection'?", ValueError, khot.soft_rank, (ROW,), {"method": "projecton"}),
    ("; did you mean 'log'?", ValueError, SAE.loss, (torch.ones(1, 3), "lgo"), {}),
    ("; did you mean 'saelens'?", ValueError, khot.nn.sae_to_layout, (SAE, "saelen"), {}),
    ("but got 'xyz'", ValueError, khot.soft_topk, (ROW, 1), {"cdf": "xyz"}),
    ("call it: Normal()", TypeError, khot.soft_topk, (ROW, 1), {"cdf": khot.cdfs.Normal}),
    ("such as tau, go by name", TypeError, khot.soft_topk, (ROW, 1, 0.5), {}),
    (
        "relevance must be finite and >= 0, but got -1.0",
        *(ValueError, khot.losses.ndcg_loss, (ROW[:2], torch.tensor([1.0, -1.0])), {}),
    ),
    (
        "k must be one number, or a module that returns one, but got shape (2,); functions such as "
        "khot.soft_topk take one for each row",
        *(ValueError, khot.nn.SoftTopK, (ROW[:2],), {}),
    ),
    # whole numbers are written as integers, unless the user's own tensor has floats
    ("k must lie in [0, 4], but got 7", ValueError, khot.soft_topk, (X, torch.tensor(7)), {}),
    ("but got 2.5 for a row with 2", ValueError, khot.soft_topk, (X, 2.5), {"mask": THIRD}),
    *(
        ("but got 3 for a row with 2", ValueError, call, (X, 3), {"mask": THIRD})
        for call in (khot.soft_topk, khot.soft_assign, khot.kth_value)
    ),
    ("count must lie in [0, 4], but got -1", ValueError, khot.inverse_soft_count, (X, torch.tensor(-1)), {}),
    *(
        ("k must be an integer in [0, 4], but got 9", ValueError, call, (X, k), {})
        for call in (khot.sampling.conditional_poisson.log_normalizer,)
        for k in (9, torch.tensor(9))
    ),
    ("k must be finite and >= 0, but got -1", ValueError, khot.losses.FenchelYoungTopKLoss, (-1,), {}),
    *(
        ("(the input's shape without dim), but got (3,)", ValueError, call, (X,), {"tau": ROW})
        for call in (khot.soft_rank, khot.soft_sort, khot.soft_permutation, khot.soft_median)
    ),
    ("that of k, 4, but got 2", ValueError, khot.soft_assign, (X, 2, torch.ones(4) / 2), {}),
]


@pytest.mark.parametrize(
    ("said", "error", "call", "args", "options"), SAID, ids=[f"{row[0]} {row[2].__name__}" for row in SAID]
)
def test_what_was_meant(
    said: str,
    error: type[Exception],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    with pytest.raises(error, match=re.escape(said) + "$"):
        call(*args, **options)


# A call for each of these arguments, which gives it a name.
NAMED: dict[str, Callable[[Any], Any]] = {
    "cdf": lambda name: khot.soft_topk(ROW, 1, cdf=name),
    "estimator": lambda name: khot.sample_khot(ROW, 1, estimator=name),
    "design": lambda name: khot.sample_khot(ROW, 1, design=name),
    "schedule": lambda name: khot.nn.Anneal(1.0, 0.5, steps=2, schedule=name),
    "regularization": lambda name: khot.project_permutahedron(ROW, ROW, regularization=name),
    "reduction": lambda name: khot.losses.ndcg_loss(ROW, ROW, reduction=name),
}
# What each takes, and what other code calls it; the last one is misspelt.
MEANT: dict[str, dict[str, tuple[str, ...]]] = {
    "cdf": {
        "logistic": ("sigmoid", "logistc"),
        "normal": ("gaussian", "gauss", "probit", "erf"),
        "laplace": ("laplacian", "double exponential"),
        "uniform": ("hard-sigmoid",),
    },
    "estimator": {
        "straight_through": ("ste", "st", "straight-through"),
        "gumbel": ("gumbel-softmax", "gumbel-topk"),
        "imle": ("I-MLE",),
        "second_order": ("reinmax",),
    },
    "design": {
        "conditional_poisson": ("maximum entropy", "max-entropy", "rejective"),
        "pareto": ("paretto",),
    },
    "schedule": {"exponential": ("exp",), "cosine": ("cos",), "linear": ("linar",)},
    "regularization": {"l2": ("euclidean", "quadratic"), "kl": ("entropic", "entropy")},
    "reduction": {"mean": ("average", "meen")},
}


@pytest.mark.parametrize("argument", NAMED)
def test_what_other_code_calls_it(argument: str) -> None:
    for meant, names in MEANT[argument].items():
        NAMED[argument](meant)
        for called in names:
            for spelled in (called, called.upper(), called.title()):
                with pytest.raises(ValueError, match=rf"^{argument} must be .*; did you mean '{meant}'\?$"):
                    NAMED[argument](spelled)


def test_every_other_name_is_of_an_argument() -> None:
    known = {
        (re.sub("[- ]", "_", called.lower()), meant)
        for of in MEANT.values()
        for meant, names in of.items()
        for called in names
    }
    assert set(OTHER_NAMES.items()) <= known


def test_other_types_of_numbers() -> None:
    for op in FIRST:
        for two in (np.int64(2), np.float32(2), Fraction(2)) if op.arguments.family else ():
            assert torch.equal(op.plain(X, two), op.plain(X, 2))
            if op.arguments.tau is not None:
                assert torch.equal(op.plain(X, tau=two), op.plain(X, tau=2))
            assert torch.equal(op.plain(X, 1, dim=np.int64(0)), op.plain(X, 1, dim=0))
