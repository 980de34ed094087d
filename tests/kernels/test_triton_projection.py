"""The projection onto the permutahedron of the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from projection_rows import ROUNDED, ROWS, check, f64, ranks, table

INF = math.inf
every_regularization = pytest.mark.parametrize("regularization", ["l2", "kl"])


@every_regularization
def test_rows_as_the_reference(kernels: ModuleType, regularization: str) -> None:
    for n in (1, 2, 5):
        check(kernels, *(t[::3] for t in table(n, (0.7,))), regularization)
    z, w, tau = table(33, (0.1, 10.0))
    same = torch.tensor([kind not in ROUNDED for kind in ROWS]).repeat_interleave(2)
    check(kernels, z, w, tau, regularization, same)


@every_regularization
def test_rows_of_several_chunks_and_parts(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, regularization: str
) -> None:
    monkeypatch.setattr(kernels.projection, "WIDTH", 64)
    z, w = (
        torch.stack(values)
        for values in zip(*(ROWS[kind](70) for kind in ("normal", "a cascade")), strict=True)
    )
    tau = f64([2.0, 1.0])
    want = check(kernels, z, w, tau, regularization)
    monkeypatch.setattr(kernels.layout, "CHUNK", 16)
    monkeypatch.setattr(kernels.layout, "PROGRAMS", 10)
    assert kernels.projection._parts(2, 70) == (5, 16)
    for a, b in zip(check(kernels, z, w, tau, regularization), want, strict=True):
        assert torch.equal(a, b)  # the halves are the same ones, whoever joins them
    # one block of all parts, which none of them starts but the first
    check(kernels, z[:1], w[:1], f64(1e3), regularization)


@every_regularization
def test_equal_scores_share_and_an_entry_alone_has_its_w(kernels: ModuleType, regularization: str) -> None:
    for big in (1e20, 1e308):
        z = f64([big, 1.0, big, -big, 0.5, -big])
        y, _, _, start = kernels.permutahedron(
            z, f64([7.3, 1.1, 4.4, 3.3, 9.9, 1.1]), f64(1e-3), regularization
        )
        assert y[0] == y[2] and y[3] == y[5] == 1.1 and y[1] == 4.4 and y[4] == 3.3
        assert start.tolist() == [0, 0, 2, 3, 4, 4]


@every_regularization
def test_infinite_scores_and_weights(kernels: ModuleType, regularization: str) -> None:
    z = f64([[0.3, INF, -INF, -0.7, INF, 1.1, -INF], [INF, INF, INF, INF, 0.0, -INF, 2.0]])
    check(kernels, z, ranks(7), f64(0.5), regularization)
    w = f64([[1.0, INF, 0.0, 0.5], [INF, -INF, INF, 2.0], [-INF, 1.0, 0.0, 0.5]])
    if regularization == "l2":
        check(kernels, ranks(4).expand(3, 4), w, f64([1.0, 1e3, 1.0]), regularization)
    else:  # where an entry of e^w is 0, a block has the sum of the others
        y = kernels.permutahedron(ranks(4).expand(3, 4), w, f64([1.0, 1e3, 1.0]), regularization)[0]
        assert (y[:2] == INF).all() and y[2, :2].tolist() == [1.0, 0.5]
        torch.testing.assert_close(y[2, 2:].exp(), f64([1.0, 0.0]).softmax(-1), rtol=1e-14, atol=0)
