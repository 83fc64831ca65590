"""Write `compositions.md`: which preconditioner goes around what, and why not the others.

python docs/make_compositions.py
"""

from __future__ import annotations

from pathlib import Path

import precondattn as pa

PAGE = Path(__file__).with_name("compositions.md")

HEAD = """\
# What composes with what

Rows stand around columns: the row `lucid` and the column `path` are `lucid(path)`. A ✓ has an
output, gradients and, where it is causal, a cache, all derived from its steps; conformance holds
them to the oracle. A number is a refusal at construction, for the reason given below.

This page is generated from the mechanisms themselves by `docs/make_compositions.py`.

"""

EXTRA_COLUMNS = ("softmax[causal=false]",)
"""Bases that differ from their default in what they offer."""


def refusal(outer: type[pa.Mechanism], inner: str) -> str | None:
    """Why a preconditioner refuses a base; None where it does not."""
    try:
        outer(base=pa.parse(inner))  # type: ignore[call-arg]
    except TypeError as error:
        return str(error).partition(" makes no sense: ")[2]
    return None


def page() -> str:
    """The page, as Markdown."""
    classes = {
        n: c for n, c in sorted(pa.mechanisms().items()) if c.__module__.startswith("precondattn.")
    }
    rows = {n: c for n, c in classes.items() if c.role == "preconditioner"}
    bases = [n for n, c in classes.items() if c.role == "base"]
    columns = [*bases, *EXTRA_COLUMNS, *rows]
    reasons: dict[str, int] = {}
    refused: dict[str, list[str]] = {}
    lines = [f"| | {' | '.join(f'`{c}`' for c in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, outer in rows.items():
        cells = []
        for inner in columns:
            reason = refusal(outer, inner)
            if reason is None:
                cells.append("✓")
                continue
            number = reasons.setdefault(reason, len(reasons) + 1)
            refused.setdefault(reason, []).append(f"`{name}({inner})`")
            cells.append(str(number))
        lines.append(f"| **`{name}`** | {' | '.join(cells)} |")
    lines += ["", "## Refusals", ""]
    lines += [f"{i}. {', '.join(refused[reason])}: {reason}." for reason, i in reasons.items()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
