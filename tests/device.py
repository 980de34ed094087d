"""A device that is not there: what the host does for it, seen without one.

A tensor on it has a shape and no values (torch's fake tensors, on "cuda"), so whatever needs a value raises
:class:`Waits`: reading a number, a result whose shape depends on values, a copy to or from the host. That is
also what a CUDA graph cannot capture. Launches are counted: those of our own kernels, whose host code runs
as on a device up to the launch itself, and one for each operation of torch that is not a view.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from khot._core import arguments
from khot._core.dispatch import OPERATORS
from khot._kernels import gpu

CUDA = torch.device("cuda", 0)
# operations that read a value, or whose result has a shape that depends on values
READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_consecutive",
    "_unique2", "unique_dim", "bincount", "_linalg_check_errors", "repeat_interleave",
}  # fmt: skip
FREE = {
    "device",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
}


class Waits(AssertionError):
    """The host would wait for the device."""


class Device(TorchDispatchMode):
    """While it is on, what touches a tensor of the device is watched; the rest runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []  # of ours, as they are launched
        self.torch: list[str] = []  # torch's own

    def forget(self) -> None:
        self.kernels.clear()
        self.torch.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        there = [a for a in leaves if isinstance(a, FakeTensor)]
        goal = kwargs.get("device")
        if not there and (goal is None or torch.device(goal).type != "cuda"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "khot":
            with self:
                return _operator(name)(*args, **kwargs)
        self._judge(func, name, args, leaves, goal)
        return func(*args, **kwargs)

    def _judge(self, func: Any, name: str, args: Any, leaves: list[Any], goal: Any) -> None:
        if name in READS and not (name == "repeat_interleave" and func._overloadname == "self_int"):
            raise Waits(f"{name} reads a value of the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            one = name != "index" and args[2].numel() == 1  # which torch turns into masked_fill
            if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]) and not one:
                raise Waits(f"{name} by a mask has to count what it selects")
        if name == "_to_copy" and goal is not None and torch.device(goal).type != args[0].device.type:
            raise Waits(f"a copy from {args[0].device} to {goal}")
        if name in ("copy_", "_copy_from", "copy") and args[0].device != args[1].device:
            raise Waits(f"a copy from {args[1].device} to {args[0].device}")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and name not in FREE:
            self.torch.append(name)


def _operator(name: str) -> Any:
    """What runs an operator of ours on a device."""
    return gpu.load(name) if name in gpu.KERNELS else OPERATORS[name].kernel


def backward(y: Tensor) -> None:
    """What ``y.backward()`` launches. Torch's own engine asks for streams of a device; so the graph is walked
    here, and a gradient that nobody sends is None or zeros, as the node wants it."""
    assert y.grad_fn is not None
    waiting: dict[Any, int] = {}
    found = [y.grad_fn]
    for node in found:
        for after, _ in node.next_functions:
            if after is not None:
                if after not in waiting:
                    found.append(after)
                waiting[after] = waiting.get(after, 0) + 1
    grads: dict[Any, list[Tensor | None]] = {n: [None] * len(n._input_metadata) for n in found}
    grads[y.grad_fn][y.output_nr] = torch.empty_like(y)
    ready = [y.grad_fn]
    with torch.no_grad():
        for node in ready:
            given = grads.pop(node)
            sent: Any = (None,) * len(node.next_functions)
            if "AccumulateGrad" not in node.name() and any(g is not None for g in given):
                sent = _apply(node, given)
            for (after, at), grad in zip(node.next_functions, sent, strict=False):
                if after is None:
                    continue
                if grad is not None:
                    shape = after._input_metadata[at].shape
                    grad = grad if grad.shape == shape else grad.sum_to_size(shape)
                    before = grads[after][at]
                    grads[after][at] = grad if before is None else before + grad
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)


def _apply(node: Any, given: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    python = hasattr(node, "_forward_cls")
    if python and node.__dict__.get("zeros", True):
        device = next(g.device for g in given if g is not None)  # results that are constants have no metadata
        given = [
            torch.zeros(m.shape, dtype=m.dtype, device=device) if g is None else g
            for g, m in zip(given, node._input_metadata, strict=True)
        ]
    sent = node.apply(*given) if python else node(*given)
    return sent if isinstance(sent, tuple) else (sent,)


@functools.cache
def _guard() -> None:
    folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as build:
        library = f"{build}/guard.so"
        source = Path(__file__).with_name("guard.cpp")
        paths = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
        command = ["c++", "-std=c++20", "-shared", "-fPIC", source, *paths, "-lc10", "-o", library]
        subprocess.run(command, check=True)
        ctypes.CDLL(library).use_guard()


def _remember(ctx: Any, zeros: bool) -> None:
    ctx.materialize_grads = ctx.zeros = zeros  # torch's own attribute cannot be read


@contextlib.contextmanager
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device, on which nothing is launched."""
    from khot._kernels.triton import launch

    _guard()
    device = Device()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "start", lambda *_: None)
        patch.setattr(launch, "watch", device.kernels.append)
        # in eager mode numbers are shared; here a mode is on, which is not a trace
        shares = lambda like, by_value=False: like.is_cpu or (by_value and like.is_cuda)  # noqa: E731
        patch.setattr(arguments, "_shares", shares)
        patch.setattr(FunctionCtx, "set_materialize_grads", _remember)
        with FakeTensorMode(allow_non_fake_inputs=True), device:
            yield device


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the device that is pretended, which requires a gradient."""
    return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=True)
