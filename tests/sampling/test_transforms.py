"""Draws under torch.func.vmap and in torch.compile(fullgraph=True)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.subsets import assert_inclusion
from torch import Tensor

import khot
from khot import sampling
from khot.distributions import KHot
from khot.sampling import conditional_poisson as cp
from khot.sampling import gumbel_topk

Draw = Callable[[Tensor], Tensor]

FIXED = [name for name, d in sampling.designs.items() if d.fixed_size]
CLOSE = [name for name in FIXED if sampling.designs[name].close]
DRAWS: dict[str, Draw] = {
    **{
        f"sample {name}": lambda x, name=name: sampling.sample(khot.sigmoid_topk(x, 3), name)
        for name in FIXED
    },
    **{f"sample_khot {name}": lambda x, name=name: khot.sample_khot(x, 3, design=name) for name in FIXED},
    **{
        f"KHot {name}": lambda x, name=name: KHot(3, logits=x, design=name, validate_args=False).sample()
        for name in CLOSE
    },
    "exact": lambda x: sampling.sample(khot.sigmoid_topk(x, 3), adjust="exact"),
    "conditional_poisson.sample": lambda x: cp.sample(x, 3),
    "gumbel_topk": lambda x: gumbel_topk(x, 3),
    **{name: lambda x, name=name: khot.sample_khot(x, 3, estimator=name) for name in ("gumbel", "imle")},
    "simple": lambda x: khot.sample_khot(x, 3, estimator="simple"),
}


def rows(count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("name", DRAWS)
def test_vmap(name: str) -> None:
    torch.manual_seed(0)
    draw, x = DRAWS[name], rows()
    different = torch.func.vmap(draw, randomness="different")(x)
    assert different.shape == x.shape and (different.sum(-1) == 3).all()
    # 16 copies of a row: all the same, or not
    many = x[:1].expand(16, -1)
    assert len(torch.func.vmap(draw, randomness="same")(many).unique(dim=0)) == 1
    assert len(torch.func.vmap(draw, randomness="different")(many).unique(dim=0)) > 1
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(draw)(x)
    # a draw that does not depend on the mapped tensor
    fresh = torch.func.vmap(lambda _: draw(x[0]), randomness="different")(torch.arange(16))
    assert fresh.shape == (16, 7) and len(fresh.unique(dim=0)) > 1


@pytest.mark.parametrize("design", [*CLOSE, "poisson"])
def test_vmap_draws_with_the_prescribed_marginals(design: str) -> None:
    torch.manual_seed(1)
    probs = khot.sigmoid_topk(rows(1, torch.float64)[0], 3)
    one = torch.func.vmap(lambda p: sampling.sample(p, design), randomness="different")
    assert_inclusion(one(probs.expand(300, -1)).sum(0), 300, sampling.inclusion_probs(probs, design))


WAYS = ("sample", "sample_khot", "KHot")
#: Each design by one of the three, which all take it from the table of designs.
TRACED = [
    *(f"{WAYS[i % (2 + (name in CLOSE))]} {name}" for i, name in enumerate(FIXED)),
    *(name for name in DRAWS if " " not in name),
]


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_draws_as_eager_mode_does(name: str) -> None:
    draw, x = DRAWS[name], rows()
    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        want = draw(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(compiled(x), want, rtol=0, atol=1e-6)


def test_a_compiled_gradient() -> None:
    x = rows().requires_grad_()
    weight = torch.arange(7.0)
    torch._dynamo.reset()

    def loss(x: Tensor) -> Tensor:
        return (khot.sample_khot(x, 3) * weight).sum()

    torch.manual_seed(0)
    (want,) = torch.autograd.grad(loss(x), x)
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, want)


def test_two_draws_in_one_trace_differ() -> None:
    torch._dynamo.reset()
    x = torch.zeros(3, 200)
    two = torch.compile(
        lambda x: (sampling.sample(x + 0.5), sampling.sample(x + 0.5)), fullgraph=True, backend="aot_eager"
    )(x)
    assert not torch.equal(*two)


def test_a_generator_in_a_trace_is_refused_as_torch_refuses_it() -> None:
    torch._dynamo.reset()
    x = torch.full((8,), 0.5)
    for draw in (
        lambda x, g: torch.rand(8, generator=g) + x,
        lambda x, g: sampling.sample(x, generator=g),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)generator"):
            torch.compile(draw, fullgraph=True, backend="aot_eager")(x, torch.Generator())
