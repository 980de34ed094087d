"""What plans of launches say: run by `test_native.py` with `launches.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
import recorded
from answers import answers
from kernels.launching import device, ordinary, scores, seen
from khot._kernels.triton import native, plans, selection

__all__ = ["device", "seen"]  # fixtures

CPU = torch.device("cpu")

#: The choices of each operator, and how many numbers it has.
CHOICES: dict[str, tuple[tuple[Any, ...], int]] = {
    "soft_topk": (("laplace", True), 2),
    "topk_mask": ((), 1),
    "soft_topk_magnitude": ((1.5,), 2),
    "soft_budget": (("logistic", "value", True), 2),
    "soft_rank": (("laplace", False, "count", "l2"), 1),
    "soft_sort": (("laplace", True, "count", "l2"), 1),
    "selectable": ((), 1),
    "sizes": ((2,), 2),
    "pareto_sample": ((4.0, 1e-5), 0),
    "topk": ((3, True, True), 0),
}
SHAPES = ((6, 32), (3, 700), (2, 9_000), (2, 300_000))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def kind(operator: str, how: tuple[torch.dtype, bool] | None) -> tuple[Any, ...]:
    choices, count = CHOICES[operator]
    return choices, (how,) * count, (torch.float32, False) if operator == "soft_budget" else None


@pytest.mark.parametrize("operator", plans.PLANNED)
def test_numbers_decide_nothing(
    operator: str, seen: list[recorded.Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a plan holds for all of them; and each number that is given by value is passed on."""
    planned, count, own = 0, CHOICES[operator][1], plans.NUMBERS
    for backward in (False, True)[: 2 if plans.PLANNED[operator].pull else 1]:
        for (rows, n), dtype in ((shape, dtype) for shape in SHAPES for dtype in DTYPES):
            if operator == "topk_mask" and n > selection.longest():  # k decides, so it has no plan
                continue
            found, kernels = [], []
            for numbers in (own, (1.4142135623730951, 123.45678901234), (3.0, 1.0)):
                monkeypatch.setattr(plans, "NUMBERS", numbers)
                plan = plans.plan(operator, backward, CPU, dtype, rows, n, *kind(operator, None), True)
                kernels.append(plan and [each[:2] for each in plan.launches])
                found.append(plan and told(plan, numbers))
            assert kernels[0] == kernels[1] == kernels[2] and found[0] == found[1]
            planned += found[0] is not None
            if found[0] is not None and not backward:
                first = {number for *_, parts in found[0][1] for _, number, part in parts if part == 0}
                assert first == set(range(count))
    assert planned >= 2


def told(plan: plans.Plan, numbers: tuple[float, float]) -> tuple[Any, ...]:
    """All that it says, without the addresses and the numbers."""
    parts = {part for number in numbers for part in plans._parts(number) if part}
    launches = []
    for table, programs, arguments, *places in plan.launches:
        others = [
            each
            for each in native.members(arguments)
            if not (isinstance(each, Tensor) or (isinstance(each, float) and each in parts))
        ]
        launches.append((table, programs, others, *places))
    return plan[1:], launches


def test_numbers_have_parts_that_differ() -> None:
    assert len({part for number in plans.NUMBERS for part in plans._parts(number)} - {0.0}) == 6


#: Calls, the extension's names for them, and for how many of the shapes they have a plan in float32, bfloat16
#: and float64: of the others torch computes a part, or a number decides, or an address is not aligned.
#: Likewise of their gradients.
CALLS: dict[str, tuple[str, Callable[[Tensor], Tensor], str, str]] = {
    "soft_topk": ("soft_topk", lambda x: khot.soft_topk(x, 3, tau=0.7), "444", "333"),
    "log": ("soft_topk", lambda x: khot.log_soft_topk(x, 3, cdf="uniform"), "444", "333"),
    "mask": ("topk_mask", lambda x: khot.topk_mask(x, 3), "332", ""),
    "magnitude": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, 3), "444", "333"),
    "budget": ("soft_budget", lambda x: khot.soft_budget(x, COST[: x.shape[-1]], 2.5), "334", "333"),
    "rank": ("soft_rank", lambda x: khot.soft_rank(x), "220", "220"),
    "sort": ("soft_sort", lambda x: khot.soft_sort(x, descending=True), "220", "220"),
    "sample": ("pareto", lambda x: khot.sampling.sample(x), "333", ""),
    "topk": ("topk", lambda x: khot.topk(x, 3).values, "440", ""),
}
COST = torch.rand(300_000, generator=torch.Generator().manual_seed(3)) + 0.1
CASES = [
    (name, shape, dtype, gradient)
    for name, (*_, of_calls, of_gradients) in CALLS.items()
    for gradient, planned in ((False, of_calls), (True, of_gradients))
    for dtype, shapes in zip(DTYPES, planned, strict=False)
    for shape in SHAPES[: int(shapes)]
]


@pytest.mark.parametrize(("name", "shape", "dtype", "gradient"), CASES, ids=str)
def test_calls_launch_what_the_ordinary_way_does(
    name: str, shape: tuple[int, int], dtype: torch.dtype, gradient: bool, seen: list[recorded.Launch]
) -> None:
    """The same kernels and numbers, and addresses that are the same in both, or in neither. Nothing is
    computed in their place."""
    entry, call, *_ = CALLS[name]
    x = torch.sigmoid(scores(*shape, dtype=dtype)).requires_grad_(gradient)
    recorded.run_instead(lambda: seen.append(recorded.Launch()) or 0)

    def launched() -> list[recorded.Launch]:
        seen.clear()
        y = call(x)
        if gradient:
            torch.autograd.grad(y, x, torch.ones_like(y))
        return list(seen)

    with ordinary():
        wanted = launched()
    launched()
    with answers(entry) as answered:
        found = launched()
    assert answered == [True] and len(found) == len(wanted) > 0
    same: dict[int, int] = {}
    for own, tritons in zip(found, wanted, strict=True):
        if gradient:  # a call after the other, and the first one's memory may be used again
            same = {}
        assert (own.function, own.place) == (tritons.function, tritons.place)
        kinds = (*recorded.compiled[own.function - 1].kept.values(), "scratch", "scratch")
        for which, a, b in zip(kinds, own.values, tritons.values, strict=True):
            assert same.setdefault(a, b) == b if which.startswith("*") else a == b


def test_what_torch_computes_has_no_plan(seen: list[recorded.Launch]) -> None:
    """It is not computed for one, nor asked for twice."""
    asked, plan = [], plans.plan
    recorded.use(lambda *given: asked.append(plan(*given)) or asked[-1])
    x = scores(6, 32, dtype=torch.float64)
    with answers("soft_rank") as answered:
        for _ in range(4):
            khot.soft_rank(x)
    assert answered == [False] * 4 and asked == [None]


def test_other_threads_launch_while_a_plan_is_made(
    seen: list[recorded.Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = scores(6, 32), scores(7, 32)
    for _ in range(3):
        khot.soft_topk(x, 3)
    started, go_on = threading.Event(), threading.Event()
    planned = plans.PLANNED["topk_mask"]

    def wait(*given: Any) -> Any:
        started.set()
        assert go_on.wait(20)
        return planned.call(*given)

    monkeypatch.setitem(plans.PLANNED, "topk_mask", planned._replace(call=wait))
    khot.topk_mask(other, 3)
    thread = threading.Thread(target=khot.topk_mask, args=(other, 3))
    thread.start()
    assert started.wait(20)
    before = recorded.starts()
    y = khot.soft_topk(x, 3)
    with ordinary():
        assert torch.equal(khot.soft_topk(x, 3), y)
    assert recorded.starts() == before + 2
    go_on.set()
    thread.join()
    with answers("topk_mask") as answered:
        khot.topk_mask(other, 3)
    assert answered == [True] and recorded.starts() == before + 4
