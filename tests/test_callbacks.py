"""AnnealCallback in Lightning's and in Hugging Face's trainers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import khot.lightning
import khot.transformers
from khot.nn import Anneal, SoftTopK

# Lightning uses a name of torch.utils._pytree that torch 2.13 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")

ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


class Net(lightning.LightningModule):
    """Two layers share a temperature without a length; k has its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.k = Anneal(1.0, 0.1), Anneal(4.0, 2.0, 100)
        self.layers = nn.Sequential(
            nn.Linear(6, 6), SoftTopK(3, tau=self.tau), nn.Linear(6, 6), SoftTopK(self.k, tau=self.tau)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.training_step(x)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_lightning(
    net: Net, folder: Path, epochs: int = 2, ckpt_path: Path | None = None, **options: Any
) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[khot.lightning.AnnealCallback()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(net, DataLoader(ROWS, batch_size=4), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer


def fit_transformers(net: Net, folder: Path) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    rows = [{"x": row} for row in ROWS]
    callbacks = [khot.transformers.AnnealCallback()]
    trainer = transformers.Trainer(net, arguments, train_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train()
    return trainer


@pytest.mark.parametrize("fit", [fit_lightning, fit_transformers])
def test_steps_once_per_step_of_the_optimizer(fit: Any, tmp_path: Path) -> None:
    net = Net()
    fit(net, tmp_path)  # 6 batches an epoch, two for each step
    assert int(net.tau.taken) == int(net.k.taken) == 6
    assert net.tau.steps == 6 and net.k.steps == 100
    assert float(net.tau()) == pytest.approx(0.1) and float(net.k()) == pytest.approx(4 * 0.5**0.06)


def test_resumes_where_lightning_stopped(tmp_path: Path) -> None:
    trainer = fit_lightning(Net(), tmp_path, epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    net = Net()
    fit_lightning(net, tmp_path, ckpt_path=tmp_path / "half.ckpt")
    assert int(net.tau.taken) == 6 and net.tau.steps == 6


def test_a_training_of_unknown_length_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps must be given to Anneal"):
        fit_lightning(Net(), tmp_path, epochs=-1, max_time={"seconds": 1})


def test_without_a_length_it_says_what_to_do() -> None:
    tau = Anneal(1.0, 0.1)
    with pytest.raises(RuntimeError, match="steps must be set before training"):
        SoftTopK(2, tau=tau)(torch.randn(4))
    tau.steps = 2
    tau.step()
    assert float(tau()) == pytest.approx(math.sqrt(0.1))
    assert (Anneal(1, 0.1, 2).schedule, Anneal(1.0, 0.0, 2).schedule) == ("exponential", "linear")


class Choice(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 8)
        self.balancer = khot.nn.QuantileBalancer(8, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        scores = self.scores(batch)
        return scores.gather(-1, self.balancer(scores)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_updates_balancers_and_logs(tmp_path: Path) -> None:
    """After steps of the optimizer, each of two batches of four."""
    net = Choice()
    trainer = lightning.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[khot.lightning.BalancerCallback()],
        accelerator="cpu",
        logger=False,
        log_every_n_steps=3,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(net, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    assert net.balancer.updates == 6 and net.balancer.load.sum() == 2 * 8
    share = net.balancer.load / 2.0
    assert trainer.logged_metrics["violation"] == share.max() - 1
    assert trainer.logged_metrics["least_load"] == share.min()


RECIPES = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```py\n(.*?)```", RECIPES.split("## Lightning and Transformers")[1], re.DOTALL)


# what a machine has or has not, of which the trainers tell
@pytest.mark.filterwarnings("ignore:.*(GPU|pin_memory|num_workers|LeafSpec|logging interval|tensorboardX)")
@pytest.mark.parametrize("program", PROGRAMS, ids=["lightning", "transformers"])
def test_the_recipe_finds_its_features(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    *statements, result, said = program.strip().splitlines()
    names: dict[str, Any] = {"__name__": "recipe"}
    exec("\n".join(statements), names)
    assert repr(eval(result, names).cpu()) == said.removeprefix("# ")
