"""Clusters of equal size: what is gained by deciding rows and columns together?

k-means puts digits into clusters, and the sizes of these are whatever comes out. Where each cluster has to
have the same size (the images that one person labels, the customers of one van), the assignment of points to
centres is a two-sided choice: each point belongs to one cluster, and each cluster has n/10 points. Four ways
to it from the same centres, on the same principal components, with no setting chosen by a label:

- k-means (Lloyd's iteration), which ignores the sizes, as the baseline of cost;
- k-means, and at the end the points of each overfull cluster that are farthest from its centre move to their
  nearest cluster with room: what one would write by hand;
- Lloyd's iteration with the plan of Sinkhorn's sweeps in place of the nearest centre (written out below);
- Lloyd's iteration with `khot.soft_assign`, which starts each step from the last one's bias.

The last two go through the same falling temperatures. At the end, the hand-written rule makes whole points of
their shares, from distances less the thresholds of the columns. Their costs are the same: what soft_assign
saves is time, and the sums are exact. The cost is the mean squared distance to the centres.

    python examples/assign.py                       # scikit-learn's digits, 10 s on one core
    python examples/assign.py --data-dir FOLDER     # MNIST, from its four gzipped files; 5,000 of its images
    python examples/assign.py --seed 1 --out assign.png
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness.data import Images, load_digits, load_mnist

CLUSTERS, COMPONENTS, LARGEST = 10, 20, 5000
TAUS = (0.1, 0.03, 0.01)  # of the mean squared distance between points and centres
NAMES = {
    "lloyd": "k-means",
    "moved": "k-means, then moved",
    "sinkhorn": "Sinkhorn's sweeps",
    "assign": "soft_assign",
}


@dataclass
class Result:
    """The clusters of the points (n,), their centres, the cost, the error of the sums of the last plan, and
    the seconds."""

    labels: Tensor
    centres: Tensor
    cost: float
    off: float
    seconds: float

    @property
    def sizes(self) -> Tensor:
        return self.labels.bincount(minlength=CLUSTERS)


def points(images: Images) -> Tensor:
    """The principal components of the training images."""
    x = images.train_images[:LARGEST].double()
    x = x[: len(x) // CLUSTERS * CLUSTERS]
    x = x - x.mean(0)
    _, _, directions = torch.linalg.svd(x, full_matrices=False)
    return x @ directions[:COMPONENTS].T


def sweeps(score: Tensor, tau: float, bias: Tensor, count: int = 200) -> tuple[Tensor, Tensor]:
    """Rows of sum 1 and columns of equal sums, by alternate scaling in logarithms."""
    room = torch.tensor(len(score) / CLUSTERS, dtype=score.dtype).log()
    b = bias / tau
    for _ in range(count):
        a = -(score / tau + b).logsumexp(-1, keepdim=True)
        b = room - (score / tau + a).logsumexp(0)
    return (score / tau + b).softmax(-1), b * tau


def whole(prefer: Tensor) -> Tensor:
    """Each row's preferred column, where it has room; the rows that lose least by it give way."""
    size = len(prefer) // CLUSTERS
    prefer = prefer.clone()
    while True:
        labels = prefer.argmax(-1)
        sizes = labels.bincount(minlength=CLUSTERS)
        if int(sizes.max()) == size:
            return labels
        j = int(sizes.argmax())
        members = (labels == j).nonzero().squeeze(-1)
        others = prefer[members].masked_fill(sizes >= size, -torch.inf)
        loss, to = (prefer[members, j].unsqueeze(-1) - others).min(-1)
        give = loss.argmin()
        prefer[members[give], to[give]] = torch.inf


def fit(x: Tensor, centres: Tensor, method: str, steps: int) -> Result:
    start, off = time.perf_counter(), 0.0
    bias = torch.zeros(CLUSTERS, dtype=x.dtype)
    spread = torch.cdist(x, centres).square().mean().item()
    for step in range(steps):
        score = -torch.cdist(x, centres).square()
        tau = spread * TAUS[min(step * len(TAUS) // steps, len(TAUS) - 1)]
        if method == "assign":
            y, bias = khot.soft_assign(score, 1, tau=tau, bias=bias, return_bias=True)
        elif method == "sinkhorn":
            y, bias = sweeps(score, tau, bias)
        else:
            y = torch.nn.functional.one_hot(score.argmax(-1), CLUSTERS).to(x.dtype)
        if method in ("assign", "sinkhorn"):
            off = float((y.sum(0) * CLUSTERS / len(x) - 1).abs().max())
        centres = (y.T @ x) / y.sum(0).clamp(min=1e-9).unsqueeze(-1)
    score = -torch.cdist(x, centres).square()
    labels = score.argmax(-1) if method == "lloyd" else whole(score + bias)
    centres = torch.stack([x[labels == j].mean(0) for j in range(CLUSTERS)])
    cost = (x - centres[labels]).square().sum(-1).mean().item()
    return Result(labels, centres, cost, off, time.perf_counter() - start)


def run(x: Tensor, steps: int = 45, seed: int = 0) -> dict[str, Result]:
    generator = torch.Generator().manual_seed(seed)
    centres = x[torch.randperm(len(x), generator=generator)[:CLUSTERS]]
    return {method: fit(x, centres, method, steps) for method in NAMES}


def draw(x: Tensor, results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    size = len(x) / CLUSTERS
    for ax, (method, result) in zip(figure.subplots(1, 4, sharey=True), results.items(), strict=True):
        color = "#0b6e99" if method == "assign" else "#999999"
        ax.bar(range(1, CLUSTERS + 1), result.sizes.sort(descending=True).values.tolist(), color=color)
        ax.axhline(size, color="#d9730d", linestyle="--")
        ax.set_title(f"{NAMES[method]}:\ncost {result.cost:.2f}", fontsize=11)
        ax.set_xlabel("cluster")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("points")
    figure.savefig(out, dpi=80)


def main(
    data_dir: Path | None = None, steps: int = 45, seed: int = 0, out: Path = Path("assign.png")
) -> None:
    """Clusters of equal size."""
    torch.set_num_threads(1)
    images = load_digits() if data_dir is None else load_mnist(data_dir)
    x = points(images)
    results = run(x, steps, seed)
    table = Table(title=f"{images.name}: {len(x)} points in {CLUSTERS} clusters")
    table.add_column("assigned by")
    for name in ("smallest", "largest", "cost", "sums off by", "seconds"):
        table.add_column(name, justify="right")
    for method, name in NAMES.items():
        result = results[method]
        sizes = result.sizes
        table.add_row(
            name,
            str(int(sizes.min())),
            str(int(sizes.max())),
            f"{result.cost:.3f}",
            f"{result.off:.0e}" if result.off else "–",
            f"{result.seconds:.2f}",
        )
    Console().print(table)
    draw(x, results, out)


if __name__ == "__main__":
    typer.run(main)
