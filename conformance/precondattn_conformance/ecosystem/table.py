"""The whole table as data, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import precondattn
from precondattn.json_types import Json
from precondattn_conformance.ecosystem.cells import TableCell, cells_of
from precondattn_conformance.ecosystem.contenders import Contender
from precondattn_conformance.ecosystem.run import Ran
from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.report import environment
from precondattn_conformance.report.printable import printable

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

SCHEMA = "precondattn-ecosystem/2"


@dataclass(frozen=True)
class TableRow:
    """One implementation of one mechanism."""

    name: str
    project: str
    url: str
    version: str
    date: str
    """The date of the version (year, month, day), or empty."""
    mechanism: str
    library: str
    seconds: float
    missing: str
    """The reason why nothing, or nothing more, was compared."""
    checks: Mapping[str, TableCell]
    findings: tuple[str, ...] = ()
    """What the implementation computes instead, if its plain call is wrong."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """The limits that its documentation states, by the name of the check."""

    def as_dict(self) -> JsonObject:
        entry: JsonObject = {**vars(self), "findings": list(self.findings)}
        del entry["checks"]  # They are the end of a line.
        checks: JsonObject = {check: cell.as_list() for check, cell in self.checks.items()}
        return {**entry, "limits": dict(self.limits), "checks": checks}

    @classmethod
    def from_dict(cls, content: Mapping[str, Json]) -> TableRow:
        checks = {name: TableCell.from_list(cell) for name, cell in content["checks"].items()}
        return cls(**{**content, "checks": checks, "findings": tuple(content["findings"])})


@dataclass
class Table:
    """The rows, with the date and environment of the run."""

    level: str
    patterns: tuple[str, ...] = ()
    """Patterns of row names; empty if all rows were run."""
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")
    suite: str = precondattn.__version__
    environment: JsonObject = field(default_factory=environment.describe)
    seconds: float = 0.0
    rows: list[TableRow] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write a JSON file with a line for each row."""
        content: JsonObject = {
            "schema": SCHEMA,
            "date": self.date,
            "suite": self.suite,
            "level": self.level,
            "patterns": list(self.patterns),
            "seconds": round(self.seconds),
            "environment": self.environment,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
        rows = [json.dumps(row.as_dict(), ensure_ascii=False) for row in self.rows]
        text = head + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
        path.write_text(text, encoding="utf-8")


def load(path: Path) -> Table:
    """A table from its file.

    Raises
    ------
    ValueError
        if the file is not a table.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is no table of `precondattn ecosystem`: its schema is not {SCHEMA}"
        )
    return Table(
        content["level"],
        tuple(content["patterns"]),
        content["date"],
        content["suite"],
        content["environment"],
        content["seconds"],
        [TableRow.from_dict(row) for row in content["rows"]],
    )


def row_of(contender: Contender, ran: Ran) -> TableRow:
    """The row of a contender that has run."""
    try:
        version = contender.version()
    except MissingError:
        version = ""
    cells = cells_of(ran.outcomes, ran.conventions)
    return TableRow(
        contender.name,
        **contender.described(),
        version=version,
        mechanism=contender.mechanism,
        library=contender.library,
        seconds=round(ran.seconds, 1),
        missing=printable(ran.missing or _why_not(cells)),
        checks=cells,
        findings=tuple(map(printable, ran.findings)),
        limits=contender.limits(),
    )


def _why_not(cells: Mapping[str, TableCell]) -> str:
    """The most common reason of the first check, if nothing was compared."""
    if any(cell.compared for cell in cells.values()):
        return ""
    return next((cell.reason for cell in cells.values() if cell.reason), "no cases")
