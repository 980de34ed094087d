"""What a small call costs on the CPU: `python -m benchmarks.latency`.

Every public operator, sampler, estimator, loss and layer on tensors so small that the arithmetic hardly
counts, beside torch.softmax of the same tensor in the same run: microseconds and softmaxes, one thread, CPU
time, medians of interleaved calls. It writes latency.json and latency.md, shape by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

import khot
from benchmarks import report, timing
from reproduce.harness.timing import Call

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1, 16), (4, 64), (32, 64), (256, 64))
REPEATS = 10  # calls for each reading of the clock, whose own cost is then small

# What takes no part: it is not called in a training step, or it is no faster than the model that it calls.
ELSEWHERE = {
    "estimators.sample_khot": "sample_khot",
    "estimators.score_function": "arithmetic on two numbers a row",
    "conditional_poisson.joint_marginals": "for analysis, (n, n) a row",
    "distributions.capped_simplex": "a constraint",
    "distributions.k_hot": "a constraint",
    "nn.Anneal": "a number",
    "nn.fit_sae": "a training",
    "nn.loss_recovered": "calls a model",
    "nn.make_permanent": "called once",
    "nn.sae_from_layout": "called once",
    "nn.sae_to_layout": "called once",
    "nn.soft_beam_search": "calls a model at each step",
    "nn.soft_beam_loss": "calls a model at each step",
    "nn.unexplained": "no faster than the layer that it calls",
    "show_config": "prints what is installed",
    "sampling.joint_inclusion_probs": "for analysis, (n, n) a row",
}


def entries(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every public function of a tensor (rows, n), by its name in khot, with k = n / 8."""
    k, poisson = n // 8, khot.sampling.conditional_poisson
    functions: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: torch.softmax(x, -1)}
    of_k = (
        "soft_topk sigmoid_topk laplace_topk sparse_topk log_soft_topk ot_topk soft_topk_magnitude topk_mask "
    )
    of_k += "sorted_soft_topk soft_topk_signed soft_topk_exp soft_topk_sum k_support_norm"
    functions |= {name: partial(getattr(khot, name), k=k) for name in of_k.split()}
    for name in ("soft_rank", "soft_sort", "soft_permutation", "log_soft_permutation", "soft_median"):
        functions[name] = getattr(khot, name)
    functions |= {
        "soft_topk, hard": lambda x: khot.soft_topk(x, k, hard=True),
        "soft_rank, projection": lambda x: khot.soft_rank(x, method="projection"),
        "soft_sort, projection": lambda x: khot.soft_sort(x, method="projection"),
        "project_permutahedron": lambda x: khot.project_permutahedron(
            x, torch.arange(n, 0.0, -1, device=x.device)
        ),
        "soft_quantile": lambda x: khot.soft_quantile(x, 0.9),
        "k_support_negentropy": lambda x: khot.k_support_negentropy(x.softmax(-1), k),
        "kth_value": lambda x: khot.kth_value(x, k),
        "quantile": lambda x: khot.quantile(x, 0.9),
        "quantile, weights": lambda x: khot.quantile(x, 0.9, weights=x.detach().exp()),
        "conformal_quantile": lambda x: khot.conformal_quantile(x, 0.1),
        "topk": lambda x: khot.topk(x, k).values,
        "linear_topk": lambda x: khot.linear_topk(x, torch.eye(n, device=x.device), k).values,
        "soft_assign": lambda x: khot.soft_assign(x, float(k)),
        "soft_budget": lambda x: khot.soft_budget(x, torch.ones(()), float(k)),
        "budget_mask": lambda x: khot.budget_mask(x, torch.ones(()), float(k)),
        "nucleus_mask": lambda x: khot.nucleus_mask(x, 0.9),
        "soft_count": lambda x: khot.soft_count(x, 0.0),
        "inverse_soft_count": lambda x: khot.inverse_soft_count(x, k),
        "losses.permutation_cross_entropy": partial(permutation_loss, n),
        "losses.spearman_loss": partial(ranking_loss, khot.losses.spearman_loss, n),
        "losses.ndcg_loss": partial(ranking_loss, khot.losses.ndcg_loss, n),
        "losses.log_rank_loss": partial(ranking_loss, khot.losses.log_rank_loss, n, grades=1),
        "losses.average_precision_loss": partial(ranking_loss, khot.losses.average_precision_loss, n),
        "losses.recall_at_k_loss": partial(ranking_loss, khot.losses.recall_at_k_loss, n, k=k),
        "losses.hit_at_k_loss": partial(ranking_loss, khot.losses.hit_at_k_loss, n, k=k),
        "losses.precision_at_k_loss": partial(ranking_loss, khot.losses.precision_at_k_loss, n, k=k),
        "losses.size_penalty": lambda x: khot.losses.size_penalty(x.sigmoid(), 0.1),
        "losses.FenchelYoungTopKLoss": partial(young_loss, khot.losses.FenchelYoungTopKLoss(k), n, k),
        "losses.TopKCrossEntropyLoss": partial(class_loss, khot.losses.TopKCrossEntropyLoss(k)),
        "sampling.gumbel_topk": lambda x: khot.sampling.gumbel_topk(x, k),
        "sampling.inclusion_probs": lambda x: khot.sampling.inclusion_probs(khot.sigmoid_topk(x, k)),
        "conditional_poisson.sample": lambda x: poisson.sample(x, k),
        "conditional_poisson.marginals": lambda x: poisson.marginals(x, k),
        "conditional_poisson.log_normalizer": lambda x: poisson.log_normalizer(x, k),
        "conditional_poisson.log_prob": lambda x: poisson.log_prob(khot.topk_mask(x.detach(), k), x, k),
        "conditional_poisson.entropy": lambda x: poisson.entropy(x, k),
        "conditional_poisson.kl": lambda x: poisson.kl(x, 2 * x, k),
        "conditional_poisson.calibrate": lambda x: poisson.calibrate(khot.sigmoid_topk(x, k)),
        "distributions.KHot": lambda x: khot.distributions.KHot(k, logits=x).sample(),
        "distributions.KHotStraightThrough": lambda x: khot.distributions.KHotStraightThrough(
            k, logits=x
        ).rsample(),
        "distributions.RelaxedKHot": lambda x: khot.distributions.RelaxedKHot(1.0, k, x).rsample(),
        "distributions.LogitRelaxedKHot": lambda x: khot.distributions.LogitRelaxedKHot(1.0, k, x).rsample(),
        "distributions.ConditionalPoisson": lambda x: khot.distributions.ConditionalPoisson(k, x).sample(),
        "distributions.PlackettLuce": lambda x: khot.distributions.PlackettLuce(k, x).log_prob(
            torch.arange(k, device=x.device)
        ),
        "sample_khot": lambda x: khot.sample_khot(x, k),
    }
    for design in khot.sampling.designs:
        draw = partial(khot.sampling.sample, design=design)
        functions[f"sampling.sample, {design}"] = partial(after, partial(khot.sigmoid_topk, k=k), draw)
    for name in get_args(khot.estimators.EstimatorName):
        functions[f"estimators.{name}"] = partial(getattr(khot.estimators, name), k=k)
    functions["estimators.reinmax"] = khot.estimators.reinmax
    return functions


def layers(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every layer, on a tensor (rows, n)."""
    k, L = n // 8, khot.nn
    token = L.TokenChoiceRouter(n, num_experts=8, k=2)
    expert = L.ExpertChoiceRouter(n, num_experts=8, capacity=1.0)
    balanced = L.BalancedRouter(n, num_experts=8, k=2)
    best = L.TopKRouter(n, num_experts=8, k=2)
    attention = L.TopKAttention(n, 4, 1, batch_first=True)
    pruned, together = L.prune_magnitude(nn.Linear(n, n), "weight", n), nn.Linear(n, n)
    L.prune_global([(together, "weight")], n)
    blocks = L.prune_n_m(nn.Linear(n, n), "weight")
    knn = L.SoftKNN(2, num_classes=4)
    templates, labels = torch.randn(32, n), torch.arange(32) % 4
    sae = L.TopKSAE(n, 4 * n, k)
    balancer = L.QuantileBalancer(n, k)
    mixture = L.MixtureOfExperts(token, [nn.Identity() for _ in range(8)])
    return {
        "nn.SoftTopK": L.SoftTopK(k),
        "nn.KHotGate": L.KHotGate(n, k),
        "nn.TopKSAE": lambda x: first(sae(x)),
        "nn.TokenChoiceRouter": lambda x: token(x).weights,
        "nn.ExpertChoiceRouter": lambda x: expert(x).weights,
        "nn.BalancedRouter": lambda x: balanced(x).weights,
        "nn.TopKRouter": lambda x: best(x).topk_weights,
        "nn.QuantileBalancer": lambda x: x.gather(-1, balancer(x)),
        "nn.MixtureOfExperts": lambda x: first(mixture(x)),
        "nn.TopKAttention": lambda x: first(attention(x[None], x[None], x[None])),
        "nn.topk_attention": lambda x: L.topk_attention(x[None], x[None], x[None], 1),
        "nn.selected_attention": lambda x: L.selected_attention(
            x[None], x[None], x[None], torch.zeros(1, len(x), 1, dtype=torch.int64, device=x.device)
        ),
        "nn.SoftKNN": lambda x: knn(x, templates, labels),
        "nn.prune_magnitude": pruned,
        "nn.prune_global": together,
        "nn.prune_n_m": blocks,
    }


def first(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def after(probs: Callable[[Tensor], Tensor], draw: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return draw(probs(x))


def permutation_loss(n: int, x: Tensor) -> Tensor:
    return khot.losses.permutation_cross_entropy(x, torch.arange(n, device=x.device).expand(x.shape))


def ranking_loss(loss: Callable[..., Tensor], n: int, x: Tensor, **size: int) -> Tensor:
    return loss(x, (torch.arange(n, device=x.device) % 4 == 0).expand(x.shape), **size)


def young_loss(loss: nn.Module, n: int, k: int, x: Tensor) -> Tensor:
    target = (torch.arange(n, device=x.device) < k).to(x.dtype).expand(x.shape)
    result: Tensor = loss(x, target)
    return result


def class_loss(loss: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = loss(x, torch.zeros(len(x), dtype=torch.long, device=x.device))
    return result


def repeated(call: Call) -> Call:
    def calls() -> None:
        for _ in range(REPEATS):
            call()

    return calls


def measure(rows: int, n: int, seconds: float, clock: timing.Clock) -> dict[str, dict[str, float]]:
    """Seconds of one call, forward and forward + backward; what has no gradient is in the first only."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
    functions = entries(n) | layers(n)
    forward = {name: repeated(partial(function, x)) for name, function in functions.items()}
    both = {
        name: repeated(timing.forward_backward(function, x))
        for name, function in functions.items()
        if function(x.clone().requires_grad_()).requires_grad
        and not name.startswith(("sampling.", "conditional_poisson.sample"))
    }
    return {
        name: {key: value / REPEATS for key, value in timing.medians(c, seconds=seconds, clock=clock).items()}
        for name, c in (("forward", forward), ("forward + backward", both))
    }


def tables(results: report.Results) -> Iterator[str]:
    cases: dict[str, dict[str, dict[str, float]]] = results["cases"]
    for kind in ("forward", "forward + backward"):
        names = list(dict.fromkeys(name for case in cases.values() for name in case[kind]))
        lines = [[f"`{name}`", *(cell(case[kind], name) for case in cases.values())] for name in names]
        yield f"## {kind.capitalize()}\n\n{report.table(['', *cases], lines)}"


def cell(times: dict[str, float], name: str) -> str:
    """Microseconds, and in softmaxes."""
    if name not in times:
        return "–"
    micros = 1e6 * times[name]
    text = f"{micros:.1f}" if micros < 10 else f"{micros:,.0f}"
    return text if name == "softmax" else f"{text} ({report.ratio(times[name] / times['softmax'])})"


def main() -> None:
    args = report.parser(__doc__ or "", seconds=0.3, out=RESULTS).parse_args()
    clock = timing.clock(cpu_time=True)
    todo = {f"({rows}, {n})": partial(measure, rows, n, args.seconds, clock) for rows, n in SHAPES}
    setting = report.machine(cpu_time=True) | {"seconds": args.seconds}
    report.complete(args.out / "latency.md", setting, todo, write)


def write(path: Path, results: report.Results) -> None:
    setting = report.said(results["setting"])
    text = (
        "# Small calls on the CPU\n\n"
        "Microseconds of a call (and in softmaxes of the same tensor), with k = n/8. "
        "Written by `python -m benchmarks.latency`.\n\n" + setting + ".\n\n" + "\n".join(tables(results))
    )
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
