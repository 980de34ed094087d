"""The compiled CPU kernels (``csrc/``): found, loaded, named.

They serve where the extension was built, with the best instruction set that the processor offers. The
environment variable ``KHOT_KERNELS`` chooses otherwise: ``reference`` switches them off, ``avx2`` and
``baseline`` hold them to less, ``triton`` is for tests (:mod:`khot._kernels.gpu`).
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
    """Register the compiled kernels; the instruction set they use, or None where there are none.

    Raises:
        ValueError: for a ``KHOT_KERNELS`` that is not in `CHOICES`.
    """
    choice = os.environ.get("KHOT_KERNELS", "")
    if choice not in CHOICES:
        raise ValueError(f"KHOT_KERNELS must be one of {', '.join(CHOICES[1:])}, but got {choice!r}")
    if choice == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("KHOT_KERNELS=triton needs TRITON_INTERPRET=1: Triton compiles nothing for a CPU")
    if choice in ("reference", "triton"):
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
