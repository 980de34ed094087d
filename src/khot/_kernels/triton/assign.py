"""Which kernels two-sided assignments take.

Rows of a matrix are spread over programs, in a fixed number of launches, so that nothing waits
(:mod:`.assign_steps`). A matrix of few entries is solved by one program, in one launch
(:mod:`.assign_whole`), and so is in the end what the steps leave: matrices of which rows or columns are
decided beforehand, those that are wrong, and those that do not arrive. The reference serves what one program
would take too long for, rows that are spread over processes, and CDFs of the user's own or of compact
support.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_assign as reference
from khot._kernels.triton import assign_steps as steps
from khot._kernels.triton import assign_whole as whole
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Duals, Rows, Scratch, Sizes
from khot._kernels.triton.assign_rows import TILE
from khot._kernels.triton.launch import variant
from khot._kernels.triton.sizes import cdiv, next_power_of_2

WIDEST = 256  # columns: beyond, their matrix takes one program longer than all the rest
ENTRIES = 1 << 20  # of a matrix, for each matrix that there is: beyond, one program a matrix idles the device
LONGEST = 1 << 30  # places in a matrix are integers of 32 bits
FEW = TILE  # entries of a matrix that one program holds at once
LAUNCHES = 28  # steps; 4,096 rows need 4 to 17 from τ = 1 to 0.001, and 26 where scores have steps of 125 τ
PROGRAMS = 128  # about as many as a large device has multiprocessors
HELD = 32  # rows of a program, at least


def which(n: int, cdf: str, at_most: bool) -> dict[str, dict[str, Any]]:
    """The constants of the kernels of the steps, for so many columns."""
    width = max(16, next_power_of_2(n))
    rows = max(1, 2 * TILE // width)
    common = {"AT_MOST": at_most, "num_warps": TILE // 32}
    sizes = Sizes(rows, width, min(32, width), 32, 4 * rows, 16, TILE)
    return {
        "begin": {**common, "T": Sizes(rows, width)},
        "step": {"CDF": layout.cdf_id(cdf), **common, "T": sizes, **layout.registers()},
    }


class Cut(NamedTuple):
    """How so many matrices are cut into parts of rows, a program each."""

    matrices: int
    parts: int
    length: int


def cut(count: int, m: int, n: int) -> Cut:
    held = max(HELD, 2 * TILE // max(16, next_power_of_2(n)))
    length = cdiv(cdiv(m, max(1, PROGRAMS // max(count, 1))), held) * held
    return Cut(count, cdiv(m, max(length, 1)), length)


def fits(x: Tensor, cdf: str, shape: float) -> bool:
    """Whether the kernels take matrices of this shape."""
    *batch, m, n = x.shape
    few = 0 < n <= WIDEST and m * n <= min(ENTRIES * torch.Size(batch).numel(), LONGEST)
    return few and x.numel() > 0 and cdfs.resolve(cdf, shape).built_in


def scores(x: Tensor) -> Rows:
    """The rows of x, one after another, and the distance between them."""
    flat, stride = layout.rows(x, x.shape[-1])
    if x.shape[-2] * stride > LONGEST:
        flat = flat.contiguous()
    return Rows(flat, flat.stride(0))


def soft_assign(
    x: Tensor, k: Tensor, capacity: Tensor, tau: Tensor, bias: Tensor, cdf: str, shape: float, at_most: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`soft_assign.soft_assign`, in Triton."""
    if group or not fits(x, cdf, shape):
        return reference.soft_assign(x, k, capacity, tau, bias, cdf, shape, at_most, group)
    *batch, m, n = x.shape
    count, parts, length = cut(torch.Size(batch).numel(), m, n)
    y = x.new_empty(x.shape)
    r = torch.empty((*batch, m), dtype=torch.float64, device=x.device)
    c = torch.empty((*batch, n), dtype=torch.float64, device=x.device)
    scratch = r.new_empty(count * (m + n * (m + 2 * n + whole.VECTORS.value)))
    taus = tau.expand(*batch, 1).reshape(-1)
    goal, by_matrix, by_row = layout.matrix(k, x[..., 0])
    rows = scores(x), Rows(goal, by_row), by_matrix
    given = (
        layout.matrix(capacity, x[..., 0, :]), Rows(taus, taus.stride(0)), layout.matrix(bias, x[..., 0, :])
    )  # fmt: skip
    note, t = None, Duals(r, c)
    if m * n > FEW:
        note = r.new_empty(count * (steps.NOTES + 3 * n))
        left = r.new_empty(count * parts * steps.left_by_part(n))
        counter = torch.zeros(count * (parts + 1), dtype=torch.int32, device=x.device)
        held, size = Scratch(note, counter, left, scratch), (m, n, parts, length)
        constants = which(n, cdf, at_most)
        begin = variant(steps.begin_assignments, FLOAT64=x.dtype == torch.float64, **constants["begin"])
        begin(count * parts, *rows, *given, t, held, *size)
        step = variant(steps.step_assignments, **constants["step"])
        for _ in range(LAUNCHES):
            step(count * parts, *rows, y, t, held, *size, steps.MOST)
    variant(whole.solve_whole, **whole.which(n, cdf, at_most))(
        count, *rows, *given, y, t, scratch, note, m, n, whole.STEPS
    )
    return y, r, c
