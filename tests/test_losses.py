"""The losses: their values against independent ones, their gradients, and their errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
import oracles
from drawn import normal as scores
from khot import cdfs
from khot._ops.fenchel_young import row_losses
from khot._ops.ranking_losses import counted_mean
from khot.losses import FenchelYoungTopKLoss, TopKCrossEntropyLoss, permutation_cross_entropy

ALL = {
    "logistic": cdfs.Logistic(),
    "laplace": cdfs.Laplace(),
    "normal": cdfs.Normal(),
    "uniform": cdfs.Uniform(),
    "power": cdfs.Power(4 / 3),
}
each_cdf = pytest.mark.parametrize("name", ALL)
each_full_cdf = pytest.mark.parametrize("name", ["logistic", "laplace", "normal"])


def labels(rows: int, n: int, m: int, seed: int = 1) -> Tensor:
    """m labels in each row."""
    return khot.topk_mask(scores(rows, n, seed=seed), m)


# ------------------------------------------------------------------------------ Fenchel-Young


@each_cdf
@pytest.mark.parametrize("m", [3, 5])
def test_fenchel_young_is_the_gap_of_the_maximum(name: str, m: int) -> None:
    # the maximum from a general solver of 50 digits: ⟨y, x⟩ − τΣω(y) at its y
    x, T, tau = scores(4, 7), labels(4, 7, m), 0.7
    F = ALL[name]
    oracle = ("power", F.p) if name == "power" else (name, None)
    loss = FenchelYoungTopKLoss(3, tau=tau, cdf=F, reduction="none")(x, T)
    for row, target, got in zip(x, T, loss, strict=True):
        y = torch.from_numpy(oracles.soft_topk(row, 3, tau, *oracle)[0])

        def regularised(v: Tensor, row: Tensor = row) -> Tensor:
            return v @ row - tau * F.potential(v).sum()

        assert abs(regularised(y) - regularised(target * 3 / m) - got) < 1e-12


@each_cdf
def test_fenchel_young_gradcheck(name: str) -> None:
    T = labels(3, 6, 2)

    def loss(x: Tensor, tau: Tensor) -> Tensor:
        return FenchelYoungTopKLoss(2, tau=tau, cdf=ALL[name], reduction="none")(x, T)

    tau = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64, requires_grad=True)
    x = scores(3, 6).requires_grad_()
    torch.autograd.gradcheck(loss, (x, tau), check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(loss, (x, tau))


def test_fenchel_young_is_zero_where_the_target_is_met() -> None:
    y = khot.soft_topk(scores(3, 6), 2)
    loss = FenchelYoungTopKLoss(2, reduction="none")
    torch.testing.assert_close(loss(scores(3, 6), y), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (loss(scores(3, 6, seed=9), y) > 0.01).all()


def test_fenchel_young_with_compact_support_is_exactly_zero_beyond_a_margin() -> None:
    loss = FenchelYoungTopKLoss(2, cdf="uniform")
    assert loss(torch.tensor([[3.0, 0.0, 2.0, -1.0]]), torch.tensor([[1, 0, 1, 0]])) == 0


def test_infinite_scores_are_free_where_right_and_infinitely_dear_where_wrong() -> None:
    x = torch.tensor([[-math.inf, 1.0, math.inf, 0.0], [1.0, -math.inf, 2.0, 0.0]], requires_grad=True)
    T = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    loss = FenchelYoungTopKLoss(2, reduction="none")(x, T)
    alone = FenchelYoungTopKLoss(1)(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(loss[0], alone, rtol=2.4e-7, atol=0)  # a GPU solves the two rows differently
    assert loss[1] == math.inf
    (grad,) = torch.autograd.grad(loss[0], x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("k", [0, 5])
def test_nothing_or_everything_is_no_choice(k: int) -> None:
    x = scores(2, 5).requires_grad_()
    loss = FenchelYoungTopKLoss(k)(x, torch.full((2, 5), k / 5))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert (x.grad == 0).all()


def test_a_nan_row_is_alone() -> None:
    x = scores(3, 5)
    x[1, 2] = math.nan
    loss = FenchelYoungTopKLoss(2, reduction="none")(x, labels(3, 5, 2))
    assert loss.isnan().tolist() == [False, True, False]


def test_a_target_with_too_little_mass_is_refused() -> None:
    # one label and k = 3: adding a constant to all scores lowers the loss without end
    with pytest.raises(ValueError, match=r"^each target row must sum to at least k = 3, but one sums to 1$"):
        FenchelYoungTopKLoss(3)(scores(2, 5), labels(2, 5, 1))
    with pytest.raises(ValueError, match="target must lie"):
        FenchelYoungTopKLoss(3)(scores(2, 5), 4 * labels(2, 5, 1))
    with pytest.raises(ValueError, match="shape"):
        FenchelYoungTopKLoss(3)(scores(2, 5), labels(2, 4, 3))


# ---------------------------------------------------------------------------- cross-entropy


def test_k_as_large_as_the_number_of_classes() -> None:
    x, tau = scores(2, 3).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    loss = TopKCrossEntropyLoss(3, tau=tau)(x, torch.tensor([0, 1]))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert tau.grad is not None
    assert (x.grad == 0).all() and tau.grad == 0


def restricted(row: Tensor, label: int, m: int | None) -> Tensor:
    """The label's score, and then the m − 1 largest others, by sorting."""
    others = torch.cat((row[:label], row[label + 1 :])).sort(descending=True).values
    return torch.cat((row[label : label + 1], others if m is None else others[: m - 1]))


@each_full_cdf
@pytest.mark.parametrize("m", [None, 3, 5, 6])
def test_top_1_modes_and_the_restriction_to_m_scores(name: str, m: int | None) -> None:
    x, label, tau = 2 * scores(4, 6), torch.tensor([0, 1, 5, 3]), 0.7
    seen = [restricted(row, int(i), m) for row, i in zip(x, label, strict=True)]
    # the logarithm of the label's share for each k
    all_logs = [[oracles.soft_topk(row, k, tau, name, None)[1][0] for k in (1, 2, 3)] for row in seen]
    for p, mode in itertools.product(
        ([1.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]), ("topk", "softmax", "cross_entropy")
    ):
        options: dict[str, Any] = {"tau": tau, "cdf": name, "top1_mode": mode, "m": m, "reduction": "none"}
        got = TopKCrossEntropyLoss({k: w for k, w in enumerate(p, 1) if w}, **options)(x, label)
        for row, row_logs, value in zip(seen, all_logs, got, strict=True):
            softmax, logs = float(row[0] - row.logsumexp(0)), row_logs[: len(p)]
            if mode == "topk":
                want = -math.log(sum(w * math.exp(v) for w, v in zip(p, logs, strict=True)))
            elif mode == "softmax":
                want = -math.log(sum(w * math.exp(v) for w, v in zip(p, [softmax, *logs[1:]], strict=True)))
            else:  # the published form, less its constant
                want, rest = -p[0] * softmax, sum(p[1:])
                mixture = sum(w * math.exp(v) for w, v in zip(p[1:], logs[1:], strict=True))
                want += rest * (math.log(rest) - math.log(mixture)) if rest else 0
            assert abs(float(value) - want) <= 1e-11 * (1 + abs(want)), (p, mode)


@pytest.mark.parametrize("mode", ["topk", "softmax", "cross_entropy"])
@pytest.mark.parametrize("m", [None, 4])
def test_gradients_of_the_top_1_modes(mode: Any, m: int | None) -> None:
    label = torch.tensor([0, 4, 2])

    def loss(x: Tensor, tau: Tensor) -> Tensor:
        options: dict[str, Any] = {"tau": tau, "top1_mode": mode, "m": m, "reduction": "none"}
        return TopKCrossEntropyLoss({1: 0.5, 2: 0.2, 3: 0.3}, **options)(x, label)

    x, tau = scores(3, 6).requires_grad_(), torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(loss, (x, tau), check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(loss, (x, tau), fast_mode=True)
    if (m is None) == (mode == "topk"):  # every mode once
        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, tau), loss(x, tau), rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(loss(x, tau).sum(), x)
    assert (grad != 0).sum(-1).tolist() == [6 if m is None else m] * 3


def test_the_restriction_with_infinite_scores_ties_and_nan() -> None:
    inf = math.inf
    both = {1: 0.5, 2: 0.5}
    cases: list[tuple[list[float], int, Any]] = [
        ([0.3, inf, inf, 0.2, 1.0], 0, 2),  # as many infinite scores as places for others
        ([0.3, -inf, -inf, -inf, -inf], 0, 1),  # fewer finite ones than places
        ([-inf, 0.1, 0.2, -inf, -inf], 1, both),
        ([-inf, 0.1, 0.2, 0.3, 0.4], 0, both),  # an impossible label
        ([1.0, 1.0, 1.0, 1.0, 1.0], 4, both),
    ]
    for row, label, k in cases:
        x = torch.tensor(row, dtype=torch.float64)
        got = TopKCrossEntropyLoss(k, m=3)(x, torch.tensor(label))
        want = TopKCrossEntropyLoss(k)(restricted(x, label, 3), torch.tensor(0))
        torch.testing.assert_close(got, want)
    x = scores(2, 5)
    x[0, 1] = math.nan
    loss = TopKCrossEntropyLoss(1, m=2, reduction="none")(x, torch.tensor([0, 3]))
    assert loss.isnan().tolist() == [True, False]


def test_the_restriction_refuses() -> None:
    for m in (0, 1, 2):
        with pytest.raises(ValueError, match="m must"):
            TopKCrossEntropyLoss(3, m=m)
    with pytest.raises(ValueError, match="m must"):
        TopKCrossEntropyLoss(1, m=1)
    with pytest.raises(ValueError, match="m must be at most the number of classes, 4, but got 5"):
        TopKCrossEntropyLoss(1, m=5)(scores(1, 4), torch.tensor([0]))
    text = repr(TopKCrossEntropyLoss(1, top1_mode="softmax", m=5))
    assert "top1_mode='softmax', m=5" in text and ", m=" not in repr(TopKCrossEntropyLoss(1))


def test_cross_entropy_refuses() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        TopKCrossEntropyLoss({1: 0.5, 2: 0.2})
    for k in ([0.5, 0.5], 2.5, True, None):
        with pytest.raises(TypeError, match=r"k must be an int, or a mapping such as \{1: 0.5, 5: 0.5\}"):
            TopKCrossEntropyLoss(k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"k must be an int, but got 1\.5"):
        TopKCrossEntropyLoss({1.5: 1.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="k must be at least 1, but got 0"):
        TopKCrossEntropyLoss({0: 1.0})
    with pytest.raises(ValueError, match=r"the weight of k = 2 must lie in \[0, 1\], but got -0.5"):
        TopKCrossEntropyLoss({1: 1.5 - 0.5, 2: -0.5})
    with pytest.raises(ValueError, match="full support"):
        TopKCrossEntropyLoss(1, cdf="uniform")
    for label in (10**400, -(10**400), 2**63):
        with pytest.raises(ValueError, match="ignore_index must lie in"):
            TopKCrossEntropyLoss(1, ignore_index=label)
    with pytest.raises(ValueError, match="k must be at most the number of classes, 2, but got 3"):
        TopKCrossEntropyLoss(3)(scores(1, 2), torch.tensor([0]))
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=rf"^label must lie in \[0, 1\], but got {wrong}$"):
            TopKCrossEntropyLoss(1)(scores(1, 2), torch.tensor([wrong]))
    with pytest.raises(ValueError, match="label"):
        TopKCrossEntropyLoss(1)(scores(1, 2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"^a floating-point label must have the input's shape \(1, 2\)"):
        TopKCrossEntropyLoss(1)(scores(1, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^label must be finite and >= 0, but got -0\.5"):
        TopKCrossEntropyLoss(1)(scores(1, 2), torch.tensor([[1.5, -0.5]]))
    with pytest.raises(ValueError, match=r"^label must be int64 where m is given"):
        TopKCrossEntropyLoss(1, m=2)(scores(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"^label_smoothing must be 0 where m is given"):
        TopKCrossEntropyLoss(1, m=2, label_smoothing=0.1)(scores(1, 3), torch.tensor([0]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_targets_of_torch(reduction: Any, smoothing: float) -> None:
    """Of one class, by a softmax, it is torch's cross-entropy: ignored rows, smoothing, probabilities."""
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    x, label = scores(2, 5, 3), torch.tensor([[0, 2, -100], [4, 1, 1]])
    share = scores(2, 5, 3, seed=1).softmax(1)
    loss = TopKCrossEntropyLoss(1, 1, top1_mode="softmax", **options)
    for target in (label, share):
        torch.testing.assert_close(loss(x, target), F.cross_entropy(x, target, **options), rtol=0, atol=1e-14)
    ignoring = TopKCrossEntropyLoss(1, 1, top1_mode="softmax", ignore_index=1, **options)
    label = label.clamp(min=0)
    want = F.cross_entropy(x, label, ignore_index=1, **options)
    torch.testing.assert_close(ignoring(x, label), want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", ["topk", "softmax", "cross_entropy"])
def test_several_labels(mode: Any) -> None:
    """A k-hot target is the sum of its labels' losses, and a score of −inf may stand where none is."""
    x, labels = scores(3, 6), torch.tensor([[0, 2], [5, 1], [3, 4]])
    loss = TopKCrossEntropyLoss({1: 0.3, 2: 0.5, 6: 0.2}, tau=0.7, top1_mode=mode, reduction="none")
    target = torch.zeros(3, 6).scatter(-1, labels, 1)
    want = loss(x, labels[:, 0]) + loss(x, labels[:, 1])
    torch.testing.assert_close(loss(x, target), want, rtol=0, atol=1e-14)
    x = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, target), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, target), x)
    held = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    one = TopKCrossEntropyLoss(2, tau=0.7)
    one(held, torch.tensor([[1.0, 1.0, 0.0]])).backward()
    assert held.grad is not None and held.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["topk", "softmax", "cross_entropy"])
@pytest.mark.parametrize("options", [{}, {"m": 3}, {"label_smoothing": 0.2}, {"soft": True}], ids=str)
def test_classes_that_are_left_out(mode: Any, options: dict[str, Any]) -> None:
    """As of rows without them."""
    options = dict(options)
    soft = options.pop("soft", False)
    loss = TopKCrossEntropyLoss({1: 0.4, 2: 0.6}, tau=0.7, top1_mode=mode, reduction="none", **options)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 1:3] = mask[1, 5] = False
    x, label = scores(3, 6).masked_fill(~mask, math.nan).requires_grad_(), torch.tensor([3, 0, -100])
    if soft:
        label = scores(3, 6, seed=1).exp() * mask
    rows, expected = zip(x, mask, label, strict=True), []
    for row, there, target in rows:
        kept = target[there] if soft else target if target < 0 else there[:target].sum()
        expected.append(loss(row[there], kept))
    found = loss(x, label, mask=mask)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    got, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (found, torch.stack(expected)))
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="label must name classes under the mask"):
        loss(x, label if soft else torch.tensor([1, 0, 0]), mask=mask & (torch.arange(6) != 3))
    with pytest.raises(ValueError, match=r"must be at most the number of entries under the mask"):
        loss(x, label, mask=mask & (torch.arange(6) == 3))


def test_rows_that_are_all_ignored() -> None:
    x, label = scores(2, 3).requires_grad_(), torch.tensor([-100, -100])
    assert TopKCrossEntropyLoss(1)(x, label).isnan() and F.cross_entropy(x, label).isnan()
    total = TopKCrossEntropyLoss(1, reduction="sum")(x, label)
    total.backward()
    assert total == 0 and (x.grad == 0).all()


@pytest.mark.parametrize("options", [{}, {"m": 2}, {"label_smoothing": 0.1}], ids=str)
def test_rows_without_a_class_that_are_all_ignored(options: dict[str, Any]) -> None:
    x, label = scores(2, 0).requires_grad_(), torch.tensor([-100, -100])
    for mask in (None, torch.ones(2, 0, dtype=torch.bool)):
        assert TopKCrossEntropyLoss(1, **options)(x, label, mask=mask).isnan()
        total = TopKCrossEntropyLoss(1, reduction="sum", **options)(x, label, mask=mask)
        assert total == 0 and torch.autograd.grad(total, x)[0].shape == (2, 0)
    with pytest.raises(ValueError, match="at most the number of classes, 0"):
        TopKCrossEntropyLoss(1, **options)(x, torch.tensor([-100, 0]))


@pytest.mark.parametrize("padding", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{}, {"m": 2}, {"label_smoothing": 0.1}], ids=str)
def test_the_scores_of_ignored_rows_have_no_influence(options: dict[str, Any], padding: float) -> None:
    x, label = scores(3, 4), torch.tensor([1, -100, 2])
    want = TopKCrossEntropyLoss(2, **options)(x, label)
    x = x.index_fill(0, torch.tensor(1), padding).requires_grad_()
    loss = TopKCrossEntropyLoss(2, **options)(x, label)
    loss.backward()
    assert loss == want and x.grad is not None and x.grad.isfinite().all() and (x.grad[1] == 0).all()


def test_smoothing_compiled_after_none() -> None:
    x, label = scores(3, 4), torch.tensor([1, 3, 2])
    torch.compiler.reset()
    for smoothing in (0.0, 0.1):  # a number that has changed is an unknown one in the trace
        loss = TopKCrossEntropyLoss(2, label_smoothing=smoothing)
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, label), loss(x, label))


# ----------------------------------------------------------------------------- permutations


@pytest.mark.parametrize("cdf", list(ALL.values()), ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_permutation_cross_entropy_is_that_of_the_whole_matrix(cdf: Any, descending: bool) -> None:
    x, target = scores(3, 6), scores(3, 6, seed=1).argsort(-1)
    tau = torch.tensor([8.0, 9.0, 10.0], dtype=torch.float64)
    log_p = khot.log_soft_permutation(x, tau=tau, cdf=cdf, descending=descending)
    want = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    options: dict[str, Any] = {"tau": tau, "cdf": cdf, "descending": descending}
    for reduction, value in (("none", want), ("mean", want.mean()), ("sum", want.sum())):
        got = permutation_cross_entropy(x, target, **options, reduction=reduction)
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    got = permutation_cross_entropy(x.mT, target.mT, 0, **options, reduction="none")
    torch.testing.assert_close(got, want.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cdf", list(ALL.values()), ids=str)
def test_permutation_cross_entropy_has_exact_gradients(cdf: Any) -> None:
    x, tau = scores(2, 5).requires_grad_(), torch.tensor([8.0, 9.0]).double().requires_grad_()
    target = scores(2, 5, seed=1).argsort(-1)

    def loss(x: Tensor, tau: Tensor) -> Tensor:
        return permutation_cross_entropy(x, target, tau=tau, cdf=cdf)

    torch.autograd.gradcheck(loss, (x, tau), check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(loss, (x, tau), check_fwd_over_rev=True, fast_mode=True)
    if cdf.name in ("normal", "power"):
        return  # whose trace is that of the logistic or the uniform one
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, tau), loss(x, tau), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, tau), (x, tau)), torch.autograd.grad(loss(x, tau), (x, tau))
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: permutation_cross_entropy(
            x, scores(9, seed=1).argsort(), tau=0.05, cdf="logistic", reduction="sum"
        ),
        lambda x: TopKCrossEntropyLoss({1: 0.25, 2: 0.25, 5: 0.5}, top1_mode="softmax")(x, torch.tensor(3)),
    ],
    ids=["permutation", "top-k"],
)
def test_gradients_of_half_precision_are_summed_in_float32(loss: Any) -> None:
    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x, torch.full((), 512, dtype=x.dtype))[0]

    x = scores(9).half()
    want = gradient(x.float())
    unit = 2.0 ** (want.frexp().exponent - 11)  # of the last of 11 bits
    assert ((gradient(x).float() - want).abs() <= 0.51 * unit).all()


def test_permutation_cross_entropy_in_linear_memory() -> None:
    from test_counting import PeakMemory

    n = 20_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with PeakMemory() as memory:
        permutation_cross_entropy(x, x.argsort()).backward()
    assert memory.peak <= 8 * n * n / 200


@pytest.mark.parametrize("cdf", ["laplace", "logistic", "uniform"])
@pytest.mark.parametrize("descending", [False, True])
def test_permutation_cross_entropy_of_masked_rows(cdf: Any, descending: bool) -> None:
    """As of rows without the entries that are left out; what stands behind the last place is not read."""
    x, mask = scores(3, 6), torch.ones(3, 6, dtype=torch.bool)
    mask[1, 2:4] = mask[2, 0] = False
    x = x.masked_fill(~mask, math.nan).requires_grad_()
    target, expected = torch.full((3, 6), -100), []
    for row, there, to in zip(x, mask, target, strict=True):
        kept = row[there]
        order = kept.detach().argsort(descending=not descending)
        to[: len(order)] = there.nonzero().flatten()[order]
        loss = permutation_cross_entropy(
            kept, order, cdf=cdf, tau=3.0, descending=descending, reduction="none"
        )
        expected.append(F.pad(loss, (0, len(row) - len(order))))
    options: dict[str, Any] = {"cdf": cdf, "tau": 3.0, "descending": descending, "mask": mask}
    found = permutation_cross_entropy(x, target, **options, reduction="none")
    torch.testing.assert_close(found, torch.stack(expected))
    mean = permutation_cross_entropy(x, target, **options)
    torch.testing.assert_close(mean, found.sum() / mask.sum())
    got, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (found, torch.stack(expected)))
    torch.testing.assert_close(got, wanted)
    target[1, 0] = 2
    with pytest.raises(ValueError, match="target must name entries under the mask, but got 2"):
        permutation_cross_entropy(x, target, **options)


def test_permutation_cross_entropy_of_bad_arguments() -> None:
    x, target = scores(2, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    with pytest.raises(ValueError, match=r"^target must have the input's shape"):
        permutation_cross_entropy(x, target[0])
    with pytest.raises(ValueError, match=r"^target must lie in"):
        permutation_cross_entropy(x, target + 1)


# ------------------------------------------------------------------------------------ both


def test_the_mean_over_nothing_is_nan_as_in_torch() -> None:
    x, label = scores(0, 4), torch.zeros(0, dtype=torch.int64)
    assert nn.functional.cross_entropy(x, label).isnan()
    assert TopKCrossEntropyLoss(2)(x, label).isnan()
    assert permutation_cross_entropy(x, label.expand(4, 0).mT).isnan()


MODULES: dict[str, tuple[nn.Module, Tensor]] = {
    "FenchelYoungTopKLoss": (FenchelYoungTopKLoss(2, tau=0.5), labels(4, 6, 2)),
    "TopKCrossEntropyLoss": (TopKCrossEntropyLoss({1: 0.5, 2: 0.5}, tau=0.5), torch.tensor([1, 2, 3, 0])),
}
each_module = pytest.mark.parametrize("name", MODULES)


def test_every_loss_is_in_the_table() -> None:
    classes = {name for name in khot.losses.__all__ if isinstance(getattr(khot.losses, name), type)}
    assert classes == set(MODULES)


@each_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_the_dtype(name: str, dtype: torch.dtype) -> None:
    loss, target = MODULES[name]
    x = scores(4, 6).to(dtype)
    got = loss(x, target)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), loss(x.double(), target), rtol=2 * torch.finfo(dtype).eps, atol=0
    )


@each_module
def test_compiles_whole(name: str) -> None:
    loss, target = MODULES[name]
    torch.compiler.reset()
    eager, traced = scores(4, 6).requires_grad_(), scores(4, 6).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want, got = loss(eager, target), compiled(traced, target)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(traced.grad, eager.grad)


@each_module
def test_any_dim_and_reduction(name: str) -> None:
    loss, target = MODULES[name]
    x = scores(4, 6)
    rows = loss.__class__(loss.k, tau=0.5, reduction="none")(x, target)
    across = target.movedim(-1, 0) if target.dim() == 2 else target
    arguments = {"tau": 0.5, "reduction": "sum"}
    moved = loss.__class__(loss.k, 0, **arguments)(x.T, across)
    torch.testing.assert_close(rows.mean(), loss(x, target))
    torch.testing.assert_close(rows.sum(), moved)
    assert "tau=0.5" in repr(loss)


def test_the_mean_of_a_gpu_has_the_derivatives_of_a_mean() -> None:
    """It is written in the scores' dtype; on the CPU losses take torch's own."""
    loss, v = scores(7), scores(7, seed=1)

    def mean(loss: Tensor) -> Tensor:
        return counted_mean(loss, None, torch.float32)

    torch.testing.assert_close(mean(loss), loss.mean().float(), rtol=1e-7, atol=0)
    changed = torch.func.jvp(mean, (loss,), (v,))[1]
    torch.testing.assert_close(changed, v.mean().float(), rtol=1e-7, atol=0)
    grad = torch.func.grad(mean)(loss)
    torch.testing.assert_close(grad, torch.full_like(loss, 1 / 7), rtol=1e-15, atol=0)
    both = torch.func.vmap(torch.func.grad(lambda x: mean(x).square()))(torch.stack((loss, v)))
    want = 2 / 7 * torch.stack((loss, v)).mean(-1, keepdim=True).expand(2, 7)
    torch.testing.assert_close(both, want, rtol=1e-6, atol=0)
    every = torch.func.hessian(lambda x: mean(x).square())(loss)
    torch.testing.assert_close(every, torch.full((7, 7), 2 / 49, dtype=torch.float64), rtol=1e-6, atol=0)
    compiled = torch.compile(torch.func.grad(mean), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(loss), grad, rtol=0, atol=0)


def test_fenchel_young_mask() -> None:
    """Scores and targets under False are ignored, even NaN."""
    loss = khot.losses.FenchelYoungTopKLoss(2, tau=0.5)
    x, target = torch.tensor([3.0, torch.nan, 1.0, 2.0, 0.5]), torch.tensor([1.0, torch.nan, 0, 1, 1])
    mask = torch.tensor([1, 0, 1, 1, 1]).bool()
    torch.testing.assert_close(loss(x, target, mask=mask), loss(x[mask], target[mask]))


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform"])
def test_fenchel_young_of_targets_that_miss_k_by_rounding(cdf: Any) -> None:
    """Their share is a little above 1, and so is what they ask of an entry, far from the others."""
    x = torch.tensor([[3.0, 2, 0, -1], [1e8, 2, 0, -1]])
    target = torch.tensor([1.0, 1 - 5e-7, 0, 0]).expand(2, 4)
    tau = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = FenchelYoungTopKLoss(2, tau=tau, cdf=cdf, reduction="none")(x, target)
    assert (loss >= 0).all() and loss.isfinite().all()
    for graph in (False, True):
        (dtau,) = torch.autograd.grad(loss[0], tau, create_graph=graph, retain_graph=True)
        assert dtau.isfinite()


@pytest.mark.parametrize("score", [1e9, 1e15, 1e20])
def test_fenchel_young_of_a_score_that_is_missed_by_far(score: float) -> None:
    x, target = torch.tensor([score, 0.3, 0, -1], dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    tau = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = FenchelYoungTopKLoss(2, tau=tau)(x, target)
    (dtau,) = torch.autograd.grad(loss, tau)
    # the other three share 1, and the first one adds nothing
    y = khot.soft_topk(x[1:], 1)
    want = -(torch.special.entr(y) + torch.special.entr(1 - y)).sum()
    torch.testing.assert_close(dtau, -want, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "cdf", ["logistic", "laplace", "normal", *map(khot.cdfs.Power, (1.15, 1.5, 1.7, 3.0))], ids=str
)
def test_fenchel_young_losses_of_float32_are_those_of_float64(cdf: Any) -> None:
    """Under CDFs that float does not carry, and beside an entry that takes the digits of dL/dtau."""
    cases: list[tuple[list[float], list[float], float]] = [
        ([0.3, 1.2, -0.5, 0.9, 0.1], [0, 1, 0, 1, 0], 1.3),
        ([3e5 + 0.3, 0.1, -0.7, 0.4], [0, 1, 0, 0], 1.0),
        ([1e6 + 0.3, 0.1, -0.7, 0.4, 0.2, 0.9], [1, 0.3, 0.3, 0.3, 0.05, 0.05], 1.0),
        ([1e15, 1e15, 0], [0, 0, 1], 1e-24),
    ]
    for values, target, temperature in cases:
        found = []
        x, T = torch.tensor(values), torch.tensor(target)
        for dtype in (torch.float32, torch.float64):
            leaf = x.to(dtype).requires_grad_()
            tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
            k = T.double().sum().round().item()
            loss = FenchelYoungTopKLoss(k, tau=tau, cdf=cdf)(leaf, T.to(dtype))
            found.append(
                [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, (leaf, tau)))]
            )
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cdf", ["logistic", "laplace"])
def test_the_gradient_of_a_small_temperature_keeps_its_digits(cdf: Any) -> None:
    """Beside a loss that is some thousand times as large."""
    x = scores(1, 16, seed=2).expand(8, 16).float()
    target = scores(8, 16, seed=3).argsort(-1).lt(3).float()
    found = []
    for dtype in (torch.float32, torch.float64):
        tau = torch.full((8,), 0.01, dtype=torch.float64, requires_grad=True)
        loss, _ = row_losses(x.to(dtype), target.to(dtype), torch.tensor(3.0), tau, cdfs.resolve(cdf))
        found.append(*torch.autograd.grad(loss.sum(), tau))
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
