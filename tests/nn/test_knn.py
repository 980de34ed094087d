"""SoftKNN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drawn import normal
from khot.nn import Anneal, SoftKNN
from largest import Largest


def labels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(seed))


def votes(query: Tensor, template: Tensor, label: Tensor, k: int) -> Tensor:
    """By sorting."""
    d = (query.unsqueeze(-2) - template.unsqueeze(-3)).square().sum(-1)
    near = label[d.argsort(-1)[:, :k]]
    return F.one_hot(near, 4).sum(-2)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_eval_is_the_vote_of_the_nearest_and_training_tends_to_it(k: int) -> None:
    query, template, label = normal(6, 5), normal(20, 5, seed=1), labels(20)
    want = votes(query, template, label, k) / k
    torch.testing.assert_close(SoftKNN(k, 4).eval()(query, template, label), want.double())
    torch.testing.assert_close(SoftKNN(k, 4, tau=1e-5)(query, template, label), want.double())
    p = SoftKNN(k, 4)(query, template, label)
    torch.testing.assert_close(p.sum(-1), torch.ones(6).double())
    assert (p >= 0).all()


@pytest.mark.parametrize("k", [1, 5, 9, 229, 230])
@pytest.mark.parametrize("queries", [0, 1, 300])
def test_predict_is_the_vote_by_sorting(k: int, queries: int) -> None:
    query, template, label = normal(queries, 5), normal(230, 5, seed=1), labels(230)
    got = SoftKNN(k, 4).predict(query, template, label)
    assert torch.equal(got, votes(query, template, label, k).argmax(-1))


def test_predict_breaks_ties_by_the_first_template() -> None:
    # each point is there ten times, and every time with another label
    point = normal(23, 5).float()
    template, label = point.repeat(10, 1), torch.arange(10).repeat_interleave(23)
    got = SoftKNN(1, 10).predict(point + 0.01, template, label)
    assert torch.equal(got, torch.zeros(23, dtype=torch.int64))
    got = SoftKNN(3, 10).eval()(point + 0.01, template, label)
    among = SoftKNN(3, 10, candidates=30).eval()(point + 0.01, template, label)
    assert torch.equal(among, got)


def test_predict_measures_what_products_cannot_tell_apart() -> None:
    # Around each of two far points, in float32: products are off by more than the distances there differ.
    generator = torch.Generator().manual_seed(0)
    corner = torch.tensor([4096.0, -4096.0]).view(2, 1, 1)
    template, query = (
        (corner + torch.randint(-9, 9, (2, size, 8), generator=generator) / 8).flatten(0, 1)
        for size in (9, 20)
    )
    label = labels(18)
    d = (query.double()[:, None] - template.double()).square().sum(-1)
    want = label[d.sort(dim=-1, stable=True).indices[:, 0]]
    assert torch.equal(SoftKNN(1, 4).predict(query, template, label), want)


def test_candidates_are_the_nearest() -> None:
    query, template, label = normal(6, 5), normal(80, 5, seed=1), labels(80)
    near = (query[:, None] - template).square().sum(-1).argsort(-1)[:, :8]
    got = SoftKNN(3, 4, tau=0.5, candidates=8)(query, template, label)
    for i in range(6):
        want = SoftKNN(3, 4, tau=0.5)(query[i : i + 1], template[near[i]], label[near[i]])
        torch.testing.assert_close(got[i : i + 1], want)
    hard = SoftKNN(3, 4, candidates=8).eval()(query, template, label)
    torch.testing.assert_close(hard, SoftKNN(3, 4).eval()(query, template, label))
    half = SoftKNN(3, 4, tau=0.5, candidates=8)(query.half(), template.half(), label)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), got, rtol=0.02, atol=0.02)


def test_candidates_have_every_derivative() -> None:
    label, right = labels(7), labels(3, seed=2)

    def loss(query: Tensor, template: Tensor) -> Tensor:
        return SoftKNN(2, 4, tau=0.5, candidates=5).loss(query, right, template, label)

    leaves = normal(3, 2).requires_grad_(), normal(7, 2, seed=1).requires_grad_()
    torch.autograd.gradcheck(loss, leaves, check_forward_ad=True)
    torch.autograd.gradgradcheck(loss, leaves)
    both = normal(4, 3, 2), normal(4, 7, 2, seed=1)
    got = torch.vmap(torch.func.grad(loss))(*both)
    for i in range(4):
        torch.testing.assert_close(got[i], torch.func.grad(loss)(both[0][i], both[1][i]))


def test_candidates_at_distance_0_have_no_gradient_and_are_measured_exactly() -> None:
    x = (normal(20, 5) + 512).float().requires_grad_()
    label, others = labels(20), ~torch.eye(20, dtype=torch.bool)
    knn, dense = SoftKNN(3, 4, tau=0.5, candidates=9), SoftKNN(3, 4, tau=0.5)
    (grad,) = torch.autograd.grad(knn.loss(x, label, x, label), x)
    assert grad.isfinite().all()
    among = SoftKNN(3, 4, tau=0.5, candidates=20)
    torch.testing.assert_close(among(x, x, label, others), dense(x, x, label, others), rtol=1e-5, atol=1e-6)


def test_predict_and_candidates_keep_no_distance_for_each_pair() -> None:
    query, template, label = normal(3000, 4).requires_grad_(), normal(2000, 4, seed=1), labels(2000)
    right = labels(3000, seed=2)
    with Largest() as largest:
        SoftKNN(3, 4).predict(query.detach(), template, label)
        SoftKNN(3, 4, candidates=12).loss(query, right, template, label).backward()
    assert largest.numel < 3000 * 2000 / 2


def test_predict_far_from_the_origin() -> None:
    # in float32, ‖q‖² − 2⟨q, t⟩ + ‖t‖² would be off by more than the distances
    query, template, label = normal(30, 5).float(), normal(230, 5, seed=1).float(), labels(230)
    want = SoftKNN(5, 4).predict(query, template, label)
    assert torch.equal(SoftKNN(5, 4).predict(query + 512, template + 512, label), want)


@pytest.mark.parametrize("case", ["clusters", "outlier", "padding", "lattice"])
def test_finds_what_rounded_products_miss(case: str) -> None:
    """In float32 the distances are far below the digits of the products, or many templates are as near."""
    query, template, label = normal(20, 3).float(), normal(400, 3, seed=1).float(), labels(400)
    mask = torch.ones(400, dtype=torch.bool)
    if case == "clusters":
        query[10:] += 1e4
        template[200:] += 1e4
    elif case == "outlier":
        template[7] = 1e12
    elif case == "padding":
        template[7], mask[7] = 1e15, False
    else:
        query, template = (2 * query[:, :2]).round(), (2 * template[:, :2]).round()
    knn = SoftKNN(5, 4).eval()
    want = knn(query.double(), template.double(), label, mask)
    among = SoftKNN(5, 4, candidates=6).eval()(query, template, label, mask)
    torch.testing.assert_close(among.double(), want)
    batch = SoftKNN(5, 4, candidates=6).eval()(
        query.view(2, 10, 3 - (case == "lattice")),
        template.expand(2, *template.shape),
        label.expand(2, 400),
        mask,
    )
    torch.testing.assert_close(batch.flatten(0, 1), among)
    if case != "padding":
        assert torch.equal(knn.predict(query, template, label), want.argmax(-1))


def test_candidates_without_templates() -> None:
    p = SoftKNN(1, 4, candidates=3)(normal(2, 5), normal(0, 5), labels(0))
    assert p.shape == (2, 4) and p.isnan().all()


@pytest.mark.parametrize("candidates", [None, 5, 9])
def test_gradients_do_not_depend_on_padding(candidates: int | None) -> None:
    query, template, label = normal(4, 3).float().requires_grad_(), normal(9, 3, seed=1).float(), labels(9)
    mask, grads = torch.arange(9) < 8, []
    for padding in (0.0, 1e15, math.nan, math.inf):
        template = template.detach().index_fill(0, torch.tensor(8), padding).requires_grad_()
        loss = SoftKNN(2, 4, candidates=candidates).loss(query, labels(4), template, label, mask)
        grads += torch.autograd.grad(loss, (query, template))
    torch.testing.assert_close(grads[2:], grads[:2] * 3)


def test_fewer_templates_than_k() -> None:
    query, template, label = normal(3, 5), normal(4, 5, seed=1), torch.tensor([1, 1, 3, 1])
    p = SoftKNN(9, 4)(query, template, label)
    torch.testing.assert_close(p, torch.tensor([0, 0.75, 0, 0.25]).double().expand(3, 4))
    assert SoftKNN(9, 4).predict(query, template, label).tolist() == [1, 1, 1]


@pytest.mark.parametrize("training", [True, False])
def test_queries_that_are_the_templates_leave_themselves_out(training: bool) -> None:
    x, label = normal(8, 5).requires_grad_(), labels(8)
    knn = SoftKNN(3, 4, tau=0.5).train(training)
    p = knn(x, x, label, mask=~torch.eye(8, dtype=torch.bool))
    for i in range(8):
        others = torch.arange(8) != i
        torch.testing.assert_close(p[i : i + 1], knn(x[i : i + 1], x[others], label[others]))
    if training:
        knn.loss(x, label, x, label, ~torch.eye(8, dtype=torch.bool)).backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_padded_templates() -> None:
    query, template, label = normal(2, 3, 5), normal(2, 7, 5, seed=1), labels(2, 7)
    mask = (torch.arange(7) < torch.tensor([7, 2])[:, None]).unsqueeze(1)
    for knn in (SoftKNN(3, 4), SoftKNN(3, 4).eval()):
        p = knn(query, template, label, mask)
        torch.testing.assert_close(p[0], knn(query[0], template[0], label[0]))
        torch.testing.assert_close(p[1], knn(query[1], template[1, :2], label[1, :2]))


def test_loss_is_the_expected_error() -> None:
    query, template, label, right = normal(6, 5), normal(20, 5, seed=1), labels(20), labels(6, seed=2)
    knn = SoftKNN(3, 4, tau=0.5)
    p = knn(query, template, label)
    want = sum(1 - p[i, right[i]] for i in range(6)) / 6
    torch.testing.assert_close(knn.loss(query, right, template, label), want)


def test_a_learned_tau_has_the_right_gradient_and_stays_positive() -> None:
    query, template, label, right = normal(6, 5), normal(20, 5, seed=1), labels(20), labels(6, seed=2)
    knn = SoftKNN(3, 4, tau=0.5, learnable_tau=True, dtype=torch.float64)
    fixed = SoftKNN(3, 4, tau=0.5)
    torch.testing.assert_close(knn(query, template, label), fixed(query, template, label))
    knn.loss(query, right, template, label).backward()
    (raw,) = knn.parameters()
    assert raw.grad is not None
    tau = {h: SoftKNN(3, 4, tau=0.5 + h).loss(query, right, template, label) for h in (-1e-5, 1e-5)}
    slope = (tau[1e-5] - tau[-1e-5]) / 2e-5  # and the derivative of log(1 + e^raw) is 1 − e^(−τ)
    torch.testing.assert_close(raw.grad, (slope * -math.expm1(-0.5)).reshape(1), rtol=1e-7, atol=0)
    with torch.no_grad():
        raw -= 50
    assert knn(query, template, label).isfinite().all()
    assert not list(fixed.parameters())


def test_refuses() -> None:
    query, template, label = normal(3, 5), normal(4, 5), labels(4)
    with pytest.raises(ValueError, match="candidates must be at least 1, but got 0"):
        SoftKNN(1, 4, candidates=0)
    with pytest.raises(ValueError, match="k must be at most candidates = 2, but got 3"):
        SoftKNN(3, 4, candidates=2)(query, template, label)
    with pytest.raises(ValueError, match="label must have"):
        SoftKNN(1, 4).predict(query, template, label[:3])
    with pytest.raises(ValueError, match="at least one"):
        SoftKNN(1, 4).predict(query, template[:0], label[:0])
    with pytest.raises(ValueError, match="tau must"):
        SoftKNN(1, 4, tau=0.0, learnable_tau=True)
    with pytest.raises(TypeError, match="tau must be a number if it is learned, but got Anneal"):
        SoftKNN(1, 4, tau=Anneal(1.0, 0.1, 3), learnable_tau=True)
    assert SoftKNN(Anneal(5, 1, 3), 4).predict(query, template, label).shape == (3,)
    assert SoftKNN(1, 4)(query[:0], template, label).shape == (0, 4)
    assert math.isnan(SoftKNN(1, 4)(query, template, label, torch.zeros(4, dtype=torch.bool)).sum())


@pytest.mark.parametrize("wrong", [-1, 4, -100])
def test_refuses_labels_of_no_class(wrong: int) -> None:
    query, template, label = normal(3, 5), normal(6, 5), labels(6)
    knn, said = SoftKNN(1, 4), rf"^label must lie in \[0, 3\], but got {wrong}$"
    for i in range(6):  # also where it is no neighbour
        bad = label.index_fill(0, torch.tensor(i), wrong)
        for call in (knn, knn.predict):
            with pytest.raises(ValueError, match=said):
                call(query, template, bad)
    with pytest.raises(ValueError, match="query_" + said[1:]):
        knn.loss(query, torch.tensor([0, wrong, 1]), template, label)


def test_refuses_other_shapes() -> None:
    query, template, label, knn = normal(3, 5), normal(6, 5), labels(6), SoftKNN(1, 4)
    with pytest.raises(ValueError, match=r"^query_label must have the shape \(3,\) .* but got \(2,\)"):
        knn.loss(query, labels(2), template, label)
    with pytest.raises(ValueError, match=r"\(\.\.\., q, d\) and .* but got \(5,\) and \(6, 5\)$"):
        knn(query[0], template, label)
    with pytest.raises(ValueError, match=r"\(q, d\) and \(m, d\), but got \(1, 3, 5\) and \(1, 6, 5\)"):
        knn.predict(query[None], template[None], label[None])
