"""The training of sparse autoencoders, and how they are judged, against loops written out."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot.nn import Anneal, QuantileBalancer, TopKSAE, fit_sae, loss_recovered, unexplained

D, N, K = 6, 16, 3


def vectors(count: int = 200, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, D, generator=torch.Generator().manual_seed(9))
    return torch.randn(count, 4, generator=generator).abs() @ mixing + 1


X = vectors()


def make(**options: Any) -> TopKSAE:
    torch.manual_seed(0)
    return TopKSAE(D, N, options.pop("k", K), **options)


def batches(seed: int = 0, size: int = 32) -> Iterator[Tensor]:
    """As the docstring of fit_sae describes them."""
    while True:
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
        for part in X[order].split(size):
            if len(part) == size:
                yield part
        seed += 1


def by_hand(sae: TopKSAE, steps: int, decay: float = 0.2, average: float | None = None) -> list[float]:
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
    losses, means = [], [p.detach().double() for p in sae.parameters()]
    for step, x in zip(range(steps), batches(), strict=False):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (steps - step) / (decay * steps)) if decay else 1e-3
        optimizer.zero_grad()
        loss = sae(x, loss=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if average is not None:
            new = max(1 - average, 1 / (step + 1))
            means = [m + new * (p.detach() - m) for m, p in zip(means, sae.parameters(), strict=True)]
    if average is not None:
        with torch.no_grad():
            for p, mean in zip(sae.parameters(), means, strict=True):
                p.copy_(mean)
    return losses


@pytest.mark.parametrize("options", [{}, {"batch": True}, {"widths": [4]}, {"revive": 2}], ids=str)
def test_is_the_loop(options: dict[str, Any]) -> None:
    want, got = make(**options), make(**options)
    losses = by_hand(want, 20)
    record = fit_sae(got, X, 20, batch_size=32, every=1)
    assert [row["loss"] for row in record] == losses
    assert [row["step"] for row in record] == list(range(20))
    torch.testing.assert_close(got.state_dict(), want.state_dict(), rtol=0, atol=0)


def test_a_moving_mean_takes_the_place_of_the_parameters() -> None:
    want, got = make(), make()
    by_hand(want, 40, decay=0, average=0.9)
    fit_sae(got, X, 40, batch_size=32, decay=0, average=0.9)
    torch.testing.assert_close(got.state_dict(), want.state_dict())


def test_batches_of_an_iterable_are_gone_through_again() -> None:
    parts = list(X.split(50))
    want, got = make(), make()
    optimizer = torch.optim.Adam(want.parameters(), lr=1e-3)
    for step in range(10):
        optimizer.zero_grad()
        want.loss(parts[step % 4]).backward()
        optimizer.step()
    fit_sae(got, [part.view(5, 10, D) for part in parts], 10, decay=0)
    torch.testing.assert_close(got.state_dict(), want.state_dict())
    with pytest.raises(ValueError, match="ended after 4 of them"):
        fit_sae(make(), iter(parts), 10)
    with pytest.raises(ValueError, match="ended after 0 of them"):
        fit_sae(make(), [], 10)
    assert len(fit_sae(make(), iter(parts), 4, every=1)) == 4


@pytest.mark.parametrize("options", [{}, {"batch": True}], ids=str)
@pytest.mark.parametrize("iterable", [False, True])
def test_goes_on_with_the_same_bits(options: dict[str, Any], iterable: bool, tmp_path: Path) -> None:
    given: Any = list(X.split(40)) if iterable else X
    settings: dict[str, Any] = {"batch_size": 32, "average": 0.9, "every": 3, "save_every": 5}

    def made() -> TopKSAE:
        return make(k=Anneal(6, K, 12), revive=2, **options)

    want = made()
    record = fit_sae(want, given, 17, **settings)
    file = tmp_path / "deep" / "sae.pt"

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_sae(made(), given, 17, checkpoint=file, callback=stop, **settings)
    for _ in range(2):  # a training that has ended ends with the same, too
        got = made()
        torch.manual_seed(1)
        with torch.no_grad():
            got.raw_encoder.normal_()
        seen: list[dict[str, float]] = []
        assert fit_sae(got, given, 17, checkpoint=file, callback=seen.append, **settings) == record
        torch.testing.assert_close(got.state_dict(), want.state_dict(), rtol=0, atol=0)
    assert seen == [] and not list(tmp_path.rglob("*.part"))
    with pytest.raises(ValueError, match=r"lr must be 0\.001, as in the training that .*sae\.pt is of"):
        fit_sae(made(), given, 17, checkpoint=file, lr=1e-2, **settings)


def test_the_record() -> None:
    sae = make(batch=True)
    seen: list[dict[str, float]] = []
    record = fit_sae(sae, X, 25, batch_size=50, callback=seen.append)
    assert record == seen and [row["step"] for row in record] == [9, 19, 24]
    assert all(type(value) in (int, float) for row in record for value in row.values())
    other = make(batch=True)
    fit_sae(other, X, 24, batch_size=50, decay=0)
    row = fit_sae(copy.deepcopy(other), X, 1, batch_size=len(X))[0]
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    x = X[order]
    before = copy.deepcopy(other)
    with torch.no_grad():
        error = (before(x) - x).square().mean()
        code = before.encode(x)
    variance = (x.double() - x.double().mean(0)).square().mean()
    assert row["error"] == pytest.approx(error.item(), rel=1e-5)
    assert row["unexplained"] == pytest.approx((error / variance).item(), rel=1e-5)
    assert row["l0"] == pytest.approx((code > 0).sum(-1).float().mean().item())
    assert row["loss"] == pytest.approx(
        math.log(row["error"] + row["wider"] / 2 + 0.3 * row["idle"]), rel=1e-5
    )
    assert row["lr"] == 1e-3 and row["threshold"] > 0
    assert 0 < row["dead"] == pytest.approx((other.idle >= 267).double().mean().item())  # 50 · 16 / 3


def test_a_schedule_of_k_takes_steps() -> None:
    k = Anneal(8, 2)
    sae = make(k=k)
    fit_sae(sae, X, 6)
    assert k.steps == 6 and k.taken == 6


def test_stops_and_says_why_the_loss_is_not_finite() -> None:
    sae, spoiled = make(), X.clone()
    before = copy.deepcopy(sae.state_dict())
    spoiled[:7, 2] = math.nan
    with pytest.raises(FloatingPointError, match=r"is nan in step 0, because 7 of the 200 vectors"):
        fit_sae(sae, spoiled, 5, batch_size=200)
    for name, _ in sae.named_parameters():
        assert sae.state_dict()[name].equal(before[name])
    with pytest.raises(FloatingPointError, match="because its batch is empty"):
        fit_sae(sae, [torch.zeros(0, D)], 5)
    with pytest.raises(FloatingPointError, match="although its batch and the parameters are finite"):
        fit_sae(make(centre=False), 1e30 * X, 5)
    with pytest.raises(FloatingPointError, match=r"with numbers up to 12\.\d and 1e\+30: scale"):
        fit_sae(make(), X, 50, lr=1e30)
    with torch.no_grad():
        sae.encoder_bias[3] = math.nan
    with pytest.raises(
        FloatingPointError, match="because encoder_bias are not finite any more: a smaller lr"
    ):
        fit_sae(sae, X, 5)


def test_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    want, got = make(), make()
    record = fit_sae(want, X, 12)
    assert fit_sae(got, X, 12, progress=True) == record
    assert "100%" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit_sae(make(), X, 2)
    with pytest.raises(ImportError, match="pip install rich"):
        fit_sae(make(), X, 2, progress=True)


def test_fit_refuses() -> None:
    sae = make()
    with pytest.raises(TypeError, match="sae must be a khot"):
        fit_sae(nn.Linear(D, D), X, 2)  # type: ignore[arg-type]
    for wrong, message in (
        (X[0, 0], r"must have shape \(..., 6\)"),
        (X[:, :5], r"must have shape \(..., 6\), but got \(200, 5\)"),
        (X[:0], "must have vectors"),
        ([X[:, :5]], r"must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_sae(sae, wrong, 2)
    for other, text in (
        (3, "a tensor or an iterable of tensors"),
        ([(X,)], "must give tensors, but gave a tuple"),
        (X.long(), "activations"),
    ):
        with pytest.raises(TypeError, match=text):
            fit_sae(sae, other, 2)  # type: ignore[arg-type]
    with mock.patch.object(TopKSAE, "group", "some"), pytest.raises(ValueError, match="must have no group"):
        fit_sae(sae, X, 2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("options", [{}, {"tau": 0.3}, {"dtype": torch.bfloat16, "refine": 1}], ids=str)
def test_trains_whether_gradients_are_enabled_or_not(
    options: dict[str, Any], iterable: bool, context: Any, tmp_path: Path
) -> None:
    """And batches and callback are in the mode of the caller."""
    modes: list[bool] = []
    settings: dict[str, Any] = {"average": 0.9, "batch_size": 32, "every": 2, "save_every": 4}

    def made() -> TopKSAE:
        return make(k=Anneal(6, K), revive=2, **options)

    def given() -> Any:
        x = X.to(want.shift.dtype).clone()
        return [x[:32], x[32:64], x[64:96]] if iterable else x

    def seen(row: dict[str, float]) -> None:
        modes.append(torch.is_grad_enabled())
        if row["step"] == 5:
            raise KeyboardInterrupt

    want, got = made(), made()
    record = fit_sae(want, given(), 9, **settings)
    with context():
        with pytest.raises(KeyboardInterrupt):
            fit_sae(got, given(), 9, checkpoint=tmp_path / "sae.pt", callback=seen, **settings)
        got = copy.deepcopy(got) if context is not torch.inference_mode else got
        assert fit_sae(got, given(), 9, checkpoint=tmp_path / "sae.pt", **settings) == record
        assert modes == [torch.is_grad_enabled()] * 3
    torch.testing.assert_close(got.state_dict(), want.state_dict(), rtol=0, atol=0)
    fit_sae(got, given(), 2)
    assert not any(x.is_inference() for x in (*got.parameters(), *got.buffers()))


def test_what_was_made_in_inference_mode_cannot_learn() -> None:
    with torch.inference_mode():
        sae, x = make(), X.clone()
    with pytest.raises(ValueError, match=r"sae must not be made within torch\.inference_mode"):
        fit_sae(sae, X, 2)
    fit_sae(copy.deepcopy(sae), x, 2)
    fit_sae(make(), [x], 2)


@pytest.mark.parametrize("who", ["callback", "batches"])
@pytest.mark.parametrize("seed", range(3))
def test_a_callback_or_batches_may_leave_it_in_eval_mode(seed: int, who: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    want, got = (make(batch=True, revive=2, k=Anneal(6, K)) for _ in range(2))
    record = fit_sae(want, X, 12, batch_size=32, every=1)

    def judge(row: dict[str, float]) -> None:
        if torch.rand((), generator=generator) < 0.6:
            unexplained(got.eval(), X)

    def judged() -> Iterator[Tensor]:
        for x in batches():
            got.train(bool(torch.rand((), generator=generator) < 0.5))
            yield x

    if who == "callback":
        assert fit_sae(got, X, 12, batch_size=32, every=1, callback=judge) == record
    else:
        assert fit_sae(got, judged(), 12, every=1) == record
    torch.testing.assert_close(got.state_dict(), want.state_dict(), rtol=0, atol=0)
    assert all(module.training for module in got.modules())


def test_a_training_that_did_not_begin_gives_no_length() -> None:
    for fails in (X[:, :4], [], [X[:, :4]], X * math.nan, iter([X[0], torch.zeros(2)])):
        sae = make(k=Anneal(6.0, K))
        began = isinstance(fails, Iterator)
        with pytest.raises((ValueError, FloatingPointError)):
            fit_sae(sae, fails, 100)
        assert sae.k.steps == (100 if began else None)  # type: ignore[union-attr]
        fit_sae(sae, X, 7)
        assert sae.k.steps == (100 if began else 7)  # type: ignore[union-attr]


# ------------------------------------------------------------------------- the terms of the loss


@pytest.mark.parametrize("kind", ["log", "mse"])
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"batch": True}, {"widths": [4, 9]}, {"tau": 0.3}, {"dtype": torch.bfloat16}], ids=str
)
def test_the_terms_of_the_loss(options: dict[str, Any], idle: bool, kind: Any) -> None:
    sae = make(**options)
    x = X.to(sae.shift.dtype)
    if idle:
        sae(x)
        sae.idle[5:] = 10**6
    other = copy.deepcopy(sae)
    parts, loss = sae.loss_parts(x, kind), other.loss(x, kind)
    assert parts.loss.equal(loss) and (parts.idle > 0) == idle
    total = parts.error + parts.wider / 2 + 0.3 * parts.idle
    torch.testing.assert_close(parts.loss.detach(), total.log() if kind == "log" else total)
    assert not any(term.requires_grad for term in parts[1:])
    parts.loss.backward()
    loss.backward()
    for p, q in zip(sae.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or p.grad.equal(q.grad))
    # a second step, whose idle latents are read anew after the backward pass
    assert sae.loss_parts(x).loss.equal(other.loss(x))
    torch.testing.assert_close(sae.state_dict(), other.state_dict(), rtol=0, atol=0)


# --------------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    "options", [{}, {"batch": True}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}], ids=str
)
def test_the_share_that_is_unexplained(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make(**options)
    fit_sae(sae, X.to(sae.shift.dtype), 30)
    x = vectors(90, seed=1).to(sae.shift.dtype)
    with torch.no_grad():
        rest = (x.double() - copy.deepcopy(sae).eval()(x).double()).square().sum()
    want = rest / (x.double() - x.double().mean(0)).square().sum()
    state = copy.deepcopy(sae.state_dict())
    for given in (x, x.view(3, 30, D), list(x.split(17)), iter(x.split(90)), [x[:0], x]):
        torch.testing.assert_close(unexplained(sae, given), want)
    monkeypatch.setattr("khot.nn._sae_metrics.ROOM", 1)
    torch.testing.assert_close(unexplained(sae, x), want)
    if x.dtype == torch.float64:  # the sums keep their digits
        far = x + 1e6
        with torch.no_grad():
            rest = (far - copy.deepcopy(sae).eval()(far)).square().sum()
        torch.testing.assert_close(unexplained(sae, far), rest / (far - far.mean(0)).square().sum())
    assert sae.training
    torch.testing.assert_close(sae.state_dict(), state, rtol=0, atol=0)
    assert unexplained(sae, x[:0]).isnan()
    with pytest.raises(TypeError, match="sae must be"):
        unexplained(nn.Linear(D, D), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations must have shape"):
        unexplained(sae, x[:, :3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_unexplained_of_equal_activations_is_no_number(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** float(torch.empty(()).uniform_(-3, 4, generator=generator))
    count, size = (int(torch.randint(1, 60, (), generator=generator)) for _ in range(2))
    sae = make(dtype=dtype)
    row = (scale * torch.randn(D, generator=generator)).to(dtype)
    equal = row.expand(count, D)
    for given in (equal, list(equal.split(size)), [equal[:0], equal, equal[:0]]):
        assert unexplained(sae, given).isnan()
    if count > 1 and scale < 100:  # or the loss of half precision is not finite
        record = fit_sae(make(dtype=dtype), equal, 1, batch_size=count)
        assert math.isnan(record[0]["unexplained"])
    other = equal.clone()
    other[-1, 0] = torch.nextafter(row[0].float(), torch.tensor(math.inf)).to(dtype) + scale * 0.01
    want = (other.double() - sae.eval()(other).double()).square().sum()
    want = want / (other.double() - other.double().mean(0)).square().sum()
    for given in (other, list(other.split(size))):
        if count > 1:
            torch.testing.assert_close(unexplained(sae, given), want, rtol=1e-6, atol=0)


class Block(nn.Module):
    """Returns a tuple, as those of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x + self.linear(x), "more"


class Model(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.embed, self.block, self.head = nn.Embedding(9, D), Block(), nn.Linear(D, 9)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Any:
        logits = self.head(self.drop(self.block(self.embed(tokens))[0]))
        return mock.Mock(spec=["logits"], logits=logits) if self.wrapped else (logits, None)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_loss_that_is_recovered(wrapped: bool, by_name: bool) -> None:
    torch.manual_seed(0)
    model, sae = Model(wrapped), make(centre=False)
    tokens = torch.randint(9, (4, 10))
    with torch.no_grad():
        hidden = model.block(model.embed(tokens))[0]
        inner = copy.deepcopy(sae).eval()
        losses = [
            F.cross_entropy(model.head(h)[:, :-1].reshape(-1, 9), tokens[:, 1:].reshape(-1))
            for h in (torch.zeros_like(hidden), inner(hidden), hidden)
        ]
    hook = "block" if by_name else model.block
    got = loss_recovered(model, hook, sae, tokens)
    torch.testing.assert_close(got, (losses[0] - losses[1]) / (losses[0] - losses[2]))
    assert model.training and model.drop.training and sae.training and not got.requires_grad
    assert not model.block._forward_hooks
    labels = torch.randint(9, (4,))

    def judge(output: Any, tokens: Tensor) -> Tensor:
        logits = output.logits if wrapped else output[0]
        return F.cross_entropy(logits[:, -1], labels)

    own = loss_recovered(model, hook, sae, tokens, loss=judge)
    assert own.isfinite() and own != got


def test_recovered_refuses() -> None:
    model, sae, tokens = Model(False), make(), torch.randint(9, (4, 10))
    with pytest.raises(ValueError, match=r"such as 'embed', 'block', 'block\.linear'"):
        loss_recovered(model, "blocks", sae, tokens)
    with pytest.raises(ValueError, match="hook must be a submodule of model or its name"):
        loss_recovered(model, nn.Linear(2, 2), sae, tokens)
    with pytest.raises(TypeError, match="sae must be"):
        loss_recovered(model, "block", nn.Linear(2, 2), tokens)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be"):
        loss_recovered(len, "block", sae, tokens)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss must be"):
        loss_recovered(model, "block", sae, tokens, loss=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="6"):
        loss_recovered(model, "head", sae, tokens)
    assert not model.head._forward_hooks


# ----------------------------------------------------------------------------- modes and warnings


class Deep(nn.Module):
    """Has a frozen norm, and autoencoder and balancer, which warn when their training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, D), nn.BatchNorm1d(D), nn.Linear(D, 9)
        self.balancer = QuantileBalancer(D, 2, bins=64)
        self.sae = make(tau=3.0)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, D)
        self.balancer(hidden)
        return self.head(self.sae(hidden))


TOKENS = torch.arange(36).view(4, 9) % 9


@pytest.mark.parametrize("train", [("sae", "balancer"), ("sae",), ("balancer",), ()], ids=str)
@pytest.mark.parametrize("root", [True, False])
def test_warns_once_of_what_is_left_in_train_mode(root: bool, train: tuple[str, ...]) -> None:
    model = Deep()
    for _ in range(12):
        model(TOKENS).square().sum().backward()
    model.training = root
    for name in ("sae", "balancer", "norm"):
        model.get_submodule(name).training = name in train
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loss_recovered(model, "norm", model.sae, TOKENS)
    assert {"TopKSAE" in str(each.message) for each in found} == {name == "sae" for name in train}
    assert len(found) == len(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        loss_recovered(model, "norm", model.sae, TOKENS)
    assert model.training == root
    assert {name for name in ("sae", "balancer", "norm") if model.get_submodule(name).training} == set(train)
    rest = {"sae", "balancer"} - set(train)
    for name in rest:  # nothing has been said of these
        with pytest.warns(UserWarning, match="TopKSAE" if name == "sae" else "never updated"):
            model.get_submodule(name).train().eval()


@pytest.mark.parametrize("training", [True, False])
def test_warns_when_a_training_leaves_a_soft_choice(training: bool) -> None:
    """Where it ends with the function, and not where the autoencoder is left in train mode."""
    sae = make(tau=3.0).train(training)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit_sae(sae, X, 15)
    assert ["is not used as it was trained" in str(each.message) for each in found] == [True] * (not training)
    assert sae.training == training
    if training:
        with pytest.warns(UserWarning, match="is not used as it was trained"):
            sae.eval()


def test_modes_stay_where_a_warning_is_an_error() -> None:
    model = Deep()
    for _ in range(12):
        model(TOKENS).square().sum().backward()
    model.norm.eval()
    before = [module.training for module in model.modules()]
    sae = model.sae
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="never updated"):
            loss_recovered(model, "norm", sae, TOKENS)
        assert [module.training for module in model.modules()] == before
        with pytest.raises(UserWarning, match="is not used as it was trained"):
            unexplained(sae, X)
        assert [module.training for module in model.modules()] == before
        sae.eval()
        with pytest.raises(UserWarning, match="is not used as it was trained"):
            fit_sae(sae, X, 200)
        assert not sae.training


def test_modules_that_do_more_in_train_are_asked_both_ways() -> None:
    class Merging(nn.Linear):
        """Merges something into its weight for eval mode, as some adapters do."""

        merged = False

        def train(self, mode: bool = True) -> Any:
            if mode == self.merged:
                self.weight.data += 1 if not mode else -1
                self.merged = not mode
            return super().train(mode)

    model = Model(False)
    model.head = Merging(D, 9)
    weight = model.head.weight.detach().clone()
    loss_recovered(model, "block", make(), TOKENS)
    assert not model.head.merged
    torch.testing.assert_close(model.head.weight.detach(), weight)
