"""The guard of every search for a root in float64: when a trial is not taken, and the bracket is halved."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stalls(width, span, helps, count):
    """Whether a bracket of this width has not become half as wide in three trials, of which this is one with
    the number `count`, and no step `helps`; and its width as the next trial has to compare it.

    `span` is that width so far, at the beginning that of the first bracket.
    """
    third = count % 3 == 2
    return third & (width > 0.5 * span) & ~helps, tl.where(third, width, span)
