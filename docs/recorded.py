"""Saved measurements, tables of them, and pages that show these between marks."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parent
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def save(path: Path, run: dict) -> None:
    """Write a run; each list of numbers is one line."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> dict:
    """A saved run."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_all(folder: Path) -> list[dict]:
    """The saved runs of a folder, in the order of their names."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def with_measured(path: Path, *parts: str) -> str:
    """The text of a page, with a part between each pair of its marks."""
    between = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    made = iter(parts)
    return between.sub(lambda _: f"{BEGIN}\n\n{next(made)}\n\n{END}", path.read_text("utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; floating-point numbers have three significant digits."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([_cell(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(x: object) -> str:
    if not isinstance(x, float):
        return str(x)
    if not np.isfinite(x):
        return "NaN" if x != x else "∞" if x > 0 else "−∞"
    return f"{x:.3g}" if x == 0 or 1e-2 <= abs(x) < 1e4 else f"{x:.1e}"


def with_range(values, form: str, *, unit: str = "", middle: float | None = None) -> str:
    """ "middle (least to largest)" of numbers, each in the format `form`; the mean by default."""
    of = values.mean() if middle is None else middle
    return f"{of:{form}}{unit} ({values.min():{form}} to {values.max():{form}})"
