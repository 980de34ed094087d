"""Feature selection by gates before a kernel machine, and by exchanges.

:func:`choose` first learns gates, the weights of the features in the machine of :mod:`khot._kernel_machine`,
by gradient descent on random examples. Then it exchanges features as long as exact evaluations say that
another set is better. Both start from, and are held to, a prior: what somebody else believes about the
features. :func:`path` removes one feature after the other instead, to say how many are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from khot._kernel_machine import START, Data, Examples
from khot.budgets import budget_mask, soft_budget
from khot.masks import soft_topk, topk_mask

__all__ = ["choose", "path"]

# The learning of the gates: examples per step, the rates of gates and kernel, tau, which falls by a constant
# factor per step and stays at its last value in the last tenth. All were chosen on eight data sets that no
# published figure is of, as were those of the exchange.
BATCH, RATE, KERNEL_RATE = 160, 0.15, 0.03
HOT, COLD, COOLING = 1.0, 0.05, 0.9
# The exchange: examples per subset and subsets; how many features are tried in a round, and how many of these
# in turn until one is accepted; steps and rate by which the kernel is fitted to a set.
EXAMPLES, SUBSETS, TRIED, FOLLOWED, ROUNDS = 400, 2, 16, 2, 20
FITTING, FITTING_RATE = 30, 0.1
# The path: examples, how many features are tried before one is removed, and the steps by which the kernel is
# fitted anew when this share of the features is left.
PATH_EXAMPLES, PATH_TRIED, PATH_FITTING, PATH_SHARE = 400, 4, 10, 0.7
# A set is better if the loss falls by this, in nats over all examples; and the weight of the prior, in nats.
MARGIN, BELIEF = 0.04, 10.0


def choose(
    data: Data,
    prior: Tensor,
    prices: Tensor | None,
    size: float,
    steps: int,
    generator: torch.Generator,
    report: Callable[[str], None],
) -> tuple[Tensor, Tensor]:
    """The learned logits and the selection, both (p,).

    Args:
        prior: log of how much each feature is believed to matter, (p,).
        prices, size: prices of the features and what may be spent; or None and how many features.
        steps: number of training steps of the gates.
        report: is told how far it is.
    """
    logits, kernel = _learn(data, prior, prices, size, steps, generator, report)
    mask = topk_mask(logits, size) if prices is None else budget_mask(logits, prices, size)
    few = data.subsets(EXAMPLES, SUBSETS, generator)
    search = _Search(few, prior, torch.ones_like(prior) if prices is None else prices, size, report)
    chosen = search.run(mask.nonzero().flatten().tolist(), kernel)
    mask = torch.zeros_like(mask)
    mask[chosen] = 1.0
    return logits, mask


def path(
    data: Data, others: Data, prior: Tensor, largest: int, steps: int, generator: torch.Generator
) -> Iterator[tuple[int, Tensor]]:
    """For each number of features from ``largest`` to 1 what the machine, solved for ``data``, says of all
    examples of ``others``, (n, outputs)."""
    start, kernel = list(range(len(prior))), torch.tensor(START, dtype=torch.float32)
    if largest < len(prior):
        logits, kernel = _learn(data, prior, None, largest, steps, generator, lambda _: None)
        start = topk_mask(logits, largest).nonzero().flatten().tolist()
    few = data.subsets(PATH_EXAMPLES, 1, generator)
    polynomials = others.polynomials(torch.arange(len(others.weights))).float()
    search = _Search(few, prior, torch.ones_like(prior), largest, lambda _: None)
    for chosen, fitted in search.removals(start, kernel):
        columns = [column for feature in chosen for column in few.columns[feature]]
        yield len(chosen), few.of(chosen).predicted(polynomials[:, columns], fitted, search.size)


def _learn(
    data: Data,
    prior: Tensor,
    prices: Tensor | None,
    size: float,
    steps: int,
    generator: torch.Generator,
    report: Callable[[str], None],
) -> tuple[Tensor, Tensor]:
    """The logits of the gates, and the logs of the kernel's parameters, by gradient descent."""
    logits = (prior - prior.mean()).requires_grad_()
    kernel = torch.tensor(START, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.Adam(
        [{"params": [logits], "lr": RATE}, {"params": [kernel], "lr": KERNEL_RATE}], fused=True
    )
    for step in range(steps):
        tau = HOT * (COLD / HOT) ** min(step / (COOLING * steps), 1.0)
        # noise tries other sets: the learning would otherwise stay with the first good one
        uniform = torch.rand(len(prior), generator=generator, dtype=torch.float32)
        noisy = logits + tau * uniform.logit(1e-6)
        gates = (
            soft_topk(noisy, size, tau=tau) if prices is None else soft_budget(noisy, prices, size, tau=tau)
        )
        examples = data.subset(BATCH, generator)
        loss = examples.loss(*examples.likeness(gates, float(gates.detach().sum())), kernel)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) * 10 // steps > step * 10 // steps:
            report(f"step {step + 1} of {steps}, tau {tau:.2f}, loss {loss.item():.3f}")
    return logits.detach(), kernel.detach()


class _Search:
    """Exchanges features while the loss, less the prior of the selected ones, falls."""

    def __init__(
        self, examples: Examples, prior: Tensor, prices: Tensor, size: float, report: Callable[[str], None]
    ) -> None:
        self.examples = examples
        nats = (examples.trust * examples.weights.shape[-1]).sum().item()
        self.margin = MARGIN / nats
        self.prior = BELIEF / nats * prior
        self.prices = prices.tolist()
        self.budget = size
        self.report = report

    def run(self, chosen: list[int], kernel: Tensor) -> list[int]:
        """The selection from which no exchange leads to a better one; the kernel is fitted twice."""
        self.size = float(max(len(chosen), 1))
        for fit in range(2):
            kernel = self._fitted(chosen, kernel, FITTING)
            before = set(chosen)
            for turn in range(ROUNDS):
                better = self._better(chosen, kernel)
                if better is None:
                    break
                chosen = better
                self.report(f"exchange {turn + 1} of at most {ROUNDS}, pass {fit + 1} of 2")
            if set(chosen) == before:
                break
        return chosen

    def _likeness(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        return self.examples.of(chosen).likeness(torch.ones(len(chosen), dtype=torch.float32), self.size)

    def removals(self, chosen: list[int], kernel: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """The selection, and those that are left when the feature that is missed least is removed, to the
        last one, with the kernel."""
        fitted = math.inf
        while chosen:
            if len(chosen) <= PATH_SHARE * fitted:
                fitted = len(chosen)
                self.size = float(fitted)
                kernel = self._fitted(chosen, kernel, PATH_FITTING)
            yield chosen, kernel
            Z, D = self._likeness(chosen)
            _, slope = self.examples.slopes(Z, D, kernel, self.size)
            with torch.no_grad():
                out, *_ = self._least(chosen, Z, D, kernel, slope - self.prior, PATH_TRIED)
            chosen = [i for i in chosen if i != out]

    def _fitted(self, chosen: list[int], kernel: Tensor, steps: int) -> Tensor:
        """The kernel's parameters that suit this selection."""
        Z, D = self._likeness(chosen)
        kernel = kernel.clone().requires_grad_()
        optimizer = torch.optim.Adam([kernel], lr=FITTING_RATE, fused=True)
        for _ in range(steps):
            optimizer.zero_grad()
            self.examples.loss(Z, D, kernel).mean().backward()
            optimizer.step()
        return kernel.detach()

    @torch.no_grad()
    def _better(self, chosen: list[int], kernel: Tensor) -> list[int] | None:
        """A better selection, with one more feature and without those that it takes to pay for it; or None
        if none was found."""
        Z, D = self._likeness(chosen)
        loss, slope = self.examples.slopes(Z, D, kernel, self.size)
        # to first order the objective changes by this if a feature is added, and by the opposite if removed
        steep = slope - self.prior
        best = loss - self.prior[chosen].sum().item() - self.margin
        inside = set(chosen)
        outside = [j for j in steep.argsort().tolist() if j not in inside and self.prices[j] <= self.budget]
        if not outside:
            return None
        outside = outside[:TRIED]
        z, d = self.examples.likeness_of(outside, self.size)
        added = self._losses(Z + z, D + d, kernel) - self.prior[outside]
        for at in added.argsort()[:FOLLOWED].tolist():
            selection = [*chosen, outside[at]]
            value = self._paid(selection, Z + z[at], D + d[at], kernel, steep)
            if value < best:
                return selection
        return None

    def _paid(self, selection: list[int], Z: Tensor, D: Tensor, kernel: Tensor, steep: Tensor) -> float:
        """The objective of the selection, from which this removes features until the budget pays for it. The
        last one stays."""
        value = math.inf
        spent = sum(self.prices[i] for i in selection)
        if spent <= self.budget:
            value = self._losses(Z[None], D[None], kernel).item()
        while spent > self.budget:
            paid = [i for i in selection[:-1] if self.prices[i] > 0]
            out, value, Z, D = self._least(paid, Z, D, kernel, steep, TRIED)
            selection.remove(out)
            spent = sum(self.prices[i] for i in selection)
        return value - self.prior[selection].sum().item()

    def _least(
        self, among: list[int], Z: Tensor, D: Tensor, kernel: Tensor, steep: Tensor, tried: int
    ) -> tuple[int, float, Tensor, Tensor]:
        """The feature that is missed least, and the loss, Z and D without it."""
        candidates = sorted(among, key=lambda i: -steep[i].item())[:tried]
        z, d = self.examples.likeness_of(candidates, self.size)
        losses = self._losses(Z - z, (D - d).clamp_min(0), kernel)
        at = int((losses + self.prior[candidates]).argmin())
        return candidates[at], losses[at].item(), Z - z[at], (D - d[at]).clamp_min(0)

    def _losses(self, Z: Tensor, D: Tensor, kernel: Tensor) -> Tensor:
        """The loss of several selections, one after the other so that a few matrices are held at a time."""
        return torch.stack([self.examples.loss(z, d, kernel).mean() for z, d in zip(Z, D, strict=True)])
