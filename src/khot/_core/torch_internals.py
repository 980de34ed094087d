"""torch's private names. No other file uses any, so that a new version of torch can break only this one.

None of them has a public counterpart (torch 2.6 to 2.14). What torch 2.6 lacks has a second way here, which
asks for the name and not for the version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._C._functorch as functorch
import torch.distributed as dist
from torch import Tensor
from torch._C import _autograd
from torch._C._dynamo import eval_frame
from torch._decomp import register_decomposition
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DispatchMode",
    "any_requires_grad",
    "apply_outside_transforms",
    "as_usual",
    "bag_gradient",
    "bag_products",
    "bag_sums",
    "below_autograd",
    "collective_device",
    "copy_each",
    "decides_by_device",
    "decompose_in_exports",
    "derivative_levels",
    "differentiable",
    "forward_mode_is_on",
    "has_cpu_kernel",
    "is_exporting",
    "is_recomputation",
    "is_transformed",
    "leave_graph",
    "process_group",
    "run_as_is",
    "save_in_exports",
    "transforms_are_on",
    "transforms_are_traced",
    "within_backward",
    "without_modes",
    "zero_each",
    "vmap_changes_draws",
]

# A context in which an operator's own autograd rule is skipped. Inside a Function that rule is not needed,
# and it costs more than the kernel for a small row. Views are not recorded, either: torch would refuse to
# change a result in place that is a view of a kernel's buffer.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def _any_requires_grad(*args: Any) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


# Whether any argument is a tensor that requires a gradient; a loop in Python takes five times as long, and is
# there for torch 2.6, which lacks the function.
any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_requires_grad)

# A context whose method `__torch_dispatch__` sees every operation.
DispatchMode = TorchDispatchMode

# A context in which new tensors have data, also within a FakeTensorMode.
without_modes = _disable_current_modes


# Operations in place on each of a list of tensors, which a GPU takes in few launches.
copy_each, zero_each = torch.ops.aten._foreach_copy_.default, torch.ops.aten._foreach_zero_.default

# Whether a transform of torch.func is being applied: a function without arguments.
transforms_are_on = torch._C._are_functorch_transforms_active


@functools.cache
def has_cpu_kernel(operator: str) -> bool:
    """Whether a kernel was registered for the CPU under the operator's full name."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")


# Whether a tensor represents a batch, or a value with its tangent, under a transform of torch.func.
is_transformed = functorch.is_functorch_wrapped_tensor


def as_usual() -> bool:
    """Whether operators only compute: no trace, no transform of torch.func and no dispatch mode sees them."""
    if torch.compiler.is_compiling():  # first, because Dynamo cannot trace the others
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not transforms_are_on()


# The mode of the vmap that is older than torch.func, for is_grads_batched. To ask for it by its name takes
# longer than all else that is asked before a kernel is called.
_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")


def decides_by_device(args: tuple[Any, ...]) -> bool:
    """Whether torch's dispatcher would choose an operator's kernel for these arguments by their device alone,
    and do nothing else: nothing sees or records the call, and no tensor is of another kind."""
    if not as_usual() or torch._C._len_torch_function_stack() or torch.autograd.profiler._is_profiler_enabled:
        return False
    if torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE):
        return False
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is torch.nn.Parameter:
            if a.is_neg() or a._is_zerotensor():  # values that are not in memory
                return False
        elif isinstance(a, Tensor):
            return False
    return True


def vmap_changes_draws(rows: Tensor) -> bool:
    """Whether a torch.func.vmap that is being applied makes a draw from these rows differ from one outside.

    It does not if the examples share the rows and, by ``randomness="same"``, the draw.
    """
    if not transforms_are_on():
        return False
    vmaps = [
        functorch.CVmapInterpreterPtr(level)
        for level in functorch.get_interpreter_stack() or ()
        if level.key() == functorch.TransformType.Vmap
    ]
    shared = all(vmap.randomness() == functorch.RandomnessType.Same for vmap in vmaps)
    return bool(vmaps) and (is_transformed(rows) or not shared)


def _is_exporting() -> bool:
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


# Whether torch.export traces; torch 2.6 lacks the function, and its strict export is taken for a compilation.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _is_exporting)


def forward_mode_is_on() -> bool:
    """Whether tensors may carry tangents, which ``requires_grad`` does not show."""
    return forward_ad._current_level >= 0


def within_backward() -> bool:
    """Whether a backward pass is running, outside a trace."""
    if torch.compiler.is_dynamo_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    return not torch.compiler.is_compiling()


_hooks_on_top: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def is_recomputation() -> bool:
    """Whether activation checkpointing computes again what it has computed with gradients before.

    That is what it does with ``use_reentrant=False``, for the tensors that it did not save: hooks for saved
    tensors are on then, its own or those of something within it, such as another checkpointing. With
    ``use_reentrant=True`` its first pass is without gradients, and the second one is not a repetition of it:
    that is the backward pass of a Function of its own, within which others may have their first pass.
    """
    if not within_backward():
        return False
    if _hooks_on_top is not None:  # else torch 2.6
        hooks = _hooks_on_top(False)
        if hooks is None:
            return False
        if "_recomputation_hook" in getattr(hooks[0], "__qualname__", ""):
            return True
    return "Checkpoint" not in torch._C._current_autograd_node().name()


def derivative_levels() -> int:
    """How many derivatives are being taken while Dynamo traces: the transforms of torch.func except vmap, and
    forward mode. Dynamo guards both states, so that a trace is used only where the number is the same."""
    stack = functorch.get_interpreter_stack() or []
    kinds = functorch.TransformType
    levels = sum(each.key() in (kinds.Grad, kinds.Jvp) for each in stack)
    if levels == 0 and forward_mode_is_on():  # a jvp of torch.func opens a level of forward mode as well
        levels = 1
    return levels


def transforms_are_traced() -> bool:
    """Whether any transform of torch.func, or forward mode, is on while Dynamo traces."""
    return bool(functorch.get_interpreter_stack()) or forward_mode_is_on()


# What torch.compiler.assume_constant_result sets; calling that would import Dynamo, which takes a second.
derivative_levels._dynamo_marked_constant = True  # type: ignore[attr-defined]
transforms_are_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_as_is(*functions: Callable[..., Any]) -> None:
    """Let Dynamo run these functions and what they call without looking at their code.

    ``torch.compiler.disable`` does the same, but imports Dynamo, and costs time in every call.
    """
    frames: Any = eval_frame  # the annotations of one version do not have the other's names
    if not hasattr(frames, "set_code_exec_strategy"):  # torch 2.6
        for function in functions:
            frames.skip_code(function.__code__)
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, skip)


def leave_graph(why: str) -> None:
    """End the graph that Dynamo traces; with ``fullgraph=True`` its error has this text."""
    try:
        torch._dynamo.graph_break(msg=why)
    except TypeError:  # torch 2.6 takes no text
        torch._dynamo.graph_break()


def apply_outside_transforms(function: type[Function], args: tuple[Any, ...]) -> Any:
    """The same as ``function.apply`` outside of transforms, without 10 µs for binding arguments."""
    for a in args:
        if isinstance(a, Tensor) and is_transformed(a):
            args = unwrap_dead_wrappers(args)
            break
    return super(Function, function).apply(*args)  # type: ignore[misc]


class _Constants:
    """A Function's context in which the saved tensors carry no tangents of the given level."""

    def __init__(self, ctx: Any, level: int) -> None:
        self.ctx = ctx
        self.saved_tensors = _without_tangents(ctx.saved_tensors, level)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def _without_tangents(values: tuple[Any, ...], level: int) -> tuple[Any, ...]:
    return tuple(
        functorch._unwrap_for_grad(value, level) if isinstance(value, Tensor) else value for value in values
    )


def differentiable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's jvp for use inside other forward modes, such as a jacfwd of a jacfwd.

    torch switches every forward mode off while it calls a jvp, so that the derivative of the rule itself
    would be missing. Here the outer ones are on, and the tensors carry no tangents of the inner one.
    """

    @functools.wraps(jvp)
    def run(ctx: Any, *tangents: Any) -> Any:
        if not transforms_are_on():  # torch has one forward mode outside of torch.func
            return jvp(ctx, *tangents)
        level = functorch.maybe_current_level()
        assert level is not None  # because a transform is on
        with _set_fwd_grad_enabled(True):
            return jvp(_Constants(ctx, level), *_without_tangents(tangents, level))

    return run


def decompose_in_exports(overload: Any, function: Callable[..., Any]) -> None:
    """Let exporters that do not know the operator, such as ONNX's, use the function's operations instead.

    ``torch.compile`` and ``torch.export`` keep the operator.
    """
    register_decomposition(overload)(function)


def save_in_exports(named_tuple: type[Any], name: str) -> None:
    """Let exported programs that return the named tuple be saved; it is saved under that name."""
    _pytree._register_namedtuple(named_tuple, serialized_type_name=name)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """A device that the group's backend can communicate from."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def bag_sums(weights: Tensor, matrix: Tensor, indices: Tensor) -> Tensor:
    """The sums Σ_j weights_bj matrix[indices_bj], (B, d): ``torch.nn.functional.embedding_bag``, whose checks
    take as long as a launch."""
    count, k = indices.shape
    starts = torch.arange(0, count * k, k, device=indices.device)
    entries, of_each = indices.reshape(-1).contiguous(), weights.reshape(-1).contiguous()
    return torch.embedding_bag(matrix, entries, starts, False, 0, False, of_each)[0]


def bag_products(vectors: Tensor, matrix: Tensor, indices: Tensor) -> Tensor:
    """The products ⟨vectors_b, matrix[indices_bj]⟩, (B, k), without these rows in memory: the derivative of
    ``torch.nn.functional.embedding_bag`` in its weights."""
    count, k = indices.shape
    entries = indices.reshape(-1).contiguous()
    bags = torch.arange(count, device=entries.device)
    # where the bags begin is asked only without the bag of each entry
    products = torch.ops.aten._embedding_bag_per_sample_weights_backward.default(
        vectors, matrix, entries, bags, bags.repeat_interleave(k, output_size=count * k), 0
    )
    return products.view(count, k)


def bag_gradient(weights: Tensor, vectors: Tensor, indices: Tensor, n: int) -> Tensor:
    """The matrix (n, d) whose row indices_bj has the sum of weights_bj vectors_b: the derivative of
    ``torch.nn.functional.embedding_bag`` in its matrix."""
    count, k = indices.shape
    bags = torch.arange(count, device=indices.device)
    # the sizes and maxima of the bags serve other modes than sums: these are not theirs
    return torch.ops.aten._embedding_bag_dense_backward.default(
        vectors,
        indices.reshape(-1).contiguous(),
        bags.repeat_interleave(k, output_size=count * k),
        bags,
        bags[:0],
        n,
        False,
        0,
        weights.reshape(-1).contiguous(),
    )
