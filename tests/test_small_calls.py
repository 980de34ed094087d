"""What a small call does besides its arithmetic: how many operators and functions of Python it calls.

The time of a small call is all overhead (`benchmarks/latency.py` measures it), and a shared machine measures
it badly. These counts do not depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import khot
from khot._core import eager
from khot._kernels import active

pytestmark = pytest.mark.skipif(
    not active()["cpu"].startswith("compiled"), reason="other kernels are made of operators"
)

K = 8


class Call(NamedTuple):
    name: str
    run: Callable[[Tensor], Tensor]
    operators: int
    functions: int  # with a small margin, because versions of Python and torch differ
    small: int  # the same with the extension for small calls


CALLS = [
    Call("soft_topk", lambda x: khot.soft_topk(x, K), 1, 47, 6),
    Call("sigmoid_topk", lambda x: khot.sigmoid_topk(x, K, tau=0.5), 1, 47, 7),
    Call("laplace_topk", lambda x: khot.laplace_topk(x, K), 1, 47, 7),
    Call("sparse_topk", lambda x: khot.sparse_topk(x, K), 1, 52, 7),
    Call("log_soft_topk", lambda x: khot.log_soft_topk(x, K), 1, 47, 6),
    Call("topk", lambda x: khot.topk(x, K).values, 1, 40, 7),
    Call("topk_mask", lambda x: khot.topk_mask(x, K), 2, 44, 6),
    Call("soft_rank", lambda x: khot.soft_rank(x, descending=True), 1, 33, 33),
    Call("soft_sort", lambda x: khot.soft_sort(x, descending=True), 1, 33, 33),
    Call("sample_khot", lambda x: khot.sample_khot(x, K), 11, 107, 70),
]
# what Tensor.tolist() calls, which copies nothing
FREE = {"aten::resolve_conj", "aten::resolve_neg"}


def scores() -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def operators(run: Callable[[], Any]) -> list[str]:
    """The operators that Python calls; those that other operators call are left out."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        run()
    events = profile.function_events or []
    return [e.name for e in events if e.cpu_parent is None and e.name not in FREE]


def functions(run: Callable[[], Any]) -> list[str]:
    """The functions written in Python that a call enters."""
    names: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a torch for which there is no extension for small calls."""
    for name in ("soft_topk", "topk", "topk_mask"):
        monkeypatch.setattr(eager, name, lambda *_: None)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_forward_calls_few_operators(call: Call) -> None:
    x = scores()
    call.run(x)  # the first call makes the tensors of k and tau
    found = operators(lambda: call.run(x))
    assert len(found) <= call.operators, found


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_forward_enters_few_functions(call: Call) -> None:
    x = scores()
    call.run(x)
    found = functions(lambda: call.run(x))
    assert len(found) <= call.functions, found


@pytest.mark.skipif(not eager.in_use(), reason="the extension for small calls is not in use")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_small_calls_enter_hardly_a_function(call: Call) -> None:
    x = scores()
    call.run(x)
    found = functions(lambda: call.run(x))
    assert len(found) <= call.small, found


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize("call", CALLS[:5], ids=lambda call: call.name)
def test_backward_calls_one_operator(call: Call) -> None:
    x = scores().requires_grad_()
    grad = torch.ones(4, 64)
    torch.autograd.grad(call.run(x), x, grad)
    y = call.run(x)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        torch.autograd.grad(y, x, grad)
    found = [e.name for e in profile.function_events or [] if e.name.startswith(("aten::", "khot::"))]
    assert found == ["khot::soft_topk_backward"]


# --------------------------------------------------------------------------- numbers as shared tensors


def test_calls_share_the_tensors_of_numbers() -> None:
    """A number's tensor is the same in every call, and the two zeros have their own."""
    from khot._core import arguments

    x = scores()
    first, second = (arguments.per_row(3, "k", x, low=0) for _ in range(2))
    assert first is second and first.item() == 3.0
    zero, negative = (arguments.constant(number, x) for number in (0.0, -0.0))
    assert not zero.signbit() and negative.signbit()


def test_a_number_first_met_in_inference_mode_can_be_saved_for_backward() -> None:
    x, tau = scores(), 0.123456789
    with torch.inference_mode():
        khot.soft_topk(x, K, tau=tau)
        khot.soft_rank(x, tau=tau)
    x.requires_grad_()
    (khot.soft_topk(x, K, tau=tau) + khot.soft_rank(x, tau=tau)).sum().backward()
    assert x.grad is not None and not x.grad.isnan().any()


@pytest.mark.parametrize("call", CALLS[:8], ids=lambda call: call.name)
def test_fake_tensors_meet_no_shared_tensor(call: Call) -> None:
    """In a fake mode every tensor has to be fake, also one that an earlier call has made."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    real = call.run(scores())
    with FakeTensorMode() as mode:
        y = call.run(mode.from_tensor(scores()))
    assert isinstance(y, FakeTensor) and y.shape == real.shape
    assert torch.equal(call.run(scores()), real)  # and the fake ones are not shared


@pytest.mark.parametrize("call", CALLS[:8], ids=lambda call: call.name)
def test_numbers_are_traced_as_they_were(call: Call) -> None:
    """A traced graph makes its own tensors; it holds none that other calls share."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = scores()
    graph = make_fx(call.run)(x)
    assert not [n for n in graph.graph.nodes if n.op == "get_attr"]
    assert torch.equal(graph(x), call.run(x))


def test_no_call_changes_a_shared_tensor() -> None:
    from khot._core import arguments

    x = scores().requires_grad_()
    shared = [arguments.per_row(n, "k", x.detach(), low=0) for n in (K, 1.0, 0.5)]
    for call in CALLS:
        y = call.run(x)
        if y.requires_grad:
            y.sum().backward()
    khot.soft_topk(x, K, tau=0.5, hard=True).sum().backward()
    khot.soft_count(x, 1.0, tau=0.5).sum().backward()
    assert [v.item() for v in shared] == [K, 1.0, 0.5] and [v._version for v in shared] == [0] * 3
