"""Uniforms by position: known answers, the compiled kernel against the reference, and statistics."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from khot._kernels import active
from khot._kernels.reference import philox
from khot._ops import uniform

FAILURE = 1e-6  # rate of each statistical test
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]
needs_extension = pytest.mark.skipif(active()["cpu"] == "reference", reason="no compiled kernels in use")

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, block
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def seed(value: int = 0) -> Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("counter, key, block", KNOWN)
def test_known_answers(counter: list[int], key: list[int], block: list[int]) -> None:
    a, b = torch.tensor(key)
    assert [int(word) for word in philox.cipher(torch.tensor(counter).unbind(), (a, b))] == block


def test_numbers_of_the_first_known_answer() -> None:
    low, high, next_low, next_high = KNOWN[0][2]
    want = [((high << 32 | low) >> 12, 2**52), ((next_high << 32 | next_low) >> 12, 2**52)]
    assert uniform.uniform(seed(), (2,)).tolist() == [(x + 0.5) / scale for x, scale in want]


@needs_extension
@pytest.mark.parametrize("value", SEEDS)
@pytest.mark.parametrize(
    "rows, n, offset", [(3, 1, 0), (2, 33, 5), (5, 64, 2**33 - 7), (1, 40_001, 1), (2, 0, 3), (0, 4, 0)]
)
def test_compiled_as_the_reference(value: int, rows: int, n: int, offset: int) -> None:
    got = torch.ops.khot.uniform(seed(value), rows, n, offset)
    assert torch.equal(got, philox.uniform_kernel(seed(value), rows, n, offset))


@pytest.mark.parametrize("start", [1, 2, 31, 32, 99])
def test_a_part_of_the_columns(start: int) -> None:
    whole = uniform.uniform(seed(7), (2, 3, 100))
    assert torch.equal(uniform.uniform(seed(7), (2, 3, 100 - start), offset=start), whole[..., start:])


def test_threads_do_not_change_a_bit() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(uniform.uniform(seed(3), (2, 50_000)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_shapes() -> None:
    assert uniform.uniform(seed(), ()).shape == ()
    assert uniform.uniform(seed(), (2, 0, 3)).shape == (2, 0, 3)
    u = uniform.uniform(seed(), (4, 5))
    assert u.dtype == torch.float64 and len(u.unique()) == 20


def test_the_generator_gives_the_seed() -> None:
    first, again, other = (uniform.rand((9,), generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not (first == other).any()
    torch.manual_seed(1)
    assert torch.equal(uniform.rand((9,)), first)


def test_uniform_and_independent() -> None:
    """Tests the values, and pairs with the neighbours in the row, in the column and for the next seed: 64
    cells each."""
    u, other = (uniform.uniform(seed(value), (200, 1_000)) for value in (11, 12))
    assert u.min() > 0 and u.max() < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > FAILURE
    for v, w in ((u[:, ::2], u[:, 1::2]), (u[::2], u[1::2]), (u, other)):
        cells = (8 * v).long() * 8 + (8 * w).long()
        counts = torch.bincount(cells.flatten(), minlength=64)
        assert stats.chisquare(counts.numpy()).pvalue > FAILURE
    for bit in range(1, 53):  # every bit is fair, including the last
        ones = int((u * 2**bit).long().bitwise_and(1).sum())
        assert stats.binomtest(ones, u.numel()).pvalue > FAILURE / 52
