"""Every public operator on a device without float64 (single.py), against its results in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils._pytree import tree_leaves

import khot
import single
from differences import error
from khot import cdfs
from khot._core import precision
from khot._ops import exponential
from operators import OPERATORS, Operator

# what is done with numbers and with half precision, and how much a trace widens, hardly depends on the CDF
ONCE = list({op.name: op for op in reversed(OPERATORS)}.values())
each_once = pytest.mark.parametrize("op", ONCE, ids=lambda op: op.id)
# what each CDF and each regulariser computes is in these; the other variants call the same functions
COMPUTED = [op for op in OPERATORS if op in ONCE or op.name in ("soft_topk", "log_soft_topk", "soft_count")]
COMPUTED += [
    op for op in OPERATORS if op.id in ("project_permutahedron-projection-kl", "soft_assign-uniform")
]
each_computed = pytest.mark.parametrize("op", COMPUTED, ids=lambda op: op.id)

TAU = [0.5, 1.0, 1.7]
# in units of 1 + abs(result); next to an edge of a compact support the logarithm loses digits
LOSSY = {"log_soft_permutation-uniform": 2e-5, "log_soft_permutation-power": 5e-3}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[single.Device]:
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", {single.NAME})
    with single.Device() as device:
        yield device


def arguments(op: Operator, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """On the CPU: x (3, 7), and one k and one tau per row, in the operator's domain."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    k = torch.tensor(op.k)
    if op.name in ("soft_count", "inverse_soft_count"):
        k = k.unsqueeze(-1)  # levels lie along dim
    return [x, k, torch.tensor(TAU)]


def wanted(op: Operator) -> list[bool]:
    return [op.differentiable and there for there in (True, not op.integer_k, op.has_tau)]


def value_and_gradients(
    op: Operator, args: list[Tensor], put: Callable[[Tensor], Tensor], create_graph: bool
) -> list[Tensor]:
    args = [put(a).requires_grad_(w) for a, w in zip(args, wanted(op), strict=True)]
    y = op.call(*args)
    if not op.differentiable:
        return [y]
    cotangent = put(torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).to(y.dtype)
    cotangent = cotangent.masked_fill(y.detach().isinf(), 0)
    leaves = [a for a in args if a.requires_grad]
    grads = torch.autograd.grad(y, leaves, cotangent, create_graph=create_graph)
    return [y, *grads, *(_second(grads, leaves) if create_graph and not op.piecewise_linear else [])]


def _second(grads: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    # for moderate scores; in a sum of squares, rounding errors stay in proportion
    total = sum((g.square().sum() for g in grads), grads[0].new_zeros(()))
    second = torch.autograd.grad(total, leaves, allow_unused=True)
    return [s for s in second if s is not None]


# ------------------------------------------------------------------------------------- the device


def test_float64_is_an_error_there(device: single.Device) -> None:
    x = device.put(torch.zeros(3))
    for attempt in (x.double, lambda: torch.zeros(3, dtype=torch.float64, device=single.NAME)):
        with pytest.raises(AssertionError, match="float64"):
            attempt()
    assert x.cpu().double().dtype == torch.float64


def test_two_devices_are_an_error(device: single.Device) -> None:
    with pytest.raises(RuntimeError, match="two devices"):
        device.put(torch.zeros(3)) + torch.zeros(3)


# ------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, torch.float32) for op in OPERATORS] + [(op, torch.bfloat16) for op in ONCE],
    ids=lambda v: v.id if isinstance(v, Operator) else str(v),
)
def test_agrees_with_float64(op: Operator, dtype: torch.dtype, device: single.Device) -> None:
    args = arguments(op, dtype)
    exact = dtype == torch.float32
    want = value_and_gradients(op, [a.double() if exact else a for a in args], torch.clone, False)
    got = value_and_gradients(op, args, device.put, False)
    assert got[0].dtype == dtype
    tolerance = max(ROUNDING[dtype], LOSSY.get(op.id, 0))
    errors = [error(device.fetch(g), w.detach()) for g, w in zip(got, want, strict=True)]
    assert max(errors) <= tolerance, errors


@pytest.mark.parametrize("op", [op for op in COMPUTED if op.differentiable], ids=lambda op: op.id)
def test_second_derivatives(op: Operator, device: single.Device) -> None:
    want = value_and_gradients(op, [a.double() for a in arguments(op)], torch.clone, True)
    got = value_and_gradients(op, arguments(op), device.put, True)
    errors = [error(device.fetch(g), w.detach()) for g, w in zip(got, want, strict=True)]
    assert max(errors) <= 20 * max(ROUNDING[torch.float32], LOSSY.get(op.id, 0)), errors


@each_once
def test_numbers(op: Operator, device: single.Device) -> None:
    x, _, _ = arguments(op)
    for k in (op.k[1], torch.tensor(op.k[1], dtype=torch.float64)):  # a number, and a 0-dim tensor on the CPU
        want = op.call(x.double(), k, 0.8)
        assert error(device.fetch(op.call(device.put(x), k, 0.8)), want) <= LOSSY.get(op.id, 2e-6)


@pytest.mark.parametrize("op", [op for op in ONCE if op.has_mask], ids=lambda op: op.id)
def test_masks(op: Operator, device: single.Device) -> None:
    x, k, tau = arguments(op)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[:, 2] = False
    want = op.call(x.double(), k.double(), tau.double(), mask=mask)
    got = op.call(*(device.put(v) for v in (x, k, tau)), mask=device.put(mask))
    assert error(device.fetch(got), want) <= LOSSY.get(op.id, 2e-6)


# the others' own forward mode, where torch has zeros for tangents, takes "meta" for what it is elsewhere
@pytest.mark.parametrize(
    "op",
    [op for op in OPERATORS if op.name in ("soft_topk", "log_soft_topk", "soft_count")],
    ids=lambda op: op.id,
)
def test_forward_mode(op: Operator, device: single.Device) -> None:
    def tangent(args: list[Tensor], put: Callable[[Tensor], Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        with dual_level():
            duals = [
                make_dual(put(a), put(torch.randn(a.shape, generator=generator).to(a))) if w else put(a)
                for a, w in zip(args, wanted(op), strict=True)
            ]
            return unpack_dual(op.call(*duals)).tangent

    want = tangent([a.double() for a in arguments(op)], torch.clone)
    got = tangent(arguments(op), device.put)
    assert error(device.fetch(got), want) <= max(2e-6, LOSSY.get(op.id, 0))


@each_computed
def test_vmap(op: Operator, device: single.Device) -> None:
    want = op.call(*(a.double() for a in arguments(op)))
    got = torch.func.vmap(op.call)(*(device.put(a) for a in arguments(op)))
    assert error(device.fetch(got), want) <= LOSSY.get(op.id, 2e-6)


# these two are found on the CPU, and what is traced has no data to go there
@pytest.mark.filterwarnings(
    r"ignore:aten..where. an autograd kernel was not registered"
)  # of "meta", in torch
@pytest.mark.parametrize(
    "op",
    [op for op in ONCE if op.name not in ("sorted_soft_topk", "soft_assign")]
    + [op for op in OPERATORS if op.name in ("soft_topk", "log_soft_topk") and op not in ONCE],
    ids=lambda op: op.id,
)
def test_traced_for_the_device(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", {single.NAME})
    monkeypatch.setattr(exponential, "STEPS", 2)  # which are traced one after the other, all alike
    seen = set()

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
        seen.update(v.dtype for v in values if isinstance(v, Tensor) and v.device.type == single.NAME)
        return make_boxed_func(graph.forward)

    args = [a.to(single.NAME).requires_grad_(w) for a, w in zip(arguments(op), wanted(op), strict=True)]
    torch._dynamo.reset()
    y = torch.compile(op.call, fullgraph=True, backend=aot_autograd(fw_compiler=note))(*args)
    if op.differentiable:
        y.sum().backward()
    assert torch.float32 in seen
    assert torch.float64 not in seen


# ------------------------------------------------------------------------------------- accuracy

ROWS = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "narrow": lambda n, g: 1e-6 * torch.randn(n, generator=g),
    "spread": lambda n, g: 1e4 * torch.randn(n, generator=g),
    "cauchy": lambda n, g: torch.empty(n).cauchy_(generator=g),
    "outlier": lambda n, g: torch.randn(n, generator=g).index_fill(0, torch.tensor(0), 1e6),
    "equal": lambda n, g: torch.full((n,), 0.3),
    "ties": lambda n, g: torch.randint(0, 4, (n,), generator=g).float(),
}


HARD_CDFS = ["logistic", "laplace", "normal", "uniform", cdfs.Power(4 / 3)]


@pytest.mark.parametrize("cdf", HARD_CDFS, ids=str)
def test_hard_rows(cdf: str | cdfs.CDF, device: single.Device) -> None:
    n, generator = 1_500, torch.Generator().manual_seed(3)
    x = torch.stack([make(n, generator) for make in ROWS.values()])
    turn = HARD_CDFS.index(cdf)  # each k with the temperatures by turns, which are others under the next CDF
    for i, k in enumerate((0.5, n / 100, n / 2 + 0.5, n - 1)):
        tau = (1.0, 0.01)[(turn + i) % 2]
        want = khot.soft_topk(x.double(), k, tau=tau, cdf=cdf)
        got = device.fetch(khot.soft_topk(device.put(x), k, tau=tau, cdf=cdf)).double()
        assert (got - want).abs().max() <= 1e-6, (tau, k)
        # a rounding error of every output, which where they are equal all have alike; 5 of a power's
        slack = (5 if isinstance(cdf, cdfs.Power) else 1) * 0.5 * n * torch.finfo(torch.float32).eps
        assert (got.sum(-1) - k).abs().max() <= 1e-6 * max(1, min(k, n - k)) + slack, (tau, k)


# ------------------------------------------------------------------------------------- the rest

PROBS = torch.tensor([[0.9, 0.6, 0.3, 0.2, 1.0], [0.5, 0.25, 0.25, 0.5, 0.5]])
LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.3, -0.4], [0.0, 0.1, -3.0, 0.7, 1.0]])
K_HOT = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]])


def agree(device: single.Device, function: Callable[..., Tensor], *args: Tensor, **options: Any) -> None:
    """The value and gradients on the device agree with those in float64 on the CPU."""

    def run(put: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        there = [put(a.to(dtype) if a.is_floating_point() else a) for a in args]
        leaves = [a.requires_grad_() for a in there if a.is_floating_point()]
        y = function(*there, **options)
        cotangent = put(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype))
        grads = torch.autograd.grad(y, leaves, cotangent.to(y.dtype), allow_unused=True)
        return [y, *(g for g in grads if g is not None)]

    got, want = run(device.put, torch.float32), run(torch.clone, torch.float64)
    errors = [error(device.fetch(g), w.detach()) for g, w in zip(got, want, strict=True)]
    assert max(errors) <= 2e-6, errors


@pytest.mark.parametrize("design", [name for name, d in khot.sampling.designs.items() if d.fixed_size])
def test_designs(design: str, device: single.Device) -> None:
    x = device.fetch(khot.sampling.sample(device.put(PROBS), design, sample_shape=(8,)))
    assert x.shape == (8, 2, 5)
    assert torch.equal(x.sum(-1), PROBS.sum(-1).expand(8, 2))
    chances = device.fetch(khot.sampling.inclusion_probs(device.put(PROBS), design))
    assert error(chances, khot.sampling.inclusion_probs(PROBS.double(), design)) <= 1e-6
    if khot.sampling.designs[design].joint is not None:
        both = device.fetch(khot.sampling.joint_inclusion_probs(device.put(PROBS), design))
        assert error(both, khot.sampling.joint_inclusion_probs(PROBS.double(), design)) <= 1e-6


def test_gumbel_topk(device: single.Device) -> None:
    x = device.fetch(khot.sampling.gumbel_topk(device.put(LOGITS), 2, sample_shape=(8,)))
    assert torch.equal(x.sum(-1), torch.full((8, 2), 2.0))


@pytest.mark.parametrize("name", ["log_normalizer", "marginals", "joint_marginals", "entropy"])
def test_conditional_poisson(name: str, device: single.Device) -> None:
    agree(device, getattr(khot.sampling.conditional_poisson, name), LOGITS, k=3)


def test_conditional_poisson_of_two(device: single.Device) -> None:
    design = khot.sampling.conditional_poisson
    agree(device, lambda theta: design.log_prob(K_HOT.to(theta.device), theta, 3), LOGITS)
    agree(device, lambda p, q: design.kl(p, q, 3), LOGITS, LOGITS.flip(-1))
    # calibrated for what float32 makes of the probabilities
    theta = device.fetch(design.calibrate(device.put(PROBS)))
    assert error(theta, design.calibrate(PROBS).double()) <= 1e-5
    x = device.fetch(design.sample(device.put(LOGITS), 3, sample_shape=(8,)))
    assert torch.equal(x.sum(-1), torch.full((8, 2), 3.0))


@pytest.mark.parametrize("estimator", get_args(khot.estimators.EstimatorName))
def test_estimators(estimator: str, device: single.Device) -> None:
    logits = device.put(LOGITS, requires_grad=True)
    x = khot.sample_khot(logits, 2, estimator=estimator)
    (grad,) = torch.autograd.grad(x, logits, device.put(K_HOT))
    sizes = device.fetch(x).sum(-1)
    if estimator == "ncpss":  # whose sizes need not reach k
        assert ((sizes - 2).abs() <= 2).all() and torch.equal(sizes, sizes.round())
    else:
        assert torch.equal(sizes, torch.full((2,), 2.0))
    assert device.fetch(grad).isfinite().all()


def test_score_function(device: single.Device) -> None:
    score = khot.estimators.score_function
    agree(device, lambda loss, log_p: score(loss, log_p, "leave_one_out"), LOGITS[0], LOGITS[1])


@pytest.mark.parametrize("design", ["conditional_poisson", "sampford"])
def test_khot_distribution(design: str, device: single.Device) -> None:
    def log_prob(probs: Tensor) -> Tensor:
        p = khot.distributions.KHot(k.to(probs.device), probs=probs, design=design)
        return p.log_prob(value.to(probs.device))

    k = torch.tensor([3, 2])
    value = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    there = device.fetch(log_prob(device.put(PROBS)))
    assert error(there, log_prob(PROBS)) <= 2e-6


def test_distributions(device: single.Device) -> None:
    natural = khot.distributions.ConditionalPoisson
    agree(device, lambda logits: natural(3, logits).entropy(), LOGITS)
    given = khot.distributions.KHot
    agree(device, lambda logits: given(3, logits=logits, design="conditional_poisson").entropy(), LOGITS)

    def kl(logits: Tensor) -> Tensor:
        p = given(3, logits=logits, design="conditional_poisson")
        return torch.distributions.kl_divergence(p, natural(3, logits))

    agree(device, kl, LOGITS)
    for p in (
        given(3, logits=device.put(LOGITS)),
        natural(3, device.put(LOGITS)),
        khot.distributions.KHotStraightThrough(3, logits=device.put(LOGITS)),
        khot.distributions.RelaxedKHot(0.5, 3, logits=device.put(LOGITS)),
    ):
        x = device.fetch(p.sample((4,)))
        torch.testing.assert_close(x.sum(-1), torch.full((4, 2), 3.0))
    for relaxed in (khot.distributions.RelaxedKHot, khot.distributions.LogitRelaxedKHot):
        p = relaxed(0.5, 3, logits=device.put(LOGITS))
        x = p.rsample()
        assert device.fetch(x).shape == (2, 5)
        assert device.fetch(p.log_prob(x)).isfinite().all()


def test_losses(device: single.Device) -> None:
    losses = khot.losses
    agree(device, lambda x: losses.FenchelYoungTopKLoss(3)(x, K_HOT.to(x)), LOGITS)
    agree(device, lambda x: losses.TopKCrossEntropyLoss({1: 0.5, 2: 0.5})(x, label.to(x.device)), LOGITS)
    for mode in ("softmax", "cross_entropy"):
        restricted = losses.TopKCrossEntropyLoss({1: 0.5, 2: 0.5}, top1_mode=mode, m=4)
        agree(device, lambda x, f=restricted: f(x, label.to(x.device)), LOGITS)
    agree(device, lambda x: losses.permutation_cross_entropy(x, order.to(x.device)), LOGITS)
    agree(device, lambda p: losses.size_penalty(p, 0.1), PROBS)
    for ranking in (losses.spearman_loss, losses.ndcg_loss, losses.average_precision_loss):
        agree(device, lambda x, f=ranking: f(x, K_HOT.to(x), tau=0.5), LOGITS)
    agree(device, lambda x: losses.log_rank_loss(x, K_HOT.to(x)), LOGITS)
    for at_k in (losses.ndcg_loss, losses.recall_at_k_loss, losses.precision_at_k_loss):
        agree(device, lambda x, f=at_k: f(x, K_HOT.to(x), 2, tau=0.5), LOGITS)


label = torch.tensor([2, 4])
order = torch.tensor([[0, 3, 1, 2, 4], [4, 3, 2, 1, 0]])


def test_baselines(device: single.Device) -> None:
    for function, options in [
        (khot.baselines.sequential_softmax_topk, {}),
        (khot.baselines.rescaled_sigmoid_topk, {}),
        (khot.baselines.sinkhorn_topk, {"iterations": 5}),
        (khot.baselines.sorted_sinkhorn_topk, {"iterations": 5}),
        (khot.baselines.masked_softmax_topk, {}),
        (khot.baselines.neuralsort_topk, {}),
        (khot.baselines.softsort_topk, {}),
        (khot.baselines.pav_topk, {}),
        (khot.baselines.generic_pav_topk, {}),
        (khot.baselines.root_finding_topk, {}),
        (khot.baselines.block_ascent_topk, {"iterations": 5}),
    ]:
        agree(device, lambda x, f=function, o=options: f(x, 2, **o), LOGITS)
    for sort in (khot.baselines.neuralsort_permutation, khot.baselines.softsort_permutation):
        agree(device, sort, LOGITS)


@pytest.mark.parametrize("at_most", [False, True])
def test_soft_assign(at_most: bool, device: single.Device) -> None:
    capacity = 2.5 * len(LOGITS) / LOGITS.shape[-1] if at_most else None
    agree(device, lambda x: khot.soft_assign(x, 2, capacity, tau=0.5, at_most=at_most), LOGITS)


@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_soft_assign_within_bounds(cdf: Any, device: single.Device) -> None:
    def call(x: Tensor) -> Tensor:
        return khot.soft_assign(x, (1, 2), total=1.6 * len(LOGITS), tau=0.5, cdf=cdf)

    agree(device, call, LOGITS)


def _embed(module: torch.nn.Module, put: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """The module, with its parameters and buffers put."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(put(value.detach()))
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = put(value)
    return module


def _routed(module: Any, x: Tensor) -> Tensor:
    # below its forward, whose autocast does not know "meta"
    scores = torch.nn.functional.linear(x, module.weight).log_softmax(-1)
    return module._route(x, scores, None)[1]


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Tensor]]] = {
    "SoftTopK": (
        lambda: khot.nn.SoftTopK(2, tau=khot.nn.Anneal(1.0, 0.25, steps=2)),
        torch.nn.Module.__call__,
    ),
    "ExpertChoiceRouter": (lambda: khot.nn.ExpertChoiceRouter(8, 4, capacity=2.0), _routed),
    "TokenChoiceRouter": (lambda: khot.nn.TokenChoiceRouter(8, 4, k=2), _routed),
    "TopKRouter": (
        lambda: khot.nn.TopKRouter(8, 4, k=2, capacity=1.5),
        lambda module, x: module(x.unsqueeze(0)).topk_weights,
    ),
    "BalancedRouter": (lambda: khot.nn.BalancedRouter(8, 4, k=2), _routed),
    "BalancedRouter in eval mode": (lambda: khot.nn.BalancedRouter(8, 4, k=2).eval(), _routed),
    "TopKSAE": (lambda: khot.nn.TopKSAE(8, 16, k=4), torch.nn.Module.__call__),
    "TopKAttention": (
        lambda: khot.nn.TopKAttention(8, 2, top_k=2, batch_first=True),
        lambda module, x: module(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0), need_weights=False)[0],
    ),
    "SoftKNN": (
        lambda: khot.nn.SoftKNN(3, num_classes=2),
        lambda module, x: module(x[:2], x, (x.detach()[:, 0] > 0).long()),
    ),
    "KHotGate": (lambda: khot.nn.KHotGate(8, k=3).eval(), torch.nn.Module.__call__),
    "prune_magnitude": (
        lambda: khot.nn.prune_magnitude(torch.nn.Linear(8, 4), "weight", 0.5, tau=0.5),
        torch.nn.Module.__call__,
    ),
    "prune_n_m": (
        lambda: khot.nn.prune_n_m(torch.nn.Linear(8, 4), "weight", tau=0.5),
        torch.nn.Module.__call__,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, device: single.Device) -> None:
    make, call = LAYERS[name]
    torch.manual_seed(0)
    module = make()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
    twin = copy.deepcopy(module)
    want = x.double().requires_grad_()
    got = device.put(x, requires_grad=True)
    results = [
        call(_embed(module, lambda v: v.double() if v.is_floating_point() else v), want),
        call(_embed(twin, device.put), got),
    ]
    for result in results:
        result.square().sum().backward()
    pairs = [(results[1], results[0]), (got.grad, want.grad)]
    pairs += [(b.grad, a.grad) for a, b in zip(module.parameters(), twin.parameters(), strict=True)]
    errors = [error(device.fetch(g), w.detach()) for g, w in pairs if w is not None]
    assert max(errors) <= 2e-5, errors
