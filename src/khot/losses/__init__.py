"""Losses that train a selection."""

from khot.losses.cross_entropy import TopKCrossEntropyLoss as TopKCrossEntropyLoss
from khot.losses.fenchel_young import FenchelYoungTopKLoss as FenchelYoungTopKLoss
from khot.losses.permutation import permutation_cross_entropy as permutation_cross_entropy
from khot.losses.ranking import average_precision_loss as average_precision_loss
from khot.losses.ranking import hit_at_k_loss as hit_at_k_loss
from khot.losses.ranking import log_rank_loss as log_rank_loss
from khot.losses.ranking import ndcg_loss as ndcg_loss
from khot.losses.ranking import precision_at_k_loss as precision_at_k_loss
from khot.losses.ranking import recall_at_k_loss as recall_at_k_loss
from khot.losses.ranking import spearman_loss as spearman_loss
from khot.losses.size import size_penalty as size_penalty

__all__ = [
    "FenchelYoungTopKLoss",
    "TopKCrossEntropyLoss",
    "average_precision_loss",
    "hit_at_k_loss",
    "log_rank_loss",
    "ndcg_loss",
    "permutation_cross_entropy",
    "precision_at_k_loss",
    "recall_at_k_loss",
    "size_penalty",
    "spearman_loss",
]


def __dir__() -> list[str]:
    return __all__
