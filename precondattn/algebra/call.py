"""A call of a mechanism as one value, from the public method that makes it to its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precondattn.algebra.piece import BackendNames, Piece
from precondattn.arrays import Array
from precondattn.given import Given, at_least


class Keeping(NamedTuple):
    """The states that `extend` keeps: before each of the `last` tokens, or after `every` tokens.

    One of the two is 0.
    """

    last: int
    every: int

    @classmethod
    def read(cls, owner: str, keep: Given, states_every: Given) -> Keeping | None:
        """The states that the arguments of `extend` ask for; None if they ask for none."""
        keep = at_least(0, f"{owner}: keep", keep)
        if states_every is not None:
            states_every = at_least(1, f"{owner}: states_every", states_every)
        if keep and states_every is not None:
            raise ValueError(
                f"{owner}: keep and states_every are two ways to keep states; give one"
            )
        return cls(keep, states_every or 0) if keep or states_every else None

    @property
    def options(self) -> dict[str, int]:
        """The option of `extend` that it was read from, with its value."""
        return {"keep": self.last} if self.last else {"states_every": self.every}


class Call(NamedTuple):
    """The arguments of a public method, before any check."""

    verb: str
    """The method: `forward`, `vjp`, `extend` or `extend_vjp`, or `init_cache` of DTensors."""
    mechanism: Piece
    arrays: tuple[Array, ...]
    named: Mapping[str, Given]
    """The inputs given by name, and keywords that no method has, which are an error."""
    masks: Mapping[str, Given]
    """The masks by name; None for a mask that is not given."""
    backend: BackendNames
    cache: Given = None
    donate: bool = False
    """Whether `extend` may write into the buffers of the cache."""
    keeping: Keeping | None = None
