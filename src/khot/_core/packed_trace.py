"""A call on packed rows as one operator, which a trace does not look into: how the rows become groups depends
on their lengths, which it does not know.

The call is a function's name, tensors, numbers, and words for all else. Its backward pass calls the function
again, and asks autograd for the gradients.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core.arguments import is_nested
from khot._core.torch_internals import transforms_are_traced
from khot.cdfs import CDF

__all__ = ["call", "knows", "register"]

_FUNCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {}

_CALL = "str words, Tensor[] tensors, SymInt[] ints, float[] floats, bool reduced"
torch.library.define("khot::packed_call", f"({_CALL}) -> Tensor")
torch.library.define("khot::packed_call_backward", f"(Tensor grad, {_CALL}) -> Tensor[]")


# What an argument may be, beside a CDF.
WORDS = (bool, str, int, float, Tensor, torch.SymInt, torch.SymFloat)


def register(name: str, function: Callable[..., Any], entries: bool) -> None:
    """Let traces call a function, whose results have one value for each entry, or one for each row."""
    _FUNCTIONS[name] = function, entries


def knows(name: str, options: dict[str, Any]) -> bool:
    """Whether such a call can be one operator, which has a backward pass and no other rule."""
    if name not in _FUNCTIONS or transforms_are_traced():
        return False
    for value in options.values():
        if isinstance(value, CDF):
            if not value.built_in:
                return False
        elif value is not None and (not isinstance(value, WORDS) or is_nested(value)):
            return False
    return True


def call(function: str, options: dict[str, Any], reduced: bool) -> Tensor:
    """The function with this name, of these arguments, the values first; ``reduced`` if the result is one
    number."""
    words = function
    tensors: list[Tensor] = []
    ints: list[int] = []
    floats: list[float] = []
    for key, value in options.items():
        kept: list[Any]
        if isinstance(value, CDF):
            name, shape = value.key
            words += f";{key}:cdf={(name, len(floats))!r}"
            floats.append(shape)
        elif value is None or isinstance(value, (bool, str)):
            words += f";{key}={value!r}"
        else:
            if isinstance(value, Tensor):
                word, kept = "tensor", tensors
            elif isinstance(value, (int, torch.SymInt)):
                word, kept = "int", ints
            else:
                word, kept = "float", floats
            words += f";{key}:{word}={len(kept)}"
            kept.append(value)
    found: Tensor = torch.ops.khot.packed_call(words, tensors, ints, floats, reduced)
    return found


def _read(
    words: str, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[Callable[..., Any], bool, dict[str, Any]]:
    """The function, whether its results have entries, and its arguments."""
    name, *given = words.split(";")
    options: dict[str, Any] = {}
    for each in given:
        key, _, text = each.partition("=")
        key, _, kind = key.partition(":")
        value = ast.literal_eval(text)
        if kind == "cdf":
            options[key] = cdfs.resolve(value[0], floats[value[1]])
        else:
            options[key] = {"tensor": tensors, "int": ints, "float": floats}[kind][value] if kind else value
    return *_FUNCTIONS[name], options


@torch.library.impl("khot::packed_call", "CompositeExplicitAutograd")
def _forward(
    words: str, tensors: list[Tensor], ints: list[int], floats: list[float], reduced: bool
) -> Tensor:
    function, _, options = _read(words, tensors, ints, floats)
    with torch.no_grad():
        found: Tensor = function(**options)
    return found.clone() if found._is_view() or any(found is t for t in tensors) else found


def _fake(words: str, tensors: list[Tensor], ints: list[int], floats: list[float], reduced: bool) -> Tensor:
    _, entries, options = _read(words, tensors, ints, floats)
    values = tensors[0]
    if reduced:
        return values.new_empty(())
    if entries:
        return torch.empty_like(values)
    q = options.get("q")
    levels = [x.shape[1:] for x in options.values() if isinstance(x, Tensor) and x.dim() == 2]
    last = levels[0] if levels else (1,) if options.get("keepdim") else ()
    first = q.shape if isinstance(q, Tensor) else ()
    return values.new_empty((*first, options["offsets"].shape[0] - 1, *last))


@torch.library.impl("khot::packed_call_backward", "CompositeExplicitAutograd")
def _backward(
    grad: Tensor, words: str, tensors: list[Tensor], ints: list[int], floats: list[float], reduced: bool
) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        function, _, options = _read(words, leaves, ints, floats)
        found = function(**options)
    if not found.requires_grad:
        return [torch.zeros_like(t) for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    grads = iter(torch.autograd.grad(found, wanted, grad, allow_unused=True, materialize_grads=True))
    return [next(grads) if t.requires_grad else torch.zeros_like(t) for t in leaves]


def _fake_backward(
    grad: Tensor, words: str, tensors: list[Tensor], ints: list[int], floats: list[float], reduced: bool
) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    words, tensors, ints, floats, reduced = inputs
    ctx.save_for_backward(*tensors)
    ctx.call = words, ints, floats, reduced


def _vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    words, ints, floats, reduced = ctx.call
    tensors = list(ctx.saved_tensors)
    grads = torch.ops.khot.packed_call_backward(grad, words, tensors, ints, floats, reduced)
    found = [g if t.is_floating_point() else None for g, t in zip(grads, tensors, strict=True)]
    # torch takes a list of no numbers for one of no tensors
    return None, found, None if ints else [], None if floats else [], None


torch.library.register_fake("khot::packed_call", _fake)
torch.library.register_fake("khot::packed_call_backward", _fake_backward)
torch.library.register_autograd("khot::packed_call", _vjp, setup_context=_save)
