"""Checks of the users' arguments, and the one layout that the kernels know: rows along the last dim.

Wrong values raise ValueError, wrong types and dtypes TypeError, and wrong dims IndexError. Python numbers are
checked here. The values of tensors are only read where this does not wait for a device. Elsewhere the
kernel marks a row that it cannot solve with NaN; on the CPU and in eager mode, :func:`explain_nan` then says
what was wrong.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from khot._core import precision
from khot._core.torch_internals import as_usual, forward_mode_is_on, is_transformed

__all__ = [
    "FLOATS",
    "INTEGERS",
    "NUMBERS",
    "OF_ALL",
    "OF_ENTRIES",
    "broadcast_shape",
    "Scalar",
    "broadcasts",
    "check_bool_or_real",
    "check_device",
    "check_enough",
    "check_dim",
    "check_dim_type",
    "check_flags",
    "check_has_values",
    "check_index",
    "check_input",
    "check_integer",
    "check_number",
    "check_real",
    "check_scalar",
    "check_tensor",
    "check_values",
    "constant",
    "detached",
    "explain_nan",
    "has_data",
    "is_dtensor",
    "is_nested",
    "like_rows",
    "k_and_tau",
    "mask_rows",
    "masked",
    "not_binary",
    "of_entries",
    "per_row",
    "plain",
    "quantile_levels",
    "readable",
    "rows",
    "shows_nan",
    "sizes",
    "unasked",
    "unrows",
]

Scalar = float | Tensor  # a number, or a tensor with one entry per row
# The largest τ for rows whose differences overflow: for smaller ones, they are infinite in τ, too.
STEEPEST = 1e290
CPU = torch.device("cpu")


# Batches of up to so many rows are searched for NaN in Python, which takes less time than two operators.
FEW = 64
# From so many entries on, an operator of its own takes less time than ``torch.where``, which reads masks that
# look random at a fourth of the speed of a softmax.
MANY = 1 << 13

# The types of Python's numbers, without bool, which is not accepted as one.
NUMBERS = (int, float)

# The dtypes that one can compute with: those of 8 bits and less are for storage only.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset(
    {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
)


#: Tensors with one value for each entry of the input, and those that are the same for all rows. All others
#: have one value, or several, for each row.
OF_ENTRIES = frozenset(
    {"cost", "labels", "logits", "mask", "q_logits", "relevance", "soft_label", "target"}
    | {"targets", "weights"}
)
OF_ALL = frozenset({"q", "w"})


def is_dtensor(value: Any) -> bool:
    return type(value) is not Tensor and hasattr(value, "placements")


def is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def check_input(input: Any, name: str = "input", distributed: bool = False) -> None:
    """Raise unless it is a dense tensor of a floating-point dtype that one can compute with."""
    check_tensor(input, name, distributed)
    if input.dtype not in FLOATS:
        least = " of at least 16 bits" if input.is_floating_point() else ""
        raise TypeError(f"{name} must have a floating-point dtype{least}, but got {input.dtype}")


def check_tensor(value: Any, name: str, distributed: bool = False) -> None:
    """Raise unless it is a dense tensor: not sparse, not nested, and not in a layout of one library; nor a
    DTensor, unless ``distributed``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, but got {type(value).__name__}")
    if type(value) is not Tensor and not distributed and is_dtensor(value):
        raise TypeError(
            f"{name} must be a plain tensor here, but got a DTensor: pass the part of this process, "
            f"{name}.to_local()"
        )
    # Dynamo cannot read the layout of a tensor inside a Function that it maps over a batch
    if not torch.compiler.is_compiling() and (value.layout != torch.strided or value.is_nested):
        got = f"the layout {value.layout}"
        if value.is_nested:
            got = "a nested tensor; functions with offsets take those of layout=torch.jagged, as "
            got += f"torch.nested.nested_tensor(list({name}.unbind()), layout=torch.jagged) gives"
        raise TypeError(f"{name} must be a dense tensor, but got {got}")


def check_real(value: Tensor, name: str) -> None:
    """Raise unless it is a dense tensor of real numbers: integers or floating-point numbers."""
    check_tensor(value, name)
    if value.dtype not in FLOATS and value.dtype not in INTEGERS:
        raise TypeError(f"{name} must be a real number or tensor, but got dtype {value.dtype}")


def check_bool_or_real(value: Any, name: str) -> None:
    """Raise unless it is a dense tensor of a bool, integer or floating-point dtype."""
    check_tensor(value, name)
    if value.dtype != torch.bool:
        check_real(value, name)


def not_binary(value: Tensor, name: str) -> Tensor:
    """Where a tensor of zeros and ones has something else. If it is :func:`readable`, everything but a NaN
    raises, because a draw from a row with a NaN is NaN."""
    check_bool_or_real(value, name)
    wrong = (value != 0) & (value != 1)
    if readable(value) and bool(wrong.any()):
        other = value.detach()[wrong & ~value.isnan()]
        if other.numel():
            raise ValueError(f"{name} must be 0 or 1, but got {other[0].item()}")
    return wrong


def check_index(value: Any, name: str, input: Tensor) -> None:
    """Raise unless it is a dense int64 tensor on the input's device."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of dtype torch.int64, but got {got}")
    check_tensor(value, name)
    check_device(value, name, input)


def check_device(value: Tensor, name: str, input: Tensor) -> None:
    """Raise if the value is on another device than the input, unless it is a number with a device."""
    if value.device != input.device and (value.dim() or value.is_meta):
        raise ValueError(f"{name} must be on the input's device {input.device}, but got {value.device}")


def check_has_values(value: Tensor, name: str, input: Tensor) -> None:
    """Raise for a meta tensor, which has no values, together with an input that has."""
    if value.is_meta and not input.is_meta:
        check_device(value, name, input)


def check_flags(**flags: Any) -> None:
    """Raise unless each is True or False, as torch does. Others have a truth value, too, but seldom the one
    that is meant: "False" is true, and so is a mask of one True in the place of a flag."""
    for name, value in flags.items():
        if not isinstance(value, (bool, torch.SymBool)):
            raise TypeError(f"{name} must be a bool, but got {type(value).__name__}")


def check_dim_type(dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, (int, numbers.Integral)):
        more = "; arguments behind it, such as tau, go by name" if isinstance(dim, float) else ""
        raise TypeError(f"dim must be an int, but got {type(dim).__name__}{more}")


def check_dim(input: Tensor, dim: Any) -> int:
    """dim, counted from the front. A 0-dim input counts as a row of one entry, as for torch.softmax."""
    if type(dim) is not int:
        check_dim_type(dim)
    index, ndim = int(dim), max(input.dim(), 1)
    if not -ndim <= index < ndim:
        raise IndexError(f"dim must be in [{-ndim}, {ndim - 1}], but got {index}")
    return index % ndim


def rows(
    input: Tensor, dim: int, mask: Tensor | None = None, largest: bool = True, fill: float = -math.inf
) -> Tensor:
    """The scores with dim last, negated unless ``largest``, and ``fill`` where the mask is False."""
    check_input(input)
    dim = check_dim(input, dim)
    x = input
    if dim != input.dim() - 1:
        x = input.movedim(dim, -1) if input.dim() else input.reshape(1)
    if not largest:
        x = -x
    if mask is not None:
        x = masked(x, mask_rows(mask, input, dim), fill)
    return x


def masked(x: Tensor, mask: Tensor, fill: float) -> Tensor:
    """The entries under a mask of the same shape, and ``fill``, 0 or infinite, in the place of the others."""
    plain = readable(x) and readable(mask) and x.dtype in FLOATS and not forward_mode_is_on()
    if x.numel() < MANY or not plain:
        return torch.where(mask, x, fill)
    found: Tensor = torch.ops.khot.masked(x, mask, fill)
    return found


def unrows(y: Tensor, input: Tensor, dim: int) -> Tensor:
    """The inverse of the move in :func:`rows`, for a result of the input's shape."""
    if dim in (-1, input.dim() - 1) and input.dim():
        return y
    return y.movedim(-1, dim) if input.dim() else y.reshape(())


def mask_rows(mask: Any, input: Tensor, dim: int) -> Tensor:
    check_tensor(mask, "mask")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must have dtype torch.bool, but got {mask.dtype}")
    if not broadcasts(mask.shape, input.shape):
        raise ValueError(
            f"mask must broadcast to the input's shape {tuple(input.shape)}, but got {tuple(mask.shape)}"
        )
    check_device(mask, "mask", input)
    if input.dim() == 0:
        return mask.reshape(1)
    return mask.expand(input.shape).movedim(dim, -1)


def like_rows(value: Tensor, name: str, input: Tensor, dim: int, of: str = "the input's") -> Tensor:
    """What belongs to each entry of the input, whose shape it must have, in the layout of :func:`rows`."""
    check_device(value, name, input)
    if value.shape != input.shape:
        raise ValueError(f"{name} must have {of} shape {tuple(input.shape)}, but got {tuple(value.shape)}")
    return value.movedim(dim, -1) if value.dim() else value.reshape(1)


def of_entries(value: Any, name: str, input: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Numbers of the input's entries, such as costs, in the layout of :func:`rows` and in a floating-point
    dtype; 0 where the mask is False."""
    check_real(value, name)
    check_device(value, name, input)
    if not broadcasts(value.shape, input.shape):
        raise ValueError(
            f"{name} must broadcast to the input's shape {tuple(input.shape)}, but got {tuple(value.shape)}"
        )
    dim = check_dim(input, dim)
    w = precision.on(input.device, value).expand(input.shape)
    w = w.movedim(dim, -1) if input.dim() else w.reshape(1)
    if mask is not None:
        w = masked(w, mask_rows(mask, input, dim), 0)
    return w if w.is_floating_point() else precision.widen(w)


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """The shape that the shapes broadcast to: ``torch.broadcast_shapes``, which imports sympy."""
    point = torch.empty(())
    return torch.broadcast_tensors(*(point.expand(shape) for shape in shapes))[0].shape


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of a shape can be expanded to another one."""
    if len(shape) > len(target):
        return False
    # under torch.compile, `s in (1, t)` is False for a symbolic t that has the value of s
    return all(s == 1 or s == t for s, t in zip(reversed(shape), reversed(target), strict=False))


def per_row(
    value: Any,
    name: str,
    x: Tensor,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
    by_value: bool = False,
) -> Tensor:
    """A number or a tensor as a floating-point tensor on x's device that broadcasts with x's batch shape.

    A number must lie in [low, high]; with ``low_open`` it must be finite and greater than low. With
    ``by_value`` a number stays on the CPU if the kernels for x's device accept it there, because a launch to
    fill a tensor of one element takes as long as the kernel for a short row.
    """
    if isinstance(value, Tensor):
        check_real(value, name)
        if not broadcasts(value.shape, x.shape[:-1]):
            raise ValueError(
                f"{name} must broadcast with the batch shape {tuple(x.shape[:-1])} (the input's shape "
                f"without dim), but got {tuple(value.shape)}"
            )
        check_device(value, name, x)
        value = precision.on(x.device, value)
        return check_values(value, name, low=low, high=high, low_open=low_open, integer=integer)
    if type(value) in NUMBERS and value and _shares(x, by_value):
        return _checked(value, name, low, high, low_open, integer)
    number = _number(value, name, low=low, high=high, low_open=low_open, integer=integer)
    return constant(number, x, by_value=by_value)


def k_and_tau(k: Any, tau: Any, x: Tensor, *, high: float, by_value: bool = False) -> tuple[Tensor, Tensor]:
    """:func:`per_row` of the k in [0, high] and of the temperature of a top-k."""
    if type(k) in NUMBERS and type(tau) in NUMBERS and k and tau and _shares(x, by_value):
        return _checked_pair(k, tau, high)
    count = per_row(k, "k", x, low=0, high=high, by_value=by_value)
    return count, per_row(tau, "tau", x, low=0, low_open=True, by_value=by_value)


@functools.lru_cache(maxsize=256, typed=True)
def _checked_pair(k: float, tau: float, high: float) -> tuple[Tensor, Tensor]:
    return _checked(k, "k", 0, high, False, False), _checked(tau, "tau", 0, math.inf, True, False)


# The types of a key count, because True == 1; the two zeros, which are equal, are left out.
@functools.lru_cache(maxsize=256, typed=True)
def _checked(value: float, name: str, low: float, high: float, low_open: bool, integer: bool) -> Tensor:
    """The shared tensor of a number, which is checked when it is first met."""
    number = _number(value, name, low=low, high=high, low_open=low_open, integer=integer)
    return _shared(number, math.copysign(1, number))


def constant(number: float, like: Tensor, *, by_value: bool = False) -> Tensor:
    """A number as a tensor on the device of another tensor, or on the CPU if ``by_value`` as for
    :func:`per_row`. Nothing may change the result."""
    if _shares(like, by_value):
        return _shared(number, math.copysign(1, number))
    device = like.device
    by_value = by_value and device.type == "cuda" and not torch.compiler.is_compiling()
    where = CPU if by_value else device
    return torch.full((), number, dtype=precision.wide_dtype(device), device=where)


def unasked(like: Tensor) -> Tensor:
    """What stands for a gradient in numbers like these that nobody asked for: a zero, on the CPU where the
    kernels take numbers by value."""
    if (like.is_cpu or like.is_cuda) and not torch.compiler.is_compiling():
        return constant(0.0, like, by_value=True)
    return like.new_zeros((), device="cpu")


def _shares(like: Tensor, by_value: bool = False) -> bool:
    """Whether calls with a tensor may share the tensors of numbers, which lie on the CPU: not where something
    records tensors, or where they must be of another kind."""
    here = like.is_cpu or (by_value and like.is_cuda)
    return here and type(like) in (Tensor, torch.nn.Parameter) and as_usual()


def detached(value: Tensor) -> Tensor:
    """The tensor without its gradient; the same object where it clearly has none."""
    return value if not value.requires_grad and _shares(value) else value.detach()


@functools.lru_cache(maxsize=256)
def _shared(number: float, sign: float) -> Tensor:
    """A number as a tensor on the CPU. Calls share it, because filling a tensor takes as long as the kernel
    for a short row. The sign tells the two zeros apart, which are equal."""
    with torch.inference_mode(False):  # autograd cannot save a tensor that was made in inference mode
        return torch.full((), number, dtype=precision.wide_dtype(CPU), device=CPU)


def check_scalar(
    value: Any,
    name: str,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
) -> None:
    """Raise as :func:`per_row` does, as far as one can tell without the input: for constructors."""
    if isinstance(value, Tensor):
        check_real(value, name)
        check_values(value, name, low=low, high=high, low_open=low_open, integer=integer)
    else:
        _number(value, name, low=low, high=high, low_open=low_open, integer=integer)


def _number(value: Any, name: str, *, low: float, high: float, low_open: bool, integer: bool) -> float:
    if type(value) not in (int, float) and (
        isinstance(value, bool)
        or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real))
    ):
        raise TypeError(f"{name} must be a real number or tensor, but got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside_number = low < number < math.inf if low_open else low <= number <= high
    if not inside_number or (integer and number != math.floor(number)):
        raise ValueError(f"{name} must {_domain(low, high, low_open, integer)}, but got {value}")
    return number


def check_values(
    value: Tensor,
    name: str,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
) -> Tensor:
    """The tensor in a floating-point dtype. Its values are checked if :func:`readable`."""
    given = value
    if not value.is_floating_point():
        value = precision.widen(value)
    if readable(value):

        def inside(v: Tensor) -> Tensor:
            within = (v > low) & (v < math.inf) if low_open else (v >= low) & (v <= high)
            return within & (v == torch.floor(v)) if integer else within

        # of many values the ends, which are NaN where a value is, are found in a sixteenth of the time
        few = integer or value.numel() < MANY
        ends = value if few else torch.stack(value.detach().aminmax())
        if not bool(inside(ends).all()):
            bad = given.detach()[~inside(value)][0].item()
            raise ValueError(f"{name} must {_domain(low, high, low_open, integer)}, but got {bad}")
    return value


def sizes(present: Tensor) -> Tensor:
    """How many entries of each row are there, in int32, in which torch sums bools in half the time."""
    return present.sum(-1, dtype=torch.int32)


def check_enough(present: Tensor, name: str, number: int) -> None:
    """Raise if a row has fewer entries than the number, if they can be read."""
    if readable(present) and present.numel():
        fewest = int(sizes(present).amin())
        if fewest < number:
            raise ValueError(
                f"{name} must be at most the number of entries under the mask, but got {number} for a row "
                f"with {fewest}"
            )


def plain(number: float) -> float:
    """A whole number as an int, so that messages do not write 3 as 3.0. Floats that are larger than all exact
    integers stay as they are."""
    whole = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
    return int(number) if whole else number


def _domain(low: float, high: float, low_open: bool, integer: bool) -> str:
    low, high = plain(low), plain(high)
    if low_open:
        return f"be finite and > {low}"
    if high == sys.float_info.max:
        return f"be finite and >= {low}"
    return f"be an integer in [{low}, {high}]" if integer else f"lie in [{low}, {high}]"


def readable(value: Tensor, wait: bool = False) -> bool:
    """Whether values can be read: on the CPU, or where a device may ``wait`` on any, and not under a
    transform or a trace."""
    return (
        (value.is_cpu or (wait and not value.is_meta))
        and not torch.compiler.is_compiling()
        and type(value) in (Tensor, torch.nn.Parameter)
        and not is_transformed(value)
    )


def has_data(value: Tensor) -> bool:
    """Whether values can decide what is computed: not while tracing or under transforms. A GPU may wait."""
    return readable(value, wait=True)


def check_number(value: Any, name: str, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a real number, but got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must {_domain(low, high, False, False)}, but got {value}")


def quantile_levels(q: Any, x: Tensor) -> Tensor:
    """The levels of quantiles of rows x, which are in [0, 1], as a tensor of at most one dim."""
    if not isinstance(q, Tensor):
        check_scalar(q, "q", low=0, high=1)
        return torch.full((), float(q), dtype=precision.wide_dtype(x.device), device=x.device)
    check_real(q, "q")
    check_has_values(q, "q", x)
    if q.dim() > 1:
        raise ValueError(f"q must be a number or have at most one dim, but got shape {tuple(q.shape)}")
    return check_values(q.to(x.device), "q", low=0, high=1)


def check_integer(value: Any, name: str, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{name} must be an int, but got {type(value).__name__}")
    number = int(value)
    if number < low or (high is not None and number > high):
        allowed = f"be at least {low}" if high is None else f"lie in [{low}, {high}]"
        raise ValueError(f"{name} must {allowed}, but got {value}")


def explain_nan(
    result: Tensor,
    x: Tensor,
    k: Tensor,
    tau: Tensor | None = None,
    name: str = "k",
    integer: bool = False,
    count: Callable[[Tensor], Tensor] = lambda selectable: selectable,
) -> None:
    """Raise if a row of the result is NaN because of k or tau, and not because of its scores.

    This happens on the CPU only: elsewhere reading the values would wait for the device, and such rows stay
    NaN. ``count`` turns the number of selectable entries of a shard into the number for the row.
    """
    if not shows_nan(result):
        return
    if tau is not None:
        check_values(tau, "tau", low=0, low_open=True)
    k, selectable = torch.broadcast_tensors(k, count((x != -math.inf).sum(-1)))
    bad = ~((k >= 0) & (k <= selectable))
    if bool(bad.any()):
        raise ValueError(
            f"{name} must lie in [0, number of entries that may be selected], but got "
            f"{plain(k[bad][0].item())} for a row with {plain(selectable[bad][0].item())}"
        )
    if integer:
        check_values(k, name, low=0, integer=True)
    if tau is not None and x.dtype == torch.float64 and x.shape[-1]:
        finite = x.detach().masked_fill(x.isinf(), 0)
        bad = (finite.amax(-1) - finite.amin(-1)).isinf() & (tau > STEEPEST)
        if bool(bad.any()):
            raise ValueError(
                f"tau must be at most {STEEPEST} for a row with differences of scores that overflow, but "
                f"got {tau.expand(bad.shape)[bad][0].item()}"
            )


def shows_nan(values: Tensor) -> bool:
    """Whether values can be read, and one of them is NaN. One makes the sum NaN, at half the cost of
    isnan().any()."""
    if not readable(values):
        return False
    if values.numel() > FEW:
        return math.isnan(values.sum().item())
    total: float = sum((values if values.dim() == 1 else values.reshape(-1)).tolist())
    return total != total
