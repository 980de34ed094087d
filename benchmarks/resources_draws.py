"""What the kernels of :data:`TITLE` compile to, for `python -m benchmarks.resources`.

Instructions are all of a kernel, divided by the entries (and levels) that a thread holds at a time. A draw
computes a uniform number for each: ten rounds of Philox, of which two entries share one, take about 40.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.compiler import ASTSource

from khot import cdfs
from khot._kernels.triton import (
    assign,
    assign_backward,
    assign_steps,
    assign_whole,
    between,
    conditional_poisson,
    counts,
    designs,
    draws,
    exact,
    exact_backward,
    exact_sums,
    greedy,
    interpolation,
    layout,
    long_projection,
    losses,
    magnitude,
    mask,
    permutation,
    places,
    power_norms,
    projection,
    ranking_losses,
    ranks,
    resident_budget,
    resident_budget_backward,
    row_sort,
    selection,
    short_projection,
    sorts,
    split,
    split_budget,
    split_budget_backward,
    split_losses,
    split_magnitude,
    transport,
    transport_backward,
)
from khot._kernels.triton.functions import OUTPUTS

TITLE = "Draws, counts, losses, budgets, projections, assignments, ranks"
REGISTERS = 128  # a thread, where several programs share a multiprocessor
ALL = 255


class Case(NamedTuple):
    """A kernel at the constants that it runs with, and the instructions per entry that it may take."""

    kernel: Any
    shape: str
    constants: dict[str, Any]
    warps: int
    held: float  # entries, or entries times levels, of a thread
    bound: float
    spills: int = 0  # stores a thread, in what few rows need
    registers: int = REGISTERS
    few: bool = False  # compiled by --few, too
    multiples: tuple[str, ...] = ()  # integers that are divisible by 16
    limited: bool = False  # whether it runs with :func:`.layout.registers`
    options: dict[str, int] = {}  # noqa: RUF012 (what else it is compiled with)
    types: dict[str, str] = {}  # noqa: RUF012 (of arguments, where they are its own)

    @property
    def id(self) -> str:
        return f"{self.kernel.fn.__name__} {self.shape}"


def _pareto(n: int, bound: float, whole: bool = True) -> Case:
    """Rows with whole sums, or the kernel with everything else."""
    constants = draws.which(n)
    warps, held = constants.pop("num_warps"), 2 * constants["PIECES"] * constants["PAIRS"]
    return Case(
        draws._pareto, f"n = {n:,}{'' if whole else ', all'}", constants | {"WHOLE": whole}, warps,
        held / 32 / warps, bound, few=not whole and n == 64, limited=True,
    )  # fmt: skip


def _poisson(n: int, bound: float, few: bool = False, whole: bool = True) -> Case:
    """Calibration and draw of rows with whole sums, or the kernel with everything else, in float64."""
    constants = conditional_poisson.which(n)
    warps = constants.pop("num_warps")
    return Case(
        conditional_poisson._conditional_poisson, f"n = {n:,}{'' if whole else ', all'}",
        constants | {"WHOLE": whole}, warps, constants["NARROW"] / 32 / warps, bound, registers=ALL, few=few,
    )  # fmt: skip


def _tile(kernel: Any, cdf: int, height: int, bound: float, **more: int) -> Case:
    width = min(counts.TILE // height, counts.ENTRIES)
    constants = {
        "CDF": cdf, "CENTRED": True, "COMPUTE": tl.float32, "EXACT": True,
        "HEIGHT": height, "WIDTH": width, **more,
    }  # fmt: skip
    shape = f"CDF {cdf}, {height} levels at a time"
    return Case(kernel, shape, constants, 4, height * width / 128, bound)


def cases() -> list[Case]:
    many = {"MANY": counts.MANY}
    chunk = {"PAIRS": draws.CHUNK // 2}
    careful = {"WIDTH": draws.CALIBRATED_WIDTH, "PAIRS": draws.CALIBRATED_WIDTH // 2}
    return [
        _pareto(64, 350),
        _pareto(1_000, 165),
        _pareto(4_096, 165),
        _pareto(64, 740, whole=False),
        _pareto(1_024, 350, whole=False),
        _poisson(64, 1_850, few=True),
        _poisson(64, 4_300, whole=False),
        _poisson(1_000, 1_150),
        _poisson(1_024, 1_150),
        Case(draws._part_moments, "long rows", {"CHUNK": draws.CHUNK}, 4, draws.CHUNK / 128, 60),
        Case(draws._part_keys, "long rows", {"PARTS": 1, **chunk}, 4, draws.CHUNK / 128, 150),
        Case(draws._choose, "long rows", {"PARTS": 1, "WIDTH": draws.LISTED}, draws.LISTED // 128, 4, 380),
        Case(
            draws._careful, "rows that are calibrated", careful, draws.CALIBRATED_WARPS, 4, 1_550, spills=75,
            limited=True,
        ),
        Case(draws._uniform, "", chunk, 4, draws.CHUNK / 128, 80),
        *(_tournament(nodes, bound) for nodes, bound in ((65, 340), (1_024, 430), (2_048, 530))),
        *(
            Case(
                designs._systematic, f"{width:,} units at a time", {"WIDTH": width}, warps,
                width / 32 / warps, bound, registers=168,
            )
            for width, warps, bound in ((128, 1, 260), (designs.WIDTH, 4, 280))
        ),
        Case(designs._phantoms, "", {"WIDTH": designs.WIDTH}, 4, 8, 60),
        *(_tile(counts._count, cdf, 32, bound, **many) for cdf, bound in enumerate((85, 74, 154, 70, 105))),
        _tile(counts._count, 0, 1, 110, **many),
        *(
            _tile(counts._count_densities, cdf, 32, bound, **many)
            for cdf, bound in enumerate((90, 75, 80, 71, 119))
        ),
        _tile(counts._pull_row, 0, 1, 90, **many)._replace(spills=1),
        _tile(counts._pull_row, 0, 32, 95, **many),
        *(_tile(counts._pull_entries, cdf, 32, bound) for cdf, bound in enumerate((58, 44, 47, 40, 89))),
        *(_loss(*case) for case in LOSSES),
        *(
            _split_loss(kernel, cdf, bound)
            for kernel, bound in (
                (split_losses._target_parts, 20),
                (split_losses._loss_parts, 330),
                (split_losses._pull_loss_parts, 230),
            )
            for cdf in ("logistic", "normal", "power")
        ),
        *(_magnitude(*case) for case in MAGNITUDES),
        *(_split_magnitude(*case) for case in SPLIT_MAGNITUDES),
        *(
            _split_budget(kernel, cdf, by, bound, first)
            for kernel, first, bounds in (
                (split_budget._weigh_budget_parts, False, (165, 210, 215)),
                (split_budget._spend_parts, True, (290, 365, 290)),
                (split_budget._spend_parts, False, (190, 195, 140)),
                (split_budget._rescue_budgets, False, (670, 800, 960)),
                (split_budget._write_budget_parts, False, (100, 76, 190)),
                (split_budget_backward._pull_budget_parts, False, (330, 340, 580)),
                (split_budget_backward._budget_gradient_parts, False, (52, 55, 55)),
            )
            for (cdf, by), bound in zip(
                (("logistic", "score"), ("logistic", "value"), ("power", "value")), bounds, strict=True
            )
        ),
        *(
            _budget(exact.solve_exactly, cdf, bound)
            for cdf, bound in enumerate((2_760, 2_500, 3_330, 2_610, 4_080))
        ),
        _budget(exact.solve_exactly, 0, 2_600, "count"),
        _budget(exact_backward.pull_rows_exactly, 3, 1_100, "count"),
        *(
            _budget(exact_backward.pull_rows_exactly, cdf, bound)
            for cdf, bound in enumerate((1_240, 1_030, 1_420, 1_240, 1_950))
        ),
        *(
            _budget_in_float32(kernel, "logistic", n, bound, ordinary=True)
            for kernel, n, bound in (
                (resident_budget.solve_budgets, 64, 95),
                (resident_budget_backward.pull_budgets, 64, 72),
                (resident_budget.solve_budgets, 8_192, 88),
                (resident_budget_backward.pull_budgets, 8_192, 64),
            )
        ),
        *(
            _budget_in_float32(kernel, "logistic", n, bound, ordinary=True, by="value")
            for kernel, n, bound in (
                (resident_budget.solve_budgets, 8_192, 125),
                (resident_budget_backward.pull_budgets, 8_192, 71),
            )
        ),
        *(
            _budget_in_float32(kernel, cdf, n, bound, by=by)
            for kernel, cdf, n, bound, by in (
                (resident_budget.solve_budgets, "logistic", 64, 950, "value"),
                (resident_budget.solve_budgets, "logistic", 8_192, 485, "value"),
                (resident_budget_backward.pull_budgets, "logistic", 8_192, 200, "value"),
                (resident_budget.solve_budgets, "laplace", 8_192, 450, "value"),
                (resident_budget.solve_budgets, "normal", 8_192, 580, "value"),
                (resident_budget.solve_budgets, "power", 8_192, 630, "value"),
                (resident_budget.solve_budgets, "logistic", 100_000, 950, "value"),
                (resident_budget_backward.pull_budgets, "logistic", 100_000, 335, "value"),
                (resident_budget.solve_budgets, "logistic", 100_000, 810, "score"),
                (resident_budget.solve_budgets, "logistic", 64, 900, "score"),
                (resident_budget_backward.pull_budgets, "logistic", 64, 400, "score"),
                (resident_budget.solve_budgets, "logistic", 8_192, 410, "score"),
                (resident_budget_backward.pull_budgets, "logistic", 8_192, 240, "score"),
                (resident_budget.solve_budgets, "normal", 8_192, 600, "score"),
                (resident_budget.solve_budgets, "power", 8_192, 600, "score"),
                (resident_budget_backward.pull_budgets, "power", 8_192, 340, "score"),
            )
        ),
        *(
            Case(kernel, "", {"BLOCK": interpolation.BLOCK}, 4, 1, bound)
            for kernel, bound in ((interpolation._interpolate, 190), (interpolation._pull_ends, 190))
        ),
        *(_permutation(*case) for case in PERMUTATIONS),
        *(_sorted(kernel, n, bound) for kernel, n, bound in SORTED_ROWS),
        *(_places(kernel, count, bound) for kernel, count, bound in PLACES),
        Case(greedy._greedy, "", {"WIDTH": greedy.WIDTH}, 4, greedy.WIDTH / 128, 150),
        *(
            _rank(greedy._greedy_rows, n, bound, REGISTERS)
            for n, bound in ((64, 280), (256, 365), (1_024, 560))
        ),
        *(_project(*case) for case in PROJECTIONS),
        *(_short_projection(*case) for case in SHORT_PROJECTIONS),
        *(_long_projection(*case) for case in LONG_PROJECTIONS),
        *(_pull(*case) for case in PULLED),
        Case(
            power_norms._power_levels, "", {"WIDTH": power_norms.WIDTH}, power_norms.WIDTH // 32, 1, 2_000,
            spills=2,
        ),
        *(_rank(*case) for case in RANKS),
        *(_rank_long(*case) for case in LONG_RANKS),
        *(_row_sort(*case) for case in ROW_SORTS),
        *(_list(*case) for case in LISTS),
        *(_transport(*case) for case in TRANSPORTS),
        *(
            _assign(kernel, cdf, bound, spills)
            for kernel, bounds, spills in (
                (assign_whole.solve_whole, (3_950, 3_650, 4_600), 0),
                (assign_steps.begin_assignments, (800,), 0),
                (assign_steps.step_assignments, (3_400, 3_200, 3_800), 24),
                (assign_backward.pull_columns, (1_450, 1_350, 1_500), 2),
                (assign_backward.pull_entries, (520, 490, 520), 0),
            )
            for cdf, bound in zip(("logistic", "laplace", "normal"), bounds, strict=False)
        ),
    ]  # fmt: skip


def _tournament(nodes: int, bound: float) -> Case:
    constants, _ = designs.way(nodes)
    warps, held = constants.pop("num_warps"), constants["TOGETHER"] * constants["WIDTH"]
    more = {"SUMMED": True, "LAST": True, "units_pointer": None, "phantom_pointer": None}
    return Case(
        designs._duels,
        f"{nodes:,} units",
        constants | more,
        warps,
        held / 32 / warps,
        bound,
        registers=200,
        few=nodes == 65,
    )


# entries of a row, and the bound
SORTED_ROWS = [
    (mask._resident_mask, 64, 165),
    (mask._resident_mask, 128, 185),
    (places._resident_places, 64, 115),
    (between._resident_quantiles, 64, 142),
    (between._pull_quantiles, 64, 51),
]


def _sorted(kernel: Any, n: int, bound: float) -> Case:
    """Short rows that fill their width, of which few share the device, with one k for all."""
    if kernel is between._pull_quantiles:
        width, together, warps = layout.block(n)
        constants = {"COMPUTE": tl.float32, "TOGETHER": together, "WIDTH": width, "dweight_pointer": None}
    else:
        _, constants = selection.held(1, n, tl.float32)
        warps = constants.pop("num_warps")
    held = constants["TOGETHER"] * constants["WIDTH"] / 32 / warps
    constants |= {"k_pointer": None, "k_stride": 0, "weight_pointer": None, "FOLLOWS": True}
    constants = {name: v for name, v in constants.items() if name in kernel.arg_names}
    return Case(kernel, f"n = {n}", constants, warps, held, bound, few=n == 64, multiples=("x_stride", "n"))


# places that are asked for, and the bound
PLACES = [
    (places._find_places, 1, 22),
    (places._find_places, 2, 20),
    (places._find_places, 8, 20),
    (places._write_places, 2, 20),
]


def _places(kernel: Any, count: int, bound: float) -> Case:
    """Of long rows: instructions for each entry and place."""
    chunk, warps = layout.CHUNK // count, layout.CHUNK // 512
    constants = {"COMPUTE": tl.float32, "COUNT": count, "CHUNK": chunk, "PARTS": 64}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return Case(kernel, f"{count} at a time", constants, warps, layout.CHUNK / 32 / warps, bound)


# which passes, of "l2" or "kl", entries that a program holds, and the bound
PROJECTIONS = [
    ("row", False, 64, 700),
    ("row", True, 64, 1_350),
    ("row", False, projection.WIDTH, 750),
    ("row", True, projection.WIDTH, 1_400),
    ("part, begun", True, projection.WIDTH, 1_120),
    ("parts, joined", True, projection.WIDTH, 1_040),
    ("part, written", True, projection.WIDTH, 1_330),
]
# entries of a row, the bound, and the turns of an ordinary row, or 0 for everything
SHORT_PROJECTIONS = [
    (short_projection._project_rows, 64, 620, 1),
    (short_projection._project_rows, 64, 1_040, 2),
    (short_projection._project_rows, 64, 1_030, 0),
    (short_projection._project_rows, 256, 780, 1),
    (short_projection._project_rows, 1_024, 1_050, 1),
    (short_projection._project_rows, 1_024, 1_800, 0),
    (short_projection._project_rows, 64, 3_000, 1, True),
    (short_projection._project_rows, 64, 3_600, 0, True),
    (short_projection._project_rows, 256, 5_500, 0, True),
    (short_projection._pull_rows, 64, 250, 0),
    (short_projection._pull_rows, 1_024, 320, 0),
    (short_projection._pull_rows, 64, 300, 0, True),
]
LONG_PROJECTIONS = [(1, 1_060), (0, 1_010)]
PULLED = [
    ("row", False, 710),
    ("row", True, 1_140),
    ("part, summed", True, 790),
    ("part, written", True, 660),
]


def _project(passes: str, kl: bool, width: int, bound: float) -> Case:
    """All passes over a row or a part of one, with one copy of the joining of two blocks, which is repeated
    as often as there are blocks to join."""
    begin, write = passes in ("row", "part, begun"), passes in ("row", "part, written")
    constants = {"BEGIN": begin, "WRITE": write, "KL": kl, "WIDTH": width}
    shape = f"{'kl' if kl else 'l2'}, {passes}, {width} places at a time"
    return Case(projection._project, shape, constants, width // 64, 2, bound, spills=1)


def _short_projection(kernel: Any, n: int, bound: float, turns: int, kl: bool = False) -> Case:
    """Rows that fill their width, by one τ. Ordinary rows have w in order, and few turns."""
    powers = kl and kernel is short_projection._project_rows
    constants = short_projection.tile(n, short_projection.HELD_POWERS if powers else short_projection.HELD)
    warps, held = constants.pop("num_warps"), constants["TOGETHER"] * constants["WIDTH"]
    constants |= {"DOUBLES": True, "STEPS": (n - 1).bit_length(), "ORDINARY": turns, "WANT_W": False}
    constants |= {"w_column": 1, "KL": kl, **NUMBER}
    shape = f"n = {n:,}" + ", kl" * kl
    if kernel is short_projection._project_rows:
        shape += f", {turns} turn{'s' * (turns > 1)}" if turns else ", all"
    return Case(
        kernel, shape, {name: v for name, v in constants.items() if name in kernel.arg_names}, warps,
        held / 32 / warps, bound, spills=24 if kl else 4 if turns else 20,
        few=n == 64 and turns == 1 and not kl,
        limited=kernel is short_projection._project_rows,
        multiples=("z_stride", "w_row", "grad_row", "n"),
    )  # fmt: skip


def _long_projection(turns: int, bound: float) -> Case:
    """All passes over a row of 8,192 entries, with turns in all chords that it has."""
    constants = {"CHUNK": long_projection.CHUNK, "ORDINARY": turns, "tau_pointer": None, "tau_stride": 0}
    if turns:
        constants["steps"] = 13
    shape = "one turn" if turns else "all, one chord of each kind"
    return Case(
        long_projection._project_long_rows, shape, constants, long_projection.WARPS,
        long_projection.CHUNK / 32 / long_projection.WARPS, bound, limited=True,
        multiples=("z_stride", "w_stride", "order_stride", "w_order_stride", "n"),
    )  # fmt: skip


def _pull(passes: str, kl: bool, bound: float) -> Case:
    constants = {
        "SUM": passes in ("row", "part, summed"), "WRITE": passes in ("row", "part, written"), "KL": kl,
        "WANT_W": True, "PARTS": 1 if passes == "row" else 256, "WIDTH": projection.WIDTH,
    }  # fmt: skip
    shape = f"{'kl' if kl else 'l2'}, {passes}"
    return Case(projection._pull, shape, constants, projection.WIDTH // 64, 2, bound)


# the CDF, entries of a row, and the bound: of ordinary levels, of all, and of the gradients
PERMUTATIONS = [
    (permutation._permute, "logistic", 64, 140, True),
    (permutation._permute, "laplace", 64, 150, True),
    (permutation._permute, "logistic", 256, 140, True),
    (permutation._permute, "laplace", 256, 150, True),
    (permutation._permute, "normal", 256, 520, True),
    *((permutation._permute, cdf, 256, 1_300, False) for cdf in ("logistic", "laplace", "normal", "power")),
    (permutation._permute, "laplace", 33, 1_700, False),
    (permutation._pull_permutations, "logistic", 64, 90, False),
    (permutation._pull_permutations, "laplace", 256, 90, False),
    (permutation._pull_permutations, "normal", 33, 160, False),
]


def _permutation(kernel: Any, name: str, n: int, bound: float, ordinary: bool) -> Case:
    """Entries times levels; ordinary levels take one evaluation, and one more in float64."""
    F = cdfs.Power(4 / 3) if name == "power" else cdfs.resolve(name)
    forward = kernel is permutation._permute
    chosen = (permutation._forward(n, F) if forward else permutation._backward(n, F, True))[0].constants
    constants: dict[str, Any] = {"ORDINARY": int(ordinary), **chosen, **NUMBER}
    warps, held = chosen["num_warps"], constants["LEVELS"] * constants["PIECES"] * constants["WIDTH"]
    shape = f"{name}, n = {n:,}, {'ordinary levels' if ordinary else 'all'}"
    aligned = ("n", "x_stride", "grad_row", "grad_place") if n % 16 == 0 else ()
    return Case(
        kernel, shape, {key: value for key, value in constants.items() if key in kernel.arg_names}, warps,
        held / 32 / warps, bound, spills=8 if forward else 0,
        registers=ALL if forward and name == "normal" else REGISTERS, few=n == 64 and name == "logistic",
        multiples=aligned, limited=True, options=permutation.registers(F) if forward else {},
    )  # fmt: skip


# the CDF, entries of a row, the bound, and whether only what ordinary rows take is counted
LOSSES = [
    (losses.solve_losses, "logistic", 64, 104, True),
    (losses.solve_losses, "logistic", 8_192, 57, True),
    (losses.pull_losses, "logistic", 64, 57, True),
    (losses.pull_losses, "logistic", 8_192, 29, True),
    *(
        (kernel, cdf, 8_192, bound, False)
        for kernel, bound in ((losses.solve_losses, 400), (losses.pull_losses, 200))
        for cdf in ("logistic", "laplace", "normal", "uniform", "power")
    ),
    (losses.solve_losses, "logistic", 100_000, 600, False),
]


def _loss(kernel: Any, name: str, n: int, bound: float, ordinary: bool) -> Case:
    F, tile = cdfs.Power(4 / 3) if name == "power" else cdfs.resolve(name), layout.tile(4_096, n)
    held = tile.pieces * tile.width if tile.streams else tile.together * n
    constants = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "FINE": False, "ORDINARY": int(ordinary),
        "TOGETHER": tile.together, "PIECES": tile.pieces, "WIDTH": tile.width, "STREAM": tile.streams,
        "EXACT": n == tile.pieces * tile.width, "CHUNK": layout.RESCUE * tile.warps,
        "tau_pointer": None, "tau_stride": 0, "k_pointer": None, "k_stride": 0,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    shape = f"{name}, n = {n:,}, {'an ordinary row' if ordinary else 'all'}"
    return Case(
        kernel, shape, constants, tile.warps, held / 32 / tile.warps, bound, few=ordinary and n == 64,
        limited=True, multiples=("x_stride", "target_stride", "n_columns"),
    )  # fmt: skip


def _split_loss(kernel: Any, name: str, bound: float) -> Case:
    """A part of a row, in float32 and in float64."""
    F, cut = cdfs.Power(4 / 3) if name == "power" else cdfs.resolve(name), layout.cut(1, 6_300_000)
    constants = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "PIECES": cut.pieces, "WIDTH": cut.width,
        "PARTS": 1024, "CHUNK": layout.RESCUE * cut.warps, "tau_pointer": None, "tau_stride": 0,
        "k_pointer": None, "k_stride": 0,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return Case(
        kernel, name, constants, cut.warps, cut.pieces * cut.width / 32 / cut.warps, bound, limited=True,
        multiples=("x_stride", "target_stride", "n_columns", "length"),
    )  # fmt: skip


# p, entries of a row, the bound, and whether it is without the rescue in float64
MAGNITUDES = [
    (magnitude.solve_magnitudes, 2.0, 64, 150, True),
    (magnitude.solve_magnitudes, 2.0, 8_192, 70, True),
    (magnitude.solve_magnitudes, 2.0, 8_192, 135, False),
    (magnitude.solve_magnitudes, 1.25, 8_192, 735, False),
    (magnitude.solve_magnitudes, 2.0, 100_000, 245, False),
    (magnitude.pull_magnitudes, 2.0, 64, 90, True),
    (magnitude.pull_magnitudes, 2.0, 8_192, 36, True),
    (magnitude.pull_magnitudes, 2.0, 8_192, 52, False),
    (magnitude.pull_magnitudes, 1.25, 8_192, 185, False),
]


def _magnitude(kernel: Any, p: float, n: int, bound: float, ordinary: bool) -> Case:
    """Of entries with signs: a step of the search, of which an ordinary row takes some five."""
    tile = layout.tile(4_096, n)
    held = tile.pieces * tile.width if tile.streams else tile.together * n
    forward, back, _, _ = magnitude._variants(4_096, n, p, True, False)
    constants = (forward if kernel is magnitude.solve_magnitudes else back).constants | {
        "ORDINARY": int(ordinary), "tau_pointer": None, "tau_stride": 0, "k_pointer": None, "k_stride": 0,
        "grad_lo_pointer": None, "grad_lo_stride": 0, "grad_column": 1,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    shape = f"p = {p:g}, n = {n:,}, {'without rescue' if ordinary else 'all'}"
    return Case(
        kernel, shape, constants, tile.warps, held / 32 / tile.warps, bound, spills=6,
        few=ordinary and n == 64, limited=True, multiples=("x_stride", "y_stride", "grad_row", "n_columns"),
    )  # fmt: skip


# p, the bound, and spills in what few rows need
SPLIT_MAGNITUDES = [
    (split._sample_rows, 2.0, 110, 48),
    (split._sample_rows, 1.25, 295, 96),
    (split._sum_parts, 2.0, 110, 0),
    (split._sum_parts, 1.25, 185, 0),
    (split._finish_parts, 2.0, 260, 0),
    (split._finish_parts, 1.25, 570, 0),
    (split_magnitude._write_sizes, 2.0, 40, 0),
    (split_magnitude._write_sizes, 1.25, 630, 0),
    (split_magnitude._pull_size_parts, 2.0, 100, 0),
    (split_magnitude._pull_size_parts, 1.25, 255, 6),
    (split_magnitude._size_gradient_parts, 2.0, 44, 0),
    (split_magnitude._size_gradient_parts, 1.25, 180, 0),
]


def _split_magnitude(kernel: Any, p: float, bound: float, spills: int) -> Case:
    """A part of a row of entries with signs, in float32 and in float64; or the row's sample."""
    F, cut = cdfs.Power(p), layout.cut(1, 6_300_000)
    pieces, width, warps = layout.sample() if kernel is split._sample_rows else cut[2:]
    constants = {
        "POOLED": p, "SIGNED": True, "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole_of_sizes(p),
        "FINE": False, "PIECES": pieces, "WIDTH": width, "BLOCK": layout.SAMPLE_BLOCK, "PARTS": 1024,
        "CHUNK": layout.RESCUE * cut.warps, "tau_pointer": None, "tau_stride": 0, "k_pointer": None,
        "k_stride": 0, "grad_lo_pointer": None, "grad_lo_stride": 0, "grad_column": 1,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return Case(
        kernel, f"p = {p:g}", constants, warps, pieces * width / 32 / warps, bound, spills=spills,
        limited=True, multiples=("x_stride", "y_stride", "grad_row", "n_columns", "length"),
    )  # fmt: skip


def _split_budget(kernel: Any, cdf: str, by: str, bound: float, first: bool) -> Case:
    """A part of a row, in float32; and, where one program does that, the whole row in float64. The first
    evaluation is of a budget at most."""
    F, cut = cdfs.Power(4 / 3) if cdf == "power" else cdfs.resolve(cdf), layout.cut(1, 6_300_000)
    whole = kernel is split_budget._rescue_budgets
    pieces, width, warps = split_budget.PIECES, cut.width, cut.warps
    if whole:
        _, pieces, width, warps, _ = layout.STREAMED_PAIRS
    constants = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "BY": exact_sums.BY[by], "AT_MOST": first,
        "FIRST": first, "ASKED": False, "PIECES": pieces, "WIDTH": width, "PARTS": 1024,
        "CHUNK": layout.RESCUE * warps, "tau_pointer": None, "tau_stride": 0, "grad_lo_pointer": None,
        "grad_lo_stride": 0, "budget_pointer": None, "budget_stride": 0, "grad_column": 1, "cost_column": 1,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    shape = f"{cdf}, by {by}" + (", first" if first else "")
    return Case(
        kernel, shape, constants, warps, pieces * width / 32 / warps, bound, limited=True,
        multiples=("x_stride", "cost_row", "grad_row", "n_columns", "length"),
    )  # fmt: skip


def _budget(kernel: Any, cdf: int, bound: float, by: str = "value") -> Case:
    """In float64: all passes, of which there are seven forward by value and four backward."""
    constants = {
        "CDF": cdf, "BY": exact_sums.BY[by], "AT_MOST": False, "OUTPUT": OUTPUTS["y"], "WIDTH": exact.WIDTH
    }  # fmt: skip
    if by == "count":
        absent = {"cost_pointer": None, "cost_row": 0, "cost_column": 0, "dcost_pointer": None}
        constants |= {name: value for name, value in absent.items() if name in kernel.arg_names}
    warps = exact.WIDTH // 64
    return Case(kernel, f"CDF {cdf}, by {by}", constants, warps, exact.WIDTH / 32 / warps, bound)


# entries of a row, the bound, and registers that a thread may have; what kind of ranks
RANKS = [
    (ranks._rank_rows, 64, 240, REGISTERS),
    (ranks._rank_rows, 256, 375, REGISTERS),
    (ranks._rank_rows, 1_024, 520, REGISTERS),
    (ranks._rank_rows, 64, 300, REGISTERS, ranks.CENTRED),
    (ranks._rank_rows, 1_024, 670, REGISTERS, ranks.CENTRED),
    (ranks._rank_rows, 64, 240, REGISTERS, ranks.PLACE),
    (ranks._rank_rows, 1_024, 520, REGISTERS, ranks.PLACE),
    (ranks._pull_ranks, 64, 360, REGISTERS),
    (ranks._pull_ranks, 256, 220, REGISTERS),
    (ranks._pull_ranks, 1_024, 210, 168),
    (sorts._sort_rows, 64, 425, REGISTERS),
    (sorts._sort_rows, 256, 530, REGISTERS),
    (sorts._sort_rows, 1_024, 680, REGISTERS),
    (sorts._pull_sorts, 64, 860, 168),
    (sorts._pull_sorts, 256, 520, REGISTERS),
    (sorts._pull_sorts, 2_048, 590, 224),
]
LONG_RANKS = [
    (ranks._rank_long_rows, 300),
    (ranks._rank_long_rows, 480, ranks.CENTRED),
    (ranks._rank_long_rows, 300, ranks.PLACE),
    (ranks._pull_long_ranks, 400),
    (sorts._sort_long_rows, 375),
    (sorts._pull_long_sorts, 500),
]
# with places or entries alone, whether it is the last merge, and the bound
ROW_SORTS = [
    (row_sort._sort_chunks, True, False, 245),
    (row_sort._sort_chunks, False, False, 122),
    (row_sort._merge_runs, True, False, 66),
    (row_sort._merge_runs, True, True, 72),
    (row_sort._merge_runs, False, False, 41),
    (row_sort._merge_runs, False, True, 45),
]
# entries of a list, and the bound
LISTS = [
    (ranking_losses._ndcg, 64, 225),
    (ranking_losses._ndcg, 2_048, 420),
    (ranking_losses._ndcg, 8_192, 135),
    (ranking_losses._pull_ndcg, 64, 70),
    (ranking_losses._correlations, 64, 50),
    (ranking_losses._correlations, 8_192, 32),
    (ranking_losses._pull_correlations, 64, 105),
]
NUMBER = {"tau_pointer": None, "tau_stride": 0, "grad_column": 1}


def _of_kind(kernel: Any, kind: Any) -> tuple[dict[str, Any], str]:
    """The constants and the name of a kind of ranks, in ascending order if there is one."""
    absent = ("index_pointer",) if kind is ranks.PLACE else ("value_pointer", "value_row", "value_column")
    constants = {"KIND": kind, "DESCENDING": kind is not ranks.RANK}
    constants |= {name: None if name.endswith("r") else 0 for name in absent}
    return constants, ("", ", centred", ", places")[kind.value]


def _rank(kernel: Any, n: int, bound: float, registers: int, kind: Any = ranks.RANK) -> Case:
    """Rows that fill their width, by one τ; the gradient in τ is wanted, too."""
    constants = ranks.tile(n)
    warps = constants.pop("num_warps")
    held = constants["TOGETHER"] * constants["WIDTH"] / 32 / warps
    more, which = _of_kind(kernel, kind)
    constants |= {"DOUBLES": True, "ASKED": True, **NUMBER, **more}
    return Case(
        kernel, f"n = {n:,}{which}", {name: v for name, v in constants.items() if name in kernel.arg_names},
        warps, held, bound, registers=registers, few=n == 64, multiples=("x_stride", "grad_row", "n"),
    )  # fmt: skip


def _rank_long(kernel: Any, bound: float, kind: Any = ranks.RANK) -> Case:
    """Both passes over a row."""
    more, which = _of_kind(kernel, kind)
    constants = {"CHUNK": ranks.CHUNK, "ASKED": True, "STEPS": 14, "sums_pointer": None, **NUMBER, **more}
    if kernel is ranks._rank_long_rows:
        constants["index_pointer"] = None  # as the sort gives the places
    else:
        del constants["sums_pointer"]
    return Case(
        kernel, f"long rows{which}", {name: v for name, v in constants.items() if name in kernel.arg_names},
        ranks.WARPS, ranks.CHUNK / 32 / ranks.WARPS, bound, registers=168, multiples=("x_stride", "n"),
    )  # fmt: skip


def _row_sort(kernel: Any, indexed: bool, last: bool, bound: float) -> Case:
    """A chunk; in a merge with one step of its two searches, of which there are two to four."""
    absent = ("merged_pointer",) if last else ("out_pointer", "index_pointer")
    constants = {
        "INDEXED": indexed, "DOUBLES": indexed, "CHUNK": row_sort.CHUNK, "HELD": row_sort.HELD,
        "PROBES": row_sort.PROBES, **dict.fromkeys(absent),
    }  # fmt: skip
    digits = "*i64" if indexed else "*i32"
    shape = ("entries and places" if indexed else "entries alone") + (", the last" if last else "")
    return Case(
        kernel, shape, {name: v for name, v in constants.items() if name in kernel.arg_names}, 1,
        row_sort.CHUNK / 32, bound, registers=168, few=kernel is row_sort._merge_runs and not indexed,
        multiples=("n",) if kernel is row_sort._merge_runs else (),
        types={"digits_pointer": digits, "merged_pointer": digits, "index_pointer": "*i32"},
    )  # fmt: skip


def _list(kernel: Any, n: int, bound: float) -> Case:
    """Of all places, by relevance in float32."""
    constants = ranking_losses.tile(n)
    warps, held = constants.pop("num_warps"), constants["TOGETHER"] * constants["WIDTH"]
    absent = ("cut_pointer", "k_pointer", *(["best_pointer"] if n <= ranking_losses.SORTED else []))
    constants |= dict.fromkeys(absent) | dict.fromkeys(("cut_row", "cut_column", "k_stride"), 0)
    constants |= {"gain_column": 1}
    return Case(
        kernel, f"n = {n:,}", {name: v for name, v in constants.items() if name in kernel.arg_names}, warps,
        held / 32 / warps, bound, few=n == 64, multiples=("x_stride", "gain_row", "n"),
    )  # fmt: skip


def _budget_in_float32(
    kernel: Any, name: str, n: int, bound: float, ordinary: bool = False, by: str = "score"
) -> Case:
    """With the rescue in float64; or, ordinary, an evaluation of an ordinary row, or its gradients."""
    F, tile = cdfs.Power(4 / 3) if name == "power" else cdfs.resolve(name), layout.pair_tile(4_096, n)
    constants = {
        "CDF": layout.cdf_id(F.name), "WHOLE": layout.whole(F), "AT_MOST": False, "ORDINARY": int(ordinary),
        "TOGETHER": tile.together, "PIECES": tile.pieces, "WIDTH": tile.width,
        "EXACT": n == tile.pieces * tile.width, "CHUNK": layout.RESCUE * tile.warps, "ASKED": False,
        "BY": exact_sums.BY[by], "STREAM": tile.streams,
        "tau_pointer": None, "tau_stride": 0, "budget_pointer": None, "budget_stride": 0,
        "grad_lo_pointer": None, "grad_lo_stride": 0, "cost_column": 1, "grad_column": 1,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    shape = f"{name}, n = {n:,}, {'an ordinary row' if ordinary else 'all'}"
    shape += ", by value" if by == "value" else ""
    held = tile.pieces * tile.width if tile.streams else tile.together * n
    return Case(
        kernel, shape, constants, tile.warps, held / 32 / tile.warps, bound, spills=0 if ordinary else 2,
        few=ordinary and n == 64, limited=True, multiples=("x_stride", "cost_row", "grad_row", "n_columns"),
    )  # fmt: skip


# the kernel, rows, entries of each, k, the bound, and spills around the loops over anchors
TRANSPORTS = [
    (transport._transport, 4_096, 64, 8, 1_600, 0),
    (transport._transport, 4_096, 64, 32, 2_090, 0),
    (transport._transport, 64, 256, 16, 1_380, 0),
    (transport._transport, 64, 1_000, 64, 4_700, 160),
    (transport._transport, 64, 8_192, 16, 1_280, 0),
    (transport_backward._pull_transport, 4_096, 64, 8, 1_160, 8),
    (transport_backward._pull_transport, 64, 256, 16, 1_030, 0),
    (transport_backward._pull_transport, 64, 1_000, 64, 3_400, 90),
]


def _transport(kernel: Any, rows: int, n: int, k: int, bound: float, spills: int) -> Case:
    """Entries times anchors that a program holds at a time; in float64, with one step of all loops."""
    constants = transport.which(k, rows)
    warps, held = constants.pop("num_warps"), constants["KEYS"] * constants["CHUNK"]
    constants |= {"epsilon_pointer": None, "epsilon_stride": 0, "grad_column": 1}
    constants |= transport.sorting(n, k, n <= transport.SORTED)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Case(
        kernel, f"({rows:,}, {n:,}), k = {k}", constants, warps, held / 32 / warps, bound, spills=spills,
        registers=ALL, few=n == 256, multiples=("x_stride", "grad_row", "grad_anchor"),
    )  # fmt: skip


def _assign(kernel: Any, cdf: str, bound: float, spills: int) -> Case:
    """Of 64 columns. The kernels of the steps spill addresses, which no loop over entries needs."""
    name = kernel.fn.__name__
    constants = {
        "solve_whole": lambda: assign_whole.which(64, cdf, False),
        "begin_assignments": lambda: {**assign.which(64, cdf, False)["begin"], "FINE": False},
        "step_assignments": lambda: assign.which(64, cdf, False)["step"],
        "pull_columns": lambda: assign_backward.which(64, cdf, False)["columns"],
        "pull_entries": lambda: assign_backward.which(64, cdf, False)["entries"],
    }[name]()
    warps, limited = constants.pop("num_warps"), constants.pop("maxnreg", None) is not None
    given = {f"grad_{of}_pointer": None for of in "rc" if f"grad_{of}_pointer" in kernel.arg_names}
    held = constants["ROWS"] * constants["WIDTH"] / 32 / warps
    return Case(
        kernel, f"{cdf}, 64 columns", constants | given, warps, held, bound, spills=spills,
        registers=ALL if kernel is assign_whole.solve_whole else REGISTERS,
        few=cdf == "logistic" and name != "begin_assignments", limited=limited,
    )  # fmt: skip


class Line(NamedTuple):
    number: int  # of the case, since a kernel cannot be sent to another process
    found: Any  # Counts of benchmarks.resources

    @property
    def case(self) -> Case:
        return cases()[self.number]

    @property
    def per_entry(self) -> float:
        return float(self.found.instructions / self.case.held)

    def faults(self) -> Iterator[str]:
        for what, value, limit in (
            ("instructions per entry", self.per_entry, self.case.bound),
            ("registers", self.found.registers, self.case.registers),
            ("spills", self.found.spills, self.case.spills),
        ):
            if value > limit:
                yield f"{self.case.id}: {value:.1f} {what}, and {limit} are allowed"


TYPES = {
    "x_pointer": "*fp32", "out_pointer": "*fp32", "at_pointer": "*fp32", "dx_pointer": "*fp32",
    "target_pointer": "*fp32", "seed_pointer": "*i64", "keys_pointer": "*i64", "drawn_pointer": "*i1",
    "singles_pointer": "*fp32",
    "probabilities_pointer": "*i1", "least": "fp32", "tolerance": "fp32", "found_pointer": "*i32",
    "below_pointer": "*i32", "columns_pointer": "*i32", "units_pointer": "*i32", "units_after": "*i32",
    "cost_pointer": "*fp32", "grad_pointer": "*fp32", "dcost_pointer": "*fp32", "slack": "fp32",
    "x_after": "*fp64", "power_high": "fp32", "power_low": "fp32", "goal_rest": "fp32", "budget_rest": "fp32",
    "place_pointer": "*i64", "grain": "fp32", "floor": "fp32",
    **{
        f"{name}_{half}": "fp32"
        for name in ("at", "tau", "k", "grad", "budget", "grad_lo", "epsilon")
        for half in ("high", "low")
    },
}  # fmt: skip
SORTED = {
    "z_pointer": "*fp32", "w_pointer": "*fp32", "order_pointer": "*i64", "w_order_pointer": "*i64",
    "index_pointer": "*i32", "w_index_pointer": "*i32", "start_pointer": "*i32",
}  # fmt: skip
OF_SHORT = {
    **dict.fromkeys(("z_pointer", "w_pointer", "dz_pointer", "dw_pointer", "grad_pointer"), "*fp32"),
    **dict.fromkeys(("index_pointer", "w_index_pointer", "start_pointer", "left_pointer"), "*i32"),
    **dict.fromkeys(("order_pointer", "w_order_pointer"), "*i32"),
}
OF_RANKS = {
    "index_pointer": "*i32", "place_pointer": "*i32", "order_pointer": "*i32", "y_pointer": "*fp32",
    "note_pointer": "*fp32", "scratch_pointer": "*fp32", "value_pointer": "*fp32",
    "sums_pointer": "*fp32", "pulls_pointer": "*fp32", "tau_high": "fp32", "tau_low": "fp32",
}  # fmt: skip
OF_LISTS = {
    **dict.fromkeys(("rank_pointer", "gain_pointer", "best_pointer", "weight_pointer"), "*fp32"),
    **dict.fromkeys(("drank_pointer", "dcut_pointer", "a_pointer", "b_pointer", "da_pointer"), "*fp32"),
    "grad_pointer": "*fp64", "counted_pointer": "*i1",
}  # fmt: skip
OF_PLACES = {
    **dict.fromkeys(("both_pointer", "values_pointer", "grad_pointer", "dboth_pointer"), "*fp32"),
    **dict.fromkeys(("weight_high", "weight_low", "weight_rest"), "fp32"),
    "first_pointer": "*i32",
}
OWN_TYPES = {
    **{
        kernel.fn.__name__: OF_PLACES
        for kernel in (*places.KERNELS, *interpolation.KERNELS, *between.KERNELS)
    },
    "pull_losses": {"grad_pointer": "*fp64"},
    "_pull_loss_parts": {"grad_pointer": "*fp64"},
    **{key: {"counter_pointer": "*i32"} for key in ("_target_parts", "_loss_parts")},
    "pull_magnitudes": {"y_pointer": "*fp32"},
    **{k.fn.__name__: {"counter_pointer": "*i32", "window_pointer": "*fp32"} for k in split.KERNELS},
    **{
        kernel.fn.__name__: {"y_pointer": "*fp32", "counter_pointer": "*i32"}
        for kernel in split_magnitude.KERNELS
    },
    **{
        kernel.fn.__name__: {"counter_pointer": "*i32", "done_pointer": "*i32"}
        for kernel in (*split_budget.KERNELS, *split_budget_backward.KERNELS)
    },
    "_greedy": {"place_pointer": "*i32"},
    "_project": SORTED | {"stop_pointer": "*i32"},
    "_pull": {
        "z_pointer": "*fp32", "w_pointer": "*fp32", "order_pointer": "*i32", "w_order_pointer": "*i32",
        "start_pointer": "*i32", "dz_pointer": "*fp32", "dw_pointer": "*fp32",
    },
    "_project_rows": OF_SHORT,
    "_pull_rows": OF_SHORT,
    "_project_long_rows": OF_SHORT
    | {"left_pointer": "*i8", "after_pointer": "*i32", "w_order_pointer": "*i64"},
    **{kernel.fn.__name__: OF_RANKS for kernel in (*ranks.KERNELS, *sorts.KERNELS)},
    "_transport": {"index_pointer": "*i64", "order_pointer": "*i64"},
    "_pull_transport": {"order_pointer": "*i64"},
    **{kernel.fn.__name__: OF_LISTS for kernel in ranking_losses.KERNELS},
    "_power_levels": SORTED
    | {"mark_pointer": "*i32"}
    | dict.fromkeys(("less_high", "less_low", "exponent_high", "exponent_low"), "fp32"),
}  # fmt: skip


def line(number: int, read: Callable[[bytes], Any], target: Any) -> Line:
    case = cases()[number]
    names = case.kernel.arg_names
    signature = {
        name: "constexpr" if name in case.constants
        else TYPES.get(name, "*fp64" if name.endswith("_pointer") else "i32")
        for name in names
    }  # fmt: skip
    own = OWN_TYPES.get(case.kernel.fn.__name__, {}) | case.types
    signature |= {name: own[name] for name in own if name in names and name not in case.constants}
    source = ASTSource(
        case.kernel,
        signature,
        {(names.index(name),): value for name, value in case.constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if (name.endswith("_pointer") and name not in case.constants) or name in case.multiples
        },
    )
    options = {"num_warps": case.warps, **(layout.registers() if case.limited else {}), **case.options}
    binary = triton.compile(source, target=target, options=options)
    return Line(number, read(binary.asm["cubin"]))


def table(lines: list[Line]) -> str:
    head = ["kernel", "instructions per entry", "bound", "registers", "spills", "instructions"]
    body = [
        [
            f"`{each.case.kernel.fn.__name__}` {each.case.shape}".rstrip(), f"{each.per_entry:.1f}",
            f"{each.case.bound:.0f}", str(each.found.registers), str(each.found.spills),
            f"{each.found.instructions:,}",
        ]
        for each in lines
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])
