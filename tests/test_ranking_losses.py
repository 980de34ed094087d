"""The ranking losses: against pairwise formulas, the metrics of scipy and scikit-learn, lists one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import Tensor

from drawn import normal as randn
from khot import cdfs, losses

INF, NAN = math.inf, math.nan

# ------------------------------------------------------------------------- the pairwise formulas, in NumPy

Array = Any  # np.ndarray of float64
# each with the median 0, and beside it the shift of its argument that makes it so
FUNCTIONS: dict[str, tuple[Any, Callable[[Array], Array], float]] = {
    "logistic": ("logistic", special.expit, 0.0),
    "laplace": ("laplace", stats.laplace.cdf, 0.0),
    "normal": ("normal", stats.norm.cdf, 0.0),
    "uniform": ("uniform", lambda z: np.clip(z + 0.5, 0, 1), 0.5),
    "power": (cdfs.Power(4 / 3), lambda z: np.clip(z + 0.5 ** (1 / 3), 0, 1) ** 3, 0.5 ** (1 / 3)),
}


def rank_above(x: Array, F: Callable[[Array], Array], tau: float) -> Array:
    """1 for the largest: ½ + Σ_j F((x_j − x_i)/τ)."""
    return 0.5 + F((x[None, :] - x[:, None]) / tau).sum(-1)


def share_of_top(x: Array, F: Callable[[Array], Array], tau: float, k: float) -> Array:
    if k >= len(x):
        return np.ones(len(x))
    reach = 60 * tau
    t = optimize.brentq(
        lambda t: F((x - t) / tau).sum() - k, x.min() - reach, x.max() + reach, xtol=1e-13, rtol=1e-15
    )
    return F((x - t) / tau)


def spearman(x: Array, target: Array, F: Any, tau: float, k: None) -> float:
    return stats.pearsonr(rank_above(x, F, tau), stats.rankdata(-target))[0]


def ndcg(x: Array, relevance: Array, F: Any, tau: float, k: float | None) -> float:
    r = rank_above(x, F, tau)
    y = np.ones(len(x)) if k is None else share_of_top(x, F, tau, k)
    best = sorted(relevance, reverse=True)[: None if k is None else int(k)]
    ideal = sum(g / math.log2(2 + i) for i, g in enumerate(best))
    return sum(g * w / math.log2(1 + s) for g, w, s in zip(relevance, y, r, strict=True)) / ideal


def average_precision(x: Array, label: Array, F: Any, tau: float, k: None) -> float:
    r, positive = rank_above(x, F, tau), x[label == 1]
    return float(np.mean(rank_above(positive, F, tau) / r[label == 1]))


def recall(x: Array, label: Array, F: Any, tau: float, k: float) -> float:
    return float(label @ share_of_top(x, F, tau, k) / label.sum())


def precision(x: Array, label: Array, F: Any, tau: float, k: float) -> float:
    return float(label @ share_of_top(x, F, tau, k) / k)


def hit(x: Array, label: Array, F: Any, tau: float, k: float) -> float:
    return float(1 - np.prod(1 - share_of_top(x, F, tau, k)[label == 1]))


def log_rank(x: Array, relevance: Array, *_: Any) -> float:
    """1 less the loss of a list, from its formula."""
    total, below = 0.0, 0.0
    for grade in sorted(set(relevance[relevance > 0])):
        high, low = x[relevance >= grade], x[relevance < grade]
        t = low[None, :] - high[:, None]
        n = (np.maximum(t, 0) + 0.5 * np.exp(-np.abs(t))).sum(-1)
        total += (grade - below) * np.log1p(n / ((len(high) + 1) / 2)).sum()
        below = grade
    return 1 - total


# ------------------------------------------------------------------------------------- the table of losses


@dataclass(frozen=True)
class Loss:
    call: Callable[..., Tensor]
    metric: Callable[..., float]
    kind: str  # of the targets: "real", "graded", "binary"
    k: int | None = None
    of_cdf: bool = True  # whether it has a cdf and a tau

    def __call__(self, scores: Any, target: Any, *args: Any, **options: Any) -> Tensor:
        if not self.of_cdf:
            options = {name: value for name, value in options.items() if name not in ("tau", "cdf")}
        if self.k is not None:
            options = {"k": self.k, **options}
        return self.call(scores, target, *args, **options)

    def targets(self, *shape: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "real":
            return torch.randint(0, 5, shape, generator=generator) - 1.5
        return torch.randint(0, 2 if self.kind == "binary" else 4, shape, generator=generator)


LOSSES = {
    "spearman_loss": Loss(losses.spearman_loss, spearman, "real"),
    "ndcg_loss": Loss(losses.ndcg_loss, ndcg, "graded"),
    "ndcg_loss at k": Loss(losses.ndcg_loss, ndcg, "graded", 3),
    "average_precision_loss": Loss(losses.average_precision_loss, average_precision, "binary"),
    "recall_at_k_loss": Loss(losses.recall_at_k_loss, recall, "binary", 3),
    "precision_at_k_loss": Loss(losses.precision_at_k_loss, precision, "binary", 3),
    "hit_at_k_loss": Loss(losses.hit_at_k_loss, hit, "binary", 3),
    "log_rank_loss": Loss(losses.log_rank_loss, log_rank, "graded", of_cdf=False),
}
ARGUMENT = {"real": "targets", "graded": "relevance", "binary": "labels"}
each_loss = pytest.mark.parametrize("name", LOSSES)
each_of_cdf = pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.of_cdf])
each_cdf = pytest.mark.parametrize("cdf", FUNCTIONS)
with_cdf = pytest.mark.parametrize(
    ("name", "cdf"),
    [(n, c) for n, loss in LOSSES.items() for c in FUNCTIONS if loss.of_cdf or c == "laplace"],
)


def test_every_ranking_loss_is_in_the_table() -> None:
    named = {name for name in losses.__all__ if name.endswith("_loss")}
    assert named == {name.partition(" ")[0] for name in LOSSES}


# ------------------------------------------------------------------------------------------------- values


@each_of_cdf
@each_cdf
@pytest.mark.parametrize("tau", [2.0, 0.3])
def test_the_pairwise_formula(name: str, cdf: str, tau: float) -> None:
    loss, (F, function, _) = LOSSES[name], FUNCTIONS[cdf]
    x, target = randn(5, 11), loss.targets(5, 11)
    want = [
        1 - loss.metric(row, t, function, tau, loss.k)
        for row, t in zip(x.numpy(), target.double().numpy(), strict=True)
    ]
    got = loss(x, target, tau=tau, cdf=F, reduction="none")
    assert got.shape == (5,)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-11)
    single = loss(x.float(), target, tau=tau, cdf=F, reduction="none")
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [2, 5, 40])
@each_cdf
def test_hard_limits_are_those_of_scipy_and_scikit_learn(n: int, cdf: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    F = FUNCTIONS[cdf][0]
    for seed in range(4):
        x, options = randn(n, seed=seed), {"tau": 1e-7, "cdf": F}
        real = torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(seed)).double()
        real[0], real[1] = -1, 10  # at least two are different
        graded = LOSSES["ndcg_loss"].targets(n, seed=seed)
        graded[0] = 2
        label = (graded > 1).long()
        row, relevance = x.numpy()[None], graded.numpy()[None]
        want = stats.spearmanr(x, real)[0]
        assert abs(1 - losses.spearman_loss(x, real, **options) - want) < 1e-12
        for k in (None, 1, 3, n, n + 5):
            want = metrics.ndcg_score(relevance, row, k=k)
            assert abs(1 - losses.ndcg_loss(x, graded, k, **options) - want) < 1e-12
        want = metrics.average_precision_score(label.numpy(), x.numpy())
        assert abs(1 - losses.average_precision_loss(x, label, **options) - want) < 1e-12
        for k in (1, 2, n):
            chosen = np.argsort(-x.numpy())[:k]
            hits = label.numpy()[chosen].sum()
            assert (
                abs(1 - losses.recall_at_k_loss(x, label, k, **options) - hits / label.sum().item()) < 1e-12
            )
            assert abs(1 - losses.precision_at_k_loss(x, label, k, **options) - hits / k) < 1e-12
            assert abs(1 - losses.hit_at_k_loss(x, label, k, **options) - (hits > 0)) < 1e-12


def test_targets_count_by_their_order_only() -> None:
    x = randn(6)
    target = torch.tensor([-1e300, -1e-200, 0.0, 0.0, 1e-220, 1e300], dtype=torch.float64)
    for each in (target, torch.tensor([-INF, -1, 0, 0, 0.5, INF]), torch.tensor([-9, -1, 5, 5, 7, 8])):
        got = 1 - losses.spearman_loss(x, each, tau=1e-7)
        assert abs(got - stats.spearmanr(x, [0, 1, 2, 2, 3, 4])[0]) < 1e-12
    # as τ → ∞: Pearson's correlation of the scores with the ranks
    got = 1 - losses.spearman_loss(x, target, tau=1e4, cdf="logistic")
    assert abs(got - np.corrcoef(x, stats.rankdata(target))[0, 1]) < 1e-6


@each_loss
def test_memory_is_linear(name: str) -> None:
    from test_counting import PeakMemory

    loss, n = LOSSES[name], 10_000
    x, target = randn(n).requires_grad_(), loss.targets(n)
    with PeakMemory() as memory:
        loss(x, target).backward()
    assert memory.peak <= 8 * n * n / 50


# ---------------------------------------------------------------------------------------------- gradients


@each_of_cdf
@each_cdf
def test_gradients_are_exact(name: str, cdf: str) -> None:
    loss, F = LOSSES[name], FUNCTIONS[cdf][0]
    target = torch.tensor([[2, 0, 1, 0], [0, 1, 3, 0]]).clamp(max=1 if loss.kind == "binary" else 3)
    x = randn(2, 4).requires_grad_()
    tau = torch.tensor([0.7, 1.6], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])

    def call(x: Tensor, tau: Tensor) -> Tensor:
        return loss(x, target, tau=tau, cdf=F, mask=mask, reduction="none")

    torch.autograd.gradcheck(call, (x, tau), check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(call, (x, tau), check_fwd_over_rev=True, fast_mode=True)
    # the difference that one takes for oneself, of the whole and not of its parts
    (grad,) = torch.autograd.grad(call(x, tau).sum(), x)
    step = randn(2, 4, seed=8)
    with torch.no_grad():
        slope = (call(x + 1e-5 * step, tau).sum() - call(x - 1e-5 * step, tau).sum()) / 2e-5
    assert abs((grad * step).sum() - slope) < 1e-8


@each_loss
def test_compiles_whole(name: str) -> None:
    loss, target = LOSSES[name], LOSSES[name].targets(3, 6)
    mask = randn(3, 6, seed=2) < 1
    torch.compiler.reset()

    def call(x: Tensor) -> Tensor:
        return loss(x, target, tau=0.6, mask=mask)

    eager, traced = randn(3, 6).requires_grad_(), randn(3, 6).requires_grad_()
    want, got = call(eager), torch.compile(call, fullgraph=True, backend="aot_eager")(traced)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    want.backward()
    got.backward()
    torch.testing.assert_close(traced.grad, eager.grad, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------- lists, masks, reductions


@with_cdf
@pytest.mark.parametrize("under", [0.0, 1e6, NAN, INF, -INF])
def test_ragged_lists_are_separate_lists(name: str, cdf: str, under: float) -> None:
    loss, F = LOSSES[name], FUNCTIONS[cdf][0]
    x, target = randn(4, 7), loss.targets(4, 7, seed=3).double()
    mask = torch.tensor([2, 7, 5, 4]).unsqueeze(-1) > torch.arange(7)
    mask[3] = mask[3].roll(2)
    target[0, :2] = torch.tensor([1.0, 0.0])
    padded, padding = x.masked_fill(~mask, under).requires_grad_(), target.masked_fill(~mask, -100)
    got = loss(padded, padding, tau=0.5, cdf=F, mask=mask, reduction="none")
    rows = [x[i, mask[i]].requires_grad_() for i in range(4)]
    want = torch.stack(
        [loss(rows[i], target[i, mask[i]], tau=0.5, cdf=F, reduction="none") for i in range(4)]
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(got.sum(), padded)
    wants = torch.autograd.grad(want.sum(), rows)
    assert (grad[~mask] == 0).all()
    for i, each in enumerate(wants):
        torch.testing.assert_close(grad[i, mask[i]], each, rtol=1e-10, atol=1e-12)


@each_of_cdf
def test_lists_that_tell_nothing_are_left_out(name: str) -> None:
    loss = LOSSES[name]
    x, target = randn(4, 6), loss.targets(4, 6, seed=3).double()
    target[1] = 0  # nothing is relevant, and all are equal
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    leaf = x.clone().requires_grad_()
    rows = loss(leaf, target, mask=mask, reduction="none")
    assert rows[1] == rows[2] == 0 and (rows[[0, 3]] > 0).all()
    torch.testing.assert_close(loss(leaf, target, mask=mask), rows[[0, 3]].mean())
    torch.testing.assert_close(loss(leaf, target, mask=mask, reduction="sum"), rows.sum())
    loss(leaf, target, mask=mask).backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert (leaf.grad[1:3] == 0).all() and (leaf.grad[[0, 3]] != 0).any(-1).all()
    alone = x[1].clone().requires_grad_()
    nothing = loss(alone, target[1])
    nothing.backward()
    assert nothing == 0 and alone.grad is not None and (alone.grad == 0).all()


@each_loss
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(name: str, shape: tuple[int, int]) -> None:
    loss = LOSSES[name]
    x = torch.empty(shape, requires_grad=True)
    assert loss(x, torch.empty(shape), reduction="none").shape == shape[:1]
    value = loss(x, torch.empty(shape))
    value.backward()
    assert value == 0


@each_loss
def test_any_dim_and_layout(name: str) -> None:
    loss = LOSSES[name]
    x, target = randn(2, 5, 3), loss.targets(2, 5, 3, seed=2)
    tau = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True]).unsqueeze(-1)
    want = loss(x.mT.contiguous(), target.mT.contiguous(), tau=tau, mask=mask.mT, reduction="none")
    assert want.shape == (2, 3)
    for dim in (1, -2):
        got = loss(x, target, dim=dim, tau=tau, mask=mask, reduction="none")
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    number = loss(torch.tensor(1.0), torch.tensor(1.0), **({"k": 1} if loss.k else {}))
    assert number.shape == () and number == 0


@each_loss
def test_k_per_list_and_beyond_the_list(name: str) -> None:
    loss = LOSSES[name]
    if loss.k is None:
        assert "k" not in loss.call.__annotations__ or name == "ndcg_loss"
        return
    x, target = randn(3, 6), loss.targets(3, 6, seed=2)
    k = torch.tensor([1, 4, 60])
    got = loss(x, target, k=k, reduction="none")
    want = [loss(a, b, k=c) for a, b, c in zip(x, target, (1, 4, 60), strict=True)]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-12, atol=1e-12)
    if "precision" in name:
        assert abs(got[2] - (1 - target[2].sum().item() / 60)) < 1e-12
    elif "recall" in name or "hit" in name:
        assert got[2] < 1e-300
    else:
        assert got[2] == losses.ndcg_loss(x[2], target[2])


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounded_once(name: str, dtype: torch.dtype) -> None:
    loss = LOSSES[name]
    x, target = randn(4, 200).to(dtype), loss.targets(4, 200)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = (loss(v, target, tau=0.5, reduction="none") for v in (leaf, wide))
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=0.501 * eps, atol=2e-7)
    got.float().sum().backward()
    want.sum().backward()
    assert leaf.grad is not None and wide.grad is not None and leaf.grad.dtype == dtype
    slack = 0.501 * eps * wide.grad.abs() + torch.finfo(dtype).smallest_normal + 1e-7
    assert ((leaf.grad.double() - wide.grad).abs() <= slack).all()


# ----------------------------------------------------------------------------------------- unusual scores


@each_loss
def test_equal_scores(name: str) -> None:
    loss = LOSSES[name]
    x, target = torch.full((6,), 0.1, requires_grad=True), loss.targets(6, seed=3)
    value = loss(x, target, tau=0.7)
    value.backward()
    assert value.isfinite() and x.grad is not None and x.grad.isfinite().all()
    if loss.kind == "real":
        assert value == 1 and (x.grad == 0).all()
        assert losses.spearman_loss(1e-14 * randn(6).float(), target, tau=1e6) == 1  # below rounding
    elif loss.k is None:  # a gradient step raises the most relevant entries, and lowers those that are not
        assert x.grad[target == target.max()].max() < 0 < x.grad[target == 0].min()


@each_of_cdf
@each_cdf
def test_infinite_scores(name: str, cdf: str) -> None:
    # an entry at −inf is padding, and one at +inf before all others, as one at 1e6 is
    loss, F = LOSSES[name], FUNCTIONS[cdf][0]
    x, target = randn(6), loss.targets(6, seed=5)
    x[1], x[4] = -INF, INF
    some = torch.tensor([0, 2, 3, 4, 5])
    leaf = x.clone().requires_grad_()
    value = loss(leaf, target, tau=0.5, cdf=F)
    want = loss(x[some].clamp(max=1e6), target[some], tau=0.5, cdf=F)
    torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-9)
    value.backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()


@each_loss
@pytest.mark.parametrize("masked", [False, True])
def test_padding_of_minus_infinity_is_masked(name: str, masked: bool) -> None:
    loss = LOSSES[name]
    x, target = randn(3, 8), loss.targets(3, 8, seed=5)
    there = torch.arange(8) < torch.tensor([[8], [5], [3]])
    mask = torch.arange(8) > 0 if masked else None
    got = loss(x.masked_fill(~there, -INF), target, mask=mask, reduction="none")
    want = loss(x, target, mask=there if mask is None else there & mask, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32])
@pytest.mark.parametrize("dim", [-1, 0])
def test_spearman_tells_large_integers_apart(dtype: torch.dtype, dim: int) -> None:
    # identifiers or times in nanoseconds: float64 has no digits for the last ones
    end = torch.iinfo(dtype)
    steps = [[3, 0, 1, 1, 4, 2], [5, 5, 0, 4, 1, 2]]
    values = [[end.max - s for s in row] for row in steps]
    values[1][2] = end.min  # a difference that overflows
    target, x = torch.tensor(values, dtype=dtype), randn(2, 6)
    got = losses.spearman_loss(
        x if dim else x.T, target if dim else target.T, dim, tau=1e-9, reduction="none"
    )
    want = [1 - stats.spearmanr(row, [-s for s in step])[0] for row, step in zip(x, steps[:1], strict=False)]
    want.append(1 - stats.spearmanr(x[1], [-5, -5, -9, -4, -1, -2])[0])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    scalar = losses.spearman_loss(torch.tensor(0.3), torch.tensor(end.max, dtype=dtype), tau=1e-9)
    assert scalar == 0 == losses.spearman_loss(randn(0), target[:0, 0], tau=1e-9)


@each_loss
def test_a_nan_is_alone(name: str) -> None:
    loss = LOSSES[name]
    x, target = randn(3, 5), loss.targets(3, 5, seed=3)
    x[1, 2] = NAN
    assert loss(x, target, reduction="none").isnan().tolist() == [False, True, False]


# ---------------------------------------------------------------------------------------------- bad input

X, ZEROS = torch.tensor([[3.0, -1.0, 2.0], [0.1, 0.2, 0.3]]), torch.zeros(2, 3)


def refused() -> Iterator[Any]:
    """What test_bad_input.py does not ask for."""
    for name, loss in LOSSES.items():
        target = ARGUMENT[loss.kind]
        shape = rf"{target} must have the scores' shape \(2, 3\), but got \(3,\)"
        cases: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({target: ZEROS[0]}, ValueError, shape),
            ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"mask must broadcast"),
            ({"dim": 2}, IndexError, r"dim must be in \[-2, 1\], but got 2"),
        ]
        if loss.of_cdf:
            cases.append(({"tau": torch.ones(3)}, ValueError, r"tau must broadcast"))
        if loss.kind == "binary":
            cases.append(({target: ZEROS + 0.5}, ValueError, r"labels must be 0 or 1, but got 0\.5"))
            cases.append(({target: ZEROS.long() - 1}, ValueError, r"labels must be 0 or 1, but got -1"))
        if loss.kind == "graded":
            cases.append(({target: ZEROS - 1}, ValueError, r"relevance must be finite and >= 0, but got -1"))
            cases.append(
                ({target: ZEROS + INF}, ValueError, r"relevance must be finite and >= 0, but got inf")
            )
            cases.append(
                ({target: ZEROS + NAN}, ValueError, r"relevance must be finite and >= 0, but got nan")
            )
        if loss.k:
            cases.append(({"k": torch.tensor([1, -2])}, ValueError, r"k must be finite and > 0, but got -2"))
            cases.append(({"k": torch.ones(3)}, ValueError, r"k must broadcast"))
        for changed, error, said in cases:
            yield pytest.param(
                loss, {"scores": X, target: ZEROS, **changed}, error, said, id=f"{name}-{said}"
            )


@pytest.mark.parametrize("loss, arguments, error, said", list(refused()))
def test_bad_arguments(loss: Loss, arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    options = {"k": loss.k, **arguments} if loss.k else arguments
    with pytest.raises(error, match=f"^{said}") as info:
        loss.call(**options)
    assert type(info.value) is error


@each_of_cdf
def test_what_cannot_be_raised_is_nan_in_its_list(name: str) -> None:
    loss, target = LOSSES[name], LOSSES[name].targets(2, 5, seed=3).double()
    bad = {"real": NAN, "graded": -1.0, "binary": 0.5}[loss.kind]
    wrong = target.clone()
    wrong[1, 0] = bad
    x, good, negative = randn(2, 5), torch.ones(1, 2), torch.tensor([[1.0, -1.0]])

    def call(labels: Tensor, tau: Tensor) -> Tensor:
        return torch.vmap(lambda x, t, tau: loss(x, t, tau=tau, reduction="none"))(
            x[None], labels[None], tau.double()
        )

    assert call(wrong, good).isnan().tolist() == [[False, True]]
    if loss.k:  # the soft top-k can tell
        with pytest.raises(ValueError, match=r"^tau must be finite and > 0, but got -1"):
            call(target, negative)
    else:
        assert call(target, negative).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("name", ["recall_at_k", "precision_at_k", "ndcg_at_k"])
def test_float32_losses_of_equal_scores_keep_their_digits(name: str) -> None:
    """Equal scores are all rounded in the same way: a soft top-k in float32 would be off by n of these."""
    for n, k in ((2, 1.1), (45, 1.7), (51, 50.9), (1000, 999.9)):
        x, labels = torch.ones(n), torch.ones(n, dtype=torch.long)
        if name == "ndcg_at_k":
            loss, want = losses.ndcg_loss(x, labels, math.floor(k)), None
        elif name == "recall_at_k":
            loss, want = losses.recall_at_k_loss(x, labels, k), 1 - k / n
        else:
            loss, want = losses.precision_at_k_loss(x, labels, k), 0.0
        assert loss >= 0
        if want is not None:
            assert loss.item() == pytest.approx(want, rel=1e-6, abs=1e-12)
