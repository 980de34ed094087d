"""Builds the CPU kernels where torch and a compiler are installed; without them khot is pure Python.

`pip install .` builds in an environment of its own, which has no torch; a download of one would take minutes
and gigabytes. The kernels use only torch's stable interface, so they are built with the torch that is
installed for the Python that runs the build. uv builds in an environment from which that torch cannot be
found, so it needs `--no-build-isolation`.

The README's links and the package's URLs get the address of the repository (docs/build/address.py).
Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import glob
import os
import re
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

# tests/kernels/sanitize asks for these
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-O1",
]


# what the compiled kernels need: the oldest torch whose stable interface has all that they use
OLDEST_TORCH = "2.10"
EAGER = os.path.join("csrc", "eager")
# They take half a minute each, so they are compiled first, beside each other.
FAST = [os.path.join("csrc", "simd", f"isa_{name}.cpp") for name in ("avx512", "avx2")]
# Half of each is torch's headers, and what they do for a row is little beside what the kernels do for it.
SMALL = [
    os.path.join("csrc", "bindings", f"{name}.cpp")
    for name in ("assign_pass", "fenchel_young", "sampling", "soft_budget", "soft_count", "soft_topk")
]


def addresses() -> dict[str, Any]:
    """The README and the URLs, with the address of the repository where it has one."""
    here = Path(__file__).resolve().parent
    address = runpy.run_path(str(here / "docs" / "build" / "address.py"))
    (version,) = re.findall(r'^version = "(.+)"$', (here / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    repository, site = address["repository"](), address["site"]()
    urls = {"Source": repository, "Documentation": site}
    if repository:
        urls |= {"Issues": f"{repository}/issues", "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md"}
    return {
        "long_description": address["absolute"]((here / "README.md").read_text("utf-8"), version),
        "long_description_content_type": "text/markdown",
        "project_urls": {name: url for name, url in urls.items() if url},
    }


def pure(reason: str) -> dict[str, Any]:
    """The arguments of a build without kernels. pip shows the reason with -v, and `khot info` afterwards."""
    print(f"khot: the CPU kernels are not built: {reason}", file=sys.stderr)
    return {}


def extension() -> dict[str, Any]:
    if os.environ.get("KHOT_PURE") == "1":  # a wheel for every platform
        return pure("KHOT_PURE=1")
    installed = sysconfig.get_path("platlib")
    if installed not in sys.path:
        sys.path.append(installed)  # at the end: the build's own tools come first
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except (ImportError, OSError) as error:
        return pure(f"torch is not installed, or does not load ({error})")
    if torch.__version__ < OLDEST_TORCH:
        return pure(f"torch {torch.__version__} is older than {OLDEST_TORCH}")

    class OptionalBuild(BuildExtension):
        """A build whose failure leaves the reference kernels in charge, and says so. The extension for small
        calls may fail by itself."""

        def build_extension(self, ext: Any) -> None:
            try:
                self.tell_what_is_compiled()
                self.compile_for_size(ext)
                super().build_extension(ext)
            except Exception as error:
                print(f"khot: {ext.name} was not built: {error}", file=sys.stderr)

        def build_extensions(self) -> None:
            self.told = False
            super().build_extensions()

        def tell_what_is_compiled(self) -> None:
            """A line for each file, as a build takes minutes. Ninja, where it is installed, has its own."""
            if self.told:
                return
            self.told, compile_one = True, self.compiler._compile

            def told(obj: str, src: str, *arguments: Any) -> None:
                print(f"khot: compiling {os.path.relpath(src)}", file=sys.stderr, flush=True)
                compile_one(obj, src, *arguments)

            self.compiler._compile = told

        def compile_for_size(self, ext: Any) -> None:
            """An extension has one set of flags, so these objects are made before the others."""
            small = [source for source in ext.sources if source in SMALL]
            if small and self.compiler.compiler_type == "unix":
                ext.sources = [source for source in ext.sources if source not in SMALL]
                ext.extra_objects += self.compiler.compile(
                    small,
                    output_dir=self.build_temp,
                    macros=ext.define_macros,
                    include_dirs=ext.include_dirs,
                    extra_postargs=[*ext.extra_compile_args, "-Os"],
                    depends=ext.depends,
                )

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                print(f"khot: the CPU kernels were not built: {error}", file=sys.stderr)

    sanitize = SANITIZE if os.environ.get("KHOT_SANITIZE") == "1" else []
    # Python's own flags ask for debug symbols, which take nine tenths of the file
    debug = ["-g1"] if sanitize else ["-g0"]
    strip = ["-Wl,-s"] if sys.platform == "linux" and not sanitize else []
    sources = glob.glob("csrc/**/*.cpp", recursive=True)
    others = sorted({source for source in sources if not source.startswith(EAGER)} - {*FAST})
    kernels = CppExtension(
        "khot._C",
        [*FAST, *others],
        depends=sorted(glob.glob("csrc/**/*.h", recursive=True)),
        # includes are written from csrc on: "simd/vec.h"
        include_dirs=[os.path.abspath("csrc")],
        py_limited_api=True,
        # the stable ABI of torch 2.10, so that one build serves every later torch
        define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
        # fp-contract: fused multiply-adds, which a strict language standard would switch off
        extra_compile_args=[
            # Not -O3, whose larger code was not faster: the passes over a row are inlined whole at any level
            # (KHOT_PASS), and the short loops that have to be unrolled say so.
            "-O2",
            # the cost model of -O3. That of -O2 leaves most loops of the selection as they are.
            "-fvect-cost-model=dynamic",
            "-std=c++17",
            "-ffp-contract=fast",
            "-fvisibility=hidden",
            "-Wno-psabi",
            *debug,
            *sanitize,
        ],
        extra_link_args=[*strip, *sanitize],
        optional=True,
    )
    # small calls, in torch's C++, which is not stable: of use with this torch and this Python only
    version = torch.__version__.split("+")[0].replace(".", "_")
    eager = CppExtension(
        f"khot._eager_{version}",
        [os.path.join(EAGER, "all.cpp")],
        depends=["csrc/kernels.h", "csrc/bindings/rows.h", *glob.glob(os.path.join(EAGER, "*"))],
        include_dirs=[os.path.abspath("csrc")],
        extra_compile_args=["-O2", "-fvisibility=hidden", "-Wno-psabi", *debug, *sanitize],
        extra_link_args=[*strip, *sanitize],
        optional=True,
    )
    return {
        "ext_modules": [kernels, eager],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**addresses(), **extension())
