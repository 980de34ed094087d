"""The kernels: the reference in plain torch, the compiled ones for the CPU, and those in Triton for the GPU.

Every caller calls `torch.ops.khot.*`. A faster kernel is registered under the same name for its device; all
other devices use the reference.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from typing import Any

import torch

from khot._core.dispatch import OPERATORS
from khot._core.ways import Operator
from khot._kernels import cpu, gpu

__all__ = ["active", "note", "register"]

_CPU: str | None = None  # the instruction set of the compiled kernels, where they are in use
_NOTE = ""  # and why they are not, elsewhere
_INTERPRETED = os.environ.get("KHOT_KERNELS") == "triton"


def register() -> None:
    """Register the faster kernels. The operators must be defined before."""
    global _CPU, _NOTE
    _CPU, _NOTE = cpu.load()
    gpu.register("CUDA")
    if _INTERPRETED:
        gpu.register("CPU")
    if _CPU is None and not cpu.switched_off():
        _warn_at_first_use(f"khot: {_NOTE}")


def _warn_at_first_use(text: str) -> None:
    """Warn once, when the first operator is called on a CPU; until then each call asks for its device."""
    before = {operator: operator.compute for operator in OPERATORS.values()}

    def watched(operator: Operator, *args: Any) -> Any:
        if args[0].device.type == "cpu":
            for other, compute in before.items():
                other.compute = compute
            warnings.warn(text, UserWarning, stacklevel=_level_of_the_caller())
        return before[operator](*args)

    for operator in before:
        operator.compute = partial(watched, operator)


def _level_of_the_caller() -> int:
    """How far above the calling function the first frame outside of khot and torch is, as warnings count."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("khot", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def active() -> dict[str, str]:
    """Which kernels each kind of device uses, in the words of ``khot info``."""
    return {
        "cpu": f"compiled ({_CPU})" if _CPU else "triton, interpreted" if _INTERPRETED else "reference",
        "gpu": ("triton" if gpu.available() else "reference") if torch.cuda.is_available() else "none",
    }


def note() -> str:
    """One line where the compiled CPU kernels are not in use: why, and what to do. Otherwise empty."""
    return _NOTE
