"""SoftTopK and Anneal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import khot
from drawn import normal as scores
from khot.nn import Anneal, SoftTopK


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform", khot.cdfs.Power(1.5)], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_is_the_soft_operator_in_training_and_the_hard_one_in_eval(cdf: str, dim: int) -> None:
    x = scores(5, 7)
    layer = SoftTopK(2.3, dim, tau=0.6, cdf=cdf)
    torch.testing.assert_close(layer(x), khot.soft_topk(x, 2.3, dim, tau=0.6, cdf=cdf), rtol=0, atol=0)
    torch.testing.assert_close(layer.eval()(x), khot.topk_mask(x, 2.3, dim), rtol=0, atol=0)


def test_soft_eval() -> None:
    x = scores(3, 5)
    layer = SoftTopK(2, soft_eval=True)
    torch.testing.assert_close(layer.eval()(x), layer.train()(x), rtol=0, atol=0)


def test_straight_through_is_hard_forward_and_soft_backward() -> None:
    x, y = scores(3, 5).requires_grad_(), scores(3, 5).requires_grad_()
    weight = scores(3, 5, seed=1)
    hard, soft = SoftTopK(2, hard=True)(x), SoftTopK(2)(y)
    torch.testing.assert_close(hard, khot.topk_mask(x, 2))
    (hard * weight).sum().backward()
    (soft * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


def test_starts_at_the_given_values() -> None:
    layer = SoftTopK(3, tau=0.02, learnable_tau=True, learnable_k=True, dtype=torch.float64)
    torch.testing.assert_close(layer.k().item(), 3.0, rtol=1e-15, atol=0)
    torch.testing.assert_close(layer.tau().item(), 0.02, rtol=1e-14, atol=0)
    assert {name for name, _ in layer.named_parameters()} == {"k.raw", "tau.raw"}
    assert not list(SoftTopK(3).parameters())


def test_learned_values_stay_in_range_however_far_they_are_pushed() -> None:
    layer = SoftTopK(2, tau=0.5, learnable_tau=True, learnable_k=True)
    x = scores(1, 4).float()
    for sign in (1.0, -1.0):
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for _ in range(60):
            optimizer.zero_grad()
            (sign * (layer.k() + layer.tau())).backward()
            optimizer.step()
        assert layer.k() > 0 and layer.tau() > 0
        torch.testing.assert_close(layer(x).sum().item(), min(layer.k().item(), 4.0), rtol=1e-5, atol=1e-6)


def test_rows_with_fewer_entries_than_k_get_all_and_teach_k_nothing() -> None:
    layer = SoftTopK(3, learnable_k=True, dtype=torch.float64)
    x = scores(2, 5)
    mask = torch.tensor([[True, True, False, False, False], [True] * 5])
    y = layer(x, mask)
    torch.testing.assert_close(y[0], mask[0].double(), rtol=0, atol=0)
    torch.testing.assert_close(y[1].sum().item(), 3.0, rtol=1e-12, atol=0)
    weight = scores(5, seed=1)
    assert torch.autograd.grad(y[0] @ weight, layer.k.raw, retain_graph=True)[0] == 0
    assert torch.autograd.grad(y[1] @ weight, layer.k.raw)[0] != 0
    torch.testing.assert_close(
        layer.eval()(x, mask), torch.stack([mask[0].double(), khot.topk_mask(x[1], 3)])
    )
    torch.testing.assert_close(layer(x[:, :2]), torch.ones(2, 2, dtype=torch.float64), rtol=0, atol=0)


def test_a_padded_batch_is_its_rows() -> None:
    x, lengths = scores(4, 6), torch.tensor([6, 4, 1, 0])
    mask = torch.arange(6) < lengths[:, None]
    padded = torch.where(mask, x, math.nan)
    for layer in (SoftTopK(2, tau=0.5), SoftTopK(2, tau=0.5).eval()):
        y = layer(padded, mask)
        for row, length, got in zip(x, lengths.tolist(), y, strict=True):
            torch.testing.assert_close(got[:length], layer(row[:length]))
            assert (got[length:] == 0).all()


def test_refuses() -> None:
    with pytest.raises(TypeError, match="k must be a number"):
        SoftTopK(Anneal(1, 2, 3), learnable_k=True)
    with pytest.raises(IndexError, match="dim"):
        SoftTopK(1, dim=2)(scores(2, 2))


# -------------------------------------------------------------------------------------- Anneal

COURSES = {
    "linear": [2.0, 1.625, 1.25, 0.875, 0.5, 0.5],
    # (2 + ½)/2 ± (2 − ½)/2 · cos(π/4)
    "cosine": [2.0, 1.25 + 0.75 / math.sqrt(2), 1.25, 1.25 - 0.75 / math.sqrt(2), 0.5, 0.5],
    # ½ + (2 − ½)·(1, ¾, ½, ¼)³
    "cubic": [2.0, 0.5 + 1.5 * 27 / 64, 0.5 + 1.5 / 8, 0.5 + 1.5 / 64, 0.5, 0.5],
    "exponential": [2.0, math.sqrt(2), 1.0, math.sqrt(0.5), 0.5, 0.5],
}


@pytest.mark.parametrize("schedule", COURSES)
def test_anneal_goes_its_course_and_stays_at_the_end(schedule: str) -> None:
    value, course = Anneal(2.0, 0.5, 4, schedule), []
    for _ in range(6):
        course.append(value().item())
        value.step()
    assert course == pytest.approx(COURSES[schedule], rel=1e-14)


def test_anneal_waits_before_it_goes() -> None:
    value, course = Anneal(2.0, 0.5, 6, "linear", wait=2), []
    for _ in range(8):
        course.append(value().item())
        value.step()
    assert course == pytest.approx([2.0, 2.0, *COURSES["linear"]], rel=1e-14)
    assert repr(value) == "Anneal(2.0, 0.5, steps=6, schedule='linear', wait=2)"
    with pytest.raises(ValueError, match="steps must be at least 7, but got 6"):
        Anneal(2.0, 0.5, 6, wait=6)
    with pytest.raises(TypeError, match="wait must be an int"):
        Anneal(2.0, 0.5, 6, wait=0.5)  # type: ignore[arg-type]


def test_layers_share_an_anneal_and_resume() -> None:
    k = Anneal(6.0, 2.0, 4, "linear")
    first, second = SoftTopK(k), SoftTopK(k, cdf="normal")
    x = scores(1, 8)
    k.step()
    for layer in (first, second):
        torch.testing.assert_close(layer(x).sum().item(), 5.0, rtol=1e-12, atol=0)
    fresh = SoftTopK(Anneal(6.0, 2.0, 4, "linear"))
    fresh.load_state_dict(first.state_dict())
    torch.testing.assert_close(fresh(x), first(x), rtol=0, atol=0)


def test_stepping_does_not_recompile() -> None:
    torch.compiler.reset()
    tau = Anneal(1.0, 0.1, 10, "exponential")
    layer = SoftTopK(2, tau=tau)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled, x = torch.compile(layer, fullgraph=True, backend=count), scores(2, 6)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), layer(x))
        tau.step()
    assert len(graphs) == 1


def test_anneal_refuses() -> None:
    with pytest.raises(ValueError, match="end must be > 0 for the exponential schedule, but got 0"):
        Anneal(1, 0, 3, "exponential")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["k", "tau"])
def test_loads_a_learned_number_that_was_saved_without_a_dim(name: str, assign: bool) -> None:
    """Its parameter has one element, because FSDP2 cannot share out a 0-dim one; it used to be 0-dim."""
    model = torch.nn.Sequential(SoftTopK(2.5, learnable_k=True, learnable_tau=True))
    saved = {key: x.detach() + 0.5 for key, x in model.state_dict().items()}
    assert {x.shape for x in saved.values()} == {torch.Size([1])}
    old = {key: x.squeeze(0) if f".{name}." in key else x for key, x in saved.items()}
    assert sum(x.dim() == 0 for x in old.values()) == 1
    model.load_state_dict(old, assign=assign)
    for key, x in model.state_dict().items():
        assert x.equal(saved[key])
    value = getattr(model[0], name)()
    assert value.shape == () and value == torch.nn.functional.softplus(saved[f"0.{name}.raw"])
    assert old[f"0.{name}.raw"].dim() == 0  # the user's dict is left as it was
