"""Every layer takes an Anneal without steps, which the callback of a trainer gives it: in Lightning and in
Hugging Face's Trainer, each value of each layer changes over the training, and goes on from a checkpoint."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import khot.lightning
import khot.transformers
from changing import BATCH, ROWS, STEPS, N, Row, X
from khot.nn import Anneal

pytestmark = [
    # Lightning uses a name of torch.utils._pytree that torch 2.13 calls deprecated
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),  # of a checkpoint
]

ENDS = {"tau": (1.0, 0.2), "amount": (0.0, 0.5)}  # of the schedules; the others are numbers that are chosen
NUMBER = (3.0, 2.0)
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def test_everything_that_takes_a_changing_number_is_in_the_table() -> None:
    want: dict[str, set[str]] = {}
    for name in khot.nn.__all__:
        if callable(made := getattr(khot.nn, name)):
            taken = inspect.signature(made).parameters.values()
            found = {one.name for one in taken if "Value" in str(one.annotation).split(" | ")}
            if found:
                want[name] = found
    got: dict[str, set[str]] = {}
    for row in ROWS:
        got.setdefault(row.name.partition("-")[0], set()).update(row.values)
    assert got.pop("MixtureOfExperts")  # which takes them in its router
    assert want and got == want


class Net(lightning.LightningModule):
    """The layer behind a linear one, and what its values were in each step."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = {name: Anneal(*ENDS.get(name, NUMBER)) for name in row.values}
        self.first, self.layer, self.call = nn.Linear(N, N), row.make(**values), row.call
        self.values, self.own = [values[name] for name in row.values], Anneal(4.0, 2.0, 100)
        self.seen: list[list[float]] = []

    def output(self, x: Tensor) -> Tensor:
        y = self.call(self.layer, self.first(x))
        return y if isinstance(y, Tensor) else y[0]

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append([float(value()) for value in self.values])
        return self.output(batch).square().mean()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.training_step(x)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def computes(self) -> Tensor:
        """The output and all gradients, for the same samples."""
        torch.manual_seed(0)
        self.zero_grad()
        y = self.train().output(X[:BATCH])
        y.square().sum().backward()
        grads = [parameter.grad for parameter in self.parameters()]
        return torch.cat([x.detach().flatten() for x in (y, *grads) if x is not None])


def fit_lightning(net: Net, folder: Path, checkpoint: Path | None = None) -> Path:
    """The checkpoint of the first epoch."""
    trainer = lightning.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[
            khot.lightning.AnnealCallback(),
            ModelCheckpoint(folder, filename="{step}", save_top_k=-1),  # of each epoch
        ],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader: Any = DataLoader(X, batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(net, loader, ckpt_path=checkpoint)
    return folder / f"step={STEPS // 2}.ckpt"


def fit_transformers(net: Net, folder: Path, checkpoint: Path | None = None) -> Path:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="epoch",
        dataloader_pin_memory=False,
    )
    callbacks = [khot.transformers.AnnealCallback()]
    rows: Any = [{"x": x} for x in X]
    trainer = transformers.Trainer(net, arguments, train_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train(None if checkpoint is None else str(checkpoint))
    return folder / f"checkpoint-{STEPS // 2}"


# the trainer sees the numbers, and not whose they are
@pytest.mark.parametrize(
    ("fit", "row"),
    [*((fit_lightning, row) for row in ROWS), *((fit_transformers, row) for row in ROWS[::4])],
    ids=lambda v: getattr(v, "name", None) or v.__name__,
)
def test_the_callback_gives_the_steps_and_a_checkpoint_resumes(fit: Any, row: Row, tmp_path: Path) -> None:
    net, other = Net(row), Net(row)
    assert all(value.steps is None for value in net.values)
    fit(other, tmp_path / "again", fit(net, tmp_path / "first"))
    want = []
    for name in row.values:
        start, end = ENDS.get(name, NUMBER)
        shares = torch.arange(STEPS).double() / STEPS
        want.append(start + (end - start) * shares if start == 0 else start * (end / start) ** shares)
    expected = torch.stack(want, -1).repeat_interleave(2, 0)  # two batches for each step
    torch.testing.assert_close(torch.tensor(net.seen).double(), expected)
    torch.testing.assert_close(torch.tensor(other.seen).double(), expected[STEPS:])
    assert all(value.steps == value.taken == STEPS for one in (net, other) for value in one.values)
    assert all(one.own.steps == 100 and one.own.taken == STEPS for one in (net, other))


@each
def test_the_layer_uses_the_value_of_now(row: Row, tmp_path: Path) -> None:
    net = Net(row)
    fit_lightning(net, tmp_path)
    now = net.computes()
    for value in net.values:
        value.taken.zero_()
        assert not torch.allclose(net.computes(), now)
        value.taken.fill_(STEPS)
    torch.testing.assert_close(net.computes(), now)
