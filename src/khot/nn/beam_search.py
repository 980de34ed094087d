"""Beam search that can be trained through."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from khot._core import arguments
from khot._core.torch_internals import save_in_exports
from khot.selection import topk
from khot.transport import sorted_soft_topk

__all__ = ["Beams", "soft_beam_loss", "soft_beam_search"]

IGNORED = -100  # the target of a place that does not count, as torch.nn.functional.nll_loss has it

# (input, state) → (logits, state), all of them (B, beams, ·)
_Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Beams(NamedTuple):
    """What a beam search found, for a batch of B.

    Attributes:
        tokens: (B, k, length), int64; with a soft selection the tokens with the largest weight.
        log_likelihood: (B, k), of each sequence.
        log_probs: (B, length, V): the model's log-probabilities for each token of the likeliest sequence.
    """

    tokens: Tensor
    log_likelihood: Tensor
    log_probs: Tensor


save_in_exports(Beams, "khot.nn.Beams")


def soft_beam_search(
    step: _Step,
    embedding: Tensor,
    start: Tensor,
    state: Tensor,
    length: int,
    k: int,
    *,
    epsilon: float = 2.0,
    normalize: bool = False,
    end: int | None = None,
    hard: bool = False,
) -> Beams:
    """Beam search whose k best continuations are chosen softly, so that a model can be trained through it.

    At each step, the m beams times V tokens have the scores log L(beam) + log P(token | beam). Row l of A =
    ``khot.sorted_soft_topk(scores, k)`` holds the weights with which they become beam l. Its next input and
    its state are mixtures with these weights,

        Σ_ij A_(l,i,j) embedding_j    and    Σ_ij A_(l,i,j) state_i

    and its predecessor, its token and its likelihood are those with the largest weight.

    Args:
        step: one step of the decoder: from inputs (B, m, D) and states (B, m, H) to logits (B, m, V) and new
            states (B, m, H). m is 1 at first, and then k.
        embedding: of the tokens, (V, D).
        start: the first input, (B, D) or (D,).
        state: the first state, (B, H); where a decoder has several, concatenated.
        length: how many tokens to produce, at least 1.
        k: the number of beams, in [1, V].
        epsilon: regularisation > 0 of the selection, in units of log-likelihood. At 2 the odds of a
            continuation for two neighbouring beams are proportional to its likelihood. Far below 2 the choice
            is nearly hard, and the gradient through the choices of many steps, each of which is proportional
            to k/ε, becomes far larger than the rest. (The 0.1 of Xie et al. is with ``normalize``.)
        normalize: divide the costs of each row's selection by the largest of them, as
            :func:`khot.sorted_soft_topk` does; epsilon is then a share of it. (The published code divides by
            the largest cost of the batch.)
        end: the token that ends a sequence; an ended sequence is continued with this token only, at no cost.
            None: sequences have the full length.
        hard: choose hard, which is the usual beam search, for inference. The choice then has no gradient. Of
            equally likely continuations the one of the first beam comes first, and within a beam the one with
            the lowest token.

    Logits of −inf forbid tokens. Where fewer than k continuations are allowed, the other beams hold forbidden
    ones, with a log-likelihood of −inf. With a soft selection this needs eager mode on the CPU; elsewhere
    such an example is NaN.

    Returns:
        :class:`Beams`, sorted by likelihood if the selection is hard. log_probs and log_likelihood are
        differentiable in everything that the steps and the embedding depend on: exactly, except through the
        back-pointers, which are constant between ties.

    Raises:
        ValueError: k, length, epsilon out of range, a start that does not fit.
        TypeError: an embedding that is not a floating-point tensor.

    Source: Xie et al. 2020, Algorithm 2 and appendices D.2 and I.2.

    Example:
        >>> table = torch.randn(6, 4)  # the embedding of 6 tokens
        >>> cell, head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 6)
        >>> def step(x, h):
        ...     new = cell(x.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        ...     return head(new), new
        >>> beams = khot.nn.soft_beam_search(step, table, table[0], torch.zeros(2, 8), length=5, k=3)
        >>> beams.tokens.shape, beams.log_likelihood.shape, beams.log_probs.shape
        (torch.Size([2, 3, 5]), torch.Size([2, 3]), torch.Size([2, 5, 6]))
    """
    _check_first(embedding, start, state)
    B, V = state.shape[0], embedding.shape[0]
    arguments.check_flags(normalize=normalize, hard=hard)
    arguments.check_integer(k, "k", low=1, high=V)
    arguments.check_integer(length, "length", low=1)
    x, h = _first(embedding, start, state)
    likelihood = x.new_zeros(B, 1, dtype=torch.promote_types(x.dtype, torch.float32))
    over = torch.zeros(B, 1, dtype=torch.bool, device=x.device)
    said, pointers, tokens = [], [], []
    ranks = torch.arange(k, device=x.device)
    for _ in range(length):
        logits, h = step(x, h)
        log_p = logits.to(likelihood.dtype).log_softmax(-1)
        said.append(log_p)
        if end is not None:
            alone = torch.full((V,), -torch.inf, device=x.device, dtype=log_p.dtype)
            alone[end] = 0
            log_p = torch.where(over.unsqueeze(-1), alone, log_p)
        scores = (likelihood.unsqueeze(-1) + log_p).flatten(1)  # (B, mV)
        if hard:
            place = topk(scores.detach(), k).indices
            x = embedding[place % V]
            h = _along(h, place // V)
        else:
            allowed = (scores.detach() > -torch.inf).sum(-1)
            A = _choice(scores, k, allowed, epsilon, normalize)
            # a beam without a continuation gets one that is forbidden
            likeliest = topk(A.detach(), 1).indices.squeeze(-1)
            forbidden = topk(scores.detach(), 1, largest=False).indices
            place = torch.where(ranks < allowed.unsqueeze(-1), likeliest, forbidden)
            A = A.unflatten(-1, (-1, V)).to(h.dtype)
            x, h = A.sum(-2) @ embedding, A.sum(-1) @ h
        likelihood = scores.gather(1, place)
        pointers.append(place // V)
        tokens.append(place % V)
        if end is not None:
            over = over.gather(1, pointers[-1]) | (tokens[-1] == end)

    best = likelihood.argmax(-1, keepdim=True)
    beam = ranks.expand(B, k)
    sequences, log_probs = [], []
    for t in reversed(range(length)):
        sequences.append(tokens[t].gather(1, beam))
        beam, best = pointers[t].gather(1, beam), pointers[t].gather(1, best)
        log_probs.append(_along(said[t], best))
    return Beams(torch.stack(sequences[::-1], -1), likelihood, torch.cat(log_probs[::-1], 1))


def _choice(scores: Tensor, k: int, allowed: Tensor, epsilon: float, normalize: bool) -> Tensor:
    """The sorted soft top-k, (B, k, mV); its last rows are 0 where fewer than k scores are above −inf."""
    if not arguments.readable(allowed) or bool((allowed >= k).all()):
        return sorted_soft_topk(scores, k, epsilon=epsilon, normalize=normalize)
    A = scores.new_zeros(len(scores), k, scores.shape[-1])
    counts = allowed.clamp(max=k)
    for count in set(counts.tolist()) - {0}:
        these = (counts == count).nonzero().squeeze(-1)
        some = sorted_soft_topk(scores[these], count, epsilon=epsilon, normalize=normalize)
        A = A.index_copy(0, these, F.pad(some, (0, 0, 0, k - count)))
    return A


def soft_beam_loss(
    step: _Step,
    embedding: Tensor,
    start: Tensor,
    state: Tensor,
    target: Tensor,
    k: int,
    *,
    epsilon: float = 2.0,
    normalize: bool = False,
    rho: float = 0.8,
) -> Tensor:
    """The loss of training through beam search: the target's cross-entropy along the model's own best beam.

        −ρ log P(target | its own beginning) − (1 − ρ) log P(target | the choices)

    averaged over the tokens, with the choices of :func:`soft_beam_search`. The first part is teacher forcing:
    the model sees only correct beginnings. The second part is conditioned on the model's own choices.

    Once the model is confident, most gradients through the selections are denormal numbers, which make the
    steps several times slower on a CPU: ``torch.set_flush_denormal(True)`` keeps them fast.

    Args:
        step, embedding, start, state, k, epsilon, normalize: as for :func:`soft_beam_search`.
        target: (B, length), int64; −100 where a sequence is over: such places do not count.
        rho: share of teacher forcing, in [0, 1]; 1 needs no search. Near 1 the model can still learn
            shortcuts from one correct token to the next, as with teacher forcing alone; near 0 it cannot.

    Returns:
        A scalar ≥ 0, differentiable in everything that the steps and the embedding depend on; 0, with a
        gradient of 0, where no place counts.

    Raises:
        ValueError: rho out of range, a target of another shape or with another token (on the CPU), and as
            :func:`soft_beam_search`.
        TypeError: a target that is not an int64 tensor, and as :func:`soft_beam_search`.

    Source: Xie et al. 2020, appendix D.2, with logarithms of the likelihoods.

    Example:
        >>> table, head = torch.randn(6, 4), torch.nn.Linear(4, 6)
        >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
        >>> step = lambda x, h: (head(x + h), x + h)
        >>> loss = khot.nn.soft_beam_loss(step, table, table[0], torch.zeros(2, 4), target, k=2)
        >>> loss.backward()
    """
    arguments.check_number(rho, "rho", low=0, high=1)
    arguments.check_flags(normalize=normalize)
    _check_first(embedding, start, state)
    _check_target(target, embedding, state)
    length, loss = target.shape[1], torch.zeros((), device=embedding.device)
    if rho > 0:
        x, h = _first(embedding, start, state)
        said = []
        for t in range(length):
            logits, h = step(x, h)
            said.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))
            x = embedding[target[:, t : t + 1].clamp(min=0)]
        loss = loss + rho * _mean_loss(torch.cat(said, 1), target)
    if rho < 1:
        beams = soft_beam_search(
            step, embedding, start, state, length, k, epsilon=epsilon, normalize=normalize
        )
        loss = loss + (1 - rho) * _mean_loss(beams.log_probs, target)
    return loss


def _check_target(target: Tensor, embedding: Tensor, state: Tensor) -> None:
    arguments.check_index(target, "target", embedding)
    if target.dim() != 2 or target.shape[0] != state.shape[0] or not target.shape[1]:
        raise ValueError(
            f"target must have shape ({state.shape[0]}, length), with a length of at least 1, but got shape "
            f"{tuple(target.shape)}"
        )
    if not arguments.readable(target):
        return
    last = embedding.shape[0] - 1
    bad = ((target < 0) | (target > last)) & (target != IGNORED)
    if bool(bad.any()):
        raise ValueError(
            f"target must lie in [0, {last}], or be {IGNORED} where it does not count, but got "
            f"{target[bad][0].item()}"
        )


def _mean_loss(log_probs: Tensor, target: Tensor) -> Tensor:
    """−log P of the tokens, (B, length, V), averaged over the places that count; 0 if there are none."""
    total = F.nll_loss(log_probs.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (target != IGNORED).sum().clamp(min=1)


def _check_first(embedding: Tensor, start: Tensor, state: Tensor) -> None:
    arguments.check_input(embedding, "embedding")
    for name, x in (("start", start), ("state", state)):
        arguments.check_bool_or_real(x, name)
        arguments.check_has_values(x, name, embedding)


def _first(embedding: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The first input and state, (B, 1, ·)."""
    shape = (state.shape[0], embedding.shape[1])
    if start.shape not in (torch.Size(shape), torch.Size(shape[1:])):
        raise ValueError(f"start must be {shape} or {shape[1:]}, but got {tuple(start.shape)}")
    return start.expand(shape).unsqueeze(1), state.unsqueeze(1)


def _along(x: Tensor, beams: Tensor) -> Tensor:
    """Those beams of x: (B, m, ·) at (B, k) becomes (B, k, ·)."""
    return x.gather(1, beams.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
