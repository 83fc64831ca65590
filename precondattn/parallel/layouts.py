"""The order in which the tokens of a sequence are placed on devices.

A sequence is cut into parts of consecutive tokens, and each device has some of them:

    contiguous:         P parts; device r has part r
    zigzag:             2 P parts; device r has part r and part 2 P − 1 − r
    cyclic[block=B]:    parts of B tokens; device r has the parts r, P + r, 2 P + r …

With a causal mask, later tokens have more keys. In `zigzag` all devices have equally many pairs of
queries and keys, and in `cyclic` almost equally many if there are many parts. In `contiguous` the
last device has almost twice the mean. A solve that goes from token to token (`torch/solve.py`)
keeps all devices busy in `cyclic` only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.execution.array_checks import check_stored
from precondattn.given import at_least

ORDERS = ("contiguous", "zigzag", "cyclic[block=512]")
"""The layouts that divide tokens. `heads`, the other layout, has no order of tokens."""


class TokenPart(NamedTuple):
    """Consecutive tokens that one device has."""

    device: int
    rows: slice
    """Their indices among the device's tokens"""
    first: int
    """The position of the first token in the sequence"""

    @property
    def tokens(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class TokenOrder:
    """A layout that divides tokens. A device's parts are in the order of the sequence."""

    name: str
    block: int | None = None
    """The number of tokens in a part; None except for `cyclic`"""

    @classmethod
    def read(cls, text: str) -> TokenOrder:
        """The layout that a text names.

        Examples
        --------
        >>> TokenOrder.read("cyclic[block=512]")
        TokenOrder(name='cyclic', block=512)
        """
        found = re.fullmatch(r"contiguous|zigzag|cyclic\[block=([1-9][0-9]*)\]", str(text))
        if found is None:
            layouts = ", ".join(map(repr, ("heads", *ORDERS[:-1])))
            raise ValueError(f"layout must be {layouts} or {ORDERS[-1]!r}; found {text!r}")
        block = found.group(1)
        return cls("cyclic", int(block)) if block else cls(found.group())

    def __str__(self) -> str:
        return self.name if self.block is None else f"{self.name}[block={self.block}]"

    @property
    def divisor(self) -> int:
        """What the number of tokens per device must be a multiple of, if all have equally many."""
        return self.block or {"contiguous": 1, "zigzag": 2}[self.name]

    def part_of(self, tokens: int) -> int:
        """The number of tokens in a part, if each device has `tokens` tokens."""
        return self.block or tokens // self.divisor

    def number_of(self, device: Array, part: Array, devices: int) -> Array:
        """The number in the sequence of a device's part: the inverse of `device_of`.

        The arguments are integers, or integer arrays, which may be traced.

        Examples
        --------
        >>> [TokenOrder("zigzag").number_of(1, part, devices=4) for part in range(2)]
        [1, 6]
        """
        if self.name == "contiguous":
            return device
        if self.name == "zigzag":
            return device + part * (2 * devices - 1 - 2 * device)
        return part * devices + device

    def device_of(self, part: int, devices: int) -> int:
        """The device that has the part of this number in the sequence."""
        if self.name == "zigzag" and part >= devices:
            return 2 * devices - 1 - part
        return part % devices

    def parts(self, counts: Sequence[int]) -> tuple[TokenPart, ...]:
        """All parts in the order of the sequence, if device r has `counts[r]` tokens.

        In `contiguous` and `zigzag` devices may have different numbers of tokens.

        Examples
        --------
        >>> for part in TokenOrder("zigzag").parts([4, 4]):
        ...     print(part.device, part.rows, part.first)
        0 slice(0, 2, None) 0
        1 slice(0, 2, None) 2
        1 slice(2, 4, None) 4
        0 slice(2, 4, None) 6
        """
        if self.block is not None:
            total = sum(counts)
            sizes = [min(self.block, total - start) for start in range(0, total, self.block)]
        elif any(count % self.divisor for count in counts):
            raise ValueError(
                f"expects two equal parts of tokens on every process; found {tuple(counts)}"
            )
        else:
            sizes = [count // self.divisor for count in counts]
            if self.name == "zigzag":
                sizes = [*sizes, *reversed(sizes)]
        parts, had, start = [], [0] * len(counts), 0
        for number, size in enumerate(sizes):
            device = self.device_of(number, len(counts))
            parts.append(TokenPart(device, slice(had[device], had[device] + size), start))
            had[device], start = had[device] + size, start + size
        if had != list(counts):
            raise ValueError(
                f"expects {', '.join(map(str, had))} tokens on the processes; found "
                f"{', '.join(map(str, counts))}"
            )
        return tuple(parts)

    def parts_of(self, tokens: int, devices: int) -> tuple[TokenPart, ...]:
        """All parts of a sequence of `tokens` tokens, in the order of the sequence."""
        if self.block is None:
            count = devices * self.divisor
            if tokens % count:
                raise ValueError(
                    f"{self}: the number of tokens must be a multiple of {count}; found {tokens}"
                )
            return self.parts([tokens // devices] * devices)
        of_devices = [0] * devices
        for number, start in enumerate(range(0, tokens, self.block)):
            of_devices[number % devices] += min(self.block, tokens - start)
        return self.parts(of_devices)


def to_layout(x: Array, layout: str, devices: int, axis: int = 1) -> Array:
    """The tokens of x in the order of the devices: all of device 0, then all of device 1 ….

    Parameters
    ----------
    x : array
        The number of tokens along `axis` must be a multiple of P in `contiguous`, and of 2 P in
        `zigzag`.
    layout : str
        "contiguous", "zigzag" or "cyclic[block=B]".
    devices : int
        The number P of devices.
    axis : int
        The axis of the tokens.

    Raises
    ------
    ValueError
        for an unknown layout, or a number of tokens that it can not divide.

    Examples
    --------
    >>> import numpy as np
    >>> to_layout(np.arange(8), "zigzag", 2, axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> to_layout(np.arange(7), "cyclic[block=2]", 2, axis=0)
    array([0, 1, 4, 5, 2, 3, 6])
    """
    check_stored("x", x)
    parts = sorted(_parts(layout, x.shape[axis], devices), key=lambda part: part.device)
    return _joined(x, [(part.first, part.tokens) for part in parts], axis)


def from_layout(x: Array, layout: str, devices: int, axis: int = 1) -> Array:
    """The tokens of x in the order of the sequence: the inverse of `to_layout`.

    Examples
    --------
    >>> import numpy as np
    >>> from_layout(np.asarray([0, 1, 6, 7, 2, 3, 4, 5]), "zigzag", 2, axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    check_stored("x", x)
    parts = _parts(layout, x.shape[axis], devices)
    counts = [sum(part.tokens for part in parts if part.device == r) for r in range(devices)]
    before = [0, *accumulate(counts)]
    pieces = [(before[part.device] + part.rows.start, part.tokens) for part in parts]
    return _joined(x, pieces, axis)


def tokens_of(layout: str, tokens: int, devices: int, device: int) -> list[int]:
    """The positions of a device's tokens in the sequence, for example for a rotary embedding.

    Examples
    --------
    >>> tokens_of("zigzag", 8, devices=2, device=0)
    [0, 1, 6, 7]
    """
    parts = _parts(layout, at_least(0, "tokens", tokens), devices)
    spans = [(part.first, part.first + part.tokens) for part in parts if part.device == device]
    return [position for span in spans for position in range(*span)]


def _parts(layout: str, tokens: int, devices: int) -> tuple[TokenPart, ...]:
    """All parts of a sequence, in the order of the sequence."""
    return TokenOrder.read(layout).parts_of(tokens, at_least(1, "devices", devices))


def _joined(x: Array, pieces: list[tuple[int, int]], axis: int) -> Array:
    """Pieces of x, each given by its start and size, concatenated."""
    before = (slice(None),) * (axis % x.ndim)
    parts = [x[(*before, slice(start, start + size), ...)] for start, size in pieces]
    return namespace(x).concat(parts, axis=axis)
