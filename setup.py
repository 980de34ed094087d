"""Builds the CPU kernels where torch and a compiler are at hand; without them khot is pure Python.

Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import glob
import os
import sys
from typing import Any

from setuptools import setup

# tests/kernels/sanitize asks for these
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-O1",
]


def extension() -> dict[str, Any]:
    if os.environ.get("KHOT_PURE") == "1":  # a wheel for every platform
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}

    class OptionalBuild(BuildExtension):
        """A build whose failure leaves the reference kernels in charge, and says so."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                print(f"khot: the CPU kernels were not built: {error}", file=sys.stderr)

    sanitize = SANITIZE if os.environ.get("KHOT_SANITIZE") == "1" else []
    kernels = CppExtension(
        "khot._C",
        sorted(glob.glob("csrc/**/*.cpp", recursive=True)),
        depends=sorted(glob.glob("csrc/**/*.h", recursive=True)),
        # includes are written from csrc on: "simd/vec.h"
        include_dirs=[os.path.abspath("csrc")],
        py_limited_api=True,
        # the stable ABI of torch 2.10, so that one build serves every later torch
        define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
        # fp-contract: fused multiply-adds, which a strict language standard would switch off
        extra_compile_args=[
            "-O3",
            "-std=c++17",
            "-ffp-contract=fast",
            "-fvisibility=hidden",
            "-Wno-psabi",
            *sanitize,
        ],
        extra_link_args=sanitize,
        optional=True,
    )
    return {
        "ext_modules": [kernels],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
