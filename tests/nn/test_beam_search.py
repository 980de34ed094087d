"""soft_beam_search: hard it is beam search, written again token by token; soft it tends to that, exactly
differentiable."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from drawn import normal
from khot.nn import soft_beam_loss, soft_beam_search

V, D, H = 5, 3, 4


TABLE, START = normal(V, D), normal(D, seed=1)
INTO, OVER, OUT = normal(D, H, seed=2), normal(H, H, seed=3), 2 * normal(H, V, seed=4)


def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    new = (x @ INTO + h @ OVER).tanh()
    return new @ OUT, new


def beam_search(h: Tensor, length: int, k: int, end: int | None) -> list[tuple[float, list[int]]]:
    """For one sequence, on lists."""
    beams: list[tuple[float, list[int], Tensor, Tensor]] = [(0.0, [], START, h)]
    for _ in range(length):
        more = []
        for likelihood, tokens, x, state in beams:
            logits, new = step(x, state)
            if end is not None and end in tokens:
                more.append((likelihood, [*tokens, end], TABLE[end], new))
                continue
            for token, log_p in enumerate(logits.log_softmax(-1).tolist()):
                more.append((likelihood + log_p, [*tokens, token], TABLE[token], new))
        beams = sorted(more, key=lambda beam: -beam[0])[:k]
    return [(likelihood, tokens) for likelihood, tokens, _, _ in beams]


@pytest.mark.parametrize("end", [None, 2])
@pytest.mark.parametrize(("length", "k"), [(1, 5), (4, 1), (4, 3), (6, 5)])
def test_hard_is_beam_search(length: int, k: int, end: int | None) -> None:
    h = normal(6, H, seed=5)
    beams = soft_beam_search(step, TABLE, START, h, length, k, end=end, hard=True)
    for i in range(6):
        likelihood, tokens = zip(*beam_search(h[i], length, k, end), strict=True)
        assert beams.tokens[i].tolist() == list(tokens)
        torch.testing.assert_close(beams.log_likelihood[i], torch.tensor(likelihood, dtype=torch.float64))


def test_hard_finds_the_best_of_all_where_nothing_is_cut_off() -> None:
    h = normal(1, H, seed=6)
    beams = soft_beam_search(step, TABLE, START, h, 2, V, hard=True)

    def likelihood(tokens: tuple[int, ...]) -> float:
        x, state, total = START, h[0], 0.0
        for token in tokens:
            logits, state = step(x, state)
            total += float(logits.log_softmax(-1)[token])
            x = TABLE[token]
        return total

    best = sorted(itertools.product(range(V), repeat=2), key=lambda tokens: -likelihood(tokens))[:V]
    assert beams.tokens[0].tolist() == [list(tokens) for tokens in best]


@pytest.mark.parametrize("end", [None, 2])
def test_soft_tends_to_hard(end: int | None) -> None:
    h = normal(6, H, seed=5)
    soft = soft_beam_search(step, TABLE, START, h, 5, 3, epsilon=1e-6, end=end)
    hard = soft_beam_search(step, TABLE, START, h, 5, 3, end=end, hard=True)
    assert soft.tokens.equal(hard.tokens)
    torch.testing.assert_close(soft.log_likelihood, hard.log_likelihood, rtol=0, atol=1e-4)
    torch.testing.assert_close(soft.log_probs, hard.log_probs, rtol=0, atol=1e-4)


def forbid(allowed: list[int]) -> Any:
    """The decoder that says these tokens only."""
    barrier = torch.full((V,), -torch.inf, dtype=torch.float64)
    barrier[allowed] = 0

    def some(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        logits, new = step(x, h)
        return logits + barrier, new

    return some


@pytest.mark.parametrize("end", [None, 2])
@pytest.mark.parametrize("allowed", [[2], [2, 4], [0, 2, 4]])
@pytest.mark.parametrize("normalize", [False, True])
def test_fewer_allowed_tokens_than_beams(allowed: list[int], end: int | None, normalize: bool) -> None:
    h = normal(3, H, seed=5).requires_grad_()
    hard = soft_beam_search(forbid(allowed), TABLE, START, h, 3, 4, end=end, hard=True)
    options: Any = {"epsilon": 1e-6, "normalize": normalize, "end": end}
    soft = soft_beam_search(forbid(allowed), TABLE, START, h, 3, 4, **options)
    known = hard.log_likelihood > -torch.inf
    assert known.any(-1).all() and known.equal(soft.log_likelihood > -torch.inf)
    assert soft.tokens[known].equal(hard.tokens[known])
    assert set(soft.tokens[known].flatten().tolist()) <= set(allowed)
    torch.testing.assert_close(soft.log_likelihood, hard.log_likelihood, rtol=0, atol=1e-4)
    torch.testing.assert_close(soft.log_probs, hard.log_probs, rtol=0, atol=1e-4)
    softer = soft_beam_search(forbid(allowed), TABLE, START, h, 3, 4, end=end)
    (grad,) = torch.autograd.grad(softer.log_likelihood[known].sum(), h)
    assert grad.isfinite().all()


def test_a_row_with_too_few_tokens_changes_no_other() -> None:
    h = normal(3, H, seed=5)
    barrier = torch.zeros(3, 1, V, dtype=torch.float64)
    barrier[1, :, 1:] = -torch.inf

    def some(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        logits, new = step(x, h)
        return logits + barrier, new

    got = soft_beam_search(some, TABLE, START, h, 3, 3)
    want = soft_beam_search(step, TABLE, START, h, 3, 3)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one[[0, 2]], other[[0, 2]])
    assert got.tokens[1, 0].tolist() == [0, 0, 0] and got.log_likelihood[1, 0] == 0


def test_log_probs_are_those_along_the_best_sequence() -> None:
    h = normal(6, H, seed=5)
    for beams in (soft_beam_search(step, TABLE, START, h, 5, 3, hard=hard) for hard in (True, False)):
        best, place = beams.log_likelihood.max(-1)
        tokens = beams.tokens[torch.arange(6), place]
        along = beams.log_probs.gather(-1, tokens.unsqueeze(-1)).sum((-2, -1))
        torch.testing.assert_close(along, best)


@pytest.mark.parametrize(("epsilon", "normalize"), [(0.5, False), (0.1, True), (0.02, True)])
def test_mixes_embeddings_and_states(epsilon: float, normalize: bool) -> None:
    h, k = normal(1, H, seed=7), 3

    def choose(scores: Tensor) -> Tensor:
        # the costs of anchors k, …, 0, of which the largest is the unit
        unit = float((scores.unsqueeze(-1) - torch.arange(k + 1)).square().max()) if normalize else 1.0
        return khot.sorted_soft_topk(scores, k, epsilon=epsilon * unit)

    scores, new = step(START.expand(1, D), h)
    first = scores.log_softmax(-1)
    A = choose(first[0])
    logits, states = step(A @ TABLE, new.expand(k, H))
    tokens = A.argmax(-1)
    second = first[0, tokens, None] + logits.log_softmax(-1)
    A = choose(second.flatten()).view(k, k, V)
    logits, _ = step(A.sum(1) @ TABLE, A.sum(2) @ states)
    place = A.flatten(1).argmax(-1)
    third = second.flatten()[place, None] + logits.log_softmax(-1)
    last = choose(third.flatten()).argmax(-1)
    got = soft_beam_search(step, TABLE, START, h, 3, k, epsilon=epsilon, normalize=normalize)
    torch.testing.assert_close(got.log_likelihood[0], third.flatten()[last])
    assert got.tokens[0, :, 2].equal(last % V) and got.tokens[0, :, 1].equal((place % V)[last // V])


def test_normalized_rows_do_not_mix_and_do_not_depend_on_where_sequences_have_ended() -> None:
    h = normal(3, H, seed=10)
    together = soft_beam_search(step, TABLE, START, h, 4, 2, epsilon=0.1, normalize=True, end=2)
    assert all(x.isfinite().all() for x in (together.log_likelihood, together.log_probs.exp()))
    for i in range(3):
        alone = soft_beam_search(step, TABLE, START, h[i : i + 1], 4, 2, epsilon=0.1, normalize=True, end=2)
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[i])


@pytest.mark.parametrize(("epsilon", "normalize"), [(1.0, False), (0.1, True)])
def test_gradcheck(epsilon: float, normalize: bool) -> None:
    h, table, out = normal(2, H, seed=8), TABLE.clone(), OUT.clone()

    def of(h: Tensor, table: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        def with_out(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            new = (x @ INTO + state @ OVER).tanh()
            return new @ out, new

        beams = soft_beam_search(with_out, table, START, h, 3, 2, epsilon=epsilon, normalize=normalize)
        return beams.log_likelihood, beams.log_probs

    torch.autograd.gradcheck(of, [x.requires_grad_() for x in (h, table, out)], fast_mode=True)


def test_the_loss() -> None:
    h, target = normal(3, H, seed=9), torch.tensor([[0, 1, 2, 3], [4, 3, -100, -100], [2, 2, 2, 2]])
    state, x, said = h, START.expand(3, D), []
    for t in range(4):
        logits, state = step(x, state)
        said.append(logits)
        x = TABLE[target[:, t].clamp(min=0)]
    forced = F.cross_entropy(torch.stack(said, 1).flatten(0, 1), target.flatten())
    searched = soft_beam_search(step, TABLE, START, h, 4, 2).log_probs
    searched = F.nll_loss(searched.flatten(0, 1), target.flatten())
    for rho in (0, 0.3, 1):
        got = soft_beam_loss(step, TABLE, START, h, target, 2, rho=rho)
        torch.testing.assert_close(got, rho * forced + (1 - rho) * searched)
    searched = soft_beam_search(step, TABLE, START, h, 4, 2, epsilon=0.05, normalize=True).log_probs
    got = soft_beam_loss(step, TABLE, START, h, target, 2, epsilon=0.05, normalize=True, rho=0)
    torch.testing.assert_close(got, F.nll_loss(searched.flatten(0, 1), target.flatten()))


@pytest.mark.parametrize("rho", [0.0, 0.8, 1.0])
def test_the_loss_of_no_token_is_zero(rho: float) -> None:
    h, out = normal(2, H, seed=14).requires_grad_(), OUT.clone().requires_grad_()

    def its(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = step(x, h)[1]
        return new @ out, new

    loss = soft_beam_loss(its, TABLE, START, h, torch.full((2, 3), -100), 2, rho=rho)
    loss.backward()
    assert loss == 0 and (h.grad == 0).all() and (out.grad == 0).all()
    assert soft_beam_loss(step, TABLE, START, h[:0], torch.zeros(0, 3).long(), 2, rho=rho) == 0


def test_rows_do_not_mix_and_a_start_may_differ() -> None:
    h, start = normal(3, H, seed=10), normal(3, D, seed=11)
    together = soft_beam_search(step, TABLE, start, h, 4, 2)
    for i in range(3):
        alone = soft_beam_search(step, TABLE, start[i], h[i : i + 1], 4, 2)
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[i])


def test_compiles_whole() -> None:
    torch.compiler.reset()
    h = normal(2, H, seed=12)
    for hard in (False, True):
        compiled = torch.compile(
            lambda h, hard=hard: soft_beam_search(step, TABLE, START, h, 2, 2, hard=hard),
            fullgraph=True,
            backend="aot_eager",
        )
        for got, want in zip(
            compiled(h), soft_beam_search(step, TABLE, START, h, 2, 2, hard=hard), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_autocast() -> None:
    h, into = normal(2, H, seed=13).float(), INTO.float()

    def low(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        new = (x @ into + state @ OVER.float()).tanh()
        return new @ OUT.float(), new

    want = soft_beam_search(low, TABLE.float(), START.float(), h, 3, 2, epsilon=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        got = soft_beam_search(low, TABLE.float(), START.float(), h, 3, 2, epsilon=1.0)
    assert got.log_probs.dtype == torch.float32
    # three steps whose logits, up to 8, are rounded to 8 bits
    torch.testing.assert_close(got.log_likelihood, want.log_likelihood, rtol=0, atol=0.2)


def test_refuses() -> None:
    h = normal(2, H)
    with pytest.raises(ValueError, match="start must"):
        soft_beam_search(step, TABLE, TABLE[:3], h, 3, 2)
    for rho in (0.0, 0.8, 1.0):
        for wrong in (-1, V, -99):
            target = torch.tensor([[0, 1, -100], [2, wrong, 1]])
            with pytest.raises(ValueError, match=rf"^target must lie in \[0, 4\], or be -100.* {wrong}$"):
                soft_beam_loss(step, TABLE, START, h, target, 2, rho=rho)
        for shape in ((3,), (3, 3), (2, 0), (2, 3, 1)):
            with pytest.raises(ValueError, match=r"^target must have shape \(2, length\)"):
                soft_beam_loss(step, TABLE, START, h, torch.zeros(shape).long(), 2, rho=rho)
