"""Every public operator on a device without float64 (single.py), against its results in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils._pytree import tree_leaves

import khot
import modes
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
UNTRACED = {"sorted_soft_topk", "soft_assign", "sigmoid_topk", "laplace_topk", "sparse_topk", "soft_median"}
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


# two of these are found on the CPU, and what is traced has no data to go there; the others are calls of those
# that are traced
@pytest.mark.filterwarnings(
    r"ignore:aten..where. an autograd kernel was not registered"
)  # of "meta", in torch
@pytest.mark.parametrize(
    "op",
    [op for op in ONCE if op.name not in UNTRACED],
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


LABEL, ORDER = torch.tensor([2, 4]), torch.tensor([[0, 3, 1, 2, 4], [4, 3, 2, 1, 0]])
losses, baselines, poisson = khot.losses, khot.baselines, khot.sampling.conditional_poisson
natural, given = khot.distributions.ConditionalPoisson, khot.distributions.KHot


def prescribed(logits: Tensor) -> khot.distributions.KHot:
    return given(3, logits=logits, design="conditional_poisson")


def cross_entropy(**options: Any) -> Callable[[Tensor], Tensor]:
    loss = losses.TopKCrossEntropyLoss({1: 0.5, 2: 0.5}, **options)
    return lambda x: loss(x, LABEL.to(x.device))


def ranked(name: str, *k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(losses, f"{name}_loss")(x, K_HOT.to(x), *k, tau=0.5)


PLAIN = "sequential_softmax rescaled_sigmoid masked_softmax neuralsort softsort pav generic_pav root_finding"
#: Functions of logits, of probabilities where that is said, or of two rows of logits.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{
        f"conditional_poisson.{name}": partial(getattr(poisson, name), k=3)
        for name in ("log_normalizer", "marginals", "joint_marginals", "entropy")
    },
    "conditional_poisson.log_prob": lambda x: poisson.log_prob(K_HOT.to(x.device), x, 3),
    "conditional_poisson.kl": lambda x: poisson.kl(x, x.flip(-1), 3),
    "score_function": lambda x: khot.estimators.score_function(x[0], x[1], "leave_one_out"),
    "ConditionalPoisson, entropy": lambda x: natural(3, x).entropy(),
    "KHot, entropy": lambda x: prescribed(x).entropy(),
    "kl_divergence": lambda x: torch.distributions.kl_divergence(prescribed(x), natural(3, x)),
    "FenchelYoungTopKLoss": lambda x: losses.FenchelYoungTopKLoss(3)(x, K_HOT.to(x)),
    "TopKCrossEntropyLoss": cross_entropy(),
    "TopKCrossEntropyLoss, softmax": cross_entropy(top1_mode="softmax", m=4),
    "TopKCrossEntropyLoss, cross-entropy": cross_entropy(top1_mode="cross_entropy", m=4),
    "permutation_cross_entropy": lambda x: losses.permutation_cross_entropy(x, ORDER.to(x.device)),
    "size_penalty of probabilities": lambda p: losses.size_penalty(p, 0.1),
    **{f"{name}_loss": ranked(name) for name in ("spearman", "ndcg", "average_precision")},
    **{f"{name}_loss at 2": ranked(name, 2) for name in ("ndcg", "recall_at_k", "precision_at_k")},
    "log_rank_loss": lambda x: losses.log_rank_loss(x, K_HOT.to(x)),
    **{f"baselines.{name}_topk": partial(getattr(baselines, f"{name}_topk"), k=2) for name in PLAIN.split()},
    **{
        f"baselines.{name}_topk": partial(getattr(baselines, f"{name}_topk"), k=2, iterations=5)
        for name in ("sinkhorn", "sorted_sinkhorn", "block_ascent")
    },
    "baselines.neuralsort_permutation": baselines.neuralsort_permutation,
    "baselines.softsort_permutation": baselines.softsort_permutation,
    "soft_assign": partial(khot.soft_assign, k=2, tau=0.5),
    "soft_assign, at most": partial(khot.soft_assign, k=2, capacity=1.0, tau=0.5, at_most=True),
    **{
        f"soft_assign, bounded, {cdf}": partial(khot.soft_assign, k=(1, 2), total=3.2, tau=0.5, cdf=cdf)
        for cdf in ("logistic", "uniform")
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str, device: single.Device) -> None:
    """Agree with those in float64 on the CPU."""

    def run(put: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaf = put((PROBS if "of probabilities" in name else LOGITS).to(dtype)).requires_grad_()
        y = FUNCTIONS[name](leaf)
        cotangent = put(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype))
        return [y, *torch.autograd.grad(y, leaf, cotangent.to(y.dtype))]

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


def test_conditional_poisson(device: single.Device) -> None:
    # calibrated for what float32 makes of the probabilities
    theta = device.fetch(poisson.calibrate(device.put(PROBS)))
    assert error(theta, poisson.calibrate(PROBS).double()) <= 1e-5
    x = device.fetch(poisson.sample(device.put(LOGITS), 3, sample_shape=(8,)))
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


@pytest.mark.parametrize("design", ["conditional_poisson", "sampford"])
def test_khot_distribution(design: str, device: single.Device) -> None:
    def log_prob(probs: Tensor) -> Tensor:
        p = khot.distributions.KHot(k.to(probs.device), probs=probs, design=design)
        return p.log_prob(value.to(probs.device))

    k = torch.tensor([3, 2])
    value = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    there = device.fetch(log_prob(device.put(PROBS)))
    assert error(there, log_prob(PROBS)) <= 2e-6


def test_samples_of_distributions(device: single.Device) -> None:
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


def _embed(module: nn.Module, put: Callable[[Tensor], Tensor]) -> nn.Module:
    """The module, with its parameters and buffers put."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(put(value.detach()))
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = put(value)
    return module


# the prices of a gate stay in float64
@pytest.mark.parametrize(
    "name", [name for name, row in modes.ROWS.items() if row.inputs and name != "KHotGate-prices"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layers(training: bool, name: str, device: single.Device) -> None:
    def run(module: nn.Module, put: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        module = _embed(module.train(training), put)
        x = [put(v).requires_grad_(v.is_floating_point()) for v in modes.ROWS[name].inputs]
        y = modes.output(module, tuple(x))
        if y.requires_grad:
            y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in (*x, *module.parameters()))]

    def there(v: Tensor) -> Tensor:
        return device.put(v.float() if v.is_floating_point() else v)

    want, got = run(modes.make(name), torch.clone), run(modes.make(name).float(), there)
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if w is not None]
    errors = [error(device.fetch(g), w) for g, w in pairs if g is not None]
    assert len(errors) == len(pairs) and max(errors) <= 2e-5, errors
