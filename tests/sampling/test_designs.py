"""Every design of the table: sizes, inclusion probabilities, joint probabilities, and errors."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import khot
from khot.sampling import _designs, designs, inclusion_probs, joint_inclusion_probs, sample
from subsets import assert_inclusion

NAMES = list(designs)

FIXED = [name for name in NAMES if designs[name].fixed_size]
CLOSE = [name for name in FIXED if designs[name].close]
KNOWN = [name for name in NAMES if designs[name].exact or designs[name].marginals is not None]
JOINT = [name for name in NAMES if designs[name].joint is not None]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


def random_probs(n: int, k: float, scale: float, seed: int) -> torch.Tensor:
    """σ_k of normal scores: a row of n that sums to k."""
    scores = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return khot.sigmoid_topk(scale * scores, k)


def float64(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows[0] if len(rows) == 1 else rows, dtype=torch.float64)


# Twenty π, each with the number of units and the difficulty that its name says.
PROBS = {
    "n=2": float64([0.3, 0.7]),
    "n=2, lopsided": float64([0.99, 0.01]),
    "n=2, nearly certain": float64([1 - 1e-7, 1e-7]),
    "n=2, not an integer": float64([0.6, 0.7]),
    "n=3": float64([0.5, 0.5, 1.0]),
    "n=3, k=1": float64([0.5, 0.3, 0.2]),
    "n=4, equal": float64([0.5] * 4),
    "n=4, certain and not": float64([1.0, 0.25, 0.75, 0.0]),
    "n=5, not an integer": float64([0.1, 0.9, 0.35, 0.2, 0.4]),
    "n=6, size 0 or 1": float64([0.01, 0.02, 0.03, 0.05, 0.08, 0.13]),
    "n=6, near 0 and 1": float64([1e-9, 1 - 1e-9, 0.5, 0.5, 1e-3, 1 - 1e-3]),
    "n=9, ends mixed": float64([0.9, 0.7, 0.3, 0.2, 1, 0, 0.55, 1e-9, 1 - 1e-7]),
    "n=10": random_probs(10, 3, 1, 1),
    "n=12, steep": random_probs(12, 6, 6, 2),
    "n=20": random_probs(20, 5, 1, 3),
    "n=20, k=n-1": random_probs(20, 19, 2, 4),
    "n=33, not an integer": random_probs(33, 11.25, 1.5, 5),
    "n=60": random_probs(60, 20, 1, 6),
    "batch": torch.stack([random_probs(12, k, s, 7) for k, s in ((1, 0.5), (4, 2.0), (6.5, 1.0), (11, 3.0))]),
    "deep batch": torch.stack([random_probs(7, 3, s, 8) for s in (0.1, 1, 3, 0, 5, 9)]).reshape(3, 1, 2, 7),
}
assert len(PROBS) == 20


def draws(probs: torch.Tensor, design: str, count: int, **options: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(design))
    return sample(probs, design, sample_shape=(count,), generator=generator, **options)  # type: ignore[arg-type]


def check_counts(x: torch.Tensor, want: torch.Tensor) -> None:
    """How often x (count, ...) is 1 is binomial, with probability want."""
    assert_inclusion(x.sum(0, dtype=torch.float64), len(x), want)


def check_sizes(x: torch.Tensor, probs: torch.Tensor) -> None:
    total = probs.sum(-1)
    low, high = (total - 1e-9).ceil() - ((total - total.round()).abs() > 1e-9).double(), (total - 1e-9).ceil()
    size = x.sum(-1)
    assert ((size == low) | (size == high)).all()
    check_counts((size == high).double(), torch.where(low == high, 1.0, total - low))


def test_table_lists_every_design() -> None:
    files = {path.stem for path in Path(_designs.__file__).parent.glob("*.py")}
    assert files - {"__init__"} == set(NAMES) - {"random_pivotal"}  # random_pivotal is in pivotal.py
    assert set(get_args(khot.sampling.DesignName)) == set(NAMES)
    assert all(design.description for design in designs.values())


def test_docs_list_every_design() -> None:
    rows = re.findall(r"^\| `(\w+)`.*\|$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(NAMES)


@pytest.mark.parametrize("case", PROBS)
@pytest.mark.parametrize("design", CLOSE)
def test_inclusion(design: str, case: str) -> None:
    probs = PROBS[case]
    x = draws(probs, design, 40_000 // probs[..., 0].numel())
    want = inclusion_probs(probs, design)
    check_counts(x, want)
    check_sizes(x, probs)
    assert designs[design].exact <= torch.equal(want, probs)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROBS)
@pytest.mark.parametrize("design", CLOSE)
def test_inclusion_of_a_million(design: str, case: str) -> None:
    x = draws(PROBS[case].float(), design, 1_000_000)
    check_counts(x, inclusion_probs(PROBS[case], design))
    check_sizes(x, PROBS[case])


@pytest.mark.parametrize("case", PROBS)
def test_pareto_exact(case: str) -> None:
    x = draws(PROBS[case], "pareto", 100_000 // PROBS[case][..., 0].numel(), adjust="exact")
    check_counts(x, PROBS[case])
    check_sizes(x, PROBS[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", PROBS)
def test_pareto_exact_of_a_million(case: str) -> None:
    check_counts(draws(PROBS[case], "pareto", 1_000_000, adjust="exact"), PROBS[case])


def test_pareto_bias() -> None:
    worst = 0.0
    for n in (8, 12, 20, 60):
        kinds = itertools.product({1, n // 4, n // 2, n - 2}, (0, 0.5, 1, 2, 4), range(3))
        rows = torch.stack([random_probs(n, k, scale, seed) for k, scale, seed in kinds])
        error = (inclusion_probs(rows) - rows).abs().amax(-1)
        enough = (rows * (1 - rows)).sum(-1) >= 2.5
        assert (error[~enough] < 1e-8).all()
        worst = max([worst, *error[enough].tolist()])
    assert 1e-4 < worst <= 2e-3


@pytest.mark.parametrize(
    "case", ["n=3", "n=5, not an integer", "n=9, ends mixed", "n=12, steep", "n=20", "batch"]
)
@pytest.mark.parametrize("design", JOINT)
def test_joint(design: str, case: str) -> None:
    probs = PROBS[case]
    joint = joint_inclusion_probs(probs, design)
    x = draws(probs, design, 40_000 // probs[..., 0].numel())
    assert_inclusion(torch.einsum("s...i,s...j->...ij", x, x), len(x), joint)
    torch.testing.assert_close(joint, joint.mT)
    torch.testing.assert_close(
        joint.diagonal(dim1=-2, dim2=-1), inclusion_probs(probs, design), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("design", FIXED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_shapes(design: str, dtype: torch.dtype) -> None:
    probs = torch.tensor([[[0.5, 0.5, 0.25, 0.75]], [[1, 0, 0.5, 0.5]]], dtype=dtype)
    for shape in ((), (3,), (2, 0), (2, 3)):
        x = sample(probs, design, sample_shape=shape)
        assert x.shape == (*shape, 2, 1, 4) and x.dtype == dtype and not x.requires_grad
        assert ((x == 0) | (x == 1)).all() and (x.sum(-1) == 2).all()
    assert (
        inclusion_probs(probs, design).dtype == dtype and inclusion_probs(probs, design).shape == probs.shape
    )


@pytest.mark.parametrize("design", NAMES)
def test_layouts(design: str) -> None:
    probs = PROBS["batch"][:, :5]
    seed = torch.Generator().manual_seed
    want = sample(probs.contiguous(), design, generator=seed(0))
    assert torch.equal(sample(probs, design, generator=seed(0)), want)
    assert torch.equal(sample(probs.T.contiguous().T, design, generator=seed(0)), want)
    repeated = probs[:1].expand(3, 5)
    assert torch.equal(
        sample(repeated, design, generator=seed(0)), sample(repeated.contiguous(), design, generator=seed(0))
    )
    leaf = probs.clone().requires_grad_()
    assert not sample(leaf, design).requires_grad


@pytest.mark.parametrize("design", NAMES)
def test_same_seed_same_draw(design: str) -> None:
    probs = PROBS["n=60"]
    first, again, other = (
        sample(probs, design, sample_shape=(20,), generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(1)
    assert torch.equal(sample(probs, design, sample_shape=(20,)), first)


@pytest.mark.parametrize("design", NAMES)
def test_ends(design: str) -> None:
    for row in ([0.0], [1.0], [0.0] * 5, [1.0] * 5, [1.0, 0.0, 1.0], []):
        probs = torch.tensor(row)
        assert torch.equal(sample(probs, design, sample_shape=(4,)), probs.expand(4, len(row)))
        if design in KNOWN:
            assert torch.equal(inclusion_probs(probs, design), probs)
        if design in JOINT:
            assert torch.equal(joint_inclusion_probs(probs, design), probs.unsqueeze(-1) * probs)
    for shape in ((0, 4), (3, 0), (0,)):
        assert sample(torch.zeros(shape), design, sample_shape=(2,)).shape == (2, *shape)
    assert sample(torch.tensor(1.0), design, sample_shape=(2,)).tolist() == [1, 1]
    coin = draws(torch.tensor([0.3]), design, 20_000)
    if design in CLOSE:
        check_counts(coin, float64([0.3]))


@pytest.mark.parametrize("design", FIXED)
def test_rounded_sums(design: str) -> None:
    """float32 rows that sum to 50 only nearly have 50 ones, always."""
    scores = torch.randn(200, 301, generator=torch.Generator().manual_seed(0))
    x = draws(khot.sigmoid_topk(scores, 50), design, 3)
    assert (x.sum(-1) == 50).all()


@pytest.mark.parametrize("design", NAMES)
def test_certain_units_among_many(design: str) -> None:
    probs = torch.tensor([1.0, 0.0] * 100 + [0.5] * 8 + [1.0] * 3)
    x = draws(probs, design, 200)
    assert (x[:, probs == 1] == 1).all() and (x[:, probs == 0] == 0).all()
    if design in FIXED:
        assert (x.sum(-1) == 107).all()


@pytest.mark.parametrize("design", NAMES)
def test_bad_probs(design: str) -> None:
    for function in (sample, inclusion_probs) if design in KNOWN else (sample,):
        for bad in (1.5, -0.1, math.nan, math.inf):
            with pytest.raises(ValueError, match=r"probs must lie in \[0, 1\], but got"):
                function(torch.tensor([0.5, bad]), design)


@pytest.mark.parametrize("design", NAMES)
def test_bad_probs_under_a_mode_that_watches(design: str) -> None:
    with FlopCounterMode(display=False), pytest.raises(ValueError, match=r"probs must lie in \[0, 1\]"):
        sample(torch.tensor([0.5, 1.5, 0.0] * 10), design)


def test_bad_adjust() -> None:
    probs = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match=r"adjust must be None, or 'exact'.* but got 'exact' with 'brewer'"):
        sample(probs, "brewer", adjust="exact")
    with pytest.raises(ValueError, match=r"adjust must be None, or 'exact'.* but got 'heuristic'"):
        sample(probs, adjust="heuristic")


@pytest.mark.parametrize("design", [name for name in NAMES if name not in JOINT])
def test_designs_without_joint(design: str) -> None:
    with pytest.raises(
        ValueError, match=rf"one with joint .* \('pareto', .*'systematic'\), but got '{design}'"
    ):
        joint_inclusion_probs(torch.tensor([0.5, 0.5]), design)


def test_systematic_counts_in_integers() -> None:
    """Units so near certain that a float sum would pass two ticks in one unit, or none at the end."""
    probs = torch.full((100_001,), 1 - 1e-16 * 2**10, dtype=torch.float64)
    probs[0] = 1e-16 * 2**10 * 100_000
    x = draws(probs, "systematic", 20)
    assert (x.sum(-1) == 100_000).all()
