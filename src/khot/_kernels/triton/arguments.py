"""What kernels are given: values that belong together, as named tuples.

Triton passes each member as an argument of its own, specialised as it would be alone, and a tuple that is a
constant as one constant. No field may be called values, type, count, index or dtype: in kernels these are
attributes of every tuple.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Rows whose entries lie side by side, and the distance between them."""

    pointer: Any
    stride: int


class Matrix(NamedTuple):
    """A value of each entry of rows, and the distances between rows and between columns."""

    pointer: Any
    row: int
    column: int


class Pairs(NamedTuple):
    """Rows of scores, and a second number of each entry if it has one, such as its cost."""

    x: Rows
    other: Matrix | None


class Values(NamedTuple):
    """A number of each row: in memory, or, where there is no tensor, the sum of two of float32."""

    pointer: Any
    stride: int
    high: float
    low: float


class Threshold(NamedTuple):
    """Of each row t = hi + lo, in float64."""

    hi: Any
    lo: Any


class Solved(NamedTuple):
    """What gradients know of rows: their thresholds, τ, and what their sums are held to where that counts."""

    t: Threshold
    tau: Values
    goal: Values | None


class Found(NamedTuple):
    """The results of rows, and of each its threshold, as above."""

    out: Any
    hi: Any
    lo: Any


class Pulled(NamedTuple):
    """The gradients in the scores, in what the rows' sums are held to, in τ, and in the costs, if there are
    some; the second also what programs that share a row leave for each other."""

    dx: Any
    dgoal: Any
    dtau: Any
    dcost: Any


class Scratch(NamedTuple):
    """What the programs that share a row, or a matrix, leave for each other: its numbers, how many programs
    are through with it, what each part leaves, and entries, where some are kept."""

    state: Any
    counter: Any
    left: Any
    window: Any = None


class Duals(NamedTuple):
    """The thresholds of a matrix's rows and columns, or the gradients in them."""

    r: Any
    c: Any


class Nodes(NamedTuple):
    """Units of a tournament that are still in play: their probabilities, and which they are, if not all."""

    x: Rows
    units: Any


class Weight(NamedTuple):
    """A number of each quantile: in memory, or, where there is no tensor, the sum of three of float32."""

    pointer: Any
    high: float
    low: float
    third: float


class Blocks(NamedTuple):
    """A projection onto a permutahedron: the result, the orders of both arguments, and where blocks start and
    stop in these; or its gradients' sums over blocks, and over the parts of a row."""

    out: Any
    order: Any
    w_order: Any
    start: Any
    stop: Any = None
    totals: Any = None
    heads: Any = None


class Digits(NamedTuple):
    """Of budgets: what the two numbers of float32 leave of one; by how much what all entries cost may differ
    from it (:mod:`.float64`); and, of Σ w f, what entries may be off by, and the least that tells
    anything."""

    third: float
    slack: float
    grain: float
    floor: float


class Drawn(NamedTuple):
    """Samples, how many are drawn of each row, and whether all rows are probabilities."""

    out: Any
    drawn: Any
    probabilities: Any


class Projected(NamedTuple):
    """The gradients in both arguments of such a projection, and in τ."""

    dz: Any
    dw: Any
    dtau: Any


class Tile(NamedTuple):
    """A constant: how a program holds rows.

    So many ``together``, each as ``pieces`` vectors of a ``width``; ``full`` if the entries fill them; or a
    row ``streams`` past, as much at a time. A search in float64 takes a ``chunk`` of entries at a time.
    A row is held ``in_words`` if two entries share one (:mod:`.words`). Rows are ``ragged`` if each has a
    length of its own (:mod:`.ragged`): then n is a pair, the columns that rows begin at and those that they
    end at, and a program looks at the pieces that one of its rows reaches.
    """

    together: int
    pieces: int
    width: int
    full: bool
    streams: bool
    chunk: int
    in_words: bool = False
    ragged: bool = False


class Cells(NamedTuple):
    """A constant: how a program holds levels and entries: so many of each at a time (``height``, ``width``),
    and how ``many`` such tiles are added up before the sums go to float64; ``one_part`` where levels are
    numbers of the entries' dtype."""

    one_part: bool
    height: int
    width: int
    many: int


class Sizes(NamedTuple):
    """A constant: how a program holds a matrix: ``rows`` at a time, their padded ``width``; of the columns'
    matrix a ``block`` at a time, over a ``depth`` of rows, and a ``chunk`` of it in products; and how many
    parts a ``group`` has, and how many of their numbers are ``added`` at a time."""

    rows: int
    width: int
    block: int = 0
    depth: int = 0
    chunk: int = 0
    group: int = 0
    added: int = 0


class Law(NamedTuple):
    """A constant: the CDF, its exponent if that is a whole number, what of it is asked for, and whether
    entries are counted or have costs (:data:`.float64_sums.BY`); and whether t is ``polished`` to the digits
    of float64, and a budget ``at_most`` spent."""

    cdf: int
    whole: int
    output: int
    by: int
    polished: bool = False
    at_most: bool = False


class Norm(NamedTuple):
    """A constant: p of a top-k in magnitude, whether entries are ``signed`` and stand for their size, and
    the exponent of its CDF if that is a whole number."""

    p: float
    signed: bool
    whole: int


class Problem(NamedTuple):
    """A constant: what :func:`.rows.solve` solves, as functions for Triton to compile.

    ``find(x, other, k, tau, row, there, n, evaluations, digits, exponent, L, T)`` returns t of the program's
    rows in two parts, which rows have it in float32, and whatever ``write`` needs to know; ``write(out, row,
    ok, n, found, L, T)`` writes the results of rows that are ok; ``in_float64(row, x, other, k, tau, results,
    n, digits, power, L, T)`` does all of it for one row in float64, and writes t, too.

    x is :class:`Rows`, other of the problem's own kind, k and tau are :class:`Values`. What ``find`` returns
    last is ``found`` in ``write``; ``results`` is a :class:`Found`, whose ``out`` (a pointer, or a tuple of
    them) ``write`` gets, too. The exponent of z is given to ``find`` as two numbers of float32, and to
    ``in_float64`` as their sum in float64. L is a constant of the problem's own, such as a :class:`Law`.
    """

    find: Any
    write: Any
    in_float64: Any

    @property
    def cache_key(self) -> str:
        """For Triton's files: they know functions within a tuple by their names alone, and would give out
        what was compiled before a body changed."""
        return _key_of(self)


class Puller(NamedTuple):
    """A constant: how :func:`.pull.pull_rows` takes gradients, as functions for Triton to compile.

    ``prepare(solved, power, row, there, L, T)`` returns what is known of the program's rows, which of them
    are tried in float32, and what their entries need of it; ``sums(at, grad, there, n, given, L, T)`` the
    sums over rows, ``left`` of them, and what ``write`` need not do again; ``settle(sums, solved, grad_lo,
    row, there, threshold, L, asked)`` what entries are pulled by, the gradient in τ, and which rows have it;
    ``write(at, grad, to, ok, n, given, pull, threshold, kept, L, T)`` the gradients of entries;
    ``in_float64(row, grad, grad_lo, pairs, solved, to, n, power, L, T)`` all of it for one row in float64.
    L is a constant of the problem's own, such as a :class:`Law`.
    """

    prepare: Any
    sums: Any
    settle: Any
    write: Any
    in_float64: Any
    left: int

    @property
    def cache_key(self) -> str:
        """As that of a :class:`Problem`."""
        return _key_of(self)


def _key_of(functions: tuple[Any, ...]) -> str:
    return "-".join(getattr(each, "cache_key", str(each)) for each in functions)
