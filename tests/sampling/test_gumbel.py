"""Gumbel top-k against successive draws without replacement, which have the same distribution."""

from __future__ import annotations

import math

import pytest
import torch

from khot.sampling import gumbel_topk
from subsets import assert_frequencies, subsets, successive_law


@pytest.mark.parametrize("n, k, scale", [(2, 1, 1.0), (3, 2, 2.0), (4, 2, 1.0), (5, 3, 1.5), (5, 4, 0.0)])
def test_sets(n: int, k: int, scale: float) -> None:
    logits = scale * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    x = gumbel_topk(logits, k, sample_shape=(200_000,), generator=torch.Generator().manual_seed(k))
    assert (x.sum(-1) == k).all()
    seen = (x.unsqueeze(-2) == subsets(n, k)).all(-1).sum(0)
    assert_frequencies(seen.numpy(), successive_law(logits, k).numpy())


def test_shapes_and_sizes() -> None:
    logits = torch.randn(3, 4, 6, dtype=torch.float32)
    k = torch.tensor([[0], [3], [6]])
    x = gumbel_topk(logits, k, sample_shape=(2, 5))
    assert x.shape == (2, 5, 3, 4, 6) and x.dtype == torch.float32
    assert (x.sum(-1) == k).all()
    assert gumbel_topk(logits[:0], 2, sample_shape=(7,)).shape == (7, 0, 4, 6)
    assert gumbel_topk(torch.tensor(0.5), 1, sample_shape=(2,)).tolist() == [1, 1]
    assert gumbel_topk(logits.requires_grad_(), 2).requires_grad is False


def test_infinite_and_nan() -> None:
    logits = torch.tensor([[0.0, -math.inf, math.inf, 1.0], [0.0, math.nan, 1.0, 2.0]])
    x = gumbel_topk(logits, 2, sample_shape=(50,))
    assert (x[:, 0, 1] == 0).all() and (x[:, 0, 2] == 1).all()
    assert x[:, 1].isnan().all()
