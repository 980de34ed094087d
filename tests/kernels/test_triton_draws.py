"""The draws of the Triton kernels, interpreted: the same seed gives the same units as the reference."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels.reference import draws as reference
from khot._kernels.reference import fixed_point, order_sampling, philox
from khot.sampling._designs.pareto import LEAST

tl = pytest.importorskip("triton.language", reason="Triton is not installed")
launch = pytest.importorskip("khot._kernels.triton.launch", reason="Triton is not installed")
SEED = torch.tensor(-5)
SEEDS = [-1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


@pytest.fixture
def draws(kernels: ModuleType) -> Any:
    return sys.modules["khot._kernels.triton.draws"]


@pytest.fixture
def parts(draws: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with rows in several parts."""
    for name, value in {"HELD": 8, "CHUNK": 16}.items():
        monkeypatch.setattr(draws, name, value)
    for name, value in {"NODES": 4, "WIDTH": 256}.items():
        monkeypatch.setattr(sys.modules["khot._kernels.triton.designs"], name, value)
    monkeypatch.setattr(draws.layout, "TOGETHER", 8)
    return draws


either = pytest.mark.parametrize("where", ["draws", "parts"])


def rows(n: int) -> tuple[Tensor, Tensor]:
    """Probabilities with some certain units, and their sums."""
    k = torch.tensor([n // 3, n // 2, n - n // 5])
    scores = 1.5 * torch.randn(3, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    scores[::2, : n // 10] = math.inf
    scores[1, : n // 10] = -math.inf
    return sigmoid_topk(scores, k), k


@pytest.mark.parametrize("value", SEEDS)
@pytest.mark.parametrize(("n", "offset"), [(0, 3), (1, 0), (33, 5), (64, 2**33 - 7)])
def test_uniforms(parts: Any, value: int, n: int, offset: int) -> None:
    seed = torch.tensor(value)
    assert torch.equal(parts.uniform(seed, 2, n, offset), philox.uniform_kernel(seed, 2, n, offset))


@either
@pytest.mark.parametrize("n", [1, 2, 19])
def test_tournaments(request: pytest.FixtureRequest, where: str, n: int) -> None:
    request.getfixturevalue(where)
    designs, (probs, _) = sys.modules["khot._kernels.triton.designs"], rows(n)
    for x in (probs[1:], probs[:1].float().expand(2, n)):
        assert torch.equal(designs.tournament(x, SEED), reference.tournament(x, SEED))


@pytest.mark.parametrize("name", ["pivotal_sample", "systematic_sample"])
@pytest.mark.parametrize("n", [1, 3])
def test_few_units_in_their_order(draws: Any, n: int, name: str) -> None:
    kernel, probs = getattr(sys.modules["khot._kernels.triton.designs"], name), rows(n)[0]
    for x in (probs, 0.9 * probs):
        assert torch.equal(kernel(x, SEED, 1e-9), getattr(reference, name)(x, SEED, 1e-9))


@either
def test_order_sampling_of_what_is_no_number(request: pytest.FixtureRequest, where: str) -> None:
    kernels = request.getfixturevalue(where)
    theta = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf], [math.nan] * 3])
    for size in (0, 2, 3):
        got = kernels.order_sample(theta, torch.tensor([size] * 3), SEED)
        assert (got.sum(-1) == size).all()
        assert size != 2 or not got[:2, :2].all(-1).any()


@pytest.mark.parametrize("n", [1, 2, 16, 32, 256])
def test_a_phantom_unit_needs_more_room(draws: Any, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Rows that fill what a program holds, with whole sums and with others; of 256 units in pieces."""
    monkeypatch.setattr(draws, "PIECE", 2)
    k = torch.tensor([n / 2, n // 2, n // 2 + 0.25, n - 0.75], dtype=torch.float64)
    x = sigmoid_topk(torch.randn(4, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64), k)
    got, drawn = draws.pareto_sample(x, SEED, LEAST, 1e-6)
    assert drawn and torch.equal(got, reference.pareto_sample(x, SEED, LEAST, 1e-6)[0])
    assert ((got.sum(-1) - k).abs() < 1 - 1e-6).all()
    assert n < 16 or by_formula(draws, x).any()


@either
def test_a_negative_zero_is_impossible(request: pytest.FixtureRequest, where: str) -> None:
    """1/−0 would be the least of all keys; small negative numbers of half precision may end there."""
    x = torch.cat((torch.tensor([-0.0]), torch.full((20,), 0.5), torch.tensor([-0.0])))[None]
    got, drawn = request.getfixturevalue(where).pareto_sample(x, SEED, LEAST, 1e-6)
    assert drawn and got.sum() == 10 and got[0, [0, -1]].sum() == 0
    assert torch.equal(got, reference.pareto_sample(x, SEED, LEAST, 1e-6)[0])


def by_formula(kernels: Any, x: Tensor) -> Tensor:
    """Which rows the launches draw from that come before the careful one."""
    drawn, every = torch.empty(len(x), dtype=torch.bool), torch.empty((), dtype=torch.bool)
    source = kernels.layout.rows(x, x.shape[-1])
    kernels._by_formula(source, SEED, torch.empty_like(x), drawn, every, x.shape[-1], LEAST, 1e-6)
    assert every  # until the careful launch has seen a row that is not of probabilities
    return drawn


def alone(kernels: Any, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sample, for which nothing is left to the reference."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels.reference, "pareto_sample", None)
        return kernels.pareto_sample(x, SEED, LEAST, 1e-6)


@either
def test_rows_that_are_not_of_probabilities_are_nan(
    request: pytest.FixtureRequest, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = request.getfixturevalue(where)
    good = torch.full((3, 20), 0.5)
    assert by_formula(kernels, good).all() and alone(kernels, monkeypatch, good)[1]
    for value in (math.nan, 1.5, -0.1, math.inf) if where == "draws" else (math.nan,):
        x = good.clone()
        x[1, 3] = value
        assert by_formula(kernels, x).tolist() == [True, False, True]
        (got, drawn), (want, same) = (
            alone(kernels, monkeypatch, x),
            reference.pareto_sample(x, SEED, LEAST, 1e-6),
        )
        assert not drawn and not same
        assert torch.equal(got[::2], want[::2]) and got[1].isnan().all() and want[1].isnan().all()


# of 1 or 2 that are selected: by two units, by many, with certain ones, and with sums that are not whole
FEW = {
    "two": [0.9, 0.1],
    "nearly certain": [1 - 1e-4, 6e-5, 4e-5],
    "certain": [1.0, 0.0, 0.6, 0.4, 0.0],
    "decided": [1.0, 0.0, 0.0, 1.0],
    "none": [0.0, 0.0, 0.0],
    "thirds": [1 / 3] * 3,
    "mixed": [0.999, 0.6, 0.4, 1e-3],
    "half a unit": [0.3, 0.15, 0.05],
    "one against many": [0.99] + [0.00125] * 8,
    "nearly decided": [1 - 1e-7] * 2 + [1e-7] * 2,
    "many": [0.05] * 40,
    "halves": [0.5] * 7,
    # Σπ(1 − π) is 0.02, from where on float32 serves
    "fine": [0.9899, 0.0101],
    "coarse": [0.9898, 0.0102],
    "two pairs": [0.9, 0.1, 0.8, 0.2],
    "nearly certain, with many": [1 - 1e-9, 1e-9, 0.7] + [0.3 / 20] * 20,
    "slow": [0.55, 0.33, 0.11, 0.01, 1e-4, 1e-6, 1e-8, 1e-10],
    # whose errors shrink most unevenly from step to step
    "uneven": [0.446688, 0.108357, 0.444955],
    "uneven, with a phantom": [0.988024, 0.554660, 0.555277, 0.902047, 0.999992],
    "uneven, of four": [0.39358, 0.00554, 0.21319, 0.38769],
}


@either
def test_rows_with_a_small_variance_are_calibrated(
    request: pytest.FixtureRequest, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sample as the reference's, beside a row that the formula serves, with one program for all,
    which looks at two rows at a time."""
    kernels = request.getfixturevalue(where)
    monkeypatch.setattr(kernels, "CALIBRATED", 1)
    monkeypatch.setattr(kernels, "LOOK", kernels.tl.constexpr(2))
    few = [FEW[name] for name in ("two", "certain", "decided", "none")]  # of which two take no step
    x = torch.full((len(few) + 1, 20), 0.5, dtype=torch.float64)
    for row, probs in zip(x, few, strict=False):
        row[: len(probs)], row[len(probs) :] = torch.tensor(probs), 0
    assert by_formula(kernels, x).tolist() == [False] * len(few) + [True]
    got, drawn = alone(kernels, monkeypatch, x if where == "draws" else x.float())
    assert drawn and torch.equal(got, reference.pareto_sample(x.to(got.dtype), SEED, LEAST, 1e-6)[0])


@pytest.mark.parametrize("name", FEW)
def test_calibration_gives_the_inclusion_probabilities(
    draws: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In few steps, and with nothing read that was not written. The phantom unit is none where Σπ is
    whole."""
    steps = []
    calibration = sys.modules[draws.calibrate.fn.__module__]
    monkeypatch.setattr(calibration, "_residuals", _counting(calibration._residuals, steps))
    probs = torch.tensor(FEW[name], dtype=torch.float64)
    n, k = len(probs), (probs.sum() - 1e-9).ceil().reshape(1)
    out, drawn, every = probs.clone(), torch.zeros(1, dtype=torch.bool), torch.ones((), dtype=torch.bool)
    numbers = torch.full((8 * (n + 1),), math.nan, dtype=torch.float64)
    draws.launch(
        draws._careful, 1,
        draws.layout.Rows(probs, n), SEED, out, drawn, every, numbers, numbers.view(torch.int64),
        numbers.view(torch.float32),
        n, LEAST, 1e-6, 1, 1, WIDTH=8, PAIRS=4,
    )  # fmt: skip
    whole = abs(probs.sum() - k) < 1e-6
    pi = probs[None] if whole else torch.cat((probs, k - probs.sum()))[None]
    theta = numbers[None, : pi.shape[-1]]
    assert len(steps) <= 5
    if not theta.isfinite().any():
        assert torch.equal(theta.sigmoid(), pi)
        return
    got, _ = order_sampling.order_inclusion(fixed_point.tilted(theta, k), k)
    assert (got - pi).abs().max() < 1e-6


def test_calibration_shifts_sums_that_are_not_whole(draws: Any) -> None:
    """By one constant on the logits, if they are nearly whole."""
    probs = torch.tensor([[0.93, 0.42, 0.67, 0.01], [0.999, 0.6, 0.39, 2e-3]], dtype=torch.float64)
    numbers = torch.full((2, 5 * 8), math.nan, dtype=torch.float64)
    out, drawn, every = probs.clone(), torch.zeros(2, dtype=torch.bool), torch.ones((), dtype=torch.bool)
    draws.launch(
        draws._careful, 2,
        draws.layout.Rows(probs, 4), SEED, out, drawn, every, numbers, numbers.view(torch.int64),
        numbers.view(torch.float32),
        4, LEAST, 0.1, 2, 2, WIDTH=8, PAIRS=4,
    )  # fmt: skip
    k = probs.sum(-1).round()
    got, _ = order_sampling.order_inclusion(fixed_point.tilted(numbers[:, :4], k), k)
    assert (got - fixed_point.tilted(torch.logit(probs), k).sigmoid()).abs().max() < 1e-6


def _counting(function: Any, calls: list[None]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*arguments, **options)

    return call


def test_a_threshold_out_of_reach_is_sought_among_all_keys(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long row lists only the keys near 1."""
    x = torch.full((1, 33), 0.5)
    assert by_formula(parts, x).all()
    monkeypatch.setattr(parts, "DEVIATIONS", parts.tl.constexpr(1e-3))
    assert not by_formula(parts, x).any()
    got, drawn = alone(parts, monkeypatch, x)
    assert drawn and torch.equal(got, reference.pareto_sample(x, SEED, LEAST, 1e-6)[0])


# of which float32 has some only, and rounds 1 − p of others
HARD = [0.0, 1.0, 5e-324, 1e-310, 1e-45, 1e-30, 6e-8, 1 - 2**-24, 1 - 2**-53, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [2.5, 90.0])
def test_float32_decides_only_what_is_certain(parts: Any, dtype: torch.dtype, d: float) -> None:
    """Keys around both ends of the interval that has to contain the threshold, within what float32 may not
    tell, and everywhere else."""
    n, capacity = 6001, 8192
    u = philox.uniform(SEED, (n,))
    margin = 0.0482 / d**2 + 1e-5
    width = 5.5 / d**0.5 + margin
    share = torch.linspace(-1, 1, n, dtype=torch.float64)
    near = 6e-8 * share / (u * (1 - u))
    aim = torch.stack([near - width, near + width, 10 * share])[torch.arange(n) % 3, range(n)]
    p = torch.sigmoid(torch.logit(u) - aim)
    p[: 5 * len(HARD)] = torch.tensor(HARD, dtype=torch.float64).repeat(5)
    p = p.to(dtype)
    out, below = torch.empty(1, n, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    found, columns = torch.ones(1, dtype=torch.int32), torch.full((capacity,), n, dtype=torch.int32)
    sums = torch.tensor([7.0, d], dtype=torch.float64)
    parts.launch(
        parts._part_keys, 1,
        parts.layout.Rows(p, n), SEED, sums, below, found, columns, out, n, 6144, 1, capacity, LEAST, 1e-6,
        PARTS=1, PAIRS=1024,
    )  # fmt: skip
    listed = torch.zeros(n, dtype=torch.bool)
    listed[columns[1 : int(found)].long()] = True
    chosen = out[0] == 1
    over = ~(chosen | listed)
    assert listed.sum() == found - 1 and below == chosen.sum() and not (chosen & listed).any()
    key = torch.logit(u) - torch.logit(p.double())
    rounded = 6e-7  # of the ends in float32
    assert chosen.any() and key[chosen].max() < rounded - width
    assert over.any() and key[over].min() > width - rounded
    # the upper bits of a uniform leave few others
    assert listed.any() and (key[listed].abs() < width + 1e-5 + (2e-6 / (u * (1 - u)))[listed]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_long_rows_of_hard_probabilities(parts: Any, dtype: torch.dtype) -> None:
    """Certain and impossible units, equal ones, and sums that are not whole, for which the phantom unit is
    in the last chunk or begins another."""
    for n in (63, 64, 65, 97) if dtype == torch.float64 else (65,):
        x = torch.rand(4, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        x[0, : 2 * len(HARD)] = torch.tensor(HARD, dtype=torch.float64).repeat(2)
        x[1], x[2, ::2] = 0.3, 1
        x[3] = x[3] / x[3].sum() * 20
        x = x.to(dtype)
        tolerance = n * torch.finfo(dtype).eps
        assert by_formula(parts, x).all()
        got, want = (f.pareto_sample(x, SEED, LEAST, tolerance)[0] for f in (parts, reference))
        assert torch.equal(got, want)


def test_the_threshold_has_to_be_where_all_keys_are_listed(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an interval that contains some of the thresholds, and lists that go beyond it."""
    x = torch.rand(12, 41, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(parts, "DEVIATIONS", parts.tl.constexpr(0.7))
    monkeypatch.setattr(parts, "MARGIN", parts.tl.constexpr(0.5))
    drawn = by_formula(parts, x)
    whole = x.sum(-1, keepdim=True).ceil()
    theta, d = reference.adjusted(torch.cat((x, whole - x.sum(-1, keepdim=True)), -1), 0)
    keys = (philox.uniform(SEED, theta.shape).logit() - theta).sort(-1).values * d.sqrt()
    k = whole.long().squeeze(-1)
    # which lies between the last key that is chosen and the first that is not
    last, after = (keys.gather(-1, at.unsqueeze(-1)).squeeze(-1) for at in (k - 1, k))
    assert torch.equal(drawn, (after > -0.7) & (last < 0.7))
    assert 2 < drawn.sum() < 10
    assert torch.equal(alone(parts, monkeypatch, x)[0], reference.pareto_sample(x, SEED, LEAST, 1e-6)[0])


def test_exact_samples_are_left_to_the_reference(draws: Any) -> None:
    x = torch.full((1, 12), 0.5)
    got, drawn = draws.pareto_sample(x, SEED, math.inf, 1e-6)
    assert drawn and torch.equal(got, reference.pareto_sample(x, SEED, math.inf, 1e-6)[0])


def test_equal_keys_are_chosen_from_the_left(draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, with every key the same."""
    x, k = torch.full((1, 30), 0.5), 15
    for held in (64, 8):
        monkeypatch.setattr(draws, "HELD", held)
        monkeypatch.setattr(draws, "_words", _halves)
        got, drawn = draws.pareto_sample(x, SEED, LEAST, 1e-6)
        assert drawn and torch.equal(got, (torch.arange(30) < k).float()[None])


def _halves(seed: Any, row: Any, block: Any) -> Any:
    zero = (block * 0).to(tl.uint32)
    half = zero + 1 << 31
    return half, zero, half, zero


def test_launches(kernels: ModuleType, draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for rows that a program holds, three for longer ones, and one for those that are calibrated; of a
    tournament one more for phantom units, where a row has more than 2,047 units, and one for the winners of
    2,048."""
    launches: list[str] = []
    monkeypatch.setattr(launch, "watch", launches.append)
    monkeypatch.setattr(launch, "start", lambda *_: None)
    x = torch.empty(5, 4096)
    draws.pareto_sample(x, SEED, LEAST, 0.0)
    kernels.tournament(x[:, :2048], SEED)
    draws.uniform(SEED, 5, 4096, 0)
    assert launches == ["_pareto", "_careful", "_duels", "_uniform"]
    draws.pareto_sample(torch.empty(1, 100_000), SEED, LEAST, 0.0)
    assert launches[4:] == ["_part_moments", "_part_keys", "_choose", "_careful"]
    launches.clear()
    kernels.systematic_sample(x, SEED, 0.0)
    kernels.pivotal_sample(x[:, :2047], SEED, 0.0)
    kernels.pivotal_sample(x, SEED, 0.0)
    assert launches == ["_systematic", "_duels", "_phantoms", "_duels", "_duels"]
