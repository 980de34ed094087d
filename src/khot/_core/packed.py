"""Rows of different lengths, packed in one tensor: row i is values[offsets[i]:offsets[i + 1]].

The functions on rows know rows of one length. So rows of like length become a matrix, a *group*, and a
function is called on each group as on any other input. Groups are cut so that the cells, with those behind
the ends of shorter rows, and the calls cost least together; for a function without a mask each length is a
group. What is here is only which cell goes where; values move by operations of torch, with their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import is_nested
from khot._core.precision import widen
from khot._core.rows import Row, batch_with
from khot._core.torch_internals import is_transformed, run_as_is

__all__ = ["Results", "apart", "by_rows", "check", "together"]

#: As many cells as a call of a function costs: of 3,000, 12,000 and 40,000 the best on most batches.
CALL = 40_000
#: The length of rows where there are none: no k for all rows is above it.
ANY = 1 << 16


class Results(NamedTuple):
    """What a function on rows gives.

    Attributes:
        entries: whether one value for each entry; if not, one number, or several, for each row.
        loss: whether it has a reduction over rows.
        at_once: the same without groups: a function of the values and offsets, of what else gives the result,
            and of the other arguments by name, all of them as they came. It returns None for what it does not
            know.
    """

    entries: bool
    loss: bool = False
    at_once: Callable[..., Any] | None = None


class Group(NamedTuple):
    """Rows that are computed together, as a matrix.

    Attributes:
        rows: how many.
        length: of the longest.
        ends: (rows, length) bool, True where a row has an entry; None if all are of this length.
    """

    rows: int
    length: int
    ends: Tensor | None


class Plan(NamedTuple):
    """How packed rows become groups.

    Attributes:
        groups: in the order of their lengths.
        order: the rows, in the order in which the groups have them.
        cells: where the cells of all groups lie in the values; behind their last where a row has ended. None
            if the values are one group as they lie.
        back: where the values lie in the cells.
    """

    groups: list[Group]
    order: Tensor
    cells: Tensor | None
    back: Tensor | None


def by_rows(
    function: Callable[..., Any], input: Any, name: str, options: dict[str, Any], results: Results
) -> Any:
    """The function on packed rows, or on those of a jagged nested tensor, which gives a nested tensor of
    entries.

    Args:
        name: of the function's first argument, which is the input.
        options: its other arguments, offsets among them.
    """
    values, options = apart(input, name, options)
    offsets = options.pop("offsets")

    def by_groups(values: Tensor, **changed: Any) -> Any:
        return _by_groups(function, values, offsets, name, options | changed, results)

    found = None if results.at_once is None else results.at_once(values, offsets, by_groups, **options)
    return together(by_groups(values) if found is None else found, input, results)


def apart(input: Any, name: str, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The values of packed rows, and the options with their offsets and without nested tensors."""
    if not is_nested(input):
        return input, options
    if options["offsets"] is not None:
        raise ValueError(f"offsets must be None for a nested {name}, which has its own, but got a tensor")
    values, offsets = _taken_apart(input, name)
    found = options | {"offsets": offsets}
    for key, value in options.items():
        if is_nested(value):
            found[key], own = _taken_apart(value, key)
            if torch.compiler.is_compiling():  # the offsets are not known: the same ones make the same shape
                same = value.shape == input.shape
            else:
                same = own is offsets or torch.equal(own, offsets)
            if not same:
                raise ValueError(f"{key} must have rows of the lengths of {name}'s, but got others")
    return values, found


def together(found: Any, input: Any, results: Results) -> Any:
    """What was found for the values, nested if it is of entries and the input is nested."""
    if not is_nested(input) or not results.entries or (results.loss and not found.dim()):
        return found
    rows = torch.nested.nested_tensor_from_jagged(found, input.offsets())
    # a nested view of what a trace computes cannot leave it (torch 2.13)
    return rows.clone() if torch.compiler.is_compiling() else rows


def _by_groups(
    function: Callable[..., Any],
    values: Tensor,
    offsets: Tensor,
    name: str,
    options: dict[str, Any],
    results: Results,
) -> Any:
    check(values, offsets, name)
    if options.get("group") is not None:
        raise ValueError("group must be None with offsets: packed rows are whole on each process")
    if "dim" in options:
        if options["dim"] is None or arguments.check_dim(values, options["dim"]) != 0:
            raise ValueError(f"dim must be -1 with offsets, but got {options['dim']}")
        options["dim"] = -1
    lists = {key: x for key, x in options.items() if isinstance(x, Tensor) and x.dim() and key != "q"}
    lengths = _lengths(offsets, len(values))
    how = _plan(lengths, offsets, len(values), masked="mask" in options)
    parts: dict[str, Sequence[Tensor]] = {name: _apart(values, how)}
    for key, value in lists.items():
        parts[key] = _parts(value, key, values, how)
    found, others = [], _Others()
    with batch_with(others):
        for i, group in enumerate(how.groups):
            here = {key: part[i] for key, part in parts.items()}
            if group.ends is not None:
                given = here.get("mask", options["mask"])
                here["mask"] = group.ends if given is None else group.ends & given
            found.append(function(**{**options, **here}))
    if results.loss and options["reduction"] == "mean":
        return others.mean(found)
    if results.loss and options["reduction"] == "sum":
        return torch.stack(found).sum()
    first = options["q"].dim() if isinstance(options.get("q"), Tensor) else 0

    def join(*parts: Tensor) -> Tensor:
        return _entries(parts, how) if results.entries else _rows(parts, how, first)

    return type(found[0])(*map(join, *found)) if isinstance(found[0], tuple) else join(*found)


# Dynamo may have left a function that calls it, and trace what is called here frame by frame: what a frame
# notes of weights would be lost.
run_as_is(by_rows)

# The arguments with one value for each entry. Each row has its own w.
OF_ENTRIES = arguments.OF_ENTRIES | {"w"}

UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


def _parts(value: Tensor, name: str, values: Tensor, how: Plan) -> Sequence[Tensor]:
    """What each group has of a tensor: of one value for each entry, or of one for each row."""
    of_entries = name in OF_ENTRIES
    count = len(values if of_entries else how.order)
    if value.shape[0] != count or (of_entries and value.dim() > 1):
        what = "entry" if of_entries else "row"
        raise ValueError(
            f"{name} must be a number or have one value for each {what}, {count} in all, but got the shape "
            f"{tuple(value.shape)}"
        )
    if of_entries:
        return _apart(value, how)
    # torch selects no rows of unsigned numbers of more than 8 bits by an index alone
    taken = value[how.order] if value.dtype in UNSIGNED else value.index_select(0, how.order)
    return taken.split([group.rows for group in how.groups])


def check(values: Any, offsets: Any, name: str) -> None:
    """Raise unless these are values, with offsets of any."""
    arguments.check_input(values, name)
    if values.dim() != 1:
        raise ValueError(f"{name} must have one dim with offsets, but got the shape {tuple(values.shape)}")
    arguments.check_tensor(offsets, "offsets")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must have dtype int32 or int64, but got {offsets.dtype}")
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(
            f"offsets must have one dim and at least one entry, but got the shape {tuple(offsets.shape)}"
        )
    arguments.check_device(offsets, "offsets", values)
    if not torch.compiler.is_compiling() and is_transformed(offsets):
        raise ValueError("offsets must be the same for all examples of torch.vmap, but got a batch of them")


def _taken_apart(input: Any, name: str) -> tuple[Tensor, Tensor]:
    """The values and the offsets of a jagged nested tensor of rows."""
    if input.dim() != 2 or input.lengths() is not None:
        what = "holes" if input.dim() == 2 else f"{input.dim()} dims"
        raise ValueError(f"a nested {name} must have two dims, rows and their entries, but got {what}")
    return input.values(), input.offsets()


def _lengths(offsets: Tensor, count: int) -> Tensor:
    """The lengths of the rows, if the offsets go from 0 to the number of values and never back."""
    lengths = offsets.diff()
    ends = offsets[0], offsets[-1], lengths.amin() if len(lengths) else offsets[0]
    first, last, least = torch.stack(ends).tolist()  # at once, because a device is waited for
    if first != 0:
        raise ValueError(f"offsets must begin with 0, but got {first}")
    if least < 0:
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"offsets must not decrease, but offsets[{at + 1}] is {int(offsets[at + 1])}, after "
            f"{int(offsets[at])}"
        )
    if last != count:
        raise ValueError(f"offsets must end with the number of values, {count}, but got {last}")
    return lengths


def _plan(lengths: Tensor, offsets: Tensor, values: int, masked: bool) -> Plan:
    """The groups of rows of these lengths, of so many values; ``masked`` if shorter rows may stand beside
    longer ones."""
    sizes, order = torch.sort(lengths, stable=True)
    kinds, counts = (each.tolist() for each in torch.unique_consecutive(sizes, return_counts=True))
    if not kinds:
        return Plan([Group(0, ANY, None)], order, None, None)
    if len(kinds) == 1 and (kinds[0] or not masked):
        return Plan([Group(counts[0], kinds[0], None)], order, None, None)
    device, groups, cells, low, last = lengths.device, [], [], 0, -1
    starts = offsets[:-1].index_select(0, order).long()
    for end in _ends(kinds, counts) if masked else range(len(kinds)):
        length = max(kinds[end], 1 if masked else 0)  # a row of no entries has one that is masked
        count = sum(counts[last + 1 : end + 1])
        places = torch.arange(length, device=device)
        cell, ends = starts[low : low + count].unsqueeze(-1) + places, None
        if end - last > 1 or length > kinds[end]:
            ends = places < sizes[low : low + count].unsqueeze(-1)
            cell.masked_fill_(~ends, values)
        groups.append(Group(count, length, ends))
        cells.append(cell.reshape(-1))
        low, last = low + count, end
    where = torch.cat(cells)
    back = where.new_empty(values + 1)
    back[where] = torch.arange(len(where), device=device)
    return Plan(groups, order, where, back[:-1])


def _ends(sizes: list[int], counts: list[int]) -> list[int]:
    """The last kind of each group, for kinds of so many rows of ascending sizes: the cells and the calls cost
    least.

    With kinds up to j in groups, f(j) = min_i f(i) + rows(i, j) size_j + CALL. The terms of i are lines in
    size_j with falling slopes, asked for at rising places, so that the least is found on their lower hull.
    """
    least, before, rows = [0.0], [0], [0]
    lines, first = [0], 0
    for j, (size, count) in enumerate(zip(sizes, counts, strict=True), 1):
        rows.append(rows[-1] + count)
        while first + 1 < len(lines) and _line(least, rows, lines[first + 1], size) <= _line(
            least, rows, lines[first], size
        ):
            first += 1
        start = lines[first]
        least.append(_line(least, rows, start, size) + rows[j] * size + CALL)
        before.append(start)
        while len(lines) - first > 1:
            a, b = lines[-2], lines[-1]
            if (least[j] - least[a]) * (rows[b] - rows[a]) > (least[b] - least[a]) * (rows[j] - rows[a]):
                break
            lines.pop()  # never the least between a and j
        lines.append(j)
    ends, j = [], len(sizes)
    while j:
        ends.append(j - 1)
        j = before[j]
    return ends[::-1]


def _line(least: list[float], rows: list[int], i: int, size: int) -> float:
    return least[i] - rows[i] * size


def _apart(values: Tensor, how: Plan) -> list[Tensor]:
    """The values as matrices, one a group, with zeros behind the ends of rows."""
    shapes = [(group.rows, group.length) for group in how.groups]
    if how.cells is None:
        return [values.reshape(shapes[0])]
    longer = torch.cat((values, values.new_zeros(1)))
    parts = longer.index_select(0, how.cells).split([a * b for a, b in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _entries(parts: Sequence[Tensor], how: Plan) -> Tensor:
    """The inverse: packed values from a matrix a group, which may have more dims in front."""
    flat = [part.flatten(-2) for part in parts]
    return flat[0] if how.back is None else torch.cat(flat, -1).index_select(-1, how.back)


def _rows(parts: Sequence[Tensor], how: Plan, dim: int) -> Tensor:
    """What the rows of each group gave, along this dim, in the order of the rows."""
    return (
        parts[0] if how.cells is None else torch.cat(list(parts), dim).index_select(dim, how.order.argsort())
    )


class _Others(Row):
    """Who has the other rows of the batch, for the loss of a group: it notes by what means are divided."""

    here = False

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def count(self, values: Tensor) -> Tensor:
        self.weights.append(values)
        return values

    def mean(self, of_groups: list[Tensor]) -> Tensor:
        """The mean over all groups. If no row counts it is that of a group, NaN or 0."""
        means, weights = torch.stack(of_groups), widen(torch.stack(self.weights))
        parts = torch.where(weights == 0, 0, widen(means)) * (weights / weights.sum())
        return torch.where(weights.any(), parts.sum(), means[0]).to(means.dtype)
