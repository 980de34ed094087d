"""khot in Hugging Face's models and Trainer (needs the extra ``transformers``)."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import _callbacks
from khot._core.precision import without_autocast
from khot.nn.balancer import QuantileBalancer

try:
    from transformers import (
        PreTrainedModel,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.utils.hub import cached_file
except ImportError as error:
    raise ImportError(
        "khot.transformers needs transformers >= 4.46: pip install '.[transformers]' in a checkout of khot"
    ) from error

__all__ = ["AnnealCallback", "BalancerCallback", "balance", "unbalance"]


def __dir__() -> list[str]:
    return __all__


def balance(model: PreTrainedModel, *, bins: int = 1024, ema: float = 0.0) -> list[QuantileBalancer]:
    """Put a :class:`khot.nn.QuantileBalancer` into every router of a mixture of experts.

    From then on the experts are chosen by biased scores, and weighted by scores without biases. Names of
    parameters, router logits and ``generate`` stay as they are. The biases belong to the model: they are
    saved with it, and balancing a model that ``from_pretrained`` has read from such a folder finds them
    again. A balancer counts in train mode, padding as other tokens; :class:`BalancerCallback` calls its
    update, or, in a loop of your own, ``QuantileBalancer.update_all(model)`` after each step of the
    optimizer.

    With biases of 0, the model computes what it did before, bit for bit. Of equal scores the lowest indices
    are chosen. An auxiliary loss of the model stays as it is (Mixtral has one if ``output_router_logits`` is
    set); it is of no use here.

    Args:
        model: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or DeepSeek-V3, with any head, of a version of
            transformers that has its routers in classes of their own (5.0 and later). Where its routers are
            balanced already, they stay so. DeepSeek-V3's own biases are the balancers' first ones, and are
            kept equal to theirs in what is saved, so that the result runs everywhere.
        bins, ema: as for :class:`khot.nn.QuantileBalancer`.

    Returns:
        The balancers, from the first layer to the last.

    Raises:
        ValueError: the model has no router that is known.

    Example:
        >>> import transformers, khot.transformers
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=64,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=2,
        ...     num_key_value_heads=2,
        ...     num_local_experts=4,
        ... )
        >>> model = transformers.MixtralForCausalLM(config)
        >>> balancers = khot.transformers.balance(model)
        >>> tokens = torch.randint(64, (2, 8))
        >>> model.train()(tokens, labels=tokens).loss.backward()
        >>> khot.nn.QuantileBalancer.update_all(model)
        >>> int(balancers[0].load.sum())  # two experts for each of 16 tokens
        32
    """
    routers: list[Any] = [
        m for m in model.modules() if isinstance(m, _Balanced) or type(m).__name__ in _RULES
    ]
    if not routers:
        known = ", ".join(_RULES)
        raise ValueError(f"model must have a router of the classes {known}, but got {type(model).__name__}")
    new = [router for router in routers if not isinstance(router, _Balanced)]
    for router in new:
        if "forward" in vars(router) and "_old_forward" not in vars(router):  # the latter is accelerate's
            raise ValueError("model must have routers whose forward pass is that of their class")
    found = _saved(model) if len(new) == len(routers) else []
    for i, router in enumerate(new):
        balancer = QuantileBalancer(
            router.num_experts,
            router.top_k,
            bins=bins,
            ema=ema,
            groups=getattr(router, "num_group", 1),
            top_groups=getattr(router, "topk_group", 1),
        )
        if len(found) == len(new) and found[i]["bias"].shape == balancer.bias.shape:
            balancer.load_state_dict(found[i])
        _become(router, _balanced(type(router)))
        offloaded = router.weight.is_meta and "_old_forward" in vars(router)
        balancer = balancer.to("cpu" if offloaded else router.weight.device)
        router.balancer = balancer.train(router.training)
        router._begin()
    return [router.balancer for router in routers]


def unbalance(model: PreTrainedModel) -> None:
    """Take the balancers out of the routers again. DeepSeek-V3's routers keep the biases as their own; the
    others choose by their scores alone.

    Raises:
        ValueError: no router of the model is balanced.
    """
    routers = [m for m in model.modules() if isinstance(m, _Balanced)]
    if not routers:
        raise ValueError(f"model must have been balanced, but no router of {type(model).__name__} is")
    for router in routers:
        router._end()
        _become(router, type(router).__bases__[1])
        del router.balancer


def _become(router: Any, kind: type[nn.Module]) -> None:
    router.__class__ = kind
    if "_old_forward" in vars(router):  # accelerate has put a forward pass of its own before it
        router._old_forward = types.MethodType(kind.forward, router)


class _Balanced(nn.Module):
    """What takes the place of the forward pass of a router. Its class is put before that of the router."""

    num_experts: int
    top_k: int
    hidden_dim: int
    weight: nn.Parameter
    balancer: QuantileBalancer

    def _begin(self) -> None:
        """After the balancer has come."""

    def _end(self) -> None:
        """Before it goes."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no name that pickle finds
        return _blank, (type(self).__bases__[1],), self.__dict__


def _blank(router: type[nn.Module]) -> nn.Module:
    made = _balanced(router)
    return made.__new__(made)


class _OfSoftmax(_Balanced):
    """The k experts of the largest biased logits, with their probabilities as weights."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        indices = self.balancer(logits)
        weights = logits.float().softmax(-1).gather(-1, indices)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        # Mixtral leaves the weights in float32
        return logits, weights.to(logits.dtype) if hasattr(self, "norm_topk_prob") else weights, indices


class _OfSigmoid(_Balanced):
    """The k experts of the largest biased sigmoids, within the best groups."""

    e_score_correction_bias: Tensor
    norm_topk_prob: bool
    routed_scaling_factor: float

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(hidden_states.device):
            logits = F.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
        scores = logits.sigmoid()
        indices = self.balancer(scores)
        weights = scores.gather(-1, indices)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices

    @torch.no_grad()
    def _begin(self) -> None:
        own, bias = self.e_score_correction_bias, self.balancer.bias
        dtypes = torch.float32, torch.bfloat16, torch.float16  # to which what was saved may be rounded
        if not own.is_meta and not any(torch.equal(own, bias.to(dtype).to(own)) for dtype in dtypes):
            bias.copy_(own - own.max())
        self._hook = self.register_state_dict_pre_hook(_keep_equal)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = state_dict.get(f"{prefix}e_score_correction_bias")
        if own is not None and f"{prefix}balancer.bias" not in state_dict:  # of a model without balancers
            state_dict[f"{prefix}balancer.bias"] = own.float() - own.max()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _end(self) -> None:
        _keep_equal(self)
        self._hook.remove()
        del self._hook


@torch.no_grad()
def _keep_equal(router: Any, *_: Any) -> None:
    router.e_score_correction_bias.copy_(router.balancer.bias)


_RULES = {
    "MixtralTopKRouter": _OfSoftmax,
    "Qwen2MoeTopKRouter": _OfSoftmax,
    "Qwen3MoeTopKRouter": _OfSoftmax,
    "OlmoeTopKRouter": _OfSoftmax,
    "DeepseekV3TopkRouter": _OfSigmoid,
}


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _balanced(router: type[nn.Module]) -> type[nn.Module]:
    """A class of its own for each class of routers, as the models look for theirs by its class."""
    if router not in _CLASSES:
        _CLASSES[router] = type(f"Balanced{router.__name__}", (_RULES[router.__name__], router), {})
    return _CLASSES[router]


def _saved(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """The states of balancers in the model's files, from the first layer to the last.

    Files name modules otherwise than models, so that layers are told by the numbers in the names.
    """
    from safetensors import safe_open

    if not (name := getattr(model, "name_or_path", "")):
        return []
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "local_files_only": True}
    options["revision"] = getattr(model.config, "_commit_hash", None)  # which was loaded, of a name's
    try:
        index = cached_file(name, "model.safetensors.index.json", **options)
    except OSError:  # neither a folder that is there nor a name
        return []
    files = re.findall(r'"([^"/]+\.safetensors)"', Path(index).read_text(encoding="utf-8")) if index else []
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for file in sorted(set(files)) or ["model.safetensors"]:
        path = cached_file(name, file, **options)
        if path is None:
            continue
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dict)
                prefix, _, rest = key.rpartition(".balancer.")
                if prefix:
                    layer = tuple(map(int, re.findall(r"\d+", prefix)))
                    found.setdefault(layer, {})[rest] = tensors.get_tensor(key)
    return [found[layer] for layer in sorted(found)]


class AnnealCallback(TrainerCallback):
    """Steps every :class:`khot.nn.Anneal` of the model once per step of the optimizer.

    An Anneal without ``steps`` takes as many as the training has (``state.max_steps``).

    Pass it to the trainer: ``transformers.Trainer(model, callbacks=[khot.transformers.AnnealCallback()])``.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _callbacks.begin(kwargs["model"], state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _callbacks.step(kwargs["model"])


class BalancerCallback(TrainerCallback):
    """Updates every :class:`khot.nn.QuantileBalancer` of the model after each step of the optimizer, by one
    all-reduce for all of them, if there are several processes.

    What the trainer prints, and ``trainer.state.log_history``, then have the ``violation`` of the worst
    layer, its largest load over the mean load, less 1, and ``least_load``, the smallest load of any expert
    over the mean load, both of the last step. Callbacks that report to a service come before those of the
    user, and have not seen them yet: add these behind this one.

    Pass it to the trainer: ``transformers.Trainer(model, callbacks=[khot.transformers.BalancerCallback()])``.
    """

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _callbacks.update_balancers(kwargs["model"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        found = _callbacks.loads(kwargs["model"])
        kwargs["logs"].update(found)
        if state.log_history:  # which has a copy
            state.log_history[-1].update(found)
