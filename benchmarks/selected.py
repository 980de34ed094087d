"""Selecting the k largest and summing what was selected, on one CPU thread: `python -m benchmarks.selected`.

Five tables, in float32, of medians of CPU time of calls that take turns:

- khot.topk beside torch.topk (not sorted) and softmax, on rows of several kinds; with `--plot`, against n;
- the hard mask and the k-th largest entry, in softmaxes;
- khot.linear_topk, and a step of TopKSAE with the mean squared error and with its own loss, in products of
  the encoder, beside one that is written by hand with torch.topk and a dense code;
- topk_attention, hard and among 4 k candidates, in dense attention, forward and forward + backward;
- SoftKNN's predict, and a step among 4 k candidates and among all templates, in products.

Results agree with those by hand before anything is timed. Set MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_THRESHOLD_ to 4000000000 to leave page faults out.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from benchmarks import report
from reproduce.harness import timing

Call = Callable[[], object]

SHAPES = ((1024, 1000, 10), (256, 8192, 32), (256, 8192, 256), (64, 65_536, 64), (1, 50_257, 50))
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ascending": lambda x: x.sort(-1).values,
    "descending": lambda x: x.sort(-1, descending=True).values,
    "ties": lambda x: (2 * x).round(),
    "equal": lambda x: torch.ones_like(x),
    "periodic": lambda x: (torch.arange(x.shape[-1]) % 64).float().expand_as(x).contiguous(),
    "Cauchy": lambda x: torch.tan(1.57 * torch.erf(x / 2**0.5)),
    "infinite": lambda x: x.where(x < 1, math.inf).where(x > -1, -math.inf),
}
LAYERS = ((1024, 512, 16_384, 32), (512, 768, 65_536, 64), (256, 128, 512, 16))  # batch, size, latents, k
PARTS = ("encoder", "encoder_bias", "decoder", "bias")
HEADS = ((4, 1024, 32, 32), (4, 8192, 32, 32), (4, 8192, 64, 64))  # heads, length, size, k
NEIGHBOURS = ((2000, 8192, 64, 9), (500, 60_000, 32, 9))  # queries, templates, size, k
TAU = 0.1
PLOT = Path(__file__).parents[1] / "docs" / "figures" / "topk.png"


def times(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    return timing.medians(calls, seconds=seconds, clock=timing.clock(cpu_time=True))


def topk_calls(x: Tensor, k: int) -> dict[str, Call]:
    values, indices = khot.topk(x, k)
    if not torch.equal(values, x.topk(k).values) or not torch.equal(x.gather(-1, indices), values):
        raise AssertionError(f"khot.topk differs from torch.topk for {tuple(x.shape)}, k = {k}")
    return {
        "khot": lambda: khot.topk(x, k, sorted=False),
        "torch": lambda: x.topk(k, sorted=False),
        "softmax": lambda: x.softmax(-1),
    }


def of_topk(seconds: float) -> Iterator[list[str]]:
    for rows, n, k in SHAPES:
        x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
        found = {kind: times(topk_calls(of(x), k), seconds) for kind, of in KINDS.items()}
        softmaxes = max(t["khot"] / t["softmax"] for t in found.values())
        ratios = [report.ratio(t["torch"] / t["khot"]) for t in found.values()]
        yield [f"({rows:,}, {n:,}), k = {k}", report.ratio(softmaxes), *ratios]


def of_masks(seconds: float) -> Iterator[list[str]]:
    for rows, n, k in SHAPES:
        x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
        calls: dict[str, Call] = {
            "softmax": lambda x=x: x.softmax(-1),
            "mask": lambda x=x, k=k: khot.topk_mask(x, k),
            "k-th": lambda x=x, k=k: khot.kth_value(x, k),
        }
        t = times(calls, seconds)
        cells = (report.ratio(t[name] / t["softmax"]) for name in ("mask", "k-th"))
        yield [f"({rows:,}, {n:,}), k = {k}", *cells]


def of_layers(seconds: float) -> Iterator[list[str]]:
    for batch, size, latents, k in LAYERS:
        torch.manual_seed(0)
        sae, x = khot.nn.TopKSAE(size, latents, k), torch.randn(batch, size)
        parameters, own = list(sae.parameters()), F.mse_loss(sae(x), x)  # which sets the bias
        hand = [getattr(sae, name).detach().clone().requires_grad_() for name in PARTS]

        def by_hand(x: Tensor = x, hand: list[Tensor] = hand, k: int = k) -> Tensor:
            encoder, encoder_bias, decoder, bias = hand
            a = F.linear(x - bias, encoder, encoder_bias).relu()
            best = a.topk(k, sorted=False)
            code = torch.zeros_like(a).scatter(-1, best.indices, best.values)
            return F.mse_loss(F.linear(code, decoder.mT, bias), x)

        torch.testing.assert_close(own, by_hand(), rtol=1e-4, atol=1e-5)
        steps = {
            "error": lambda sae=sae, x=x: F.mse_loss(sae(x), x),
            "loss": lambda sae=sae, x=x: sae.loss(x),
        }
        calls: dict[str, Call] = {
            name: (lambda f=f, p=parameters: torch.autograd.grad(f(), p)) for name, f in steps.items()
        }
        calls["by hand"] = lambda f=by_hand, p=hand: torch.autograd.grad(f(), p)
        encoder = sae.encoder.detach()
        calls["choice"] = lambda x=x, w=encoder, k=k: khot.linear_topk(x, w, k)
        t = times({"product": lambda x=x, w=encoder: x @ w.mT, **calls}, seconds)
        shape = f"({batch:,}, {size} → {latents:,}), k = {k}"
        yield [shape, *(report.ratio(t[name] / t["product"]) for name in ("choice", *steps, "by hand"))]


def of_attention(seconds: float) -> Iterator[list[str]]:
    for heads, length, size, k in HEADS:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, heads, length, size, generator=generator) for _ in range(3)]
        cells = [*attention_times(inputs, k, False, seconds), *attention_times(inputs, k, True, seconds)]
        yield [f"{heads} heads of {size}, {length:,} keys, k = {k}", *cells]


def attention_times(inputs: list[Tensor], k: int, both: bool, seconds: float) -> list[str]:
    """Exactly k keys and 4 k candidates, forward or forward + backward, in dense attention.

    The inputs have a batch dim: without one, torch's attention took five times as long.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    attentions: dict[str, Callable[..., Tensor]] = {
        "dense": F.scaled_dot_product_attention,
        "hard": lambda *x: khot.nn.topk_attention(*x, k, hard=True),
        "candidates": lambda *x: khot.nn.topk_attention(*x, k, tau=TAU, candidates=4 * k),
    }

    def call(f: Callable[..., Tensor]) -> Call:
        if both:
            return lambda: torch.autograd.grad(f(*leaves).sum(), leaves)
        return lambda: f(*inputs)

    t = times({name: call(f) for name, f in attentions.items()}, seconds)
    return [report.ratio(t[name] / t["dense"]) for name in ("hard", "candidates")]


def of_neighbours(seconds: float) -> Iterator[list[str]]:
    for queries, templates, size, k in NEIGHBOURS:
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(rows, size, generator=generator).requires_grad_() for rows in (queries, templates)
        ]
        q, t = (x.detach() for x in leaves)
        asked, label = (torch.randint(10, (rows,), generator=generator) for rows in (queries, templates))
        every, among = (khot.nn.SoftKNN(k, 10, tau=TAU, candidates=m) for m in (None, 4 * k))

        def step(
            knn: khot.nn.SoftKNN, leaves: list[Tensor] = leaves, asked: Tensor = asked, label: Tensor = label
        ) -> object:
            return torch.autograd.grad(knn.loss(leaves[0], asked, leaves[1], label), leaves)

        calls: dict[str, Call] = {
            "product": lambda q=q, t=t: q @ t.mT,
            "predict": lambda q=q, t=t, knn=every, label=label: knn.predict(q, t, label),
            "candidates": lambda knn=among, step=step: step(knn),
            "all": lambda knn=every, step=step: step(knn),
        }
        took = times(calls, seconds)
        shape = f"{queries:,} of {templates:,} × {size}, k = {k}"
        yield [shape, *(report.ratio(took[name] / took["product"]) for name in calls if name != "product")]


def plot(seconds: float) -> None:
    curves: dict[str, list[tuple[float, float]]] = {"khot.topk": [], "torch.topk": [], "softmax": []}
    for n in (1 << i for i in range(6, 21, 2)):
        x = torch.randn(max(1, (1 << 18) // n), n, generator=torch.Generator().manual_seed(0))
        t = times(topk_calls(x, max(1, min(64, n // 64))), seconds)
        for name, key in zip(curves, ("khot", "torch", "softmax"), strict=True):
            curves[name].append((n, 1e9 * t[key] / x.numel()))
    title = "ns an entry: the n/64 largest of n, at most 64, one CPU thread"
    report.loglog(PLOT, {title: curves}, "n", ["khot.topk"])


def main() -> None:
    parser = argparse.ArgumentParser(description="select, and sum what was selected, on one CPU thread")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call")
    parser.add_argument("--plot", action="store_true", help=f"draw {PLOT.name} in docs/figures, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(*(f"{key}: {value}" for key, value in report.machine(cpu_time=True).items()), sep="; ")
    print(f"float32; load: {os.getloadavg()[0]:.1f}")
    for title, head, rows in (
        (
            "khot.topk: softmaxes at most, and how many times as fast as torch.topk",
            ["rows", "softmaxes", *KINDS],
            of_topk(args.seconds),
        ),
        ("Hard masks and order statistics, in softmaxes", ["rows", "mask", "k-th"], of_masks(args.seconds)),
        (
            "A training step, in products of the encoder",
            ["layer", "linear_topk", "error", "loss", "by hand"],
            of_layers(args.seconds),
        ),
        (
            "Attention, in dense attention",
            ["", "hard", f"candidates, τ = {TAU}", "hard, both", "candidates, both"],
            of_attention(args.seconds),
        ),
        (
            "Nearest neighbours, in products of queries and templates",
            ["", "predict", "step, candidates", "step, all"],
            of_neighbours(args.seconds),
        ),
    ):
        print(f"\n## {title}\n\n{report.table(head, list(rows))}", flush=True)
    if args.plot:
        plot(args.seconds)


if __name__ == "__main__":
    main()
