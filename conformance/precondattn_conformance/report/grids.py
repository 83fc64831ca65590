"""Grids of a run: mechanisms × checks × dtypes, for one array library or for all."""

from __future__ import annotations

from dataclasses import dataclass, field

from precondattn_conformance.report.cells import Cell, by_family, grouped_by, in_order
from precondattn_conformance.report.failures import Failures
from precondattn_conformance.report.record import RunRecord
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import FAILED, PASSED

NEAR = 0.5
"""A cell is marked if its error is above this share of the bound."""

DTYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass
class GridLine:
    """A row of a grid."""

    name: str
    cells: list[dict[str, str]]


@dataclass
class GridFamily:
    """A family: a row for the whole family, and one per mechanism if there are several."""

    name: str
    head: GridLine
    members: list[GridLine] = field(default_factory=list)
    fails: bool = False


@dataclass
class ReportGrid:
    """Mechanisms × checks × dtypes, for one array library or for all."""

    library: str
    columns: dict[str, list[str]]
    """The dtypes of each check."""
    groups: list[GridFamily] = field(default_factory=list)


def grids(record: RunRecord, failures: Failures) -> list[ReportGrid]:
    """One grid for each library; with several libraries, preceded by one for all together."""
    libraries = grouped_by(record.outcomes, lambda result: result.library)
    grids = [_grid(name, results, failures) for name, results in libraries.items()]
    if len(grids) > 1:
        grids.insert(0, _grid("all", record.outcomes, failures))
    return grids


def _grid(library: str, results: list[Result], failures: Failures) -> ReportGrid:
    order = in_order([*DTYPES, *(result.dtype for result in results)])
    columns = {
        check: sorted({result.dtype for result in group}, key=order.index)
        for check, group in grouped_by(results, lambda result: result.check).items()
    }
    grid = ReportGrid(library, columns)

    def line(name: str, results: list[Result], label: str) -> GridLine:
        cells_of = grouped_by(results, lambda result: (result.check, result.dtype))
        cells = [
            _cell(Cell(cells_of.get((check, dtype), ())), f"{label}, {check}, {dtype}", failures)
            for check, dtypes in columns.items()
            for dtype in dtypes
        ]
        return GridLine(name, cells)

    for name, mechanisms in by_family(results).items():
        together = [result for group in mechanisms.values() for result in group]
        fails = any(result.status == FAILED for result in together)
        if len(mechanisms) == 1:
            (only,) = mechanisms
            grid.groups.append(GridFamily(only, line(only, together, only), fails=fails))
            continue
        members = [line(each, group, each) for each, group in mechanisms.items()]
        label = f"{name}, {len(mechanisms)} mechanisms"
        grid.groups.append(GridFamily(name, line(name, together, label), members, fails))
    return grid


def _cell(cell: Cell, label: str, failures: Failures) -> dict[str, str]:
    """The text of a cell, its label, its class, and its link."""
    if not cell.results:
        return {"status": "", "text": "", "label": "", "link": ""}
    worst = cell.worst
    near = cell.status == PASSED and worst is not None and (worst.share or 0.0) > NEAR
    return {
        "status": "near" if near else cell.status,
        "text": cell.brief,
        "label": f"{label}: {cell.in_words}",
        "link": failures.link(cell.results) if cell.status == FAILED else "",
    }
