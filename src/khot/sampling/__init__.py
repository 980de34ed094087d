"""k-hot sampling: choosing k of n at random, with inclusion probabilities that the caller prescribes."""

from khot.sampling import conditional_poisson as conditional_poisson
from khot.sampling.draw import inclusion_probs as inclusion_probs
from khot.sampling.draw import joint_inclusion_probs as joint_inclusion_probs
from khot.sampling.draw import sample as sample
from khot.sampling.gumbel import gumbel_topk as gumbel_topk
from khot.sampling.table import Design as Design
from khot.sampling.table import DesignName as DesignName
from khot.sampling.table import designs as designs

__all__ = [
    "Design",
    "DesignName",
    "conditional_poisson",
    "designs",
    "gumbel_topk",
    "inclusion_probs",
    "joint_inclusion_probs",
    "sample",
]


def __dir__() -> list[str]:
    return __all__
