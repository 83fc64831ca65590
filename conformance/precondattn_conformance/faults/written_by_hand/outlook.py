"""Faults of outlook attention: edges, cells that are not full, packed grids, and blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose
from precondattn.spec.grid_neighbours import GridNeighbours, Offset
from precondattn.spec.outlook import Outlook
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, Function, inside
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable import outlook as blocks
from precondattn_portable.outlook import OutlookCall, Rows

BOTH = (FORWARD, BACKWARD)
ON_GRID = "outlook[size=2/3,grid=5]"
IN_CELLS = "outlook[stride=2,grid=5]"
IN_SEQUENCE = "outlook[size=4,stride=3,scale=0.7]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_windows(), *_of_cells(), *_of_blocks()]


def _of_windows() -> list[Fault]:
    return [
        written(
            ON_GRID,
            BOTH,
            "tokens at opposite edges in one window",
            inside(GridNeighbours, "there", lambda true: _around_edges(true)),
        ),
        written(
            ON_GRID,
            BOTH,
            "windows that reach into other segments",
            inside(GridNeighbours, "__init__", lambda true: _of_one_segment(true)),
        ),
        written(
            ON_GRID,
            FORWARD,
            "weights of a slot as giver for those as receiver",
            inside(Outlook, "_weights", lambda true: _with_transposed_weights(true)),
        ),
        written(
            "outlook",
            BACKWARD,
            "the scale of the gradient of the logits",
            inside(Outlook, "scale_for", lambda true: lambda self, e: 1.0),
        ),
    ]


def _around_edges(true: Function) -> Function:
    def there(self: GridNeighbours, offset: Offset) -> Array:
        columns, self.columns = self.columns, None
        result = true(self, (offset[0] * (columns or 1) + offset[1],))
        self.columns = columns
        return result

    return there


def _of_one_segment(true: Function) -> Function:
    def made(self: GridNeighbours, columns: int | None, frame: Frame) -> None:
        true(self, columns, frame)
        self.segment = None

    return made


def _with_transposed_weights(true: Function) -> Function:
    def weights(self: Outlook, *given: object) -> tuple[Array, Array]:
        found, count = true(self, *given)
        return transpose(found), count

    return weights


def _of_cells() -> list[Fault]:
    return [
        written(
            mechanism,
            BOTH,
            "a cell that is not full divided by the number of its places",
            inside(Outlook, "_weights", lambda true: _of_full_cells(true)),
        )
        for mechanism in (IN_CELLS, IN_SEQUENCE)
    ] + [
        written(
            IN_CELLS,
            BOTH,
            "a window around every token",
            inside(GridNeighbours, "starts_cell", lambda true: _everywhere),
        )
    ]


def _of_full_cells(true: Function) -> Function:
    def weights(self: Outlook, x: dict[str, Array], grid: GridNeighbours) -> tuple[Array, Array]:
        weights, count = true(self, x, grid)
        return weights, 0 * count + len(self._of_cell)

    return weights


def _everywhere(self: GridNeighbours, sides: Sequence[int]) -> Array:
    return self.position >= 0


def _of_blocks() -> list[Fault]:
    return [
        blocked(
            IN_CELLS,
            BOTH,
            "the slots of the first rows for all",
            OutlookCall,
            "slots",
            lambda true: lambda self, image, rows: _of_first_rows(true, self, image, rows),
        ),
        blocked(
            ON_GRID,
            BOTH,
            "values of masked tokens",
            blocks,
            "only_at",
            lambda true: lambda valid, x: x,
        ),
    ]


def _of_first_rows(true: Function, self: OutlookCall, image: Array, rows: Rows) -> Array:
    return true(self, image, (0, rows[1] - rows[0]))
