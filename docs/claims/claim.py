"""What a module of this folder gives: `CLAIM`, `run`, `draw` and `rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "holds in part", "does not hold", "needs a GPU"]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and what an experiment says of it."""

    says: str
    """The claim, in one sentence."""
    source: str
    """Paper, section, equation."""
    verdict: Verdict
    because: str
    """The evidence, in one sentence."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; numbers have three significant digits."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([_cell(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_range(values: Any, form: str, *, unit: str = "", middle: float | None = None) -> str:
    """ "middle (least to largest)" of numbers, each in the format `form`; the mean by default."""
    of = values.mean() if middle is None else middle
    return f"{of:{form}}{unit} ({values.min():{form}} to {values.max():{form}})"


def _cell(x: object) -> str:
    if not isinstance(x, float):
        return str(x)
    if x != x:
        return "NaN"
    if abs(x) == float("inf"):
        return "∞" if x > 0 else "−∞"
    if x == 0 or 1e-2 <= abs(x) < 1e4:
        return f"{x:.3g}"
    return f"{x:.1e}"
