"""Plain calls in C++: they give what the ordinary way gives, bit for bit, and leave everything else to it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad

import khot
from answers import answers
from khot._core import eager
from khot.cdfs import CDFName

pytestmark = pytest.mark.skipif(not eager.in_use(), reason="the extension for small calls is not in use")

CALLS = ("soft_topk", "hard_topk", "soft_count", "inverse_soft_count", "topk", "topk_mask")
CDFS = ("logistic", "laplace", "normal", "uniform", khot.cdfs.Power(4 / 3))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@contextmanager
def ordinary() -> Iterator[None]:
    """The ordinary way for every call."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(eager, name, eager._ordinary)
        yield


class Function(NamedTuple):
    """An operator (x, tau, cdf) whose calls have a gradient, and the extension's name for it."""

    name: str
    call: Callable[..., Tensor]


#: They count 2, or count above 0.3, along the last dimension. The last one has no CDF.
FUNCTIONS = {
    "y": Function("soft_topk", lambda x, **rest: khot.soft_topk(x, 2, **rest)),
    "log": Function("soft_topk", lambda x, **rest: khot.log_soft_topk(x, 2, **rest)),
    "count": Function("soft_count", lambda x, **rest: khot.soft_count(x, 0.3, **rest)),
    "threshold": Function("inverse_soft_count", lambda x, **rest: khot.inverse_soft_count(x, 2, **rest)),
    "topk": Function("topk", lambda x, **rest: khot.topk(x, 2).values.square()),  # alone it is linear
}
every_function = pytest.mark.parametrize("output", FUNCTIONS)
with_a_cdf = pytest.mark.parametrize("output", list(FUNCTIONS)[:-1])


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, Tensor):
        return bool(a == b)
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(a.nan_to_num(nan=7e4), b.nan_to_num(nan=7e4)) and torch.equal(a.isnan(), b.isnan())


def scores(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_ordinary(name: str, call: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> None:
    """Values and first gradients have the ordinary way's bits; the gradients of many at once and the second
    derivatives differ by rounding, because they come by way of gradients in the scores' dtype."""
    leaves = [v.clone().requires_grad_() for v in leaves]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            quiet = call(*leaves)
        y = call(*leaves)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        both = torch.stack([grad, grad.flip(-1)])
        many = torch.autograd.grad(y, leaves, both, is_grads_batched=True, retain_graph=True)
        recorded = torch.autograd.grad(y, leaves, grad, create_graph=True)
        total = sum((g.double().square().sum() for g in recorded), torch.zeros(()))
        again = [*many, *recorded, *torch.autograd.grad(total, leaves)]
        return [quiet, y.detach(), *first], [v.detach() for v in again]

    with answers(name) as answered:
        here, here_again = run()
    assert answered == [True] * 2
    with ordinary():
        there, there_again = run()
    assert all(map(same, here, there))
    for a, b in zip(here_again, there_again, strict=True):
        eps = max(torch.finfo(v.dtype).eps for v in (grad, b))
        largest = max(v.nan_to_num(0, 0, 0).abs().max().item() for v in (grad, b))
        torch.testing.assert_close(a, b, rtol=0, atol=64 * eps * largest, equal_nan=True)


ROWS = {
    "row": scores(7),
    "one entry": scores(3, 1),
    "many rows": scores(37, 5),
    "three dims": scores(2, 3, 9),
    "transposed": scores(9, 4).mT,
    "expanded": scores(1, 9).expand(4, 9),
    "empty batch": scores(0, 5),
    "empty rows": scores(4, 0),
    "scalar": scores(),
    "long": scores(3, 9_000),
    "ties": scores(6, 12).round(),
    "infinite": torch.tensor([[1.0, math.inf, -math.inf, 2.0, 3.0], [0.0, 1.0, -math.inf, -math.inf, 2.0]]),
    "few selectable": torch.tensor([[1.0, -math.inf, -math.inf, -math.inf, -math.inf]]),
    "nan": torch.tensor([[1.0, math.nan, 2.0, 0.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]]),
    "huge": scores(3, 8) * 1e30,
    "flat": torch.zeros(3, 8),
}
KS: tuple[Any, ...] = (
    *(0, 0.0, 1, 2.5, 3, 5, 2000, -1, math.nan, math.inf, True, -math.inf, 2**80, "2", None),
    *map(torch.tensor, (2, 2.5, True)),
    torch.tensor(-1.0, dtype=torch.float64),
    torch.tensor(2, dtype=torch.int16),
)


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives here, and the ordinary way."""
    here = outcome(run)
    with ordinary():
        return here, outcome(run)


SELECTIONS: list[Callable[[Tensor, Any], Any]] = [
    khot.topk_mask,
    lambda x, k: khot.topk_mask(x, k, 0),
    lambda x, k: khot.topk_mask(x, k, largest=False),
    *(
        partial(function, cdf=cdf, tau=0.7)
        for cdf in CDFS
        for function in (khot.soft_topk, khot.log_soft_topk, khot.soft_count, khot.inverse_soft_count)
    ),
    lambda x, k: khot.soft_count(x, k, 0),
    lambda x, k: khot.inverse_soft_count(x, k, 0),
    lambda x, k: khot.soft_topk(x, k, 0).clone(memory_format=torch.contiguous_format),
    lambda x, k: khot.soft_topk(x, k, x.dim() - 1, tau=3),
    partial(khot.soft_topk, hard=True),
    khot.topk,
    lambda x, k: khot.topk(x, k, 0),
    lambda x, k: khot.topk(x, k, x.dim() - 1, False),
    lambda x, k: khot.topk(x, k, -1, True, False),
    lambda x, k: khot.topk(x, k, -1, 1),  # type: ignore[arg-type]
    lambda x, k: khot.topk(x, k, -1, True, None),  # type: ignore[arg-type]
]
TAUS: tuple[Any, ...] = (
    *(1.0, 2, 1e-30, 1e30, 0, -1.0, math.nan, math.inf, True, None),
    *map(torch.tensor, (0.5, -1.0)),
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", KS, ids=str)
def test_forward_is_that_of_the_ordinary_way(rows: str, k: Any) -> None:
    """Values, and the errors of what is out of range; the dtypes by turns."""
    turn = list(ROWS).index(rows) + [str(each) for each in KS].index(str(k))
    for i, select in enumerate(SELECTIONS):
        dtype = DTYPES[(i + turn) % len(DTYPES)]
        here, there = both(partial(select, ROWS[rows].to(dtype), k))
        assert same(here, there), (i, dtype, here, there)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tau", TAUS, ids=str)
def test_temperatures_are_those_of_the_ordinary_way(rows: str, tau: Any) -> None:
    for dtype in DTYPES:
        for output, function in FUNCTIONS.items():
            here, there = both(partial(function.call, ROWS[rows].to(dtype), tau=tau))
            assert same(here, there), (output, dtype, here, there)


@pytest.mark.parametrize("cdf", CDFS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_function
def test_gradients_are_those_of_the_ordinary_way(cdf: Any, dtype: torch.dtype, output: str) -> None:
    """Also of a tensor that rows are a view of, in which they do not lie in order: small ones are copied. The
    gradients come by turns."""
    name, function = FUNCTIONS[output]
    views: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
        *(
            (x, lambda x: x)
            for x in (scores(4, 64), scores(2, 3, 9), scores(7), ROWS["ties"], ROWS["infinite"])
        ),
        (scores(9), lambda x: x.expand(4, 9)),
        (scores(9, 4), lambda x: x.mT),
        (scores(4, 18), lambda x: x[:, ::2]),
    ]
    turn = CDFS.index(cdf) + DTYPES.index(dtype)
    for i, (x, view) in enumerate(views):
        shape = function(view(x)).shape
        grads = (
            scores(*shape, seed=1),
            torch.ones(()).expand(shape),
            scores(*shape[::-1]).permute(tuple(range(len(shape)))[::-1]),
        )
        call = lambda x, view=view: function(view(x), tau=0.7, cdf=cdf)  # noqa: E731
        assert_ordinary(name, call, [x.to(dtype)], grads[(i + turn) % 3].to(dtype))


@pytest.mark.parametrize("level", [math.inf, -math.inf])
def test_nothing_moves_the_count_above_an_infinite_level(level: float) -> None:
    x = torch.tensor([[1.0, math.inf, -math.inf, 2.0]], requires_grad=True)
    with answers("soft_count") as answered:
        count = khot.soft_count(x, level)
    assert answered == [True] and count.tolist() == [1.0 if level > 0 else 3.0]
    (dx,) = torch.autograd.grad(count, x, torch.ones(1), create_graph=True)
    assert not dx.any() and not torch.autograd.grad(dx.sum(), x)[0].any()


MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda x: None,
    "each entry": lambda x: scores(*x.shape, seed=2) > -0.6,
    "one row": lambda x: scores(x.shape[-1], seed=2) > -0.6,
    "all": lambda x: torch.ones(x.shape, dtype=torch.bool),
}


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_masked_and_hard_calls_are_those_of_the_ordinary_way(
    cdf: Any, dtype: torch.dtype, mask: str, hard: bool
) -> None:
    """With a k that some rows have not."""
    for x in (scores(33, 16), scores(3, 2, 9), scores(40), scores(2, 300)):
        x, given = x.to(dtype), MASKS[mask](x)
        call = partial(khot.soft_topk, k=2.5, tau=0.7, cdf=cdf, mask=given, hard=hard)
        assert_ordinary("hard_topk" if hard else "soft_topk", call, [x], scores(*x.shape, seed=1).to(dtype))


SOFT: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "y": ("soft_topk", khot.soft_topk),
    "log": ("soft_topk", khot.log_soft_topk),
    "hard": ("hard_topk", partial(khot.soft_topk, hard=True)),
}
#: k and tau for rows with the batch shape (33, 2)
GIVEN: dict[str, tuple[Any, Any]] = {
    "one of both": (torch.tensor(2.0), torch.tensor(0.7, dtype=torch.float64)),
    "each k": (scores(33, 2).sigmoid() + 1.5, 0.7),
    "each tau": (2, scores(33, 2, dtype=torch.bfloat16).sigmoid() + 0.5),
    "columns": (scores(2).sigmoid() + 1.5, scores(33, 1, dtype=torch.float64).sigmoid() + 0.5),
    "integers": (torch.arange(66).view(2, 33).mT % 3 + 1, 0.7),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("output", SOFT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_for_k_and_tau_are_those_of_the_ordinary_way(
    dtype: torch.dtype, output: str, given: str
) -> None:
    """Learned together with the scores and apart."""
    name, call = SOFT[output]
    x, grad = scores(33, 2, 9).to(dtype), scores(33, 2, 9, seed=1).to(dtype)
    mask = scores(33, 2, 9, seed=2) > -1.5
    mask[..., :3] = True
    given_all = (x, *GIVEN[given])
    tensors = [v for v in given_all if isinstance(v, Tensor) and v.is_floating_point()]

    def run(*leaves: Tensor, learned: list[Tensor], mask: Tensor | None) -> Tensor:
        fresh = {id(v): leaf for v, leaf in zip(learned, leaves, strict=True)}
        x, k, tau = (fresh.get(id(v), v) for v in given_all)
        return call(x, k, tau=tau, mask=mask)

    for learned in (tensors, *([v] for v in tensors)):
        for given_mask in (None, mask):
            assert_ordinary(name, partial(run, learned=learned, mask=given_mask), learned, grad)


COLUMNS: dict[str, tuple[tuple[int, ...], int]] = {
    "matrix": ((64, 40), 0),
    "few columns": ((33, 3), -2),
    "middle": ((2, 9, 37), 1),
    "outermost": ((20, 3, 5), 0),
    "long": ((700, 21), 0),
}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("output", SOFT)
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_columns_are_the_rows_of_the_moved_tensor(cdf: Any, output: str, columns: str) -> None:
    """Values and gradients to second order, with masks and learned numbers, in the layout of the input."""
    name, call = SOFT[output]
    shape, dim = COLUMNS[columns]
    x, grad = scores(*shape), scores(*shape, seed=1)
    batch = x.movedim(dim, -1).shape[:-1]
    k, tau = 2 + scores(*batch, seed=2).sigmoid(), 1 + scores(*batch, seed=3).sigmoid()
    mask = (scores(*shape, seed=4) > -1).movedim(dim, -1)
    mask[..., :3] = True
    mask = mask.movedim(-1, dim).contiguous()

    def run(moved: bool, learned: bool, given: Tensor | None) -> tuple[Tensor, ...]:
        leaf, count, scale = (v.clone().requires_grad_() for v in (x, k, tau))
        there = (lambda t: t.movedim(dim, -1)) if moved else (lambda t: t)
        back = (lambda t: t.movedim(-1, dim)) if moved else (lambda t: t)
        y = call(
            there(leaf),
            count if learned else 2.5,
            -1 if moved else dim,
            tau=scale if learned else 1.0,
            cdf=cdf,
            mask=None if given is None else there(given),
        )
        assert moved or y.is_contiguous()
        leaves = [leaf, count, scale] if learned else [leaf]
        y = back(y)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        recorded = torch.autograd.grad(y, leaves, grad, create_graph=True)
        total = sum((g.double().square().sum() for g in recorded), torch.zeros(()))
        return y.detach(), *first, *torch.autograd.grad(total, leaves)

    for learned in (False, True):
        for given in (None, mask):
            with answers(name) as answered:
                here = run(False, learned, given)
            assert answered == [True]
            with ordinary():
                there = run(True, learned, given)
            for a, b in zip(here, there, strict=True):
                largest = b.masked_fill(b.isinf(), 0).abs().max().clamp(min=1)
                assert (a - b).abs().masked_fill(a == b, 0).max() <= 2e-6 * largest
    with torch.no_grad(), answers(name) as answered:
        assert torch.equal(call(x, 2.5, dim, cdf=cdf), call(x.clone().requires_grad_(), 2.5, dim, cdf=cdf))
    assert answered == [True, True]


@pytest.mark.parametrize("output", SOFT)
def test_columns_without_a_result_are_those_of_the_ordinary_way(output: str) -> None:
    _, call = SOFT[output]
    x = scores(9, 4)
    x[3, 2] = math.nan
    here, there = both(lambda: call(x, 2, 0).clone(memory_format=torch.contiguous_format))
    assert same(here, there) and here[:, 2].isnan().all()
    x[:, 1] = -math.inf
    here, there = both(lambda: call(x, 2, 0))
    assert isinstance(here, tuple) and here == there


@pytest.mark.parametrize("output", SOFT)
def test_tensors_for_k_and_tau_raise_the_errors_of_the_ordinary_way(output: str) -> None:
    _, call = SOFT[output]
    x = scores(4, 9)
    few = x.where(x > 0, -math.inf)
    for run in (
        lambda: call(x, torch.tensor([2, 3, 10, 3])),
        lambda: call(x, torch.tensor([2, 3, -1.0, 3])),
        lambda: call(few, torch.tensor([1.0, 1.0, 9.0, 1.0])),
        lambda: call(x, 2, tau=torch.tensor([1.0, 0.0, 1.0, 1.0])),
        lambda: call(x, 2, tau=torch.tensor([1.0, math.nan, 1.0, 1.0], requires_grad=True)),
        lambda: call(x, torch.tensor([2.0, 3.0])),
        lambda: call(x, torch.full((9, 4), 2.0)),
        lambda: call(x, torch.tensor([True, True, True, False])),
    ):
        here, there = both(run)
        assert isinstance(here, tuple) and here == there
    tau = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = call(x, 2, tau=tau)
    with torch.no_grad():
        tau.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    nothing = call(x, torch.zeros(4))
    assert not nothing.exp().any() if output == "log" else not nothing.any()


@pytest.mark.parametrize("hard", [False, True])
def test_masked_calls_raise_the_errors_of_the_ordinary_way(hard: bool) -> None:
    x = scores(4, 9)
    spoiled = x.clone()
    spoiled[2, 3] = math.nan
    few = torch.ones(4, 9, dtype=torch.bool)
    few[1, 2:] = False
    call = partial(khot.soft_topk, hard=hard)
    for run in (
        lambda: call(x, 3, mask=few),
        lambda: call(spoiled, 3, mask=few.logical_not()),
        lambda: call(x, 3, mask=few.float()),
        lambda: call(x, 3, mask=few[:, :5]),
        lambda: call(x, 10),
    ):
        here, there = both(run)
        assert isinstance(here, tuple) and here == there
    hidden = few.clone()
    hidden[2, 3] = False
    assert same(*both(lambda: call(spoiled, 2, mask=hidden)))  # what is masked may be anything
    assert same(*both(lambda: call(spoiled, 2))) and call(spoiled, 2)[2].isnan().all()
    leaf, mask = x.clone().requires_grad_(), few.clone()
    y = call(leaf, 2, mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hard_masks_of_rows_that_do_not_lie_in_order() -> None:
    x = scores(9, 4)
    with answers("topk_mask") as answered:
        here = khot.topk_mask(x.mT, 2)
    assert answered == [True]
    assert same(here, khot.topk_mask(x.mT.contiguous(), 2))


@pytest.mark.parametrize("cdf", CDFS[:3])
@every_function
def test_gradients_are_right_to_second_order(cdf: Any, output: str) -> None:
    """And those of the third are those of the ordinary way."""
    name, function = FUNCTIONS[output]
    x = scores(3, 6, dtype=torch.float64).requires_grad_()
    call = partial(function, tau=0.8, cdf=cdf)

    def third() -> Tensor:
        value, seed = call(x), 3
        for _ in range(3):
            value = (value * scores(*value.shape, seed=seed, dtype=x.dtype)).sum()
            value, seed = torch.autograd.grad(value, x, create_graph=True)[0], seed + 1
        return value.detach()

    with answers(name) as answered:
        assert torch.autograd.gradcheck(call, x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(call, x, check_batched_grad=True)
        found = third() if output != "topk" else x  # which is linear
    assert all(answered)
    with ordinary():
        torch.testing.assert_close(found, third() if output != "topk" else x, rtol=1e-10, atol=1e-12)


@every_function
def test_what_is_not_plain_takes_the_ordinary_way(output: str) -> None:
    name, call = FUNCTIONS[output]
    x, operator = scores(4, 9), getattr(khot, name if output != "log" else "log_soft_topk")

    class Own(Tensor):
        pass

    with answers(name) as answered:
        with forward_ad.dual_level():
            assert (
                forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None
            )
        torch.func.vmap(call)(x)
        torch.func.grad(lambda x: call(x).flatten()[0])(x)
        torch.func.vmap(lambda _: call(x))(x)  # not mapped, but a transform is on
        call(x.to("meta"))
        call(x.as_subclass(Own))
        call(torch.randn(2, 9, dtype=torch.complex64).conj().imag)  # with the negative bit
        if output == "topk":
            operator(x, 0)
        else:
            call(x, cdf=Wider())
        if output not in ("y", "log"):
            operator(x, 2, 0)
        if output in ("count", "threshold"):
            for level in (torch.tensor(2.0, requires_grad=True), torch.full((4,), 2), torch.full((4, 3), 2)):
                operator(x, level)
            call(x, tau=torch.tensor(1.0, requires_grad=True))
    assert answered == [False] * len(answered) and len(answered) >= 8


def test_other_soft_calls_that_are_not_plain() -> None:
    x = scores(4, 9)
    with answers("soft_topk") as answered:
        with forward_ad.dual_level():
            y = khot.soft_topk(x, 2, tau=forward_ad.make_dual(torch.ones(4), torch.ones(4)))
            assert forward_ad.unpack_dual(y).tangent is not None
        khot.soft_topk(x, 2, mask=(x > -9).mT.contiguous().mT)
        khot.soft_topk(x, 2, mask=(x > -9)[:, :1].expand_as(x))
        khot.soft_topk(x, 2, largest=False)
        khot.soft_topk(x, torch.tensor([2, 3, 2, 3], dtype=torch.int16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(lambda x: khot.soft_topk(x, 2), x, check_trace=False)
    assert answered == [False] * len(answered) and len(answered) >= 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("soft_topk", khot.soft_topk),
        ("soft_topk", khot.log_soft_topk),
        ("hard_topk", partial(khot.soft_topk, hard=True)),
    ],
)
def test_packed_rows_of_one_length(name: str, call: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, offsets = scores(6, 9).requires_grad_(), torch.arange(0, 55, 9, dtype=dtype)
    mask = torch.arange(54).view(6, 9) % 5 > 0
    k, tau = (torch.linspace(*ends, 6, dtype=torch.float64).requires_grad_() for ends in ((1, 4), (0.5, 2)))
    for numbers in ((k, tau), (torch.tensor(2.5), 0.7)):
        leaves = [v for v in (x, *numbers) if isinstance(v, Tensor) and v.requires_grad]
        for options in ({}, {"mask": mask}):
            found = []
            for matrix in (True, False):
                given = options if matrix else {key: value.flatten() for key, value in options.items()}
                given = given if matrix else given | {"offsets": offsets}
                with answers(name) as answered:
                    y = call(x if matrix else x.flatten(), numbers[0], tau=numbers[1], **given)
                assert answered == [True]
                first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
                second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
                found.append((y.detach().flatten(), *(g.detach() for g in first), *second))
            assert same(*found)


def test_packed_rows_that_are_not_plain() -> None:
    x, even = scores(12), torch.tensor([0, 4, 8, 12])
    with answers("soft_topk") as answered:
        for offsets in ([0, 3, 8, 12], [0, 4, 8], [4, 8, 12], [0, 4, 8, 13], [0], [[0, 4, 8, 12]]):
            assert same(*both(lambda o=offsets: khot.soft_topk(x, 2, offsets=torch.tensor(o))))  # type: ignore[misc]
        others: list[dict[str, Any]] = [
            *({"offsets": even.to(dtype)} for dtype in (torch.int16, torch.float32)),
            *({"k": torch.full(shape, 2.0)} for shape in ((1,), (3, 1), (4,))),
            *({"tau": torch.full(shape, 2.0)} for shape in ((1,), (1, 3))),
            *({"mask": mask} for mask in (x[:4] > -9, x.view(3, 4) > -9, x)),
            *({"input": rows} for rows in (x.view(3, 4), x.view(1, 12), x[::2])),
            *({"dim": 1}, {"k": 5}, {"k": 4}, {"k": 0}, {"largest": False}, {"offsets": even[::2]}),
        ]
        for other in others:
            given = {"input": x, "k": 2, "offsets": even} | other
            assert same(*both(lambda given=given: khot.soft_topk(**given))), other  # type: ignore[misc]
    assert not any(answered)


def test_large_calls_and_their_gradients_are_shared_among_threads_alike() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for shape in ((999, 40), (40, 1_000), (1, 300_000)):
            x, v = scores(*shape), scores(*shape, seed=1)
            assert same(*both(lambda x=x: khot.topk(x, 9)))  # type: ignore[misc]
            for output, (name, function) in FUNCTIONS.items():
                grad = v if output in ("y", "log") else v[:, :2] if output == "topk" else v[:, 0]
                assert_ordinary(name, function, [x], grad)
    finally:
        torch.set_num_threads(threads)


def test_it_serves_parameters_inference_mode_and_autocast() -> None:
    x = torch.nn.Parameter(scores(4, 9))
    with answers("soft_topk") as answered:
        assert khot.soft_topk(x, 2).requires_grad
        with torch.inference_mode():
            assert khot.soft_topk(x, 2).is_inference()
        with torch.no_grad():
            assert not khot.soft_topk(x, 2).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert khot.soft_topk(x, 2).dtype == torch.float32
    assert answered == [True] * 4


@every_function
def test_it_is_a_node_of_autograd_like_any_other(output: str) -> None:
    call = FUNCTIONS[output].call
    x = scores(4, 9).requires_grad_()
    y = call(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()

    if output != "topk":  # whose gradient needs the places alone
        changed = x * 1
        y = call(changed)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    assert packed and torch.autograd.grad(y, x, torch.ones_like(y))[0].shape == x.shape

    m = y.numel()
    (rows,) = torch.autograd.grad(call(x), x, torch.eye(m).view(m, *y.shape), is_grads_batched=True)
    jacobian = torch.autograd.functional.jacobian(call, x).view(m, 36)
    assert torch.allclose(rows.view(m, 36), jacobian, atol=1e-6)

    checkpointed = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
    (here,) = torch.autograd.grad(checkpointed, x, torch.ones_like(y))
    assert torch.equal(here, torch.autograd.grad(call(x), x, torch.ones_like(y))[0])


DRAWS: list[Callable[..., Tensor]] = [
    lambda x, p, g: khot.sampling.sample(p, generator=g),
    lambda x, p, g: khot.sampling.sample(p * 0.01, generator=g),
    lambda x, p, g: khot.sampling.sample(p, dim=0, generator=g),
    lambda x, p, g: khot.sampling.sample(x, generator=g),
    lambda x, p, g: khot.sample_khot(x, 3, generator=g),
    lambda x, p, g: khot.sample_khot(x, generator=g),
    lambda x, p, g: khot.sample_khot(x * 100, 3, generator=g),
    lambda x, p, g: khot.sample_khot(x, 3, estimator="second_order", generator=g),
]


def drawn(draw: Callable[..., Tensor], x: Tensor, own: bool) -> tuple[Any, Tensor]:
    """A sample, and the state of the generator after it."""
    torch.manual_seed(3)
    probs = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    generator = torch.Generator().manual_seed(4) if own else None
    sample = outcome(partial(draw, x, probs, generator))
    return sample, (generator or torch.default_generator).get_state()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_samples_use_the_same_random_numbers(rows: str, dtype: torch.dtype) -> None:
    """Also where a call is left to the ordinary way."""
    for i, draw in enumerate(DRAWS):
        for own in (True, False):
            (here, after), (there, then) = both(partial(drawn, draw, ROWS[rows].to(dtype), own))
            assert same(here, there), (i, here, there)
            assert torch.equal(after, then), i


class Renamed(khot.cdfs.Logistic):
    """Another class, which has the compiled kernels of its parent."""


class Wider(khot.cdfs.Logistic):
    """Another CDF."""

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z / 2)

    def pdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z / 2) * torch.sigmoid(-z / 2) / 2


@with_a_cdf
@pytest.mark.parametrize("name", CDFS[:-1])
def test_objects_of_the_cdfs_are_taken_like_their_names(name: CDFName, output: str) -> None:
    function, x = FUNCTIONS[output], scores(3, 9).requires_grad_()
    found = []
    for cdf in (name, khot.cdfs.resolve(name)):
        with answers(function.name) as answered:
            y = function.call(x, tau=0.7, cdf=cdf)
        assert answered == [True]
        found.append((y.detach(), *torch.autograd.grad(y.sin().sum(), x)))
    for by_name, by_object in zip(*found, strict=True):
        assert same(by_name, by_object)


@with_a_cdf
@pytest.mark.parametrize("cdf", [Renamed(), Wider(), None, 3], ids=lambda cdf: type(cdf).__name__)
def test_other_objects_are_left_to_the_ordinary_way(cdf: Any, output: str) -> None:
    function, x = FUNCTIONS[output], scores(3, 9)
    with answers(function.name) as answered:
        here, there = both(lambda: function.call(x, tau=0.7, cdf=cdf))
    assert not any(answered)
    assert same(here, there)


def test_layers_make_plain_calls() -> None:
    """A layer keeps its CDF as an object."""
    x = scores(4, 64).requires_grad_()
    for layer in (khot.nn.SoftTopK(2), khot.nn.SoftTopK(2, cdf="normal"), khot.nn.KHotGate(64, 2)):
        with answers("soft_topk") as answered:
            layer(x)
        assert answered == [True], layer


def test_profiles_show_the_operators() -> None:
    x = scores(4, 64).requires_grad_()
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        khot.soft_topk(x, 2).sum().backward()
        khot.soft_count(x, 0.0).sum().backward()
        khot.topk(x, 2)
        khot.topk_mask(x, 2)
    names = {event.name for event in profile.function_events or []}
    shown = ("soft_topk", "soft_topk_backward", "soft_count", "soft_count_backward", "topk", "topk_mask")
    assert {f"khot::{name}" for name in shown} <= names


def test_another_torch_leaves_the_extension_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = eager.soft_topk
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with ordinary():
        eager.load(None, {})  # type: ignore[arg-type]
        assert not eager.in_use()
    assert eager.soft_topk is found


def test_wrong_numbers_of_arguments_are_errors() -> None:
    for name in CALLS:
        with pytest.raises(TypeError, match="arguments"):
            getattr(eager, name)(1)


def test_compiled_autograd_takes_it_as_it_is() -> None:
    from torch._dynamo import compiled_autograd

    def run() -> Tensor:
        leaf = scores(4, 9).requires_grad_()
        with compiled_autograd._enable(partial(torch.compile, backend="eager")):
            (khot.soft_topk(leaf, 2) ** 2).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    here, there = both(run)
    assert same(here, there), (here, there)


@pytest.mark.parametrize("columns", [4, 8, 16])
def test_as_many_columns_as_a_vector_has_lanes(columns: int) -> None:
    """What is written ends with the last row: beyond it lies what others have in memory."""
    for _ in range(200):
        x = scores(9, columns).requires_grad_()
        y = khot.soft_topk(x, 2, 0)
        (y * x.detach()).sum().backward()
    torch.testing.assert_close(y, khot.soft_topk(x.T.contiguous(), 2).T)
