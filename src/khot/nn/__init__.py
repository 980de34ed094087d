"""Layers that select: the operators as parts of a model, with the conventions of torch.nn.

The selection is soft in train mode, so that it can be learned, and hard in eval mode. A layer warns, once, if
training ends while the two are far apart: more than a quarter of the soft selection of the last step lies
outside of the hard one. In a row in which fewer
than k entries may be selected, all of them are selected.
"""

from khot.nn._router import Routing as Routing
from khot.nn._sae_fit import fit_sae as fit_sae
from khot.nn._sae_layouts import sae_from_layout as sae_from_layout
from khot.nn._sae_layouts import sae_to_layout as sae_to_layout
from khot.nn._sae_metrics import loss_recovered as loss_recovered
from khot.nn._sae_metrics import unexplained as unexplained
from khot.nn.anneal import Anneal as Anneal
from khot.nn.anneal import ScheduleName as ScheduleName
from khot.nn.attention import TopKAttention as TopKAttention
from khot.nn.attention import selected_attention as selected_attention
from khot.nn.attention import topk_attention as topk_attention
from khot.nn.balanced import BalancedRouter as BalancedRouter
from khot.nn.balancer import QuantileBalancer as QuantileBalancer
from khot.nn.beam_search import Beams as Beams
from khot.nn.beam_search import soft_beam_loss as soft_beam_loss
from khot.nn.beam_search import soft_beam_search as soft_beam_search
from khot.nn.expert_choice import ExpertChoiceRouter as ExpertChoiceRouter
from khot.nn.gate import KHotGate as KHotGate
from khot.nn.knn import SoftKNN as SoftKNN
from khot.nn.mixture import MixtureOfExperts as MixtureOfExperts
from khot.nn.pruning import make_permanent as make_permanent
from khot.nn.pruning import prune_global as prune_global
from khot.nn.pruning import prune_magnitude as prune_magnitude
from khot.nn.pruning import prune_n_m as prune_n_m
from khot.nn.sae import LossParts as LossParts
from khot.nn.sae import TopKSAE as TopKSAE
from khot.nn.soft_topk import SoftTopK as SoftTopK
from khot.nn.token_choice import TokenChoiceRouter as TokenChoiceRouter
from khot.nn.topk_router import TopKRouter as TopKRouter
from khot.nn.topk_router import TopKRouting as TopKRouting

__all__ = [
    "Anneal",
    "BalancedRouter",
    "Beams",
    "ExpertChoiceRouter",
    "KHotGate",
    "LossParts",
    "MixtureOfExperts",
    "QuantileBalancer",
    "Routing",
    "ScheduleName",
    "SoftKNN",
    "SoftTopK",
    "TokenChoiceRouter",
    "TopKAttention",
    "TopKRouter",
    "TopKRouting",
    "TopKSAE",
    "fit_sae",
    "loss_recovered",
    "make_permanent",
    "prune_global",
    "prune_magnitude",
    "prune_n_m",
    "sae_from_layout",
    "sae_to_layout",
    "soft_beam_loss",
    "soft_beam_search",
    "selected_attention",
    "topk_attention",
    "unexplained",
]


def __dir__() -> list[str]:
    return __all__
