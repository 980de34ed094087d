"""khot: choose k of n, as easily, exactly and cheaply as softmax chooses one."""

from importlib.metadata import version as _version

from khot import baselines as baselines
from khot import cdfs as cdfs
from khot import losses as losses
from khot import nn as nn
from khot import sampling as sampling
from khot.magnitude import soft_topk_magnitude as soft_topk_magnitude
from khot.soft_count import inverse_soft_count as inverse_soft_count
from khot.soft_count import soft_count as soft_count
from khot.topk import laplace_topk as laplace_topk
from khot.topk import log_soft_topk as log_soft_topk
from khot.topk import ot_topk as ot_topk
from khot.topk import sigmoid_topk as sigmoid_topk
from khot.topk import soft_topk as soft_topk
from khot.topk import sparse_topk as sparse_topk
from khot.topk import topk_mask as topk_mask
from khot.transport import sorted_soft_topk as sorted_soft_topk

__version__ = _version("khot")
__all__ = [
    "baselines",
    "cdfs",
    "inverse_soft_count",
    "laplace_topk",
    "log_soft_topk",
    "losses",
    "nn",
    "ot_topk",
    "sampling",
    "sigmoid_topk",
    "soft_count",
    "soft_topk",
    "soft_topk_magnitude",
    "sorted_soft_topk",
    "sparse_topk",
    "topk_mask",
]
