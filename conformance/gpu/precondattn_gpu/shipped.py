"""The calls that launch every kernel variant that is shipped, at their smallest size.

A backend's `variants` module lists mechanisms, dtypes and widths, so that every kernel is compiled
in every configuration. The same list is run here, with as few tokens as launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

FEW, MANY = 129, 513
"""Tokens: one more than the rows of the largest tile, and one more than a super-block of LUCID's
solve, which has kernels between super-blocks."""


AROUND = {"lucid_solve[normalize=given": "lucid[normalize=queries_and_keys"}
"""A leaf that expects normalised keys is run within the mechanism that normalises them."""


class Call(NamedTuple):
    """A call of a mechanism with its gradient, or a step after a cache."""

    backend: str
    mechanism: str
    dtype: str
    d: int
    e: int
    is_step: bool = False

    @property
    def tokens(self) -> int:
        return MANY if self.mechanism.startswith("lucid") else FEW

    @property
    def expression(self) -> str:
        """The mechanism that is run."""
        for leaf, mechanism in AROUND.items():
            if self.mechanism.startswith(leaf):
                return self.mechanism.replace(leaf, mechanism)
        return self.mechanism

    @property
    def name(self) -> str:
        width = str(self.d) if self.d == self.e else f"{self.d}x{self.e}"
        step = " step" if self.is_step else ""
        return f"{self.backend} {self.mechanism} {self.dtype} {width}{step}"


def calls(backend: str) -> list[Call]:
    """Every call of a backend's list, once."""
    return list(dict.fromkeys(_listed(backend)))


def _listed(backend: str) -> Iterator[Call]:
    variants = import_module(f"precondattn_{backend}.variants")
    for is_step, listed in ((False, variants.CALLS), (True, variants.STEPS)):
        for mechanism, dtypes, widths in listed:
            for dtype in dtypes:
                for d, e in widths:
                    yield Call(backend, mechanism, _name(dtype), d, e, is_step)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
