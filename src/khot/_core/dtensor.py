"""Operators on DTensors: each process computes its own shard, together with the group that shares its rows.

Mesh dimensions that shard the batch separate the rows into independent groups: every operator computes the
rows that its process has (:func:`by_rows`). Shards along ``dim`` stay where they are, for the few operators
that work on rows spread over processes (:func:`by_shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from khot._core import arguments, rows

__all__ = ["Pieces", "by_rows", "by_shards", "local", "with_whole_dim"]


def by_shards(function: Callable[..., Tensor], input: DTensor, name: str, options: dict[str, Any]) -> DTensor:
    """The function on this process's shards of the rows of a DTensor; see ``ways.by_shards``. The result has
    the input's placements, except that partial sums are added up and replicated.

    Args:
        options: the other arguments of the function, which takes all of them as keywords. A tensor is a
            DTensor, or a plain tensor that is the same on every process. The mask is for all the entries, and
            the others broadcast with the batch shape.
    """
    arguments.check_input(input, name, distributed=True)
    dim = arguments.check_dim(input, options["dim"])
    mesh = input.device_mesh
    placements = tuple(Replicate() if p.is_partial() else p for p in input.placements)
    if placements != input.placements:
        input = input.redistribute(placements=placements)
    batch = [d for d in range(input.dim()) if d != dim]

    def shard(key: str, value: Any) -> Any:
        dims = list(range(input.dim())) if key == "mask" else batch
        return local(value, mesh, placements, dims) if isinstance(value, Tensor) else value

    options = {key: shard(key, value) for key, value in options.items()}
    # over several dimensions of the mesh, sums are reduced along one dimension after the other
    group = tuple(mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard(dim)) or None
    y = function(**{**options, name: input.to_local(), "group": group})
    like = torch.empty(input.shape, device="meta")
    return DTensor.from_local(
        y.contiguous(), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def by_rows(
    function: Callable[..., Any],
    input: DTensor,
    name: str,
    options: dict[str, Any],
    out: int,
    loss: bool,
    of_all: frozenset[str],
) -> Any:
    """The function on this process's rows of a DTensor, which must be whole; see ``ways.by_rows``.

    Partial sums of the input are added up first. The results have the placements of the rows, and a reduced
    loss is replicated.

    Args:
        options: as for :func:`by_shards`.
        out, loss, of_all: as for ``ways.by_rows``.
    """
    arguments.check_input(input, name, distributed=True)
    mesh, dim = input.device_mesh, options.get("dim", -1)
    at = arguments.check_dim(input, dim)
    placements = tuple(Replicate() if p.is_partial() else p for p in input.placements)
    if any(p.is_shard(at) for p in placements):
        raise ValueError(
            f"{name} must have whole rows along dim={dim} on every process, but got a DTensor with the "
            f"placements {tuple(input.placements)}: redistribute it, such as to Replicate()"
        )
    every = list(range(input.dim()))
    batch = [d for d in every if d != at]

    def shard(key: str, value: Any) -> Any:
        nonlocal out
        if not isinstance(value, Tensor):
            return value
        of_entries = key in arguments.OF_ENTRIES
        if key not in arguments.OF_ENTRIES | of_all and value.dim() == input.dim():  # several levels per row
            of_entries, out = True, 1
        return local(value, mesh, placements, every if of_entries else batch, shared=key in of_all)

    if placements != input.placements:
        input = input.redistribute(placements=placements)
    out = 1 if options.get("keepdim", False) else out
    options = {key: shard(key, value) for key, value in options.items()}
    split = [i for i, p in enumerate(placements) if isinstance(p, Shard)]
    others = rows.named(tuple(mesh.get_group(i) for i in split) or None)
    with rows.batch_with(others) if loss else nullcontext():
        result = function(**{name: input.to_local(), **options})
    if loss and options.get("reduction", "mean") != "none":
        parts = [Partial() if i in split else Replicate() for i in range(mesh.ndim)]
        total = DTensor.from_local(result, mesh, parts, run_check=False)
        return total.redistribute(placements=[Replicate()] * mesh.ndim)

    def join(result: Tensor) -> DTensor:
        before = result.dim() - len(batch) - out  # dims of one value for all rows, such as many quantiles
        size, places = list(result.shape), list(placements)
        for i in split:
            d = placements[i].dim  # type: ignore[attr-defined]
            moved = before + (d if d < at else d - 1 + out)
            size[moved], places[i] = input.shape[d], Shard(moved)
        like = torch.empty(size, device="meta")
        return DTensor.from_local(
            result.contiguous(), mesh, places, run_check=False, shape=like.shape, stride=like.stride()
        )

    return type(result)(*map(join, result)) if isinstance(result, tuple) else join(result)


def local(
    value: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    dims: list[int],
    shared: bool = False,
) -> Tensor:
    """This process's part of a tensor whose dimensions are these dims of the input, aligned at the right. One
    that is ``shared`` has none of them: it is the same for all rows.

    Where the processes share the input's rows, each of them has the whole gradient of the tensor. Where they
    have different rows, the gradient is the sum over the processes.
    """
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    own = dims[len(dims) - value.dim() :] if not shared and value.dim() <= len(dims) else []
    places: list[Placement] = []
    grads: list[Placement] = []
    for p in placements:
        at = own.index(p.dim) if isinstance(p, Shard) and p.dim in own else None
        split = at is not None and value.shape[at] > 1
        places.append(Shard(at) if at is not None and split else Replicate())
        same_rows = not isinstance(p, Shard) or p.dim not in dims
        grads.append(places[-1] if split or same_rows else Partial())
    return value.redistribute(placements=places).to_local(grad_placements=grads)


def with_whole_dim(function: Callable[[Tensor], Tensor], input: DTensor, dim: int) -> DTensor:
    """A function of the processes' shards, which keeps their shape and needs them whole along a dimension."""
    whole = tuple(Replicate() if p.is_partial() or p.is_shard(dim) else p for p in input.placements)
    result = function(input.redistribute(placements=whole).to_local())
    like = torch.empty(input.shape, device="meta")
    y = DTensor.from_local(
        result, input.device_mesh, whole, run_check=False, shape=like.shape, stride=like.stride()
    )
    return y.redistribute(placements=input.placements)


class Pieces:
    """Tensors on one mesh as pieces of one row: each process holds a part of every tensor, without overlap.

    A plain tensor among DTensors is whole on every process: for example, a parameter that FSDP has just
    gathered, or one that tensor parallelism does not split. Its result is whole again, and the gradient is
    the mean of the processes' gradients, as for data parallelism.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.mesh: DeviceMesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
        self.groups: tuple[dist.ProcessGroup, ...] = tuple(
            self.mesh.get_group(i) for i in range(self.mesh.ndim)
        )
        self.split: list[list[Placement]] = [
            [p if isinstance(p, Shard) else Shard(0) for p in x.placements]
            if isinstance(x, DTensor)
            else [Shard(0)] * self.mesh.ndim
            for x in tensors
        ]

    def locals(self) -> list[Tensor]:
        """This process's pieces."""
        pieces = []
        for x, placements in zip(self.tensors, self.split, strict=True):
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
            pieces.append(x.redistribute(placements=placements).to_local())
        return pieces

    def join(self, pieces: list[Tensor]) -> list[Tensor]:
        """Tensors with the placements of the original ones, from pieces of the same shapes."""
        whole: list[Tensor] = []
        for y, x, placements in zip(pieces, self.tensors, self.split, strict=True):
            like = torch.empty(x.shape, device="meta")
            z = DTensor.from_local(
                y, self.mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
            )
            if isinstance(x, DTensor):
                whole.append(z.redistribute(placements=x.placements))
            else:
                whole.append(z.full_tensor(grad_placements=[Partial("avg")] * self.mesh.ndim))
        return whole
