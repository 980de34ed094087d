"""Experts with the same load in a language model: one line instead of a loss.

A small Mixtral of Hugging Face learns to write Python's documentation, letter by letter. Each token goes to 2
of 8 experts in each of 2 layers. The same model is trained three times from the same start:

- with nothing that balances the experts;
- with the model's own auxiliary loss, weighted by 0.02;
- after `khot.transformers.balance(model)`, and no loss but that of the text.

The violation is the largest load of the worse layer over the mean, less 1: how much longer its experts take
than with an even load. It needs the extra `transformers`: pip install '.[reproduce,transformers]'.

    python examples/moe_llm.py                        # 2 minutes on one core
    python examples/moe_llm.py --seed 1 --out moe_llm.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import khot
import khot.transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.harness import reporting

EXPERTS, K, CONTEXT, BATCH, RATE, WEIGHT = 8, 2, 128, 16, 3e-3, 0.02
NAMES = {"none": "nothing", "loss": "auxiliary loss", "khot": "khot's balancer"}
COLORS = {"none": "#999999", "loss": "#d9730d", "khot": "#0b6e99"}


def letters() -> tuple[Tensor, Tensor]:
    """The text, and a tenth of it to test."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def violation(router_logits: tuple[Tensor, ...], biases: list[Tensor]) -> float:
    """Of the worse layer, in this batch."""
    worst = 0.0
    for logits, bias in zip(router_logits, biases, strict=True):
        load = (logits.detach() + bias).topk(K).indices.flatten().bincount(minlength=EXPERTS).double()
        worst = max(worst, (load.max() / load.mean()).item() - 1)
    return worst


def train(method: str, steps: int, seed: int) -> tuple[list[float], float]:
    """The violation of each step, and the loss on text that was not trained on."""
    torch.manual_seed(seed)
    config: Any = transformers.MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=K,
        max_position_embeddings=CONTEXT, router_aux_loss_coef=WEIGHT if method == "loss" else 0.0,
        output_router_logits=True,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    balancers = khot.transformers.balance(model) if method == "khot" else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    text, test = letters()
    generator = torch.Generator().manual_seed(seed)
    violations = []
    for _ in track(range(steps), NAMES[method], console=Console(stderr=True)):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(CONTEXT)]
        output = model(tokens, labels=tokens)
        biases = [b.bias.clone() for b in balancers] or [torch.zeros(EXPERTS)] * config.num_hidden_layers
        violations.append(violation(output.router_logits, biases))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        khot.nn.QuantileBalancer.update_all(model)
    model.eval()
    with torch.no_grad():
        parts = test[: 64 * CONTEXT].view(-1, 16, CONTEXT)
        logits = [model(part, output_router_logits=False).logits for part in parts]
    predicted, wanted = torch.cat(logits)[:, :-1].flatten(0, 1), parts.flatten(0, 1)[:, 1:].flatten()
    return violations, torch.nn.functional.cross_entropy(predicted, wanted).item()


def draw(violations: dict[str, list[float]], out: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for method, values in violations.items():
        axes.plot(values, color=COLORS[method], linewidth=1.5)
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("largest load over the mean, less 1")
    axes.set_title(f"The worse of two layers of {EXPERTS} experts, {K} for each letter")
    axes.spines[["top", "right"]].set_visible(False)
    ends = {
        NAMES[method]: (len(v) - 1, sum(v[-20:]) / len(v[-20:]), COLORS[method])
        for method, v in violations.items()
    }
    reporting.label_ends(axes, ends)
    figure.savefig(out, dpi=80)


def main(steps: int = 300, seed: int = 0, out: Path = Path("moe_llm.png")) -> None:
    """Experts with the same load in a language model."""
    table = Table("balanced by", "loss on new text", "violation, last 20 steps")
    found = {}
    for method, name in NAMES.items():
        found[method], loss = train(method, steps, seed)
        last = found[method][-20:]
        table.add_row(name, f"{loss:.3f}", f"{sum(last) / len(last):.2f}")
    Console().print(table)
    draw(found, out)


if __name__ == "__main__":
    typer.run(main)
