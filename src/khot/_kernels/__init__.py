"""The kernels: the reference in plain torch, the compiled ones for the CPU, and those in Triton for the GPU.

Every caller calls `torch.ops.khot.*`. A faster kernel is registered under the same name for its device; all
other devices use the reference.
"""

from __future__ import annotations

import os

import torch

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


def active() -> dict[str, str]:
    """Which kernels each kind of device uses, in the words of ``khot info``."""
    return {
        "cpu": f"compiled ({_CPU})" if _CPU else "triton, interpreted" if _INTERPRETED else "reference",
        "gpu": ("triton" if gpu.available() else "reference") if torch.cuda.is_available() else "none",
    }


def note() -> str:
    """One line where the compiled CPU kernels are not in use: why, and what to do. Otherwise empty."""
    return _NOTE
