"""khot: choose k of n, as easily, exactly and cheaply as softmax chooses one."""

from khot import baselines as baselines
from khot import cdfs as cdfs
from khot import distributions as distributions
from khot import estimators as estimators
from khot import losses as losses
from khot import nn as nn
from khot import sampling as sampling
from khot._config import show_config as show_config
from khot._config import version as _version
from khot.assignment import soft_assign as soft_assign
from khot.budgets import budget_mask as budget_mask
from khot.budgets import nucleus_mask as nucleus_mask
from khot.budgets import soft_budget as soft_budget
from khot.counting import inverse_soft_count as inverse_soft_count
from khot.counting import soft_count as soft_count
from khot.estimators import sample_khot as sample_khot
from khot.magnitude import k_support_negentropy as k_support_negentropy
from khot.magnitude import k_support_norm as k_support_norm
from khot.magnitude import soft_topk_exp as soft_topk_exp
from khot.magnitude import soft_topk_magnitude as soft_topk_magnitude
from khot.magnitude import soft_topk_signed as soft_topk_signed
from khot.magnitude import soft_topk_sum as soft_topk_sum
from khot.masks import laplace_topk as laplace_topk
from khot.masks import log_soft_topk as log_soft_topk
from khot.masks import ot_topk as ot_topk
from khot.masks import sigmoid_topk as sigmoid_topk
from khot.masks import soft_topk as soft_topk
from khot.masks import sparse_topk as sparse_topk
from khot.masks import topk_mask as topk_mask
from khot.permutahedron import project_permutahedron as project_permutahedron
from khot.quantiles import conformal_quantile as conformal_quantile
from khot.quantiles import kth_value as kth_value
from khot.quantiles import quantile as quantile
from khot.ranking import log_soft_permutation as log_soft_permutation
from khot.ranking import soft_median as soft_median
from khot.ranking import soft_permutation as soft_permutation
from khot.ranking import soft_quantile as soft_quantile
from khot.ranking import soft_rank as soft_rank
from khot.ranking import soft_sort as soft_sort
from khot.selection import linear_topk as linear_topk
from khot.selection import topk as topk
from khot.transport import sorted_soft_topk as sorted_soft_topk

__version__ = _version()


def __getattr__(name: str) -> object:
    if name in ("lightning", "sklearn", "transformers"):
        raise AttributeError(
            f"khot.{name} is not imported with khot, because it needs another package: import khot.{name}"
        )
    raise AttributeError(f"module 'khot' has no attribute {name!r}")


__all__ = [
    "baselines",
    "budget_mask",
    "cdfs",
    "conformal_quantile",
    "distributions",
    "estimators",
    "inverse_soft_count",
    "k_support_negentropy",
    "k_support_norm",
    "kth_value",
    "laplace_topk",
    "linear_topk",
    "log_soft_permutation",
    "log_soft_topk",
    "losses",
    "nn",
    "nucleus_mask",
    "ot_topk",
    "project_permutahedron",
    "quantile",
    "sample_khot",
    "sampling",
    "show_config",
    "sigmoid_topk",
    "soft_assign",
    "soft_budget",
    "soft_count",
    "soft_median",
    "soft_permutation",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
    "soft_topk",
    "soft_topk_exp",
    "soft_topk_magnitude",
    "soft_topk_signed",
    "soft_topk_sum",
    "sorted_soft_topk",
    "sparse_topk",
    "topk",
    "topk_mask",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
