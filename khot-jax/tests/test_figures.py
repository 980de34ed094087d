"""Values and gradients are those of khot's torch operators (figures.py)."""

from __future__ import annotations

import json
from typing import Any

import figures
import jax
import numpy as np
import pytest

import khot_jax as kj

CASES = json.loads(figures.FILE.read_text(encoding="utf-8"))


def test_every_operator_with_a_twin_is_there() -> None:
    names = {case["name"] for case in CASES}
    others = {"cdfs", "instruction_set", "sample_khot", "topk_mask"}
    assert names | others == set(kj.__all__)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_values_and_gradients_equal_torch(i: int) -> None:
    case = CASES[i]
    options = {
        key: kj.cdfs.Power(value[1]) if isinstance(value, list) else value
        for key, value in case["options"].items()
    }
    names = list(case["inputs"])

    def f(*inputs: Any) -> Any:
        given = dict(zip(names, inputs, strict=True))
        tau = given.pop("tau")
        return getattr(kj, case["name"])(*given.values(), tau=tau, **options)

    inputs = [np.float32(each) for each in case["inputs"].values()]
    out, pull = jax.vjp(jax.jit(f), *inputs)
    want = np.float32(case["out"])
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=6e-7 * scale)
    for name, got, grad in zip(names, pull(np.float32(case["v"])), case["grads"], strict=True):
        grad = np.float32(grad)
        np.testing.assert_allclose(got, grad, rtol=2e-5, atol=1e-5 * max(1, np.abs(grad).max()), err_msg=name)
