"""Write `compositions.md`: the bases that each preconditioner accepts, and reasons for refusals.

python docs/make_compositions.py
"""

from __future__ import annotations

from pathlib import Path

import precondattn as pa

PAGE = Path(__file__).with_name("compositions.md")

HEAD = """\
# What composes with what

Rows are outer mechanisms, and columns are inner mechanisms: row `lucid` and column `path` stand for
`lucid(path)`. A composition with a ✓ has an output, gradients and, if it is causal, a cache. All of
them are derived from the steps of the composition, and the conformance suite tests them. A number
means that the composition raises an error when it is built; the list below gives the reason.

`docs/make_compositions.py` generates this page from the declarations of the mechanisms.

"""


REFUSALS = (
    "Each reason is the text of the error. In it, *it* is the outer mechanism, and *the base* is "
    "the inner one."
)


def other_bases(bases: dict[str, type[pa.Mechanism]]) -> list[str]:
    """Variants of the bases that differ in which preconditioners refuse them."""
    rows = [c for c in pa.mechanisms().values() if c.role == "preconditioner"]
    distinct: list[str] = []
    for name, base in bases.items():
        columns: list[list[bool]] = []
        for expression in (name, *base.variants):
            column = [refusal(row, expression) is None for row in rows]
            if column not in columns:
                columns.append(column)
                distinct.append(expression)
    return [expression for expression in distinct if expression not in bases]


def refusal(outer: type[pa.Mechanism], inner: str) -> str | None:
    """The reason for which a preconditioner refuses a base; None where it accepts it."""
    try:
        outer(base=pa.parse(inner))  # type: ignore[call-arg]
    except TypeError as error:
        return str(error).partition(" makes no sense: ")[2].partition("; write ")[0]
    return None


def ours() -> dict[str, type[pa.Mechanism]]:
    """The mechanisms of this library in order of their names, without those of a user."""
    classes = sorted(pa.mechanisms().items())
    return {name: cls for name, cls in classes if cls.__module__.startswith("precondattn.")}


def page() -> str:
    """The page, as Markdown."""
    classes = ours()
    rows = {n: c for n, c in classes.items() if c.role == "preconditioner"}
    bases = {n: c for n, c in classes.items() if c.role == "base"}
    columns = [*bases, *other_bases(bases), *rows]
    reasons: dict[str, int] = {}
    refused: dict[str, dict[str, None]] = {}
    lines = [f"| | {' | '.join(f'`{c}`' for c in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, outer in rows.items():
        cells = []
        for inner in columns:
            reason = refusal(outer, inner)
            if reason is None:
                cells.append("✓")
                continue
            number = reasons.setdefault(reason, len(reasons) + 1)
            refused.setdefault(reason, {})[f"`{name}`"] = None
            cells.append(str(number))
        lines.append(f"| **`{name}`** | {' | '.join(cells)} |")
    lines += ["", "## Refusals", "", REFUSALS, ""]
    lines += [f"{i}. {', '.join(refused[reason])}: {reason}." for reason, i in reasons.items()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
