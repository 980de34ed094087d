"""The routers and the mixture on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import khot
import oracles
from drawn import normal
from khot.nn import Anneal, ExpertChoiceRouter, MixtureOfExperts, TokenChoiceRouter
from khot.nn._router import Router

DIM, EXPERTS = 5, 4


def make(name: str, cdf: str = "logistic", tau: float = 0.5, **options: object) -> Router:
    torch.manual_seed(0)
    choose = {"expert": ExpertChoiceRouter, "token": TokenChoiceRouter}[name]
    return choose(DIM, EXPERTS, 2, tau=tau, cdf=cdf, dtype=torch.float64, **options)


def mixture(name: str, cdf: str = "logistic") -> MixtureOfExperts:
    router = make(name, cdf)
    return MixtureOfExperts(router, [nn.Linear(DIM, 3, dtype=torch.float64) for _ in range(EXPERTS)])


both = pytest.mark.parametrize("name", ["expert", "token"])
MASK = torch.arange(9) < torch.tensor([9, 6, 0])[:, None]


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_each_expert_chooses_its_tokens(cdf: str) -> None:
    router, x = make("expert", cdf), normal(2, 9, DIM)
    routing = router(x)
    p = (x @ router.weight.T).softmax(-1)
    for row in range(2):
        for e in range(EXPERTS):  # k = 2 · 9 / 4
            y = torch.from_numpy(oracles.soft_topk(p[row, :, e].log().detach(), 4.5, 0.5, cdf, None)[0])
            torch.testing.assert_close(routing.selection[row, :, e], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(routing.weights, routing.selection * p)
    hard = router.eval()(x)
    best = p.topk(5, dim=1).indices  # ⌊4.5 + ½⌋
    assert hard.selection.sum() == 2 * EXPERTS * 5
    assert (hard.selection.gather(1, best) == 1).all()


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_each_token_chooses_its_experts(cdf: str) -> None:
    router, x = make("token", cdf), normal(2, 9, DIM)
    routing = router(x)
    scores = (x @ router.weight.T).detach()
    for i in range(9):
        y = torch.from_numpy(oracles.soft_topk(scores[1, i], 2, 0.5, cdf, None)[0])
        torch.testing.assert_close(routing.selection[1, i], y, rtol=0, atol=1e-12)
        torch.testing.assert_close(routing.weights[1, i], (scores[1, i] + y.log()).softmax(-1))
    hard, best = router.eval()(x), scores.topk(2)
    torch.testing.assert_close(hard.weights.gather(-1, best.indices), best.values.softmax(-1))
    assert (hard.selection.sum(-1) == 2).all() and ((hard.weights > 0).sum(-1) == 2).all()


def test_a_learned_k_starts_as_the_number_and_differs_by_token() -> None:
    router, x = make("token", learnable_k=True), normal(3, 9, DIM)
    torch.testing.assert_close(router(x).selection.sum(-1), torch.full((3, 9), 2.0).double())
    with torch.no_grad():
        router.k.weight.copy_(normal(1, DIM) * 10)
    k = router(x).selection.sum(-1)
    assert k.std() > 0.5 and (k >= 1 - 1e-9).all() and (k <= EXPERTS + 1e-9).all()
    torch.testing.assert_close(router.eval()(x).selection.sum(-1), (k + 0.5).floor())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("learnable_k", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_stays_in_its_token(bad: float, learnable_k: bool, training: bool) -> None:
    router, x = make("token", learnable_k=learnable_k), normal(3, 9, DIM)
    if learnable_k:
        with torch.no_grad():
            router.k.weight.copy_(normal(1, DIM))
    layer = MixtureOfExperts(router, [nn.Linear(DIM, 3, dtype=torch.float64) for _ in range(EXPERTS)])
    layer.train(training)
    want, routed = layer(x)
    x[1, 2, 3] = bad
    output, routing = layer(x)
    others = torch.ones(3, 9, dtype=torch.bool)
    others[1, 2] = False
    assert output[~others].isnan().all()
    torch.testing.assert_close(output[others], want[others])
    for name in ("weights", "selection"):
        got = getattr(routing, name)
        assert got[~others].isnan().all()
        torch.testing.assert_close(got[others], getattr(routed, name)[others])


def test_a_k_that_is_nan_by_itself_makes_its_token_nan() -> None:
    router, x = make("token", learnable_k=True), normal(2, DIM)
    with torch.no_grad():
        router.k.weight.copy_(torch.tensor([math.inf, 0, 0, 0, 0]))
    x[0, 0] = 0
    selection = router(x).selection
    assert selection[0].isnan().all() and not selection[1].isnan().any()


@both
@pytest.mark.parametrize("training", [True, False])
def test_padding_goes_to_no_expert_and_does_not_matter(name: str, training: bool) -> None:
    layer = mixture(name).train(training)
    x = normal(3, 9, DIM)
    padded = torch.where(MASK[..., None], x, math.nan).requires_grad_()
    output, routing = layer(padded, MASK)
    for row, length in enumerate(MASK.sum(-1).tolist()[:2]):
        alone, its = layer(x[row, :length])
        torch.testing.assert_close(output[row, :length], alone)
        torch.testing.assert_close(routing.selection[row, :length], its.selection)
    assert (output[~MASK] == 0).all() and (routing.selection[~MASK] == 0).all()
    torch.testing.assert_close(routing.load.sum(), routing.selection.sum() / MASK.sum())
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.experts.parameters())
    assert padded.grad is not None and padded.grad.isfinite().all()


@both
@pytest.mark.parametrize("shape", [(0,), (0, 9), (2, 0)])
def test_no_tokens(name: str, shape: tuple[int, ...]) -> None:
    for layer in (mixture(name), mixture(name).eval()):
        output, routing = layer(normal(*shape, DIM))
        assert output.shape == (*shape, 3)
        assert all(figure.isfinite().all() for figure in routing)


@both
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
@pytest.mark.parametrize("training", [True, False])
def test_mixture_is_the_weighted_sum(name: str, cdf: str, training: bool) -> None:
    layer = mixture(name, cdf).train(training)
    x = normal(2, 9, DIM).requires_grad_()
    y = x.detach().clone().requires_grad_()
    output, routing = layer(x)
    want = torch.einsum(
        "bne,bned->bnd", layer.router(y).weights, torch.stack([f(y) for f in layer.experts], 2)
    )
    torch.testing.assert_close(output, want)
    weight = normal(2, 9, 3)
    ours = torch.autograd.grad((output * weight).sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad((want * weight).sum(), [y, *layer.parameters()])
    torch.testing.assert_close(ours, theirs)
    assert routing.weights.shape == (2, 9, EXPERTS)


@both
@pytest.mark.parametrize(
    ("cdf", "training", "masked"),
    [
        ("logistic", True, True),
        ("logistic", False, False),
        ("uniform", True, False),
        ("uniform", False, True),
    ],
)
def test_under_transforms(name: str, cdf: str, training: bool, masked: bool) -> None:
    """vmap over the inputs, over models (an ensemble), and the gradients of each input."""
    layer = mixture(name, cdf).train(training)
    x, mask = normal(3, 9, DIM), MASK if masked else torch.ones_like(MASK)
    state = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(state: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
        output, routing = torch.func.functional_call(layer, state, (x, mask))
        return output.square().sum() + routing.load[0]

    one_by_one = [loss(state, *each) for each in zip(x, mask, strict=True)]
    torch.testing.assert_close(torch.vmap(loss, (None, 0, 0))(state, x, mask), torch.stack(one_by_one))
    models = {n: torch.stack([p, 2 * p, -p]) for n, p in state.items()}
    got = torch.vmap(loss, (0, 0, 0))(models, x, mask)
    for i in range(3):
        torch.testing.assert_close(got[i], loss({n: p[i] for n, p in models.items()}, x[i], mask[i]))
    grads = torch.vmap(torch.func.grad(loss), (None, 0, 0))(state, x, mask)
    for i in range(3):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), x[i], mask[i]).backward()
        for n, p in layer.named_parameters():
            torch.testing.assert_close(grads[n][i], torch.zeros_like(p) if p.grad is None else p.grad)


@both
def test_experts_see_only_what_is_selected_for_them(name: str) -> None:
    seen: list[int] = []

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.shape[:-1].numel())
            return super().forward(input)

    for cdf, training, sparse in (("logistic", True, 0), ("logistic", False, 1), ("uniform", True, 1)):
        experts = [Counted(DIM, 3, dtype=torch.float64) for _ in range(EXPERTS)]
        layer = MixtureOfExperts(make(name, cdf, tau=0.05), experts).train(training)
        seen.clear()
        _, routing = layer(normal(2, 10, DIM))
        assert seen == [int(n) for n in (routing.selection != 0).flatten(0, 1).sum(0)]
        assert (sum(seen) < 0.7 * 20 * EXPERTS) == bool(sparse)


def test_the_router_alone_in_eval_mode_trains_with_a_hard_selection() -> None:
    layer = mixture("token")
    layer.router.eval()
    output, routing = layer(normal(9, DIM))
    output.square().sum().backward()
    assert routing.selection.unique().tolist() == [0, 1]
    assert layer.router.weight.grad is not None and (layer.router.weight.grad != 0).any()


def test_load_figures() -> None:
    router = make("token").eval()
    x = normal(8, DIM)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:2, 0] = 1
    x[:, 0] = 1  # two experts get all
    routing = router(x)
    assert routing.load.tolist() == [1, 1, 0, 0]
    assert routing.entropy.item() == pytest.approx(0.5)
    assert routing.dropped == 0
    choice = make("expert").eval()
    with torch.no_grad():
        choice.weight.copy_(router.weight)
    x[:4, 0] = 0.5  # for half of the tokens the first two are less likely, and the others more
    routing = choice(x)
    assert routing.load.tolist() == [0.5] * 4
    assert routing.entropy.item() == pytest.approx(1.0)
    # both groups of experts take four tokens each, the same ones within a group
    assert routing.dropped == 0
    routing = ExpertChoiceRouter(DIM, EXPERTS, 0.5, dtype=torch.float64).eval()(x)
    assert routing.dropped >= 0.5


def test_an_idle_expert_has_no_gradient_of_the_entropy() -> None:
    router = make("token", "uniform", tau=0.1)
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([4.0, 3.9, 0.0, 0.0])
    x = torch.eye(DIM, dtype=torch.float64)[:1]  # the selection is flat, too
    routing = router(x)
    assert routing.load.tolist()[2:] == [0, 0]
    routing.entropy.backward()
    assert not router.weight.grad.isnan().any()


@both
def test_bf16_routes_in_float32(name: str) -> None:
    router = make(name).bfloat16().eval()
    x = normal(3, 50, DIM).bfloat16()
    exact = make(name).bfloat16().double().eval()
    routing = router(x)
    assert routing.weights.dtype == torch.bfloat16 and routing.selection.dtype == torch.float32
    torch.testing.assert_close(routing.selection.double(), exact(x.double()).selection, rtol=0, atol=0)
    single = make(name).float().eval()
    with torch.autocast("cpu", torch.bfloat16):
        inside = single(x.float())
    torch.testing.assert_close(inside, single(x.float()), rtol=0, atol=0)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="k must"):
        TokenChoiceRouter(DIM, 4, 5)
    with pytest.raises(ValueError, match="inside"):
        TokenChoiceRouter(DIM, 4, 4, learnable_k=True)
    with pytest.raises(TypeError, match="k must be a number"):
        TokenChoiceRouter(DIM, 4, Anneal(3, 1, 2), learnable_k=True)
    with pytest.raises(ValueError, match="experts must be 4"):
        MixtureOfExperts(TokenChoiceRouter(DIM, 4, 2), [nn.Identity()])
    with pytest.raises(ValueError, match="mask"):
        make("token")(normal(2, 9, DIM), MASK)
    for name in ("expert", "token"):
        for layer in (make(name), mixture(name), make(name).eval(), mixture(name).eval()):
            with pytest.raises(ValueError, match=r"^input must have shape \(\.\.\., n, 5\) .* \(5,\)$"):
                layer(normal(DIM))
    assert khot.nn.Routing._fields[0] == "weights"
