"""Drawing k-hot vectors by any design, and what is known of them: their inclusion probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.precision import on_cpu
from khot.sampling import pareto, phantom
from khot.sampling.table import designs, resolve

__all__ = ["inclusion_probs", "joint_inclusion_probs", "sample"]


@on_cpu
def sample(
    probs: Tensor,
    design: str = "pareto",
    sample_shape: Sequence[int] = (),
    *,
    adjust: str | None = None,
    generator: torch.Generator | None = None,
    group: Any = None,
    seed: int | None = None,
) -> Tensor:
    """Random k-hot vectors with the given inclusion probabilities: E[x] = π and Σx = Σπ.

    Args:
        probs: π, (*batch, n) with the units along the last dim, in [0, 1]. Units with 0 are never selected,
            units with 1 always. Where a row does not sum to an integer (up to n·eps of its dtype), Σx is
            ⌊Σπ⌋ or ⌈Σπ⌉, with probabilities that keep E[x] = π.
        design: which of the distributions with these inclusion probabilities; a name in
            :data:`khot.sampling.designs`.
        sample_shape: shape of the draws for each row.
        adjust: for ``"pareto"`` only, whose inclusion probabilities are not exactly π. None brings them
            within 2e-3 by a formula (by calibration where Σπ(1 − π) < 2.5), ``"exact"`` within 1e-8 by
            calibration, which costs as much as some hundred draws.
        generator: the source of randomness, on the device of probs.
        group: a process group over which the rows are spread, probs being this process's shard of them; for
            ``"pareto"`` without adjust, and rows with Σπ(1 − π) ≥ 2.5. Rank 0's generator decides.
        seed: with group, an int that alone decides: the same draw however many processes share the rows.

    Returns:
        Zeros and ones in probs' dtype, of shape sample_shape + probs.shape. Not differentiable:
        gradients are the business of :mod:`khot.estimators`.

    Raises:
        ValueError: probs outside [0, 1] or NaN (on the CPU; elsewhere that row is NaN), an unknown design,
            adjust for a design that has none.
        TypeError: probs that are not a floating-point tensor.

    Sources: Tillé 2006, *Sampling Algorithms*; Wijk, Vinuesa, Azizpour 2025, section 2.2.

    Example:
        >>> probs = torch.tensor([0.9, 0.7, 0.3, 0.1])
        >>> x = khot.sampling.sample(probs, sample_shape=(1000,))
        >>> x.shape, bool((x.sum(-1) == 2).all())
        (torch.Size([1000, 4]), True)
    """
    chosen = resolve(design)
    if adjust is not None and (adjust != "exact" or design != "pareto"):
        raise ValueError(
            f"adjust must be None, or 'exact' with design 'pareto', but got {adjust!r} with {design!r}"
        )
    if group is not None:
        if design != "pareto" or adjust is not None:
            raise ValueError(f"with group, design must be 'pareto' without adjust, but got {design!r}")
        from khot.sampling import shards

        return shards.pareto(probs, sample_shape, generator, seed, group)
    if seed is not None:
        raise ValueError("seed goes with group; without one, pass a generator")
    pi, valid = _checked(probs)
    shape = torch.Size(sample_shape)
    if not pi.numel():
        return probs.new_zeros(shape + probs.shape)
    draw = pareto.draw_exact if adjust == "exact" else chosen.draw
    x = draw(pi.expand(shape + pi.shape), generator)[..., : probs.shape[-1] if probs.dim() else 1]
    return _marked(x.to(probs.dtype), valid).reshape(shape + probs.shape)


@on_cpu
def inclusion_probs(probs: Tensor, design: str = "pareto") -> Tensor:
    """The inclusion probabilities P(x_i = 1) that :func:`sample` really has: π itself for an exact design.

    Args:
        probs, design: as for :func:`sample`.

    Returns:
        Same shape and dtype as probs.

    Raises:
        ValueError, TypeError: as for :func:`sample`.

    Example:
        >>> khot.sampling.inclusion_probs(torch.tensor([0.5, 0.25, 0.25]))
        tensor([0.5000, 0.2500, 0.2500])
    """
    marginals = resolve(design).marginals
    pi, valid = _checked(probs)
    if marginals is None or not pi.numel():
        return _marked(probs.detach().clone(), valid)
    true = marginals(pi)[..., : probs.shape[-1] if probs.dim() else 1]
    return _marked(true.to(probs.dtype), valid).reshape(probs.shape)


@on_cpu
def joint_inclusion_probs(probs: Tensor, design: str) -> Tensor:
    """The joint inclusion probabilities P(x_i = 1 and x_j = 1), with P(x_i = 1) on the diagonal.

    Args:
        probs: (*batch, n), as for :func:`sample`.
        design: one in which they are tractable (``khot.sampling.designs[design].joint`` is not None).

    Returns:
        (*batch, n, n), symmetric, in probs' dtype.

    Raises:
        ValueError, TypeError: as for :func:`sample`; ValueError also for other designs.

    Example:
        >>> khot.sampling.joint_inclusion_probs(torch.tensor([0.5, 0.5, 1.0]), "systematic")
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 0.5000, 0.5000],
                [0.5000, 0.5000, 1.0000]])
    """
    joint = resolve(design).joint
    if joint is None:
        known = ", ".join(repr(name) for name, other in designs.items() if other.joint is not None)
        raise ValueError(
            f"design must be one with joint inclusion probabilities ({known}), but got {design!r}"
        )
    pi, valid = _checked(probs)
    n = probs.shape[-1] if probs.dim() else 1
    if not pi.numel():
        return probs.new_zeros((*probs.shape, n))
    both = joint(pi)[..., :n, :n].to(probs.dtype)
    if valid is not None:
        both = both.masked_fill(~valid.unsqueeze(-1), math.nan)
    return both if probs.dim() else both.reshape(1, 1)


def _checked(probs: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows in float64 with a phantom unit if they need one, and which rows are valid: None means all."""
    arguments.check_input(probs, "probs")
    pi = probs.detach()
    n = pi.shape[-1] if pi.dim() else 1
    tolerance = n * torch.finfo(pi.dtype).eps
    pi = pi.double() if pi.dim() else pi.double().reshape(1)
    valid = None
    if pi.device.type == "cpu":
        low, high = probs.aminmax() if probs.numel() else (0, 1)
        if not (low >= 0 and high <= 1):  # NaN is neither
            arguments.check_values(pi, "probs", low=0, high=1)
    else:
        valid = ((pi >= 0) & (pi <= 1)).all(-1, keepdim=True)
        pi = torch.where(valid, pi, 0)
    return phantom.append(pi, tolerance), valid


def _marked(result: Tensor, valid: Tensor | None) -> Tensor:
    return result if valid is None else result.masked_fill(~valid, math.nan)
