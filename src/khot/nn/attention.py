"""Attention to the k best keys of each query."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, masks
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.parts import in_parts
from khot._core.precision import autocast_dtype
from khot._core.torch_internals import is_exporting, transforms_are_on
from khot._ops.product import product
from khot._ops.selected import Where, best_of_product, selected_dot, selected_sum
from khot.cdfs import CDF, CDFName
from khot.nn._inputs import check_width
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Value, available, current, describe, positive

__all__ = ["TopKAttention", "selected_attention", "topk_attention"]

# From so many keys on, and for at most this part of them, they are selected, and not weighed with all others.
LONG, FEW = 512, 8


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
    gap: float | None = None,
    candidates: int | None = None,
) -> Tensor:
    """Attention in which each query attends to its k best keys, which are chosen softly.

    With scores s = scale · query keyᵀ and the soft top-k A of each row of them:

        softmax(s + log A) value,   A = soft_topk(s, k)

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
        gap: None, or with ``hard`` a distance of scores c > 0: the weights of the k best keys then fade to 0
            towards the next score t, as softmax(s + log(1 − exp(−(s − t)/c))). They are continuous where one
            key takes the place of another, and at most those of a softmax over the k keys where scores are
            close to t, as the soft selection has it in training. Where no score is above t, or no key is
            left, it is a softmax over the k keys.
        candidates: None, or m: choose softly among the m best keys of each query instead of all, with A the
            soft top-k of their m scores, and 0 weight for all others. From some thousands of keys on this
            takes less time and O(L·m + S) memory. The smaller τ, the less it differs from the choice among
            all: of 8,192 scores of deviation 1, with top_k = 32 and m = 128, A differs by at most 0.01 at
            τ = 0.1 and 2e-6 at 0.03, but by a half at τ = 1. With compact support it does not differ where
            the m-th score is too low to be selected at all. Not together with ``hard``.

    Returns:
        (..., L, Ev), of the query's dtype. Selection and softmax are computed in float32 at least. Queries
        that may attend to nothing get 0, with zero gradient.

    The gradient is exact, through the scores as well as through the selection. Queries are taken in parts
    whose weights are computed again in the backward pass, so that memory beyond the output is O(L + S) and
    not O(L·S). Under ``torch.compile`` there are at most 16 parts; under the transforms of ``torch.func`` and
    in exported programs there is one.

    With ``hard`` and a number ``top_k`` of at most S/8, from 512 keys on, only the selected keys are weighed
    and summed, which takes less time than attention to all from some thousands of keys on. Memory is then
    O(L·top_k + S). Under ``torch.compile`` and the transforms of ``torch.func`` this is done where
    ``top_k``·E is at most S, since the selected rows may be gathered there, with O(L·top_k·E) memory; and in
    exported programs it is not, since they fit every length.

    Raises:
        ValueError: both ``attn_mask`` and ``is_causal``, or ``hard`` and ``candidates``; top_k, tau or
            candidates out of range; an argument of a shape that does not fit; with ``enable_gqa``, a number
            of heads that does not divide the query's.
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
    _check_numbers(dropout_p, scale)
    arguments.check_flags(is_causal=is_causal, enable_gqa=enable_gqa, hard=hard)
    arguments.check_scalar(top_k, "top_k", low=0)
    arguments.check_scalar(tau, "tau", low=0, low_open=True)
    cdf = cdfs.resolve(cdf)
    for name, value_ in (("top_k", top_k), ("tau", tau)):
        if isinstance(value_, Tensor):
            arguments.check_has_values(value_, name, query)
    if attn_mask is not None:
        arguments.check_bool_or_real(attn_mask, "attn_mask")
        arguments.check_has_values(attn_mask, "attn_mask", query)
    if enable_gqa:
        key, value = (_for_each_head(x, name, query) for x, name in ((key, "key"), (value, "value")))
    _check_shapes(query, key, value, top_k, tau, attn_mask)
    if candidates is not None:
        arguments.check_integer(candidates, "candidates", low=1)
        if hard:
            raise ValueError(f"candidates must be None with hard=True, but got {candidates}")
        _check_candidates(candidates, top_k)
    if gap is not None:
        _check_gap(gap)
        if not hard:
            raise ValueError(f"gap must be None without hard=True, but got {gap}")
    return _attend(
        query, key, value, top_k, attn_mask, dropout_p, is_causal, scale, tau, cdf, hard, gap, candidates
    )


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of each query to keys that something else has chosen: an indexer, a retriever, blocks.

        softmax_j(scale · ⟨query_i, key_indices[i, j]⟩) value_indices[i, j]

    It is ``torch.nn.functional.scaled_dot_product_attention`` with a mask that leaves these keys, for less
    time and memory. :func:`khot.linear_topk` chooses such indices from the scores of an indexer without
    keeping these.

    Args:
        query: (..., L, E), of any floating-point dtype.
        key: (..., S, E).
        value: (..., S, Ev).
        indices: (..., L, k), int64, in [0, S). A key that is there twice counts twice.
        attn_mask: None, or broadcastable to (..., L, k); bool, True where the chosen key may be attended to,
            or of the query's dtype, added to the scores.
        dropout_p: probability of dropping a weight. Applied whenever it is > 0, as in PyTorch.
        scale: of the scores; 1/√E by default.
        enable_gqa: the number of heads (dim −3) of key, value and indices divides the query's, and each of
            theirs serves a group.

    Returns:
        (..., L, Ev), of the query's dtype. Scores and softmax are computed in float32 at least. Queries that
        may attend to nothing get 0, with zero gradient.

    The gradient in query, key, value and a floating-point mask is exact, to any order and in both modes.
    Memory beyond the output is O(L·k + S). Under ``torch.compile`` and the transforms of ``torch.func`` the
    selected rows of key and value are gathered: O(L·k·E).

    Raises:
        ValueError: indices out of their range, where they can be read without waiting for a device; an
            argument of a shape that does not fit.
        TypeError: query, key and value of different dtypes (autocast takes them); indices of another dtype.

    Source: the attention that DeepSeek-AI 2025 (sparse attention) applies after its indexer.

    Example:
        >>> query, key, value = torch.randn(3, 2, 5, 8).unbind()
        >>> indices = khot.topk(torch.randn(2, 5, 5), 3).indices
        >>> khot.nn.selected_attention(query, key, value, indices).shape
        torch.Size([2, 5, 8])
    """
    _check_inputs(query, key, value)
    _check_numbers(dropout_p, scale)
    arguments.check_flags(enable_gqa=enable_gqa)
    arguments.check_tensor(indices, "indices")
    arguments.check_has_values(indices, "indices", query)
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must have dtype torch.int64, but got {indices.dtype}")
    if attn_mask is not None:
        arguments.check_bool_or_real(attn_mask, "attn_mask")
        arguments.check_has_values(attn_mask, "attn_mask", query)
        _check_mask(attn_mask, False)
    if enable_gqa:
        key, value = (_for_each_head(x, name, query) for x, name in ((key, "key"), (value, "value")))
        indices = _for_each_head(indices, "indices", query)
    batch = _check_indices(query, key, value, indices, attn_mask)
    indices = indices.expand(*batch, *indices.shape[-2:])
    scores = selected_dot(*_scaled(query, key, scale, batch), indices)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _summed(_softmax(scores), query, value, indices, dropout_p, batch)


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
        gap: as for :func:`topk_attention`, in eval mode. In train mode it changes nothing.
        candidates: as for :func:`topk_attention`, in train mode. In eval mode it changes nothing.
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
        ValueError: top_k, tau or candidates out of range; an input or mask of another shape than the above,
            which are the shapes that ``torch.nn.MultiheadAttention`` takes.
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
    gap: float | None
    candidates: int | None

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
        gap: float | None = None,
        candidates: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        arguments.check_integer(embed_dim, "embed_dim", low=1)
        arguments.check_integer(num_heads, "num_heads", low=1)
        arguments.check_flags(bias=bias, batch_first=batch_first)
        if gap is not None:
            _check_gap(gap)
        if candidates is not None:
            arguments.check_integer(candidates, "candidates", low=1)
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
        self.cdf, self.gap, self.candidates = cdfs.resolve(cdf), gap, candidates

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
        is_causal = is_causal and attn_mask is None
        if is_causal and key_padding_mask is not None:
            attn_mask = q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
            is_causal = False
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(-1, 1, 1, k.shape[-2])
        mask = _joined(attn_mask, key_padding_mask, q.dtype)

        top_k, tau = current(self.top_k), current(self.tau)
        dropout, hard = self.dropout if self.training else 0.0, not self.training
        candidates = self.candidates if self.training else None
        if candidates is not None:
            _check_candidates(candidates, top_k)
        weights = None
        if need_weights:
            weights = _weights(q, k, top_k, mask, is_causal, None, tau, self.cdf, hard, self.gap, candidates)
            if self.training:
                self._note(weights, top_k)
            output = F.dropout(weights, dropout) @ v
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            note = self._note if self.training else None
            output = _attend(
                q,
                k,
                v,
                top_k,
                mask,
                dropout,
                is_causal,
                None,
                tau,
                self.cdf,
                hard,
                self.gap,
                candidates,
                note,
            )
        output = self.out_proj(output.transpose(1, 2).flatten(-2))
        if not batched:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights

    if TYPE_CHECKING:
        __call__ = forward

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
        among = {"gap": self.gap, "candidates": self.candidates}
        among = {name: value for name, value in among.items() if value is not None}
        return describe(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            top_k=self.top_k,
            tau=self.tau,
            cdf=self.cdf,
            **among,
        )


def _joined(attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One mask for :func:`topk_attention`: of boolean ones a boolean one, True where attending is allowed;
    otherwise their sum as scores, −inf where a boolean one is True."""
    given = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if given and all(mask.dtype == torch.bool for mask in given):
        return ~functools.reduce(torch.logical_or, given)
    total = None
    for mask in given:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
        total = mask if total is None else total + mask
    return total


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        arguments.check_input(x, name)
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dims, but got shape {tuple(x.shape)}")
        # autocast casts all
        if x.dtype != query.dtype and autocast_dtype(query.device) is None:
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


def _check_numbers(dropout_p: float, scale: float | None) -> None:
    arguments.check_number(dropout_p, "dropout_p", low=0, high=1)
    if not (scale is None or isinstance(scale, Tensor)):
        arguments.check_number(scale, "scale", low=-math.inf, high=math.inf)


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


def _check_indices(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, attn_mask: Tensor | None
) -> Sequence[int]:
    """Raise for shapes that do not broadcast, and for indices of keys that are not there.

    Returns:
        The batch shape of all together.
    """
    length, keys = query.shape[-2], key.shape[-2]
    batches = [x.shape[:-2] for x in (query, key, value, indices)]
    if indices.dim() < 2 or indices.shape[-2] != length:
        raise ValueError(f"indices must have shape (..., {length}, k), but got {tuple(indices.shape)}")
    if not all(_broadcast(*pair) for pair in itertools.combinations(batches, 2)):
        raise ValueError(
            "query, key, value and indices must have batch dims that broadcast, but got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} and {tuple(indices.shape)}"
        )
    if indices.numel() and arguments.readable(indices):
        low, high = (int(v) for v in indices.aminmax())
        if low < 0 or high >= keys:
            raise ValueError(f"indices must be in [0, {keys}), but got {low if low < 0 else high}")
    batch = arguments.broadcast_shape(*batches)
    if attn_mask is not None:
        shape = (*batch, *indices.shape[-2:])
        if not arguments.broadcasts(attn_mask.shape, shape):
            raise ValueError(
                f"attn_mask must broadcast to the shape {shape} of the indices, but got "
                f"{tuple(attn_mask.shape)}"
            )
    return batch


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
    gap: float | None,
    candidates: int | None = None,
    note: Callable[[Tensor, Scalar], None] | None = None,
) -> Tensor:
    """The output, by sums over the keys that are selected, or in parts of the queries."""
    if candidates is not None or (hard and _selects(top_k, query, key)):
        batch_shape = _batch(query, key, value, attn_mask)
        weights, indices = _weights_of_best(
            query, key, top_k, attn_mask, is_causal, scale, tau, cdf, gap, candidates, batch_shape
        )
        if note is not None:
            note(weights, top_k)
        return _summed(weights, query, value, indices, dropout_p, batch_shape)
    length = query.shape[-2]
    batch = math.prod(arguments.broadcast_shape(query.shape[:-2], key.shape[:-2]))

    def part(start: int, stop: int) -> Tensor:
        def of(x: Any, dim: int) -> Any:
            """The part of what may have an entry for each query."""
            per_query = isinstance(x, Tensor) and x.dim() >= -dim and x.shape[dim] == length > 1
            return x.narrow(dim, start, stop - start) if per_query else x

        queries = query[..., start:stop, :]
        weights = _weights(
            queries,
            key,
            of(top_k, -1),
            of(attn_mask, -2),
            is_causal,
            scale,
            of(tau, -1),
            cdf,
            hard,
            gap,
            first=start,
        )
        if note is not None and start == 0:
            note(weights, top_k)
        return F.dropout(weights, dropout_p) @ value

    # as many scores as the keys have entries do not count
    entries = batch * key.shape[-2]
    options: dict[str, Any] = {"least": query.shape[-1], "preserve_rng_state": dropout_p > 0}
    return in_parts(part, length, entries, query.device, **options)


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
    gap: float | None,
    candidates: int | None = None,
    first: int = 0,
) -> Tensor:
    """The weights of the keys, for queries of which the first one has the given number."""
    _check_mask(attn_mask, is_causal)
    if candidates is not None:
        batch = _batch(query, key, attn_mask)
        weights, indices = _weights_of_best(
            query, key, top_k, attn_mask, is_causal, scale, tau, cdf, gap, candidates, batch
        )
        of_all = weights.new_zeros(*weights.shape[:-1], key.shape[-2])
        return of_all.scatter(-1, indices, weights).to(query.dtype)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(first)
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = product(query, key.mT, scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask

    k = available(top_k, scores)
    if not hard:
        return _softmax(scores + masks.log_soft_topk(scores, k, tau=tau, cdf=cdf)).to(query.dtype)
    mask = masks.topk_mask(scores, k)
    chosen = scores + mask.log()
    if gap is not None and scores.shape[-1]:
        chosen = _faded(chosen, scores.masked_fill(mask > 0, -math.inf).amax(-1, keepdim=True), gap)
    return _softmax(chosen).to(query.dtype)


def _faded(scores: Tensor, next_: Tensor, gap: float) -> Tensor:
    """The scores of what is selected, −inf elsewhere, with weights that fade towards the next score."""
    distance = (scores - next_) / gap
    above = distance > 0
    fading = (-torch.expm1(-distance.masked_fill(~above, 1))).log().masked_fill(~above, -math.inf)
    return torch.where(next_.isfinite() & above.any(-1, keepdim=True), scores + fading, scores)


def _softmax(logits: Tensor) -> Tensor:
    """0 where all logits are −inf, which softmax would turn into NaN."""
    idle = (logits == -math.inf).all(-1, keepdim=True)
    return logits.masked_fill(idle, 0).softmax(-1).masked_fill(idle, 0)


def _check_gap(gap: float) -> None:
    arguments.check_number(gap, "gap", low=-math.inf, high=math.inf)
    if not 0 < gap < math.inf:
        raise ValueError(f"gap must be finite and > 0, but got {gap}")


def _check_candidates(candidates: int, top_k: Scalar) -> None:
    if isinstance(top_k, Tensor):
        arguments.check_values(top_k, "top_k", low=0, high=candidates)
    elif top_k > candidates:
        raise ValueError(f"top_k must be at most candidates = {candidates}, but got {top_k}")


def _check_mask(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is None:
        return
    if is_causal:
        raise ValueError("is_causal must be False where attn_mask is given, but got True")
    if not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(f"attn_mask must be bool or floating-point, but got {attn_mask.dtype}")


def _selects(top_k: Scalar, query: Tensor, key: Tensor) -> TypeGuard[float]:
    """Whether exactly the best keys are to be selected and the others left alone, which takes less time and
    memory from some length on. It takes one number of keys for all queries."""
    if is_exporting():  # a program that fits every length may not depend on it
        return False
    keys, number = key.shape[-2], isinstance(top_k, (int, float))
    if not number or keys < LONG or top_k > keys / FEW or top_k < 0.5 or not query.numel():
        return False
    # where the selected rows of key and value are gathered, they may not take more memory than the scores
    gathers = torch.compiler.is_compiling() or transforms_are_on()
    return not (gathers and bool(top_k * query.shape[-1] > keys))


def _batch(*tensors: Tensor | None) -> Sequence[int]:
    """The batch dims of tensors (*batch, ., .) together."""
    return arguments.broadcast_shape(*(x.shape[:-2] for x in tensors if x is not None))


def _weights_of_best(
    query: Tensor,
    key: Tensor,
    top_k: Scalar,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tau: Scalar,
    cdf: CDFName | CDF,
    gap: float | None,
    candidates: int | None,
    batch: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The weights of the best keys and their indices, (*batch, L, m) each: of so many candidates, among which
    the selection is soft; without candidates of exactly top_k keys. A part of the scores at a time is in
    memory, and none is kept."""
    _check_mask(attn_mask, is_causal)
    length, keys = query.shape[-2], key.shape[-2]
    if candidates is None:
        assert not isinstance(top_k, Tensor)
        count = math.floor(top_k + 0.5) + (gap is not None)
    else:
        count = min(candidates, keys)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*batch, length, keys)
    queries, keys_of_all = _scaled(query, key, scale, batch)

    def masked(where: Where, scores: Tensor) -> Tensor:
        whole = where[-1] is ...  # under a trace or a transform, where nothing is to be changed in place
        if is_causal:
            first = 0 if whole else where[-1].start
            closed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        else:
            assert attn_mask is not None
            mask = attn_mask.detach()[where]
            if mask.dtype != torch.bool:
                return scores + mask
            closed = ~mask
        return scores.masked_fill(closed, -math.inf) if whole else scores.masked_fill_(closed, -math.inf)

    scores, indices = best_of_product(
        queries,
        keys_of_all,
        count,
        adjust=masked if is_causal or attn_mask is not None else None,
        columns=(lambda queries: queries) if is_causal else None,
    )
    if attn_mask is not None and attn_mask.dtype != torch.bool:  # which has a derivative, too
        logits = selected_dot(queries, keys_of_all, indices) + attn_mask.gather(-1, indices)
    else:
        logits = selected_dot(queries, keys_of_all, indices, known=scores)
    if candidates is not None:
        k = available(top_k, logits)
        logits = logits + masks.log_soft_topk(logits, k, tau=tau, cdf=cdf)
    elif gap is not None:
        logits, indices = _faded(logits[..., :-1], logits[..., -1:], gap), indices[..., :-1]
    return _softmax(logits), indices


def _scaled(query: Tensor, key: Tensor, scale: float | None, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Query and key for scores in float32 at least, with all batch dims."""
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    queries = query.to(wide) * scale
    return queries.expand(*batch, *query.shape[-2:]), key.to(wide).expand(*batch, *key.shape[-2:])


def _summed(
    weights: Tensor, query: Tensor, value: Tensor, indices: Tensor, dropout_p: float, batch: Sequence[int]
) -> Tensor:
    """The sums of the selected values, in the dtype that a product of weights and values has."""
    weights = F.dropout(weights.to(query.dtype), dropout_p)
    return selected_sum(weights, value.expand(*batch, *value.shape[-2:]), indices).to(
        autocast_dtype(query.device) or query.dtype
    )
