"""The error for a name that is not among those that an argument may have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["OTHER_NAMES", "unknown"]

# What papers and other libraries call the names that arguments of khot take.
OTHER_NAMES = {
    "sigmoid": "logistic",
    "double_exponential": "laplace",
    "laplacian": "laplace",
    "erf": "normal",
    "gauss": "normal",
    "gaussian": "normal",
    "probit": "normal",
    "hard_sigmoid": "uniform",
    "st": "straight_through",
    "ste": "straight_through",
    "gumbel_softmax": "gumbel",
    "gumbel_topk": "gumbel",
    "i_mle": "imle",
    "reinmax": "second_order",
    "max_entropy": "conditional_poisson",
    "maximum_entropy": "conditional_poisson",
    "rejective": "conditional_poisson",
    "cos": "cosine",
    "exp": "exponential",
    "euclidean": "l2",
    "quadratic": "l2",
    "entropic": "kl",
    "entropy": "kl",
    "average": "mean",
}


def unknown(argument: str, value: object, names: Iterable[str], more: str = "") -> ValueError:
    """What to raise; it tells the name that means the same as this one, or else looks most like it.

    ``more`` follows the list of names.
    """
    known = list(names)
    hint = ""
    if isinstance(value, str):
        plain = value.lower().replace("-", "_").replace(" ", "_")
        near = [OTHER_NAMES.get(plain), *difflib.get_close_matches(plain, known, 1)]
        hint = next((f"; did you mean {name!r}?" for name in near if name in known), "")
    allowed = ", ".join(map(repr, known))
    return ValueError(f"{argument} must be one of {allowed}{more}, but got {value!r}{hint}")
