"""khot.sampling along any dim: the same numbers as along the last one, moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import khot
from khot.sampling import conditional_poisson, designs

LOGITS = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PROBS = khot.sigmoid_topk(LOGITS, 2, 1)
K = torch.tensor([[1, 2, 3], [4, 2, 1]])  # for the units along dim 1
SHAPE = (4, 6)


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# each with the number of dims that follow the batch
CASES: dict[str, tuple[Callable[..., Tensor], Tensor, int]] = {
    **{
        f"sample-{name}": (
            lambda x, dim, name=name: khot.sampling.sample(x, name, dim, generator=seed()),
            PROBS,
            1,
        )
        for name in designs
    },
    "sample-shape": (
        lambda x, dim: khot.sampling.sample(x, dim=dim, sample_shape=SHAPE, generator=seed()),
        PROBS,
        1,
    ),
    "inclusion": (lambda x, dim: khot.sampling.inclusion_probs(x, "pareto", dim), PROBS, 1),
    "inclusion-exact": (lambda x, dim: khot.sampling.inclusion_probs(x, "sampford", dim), PROBS, 1),
    "joint": (lambda x, dim: khot.sampling.joint_inclusion_probs(x, "sampford", dim), PROBS, 2),
    "gumbel": (
        lambda x, dim: khot.sampling.gumbel_topk(x, K, dim, sample_shape=SHAPE, generator=seed()),
        LOGITS,
        1,
    ),
    "log_normalizer": (lambda x, dim: conditional_poisson.log_normalizer(x, K, dim), LOGITS, 0),
    "marginals": (lambda x, dim: conditional_poisson.marginals(x, K, dim), LOGITS, 1),
    "joint_marginals": (lambda x, dim: conditional_poisson.joint_marginals(x, K, dim), LOGITS, 2),
    "entropy": (lambda x, dim: conditional_poisson.entropy(x, K, dim), LOGITS, 0),
    "kl": (lambda x, dim: conditional_poisson.kl(x, 2 * x, K, dim), LOGITS, 0),
    "calibrate": (lambda x, dim: conditional_poisson.calibrate(x, dim), PROBS, 1),
    "draws": (
        lambda x, dim: conditional_poisson.sample(x, K, dim, sample_shape=SHAPE, generator=seed()),
        LOGITS,
        1,
    ),
}


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("name", CASES)
def test_any_dim(name: str, dim: int) -> None:
    function, x, last = CASES[name]
    want = function(x.movedim(1, -1), -1)
    if last:
        # move the dim that follows the units behind them again
        want = want.movedim(-last - 1, -1)
    got = function(x, dim)
    assert got.shape == want.shape
    assert torch.equal(got, want)


@pytest.mark.parametrize("dim", [1, -2])
def test_log_prob_of_draws_along_any_dim(dim: int) -> None:
    x = conditional_poisson.sample(LOGITS, K, dim, sample_shape=SHAPE, generator=seed())
    want = conditional_poisson.log_prob(x.movedim(-2, -1), LOGITS.movedim(1, -1), K)
    got = conditional_poisson.log_prob(x, LOGITS, K, dim)
    assert got.shape == (*SHAPE, 2, 3)
    assert torch.equal(got, want)


def test_size_penalty_along_any_dim() -> None:
    weight = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64)
    want = (weight * PROBS.sum(1)).mean()
    torch.testing.assert_close(khot.losses.size_penalty(PROBS, weight, 1), want)


DRAWS: dict[str, Callable[..., Tensor]] = {
    **{
        name: lambda shape, name=name: khot.sampling.sample(PROBS, name, 1, sample_shape=shape)
        for name in designs
    },
    "gumbel": lambda shape: khot.sampling.gumbel_topk(LOGITS, 2, 1, sample_shape=shape),
    "draws": lambda shape: conditional_poisson.sample(LOGITS, 2, 1, sample_shape=shape),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@each_draw
@pytest.mark.parametrize(
    ("shape", "error", "said"),
    [
        (3, TypeError, "sample_shape must be a sequence of ints, .* but got int"),
        (0, TypeError, "sample_shape must be a sequence of ints, .* but got int"),
        (torch.tensor([2, 3]), TypeError, "sample_shape must be a sequence of ints, .* but got Tensor"),
        ((2.0,), TypeError, "each size in sample_shape must be an int, but got float"),
        ((2, -1), ValueError, "each size in sample_shape must be at least 0, but got -1"),
    ],
    ids=str,
)
def test_a_bad_sample_shape_is_named(
    draw: Callable[..., Tensor], shape: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}$"):
        draw(shape)


@each_draw
@pytest.mark.parametrize("shape", [(), [], torch.Size(), (0,), [2, 0], (3, 2)], ids=str)
def test_a_sample_shape_comes_in_front(draw: Callable[..., Tensor], shape: Sequence[int]) -> None:
    assert draw(shape).shape == (*shape, 2, 5, 3)
