"""A call on packed rows as one operator, which a trace does not look into: how the rows become groups depends
on their lengths, which it does not know.

The call is tensors, numbers, and words for all else. Its backward pass calls the function again, and asks
autograd for the gradients. A function that draws random numbers draws the same again, by the state that
torch's generator had. Under a vmap that is traced, the function is called for one example after the other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot import cdfs
from khot._core import packed
from khot._core.arguments import is_nested
from khot._core.torch_internals import derivative_levels, transforms_are_traced, without_modes
from khot.cdfs import CDF

__all__ = ["call", "knows", "register"]


class _Known(NamedTuple):
    """A function that a trace can call by its name.

    Attributes:
        function: of packed rows, the values first.
        results: what it gives, as the groups are told.
        made: Tensor, or the named tuple that it gives: k entries of each row, and their places.
        draws: whether it draws random numbers, from its argument generator.
    """

    function: Callable[..., Any]
    results: packed.Results
    made: type[Any]
    draws: bool


_FUNCTIONS: dict[str, _Known] = {}

_CALL = "str words, Tensor[] tensors, SymInt[] ints, float[] floats"
torch.library.define("khot::packed_call", f"({_CALL}) -> Tensor[]")
# The last of its results is the state of the generator before the draw. Of the first argument torch takes the
# device alone, if it keeps that state for a second draw.
torch.library.define(
    "khot::packed_draw", f"(Tensor values, {_CALL}) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.define("khot::packed_call_backward", f"(Tensor grad, bool[] wanted, {_CALL}) -> Tensor[]")

# What an argument may be, beside a CDF and a tuple of these.
WORDS = (bool, str, int, float, Tensor, torch.SymInt, torch.SymFloat)


def register(
    name: str, function: Callable[..., Any], results: packed.Results, made: type[Any], draws: bool
) -> None:
    """Let traces call a function; the arguments are as in ``_Known``."""
    _FUNCTIONS[name] = _Known(function, results, made, draws)


def knows(name: str, options: dict[str, Any]) -> bool:
    """Whether such a call can be one operator. That has a backward pass, which torch 2.13 refuses under a
    derivative of torch.func (pytorch issue 170834; that of a Function it ignores: 193279), no forward mode,
    and a rule for vmap unless it draws."""
    known = _FUNCTIONS.get(name)
    if known is None or derivative_levels() or (known.draws and transforms_are_traced()):
        return False
    return all(_has_words(value) for value in options.values())


def _has_words(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_has_words(each) for each in value)
    return value is None or (isinstance(value, (CDF, *WORDS)) and not is_nested(value))


def call(name: str, options: dict[str, Any]) -> Any:
    """The function with this name, of these arguments."""
    tensors: list[Tensor] = []
    ints: list[int | torch.SymInt] = []
    floats: list[float] = []

    def word(value: Any) -> str:
        """A kind of value, and where it is in its list, or itself."""
        if isinstance(value, (tuple, list)):
            return "('tuple', [" + "".join([f"{word(each)}, " for each in value]) + "])"
        if isinstance(value, CDF):
            key, shape = value.key
            floats.append(shape)
            return f"('cdf', ({key!r}, {len(floats) - 1}))"
        if value is None or isinstance(value, (bool, str)):
            return f"('word', {value!r})"
        if isinstance(value, Tensor):
            tensors.append(value)
            return f"('tensor', {len(tensors) - 1})"
        if isinstance(value, (int, torch.SymInt)):
            ints.append(value)
            return f"('int', {len(ints) - 1})"
        floats.append(value)
        return f"('float', {len(floats) - 1})"

    given = "".join([f"{key!r}: {word(value)}, " for key, value in options.items()])
    words = f"({name!r}, {{{given}}})"
    known = _FUNCTIONS[name]
    if known.draws:
        drawn: Tensor = torch.ops.khot.packed_draw(tensors[0].detach(), words, tensors, ints, floats)[0]
        return drawn
    found = torch.ops.khot.packed_call(words, tensors, ints, floats)
    return found[0] if known.made is Tensor else known.made(*found)


def _read(
    words: str, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[_Known, dict[str, Any]]:
    """The function, and its arguments."""

    def meant(kind: str, value: Any) -> Any:
        if kind == "tuple":
            return tuple(meant(*each) for each in value)
        if kind == "cdf":
            return cdfs.resolve(value[0], floats[value[1]])
        return value if kind == "word" else {"tensor": tensors, "int": ints, "float": floats}[kind][value]

    name, given = ast.literal_eval(words)
    return _FUNCTIONS[name], {key: meant(*value) for key, value in given.items()}


def _results(
    words: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    state: Tensor | None = None,
) -> list[Tensor]:
    """What the function gives; of a draw, with the generator in this state, if there is one."""
    own, *vmaps = words.splitlines()  # a vmap adds a line: the dims of the tensors that it maps over

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        known, options = _read(own, tensors, ints, floats)
        if state is not None:
            options["generator"] = torch.Generator(tensors[0].device)
            options["generator"].set_state(state)
        found = known.function(**options)
        return [found] if known.made is Tensor else list(found)

    for dims in vmaps:
        run = _of_each(run, ast.literal_eval(dims))
    return run(tensors)


def _of_each(run: Callable[[Sequence[Tensor]], list[Tensor]], dims: list[int | None]) -> Any:
    """What torch.func.vmap gives, which cannot be called in an operator under a dispatch mode."""

    def every(tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [repeat(t) if d is None else t.unbind(d) for t, d in zip(tensors, dims, strict=True)]
        of_each = map(run, zip(*parts, strict=False))
        return [torch.stack(found) for found in zip(*of_each, strict=True)]

    return every


def _forward(words: str, tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
    with torch.no_grad():
        found = _results(words, tensors, ints, floats)
    return [
        x.clone(memory_format=torch.contiguous_format)
        if x._is_view() or not x.is_contiguous() or any(x is t for t in tensors)
        else x
        for x in found
    ]


def _forward_draw(values: Tensor, *called: Any) -> list[Tensor]:
    state = _state(values.device)
    return [*_forward(*called), state]


def _state(device: torch.device) -> Tensor:
    """The state of torch's generator for the device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _fake(words: str, tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
    own, *vmaps = words.splitlines()
    sizes = []
    for dims in map(ast.literal_eval, reversed(vmaps)):
        sizes.append(next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None))
        tensors = [t if d is None else t.select(d, 0) for t, d in zip(tensors, dims, strict=True)]
    known, options = _read(own, tensors, ints, floats)
    values = tensors[0]
    if known.made is not Tensor:
        of_rows = (options["offsets"].shape[0] - 1, options["k"])
        dtypes = (values.dtype, torch.int64)
        return [values.new_empty((*sizes, *of_rows), dtype=dtype) for dtype in dtypes]
    return [values.new_empty((*sizes, *_shape(known.results, values, options)))]


def _shape(results: packed.Results, values: Tensor, options: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the tensor that a function gives."""
    if results.loss and options["reduction"] != "none":
        return ()
    if results.entries:
        return (*options.get("sample_shape", ()), *values.shape)
    q = options.get("q")
    levels = [x.shape[1:] for x in options.values() if isinstance(x, Tensor) and x.dim() == 2]
    last = levels[0] if levels else (1,) if options.get("keepdim") else ()
    first = q.shape if isinstance(q, Tensor) else ()
    return (*first, options["offsets"].shape[0] - 1, *last)


def _fake_draw(values: Tensor, *called: Any) -> list[Tensor]:
    with without_modes():
        size = _state(values.device).numel()
    return [*_fake(*called), torch.empty(size, dtype=torch.uint8, device="cpu")]


def _backward(
    grad: Tensor,
    wanted: list[bool],
    words: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> list[Tensor]:
    """The gradients of the tensors that are wanted. The last tensor is the state if the function draws."""
    draws = _read(words.splitlines()[0], tensors, ints, floats)[0].draws
    state = tensors[-1] if draws else None
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        found = _results(words, leaves, ints, floats, state)[0]
    given = [t for t in leaves if t.requires_grad]
    if not found.requires_grad:
        return [t.new_zeros(t.shape) for t in given]
    grads = torch.autograd.grad(found, given, grad, allow_unused=True, materialize_grads=True)
    return [g.contiguous() for g in grads]


def _fake_backward(
    grad: Tensor, wanted: list[bool], words: str, tensors: list[Tensor], *numbers: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, w in zip(tensors, wanted, strict=True) if w]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    words, tensors, ints, floats = inputs
    ctx.save_for_backward(*tensors)
    ctx.call = words, ints, floats


def _save_draw(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, words, tensors, *numbers = inputs
    _save(ctx, (words, [*tensors, output[-1]], *numbers), output)


class _Last(Function):
    """Gradients that have no derivative."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.clone() for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("compiled calls on packed rows have no second derivatives; use eager mode")


def _vjp(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """The first result alone has a gradient."""
    words, ints, floats = ctx.call
    tensors, needed = list(ctx.saved_tensors), ctx.needs_input_grad[-3]
    wanted = [*needed, *[False] * (len(tensors) - len(needed))]  # the state of a draw has none
    found = torch.ops.khot.packed_call_backward(grads[0], wanted, words, tensors, ints, floats)
    parts = iter(_Last.apply(*(g.requires_grad_() for g in found)) if torch.is_grad_enabled() else found)
    # torch takes a list of no numbers for one of no tensors
    return None, [next(parts) if w else None for w in needed], None if ints else [], None if floats else []


def _vjp_draw(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return None, *_vjp(ctx, grads)


def _batch(
    info: Any, in_dims: tuple[Any, ...], words: str, tensors: list[Tensor], *numbers: Any
) -> tuple[list[Tensor], list[int]]:
    found = torch.ops.khot.packed_call(f"{words}\n{list(in_dims[1])!r}", tensors, *numbers)
    return found, [0] * len(found)


for _name, _kernel, _shapes in (
    ("packed_call", _forward, _fake),
    ("packed_draw", _forward_draw, _fake_draw),
    ("packed_call_backward", _backward, _fake_backward),
):
    torch.library.impl(f"khot::{_name}", "CompositeExplicitAutograd")(_kernel)
    torch.library.register_fake(f"khot::{_name}", _shapes)
torch.library.register_autograd("khot::packed_call", _vjp, setup_context=_save)
torch.library.register_autograd("khot::packed_draw", _vjp_draw, setup_context=_save_draw)
torch.library.register_vmap("khot::packed_call", _batch)
