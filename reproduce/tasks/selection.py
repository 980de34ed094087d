"""A network behind a mask of pixels, whose logits are trained with it: what feature selection is run on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reproduce.harness import training

__all__ = ["TEST_MASKS", "Selection"]

TEST_MASKS = 100


class Selection(nn.Module):
    """The logits of n pixels, and the network n-512-256-outputs that sees the pixels of a mask."""

    def __init__(self, n: int, outputs: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))
        self.network = training.mlp(n, 512, 256, outputs)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """What the network predicts for each image.

        The images are split into as many parts of equal size as there are masks, one part for each mask.
        """
        seen = images.view(len(masks), -1, images.shape[-1]) * masks.unsqueeze(1)
        predicted: Tensor = self.network(seen.flatten(0, 1))
        return predicted
