"""Description of a result that differs from the oracle's: error, first wrong element, error map.

first wrong element: b=0, t=5, h=1, e=3: 0.318 found, 0.274 expected

error / bound, the largest in each block; "." is at most 1, a digit d at most 10^d
            t=0  8  16
b=0 h=0     .  .  3
b=0 h=1     .  .  4
"""

from __future__ import annotations

import numpy as np

from precondattn_conformance.tolerance import error

COLUMNS = 32
"""The largest number of blocks in an error map."""
ROWS = 24
SMALLEST_BLOCK = 16
SYMBOLS = ".123456789"


class DisagreementError(AssertionError):
    """Raised for a result that differs from the oracle's; `details` say where.

    `error` and `bound` are None unless an error was measured. `what` is then the name of the
    result, and `index` the index of its worst element.
    """

    def __init__(
        self,
        message: str,
        details: str = "",
        error: float | None = None,
        bound: float | None = None,
        what: str = "",
        index: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.details, self.error, self.bound = details, error, bound
        self.what, self.index = what, index

    def saying(self, message: str) -> DisagreementError:
        """The error with another message and the same data."""
        return DisagreementError(
            message, self.details, self.error, self.bound, self.what, self.index
        )


def agree(
    what: str,
    result: np.ndarray,
    expected: np.ndarray,
    bound: float,
    *,
    terms: float | np.ndarray = 0.0,
    smallest: float = 0.0,
    axes: str = "",
) -> float:
    """Return the error of a result, or raise DisagreementError if it is above the bound.

    Parameters
    ----------
    what
        The result's name in the message, such as "the output".
    terms
        The size of the terms whose sum an element is, for all elements or for each, if the terms
        are larger than the result.
    smallest
        The smallest size to which an error is relative: smaller elements count as this large.
    axes
        The letters of the result's axes, such as "bthe"; empty if unknown.
    """
    if result.shape != expected.shape:
        raise DisagreementError(f"{what} has the shape {result.shape}, not {expected.shape}")
    worst = error(result, expected, terms, smallest)
    if worst <= bound:
        return worst
    finite = np.abs(expected[np.isfinite(expected)])
    size = max(float(np.max(finite, initial=0.0)), float(np.max(terms)), smallest) or 1.0
    # The error in norm can exceed the bound while no element does: then show the worst element.
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        difference = np.where(result == expected, 0.0, np.abs(result - expected))
    share = np.nan_to_num(difference / (size * bound), nan=np.inf, posinf=np.inf)
    share = share / min(1.0, float(np.max(share)))
    index = np.unravel_index(np.argmax(share), share.shape)
    raise DisagreementError(
        f"{what} is off by {worst:.3g} (bound {bound:.1g}); worst at "
        + _place(index, result, expected, axes),
        "\n".join((_first_wrong(share, result, expected, axes), "", *_map(share, axes))),
        worst,
        bound,
        what,
        tuple(map(int, index)),
    )


def require_same(
    what: str,
    result: np.ndarray,
    expected: np.ndarray,
    reason: str,
    axes: str = "",
    words: tuple[str, str] = ("found", "expected"),
) -> None:
    """Raise a DisagreementError unless two arrays are equal in every bit, NaN included.

    `reason` says what a difference means, and `words` name the two values.
    """
    if np.array_equal(result, expected, equal_nan=True):
        return
    differs = (result != expected) & ~(np.isnan(result) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        distance = np.nan_to_num(np.abs(result - expected), nan=np.inf)
    distance = np.where(differs, distance, -1.0)
    index = np.unravel_index(np.argmax(distance), distance.shape)
    count = int(np.count_nonzero(differs))
    raise DisagreementError(
        f"{what} {reason}; {count} of {result.size} elements differ, most at "
        + _place(index, result, expected, axes, words)
    )


def require_unchanged(what: str, after: np.ndarray, before: np.ndarray, axes: str = "") -> None:
    """Raise a DisagreementError if a call has written to an array that it may only read."""
    reason = "was written to; a call may not change it"
    require_same(what, after, before, reason, axes, ("after the call", "before it"))


def _place(
    index: tuple[np.intp, ...],
    result: np.ndarray,
    expected: np.ndarray,
    axes: str,
    words: tuple[str, str] = ("found", "expected"),
) -> str:
    numbers = tuple(map(int, index))
    where = str(numbers)
    if len(axes) == len(numbers) > 0:
        where = ", ".join(f"{axis}={i}" for axis, i in zip(axes, numbers, strict=True))
    found, right = (f"{array[index]:.9g}" for array in (result, expected))
    if found == right:  # The values print equal, but differ in the last bits.
        found, right = (f"{array[index]:.17g}" for array in (result, expected))
    return f"{where}: {found} {words[0]}, {right} {words[1]}"


def _first_wrong(share: np.ndarray, result: np.ndarray, expected: np.ndarray, axes: str) -> str:
    """The first wrong element, in the order of time if there is a time axis."""
    wrong = np.argwhere(share >= 1)
    time = _time_axis(axes, share.ndim)
    if time is not None:
        wrong = wrong[np.argsort(wrong[:, time], kind="stable")]
    first = tuple(np.intp(i) for i in wrong[0])
    return (
        f"first wrong element: {_place(first, result, expected, axes)}\n"
        f"{len(wrong)} of {share.size} elements are wrong"
    )


def _time_axis(axes: str, ndim: int) -> int | None:
    if len(axes) != ndim:
        return None
    return next((axes.index(letter) for letter in "ts" if letter in axes), None)


def _map(share: np.ndarray, axes: str) -> list[str]:
    """The largest error in each block of tokens, for every sequence and head."""
    time = _time_axis(axes, share.ndim)
    if time is None or share.size == 0:
        return []
    letters = [axis for axis in axes if axis in "bhnu"]
    others = tuple(i for i, axis in enumerate(axes) if i != time and axis not in "bhnu")
    worst = np.max(share, axis=others, keepdims=True)
    rows = np.moveaxis(worst, time, -1).reshape(-1, share.shape[time])
    kept = [share.shape[axes.index(letter)] for letter in letters]
    tokens = rows.shape[1]
    block = 1 if tokens <= COLUMNS else max(SMALLEST_BLOCK, -(-tokens // COLUMNS))
    starts = range(0, tokens, block)
    lines = [
        'error / bound, the largest in each block; "." is at most 1, a digit d at most 10^d:',
        f"columns: {axes[time]} in blocks of {block}" if block > 1 else f"columns: {axes[time]}",
    ]
    for row, index in zip(rows[:ROWS], np.ndindex(*kept), strict=False):
        cells = "".join(_symbol(float(np.max(row[i : i + block]))) for i in starts)
        name = " ".join(f"{axis}={i}" for axis, i in zip(letters, index, strict=True))
        lines.append(f"  {name:<12} {cells}")
    if len(rows) > ROWS:
        lines.append(f"  ... and {len(rows) - ROWS} rows more")
    return lines


def _symbol(share: float) -> str:
    if share < 1:
        return SYMBOLS[0]
    if not np.isfinite(share):
        return "N"
    return SYMBOLS[min(1 + int(np.log10(share)), 9)]
