"""The calls that launch every kernel variant that is shipped, at their smallest size.

A backend's `variants` module lists mechanisms, dtypes and widths, so that every kernel is compiled
in every configuration. The same list is run here, with the fewest tokens that launch the same
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple, TypeVar

import precondattn as pa
from precondattn.kernel_backend.kernel_table import KernelTable, recurrences_in
from precondattn.spec.stateful import Stateful

T = TypeVar("T")

FEW, MANY = 129, 513
"""Token counts: one more than the rows of the largest tile, and one more than a super-block of
LUCID's solve, which has kernels between super-blocks."""


SHARED = ("bfloat16", 128, 128)
"""The dtype and widths of calls that share their kernels with other calls."""

AROUND = {"lucid_solve[normalize=given": "lucid[normalize=queries_and_keys"}
"""A leaf that expects normalised keys is run within the mechanism that normalises them."""

GRIDS = "grid=64/64", "grid=16/16"
"""Grid sizes as listed, and as run: two whole windows and part of a third in each direction."""
PIXELS = 16 * 16


class ShippedCall(NamedTuple):
    """A call of a mechanism with its gradient, or a step after a cache."""

    backend: str
    mechanism: str
    dtype: str
    d: int
    e: int
    is_step: bool = False

    @property
    def tokens(self) -> int:
        if GRIDS[0] in self.mechanism:
            return PIXELS
        return MANY if self.mechanism.startswith("lucid") else FEW

    @property
    def expression(self) -> str:
        """The mechanism that is run."""
        for leaf, mechanism in AROUND.items():
            if self.mechanism.startswith(leaf):
                return self.mechanism.replace(leaf, mechanism)
        return self.mechanism.replace(*GRIDS)

    @property
    def name(self) -> str:
        width = str(self.d) if self.d == self.e else f"{self.d}x{self.e}"
        step = " step" if self.is_step else ""
        return f"{self.backend} {self.mechanism} {self.dtype} {width}{step}"


def calls(backend: str) -> list[ShippedCall]:
    """Every call of a backend's list once, then calls that run the same kernels in another way."""
    listed = list(dict.fromkeys(_listed(backend)))
    more = [*_sharing(backend, listed), *_steps(listed)]
    return list(dict.fromkeys([*listed, *more]))


def _listed(backend: str) -> Iterator[ShippedCall]:
    variants = import_module(f"precondattn_{backend}.variants")
    for is_step, listed in ((False, variants.CALLS), (True, variants.STEPS)):
        for mechanism, dtypes, widths in listed:
            for dtype in dtypes:
                for d, e in widths:
                    yield ShippedCall(backend, mechanism, _name(dtype), d, e, is_step)


def _sharing(backend: str, listed: list[ShippedCall]) -> Iterator[ShippedCall]:
    """Recurrences that share their kernels with one in the list, each once in bfloat16."""
    listed_leaves = {
        leaf.name for call in listed for leaf in pa.parse(call.mechanism).program.leaves
    }
    for leaf in recurrences_in(kernels(backend)):
        if leaf.name not in listed_leaves:
            yield ShippedCall(backend, leaf.name, *SHARED)


def _steps(listed: list[ShippedCall]) -> Iterator[ShippedCall]:
    """A step of each recurrence in the list."""
    for call in listed:
        if not call.is_step and issubclass(type(pa.parse(call.mechanism)), Stateful):
            yield call._replace(is_step=True)


def kernels(backend: str) -> KernelTable:
    """The mechanisms that a backend computes on an NVIDIA GPU."""
    tables = import_module(f"precondattn_{backend}.backend").KERNELS
    table: KernelTable = tables.get("cuda", tables)
    return table


def interleaved(lists: Sequence[Sequence[T]]) -> list[T]:
    """The first of each list, then the second of each, and so on, until the longest ends."""
    longest = max(map(len, lists))
    return [each[i] for i in range(longest) for each in lists if i < len(each)]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
