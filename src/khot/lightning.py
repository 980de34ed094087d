"""khot in Lightning: `AnnealCallback` and `BalancerCallback` (needs the extra ``lightning``)."""

from __future__ import annotations

from typing import Any

from khot import _callbacks

try:
    import lightning
except ImportError as error:
    raise ImportError(
        "khot.lightning needs lightning >= 2.4: pip install '.[lightning]' in a checkout of khot"
    ) from error

__all__ = ["AnnealCallback", "BalancerCallback"]


def __dir__() -> list[str]:
    return __all__


class AnnealCallback(lightning.Callback):
    """Steps every :class:`khot.nn.Anneal` of the module once per step of the optimizer.

    A batch whose gradients are only accumulated is no step. An Anneal without ``steps`` takes as many as the
    training has (``trainer.estimated_stepping_batches``).

    Raises:
        ValueError: an Anneal without ``steps`` in a training of unknown length.

    Pass it to the trainer: ``lightning.Trainer(callbacks=[khot.lightning.AnnealCallback()])``.
    """

    def __init__(self) -> None:
        self._seen = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _callbacks.begin(pl_module, trainer.estimated_stepping_batches)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen = trainer.global_step  # which a checkpoint has restored by now

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        # with several optimizers a batch may take several steps, of which the schedule counts one
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            _callbacks.step(pl_module)


class BalancerCallback(lightning.Callback):
    """Updates every :class:`khot.nn.QuantileBalancer` of the module after each step of the optimizer, by one
    all-reduce for all of them, if there are several processes.

    It logs the ``violation`` of the worst layer, its largest load over the mean load, less 1, and
    ``least_load``, the smallest load of any expert over the mean load, every ``trainer.log_every_n_steps``
    steps.

    Pass it to the trainer: ``lightning.Trainer(callbacks=[khot.lightning.BalancerCallback()])``.
    """

    def __init__(self) -> None:
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self._seen:  # the gradients of this batch are only accumulated
            return
        self._seen = trainer.global_step
        _callbacks.update_balancers(pl_module)
        every = trainer.log_every_n_steps  # 0 is never
        if every and trainer.global_step % every == 0:
            pl_module.log_dict(_callbacks.loads(pl_module))
