"""Nearest neighbours that train the features they are found in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from khot import cdfs, masks
from khot._core import arguments
from khot._core.parts import in_parts
from khot._core.precision import at_least_single, wide_dtype
from khot._kernels.reference.selected import gathered
from khot._ops.selected import Where, best_of_product, selected_dot
from khot.cdfs import CDF, CDFName
from khot.nn._export import to_onnx
from khot.nn._left_soft import LeftSoft
from khot.nn._values import Positive, Value, available, current, describe, number, positive
from khot.selection import topk

__all__ = ["SoftKNN"]

# So many more templates than are asked for are measured exactly, because products that are nearly equal are
# rounded and may be in the wrong order.
SPARE = 16


class SoftKNN(LeftSoft):
    """A k-nearest-neighbour classifier whose choice of neighbours is soft, so that features can be trained.

    With the Euclidean distances d from a query to the templates, and their labels:

        A = soft_topk(−d, k),   p_c = Σ A over the templates of class c / ΣA

    In eval mode A is hard, and p_c the share of the k nearest neighbours that vote for c.

    Args:
        k: how many neighbours, ≥ 1; a number or a module that gives one (:class:`khot.nn.Anneal`). If there
            are fewer templates, all of them are neighbours.
        num_classes: labels are 0 to num_classes − 1.
        tau: temperature > 0, in the units of the distances; as k.
        cdf: as for :func:`khot.soft_topk`.
        learnable_tau: learn the temperature; tau is then the first value, a number. It stays positive.
        candidates: None, or m: choose among the m nearest templates of each query instead of all, with A the
            soft top-k of their m distances, and 0 for all others. This takes O(q·m) memory instead of one
            distance for each pair, and less time from some thousands of templates on. The smaller τ beside
            the distance that the m-th template is behind the k-th, the less it differs from the choice among
            all; in eval mode it does not differ.
        device, dtype: of a learned tau.

    Shape:
        query: features (..., q, d), of any floating-point dtype.

        template: features (..., m, d).

        label: int64, (..., m), of the templates.

        mask: bool, broadcastable to (..., q, m); True where a template may be a neighbour: False for padding,
        which is ignored, even NaN and inf, and on the diagonal (``~torch.eye(m, dtype=torch.bool)``) where
        the queries are the templates.

        output: probabilities (..., q, num_classes) of the query's dtype, computed in float32 at least. NaN
        where no template may be a neighbour.

    Differentiable in query, template, k and tau: exactly, to first order (torch.cdist has no second), or to
    any order with ``candidates``; at distance 0, where a distance has a kink, with gradient 0.

    With ``candidates``, and in :meth:`predict`, the nearest templates are found by products in float32 at
    least, of features whose mean is subtracted; the distances of those that were found, and of 16 more, are
    then computed again from the differences. On a CPU in eager mode, queries for which the products may be
    too coarse for the choice are done again in float64, so that it is that of the distances. Elsewhere
    nothing tells: there, clusters or outliers that are a thousand times as far apart as neighbours can
    change it.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed. k may be at most
            ``candidates``.

    Source: Xie et al. 2020, appendix C; the learned temperature after Struski et al. 2025.

    Example:
        >>> template = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0]])
        >>> label = torch.tensor([0, 0, 1, 1, 1])
        >>> knn = khot.nn.SoftKNN(3, num_classes=2, tau=0.5)
        >>> knn(torch.tensor([[0.4]]), template, label)
        tensor([[0.6666, 0.3334]])
        >>> knn.predict(torch.tensor([[0.4], [9.0]]), template, label)
        tensor([0, 1])
    """

    k: Value | int
    tau: Value | Positive
    num_classes: int
    cdf: CDF
    candidates: int | None

    def __init__(
        self,
        k: Value,
        num_classes: int,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        learnable_tau: bool = False,
        candidates: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.check_integer(num_classes, "num_classes", low=1)
        k = number(k, "k", low=1)
        arguments.check_flags(learnable_tau=learnable_tau)
        if candidates is not None:
            arguments.check_integer(candidates, "candidates", low=1)
        tau = positive(tau, "tau")
        self.k, self.tau = k, Positive(tau, "tau", device, dtype) if learnable_tau else tau
        self.num_classes, self.cdf, self.candidates = num_classes, cdfs.resolve(cdf), candidates

    def reset_parameters(self) -> None:
        """Back to the tau that the layer was made with, if it is learned."""
        if isinstance(self.tau, Positive):
            self.tau.reset_parameters()

    def forward(self, query: Tensor, template: Tensor, label: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(query, template, label)
        if mask is not None:
            mask = _pairs(query, template, mask)
            template = _without_padding(template, mask)
        k = current(self.k)
        if self.candidates is None:
            near = arguments.rows(-_distances(at_least_single(query), at_least_single(template)), -1, mask)
            label = label.unsqueeze(-2)
        else:
            if not isinstance(k, Tensor) and k > self.candidates:
                raise ValueError(f"k must be at most candidates = {self.candidates}, but got {k}")
            near, label = _nearest(query, template, label, self.candidates, mask)
        k = available(k, near)
        if self.training:
            A = masks.soft_topk(near, k, tau=current(self.tau), cdf=self.cdf)
            self._note(A)
        else:
            A = masks.topk_mask(near, k)
        votes = A.new_zeros(*A.shape[:-1], self.num_classes)
        votes = votes.scatter_add(-1, label.expand(A.shape), A)
        return (votes / A.sum(-1, keepdim=True)).to(query.dtype)

    if TYPE_CHECKING:
        __call__ = forward

    def loss(
        self,
        query: Tensor,
        query_label: Tensor,
        template: Tensor,
        label: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The expected error, 1 − p of the right class: the share of neighbours of other classes.

        The mean over the queries; in [0, 1]. It is bounded, so that a query among templates of another
        class does not dominate. (The paper's loss is −k times p, without the constant.)
        """
        arguments.check_input(query, "query")
        arguments.check_index(query_label, "query_label", query)
        p = self(query, template, label, mask)
        if query_label.shape != p.shape[:-1]:
            raise ValueError(
                f"query_label must have the shape {tuple(p.shape[:-1])} of the queries, but got "
                f"{tuple(query_label.shape)}"
            )
        self._check_classes(query_label, "query_label")
        return 1 - p.gather(-1, query_label.unsqueeze(-1)).mean()

    @torch.no_grad()
    def predict(self, query: Tensor, template: Tensor, label: Tensor) -> Tensor:
        """The class with the most votes among the k nearest of any number of templates.

        Hard, whatever the mode, and without a gradient. Memory is O(q·k + m), whatever ``candidates`` is.

        Args:
            query: (q, d).
            template: (m, d).
            label: (m,).

        Returns:
            Labels (q,). Of classes with equally many votes, the lowest. Of equally near templates, the first
            are the neighbours, as in eval mode.
        """
        self._check(query, template, label)
        if query.dim() != 2 or template.dim() != 2:
            raise ValueError(
                f"query and template must have shapes (q, d) and (m, d), but got {tuple(query.shape)} and "
                f"{tuple(template.shape)}"
            )
        m = template.shape[0]
        if not m:
            raise ValueError("template must have at least one row, but got none")
        k = min(max(math.floor(float(current(self.k)) + 0.5), 1), m)
        _, votes = _nearest(query, template, label, k)
        counts = votes.new_zeros(len(query), self.num_classes)
        return counts.scatter_add(-1, votes, torch.ones_like(votes)).argmax(-1)

    def _check(self, query: Tensor, template: Tensor, label: Tensor) -> None:
        arguments.check_input(query, "query")
        arguments.check_input(template, "template")
        if query.shape[-1:] != template.shape[-1:]:
            raise ValueError(
                f"query and template must have equally many features along their last dim, but got shapes "
                f"{tuple(query.shape)} and {tuple(template.shape)}"
            )
        if query.dim() < 2 or template.dim() < 2:
            raise ValueError(
                f"query and template must have shapes (..., q, d) and (..., m, d), but got "
                f"{tuple(query.shape)} and {tuple(template.shape)}"
            )
        arguments.check_index(label, "label", template)
        if label.shape != template.shape[:-1]:
            raise ValueError(
                f"label must have the template's shape without the last dim, {tuple(template.shape[:-1])}, "
                f"but got {tuple(label.shape)}"
            )
        self._check_classes(label, "label")

    def _check_classes(self, label: Tensor, name: str) -> None:
        if label.numel() and arguments.readable(label):
            least, most = (int(end) for end in label.aminmax())
            if least < 0 or most >= self.num_classes:
                bad = least if least < 0 else most
                raise ValueError(f"{name} must lie in [0, {self.num_classes - 1}], but got {bad}")

    def extra_repr(self) -> str:
        among = {} if self.candidates is None else {"candidates": self.candidates}
        return describe(k=self.k, num_classes=self.num_classes, tau=self.tau, cdf=self.cdf, **among)


def _pairs(query: Tensor, template: Tensor, mask: Tensor) -> Tensor:
    """The mask for all pairs, (..., q, m)."""
    batch = arguments.broadcast_shape(query.shape[:-2], template.shape[:-2])
    return arguments.mask_rows(
        mask, query.new_empty(1).expand(*batch, query.shape[-2], template.shape[-2]), -1
    )


def _without_padding(template: Tensor, mask: Tensor) -> Tensor:
    """The templates, 0 where the mask for all pairs lets no query choose them: NaN times a gradient of 0 is
    NaN."""
    choosing = mask.any(-2).long().sum_to_size(template.shape[:-1])
    return template.masked_fill((choosing == 0).unsqueeze(-1), 0)


def _distances(query: Tensor, template: Tensor) -> Tensor:
    if to_onnx():  # it has no cdist
        return (query.unsqueeze(-2) - template.unsqueeze(-3)).norm(dim=-1)
    return torch.cdist(query, template, compute_mode="donot_use_mm_for_euclid_dist")


def _nearest(
    query: Tensor, template: Tensor, label: Tensor, count: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Minus the distances of the nearest templates of each query, and the labels of these: (..., q, count).

    They come in the order of the templates, so that of equally near ones the first is chosen. Those that the
    mask for all pairs excludes are at −inf.
    """
    query, template = at_least_single(query), at_least_single(template)
    dtype = torch.promote_types(query.dtype, template.dtype)
    batch = arguments.broadcast_shape(query.shape[:-2], template.shape[:-2])
    query, template = (x.to(dtype).expand(*batch, *x.shape[-2:]) for x in (query, template))
    pairs = *batch, query.shape[-2], template.shape[-2]
    closed = None if mask is None else ~mask
    # products lose digits far from the origin
    known = template.detach().nan_to_num(0, 0, 0)
    known = known if closed is None else known.masked_fill(closed.all(-2).unsqueeze(-1), 0)
    centre = known.mean(-2, keepdim=True)
    indices, squared = _find(query.detach(), template.detach(), centre, min(count, pairs[-1]), closed)
    # what has the derivatives is added without its value, which has fewer digits
    query, template = query - centre, template - centre
    half = -template.square().sum(-1) / 2
    products = selected_dot(query, template, indices, half, torch.zeros_like(squared))
    formula = query.square().sum(-1, keepdim=True) - 2 * products
    squared = squared + (formula - formula.detach())
    apart = squared > 0  # at distance 0 the root has no derivative
    near = -squared.where(apart, 1).sqrt().where(apart, 0)
    if closed is not None:
        near = near.masked_fill(closed.gather(-1, indices), -math.inf)
    labels = label.unsqueeze(-2).expand(pairs).gather(-1, indices)
    return near, labels


def _find(
    query: Tensor, template: Tensor, centre: Tensor, count: int, closed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The indices of the nearest templates of each query in ascending order, and their squared distances."""
    q, t = query - centre, template - centre
    indices, squared, least = _measured(q, t, query, template, count, closed)
    wide = wide_dtype(query.device)
    if query.dtype == wide or not squared.numel() or not arguments.readable(least):
        return indices, squared
    # A template that is nearer than the farthest of these is no farther from the centre than both distances
    # together, and its product is at least that of a template as far as this one, up to rounding.
    length, far = q.norm(dim=-1), squared.amax(-1)
    rounding = 2 * math.sqrt(q.shape[-1]) * torch.finfo(q.dtype).eps * (length + far.sqrt()).square()
    unsure = ~((least == -math.inf) | (least + rounding < (length.square() - far) / 2))
    for at in unsure.any(-1).nonzero().tolist():
        where = (*at, unsure[tuple(at)])
        x, y = query[where], template[tuple(at)]
        own = None if closed is None else closed[where]
        indices[where], squared[where], _ = _measured(x.to(wide), y.to(wide), x, y, count, own)
    return indices, squared


def _measured(
    q: Tensor, t: Tensor, query: Tensor, template: Tensor, count: int, closed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest by the products of q and t, measured exactly, and the least of the products of those that
    were measured, (..., q)."""

    def masked(where: Where, scores: Tensor) -> Tensor:
        assert closed is not None
        return scores.masked_fill(closed[where], -math.inf)

    # the largest ⟨q, t⟩ − ‖t‖²/2 are the least ‖q − t‖²
    products, indices = best_of_product(
        q,
        t,
        min(count + SPARE, t.shape[-2]),
        -t.square().sum(-1) / 2,
        adjust=None if closed is None else masked,
    )
    whole = products.shape[-1] == t.shape[-2]
    least = products.new_full((), -math.inf) if whole else products[..., -1]
    indices = indices.sort(-1).values
    squared = _squared_distances(query, template, indices)
    seen = squared if closed is None else squared.masked_fill(closed.gather(-1, indices), math.inf)
    first = topk(-seen, count, sorted=False).indices.sort(-1).values
    return indices.gather(-1, first), squared.gather(-1, first), least.expand(squared.shape[:-1])


def _squared_distances(query: Tensor, template: Tensor, indices: Tensor) -> Tensor:
    """‖q − t‖² of queries and chosen templates, from the differences, of which a part is in memory."""

    def part(start: int, stop: int) -> Tensor:
        chosen = gathered(template, indices[..., start:stop, :])
        return (chosen - query[..., start:stop, None, :]).square().sum(-1)

    batch = math.prod(query.shape[:-2])
    return in_parts(part, query.shape[-2], batch * indices.shape[-1] * query.shape[-1], query.device)
