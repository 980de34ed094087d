"""The training of a sparse autoencoder."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.precision import widen
from khot.nn._modes import in_mode
from khot.nn._sae_metrics import Activations, batches_of, check_sae, is_whole, rows_of, share
from khot.nn.anneal import Anneal
from khot.nn.sae import LossParts, TopKSAE

__all__ = ["fit_sae"]

Row = dict[str, float]


def fit_sae(
    sae: TopKSAE,
    activations: Activations,
    steps: int,
    *,
    batch_size: int = 256,
    lr: float = 1e-3,
    decay: float = 0.2,
    average: float | None = None,
    kind: Literal["log", "mse"] = "log",
    seed: int = 0,
    every: int = 10,
    callback: Callable[[Row], Any] | None = None,
    checkpoint: str | Path | None = None,
    save_every: int = 1000,
    progress: bool = False,
) -> list[Row]:
    """Train a sparse autoencoder by Adam, and record how it goes.

    This is the loop::

        for batch in batches:
            optimizer.zero_grad()
            sae.loss(batch).backward()
            optimizer.step()

    with a rate that falls to 0 at the end. The autoencoder is trained in place, in train mode, also under
    ``torch.no_grad()`` and ``torch.inference_mode()``. It and its parts are left in the modes in which they
    were, and without gradients. Each :class:`khot.nn.Anneal` in it takes a step with the optimizer; one
    without ``steps`` gets these, and keeps them, unless there is an error before the first step.

    Args:
        sae: the autoencoder, without a ``group``: several processes train it by the loop above
            (docs/distributed).
        activations: a tensor (..., in_features) on any device, of which every pass takes all vectors in a new
            order, except those that fill no whole batch; or an iterable of batches (..., in_features), which
            is gone through again where it ends early, as a DataLoader can be. For a transcoder, a tuple of
            inputs and targets, or an iterable of pairs of these.
        steps: how many steps to take.
        batch_size: how many vectors of a tensor a batch has.
        lr: the rate, for which 1e-3 is good and 3e-3 as a rule, too.
        decay: in which share of the steps, the last ones, the rate falls linearly to 0.
        average: None, or the weight in [0, 1) of the old in a moving mean of the parameters, such as 0.99,
            which takes the place of the parameters in the end. It does about as much as the decay, and can be
            read at any step, as ``decay=0`` with it leaves the rate as it is.
        kind: of the loss, see :meth:`TopKSAE.loss`.
        seed: of the order of a tensor's vectors.
        every: every so many steps, and after the last one, there is a row in the record.
        callback: a function that gets each row as it is made, such as
            ``lambda row: [writer.add_scalar(name, x, row["step"]) for name, x in row.items()]`` for
            TensorBoard's SummaryWriter. It may raise an exception to stop the training.
        checkpoint: None, or the path of a file that is written every ``save_every`` steps and after the last
            one. If it is there, training goes on from it, and ends with the same bits as one without a
            break; an iterable then has to give the same batches again, of which those that were trained on
            are skipped.
        save_every: see ``checkpoint``.
        progress: whether to show a bar, for which the package rich is needed.

    Returns:
        The record, a list of dicts of plain numbers: step, loss, error, wider and idle as in
        :meth:`TopKSAE.loss_parts`; unexplained, the error as a share of the variance of the batch, NaN if
        that is 0; l0, how many latents an input uses; dead, the share of latents that were idle for 50·n/k
        inputs, or as ``revive`` says; lr; and, with ``batch``, threshold. All are of the batch of this step,
        before it.

    Raises:
        ValueError, TypeError: an argument out of range, batches that end before the last step, a checkpoint
            of another training, or an autoencoder that was made within ``torch.inference_mode()``.
        FloatingPointError: the loss is not finite. The message says whether the batch or the parameters are
            the cause, and the parameters are those before this step. On a device that works on while Python
            goes on, the loss is looked at where there is a row.
        ImportError: ``progress`` without rich.

    Example:
        >>> activations = torch.randn(2000, 16) @ torch.randn(16, 16) + 1
        >>> sae = khot.nn.TopKSAE(16, 64, k=4)
        >>> record = khot.nn.fit_sae(sae, activations, 20)
        >>> sorted(record[-1])
        ['dead', 'error', 'idle', 'l0', 'loss', 'lr', 'step', 'unexplained', 'wider']
    """
    check_sae(sae)
    if sae.group is not None:
        raise ValueError(
            "sae must have no group, because fit_sae trains in one process; several train "
            "DistributedDataParallel(sae), or sae after fully_shard, by a loop over sae(x, loss=True)"
        )
    whole = {"steps": steps, "batch_size": batch_size, "every": every, "save_every": save_every}
    for name, value in whole.items():
        arguments.check_integer(value, name, low=1)
    arguments.check_integer(seed, "seed", low=0)
    arguments.check_number(lr, "lr", low=0, high=math.inf)
    if lr == math.inf:
        raise ValueError("lr must be finite, but got inf")
    arguments.check_number(decay, "decay", low=0, high=1)
    if average is not None:
        arguments.check_number(average, "average", low=0, high=1)
        if average == 1:
            raise ValueError("average must be less than 1, or the mean never moves, but got 1")
    arguments.check_flags(progress=progress)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be None or a function, but got {type(callback).__name__}")
    settings: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "decay": decay,
        "average": average,
    }
    settings |= {"kind": kind, "seed": seed, "every": every}
    if any(x.is_inference() for x in (*sae.parameters(), *sae.buffers())):
        raise ValueError(
            "sae must not be made within torch.inference_mode(), because its parameters could not learn: "
            "make it outside, or pass copy.deepcopy(sae), which has to be taken outside"
        )
    anneals = [module for module in sae.modules() if isinstance(module, Anneal)]
    without = [anneal for anneal in anneals if anneal.steps is None]
    taken = 0
    try:
        with in_mode(True, sae):
            for anneal in without:
                anneal.steps = steps
            run = _Run(sae, settings, None if checkpoint is None else Path(checkpoint))
            batches = _batches(activations, sae, batch_size, seed, run.step)
            with _bar(progress, steps, run.step) as show:
                while run.step < steps:
                    rate = lr * min(1.0, (steps - run.step) / (decay * steps)) if decay else lr
                    x, y = next(batches)
                    sae.train()  # the callback, or what gives the batches, may have left it in eval mode
                    row = run.take(x, y, rate)
                    taken += 1
                    for anneal in anneals:
                        anneal.step()
                    if row is not None and callback is not None:
                        callback(row)
                    if checkpoint is not None and (run.step % save_every == 0 or run.step == steps):
                        run.save()
                    show(run.step, row)
            run.finish()
    except BaseException:
        if not taken:  # so that the next training, which may be longer, gives its own length
            for anneal in without:
                anneal.steps = None
        raise
    finally:
        if taken:
            sae.zero_grad()
    return run.record


class _Run:
    """A training, as far as it has got."""

    # the user's mode is for batches and callback: here gradients are wanted, and tensors that can learn
    @torch.inference_mode(False)
    def __init__(self, sae: TopKSAE, settings: dict[str, Any], path: Path | None) -> None:
        self.sae, self.settings, self.path = sae, settings, path
        self.parameters = list(sae.parameters())
        self.optimizer = torch.optim.Adam(self.parameters)
        self.step, self.record = 0, list[Row]()
        self.mean: list[Tensor] = []
        if settings["average"] is not None:
            self.mean = [parameter.detach().clone() for parameter in self.parameters]
        if path is not None and path.exists():
            self._load(path)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def take(self, x: Tensor, y: Tensor, rate: float) -> Row | None:
        """A step, and its row if there is one in the record."""
        target = None if y is x else y.clone() if y.is_inference() else y
        x = x.clone() if x.is_inference() else x
        recorded = (self.step + 1) % self.settings["every"] == 0 or self.step + 1 == self.settings["steps"]
        self.optimizer.zero_grad()
        parts = self.sae.loss_parts(x, self.settings["kind"], target=target)
        if (recorded or parts.loss.device.type == "cpu") and not math.isfinite(parts.loss.item()):
            raise FloatingPointError(self._why(x if target is None else torch.cat((x, y), -1), parts))
        row = self._row(y, parts, rate) if recorded else None
        parts.loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.mean:
            weight = max(1 - self.settings["average"], 1 / (self.step + 1))  # of all steps while they are few
            with torch.no_grad():
                for mean, parameter in zip(self.mean, self.parameters, strict=True):
                    mean.lerp_(parameter, weight)
        self.step += 1
        if row is not None:
            self.record.append(row)
        return row

    def _row(self, y: Tensor, parts: LossParts, rate: float) -> Row:
        wide = widen(y) - widen(y[0])  # exactly 0 where all are the same
        variance = (wide - wide.mean(0)).square().mean()
        row = {
            "step": self.step,
            "loss": parts.loss.item(),
            "error": parts.error.item(),
            "wider": parts.wider.item(),
            "idle": parts.idle.item(),
            "unexplained": share(parts.error, variance).item(),
            "l0": parts.used.item(),
            "dead": self.sae.dead(math.ceil(float(self.sae._limit()))).item(),
            "lr": rate,
        }
        if self.sae.threshold is not None:
            row["threshold"] = self.sae.threshold.mean().item()
        return row

    def _why(self, x: Tensor, parts: LossParts) -> str:
        what = f"the loss must be finite, but is {parts.loss.item()} in step {self.step}"
        if not len(x):
            return f"{what}, because its batch is empty"
        if not x.isfinite().all():
            count = int((~x.isfinite()).any(-1).sum())
            return f"{what}, because {count} of the {len(x)} vectors of its batch are not finite"
        names = [name for name, value in self.sae.named_parameters() if not value.isfinite().all()]
        if names:
            return f"{what}, because {', '.join(names)} are not finite any more: a smaller lr may help"
        largest = max(parameter.abs().max().item() for parameter in self.parameters)
        return (
            f"{what}, although its batch and the parameters are finite, with numbers up to "
            f"{x.abs().max():.3g} and {largest:.3g}: scale the vectors if the first is far from 1, or take a "
            "smaller lr if the second is"
        )

    def save(self) -> None:
        assert self.path is not None
        state = {
            "settings": self.settings,
            "step": self.step,
            "sae": self.sae.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean,
            "record": self.record,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        torch.save(state, part)
        os.replace(part, self.path)  # a training that is stopped while it saves loses nothing

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.parameters[0].device, weights_only=True)
        for name, value in self.settings.items():
            if state["settings"][name] != value:
                raise ValueError(
                    f"{name} must be {state['settings'][name]!r}, as in the training that {path} is of, but "
                    f"got {value!r}: pass the path of a file that is not there to train anew"
                )
        self.sae.load_state_dict(state["sae"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.step, self.record = state["mean"], state["step"], state["record"]

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, mean in zip(self.parameters, self.mean, strict=False):
            parameter.copy_(mean)


def _batches(
    activations: Any, sae: TopKSAE, size: int, seed: int, skip: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device of the autoencoder, without the first ``skip`` of them, and without an end."""
    if not is_whole(activations, sae):
        return _again_and_again(activations, sae, skip)
    rows = rows_of(activations, sae)
    if not len(rows[0]):
        raise ValueError(f"activations must have vectors, but got shape {tuple(rows[0].shape)}")
    return _shuffled(rows, sae, min(size, len(rows[0])), seed, skip)


def _shuffled(
    rows: tuple[Tensor, Tensor], sae: TopKSAE, size: int, seed: int, skip: int
) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = rows
    each = len(inputs) // size
    epoch, first = divmod(skip, each)
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for i in range(first, each):
            chosen = order[i * size : (i + 1) * size]
            x = inputs[chosen].to(sae.shift.device)
            yield x, x if targets is inputs else targets[chosen.to(targets.device)].to(sae.shift.device)
        epoch, first = epoch + 1, 0


def _again_and_again(activations: Any, sae: TopKSAE, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
    taken = 0
    while True:
        before = taken
        for batch in batches_of(activations, sae):
            taken += 1
            if taken > skip:
                yield batch
        if taken == before:
            raise ValueError(
                f"activations must give a batch for each step, but ended after {taken} of them: an iterator "
                "can be gone through once, a list or a DataLoader again and again"
            )


@contextmanager
def _bar(wanted: bool, steps: int, done: int) -> Generator[Callable[[int, Row | None], None]]:
    """What shows how far the training has got."""
    if not wanted:
        yield lambda step, row: None
        return
    try:
        progress: Any = importlib.import_module("rich.progress")
    except ImportError as error:
        raise ImportError("progress=True needs the package rich: pip install rich") from error
    bar = progress.Progress(
        *progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[state]}")
    )
    with bar:
        task = bar.add_task("sparse autoencoder", total=steps, completed=done, state="")

        def show(step: int, row: Row | None) -> None:
            fields = {}
            if row is not None:
                fields["state"] = f"unexplained {row['unexplained']:.2%}, dead {row['dead']:.1%}"
            bar.update(task, completed=step, **fields)

        yield show
