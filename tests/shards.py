"""What the processes of `processes.py` do for test_sharded.py; they import this module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import khot


@contextmanager
def collectives() -> Iterator[list[int]]:
    """The bytes of each all-reduce, as torch.distributed is asked for them; any other collective fails."""
    sizes: list[int] = []
    real = dist.all_reduce

    def counting(block: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(block.numel() * block.element_size())
        return real(block, *args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a row must not be gathered")

    names = ("all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all", "reduce_scatter")
    saved = {name: getattr(dist, name) for name in names}
    dist.all_reduce = counting
    for name in names:
        setattr(dist, name, refuse)
    try:
        yield sizes
    finally:
        dist.all_reduce = real
        for name in names:
            setattr(dist, name, saved[name])


def shard(value: Any, cuts: list[int], rank: int, n: int) -> Any:
    """This rank's part of what has n entries along the last dim."""
    if isinstance(value, Tensor) and value.dim() and value.shape[-1] == n:
        return value[..., cuts[rank] : cuts[rank + 1]].contiguous()
    return value


def derivatives(name: str, options: dict[str, Any], args: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, its gradients in both ways of taking them, and those of a function of these."""
    x, k, tau = args
    leaves = [x.requires_grad_(), tau.requires_grad_()]
    if name != "soft_topk_magnitude":
        leaves.append(k.requires_grad_())
    scale = {"epsilon": tau} if name == "ot_topk" else {"tau": tau}
    y = getattr(khot, name)(x, k, **scale, **options)
    loss = (y.masked_fill(y.isinf(), 0).square() * weights).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    # one that is replicated, like what it is made of, and one that is spread
    outer = (again[0] * weights.sin()).sum() + sum(g.square().sum() for g in again[1:])
    second = torch.autograd.grad(outer, leaves, allow_unused=True, materialize_grads=True)
    return [v.detach() for v in (y, *first, *again, *second)]


def derivatives_of_shards(
    group: Any, name: str, options: dict[str, Any], args: list[Tensor], weights: Tensor, cuts: list[int]
) -> list[Tensor]:
    n, rank = args[0].shape[-1], group.rank()
    options = {key: shard(value, cuts, rank, n) for key, value in options.items()}
    x = shard(args[0], cuts, rank, n)
    return derivatives(name, {**options, "group": group}, [x, *args[1:]], shard(weights, cuts, rank, n))


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


def failure(group: Any, name: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> str:
    """The error of a call with arguments of each rank's own; and then a call that is right."""
    args, options = calls[group.rank()]
    try:
        getattr(khot, name)(*args, **options, group=group)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "none"
    y = khot.soft_topk(torch.zeros(3), 1, group=group)
    assert torch.allclose(y.sum() * group.size(), torch.ones(()))
    return text
