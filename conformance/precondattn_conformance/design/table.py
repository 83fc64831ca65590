"""The output of `precondattn conformance --design`: factors, levels, exclusions, and rows."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_conformance.design.factors import APART, FACTORS, TRIPLES
from precondattn_conformance.design.levels import rows
from precondattn_conformance.design.rows import design


def print_design(
    console: Console, mechanisms: tuple[str, ...], library: str, blocks: tuple[int, ...]
) -> None:
    """Print the factors and, for given mechanisms, their rows."""
    table = Table("factor", "what it is", "levels", title="factors", title_justify="left")
    for name, factor in FACTORS.items():
        levels = [x if y in ("", x) else f"{x} ({y})" for x, y in factor.levels.items()]
        if name == "block" and blocks:
            levels = [*map(str, blocks)]
        text = ", ".join(levels) or "options of the mechanism"
        table.add_row(*map(escape, (name, factor.what, text)))
    console.print(table)
    table = Table("level", "incompatible with", "why", title="incompatible levels")
    table.title_justify = "left"
    for line in APART:
        level, other = f"{line.factor}: {', '.join(line.levels)}", ", ".join(line.others)
        table.add_row(*map(escape, (level, f"{line.other}: {other}", line.why)))
    console.print(table)
    console.print(
        f"Together the rows contain every compatible pair of levels, and every compatible triple "
        f"of {', '.join(TRIPLES)}."
    )
    for mechanism in mechanisms:
        made = design(mechanism, library, blocks)
        array = made.array
        smoke = [id(row) for row in rows("smoke", mechanism, library, blocks)]
        title = (
            f"{mechanism} on {library}: {len(array.rows)} rows, of which {len(array.pair_rows)} "
            f"cover all {len(array.pairs)} pairs"
        )
        table = Table("", "check", "dtype", "layout", "keys", "mechanism", title=escape(title))
        for row in array.rows:
            mark, case = "smoke" if id(row) in smoke else "", made.case(row)
            cells = (case.check, case.dtype, case.layout.name, case.kind, escape(case.mechanism))
            table.add_row(mark, *cells)
        console.print(table)
