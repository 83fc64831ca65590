"""PyTorch: which rows are finite, and what the others reach, in as few operators as possible.

It computes the masks of `execution/containment.py` for causal calls without segments, prefix and
window. A GPU waits for the host there: the operators are small, and a call has 10 to 20 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.declaration import Pattern
from precondattn.limits import KEPT

INF = float("inf")
NOTHING: AbstractContextManager[None] = nullcontext()


class RowAxes(NamedTuple):
    """What the masks need to know of an input (b, s, heads, …)."""

    within: tuple[int, ...]
    """The axes within a row."""
    may_be_minus_infinity: bool
    """Whether −∞ is a value, as in the logarithm of a decay."""


@lru_cache(maxsize=KEPT)
def row_axes(patterns: tuple[Pattern, ...]) -> tuple[RowAxes, ...] | None:
    """The axes of inputs (b, s, heads, …); None if one has them in another order."""
    found = []
    for pattern in patterns:
        letters = pattern.letters
        if letters[:2] != "bs" or letters[2:3] not in ("h", "n", "u"):
            return None
        if any(letter in "bhnu" for letter in letters[3:]):
            return None
        found.append(RowAxes(tuple(range(3, len(letters))), pattern.low == -INF))
    return tuple(found)


def finite_rows(
    inputs: Mapping[str, Tensor],
    axes: tuple[RowAxes, ...],
    heads: int,
    t: int,
    *,
    of_inputs: bool = True,
) -> tuple[dict[str, Tensor] | None, Tensor]:
    """Which rows of each input are finite, and the outputs (b, t, heads) that others reach.

    The first have size 1 within a row; they are None without `of_inputs`.
    """
    good: dict[str, Tensor] | None = {} if of_inputs else None
    largest_of_all: Tensor | None = None
    # Leaving this context takes as long as three operators.
    with torch.no_grad() if torch.is_grad_enabled() else NOTHING:
        for (name, array), (within, may_be_minus_infinity) in zip(
            inputs.items(), axes, strict=True
        ):
            largest = _largest(array, within, may_be_minus_infinity)
            if good is not None:
                rows = largest < INF
                good[name] = rows[(..., *(None,) * len(within))] if within else rows
            largest = _of_heads(largest, heads)
            # NaN is the larger of NaN and a number.
            largest_of_all = (
                largest if largest_of_all is None else torch.maximum(largest_of_all, largest)
            )
        assert largest_of_all is not None
        # A product over all earlier tokens is 0 from the first bad one on.
        passed = torch.cumprod(largest_of_all < INF, 1, dtype=torch.uint8)
        reached = torch.logical_not(passed)
    missing = reached.shape[1] - t
    return good, reached[:, missing:] if missing else reached


def without_bad_entries(array: Tensor, may_be_minus_infinity: bool) -> Tensor:
    """The array with 0 for NaN and infinity, in one operator that needs no mask of rows."""
    lowest = -INF if may_be_minus_infinity else 0.0
    return torch.nan_to_num(array, 0.0, 0.0, lowest)


def _largest(array: Tensor, within: tuple[int, ...], may_be_minus_infinity: bool) -> Tensor:
    """The largest entry, or magnitude, of each row. It is NaN where the row has a NaN."""
    if may_be_minus_infinity:
        return torch.amax(array, within) if within else array
    return torch.linalg.vector_norm(array, INF, within) if within else torch.abs(array)


def _of_heads(largest: Tensor, heads: int) -> Tensor:
    """The largest entries of rows (b, s, m) for heads: repeated, or the largest, for each group."""
    b, s, m = largest.shape
    if m in (1, heads):
        return largest
    if m < heads:
        return largest.repeat_interleave(heads // m, 2, output_size=heads)
    return largest.view(b, s, heads, m // heads).amax(-1)
