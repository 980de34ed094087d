"""The kernel machine of the selector, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from khot._kernel_gates import DEGREE, FLOOR, START, Data, _Examples, _Inverse, draw

N, M, P, SIZE = 90, 40, 7, 3.0
KERNEL = torch.tensor(START, dtype=torch.float64)


def examples(classes: int = 0) -> _Examples:
    """Two subsets of examples in float64."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, P, generator=generator)
    if classes:
        labels = (torch.arange(N) % 9).clamp(max=classes - 1)
        data = Data(features, torch.nn.functional.one_hot(labels).float(), labels)
    else:
        data = Data(features, features[:, :2].square(), None)
    drawn = [data.subset(M, generator) for _ in range(2)]
    parts = zip(*((e.polynomials, e.targets, e.weights) for e in drawn), strict=True)
    return _Examples(*(torch.stack(part).double() for part in parts))


def test_polynomials_are_orthonormal() -> None:
    data = Data(
        torch.randn(N, P, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(N, 1), None
    )
    products = torch.einsum("npd,npe->pde", data.polynomials, data.polynomials) / N
    torch.testing.assert_close(products, torch.eye(DEGREE).double().expand(P, -1, -1))


def test_two_values_have_one_polynomial() -> None:
    rare = (torch.arange(1000) < 1).float()[:, None]
    found = Data((rare - rare.mean()) / rare.std(), rare, None).polynomials
    assert found[..., 0].square().mean() == pytest.approx(1.0, rel=1e-3)
    assert (found[..., 1:] == 0).all()


@pytest.mark.parametrize("classes", [0, 2])
def test_loss_is_evidence_and_leave_one_out_error(classes: int) -> None:
    """With the errors of machines that were really solved without the example."""
    few = examples(classes)
    Z, D = few.likeness(torch.rand(P, generator=torch.Generator().manual_seed(2)).double(), SIZE)
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
        assert few.loss(Z, D, KERNEL)[at].item() == pytest.approx(expected, rel=1e-9)


def test_slopes_are_the_gradient_in_the_gates() -> None:
    few = examples(3)
    gates = torch.tensor([1.0, 0, 0, 1, 0, 1, 0], dtype=torch.float64, requires_grad=True)
    loss = few.loss(*few.likeness(gates, SIZE), KERNEL).mean()
    (expected,) = torch.autograd.grad(loss, gates)
    found, slopes = few.slopes(*few.likeness(gates.detach(), SIZE), KERNEL, SIZE)
    assert found == pytest.approx(loss.item())
    torch.testing.assert_close(slopes, expected)


def test_single_features_add_up() -> None:
    few = examples()
    gates = torch.tensor([0.0, 1, 0, 0, 1, 1, 0], dtype=torch.float64)
    for together, alone in zip(few.likeness(gates, SIZE), few.likeness_of([1, 4, 5], SIZE), strict=True):
        torch.testing.assert_close(alone.sum(0), together)


def test_gradient_of_the_inverse() -> None:
    root = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    root.requires_grad_()

    def through(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Inverse.apply(A @ A.mT + torch.eye(5, dtype=torch.float64))

    assert torch.autograd.gradcheck(through, root)


def test_draw_takes_each_class_as_often() -> None:
    generator = torch.Generator().manual_seed(4)
    labels = torch.tensor([0] * 950 + [1] * 50)
    found = draw(labels, 1000, 200, generator)
    assert len(found.unique()) == 200 and 40 <= labels[found].sum() <= 50
    assert len(draw(None, 30, 200, generator).unique()) == 30
