"""Losses that train a selection."""

from khot.losses.cross_entropy import TopKCrossEntropyLoss as TopKCrossEntropyLoss
from khot.losses.fenchel_young import FenchelYoungTopKLoss as FenchelYoungTopKLoss
from khot.losses.permutation import permutation_cross_entropy as permutation_cross_entropy
from khot.losses.size import size_penalty as size_penalty

__all__ = ["FenchelYoungTopKLoss", "TopKCrossEntropyLoss", "permutation_cross_entropy", "size_penalty"]


def __dir__() -> list[str]:
    return __all__
