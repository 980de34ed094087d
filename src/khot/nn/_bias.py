"""A bias per expert that a layer sets by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Biased"]


class Biased(nn.Module):
    """Has a saved buffer ``bias`` in float32, which is moved with the layer but never cast.

    Half precision has too few digits for a bias, which would then depend on when the model was cast.
    """

    bias: Tensor

    def _reset_bias(self) -> None:
        """Set all biases to 0."""
        self.bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Biased:
        bias, was_meta = self.bias, self.bias.is_meta
        super()._apply(fn, recurse)
        if self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)
        if was_meta and not self.bias.is_meta:  # what to_empty() gives is not initialised
            self._reset_bias()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bias = state_dict.get(prefix + "bias")
        if isinstance(bias, Tensor) and bias.dtype != torch.float32:  # assign=True would take it as it is
            state_dict[prefix + "bias"] = bias.float()
        super()._load_from_state_dict(state_dict, prefix, *args)
