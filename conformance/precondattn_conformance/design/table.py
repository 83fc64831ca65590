"""The output of `precondattn conformance --design`: factors, levels, exclusions, and rows."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_conformance.design.chosen import rows
from precondattn_conformance.design.factors import APART, FACTORS, TRIPLES
from precondattn_conformance.design.rows import design


def print_design(
    console: Console, mechanisms: tuple[str, ...], library: str, blocks: tuple[int, ...]
) -> None:
    """Print the factors and, for given mechanisms, their rows."""
    console.print(_factors(blocks))
    console.print(_apart())
    console.print(
        f"Together the rows contain every compatible pair of levels, and every compatible triple "
        f"of {', '.join(TRIPLES)}."
    )
    for mechanism in mechanisms:
        console.print(_rows(mechanism, library, blocks))


def _factors(blocks: tuple[int, ...]) -> Table:
    table = Table("factor", "what it is", "levels", title="factors", title_justify="left")
    for name, factor in FACTORS.items():
        levels = ", ".join(
            level if meaning in ("", level) else f"{level} ({meaning})"
            for level, meaning in factor.levels.items()
        )
        if name == "block" and blocks:
            levels = ", ".join(map(str, blocks))
        table.add_row(name, escape(factor.what), escape(levels or "options of the mechanism"))
    return table


def _apart() -> Table:
    table = Table(
        "level", "incompatible with", "why", title="incompatible levels", title_justify="left"
    )
    for line in APART:
        table.add_row(
            escape(f"{line.factor}: {', '.join(line.levels)}"),
            escape(f"{line.other}: {', '.join(line.others)}"),
            escape(line.why),
        )
    return table


def _rows(mechanism: str, library: str, blocks: tuple[int, ...]) -> Table:
    made = design(mechanism, library, blocks)
    smoke = [id(row) for row in rows("smoke", mechanism, library, blocks)]
    title = (
        f"{mechanism} on {library}: {len(made.rows)} rows, of which {len(made.array.pairs)} cover "
        f"all {len(made.pairs)} pairs"
    )
    table = Table("", "check", "dtype", "layout", "keys", "mechanism", title=escape(title))
    for row in made.rows:
        check, layout, kind, dtype, expression = made.entry(row)
        mark = "smoke" if id(row) in smoke else ""
        table.add_row(mark, check, dtype, layout.name, kind, escape(expression))
    return table
