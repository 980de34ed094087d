"""Of equal entries, every layer that chooses hard takes those of lowest index, as khot.topk_mask does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import khot

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def levels(*shape: int, seed: int = 0, kinds: int = 4) -> Tensor:
    """Entries of few different values, so that every row is full of ties."""
    return torch.randint(kinds, shape, generator=torch.Generator().manual_seed(seed)) - 1.0


def by_sorting(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest entries, by Python's stable sort."""
    rows = [sorted(range(x.shape[-1]), key=lambda i: -row[i])[:k] for row in x.flatten(0, -2).tolist()]
    return torch.tensor(rows, dtype=torch.int64).view(*x.shape[:-1], k)


def tied_sae(dtype: torch.dtype, batch: bool, k: float) -> khot.nn.TopKSAE:
    """An autoencoder whose activations are the inputs, each for several latents."""
    sae = khot.nn.TopKSAE(6, 24, k, batch=batch, dtype=dtype).eval()
    with torch.no_grad():
        sae.encoder = torch.eye(6, dtype=dtype).repeat(4, 1)
    return sae


@each_dtype
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("k", [0.3, 1, 5, 7.5, 24])
@pytest.mark.parametrize("shape", [(6,), (9, 6), (2, 5, 6)])
def test_the_sparse_code_is_the_dense_one(
    dtype: torch.dtype, batch: bool, k: float, shape: tuple[int, ...]
) -> None:
    sae, x = tied_sae(dtype, batch, k), levels(*shape).to(dtype)
    code, (values, indices) = sae.encode(x), sae.top(x)
    assert torch.zeros_like(code).scatter(-1, indices, values).equal(code)
    assert (indices.sort(-1).values.diff(dim=-1) > 0).all() and (values.diff(dim=-1) <= 0).all()
    a = sae._activations(x)
    if not batch:
        assert indices.equal(by_sorting(a[None], math.floor(k + 0.5))[0])
        torch.testing.assert_close(sae.decode(code), sae(x))


@pytest.mark.parametrize("batch", [False, True])
def test_a_row_with_a_nan_has_no_code(batch: bool) -> None:
    sae, x = tied_sae(torch.float32, batch, 3), levels(4, 6)
    x[1, 2] = math.nan
    values, indices = sae.top(x)
    for part in (values, sae.decode(values, indices), sae.encode(x)):
        assert part[1].isnan().all()


@pytest.mark.parametrize("end", [None, 2])
def test_beams_of_equal_likelihood(end: int | None) -> None:
    # every token is as likely as every other, at every step
    beams = khot.nn.soft_beam_search(
        lambda x, h: (torch.zeros(*x.shape[:2], 7), h),
        *(torch.eye(7), torch.zeros(7), torch.zeros(50, 7), 3, 4),
        end=end,
        hard=True,
    )
    if end is None:
        assert (beams.tokens == torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]])).all()
    else:  # the ended sequence is the likeliest, because it pays for one token only
        assert (beams.tokens[:, 0] == end).all()
        assert (beams.tokens[:, 1] == torch.tensor([0, end, end])).all()


@pytest.mark.parametrize("k", [1, 6, 20, 130])
def test_neighbours_at_equal_distance(k: int) -> None:
    template = levels(130, 2, kinds=3)  # nine different points; those at (0, 0) are one query
    label = torch.randint(4, (130,), generator=torch.Generator().manual_seed(2))
    query = template[:30]
    knn = khot.nn.SoftKNN(k, 4).eval()
    d = (query[:, None] - template).square().sum(-1)
    votes = torch.nn.functional.one_hot(label[by_sorting(-d, k)], 4).sum(-2)
    torch.testing.assert_close(knn(query, template, label), votes / k)
    # centred on a point of the grid, where distances that are equal are computed equal
    template = torch.cat([template, -template])
    got = knn.predict(query, template, torch.cat([label, label]))
    d = torch.cdist(query, template)
    assert got.equal(torch.nn.functional.one_hot(label.repeat(2)[by_sorting(-d, k)], 4).sum(-2).argmax(-1))
