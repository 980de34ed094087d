"""The path of the selector: fewer and fewer features, and what is predicted from them."""

from __future__ import annotations

import torch

from khot._kernel_gates import path
from khot._kernel_machine import Data, orthonormal

N, P = 240, 9


def test_path_predicts_from_ever_fewer_features() -> None:
    """The target is a sum of two features and a product of two: with all four the error is small, and with
    fewer the larger, the fewer they are."""
    x = torch.randn(N, P, generator=torch.Generator().manual_seed(0)).double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    y = x[:, [2]] + 0.7 * x[:, [4]] + x[:, [1]] * x[:, [6]]

    def part(rows: slice) -> Data:
        some = x[rows].float()
        number = len(some)
        return Data(
            lambda at: some[at],
            orthonormal(x).float(),
            torch.arange(P),
            y[rows].float(),
            torch.ones(number, dtype=torch.float64),
        )

    inside, outside = part(slice(180)), part(slice(180, None))
    for largest in (P, 6):  # all of them, and those that gates choose
        generator = torch.Generator().manual_seed(1)
        found = dict(path(inside, outside, torch.zeros(P), largest, 60, generator))
        assert list(found) == list(range(largest, 0, -1))
        error = {k: float((each - outside.targets).square().mean()) for k, each in found.items()}
        assert error[4] < 0.1 and error[4] < error[3] < error[2] < float(outside.targets.var())
