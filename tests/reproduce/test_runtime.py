"""The runtime experiment: what it times, what it leaves out, and what its report computes from the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from reproduce.harness import reporting, study
from reproduce.papers import runtime
from reproduce.tasks.peers import PEERS, missing


def test_smoke_run(smoke) -> None:
    found = smoke("runtime")
    here = {name for name, peer in PEERS.items() if not missing(peer)}
    for n in map(str, found.args.ns):
        for what, unit in (("time", "ms"), ("memory", "mb")):
            rows = [row for row in found.rows if (row["what"], row["n"]) == (what, n)]
            assert {row["method"] for row in rows} == {"torch.softmax", *runtime.OURS, *here}
            assert {row["pass"] for row in rows} == set(runtime.PASSES)
            assert all(float(row[unit]) >= 0 for row in rows)
        error = {row["method"]: float(row["error"]) for row in found.rows if row["error"] and row["n"] == n}
        assert set(error) == {*runtime.OURS, *here} - {name for name, peer in PEERS.items() if peer.ranks}
        # float32: n roundings of values up to 1
        assert all(error[name] < 1e-6 * max(1, int(n) // 10) + int(n) * 2**-24 for name in runtime.OURS)
    assert "| khot.sigmoid_topk |" in found.report


def test_what_is_too_large_is_left_out() -> None:
    few, many = runtime.methods(4, 64, 6), runtime.methods(4, 4**11, 4**11 // 10)
    assert {"sequential softmax", "sinkhorn", "dykstra"} <= set(few) - set(many)


def test_operators_are_those_of_their_names() -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    for call in runtime.methods(2, 30, 3).values():
        assert call(x, 3, 0.5).shape == (2, 30)
    for name, call in runtime.OURS.items():
        assert call(x, 3, 0.5).sum(-1).tolist() == pytest.approx([3, 3], rel=1e-6), name


def test_report_computes_ratios(tmp_path: Path) -> None:
    times = {"torch.softmax": 2.0, "dykstra": 10.0, "pav": 5.0}
    rows: list[study.Row] = [
        {"what": "time", "n": 64, "method": name, "pass": kind, "ms": ms * (1 + (kind != "forward"))}
        for name, ms in times.items()
        for kind in runtime.PASSES
    ]
    body = runtime.report(runtime.Args(), rows, tmp_path)
    assert "| dykstra | 5 / 5 |" in body
    assert "pav takes 0.5 times as long at n = 64." in body
    assert "Figure 6: halley" not in body
    assert "Figure 7" not in body


@given(st.lists(st.floats(-100, 100), max_size=12), st.floats(0, 30))
def test_names_are_apart_and_as_near_to_their_lines_as_they_can_be(ends: list[float], gap: float) -> None:
    heights = sorted(ends)
    places = reporting.spread_out(heights, gap)
    offsets = gap * np.arange(len(heights))
    nearest = isotonic_regression(np.array(heights) - offsets).x + offsets if heights else []
    np.testing.assert_allclose(places, nearest, atol=1e-9)
