"""How an operator is registered with torch, and how it is called: eagerly, under transforms, and in a trace.

:func:`define` takes everything that torch has to know about an operator: its schema, its reference kernel,
the shapes of its results, and its :class:`Rule`, which says how it is differentiated. Faster kernels are
registered under the same name for their device (:mod:`khot._kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core import expansion
from khot._core.torch_internals import (
    any_requires_grad,
    apply_outside_transforms,
    below_autograd,
    decides_by_device,
    decompose_in_exports,
    derivative_levels,
    differentiable,
    forward_mode_is_on,
    run_as_is,
    transforms_are_on,
)
from khot.cdfs import CDF

__all__ = ["OPERATORS", "Operator", "Rule", "by_kernel", "define", "vmap_rows"]


class Rule:
    """How an operator is differentiated: in both modes, from the same saved tensors."""

    #: The indices of the outputs that are constants: integers, and numbers whose derivative another output
    #: carries.
    constants: ClassVar[tuple[int, ...]] = ()
    #: False for an operator whose results are constants; it has a rule only for vmap and for errors.
    differentiable: ClassVar[bool] = True
    #: False if the vjp accepts None instead of a gradient of zeros, which would take a launch each.
    zeros: ClassVar[bool] = True

    #: How many dims of its own each argument has after the batch dims, in the schema's order: 0 for one
    #: number per row, 1 for a row or its levels, 2 for a matrix. Arguments that the tuple does not reach have
    #: 0.
    own_dims: ClassVar[tuple[int, ...]] = (1,)

    #: True if the kernel is plain torch code with exact derivatives, which transforms under a trace may use.
    plain: ClassVar[bool] = False

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> tuple[Tensor | None, ...]:
        """The tensors that both modes need. Other values become attributes of ``ctx``.

        ``ctx.group`` is there: the names of the process groups that the rows are spread over; "" for whole
        rows.
        """
        return ()

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


def by_kernel() -> bool:
    """Whether a vjp may call a backward kernel, which autograd does not record."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


class Operator:
    """A registered operator, ready to be called.

    Attributes:
        name: the name after ``khot::``.
        kernel: the reference kernel, in plain torch for any device.
        overload: torch's own object for the operator.
        compute: what gives the results in eager mode.
        spread: the operator for rows that are spread over processes, and for users' CDFs; None if it was not
            asked for.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], rule: type[Rule] | None) -> None:
        self.name = name
        self.kernel = kernel
        self.overload = getattr(torch.ops.khot, name).default
        self.compute: Callable[..., Any] = self.overload
        self.spread: Operator | None = None
        self._faster: dict[str, Callable[..., Any]] = {}
        self.rule = rule
        self.function = None if rule is None else _function(self, rule)

    def __call__(self, *args: Any) -> Any:
        """Apply the operator in the cheapest form that has the derivatives which may be needed.

        Dynamo rejects a Function that defines jvp, so under a trace the registered operator is called, with
        the rule that :func:`define` registered for it. If a transform is traced as well, that rule would not
        be used, and the result is expanded instead (:mod:`khot._core.expansion`). In eager mode the Function
        adds forward mode. If no derivative can be needed, only its forward is called.
        """
        if torch.compiler.is_compiling():
            levels = 0 if self.function is None else derivative_levels()
            return self.overload(*args) if levels == 0 else self._expanded(levels, args)
        if self.function is None:
            return self.compute(*args)
        if transforms_are_on():
            return self.function.apply(*args)
        if (torch.is_grad_enabled() and any_requires_grad(*args)) or forward_mode_is_on():
            return apply_outside_transforms(self.function, args)
        return self.function.forward(*args)

    def on(self, group: str, cdf: CDF | None = None) -> Callable[..., Any]:
        """The operator for rows that are spread over these process groups ("": whole rows), and for this
        CDF. Faster kernels know whole rows and khot's own CDFs only."""
        if not group and (cdf is None or cdf.built_in):
            return self
        spread = self.spread
        assert spread is not None
        return lambda *args: spread(*args, group)

    def serve(self, device: str, kernel: Callable[..., Any]) -> None:
        """Call this kernel in Python on a type of device. It is registered with torch as well, whose
        dispatcher takes as long to call it as a short row takes a GPU."""
        self._faster[device] = kernel
        self.compute = self._by_device

    def is_served(self, x: Tensor) -> bool:
        """Whether there is a kernel in Python for the device of x."""
        return x.device.type in self._faster

    def _by_device(self, *args: Any) -> Any:
        kernel = self._faster.get(args[0].device.type)
        if kernel is not None and decides_by_device(args):
            return kernel(*args)
        return self.overload(*args)

    def _expanded(self, levels: int, args: tuple[Any, ...]) -> Any:
        """The registered operator under transforms that are traced with it."""
        if self.rule is not None and self.rule.plain:
            return self.kernel(*args)
        fixed = tuple(_constant(a.detach()) if isinstance(a, Tensor) else a for a in args)
        output = self.overload(*fixed)
        if self.rule is None or not self.rule.differentiable:
            return output
        if not isinstance(output, tuple):
            return expansion.expand(self.rule, levels, args, fixed, (output,))[0]
        return expansion.expand(self.rule, levels, args, fixed, output)


#: Every operator by its name, in the order of definition.
OPERATORS: dict[str, Operator] = {}


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    rule: type[Rule] | None = None,
    decomposition: Callable[..., Any] | None = None,
    spread: bool = False,
) -> Operator:
    """Register an operator on rows.

    Args:
        name: the name after ``khot::``.
        schema: its arguments and results, in torch's schema language.
        kernel: the reference kernel, for every device that has no faster one.
        fake: returns tensors with the shapes and dtypes of the results, without their values.
        rule: how the operator is differentiated; None if it is not differentiable.
        decomposition: the same in few operations that other formats have, such as ONNX; None if there is no
            such form. It must not read values.
        spread: whether the same kernel also serves rows that are spread over processes and users' CDFs, as
            ``khot::reference_NAME``, which has the names of the process groups as one more argument.
    """
    full = f"khot::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "CompositeExplicitAutograd")(kernel)
    torch.library.register_fake(full, fake)
    operator = OPERATORS[name] = Operator(name, kernel, rule)
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
        arguments, results = schema.replace("=None", "").rsplit(") ->", 1)
        operator.spread = define(
            f"reference_{name}",
            f"{arguments}, str group) ->{results}",
            kernel,
            lambda *args: fake(*args[:-1]),
            None if rule is None else _for_shards(rule),
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
            return rule.vjp(ctx, *grads)

        @staticmethod
        @differentiable
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return rule.jvp(ctx, *tangents)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return vmap_rows(Applied.apply, rule.own_dims, info, in_dims, args)

    # A transform of a compiled function runs the Function as it is, and Dynamo is asked for its frames.
    run_as_is(Applied.forward, Applied.setup_context, Applied.backward, Applied.jvp, Applied.vmap)
    return Applied


@torch.library.custom_op("khot::constant", mutates_args=())
def _constant(x: Tensor) -> Tensor:
    """A copy that carries no tangent; ``detach`` removes what reverse mode needs, but keeps the tangent."""
    return x.clone()


@_constant.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_constant.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Any]:
    return _constant(x), in_dims[0]


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
