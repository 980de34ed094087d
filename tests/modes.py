"""The layers in every mode of use: which of them, and what the processes of `processes.py` do for FSDP2."""

from __future__ import annotations

import copy
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import khot

__all__ = ["ALIKE", "ROWS", "fsdp", "make", "output"]


def _table() -> Any:
    """test_layers.py, whose table of layers is used here. Test files are not importable by name."""
    name = "layers_of_test_layers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "nn" / "test_layers.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_SCORES = _table().scores

ROWS = {row.name: row for row in _table().LAYERS}
ALIKE = _table().ALIKE


def make(name: str, seed: int = 0) -> nn.Module:
    """The layer in float64, with parameters that are not those of a new one."""
    row = ROWS[name]
    torch.manual_seed(seed)
    layer: nn.Module = row.make(dtype=torch.float64) if row.owns_parameters else row.make()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter += 0.1 * _SCORES(*parameter.shape, seed=10 * seed + i)
    for module in layer.modules():
        if isinstance(module, khot.nn.Anneal):
            module.step()
    return layer


def output(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The first tensor that the layer returns; draws are the same in every call."""
    torch.manual_seed(3)
    result = layer(*inputs)
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first


def fsdp(group: Any, names: list[str]) -> dict[tuple[str, bool], str]:
    """What went wrong with each layer in train and eval mode when it was spread; "" for nothing."""
    mesh = DeviceMesh.from_group(group, "cpu")
    found: dict[tuple[str, bool], str] = {}
    for name in names:
        for training in (True, False):
            try:
                found[name, training] = _fsdp(name, training, mesh)
            except Exception:
                found[name, training] = traceback.format_exc()
    return found


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _fsdp(name: str, training: bool, mesh: DeviceMesh) -> str:
    whole = make(name).train(training)
    spread = copy.deepcopy(whole)
    fully_shard(spread, mesh=mesh)
    for n, parameter in spread.named_parameters():
        assert isinstance(parameter, DTensor), f"{n} is not spread"
    inputs = ROWS[name].inputs
    want, got = output(whole, inputs), output(spread, inputs)
    torch.testing.assert_close(got, want)
    for y in (want, got):
        if y.requires_grad:
            y.square().sum().backward()
    grads = {n: p.grad for n, p in whole.named_parameters()}
    for n, parameter in spread.named_parameters():
        grad = parameter.grad
        if grads[n] is None:
            assert grad is None or not full(grad).any(), f"{n} has a gradient"
        else:
            assert grad is not None, f"{n} has no gradient"
            torch.testing.assert_close(full(grad), grads[n])
    # the shards can be saved, and loaded into another spread copy
    other = make(name, seed=1).train(training)
    fully_shard(other, mesh=mesh)
    other.load_state_dict(spread.state_dict())
    torch.testing.assert_close(output(other, inputs), output(spread, inputs))
    return ""
