"""Earlier relaxed top-k operators, each as published, for comparisons.

Each has defects that its docstring names and that khot's own operators do not have. Nothing was added to what
the sources describe: there are no masks, an infinite score may give NaN, k has no gradient (except in
:func:`rescaled_sigmoid_topk` and :func:`root_finding_topk`), and :func:`torch.compile` and
:func:`torch.func.vmap` are not supported.
"""

from khot.baselines.isotonic import block_ascent_topk as block_ascent_topk
from khot.baselines.isotonic import dykstra_topk as dykstra_topk
from khot.baselines.isotonic import generic_pav_topk as generic_pav_topk
from khot.baselines.isotonic import pav_topk as pav_topk
from khot.baselines.relaxed_sort import neuralsort_permutation as neuralsort_permutation
from khot.baselines.relaxed_sort import neuralsort_topk as neuralsort_topk
from khot.baselines.relaxed_sort import softsort_permutation as softsort_permutation
from khot.baselines.relaxed_sort import softsort_topk as softsort_topk
from khot.baselines.root_finding import root_finding_topk as root_finding_topk
from khot.baselines.sigmoid import rescaled_sigmoid_topk as rescaled_sigmoid_topk
from khot.baselines.sinkhorn import sinkhorn_topk as sinkhorn_topk
from khot.baselines.sinkhorn import sorted_sinkhorn_topk as sorted_sinkhorn_topk
from khot.baselines.softmax import masked_softmax_topk as masked_softmax_topk
from khot.baselines.softmax import sequential_softmax_topk as sequential_softmax_topk

__all__ = [
    "block_ascent_topk",
    "dykstra_topk",
    "generic_pav_topk",
    "masked_softmax_topk",
    "neuralsort_permutation",
    "neuralsort_topk",
    "pav_topk",
    "rescaled_sigmoid_topk",
    "root_finding_topk",
    "sequential_softmax_topk",
    "sinkhorn_topk",
    "softsort_permutation",
    "softsort_topk",
    "sorted_sinkhorn_topk",
]


def __dir__() -> list[str]:
    return __all__
