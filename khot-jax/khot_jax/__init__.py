"""Choosing k of n in JAX: relaxed top-k operators and k-hot sampling.

The operators are those of khot, under JAX's names: ``axis`` and ``where``, keys first, and any k and tau,
traced ones too. On a CPU they run khot's compiled kernels, elsewhere in jnp.
"""

from __future__ import annotations

from khot_jax import cdfs as cdfs
from khot_jax._compiled import instruction_set as instruction_set
from khot_jax._order import soft_quantile as soft_quantile
from khot_jax._order import soft_rank as soft_rank
from khot_jax._order import soft_sort as soft_sort
from khot_jax._sample import sample_khot as sample_khot
from khot_jax._topk import log_soft_topk as log_soft_topk
from khot_jax._topk import soft_budget as soft_budget
from khot_jax._topk import soft_topk as soft_topk
from khot_jax._topk import topk_mask as topk_mask

__all__ = [
    "cdfs",
    "instruction_set",
    "log_soft_topk",
    "sample_khot",
    "soft_budget",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
    "soft_topk",
    "topk_mask",
]

__version__ = "0.1.0"
