"""Nine of ten weights at zero, in a network whose weights no process holds as a whole.

FSDP2 spreads the weights of every layer over the processes. `nn.prune_global` selects the tenth of them that
is largest in magnitude, of all layers together, where they lie: what the processes exchange for it are a few
sums, whose number does not grow with the row. Up to rounding, training is the same as on one process, so
2 and 4 processes end with the same error if the seed is the same.

    torchrun --nproc-per-node 2 examples/global_pruning_fsdp.py        # digits, 40 s on two cores
    torchrun --nproc-per-node 4 examples/global_pruning_fsdp.py --steps 100
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits

HIDDEN, AMOUNT, BATCH = 32, 0.9, 128


@dataclass
class Result:
    error: float  # of the network with the selection hard
    kept: list[int]  # weights of each layer that are not 0
    here: list[int]  # weights of each layer that this process holds


def train(images: Images, steps: int, seed: int) -> Result:
    """Train on every process of the default group. Each process takes its share of each batch."""
    torch.manual_seed(seed)  # the same network and the same batches everywhere
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(
        nn.Linear(images.n, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )
    layers = list(model[::2])
    tau = khot.nn.Anneal(1.0, 0.01, steps, "exponential")
    khot.nn.prune_global([(layer, "weight") for layer in layers], AMOUNT, tau=tau)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    here = [layer.parametrizations["weight"].original.to_local().numel() for layer in layers]

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        batch = torch.randint(len(images.train_labels), (BATCH,))[rank::world]
        loss = F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tau.step()

    kept: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: kept.append(int((layer.weight != 0).sum())))
    with torch.no_grad():
        wrong = model.eval()(images.test_images).argmax(-1) != images.test_labels
    return Result(wrong.float().mean().item(), kept, here)


def main(steps: int = 300, seed: int = 0) -> None:
    """Nine of ten weights at zero, spread over the processes of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(load_digits(), steps, seed)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes; rank 0 holds {result.here} weights of the layers")
        print(f"kept {result.kept}, {sum(result.kept)} in all; test error {100 * result.error:.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
