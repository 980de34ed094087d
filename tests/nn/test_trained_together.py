"""Layers with state that several processes train, each with a part of the batch, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import processes
import shards

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch": True},
    {"tau": 0.2},
    {"tau": 0.2, "batch": True},
    {"widths": [6, 12], "revive": None},
]
KINDS = ["DDP", "DDP, broadcast", "DDP, checkpoint", "FSDP2", "FSDP2, checkpoint"]


def batches(steps: int = 5, inputs: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(inputs, 8, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_sparse_autoencoder(options: dict[str, Any], kind: str) -> None:
    """Losses, parameters, idle counts and the threshold are those of one process with the whole batch."""
    losses, state, results = shards.trained_sae(None, "alone", options, batches())
    assert len(state["idle"].unique()) > 2
    parts = processes.run(2, shards.trained_sae, kind, options, batches())
    mean = [sum(each) / 2 for each in zip(*(part[0] for part in parts), strict=True)]
    torch.testing.assert_close(mean, losses)
    for _, own_state, own_results in parts:
        torch.testing.assert_close(own_state, state)
        torch.testing.assert_close(own_results, results)


def test_a_sparse_autoencoder_that_selects_from_candidates() -> None:
    """As it does with many latents. The one process looks at whole rows."""
    losses, state, _ = shards.trained_sae(None, "alone", {"batch": True}, batches())
    parts = processes.run(2, shards.trained_sae, "DDP, candidates", {"batch": True}, batches())
    mean = [sum(each) / 2 for each in zip(*(part[0] for part in parts), strict=True)]
    torch.testing.assert_close(mean, losses)
    for _, own_state, _ in parts:
        torch.testing.assert_close(own_state, state)


def test_idle_latents_add_to_the_loss() -> None:
    """Without which the test above says nothing of them."""
    losses, *_ = shards.trained_sae(None, "alone", {}, batches())
    others, *_ = shards.trained_sae(None, "alone", {"revive": None}, batches())
    assert losses[-1] > others[-1]


def test_a_process_without_inputs_takes_part() -> None:
    parts = processes.run(2, shards.trained_sae, "alone", {"batch": True}, batches(inputs=1))
    for _, state, _ in parts:
        assert state["idle"].max() == 5 and state["threshold"] > 0


@pytest.mark.parametrize("cuts", [[0, 9, 30], [0, 30, 30]], ids=str)
def test_a_balanced_router(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(30, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    selection, *want = shards.balanced_together(None, x, cuts)
    parts = processes.run(2, shards.balanced_together, x, cuts)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), selection)
    for part in parts:
        torch.testing.assert_close(part[1:], want)


def test_a_layer_that_knows_its_group_can_be_copied() -> None:
    for told in processes.run(2, shards.told_its_group):
        assert told == (True, True)
