"""A network behind a mask of pixels, whose logits are trained with it: what feature selection is run on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot.experiments.harness import training

__all__ = ["HIDDEN", "TASKS", "TEST_MASKS", "Selection"]

TASKS = ("reconstruction", "classification")
HIDDEN = (512, 256)
TEST_MASKS = 100


class Selection(nn.Module):
    """The logits of n pixels, and the network that sees the pixels of a mask.

    Its task is one of TASKS: the network predicts the whole image, or the label.
    """

    def __init__(self, n: int, task: str) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))
        outputs = (HIDDEN[0], n) if task == "reconstruction" else (10,)
        self.network = training.mlp(n, *HIDDEN, *outputs)

    def losses(self, images: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        """The loss of each image.

        The images are split into as many parts of equal size as there are masks, one part for each mask.
        """
        seen = (images.view(len(masks), -1, images.shape[-1]) * masks.unsqueeze(1)).flatten(0, 1)
        predicted = self.network(seen)
        if predicted.shape == images.shape:
            return F.binary_cross_entropy_with_logits(predicted, images, reduction="none").mean(-1)
        return F.cross_entropy(predicted, labels, reduction="none")
