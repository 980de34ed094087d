"""What the GPU kernels compile to stays within its bounds: registers, spills, instructions an entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

resources = pytest.importorskip("benchmarks.resources", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]


def check(*arguments: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "benchmarks.resources", "--check", "--jobs", "2", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=1800, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forward") == done.stdout.count("backward") > 0


def test_machine_code_of_some_shapes_within_bounds() -> None:
    check("--few")


@pytest.mark.slow
def test_machine_code_within_bounds() -> None:
    check()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_machine_code_for_other_devices_within_bounds(arch: str) -> None:
    check("--few", "--arch", arch)


def test_amd_assembly_is_counted() -> None:
    code = """
\tv_add_f32_e32 v0, v1, v2
\ts_waitcnt vmcnt(0)
\tds_write_b32 v0, v1
\tscratch_store_dword off, v0, s32
\ts_endpgm
    .vgpr_count:     7
"""
    assert resources._read_amd(code) == resources.Counts(registers=7, instructions=4, spills=1, shared=1)
    with pytest.raises(RuntimeError, match="says nothing"):
        resources._read_amd("")


def test_a_section_of_the_report_replaces_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "RESULTS", tmp_path / "resources.md")
    for section in ("## b\n\nold\n", "## a\n\nother\n", "## b\n\nnew\n"):
        resources.keep(section)
    text = (tmp_path / "resources.md").read_text(encoding="utf-8")
    assert [part.split() for part in text.split("## ")[1:]] == [["a", "other"], ["b", "new"]]


def test_every_model_of_a_time_is_of_what_there_is() -> None:
    """Its kernels are compiled by the table, and its line is timed on a device."""
    from benchmarks import device, gpu

    cases = json.loads((gpu.RESULTS / "device.json").read_text(encoding="utf-8"))["cases"]
    source = Path(device.__file__).read_text(encoding="utf-8")
    for (title, line), steps in (*gpu.MODELS.items(), *gpu.GRADIENTS.items()):
        assert title in device.BENCHES
        assert f'"{line}"' in source
        for step in steps:
            if isinstance(step, (gpu.Measured, gpu.Gradient)):
                assert step.table in device.BENCHES
                assert step.line in cases[f"bench: {step.table}"]
            elif isinstance(step, gpu.Kernel):
                assert not step.name or step.name in gpu.instructions()
