"""Builds khot's CPU kernels as XLA's foreign functions; without a compiler khot_jax is pure Python.

The kernels are those of ../csrc, with csrc/ffi.cpp in the place of its bindings. A source distribution has a
copy of them. ``KHOT_JAX_PURE=1`` leaves them out. The objects of ../csrc in ``KHOT_JAX_OBJECTS``, a folder
of a build of khot, are taken as they are, where they are newer than the kernels: the kernels know no torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
COPY = "kernels"  # where a source distribution has them
KERNELS = HERE / COPY if (HERE / COPY).exists() else HERE.parent / "csrc"
# As in ../setup.py: one copy per instruction set, of which the first takes longest.
SOURCES = ("isa_avx512", "isa_avx2", "isa_baseline", "choose_isa")
# What each is for stands in ../setup.py.
FLAGS = "-O2 -fvect-cost-model=dynamic -std=c++17 -ffp-contract=fast -fvisibility=hidden -Wno-psabi -g0"


class Build(build_ext):
    """The library, which is no extension module: it is loaded by ctypes, and knows nothing of Python."""

    def build_extension(self, ext: Extension) -> None:
        import jax

        latest = max(path.stat().st_mtime for path in KERNELS.rglob("*.[hc]*"))

        def compiled(source: str) -> list[str]:
            made = Path(os.environ.get("KHOT_JAX_OBJECTS") or os.devnull, f"{Path(source).stem}.o")
            if made.is_file() and made.stat().st_mtime > latest:
                return [str(made)]
            print(f"khot_jax: compiling {os.path.basename(source)}", file=sys.stderr, flush=True)
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=[str(KERNELS), str(HERE / "csrc"), jax.ffi.include_dir()],
                extra_postargs=ext.extra_compile_args,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sources = [*(str(KERNELS / "simd" / f"{name}.cpp") for name in SOURCES), *ext.sources]
            objects = [each for found in pool.map(compiled, sources) for each in found]
        target = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=ext.extra_link_args, target_lang="c++", build_temp=self.build_temp
        )

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class Wheel(bdist_wheel):
    """For any Python of this platform, or for any at all without kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Source(sdist):
    """With the kernels."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        for path in KERNELS.rglob("*"):
            room = path.relative_to(KERNELS)
            ours = room.parts[0] not in ("bindings", "eager") or path.name in ("rows.h", "share.h")
            if ours and path.suffix in (".h", ".cpp"):
                to = Path(base_dir, COPY, room)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)


kernels = Extension(
    "khot_jax._kernels",
    ["csrc/ffi.cpp"],
    extra_compile_args=FLAGS.split(),
    extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
    optional=True,
)
setup(
    ext_modules=[] if os.environ.get("KHOT_JAX_PURE") == "1" else [kernels],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel, "sdist": Source},
)
