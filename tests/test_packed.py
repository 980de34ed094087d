"""Rows of different lengths: every function that takes offsets, against a loop over its rows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import khot
from khot import estimators, losses, sampling
from khot.sampling import conditional_poisson

LENGTHS = {
    "mixed": [0, 5, 1, 5, 0, 9, 3, 3, 40, 1],
    "filled": [3, 5, 2, 5, 9, 3, 3, 40, 2],
    "equal": [4] * 6,
    "one": [7],
    "empty rows": [0, 0],
}


class Case(NamedTuple):
    """A function, and what it takes beside the rows, as :func:`_given` makes it: "k", or "k=one" for a k that
    is called one there."""

    function: Callable[..., Any]
    takes: tuple[str, ...]
    entries: bool = True
    filled: bool = False  # whether a row must have two entries
    smooth: bool = True


def _case(function: Callable[..., Any], takes: str, **more: Any) -> Any:
    return pytest.param(Case(function, tuple(takes.split()), **more), id=function.__name__)


def _topk_values(x: Tensor, **options: Any) -> Tensor:
    return khot.topk(x, 2, **options).values


def _fenchel_young(
    x: Tensor, *, target: Tensor, k: Tensor, tau: Tensor, reduction: Any = "mean", **options: Any
) -> Tensor:
    return losses.FenchelYoungTopKLoss(k, tau=tau, reduction=reduction)(x, target, **options)


def _cross_entropy(x: Tensor, *, label: Tensor, reduction: Any = "mean", **options: Any) -> Tensor:
    return losses.TopKCrossEntropyLoss(2, reduction=reduction)(x, label, **options)


def _smooth_cross_entropy(x: Tensor, *, target: Tensor, reduction: Any = "mean", **options: Any) -> Tensor:
    loss = losses.TopKCrossEntropyLoss({1: 0.3, 2: 0.7}, label_smoothing=0.1, reduction=reduction)
    return loss(x, target, **options)


def _weighted_quantile(x: Tensor, **options: Any) -> Tensor:
    return khot.quantile(x, **options)


def _shares(x: Any, k: Tensor, offsets: Tensor | None) -> Tensor:
    """k/n for each entry of rows like those of x."""
    if x.is_nested:
        return torch.nested.nested_tensor_from_jagged(_shares(x.values(), k, x.offsets()), x.offsets())
    lengths = torch.tensor([len(x)]) if offsets is None else offsets.diff()
    each = (k / lengths.clamp(min=1)).reshape(-1)
    return each.repeat_interleave(lengths, output_size=x.shape[0]) + 0 * x


def inclusion_probs(x: Tensor, k: Tensor, offsets: Tensor | None = None) -> Tensor:
    return sampling.inclusion_probs(_shares(x, k, offsets), offsets=offsets)


def calibrate(x: Tensor, k: Tensor, offsets: Tensor | None = None) -> Tensor:
    return conditional_poisson.calibrate(_shares(x, k, offsets), offsets=offsets)


def log_prob(x: Tensor, k: Tensor, offsets: Tensor | None = None) -> Tensor:
    chosen = khot.topk_mask(x, k, offsets=offsets).detach()
    return conditional_poisson.log_prob(chosen, x, k, offsets=offsets)


def sample(x: Tensor, k: Tensor, offsets: Tensor | None = None, **options: Any) -> Tensor:
    return sampling.sample(_shares(x, k, offsets), offsets=offsets, **options)


SOFT = [
    *(
        _case(getattr(khot, f"{name}_topk"), "k tau mask")
        for name in ("soft", "log_soft", "sigmoid", "laplace", "sparse")
    ),
    _case(khot.ot_topk, "k mask"),
    _case(khot.topk_mask, "k mask", smooth=False),
    _case(khot.soft_topk_magnitude, "k tau mask"),
    _case(khot.soft_topk_signed, "k tau mask"),
    _case(khot.soft_topk_exp, "k tau mask"),
    _case(khot.soft_topk_sum, "k mask", entries=False),
    _case(khot.k_support_norm, "k mask", entries=False, filled=True),
    _case(khot.soft_budget, "cost budget tau mask"),
    _case(khot.budget_mask, "cost budget mask", smooth=False),
    _case(khot.soft_rank, "tau mask"),
    _case(khot.soft_sort, "tau mask"),
    _case(khot.soft_quantile, "q tau mask", entries=False, filled=True),
    _case(khot.soft_median, "tau mask", entries=False, filled=True),
    _case(khot.quantile, "q mask", entries=False, filled=True),
    _case(khot.kth_value, "k mask", entries=False, filled=True),
    _case(khot.conformal_quantile, "alpha=share mask", entries=False, filled=True),
    _case(khot.nucleus_mask, "p=share tau mask", filled=True),
    _case(_weighted_quantile, "q weights=cost mask", entries=False, filled=True),
    _case(khot.project_permutahedron, "w tau mask"),
    _case(khot.soft_count, "at tau mask", entries=False),
    _case(khot.inverse_soft_count, "count tau mask", entries=False, filled=True),
    _case(_topk_values, "mask", entries=False, filled=True),
    _case(khot.k_support_negentropy, "k=one", entries=False, filled=True),
    _case(inclusion_probs, "k", smooth=False),
    _case(calibrate, "k"),
    _case(conditional_poisson.log_normalizer, "k", entries=False),
    _case(conditional_poisson.marginals, "k"),
    _case(log_prob, "k", entries=False),
    _case(conditional_poisson.entropy, "k", entries=False),
    _case(conditional_poisson.kl, "q_logits k", entries=False),
]
LOSSES = [
    _case(losses.spearman_loss, "targets tau mask"),
    _case(losses.ndcg_loss, "relevance tau mask"),
    _case(losses.log_rank_loss, "relevance mask"),
    _case(losses.average_precision_loss, "labels tau mask"),
    _case(losses.precision_at_k_loss, "labels k=one tau mask"),
    _case(losses.recall_at_k_loss, "labels k=one tau mask"),
    _case(losses.hit_at_k_loss, "labels k=one tau mask"),
    _case(losses.size_penalty, "weight mask"),
    _case(_fenchel_young, "target k tau mask"),
    _case(_cross_entropy, "label mask", filled=True),
    _case(_smooth_cross_entropy, "target mask", filled=True),
    _case(losses.permutation_cross_entropy, "target=order mask"),
]
DRAWS = [
    _case(khot.sample_khot, "k mask"),
    *(
        _case(getattr(estimators, name), "k")
        for name in ("straight_through", "second_order", "gumbel", "simple", "imle", "sequential_softmax")
    ),
    _case(estimators.ncpss, "k"),
    _case(sample, "k"),
    _case(sampling.gumbel_topk, "k"),
    _case(conditional_poisson.sample, "k"),
]
ENTRIES = {"cost", "mask", "w", "q_logits", "targets", "relevance", "labels", "target", "weights"}
ROWS = {"p", "alpha", "k", "one", "tau", "budget", "at", "count", "label", "weight"}


def _given(lengths: list[int], takes: tuple[str, ...]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    n, rows, each = sum(lengths), len(lengths), torch.tensor(lengths, dtype=torch.float64)

    def number(size: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, dtype=torch.float64, generator=g)

    mask = torch.rand(n, generator=g) < 0.7
    starts = _offsets(lengths)[:-1][each > 0]
    mask[starts] = mask[(starts + 1).clamp(max=n - 1)] = True  # two entries of a row that has two
    every = {
        "k": each.clamp(max=2),
        "one": torch.ones(rows),
        "tau": number(rows, 0.3, 1.3),
        "mask": mask,
        "cost": number(n, 0.5, 1.5),
        "budget": 0.4 * each.clamp(max=2),
        "q": torch.tensor([0.2, 0.9], dtype=torch.float64),
        "w": number(n, -1, 1),
        "at": number(rows, -1, 1),
        "count": 0.4 * each,
        "q_logits": number(n, -1, 1),
        "targets": number(n, -1, 1),
        "relevance": torch.randint(0, 3, (n,), generator=g),
        "labels": torch.randint(0, 2, (n,), generator=g),
        "target": mask.double(),
        "label": torch.ones(rows, dtype=torch.int64),
        "weight": number(rows, 0, 1),
        "share": number(rows, 0.4, 0.8),
    }
    if "target=order" in takes:
        every["order"] = torch.cat([_order(part, g) for part in mask.split(lengths)])
    named = (name.partition("=") for name in takes)
    return {name: every[source or name] for name, _, source in named}


def _order(mask: Tensor, generator: torch.Generator) -> Tensor:
    """The entries under the mask in any order, and then the others."""
    order = torch.randperm(len(mask), generator=generator)
    return order[torch.argsort(~mask[order], stable=True)]


def _loop(case: Case, x: Tensor, lengths: list[int], given: dict[str, Tensor], **more: Any) -> list[Tensor]:
    """The function of each row alone."""
    by_row = {
        name: value.split(lengths) if name in ENTRIES else value if name in ROWS else [value] * len(lengths)
        for name, value in given.items()
    }
    parts = enumerate(x.split(lengths))
    return [case.function(part, **{name: of[i] for name, of in by_row.items()}, **more) for i, part in parts]


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _values(lengths: list[int]) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(sum(lengths), dtype=torch.float64, generator=g).requires_grad_()


def _joined(case: Case, rows: list[Tensor], like: Tensor) -> Tensor:
    return (
        torch.cat(rows)
        if case.entries
        else torch.stack(rows, 1 if rows[0].dim() and "q" in case.takes else 0)
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", SOFT)
def test_each_row_alone(case: Case, lengths: list[int]) -> None:
    """Values, and derivatives of first and second order in the entries and in all numbers of rows."""
    if case.filled:
        lengths = [max(n, 2) for n in lengths]
    x, given = _values(lengths), _given(lengths, case.takes)
    leaves = [x, *(v.requires_grad_() for k, v in given.items() if k in ("tau", "at", "w", "cost"))]
    found = case.function(x, **given, offsets=_offsets(lengths))
    expected = _joined(case, _loop(case, x, lengths, given), x)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    jagged = torch.nested.nested_tensor_from_jagged(x, _offsets(lengths))
    of_jagged = case.function(jagged, **given)
    assert_close(of_jagged.values() if case.entries else of_jagged, found, rtol=0, atol=0)
    if not case.smooth or not found.numel():
        return
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).cos().view_as(found)
    first, wanted = (
        torch.autograd.grad((y.clamp(min=-50) * weights).sum(), leaves, create_graph=True, allow_unused=True)
        for y in (found, expected)
    )
    assert_close(first, wanted, rtol=1e-8, atol=1e-8)
    if first[0].requires_grad:
        second, wanted = (
            torch.autograd.grad(g[0].square().sum(), x, allow_unused=True, materialize_grads=True)[0]
            for g in (first, wanted)
        )
        assert_close(second, wanted, rtol=1e-6, atol=1e-6)


# Those whose mean is over all rows with an entry.
MEANS = (losses.size_penalty, _fenchel_young, _cross_entropy, _smooth_cross_entropy)
# Those whose mean over no rows is 0, and not NaN as PyTorch's is.
RANKINGS = (
    losses.spearman_loss,
    losses.ndcg_loss,
    losses.log_rank_loss,
    losses.average_precision_loss,
    losses.precision_at_k_loss,
    losses.recall_at_k_loss,
    losses.hit_at_k_loss,
)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LOSSES)
def test_losses(case: Case, reduction: str) -> None:
    """The reductions are those of a batch of padded rows: of one number for each row, and lists without an
    entry do not count."""
    lengths = LENGTHS["filled" if case.filled else "mixed"]
    x, given = _values(lengths), _given(lengths, case.takes)
    found = case.function(x, **given, offsets=_offsets(lengths), reduction=reduction)
    of_rows = _loop(case, x, lengths, given, reduction="none")
    rows = torch.stack(of_rows) if of_rows[0].dim() == 0 else torch.cat(of_rows)
    if reduction == "none":
        expected = rows
    elif reduction == "sum":
        expected = rows.sum()
    elif case.function in MEANS:
        expected = rows.sum() / sum(n > 0 for n in lengths)
    elif case.function is losses.permutation_cross_entropy:
        expected = rows.sum() / given["mask"].sum()
    elif case.function is losses.log_rank_loss:
        counts = torch.where(given["mask"], given["relevance"], 0)
        expected = rows.sum() / counts.sum()
    else:  # over the lists that count
        expected = rows.sum() / _counting(case, lengths, given)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    jagged = torch.nested.nested_tensor_from_jagged(x, _offsets(lengths))
    of_jagged = case.function(jagged, **given, reduction=reduction)
    assert_close(of_jagged.values() if of_jagged.is_nested else of_jagged, found, rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(y.cos().sum(), x)[0] for y in (found, expected))
    assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LOSSES)
def test_lists_without_entries(case: Case, reduction: str) -> None:
    """They are 0 and not in the mean, as are rows of a padded batch that are masked as a whole."""
    lengths, filled = [0, 3, 0, 5, 2, 9, 0], torch.tensor([1, 3, 4, 5])
    x, given = _values(lengths), _given([3, 5, 2, 9], case.takes)
    expected = case.function(x, **given, offsets=_offsets([3, 5, 2, 9]), reduction=reduction)
    of_none = {"k": float(case.function is not _fenchel_young), "label": -100}  # and any number for the rest
    for name in given.keys() & ROWS:
        every = given[name].new_full((len(lengths),), of_none.get(name, 0.7))
        given[name] = every.index_copy(0, filled, given[name])
    there = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    parts = {name: value for name, value in given.items() if name in ENTRIES}
    padded = {
        name: torch.zeros(there.shape, dtype=v.dtype).masked_scatter(there, v) for name, v in parts.items()
    }
    rows = torch.full(there.shape, torch.nan, dtype=x.dtype).masked_scatter(there, x)
    for found, places in (
        (case.function(x, **given, offsets=_offsets(lengths), reduction=reduction), None),
        (case.function(rows, **{**given, **padded}, reduction=reduction), there),
    ):
        if reduction == "none" and found.shape != x.shape:
            counts = torch.zeros(len(lengths), dtype=torch.bool).index_fill(0, filled, True)
            places = counts if found.dim() == 1 else there
            assert not found[~places].any()
            found = found[places]
        assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert_close(*(torch.autograd.grad(y.cos().sum(), x, retain_graph=True) for y in (found, expected)))


def test_means_of_many_lists_in_half_precision() -> None:
    """Neither the sum of the losses nor the number of lists is a float16."""
    lengths = [1, 2] * 35_000
    probs = torch.full((sum(lengths),), 0.75, dtype=torch.float16)
    mean = losses.size_penalty(probs, 1.0, offsets=_offsets(lengths))
    assert mean.dtype == torch.float16
    assert mean == 1.125


@pytest.mark.parametrize("case", LOSSES)
def test_no_list_with_entries(case: Case) -> None:
    given = _given([0, 0], case.takes)
    given |= {"label": torch.tensor([-100, -100])} if "label" in given else {}
    padded = {name: v.new_zeros(2, 3) if name in ENTRIES else v for name, v in given.items()}
    expected = 0.0 if case.function in RANKINGS else torch.nan
    x = torch.randn(2, 3, requires_grad=True)
    of_padded = case.function(x, **padded)
    assert_close(of_padded.item(), expected, equal_nan=True)
    assert not torch.autograd.grad(of_padded, x)[0].any()
    found = case.function(torch.empty(0), **given, offsets=torch.tensor([0, 0, 0]))
    assert_close(found.item(), expected, equal_nan=True)


def test_a_bad_list_without_relevant_entries() -> None:
    """In a group of its own, as the other list is far longer."""
    scores, relevance = torch.randn(50_003), torch.zeros(50_003, dtype=torch.long)
    scores[:3], relevance[10] = torch.nan, 1
    offsets = torch.tensor([0, 3, len(scores)])
    assert khot.losses.log_rank_loss(scores, relevance, offsets=offsets).isnan()
    assert khot.losses.log_rank_loss(scores[3:], relevance[3:], offsets=offsets[1:] - 3).isfinite()


def _counting(case: Case, lengths: list[int], given: dict[str, Tensor]) -> int:
    """How many lists count: those with two different targets, or with an entry that is relevant."""
    name = next(iter(given))
    lists = zip(given[name].split(lengths), given["mask"].split(lengths), strict=True)
    if name == "targets":
        return sum(int(mask.sum() > 1) for _, mask in lists)
    return sum(int((value[mask] > 0).any()) for value, mask in lists)


@pytest.mark.parametrize("case", DRAWS)
def test_draws(case: Case) -> None:
    """Each row has k ones, the same for the same seed, and the gradient of its estimator."""
    lengths = LENGTHS["mixed"]
    x, given = _values(lengths), _given(lengths, case.takes)

    def draw(rows: Tensor, **more: Any) -> Tensor:
        return case.function(rows, **given, generator=torch.Generator().manual_seed(2), **more)

    drawn = draw(x, offsets=_offsets(lengths))
    sizes = torch.stack([row.sum() for row in drawn.split(lengths)])
    if case.function is not estimators.ncpss:  # its sizes vary
        assert_close(sizes.detach(), given["k"], rtol=0, atol=1e-6)
    assert set(drawn.detach().round(decimals=6).unique().tolist()) <= {0.0, 1.0}
    jagged = draw(torch.nested.nested_tensor_from_jagged(x, _offsets(lengths)))
    assert torch.equal(jagged.values(), drawn)
    if "mask" in given:
        assert not drawn[~given["mask"]].any()
    if drawn.requires_grad:
        assert torch.autograd.grad((drawn * x.detach().cos()).sum(), x)[0].any()


def test_tables_are_complete() -> None:
    """Every public function that takes offsets is in a table here."""
    tested = {param.values[0].function.__name__ for param in (*SOFT, *LOSSES, *DRAWS)}
    modules = (khot, losses, sampling, conditional_poisson, estimators)
    public = {
        name
        for module in modules
        for name in module.__all__
        if inspect.isfunction(function := getattr(module, name))
        and "offsets" in inspect.signature(function).parameters
    }
    assert public - tested == {"topk", "reinmax"}  # of a tuple, and below


def test_every_function_on_rows_takes_offsets() -> None:
    """But those whose results are matrices for each row, and those that have no rows of values."""
    without = {
        name
        for module in (khot, losses, sampling, conditional_poisson, estimators)
        for name in module.__all__
        if inspect.isfunction(function := getattr(module, name))
        and "offsets" not in inspect.signature(function).parameters
    }
    matrices = {"soft_permutation", "log_soft_permutation", "sorted_soft_topk", "soft_assign"}
    matrices |= {"joint_inclusion_probs", "joint_marginals"}
    assert without == matrices | {"linear_topk", "score_function", "show_config"}


def test_one_hot_draws() -> None:
    x = _values(LENGTHS["filled"])
    drawn = estimators.reinmax(x, offsets=_offsets(LENGTHS["filled"]))
    assert [row.sum().item() for row in drawn.split(LENGTHS["filled"])] == [1.0] * len(LENGTHS["filled"])


def test_entries_and_their_places() -> None:
    """The indices of topk count from the first entry of a row."""
    lengths = LENGTHS["filled"]
    x = _values(lengths)
    values, indices = khot.topk(x, 2, offsets=_offsets(lengths))
    assert torch.equal(x[indices + _offsets(lengths)[:-1, None]], values)
    assert torch.equal(values[:, 0], torch.stack([row.max() for row in x.split(lengths)]))


@pytest.mark.parametrize(
    "call", [khot.soft_topk, khot.log_soft_topk, khot.topk_mask, khot.soft_topk_magnitude]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(call: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Also with offsets of 32 bits, rows of which none or all are selected, and rows beyond the lanes."""
    lengths = [4, 300, 1, 2, 17, 0, 600, 4, 4, *range(1, 40)]
    k = torch.tensor([[0.0, n, n / 2, 1.5][i % 4] for i, n in enumerate(lengths)]).clamp(
        max=torch.tensor(lengths)
    )
    if call is khot.soft_topk_magnitude:
        k = k.floor()
    x = _values(lengths).detach().to(dtype).requires_grad_()
    tau = 0.3 if call is not khot.topk_mask else None
    options = {} if tau is None else {"tau": tau}
    found = call(x, k, offsets=_offsets(lengths).int(), **options)
    expected = torch.cat([call(row, k[i], **options) for i, row in enumerate(x.split(lengths))])
    assert found.dtype == dtype
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert_close(found, expected, rtol=step, atol=step)
    if call is khot.topk_mask:
        return
    got, wanted = (torch.autograd.grad(y.float().clamp(min=-30).cos().sum(), x)[0] for y in (found, expected))
    assert_close(got.float(), wanted.float(), rtol=8 * step, atol=8 * step)


def test_hard_choices() -> None:
    lengths = LENGTHS["mixed"]
    x, given = _values(lengths), _given(lengths, ("k", "tau", "mask"))
    found = khot.soft_topk(
        x,
        given["k"],
        tau=given["tau"],
        mask=given["mask"],
        hard=True,
        largest=False,
        offsets=_offsets(lengths),
    )
    parts = given["mask"].split(lengths)
    expected = torch.cat(
        [
            khot.soft_topk(row, given["k"][i], tau=given["tau"][i], mask=parts[i], hard=True, largest=False)
            for i, row in enumerate(x.split(lengths))
        ]
    )
    assert_close(found, expected)
    got, wanted = (torch.autograd.grad(y.dot(x.detach().cos()), x)[0] for y in (found, expected))
    assert_close(got, wanted)


@pytest.mark.parametrize(
    "case", [c for c in SOFT if c.values[0].function not in (inclusion_probs, calibrate)]
)
def test_nan_stays_in_its_row(case: Case) -> None:
    """Probabilities of NaN are an error."""
    lengths = LENGTHS["filled"]
    clean, given = _values(lengths).detach(), _given(lengths, case.takes)
    x = clean.clone()
    x[4] = torch.nan
    if "mask" in given:
        given["mask"][4] = True
    found, expected = (
        _by_row(case, case.function(v, **given, offsets=_offsets(lengths)), lengths) for v in (x, clean)
    )
    assert found[1].isnan().all() or case.function is _topk_values  # which has the other entry, too
    assert found[1].isnan().any()
    assert_close(found[:1] + found[2:], expected[:1] + expected[2:])


def _by_row(case: Case, result: Tensor, lengths: list[int]) -> list[Tensor]:
    if case.entries:
        return list(result.split(lengths))
    return list(result.unbind(1 if result.dim() > 1 and "q" in case.takes else 0))


@pytest.mark.parametrize("case", SOFT)
def test_many_rows_of_one(case: Case) -> None:
    """Or of two, where a row must have two entries."""
    n, rows = 1 + case.filled, 100_000
    x, given = _values([n] * rows).detach(), _given([n] * rows, case.takes)
    found = case.function(x, **given, offsets=torch.arange(0, len(x) + 1, n))
    for i in (0, 777, rows - 1):
        entries = slice(n * i, n * i + n)
        alone = {
            name: value[entries] if name in ENTRIES else value[i] if name in ROWS else value
            for name, value in given.items()
        }
        of_row = found[entries] if case.entries else found[:, i] if "q" in case.takes else found[i]
        assert_close(of_row, case.function(x[entries], **alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("call", [khot.soft_topk, khot.log_soft_topk, khot.topk_mask])
def test_many_rows_of_none(call: Callable[..., Tensor]) -> None:
    """A time of n² for n empty rows would be minutes."""
    n = 500_000
    offsets = torch.cat((torch.zeros(n, dtype=torch.int64), torch.full((n,), 3)))
    x, k = (
        torch.randn(3, requires_grad=True),
        torch.zeros(2 * n - 1).index_fill(0, torch.tensor([n - 1]), 2.0),
    )
    found, expected = call(x, k, offsets=offsets), call(x, 2)
    assert_close(found, expected)
    if found.requires_grad:
        assert_close(*(torch.autograd.grad(y.cos().sum(), x) for y in (found, expected)))


def test_a_row_that_threads_share() -> None:
    long = torch.tensor([0, 1, 200_001, 200_003])
    scores = torch.randn(200_003)
    assert_close(
        khot.soft_topk(scores, 1, offsets=long)[1:200_001],
        khot.soft_topk(scores[1:200_001], 1),
        rtol=1e-5,
        atol=0,
    )


@pytest.mark.parametrize(
    ("offsets", "error", "says"),
    [
        ([0, 5, 3, 9], ValueError, r"offsets\[2\] is 3, after 5"),
        ([1, 9], ValueError, "begin with 0, but got 1"),
        ([0, 8], ValueError, "end with the number of values, 9, but got 8"),
        ([0], ValueError, "end with the number of values, 9, but got 0"),
        ([], ValueError, "at least one entry"),
        ([[0, 9]], ValueError, "one dim"),
        ([0.0, 9.0], TypeError, "int32 or int64"),
    ],
)
@pytest.mark.parametrize("call", [khot.soft_topk, khot.topk_mask, khot.kth_value])
def test_bad_offsets(call: Callable[..., Tensor], offsets: list[Any], error: type, says: str) -> None:
    given = torch.tensor(offsets) if offsets else torch.ones(0, dtype=torch.int64)
    with pytest.raises(error, match=says):
        call(torch.randn(9), 20, offsets=given)  # the offsets are looked at before k


@pytest.mark.parametrize(
    "call", [khot.soft_topk, khot.log_soft_topk, khot.topk_mask, khot.soft_topk_magnitude]
)
def test_nothing_is_selected_from_a_row_without_entries(call: Callable[..., Tensor]) -> None:
    """An error, as of any k above a row's length, where all rows are empty, too."""
    for lengths in ([0, 3], [0, 0]):
        x = torch.randn(sum(lengths))
        for k in (1, torch.ones(2), torch.tensor([1.0, 0.0])):
            with pytest.raises(ValueError, match=r"k must lie in \[0, .*\], but got 1"):
                call(x, k, offsets=_offsets(lengths))
        assert call(x, 0, offsets=_offsets(lengths)).shape == x.shape
    with pytest.raises(ValueError, match="tau must be finite and > 0, but got 0"):
        khot.soft_topk(x, 0, tau=torch.tensor([0.0, 1.0]), offsets=_offsets(lengths))


def test_no_rows() -> None:
    x, offsets = torch.empty(0), torch.tensor([0])
    for param in SOFT:
        (case,) = param.values
        given = {name: 2 if name in ("k", "one") else value for name, value in _given([], case.takes).items()}
        assert case.function(x, **given, offsets=offsets).numel() == 0
    assert losses.ndcg_loss(x, x, offsets=offsets) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_counts(dtype: torch.dtype) -> None:
    x, offsets, k = torch.randn(9), torch.tensor([0, 4, 9]), torch.tensor([1, 3])
    for call in (khot.soft_topk, khot.topk_mask):
        assert torch.equal(call(x, k.to(dtype), offsets=offsets), call(x, k, offsets=offsets))


def test_vmap_over_offsets() -> None:
    offsets = torch.tensor([[0, 1, 3], [0, 2, 3]])
    with pytest.raises(ValueError, match="offsets must be the same for all examples"):
        torch.vmap(lambda each: khot.soft_topk(torch.zeros(3), 1, offsets=each))(offsets)


def test_bad_arguments() -> None:
    x, offsets = torch.randn(9), torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match=r"k must lie in .* 5 for a row with 4"):
        khot.soft_topk(x, 5, offsets=offsets)
    with pytest.raises(ValueError, match="k must be a number or have one value for each row, 2 in all"):
        khot.soft_topk(x, torch.ones(3), offsets=offsets)
    with pytest.raises(ValueError, match="mask must be a number or have one value for each entry, 9 in all"):
        khot.soft_topk(x, 1, mask=torch.ones(2, dtype=torch.bool), offsets=offsets)
    with pytest.raises(ValueError, match="one dim with offsets"):
        khot.soft_topk(x.view(3, 3), 1, offsets=offsets)
    with pytest.raises(ValueError, match="dim must be -1 with offsets"):
        khot.quantile(x, 0.5, None, offsets=offsets)
    with pytest.raises(TypeError, match=r"offsets must be a torch\.Tensor"):
        khot.soft_topk(x, 1, offsets=[0, 4, 9])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"input must be a dense tensor, but got the layout torch\.sparse_coo"
    ):
        khot.soft_topk(x.to_sparse(), 1, offsets=offsets)
    with pytest.raises(ValueError, match="offsets must be on the input's device"):
        khot.soft_topk(x, 1, offsets=torch.empty(3, dtype=torch.int64, device="meta"))
    jagged = torch.nested.nested_tensor_from_jagged(x, offsets)
    with pytest.raises(ValueError, match="offsets must be None for a nested input"):
        khot.soft_topk(jagged, 1, offsets=offsets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        strided = torch.nested.nested_tensor([x[:4], x[4:]])
    with pytest.raises(TypeError, match=r"layout=torch\.jagged"):
        khot.soft_topk(strided, 1)
    with pytest.raises(ValueError, match="rows of the lengths of scores"):
        losses.log_rank_loss(jagged, torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 5, 9])))
    with pytest.raises(TypeError, match="nested"):
        khot.soft_permutation(jagged)


def test_jagged_results_go_with_their_input() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(9), torch.tensor([0, 4, 9]))
    both = jagged * khot.soft_topk(jagged, 2)
    assert both.shape == jagged.shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    """Without a break, and for other lengths without compiling again."""
    cdf = khot.cdfs.Power(1.5)  # whose p is a symbol in a dynamic trace

    def call(x: Tensor, offsets: Tensor, k: Tensor) -> Tensor:
        y = khot.soft_topk(x, k, tau=0.5, cdf=cdf, offsets=offsets) + khot.soft_rank(x, offsets=offsets)
        q = khot.quantile(x, torch.tensor([0.2, 0.9], dtype=x.dtype), offsets=offsets)
        return (y * x).sum() + q.sum() + losses.ndcg_loss(x, (x > 0).to(x.dtype), 3, offsets=offsets)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    for lengths in ([3, 5, 2], [4, 4, 4, 9]) if dynamic else ([3, 5, 2],):
        x, k = _values(lengths), torch.full((len(lengths),), 1.5, requires_grad=True)
        found, expected = (f(x, _offsets(lengths), k) for f in (compiled, call))
        assert_close(found, expected)
        assert_close(torch.autograd.grad(found, (x, k)), torch.autograd.grad(expected, (x, k)))
        counts.append(counter.frame_count)
    assert len({*counts}) == 1


def _kinds() -> dict[str, list[Case]]:
    """All cases in few graphs, each of which takes as long as several more functions in it."""
    cases = [case for param in [*SOFT, *LOSSES] for case in param.values]
    return {
        "entries": [case for case in cases if case.entries and not case.filled],
        "rows": [case for case in cases if not case.entries and not case.filled],
        "filled": [case for case in cases if case.filled],
        "draws": [case for param in DRAWS for case in param.values],
    }


@torch._dynamo.config.patch(specialize_float=True)  # which is found late: what came before is traced again
@pytest.mark.parametrize("cases", _kinds().values(), ids=_kinds())
def test_in_a_graph(cases: list[Case]) -> None:
    """Values and gradients of jagged rows are those in eager mode, of one graph for all lengths; draws are
    those of the same seed. Packed rows take the same way, in test_compiled_whole."""

    def call(rows: list[Tensor], given: list[dict[str, Tensor]]) -> list[Tensor]:
        found = [
            case.function(x, **own, offsets=None) for case, x, own in zip(cases, rows, given, strict=True)
        ]
        return [y * 2 if y.is_floating_point() else y for y in found]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for lengths in (LENGTHS["filled"], [2, 6, 4] if cases[0].filled else LENGTHS["mixed"]):
        leaves, offsets = [_values(lengths) for _ in cases], _offsets(lengths)
        rows = [torch.nested.nested_tensor_from_jagged(x, offsets) for x in leaves]
        both, grads = [], []
        for f in (compiled, call):
            torch.manual_seed(5)
            found = f(rows, [_given(lengths, case.takes) for case in cases])
            both.append([y.values() if y.is_nested else y for y in found])
            g = torch.Generator().manual_seed(6)
            weights = [torch.randn(y.shape, dtype=torch.float64, generator=g) for y in both[-1]]
            total = [(y.clamp(min=-50) * w).sum() for y, w in zip(both[-1], weights, strict=True)]
            grads.append(torch.autograd.grad(torch.stack(total).sum(), leaves, materialize_grads=True))
        for case, *of_case in zip(cases, *both, *grads, strict=True):
            for pair in (of_case[:2], of_case[2:]):
                assert_close(*pair, msg=partial("{}: {}".format, case.function.__name__))
    assert counter.frame_count == 1


def test_transforms() -> None:
    """vmap over values of the same offsets; forward mode is reverse mode."""
    offsets = torch.tensor([0, 3, 3, 8])

    def call(x: Tensor) -> Tensor:
        return khot.soft_topk(x, torch.tensor([1.0, 0.0, 2.0]), tau=0.3, offsets=offsets)

    x = torch.randn(4, 8, dtype=torch.float64)
    assert_close(torch.func.vmap(call)(x), torch.stack([call(row) for row in x]))
    assert_close(torch.func.jacfwd(call)(x[0]), torch.func.jacrev(call)(x[0]))
    assert torch.autograd.gradgradcheck(call, x[0].clone().requires_grad_())


@pytest.mark.parametrize(
    ("transform", "backend"),
    [(torch.func.jacfwd, "eager"), (torch.func.jacrev, "aot_eager")],
    ids=["jacfwd", "jacrev"],
)
def test_derivatives_leave_the_graph(transform: Callable[..., Any], backend: str) -> None:
    """The mean is over the two lists that count."""
    offsets, k, relevance = torch.tensor([0, 4, 4, 8]), torch.tensor([1, 0, 2]), torch.arange(8) % 3

    def call(x: Tensor) -> Tensor:
        return khot.soft_topk(x, k, offsets=offsets) + losses.ndcg_loss(x, relevance, offsets=offsets)

    torch._dynamo.reset()
    x = torch.randn(8, dtype=torch.float64)
    assert_close(torch.compile(transform(call), backend=backend)(x), transform(call)(x))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"packed rows leave the graph under derivatives of torch\.func"):
        torch.compile(transform(call), backend=backend, fullgraph=True)(x)


def test_vmap_in_a_graph() -> None:
    """Of values and of what there is one of for each row, one in the other, with the gradient."""
    lengths = LENGTHS["filled"]
    offsets, relevance = _offsets(lengths), torch.arange(sum(lengths)) % 3

    def inner(x: Tensor, tau: Tensor) -> tuple[Tensor, ...]:
        y = khot.soft_topk(x, 1, tau=tau, offsets=offsets)
        loss = losses.ndcg_loss(x, relevance, tau=tau.mean(), offsets=offsets)
        return y, loss, *khot.topk(x * tau.mean(), 2, offsets=offsets)

    def call(x: Tensor, tau: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(torch.func.vmap(inner, in_dims=(None, 0)), in_dims=(1, None))(x, tau)

    torch._dynamo.reset()
    x = (_values(lengths).detach().unsqueeze(-1) * torch.tensor([1.0, -1, 2])).requires_grad_()
    tau = 0.5 + torch.rand(2, len(lengths), dtype=torch.float64)
    found, expected = (f(x, tau) for f in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    assert_close(found, expected)
    got, wanted = (
        torch.autograd.grad([y.cos().sum() for y in results[:3]], x) for results in (found, expected)
    )
    assert_close(got, wanted)


def test_draws_in_a_graph() -> None:
    """Two draws are two, and the graph may ask for several of each row. A generator, and vmap, leave it."""
    x, offsets = torch.zeros(400), torch.arange(0, 401, 100)

    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, two = (sampling.gumbel_topk(x, 50, offsets=offsets) for _ in range(2))
        return one, two, sampling.sample(x + 0.5, sample_shape=(3, 2), offsets=offsets)

    def under_vmap(x: Tensor) -> Tensor:
        draw = torch.func.vmap(lambda x: khot.sample_khot(x, 50, offsets=offsets), randomness="different")
        return draw(x.expand(3, -1))

    generator = torch.Generator()

    def of_generator(x: Tensor) -> Tensor:
        return khot.sample_khot(x, 50, offsets=offsets, generator=generator)

    torch._dynamo.reset()
    torch.manual_seed(0)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch.manual_seed(0)
    assert_close(found, call(x))
    assert not torch.equal(found[0], found[1])
    assert found[2].shape == (3, 2, 400)
    for leaves in (under_vmap, of_generator):
        torch._dynamo.reset()
        drawn = torch.compile(leaves, backend="aot_eager")(x)
        assert_close(drawn.unflatten(-1, (4, 100)).sum(-1), torch.full((*drawn.shape[:-1], 4), 50.0))
        torch._dynamo.reset()
        with pytest.raises(Unsupported, match="packed rows leave the graph"):
            torch.compile(leaves, fullgraph=True, backend="aot_eager")(x)


class _Cubic(khot.cdfs.CDF):
    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 + torch.atan(z**3) / torch.pi

    def pdf(self, z: Tensor) -> Tensor:
        return 3 * z.square() / (1 + z.pow(6)) / torch.pi


def test_a_draw_of_a_checkpoint_is_repeated_in_a_graph() -> None:
    x, offsets = _values(LENGTHS["filled"]), _offsets(LENGTHS["filled"])

    def drawn(x: Tensor) -> Tensor:
        return khot.sample_khot(x, 1, offsets=offsets) * x.sin()

    def kept(x: Tensor) -> Tensor:
        return checkpoint(drawn, x, use_reentrant=False)

    found = []
    for call in (drawn, torch.compile(kept, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y.cos().sum(), x)))
    assert_close(*found)


def test_second_derivatives_do_not_go_through_a_graph() -> None:
    x, offsets = _values(LENGTHS["filled"]), _offsets(LENGTHS["filled"])
    y = torch.compile(khot.soft_topk, backend="eager", fullgraph=True)(x, 1, offsets=offsets)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="have no second derivatives"):
        torch.autograd.grad(grad.sum(), x)


def test_own_cdfs_in_a_graph() -> None:
    cdf, x, offsets = _Cubic(), _values([3, 5]), _offsets([3, 5])

    def call(x: Tensor) -> Tensor:
        return khot.soft_topk(x, 2, cdf=cdf, offsets=offsets)

    torch._dynamo.reset()
    found, expected = (f(x) for f in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(y.cos().sum(), x) for y in (found, expected)))


def test_several_jagged_tensors_in_a_graph() -> None:
    """They share their offsets, or the graph is left, where equal ones are found equal."""
    torch._dynamo.reset()
    x, relevance, offsets = _values([3, 5]), torch.arange(8) % 3, _offsets([3, 5])

    def jagged(values: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    expected = losses.ndcg_loss(x, relevance, offsets=offsets)
    for fullgraph, others in ((True, offsets), (False, offsets.clone())):
        compiled = torch.compile(losses.ndcg_loss, fullgraph=fullgraph, backend="aot_eager")
        found = compiled(jagged(x, offsets), jagged(relevance, others))
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(y, x, retain_graph=True) for y in (found, expected)))
    with pytest.raises(ValueError, match="relevance must have rows of the lengths of scores's"):
        compiled(jagged(x, offsets), jagged(relevance, _offsets([4, 4])))


def test_results_of_rows_of_one_length_are_their_own() -> None:
    """They are found as those of a matrix, and are no view of it."""
    x, offsets = torch.randn(24, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 8, 16, 24])
    want = khot.soft_topk(x.view(3, 8), 2).flatten()
    torch.testing.assert_close(khot.soft_topk(x, 2, offsets=offsets).detach_(), want)
    torch.testing.assert_close(khot.soft_topk(x.requires_grad_(), 2, offsets=offsets).detach_(), want)
