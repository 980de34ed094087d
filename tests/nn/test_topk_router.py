"""TopKRouter: what the routers of large models do with the same weights, capacity, masks, a mixture."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from drawn import floats
from khot.nn import QuantileBalancer, TopKRouter

E, K, D = 8, 2, 6


def with_weight(router: TopKRouter, weight: Tensor) -> TopKRouter:
    router.load_state_dict({"weight": weight}, strict=False)
    return router


# ------------------------------------------------------------------------------- as in large models


def of_transformers(name: str, model: str, normalize: bool) -> tuple[nn.Module, TopKRouter]:
    import importlib

    package = f"transformers.models.{model}"
    configuration = importlib.import_module(f"{package}.configuration_{model}")
    modeling = importlib.import_module(f"{package}.modeling_{model}")
    sizes: dict[str, Any] = {"hidden_size": D, "num_experts_per_tok": K}
    if model == "mixtral":
        config = configuration.MixtralConfig(num_local_experts=E, **sizes)
    else:
        config = getattr(configuration, name.replace("TopKRouter", "Config"))(
            num_experts=E, norm_topk_prob=normalize, **sizes
        )
    return getattr(modeling, name)(config), TopKRouter(D, E, K, normalize=normalize)


@pytest.mark.parametrize(
    "name,model,normalize",
    [
        ("MixtralTopKRouter", "mixtral", True),
        ("Qwen2MoeTopKRouter", "qwen2_moe", False),
        ("Qwen3MoeTopKRouter", "qwen3_moe", True),
        ("OlmoeTopKRouter", "olmoe", False),
    ],
)
def test_routes_as_models_with_a_softmax(name: str, model: str, normalize: bool) -> None:
    theirs, ours = of_transformers(name, model, normalize)
    theirs.weight.data = floats(E, D)  # type: ignore[union-attr]
    with_weight(ours, floats(E, D))
    x = floats(3, 7, D, seed=1)
    logits, weights, indices = theirs(x)
    got = ours(x)
    assert torch.equal(got.indices.flatten(0, 1), indices)
    torch.testing.assert_close(got.topk_weights.flatten(0, 1), weights)
    torch.testing.assert_close(got.logits.flatten(0, 1), logits)
    weights[:, 0].square().sum().backward()
    got.topk_weights[..., 0].square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("normalize", [True, False])
def test_routes_as_deepseek(normalize: bool) -> None:
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    options: dict[str, Any] = {
        "hidden_size": D, "num_experts_per_tok": K, "num_local_experts": E, "n_routed_experts": E,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": normalize,
    }  # fmt: skip
    theirs = modeling_deepseek_v3.DeepseekV3TopkRouter(configuration_deepseek_v3.DeepseekV3Config(**options))
    theirs.weight.data = floats(E, D)
    theirs.e_score_correction_bias.copy_(floats(E, seed=2) / 4)
    balancer = QuantileBalancer(E, K, groups=4, top_groups=2)
    ours = TopKRouter(
        D, E, K, scores="sigmoid", normalize=normalize, scale=2.5, groups=4, top_groups=2, balancer=balancer
    )
    with_weight(ours, floats(E, D))
    balancer.bias.copy_(theirs.e_score_correction_bias)
    x = floats(40, D, seed=1)
    _, weights, indices = theirs(x)
    got = ours(x)
    order, their_order = got.indices.argsort(-1), indices.argsort(-1)  # theirs are in no order
    assert torch.equal(got.indices.gather(-1, order), indices.gather(-1, their_order))
    torch.testing.assert_close(got.topk_weights.gather(-1, order), weights.gather(-1, their_order))
    ours.balancer = None
    theirs.e_score_correction_bias.zero_()
    assert torch.equal(ours(x).indices.sort(-1).values, theirs(x)[2].sort(-1).values)


# ------------------------------------------------------------------------------------ what is its own


def test_is_the_same_in_both_modes_and_learns_in_both() -> None:
    router, x = TopKRouter(D, E, K), floats(5, 9, D)
    train, evaluated = router(x), router.eval()(x)
    assert all(map(torch.equal, train, evaluated))
    train.topk_weights.square().sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_in_float32(dtype: torch.dtype) -> None:
    router, x = TopKRouter(D, E, K, dtype=dtype), floats(5, 9, D).to(dtype)
    got, want = router(x), router.float()(x.float())
    assert got.topk_weights.dtype == dtype and got.logits.dtype == torch.float32
    assert torch.equal(got.indices, want.indices) and torch.equal(got.logits, want.logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x.float()).logits, want.logits)


def dropped_by_hand(indices: Tensor, most: float) -> Tensor:
    seen = [0] * E
    kept = []
    for row in indices.flatten(0, -2).tolist():
        kept.append([])
        for expert in row:
            kept[-1].append(expert < E and seen[expert] < most)
            if expert < E:
                seen[expert] += 1
    return torch.tensor(kept).view_as(indices)


@pytest.mark.parametrize("capacity", [0, 0.3, 1, 1.25, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_capacity_drops_what_comes_last(capacity: float, masked: bool) -> None:
    x = floats(3, 20, D)
    mask = floats(3, 20, seed=5) > -0.5 if masked else None
    free, router = TopKRouter(D, E, K), TopKRouter(D, E, K, capacity=capacity)
    with_weight(free, floats(E, D, seed=3))
    with_weight(router, floats(E, D, seed=3))
    whole, got = free(x, mask), router(x, mask)
    tokens = 60 if mask is None else int(mask.sum())
    kept = dropped_by_hand(whole.indices, math.ceil(capacity * K / E * tokens))
    assert torch.equal(got.indices, whole.indices.masked_fill(~kept, E))
    assert torch.equal(got.topk_weights, whole.topk_weights * kept)
    torch.testing.assert_close(got.dropped, 1 - kept.sum() / (K * tokens))
    torch.testing.assert_close(got.load, got.indices.flatten().bincount(minlength=E + 1)[:E] / tokens)
    assert whole.dropped == 0 and (capacity < 100) == bool(got.dropped > 0)


def test_a_capacity_without_limit_drops_nothing() -> None:
    x, none = floats(20, D), torch.zeros(20, dtype=torch.bool)
    free, router = TopKRouter(D, E, K), TopKRouter(D, E, K, capacity=math.inf)
    with_weight(router, free.weight)
    for options in ({}, {"mask": none}, {"k": torch.tensor(1)}, {"k": torch.tensor(0)}):
        for a, b in zip(router(x, **options), free(x, **options), strict=True):
            torch.testing.assert_close(a, b)


def test_an_even_share_is_no_expert_too_many() -> None:
    """Sizes of which the float32 share is rounded up."""
    for tokens, experts, k in ((25, 5, 3), (15 * 17, 60, 4), (1001, 7, 3)):
        router = TopKRouter(1, experts, k, capacity=1.0)
        got = router(torch.ones(tokens, 1)).indices.flatten().bincount(minlength=experts + 1)
        assert got[:experts].max() == -(-tokens * k // experts)
    empty = TopKRouter(1, 4, 2, capacity=1.0)(torch.ones(0, 1))
    assert empty.dropped == 0 and empty.indices.shape == (0, 2)


def test_a_router_keeps_the_biases_of_its_balancer() -> None:
    balancer = QuantileBalancer(E, K)
    balancer.bias.copy_(torch.linspace(-1, 0, E))
    TopKRouter(D, E, K, balancer=balancer)
    assert balancer.bias[0] == -1


def test_padding_goes_to_no_expert() -> None:
    x, mask = floats(2, 6, D), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    router = TopKRouter(D, E, K, balancer=QuantileBalancer(E, K))
    bad = x.masked_fill(~mask.unsqueeze(-1), math.nan)
    got = router(bad, mask)
    short = router(torch.cat([x[0, :4], x[1]]))
    assert bool((got.indices[~mask] == E).all()) and not got.topk_weights[~mask].any()
    assert torch.equal(got.indices[mask], short.indices)
    for name in ("load", "entropy", "z_loss"):
        torch.testing.assert_close(getattr(got, name), getattr(short, name))
    assert router.balancer is not None and router.balancer.counts.sum() == 2 * 10 * E
    torch.testing.assert_close(
        short.z_loss, torch.stack([row.exp().sum().log() ** 2 for row in short.logits]).mean()
    )
    nothing = router(x, torch.zeros_like(mask))
    assert bool((nothing.indices == E).all()) and nothing.load.sum() == 0 and nothing.z_loss == 0


@pytest.mark.parametrize("balanced", [True, False])
def test_indices_are_the_callers_own(balanced: bool) -> None:
    router = TopKRouter(D, E, K, balancer=QuantileBalancer(E, K) if balanced else None)
    routing = router(floats(3, 7, D))
    assert routing.indices.is_contiguous()
    routing.indices.add_(1)  # autograd needs what it was
    routing.topk_weights[..., 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_tokens_with_a_k_of_their_own(capacity: float | None, scores: Any) -> None:
    """Each of them as by a router of this k."""
    x, k = floats(2, 40, 8), torch.arange(80).view(2, 40) % 4
    mask = torch.arange(40) % 9 != 4
    router = TopKRouter(8, E, 3, scores=scores, capacity=capacity, scale=1.5)
    free = with_weight(TopKRouter(8, E, 3, scores=scores), router.weight)
    routing = router(x, mask, k=k)
    wanted = (torch.arange(3) < k.unsqueeze(-1)) & mask.unsqueeze(-1)
    taken = routing.indices < E
    assert not (taken & ~wanted).any() and (routing.topk_weights[~taken] == 0).all()
    for size in (1, 2, 3):
        alone = with_weight(TopKRouter(8, E, size, scores=scores, scale=1.5), router.weight)(x, mask)
        there = taken[..., :size] & (k == size).unsqueeze(-1)
        assert torch.equal(routing.indices[..., :size][there], alone.indices[there])
        torch.testing.assert_close(routing.topk_weights[..., :size][there], alone.topk_weights[there])
    most = math.inf if capacity is None else math.ceil(capacity * wanted.sum() / E)
    assert torch.equal(taken, dropped_by_hand(torch.where(wanted, free(x).indices, E), most))
    torch.testing.assert_close(routing.dropped, 1 - taken.sum() / wanted.sum())
    torch.testing.assert_close(routing.load.sum(), taken.sum() / (2 * mask.sum()))
    whole = router(x, mask, k=torch.tensor(3))
    for a, b in zip(whole, router(x, mask), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match=r"^k must be an integer in \[0, 3\], but got 4"):
        router(x, k=k + 1)
    balanced = TopKRouter(8, E, 3, balancer=QuantileBalancer(E, 3))
    with pytest.raises(ValueError, match=r"^k must be None with a balancer"):
        balanced(x, k=k)


def test_jitter_moves_what_the_router_sees_in_train_mode() -> None:
    torch.manual_seed(0)
    router, x = TopKRouter(D, E, K, jitter=0.2), torch.ones(500, D)
    router.weight.data = torch.eye(E, D)
    seen = router(x).logits[:, :D]
    assert 0.8 <= seen.min() < 0.81 and 1.19 < seen.max() <= 1.2
    assert torch.equal(router.eval()(x).logits[:, :D], x)


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_in_a_mixture(capacity: float | None) -> None:
    """The sum by hand, in both modes, and where values cannot be read; with gradients."""
    torch.manual_seed(0)
    router = TopKRouter(D, E, K, capacity=capacity)
    mixture = khot.nn.MixtureOfExperts(router, [nn.Linear(D, 3) for _ in range(E)])
    x, mask = floats(2, 9, D).requires_grad_(), floats(2, 9, seed=2) > -1
    output, routing = mixture(x, mask)
    want = torch.zeros(2, 9, 3)
    for place in range(K):
        for e, expert in enumerate(mixture.experts):
            share = (routing.indices[..., place] == e) * routing.topk_weights[..., place]
            want = want + share.unsqueeze(-1) * expert(x)
    torch.testing.assert_close(output, want)
    inputs = (x, *mixture.parameters())
    grads = torch.autograd.grad(output.square().sum(), inputs, retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), inputs))
    torch.testing.assert_close(mixture.eval()(x, mask)[0], output)
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask)[0], output)


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"scores": "relu"}, ValueError, "scores must be 'softmax' or 'sigmoid', but got 'relu'"),
        ({"k": 9}, ValueError, r"k must lie in \[1, 8\], but got 9"),
        ({"k": 1.5}, TypeError, "k must be an int, but got float"),
        ({"groups": 3}, ValueError, "groups must divide num_experts=8, but got 3"),
        ({"jitter": 1.0}, ValueError, "jitter must lie in"),
        ({"capacity": -1.0}, ValueError, "capacity must lie in"),
        ({"balancer": nn.Identity()}, TypeError, "balancer must be a QuantileBalancer or None"),
        ({"balancer": QuantileBalancer(8, 3)}, ValueError, "num_experts=8, k=2, but got Quantile.*k=3"),
        (
            {"groups": 4, "top_groups": 2, "balancer": QuantileBalancer(8, 2)},
            ValueError,
            "k=2, groups=4, top_groups=2, but got QuantileBalancer",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TopKRouter(D, E, **{"k": K} | options)
    with pytest.raises(ValueError, match=r"input must have shape \(\.\.\., n, 6\)"):
        TopKRouter(D, E, K)(torch.ones(D))


def test_a_soft_router_refuses_groups() -> None:
    balancer = QuantileBalancer(E, K, groups=4, top_groups=2)
    with pytest.raises(ValueError, match=r"no groups, which khot\.nn\.TopKRouter takes, but got Quantile"):
        khot.nn.TokenChoiceRouter(D, E, K, balancer=balancer)
