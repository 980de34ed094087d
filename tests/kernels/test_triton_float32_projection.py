"""The projection onto the permutahedron of rows in float32, interpreted, against the formula that pools no
blocks and the reference in float64. All tests take rows as short ones, and as long ones of several chunks."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch

import oracles
from khot._kernels.reference import permutahedron as reference
from projection_rows import ROWS, check, f64, randn, ranks, table

INF = math.inf


@pytest.fixture(autouse=True, params=["short", "long"])
def which(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No row here goes another way."""

    def refuse(*_: object) -> None:
        raise AssertionError("these rows have another way")

    monkeypatch.setattr(kernels.projection, "permutahedron", refuse)
    if request.param == "short":
        monkeypatch.setattr(kernels.long_projection, "permutahedron", refuse)
        monkeypatch.setattr(kernels.projection, "permutahedron_backward", refuse)
    else:
        monkeypatch.setattr(kernels.short_projection, "LONGEST", 0)
        monkeypatch.setattr(kernels.long_projection, "CHUNK", 16)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
def test_rows_as_by_the_formula(kernels: ModuleType, n: int) -> None:
    for kind, tau in itertools.product(("normal", "ranks", "top k", "ascending w", "a cascade"), (0.05, 3.0)):
        z, w = (t.float() for t in ROWS[kind](n))
        y = kernels.permutahedron(z, w, f64(tau), "l2")[0]
        want = oracles.permutahedron((z.double() / tau).numpy(), w.numpy())
        np.testing.assert_allclose(y, want, rtol=2e-7, atol=1e-9 * w.abs().max().item())


def test_every_kind_of_row_at_every_tau(kernels: ModuleType) -> None:
    z, w, tau = table(40, (1e-250, 1e-30, 0.1, 30.0, 1e250))
    check(kernels, z.float(), w.float(), tau)


def test_rows_of_hundreds_of_entries(kernels: ModuleType) -> None:
    for kind in ("normal", "a cascade"):
        z, w = (t.float() for t in ROWS[kind](300))
        check(kernels, z, w, f64(0.5))


def test_corners_that_only_the_last_turns_drop(kernels: ModuleType) -> None:
    """One entry of w after another pools with all before: as many steps as entries, if neighbours alone were
    compared."""
    n = 100
    z, w = torch.arange(n, 0, -1.0), torch.cat((torch.arange(n - 1, 0, -1.0) / 2, torch.tensor([-1e3 * n])))
    for tau in (1e-3, 1e-2, 1.0):
        check(kernels, z, w, f64(tau))
    geometric = 3.0 ** torch.arange(40, 0, -1.0)
    check(kernels, geometric, ranks(40).float(), f64(1.0))
    check(kernels, geometric, geometric.flip(0) / 2, f64(1.0))


def test_far_entries_take_no_digits_from_others(kernels: ModuleType) -> None:
    z = torch.tensor([[2e20, 5e13, 0.5, 0.3, 0.1], [3e38, 2e38, 0.2, 0.1, -3e38]])
    check(kernels, z, torch.tensor([1e20, 1e10, 3.0, 2.0, 1.0]), f64(1.0))
    check(kernels, z, torch.tensor([7.0, 3.0, 2.5, 2.0, 1.0]), f64([1e-3, 1e3]))
    # what is pooled behind a segment whose sums have no digits for it
    near, far = [5.0, 4.0, 3.0, 2.9, 2.8, 1.0], [7.0, 4.0, 2.0, 1.5, 1.0, 0.0]
    for big, heavy in ((3e20, 2e20), (INF, 2e20), (INF, INF)):
        check(kernels, torch.tensor([big, 2e20, *near]), torch.tensor([heavy, 0.0, *far]), f64(1.0))


def test_equal_scores_share_and_an_entry_alone_has_its_w(kernels: ModuleType) -> None:
    for big in (1e20, 3e38):
        z = torch.tensor([big, 1.0, big, -big, 0.5, -big])
        w = torch.tensor([7.3, 1.1, 4.4, 3.3, 9.9, 1.1])
        y, _, _, start = kernels.permutahedron(z, w, f64(1e-3), "l2")
        assert y[0] == y[2] and y[3] == y[5] == w[1] and y[1] == w[2] and y[4] == w[3]
        assert start.tolist() == [0, 0, 2, 3, 4, 4]
        check(kernels, z, w, f64(1e-3))


def test_infinite_scores_and_weights(kernels: ModuleType) -> None:
    z = torch.tensor([[0.3, INF, -INF, -0.7, INF, 1.1, -INF], [INF, INF, INF, INF, 0.0, -INF, 2.0]])
    for tau in (0.5, 1e-200, 1e200):
        check(kernels, z, ranks(7).float(), f64(tau))
    w = torch.tensor([[1.0, INF, 0.0, 0.5], [INF, -INF, INF, 2.0], [-INF, 1.0, 0.0, 0.5]])
    check(kernels, ranks(4).float().expand(3, 4), w, f64([1.0, 1e3, 1.0]))


def test_sorted_rows_and_w_of_another_batch_or_dtype(kernels: ModuleType) -> None:
    base, weights = randn(12, 9).float(), randn(12, 9, seed=1).float()
    for z, w, tau in (
        (base[:6].unflatten(0, (2, 3)), weights[:3].unsqueeze(0), f64([[0.5], [2.0]])),
        (base[0], weights[0].sort(descending=True).values, f64(1.0)),
        (base.sort(descending=True).values, weights, f64(0.2)),
        (base.half(), weights[0], f64(0.3)),
    ):
        want = check(kernels, z, w, tau)
        one = torch.ones((), dtype=z.dtype).expand(z.shape)  # what sum() sends back: stride 0
        given = (one, z, w, tau, *want[1:], "l2", True)
        for a, b in zip(
            kernels.permutahedron_backward(*given), reference.permutahedron_backward(*given), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-3 if z.dtype == torch.half else 1e-6, atol=1e-6)


@pytest.fixture
def kl(which: None, request: pytest.FixtureRequest) -> None:
    """ "kl" goes that way in short rows alone."""
    if request.node.callspec.params["which"] == "long":
        pytest.skip("longer rows have another way")


def test_kl_of_every_kind_of_row(kernels: ModuleType, kl: None) -> None:
    """Also where e^u is far from what a number of float64 can be."""
    z, w, tau = table(33, (1e-250, 1e-3, 1.0, 30.0, 1e250))
    check(kernels, z.float(), w.float(), tau, "kl")


def test_kl_of_far_entries_and_infinities(kernels: ModuleType, kl: None) -> None:
    z = torch.tensor([[2e20, 5e13, 0.5, 0.3, 0.1], [3e38, 2e38, 0.2, 0.1, -3e38], [INF, 1.0, INF, -INF, 0.0]])
    for w in (torch.tensor([1e20, 1e10, 3.0, 2.0, 1.0]), torch.tensor([7.0, 3.0, 2.5, 2.0, 1.0])):
        check(kernels, z, w, f64([1.0, 1e-3, 0.5]), "kl")
    w = torch.tensor([[1.0, INF, 0.0, 0.5], [INF, 3.0, INF, 2.0], [-INF, 1.0, 0.0, 0.5]])
    check(kernels, ranks(4).float().expand(3, 4), w, f64([1.0, 1e3, 1.0]), "kl")
