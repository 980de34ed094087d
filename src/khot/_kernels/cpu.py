"""Find and load the compiled CPU kernels (``csrc/``).

They are used if the extension was built, with the best instruction set that the processor supports. The
environment variable ``KHOT_KERNELS`` changes this: ``reference`` switches them off, ``avx2`` and ``baseline``
restrict them to an older instruction set, and ``triton`` is for tests (:mod:`khot._kernels.gpu`).
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

__all__ = ["CHOICES", "load"]

CHOICES = ("", "reference", "compiled", "baseline", "avx2", "avx512", "triton")


def load() -> str | None:
    """Register the compiled kernels. Returns the instruction set that they use, or None if there are none.

    Raises:
        ValueError: for a ``KHOT_KERNELS`` that is not in `CHOICES`.
    """
    choice = os.environ.get("KHOT_KERNELS", "")
    if choice not in CHOICES:
        raise ValueError(f"KHOT_KERNELS must be one of {', '.join(CHOICES[1:])}, but got {choice!r}")
    if choice == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("KHOT_KERNELS=triton needs TRITON_INTERPRET=1: Triton cannot compile for a CPU")
    if choice in ("reference", "triton"):
        return None
    # the suffix is that of Python's stable ABI: _C.abi3.so, or _C.pyd on Windows
    found = sorted(p for p in Path(__file__).parents[1].glob("_C.*") if p.suffix in (".so", ".pyd"))
    if not found:
        return None
    path = str(found[0])
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(
            f"khot: {path} does not load; khot falls back to the slower pure-PyTorch kernels: {error}",
            stacklevel=2,
        )
        return None
    isa = ctypes.CDLL(path).khot_isa
    isa.restype = ctypes.c_char_p
    return isa().decode()
