"""The warning of a layer that was trained with one selection and is used with another."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single
from khot._core.torch_internals import is_recomputation
from khot.nn._values import SEVERAL
from khot.nn.anneal import Anneal

__all__ = ["FAR", "LeftSoft", "outside"]

# The share of a selection outside of the hard one from which on a layer warns. At this share the model in
# docs/make-it-learn.md, which explains all variance in train mode, misses a tenth of it in eval mode.
FAR = 0.25
ENTRIES = 2**16  # of a selection, at most, that are kept until eval(); one row if that has more
AGAIN = 10  # times as many training steps as at one warning have to pass before the next
ROUNDING = 1e-3  # how far the sum of a soft mask may lie above a whole number

_Self = TypeVar("_Self", bound="LeftSoft")


class _Seen:
    """Forward passes with a gradient in train mode, and a part of the last selection. A copy forgets them.

    From ``due`` passes on there may be a warning. The selection is known as long as it has its ``version``.
    """

    def __init__(self) -> None:
        self.passes, self.due = 0, SEVERAL
        self.selection: Tensor | None = None
        self.version = 0
        self.k: Scalar | None = None

    def __reduce__(self) -> tuple[type[_Seen], tuple[()]]:
        return _Seen, ()


class LeftSoft(nn.Module):
    """The base of layers that select softly in train mode and hard in eval mode.

    Such a layer warns when it is switched to eval mode after several training steps, if more than the share
    ``FAR`` of its selection lies outside of what eval mode selects. It is silent while an Anneal of its own
    has not reached its end, because then its training has not ended either. Without an Anneal it cannot know
    whether training has ended. If a model is evaluated early, the layer therefore warns early, and a second
    time only if the selection is still soft after ``AGAIN`` times as many training steps.
    """

    def _note(self, selection: Tensor | None = None, k: Scalar | None = None) -> None:
        """Count a training step, and keep a part of its selection: rows (..., n) of weights ≥ 0.

        Without a k, the sum of a row is its k. A layer that knows its selection without data passes none.
        """
        y = selection
        if y is not None and not (y.requires_grad and arguments.has_data(y)):
            return
        if is_recomputation():
            return
        seen: _Seen | None = self.__dict__.get("_seen")
        if seen is None:
            seen = self.__dict__["_seen"] = _Seen()
        seen.passes += 1
        if y is None or seen.passes < seen.due or not y.numel():
            return
        kept = y.detach()
        if kept.untyped_storage().nbytes() > ENTRIES * kept.element_size():
            if kept.numel() > ENTRIES:
                rows = kept.reshape(-1, kept.shape[-1])
                kept = rows[:: -(-len(rows) // max(1, ENTRIES // rows.shape[-1]))]
            kept = kept.clone()  # a view would keep all of it in memory
        seen.selection, seen.version = kept, kept._version
        seen.k = k.detach() if isinstance(k, Tensor) else k

    def _outside(self) -> float:
        """The share of the selection outside of the hard one; NaN if it is not known."""
        seen: _Seen = self.__dict__["_seen"]
        if seen.selection is None or seen.selection._version != seen.version:
            return float("nan")
        return outside(seen.selection, seen.k)

    def _title(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _cure(self) -> str:
        return "lower its tau in the course of training with khot.nn.Anneal"

    def train(self: _Self, mode: bool = True) -> _Self:
        """As in ``torch.nn.Module``; warns if training leaves a selection that is far from a hard one."""
        seen: _Seen | None = self.__dict__.get("_seen")
        ends = self.training and not mode and seen is not None and seen.passes >= seen.due
        if ends and seen is not None and not torch.compiler.is_compiling():
            annealed = (module for module in self.modules() if isinstance(module, Anneal))
            if all(_has_ended(each) for each in annealed):
                share = self._outside()
                seen.selection = None
                if share > FAR:
                    seen.due = AGAIN * seen.passes
                    warnings.warn(
                        f"{self._title()} is not used as it was trained: {100 * share:.0f} % of its "
                        f"selection lies outside of what eval mode selects; {self._cure()}",
                        UserWarning,
                        stacklevel=2,
                    )
        return super().train(mode)


def outside(selection: Tensor, k: Scalar | None = None) -> float:
    """The share of the weights in the rows of a selection that their k largest entries do not hold."""
    y = at_least_single(selection)
    total = y.sum(-1, keepdim=True)
    kept = torch.ceil((total if k is None else k) - ROUNDING * torch.ones_like(total))
    rank = torch.arange(y.shape[-1], device=y.device)
    rest = y.sort(-1, descending=True).values.masked_fill(rank < kept, 0)
    return (rest.sum() / total.sum()).item()


def _has_ended(anneal: Anneal) -> bool:
    taken = anneal.taken
    return anneal.steps is not None and arguments.has_data(taken) and int(taken) >= anneal.steps
