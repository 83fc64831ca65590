"""Write the lists of mechanisms on pages that follow from recurrences.

python docs/make_lists.py

A list is between `<!-- NAME -->` and `<!-- end -->`, in a cell of a table. It has every base of the
library whose recurrence is of that kind, so that a new spelling of a recurrence is on all pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import precondattn as pa

DOCS = Path(__file__).parent
PAGES = (DOCS / "mechanisms" / "index.md", DOCS / "which_mechanism.md")
GATES = (None, "fixed", "head", "channel")


def kinds(recurrence: pa.Recurrence) -> Iterator[str]:
    """The names of the lists that a recurrence is on."""
    r = recurrence
    if r.rule == "add" and r.normaliser is None:
        yield "additive"
        if r.gate is not None and r.reads == "after":
            yield "forgetting"
    if r.rule not in ("delta", "low rank"):
        return
    if r == pa.Recurrence("delta", gate=r.gate, strength="scalar", heads=r.heads):
        yield "delta"
        yield f"delta by {r.gate}"
        return
    yield "general delta"
    if r.rule == "delta" and r.steps is None:
        yield "erasing"


def lists() -> dict[str, list[str]]:
    """The names of mechanisms by list: first those without a decay."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, cls in pa.mechanisms().items():
        recurrence = cls().recurrence
        is_ours = cls.__module__.startswith("precondattn.")
        if cls.role == "base" and is_ours and recurrence is not None:
            for kind in kinds(recurrence):
                found.setdefault(kind, []).append((GATES.index(recurrence.gate), name))
    return {kind: [name for _, name in sorted(names)] for kind, names in found.items()}


def written(page: Path) -> str:
    """The text of a page, with its lists."""
    names = lists()

    def listed(match: re.Match[str]) -> str:
        return f"{match[1]}{', '.join(f'`{name}`' for name in names[match[2]])}<!-- end -->"

    return re.sub(r"(<!-- ([\w ]+) -->)[^<]*<!-- end -->", listed, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each), encoding="utf-8")
