"""BalancerCallback in Lightning's trainer.

That of Hugging Face is in test_transformers.py, and AnnealCallback is in nn/test_annealed.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import khot.lightning
import khot.transformers

# Lightning uses a name of torch.utils._pytree that torch 2.13 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")

ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


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
