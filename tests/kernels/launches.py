"""Launches without Python, beside Triton's own and the ordinary way: run by `test_native.py`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import compiler
from triton.runtime import driver

import khot
import recorded
from answers import answers
from kernels.launching import device, ordinary, prepare, same, scores, seen, with_gradient
from khot._core import eager
from khot._kernels import gpu
from khot._kernels.triton import launch, native, selectable

__all__ = ["device", "seen"]  # fixtures


def test_triton_would_start_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel that these operators launch: function, grid, block, shared memory, stream and every
    byte of the parameters, those included that Triton appends."""
    own, checked = launch.start, []

    def both(variant: launch.Variant, programs: int, given: tuple[Any, ...]) -> None:
        own(variant, programs, given)  # compiles it
        before = recorded.starts()
        with ordinary():
            own(variant, programs, given)
        wanted = recorded.Launch()
        assert eager.start(variant.table, programs, given)
        assert recorded.starts() == before + 2
        assert recorded.Launch() == wanted and wanted.attributes == 0
        checked.append(variant.kernel.__name__)

    monkeypatch.setattr(launch, "start", both)
    x, seed = scores(512, 64), torch.tensor(-(1 << 62) + 5)
    one = torch.ones((), dtype=torch.float64)
    hi, lo = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    gpu.load("soft_topk")(x, one * 8, one, "logistic", 0.0, "y")
    gpu.load("soft_topk")(x[:, 1:], hi + 8, one, "laplace", 0.0, "log")
    gpu.load("soft_topk")(scores(2, 300_000), one * 8, one, "logistic", 0.0, "y")
    gpu.load("soft_topk_backward")(x.mT.contiguous().mT, one * 0, x, hi, lo, one, "logistic", 0.0, "y")
    gpu.load("topk_mask")(x, one * 8)
    gpu.load("selectable")(x, 3.0)
    gpu.load("laplace_count")(x.bfloat16(), x.bfloat16(), one)
    gpu.load("uniform")(seed, 4, 8, 1 << 40)
    whole, best = torch.zeros((), dtype=torch.int64), torch.zeros(512, 5, dtype=torch.int64)
    given = (torch.zeros(65, 64, dtype=torch.int64), x, x[:, :5], best, whole, whole)
    gpu.load("count_distances")(*given, None, None, None, None)
    gpu.load("count_distances")(*given, x[:, 0] > 0, x[:, :4], x[:, :3], x[:, :4] > 0)
    assert len(set(checked)) >= 10 and len(checked) >= 13


def test_kernels_that_triton_compiles_are_plain() -> None:
    """Those of the other tests are not compiled."""
    types = ("*fp32", "i32", "*fp64", "i32", "i32", "fp32", "fp32", "constexpr", "constexpr")
    (kernel,) = selectable.KERNELS
    constants = {"TOGETHER": 1, "WIDTH": 64}
    source = compiler.ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constants)
    assert native._is_plain(compiler.compile(source, driver.active.get_current_target()).metadata)


def test_a_kernel_with_more_than_parameters_takes_tritons_own_way() -> None:
    class Metadata:
        num_ctas, num_warps, shared = 1, 4, 0
        launch_cooperative_grid = launch_pdl = False
        global_scratch_size = profile_scratch_size = 0
        target = driver.active.get_current_target()

    assert native._is_plain(Metadata())
    for name, value in (
        ("num_ctas", 2),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
        ("global_scratch_size", 8),
        ("profile_scratch_size", 8),
        ("shared", native.MOST_SHARED + 1),
        ("instrumentation_mode", "gsan"),
    ):
        other = Metadata()
        setattr(other, name, value)
        assert not native._is_plain(other), name


def test_another_triton_takes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(native, "use", lambda *given: used.append(given))
    native._look.__wrapped__()
    assert used == [(recorded.address("cuLaunchKernel"), native.SCRATCH[recorded.version()])]
    monkeypatch.setattr(native.triton, "__version__", "3.99.0")
    native._look.__wrapped__()
    assert len(used) == 1


def test_hooks_and_errors_of_the_driver_take_the_ordinary_way(seen: list[recorded.Launch]) -> None:
    x = scores(6, 32)
    prepare(lambda x: khot.soft_topk(x, 3), x), prepare(lambda x: khot.soft_topk(x, 3), x)
    told: list[Any] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(told.append)
        with answers() as answered:
            khot.soft_topk(x, 3)
        hook.remove(told.append)
        assert answered == [False]
    assert len(told) == 2
    recorded.run_instead(lambda: 201)
    before = recorded.starts()
    with answers() as answered, pytest.raises(RuntimeError, match="an error of the driver"):
        khot.soft_topk(x, 3)
    assert answered == [False] and recorded.starts() == before + 3  # prepared, remembered, and Triton's


def test_the_node_is_like_any_other(seen: list[recorded.Launch]) -> None:
    x = scores(6, 32).requires_grad_()
    call = lambda x: khot.soft_topk(x, 3)  # noqa: E731
    prepare(call, x)
    with answers() as answered:
        y = call(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        changed = x * 1
        y = call(changed)
        changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        y = call(x)
        rows = torch.autograd.grad(y, x, torch.eye(192).view(192, 6, 32), is_grads_batched=True)[0]
        assert rows.shape == (192, 6, 32)
    assert all(answered)


def test_threads_share_what_is_prepared(seen: list[recorded.Launch]) -> None:
    x = scores(16, 32)
    prepare(lambda x: khot.soft_topk(x, 3), x)
    wanted = with_gradient(lambda x: khot.soft_topk(x, 3), x, torch.ones_like(x))
    found: list[bool] = []

    def run() -> None:
        for _ in range(20):
            found.append(same(with_gradient(lambda x: khot.soft_topk(x, 3), x, torch.ones_like(x)), wanted))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 80


def test_too_many_prepared_launches_are_forgotten(seen: list[recorded.Launch]) -> None:
    """And prepared again."""
    x = scores(6, 32)
    eager.forget(), launch.forget()
    with answers() as answered:
        khot.soft_topk(x, 3), khot.soft_topk(x, 3)
        for rows in range(1, 4_097):
            khot.topk_mask(torch.empty(rows, 1), 1)
        khot.soft_topk(x, 3), khot.soft_topk(x, 3)
    assert answered == [False, True, False, True]


def test_profiles_show_the_operators(seen: list[recorded.Launch]) -> None:
    x = scores(6, 32).requires_grad_()
    prepare(lambda x: khot.soft_topk(x, 3), x)
    khot.topk_mask(x, 3)
    with answers() as answered, torch.autograd.profiler.profile(use_kineto=False) as profile:
        khot.soft_topk(x, 3).sum().backward()
        khot.topk_mask(x, 3)
    assert answered == [True]
    shown = {event.name for event in profile.function_events or []}
    assert {"khot::soft_topk", "khot::soft_topk_backward", "khot::topk_mask"} <= shown
