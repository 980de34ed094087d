"""What people run today: that each computes what it is compared with, and has the faults it is known for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import khot
from drawn import normal as scores
from reproduce.tasks import peers
from reproduce.tasks.peers import PEERS, Peer


def value_and_gradient(call: peers.TopK, x: Tensor, k: int, tau: float) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = call(leaf, k, tau)
    return y.detach(), torch.autograd.grad(y, leaf, scores(*x.shape, seed=1))[0]


def here(name: str) -> Peer:
    peer = PEERS[name]
    if reason := peers.missing(peer):
        pytest.skip(f"{name}: {reason}")
    return peer


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.equals])
def test_agrees_with_the_operator_it_is_compared_with(name: str) -> None:
    peer = here(name)
    assert peer.equals
    x = scores(4, 8) * torch.linspace(0.3, 3, 4).double()[:, None]
    for k, tau in ((1, 0.8), (3, 0.8), (7, 0.5)):
        got, want = value_and_gradient(peer.call, x, k, tau), value_and_gradient(peer.equals, x, k, tau)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.equals])
def test_sums_to_k_if_it_has_no_counterpart(name: str) -> None:
    peer = here(name)
    y, grad = value_and_gradient(peer.call, scores(4, 8), 3, 0.8)
    total = 36.0 if peer.ranks else 3.0
    torch.testing.assert_close(y.sum(-1), torch.full((4,), total).double(), rtol=1e-5, atol=0)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", PEERS)
def test_keeps_the_dtype(name: str) -> None:
    y = here(name).call(scores(4, 8).float(), 3, 0.8)
    assert (y.dtype, y.shape) == (torch.float32, (4, 8))


def test_missing_says_why() -> None:
    call = PEERS["pav"].call
    assert peers.missing(Peer(call, "")) is None
    assert peers.missing(Peer(call, "", needs="math:sqrt")) is None
    assert peers.missing(Peer(call, "", needs="no_such_module:LML")) == "not installed"
    # the registry's lml is another package of that name
    assert (
        peers.missing(Peer(call, "", needs="math:LML")) == "not installed: the math that is here has no LML"
    )


def test_bracket_of_the_bisection_misses_small_k() -> None:
    n, k = 6_290_000, 64
    x = torch.zeros(n)
    assert peers.bisection_topk(x, k, 1.0).sum().item() == pytest.approx(285.6, abs=0.1)
    assert khot.sigmoid_topk(x, k).sum().item() == pytest.approx(k, abs=1e-3)


def test_bisection_in_half_precision_is_off() -> None:
    x, k = scores(10_000).bfloat16() + 5, 100
    y = peers.bisection_topk(x, k, 0.1)
    assert abs(y.double().sum().item() / k - 1) > 0.02
    assert khot.sigmoid_topk(x, k, tau=0.1).double().sum().item() == pytest.approx(k, rel=2e-3)
