"""Find and load the compiled CPU kernels (``csrc/``).

They are used if the extension was built and torch is new enough, with the best instruction set that the
processor supports. The environment variable ``KHOT_KERNELS`` changes this: ``reference`` switches them off,
``avx2`` and ``baseline`` restrict them to an older instruction set, and ``triton`` is for tests
(:mod:`khot._kernels.gpu`).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import get_args

import torch

from khot import cdfs
from khot._core import eager

__all__ = ["CHOICES", "OLDEST_TORCH", "load", "switched_off"]

CHOICES = ("", "reference", "compiled", "baseline", "avx2", "avx512", "triton")

# the stable ABI that the extension is compiled for (setup.py)
OLDEST_TORCH = "2.10"

# The factors are those of benchmarks/results/reference.md, forward and forward + backward.
_SLOWER = (
    "so that on a CPU the pure-PyTorch kernels are in use, which take 30 to 500 times as long for a soft "
    "top-k, and up to 3,700 times for a sparse one"
)

_BUILD = (
    "`pip install .` in a checkout, or `uv pip install --no-build-isolation .`, with a C++ compiler and "
    f"torch {OLDEST_TORCH} or newer installed (with -v they say why a build has failed)"
)


def switched_off() -> bool:
    """Whether ``KHOT_KERNELS`` asks for other kernels."""
    return os.environ.get("KHOT_KERNELS", "") in ("reference", "triton")


def load() -> tuple[str | None, str]:
    """Register the compiled kernels.

    Returns:
        The instruction set that they use, or None if they are not in use; and one line that says why they are
        not, and what to do.

    Raises:
        ValueError: for a ``KHOT_KERNELS`` that is not in `CHOICES`.
    """
    choice = os.environ.get("KHOT_KERNELS", "")
    if choice not in CHOICES:
        raise ValueError(f"KHOT_KERNELS must be one of {', '.join(CHOICES[1:])}, but got {choice!r}")
    if choice == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("KHOT_KERNELS=triton needs TRITON_INTERPRET=1: Triton cannot compile for a CPU")
    if switched_off():
        return None, f"KHOT_KERNELS={choice} switches the compiled CPU kernels off"
    # the suffix is that of Python's stable ABI: _C.abi3.so, or _C.pyd on Windows
    found = sorted(p for p in Path(__file__).parents[1].glob("_C.*") if p.suffix in (".so", ".pyd"))
    if torch.__version__ < OLDEST_TORCH:
        then = "to use them, install a newer torch" + ("" if found else " and then khot again")
        return None, f"the compiled CPU kernels need torch {OLDEST_TORCH} or newer, {_SLOWER}; {then}"
    if not found:
        return None, (
            f"this is a pure build, without the compiled CPU kernels, {_SLOWER}; to build them, run {_BUILD}"
        )
    path = str(found[0])
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = " ".join(str(error).split())
        return None, f"{path} does not load, {_SLOWER}: {reason}; install khot again"
    library = ctypes.CDLL(path)
    named = {name: type(cdfs.resolve(name)) for name in get_args(cdfs.CDFName)}
    eager.load(library, named | {cdfs.Power.name: cdfs.Power})
    isa = library.khot_isa
    isa.restype = ctypes.c_char_p
    return isa().decode(), ""
