"""Bias and variance of the gradient estimators: `python -m benchmarks.estimators`, written to
benchmarks/results/estimators.md.

Compares their gradients of E f(x), from one sample each, with the exact gradient for the distribution
that they draw from, which is computed by enumeration of all k-hot vectors. Nothing is reported if the
unbiased ones are not unbiased.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
from collections.abc import Callable

import torch
from torch import Tensor

from khot import distributions, estimators

N, K = 10, 3
LEAVE_OUT = 4  # samples of a group for leave-one-out
UNBIASED = 6.0  # standard errors in which an unbiased estimator stays (1e-6, and a margin)

HEAD = f"""# Gradient estimators: bias and spread

One sample of {K} of {N}, logits drawn from N(0, 1), against the exact gradient of E f(x), by enumeration,
for the distribution that the estimator draws from. Bias: ‖mean − exact‖ / ‖exact‖, with its standard error,
which is what an unbiased estimator shows. Spread: √(trace of the covariance) / ‖exact‖; the mean of S samples
has 1/√S of it.
"""
FOOT = f"""
`straight_through` and `second_order` draw from `conditional_poisson`. The spread of `leave_one_out`, which
ran in groups of {LEAVE_OUT}, is that of one of them.
"""

Loss = Callable[[Tensor], Tensor]


def losses() -> dict[str, Loss]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    a, A, W, w = randn(N), randn(N, N) / N**0.5, randn(N, 8), randn(8)
    return {
        "linear": lambda x: x @ a,
        "quadratic": lambda x: ((x @ A) * x).sum(-1) + x @ a,
        "network": lambda x: torch.tanh(x @ W) @ w + 3,
    }


def exact_gradients(theta: Tensor, f: Loss) -> dict[str, Tensor]:
    """∇ E f(x) for each of the distributions that estimators draw from."""
    theta = theta.clone().requires_grad_()
    natural = distributions.ConditionalPoisson(K, theta)
    prescribed = distributions.KHot(K, logits=theta, design="conditional_poisson")
    x = natural.enumerate_support()
    probs = {
        "natural": natural.log_prob(x).exp(),
        "prescribed": prescribed.log_prob(x).exp(),
        "gumbel": without_replacement(theta, x),
    }
    gradients = {name: torch.autograd.grad(p @ f(x), theta)[0] for name, p in probs.items()}
    every, p = iterative_poisson(theta)
    return {**gradients, "iterative": torch.autograd.grad(p @ f(every), theta)[0]}


def iterative_poisson(theta: Tensor, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """All vectors of zeros and ones, and the probability that NCPSS draws each of them."""
    x = torch.tensor(list(itertools.product((0.0, 1.0), repeat=N)), dtype=theta.dtype)
    s = torch.sigmoid(theta)
    probs = s * K / s.sum() if s.sum() >= K else 1 - (1 - s) * (N - K) / (N - s.sum())
    size = x.sum(-1, keepdim=True)
    among = torch.where(size > K, x, 1 - x)
    wanted = torch.where(size > K, K, K - size)
    count, total = among.sum(-1, keepdim=True), (among * probs).sum(-1, keepdim=True)
    down = probs * wanted / total.clamp_min(1e-12)
    up = 1 - (1 - probs) * (count - wanted) / (count - total).clamp_min(1e-12)
    q = torch.where(total >= wanted, down, up)
    # from each vector to each other one: entries that are not drawn stay as they are, or are left out
    after = torch.ones(len(x), len(x), dtype=theta.dtype)
    for i in range(N):
        one = torch.where(among[:, i] == 1, q[:, i], torch.where(size[:, 0] > K, 0.0, x[:, i]))
        after = after * torch.where(x[:, i] == 1, one.unsqueeze(-1), 1 - one.unsqueeze(-1))
    p = torch.where(x == 1, probs, 1 - probs).prod(-1)
    for _ in range(rounds):
        p = p @ after
    return x, p


def without_replacement(theta: Tensor, x: Tensor) -> Tensor:
    """P(x) when K units are drawn one after another, each ∝ exp(θ): summed over the orders."""
    weight = torch.softmax(theta, 0)
    chosen = torch.stack([row.nonzero().squeeze(1) for row in x])
    total = theta.new_zeros(len(x))
    for order in itertools.permutations(range(K)):
        drawn = weight[chosen[:, order]]
        left = 1 - torch.cat([drawn.new_zeros(len(x), 1), drawn.cumsum(-1)[:, :-1]], -1)
        total = total + (drawn / left).prod(-1)
    return total


def sampled_gradients(estimator: str, options: dict[str, object], f: Loss, rows: Tensor) -> Tensor:
    """A gradient for each row of logits."""
    generator = torch.Generator().manual_seed(1)
    if estimator != "score_function":
        x = getattr(estimators, estimator)(rows, K, generator=generator, **options)
        return torch.autograd.grad(f(x).sum(), rows)[0]
    torch.manual_seed(1)
    groups = LEAVE_OUT if options["baseline"] else 1
    p = distributions.ConditionalPoisson(K, rows)
    x = p.sample((groups,))
    surrogate = estimators.score_function(f(x), p.log_prob(x), **options).mean(0)
    # as many gradients of one sample as would average to this one: only the spread is scaled
    gradient = torch.autograd.grad(surrogate.sum(), rows)[0]
    mean = gradient.mean(0)
    return mean + (gradient - mean) * groups**0.5


CASES = [
    ("straight_through", {"design": "conditional_poisson"}, "prescribed"),
    ("second_order", {"design": "conditional_poisson"}, "prescribed"),
    ("gumbel", {"tau": 1.0}, "gumbel"),
    ("gumbel", {"tau": 0.3}, "gumbel"),
    ("gumbel", {"hard": False, "tau": 0.3}, "gumbel"),
    ("simple", {}, "natural"),
    ("imle", {"step": 1.0}, "gumbel"),
    ("imle", {"step": 0.1}, "gumbel"),
    ("sequential_softmax", {"tau": 1.0}, "gumbel"),
    ("sequential_softmax", {"tau": 0.3}, "gumbel"),
    ("ncpss", {}, "iterative"),
    ("score_function", {"baseline": None}, "natural"),
    ("score_function", {"baseline": "leave_one_out"}, "natural"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=5_000, help="Samples of each estimator. Default: 5000."
    )
    args = parser.parse_args()
    theta = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = theta.expand(args.samples, N).clone().requires_grad_()
    functions = losses()
    exact = {name: exact_gradients(theta, f) for name, f in functions.items()}
    print(HEAD)
    print(f"| estimator | {' | '.join(f'{name}: bias | spread' for name in functions)} |")
    print(f"|---|{'---:|---:|' * len(functions)}")
    for estimator, options, distribution in CASES:
        cells = []
        for name, f in functions.items():
            expected = exact[name][distribution]
            gradient = sampled_gradients(estimator, options, f, rows)
            size = expected.norm()
            bias = ((gradient.mean(0) - expected).norm() / size).item()
            spread = (gradient.var(0).sum().sqrt() / size).item()
            error = spread / math.sqrt(args.samples)
            if estimator == "score_function" and not bias <= UNBIASED * error:
                raise SystemExit(f"{estimator} is off by {bias:.2e} on {name}: nothing is reported")
            cells += [f"{bias:.3f} ± {error:.3f}", f"{spread:.2f}"]
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items() if key != "design")
        print(f"| `{estimator}{f'({shown})' if shown else ''}` | {' | '.join(cells)} |")
    print(FOOT)
    print(
        f"`python -m benchmarks.estimators --samples {args.samples}`, torch {torch.__version__}, "
        f"Python {platform.python_version()}, float64; seeds fixed."
    )


if __name__ == "__main__":
    main()
