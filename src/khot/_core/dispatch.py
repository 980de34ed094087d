"""How an operator is registered with torch, and how it is called: eagerly, under transforms, and in a trace.

:func:`define` takes everything that torch has to know about an operator: its reference kernel, whose
annotations are its schema, the shapes of its results, and its :class:`Rule`, which says how it is
differentiated. Faster kernels are registered under the same name for their device (:mod:`khot._kernels`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core.precision import wide_dtype
from khot._core.torch_internals import (
    below_autograd,
    decompose_in_exports,
    differentiable,
    forward_mode_is_on,
    run_as_is,
    transforms_are_on,
)
from khot._core.ways import Operator

__all__ = ["OPERATORS", "Rule", "define", "gradient", "vmap_rows"]


class Rule:
    """How an operator is differentiated: in both modes, from the same saved tensors."""

    #: The indices of the outputs that are constants: integers, and numbers whose derivative another output
    #: carries.
    constants: ClassVar[tuple[int, ...]] = ()
    #: False for an operator whose results are constants; it has a rule only for vmap and for errors.
    differentiable: ClassVar[bool] = True
    #: True if the vjp needs zeros in the place of gradients that nobody gave, which take a launch each, as
    #: those of constants do. Otherwise it gets None, but not for all results.
    zeros: ClassVar[bool] = False

    #: How many dims of its own each argument has after the batch dims, in the schema's order: 0 for one
    #: number per row, 1 for a row or its levels, 2 for a matrix. Arguments that the tuple does not reach have
    #: 0.
    own_dims: ClassVar[tuple[int, ...]] = (1,)

    #: True if the kernel is plain torch code with exact derivatives, which transforms under a trace may use.
    plain: ClassVar[bool] = False

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> tuple[Tensor | None, ...]:
        """The tensors that both modes need: the inputs, if no more is said. Other values become attributes of
        ``ctx``.

        ``ctx.group`` is there: the names of the process groups that the rows are spread over; "" for whole
        rows.
        """
        return inputs

    @staticmethod
    def vjp(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Reverse mode: the gradients of the inputs from those of the outputs."""
        raise NotImplementedError

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode: the tangents of the outputs from those of the inputs."""
        raise NotImplementedError

    @staticmethod
    def examine(outputs: Any, *inputs: Any) -> None:
        """Raise if the outputs show that an input was out of its range. Rows that may be spread have their
        group as the last input."""


def gradient(
    ctx: Any, index: int, found: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """The gradient of the argument with this index, which may have been broadcast; None unless it is
    wanted."""
    if found is None or not ctx.needs_input_grad[index]:
        return None
    return found.sum_to_size(shape).to(dtype)


def _for_shards(rule: type[Rule]) -> type[Rule]:
    """The rule of the same operator with the group as one more input."""

    class ForShards(rule):  # type: ignore[misc, valid-type]
        @staticmethod
        def save(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> tuple[Tensor | None, ...]:
            ctx.group = inputs[-1]
            return rule.save(ctx, inputs[:-1], outputs)

        @staticmethod
        def vjp(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return *rule.vjp(ctx, *grads), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return rule.jvp(ctx, *tangents[:-1])

    return ForShards


#: Every operator by its name, in the order of definition.
OPERATORS: dict[str, Operator] = {}


#: What the annotations of a reference kernel are in torch's schema language, where it has another word.
_WORDS = {"Tensor | None": "Tensor?", "int": "SymInt", "torch.dtype": "ScalarType"}


def _arguments(kernel: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a reference kernel takes as an operator: not what it takes by keyword alone, which is chosen for
    it, and not the group of rows that need not be spread."""
    parameters = inspect.signature(kernel).parameters.values()
    return [p for p in parameters if p.kind is not p.KEYWORD_ONLY and (p.name, p.default) != ("group", "")]


def _schema(kernel: Callable[..., Any]) -> str:
    """The schema that the annotations of a reference kernel say, in torch's language."""
    arguments = [
        f"{_WORDS.get(p.annotation, p.annotation)} {p.name}" + ("=None" if p.default is None else "")
        for p in _arguments(kernel)
    ]
    count = str(inspect.signature(kernel).return_annotation).count("Tensor")
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(arguments)}) -> {results}"


def _like(kernel: Callable[..., Any], results: str) -> Callable[..., Any]:
    """What makes results without values, from the words that :func:`define` takes for them."""
    names = [p.name for p in _arguments(kernel)]
    words = [result.strip().partition(" ") for result in results.split(",")]
    asked = [(names.index(what.removesuffix("[row]")), "[row]" in what, dtype) for what, _, dtype in words]

    def made(like: Tensor, by_row: bool, dtype: str) -> Tensor:
        of_device = {"": like.dtype, "wide": wide_dtype(like.device)}
        found = of_device[dtype] if dtype in of_device else getattr(torch, dtype)
        return like.new_empty(like.shape[:-1] if by_row else like.shape, dtype=found)

    def fake(*args: Any) -> Any:
        found = tuple(made(args[at], by_row, dtype) for at, by_row, dtype in asked)
        return found[0] if len(found) == 1 else found

    return fake


def _with_own_results(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with results as compilers expect them of an operator: contiguous, and none a part of
    another tensor."""

    def own(result: Tensor) -> Tensor:
        whole = result.untyped_storage().nbytes() == result.nbytes
        return result.contiguous() if whole else result.clone(memory_format=torch.contiguous_format)

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        found = kernel(*args)
        if isinstance(found, Tensor):
            return own(found)
        return found and tuple(map(own, found))  # None from a kernel that writes into an argument

    return run


def define(
    name: str,
    kernel: Callable[..., Any],
    results: str | Callable[..., Any],
    rule: type[Rule] | None = None,
    *,
    schema: str = "",
    decomposition: Callable[..., Any] | None = None,
    spread: bool = False,
) -> Operator:
    """Register an operator on rows.

    Args:
        name: the name after ``khot::``.
        kernel: the reference kernel, for every device that has no faster one. Its annotations are the schema.
        results: the shapes and dtypes of the results, separated by commas: "x" for those of the argument x,
            "x[row]" for one number for each row of x, and after a space another dtype, by torch's name, or
            "wide" for that of thresholds on the device. Or a function of the arguments that returns tensors
            with the shapes and dtypes, without their values.
        rule: how the operator is differentiated; None if it is not differentiable.
        schema: in torch's language, where the annotations do not say it.
        decomposition: the same in few operations that other formats have, such as ONNX; None if there is no
            such form. It must not read values.
        spread: whether the same kernel also serves rows that are spread over processes and users' CDFs, as
            ``khot::reference_NAME``, which has the names of the process groups as one more argument.
    """
    full = f"khot::{name}"
    fake = results if callable(results) else _like(kernel, results)
    schema = schema or _schema(kernel)
    torch.library.define(full, schema)
    torch.library.impl(full, "CompositeExplicitAutograd")(_with_own_results(kernel))
    torch.library.register_fake(full, fake)
    operator = OPERATORS[name] = Operator(name, kernel, rule)
    if rule is not None:
        operator.function = _function(operator, rule)
    if decomposition is not None:
        decompose_in_exports(operator.overload, decomposition)
    if rule is not None:
        if rule.differentiable:

            def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                ctx.group = ""
                ctx.save_for_backward(*rule.save(ctx, inputs, output))

            torch.library.register_autograd(full, rule.vjp, setup_context=setup)

        def batch(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return vmap_rows(operator.overload, rule.own_dims, info, in_dims, args)

        torch.library.register_vmap(full, batch)
    if spread:
        before, after = schema.replace("=None", "").rsplit(") ->", 1)
        operator.spread = define(
            f"reference_{name}",
            kernel,
            lambda *args: fake(*args[:-1]),
            None if rule is None else _for_shards(rule),
            schema=f"{before}, str group) ->{after}",
        )
    return operator


def _function(operator: Operator, rule: type[Rule]) -> type[Function]:
    """The operator as an autograd Function, which has forward mode; a registered rule cannot have it."""

    class Applied(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with below_autograd():
                output = operator.compute(*args)
            rule.examine(output, *args)
            return output

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if not rule.differentiable:
                ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))
                return
            ctx.group = ""
            saved = rule.save(ctx, inputs, output)
            ctx.save_for_backward(*saved)
            transformed = transforms_are_on()
            if transformed or forward_mode_is_on():
                ctx.save_for_forward(*saved)
            if not rule.zeros:
                ctx.set_materialize_grads(transformed)
            if rule.constants:
                ctx.mark_non_differentiable(*[output[i] for i in rule.constants if i < len(output)])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            return rule.vjp(ctx, *grads)

        @staticmethod
        @differentiable
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return rule.jvp(ctx, *tangents) if rule.differentiable else None

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return vmap_rows(Applied.apply, rule.own_dims, info, in_dims, args)

    # A transform of a compiled function runs the Function as it is, and Dynamo is asked for its frames.
    run_as_is(Applied.forward, Applied.setup_context, Applied.backward, Applied.jvp, Applied.vmap)
    return Applied


def vmap_rows(
    function: Callable[..., Any],
    own_dims: tuple[int, ...],
    info: Any,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
) -> tuple[Any, Any]:
    """The vmap rule of an operator on rows: the mapped dimension becomes one more batch dim in front.

    The first argument has all batch dims. Each of the others has either all of them or fewer, which
    broadcast; its own dims follow them.
    """
    own = (*own_dims, *(0,) * (len(args) - len(own_dims)))
    x, size = args[0], info.batch_size
    batch = x.dim() - own[0] - (in_dims[0] is not None)  # before this dim is added

    def align(value: Any, dim: int | None, own: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if dim is not None:
            value = value.movedim(dim, 0)
            return value.reshape(size, *(1,) * (batch - (value.dim() - 1 - own)), *value.shape[1:])
        # a value with fewer batch dims broadcasts, but kernels count on batch dims that are all there
        return value.expand(size, *value.shape) if own and value.dim() - own == batch else value

    out = function(*map(align, args, in_dims, own))
    return out, (0,) * len(out) if isinstance(out, tuple) else 0
