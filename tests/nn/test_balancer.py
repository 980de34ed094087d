"""QuantileBalancer: what it chooses, counts and learns, and when it does not."""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import khot
from drawn import normal
from khot.nn import MixtureOfExperts, QuantileBalancer, TokenChoiceRouter

E, K = 16, 3


def skewed(tokens: int, experts: int = E, seed: int = 0) -> Tensor:
    """Logits, float32, whose means differ by expert and by cluster of tokens."""
    g = torch.Generator().manual_seed(7)
    directions, means = torch.randn(8, experts, generator=g), torch.randn(experts, generator=g)
    g = torch.Generator().manual_seed(seed)
    clusters = torch.randn(8, 8, generator=torch.Generator().manual_seed(8))
    of_token = clusters[torch.randint(0, 8, (tokens,), generator=g)] + torch.randn(tokens, 8, generator=g)
    return of_token @ directions / 2.5 + means


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda x: x,
    "sigmoid": torch.sigmoid,
    "small": lambda x: torch.sigmoid(x - 6),
    "large logits": lambda x: 100 * x,
    "log_softmax": lambda x: x.log_softmax(-1),
    "shifted by token": lambda x: x + 100 * torch.arange(len(x))[:, None] / len(x),
}
each_kind = pytest.mark.parametrize("kind", SCORES)


def load(x: Tensor, bias: Tensor, k: int = K) -> Tensor:
    return (x + bias).topk(k, -1).indices.flatten().bincount(minlength=x.shape[-1]).double()


def violation(x: Tensor, bias: Tensor, k: int = K) -> float:
    """The largest load over the mean load, less 1."""
    loads = load(x, bias, k)
    return (loads.max() / loads.mean() - 1).item()


def counted(x: Tensor, **options: object) -> QuantileBalancer:
    balancer = QuantileBalancer(x.shape[-1], K, **options)  # type: ignore[arg-type]
    balancer(x)
    return balancer


def learn(balancer: QuantileBalancer, x: Tensor, updates: int = 10) -> QuantileBalancer:
    for _ in range(updates):
        balancer(x)
        balancer.update()
    return balancer


# ------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chooses_the_largest_biased_scores_and_of_equal_ones_the_lowest_index(
    dtype: torch.dtype, training: bool
) -> None:
    x = (2 * normal(2, 50, E)).round().to(dtype)
    balancer = QuantileBalancer(E, K).train(training)
    balancer.bias.copy_(normal(E, seed=1).round())
    wide = x.to(torch.promote_types(dtype, torch.float32))
    want = (wide + balancer.bias).sort(dim=-1, descending=True, stable=True).indices[..., :K]
    got = balancer(x)
    assert got.dtype == torch.int64 and torch.equal(got, want)
    assert not got.requires_grad


def test_the_bias_is_added_in_float32_to_half_precision() -> None:
    balancer = QuantileBalancer(3, 1)
    balancer.bias.copy_(torch.tensor([-1e-4, 1e-4, 0.0]))
    assert balancer(torch.ones(1, 3, dtype=torch.bfloat16)).item() == 1  # 1 + 1e-4 is 1 in bfloat16


def test_closed_experts_are_chosen_last() -> None:
    x = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0], [-math.inf, -math.inf, 2.0, -math.inf]])
    got = QuantileBalancer(4, 2)(x)
    assert got[0].tolist() == [3, 1] and got[1, 0] == 2


# ------------------------------------------------------------------------------------ what is counted


def distances(biased: Tensor, k: int, update: int) -> tuple[Tensor, Tensor]:
    """From the scores with the present bias, and whether the expert has the token."""
    best = biased.topk(k + 1, -1)
    chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, best.indices[:, :k], True)
    last, next = best.values[:, k - 1 : k], best.values[:, k:]
    cutoff = (last + next) / 2 if update % 2 else torch.where(chosen, next, last)
    return (cutoff - biased).double(), chosen


@each_kind
def test_the_counts_are_those_of_the_distances(kind: str) -> None:
    """Against bins whose edges are written down one by one, in the wide and in the narrow octaves."""
    x, balancer = SCORES[kind](skewed(200)), QuantileBalancer(E, K)
    for update in range(3):
        balancer(x)
        distance, chosen = distances(x + balancer.bias, K, update)
        want = []
        for e in range(E):  # each expert has octaves of its own
            octaves, parts, first = range(-126, 128), 2, [2.0**-127]  # which is subnormal
            if update:
                end = int(balancer.octave[e]) - 127
                octaves, parts, first = range(end - 64, end), 8, []
            edges = first + [2.0**octave * (1 + step / parts) for octave in octaves for step in range(parts)]
            inner = torch.tensor(edges if first else edges[1:], dtype=torch.float64) / 2**20
            size = torch.bucketize(distance[:, e].abs(), inner, right=True)
            place = torch.where(chosen[:, e], 511 - size, 512 + size)
            want.append(place.bincount(minlength=1025))
        assert torch.equal(balancer.counts, torch.stack(want, -1))
        balancer.update()
        assert balancer.updates == update + 1


@pytest.mark.parametrize("bins", [64, 256, 1024, 65536])
def test_the_negative_bins_are_the_load(bins: int) -> None:
    x = skewed(300).round()  # with many ties
    balancer = QuantileBalancer(E, K, bins=bins)
    chosen = balancer(x)
    assert balancer.counts.shape == (bins + 1, E)
    assert torch.equal(balancer.counts[: bins // 2].sum(0), chosen.flatten().bincount(minlength=E))
    assert torch.equal(balancer.counts.sum(0), torch.full((E,), 300))


def test_closed_experts_and_unusable_tokens_are_counted_apart() -> None:
    x = skewed(100)
    x[:30, 2] = -math.inf
    x[30:50, 5:] = math.nan
    balancer = counted(x)
    assert torch.equal(balancer.counts.sum(0), torch.full((E,), 80))
    assert balancer.counts[-1].tolist() == [30 * (e == 2) for e in range(E)]
    balancer.update()
    assert balancer.bias.isfinite().all()


def test_rows_with_few_open_experts_and_infinite_scores() -> None:
    x = torch.full((4, E), -math.inf)
    x[0, 3] = x[1, 1] = x[1, 2] = 0.0
    x[3, :5] = math.inf
    balancer = counted(x)
    below = balancer.counts[:512].sum(0)
    assert below.tolist() == [1, 2, 2, 1] + [0] * (E - 4)  # each open expert, and of the ties the first three
    assert balancer.counts[-1].sum() == 4 * E - 8
    balancer.update()
    assert balancer.bias.isfinite().all()


def test_padding_does_not_count() -> None:
    x, mask = skewed(120).view(4, 30, E), torch.arange(30) < torch.tensor([[30], [12], [1], [0]])
    padded = x.masked_fill(~mask.unsqueeze(-1), 50.0)
    padded[3, 5] = math.nan
    balancer, want = QuantileBalancer(E, K), QuantileBalancer(E, K)
    balancer(padded, mask)
    want(x[mask])
    assert torch.equal(balancer.counts, want.counts)
    balancer(padded, torch.tensor(False))  # nothing but padding
    assert torch.equal(balancer.counts, want.counts)


def test_one_token_counts_as_a_batch_of_one() -> None:
    x = torch.randn(E, generator=torch.Generator().manual_seed(0))
    for mask in (None, torch.tensor(True), torch.tensor(False)):
        alone, batch = QuantileBalancer(E, K), QuantileBalancer(E, K)
        assert torch.equal(alone(x, mask), batch(x[None], None if mask is None else mask[None])[0])
        assert torch.equal(alone.counts, batch.counts)
        assert bool(alone.counts.any()) == (mask is None or bool(mask))


def test_counts_only_in_train_mode_with_gradients() -> None:
    x, balancer = skewed(50), QuantileBalancer(E, K)
    with torch.no_grad():
        balancer(x)
    with torch.inference_mode():
        balancer(x)
    balancer.eval()(x)
    assert not balancer.counts.any()
    before = balancer.bias.clone()
    balancer.update()
    assert torch.equal(balancer.bias, before)
    balancer.train()(x)
    assert balancer.counts.sum() == 50 * E


def test_the_bias_does_not_change_by_an_update_without_counts() -> None:
    balancer = counted(skewed(333))
    balancer.update()
    before = balancer.bias.clone()
    assert before.any() and not balancer.counts.any()
    for _ in range(3):
        balancer.update()
    balancer(skewed(5), torch.zeros(5, dtype=torch.bool))
    balancer.update()
    assert torch.equal(balancer.bias, before)


# ------------------------------------------------------------------------------------ the update


@pytest.mark.parametrize("ema", [0.0, 0.75])
@each_kind
def test_an_update_is_the_exact_quantile_to_the_width_of_a_bin(kind: str, ema: float) -> None:
    x = SCORES[kind](skewed(400))
    balancer, rank = QuantileBalancer(E, K, ema=ema), 400 * K // E
    for update in range(4):
        balancer(x)
        before = balancer.bias.double()
        balancer.update()
        tokens = distances(x + before.float(), K, update)[0].sort(0).values
        low, high = tokens[rank - 1], tokens[rank]  # all between them are quantiles
        moved = (balancer.bias.double() - before) / (1 - ema)
        width = (8 if update else 2) / 1.01  # bins per octave
        want = torch.maximum(torch.minimum(high, low.clamp(min=0)), low)
        shift = (moved - want).median()  # the largest bias becomes 0
        slack = (want.abs().max() + (high - low)) / width + 1e-6 * (1 + before.abs().max())
        inside = (moved - shift >= low - slack) & (moved - shift <= high + slack)
        assert inside.all()
        assert balancer.bias.max() == 0


# Within 10 updates as good as exact quantiles of all tokens, for any kind of scores.
@each_kind
def test_balances_within_ten_updates(kind: str) -> None:
    x = SCORES[kind](skewed(4096, 64))
    balancer = QuantileBalancer(64, 4)
    exact = torch.zeros(64)
    assert violation(x, exact, 4) > 2
    for _ in range(10):
        balancer(x)
        balancer.update()
        distance = (x + exact).topk(5, -1).values[:, 4:] - x
        exact = distance.sort(0).values[256 - 1 : 256 + 1].mean(0)
    assert violation(x, balancer.bias, 4) <= max(0.06, violation(x, exact, 4) + 0.02)


def one_at_a_time(x: Tensor, k: int, sweeps: int = 4) -> float:
    """The best violation that was seen while one expert after the other got the bias with which it has its
    share, the others keeping theirs: which takes E times as many looks at the tokens as an update."""
    tokens, experts = x.shape
    bias, best, share = torch.zeros(experts), math.inf, tokens * k // experts
    for _ in range(sweeps):
        for e in range(experts):
            others = x + bias
            others[:, e] = -math.inf
            needed = (others.topk(k, -1).values[:, -1] - x[:, e]).sort().values
            bias[e] = bias[e].clamp(needed[share - 1], needed[share])
        bias -= bias.max()
        best = min(best, violation(x, bias, k))
    return best


def sharp(seed: int, tokens: int = 128) -> tuple[Tensor, int]:
    """Probabilities that float32 hardly tells from 0 and 1, for 128 tokens for each expert, and k."""
    draw = random.Random(seed)
    experts, k, a = draw.choice([48, 64]), draw.choice([2, 4]), draw.uniform(9, 12)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(experts // k * tokens, experts, generator=g) + torch.randn(experts, generator=g)
    return (a * z).softmax(-1), k


@pytest.mark.parametrize("seed", [0, 5])
def test_balances_sharp_probabilities_as_well_as_is_possible(seed: int) -> None:
    """The scores of a token, and the biases, differ by a factor of up to 10⁴⁰."""
    x, k = sharp(seed)
    possible = one_at_a_time(x, k)
    balancer = learn(QuantileBalancer(x.shape[-1], k), x, 40)
    assert violation(x, balancer.bias, k) <= possible + 0.2
    balancer.solve(x)
    assert violation(x, balancer.bias, k) <= possible + 0.1


@pytest.mark.parametrize("seed", range(5))
def test_experts_of_tiny_scores_share_what_the_others_leave(seed: int) -> None:
    """One expert that wins nearly all tokens, and others whose scores have any scale down to 1e-40."""
    draw = random.Random(seed)
    experts, power = draw.randint(6, 20), draw.uniform(-133, -40)
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(200 * experts, experts, generator=g) * 2.0**power
    x[:, 0] = 0.5 + 0.5 * torch.rand(200 * experts, generator=g)
    balancer = learn(QuantileBalancer(experts, 1), x)
    assert violation(x, balancer.bias, 1) <= 0.05


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
def test_a_few_enormous_scores_do_not_spoil_the_resolution(lowest: float) -> None:
    """Experts are often closed to tokens by a huge negative score instead of −inf."""
    x = skewed(2048).softmax(-1)
    x[::50, 3] = lowest
    balancer = learn(QuantileBalancer(E, K), x)
    assert violation(x, balancer.bias) < 0.05


def test_the_same_bits_for_any_micro_batches_in_any_order() -> None:
    x = skewed(300)
    whole, parts = QuantileBalancer(E, K), QuantileBalancer(E, K)
    for _ in range(4):
        whole(x)
        for part in reversed(x.split([1, 120, 0, 79, 100])):
            parts(part)
        whole.update()
        parts.update()
        assert torch.equal(whole.bias, parts.bias)


def test_an_expert_closed_to_all_tokens_disturbs_no_other() -> None:
    x = skewed(2048)
    x[:, 5] = -math.inf
    balancer = learn(QuantileBalancer(E, K), x, 40)
    assert balancer.bias.abs().max() < 10
    loads = load(x, balancer.bias)
    others = loads[torch.arange(E) != 5]
    assert loads[5] == 0 and others.max() / others.mean() < 1.05


def test_an_expert_open_to_few_tokens_gets_all_of_them() -> None:
    x = skewed(2048)
    x[100:, 5] = -math.inf
    balancer = learn(QuantileBalancer(E, K), x, 40)
    assert load(x, balancer.bias)[5] >= 95
    assert balancer.bias.abs().max() < 50


def test_update_all_finds_each_balancer_once() -> None:
    shared = QuantileBalancer(E, K)
    model = nn.ModuleList([nn.Sequential(shared, QuantileBalancer(4, 1, bins=64)), shared])
    small, x = model[0][1], skewed(100)
    for layer, scores in ((shared, x), (small, x[:, :4])):
        layer(scores)
    want = [copy.deepcopy(layer) for layer in (shared, small)]
    for layer in want:
        layer.update()
    QuantileBalancer.update_all(model)
    assert torch.equal(shared.bias, want[0].bias) and torch.equal(small.bias, want[1].bias)
    shared(x)
    QuantileBalancer.update_all(iter([shared, model]))
    assert not shared.counts.any()
    QuantileBalancer.update_all([])
    QuantileBalancer.update_all([nn.Linear(2, 2)])


def test_balancers_that_are_updated_together_have_the_bits_of_each_alone() -> None:
    """Of several kinds and scales; one has an expert that is closed, and one counts now and then."""
    kinds: list[dict[str, object]] = [{}, {}, {}, {"ema": 0.5}, {"groups": 4, "top_groups": 2}, {"bins": 64}]
    layers = nn.ModuleList([QuantileBalancer(E, K, **kind) for kind in kinds])  # type: ignore[arg-type]
    layers.append(QuantileBalancer(E, K + 1))
    alone = copy.deepcopy(layers)
    for step in range(4):
        for i, (layer, other) in enumerate(zip(layers, alone, strict=True)):
            x = skewed(90 + i, seed=i) * 10.0 ** (3 * i - 6)
            if i == 1:
                x[:, 5] = -math.inf
            if i != 2 or step % 2:
                layer(x)
                other(x)
            other.update()
        QuantileBalancer.update_all(layers)
        for (name, got), want in zip(layers.named_buffers(), alone.buffers(), strict=True):
            assert torch.equal(got, want), name
    assert [int(layer.updates) for layer in layers] == [4, 4, 2, 4, 4, 4, 4]


# ------------------------------------------------------------------------------------ the cold start


@each_kind
def test_a_cold_start_balances_at_once(kind: str) -> None:
    x = SCORES[kind](skewed(4096, 64))
    balancer = QuantileBalancer(64, 4)
    balancer(x)
    balancer.solve(x)
    assert violation(x, balancer.bias, 4) < 0.15  # 256 tokens per expert, of which some are nearly equal
    assert not balancer.counts.any()
    again = copy.deepcopy(balancer)
    again.solve(x)
    assert torch.equal(again.bias, balancer.bias)  # it does not depend on where it starts


def test_a_cold_start_takes_the_mask_and_other_shapes() -> None:
    x, mask = skewed(240).view(2, 4, 30, E), torch.arange(30) < 20
    padded = x.masked_fill(~mask.unsqueeze(-1), math.nan)
    balancer, want = QuantileBalancer(E, K), QuantileBalancer(E, K)
    balancer.solve(padded, mask)
    want.solve(x[..., :20, :])
    assert want.bias.any() and torch.equal(balancer.bias, want.bias)


@pytest.mark.parametrize(
    "scores",
    [torch.zeros(0, E), torch.ones(9, E), torch.full((9, E), -math.inf), skewed(1), skewed(9) * 1e-30],
    ids=["no tokens", "all equal", "all closed", "one token", "tiny"],
)
def test_a_cold_start_from_little(scores: Tensor) -> None:
    balancer = QuantileBalancer(E, K)
    balancer.solve(scores)
    assert balancer.bias.isfinite().all()


def test_a_cold_start_with_closed_experts() -> None:
    x = skewed(1024)
    x[:, 5] = -math.inf
    x[:100, 7:] = -math.inf
    balancer = QuantileBalancer(E, K)
    balancer.solve(x)
    loads = load(x, balancer.bias)
    assert balancer.bias.isfinite().all()
    assert loads[torch.arange(E) != 5].max() / loads.mean() < 1.3


# ------------------------------------------------------------------------------------ a module like any other


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to(torch.bfloat16)]
)
def test_the_bias_is_never_cast(cast: Callable[[nn.Module], nn.Module]) -> None:
    balanced = TokenChoiceRouter(5, E, K, balancer=QuantileBalancer(E, K))
    assigned = MixtureOfExperts(khot.nn.BalancedRouter(5, E, K), [nn.Identity() for _ in range(E)])
    bias = normal(E).float()
    for layer, holder in ((balanced, balanced.balancer), (assigned, assigned.router)):
        holder.bias.copy_(bias)
        assert cast(layer) is layer
        assert next(layer.parameters()).dtype != torch.float32
        assert holder.bias.dtype == torch.float32 and torch.equal(holder.bias, bias)
    assert balanced.balancer.counts.dtype == torch.int64


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_the_bias_and_how_it_goes_on(dtype: torch.dtype, assign: bool) -> None:
    x = skewed(100)
    balancer = counted(x)
    balancer.update()
    balancer(x)
    state = balancer.state_dict()
    assert list(state) == ["bias", "updates", "octave"]
    buffer = io.BytesIO()
    torch.save({name: value.to(dtype) for name, value in state.items()}, buffer)
    buffer.seek(0)
    other = counted(x)
    other.load_state_dict(torch.load(buffer), assign=assign)
    assert other.bias.dtype == torch.float32 and other.updates.dtype == other.octave.dtype == torch.int64
    assert torch.equal(other.bias, balancer.bias.to(dtype).float())
    assert other.updates == 1 and torch.equal(other.octave, balancer.octave) and (other.octave > 0).all()
    assert not other.counts.any()  # of another bias


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_nothing_but_the_bias_is_loaded(assign: bool) -> None:
    balancer = counted(skewed(100))
    balancer.update()
    balancer.load_state_dict({"bias": normal(E).float()}, assign=assign)
    assert torch.equal(balancer.bias, normal(E).float())
    assert balancer.updates == 0 and not balancer.octave.any()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("octave", [0, 70, 128, 255])
def test_a_state_with_one_octave_for_all_experts_is_loaded(octave: int, assign: bool) -> None:
    x, balancer = skewed(2048), QuantileBalancer(E, K)
    state = {"bias": normal(E).float(), "updates": torch.tensor(3), "octave": torch.tensor(octave)}
    balancer.load_state_dict(state, assign=assign)
    assert balancer.updates == 3 and torch.equal(balancer.octave, torch.full((E,), octave))
    learn(balancer, x)
    assert violation(x, balancer.bias) < 0.05


def test_training_without_updates_warns_once() -> None:
    model = nn.Sequential(QuantileBalancer(E, K))
    for _ in range(20):
        model(skewed(9))
    with pytest.warns(UserWarning, match=r"QuantileBalancer\(.*was never updated.*update_all"):
        model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        model(skewed(9))
        model.eval()
        updated, tried, evaluated = (QuantileBalancer(E, K) for _ in range(3))
        for _ in range(20):
            updated(skewed(9))
            evaluated.eval()(skewed(9))
        tried(skewed(9))
        updated.update()
        updated.eval(), tried.eval(), evaluated.train().eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_counts_like_the_same_scores_in_float32(dtype: torch.dtype) -> None:
    x = skewed(200).to(dtype)
    half, full = counted(x), counted(x.float())
    assert torch.equal(half.counts, full.counts)
    with torch.autocast("cpu", dtype):
        assert torch.equal(counted(x.float()).counts, full.counts)


# ------------------------------------------------------------------------------------ errors


BALANCER = partial(QuantileBalancer, E, K)
ROUTER = partial(TokenChoiceRouter, 5, E, k=K, balancer=QuantileBalancer(E, K))
REFUSED: dict[str, tuple[Callable[..., object], dict[str, object], str]] = {
    "k": (partial(QuantileBalancer, 4, 4), {}, r"k must lie in \[1, 3\], but got 4"),
    "bins": (BALANCER, {"bins": 100}, "bins must be a power of two, but got 100"),
    "few bins": (BALANCER, {"bins": 32}, "bins must lie in"),
    "ema": (BALANCER, {"ema": 1}, "ema must lie in"),
    "parts": (BALANCER, {"groups": 5}, "groups must divide num_experts=16, but got 5"),
    "no groups": (BALANCER, {"groups": 0}, r"groups must lie in \[1, 16\], but got 0"),
    "top groups": (BALANCER, {"groups": 4, "top_groups": 5}, r"top_groups must lie in \[1, 4\], but got 5"),
    "small groups": (
        BALANCER,
        {"groups": 8, "top_groups": 1},
        "top_groups=1 of groups=8 have 2 experts, but got k=3",
    ),
    "a router of another k": (ROUTER, {"k": K + 1}, "num_experts=16 and k=4, but got num_experts=16 and k=3"),
    "a fraction": (ROUTER, {"k": 2.5}, "k=2.5"),
    "a schedule": (ROUTER, {"k": khot.nn.Anneal(4.0, 2.0, steps=4)}, "k=Anneal"),
    "a learned k": (ROUTER, {"learnable_k": True}, "balancer must have"),
    "other experts": (ROUTER, {"balancer": QuantileBalancer(E + 1, K)}, "got num_experts=17"),
    "a string": (QuantileBalancer.update_all, {"modules": ["model"]}, "modules, but one of them is str"),
    "a number": (QuantileBalancer(E, K).update, {"group": 3}, r"must be a torch\.distributed.ProcessGroup"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    call, options, message = REFUSED[case]
    error = TypeError if case in ("a string", "a number") else ValueError
    with pytest.raises(error, match=message):
        call(**options)


# ------------------------------------------------------------------------------------ in a router


def router_of(**options: object) -> TokenChoiceRouter:
    torch.manual_seed(0)
    return TokenChoiceRouter(
        5, E, K, tau=0.5, balancer=QuantileBalancer(E, K), dtype=torch.float64, **options
    )  # type: ignore[arg-type]


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    router, x = router_of(), normal(2, 9, 5)
    router.balancer.bias.copy_(2 * normal(E, seed=1))
    scores = (x @ router.weight.T).log_softmax(-1).detach()
    soft = router(x)
    y = khot.soft_topk(scores + router.balancer.bias, K, tau=0.5)
    torch.testing.assert_close(soft.selection, y)
    torch.testing.assert_close(soft.weights, (scores + y.log()).softmax(-1))
    hard = router.eval()(x)
    best = (scores + router.balancer.bias).topk(K).indices
    assert (hard.selection.gather(-1, best) == 1).all() and hard.selection.sum() == 2 * 9 * K
    torch.testing.assert_close(hard.weights.gather(-1, best), scores.gather(-1, best).softmax(-1))


def test_without_bias_a_balanced_router_is_the_plain_one() -> None:
    router, x = router_of(), normal(2, 9, 5)
    plain = TokenChoiceRouter(5, E, K, tau=0.5, dtype=torch.float64)
    plain.weight = router.weight
    for training in (True, False):
        got, want = router.train(training)(x), plain.train(training)(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_balanced_router_counts_no_padding() -> None:
    router, x, mask = router_of(), normal(2, 9, 5), torch.arange(9) < torch.tensor([[9], [4]])
    router(x, mask)
    assert router.balancer.counts.sum() == 13 * E
    experts = [nn.Linear(5, 3, dtype=torch.float64) for _ in range(E)]
    MixtureOfExperts(router, experts)(x, mask)
    assert router.balancer.counts.sum() == 26 * E
    with torch.no_grad():
        router(x, mask)
    router.eval()(x, mask)
    assert router.balancer.counts.sum() == 26 * E


# ------------------------------------------------------------------------------------ groups


def grouped_choice(x: Tensor, bias: Tensor, k: int, groups: int, top: int) -> Tensor:
    """A stable sort of each row, in Python: the experts of its best groups, (rows, k)."""
    rows = []
    for row in (x + bias).tolist():
        size = len(row) // groups
        sums = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -sums[g])[:top]
        open_ = [e for e in range(len(row)) if e // size in best]
        rows.append(sorted(open_, key=lambda e: -row[e])[:k])
    return torch.tensor(rows)


@pytest.mark.parametrize("groups,top", [(4, 2), (8, 3), (2, 1), (16, 5)])
def test_groups_of_experts(groups: int, top: int) -> None:
    """With ties within groups and between them."""
    x = (2 * normal(60, 32, seed=groups)).round().float()
    balancer = QuantileBalancer(32, 2, groups=groups, top_groups=top)
    balancer.bias.copy_(normal(32, seed=1).round())
    want = grouped_choice(x.double(), balancer.bias.double(), 2, groups, top)
    assert torch.equal(balancer(x), want) and torch.equal(balancer.eval()(x), want)


@pytest.mark.parametrize("kind", ["sigmoid", "logits", "log_softmax"])
def test_one_bias_per_expert_balances_groups(kind: str) -> None:
    """In 20 updates, for sigmoids in 10."""
    x = SCORES[kind](skewed(8192, 64))
    balancer = learn(QuantileBalancer(64, 4, groups=8, top_groups=4), x, 10 if kind == "sigmoid" else 20)
    before = balancer.load
    balancer(x)
    balancer.update()
    assert before.sum() == balancer.load.sum() == 4 * len(x)
    loads = before.double() / before.double().mean()
    assert loads.max() - 1 <= 0.03
    plain = QuantileBalancer(64, 4)
    plain.solve(x)
    uneven = grouped_choice(x.double()[:2048], plain.bias.double(), 4, 8, 4).flatten().bincount(minlength=64)
    assert uneven.max() / uneven.double().mean() - 1 > 0.1  # biases for all experts do not balance groups


@pytest.mark.parametrize(
    "experts,k,groups,top",
    [(8, 4, 4, 2), (8, 1, 8, 1), (16, 3, 4, 1)],
)
def test_groups_that_hold_hardly_more_than_k(experts: int, k: int, groups: int, top: int) -> None:
    """A token that an expert has is lost with its group, too. With all experts of the open groups chosen, it
    is lost in no other way."""
    x = normal(4096, experts).float() + torch.linspace(0, 1, experts)
    balancer = learn(QuantileBalancer(experts, k, groups=groups, top_groups=top), x, 30)
    assert balancer.load.max() / balancer.load.double().mean() - 1 <= 0.05
    assert balancer.bias.min() > -20


def test_all_groups_are_no_groups() -> None:
    x = skewed(512)
    plain, grouped = QuantileBalancer(E, K), QuantileBalancer(E, K, groups=4, top_groups=4)
    for _ in range(3):
        assert torch.equal(plain(x), grouped(x))
        plain.update()
        grouped.update()
    assert torch.equal(plain.bias, grouped.bias)


def test_closed_experts_and_bad_tokens_in_groups() -> None:
    x = skewed(256)
    x[:, 5], x[3, 2] = -math.inf, math.nan
    balancer = learn(QuantileBalancer(E, K, groups=4, top_groups=2), x, 4)
    assert balancer.bias.isfinite().all() and balancer.load.sum() == K * 255 and balancer.load[5] == 0


def test_the_load_of_the_last_update() -> None:
    x = skewed(300)
    balancer = QuantileBalancer(E, K)
    assert torch.equal(balancer.load, torch.zeros(E, dtype=torch.int64))
    want = load(x, balancer.bias).long()
    balancer(x[:100])
    balancer(x[100:])
    balancer.update()
    assert torch.equal(balancer.load, want)
    balancer.update()  # nothing was counted
    assert torch.equal(balancer.load, want) and "load" not in balancer.state_dict()
    balancer.reset_parameters()
    assert not balancer.load.any()
