"""The parts of a module of this folder: `CLAIM`, `run`, `draw` and `rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "holds in part", "does not hold", "needs a GPU"]

DOCUMENTS = {
    "LUCID": "LUCID: Attention with Preconditioned Representations, the anonymous version under "
    "review; sections and tables of arXiv 2602.10410 differ",
    "LUCID's README": "README of github.com/saisuryadv/LUCID, the code of arXiv 2602.10410",
    "LASER": "LASER: Attention with Exponential Transformation, arXiv 2411.03493",
    "CCQ": "Don't Read Everything: A Curvature-Conditioned Query for Linear Attention, "
    "arXiv 2606.01294",
    "Preconditioned Attention": "Preconditioned Attention: Enhancing Efficiency in Transformers, "
    "arXiv 2603.27153",
    "MesaNet": "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training, arXiv 2506.05233",
    "Differential Transformer": "Differential Transformer, arXiv 2410.05258",
    "PaTH": "PaTH Attention: Position Encoding via Accumulating Householder Transformations, "
    "arXiv 2505.16381",
    "Negative Eigenvalues": "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, "
    "arXiv 2411.12537",
}
"""The documents that claims are from, by the names that pages call them."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the verdict of an experiment."""

    says: str
    """The claim, in one sentence."""
    source: str
    """Places divided by "; ": a name of `DOCUMENTS`, the section, and the table, figure, equation,
    algorithm or theorem, or "text": "LUCID §4.2, Tables 2 to 4; LUCID §4.3, text"."""
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
