"""PlackettLuce against softmax after softmax.

Statistical tests fix their seed; each would fail for 1 seed in 10⁶ if the claim is true.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from torch.distributions import Independent

from khot.distributions import PlackettLuce

INF = math.inf


def logits(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()).to(dtype)


def by_softmax(x: Tensor, value: list[int]) -> Tensor:
    """The probabilities of the draws, one after the other."""
    left, total = list(range(len(x))), x.new_zeros(())
    for i in value:
        total = total + x[i] - x[left].logsumexp(0)
        left.remove(i)
    return total


@pytest.mark.parametrize("n, k", [(1, 1), (4, 0), (4, 1), (4, 2), (5, 5), (6, 3)])
def test_against_enumeration(n: int, k: int) -> None:
    x = logits(2, n).requires_grad_()
    p = PlackettLuce(k, x)
    every = p.enumerate_support()
    assert every.shape == (math.perm(n, k), 2, k) and p.support.check(every).all()
    log_prob = p.log_prob(every)
    torch.testing.assert_close(log_prob.exp().sum(0), torch.ones(2).double())
    want = torch.stack([by_softmax(x[1], value) for value in every[:, 1].tolist()])
    torch.testing.assert_close(log_prob[:, 1], want)
    if k:
        found = log_prob[:, 1]
        grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True) for y in (found, want)]
        torch.testing.assert_close(*grads)
        assert torch.equal(p.mode, every[log_prob.argmax(0), torch.arange(2)])
        first = torch.stack([log_prob.exp()[every[..., 0][:, 0] == i].sum(0) for i in range(n)], -1)
        torch.testing.assert_close(p.probs, first)


def test_draws_have_the_probabilities_of_log_prob() -> None:
    torch.manual_seed(0)
    p, many = PlackettLuce(3, logits(5) / 2), 50_000
    every, draws = p.enumerate_support(), p.sample((many,))
    found = (draws.unsqueeze(1) == every).all(-1).sum(0)
    expected = many * p.log_prob(every).exp()
    assert found.sum() == many
    statistic = ((found - expected).square() / expected).sum()
    assert statistic < chi2.isf(1e-6, len(every) - 1)


def test_digits_of_far_logits() -> None:
    """What is left is a tiny part of what was there at first, also where float32 has no such number."""
    x = torch.tensor([0.0, -200.0, -201.0, -202.0, -INF]).requires_grad_()
    p = PlackettLuce(2, x)
    log_prob = p.log_prob(torch.tensor([0, 1]))
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.0, -1.0, -2.0]).softmax(0)[0])
    (grad,) = torch.autograd.grad(log_prob, x)
    torch.testing.assert_close(grad[1:4], torch.tensor([1.0, 0, 0]) - torch.tensor([0.0, -1, -2]).softmax(0))
    assert not (p.sample((1000,)) == 4).any()


def test_what_cannot_be_drawn() -> None:
    x = torch.tensor([0.0, -INF, 90.0, 1.0]).requires_grad_()
    log_prob = PlackettLuce(2, x).log_prob(torch.tensor([[1, 0], [0, 1]]))
    unchecked = PlackettLuce(2, x, validate_args=False).log_prob(torch.tensor([2, 2]))
    total = torch.cat((log_prob, unchecked[None]))
    assert (total == -INF).all()
    (grad,) = torch.autograd.grad(total.masked_fill(total == -INF, 0).sum(), x)
    assert torch.equal(grad, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_torch_expects(dtype: torch.dtype) -> None:
    x = logits(3, 2, 7, dtype=dtype)
    p = PlackettLuce(4, x, validate_args=True)
    for q in (p, p.expand((5, 3, 2)), p.expand((5, 3, 2)).expand((6, 5, 3, 2)), copy.deepcopy(p)):
        value = q.sample((8,))
        assert value.shape == (8, *q.batch_shape, 4) and value.dtype == torch.int64
        log_prob = q.log_prob(value)
        assert log_prob.shape == (8, *q.batch_shape) and log_prob.dtype == dtype
        want = PlackettLuce(4, x.double()).log_prob(value)
        torch.testing.assert_close(log_prob.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        assert Independent(q, len(q.batch_shape)).log_prob(value).shape == (8,)
    assert p.log_prob(torch.tensor([3, 1, 0, 2])).shape == (3, 2)
    assert repr(p) == "PlackettLuce(logits: torch.Size([3, 2, 7]), k: 4)"


def test_transforms() -> None:
    x, value = logits(3, 5), PlackettLuce(3, logits(3, 5)).sample()

    def log_prob(x: Tensor, value: Tensor) -> Tensor:
        return PlackettLuce(3, x, validate_args=False).log_prob(value)

    assert torch.autograd.gradgradcheck(log_prob, (x.requires_grad_(), value))
    want = torch.autograd.grad(log_prob(x, value).sum(), x)[0]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(log_prob))(x.detach(), value), want)
    compiled = torch.compile(log_prob, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, value).sum(), x)[0], want)


@pytest.mark.parametrize(
    "k, x, message",
    [
        (5, torch.zeros(4), r"k must lie in \[0, 4\], but got 5"),
        (0, torch.tensor(0.5), "logits must have at least one dim"),
        (2, torch.tensor([0.0, -INF, -INF]), "k must lie in .* -inf.* 2 for a row with 1"),
        (2, torch.tensor([0.0, math.nan, 1.0]), "logits"),
    ],
)
def test_bad_parameters(k: Any, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlackettLuce(k, x, validate_args=True)


@pytest.mark.parametrize("value", [[0, 0], [0, 4], [-1, 0], [0, 1, 2]])
def test_values_outside_the_support(value: list[int]) -> None:
    with pytest.raises(ValueError, match=r"support|event"):
        PlackettLuce(2, torch.zeros(4), validate_args=True).log_prob(torch.tensor(value))
