"""What plain calls launch, found out by the operator's kernel itself.

The extension for plain calls (``csrc/eager``) asks for a plan when a call of a kind comes again: an operator,
with so many rows of a length and a dtype, and numbers that are given in one way or another. The kernel is
then called with tensors of this kind, which hold anything, and with numbers that no launch has otherwise, and
starts nothing. Of what it would have launched the plan says which arguments are a tensor of the call, and
which a number.

There is no plan where torch computes between the launches, or a number decides what they are, or where the
kernel refuses what it is given. Such calls go the ordinary way, which raises the errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core.torch_internals import DispatchMode
from khot._kernels.gpu import load
from khot._kernels.triton import launch, layout, native, selection

#: In the place of numbers that are given by value.
NUMBERS = (math.pi, math.e)

ALIGNED = 16  # bytes: Triton compiles for addresses that are multiples of it


class Slot(IntEnum):
    """What an address of a call points into, as in ``csrc/eager/prepared.h``."""

    INPUT = 0  # the rows
    SECOND = 1  # a cost, or a seed
    NUMBER = 2  # the first number, and the second behind it
    GRAD = 4
    FIRST = 5  # of a gradient: the first result of the forward call
    KEPT = 6  # the other results of the forward call
    RESULT = 7
    SCRATCH = 8


class Plan(NamedTuple):
    """The launches of a plain call.

    Attributes:
        launches: of each the table of its variant, the programs, the arguments, and among all members of
            these the addresses (which argument, which slot, how many bytes behind its begin) and the parts of
            numbers that are given by value (which argument, which number, which part).
        result: the dtype of the first result.
        whole: whether this has the shape of the rows; otherwise it is one number for each of them.
        kept, scratch: the bytes of these slots.
        pulls: of a gradient: where in the scratch the gradient of each number lies, one in float64 for each
            row, or -1.
        reads_first: whether the gradient of the call reads its first result again.
    """

    launches: tuple[tuple[Any, ...], ...]
    result: torch.dtype
    whole: bool
    kept: int
    scratch: int
    pulls: tuple[int, ...]
    reads_first: bool


class Gradient(NamedTuple):
    """What the gradient of a call is computed from.

    Attributes:
        grad: of the call's result.
        none: in the place of a gradient that nobody has.
        inputs, numbers, results: of the call.
        asked: whether gradients of numbers are wanted.
    """

    grad: Tensor
    none: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[Tensor]
    results: Sequence[Tensor]
    asked: bool


class Planned(NamedTuple):
    """An operator, with the choices of its calls.

    Attributes:
        call: from the inputs, the numbers and the choices to the results, the first of which is the call's.
        pull: from a :class:`Gradient` and the choices to the gradient of the rows, and that of each number or
            None.
        reads_first: whether this reads the call's result.
    """

    call: Callable[..., Sequence[Tensor]]
    pull: Callable[..., Sequence[Tensor | None]] | None = None
    reads_first: bool = False


def _run(operator: str, *given: Any) -> Sequence[Tensor]:
    results: Sequence[Tensor] = load(operator)(*given)
    return results


def _refuse_unless(known: bool) -> None:
    if not known:
        raise ValueError("the ordinary way has the error")


def _soft_topk(x: Tensor, k: Tensor, tau: Tensor, cdf: Any, log: bool) -> Sequence[Tensor]:
    F = cdfs.resolve(cdf)
    return _run("soft_topk", x, k, tau, F.name, F.shape, "log" if log else "y")


def _pull_soft_topk(g: Gradient, cdf: Any, log: bool) -> Sequence[Tensor]:
    (x,), (_, tau), (_, hi, lo), F = g.inputs, g.numbers, g.results, cdfs.resolve(cdf)
    output = "log" if log else "y"
    return _run("soft_topk_backward", g.grad, g.none, x, hi, lo, tau, F.name, F.shape, output)


def _soft_budget(
    x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor, cdf: Any, by: str, at_most: bool
) -> Sequence[Tensor]:
    F = cdfs.resolve(cdf)
    _refuse_unless(by in ("score", "value") and isinstance(at_most, bool))
    return _run("soft_budget", x, cost, budget, tau, F.name, F.shape, by, at_most)


def _pull_soft_budget(g: Gradient, cdf: Any, *which: Any) -> Sequence[Tensor]:
    (x, cost), (_, tau), (_, hi, lo), F = g.inputs, g.numbers, g.results, cdfs.resolve(cdf)
    given = g.grad, g.none, x, cost, hi, lo, tau, F.name, F.shape, *which
    dx, _, dbudget, dtau = _run("soft_budget_backward", *given)
    return dx, dbudget, dtau


def _magnitude(signed: bool) -> Planned:
    def call(x: Tensor, k: Tensor, tau: Tensor, p: float) -> Sequence[Tensor]:
        _refuse_unless(type(p) in (int, float) and 1.15 <= p <= 3)
        return _run("soft_topk_magnitude", x, k, tau, float(p), signed)

    def pull(g: Gradient, p: float) -> Sequence[Tensor | None]:
        (x,), (k, tau), (y, hi, lo) = g.inputs, g.numbers, g.results
        given = g.grad, g.none, x, y, k, hi, lo, tau, float(p), signed
        dx, dtau = _run("soft_topk_magnitude_backward", *given)
        return dx, None, dtau

    return Planned(call, pull, reads_first=True)


def _is_descending(cdf: Any, descending: bool, method: str, regularization: str) -> bool:
    """The order of ranks and sorts, which these choices leave to Laplace's scans."""
    by_scans = cdfs.resolve(cdf).name == "laplace" and (method, regularization) == ("count", "l2")
    _refuse_unless(by_scans and isinstance(descending, bool))
    return descending


def _soft_rank(x: Tensor, tau: Tensor, *choices: Any) -> Sequence[Tensor]:
    rank, order, _ = _run("laplace_count", x, None, tau, _is_descending(*choices))
    return rank, order


def _pull_soft_rank(g: Gradient, *choices: Any) -> Sequence[Tensor | None]:
    (x,), (tau,), (_, order) = g.inputs, g.numbers, g.results
    given = g.grad, x, order, None, order[..., :0], tau, g.asked, _is_descending(*choices)
    dx, _, dtau = _run("laplace_count_backward", *given)
    return dx, dtau if g.asked else None


def _soft_sort(x: Tensor, tau: Tensor, *choices: Any) -> Sequence[Tensor]:
    _, *results = _run("laplace_thresholds", x, None, tau, _is_descending(*choices))
    return results


def _pull_soft_sort(g: Gradient, *choices: Any) -> Sequence[Tensor | None]:
    (x,), (tau,), (_, order, place) = g.inputs, g.numbers, g.results
    given = g.grad, x, order, None, place, tau, g.asked, _is_descending(*choices)
    dx, _, dtau = _run("laplace_thresholds_backward", *given)
    return dx, dtau if g.asked else None


def _topk_mask(x: Tensor, k: Tensor) -> Sequence[Tensor]:
    _refuse_unless(x.shape[-1] <= selection.longest())  # for longer rows k decides what is launched
    return (load("topk_mask")(x, k),)


def _topk(x: Tensor, k: int, largest: bool, sorted: bool) -> Sequence[Tensor]:
    _refuse_unless(1 <= k <= x.shape[-1])
    return _run("topk", x, k, largest, sorted)


#: By the names of `kOperators` in ``csrc/eager/prepared.h``.
PLANNED = {
    "soft_topk": Planned(_soft_topk, _pull_soft_topk),
    "topk_mask": Planned(_topk_mask),
    "soft_topk_magnitude": _magnitude(True),
    "soft_budget": Planned(_soft_budget, _pull_soft_budget),
    "soft_rank": Planned(_soft_rank, _pull_soft_rank),
    "soft_sort": Planned(_soft_sort, _pull_soft_sort),
    "selectable": Planned(lambda x, most: (load("selectable")(x, most.item()),)),
    "sizes": _magnitude(False),
    "pareto_sample": Planned(functools.partial(_run, "pareto_sample")),
    "topk": Planned(_topk),
}


def plan(
    operator: str,
    backward: bool,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    n: int,
    choices: tuple[Any, ...],
    numbers: tuple[tuple[torch.dtype, bool] | None, ...],
    cost: tuple[torch.dtype, bool] | None,
    asked: bool,
) -> Plan | None:
    """The launches of such calls, or of their gradients.

    Args:
        numbers: of each that lies on the device its dtype, and whether all rows have the same.
        cost: the dtype of costs, and whether each entry has its own.
        asked: of a gradient: whether those of numbers are wanted.
    """
    planned, inputs = PLANNED[operator], [torch.empty(rows, n, dtype=dtype, device=device)]
    if cost is not None:
        shape = (rows, n) if cost[1] else (n,)
        inputs.append(torch.empty(shape, dtype=cost[0], device=device))
    if operator == "pareto_sample":
        inputs.append(torch.empty((), dtype=torch.int64, device=device))
    given, none = _numbers(numbers, rows, device), torch.zeros((), dtype=torch.float64)
    try:
        with torch.no_grad(), _Watch() as watch, launch.unstarted() as launches:
            first, *others = planned.call(*inputs, *given, *choices)
            memory = _Memory(watch.made)
            for i, tensor in enumerate(inputs):
                memory.put(Slot.INPUT + i, tensor)
            for i, (tensor, how) in enumerate(zip(given, numbers, strict=True)):
                if how is not None:
                    memory.put(Slot.NUMBER + i, tensor)
            memory.put(Slot.FIRST if backward else Slot.RESULT, first)
            for tensor in others:
                memory.put(Slot.KEPT, tensor)
            gradients: Sequence[Tensor | None] = ()
            if backward:
                assert planned.pull is not None
                launches.clear()
                grad = torch.empty_like(inputs[0])
                memory.put(Slot.GRAD, grad)
                of = Gradient(grad, none, inputs, given, (first, *others), asked)
                dx, *gradients = planned.pull(of, *choices)
                assert dx is not None
                memory.put(Slot.RESULT, dx)
                first = dx
    except _Computes:
        return None
    pulls = tuple(-1 if each is None else memory.place(each)[1] for each in gradients)
    told = [_told(*each, memory, numbers) for each in launches]
    if None in told or not memory.alone(first):
        return None
    whole, bytes = first.numel() == rows * n, memory.bytes
    launched = tuple(each for each in told if each is not None)
    return Plan(
        launched, first.dtype, whole, bytes[Slot.KEPT], bytes[Slot.SCRATCH], pulls, planned.reads_first
    )  # fmt: skip


def _numbers(
    numbers: Sequence[tuple[torch.dtype, bool] | None], rows: int, device: torch.device
) -> list[Tensor]:
    """Tensors in their place."""
    return [
        torch.tensor(value, dtype=torch.float64)
        if how is None
        else torch.empty(1 if how[1] else rows, dtype=how[0], device=device)
        for how, value in zip(numbers, NUMBERS, strict=False)
    ]


class _Computes(Exception):
    """Torch computes, so that there is no plan."""


class _Watch(DispatchMode):
    """Notes the memory that is allocated; nothing is to be computed but by kernels of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = func._schema.name.partition("::")[2], func._schema.returns
        allocates = name.startswith(("empty", "new_empty"))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        given = [each for each in args if isinstance(each, Tensor)]
        # as those that stand for a number that is given by value
        of_numbers = bool(given) and all(each.is_cpu and each.dim() == 0 for each in given)
        if not (allocates or is_view or of_numbers):
            raise _Computes
        result = func(*args, **(kwargs or {}))
        if allocates:
            self.made[_begin(result)] = result
        return result


class _Memory:
    """Where the tensors of a call lie: of each allocation the slot, and how far behind its begin."""

    def __init__(self, made: dict[int, Tensor]) -> None:
        self.made = made
        self.places: dict[int, tuple[int, int]] = {}
        self.bytes = dict.fromkeys(range(Slot.SCRATCH + 1), 0)

    def put(self, slot: int, tensor: Tensor) -> None:
        begin = _begin(tensor)
        if begin not in self.places:
            self.places[begin] = slot, self.bytes[slot]
            self.bytes[slot] += -(-tensor.untyped_storage().nbytes() // ALIGNED) * ALIGNED

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """Its slot, which is the scratch for memory that was allocated on the way, and how far behind."""
        begin = _begin(tensor)
        if begin not in self.places and begin in self.made:
            self.put(Slot.SCRATCH, tensor)
        slot, offset = self.places[begin]
        return int(slot), offset + tensor.data_ptr() - begin

    def knows(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and (_begin(tensor) in self.places or _begin(tensor) in self.made)

    def alone(self, result: Tensor) -> bool:
        """Whether a result has an allocation of its own."""
        own = result.is_contiguous() and result.nbytes == result.untyped_storage().nbytes()
        return own and self.places[_begin(result)] == (Slot.RESULT, 0)


def _begin(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _told(
    variant: launch.Variant,
    programs: int,
    arguments: tuple[Any, ...],
    memory: _Memory,
    numbers: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """A launch as a plan has it; None if an argument comes from elsewhere."""
    addresses, parts = [], []
    of_numbers = {
        part: (number, which)
        for number, (how, value) in enumerate(zip(numbers, NUMBERS, strict=False))
        if how is None
        for which, part in enumerate(_parts(value))
    }
    for at, value in enumerate(native.members(arguments)):
        if isinstance(value, Tensor):
            if not memory.knows(value):
                return None
            addresses.append((at, *memory.place(value)))
        elif isinstance(value, float) and value in of_numbers:
            parts.append((at, *of_numbers[value]))
    return variant.table, programs, arguments, addresses, parts


def _parts(number: float) -> tuple[float, float, float]:
    """The number as the sum of three, as kernels are given it."""
    high, low = layout.halves(number)
    return high, low, (number - high) - low


native.ASKED["plan"] = plan
