"""The kernel machine of the selector, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from khot._kernel_machine import DEGREE, FLOOR, START, Data, Examples, _Inverse, draw, orthonormal

N, M, P, SIZE = 90, 40, 7, 3.0
KERNEL = torch.tensor(START, dtype=torch.float64)


def table(classes: int = 0, groups: bool = False) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, P, generator=generator).double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    feature = torch.tensor([0, 1, 1, 2, 1, 3, 2]) if groups else torch.arange(P)
    if classes:
        labels = (torch.arange(N) % 9).clamp(max=classes - 1)
        targets, weights = torch.nn.functional.one_hot(labels).float(), 1 / labels.bincount()[labels]
    else:
        targets, weights = x[:, :2].square(), torch.ones(N)
    return Data(lambda rows: x[rows], orthonormal(x), feature, targets, weights)


def examples(classes: int = 0, groups: bool = False) -> Examples:
    """Two subsets of examples in float64."""
    few = table(classes, groups).subsets(M, 2, torch.Generator().manual_seed(0))
    parts = (few.polynomials, few.targets, few.weights)
    return Examples(*(part.double() for part in parts), few.feature, few.mean.double())


def test_polynomials_are_orthonormal() -> None:
    found = table().polynomials(torch.arange(N))
    products = torch.einsum("npd,npe->pde", found, found) / N
    torch.testing.assert_close(products, torch.eye(DEGREE).double().expand(P, -1, -1))
    torch.testing.assert_close(found.mean(0), torch.zeros(P, DEGREE).double())


def test_two_values_have_one_polynomial() -> None:
    rare = (torch.arange(1000) < 1).double()[:, None]
    x = (rare - rare.mean()) / rare.std()
    coefficients = orthonormal(x)
    assert (coefficients[:, 0] != 0).any() and (coefficients[:, 1:] == 0).all()


def test_a_group_has_the_mean_over_its_columns() -> None:
    alone, together = table().polynomials(torch.arange(N)), table(groups=True).polynomials(torch.arange(N))
    members = torch.tensor([1, 3, 3, 2, 3, 1, 2])
    torch.testing.assert_close(together, alone / members.sqrt()[:, None])


@pytest.mark.parametrize("classes, groups", [(0, False), (2, False), (2, True)])
def test_loss_is_evidence_and_leave_one_out_error(classes: int, groups: bool) -> None:
    """With the errors of machines that were really solved without the example."""
    few = examples(classes, groups)
    gates = torch.rand(4 if groups else P, generator=torch.Generator().manual_seed(2)).double()
    Z, D = few.likeness(gates, SIZE)
    a, b, c, s, noise = KERNEL.exp().numpy()
    for at in range(2):
        z, d, y, w = (part[at].numpy() for part in (Z, D, few.targets, few.weights))
        K = a * z + b * z * z + c * np.exp(-0.5 * s * d) + 1
        K += np.diag(noise / w + FLOOR * K.diagonal().mean())
        errors = []
        for i in range(M):
            rest = np.arange(M) != i
            predicted = K[i, rest] @ np.linalg.solve(K[np.ix_(rest, rest)], y[rest])
            errors.append(w[i] * (y[i] - predicted) ** 2)
        evidence = 0.5 * np.log((y * np.linalg.solve(K, y)).mean()) + 0.5 * np.linalg.slogdet(K)[1] / M
        share = 0.5 * (M / (w**2).sum()) ** 2
        expected = share * evidence + (1 - share) * 0.5 * np.log(np.mean(errors))
        assert few.loss(Z, D, KERNEL)[at].item() == pytest.approx(expected, rel=1e-6)


def test_likeness_is_a_sum_over_features() -> None:
    few = examples()
    gates = torch.rand(P, generator=torch.Generator().manual_seed(5)).double()
    Z, D = few.likeness(gates, SIZE)
    phi = few.polynomials
    expected = torch.einsum("j,sajd,sbjd->sab", gates, phi, phi) / (SIZE * DEGREE)
    torch.testing.assert_close(Z, expected)
    apart = (phi[:, :, None, :, 0] - phi[:, None, :, :, 0]).square()
    torch.testing.assert_close(D, (apart * gates).sum(-1) / SIZE)


@pytest.mark.parametrize("groups", [False, True])
def test_slopes_are_the_gradient_in_the_gates(groups: bool) -> None:
    few = examples(3, groups)
    gates = torch.tensor([1.0, 0, 0, 1, 0, 1, 0][: 4 if groups else P], dtype=torch.float64)
    gates.requires_grad_()
    loss = few.loss(*few.likeness(gates, SIZE), KERNEL).mean()
    (expected,) = torch.autograd.grad(loss, gates)
    found, slopes = few.slopes(*few.likeness(gates.detach(), SIZE), KERNEL, SIZE)
    assert found == pytest.approx(loss.item())
    torch.testing.assert_close(slopes, expected)


@pytest.mark.parametrize("groups", [False, True])
def test_single_features_add_up(groups: bool) -> None:
    few = examples(groups=groups)
    chosen = [1, 2, 3]
    gates = torch.zeros(4 if groups else P).double()
    gates[chosen] = 1.0
    together = few.likeness(gates, SIZE)
    alone = few.likeness_of(chosen, SIZE)
    part = few.of(chosen).likeness(torch.ones(3).double(), SIZE)
    for whole, single, kept in zip(together, alone, part, strict=True):
        torch.testing.assert_close(single.sum(0), whole)
        torch.testing.assert_close(kept, whole)


def test_predictions_are_those_of_the_machine_solved_for_each_subset() -> None:
    few, data = examples(2), table(2)
    others = data.polynomials(torch.arange(20))
    ones = torch.ones(P).double()
    found = few.predicted(others, KERNEL, SIZE)
    expected = []
    for at in range(2):
        both = torch.cat([few.polynomials[at], others])
        joint = Examples(both, few.targets[at], few.weights[at], few.feature, few.mean[at])
        Z, D = joint.likeness(ones, SIZE)
        a, b, c, s, noise = KERNEL.exp()
        K = a * Z + b * Z * Z + c * (-0.5 * s * D).exp() + 1
        inside = K[:M, :M]
        inside = inside + torch.diag(noise / few.weights[at] + FLOOR * inside.diagonal().mean())
        expected.append(K[M:, :M] @ torch.linalg.solve(inside, few.targets[at]) + few.mean[at])
    torch.testing.assert_close(found, torch.stack(expected).mean(0))


def test_gradient_of_the_inverse() -> None:
    root = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    root.requires_grad_()

    def through(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Inverse.apply(A @ A.mT + torch.eye(5, dtype=torch.float64))

    assert torch.autograd.gradcheck(through, root)


def test_draw_takes_each_class_as_often() -> None:
    generator = torch.Generator().manual_seed(4)
    labels = torch.tensor([0] * 950 + [1] * 50)
    rows, weights = draw(1 / labels.bincount()[labels], 200, generator)
    assert len(rows.unique()) == 200 and labels[rows].sum() == 50
    rare = weights[labels[rows] == 1].sum()
    assert rare == pytest.approx(100, rel=1e-3) and weights.mean() == pytest.approx(1.0)
    assert len(draw(torch.ones(30), 200, generator)[0].unique()) == 30


def test_draw_by_weights() -> None:
    """How often each is drawn is in proportion to its weight; a sum over 4,000 draws is off by six standard
    deviations once in 10^9."""
    weights = torch.tensor([1.0, 2, 3, 4, 90, 5, 0.5, 1.5])
    expected = torch.tensor([1.0, 2, 3, 4, 0, 5, 0.5, 1.5]).double() * 2 / 17  # 2 of 3, the heavy one is sure
    expected[4] = 1.0
    generator, often, totals = torch.Generator().manual_seed(6), torch.zeros(8), torch.zeros(8)
    for _ in range(4000):
        rows, left = draw(weights, 3, generator)
        assert len(rows.unique()) == 3
        often[rows] += 1
        totals[rows] += left / left.sum()
    spread = (expected * (1 - expected) / 4000).sqrt()
    assert ((often / 4000 - expected).abs() <= 6 * spread + 1e-9).all()
    assert totals[4] / 4000 == pytest.approx(90 / 107, rel=1e-3)
