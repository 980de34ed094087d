"""The compiled CPU kernels (``csrc/``): found, loaded, named. Experimental, and off unless asked for.

They serve where the environment variable ``KHOT_KERNELS`` is ``compiled``, or ``avx2`` or ``baseline`` to
hold them to less than the processor offers. They pass the operators' tests, but not yet the accuracy goal
on every row: of 48,000 random rows with ties three missed the sum in float32, by up to 1.4 times the goal,
and in another draw one float32 row of the uniform CDF was wrong. Until none is, the reference serves by
default.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

__all__ = ["CHOICES", "load"]

CHOICES = ("", "reference", "compiled", "baseline", "avx2", "avx512")


def load() -> str | None:
    """Register the compiled kernels; the instruction set they use, or None where there are none.

    Raises:
        ValueError: for a ``KHOT_KERNELS`` that is not in `CHOICES`.
    """
    choice = os.environ.get("KHOT_KERNELS", "")
    if choice not in CHOICES:
        raise ValueError(f"KHOT_KERNELS must be one of {', '.join(CHOICES[1:])}, but got {choice!r}")
    if choice in ("", "reference"):
        return None
    # the name ends as Python's stable ABI has it: _C.abi3.so, or _C.pyd on Windows
    found = sorted(p for p in Path(__file__).parents[1].glob("_C.*") if p.suffix in (".so", ".pyd"))
    if not found:
        return None
    path = str(found[0])
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(f"khot: {path} does not load, so the slow kernels serve: {error}", stacklevel=2)
        return None
    isa = ctypes.CDLL(path).khot_isa
    isa.restype = ctypes.c_char_p
    return isa().decode()
