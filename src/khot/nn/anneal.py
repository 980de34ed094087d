"""Numbers that change during training."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from khot._core import arguments
from khot._core.names import unknown
from khot._core.precision import widen
from khot._core.torch_internals import is_exporting
from khot.nn._state import counts
from khot.nn._values import SEVERAL

__all__ = ["Anneal", "ScheduleName"]

ScheduleName = Literal["linear", "cosine", "cubic", "exponential"]
"""The names of the schedules of :class:`Anneal`."""

SCHEDULES: dict[ScheduleName, Callable[[float, float, Tensor], Tensor]] = {
    "linear": lambda a, b, t: a + (b - a) * t,
    "cosine": lambda a, b, t: b + (a - b) * (1 + torch.cos(math.pi * t)) / 2,
    "cubic": lambda a, b, t: b + (a - b) * (1 - t) ** 3,
    "exponential": lambda a, b, t: a * (b / a) ** t,
}

_Self = TypeVar("_Self", bound="Anneal")


class Anneal(nn.Module):
    """A number that goes from ``start`` to ``end`` in a number of steps: the tau or k of other layers.

    With t = (steps taken − wait) / (steps − wait), from 0 to 1 and then 1:

        linear       start + (end − start)·t
        cosine       end + (start − end)·(1 + cos πt)/2
        cubic        end + (start − end)·(1 − t)³
        exponential  start·(end/start)^t

    Every layer of :mod:`khot.nn` accepts an Anneal instead of a number. The Anneal is then a submodule of the
    layer, so that the number of steps is part of the state dict, and training resumes where it stopped. Call
    :meth:`step` once per training step, or let a callback of the training framework do it
    (:class:`khot.lightning.AnnealCallback`, :class:`khot.transformers.AnnealCallback`). Several layers can
    share one Anneal.

    An Anneal that was read in several training steps but never stepped warns once when it is switched to eval
    mode (with the model that it is a part of): its number is still ``start``.

    Args:
        start, end: finite numbers, of Python, NumPy or a tensor with one entry; for ``"exponential"`` both
            > 0.
        steps: the number of steps from start to end, an int of at least 1. None stands for the length of the
            training, which the callbacks fill in; without them, set the attribute ``steps`` before training.
        schedule: one of the four above; ``"cubic"`` is the usual one for a share of weights to prune (Zhu and
            Gupta 2017). ``"exponential"`` is the default where both ends are > 0, because temperatures differ
            by factors; elsewhere the default is ``"linear"``.
        wait: how many of the steps pass before the number begins to change, an int from 0 to ``steps`` − 1.

    Returns:
        Called without arguments, the current number: a 0-dim tensor on the module's device, in float64 if the
        device has it. Reading it does not synchronise with the device, and stepping causes no recompilation.

    Raises:
        ValueError: steps, schedule, start, end or wait out of range.
        TypeError: steps or wait that is not an int, a start or end that is not a number.
        RuntimeError: called while ``steps`` is None.

    Example:
        >>> tau = khot.nn.Anneal(1.0, 0.25, steps=2)
        >>> select = khot.nn.SoftTopK(2, tau=tau)
        >>> for _ in range(3):
        ...     print(f"{tau():.2f}", select(torch.tensor([1.0, 3.0, 2.0, 0.0])))
        ...     tau.step()
        1.00 tensor([0.3775, 0.8176, 0.6225, 0.1824])
        0.50 tensor([0.2689, 0.9526, 0.7311, 0.0474])
        0.25 tensor([0.1192, 0.9975, 0.8808, 0.0025])
    """

    start: float
    end: float
    schedule: ScheduleName

    taken: Tensor

    def __init__(
        self,
        start: float,
        end: float,
        steps: int | None = None,
        schedule: ScheduleName | None = None,
        *,
        wait: int = 0,
    ) -> None:
        super().__init__()
        start, end = _number(start, "start"), _number(end, "end")
        if schedule is None:
            schedule = "exponential" if start > 0 and end > 0 else "linear"
        if schedule not in get_args(ScheduleName):
            raise unknown("schedule", schedule, SCHEDULES)
        for name, value in (("start", start), ("end", end)):
            if schedule == "exponential" and value <= 0:
                raise ValueError(f"{name} must be > 0 for the exponential schedule, but got {value}")
        arguments.check_integer(wait, "wait", low=0)
        self.wait = int(wait)
        self.start, self.end, self.steps, self.schedule = start, end, steps, schedule
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))
        self._reads, self._warned = 0, False

    @property
    def steps(self) -> int | None:
        """The number of steps from start to end, or None as long as it is not known."""
        return self._steps

    @steps.setter
    def steps(self, steps: int | None) -> None:
        if steps is not None:
            arguments.check_integer(steps, "steps", low=self.wait + 1)
            steps = int(steps)
        self._steps = steps

    def step(self) -> None:
        """Take one step towards the end; at the end nothing changes any more."""
        self.taken += 1

    def train(self: _Self, mode: bool = True) -> _Self:
        """As in ``torch.nn.Module``; warns about forgotten steps when training ends."""
        ends = self.training and not mode and self._reads >= SEVERAL
        if ends and not self._warned and self.taken.device.type != "meta" and int(self.taken) == 0:
            self._warned = True
            warnings.warn(
                f"{self} was used for training but never stepped, so that its value is still {self.start}; "
                "call its step() once per training step",
                UserWarning,
                stacklevel=2,
            )
        return super().train(mode)

    def forward(self) -> Tensor:
        if self.training:
            if not torch.compiler.is_compiling():
                self._reads += counts(self)
            elif not is_exporting():
                self._reads = SEVERAL  # counting would compile a new graph for each number
        if self.steps is None:
            raise RuntimeError(
                f"steps must be set before training, but got none for {self}: pass steps= to Anneal, set its "
                "attribute, or give khot.lightning.AnnealCallback() or khot.transformers.AnnealCallback() to "
                "the trainer, for the length of the training"
            )
        t = ((widen(self.taken) - self.wait) / (self.steps - self.wait)).clamp(0, 1)
        return SCHEDULES[self.schedule](self.start, self.end, t)

    if TYPE_CHECKING:
        __call__ = forward

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        taken = destination[prefix + "taken"]
        if keep_vars or not arguments.has_data(taken):
            return
        # what several layers share is saved for each of them, and safetensors refuses tensors of one memory
        others = (x for name, x in destination.items() if name.endswith("taken") and x is not taken)
        if any(x.data_ptr() == taken.data_ptr() for x in others):
            destination[prefix + "taken"] = taken.clone()

    def extra_repr(self) -> str:
        waits = f", wait={self.wait}" * bool(self.wait)
        return f"{self.start}, {self.end}, steps={self.steps}, schedule={self.schedule!r}{waits}"


def _number(value: Any, name: str) -> float:
    """A finite number as one of Python's, which is all that the choice of a schedule looks at."""
    arguments.check_scalar(value, name, low=-math.inf)
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta):
        raise ValueError(f"{name} must be one number, but got a tensor of shape {tuple(value.shape)}")
    number = value if type(value) is int else float(value)
    if not abs(number) <= sys.float_info.max:  # which an int may exceed
        raise ValueError(f"{name} must be finite, but got {value}")
    return number
