"""What every GPU kernel compiles to, call by call: `python -m benchmarks.ptx_guard`. Needs no GPU.

    python -m benchmarks.ptx_guard note ROOT out.json    # of the checkout at ROOT
    python -m benchmarks.ptx_guard compare before.json after.json

`note` runs the host code of a checkout on tensors without values (its tests/device.py), takes each launch,
and lets Triton specialise and compile it to PTX as on a device. So it knows nothing of signatures and names:
kernels may be renamed, merged and given other arguments. It keeps, for each launch of each call, a hash of
the instructions without names, numbers of parameters and debug lines, and the number of each instruction;
with --machine also the registers, spills and shared memory that ptxas gives them.

`compare` counts the kernels whose instructions are the same, or the same in another order, and lists the
others; if there are any, its exit code is 1. The same instructions in another order may be given other
registers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPES = {
    "float32": [(4_096, 64), (128, 1_000), (4_096, 4_096), (4_096, 8_192), (4_096, 32_768), (100, 100_000)],
    "bfloat16": [(32_768, 512), (2_048, 65_536)],
    "float16": [(256, 100), (256, 700), (256, 40_000)],
}
Call = Callable[[Any], Any]

#: What Triton would compile, by the place of its launch. Processes that compile inherit it.
BUILT: dict[str, Any] = {}


def calls() -> Iterator[tuple[str, tuple[int, ...], str, Call]]:
    """Name, shape, dtype and function: operators of the tests, soft top-k and budgets of every kind."""
    import torch

    import khot
    from kernels.test_host import LAUNCHES
    from khot._kernels.triton.functions import CDFS
    from khot._ops.soft_topk import threshold_map

    for name, (shape, call, *_) in LAUNCHES.items():
        for dtype in ("float32", "bfloat16", "float64"):
            yield name, shape, dtype, call
    two = torch.tensor(2.0, dtype=torch.float64)
    for id in CDFS:
        cdf = khot.cdfs.resolve(id, 4 / 3 if id == "power" else 0.0)
        outputs = {
            "soft_topk": partial(khot.soft_topk, k=8, cdf=cdf),
            "log_soft_topk": partial(khot.log_soft_topk, k=8, cdf=cdf),
            "thresholds": lambda x, cdf=cdf: threshold_map(x, two, two, cdf, "threshold")[2],
        }
        for (output, call), (dtype, shapes) in product(outputs.items(), SHAPES.items()):
            for shape in shapes:
                yield f"{output}, {cdf.name}", shape, dtype, call
        for by, shape in product(("score", "value"), SHAPES["float32"]):
            how = partial(khot.soft_budget, budget=8.0, tau=0.5, cdf=cdf, by=by, at_most=shape[1] == 1_000)
            yield f"soft_budget, {cdf.name}, {by}", shape, "float32", lambda x, how=how: how(x, x.detach())
    for groups, dtype in product((1, 8), ("float32", "bfloat16")):
        balancer = partial(khot.nn.QuantileBalancer, 64, 8, groups=groups, top_groups=(groups + 1) // 2)
        yield f"nn.QuantileBalancer, {groups}", (4_096, 64), dtype, partial(_made, balancer)
    for p, shape in product((2.0, 4 / 3, 1.15), SHAPES["float32"]):
        size = partial(khot.soft_topk_magnitude, k=8, p=p)
        yield f"soft_topk_magnitude, {p:.2f}", shape, "float32", size


def _made(module: Callable[[], Call], x: Any) -> Any:
    """The result of a module that is made on the device of its input."""
    with x.device:
        return module()(x)


def addresses(value: Any) -> Any:
    """With what Triton asks of a tensor in the place of each tensor."""
    if isinstance(value, tuple):
        inner = map(addresses, value)
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    if not hasattr(value, "storage_offset"):
        return value
    at = value.storage_offset() * value.element_size()
    return SimpleNamespace(dtype=value.dtype, data_ptr=lambda: at)


def start_nothing(start: Callable[..., None]) -> None:
    """Have launches go to this function, and Triton say what it would compile."""
    import triton
    from triton.runtime import driver

    from benchmarks import host
    from khot._kernels.triton import launch

    driver.set_active(host._Driver())
    triton.compiler.compile = lambda src, target=None, options=None, **_: SimpleNamespace(
        src=src, options=options
    )
    launch.start = start


def launched(only: str) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """The name of the kernel and what Triton would compile, of each launch; and the calls that failed."""
    import pytest
    import torch

    import device

    found: dict[str, tuple[str, Any]] = {}
    failed: list[str] = []
    told: list[tuple[str, Any]] = []

    def start(variant: Any, programs: int, arguments: Any) -> None:
        run = partial(variant.kernel.run, grid=(programs,), warmup=True, **variant.constants)
        told.append((variant.kernel.__name__, run(*addresses(arguments))))

    with pytest.MonkeyPatch.context() as patch, device.pretend(patch):
        start_nothing(start)
        for name, shape, dtype, call in calls():
            place = f"{name} {shape or ''} {dtype}"
            if not re.search(only, place):
                continue
            told.clear()
            try:
                y = call(device.tensor(*shape, dtype=getattr(torch, dtype)))
                if getattr(y, "requires_grad", False):
                    device.backward(y)
            except Exception as error:  # of any kind: the other calls are still compared
                failed.append(f"{place}: {type(error).__name__}: {error}"[:300])
            found |= {f"{place} #{i}": one for i, one in enumerate(told)}
    return found, failed


def compiled(built: Any, arch: int) -> tuple[str, str]:
    """What Triton would compile, compiled to PTX, and its name there."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import compiler

    class Backend(CUDABackend):
        def __init__(self, target: Any) -> None:
            super().__init__(target)
            self.binary_ext = "ptx"

        def add_stages(self, stages: Any, *given: Any) -> None:
            super().add_stages(stages, *given)
            del stages["cubin"]

    target = GPUTarget("cuda", arch, 32)
    compiler.make_backend = lambda _: Backend(target)
    given = {name: built.options[name] for name in ("num_warps", "num_stages", "maxnreg", "num_ctas")}
    done = compiler.compile(built.src, target=target, options=given)
    return str(done.asm["ptx"], "utf-8"), done.metadata.name  # bytes, as the last stage


def instructions(place: str, arch: int, machine: bool) -> dict[str, Any]:
    """Of the kernel that is launched there."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        ptx, name = compiled(BUILT[place], arch)
    except Exception as error:
        return {"text": "", "error": f"{type(error).__name__}: {error}"[-400:], "opcodes": {}}
    plain = re.sub(rf"{name}_param_\d+", "parameter", re.sub("//.*", "", ptx))
    lines = [line.strip() for line in plain.splitlines()]
    lines = [x for x in lines if re.match(r"\$L__BB|\.(req|max)n", x) or re.match(r"[^.].*;", x)]
    opcodes = Counter(re.sub(r"^@\S+\s+", "", x).split()[0] for x in lines if x.endswith(";"))
    note = {"text": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16], "opcodes": opcodes}
    if machine:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            gpu = f"sm_{arch}{'a' * (arch >= 90)}"
            command = [get_ptxas(arch).path, "-v", f"--gpu-name={gpu}", file.name, "-o", os.devnull]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        what = {
            "registers": r"Used (\d+) reg",
            "spills": r"(\d+) bytes spill st",
            "shared": r"(\d+) bytes smem",
        }
        note |= {k: int(m[1]) if (m := re.search(p, said)) else 0 for k, p in what.items()}
    return note


def note(args: argparse.Namespace) -> None:
    root = args.root.resolve()
    os.environ |= {"TRITON_INTERPRET": "0", "KHOT_KERNELS": "reference", "TRITON_DISABLE_LINE_INFO": "1"}
    os.environ |= {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": tempfile.mkdtemp()}
    sys.path[:0] = [f"{root}/src", f"{root}/tests", str(root)]
    for name in ("benchmarks", "reproduce"):  # those of this checkout
        del sys.modules[name]
    import khot

    assert Path(khot.__file__).is_relative_to(root), khot.__file__
    found, failed = launched(args.only)
    BUILT.update({place: one for place, (_, one) in found.items()})
    first = {id(one): place for place, one in BUILT.items()}
    print(f"{len(found)} launches of {len(first)} kernels", *failed, sep="\n", flush=True)
    read = partial(instructions, arch=args.arch, machine=args.machine)
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        notes = dict(zip(first, pool.map(read, first.values(), 1), strict=True))
    kept = {place: {"kernel": kernel, **notes[id(one)]} for place, (kernel, one) in found.items()}
    args.out.write_text(json.dumps(kept, indent=0), encoding="utf-8")
    raise SystemExit(bool(failed) or not found)


def compare(args: argparse.Namespace) -> None:
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in (args.before, args.after))
    same: Counter[str] = Counter()
    others = [f"{place}: not in both" for place in before.keys() ^ after.keys()]
    for place in before.keys() & after.keys():
        old, new = before[place], after[place]
        told = f"{new['kernel']}: same instructions"
        if error := old.get("error") or new.get("error"):
            told = f"{place}, {new['kernel']}: {error}"
        elif old["opcodes"] != new["opcodes"]:
            counts = [sum(each["opcodes"].values()) for each in (old, new)]
            told = f"{place}, {new['kernel']}: {counts[0]} -> {counts[1]} instructions"
        elif old["text"] != new["text"]:
            told += " in another order"
        for what in ("registers", "spills", "shared"):
            if old.get(what) != new.get(what):
                told += f", {what} {old.get(what)} -> {new.get(what)}"
        if told.startswith(place):
            others.append(told)
        else:
            same[told] += 1
    print(*(f"{n:5d} {told}" for told, n in sorted(same.items())), *sorted(others), sep="\n")
    raise SystemExit(bool(others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    noted = commands.add_parser("note")
    noted.set_defaults(do=note)
    noted.add_argument("root", type=Path)
    noted.add_argument("out", type=Path)
    noted.add_argument("--only", default="", help="a regular expression that calls have to match")
    noted.add_argument("--arch", type=int, default=90)
    noted.add_argument("--jobs", type=int, default=1)
    noted.add_argument("--machine", action="store_true")
    compared = commands.add_parser("compare")
    compared.set_defaults(do=compare)
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
