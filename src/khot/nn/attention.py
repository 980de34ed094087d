"""Attention to the k best keys of each query."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.parts import in_parts
from khot._ops.product import product
from khot.cdfs import CDF, CDFName
from khot.nn._inputs import check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Value, available, current, describe, positive

__all__ = ["TopKAttention", "topk_attention"]


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    top_k: Scalar,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    hard: bool = False,
) -> Tensor:
    """Attention in which each query attends to its k best keys, which are chosen softly.

    With scores s = scale · query keyᵀ and the soft top-k A of each row of them:

        softmax(s + log A) value,   A = soft_topk(s, top_k, tau=tau)

    so that the weight of a key outside the top k is multiplied by the small factor A. For ``top_k`` = S, the
    number of keys, A = 1 and this is ``torch.nn.functional.scaled_dot_product_attention``, whose signature it
    has.

    Args:
        query: (..., L, E), of any floating-point dtype.
        key: (..., S, E).
        value: (..., S, Ev).
        top_k: how many keys a query attends to, ≥ 0; a number or a tensor that broadcasts with (..., L). A
            row with fewer keys that may be attended to, such as the first ones of a causal mask, gets them
            all.
        attn_mask: broadcastable to (..., L, S); bool, True where a key may be attended to, or of the query's
            dtype, added to the scores before the selection (−inf: may not be attended to).
        dropout_p: probability of dropping a weight. Applied whenever it is > 0, as in PyTorch.
        is_causal: query i attends to the keys 0 to i only. Not together with ``attn_mask``.
        scale: of the scores; 1/√E by default.
        enable_gqa: the number of heads (dim −3) of key and value divides the query's, and each of theirs
            serves a group.
        tau, cdf: of the selection, in the units of the scores, as for :func:`khot.soft_topk`. With compact
            support (``"uniform"``) weights outside the selection are exactly 0.
        hard: attend to exactly the ⌊top_k + ½⌋ best keys, by a softmax over them. The selection then has no
            gradient; the weights have.

    Returns:
        (..., L, Ev), of the query's dtype. Selection and softmax are computed in float32 at least. Queries
        that may attend to nothing get 0, with zero gradient.

    The gradient is exact, through the scores as well as through the selection. Queries are taken in parts
    whose weights are computed again in the backward pass, so that memory beyond the output is O(L + S) and
    not O(L·S). Under ``torch.compile`` there are at most 16 parts; under the transforms of ``torch.func`` and
    in exported programs there is one.

    Raises:
        ValueError: both ``attn_mask`` and ``is_causal``; top_k or tau out of range; an argument of a
            shape that does not fit; with ``enable_gqa``, a number of heads that does not divide the query's.
        TypeError: query, key and value of different dtypes (autocast takes them), and as
            :func:`khot.soft_topk`.

    Source: Xie et al. 2020, appendix I.3.

    Example:
        >>> query, key, value = torch.randn(3, 2, 5, 8).unbind()
        >>> khot.nn.topk_attention(query, key, value, top_k=2, tau=0.1).shape
        torch.Size([2, 5, 8])
        >>> plain = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> torch.allclose(khot.nn.topk_attention(query, key, value, top_k=5), plain, atol=1e-6)
        True
    """
    _check_inputs(query, key, value)
    arguments.check_flags(is_causal=is_causal, enable_gqa=enable_gqa, hard=hard)
    arguments.check_scalar(top_k, "top_k", low=0)
    arguments.check_scalar(tau, "tau", low=0, low_open=True)
    for name, value_ in (("top_k", top_k), ("tau", tau)):
        if isinstance(value_, Tensor):
            arguments.check_has_values(value_, name, query)
    if attn_mask is not None:
        arguments.check_bool_or_real(attn_mask, "attn_mask")
        arguments.check_has_values(attn_mask, "attn_mask", query)
    if enable_gqa:
        key, value = (_for_each_head(x, name, query) for x, name in ((key, "key"), (value, "value")))
    _check_shapes(query, key, value, top_k, tau, attn_mask)
    return _attend(query, key, value, top_k, attn_mask, dropout_p, is_causal, scale, tau, cdf, hard)


class TopKAttention(LeftSoft, nn.MultiheadAttention):
    """Multi-head attention in which every head of every query attends to its k best keys.

    ``torch.nn.MultiheadAttention`` with :func:`topk_attention` inside: the same parameters under the same
    names, so that either loads the other's state dict, the same calls, and the same masks. (In its boolean
    masks True means *may not* be attended to, the opposite of the masks of :func:`topk_attention`.) The
    selection is soft in train mode, and in eval mode hard: exactly the k best keys.

    Args:
        embed_dim: size of the embeddings of queries, keys and values.
        num_heads: number of heads, a divisor of ``embed_dim``.
        top_k: how many keys, > 0; a number or a module that gives one (:class:`khot.nn.Anneal`). A query with
            fewer keys attends to all of them.
        dropout: probability of dropping a weight, in train mode.
        bias: whether the projections have biases.
        batch_first: whether the batch, and not the sequence, comes first.
        tau: temperature of the selection, > 0, in the units of the scores; as ``top_k``.
        cdf: as for :func:`khot.soft_topk`.
        device, dtype: of the parameters.

    Shape:
        query: (N, L, E) with ``batch_first``, else (L, N, E); or (L, E) without a batch. key and value are
        alike, with S in the place of L.

        key_padding_mask: (N, S) or (S,); bool, True where a key is padding, or floating-point, added to the
        scores.

        attn_mask: (L, S) or (N·num_heads, L, S); bool, True where attending is forbidden, or floating-point.

        is_causal: without ``attn_mask``, a causal mask; with one, that is taken for it.

        need_weights: with False, memory is that of :func:`topk_attention`, not O(L·S) per head.

        Returns (output, weights): output of the query's shape; weights (N, L, S), averaged over the heads,
        (N, num_heads, L, S) with ``average_attn_weights=False``, or None with ``need_weights=False``. They
        are the weights before dropout.

    Raises:
        ValueError: top_k or tau out of range; an input or mask of another shape than the above, which are the
            shapes that ``torch.nn.MultiheadAttention`` takes.
        TypeError: an input that is not floating-point, a mask that is neither that nor bool.

    Source: Xie et al. 2020, appendix I.3.

    Example:
        >>> attention = khot.nn.TopKAttention(16, 4, top_k=2, tau=0.1, batch_first=True).eval()
        >>> x = torch.randn(3, 10, 16)
        >>> output, weights = attention(x, x, x, average_attn_weights=False)
        >>> output.shape, bool(((weights > 0).sum(-1) == 2).all())
        (torch.Size([3, 10, 16]), True)
    """

    top_k: Value
    tau: Value
    cdf: CDF

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        top_k: Value,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        arguments.check_integer(embed_dim, "embed_dim", low=1)
        arguments.check_integer(num_heads, "num_heads", low=1)
        arguments.check_flags(bias=bias, batch_first=batch_first)
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"num_heads must be a divisor of embed_dim, but got {num_heads} for embed_dim {embed_dim}"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        # otherwise the fast path of nn.TransformerEncoderLayer would use the weights and attend to every key
        self._qkv_same_embed_dim = False
        self.top_k, self.tau = positive(top_k, "top_k"), positive(tau, "tau")
        self.cdf = cdfs.resolve(cdf)

    def _reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def reset_parameters(self) -> None:
        """As in ``torch.nn.MultiheadAttention``."""
        self.out_proj.reset_parameters()
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        arguments.check_flags(
            need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal
        )
        self._check(query, key, value, key_padding_mask, attn_mask)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._heads(query, key, value)
        if is_causal and attn_mask is None:
            attn_mask = q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(-1, 1, 1, k.shape[-2])
        mask = _added(attn_mask, key_padding_mask, q.dtype)

        top_k, tau = current(self.top_k), current(self.tau)
        dropout, hard = self.dropout if self.training else 0.0, not self.training
        weights = None
        if need_weights:
            weights = _weights(q, k, top_k, mask, False, None, tau, self.cdf, hard)
            if self.training:
                self._note(weights, top_k)
            output = F.dropout(weights, dropout) @ v
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            note = self._note if self.training else None
            output = _attend(q, k, v, top_k, mask, dropout, False, None, tau, self.cdf, hard, note)
        output = self.out_proj(output.transpose(1, 2).flatten(-2))
        if not batched:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        """Raise where the base class does, because broadcasting and views would take other shapes, too."""
        inputs = {"query": query, "key": key, "value": value}
        for name, x in inputs.items():
            arguments.check_input(x, name)
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                allowed = "2 dims, or 3 with a batch" if x is query else f"{query.dim()} dims, as query has"
                raise ValueError(f"{name} must have {allowed}, but got shape {tuple(x.shape)}")
            check_width(x, self.embed_dim, self, name)
        if key.shape != value.shape:
            raise ValueError(
                f"key and value must have the same shape, but got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        batch: tuple[int, ...] = ()
        if query.dim() == 3:
            if query.shape[1 - self.batch_first] != key.shape[1 - self.batch_first]:
                order = f"with batch_first={self.batch_first} it is dim {1 - self.batch_first}"
                raise ValueError(
                    f"query and key must have the same batch size ({order}), but got shapes "
                    f"{tuple(query.shape)} and {tuple(key.shape)}"
                )
            batch = (query.shape[1 - self.batch_first],)
        along = -2 if self.batch_first or not batch else 0
        length, keys = query.shape[along], key.shape[along]
        heads = math.prod(batch) * self.num_heads
        allowed_shapes = {
            "key_padding_mask": (key_padding_mask, [(*batch, keys)]),
            "attn_mask": (attn_mask, [(length, keys), (heads, length, keys)]),
        }
        for name, (mask, shapes) in allowed_shapes.items():
            if mask is None:
                continue
            if not (mask.dtype == torch.bool or mask.is_floating_point()):
                raise TypeError(f"{name} must be bool or floating-point, but got {mask.dtype}")
            if tuple(mask.shape) not in shapes:
                said = " or ".join(map(str, shapes))
                raise ValueError(f"{name} must have shape {said}, but got {tuple(mask.shape)}")

    def _heads(self, *inputs: Tensor) -> list[Tensor]:
        """Query, key and value, projected: (N, num_heads, length, E/num_heads)."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]

    def extra_repr(self) -> str:
        return describe(
            embed_dim=self.embed_dim, num_heads=self.num_heads, top_k=self.top_k, tau=self.tau, cdf=self.cdf
        )


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The sum of the masks as scores, −inf where a boolean one is True."""
    total = None
    for mask in (attn_mask, key_padding_mask):
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
            total = mask if total is None else total + mask
    return total


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        arguments.check_input(x, name)
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dims, but got shape {tuple(x.shape)}")
        # autocast casts all; a device that has none does not know the question
        if x.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, but got {x.dtype}")
    if query.shape[-1:] != key.shape[-1:]:
        raise ValueError(
            f"query and key must have the same size along their last dim, but got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if key.shape[-2:-1] != value.shape[-2:-1]:
        raise ValueError(
            f"key and value must have the same length along dim -2, but got shapes "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )


def _for_each_head(x: Tensor, name: str, query: Tensor) -> Tensor:
    """The heads of key or value, each repeated for the heads of the query that it serves."""
    if query.dim() < 3 or x.dim() < 3:
        raise ValueError(
            f"query and {name} must have at least 3 dims with enable_gqa, but got shapes "
            f"{tuple(query.shape)} and {tuple(x.shape)}"
        )
    heads, own = query.shape[-3], x.shape[-3]
    if not own or heads % own:
        raise ValueError(
            f"{name} must have a number of heads (dim -3) that divides the query's, {heads}, but got {own}"
        )
    return x.repeat_interleave(heads // own, -3)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, top_k: Scalar, tau: Scalar, attn_mask: Tensor | None
) -> None:
    """Raise for shapes that do not broadcast."""
    plain = attn_mask is None and not isinstance(top_k, Tensor) and not isinstance(tau, Tensor)
    if plain and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return
    batches = [query.shape[:-2], key.shape[:-2], value.shape[:-2]]
    if not all(_broadcast(*pair) for pair in itertools.combinations(batches, 2)):
        raise ValueError(
            f"query, key and value must have batch dims that broadcast, but got shapes {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    scores = (*arguments.broadcast_shape(*batches[:2]), query.shape[-2], key.shape[-2])
    if attn_mask is not None:
        mask = attn_mask.shape
        if not (_broadcast(mask, scores) and arguments.broadcasts(mask[-2:], scores[-2:])):
            raise ValueError(
                f"attn_mask must broadcast to the shape {scores} of the scores, but got {tuple(mask)}"
            )
        scores = tuple(arguments.broadcast_shape(mask, scores))  # the mask's batch may be the larger one
    for name, x in (("top_k", top_k), ("tau", tau)):
        if isinstance(x, Tensor) and not arguments.broadcasts(x.shape, scores[:-1]):
            raise ValueError(
                f"{name} must broadcast to the shape {scores[:-1]} of the queries, but got {tuple(x.shape)}"
            )


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes broadcast together."""
    return all(s == t or s == 1 or t == 1 for s, t in zip(a[::-1], b[::-1], strict=False))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    top_k: Scalar,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    tau: Scalar,
    cdf: CDFName | CDF,
    hard: bool,
    note: Callable[[Tensor, Scalar], None] | None = None,
) -> Tensor:
    """The output, in parts of the queries."""
    length = query.shape[-2]
    batch = math.prod(arguments.broadcast_shape(query.shape[:-2], key.shape[:-2]))

    def part(start: int, stop: int) -> Tensor:
        def of(x: Any, dim: int) -> Any:
            """The part of what may have an entry for each query."""
            per_query = isinstance(x, Tensor) and x.dim() >= -dim and x.shape[dim] == length > 1
            return x.narrow(dim, start, stop - start) if per_query else x

        queries = query[..., start:stop, :]
        weights = _weights(
            queries, key, of(top_k, -1), of(attn_mask, -2), is_causal, scale, of(tau, -1), cdf, hard, start
        )
        if note is not None and start == 0:
            note(weights, top_k)
        return F.dropout(weights, dropout_p) @ value

    # as many scores as the keys have entries do not count
    return in_parts(
        part, length, batch * key.shape[-2], least=query.shape[-1], preserve_rng_state=dropout_p > 0
    )


def _weights(
    query: Tensor,
    key: Tensor,
    top_k: Scalar,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tau: Scalar,
    cdf: CDFName | CDF,
    hard: bool,
    first: int = 0,
) -> Tensor:
    """The weights of the keys, for queries of which the first one has the given number."""
    if is_causal:
        if attn_mask is not None:
            raise ValueError("is_causal must be False where attn_mask is given, but got True")
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(first)
    if attn_mask is not None and not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(f"attn_mask must be bool or floating-point, but got {attn_mask.dtype}")
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = product(query, key.mT, scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask

    k = available(top_k, scores)
    log_A = masks.topk_mask(scores, k).log() if hard else masks.log_soft_topk(scores, k, tau=tau, cdf=cdf)
    logits = scores + log_A
    idle = (logits == -math.inf).all(-1, keepdim=True)  # softmax would turn them into NaN
    return logits.masked_fill(idle, 0).softmax(-1).masked_fill(idle, 0).to(query.dtype)
