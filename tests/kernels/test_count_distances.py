"""What a balancer counts: the kernel, interpreted, against the reference, which test_balancer.py tests."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import khot
from khot._kernels.reference import count_distances as reference

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    # Triton reads this variable at import, so a test cannot set it
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs with TRITON_INTERPRET=1"),
    # the interpreter computes with NumPy, which warns of infinities; they are intended
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Case(NamedTuple):
    """Experts, k, bins, groups and how many of them are open, and where the bins of the first experts end."""

    experts: int
    k: int
    bins: int
    groups: int = 1
    top: int = 1
    octave: int = 0


CASES = [
    Case(16, 3, 1024),
    Case(16, 3, 1024, octave=130),
    Case(2, 1, 64, octave=255),
    Case(37, 36, 128, octave=65),
    Case(300, 7, 65536, octave=128),
    Case(16, 2, 256, 4, 2),
    Case(12, 5, 1024, 3, 2, 131),
    Case(8, 1, 64, 8, 1, 127),
    Case(40, 9, 512, 2, 1, 129),
]


def hostile(experts: int, dtype: torch.dtype) -> Tensor:
    """Rows with ties, closed experts, infinities of both signs, zeros of both signs, NaN, and extreme
    numbers."""
    x = 2 * torch.randn(3, 10, experts, generator=torch.Generator().manual_seed(experts))
    x[:, 1] = x[:, 1].round()
    x[:, 2] = 0.5
    x[:, 3, ::2] = -math.inf
    x[:, 4] = -math.inf
    x[:, 5, :2] = math.inf
    x[0, 5, 1:] = -math.inf
    x[:, 6, -1] = math.nan
    x[:, 7] *= 0.0
    x = x.to(dtype)
    x[:, 8] *= torch.finfo(dtype).tiny
    x[:, 9, 0], x[:, 9, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    return x


def arguments(case: Case, x: Tensor, updates: int, mask: Tensor | None) -> tuple[Any, ...]:
    """All but the counts."""
    groups: tuple[Tensor | None, ...] = (None, None, None)
    offered = x
    if case.top < case.groups:
        sums = khot.topk(x.unflatten(-1, (case.groups, -1)), min(2, case.experts // case.groups)).values.sum(
            -1
        )
        tops, best = khot.topk(sums, case.top + 1)
        closed = torch.ones_like(sums, dtype=torch.bool).scatter(-1, best[..., : case.top], False)
        groups = sums, tops, closed
        offered = x.masked_fill(closed.repeat_interleave(case.experts // case.groups, -1), -math.inf)
    values, best = khot.topk(offered, case.k + 1)
    octave = (case.octave + 7 * torch.arange(case.experts)).clamp(max=255) * (case.octave > 0)
    octave[3::5] = 0  # some experts begin
    return x, values, best, torch.tensor(updates), octave, mask, *groups


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_kernel_counts_as_the_reference(kernels: ModuleType, case: Case, dtype: torch.dtype) -> None:
    """Bit by bit, for both kinds of updates, added to what was counted before. Half precision comes with
    biases in float32."""
    x = hostile(case.experts, dtype).to(torch.promote_types(dtype, torch.float32))
    for updates, mask in itertools.product((0, 1), (None, torch.arange(10) % 4 != torch.arange(3)[:, None])):
        given = arguments(case, x, updates, mask)
        counts = torch.arange((case.bins + 1) * case.experts).view(-1, case.experts) % 5
        want = counts.clone()
        reference.count_distances(want, *given)
        assert not torch.equal(want, counts)
        kernels.count_distances(counts, *given)
        assert torch.equal(counts, want)
