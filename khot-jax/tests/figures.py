"""Writes figures.json: values and gradients of khot's torch operators, which those for JAX have to equal.

It runs where torch and khot are installed, `python khot-jax/tests/figures.py`. The tests need neither.
Inputs are drawn here as well, so that the file is all that the tests need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("figures.json")


def cases() -> list[dict[str, Any]]:
    import numpy as np
    import torch

    import khot

    rng = np.random.default_rng(7)
    found: list[dict[str, Any]] = []

    def add(name: str, inputs: dict[str, Any], **options: Any) -> None:
        """One call in float32, with the gradients of Σ v·result in everything that is differentiable."""
        given = {key: torch.tensor(np.float32(value), requires_grad=True) for key, value in inputs.items()}
        named = {
            key: khot.cdfs.Power(value[1]) if isinstance(value, list) else value
            for key, value in options.items()
        }
        x, *between = (value for key, value in given.items() if key != "tau")
        out = getattr(khot, name)(x, *between, tau=given["tau"], **named)
        v = np.float32(rng.standard_normal(out.shape))
        grads = torch.autograd.grad((out * torch.from_numpy(v)).sum(), [*given.values()], allow_unused=True)
        found.append(
            {
                "name": name,
                "options": options,
                "inputs": {key: np.float32(value).tolist() for key, value in inputs.items()},
                "v": v.tolist(),
                "out": out.tolist(),
                "grads": [None if g is None else g.tolist() for g in grads],
            }
        )

    def scores(n: int, scale: float = 1.0) -> Any:
        return scale * rng.standard_normal((3, n))

    for cdf in ("logistic", "laplace", "normal", "uniform", ["power", 1.5]):
        for n, scale in ((9, 1.0), (70, 5.0)):
            numbers = {"k": [1.0, n / 3, n - 0.5], "tau": [0.3, 1.0, 2.0]}
            add("soft_topk", {"x": scores(n, scale), **numbers}, cdf=cdf)
        add("soft_topk", {"x": scores(9), "k": 2.5, "tau": 0.7}, cdf=cdf, largest=False)
        if cdf in ("logistic", "laplace", "normal"):
            add("log_soft_topk", {"x": scores(20, 3.0), "k": [1.0, 2.0, 3.5], "tau": 0.5}, cdf=cdf)
        add("soft_rank", {"x": scores(12), "tau": [0.3, 1.0, 2.0]}, cdf=cdf)
        add("soft_sort", {"x": scores(12), "tau": 0.5}, cdf=cdf, descending=True)
        costs = 0.5 + rng.random((3, 15))
        add("soft_budget", {"x": scores(15), "cost": costs, "budget": [1.0, 3.0, 6.0], "tau": 0.5}, cdf=cdf)
    for cdf in ("laplace", "logistic"):
        add("soft_quantile", {"x": scores(11), "q": [0.0, 0.3, 1.0], "tau": 0.4}, cdf=cdf)
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(cases(), separators=(",", ":")) + "\n", encoding="utf-8")
