"""Which way a call takes: the questions that a call meets, in this order, each answered in one place.

1. Is it a plain call? :mod:`khot._core.eager` answers in C++: with the result, or with None if not. The
   public operators that it knows ask it in their first lines, outside a trace.
2. Are the rows packed, or is the input a DTensor? :func:`by_rows`, :func:`by_shards`, :func:`by_lengths`,
   around the function with the checks.
3. Are the rows spread over processes, or is the CDF a user's own? :meth:`Operator.on`.
4. Is it traced or transformed, and can a derivative be asked for? ``Operator.__call__``.
5. Does the device have a kernel in Python? ``Operator._by_device``. If not, torch's dispatcher takes the
   kernel in C++, or else the reference.

Some ask one of these questions themselves, as they do something else for one of its answers. Four ask
:meth:`Operator.is_served`: a matrix of places, the gradient of an assignment, a balancer's counts and a
layer's k are several operators, or plain torch, where there is no such kernel. Three ask whether they have a
DTensor: an assignment refuses it, a balancer's method has the layer as its first argument, and pruned weights
are several tensors, or blocks of one.

Which solver a kernel then takes for a row is its own matter: ``csrc/README.md``, ``_kernels/triton/ways.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core import expansion, packed, packed_trace
from khot._core.arguments import OF_ALL, is_dtensor, is_nested
from khot._core.torch_internals import (
    any_requires_grad,
    apply_outside_transforms,
    decides_by_device,
    derivative_levels,
    forward_mode_is_on,
    leave_graph,
    transforms_are_on,
)
from khot.cdfs import CDF

__all__ = ["Operator", "by_kernel", "by_lengths", "by_rows", "by_shards"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def by_rows(
    out: int, *, loss: bool = False, of_all: frozenset[str] = OF_ALL, entries: bool | None = None
) -> Callable[[_Function], _Function]:
    """Let a function on rows take packed rows, if it has the argument offsets, and DTensors whose rows are
    whole: batch-sharded or replicated ones.

    The first argument has the rows. The function must not draw random numbers: they would be the same for
    different rows of a DTensor, or different for copies of a row.

    Args:
        out: by how many dims the results replace ``dim``; 1 with ``keepdim``.
        loss: whether the function has one of the reductions of losses over its rows.
        of_all: the names of tensors that are the same for all rows, if they are not those of most functions.
        entries: whether the results have one value for each entry; None if this follows from ``out``.
    """
    results = packed.Results(out == 1 if entries is None else entries, loss)
    known = {"out": out, "loss": loss, "of_all": of_all}
    return lambda function: _by_parts(function, "by_rows", results, known)


def by_shards(*, at_once: Callable[..., Any] | None = None) -> Callable[[_Function], _Function]:
    """Let a function of (input, k, dim) and of keywords, among them mask and group, take packed rows and
    DTensors, also those whose rows are spread over processes.

    Args:
        at_once: as in ``packed.Results``.
    """
    results = packed.Results(True, at_once=at_once)
    return lambda function: _by_parts(function, "by_shards", results)


def by_lengths(function: _Function) -> _Function:
    """Let a function on rows, which may draw random numbers, take packed rows by the argument offsets."""
    return _by_parts(function, "", packed.Results(True))


def _by_parts(
    function: _Function, how: str, results: packed.Results, known: dict[str, Any] | None = None
) -> _Function:
    """The function, which takes packed rows and a DTensor as well: it is called with groups of rows of like
    lengths, or with this process's part."""
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))
    full_name = f"{function.__module__}.{function.__qualname__}"
    every = set(signature.parameters)
    places = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}
    packs = "offsets" in signature.parameters

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        input: Any = args[0] if args else options.get(first)
        offsets = options.get("offsets")
        if offsets is None and type(input) is Tensor:
            return function(*args, **options)
        is_packed = packs and (offsets is not None or is_nested(input))
        if not is_packed and not (how and is_dtensor(input)):
            return function(*args, **options)
        given = dict(zip(places, args, strict=False)) | options
        named = defaults | given
        if len(given) < len(args) + len(options) or named.keys() != every:
            signature.bind(*args, **options)  # raises what Python raises; for each call it would take long
        named.pop(first)
        if is_packed:
            if not torch.compiler.is_compiling():
                return packed.by_rows(function, input, first, named, results)
            values, others = packed.apart(input, first, named)
            packed.check(values, others["offsets"], first)
            called = {first: values, **others}
            if packed_trace.knows(full_name, called):
                return packed.together(packed_trace.call(full_name, called), input, results)
            leave_graph(
                "packed rows leave the graph under derivatives of torch.func, in forward mode, with a "
                "generator, if they are drawn under vmap, and with arguments that are no tensors, numbers of "
                "Python, words or CDFs"
            )
            outside = cast("Callable[..., Any]", torch.compiler.disable(packed.by_rows))
            return outside(function, input, first, named, results)
        named.pop("offsets", None)
        from khot._core import dtensor  # late, because torch.distributed.tensor takes a second to import

        if named.get("group") is not None:
            raise TypeError("group must be None for a DTensor, which has its own group, but got one")
        return getattr(dtensor, how)(function, input, name=first, options=named, **(known or {}))

    if packs:
        made = inspect.unwrap(function).__globals__[signature.return_annotation]
        packed_trace.register(full_name, run, results, made, draws=not how)
    return run  # type: ignore[return-value]


def by_kernel() -> bool:
    """Whether a vjp may call a backward kernel, which autograd does not record."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


class Operator:
    """A registered operator, ready to be called.

    Attributes:
        name: the name after ``khot::``.
        rule: how it is differentiated (:class:`khot._core.dispatch.Rule`); None if it is not.
        function: the same as an autograd Function, which has forward mode.
        kernel: the reference kernel, in plain torch for any device.
        overload: torch's own object for the operator.
        compute: what gives the results in eager mode.
        spread: the operator for rows that are spread over processes, and for users' CDFs; None if it was not
            asked for.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], rule: Any) -> None:
        self.name = name
        self.kernel = kernel
        self.overload = getattr(torch.ops.khot, name).default
        self.compute: Callable[..., Any] = self.overload
        self.spread: Operator | None = None
        self._faster: dict[str, Callable[..., Any]] = {}
        self.rule = rule
        self.function: type[Function] | None = None

    def on(self, group: str, cdf: CDF | None = None) -> Callable[..., Any]:
        """The operator for rows that are spread over these process groups ("": whole rows), and for this
        CDF. Faster kernels know whole rows and khot's own CDFs only."""
        if not group and (cdf is None or cdf.built_in):
            return self
        spread = self.spread
        assert spread is not None
        return lambda *args: spread(*args, group)

    def __call__(self, *args: Any) -> Any:
        """Apply the operator in the cheapest form that has the derivatives which may be needed.

        Dynamo rejects a Function that defines jvp, so under a trace the registered operator is called, with
        the rule that was registered for it. If a transform is traced as well, that rule would not
        be used, and the result is expanded instead (:mod:`khot._core.expansion`). In eager mode the Function
        adds forward mode. If no derivative can be needed, only its forward is called.
        """
        if torch.compiler.is_compiling():
            levels = 0 if self.function is None else derivative_levels()
            return self.overload(*args) if levels == 0 else expansion.expanded(self, levels, args)
        if self.function is None:
            return self.compute(*args)
        if transforms_are_on():
            return self.function.apply(*args)
        if (torch.is_grad_enabled() and any_requires_grad(*args)) or forward_mode_is_on():
            return apply_outside_transforms(self.function, args)
        return self.function.forward(*args)

    def pull(self, *args: Any, group: str = "", cdf: CDF | None = None, **recorded: Any) -> Any:
        """What a backward operator returns: by its kernel, or, where autograd records the gradient, by the
        reference kernel, whose operations have derivatives.

        ``recorded`` is what that takes by keyword then.
        """
        if by_kernel():
            return self.on(group, cdf)(*args)
        return self.kernel(*args, group, **recorded) if self.spread else self.kernel(*args, **recorded)

    def _by_device(self, *args: Any) -> Any:
        kernel = self._faster.get(args[0].device.type)
        if kernel is not None and decides_by_device(args):
            return kernel(*args)
        return self.overload(*args)

    def serve(self, device: str, kernel: Callable[..., Any]) -> None:
        """Call this kernel in Python on a type of device. It is registered with torch as well, whose
        dispatcher takes as long to call it as a short row takes a GPU."""
        self._faster[device] = kernel
        self.compute = self._by_device

    def is_served(self, x: Tensor) -> bool:
        """Whether there is a kernel in Python for the device of x."""
        return x.device.type in self._faster
