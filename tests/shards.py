"""The functions that the processes of `processes.py` run for test_sharded.py. They import this module."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import khot
import processes


@contextmanager
def collectives() -> Iterator[list[int]]:
    """The bytes of each all-reduce, as torch.distributed is asked for them; any other collective fails."""
    sizes: list[int] = []
    real = dist.all_reduce

    def counting(block: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(block.numel() * block.element_size())
        return real(block, *args, **options)

    names = ("all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all", "reduce_scatter")
    refuse = mock.Mock(side_effect=AssertionError("a row must not be gathered"))
    with mock.patch.multiple(dist, all_reduce=counting, **dict.fromkeys(names, refuse)):
        yield sizes


def shard(value: Any, cuts: list[int], rank: int, n: int) -> Any:
    """This rank's part of a tensor with n entries along the last dim."""
    if isinstance(value, Tensor) and value.dim() and value.shape[-1] == n:
        return value[..., cuts[rank] : cuts[rank + 1]].contiguous()
    return value


#: Of a call with matrices, the arguments whose rows are spread over processes.
OF_ROWS = {"soft_assign": 2, "soft_assign within bounds": 3}


def computed(
    name: str, args: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result, what it is differentiable in, and what else there is."""
    if name == "soft_assign":
        x, k, capacity, tau = args
        y, bias = khot.soft_assign(x, k, capacity, tau=tau, return_bias=True, **options)
        return y, args, [bias]
    if name == "soft_assign within bounds":
        x, least_k, most_k, least, most, tau, *total = args
        options = {"total": total[0] if total else None, "tau": tau, **options}
        y, bias = khot.soft_assign(x, (least_k, most_k), (least, most), return_bias=True, **options)
        return y, args, [bias]
    if name == "soft_budget":
        x, cost, budget, tau = args
        return khot.soft_budget(x, cost, budget, tau=tau, **options), args, []
    x, k, tau = args
    scale = {"epsilon": tau} if name == "ot_topk" else {"tau": tau}
    y = getattr(khot, name)(x, k, **scale, **options)
    return y, [x, tau, *[k] * (name != "soft_topk_magnitude")], []


def derivatives(
    name: str, options: dict[str, Any], args: list[Tensor], weights: Tensor, second: bool = True
) -> list[Tensor]:
    """The result, its gradients without and with a recorded backward pass, and second derivatives."""
    y, leaves, others = computed(name, [v.detach().clone().requires_grad_() for v in args], options)
    loss = (y.masked_fill(y.isinf(), 0).square() * weights).sum()
    found = [*torch.autograd.grad(loss, leaves, retain_graph=True)]
    if second:
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        # terms that are spread, like their inputs, and that are replicated
        outer = sum(
            (g * weights.sin()).sum() if g.shape == weights.shape else g.square().sum() for g in again
        )
        found += [*again, *torch.autograd.grad(outer, leaves, allow_unused=True, materialize_grads=True)]
    return [v.detach() for v in (y, *found, *others)]


def derivatives_of_shards(
    group: Any,
    name: str,
    options: dict[str, Any],
    args: list[Tensor],
    weights: Tensor,
    cuts: list[int],
    second: bool = True,
) -> list[Tensor]:
    n, rank = args[0].shape[-1], group.rank()
    if name in OF_ROWS:
        mine = slice(cuts[rank], cuts[rank + 1])
        args = [v[:, mine] for v in args[: OF_ROWS[name]]] + args[OF_ROWS[name] :]
        weights = weights[:, mine].contiguous()
    else:
        options = {key: shard(value, cuts, rank, n) for key, value in options.items()}
        args, weights = [shard(v, cuts, rank, n) for v in args], shard(weights, cuts, rank, n)
    return derivatives(name, {**options, "group": group}, args, weights, second)


def joined(parts: Sequence[Tensor], like: Tensor, dim: int = -1) -> Tensor:
    """Shards as one tensor; replicated tensors must be bitwise the same on all ranks."""
    if -like.dim() <= dim < like.dim() and sum(part.shape[dim] for part in parts) == like.shape[dim]:
        return torch.cat([*parts], dim)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def assert_like_whole_rows(
    world: int,
    name: str,
    options: dict[str, Any],
    args: list[Tensor],
    weights: Tensor,
    cuts: list[int],
    second: bool = True,
) -> None:
    """Values and derivatives of shards are those of whole rows."""
    given = (name, options, args, weights)
    shares = processes.run(world, derivatives_of_shards, *given, cuts, second)
    close, dim = (1e-8, 1) if name in OF_ROWS else (1e-9, -1)
    for parts, want in zip(zip(*shares, strict=True), derivatives(*given, second), strict=True):
        got = joined(parts, want, dim)
        torch.testing.assert_close(got, want, rtol=close, atol=close, equal_nan=True)


def passes(group: Any, name: str, options: dict[str, Any], args: list[Tensor], cuts: list[int]) -> Tensor:
    """How many passes over each row the search for its threshold takes."""
    kernel = sys.modules[f"khot._kernels.reference.{name}"]
    counted: list[Tensor] = []

    def counting(*problem: Any) -> Any:
        found = root(*problem)
        counted.append(found[2].flatten())
        return found

    root, n = kernel.root, args[0].shape[-1]
    with mock.patch.object(kernel, "root", counting):
        getattr(khot, name)(*(shard(v, cuts, group.rank(), n) for v in args), group=group, **options)
    return torch.cat(counted)


def rows_assigned(group: Any, x: Tensor, k: float, options: dict[str, Any], cuts: list[int]) -> Tensor:
    mine = slice(cuts[group.rank()], cuts[group.rank() + 1])
    options = {name: v[mine] if isinstance(v, Tensor) else v for name, v in options.items()}
    return khot.soft_assign(x[mine], k, group=group, **options)


def call(
    group: Any, name: str, options: dict[str, Any], x: Tensor, k: Any, cuts: list[int], backward: bool = False
) -> tuple[Tensor, list[int], list[int]]:
    """The shard of the result, and the all-reduces of the forward and of the backward pass."""
    n = x.shape[-1]
    options = {key: shard(value, cuts, group.rank(), n) for key, value in options.items()}
    x = shard(x, cuts, group.rank(), n).requires_grad_(backward)
    with collectives() as forward:
        y = getattr(khot, name)(x, k, **options, group=group)
    with collectives() as back:
        if backward:
            y.square().sum().backward()
    return y.detach(), forward, back


def of_order_statistics(
    group: Any, name: str, options: dict[str, Any], x: Tensor, argument: Any, cuts: list[int]
) -> tuple[Tensor, Tensor]:
    """The value, and the shard of the gradient of the sum of all processes' values."""
    n, rank = x.shape[-1], group.rank()
    options = {key: shard(value, cuts, rank, n) for key, value in options.items()}
    x = shard(x, cuts, rank, n).requires_grad_()
    with collectives():
        value = getattr(khot, name)(x, argument, **options, group=group)
        (grad,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), grad


def failure(group: Any, name: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> str:
    """The error of a call with different arguments on each rank; after it, a correct call must work."""
    args, options = calls[group.rank()]
    try:
        operator.attrgetter(name)(khot)(*args, **options, group=group)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "none"
    y = khot.soft_topk(torch.zeros(3), 1, group=group)
    assert torch.allclose(y.sum() * group.size(), torch.ones(()))
    return text


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The same mesh for every test: its groups stay, and gloo connects no more than some dozens of them."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_dtensors(
    group: Any,
    name: str,
    options: dict[str, Any],
    args: list[Tensor],
    weights: Tensor,
    mesh_shape: tuple[int, ...],
    places: str,
    compiled: bool = False,
) -> tuple[list[Tensor], list[str]]:
    """The whole result and gradients, and their placements: r(eplicated), p(artial), or a dim."""
    mesh = mesh_of(mesh_shape)
    placements = [Replicate() if p == "r" else Partial() if p == "p" else Shard(int(p)) for p in places]
    if "p" in places:
        local = args[0] / mesh.size(placements.index(Partial()))
        x = DTensor.from_local(local, mesh, placements, run_check=False).detach().requires_grad_()
    else:
        x = distribute_tensor(args[0], mesh, placements).requires_grad_()
    k, tau = (v.clone().requires_grad_() for v in args[1:])

    def function(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        if name == "topk_mask":
            return khot.topk_mask(x, k, **options)
        return getattr(khot, name)(x, k, tau=tau, **options)

    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    y = function(x, k, tau)
    values, where = [y.detach()], [str(y.placements)]  # type: ignore[attr-defined]
    if y.requires_grad:
        cotangent = distribute_tensor(weights, mesh, y.placements)  # type: ignore[attr-defined]
        values += torch.autograd.grad(y, (x, k, tau), cotangent, allow_unused=True, materialize_grads=True)
        where.append(str(values[1].placements))  # type: ignore[attr-defined]
    return [v.full_tensor() if isinstance(v, DTensor) else v for v in values], where


def compiled_with_a_group(group: Any, name: str, x: Tensor, cuts: list[int]) -> list[Tensor]:
    torch.compiler.reset()
    function = getattr(khot, name)
    compiled = torch.compile(lambda x: function(x, 3.0, group=group), backend="aot_eager", fullgraph=True)
    x = shard(x, cuts, group.rank(), x.shape[-1]).requires_grad_()
    y = compiled(x)
    if y.requires_grad:
        y.square().sum().backward()
    return [y.detach(), x.grad if y.requires_grad else torch.zeros_like(y)]


def compiled_order_statistics(
    group: Any, name: str, argument: Tensor, options: dict[str, Any], x: Tensor, cuts: list[int]
) -> list[list[Tensor]]:
    """The values and gradients of compiled and of eager code."""
    torch.compiler.reset()
    whole = getattr(khot, name)
    options = {key: shard(value, cuts, group.rank(), x.shape[-1]) for key, value in options.items()}

    def call(x: Tensor, argument: Tensor) -> Tensor:
        return whole(x, argument, **options, group=group)

    found = []
    for function in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        leaf = shard(x, cuts, group.rank(), x.shape[-1]).clone().requires_grad_()
        level = argument.clone().requires_grad_(name == "quantile")
        y = function(leaf, level)
        wanted = [leaf, level] if name == "quantile" else [leaf]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), wanted)])
    return found


def checked_operators(group: Any) -> set[str]:
    """The operators for shards, which are right by torch.library.opcheck with a group of one."""
    ops, checked = torch.ops.khot, set()

    def check(name: str, *args: Any, on: str = group.group_name) -> Any:
        op = getattr(ops, f"reference_{name}")
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op.default, (*args, on), test_utils=tests)
        checked.add(f"reference_{name}")
        return op(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args), on)

    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k, tau = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    one = torch.ones_like(tau)
    for cdf, shape in (("logistic", 0.0), ("power", 1.5)):
        out, *t = check("soft_topk", x, k, tau, cdf, shape, "y")
        check("soft_topk_backward", torch.ones_like(out), one, x, *t, tau, cdf, shape, "y", None)
    for centred in (False, True):
        given = (x, x[:, :3], tau, "normal", 0.0, centred)
        check("soft_count", *given)
        check("soft_count_backward", one[:1].expand(3, 3), *given, on="")
    places = torch.stack((k, k + 1), -1)
    values = check("order_statistics", x, places)
    check("order_statistics_backward", x, values, torch.ones_like(values))
    for by in ("score", "value"):
        args = (x, torch.rand(3, 7, dtype=torch.float64) + 0.5, k, tau, "logistic", 1.0, by, False)
        y, *t = check("soft_budget", *args)
        check("soft_budget_backward", torch.ones_like(y), one, *args[:2], *t, *args[3:])
    for name in ("total", "share"):
        check(name, tau.clone().requires_grad_())
    check("topk_mask", x, k)
    y, hi, lo = check("soft_topk_magnitude", x.abs(), k, tau, 1.5, False)
    grads = (torch.ones_like(y), one)
    check("soft_topk_magnitude_backward", *grads, x.abs(), y, k, hi, lo, tau, 1.5, False)
    return checked


def left_alone(group: Any) -> tuple[str, float]:
    """The last rank does not call: the error that the others get, and after how many seconds."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if group.rank() == group.size() - 1:
        return "", 0.0
    start = time.monotonic()
    try:
        khot.soft_topk(torch.zeros(3), 1, group=group)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def drawn(group: Any, name: str, x: Tensor, options: dict[str, Any], cuts: list[int]) -> Tensor:
    torch.manual_seed(group.rank())
    x = shard(x, cuts, group.rank(), x.shape[-1])
    if name == "gumbel_topk":
        return khot.sampling.gumbel_topk(x, 4, **options, group=group)
    return khot.sampling.sample(x, **options, group=group)


def prune(model: nn.Sequential, how: str) -> None:
    if how == "n of m":
        khot.nn.prune_n_m(model[0], "weight", 1, 2, tau=0.5)
        khot.nn.prune_n_m(model[2], "weight", 2, 4, tau=0.5)
        return
    options: dict[str, Any] = {"score": {"by": "score"}, "bounded": {"min_share": 0.45, "max_share": 0.55}}
    khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], 0.5, tau=0.5, **options.get(how, {}))


def pruned(group: Any, kind: str, how: str) -> tuple[Tensor, list[int]]:
    """Three steps with half of the weights pruned; the model's output after them, and the zeros of its
    layers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, x, target = small_model()
    if kind == "tensor parallel":
        mesh = mesh_of((world,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    prune(model, how)
    share = slice(None)
    if kind.startswith("FSDP"):
        twice = kind == "FSDP, replicated"
        mesh = mesh_of((2, 2) if twice else (world,), ("copies", "parts")[1 - twice :])
        for part in (model[0], model[2], model) if kind != "FSDP of the whole" else (model,):
            fully_shard(part, mesh=mesh)
        share = slice(rank, None, world)
    zeros: list[int] = []
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(lambda layer, _: zeros.append(int(_full(layer.weight).eq(0).sum())))
    y = three_steps(model, x, target, share)
    return y, zeros[-2:]


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def small_model() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    return model, torch.randn(8, 6).double(), torch.randn(8, 4).double()


def three_steps(model: nn.Module, x: Tensor, target: Tensor, share: slice = slice(None)) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = (model(x[share]) - target[share]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return _full(model.eval()(x)).clone()


# -------------------------------------------------------------------- balanced experts


def balanced(group: Any, scores: list[Tensor], k: int, tokens: list[int]) -> tuple[list[Tensor], list[int]]:
    """The biases of two balancers, for other columns of the scores, after each of some updates and after a
    cold start, and the bytes of the all-reduces of the updates. Rank i has the tokens from tokens[i] on."""
    first, last = tokens[group.rank()], tokens[group.rank() + 1]
    width = scores[0].shape[-1]
    layers = nn.ModuleList([khot.nn.QuantileBalancer(n, k, bins=256) for n in (width, width - 3)])
    found: list[Tensor] = []
    with collectives() as sizes:
        for step in scores:
            for part in step[first:last].split(7):  # micro-batches, of which a rank may have none
                for layer in layers:
                    layer(part[:, : layer.num_experts])
            khot.nn.QuantileBalancer.update_all(layers, group)
            found += [layer.bias.clone() for layer in layers]
        updates = list(sizes)
    for layer in layers:
        layer.solve(scores[0][first:last, : layer.num_experts], group=group)
    return [*found, *(layer.bias.clone() for layer in layers)], updates


class Scored(nn.Module):
    """Scores times a weight of 1 per expert, and the experts that a balancer chooses by them."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts))
        self.balancer = khot.nn.QuantileBalancer(experts, k)

    def forward(self, x: Tensor) -> Tensor:
        scores = x * self.weight
        return scores.gather(-1, self.balancer(scores.detach())).sum()


def buffers_argument() -> str:
    """What switches the copies of buffers off, which torch 2.13 has given another name."""
    names = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"


def data_parallel(model: nn.Module, group: Any, broadcast: bool) -> DistributedDataParallel:
    """With or without copies of the first process's buffers before each forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return DistributedDataParallel(model, process_group=group, **{buffers_argument(): broadcast})


def balanced_in_ddp(group: Any, steps: list[Tensor], k: int, broadcast: bool, how: str) -> list[Tensor]:
    """The biases after each update, in DistributedDataParallel. Rank i has each world-th token from i on."""
    model = data_parallel(Scored(steps[0].shape[-1], k), group, broadcast)
    found = []
    for step in steps:
        own = step[group.rank() :: group.size()]
        parts = [own] if how == "one forward pass" else list(own.split(9))
        for i, part in enumerate(parts):
            waits = how != "synchronised each time" and i < len(parts) - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                model(part).backward()
        if how == "evaluation before the update":
            evaluate(model, own)
        khot.nn.QuantileBalancer.update_all(model, group)
        evaluate(model, own)
        found.append(model.module.balancer.bias.clone())
    return found


def evaluate(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


# ------------------------------------------------------- layers that are trained together


def sparse_autoencoder(**options: Any) -> khot.nn.TopKSAE:
    """One of whose latents some are soon idle."""
    torch.manual_seed(0)
    sae = khot.nn.TopKSAE(8, 24, 3, **{"revive": 4} | options, dtype=torch.float64)
    with torch.no_grad():
        sae.encoder_bias[12:] = -1.5
        sae.decoder = sae.decoder * torch.linspace(0.5, 1.5, 24, dtype=torch.float64).unsqueeze(-1)
    return sae


def trained_sae(
    group: Any, kind: str, options: dict[str, Any], batches: list[Tensor]
) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """The losses of the steps, the state after them, and results of eval mode on the last batch. Rank i has
    every world-th input from i on; a group of None has the whole batch."""
    sae = sparse_autoencoder(**options)
    sae.group = group
    sae = copy.deepcopy(sae)  # as pickle.dumps, which processes that train for others need
    part = slice(None) if group is None else slice(group.rank(), None, group.size())
    model: nn.Module = sae
    if kind.startswith("DDP"):
        model = data_parallel(sae, group, "broadcast" in kind)
    elif kind.startswith("FSDP2"):
        model = fully_shard(sae, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    many = 1 if "candidates" in kind else khot.nn.sae.MANY
    for x in batches:
        optimizer.zero_grad()
        if "checkpoint" in kind:
            loss = checkpoint(model, x[part], loss=True, use_reentrant=False)
        else:
            with mock.patch.object(khot.nn.sae, "MANY", many):
                loss = sae.loss(x[part]) if kind.startswith("FSDP2") else model(x[part], loss=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    x = batches[-1]
    with torch.no_grad():
        values, indices = sae.top(x)
        results = [values, indices, sae.encode(x), sae.decode(values, indices), sae(x), sae.loss(x)]
    return losses, {name: _full(x).clone() for name, x in sae.state_dict().items()}, results


def balanced_together(group: Any, batches: list[Tensor], cuts: list[int]) -> list[Tensor]:
    """The selections of a BalancedRouter, its gradient and its biases."""
    torch.manual_seed(0)
    router = khot.nn.BalancedRouter(5, 4, 2, tau=0.5, group=group, dtype=torch.float64)
    part = slice(None) if group is None else slice(cuts[group.rank()], cuts[group.rank() + 1])
    selections = []
    for x in batches:
        routing = router(x[part])
        selections.append(routing.selection.detach())
        routing.weights.square().sum().backward()
    grad = router.weight.grad
    assert grad is not None
    if group is not None:
        dist.all_reduce(grad, group=group)
    return [torch.cat(selections, -1), grad, router.bias]


def told_its_group(group: Any) -> tuple[bool, bool]:
    """Whether a layer that knows its group can be pickled, and whether it refuses what is no group."""
    sae = sparse_autoencoder(group=group)
    again = pickle.loads(pickle.dumps(sae))
    try:
        sae.group = "world"
    except TypeError as error:
        return again.group is group is sae.group, "group must be a torch.distributed.ProcessGroup" in str(
            error
        )
    return False, False


# -------------------------------------------------------------------- whole rows of DTensors


def whole_rows() -> dict[str, tuple[Any, bool]]:
    """Functions of (x, k, tau) on the rows of x (5, 6), one k and tau each, and whether k is a constant."""
    from operators import OPERATORS  # imported late, because few tests here need the oracles

    targets, losses, prob = torch.arange(30).view(5, 6) * 7 % 11, khot.losses, torch.sigmoid
    targets[1] = 0  # a list that is left out of the mean
    labels, order = (targets > 6).long(), targets.argsort(-1)
    mask, levels = targets % 5 > 0, torch.arange(15).view(5, 3) / 4 + 0.5
    design, poisson = khot.sampling, khot.sampling.conditional_poisson
    # one row of the table for each operator
    first = {op.name: (op.call, op.integer_k) for op in reversed(OPERATORS)}
    every: dict[str, tuple[Any, bool]] = {
        name: row for name, row in first.items() if name not in ("sorted_soft_topk", "soft_assign", "topk")
    }
    every |= {
        "topk": (lambda x, k, tau: khot.topk(x, 2).values, True),
        "linear_topk": (
            lambda x, k, tau: khot.linear_topk(x, targets.cos().double() * tau[:, None], 2, tau).values,
            True,
        ),
        "sorted_soft_topk": (lambda x, k, tau: khot.sorted_soft_topk(x, 2, epsilon=tau), True),
        "along the first dim": (lambda x, k, tau: khot.soft_sort(x[None], 2, tau=tau[None]), True),
        "masked": (lambda x, k, tau: khot.soft_rank(x, tau=tau, mask=mask), True),
        "masked alike": (lambda x, k, tau: khot.soft_rank(x, tau=tau, mask=mask[0]), True),
        "many levels": (lambda x, k, tau: khot.soft_count(x, levels, tau=tau), True),
        "several quantiles": (lambda x, k, tau: khot.quantile(x, torch.tensor([0.1, 0.7]).double()), True),
        "kept dim": (lambda x, k, tau: khot.quantile(x, 0.3, keepdim=True), True),
        "costs": (lambda x, k, tau: khot.soft_budget(x, mask + torch.ones(6).double(), k, tau=tau), False),
        "own shape": (lambda x, k, tau: khot.project_permutahedron(x, tau[:1] * targets[0], tau=tau), True),
        "inclusion_probs": (lambda x, k, tau: design.inclusion_probs(prob(x), "sampford"), True),
        "joint": (lambda x, k, tau: design.joint_inclusion_probs(prob(x), "poisson"), True),
        "marginals": (lambda x, k, tau: poisson.marginals(x, k.detach().round()), True),
        "log_normalizer": (lambda x, k, tau: poisson.log_normalizer(x, k.detach().round()), True),
        "kl": (lambda x, k, tau: poisson.kl(x, x.detach().sin(), 2), True),
    }
    few = {"mask": torch.ones_like(mask).scatter(1, order[:, 5:], False)}
    some = {"mask": mask & (torch.arange(5) > 1).unsqueeze(-1)}
    cross, fenchel_young = losses.TopKCrossEntropyLoss, losses.FenchelYoungTopKLoss
    reduced = {
        "spearman": lambda x, k, **o: losses.spearman_loss(x, targets, **o),
        "ndcg": lambda x, k, **o: losses.ndcg_loss(x, targets, k.detach(), mask=mask, **o),
        "log rank": lambda x, k, tau, **o: losses.log_rank_loss(x, labels, **o),
        "average precision": lambda x, k, **o: losses.average_precision_loss(x, labels, **o),
        "recall": lambda x, k, **o: losses.recall_at_k_loss(x, labels, k.detach(), **o),
        "precision": lambda x, k, **o: losses.precision_at_k_loss(x, labels, 2, **o),
        "hit": lambda x, k, **o: losses.hit_at_k_loss(x, labels, 2, **o),
        "permutation": lambda x, k, **o: losses.permutation_cross_entropy(x, order, **o),
        "permutation masked": lambda x, k, **o: losses.permutation_cross_entropy(x, order, **few, **o),
        "cross-entropy masked": lambda x, k, **o: cross(2, **o)(x, order[:, 0], **few),
        "Fenchel-Young": lambda x, k, **o: fenchel_young(2, **o)(x, (order < 2).long()),
        "size of rows with entries": lambda x, k, tau, **o: losses.size_penalty(prob(x), tau, **some, **o),
        "cross-entropy": lambda x, k, **o: cross({2: 0.5, 3: 0.5}, **o)(x, order[:, 0]),
    }
    every |= {
        f"{name} {how}": (lambda x, k, tau, f=loss, how=how: f(x, k, tau=tau, reduction=how), True)
        for name, loss in reduced.items()
        for how in ("mean", "sum", "none")
    }
    every["size_penalty"] = (lambda x, k, tau: losses.size_penalty(prob(x), tau), True)
    return every


def differ_on_whole_rows(group: Any, place: str) -> list[str]:
    """The functions whose results or gradients differ from those of plain tensors: r(eplicated), p(artial),
    or sharded along dim 0."""
    mesh = mesh_of((group.size(),))
    start = torch.Generator().manual_seed(0)
    args = [
        torch.randn(5, 6, generator=start).double(),
        torch.tensor([2.0, 3.0, 2.0, 3.0, 3.0]).double(),
        torch.linspace(0.5, 1.5, 5).double(),
    ]
    where = {"r": Replicate(), "p": Partial(), "0": Shard(0)}[place]
    wrong = []
    for name, (function, constant) in whole_rows().items():
        plain = [v.clone().requires_grad_() for v in args]
        spread = [v.clone().requires_grad_() for v in args]
        if place == "p":
            spread[0] = DTensor.from_local(args[0] / group.size(), mesh, [where]).requires_grad_()
        else:
            spread[0] = distribute_tensor(args[0], mesh, [where]).requires_grad_()
        if constant:
            plain[1], spread[1] = plain[1].detach(), spread[1].detach()
        try:
            want, got = function(*plain), function(*spread)
            if not isinstance(got, DTensor) or got.shape != want.shape:
                raise AssertionError(f"got {type(got)} of shape {tuple(got.shape)}")
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)
            scattered = any(isinstance(p, Shard) for p in got.placements)
            if scattered != (
                place == "0" and bool(got.dim()) and not name.endswith((" mean", " sum", "penalty"))
            ):
                raise AssertionError(f"got the placements {got.placements}")
            leaves = [i for i in range(3) if want.requires_grad and plain[i].requires_grad]
            if leaves:
                w = torch.arange(want.numel()).double().cos().view(want.shape)
                options = {"allow_unused": True, "materialize_grads": True}
                expected = torch.autograd.grad(want, [plain[i] for i in leaves], w, **options)
                grads = torch.autograd.grad(
                    got, [spread[i] for i in leaves], distribute_tensor(w, mesh, got.placements), **options
                )
                for a, b in zip(grads, expected, strict=True):
                    torch.testing.assert_close(_full(a), b, rtol=1e-8, atol=1e-8)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return wrong


def refusals(group: Any) -> dict[str, str]:
    """The errors of what takes no DTensor, and of rows that are not whole."""
    mesh = mesh_of((group.size(),))
    whole = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).double()
    x, spread = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])
    design, poisson, estimators = khot.sampling, khot.sampling.conditional_poisson, khot.estimators
    calls: dict[str, Any] = {
        "soft_assign": lambda: khot.soft_assign(x, 2, 4),
        "sample_khot": lambda: khot.sample_khot(x, 2),
        "sample": lambda: design.sample(x),
        "gumbel_topk": lambda: design.gumbel_topk(x, 2),
        "conditional Poisson": lambda: poisson.sample(x, 2),
        "log_prob": lambda: poisson.log_prob(whole.round(), x, 2),
        "reinmax with tau": lambda: estimators.reinmax(x, tau=2.0),
        "gumbel": lambda: estimators.gumbel(x, 2),
        "reinmax": lambda: estimators.reinmax(x),
        **{
            name: lambda name=name: getattr(estimators, name)(x, 2)
            for name in ("straight_through", "second_order", "simple", "imle", "sequential_softmax", "ncpss")
        },
        "KHot": lambda: khot.distributions.KHot(2, logits=x),
        "solve": lambda: khot.nn.QuantileBalancer(6, 2).solve(x),
        "a mask alone": lambda: khot.soft_rank(whole, mask=x > 0.5),
        "a target alone": lambda: khot.losses.spearman_loss(whole, x),
        "a tau alone": lambda: khot.soft_topk(whole, 2, tau=x[:, 0]),
        "group": lambda: khot.quantile(x, 0.5, group=group),
        **{
            f"spread {name}": lambda name=name: getattr(khot, name)(spread)
            for name in ("soft_rank", "soft_permutation", "soft_median")
        },
        "spread loss": lambda: khot.losses.spearman_loss(spread, whole),
        "spread scores": lambda: khot.nn.QuantileBalancer(6, 2)(spread),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except (TypeError, ValueError) as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = repr(error)
    return found


def balanced_on_dtensors(group: Any, x: Tensor, mask: Tensor, place: str) -> list[Tensor]:
    """The experts of a batch, and the bias after an update."""
    mesh = mesh_of((group.size(),))
    balancer = khot.nn.QuantileBalancer(x.shape[-1], 2)
    scores = distribute_tensor(x, mesh, [Replicate() if place == "r" else Shard(int(place))])
    experts = balancer(scores, mask)
    balancer.update(group)
    return [experts.full_tensor(), balancer.bias]
