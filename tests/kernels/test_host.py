"""What the host does for a GPU, without one: it waits for nothing, and launches little.

What waits also cannot be captured in a CUDA graph. A device that is there is asked in tests/test_cuda.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks import latency
from torch import Tensor

import khot
from device import Device, Waits, backward, pretend, tensor
from khot._kernels.reference import permutahedron
from khot._ops import exponential
from khot.nn._state import PASSES
from operators import OPERATORS, Operator

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(bool(os.environ.get("KHOT_KERNELS")), reason="operators are watched as they come"),
]

N = 64
PARETO = "below d = 2.5 the formula does not hold, and which rows these are decides what is computed"
CALIBRATED = "iterates until all rows have arrived"
REJECTS = "draws again until enough draws are accepted"
CHECKED = "torch.distributions looks at the arguments unless validate_args=False"

#: What waits, and why. Everything else must not.
WAITS = {
    "conditional_poisson.calibrate": CALIBRATED,
    "conditional_poisson.sample": REJECTS,
    "distributions.ConditionalPoisson": CHECKED,
    "distributions.KHot": CHECKED,
    "distributions.KHotStraightThrough": CHECKED,
    "distributions.LogitRelaxedKHot": CHECKED,
    "distributions.RelaxedKHot": CHECKED,
    "estimators.sequential_softmax": "a loop of k softmaxes",
    "estimators.simple": REJECTS,
    "sampling.inclusion_probs": PARETO,
    "sampling.sample, adjusted_conditional_poisson": PARETO,
    "sampling.sample, brewer": "draws unit by unit, as many as the row with most needs",
    "sampling.sample, repeated_poisson": REJECTS,
    "sampling.sample, sampford": REJECTS,
}

ENTRIES, LAYERS = list(latency.entries(N)), list(latency.layers(N))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    # torch turns it off for the whole process when it compiles something
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    monkeypatch.setattr(exponential, "STEPS", 3)  # all of which are taken, one like the other
    with pretend(monkeypatch) as device:
        yield device


def step(call: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.float32) -> None:
    y = call(tensor(*shape, dtype=dtype))
    if y.requires_grad:
        backward(y)


# ------------------------------------------------------------------------------------- nothing waits


@pytest.mark.parametrize("name", [*ENTRIES, *LAYERS])
def test_the_host_waits_for_nothing(device: Device, name: str) -> None:
    with torch.device("cuda") if name in LAYERS else torch.device("cpu"):
        call = (latency.layers(N) if name in LAYERS else latency.entries(N))[name]
    if name in WAITS:
        with pytest.raises((Waits, torch._subclasses.fake_tensor.DataDependentOutputException)):
            step(call, 4, N)
    else:
        step(call, 4, N)


@pytest.mark.parametrize("shape", [(), (3,)], ids=["once", "repeated"])
def test_samples_launch_little(device: Device, shape: tuple[int, ...]) -> None:
    """A seed and the draw; for Pareto sampling also the launch that looks for rows to calibrate."""
    probs = tensor(4, N).detach()
    device.forget()
    khot.sampling.sample(probs, sample_shape=shape)
    assert device.kernels == ["_pareto", "_careful"] and len(device.torch) <= 2, device.torch
    device.forget()
    khot.sampling.sample(probs, "conditional_poisson", sample_shape=shape)
    assert device.kernels == ["_conditional_poisson"] and len(device.torch) <= 2, device.torch
    for design, kernel in (("pivotal", "_duels"), ("systematic", "_systematic")):
        device.forget()
        khot.sampling.sample(probs, design, sample_shape=shape)
        assert device.kernels == [kernel] and len(device.torch) <= 2, device.torch


def test_the_list_of_what_waits_names_what_there_is() -> None:
    assert set(WAITS) <= {*ENTRIES, *LAYERS}


#: Assignments with bounds, a total or compact support, and projections in a p-norm, are found by torch
#: operations whose steps are judged.
FOUND_IN_STEPS = {"soft_assign-uniform", "project_permutahedron-1.33", "project_permutahedron-3.00"}


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.id not in FOUND_IN_STEPS], ids=lambda op: op.id)
def test_no_variant_of_an_operator_waits(device: Device, op: Operator) -> None:
    k = torch.empty(3, device="cuda")
    if op.name in ("soft_count", "inverse_soft_count"):
        k = k.unsqueeze(-1)
    step(lambda x: op.call(x, k, torch.empty(3, device="cuda")), 3, 7)


@pytest.mark.parametrize(
    "loss",
    [
        khot.losses.TopKCrossEntropyLoss({1: 0.5, 5: 0.5}),
        khot.losses.TopKCrossEntropyLoss({1: 0.5, 5: 0.5}, top1_mode="cross_entropy", m=16),
    ],
    ids=str,
)
def test_no_loss_copies_its_settings(device: Device, loss: Callable[..., Tensor]) -> None:
    labels = torch.empty(4, dtype=torch.long, device="cuda")
    step(lambda x: loss(x, labels), 4, N)


@pytest.mark.parametrize("regularization", ["l2", "kl"])
def test_recorded_and_forward_derivatives_of_projections_wait_for_nothing(
    device: Device, regularization: str
) -> None:
    """They are torch's own operations, on the blocks that the kernel found."""
    z, w, rates = tensor(4, N).detach(), torch.empty(N, device="cuda"), torch.empty(4, device="cuda")
    places = [torch.empty(4, N, dtype=torch.int32, device="cuda") for _ in range(3)]
    for tau in (rates, torch.tensor(0.5)):  # a number stays on the CPU
        permutahedron.permutahedron_backward(z, z, w, tau, *places, regularization, True)
        permutahedron.jvp_permutahedron((z, w, None), (z, w, tau, *places), regularization)
    permutahedron.jvp_permutahedron((z, w, rates), (z, w, rates, *places), regularization)


def test_no_pruning_copies_its_settings(device: Device) -> None:
    with torch.device("cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(N, N), torch.nn.Linear(N, N))
        khot.nn.prune_global(
            [(model[0], "weight"), (model[1], "weight")], 4096, min_share=0.001, max_share=0.9
        )
    step(model, 4, N)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0, 0].item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[0].tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: x + torch.ones(N).to("cuda"),
        lambda x: x * torch.tensor([2.0], device="cuda"),
        lambda x: torch.equal(x, x),
    ],
    ids=["item", "bool", "tolist", "cpu", "mask", "nonzero", "to", "tensor", "equal"],
)
def test_what_waits_is_noticed(device: Device, wait: Callable[[Tensor], Any]) -> None:
    with torch.no_grad(), pytest.raises((Waits, torch._subclasses.fake_tensor.DataDependentOutputException)):
        wait(tensor(4, N))


# ---------------------------------------------------------------------------------------- launches

# rows, n, the operator, and the kernels of ours and operations of torch that it takes forward and backward
LAUNCHES: dict[str, tuple[tuple[int, int], Callable[[Tensor], Tensor], list[int], list[int]]] = {
    **{
        f"soft_topk {shape}, {cdf}": (shape, partial(khot.soft_topk, k=8, cdf=cdf), [1, 0], [1, 0])
        for shape in ((4096, 64), (128, 1_000), (4096, 8_192), (64, 32_768))
        for cdf in ("logistic", "laplace", "normal", "uniform")
    },
    "soft_topk (64, 100_000)": ((64, 100_000), partial(khot.soft_topk, k=8), [1, 0], [1, 0]),
    "soft_topk (128, 1_000), tau": (
        (128, 1_000), lambda x: khot.soft_topk(x, 8, tau=torch.empty(128, device="cuda")), [1, 0], [1, 0],
    ),
    "log_soft_topk": ((4096, 64), partial(khot.log_soft_topk, k=8), [1, 0], [1, 0]),
    "soft_topk, packed": (
        (4096, 64), lambda x: khot.soft_topk(x.view(-1), 8, offsets=torch.arange(4097, device="cuda")),
        [2, 1], [2, 0],
    ),
    "soft_budget": ((4096, 64), lambda x: khot.soft_budget(x, x.detach(), 8.0, tau=0.5), [1, 0], [1, 0]),
    "soft_budget, at_most": (
        (16, 100_000), lambda x: khot.soft_budget(x, x.detach()[0], 8.0, by="value", at_most=True),
        [1, 0], [1, 0],
    ),
    "soft_budget (1, 1_000_000)": (
        (1, 1_000_000), lambda x: khot.soft_budget(x, x.detach(), 8.0), [9, 1], [2, 1],
    ),
    "budget_mask": ((4096, 64), lambda x: khot.budget_mask(x, x.detach(), 8.0), [1, 0], [0, 0]),
    "budget_mask (64, 8_192)": (
        (64, 8_192), lambda x: khot.budget_mask(x, x.detach(), 8.0), [5, 0], [0, 0],
    ),
    "budget_mask, by value": (
        (16, 100_000), lambda x: khot.budget_mask(x, x.detach()[0], 8.0, by="value", at_most=True),
        [1, 19], [0, 0],
    ),
    "soft_assign": ((4096, 64), partial(khot.soft_assign, k=2), [30, 10], [2, 1]),
    "soft_assign, few entries": ((64, 8), partial(khot.soft_assign, k=2), [1, 9], [2, 1]),
    "soft_assign, at_most": (
        (512, 8), partial(khot.soft_assign, k=2, capacity=150.0, at_most=True), [30, 9], [2, 1],
    ),
    "nn.BalancedRouter": (
        (512, 64), lambda x: khot.nn.BalancedRouter(64, 8, 2, device="cuda")(x).weights, [30, 41], [2, 8],
    ),
    "ot_topk": ((4096, 64), partial(khot.ot_topk, k=8), [1, 6], [1, 0]),
    "soft_topk, hard": ((4096, 64), partial(khot.soft_topk, k=8, hard=True), [2, 3], [1, 0]),
    "nn.SoftTopK": ((4096, 64), khot.nn.SoftTopK(8), [2, 0], [1, 0]),
    "nn.SoftTopK, eval": ((4096, 64), khot.nn.SoftTopK(8).eval(), [2, 0], [0, 0]),
    "nn.SoftTopK, mask": (
        (4096, 64),
        lambda x: khot.nn.SoftTopK(8)(x, torch.empty(64, dtype=torch.bool, device="cuda")),
        [2, 2], [1, 2],
    ),
    "topk": ((4096, 64), lambda x: khot.topk(x, 8).values, [1, 0], [0, 4]),
    "topk (16, 100_000)": ((16, 100_000), lambda x: khot.topk(x, 8).values, [2, 0], [0, 4]),
    "topk (100, 100_000), many": ((100, 100_000), lambda x: khot.topk(x, 10_000).values, [5, 2], [0, 4]),
    "topk_mask": ((4096, 64), partial(khot.topk_mask, k=8), [1, 0], [0, 0]),
    "topk_mask (2048, 65_536)": ((2048, 65_536), partial(khot.topk_mask, k=8), [3, 0], [0, 0]),
    "topk_mask (64, 65_536), many": ((64, 65_536), partial(khot.topk_mask, k=20_000), [4, 0], [0, 0]),
    "topk_mask (1, 1_000_000), tensor": (
        (1, 1_000_000), lambda x: khot.topk_mask(x, torch.empty(1, device="cuda")), [4, 0], [0, 0],
    ),
    "kth_value": ((4096, 64), partial(khot.kth_value, k=8), [1, 0], [1, 0]),
    "kth_value (16, 100_000)": ((16, 100_000), partial(khot.kth_value, k=8), [3, 0], [2, 0]),
    "quantile": ((4096, 64), partial(khot.quantile, q=0.3), [1, 0], [1, 0]),
    "quantile (16, 100_000)": ((16, 100_000), partial(khot.quantile, q=0.3), [4, 0], [3, 0]),
    "quantile (1, 6_300_000)": ((1, 6_300_000), partial(khot.quantile, q=0.5), [6, 0], [3, 0]),
    "quantile, tensor": (
        (4096, 64), lambda x: khot.quantile(x, torch.empty(2, device="cuda")), [1, 7], [1, 0],
    ),
    "quantile, mask": (
        (4096, 64), lambda x: khot.quantile(x, 0.3, mask=x.detach() > 0), [1, 14], [1, 2],
    ),
    "soft_quantile, linear": (
        (4096, 64), partial(khot.soft_quantile, q=0.3, interpolation="linear"), [3, 105], [7, 156],
    ),
    "soft_count": ((4096, 64), partial(khot.soft_count, at=0.0), [1, 0], [1, 0]),
    "soft_count, tensor": (
        (100, 10_000), lambda x: khot.soft_count(x, torch.empty(100, device="cuda")), [1, 1], [1, 1],
    ),
    "soft_count (1, 1_000_000)": ((1, 1_000_000), partial(khot.soft_count, at=0.5), [1, 2], [3, 0]),
    "inverse_soft_count": ((4096, 64), partial(khot.inverse_soft_count, count=8), [1, 0], [1, 0]),
    "inverse_soft_count (1, 1_000_000)": (
        (1, 1_000_000), partial(khot.inverse_soft_count, count=8), [4, 1], [2, 1],
    ),
    "soft_topk (1, 1_000_000), float64": (
        (1, 1_000_000), lambda x: khot.soft_topk(x.double(), k=8), [5, 1], [2, 3],
    ),
    "soft_topk_magnitude": ((4096, 64), partial(khot.soft_topk_magnitude, k=8), [1, 0], [1, 0]),
    "soft_topk_magnitude (1, 1_000_000)": (
        (1, 1_000_000), partial(khot.soft_topk_magnitude, k=8), [4, 0], [2, 1],
    ),
    "FenchelYoungTopKLoss": (
        (4096, 64), lambda x: khot.losses.FenchelYoungTopKLoss(8)(x, torch.empty_like(x)), [2, 0], [1, 1],
    ),
    "FenchelYoungTopKLoss (100, 100_000)": (
        (100, 100_000), lambda x: khot.losses.FenchelYoungTopKLoss(8)(x, torch.empty_like(x)), [2, 0], [1, 1],
    ),
    "FenchelYoungTopKLoss (1, 1_000_000)": (
        (1, 1_000_000), lambda x: khot.losses.FenchelYoungTopKLoss(8)(x, torch.empty_like(x)), [6, 0], [2, 1],
    ),
    "sorted_soft_topk": ((4096, 64), partial(khot.sorted_soft_topk, k=8), [1, 0], [1, 0]),
    "sorted_soft_topk, normalize": (
        (256, 64), partial(khot.sorted_soft_topk, k=8, normalize=True), [1, 10], [1, 0],
    ),
    "sample_khot": ((4096, 64), partial(khot.sample_khot, k=8), [3, 3], [1, 0]),
    "sorted_soft_topk, epsilon": (
        (64, 256), lambda x: khot.sorted_soft_topk(x, 16, epsilon=torch.empty(64, device="cuda")),
        [1, 1], [1, 0],
    ),
    "sorted_soft_topk (64, 8_192)": (
        (64, 8_192), partial(khot.sorted_soft_topk, k=16, largest=False), [2, 1], [1, 1],
    ),
    "soft_permutation": ((256, 64), khot.soft_permutation, [1, 1], [1, 1]),
    "soft_permutation, logistic, descending": (
        (64, 256), partial(khot.soft_permutation, cdf="logistic", descending=True), [1, 0], [1, 0],
    ),
    "soft_permutation, tau": (
        (64, 255), lambda x: khot.soft_permutation(x, tau=torch.empty(64, device="cuda"), descending=True),
        [1, 0], [1, 0],
    ),
    "soft_rank": ((4096, 64), khot.soft_rank, [1, 0], [1, 0]),
    "soft_rank, descending": ((4096, 64), partial(khot.soft_rank, descending=True), [1, 0], [1, 0]),
    "soft_rank, normal, descending": (
        (4096, 64), partial(khot.soft_rank, cdf="normal", descending=True), [1, 2], [3, 2],
    ),
    "soft_rank (64, 8_192)": ((64, 8_192), khot.soft_rank, [5, 0], [1, 0]),
    "soft_sort": ((4096, 64), khot.soft_sort, [1, 0], [1, 0]),
    "soft_sort (64, 8_192), descending": (
        (64, 8_192), partial(khot.soft_sort, descending=True), [6, 0], [2, 2],
    ),
    "soft_sort, descending": ((4096, 64), partial(khot.soft_sort, descending=True), [1, 0], [1, 0]),
    "ndcg_loss": ((4096, 64), lambda x: khot.losses.ndcg_loss(x, x.detach()), [3, 0], [2, 2]),
    "ndcg_loss, half precision": (
        (4096, 64), lambda x: khot.losses.ndcg_loss(x.bfloat16(), x.detach().int()), [3, 3], [2, 4],
    ),
    "ndcg_loss, mask": (
        (4096, 64), lambda x: khot.losses.ndcg_loss(x, x.detach(), mask=x.detach() > 0), [3, 3], [2, 4],
    ),
    "ndcg_loss (64, 8_192)": (
        (64, 8_192), lambda x: khot.losses.ndcg_loss(x, x.detach()), [11, 2], [2, 2],
    ),
    "spearman_loss": ((4096, 64), lambda x: khot.losses.spearman_loss(x, x.detach()), [4, 0], [2, 2]),
    "spearman_loss (64, 8_192)": (
        (64, 8_192), lambda x: khot.losses.spearman_loss(x, x.detach()), [12, 2], [2, 2],
    ),
    "average_precision_loss": (
        (4096, 64), lambda x: khot.losses.average_precision_loss(x, x.detach()), [3, 25], [2, 21],
    ),
    "soft_rank, projection": ((4096, 64), partial(khot.soft_rank, method="projection"), [1, 1], [1, 0]),
    "soft_sort, projection": ((4096, 64), partial(khot.soft_sort, method="projection"), [1, 3], [1, 2]),
    "soft_rank, projection (64, 8_192)": (
        (64, 8_192), partial(khot.soft_rank, method="projection"), [7, 3], [2, 2],
    ),
    "soft_rank, projection (1024, 8_192)": (
        (1024, 8_192), partial(khot.soft_rank, method="projection"), [5, 2], [1, 1],
    ),
    "soft_sort, projection (16, 100_000), kl": (
        (16, 100_000), partial(khot.soft_sort, method="projection", regularization="kl"), [3, 7], [2, 4],
    ),
    "project_permutahedron": (
        (4096, 64), lambda x: khot.project_permutahedron(x, torch.empty(64, device="cuda")), [1, 0], [1, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(device: Device, name: str) -> None:
    """No more than these. A change that takes fewer lowers the number here."""
    shape, call, forward, back = LAUNCHES[name]
    x = tensor(*shape)
    device.forget()
    y = call(x)
    assert len(device.kernels) == forward[0] and len(device.torch) <= forward[1], device
    device.forget()
    if y.requires_grad:
        backward(y)
    assert len(device.kernels) == back[0] and len(device.torch) <= back[1], device


#: A layer, a call of it, and what it takes forward and backward once its first passes are behind it.
OF_LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], list[int], list[int]]] = {
    "TopKRouter": (lambda: khot.nn.TopKRouter(N, 8, 2), lambda f, x: f(x).topk_weights, [1, 23], [0, 12]),
    "TopKRouter, mask": (
        lambda: khot.nn.TopKRouter(N, 8, 2),
        lambda f, x: f(x, torch.empty(len(x), dtype=torch.bool, device="cuda")).topk_weights,
        [1, 30], [0, 14],
    ),
    "TopKRouter, capacity": (
        lambda: khot.nn.TopKRouter(N, 8, 2, capacity=1.25), lambda f, x: f(x).topk_weights, [1, 38], [0, 13],
    ),
    "TopKRouter, groups": (
        lambda: khot.nn.TopKRouter(N, 8, 2, scores="sigmoid", groups=4, top_groups=2),
        lambda f, x: f(x).topk_weights,
        [3, 27], [0, 12],
    ),
    "TokenChoiceRouter": (
        lambda: khot.nn.TokenChoiceRouter(N, 8, 2), lambda f, x: f(x).weights, [1, 18], [1, 5],
    ),
    "ExpertChoiceRouter": (
        lambda: khot.nn.ExpertChoiceRouter(N, 8, 1.0), lambda f, x: f(x).weights, [1, 17], [1, 7],
    ),
    "TopKSAE": (lambda: khot.nn.TopKSAE(N, 4 * N, 8), lambda f, x: f(x), [1, 22], [0, 33]),
    "TopKSAE, eval": (lambda: khot.nn.TopKSAE(N, 4 * N, 8).eval(), lambda f, x: f(x), [1, 15], [0, 33]),
    "TopKSAE, loss": (lambda: khot.nn.TopKSAE(N, 4 * N, 8), lambda f, x: f(x, loss=True), [2, 54], [0, 103]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LAYERS)
def test_layers_launch_little(device: Device, name: str) -> None:
    """No more than these, as in :func:`test_launches`."""
    make, call, forward, back = OF_LAYERS[name]
    with torch.device("cuda"):
        layer = make()
    x = tensor(512, N)
    for _ in range(PASSES):
        call(layer, x)
    device.forget()
    y = call(layer, x)
    assert len(device.kernels) == forward[0] and len(device.torch) <= forward[1], (
        device.kernels,
        device.torch,
    )
    device.forget()
    backward(y)
    assert len(device.kernels) == back[0] and len(device.torch) <= back[1], (device.kernels, device.torch)


#: Operations of torch in an update of balancers of one kind, however many there are.
UPDATE = 104


@pytest.mark.parametrize(
    ("groups", "kernels", "operations"),
    [({}, ["_sort_short_rows"], 1), ({"groups": 8, "top_groups": 4}, 4 * ["_sort_short_rows"], 6)],
    ids=["all", "groups"],
)
def test_balancers_launch_little(
    device: Device, groups: dict[str, int], kernels: list[str], operations: int
) -> None:
    """The biases are added, the best are found, and one launch counts all distances."""
    with torch.device("cuda"):
        layers = torch.nn.ModuleList([khot.nn.QuantileBalancer(N, 8, **groups) for _ in range(32)])
        mask = torch.empty(4096, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        x = tensor(4096, N, dtype=dtype)
        for given in (None, mask):
            device.forget()
            layers[0](x, given)
            assert device.kernels == [*kernels, "_count_distances"], device.kernels
            assert len(device.torch) <= operations, device.torch
    for modules in (layers, layers[0]):
        device.forget()
        khot.nn.QuantileBalancer.update_all(modules)
        assert not device.kernels and len(device.torch) <= UPDATE, device.torch


def test_numbers_are_not_filled_in_on_the_device(device: Device) -> None:
    x = tensor(4, N)
    device.forget()
    khot.soft_topk(x, 8, tau=0.5)
    assert device.kernels == ["solve"] and not device.torch
