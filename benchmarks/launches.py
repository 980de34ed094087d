"""How many kernels a GPU is asked to launch: `python -m benchmarks.launches`. Needs no GPU.

Counts, for single operators, the launches of their Triton kernels and torch operations that are not views:
with the Triton kernels, which are not run here, and with the reference kernels, which a GPU used before it
had these.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results" / "launches.md"
FREE = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias",
    "promote_types",
}  # fmt: skip
SEED = torch.tensor(1)


class Case(NamedTuple):
    name: str
    shape: str
    arguments: tuple[Any, ...]


class Launches(TorchDispatchMode):
    """Counts torch operations that are not views, those within the reference kernels included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from khot._core.dispatch import OPERATORS

        if func.namespace == "khot":
            with self:
                return OPERATORS[func._schema.name.partition("::")[2]].kernel(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and func._schema.name.partition("::")[2] not in FREE:
            self.count += 1
        return func(*args, **(kwargs or {}))


def cases() -> Iterator[Case]:
    one = torch.ones((), dtype=torch.float64, device="meta")
    # the reference needs values of the samplers, and of all others only their shapes
    for rows, n in ((4_096, 64), (64, 4_096), (1, 100_000)):
        probs = torch.full((rows, n), 0.25)
        yield Case("uniform", f"({rows:,}, {n:,})", (SEED, rows, n, 0))
        yield Case("pareto_sample", f"({rows:,}, {n:,})", (probs, SEED, 2.5, 1e-6))
        size = torch.full((rows,), n // 4)
        yield Case("order_sample", f"({rows:,}, {n:,})", (torch.logit(probs.double()), size, SEED))
        for name in ("pivotal_sample", "systematic_sample"):
            yield Case(name, f"({rows:,}, {n:,})", (probs, SEED, 1e-6))
    for rows, n, m in ((4_096, 64, 64), (100, 10_000, 1), (100, 1_000, 1_000)):
        x, at = _nothing(rows, n), _nothing(rows, m)
        key = (x, at, one, "logistic", 0.0, True)
        yield Case("soft_count", f"({rows:,}, {n:,}), {m:,} levels", key)
        grad = torch.empty_like(at, dtype=torch.float64)
        yield Case("soft_count_backward", f"({rows:,}, {n:,}), {m:,} levels", (grad, *key))
    for rows, n in ((4_096, 64), (1, 1_000_000)):
        x, wide = _nothing(rows, n), torch.empty(rows, dtype=torch.float64, device="meta")
        k = one
        shape = f"({rows:,}, {n:,})"
        yield Case("soft_topk", shape, (x, k, one, "logistic", 0.0, "y"))
        yield Case("soft_topk", f"{shape}, float64", (x.double(), k, one, "logistic", 0.0, "y"))
        yield Case("soft_topk", f"{shape}, threshold alone", (x, k, one, "logistic", 0.0, "threshold"))
        yield Case("magnitude_with_signs", shape, (x, k, one, 2.0))
        yield Case("magnitude_with_signs_backward", shape, (x, wide, x, x, k, wide, wide, one, 2.0))
        yield Case("laplace_count", f"{shape}, ranks", (x, None, one, True))
        yield Case("fenchel_young", shape, (x, x, k, one, "logistic", 0.0))
        given = (wide, x, x, wide, wide, wide, wide, one, "logistic", 0.0)
        yield Case("fenchel_young_backward", shape, given)
        how = ("logistic", 0.0, "score", False)
        yield Case("soft_budget", shape, (x, x, wide, one, *how))
        yield Case("soft_budget_backward", shape, (x, wide, x, x, wide, wide, one, *how))
        yield Case("budget_mask", shape, (x, x, wide))
        places = (torch.empty_like(x, dtype=torch.int32) for _ in range(3))
        yield Case("permutahedron", shape, (x, x[:1], one, "kl"))
        yield Case("permutahedron_backward", shape, (x, x, x[:1], one, *places, "kl", True))
    whole, (rows, n, k) = torch.empty((), dtype=torch.int64, device="meta"), (16_384, 256, 8)
    best = torch.empty(rows, k + 1, dtype=torch.int64, device="meta")
    counts = torch.empty(1_025, n, dtype=torch.int64, device="meta")
    none = (None, None, None, None)
    given = (counts, _nothing(rows, n), _nothing(rows, k + 1), best, whole, whole, *none)
    yield Case("count_distances", f"({rows:,}, {n})", given)
    yield Case("power_blocks", "(4,096, 64)", (_nothing(4_096, 64), _nothing(1, 64), one, 1.5))
    for rows, n in ((512, 8), (4_096, 64)):
        x, per_row, per_column = _nothing(rows, n), one.expand(rows), one.expand(n)
        given = (x, per_row, per_column, one.expand(1), per_column, "logistic", 0.0, False, "")
        yield Case("soft_assign", f"({rows:,}, {n:,})", given)


def _nothing(rows: int, n: int) -> Tensor:
    return torch.empty(rows, n, device="meta")


@contextmanager
def _stubbed(launched: list[str]) -> Iterator[None]:
    """Triton's launches are noted, and nothing else."""
    from triton.runtime.interpreter import InterpretedFunction

    def note(kernel: Any, *_: Any, **__: Any) -> None:
        launched.append(kernel.fn.__name__)

    run = InterpretedFunction.run
    InterpretedFunction.run = note
    try:
        yield
    finally:
        InterpretedFunction.run = run


def by_triton(case: Case) -> int:
    from khot._kernels import triton

    launched: list[str] = []
    with _stubbed(launched), Launches() as operations:
        getattr(triton, case.name)(*case.arguments)
    return len(launched) + operations.count


def by_reference(case: Case) -> int | None:
    """None where the kernel needs values that are not there."""
    from khot._core.dispatch import OPERATORS

    try:
        with Launches() as operations:
            OPERATORS[case.name].kernel(*case.arguments)
    except (RuntimeError, NotImplementedError):
        return None
    return operations.count


def table() -> str:
    lines = ["| operator | shape | launches | with the reference kernels |", "| --- | --- | --- | --- |"]
    for case in cases():
        before = by_reference(case)
        cells = (
            f"`{case.name}`",
            case.shape,
            f"{by_triton(case):,}",
            "–" if before is None else f"{before:,}",
        )
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(
        prog="benchmarks.launches", description=(__doc__ or "").partition("\n")[0]
    ).parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("benchmarks.launches stubs Triton's interpreter: set TRITON_INTERPRET=1")
    import triton

    text = f"# Launches of single operators\n\ntorch {torch.__version__}, Triton {triton.__version__}.\n\n"
    RESULTS.write_text(text + table() + "\n\n" + (__doc__ or "").partition("\n\n")[2], encoding="utf-8")


if __name__ == "__main__":
    main()
