"""Drawing k-hot vectors by any design, and what is known about them: their inclusion probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.precision import on_cpu
from khot._core.ways import by_lengths, by_rows
from khot._kernels.reference import phantom
from khot._kernels.reference.order_sampling import LEAST
from khot._ops import uniform as philox
from khot._ops.draws import conditional_poisson_sample, pareto_sample
from khot.sampling import _hidden, _shards
from khot.sampling._axes import check_sample_shape, from_end, to_dim, to_last, to_pair
from khot.sampling._designs import pareto
from khot.sampling._lookup import resolve
from khot.sampling.table import DesignName, designs

__all__ = ["inclusion_probs", "joint_inclusion_probs", "sample"]


@by_lengths
@on_cpu
def sample(
    probs: Tensor,
    design: DesignName = "pareto",
    dim: int = -1,
    *,
    sample_shape: Sequence[int] = (),
    adjust: Literal["exact"] | None = None,
    generator: torch.Generator | None = None,
    group: Any = None,
    seed: int | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Random k-hot vectors with the given inclusion probabilities: E[x] = π and Σx = Σπ.

    Two designs draw vectors of a random size, ``"poisson"`` and ``"iterative_poisson"``; with the latter,
    ``"repeated_poisson"`` and ``"unadjusted_pareto"`` E[x] is not π.

    Args:
        probs: π in [0, 1]. Units with 0 are never selected, units with 1 always. Where a row does not sum to
            an integer (up to n·eps of its dtype), Σx is ⌊Σπ⌋ or ⌈Σπ⌉, with probabilities that keep E[x] = π.
        design: which of the distributions with these inclusion probabilities; a name in
            :data:`khot.sampling.designs`.
        dim: the dimension along which the units lie.
        sample_shape: shape of the draws for each row.
        adjust: for ``"pareto"`` only, whose inclusion probabilities are not exactly π. None brings them
            within 2e-3 by a formula (by calibration where Σπ(1 − π) < 2.5), ``"exact"`` within 1e-8 by
            calibration, which takes about ten times as long.
        generator: the source of randomness, on the device of probs. The same seed may give other samples on a
            GPU than on a CPU.
        group: a process group over which the rows are spread, probs being this process's shard of them; for
            ``"pareto"`` without adjust, and rows with Σπ(1 − π) ≥ 2.5. The generator of rank 0 decides.
        seed: only together with group: an int that alone decides, so that the draw is the same however many
            processes share the rows.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones in probs' dtype, of shape sample_shape + probs.shape. Not differentiable; the samples
        of :mod:`khot.estimators` are.

    Raises:
        ValueError: probs outside [0, 1] or NaN (on the CPU; elsewhere that row is NaN), an unknown design,
            adjust for a design that has none, a negative size in sample_shape.
        TypeError: probs that are not a floating-point tensor, a sample_shape that is not a sequence of ints.
        IndexError: dim out of range.

    Sources: Tillé 2006, *Sampling Algorithms*; Wijk, Vinuesa, Azizpour 2025, section 2.2.

    Example:
        >>> probs = torch.tensor([0.9, 0.7, 0.3, 0.1])
        >>> x = khot.sampling.sample(probs, sample_shape=(1000,))
        >>> x.shape, bool((x.sum(-1) == 2).all())
        (torch.Size([1000, 4]), True)
    """
    if sample_shape != ():
        check_sample_shape(sample_shape)
    exact = adjust == "exact"
    if design == "pareto" and (exact or adjust is None) and group is seed is None and not sample_shape:
        small = pareto.draw_small(probs, dim, generator, exact)
        if small is not None:
            return small
    resolve(design)
    if adjust is not None and (adjust != "exact" or design != "pareto"):
        raise ValueError(
            f"adjust must be None, or 'exact' with design 'pareto', but got {adjust!r} with {design!r}"
        )
    if group is not None:
        if design != "pareto" or adjust is not None:
            raise ValueError(f"with group, design must be 'pareto' without adjust, but got {design!r}")
        return _shards.pareto(probs, dim, sample_shape, generator, seed, group)
    if seed is not None:
        raise ValueError("seed is used only together with group; without a group, pass a generator")
    arguments.check_input(probs, "probs")
    dim = from_end(probs, dim)
    rows = to_last(probs.detach(), dim)
    if _hidden.values_are_hidden(rows):
        x = _draw_hidden(rows, design, exact, sample_shape=sample_shape, generator=generator)
    else:
        x = _draw(rows, design, exact, sample_shape, generator)
    return to_dim(x, probs, dim)


@by_rows(1)
@on_cpu
def inclusion_probs(
    probs: Tensor, design: DesignName = "pareto", dim: int = -1, *, offsets: Tensor | None = None
) -> Tensor:
    """The inclusion probabilities P(x_i = 1) that :func:`sample` really has: π itself for an exact design.

    Args:
        probs, dim: as for :func:`sample`.
        design: as for :func:`sample`, but not ``"iterative_poisson"``, whose probabilities are not tractable.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as probs.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`sample`; ValueError also for the other design.

    Example:
        >>> khot.sampling.inclusion_probs(torch.tensor([0.5, 0.25, 0.25]))
        tensor([0.5000, 0.2500, 0.2500])
    """
    found = resolve(design)
    marginals = found.marginals
    if marginals is None and not found.exact:
        known = [name for name, other in designs.items() if other.exact or other.marginals is not None]
        raise ValueError(
            f"design must be one with known inclusion probabilities ({', '.join(map(repr, known))}), "
            f"but got {design!r}"
        )
    arguments.check_input(probs, "probs")
    dim = from_end(probs, dim)
    rows = to_last(probs.detach(), dim)
    pi, valid = _checked(rows)
    if marginals is None or not pi.numel():
        return to_dim(_marked(rows.clone(), valid), probs, dim)
    true = marginals(pi)[..., : rows.shape[-1]]
    return to_dim(_marked(true.to(probs.dtype), valid), probs, dim)


@by_rows(2)
@on_cpu
def joint_inclusion_probs(probs: Tensor, design: DesignName, dim: int = -1) -> Tensor:
    """The joint inclusion probabilities P(x_i = 1 and x_j = 1), with P(x_i = 1) on the diagonal.

    Args:
        probs, dim: as for :func:`sample`.
        design: one in which they are tractable (``khot.sampling.designs[design].joint`` is not None).

    Returns:
        The shape of probs with ``dim`` replaced by two dims (n, n), symmetric in them, in probs' dtype.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`sample`; ValueError also for other designs.

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
    arguments.check_input(probs, "probs")
    dim = from_end(probs, dim)
    rows = to_last(probs.detach(), dim)
    pi, valid = _checked(rows)
    n = rows.shape[-1]
    if not pi.numel():
        return to_pair(probs.new_zeros((*rows.shape, n)), dim)
    both = joint(pi)[..., :n, :n].to(probs.dtype)
    if valid is not None:
        both = both.masked_fill(~valid.unsqueeze(-1), math.nan)
    return to_pair(both, dim)


def _draw(
    rows: Tensor,
    design: DesignName,
    exact: bool,
    sample_shape: Sequence[int],
    generator: torch.Generator | None,
) -> Tensor:
    """:func:`sample` of rows with the units along the last dim."""
    # On the CPU rows that are repeated are calibrated once. Other devices would have to be waited for, to
    # learn which rows that are.
    repeated = sample_shape or 0 in rows.stride()[:-1]
    every = rows.expand(*sample_shape, *rows.shape) if sample_shape else rows
    # A row that is not of probabilities is NaN in the sample. To find that out one would have to wait for
    # other devices than the CPU.
    if design == "pareto" and rows.numel() and not (repeated and rows.is_cpu):
        seed = philox.new_seed(rows.device, generator)
        sample, drawn = pareto_sample(every, seed, math.inf if exact else LEAST, _tolerance(rows))
        if not arguments.readable(drawn) or bool(drawn):
            return sample
    if design == "conditional_poisson" and every.numel():
        seed = philox.new_seed(rows.device, generator)
        sample = conditional_poisson_sample(every, seed, _tolerance(rows))
        if not arguments.readable(sample) or not bool(sample[..., 0].isnan().any()):
            return sample
    found = resolve(design)
    if found.sample is not None and every.numel() and not rows.is_cpu:
        return found.sample(every, philox.new_seed(rows.device, generator), _tolerance(rows))
    draw: Any = pareto.draw_exact if exact else found.draw
    pi, valid = _checked(rows)
    shape = torch.Size(sample_shape)
    if not pi.numel():
        return rows.new_zeros(shape + rows.shape)
    x = draw(pi.expand(shape + pi.shape), generator)[..., : rows.shape[-1]]
    return _marked(x.to(rows.dtype), valid)


_draw_hidden = _hidden.operator("draw", "str design, bool exact", _draw, None)


def _checked(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows in float64, with a phantom unit if they need one, and which rows are valid (None: all)."""
    pi = rows.double()
    valid = None
    if pi.device.type == "cpu":
        low, high = rows.aminmax() if rows.numel() else (0, 1)
        if not (low >= 0 and high <= 1):  # NaN is neither
            arguments.check_values(pi, "probs", low=0, high=1)
    else:
        valid = ((pi >= 0) & (pi <= 1)).all(-1, keepdim=True)
        pi = torch.where(valid, pi, 0)
    return phantom.append(pi, _tolerance(rows)), valid


def _tolerance(rows: Tensor) -> float:
    """A sum of a row that is so near to an integer is that integer."""
    return rows.shape[-1] * torch.finfo(rows.dtype).eps


def _marked(result: Tensor, valid: Tensor | None) -> Tensor:
    return result if valid is None else result.masked_fill(~valid, math.nan)
