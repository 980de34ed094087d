"""Draws the figures of the documentation: `make figures`, or `python docs/figures.py FOLDER`.

All is computed here, but for times and for what was trained: these are read from the committed tables in
benchmarks/results and docs/results.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from torch import Tensor

import khot
from khot.cdfs import CDF, Laplace, Logistic, Normal, Power, Uniform

ROOT = Path(__file__).resolve().parents[1]
BLUE, ORANGE, GREY, LIGHT, INK = "#1f8fc2", "#d9730d", "#7a7a7a", "#bbbbbb", "#7a7a7a"
CDFS: dict[str, CDF] = {
    '"logistic"': Logistic(),
    '"laplace"': Laplace(),
    '"normal"': Normal(),
    '"uniform"': Uniform(),
    "Power(4/3)": Power(4 / 3),
}


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: object) -> tuple:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def shown(figure: Figure) -> str:
    """The lines, bars and numbers of a figure, by which a test sees whether its tables have changed since."""
    parts = [
        [ax.get_title(loc="left") or ax.get_title(), [text.get_text() for text in ax.texts]]
        + [line.get_xydata().tolist() for line in ax.lines]
        + [[bar.get_width(), bar.get_height()] for bar in ax.patches if isinstance(bar, Rectangle)]
        for ax in figure.axes
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Without a background, in colours that can be read on white and on dark pages."""
    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK)
    for ax in figure.axes:
        ax.tick_params(color=INK, which="both")
        ax.spines[:].set_color(INK)
    figure.savefig(path, dpi=dpi, transparent=True, metadata={"Description": shown(figure)})


def cdfs(out: Path) -> None:
    """Of two entries, how much of the one place goes to the first: as Figure 4 of Wijk et al. 2025."""
    d = torch.linspace(-5, 5, 401, dtype=torch.float64)
    x = torch.stack([d / 2, -d / 2], -1).requires_grad_()
    figure, axes = panels(10, 4, 2, len(CDFS), sharex=True, sharey="row")
    softmax = torch.softmax(x.detach(), -1)[:, 0]
    for (name, F), (above, below) in zip(CDFS.items(), axes.T, strict=True):
        y = khot.soft_topk(x, 1, cdf=F)[:, 0]
        (slope,) = torch.autograd.grad(y.sum(), x)
        above.plot(d, softmax, color=LIGHT, linewidth=3, label="softmax")
        below.plot(d, softmax * (1 - softmax), color=LIGHT, linewidth=3)
        above.plot(d, y.detach(), color=BLUE)
        below.plot(d, slope[:, 0], color=ORANGE)
        above.set_title(name, family="monospace", fontsize=11)
        below.set_xlabel("x₁ − x₂")
    axes[0, 0].set_ylabel("y₁")
    axes[1, 0].set_ylabel("∂y₁/∂x₁")
    axes[0, 0].legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, out / "cdfs.png")


def temperature(out: Path) -> None:
    """3 of 5 at four temperatures: as Figure 3 of Wijk et al. 2025, for every CDF."""
    x = torch.tensor([0.3, 1.4, -0.5, 0.9, 0.5], dtype=torch.float64)
    taus = (0.05, 0.25, 1.0, 5.0)
    figure, axes = panels(10, 7, len(CDFS), len(taus), sharex=True, sharey=True)
    for row, (name, F) in zip(axes, CDFS.items(), strict=True):
        for ax, tau in zip(row, taus, strict=True):
            ax.bar(range(1, 6), khot.soft_topk(x, 3, tau=tau, cdf=F).tolist(), color=BLUE, width=0.7)
            ax.axhline(3 / 5, color=GREY, linestyle=":", linewidth=1)
            ax.set_ylim(0, 1.05)
        row[0].set_ylabel(name, family="monospace")
    for ax, tau in zip(axes[0], taus, strict=True):
        ax.set_title(f"τ = {tau:g}", fontsize=11)
    for ax in axes[-1]:
        ax.set_xticks(range(1, 6), [f"{v:g}" for v in x.tolist()])
        ax.set_xlabel("score")
    save(figure, out / "temperature.png")


def falling_tau(out: Path) -> None:
    """What khot does: 3 of 6 at falling temperatures, down to the hard mask."""
    x = torch.tensor([0.4, 1.6, -0.6, 2.2, 0.9, 1.2], dtype=torch.float64)
    k, taus = 3, (4.0, 1.0, 0.3, 0.1)
    figure, axes = panels(10, 2.9, 1, 1 + len(taus), sharey=True)
    top = khot.topk_mask(x, k)
    colors = [BLUE if chosen else "#8fb9cc" for chosen in top.tolist()]
    weights = {f"τ = {tau:g}": khot.soft_topk(x, k, tau=tau) for tau in taus} | {"hard mask, τ → 0": top}
    for ax, (title, y) in zip(axes, weights.items(), strict=True):
        ax.bar(range(len(x)), y.tolist(), color=colors, width=0.75)
        ax.axhline(k / len(x), color=GREY, linestyle=":", linewidth=1)
        ax.set_title(title, fontsize=13)
        ax.set_xticks(range(len(x)), [f"{v:g}".replace("-", "−") for v in x.tolist()], fontsize=8.5)
        ax.set_xlabel(f"weights sum to {y.sum():g}", fontsize=11)
    axes[0].set(ylim=(0, 1.05), yticks=(0, k / len(x), 1), yticklabels=("0", "k/n", "1"))
    figure.suptitle("six scores, k = 3", fontsize=11, color=GREY)
    save(figure, out / "falling_tau.png")


def soft_count(out: Path) -> None:
    """Counting above a level, softly; the level with a count of k; and each entry's share in that count."""
    x = torch.tensor([0.4, 1.0, 1.9, 2.3, 3.6], dtype=torch.float64)
    k, tau = 2, 0.3
    low, high = -0.5, 4.7
    b = torch.linspace(low, high, 600, dtype=torch.float64)
    t = khot.inverse_soft_count(x, k, tau=tau).item()
    figure, (left, right) = panels(10, 3.6, 1, 2)

    left.step(b, (x > b[:, None]).sum(-1), color=LIGHT, linewidth=3, label="entries above b")
    left.plot(b, khot.soft_count(x, b, tau=tau), color=BLUE, label=f"C(b), τ = {tau}")
    left.plot(x, torch.zeros_like(x), "|", color=GREY, markersize=14, markeredgewidth=2, clip_on=False)
    left.plot([low, t, t], [k, k, 0], color=ORANGE, linestyle="--")
    left.plot(t, k, "o", color=ORANGE)
    left.annotate(f"C(t) = {k}", (t, k), (8, 6), textcoords="offset points", color=ORANGE)
    left.set(xlabel="level b", ylabel="count", ylim=(0, 5.3), xlim=(low, high))
    left.legend(frameon=False, loc="upper right")

    right.plot(b, Logistic().cdf((b - t) / tau), color=BLUE, label="F((x − t)/τ)")
    y = khot.sigmoid_topk(x, k, tau=tau)
    right.vlines(x, 0, y, color=GREY, linewidth=2)
    right.plot(x, y, "o", color=GREY)
    for score, share in zip(x.tolist(), y.tolist(), strict=True):
        side = (-8, "right") if score > 1.5 else (8, "left")
        right.annotate(
            f"{share:.2f}", (score, share), (side[0], 2), textcoords="offset points", ha=side[1], fontsize=9
        )
    right.axvline(t, color=ORANGE, linestyle="--")
    right.set(xlabel="score x", ylabel="y", ylim=(0, 1.08), xlim=(low, high))
    right.set_title(f"the five values of y sum to {y.sum():g}", fontsize=10)
    right.legend(frameon=False, loc="upper left")
    save(figure, out / "soft_count.png")


def budgets(out: Path) -> None:
    """A budget spent by score and by value: bars as wide as the costs, as high as the shares."""
    generator = torch.Generator().manual_seed(3)
    cost = torch.tensor([2.0, 0.5, 1.5, 0.4, 3.0, 0.8, 1.0, 2.5, 0.6, 1.2], dtype=torch.float64)
    density = torch.randn(10, generator=generator, dtype=torch.float64).sort(descending=True).values + 1
    budget = 5.0
    figure, axes = panels(10, 3.4, 1, 2, sharey=True)
    for ax, by in zip(axes, ("score", "value"), strict=True):
        x = density if by == "score" else density * cost
        starts = cost.cumsum(0) - cost
        y = khot.soft_budget(x, cost, budget, tau=0.4, by=by)
        mask = khot.budget_mask(x, cost, budget, by=by)
        ax.bar(starts.tolist(), y.tolist(), cost.tolist(), align="edge", color=BLUE, edgecolor="white")
        edges = torch.cat((starts, cost.sum(0, keepdim=True))).tolist()
        ax.stairs(mask.tolist(), edges, color=ORANGE, linestyle="--", linewidth=1.5)
        ax.set(xlabel="cost, added up in the order of value per cost", ylim=(0, 1.08), xlim=(0, edges[-1]))
        ax.set_title(f'by="{by}": Σ w y = {(cost * y).sum():g}', family="monospace", fontsize=10)
    axes[0].set_ylabel("y")
    save(figure, out / "budgets.png")


def pruned_blocks(out: Path) -> None:
    """The same weights with two of every four, as the temperature falls."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    figure, axes = panels(10, 1.9, 1, 4)
    axes[0].imshow(weight.numpy(), cmap="RdBu", vmin=-2.5, vmax=2.5)
    axes[0].set_title("all weights", fontsize=10)
    for ax, tau in zip(axes[1:], (1.0, 0.3, 0.01), strict=True):
        layer = torch.nn.Linear(16, 8, bias=False, dtype=torch.float64)
        layer.weight.data.copy_(weight)
        pruned = khot.nn.prune_n_m(layer, "weight", tau=tau).weight.detach()
        ax.imshow(pruned.numpy(), cmap="RdBu", vmin=-2.5, vmax=2.5)
        ax.set_title(f"tau = {tau:g}", family="monospace", fontsize=10)
    for ax in axes:
        for edge in (3.5, 7.5, 11.5):
            ax.axvline(edge, color=GREY, linewidth=0.8)
        ax.set(xticks=[], yticks=[])
    axes[0].set(xlabel="input", ylabel="output")
    save(figure, out / "pruned_blocks.png")


def two_sided(out: Path) -> None:
    """The loads of columns with and without a capacity; the value of the assignment as τ falls."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64) + torch.linspace(1.2, 0, 6)
    figure, (left, right) = panels(10, 3.6, 1, 2)
    for i, (name, y, color) in enumerate(
        (
            ("soft_topk", khot.soft_topk(x, 2, tau=0.2), LIGHT),
            ("soft_assign", khot.soft_assign(x, 2, tau=0.2), BLUE),
            ("at_most=True, capacity 24", khot.soft_assign(x, 2, 24, tau=0.2, at_most=True), ORANGE),
        )
    ):
        places = [j + 0.27 * (i - 1) for j in range(1, 7)]
        left.bar(places, y.sum(0).tolist(), 0.25, color=color, label=name)
    left.axhline(20, color=BLUE, linestyle=":", linewidth=1)
    left.axhline(24, color=ORANGE, linestyle=":", linewidth=1)
    left.set(xlabel="column", ylabel="load", ylim=(0, 48))
    left.set_title("60 rows select 2 of 6 columns each", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    taus = torch.logspace(-2.5, 1, 36, dtype=torch.float64)
    best = (x * khot.soft_assign(x, 2, tau=1e-4)).sum()
    for cdf, color in (("logistic", BLUE), ("laplace", ORANGE), ("normal", GREY)):
        values = [(x * khot.soft_assign(x, 2, tau=tau, cdf=cdf)).sum() / best for tau in taus]
        right.semilogx(taus, values, color=color, label=f'"{cdf}"')
    right.axhline(1, color=GREY, linestyle=":", linewidth=1)
    right.set(xlabel="τ", ylabel="Σ x y, of the linear programme's")
    right.legend(frameon=False, fontsize=9, title="cdf")
    save(figure, out / "two_sided.png")


def groups(out: Path) -> None:
    """The largest load over the mean, less 1, by update, where a token may use the experts of few groups."""
    experts, k, rows, updates = 256, 8, 16_384, 20
    figure, axes = panels(10, 3.4, 1, 2)
    draw = torch.Generator().manual_seed(0)
    uneven = torch.linspace(-1, 1, experts)[torch.randperm(experts, generator=draw)]
    scores = (torch.randn(rows, experts, generator=draw) + uneven).sigmoid()
    for ax, (G, M) in zip(axes, ((8, 4), (8, 2)), strict=True):
        rules = {"balancer with groups": BLUE, "balancer without, in groups": ORANGE, "sign rule": GREY}
        for rule, color in rules.items():
            known = {} if "without" in rule else {"groups": G, "top_groups": M}
            learns = khot.nn.QuantileBalancer(experts, k, **known)
            chooses = khot.nn.QuantileBalancer(experts, k, groups=G, top_groups=M)
            found = []
            for update in range(updates + 1):
                chooses.bias.copy_(learns.bias)
                load = chooses(scores).flatten().bincount(minlength=experts).double()
                found.append(load.max() / load.mean() - 1)
                if rule == "sign rule":
                    learns.bias += 0.01 * (load.mean() - load).sign()
                elif update < updates:
                    learns(scores)
                    learns.update()
            ax.semilogy(range(updates + 1), found, color=color, label=rule, marker="o", markersize=3)
        ax.axhline(0.03, color=GREY, linestyle=":", linewidth=1)
        ax.set(xlabel="update", xticks=range(0, updates + 1, 5), ylim=(1e-3, 10))
        ax.set_title(f"{M} of {G} groups", fontsize=10)
    axes[0].set_ylabel("largest load / mean - 1")
    axes[1].legend(frameon=False, fontsize=9)
    save(figure, out / "groups.png")


def design_entropy(probs: Tensor, draws: int) -> dict[str, tuple[float, float]]:
    """For each design: the largest error of an inclusion probability, and the entropy of its draws in nats.

    The entropy is that of the observed frequencies, corrected for its bias (Miller and Madow 1955).
    """
    found = {}
    for name, design in khot.sampling.designs.items():
        if not (design.fixed_size and design.close):
            continue
        generator = torch.Generator().manual_seed(0)
        x = khot.sampling.sample(probs, name, sample_shape=(draws,), generator=generator)
        code = (x.long() << torch.arange(len(probs))).sum(-1)
        share = torch.bincount(code).double() / draws
        seen = int((share > 0).sum())
        entropy = -torch.special.xlogy(share, share).sum().item() + (seen - 1) / (2 * draws)
        true = khot.sampling.inclusion_probs(probs, name)
        found[name] = ((true - probs).abs().max().item() if not design.exact else 0.0, entropy)
    return found


def designs(out: Path) -> None:
    probs = torch.linspace(0.1, 0.9, 14, dtype=torch.float64)  # 7 of 14
    found = design_entropy(probs, 200_000)
    cost = table(ROOT / "benchmarks" / "results" / "sampling.md")
    names = [name for name in found if name in cost]
    figure, axes = panels(10, 3.2, 1, 3, sharey=True)
    first, second, third = axes
    bars(first, names, [found[name][0] for name in names], "{:.1e}")
    first.set_xlabel("largest error of an\ninclusion probability")
    bars(second, names, [found[name][1] for name in names], "{:.2f}")
    second.set_xlabel("entropy of a draw,\nnats")
    bars(third, names, [float(cost[name][1].replace(",", "")) for name in names], "{:g}")
    third.set_xscale("log")
    third.set_xlabel("cost at (128, 1000),\nin torch.topk")
    first.invert_yaxis()
    save(figure, out / "designs.png")


def bars(ax: Axes, names: Sequence[str], values: Sequence[float], label: str) -> None:
    drawn = ax.barh(names, values, color=BLUE, height=0.6)
    ax.bar_label(drawn, [label.format(v) if v else "0" for v in values], padding=3, fontsize=9)
    ax.margins(x=0.3)
    for tick in ax.get_yticklabels():
        tick.set_family("monospace")


def estimators(out: Path) -> None:
    rows = table(ROOT / "benchmarks" / "results" / "estimators.md")
    names = list(rows)
    places = range(len(names))
    figure, axes = panels(10, 4.2, 1, 2, sharey=True)
    losses = ((BLUE, "linear", "o"), (ORANGE, "quadratic", "s"), (GREY, "network", "D"))
    for column, (color, loss, marker) in enumerate(losses):
        bias = [tuple(map(float, re.findall(r"[\d.]+", rows[name][2 * column]))) for name in names]
        spread = [float(rows[name][2 * column + 1]) for name in names]
        shift = [place + 0.22 * (column - 1) for place in places]
        axes[0].errorbar(
            [b for b, _ in bias],
            shift,
            xerr=[e for _, e in bias],
            fmt=marker,
            color=color,
            label=loss,
            markersize=5,
        )
        axes[1].plot(spread, shift, marker, color=color, markersize=5)
    axes[0].set_yticks(places, names, family="monospace", fontsize=9)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("bias, with its standard error")
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    axes[1].set_xlabel("spread of one sample")
    axes[1].set_xscale("symlog", linthresh=0.2)
    axes[1].set_xlim(-0.02, 20)
    axes[1].set_xticks([0, 0.2, 1, 5, 20], ["0", "0.2", "1", "5", "20"])
    for ax in axes:
        ax.grid(axis="y", color=LIGHT, linewidth=0.5)
    save(figure, out / "estimators.png")


def quantiles(out: Path) -> None:
    """What stands between two entries of a row; and the time of torch's functions as multiples of khot's."""
    x = torch.tensor([0.2, 0.5, 0.6, 1.5, 2.0, 3.1], dtype=torch.float64)
    q = torch.linspace(0, 1, 1001, dtype=torch.float64)
    figure, (left, right) = panels(10, 3.6, 1, 2)
    for name, color, style in (
        ("lower", GREY, ":"),
        ("higher", GREY, "--"),
        ("nearest", ORANGE, "-"),
        ("midpoint", "#6b4c9a", "-"),
        ("linear", BLUE, "-"),
    ):
        left.plot(q, khot.quantile(x, q, interpolation=name), color=color, linestyle=style, label=name)
    left.plot(torch.linspace(0, 1, len(x)), x, "o", color=BLUE, markersize=7)
    left.set_xlabel("q")
    left.set_title("khot.quantile of six entries")
    left.legend(frameon=False, fontsize=9)
    rows = {n: cells for n, cells in table(ROOT / "benchmarks/results/quantile.md").items() if " x " not in n}
    for column, name, color in (
        (1, "torch.kthvalue : kth_value", BLUE),
        (2, "torch.quantile : quantile", ORANGE),
    ):
        there = {int(n.replace(",", "")): cells[column] for n, cells in rows.items() if cells[column] != "–"}
        right.loglog(there.keys(), [float(cell) for cell in there.values()], "o-", color=color, label=name)
    right.axhline(1, color=GREY, linestyle=":", linewidth=1)
    right.set_xlabel("entries of one row")
    right.set_title("time, as multiples of khot's")
    right.legend(frameon=False, fontsize=9)
    save(figure, out / "quantiles.png")


def sae_parts(out: Path) -> None:
    """What each part of the autoencoder's default is worth, on the sets on which all were left out."""
    cases = json.loads((ROOT / "benchmarks/results/sae.json").read_text(encoding="utf-8"))["cases"].values()
    methods = ["khot"]
    methods += dict.fromkeys(case["method"] for case in cases if case["method"].startswith("with"))
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for case in cases:
        if case["method"] in methods:
            found.setdefault(case["set"], {}).setdefault(case["method"], []).append(case)
    sets = [name for name, measured in found.items() if len(measured) == len(methods)]
    figure, axes = panels(2 + 5 * len(sets), 2.8, 1, len(sets), sharey=True, squeeze=False)
    for name, ax in zip(sets, axes[0], strict=True):
        means = [
            [
                sum(case[column] for case in found[name][method]) / len(found[name][method])
                for method in methods
            ]
            for column in ("unexplained", "dead")
        ]
        drawn = ax.barh(methods, means[0], color=[ORANGE, *[BLUE] * (len(methods) - 1)], height=0.6)
        labels = [f"{error:.2f}, {dead:.0f} % unused" for error, dead in zip(*means, strict=True)]
        ax.bar_label(drawn, labels, padding=3, fontsize=9)
        ax.set_xlim(0, 1.6 * max(means[0]))
        ax.set_title({"hidden": "hidden layer"}.get(name, name))
        ax.set_xlabel("variance unexplained, %")
    axes[0, 0].invert_yaxis()
    save(figure, out / "sae_parts.png")


def headline(out: Path) -> None:
    """Time against n beside softmax, entmax and torch.topk, on one CPU thread and on a GPU."""
    parts = (ROOT / "benchmarks" / "results" / "headline.md").read_text(encoding="utf-8").split("\n\n| ")[1:]
    figure, axes = panels(10, 3.7, 1, len(parts), sharey=True)
    colors = {
        "khot.soft_topk": BLUE,
        "entmax.budget_bisect": ORANGE,
        "torch.topk": GREY,
        "torch.softmax": LIGHT,
    }
    for ax, part in zip(axes, parts, strict=True):
        head, _, *lines = part.strip().splitlines()
        title, *shapes = (cell.strip() for cell in head.strip("|").split("|"))
        n = [int(shape.split(", ")[1].split(")")[0].replace(",", "")) for shape in shapes]
        for line in lines:
            name, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
            if name in colors:
                times = [float(cell.replace(",", "")) for cell in cells]
                ax.loglog(n, times, "-" if name == "torch.softmax" else ".-", color=colors[name], label=name)
        ax.set_title(title.partition(":")[0].replace(" 80GB HBM3", ""), fontsize=11)
        ax.set_xlabel("entries of a row, n")
        ax.grid(True, which="major", alpha=0.3)
    axes[0].set_ylabel("forward + backward, in softmaxes")
    axes[0].set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes[0].legend(frameon=False, fontsize=9, loc="lower left")  # the panel that a phone shows
    save(figure, out / "headline.png")


def table(path: Path) -> dict[str, list[str]]:
    """The rows of the tables in a Markdown file, by their first cell; the first table comes first."""
    text = path.read_text(encoding="utf-8")
    _, _, *lines = re.findall(r"^\|(.+)\|$", text, flags=re.MULTILINE)  # without the head and its rule
    cells = [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]
    return {first: rest for first, *rest in reversed(cells)}


FIGURES = (
    falling_tau,
    headline,
    cdfs,
    temperature,
    soft_count,
    budgets,
    pruned_blocks,
    two_sided,
    groups,
    designs,
    estimators,
    quantiles,
    sae_parts,
)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures"
    for figure in FIGURES:
        figure(out)


if __name__ == "__main__":
    main()
