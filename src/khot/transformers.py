"""khot in Hugging Face's Trainer: `AnnealCallback` (needs the extra ``transformers``)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from khot import _callbacks

__all__ = ["AnnealCallback"]


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
