"""BalancedRouter: exact sums in train mode, biases that balance in eval mode, and when these change."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import khot
from drawn import normal
from khot.nn import Anneal, BalancedRouter, Routing, TokenChoiceRouter

DIM, EXPERTS, K = 5, 8, 2


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Tokens whose mean is not 0, so that all of them prefer the same experts."""
    return normal(*shape, DIM, seed=seed) + torch.linspace(0, 1, DIM, dtype=torch.float64)


def make(k: float | nn.Module = K, dtype: torch.dtype = torch.float64, **options: object) -> BalancedRouter:
    torch.manual_seed(0)
    return BalancedRouter(DIM, EXPERTS, k, **{"tau": 0.5, "dtype": dtype, **options})  # type: ignore[arg-type]


def skew(router: BalancedRouter | TokenChoiceRouter) -> None:
    with torch.no_grad():
        router.weight.copy_(normal(*router.weight.shape, seed=4))


def used(**options: object) -> BalancedRouter:
    """After a step on other tokens."""
    router = make(**options)  # type: ignore[arg-type]
    router(tokens(50, seed=9))
    assert router.bias.any()
    return router


def scores(router: BalancedRouter, x: Tensor) -> Tensor:
    return (x @ router.weight.detach().to(x.dtype).T).log_softmax(-1)


each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
MASK = torch.arange(9) < torch.tensor([9, 6, 0])[:, None]

# ------------------------------------------------------------------------------------ train mode


@pytest.mark.parametrize(
    ("dtype", "accuracy"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
    ids=str,
)
@pytest.mark.parametrize(
    ("k", "tau", "shape"),
    [
        (1, 1.0, (40,)),
        (2, 0.01, (3, 20)),
        (2.5, 1.0, (2, 1, 9)),
        (2.5, 0.01, (40,)),
        (EXPERTS - 1, 0.01, (2, 1, 9)),
        (EXPERTS, 1.0, (3, 20)),
    ],
)
def test_all_experts_get_the_same_and_all_tokens_get_k(
    tau: float, k: float, shape: tuple[int, ...], dtype: torch.dtype, accuracy: float
) -> None:
    router = make(k, dtype, tau=tau)
    skew(router)
    routing = router(tokens(*shape).to(dtype))
    y = routing.selection
    assert y.dtype == torch.promote_types(dtype, torch.float32) and routing.weights.dtype == dtype
    assert (y >= 0).all() and (y <= 1).all()
    # a sum that is exact would have the rounding of the outputs only, so that the sums are taken in float64
    torch.testing.assert_close(
        y.double().sum(-1), torch.full(shape, float(k)).double(), rtol=accuracy, atol=0
    )
    columns = y.double().flatten(0, -2).sum(0)
    even = torch.full((EXPERTS,), k * y[..., 0].numel() / EXPERTS).double()
    torch.testing.assert_close(columns, even, rtol=accuracy, atol=0)
    torch.testing.assert_close(routing.load.double(), torch.full((EXPERTS,), k / EXPERTS).double())
    torch.testing.assert_close(routing.entropy.double(), torch.tensor(1.0).double())


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_soft_assignment_of_all_tokens(cdf: str, masked: bool) -> None:
    router, x = make(cdf=cdf), tokens(3, 9)
    mask = MASK if masked else torch.ones(3, 9, dtype=torch.bool)
    routing = router(x, MASK if masked else None)
    s = scores(router, x)
    want, bias = khot.soft_assign(s[mask], K, tau=0.5, cdf=cdf, return_bias=True)
    torch.testing.assert_close(routing.selection[mask], want, rtol=0, atol=1e-12)
    torch.testing.assert_close(routing.weights[mask], want * s[mask].exp(), rtol=0, atol=1e-12)
    torch.testing.assert_close(router.bias, bias.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("what", ["weights", "selection", "entropy"])
def test_gradients_of_the_tokens_and_the_weight(what: str, masked: bool) -> None:
    router = make(tau=0.7)
    mask = torch.tensor([[True, True, True], [True, False, True]]) if masked else None

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return getattr(torch.func.functional_call(router, {"weight": weight}, (x, mask)), what)

    inputs = (tokens(2, 3).requires_grad_(), router.weight.detach().clone().requires_grad_())
    if what == "entropy":  # of a load that is even by construction
        grads = torch.autograd.grad(call(*inputs), inputs)
        assert all(g.abs().max() < 1e-12 for g in grads)
        return
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@each_mode
def test_padding_goes_to_no_expert_and_does_not_matter(training: bool) -> None:
    router, x = used().train(training), tokens(3, 9)
    alone = copy.deepcopy(router)
    padded = torch.where(MASK[..., None], x, torch.nan).requires_grad_()
    routing, want = router(padded, MASK), alone(x[MASK])
    torch.testing.assert_close(routing.selection[MASK], want.selection)
    torch.testing.assert_close(routing.weights[MASK], want.weights)
    torch.testing.assert_close((routing.load, routing.entropy), (want.load, want.entropy))
    torch.testing.assert_close(router.bias, alone.bias)
    assert (routing.selection[~MASK] == 0).all() and (routing.weights[~MASK] == 0).all()
    assert routing.dropped < 1e-12
    routing.weights.square().sum().backward()
    assert padded.grad is not None and padded.grad.isfinite().all() and (padded.grad[~MASK] == 0).all()
    assert router.weight.grad is not None and router.weight.grad.any()


# ------------------------------------------------------------------------------------ the biases


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
def test_where_it_starts_changes_nothing(tau: float, masked: bool) -> None:
    x, mask = tokens(3, 9), MASK if masked else None
    cold = make(tau=tau)
    skew(cold)
    other, far = copy.deepcopy(cold), copy.deepcopy(cold)
    other(tokens(50, seed=9))
    far.bias.copy_(20 * normal(EXPERTS, seed=3))
    results = []
    for router in (cold, other, far):
        start = router.bias.clone()
        routing = router(x, mask)
        assert not torch.equal(start, router.bias)
        weight = normal(*routing.weights.shape, seed=6)
        results.append((*routing, *torch.autograd.grad((routing.weights * weight).sum(), router.weight)))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-8, atol=1e-9)


def test_the_biases_change_in_train_mode_with_gradients_only() -> None:
    router, x = used(), tokens(30)
    before = router.bias.clone()
    with torch.no_grad():
        router(x)
    with torch.inference_mode():
        router(x)
    router.eval()(x)
    with torch.no_grad():
        router(x)
    assert torch.equal(router.bias, before)
    router.train()(x)
    assert not torch.equal(router.bias, before) and not router.bias.requires_grad
    before = router.bias.clone()
    router.requires_grad_(False)(tokens(30, seed=8))  # a frozen router still follows the data
    assert not torch.equal(router.bias, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda router: router(tokens(0)),
        lambda router: router(tokens(0, 9)),
        lambda router: router(tokens(2, 0)),
        lambda router: router(tokens(2, 9), torch.zeros(2, 9, dtype=torch.bool)),
        lambda router: router(tokens(9) * torch.nan),
    ],
    ids=["no tokens", "no rows", "empty rows", "padding only", "nan"],
)
def test_a_batch_that_says_nothing_leaves_the_biases(call: Callable[[BalancedRouter], Routing]) -> None:
    router = make()
    router.bias.copy_(normal(EXPERTS))
    before = router.bias.clone()
    assert before.any()
    routing = call(router)
    assert torch.equal(router.bias, before)
    y = routing.selection
    assert y.isnan().all() or (y == 0).all()
    if not y.isnan().any():
        assert all(figure.isfinite().all() for figure in routing)
        routing.weights.sum().backward()
        assert router.weight.grad is not None and router.weight.grad.isfinite().all()
    assert all(figure.isfinite().all() for figure in router.eval()(tokens(4)))


def test_an_infinite_bias_is_not_kept() -> None:
    """Half of the tokens are closed to the first two experts, and so take all that the others have."""
    router = BalancedRouter(DIM, 4, 2, dtype=torch.float64)
    router.bias.copy_(normal(4))
    before = router.bias.clone()
    s = normal(6, 4)
    s[:3, :2] = -torch.inf
    _, bias = khot.soft_assign(s, 2, return_bias=True)
    assert bias.isinf().any()
    y, _ = router._route(tokens(6), s, None)
    assert y.isfinite().all() and router.bias.isfinite().all()
    assert torch.equal(router.bias[bias.isinf()], before[bias.isinf()])


# ------------------------------------------------------------------------------------ eval mode


@pytest.mark.parametrize("k", [1, 2, 2.5, EXPERTS])
def test_in_eval_mode_each_token_chooses_by_itself(k: float) -> None:
    router, x = used(k=k) if k < EXPERTS else make(k), tokens(3, 9)
    router.eval()
    routing = router(x)
    s = scores(router, x)
    assert torch.equal(routing.selection, khot.topk_mask(s + router.bias, k))
    torch.testing.assert_close(routing.weights, routing.selection * s.exp())
    for row in range(3):  # causal: what comes later, or in other rows, does not matter
        for i in range(9):
            assert torch.equal(router(x[row, : i + 1]).selection[i], routing.selection[row, i])
    (grad,) = torch.autograd.grad(routing.weights.square().sum(), router.weight)
    assert grad.any()  # of the probabilities


# ------------------------------------------------------------------------------------ a module like any other


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_state_has_the_bias(dtype: torch.dtype, assign: bool) -> None:
    router, other = used(), make()
    assert set(router.state_dict()) == {"weight", "bias"}
    buffer = io.BytesIO()
    torch.save({name: value.to(dtype) for name, value in router.state_dict().items()}, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer), assign=assign)
    assert other.bias.dtype == torch.float32
    assert torch.equal(other.bias, router.bias.to(dtype).float())


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((DIM, 4, 0), {}, r"k must lie in \[1, 4\], but got 0"),
        ((DIM, 4, 2), {"cdf": "uniform"}, "cdf must have full support, .* but got 'uniform'"),
        ((DIM, 4, 2), {"cdf": khot.cdfs.Power(2)}, "cdf must have full support"),
    ],
    ids=str,
)
def test_arguments_out_of_range(
    arguments: tuple[int, int, float], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedRouter(*arguments, **options)  # type: ignore[arg-type]


@each_mode
def test_inputs_that_do_not_fit(training: bool) -> None:
    router = make().train(training)
    with pytest.raises(ValueError, match=r"input must have shape \(\.\.\., n, 5\) .* but got shape \(5,\)"):
        router(torch.zeros(DIM))
    with pytest.raises(ValueError, match="mask must broadcast"):
        router(tokens(3, 9), MASK[:2])
    with pytest.raises(ValueError, match="k must"):
        make(Anneal(EXPERTS + 1, 1, 2)).train(training)(tokens(3))
