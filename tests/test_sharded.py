"""Rows spread over processes against whole rows: values, derivatives, errors and costs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import budget_rows
import khot
import operators
import oracles
import processes
import shards
from drawn import normal as scores
from khot import cdfs
from khot._core.dispatch import OPERATORS as REGISTERED

N = 23
CUTS = {1: [0, N], 2: [0, 14, N], 3: [0, 9, 9, N], 4: [0, 0, 2, 15, N]}  # uneven, and some empty
POWER = cdfs.Power(4 / 3)
OPERATORS: list[tuple[str, dict[str, Any]]] = [
    *(("soft_topk", {"cdf": cdf}) for cdf in ("logistic", "laplace", "normal", "uniform", POWER)),
    *(("log_soft_topk", {"cdf": cdf}) for cdf in ("logistic", "normal", POWER)),
    ("sigmoid_topk", {"largest": False}),
    ("laplace_topk", {}),
    ("sparse_topk", {"p": 1.5}),
    ("ot_topk", {}),
    ("ot_topk", {"normalize": True}),
    ("soft_topk_magnitude", {}),
    ("soft_topk_magnitude", {"p": 4 / 3, "rescale": True}),
    ("soft_topk", {"hard": True}),
]
worlds = pytest.mark.parametrize("world", [1, 2, 3, 4])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# -------------------------------------------------------------------- values and derivatives


# an even number of processes by turns with an odd one
@pytest.mark.parametrize(
    ("name", "options", "world"),
    [(*each, world) for i, each in enumerate(OPERATORS) for world in ((2, 3), (1, 4))[i % 2]],
    ids=str,
)
def test_equals_the_whole_row(name: str, options: dict[str, Any], world: int) -> None:
    whole = name == "soft_topk_magnitude"
    k = torch.tensor([2.0, 7.0, 20.0] if whole else [0.6, 7.0, 20.3], dtype=torch.float64)
    args = [scores(3, N), k, torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)]
    mask = torch.arange(N) % 11 != 4
    if world == 3:
        options = {**options, "mask": mask}
    weights = scores(3, N, seed=1)
    shards.assert_like_whole_rows(world, name, options, args, weights, CUTS[world])


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform", POWER], ids=str)
def test_the_adversarial_list(cdf: Any) -> None:
    """Values and gradients, one batch for all; 1e-12 is the goal for values of float64."""
    n = 60
    x, k = adversarial_rows(n)
    for tau in oracles.TAUS:
        args = [x.clone(), k.clone(), torch.full_like(k, tau)]
        weights = scores(*x.shape)
        cuts = [0, 17, 17, 44, n]
        options = {"cdf": cdf}
        shares = processes.run(4, shards.derivatives_of_shards, "soft_topk", options, args, weights, cuts)
        expected = shards.derivatives("soft_topk", options, args, weights)
        assert_close(shards.joined([share[0] for share in shares], x), expected[0], 2e-12)
        for i in range(1, 4):
            parts = [share[i] for share in shares]
            scale = 1 / tau if i < 3 else 1
            assert_close(shards.joined(parts, expected[i]) / scale, expected[i] / scale, 1e-8)


# Rows of which a part lies so far from the threshold, in τ, that its densities underflow.
FAR = {"800 below": -800.0, "1e5 below": -1e5, "−inf": -math.inf, "1e4 above": 1e4}


@pytest.mark.parametrize(
    ("cdf", "name", "where"),
    [
        (cdf, ("soft_topk", "log_soft_topk")[(i + j) % 2], where)
        for i, cdf in enumerate(("logistic", "laplace", "normal", "uniform", POWER))
        for j, where in enumerate(FAR)
    ],
    ids=str,
)
def test_derivatives_with_shards_far_away(cdf: Any, name: str, where: str) -> None:
    """Of four processes one has the entries near the threshold, one none at all, and two only far ones."""
    x, cuts, tau = scores(2, N), [0, 11, 11, 17, N], torch.tensor([1.0, 0.5], dtype=torch.float64)
    x[:, 11:] += FAR[where]
    k = torch.tensor([2.3, 7.0], dtype=torch.float64) + (N - 11 if where == "1e4 above" else 0)
    weights = scores(2, N, seed=1)
    if where == "1e4 above":  # log y of these is 0, and that of the others must not be lost beside it
        weights[:, 11:] *= 1e-3
    args = [x, k, tau]
    shares = processes.run(4, shards.derivatives_of_shards, name, {"cdf": cdf}, args, weights, cuts)
    expected = shards.derivatives(name, {"cdf": cdf}, args, weights)
    for parts, want in zip(zip(*shares, strict=True), expected, strict=True):
        got = shards.joined(parts, want)
        assert got.nan_to_num(posinf=0, neginf=0).isfinite().all() and not got.isnan().any()
        assert_close(got, want, 1e-9)


@worlds
def test_infinite_and_nan_scores(world: int) -> None:
    x = scores(5, N)
    x[0, [1, 20]] = math.inf
    x[1, 3:12] = -math.inf
    x[2, 22] = math.nan
    x[3, :] = 0.7
    x[4, :3] = math.inf  # more than k
    for name, options in (("soft_topk", {}), ("log_soft_topk", {}), ("topk_mask", {})):
        parts = processes.run(world, shards.call, name, options, x, 2.0, CUTS[world])
        want = getattr(khot, name)(x, 2.0, **options)
        assert_close(torch.cat([part for part, *_ in parts], -1), want, 1e-13)


@worlds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_hard_mask_with_ties(world: int, dtype: torch.dtype) -> None:
    """Ties go to the lowest index of the whole row; 0 and −0 are equal."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (6, N), generator=generator).to(dtype) * 0.3
    x[0] = -x[0]  # with −0
    x[1] = scores(N).to(dtype)
    for k in (0, 1, 5.5, 11, torch.tensor([0.0, 2, 9, 22, 23, 13])):
        for largest in (True, False):
            parts = processes.run(world, shards.call, "topk_mask", {"largest": largest}, x, k, CUTS[world])
            want = khot.topk_mask(x, k, largest=largest)
            assert torch.equal(torch.cat([part for part, *_ in parts], -1), want)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_order_statistics(world: int, dtype: torch.dtype) -> None:
    """Every process has the value of the whole row; the gradient is that of the sum of the losses."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-3, 4, (6, N), generator=generator).to(dtype)
    x[1] = scores(N).to(dtype)
    x[2, 5], x[3, :9], x[4, 20:] = math.nan, -math.inf, math.inf
    mask = torch.rand(6, N, generator=generator) < 0.7
    for options in ({}, {"mask": mask}):
        for name, argument, more in (
            ("kth_value", torch.tensor([1, 5, 3, 12, 2, 9]), {}),
            ("kth_value", 3, {"largest": False}),
            ("quantile", torch.tensor([0.0, 0.3, 0.5, 1.0]), {}),
            ("quantile", 0.45, {"interpolation": "nearest", "dim": None}),
        ):
            arguments = (name, {**options, **more}, x, argument, CUTS[world])
            parts = processes.run(world, shards.of_order_statistics, *arguments)
            leaf = x.clone().requires_grad_()
            want = getattr(khot, name)(leaf, argument, **options, **more)
            # of dim=None, the entries are in another order, so equal ones share the gradient differently
            (grad,) = torch.autograd.grad(want.sum(), leaf)
            for value, _ in parts:
                torch.testing.assert_close(value, want.detach(), rtol=0, atol=0, equal_nan=True)
            joint = torch.cat([part for _, part in parts], -1) / world
            if "dim" not in more:
                torch.testing.assert_close(joint, grad, rtol=0, atol=0, equal_nan=True)


def test_order_statistics_of_nothing() -> None:
    calls = [(torch.zeros(2, 0), 0.5), (torch.zeros(2, 0), 0.5)]
    for text in processes.run(2, shards.failure, "quantile", [(call, {}) for call in calls]):
        assert text.startswith("ValueError: input must have at least one entry along dim")
    for text in processes.run(2, shards.failure, "kth_value", [((torch.zeros(3), 7), {})] * 2):
        assert text.startswith("ValueError: k must be an integer in [1, 6], but got 7")


def test_other_dims_and_half_precision() -> None:
    x = scores(4, N, 2).bfloat16().movedim(1, -1)
    parts = processes.run(2, shards.call, "soft_topk", {"dim": -1}, x, 3.0, CUTS[2])
    got = torch.cat([part for part, *_ in parts], -1)
    assert got.dtype == torch.bfloat16
    assert_close(got, khot.soft_topk(x, 3.0), 2**-8)
    parts = processes.run(3, along_dim_1, x.movedim(-1, 1), CUTS[3])
    assert_close(torch.cat(parts, 1), khot.soft_topk(x, 3.0).movedim(-1, 1), 2**-8)


def along_dim_1(group: Any, x: Tensor, cuts: list[int]) -> Tensor:
    return khot.soft_topk(x[:, cuts[group.rank()] : cuts[group.rank() + 1]], 3.0, dim=1, group=group)


# ----------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform", POWER], ids=str)
def test_collectives(cdf: Any) -> None:
    """A few in the forward pass, including the check of arguments; two in the backward pass, of maxima and
    sums; a few numbers per row, and some per point where a pass evaluates many."""
    most, size = (8, 200) if cdf in ("logistic", "laplace", "normal") else (14, 16_000)
    n, cuts = 3000, [0, 1000, 1800, 3000]
    for scale in (0.1, 1.0, 5.0):
        for k in (1, n / 10 + 0.5, n - 1):
            x = scale * scores(1, n)
            _, forward, backward = processes.run(3, shards.call, "soft_topk", {"cdf": cdf}, x, k, cuts, True)[
                0
            ]
            assert len(forward) <= most
            assert max(forward) <= size
            assert len(backward) == 2
            assert max(backward) <= 8 * (5 + 2 * 3 + 3)


def adversarial_rows(n: int) -> tuple[Tensor, Tensor]:
    """Every kind of row with every k of the list."""
    generator, rows = torch.Generator().manual_seed(0), []
    for make in oracles.ADVERSARIAL.values():
        x = make(n, generator)
        rows += [(x, k) for k in oracles.adversarial_ks(int((x != -math.inf).sum()))]
    return torch.stack([x for x, _ in rows]), torch.tensor([k for _, k in rows], dtype=torch.float64)


@pytest.mark.parametrize(
    ("cdf", "n"),
    [
        *((cdf, 60) for cdf in ("logistic", "laplace", "normal", "uniform", POWER)),
        ("logistic", 3000),  # of full and of compact support; test_counting.py has all of them at 1,000
        (POWER, 3000),
    ],
    ids=str,
)
def test_at_most_ten_passes(cdf: Any, n: int) -> None:
    """As for whole rows (``test_counting.py``), of which shards take smaller samples."""
    x, k = (each[:: 1 if n == 60 else 5] for each in adversarial_rows(n))
    for tau in oracles.TAUS:
        options, cuts = {"tau": tau, "cdf": cdf}, [0, n // 3, n // 3, 2 * n // 3, n]
        counts = processes.run(4, shards.passes, "soft_topk", options, [x, k], cuts)
        assert all(torch.equal(count, counts[0]) for count in counts)
        assert counts[0].numel() == k.numel() and 1 <= counts[0].max() <= 10


@pytest.mark.parametrize("by", ["score", "value"])
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform", POWER], ids=str)
def test_at_most_ten_passes_of_a_budget(cdf: Any, by: str) -> None:
    """Costs of 12 decades among them, and budgets that end in a gap."""
    for n in (7, 300):
        x, w, budget = (
            budget_rows.table(n, torch.float64, (1e-6, 0.3, 0.9))
            if n == 300
            else budget_rows.gaps(n, torch.float64, by, 12)
        )
        for tau in ((0.01, 1.0)[(n == 7) ^ (by == "value")],):
            options, cuts = {"tau": tau, "cdf": cdf, "by": by}, [0, n // 3, n // 3, 2 * n // 3, n]
            counts = processes.run(4, shards.passes, "soft_budget", options, [x, w, budget], cuts)
            assert all(torch.equal(count, counts[0]) for count in counts)
            assert 1 <= counts[0].max() <= 10


def test_collectives_of_the_mask_and_of_magnitude() -> None:
    x = scores(1, 3000).float()
    cuts = [0, 1000, 1800, 3000]
    _, forward, _ = processes.run(3, shards.call, "topk_mask", {}, x, 300, cuts)[0]
    assert len(forward) == 4  # the arguments, two digits of 16 bits, and whether there is an answer
    _, forward, backward = processes.run(3, shards.call, "soft_topk_magnitude", {}, x, 300, cuts, True)[0]
    assert len(forward) <= 8
    assert len(backward) == 1


# ------------------------------------------------------------------------------------ errors


GOOD: tuple[tuple[Any, ...], dict[str, Any]] = ((torch.zeros(2, 5), 2.0), {})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (((torch.zeros(2, 5), -1.0), {}), r"ValueError: k must lie in \[0, inf\], but got -1.0"),
        (((torch.zeros(2, 5).int(), 2.0), {}), "TypeError: input must have a floating-point dtype"),
        (((None, 2.0), {}), "TypeError: input must be a torch.Tensor, but got NoneType"),
        (((torch.zeros(2, 5), 2.0), {"tau": 0.0}), "ValueError: tau must be finite and > 0"),
        (((torch.zeros(2, 5), 2.0, 2), {}), "IndexError: dim must be in"),
        (((torch.zeros(2, 5), 2.0), {"cdf": "cauchy"}), "ValueError: cdf must be one of"),
        (((torch.zeros(2, 5), 2.0), {"mask": torch.ones(3, dtype=torch.bool)}), "ValueError: mask must"),
        (((torch.zeros(3, 5), 2.0), {}), r"ValueError: all processes of group .* rows \(2,\).*rows \(3,\)"),
        (((torch.zeros(2, 5), torch.tensor(3.0)), {}), "ValueError: all processes .* k=2.0,.* k=3.0,"),
        (((torch.zeros(2, 5), 2.0), {"largest": False}), "ValueError: all processes of group must pass"),
    ],
)
@pytest.mark.parametrize("guilty", [0, 2])
def test_an_error_on_one_rank_is_raised_on_all(bad: Any, message: str, guilty: int) -> None:
    calls = [GOOD] * 3
    calls[guilty] = bad
    told = processes.run(3, shards.failure, "soft_topk", calls)
    assert told[0] == told[1] == told[2]
    if guilty == 2 or "all processes" not in message:
        assert re.match(message, told[0], re.DOTALL)


def test_errors_that_only_the_whole_row_shows() -> None:
    x = torch.zeros(2, 5)
    for name in ("soft_topk", "topk_mask", "soft_topk_magnitude"):
        told = processes.run(3, shards.failure, name, [((x, 16.0), {})] * 3)
        assert set(told) == {f"ValueError: k must {domain(name)}, but got 16.0"}
        mask = torch.arange(5) < 4
        told = processes.run(3, shards.failure, name, [((x, 13.0), {"mask": mask})] * 3)
        assert len(set(told)) == 1
        assert "but got 13 for a row with 12" in told[0]
    told = processes.run(2, shards.failure, "soft_topk", [((x, 2), {}), ((x[:, :0], 2), {})])
    assert told == ["none", "none"]


def domain(name: str) -> str:
    return "be an integer in [0, 15]" if name == "soft_topk_magnitude" else "lie in [0, 15]"


def test_a_group_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"group must be a .*ProcessGroup, but got str"):
        khot.soft_topk(torch.zeros(3), 1, group="all")


def test_a_peer_that_does_not_come_is_a_timeout() -> None:
    *told, _ = processes.run(0, shards.left_alone)
    for message, seconds in told:
        assert re.search("[Tt]imed out|[Tt]imeout", message)
        assert seconds < 20


# --------------------------------------------------------------------- DTensor, torch.compile

PLACES = [((4,), "1"), ((4,), "0"), ((4,), "r"), ((4,), "p")]
PLACES += [((2, 2), "01"), ((2, 2), "10"), ((2, 2), "1r"), ((2, 2), "11")]


@pytest.mark.parametrize(("shape", "places"), PLACES, ids=str)
def test_dtensors(shape: tuple[int, ...], places: str) -> None:
    args = [scores(3, N), torch.tensor([2.0, 7, 20]).double(), torch.tensor([0.5, 1.0, 1.7]).double()]
    mask = torch.arange(N) % 11 != 4
    for name, options in (("soft_topk", {}), ("soft_topk_magnitude", {"mask": mask}), ("topk_mask", {})):
        check_dtensors(name, options, args, shape, places)


@pytest.mark.parametrize("place", ["r", "0", "p"])
def test_dtensors_with_whole_rows(place: str) -> None:
    """Every operator and loss: values, gradients and placements are those of a plain tensor."""
    for wrong in processes.run(2, shards.differ_on_whole_rows, place):
        assert not wrong, "\n".join(wrong)


def test_every_operator_and_loss_is_tried_on_dtensors() -> None:
    tried = {name.partition(" ")[0] for name in shards.whole_rows()}
    assert {op.name for op in operators.OPERATORS} - tried == {"soft_assign"}
    losses = {name for name in khot.losses.__all__ if name.islower()}
    assert {name.removesuffix("_loss").replace("_at_k", "").split("_")[0] for name in losses} <= {
        name.split("_")[0] for name in tried
    }


def test_dtensors_that_do_not_work_say_what_to_do() -> None:
    for told in processes.run(2, shards.refusals):
        for name, message in told.items():
            assert "DTensor" in message and re.search("local|redistribute|group", message), (name, message)


@pytest.mark.parametrize("place", ["r", "0", "1"])
def test_a_balancer_takes_dtensors(place: str) -> None:
    x, mask = scores(3, 40, 6), torch.arange(120).view(3, 40) % 7 > 0
    alone = khot.nn.QuantileBalancer(6, 2)
    want = alone(x, mask)
    alone.update()
    for experts, bias in processes.run(2, shards.balanced_on_dtensors, x, mask, place):
        assert torch.equal(experts, want) and torch.equal(bias, alone.bias)


@pytest.mark.parametrize(
    ("shape", "places"),
    [((2, 2), "01"), *(pytest.param(*case, marks=pytest.mark.slow) for case in PLACES)],
    ids=str,
)
def test_dtensors_compiled(shape: tuple[int, ...], places: str) -> None:
    args = [scores(3, N), torch.tensor([2.0, 7, 20]).double(), torch.tensor([0.5, 1.0, 1.7]).double()]
    processes.renew()
    for name in ("soft_topk", "soft_topk_magnitude"):
        check_dtensors(name, {}, args, shape, places, True)


def check_dtensors(
    name: str,
    options: dict[str, Any],
    args: list[Tensor],
    shape: tuple[int, ...],
    places: str,
    compiled: bool = False,
) -> None:
    weights = scores(3, N, seed=1)
    x, k, tau = (a.clone().requires_grad_() for a in args)
    y = khot.topk_mask(x, k) if name == "topk_mask" else getattr(khot, name)(x, k, tau=tau, **options)
    want = [y.detach()]
    if y.requires_grad:
        want += torch.autograd.grad(y, (x, k, tau), weights, allow_unused=True, materialize_grads=True)
    told = processes.run(4, shards.on_dtensors, name, options, args, weights, shape, places, compiled)
    for values, where in told:
        assert len(set(where)) == 1
        assert where[0].count("Shard") == sum(p in "01" for p in places)
        for a, b in zip(values, want, strict=True):
            assert_close(a, b, 1e-12)


@pytest.mark.parametrize("name", ["soft_topk", "log_soft_topk", "soft_topk_magnitude", "topk_mask"])
def test_compile_with_a_group(name: str) -> None:
    x = scores(2, N).requires_grad_()
    y = getattr(khot, name)(x, 3.0)
    grad = torch.autograd.grad(y.square().sum(), x)[0] if y.requires_grad else torch.zeros_like(y)
    parts = processes.run(2, shards.compiled_with_a_group, name, x.detach(), CUTS[2])
    for got, want in zip(zip(*parts, strict=True), (y.detach(), grad), strict=True):
        assert_close(torch.cat(got, -1), want, 1e-12)


@pytest.mark.parametrize(
    ("name", "argument", "options", "masked"),
    [
        ("kth_value", torch.tensor([3.0, 5.0]), {}, True),
        ("kth_value", torch.tensor([3.0, 5.0]), {"largest": False}, False),
        ("quantile", torch.tensor(0.3, dtype=torch.float64), {}, False),
        ("quantile", torch.tensor([0.2, 0.7], dtype=torch.float64), {}, True),
    ],
)
def test_order_statistics_compiled_with_a_group(
    name: str, argument: Any, options: dict[str, Any], masked: bool
) -> None:
    options = {**options, "mask": scores(2, N, seed=3) < 1} if masked else options
    x = scores(2, N)
    for got, want in processes.run(2, shards.compiled_order_statistics, name, argument, options, x, CUTS[2]):
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, 1e-12)


def test_opcheck() -> None:
    (checked,) = processes.run(1, shards.checked_operators)
    assert checked == {name for name in REGISTERED if name.startswith("reference_")}


# --------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("tensor parallel", how) for how in ("bounded", "n of m", "score")),
        ("FSDP", "score"),
        # where the parts lie does not depend on how they are pruned
        ("FSDP of the whole", ""),
        ("FSDP, replicated", ""),
    ],
    ids=str,
)
def test_pruning_of_spread_parameters(kind: str, how: str) -> None:
    model, x, target = shards.small_model()
    shards.prune(model, how)
    want = shards.three_steps(model, x, target)
    zeros = [int((layer.weight == 0).sum()) for layer in (model[0], model[2])]
    assert sum(zeros) == 60
    for y, found in processes.run(4, shards.pruned, kind, how):
        assert_close(y, want, 1e-12)
        assert found == zeros


# -------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("name", ["pareto", "gumbel_topk"])
def test_a_seed_gives_the_same_draw_to_any_number_of_ranks(name: str) -> None:
    probs = torch.rand(2, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs[0, 3], probs[1, 20] = 1.0, 0.0
    draws = []
    for world in (1, 2, 3, 4):
        options = {"sample_shape": (5,), "seed": 2**61 + 7}
        parts = processes.run(world, shards.drawn, name, probs, options, CUTS[world])
        draws.append(torch.cat(parts, -1))
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    if name == "pareto":
        assert (draws[0].sum(-1) - probs.sum(-1)).abs().max() < 1
        assert (draws[0][:, 0, 3] == 1).all() and (draws[0][:, 1, 20] == 0).all()
    else:
        from khot._ops import uniform as philox

        uniform = philox.uniform(torch.tensor(2**61 + 7), (5, 2, N))
        assert torch.equal(draws[0], khot.topk_mask(probs - (-uniform.log()).log(), 4))
        assert (draws[0].sum(-1) == 4).all()


def test_without_a_seed_rank_0_decides() -> None:
    """Shards must not repeat one another, and E[x] = π: |z| < 6 fails once in 10^7 runs of 46 units."""
    probs = torch.full((2, N), 0.4, dtype=torch.float64)
    parts = processes.run(3, shards.drawn, "pareto", probs, {"sample_shape": (1000,)}, CUTS[3])
    draws = torch.cat(parts, -1)
    assert set(draws.sum(-1).unique().tolist()) == {9.0, 10.0}
    assert ((draws.mean(0) - probs).abs() < 6 * math.sqrt(0.24 / 1000) + 2e-3).all()


def test_sampling_errors() -> None:
    with pytest.raises(ValueError, match="seed is used only together with group"):
        khot.sampling.sample(torch.full((4,), 0.5), seed=1)
    with pytest.raises(ValueError, match="seed is used only together with group"):
        khot.sampling.gumbel_topk(torch.zeros(4), 2, seed=1)
    with pytest.raises(ValueError, match="with group, design must be 'pareto'"):
        khot.sampling.sample(torch.full((4,), 0.5), "brewer", group="all")
    for probs, message in (([0.5] * 4, "at least 2.5 in every row"), ([0.5, 1.5], "in [0, 1], but got 1.5")):
        calls = [((torch.tensor(values),), {}) for values in ([min(p, 1) for p in probs], probs)]
        told = processes.run(2, shards.failure, "sampling.sample", calls)
        assert told[0] == told[1] and message in told[0]


# -------------------------------------------------------------------- balanced experts

TOKENS = {1: [0, 91], 2: [0, 40, 91], 3: [0, 91, 91, 91], 4: [0, 0, 13, 60, 91]}


@worlds
def test_balancers_have_the_same_bits_for_any_number_of_processes(world: int) -> None:
    k = 3
    batches = [scores(91, 12, seed=i).float() + torch.arange(12) / 3 for i in range(4)]
    results = processes.run(world, shards.balanced, batches, k, TOKENS[world])
    alone: list[Tensor] = []
    layers = [khot.nn.QuantileBalancer(n, k, bins=256) for n in (12, 9)]
    for batch in batches:
        for layer in layers:
            layer(batch[:, : layer.num_experts])
            layer.update()
            alone.append(layer.bias.clone())
    for layer in layers:
        layer.solve(batches[0][:, : layer.num_experts])
        alone.append(layer.bias.clone())
    for biases, bytes_sent in results:
        assert len(biases) == len(alone) == 10
        for got, want in zip(biases, alone, strict=True):
            assert want.any() and torch.equal(got, want)
        assert bytes_sent == 4 * [257 * (12 + 9) * 8]  # one all-reduce of int64 per update, for all layers


# Whether the biases are those of all tokens while DistributedDataParallel broadcasts the buffers.
UNDER_BROADCASTS = {
    "one forward pass": True,
    "no_sync": True,
    "synchronised each time": False,
    "evaluation before the update": False,
}


@pytest.mark.parametrize("how", UNDER_BROADCASTS)
@pytest.mark.parametrize("broadcast", [False, True], ids=["no broadcast", "broadcast"])
def test_balancers_in_distributed_data_parallel(broadcast: bool, how: str) -> None:
    """The biases are equal on all processes, and those of all tokens, bit for bit. With broadcasts, counts of
    the first process may overwrite the others, which the documentation warns of."""
    steps = [scores(90, 12, seed=i).float() + torch.arange(12) / 3 for i in range(3)]
    alone, want = khot.nn.QuantileBalancer(12, 3), []
    for step in steps:
        alone(step)
        alone.update()
        want.append(alone.bias.clone())
    results = processes.run(2, shards.balanced_in_ddp, steps, 3, broadcast, how)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert all(map(torch.equal, results[0], want)) == (not broadcast or UNDER_BROADCASTS[how])


def test_the_argument_that_keeps_counts_is_named_as_this_torch_names_it() -> None:
    """With a warning as an error, shards.data_parallel shows that the name is not deprecated."""
    page = (Path(__file__).parents[1] / "docs" / "balancing.md").read_text(encoding="utf-8")
    for text in (page, khot.nn.QuantileBalancer.__doc__ or ""):
        assert f"`{shards.buffers_argument()}=False`" in text
