"""The output of `precondattn list`: mechanisms with their inputs, and backends.

On a terminal these are tables, and in a pipe lines of columns. `--json` has the same as data.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import precondattn as pa
from precondattn.json_types import JsonObject

NOT_IMPORTED = "could not be imported"


def data() -> JsonObject:
    """All listed mechanisms and backends, as JSON data."""
    return {"mechanisms": _mechanisms(), "backends": _backends()}


def print_lists(console: Console) -> None:
    """Print the mechanisms, and then the backends."""
    listed = data()
    mechanisms = [
        (each["name"], each["kind"], each.get("error") or _inputs_text(each["inputs"]))
        for each in listed["mechanisms"]
    ]
    backends = [
        (
            each["name"],
            each.get("error") or ", ".join(each["libraries"]) or "any library",
            ", ".join(each["made_for"]) or "-",
        )
        for each in listed["backends"]
    ]
    _print(console, "mechanisms", ("mechanism", "kind", "inputs"), mechanisms)
    _print(console, "backends", ("backend", "arrays of", "made for"), backends)


def _print(
    console: Console, title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    if console.is_terminal:
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.out("  ".join(cells).rstrip(), highlight=False)
    console.out("")


def _mechanisms() -> list[JsonObject]:
    from precondattn.algebra import registry

    listed = []
    for name, cls in sorted(pa.mechanisms().items()):
        entry: JsonObject = {"name": name, "kind": cls.role, "inputs": {}}
        try:
            inputs = pa.parse(name).inputs
            entry["inputs"] = {key: pattern.text for key, pattern in inputs.items()}
        except (TypeError, ValueError) as error:  # It has an option or a base without a default.
            entry["error"] = str(error)
        listed.append(entry)
    for name, why in registry.broken.items():
        listed.append({"name": name, "kind": NOT_IMPORTED, "inputs": {}, "error": why})
    return listed


def _inputs_text(inputs: dict[str, str]) -> str:
    return ", ".join(f"{name} ({pattern})" for name, pattern in inputs.items())


def _backends() -> list[JsonObject]:
    from precondattn.dispatch.discovery import discover

    discovered = discover()
    listed: list[JsonObject] = [
        {
            "name": backend.name,
            "libraries": sorted(backend.libraries),
            "made_for": sorted(backend.accelerates),
        }
        for backend in discovered.backends
    ]
    for name, error in discovered.broken:
        why = f"{NOT_IMPORTED}: {error}"
        listed.append({"name": name, "libraries": [], "made_for": [], "error": why})
    return listed
