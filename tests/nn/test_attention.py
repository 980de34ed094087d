"""topk_attention and TopKAttention: the formula by hand, and torch's attention where k is all of the keys."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import fresh
import khot
import oracles
from drawn import normal
from khot.nn import TopKAttention, attention, selected_attention, topk_attention
from largest import Largest


def qkv(queries: int = 4, keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 3, queries, 5), normal(2, 3, keys, 5, seed=1), normal(2, 3, keys, 7, seed=2)


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) > 0.3,
    "padding": (torch.arange(6) < torch.tensor([6, 2])[:, None])[:, None, None],
    "added": normal(2, 1, 4, 6, seed=4),
    "added -inf": torch.where(normal(4, 6, seed=5) > -0.5, 0.3, -math.inf).double(),
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


@each_mask
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_is_the_formula(mask: Tensor | None, cdf: str) -> None:
    q, k, v = qkv()
    got = topk_attention(q, k, v, 2, mask, tau=0.3, cdf=cdf)
    scores = q @ k.mT / math.sqrt(5)
    if mask is not None:
        allowed = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        scores = scores + allowed
    for i in np.ndindex(2, 3, 4):
        row = scores[i]
        there = row > -math.inf
        log_A = oracles.soft_topk(row[there], min(2, int(there.sum())), 0.3, cdf, None)[1]
        weights = (row[there] + torch.from_numpy(np.asarray(log_A))).softmax(-1)
        torch.testing.assert_close(got[i], weights @ v[i[:2]][there], rtol=0, atol=1e-12)


@each_mask
@pytest.mark.parametrize("hard", [False, True])
def test_all_keys_is_plain_attention(mask: Tensor | None, hard: bool) -> None:
    q, k, v = qkv()
    want = F.scaled_dot_product_attention(q, k, v, mask)
    for top_k in (6, 100):
        torch.testing.assert_close(topk_attention(q, k, v, top_k, mask, hard=hard), want)


@pytest.mark.parametrize("hard", [False, True])
def test_signature_of_plain_attention(hard: bool) -> None:
    q, k, v = qkv(6, 6)
    options = {"is_causal": True, "scale": 0.7}
    got, want = (
        topk_attention(q, k, v, 6, **options, hard=hard),
        F.scaled_dot_product_attention(q, k, v, **options),
    )
    torch.testing.assert_close(got, want)
    q, k, v = normal(2, 6, 4, 5), normal(2, 2, 7, 5), normal(2, 2, 7, 3)
    got = topk_attention(q, k, v, 7, enable_gqa=True, hard=hard)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    torch.manual_seed(0)
    dropped = topk_attention(normal(1, 1000, 5), normal(1, 8, 5), torch.ones(1, 8, 1).double(), 8, None, 0.5)
    # the mean of 1000 rows whose variance is at most 1: within 5 standard errors, failing once in 10⁶
    assert abs(dropped.mean() - 1) < 5 / math.sqrt(1000) and dropped.std() > 0.1


def test_hard_attends_to_the_best_keys_only() -> None:
    q, k, v = qkv()
    for options in ({"hard": True}, {"tau": 1e-4}):
        torch.testing.assert_close(topk_attention(q, k, v, 2, **options), weighed(q, k, v, 2))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_a_query_that_may_attend_to_nothing_gets_zeros_and_no_gradient(hard: bool, cdf: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    out = topk_attention(q, k, v, 2, mask, cdf=cdf, hard=hard)
    out.sum().backward()
    assert (out[..., 1, :] == 0).all()
    assert q.grad is not None and (q.grad[..., 1, :] == 0).all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_values_under_the_mask_do_not_matter() -> None:
    q, k, v = qkv()
    mask = torch.tensor([True, True, False, True, True, False])
    want = topk_attention(q, k, v, 2, mask)
    k = torch.where(mask[:, None], k, math.nan)
    torch.testing.assert_close(topk_attention(q, k, v, 2, mask), want)


# ------------------------------------------------------------------------------------- in parts

PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hard": {"hard": True},
    "causal": {"is_causal": True},
    "a k and tau a query": {
        "top_k": torch.arange(13) % 4 + 0.5,
        "tau": 0.1 + torch.rand(2, 1, 13, generator=torch.Generator().manual_seed(6)).double(),
    },
    "a k a head": {"top_k": torch.tensor([1.0, 2.0, 3.5]).double()[:, None]},
    "bool mask": {"attn_mask": torch.rand(13, 6, generator=torch.Generator().manual_seed(7)) > 0.4},
    "padding": {"attn_mask": (torch.arange(6) < torch.tensor([6, 2])[:, None])[:, None, None]},
    "added mask": {"attn_mask": normal(3, 13, 6, seed=8)},
    "groups": {"enable_gqa": True},
}
each_call = pytest.mark.parametrize("options", PARTS.values(), ids=PARTS.keys())


def call(options: dict[str, Any], leaves: tuple[Tensor, ...]) -> Tensor:
    return topk_attention(*leaves[:3], **{"top_k": 2, "tau": 0.3, **options})  # type: ignore[misc]


def leaves_of(options: dict[str, Any]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    heads = 1 if "enable_gqa" in options else 3
    leaves = [normal(2, 3, 13, 5), normal(2, heads, 6, 5, seed=1), normal(2, heads, 6, 7, seed=2)]
    options = {
        name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }
    given = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    return options, (*(x.requires_grad_() for x in leaves), *given)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("khot._core.parts.PART", 1)  # then a part has as many queries as a query has entries


@each_call
def test_parts_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options, leaves = leaves_of(options)
    v = normal(2, 3, 13, 7, seed=9)
    results = []
    for part in (1 << 30, 1):
        monkeypatch.setattr("khot._core.parts.PART", part)
        y = call(options, leaves)
        grads = torch.autograd.grad(y, leaves, v, create_graph=True, allow_unused=True)
        some = sum(g.square().sum() for g in grads if g is not None)
        again = torch.autograd.grad(some, leaves, allow_unused=True)
        results.append([y, *(g for g in (*grads, *again) if g is not None)])
    assert len(results[0]) == len(results[1]) > 4
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_no_tensor_has_an_entry_for_each_pair(small_parts: None) -> None:
    layer = TopKAttention(4, 1, top_k=3, batch_first=True).double()
    calls: list[tuple[Callable[..., Tensor], int, int]] = [
        (functools.partial(topk_attention, top_k=3), 200, 4),
        (functools.partial(topk_attention, top_k=3, is_causal=True), 200, 4),
        (lambda *x: layer(*x, need_weights=False)[0], 200, 4),
        # as many rows as best_of_product takes at a time
        (functools.partial(topk_attention, top_k=8, hard=True), 2_048, 64),
        (functools.partial(topk_attention, top_k=8, hard=True, is_causal=True), 2_048, 64),
    ]
    for f, n, most in calls:
        x = [normal(1, n, 4, seed=i).requires_grad_() for i in range(3)]
        with Largest() as largest:
            f(*x).sum().backward()
        assert largest.numel <= n * most
    with Largest() as largest:
        layer(*(normal(1, 200, 4, seed=i) for i in range(3)))[0].sum().backward()
    assert largest.numel >= 200 * 200


# -------------------------------------------------------------------------------- only the selected keys


@pytest.fixture
def selecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select however few keys there are."""
    monkeypatch.setattr(attention, "LONG", 1)
    monkeypatch.setattr(attention, "FEW", 1)


def scores_of(
    q: Tensor, k: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The scores of all pairs, and −inf where a query may not attend to a key."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def softmax(logits: Tensor) -> Tensor:
    """Of a row without a finite logit, zeros."""
    idle = (logits == -math.inf).all(-1, keepdim=True)
    return logits.masked_fill(idle, 0).softmax(-1).masked_fill(idle, 0)


def weighed(
    q: Tensor, k: Tensor, v: Tensor, top_k: int, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Attention to the first top_k keys of a stable sort, whose weights are 0 for all others."""
    scores = scores_of(q, k, mask, **options)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return softmax(scores.masked_fill(~chosen, -math.inf)) @ v


def agree_to_second_order(
    got: Tensor, want: Tensor, leaves: Sequence[Tensor], rtol: float = 0.0, atol: float = 1e-12
) -> None:
    """The values, and their first and second derivatives."""
    grad = normal(*want.shape, seed=9).requires_grad_()
    found = []
    for y in (got, want):
        first = torch.autograd.grad(y, leaves, grad, create_graph=True)
        second = torch.autograd.grad([x.square().sum() for x in first], (*leaves, grad))
        found.append((y, *first, *second))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


SELECTED: dict[str, tuple[Tensor | None, dict[str, Any]]] = {
    **{name: (mask, {}) for name, mask in MASKS.items()},
    "nothing for one": ((torch.arange(4) != 1)[:, None].expand(4, 6), {}),
    "causal": (None, {"is_causal": True}),
    "scale": (None, {"scale": -0.7}),
}


@pytest.mark.parametrize("call", SELECTED.values(), ids=SELECTED.keys())
def test_selected_keys_are_those_that_a_sort_gives(
    selecting: None, monkeypatch: pytest.MonkeyPatch, call: tuple[Tensor | None, dict[str, Any]]
) -> None:
    """The output, and its first and second derivatives."""
    monkeypatch.setattr(attention, "_weights", None)  # nothing weighs all keys
    monkeypatch.setattr("khot._ops.selected.ROWS_OF_NARROW", 3)
    mask, options = call
    leaves = tuple(x.requires_grad_() for x in qkv())
    ours = topk_attention(*leaves, 2, mask, hard=True, **options)
    agree_to_second_order(ours, weighed(*leaves, 2, mask, **options), leaves)


def test_selected_keys_of_heads_in_groups_of_batches_that_broadcast(selecting: None) -> None:
    q, k, v = normal(2, 4, 5, 3), normal(2, 2, 6, 3, seed=1), normal(1, 2, 6, 7, seed=2)
    got = topk_attention(q, k, v, 3, hard=True, enable_gqa=True)
    want = weighed(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 3)
    torch.testing.assert_close(got, want)


def test_selected_keys_of_equal_scores_are_the_first_ones(selecting: None) -> None:
    q, k, v = torch.ones(1, 2), torch.ones(6, 2), torch.eye(6)
    assert topk_attention(q, k, v, 2, hard=True).tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


@pytest.mark.parametrize("top_k", [16, 17])
def test_where_rows_are_gathered_few_keys_are_selected(
    selecting: None, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    # 16 keys of 4 entries take as much memory as the scores of 64 keys
    weigh, calls = attention._weights, []

    def weights(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return weigh(*args, **options)

    monkeypatch.setattr(attention, "_weights", weights)
    q, k, v = normal(1, 3, 4), normal(1, 64, 4, seed=1), normal(1, 64, 4, seed=2)
    got = torch.vmap(functools.partial(topk_attention, top_k=top_k, hard=True))(q, k, v)
    torch.testing.assert_close(got, weighed(q, k, v, top_k))
    assert len(calls) == (top_k == 17)


# ---------------------------------------------------------------------------------------- candidates


def among(
    q: Tensor, k: Tensor, v: Tensor, top_k: float, m: int, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Soft attention among the first m keys of a stable sort, with weights for all keys."""
    scores = scores_of(q, k, mask, is_causal)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :m]
    best = scores.gather(-1, order)
    count = (best > -math.inf).sum(-1).double().clamp(max=top_k)
    weights = softmax(best + khot.log_soft_topk(best, count, tau=0.3))
    return torch.zeros_like(scores).scatter(-1, order, weights) @ v


AMONG = {name: call for name, call in SELECTED.items() if name != "scale"}


@pytest.mark.parametrize("call", AMONG.values(), ids=AMONG.keys())
def test_candidates_are_the_best_keys(
    monkeypatch: pytest.MonkeyPatch, call: tuple[Tensor | None, dict[str, Any]]
) -> None:
    """The output, and its first and second derivatives, those in the mask included."""
    monkeypatch.setattr(attention, "_weights", None)  # nothing weighs all keys
    monkeypatch.setattr("khot._ops.selected.ROWS_OF_NARROW", 3)
    mask, options = call
    leaves = [x.requires_grad_() for x in qkv()]
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        leaves.append(mask)
    ours = topk_attention(*leaves[:3], 1.7, mask, candidates=4, tau=0.3, **options)
    agree_to_second_order(ours, among(*leaves[:3], 1.7, 4, mask, **options), leaves, 1e-10, 1e-10)


LAYER_MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal and padding": {"is_causal": True, "key_padding_mask": torch.arange(7) > 4},
    "closed": {"attn_mask": torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.4},
    "added": {"attn_mask": normal(7, 7, seed=5)},
}


@pytest.mark.parametrize("options", LAYER_MASKS.values(), ids=LAYER_MASKS.keys())
@pytest.mark.parametrize("training", [True, False])
def test_candidates_of_the_layer(options: dict[str, Any], training: bool) -> None:
    """With all keys as candidates the outputs and weights are those without; with few, both calls agree."""
    x = normal(7, 8)
    torch.manual_seed(0)
    layers = [
        TopKAttention(8, 2, top_k=2, tau=0.3, candidates=m, dtype=torch.float64).train(training)
        for m in (None, 99, 3)
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    for weights in (True, False):
        want = layers[0](x, x, x, need_weights=weights, **options)
        torch.testing.assert_close(layers[1](x, x, x, need_weights=weights, **options), want)
    output, weights = layers[2](x, x, x, average_attn_weights=False, **options)
    assert ((weights > 0).sum(-1) <= (3 if training else 2)).all()
    torch.testing.assert_close(layers[2](x, x, x, need_weights=False, **options)[0], output)
    if not training:
        torch.testing.assert_close(output, layers[0](x, x, x, **options)[0])


def test_the_layer_keeps_no_score_of_each_pair_where_it_selects(selecting: None) -> None:
    x = normal(1, 600, 4)
    layer = TopKAttention(4, 1, top_k=2, tau=0.3, candidates=4, batch_first=True, dtype=torch.float64)
    for training in (True, False):
        layer.train(training)
        with Largest() as largest:
            layer(x, x, x, need_weights=False, is_causal=True)[0].sum().backward()
        assert largest.numel <= 64 * 600


def test_the_layer_notes_what_candidates_leave_outside() -> None:
    layer = TopKAttention(4, 1, top_k=1, tau=10.0, candidates=5, batch_first=True)
    x = torch.randn(1, 12, 4)
    for _ in range(20):
        layer(x, x, x, need_weights=False)
    with pytest.warns(UserWarning, match="not used as it was trained"):
        layer.eval()


# ------------------------------------------------------------------------------- keys that others chose


def masked(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The formula, with the selected rows in memory."""
    rows = [x[..., None, :, :].expand(*indices.shape[:-1], *x.shape[-2:]) for x in (k, v)]
    keys, values = (x.gather(-2, indices[..., None].expand(*indices.shape, x.shape[-1])) for x in rows)
    scores = (keys * q[..., None, :]).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (softmax(scores)[..., None] * values).sum(-2)


INDICES = torch.randint(0, 6, (2, 3, 4, 3), generator=torch.Generator().manual_seed(5))  # some of them twice
OF_SELECTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "bool": {"mask": torch.rand(4, 3, generator=torch.Generator().manual_seed(3)) > 0.3},
    "nothing for one": {"mask": (torch.arange(4) != 1)[:, None]},
    "added": {"mask": normal(2, 1, 4, 3, seed=4)},
}


@pytest.mark.parametrize("options", OF_SELECTED.values(), ids=OF_SELECTED.keys())
def test_attention_to_given_keys(options: dict[str, Any]) -> None:
    """The output, and its first and second derivatives."""
    options = dict(options)
    mask = options.pop("mask", None)
    leaves = [x.requires_grad_() for x in qkv()]
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        leaves.append(mask)
    ours = selected_attention(*leaves[:3], INDICES, attn_mask=mask, **options)
    agree_to_second_order(ours, masked(*leaves[:3], INDICES, mask, **options), leaves, 1e-11)


@pytest.mark.parametrize(
    "attend",
    [
        functools.partial(topk_attention, top_k=4, hard=True),
        functools.partial(topk_attention, top_k=4, candidates=8),
        functools.partial(selected_attention, indices=torch.zeros(600, 3, dtype=torch.int64, device="meta")),
    ],
)
def test_selected_keys_of_meta_tensors(attend: Any) -> None:
    q, k, v = (torch.empty(2, 600, 8, device="meta") for _ in range(3))
    assert attend(q, k, v).shape == q.shape


OF_WAYS = torch.randint(0, 12, (2, 3, 13, 3), generator=torch.Generator().manual_seed(6))
WAYS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all keys, in parts": (
        functools.partial(topk_attention, top_k=2, tau=0.3, is_causal=True),
        functools.partial(among, top_k=2, m=12, is_causal=True),
    ),
    "selected": (
        functools.partial(topk_attention, top_k=2, hard=True, is_causal=True),
        functools.partial(weighed, top_k=2, is_causal=True),
    ),
    "candidates": (
        functools.partial(topk_attention, top_k=2, tau=0.3, candidates=4, is_causal=True),
        functools.partial(among, top_k=2, m=4, is_causal=True),
    ),
    "given keys": (
        functools.partial(selected_attention, indices=OF_WAYS),
        functools.partial(masked, indices=OF_WAYS),
    ),
}
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
def test_compiled_mapped_and_differentiated(
    selecting: None, small_parts: None, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    torch._dynamo.reset()
    attend, formula = WAYS[way]
    if way != "all keys, in parts":
        monkeypatch.setattr(attention, "_weights", None)  # nothing weighs all keys
    q, k, v = inputs = tuple(x.requires_grad_() for x in qkv(13, 12))
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    want = formula(*inputs)
    grads = torch.autograd.grad(want.square().sum(), inputs)
    mapped = torch.vmap(attend) if way != "given keys" else functools.partial(_mapped, attend)
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager"), mapped):
        got = call(*inputs)
        close(got, want)
        close(torch.autograd.grad(got.square().sum(), inputs), grads)
    close(torch.func.grad(lambda q: attend(q, k, v).square().sum())(q), grads[0])
    leaves, tangents = ([x.detach() for x in inputs], [normal(*x.shape, seed=7) for x in inputs])
    want_tangent = torch.func.jvp(formula, tuple(leaves), tuple(tangents))[1]
    close(torch.func.jvp(attend, tuple(leaves), tuple(tangents))[1], want_tangent)
    with forward_ad.dual_level():
        y = attend(*(forward_ad.make_dual(*pair) for pair in zip(leaves, tangents, strict=True)))
        close(forward_ad.unpack_dual(y).tangent, want_tangent)


def _mapped(attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over both batch dims, with the indices."""
    given = torch.vmap(torch.vmap(selected_attention))
    return given(q, k, v, attend.keywords["indices"])


@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast(selecting: None, way: str, dtype: torch.dtype) -> None:
    attend, formula = WAYS[way]
    inputs = tuple(x.to(dtype).requires_grad_() for x in qkv(13, 12))
    want = formula(*(x.double() for x in inputs))
    y = attend(*inputs)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)
    for x, grad in zip(inputs, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert grad.dtype == x.dtype and grad.isfinite().all()
    with torch.autocast("cpu", dtype):
        cast = attend(*(x.float() for x in inputs))
    assert cast.dtype == dtype
    torch.testing.assert_close(cast, y, rtol=0.02, atol=0.02)


def test_given_keys_of_groups() -> None:
    q, k, v = qkv()
    one = selected_attention(q, k[:, :1], v[:, :1], INDICES[:, :1], enable_gqa=True)
    torch.testing.assert_close(
        one, selected_attention(q, *(x[:, :1].expand(-1, 3, -1, -1) for x in (k, v, INDICES)))
    )


def test_given_keys_without_entries_count_alike() -> None:
    q, k, v = qkv()
    indices = torch.tensor([1, 4]).expand(2, 3, 4, 2)
    got = selected_attention(q[..., :0], k[..., :0], v, indices)
    torch.testing.assert_close(got, v[..., [1, 4], :].mean(-2, keepdim=True).expand(got.shape))


def test_a_nan_stays_in_its_row(selecting: None) -> None:
    q, k, v = qkv()
    q[0, 0, 1, 0] = math.nan
    y = topk_attention(q, k, v, 2, hard=True)
    assert y[0, 0, 1].isnan().all() and y.isnan().sum() == 7


def test_dropout_drops_the_same_weights_in_both_passes(small_parts: None) -> None:
    q, k, v = qkv(queries=13)
    v.requires_grad_()
    y = topk_attention(q, k, v, 3, dropout_p=0.5)
    (grad,) = torch.autograd.grad(y.sum(), v)
    torch.testing.assert_close((grad * v).sum(), y.sum())  # y is linear in v
    assert (topk_attention(q, k, v, 3, dropout_p=0.5) != y).any()


def test_a_mask_with_a_larger_batch() -> None:
    q, k, v = (x[0, 0] for x in qkv())
    masks = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(3)) > 0.3
    got = topk_attention(q, k, v, torch.tensor([[1], [2], [3]]), masks)
    for i, mask in enumerate(masks):
        torch.testing.assert_close(got[i], topk_attention(q, k, v, i + 1, mask))


def test_large_float16_scores_do_not_overflow() -> None:
    q, k = (torch.full(shape, 100.0, dtype=torch.float16) for shape in ((2, 4, 64), (2, 6, 64)))
    k[:, 2] = 101
    v = normal(2, 6, 7).half()
    for top_k in (6, 1):
        got = topk_attention(q, k, v, top_k, hard=top_k < 6)
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())  # key 2 has all the weight
        torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-3)


def attended(q: Tensor, k: Tensor, top_k: int) -> Tensor:
    """The keys that a hard selection attends to: (L, S)."""
    return topk_attention(q, k, torch.eye(k.shape[-2], dtype=k.dtype), top_k, hard=True) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_attends_to_the_keys_of_float32(dtype: torch.dtype, autocast: bool) -> None:
    q, k = normal(300, 64).to(dtype), normal(512, 64, seed=1).to(dtype)
    # to the last of 16 keys weights of e⁻⁷ remain
    want = torch.zeros(300, 512, dtype=torch.bool).scatter(
        -1, (q.float() @ k.float().mT).topk(16).indices, True
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(attended(q, k, 16), want)
        if autocast:
            assert torch.equal(attended(q.float(), k.float(), 16), want)


def test_the_first_call_does_not_import_sympy() -> None:
    code = (
        "import sys, torch, khot; q = torch.ones(2, 3); khot.nn.topk_attention(q, q, q, 1); "
        "khot.nn.topk_attention(q[None], q, q, 1); print('sympy' in sys.modules)"
    )
    ran = fresh.run(code)
    assert ran.stdout.strip() == "False", ran.stderr


def test_compiled_for_any_size_it_takes_masks_and_numbers_of_one_size() -> None:
    q, k, v = qkv()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, top_k = torch.ones(4, 6, dtype=torch.bool).tril(2), torch.tensor([1.0, 2, 3, 2])
        return topk_attention(q, k, v, top_k, mask)

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), f(q, k, v), rtol=0, atol=1e-12)


def test_queries_without_features_find_all_keys_alike() -> None:
    q, k, v = normal(4, 0), normal(6, 0), normal(6, 7)
    torch.testing.assert_close(topk_attention(q, k, v, 6), F.scaled_dot_product_attention(q, k, v))


# ------------------------------------------------------------------------------- the module


def pair(
    top_k: float, batch_first: bool = True, bias: bool = True
) -> tuple[TopKAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    ours = TopKAttention(8, 2, top_k, bias=bias, batch_first=batch_first, tau=0.3, dtype=torch.float64)
    theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


FORBIDDEN = torch.ones(4, 6, dtype=torch.bool).triu(3)
PADDED = torch.arange(6) >= torch.tensor([6, 5])[:, None]
CALLS: dict[str, dict[str, object]] = {
    "plain": {},
    "weights a head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "attn_mask": {"attn_mask": FORBIDDEN},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": FORBIDDEN, "key_padding_mask": PADDED},
    "added": {"attn_mask": normal(4, 6), "key_padding_mask": torch.where(PADDED, -math.inf, 0.0).double()},
    "a head": {"attn_mask": torch.stack([FORBIDDEN] * 4), "key_padding_mask": PADDED},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_all_keys_is_multihead_attention(call: dict[str, Tensor], batch_first: bool, training: bool) -> None:
    ours, theirs = (m.train(training) for m in pair(6, batch_first))
    inputs = [normal(2, 4, 8), normal(2, 6, 8, seed=1), normal(2, 6, 8, seed=2)]
    if not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    (got, weights), (want, their_weights) = ours(*inputs, **call), theirs(*inputs, **call)
    torch.testing.assert_close(got, want)
    assert (weights is None) == (their_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, their_weights)


@pytest.mark.parametrize("training", [True, False])
def test_in_a_transformer_it_is_not_bypassed(training: bool) -> None:
    # in eval mode the fast path of nn.TransformerEncoderLayer calls no submodule
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours, _ = pair(2)
    layer.self_attn = ours
    layer.train(training)
    x, padding = normal(2, 6, 8), PADDED
    with torch.no_grad():
        y = layer.norm1(x + ours(x, x, x, padding)[0])
        want = layer.norm2(y + layer.linear2(layer.linear1(y).relu()))
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), want)


# ------------------------------------------------------------------- the shapes that the base class takes

N, L, S, HEADS, WIDTH = 3, 4, 5, 2, 8  # all different, and N * HEADS = 6 is none of them
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    # with the batch first; the sequence comes first where a batch is not
    "batched": ((N, L, WIDTH), (N, S, WIDTH), (N, S, WIDTH)),
    "one example": ((1, L, WIDTH), (1, S, WIDTH), (1, S, WIDTH)),
    "no keys": ((N, L, WIDTH), (N, 0, WIDTH), (N, 0, WIDTH)),
    "no batch": ((L, WIDTH), (S, WIDTH), (S, WIDTH)),
    "4-D": ((2, N, L, WIDTH), (2, N, S, WIDTH), (2, N, S, WIDTH)),
    "1-D": ((WIDTH,), (WIDTH,), (WIDTH,)),
    "query without a batch": ((L, WIDTH), (N, S, WIDTH), (N, S, WIDTH)),
    "keys without a batch": ((N, L, WIDTH), (S, WIDTH), (S, WIDTH)),
    "value without a batch": ((N, L, WIDTH), (N, S, WIDTH), (S, WIDTH)),
    "query of one example": ((1, L, WIDTH), (N, S, WIDTH), (N, S, WIDTH)),
    "keys of one example": ((N, L, WIDTH), (1, S, WIDTH), (1, S, WIDTH)),
    "value of one example": ((N, L, WIDTH), (N, S, WIDTH), (1, S, WIDTH)),
    "keys of fewer examples": ((N, L, WIDTH), (N - 1, S, WIDTH), (N - 1, S, WIDTH)),
    "keys of twice the examples": ((N, L, WIDTH), (2 * N, S, WIDTH), (2 * N, S, WIDTH)),
    "fewer values": ((N, L, WIDTH), (N, S, WIDTH), (N, S - 1, WIDTH)),
    "one value": ((N, L, WIDTH), (N, S, WIDTH), (N, 1, WIDTH)),
    "narrow query": ((N, L, WIDTH // 2), (N, S, WIDTH), (N, S, WIDTH)),
    "narrow keys": ((N, L, WIDTH), (N, S, WIDTH // 2), (N, S, WIDTH // 2)),
    "narrow value": ((N, L, WIDTH), (N, S, WIDTH), (N, S, WIDTH // 2)),
}
PADDINGS: list[tuple[int, ...] | None] = [
    *(None, (S,), (N, S), (S, N), (1, S), (N, 1), (N, L), (N * S,), (N, 1, S), (N * HEADS, S), ()),
]
ATTN_MASKS: list[tuple[int, ...] | None] = [
    *(None, (L, S), (S, L), (1, S), (L, 1), (S,), (L * S,), ()),
    *((N * HEADS, L, S), (N, L, S), (HEADS, L, S), (1, L, S), (N * HEADS, S, L), (N * HEADS, L, 1)),
    *((N, HEADS, L, S), (1, 1, L, S)),
]


def attention_of_both(
    shapes: tuple[tuple[int, ...], ...],
    padding: tuple[int, ...] | None,
    mask: tuple[int, ...] | None,
    batch_first: bool,
    dtype: torch.dtype,
) -> tuple[Any, Any]:
    """What our layer and its base class say: output and weights, or the exception."""
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    if not batch_first:
        inputs = [x.transpose(0, 1) if x.dim() == 3 else x for x in inputs]
    masks = {
        name: None if shape is None else torch.zeros(shape, dtype=dtype)
        for name, shape in (("key_padding_mask", padding), ("attn_mask", mask))
    }
    said = []
    for layer in pair(3, batch_first):
        try:
            said.append(layer(*inputs, **masks))
        except Exception as error:
            said.append(error)
    return said[0], said[1]


RIGHT = ("batched", "no batch", "one example", "no keys")


@pytest.mark.parametrize(
    ("name", "batch_first", "dtype"),
    [
        *itertools.product(SIZES, [True, False], [torch.bool]),
        # what a dtype allows does not depend on where the batch is, nor on inputs that are wrong
        *itertools.product(RIGHT, [True], [torch.float64, torch.int64]),
    ],
    ids=str,
)
def test_takes_the_shapes_that_multihead_attention_takes(
    name: str, batch_first: bool, dtype: torch.dtype
) -> None:
    right = name in RIGHT
    cases = [(padding, mask) for padding in PADDINGS for mask in ATTN_MASKS]
    if not right or dtype == torch.int64:  # masks cannot mend wrong inputs: one at a time
        cases = [(padding, mask) for padding, mask in cases if padding is None or mask is None]
    if not right and not batch_first:
        cases = cases[:1]
    taken = 0
    for padding, mask in cases:
        ours, theirs = attention_of_both(SIZES[name], padding, mask, batch_first, dtype)
        where = f"key_padding_mask {padding}, attn_mask {mask}: {ours!r}, {theirs!r}"
        if isinstance(theirs, Exception):
            assert isinstance(ours, (ValueError, TypeError)), where
            assert " must " in str(ours) and "but got" in str(ours), where
        else:
            assert not isinstance(ours, Exception), where
            assert [x.shape for x in ours] == [x.shape for x in theirs], where
            taken += 1
    assert len(cases) > taken >= (4 if right and name != "no keys" and dtype != torch.int64 else right)


# ------------------------------------------------------------------------------------------- gap


def faded_by_hand(query: Tensor, key: Tensor, value: Tensor, k: int, gap: float, mask: Tensor) -> Tensor:
    """Row by row, from a sort in Python."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    for i, row in enumerate((query.double() @ key.double().mT / math.sqrt(query.shape[-1])).tolist()):
        order = sorted((j for j in range(len(row)) if mask[i, j]), key=lambda j: -row[j])
        best, rest = order[:k], order[k:]
        weights = {j: math.exp(row[j] - row[best[0]]) for j in best}
        if rest and row[best[0]] > row[rest[0]]:
            weights = {j: -w * math.expm1((row[rest[0]] - row[j]) / gap) for j, w in weights.items()}
        for j, w in weights.items():
            out[i] += w / sum(weights.values()) * value[j].double()
    return out


@pytest.mark.parametrize("keys,k", [(40, 3), (40, 39), (40, 40), (3, 5), (600, 4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gap", [0.05, 4.0])
def test_weights_that_fade_towards_the_next_score(keys: int, k: int, masked: bool, gap: float) -> None:
    """Short and long rows, in which a few keys are selected by another way; and with too few keys."""
    query, key, value = normal(9, 8), 2 * normal(keys, 8, seed=1), normal(keys, 5, seed=2)
    mask = normal(9, keys, seed=3) > -0.3 if masked else torch.ones(9, keys, dtype=torch.bool)
    mask[0, 2:] = False  # 2 keys
    given = mask if masked else None
    want = faded_by_hand(query, key, value, k, gap, mask if masked else torch.ones_like(mask))
    got = khot.nn.topk_attention(query, key, value, k, given, hard=True, gap=gap)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys", [12, 640])
def test_derivatives_with_a_gap(keys: int) -> None:
    """In the scores of the chosen keys and of the next one; of both ways."""
    query, key, value = (normal(*shape, seed=i) for i, shape in enumerate([(2, 4), (keys, 4), (keys, 3)]))
    few = torch.arange(6)

    def attend(q: Tensor, part: Tensor) -> Tensor:
        keys_ = key.index_copy(0, few, part)
        return khot.nn.topk_attention(q, keys_, value, 3, hard=True, gap=2.0)

    inputs = (query.requires_grad_(), (3 * key[few]).detach().requires_grad_())
    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_the_layer_fades_in_eval_mode() -> None:
    layer = TopKAttention(8, 2, 2, gap=4.0, batch_first=True)
    plain = TopKAttention(8, 2, 2, batch_first=True)
    plain.load_state_dict(layer.state_dict())
    x = normal(2, 7, 8).float()
    assert torch.equal(layer(x, x, x)[0], plain(x, x, x)[0])
    output, weights = layer.eval()(x, x, x, average_attn_weights=False)
    assert weights is not None and bool(((weights > 0).sum(-1) == 2).all())
    q, k, v = layer._heads(x, x, x)
    want = khot.nn.topk_attention(q, k, v, 2, hard=True, gap=4.0)
    torch.testing.assert_close(output, layer.out_proj(want.transpose(1, 2).flatten(-2)))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], output)
    assert not torch.allclose(output, plain.eval()(x, x, x)[0])
    assert "gap=4.0" in repr(layer)


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"candidates": 3, "hard": True}, ValueError, "candidates must be None with hard=True, but got 3"),
        ({"candidates": 1}, ValueError, "top_k must be at most candidates = 1, but got 2"),
        ({"hard": True, "gap": 0}, ValueError, "gap must be finite and > 0, but got 0"),
        ({"gap": 1.0}, ValueError, "gap must be None without hard=True"),
        ({"dropout_p": 2}, ValueError, r"dropout_p must lie in \[0, 1\], but got 2"),
        ({"scale": "a"}, TypeError, "scale must be a real number, but got str"),
        ({"is_causal": True, "attn_mask": torch.ones(4, 6).bool()}, ValueError, "is_causal"),
        *(
            ({name: torch.ones(shape)}, ValueError, rf"^{name} must broadcast to the shape \(2, 3, 4\)")
            for name in ("top_k", "tau")
            for shape in ((3,), (6,), (2, 1, 1, 4))
        ),
        *(
            ({"attn_mask": torch.ones(shape, dtype=dtype)}, ValueError, "^attn_mask must broadcast")
            for shape in ((3, 3), (4, 1, 6), (5, 1, 4, 6), (6, 4))
            for dtype in (torch.bool, torch.float64)
        ),
        ({"key": qkv()[1][:, :2]}, ValueError, r"^query, key and value must have batch .* \(2, 2, 6, 5\)"),
        ({"query": normal(5)}, ValueError, r"^query must have at least 2 dims, but got shape \(5,\)"),
        ({"key": qkv()[1].float()}, TypeError, r"^key must .* torch\.float64, but got torch\.float32"),
        ({"value": qkv()[2].bfloat16()}, TypeError, r"^value must .* but got torch\.bfloat16"),
    ],
)
@pytest.mark.parametrize("hard", [False, True])
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], message: str, hard: bool) -> None:
    q, k, v = qkv()
    given = {"query": q, "key": k, "value": v, "top_k": 2}
    if not {"candidates", "gap"} & set(changed):  # which go with one of the two
        given["hard"] = hard
    with pytest.raises(error, match=message):
        topk_attention(**given | changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"indices": INDICES.int()}, TypeError, "indices must have dtype torch.int64, but got torch.int32"),
        ({"indices": INDICES + 6}, ValueError, r"indices must be in \[0, 6\), but got "),
        ({"indices": INDICES - 7}, ValueError, r"indices must be in \[0, 6\), but got -"),
        ({"indices": INDICES[:, :, :3]}, ValueError, r"indices must have shape \(..., 4, k\)"),
        ({"indices": INDICES[:, :2]}, ValueError, "batch dims that broadcast"),
        ({"attn_mask": torch.ones(4, 6).bool()}, ValueError, "attn_mask must broadcast"),
        ({"attn_mask": torch.ones(4, 3).int()}, TypeError, "attn_mask must be bool or floating-point"),
        ({"query": qkv()[0].float()}, TypeError, "dtype"),
        ({"dropout_p": 2}, ValueError, r"dropout_p must lie in \[0, 1\], but got 2"),
        ({"scale": "a"}, TypeError, "scale must be a real number, but got str"),
    ],
)
def test_bad_arguments_beside_given_keys(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = qkv()
    with pytest.raises(error, match=message):
        selected_attention(**{"query": q, "key": k, "value": v, "indices": INDICES, **changed})


@pytest.mark.parametrize("heads", [(2, 4), (4, 3), (4, 0)], ids=str)
def test_heads_that_do_not_divide_the_queries(heads: tuple[int, int]) -> None:
    own, others = heads
    q, good, bad = normal(2, own, 4, 5), normal(2, 1, 6, 5), normal(2, others, 6, 5)
    for name, k, v in (("key", bad, good), ("value", good, bad)):
        with pytest.raises(ValueError, match=rf"^{name} must .* the query's, {own}, but got {others}$"):
            topk_attention(q, k, v, 2, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^query and key must have at least 3 .* \(4, 5\) and \(6, 5\)$"):
        topk_attention(q[0, 0], good[0, 0], good[0, 0], 2, enable_gqa=True)
    with pytest.raises(ValueError, match="num_heads"):
        TopKAttention(8, 3, 2)


def test_autocast_takes_several_dtypes() -> None:
    q, k, v = (x.float() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        assert topk_attention(q, k.bfloat16(), v, 2).dtype == torch.bfloat16
