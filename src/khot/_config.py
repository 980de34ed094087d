"""What is installed and in use: the text of ``khot info``."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from khot import _kernels as kernels

__all__ = ["show_config", "version"]


def version() -> str:
    """The version of khot that is installed."""
    try:
        return importlib.metadata.version("khot")
    except (
        importlib.metadata.PackageNotFoundError
    ):  # a bare checkout that was never installed has no metadata
        return "0+unknown"


def show_config() -> None:
    """Print the versions, the devices, and which kernels are in use; ``khot info`` prints the same.

    The lines are ``khot``, ``torch``, ``python``, ``triton``, ``devices``, ``cpu kernels`` and
    ``gpu kernels``. Where the compiled CPU kernels are not in use, a ``note`` says why, and what to do.
    Put these lines into a report of a bug.

    Example:
        >>> khot.show_config()  # doctest: +ELLIPSIS
        khot: ...
        torch: ...
    """
    found = {
        "khot": version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "triton": _triton(),
        "devices": ", ".join(_devices()),
        **{f"{kind} kernels": active for kind, active in kernels.active().items()},
    }
    note = kernels.note()
    if note:
        found["note"] = note
    print("\n".join(f"{name}: {value}" for name, value in found.items()))


def _triton() -> str:
    for name in ("triton", "triton-windows", "pytorch-triton-rocm", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _devices() -> list[str]:
    """The names of the devices that torch sees, each with a description."""
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    found += [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found
