"""The layout `heads`: which heads of an input a device computes.

With P devices, of which each has the tokens T_r, and x (b, T, heads, …):

    device r:  x[:, T_r, all heads]  →  x[:, all tokens, heads of r]

If P divides the number of heads, each device gets an equal share of them. If the number n of heads
divides P (key/value heads of grouped queries), each head goes to the P / n devices that have its
query heads. An input without heads, or with one head, goes to every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from precondattn.algebra.declaration import HEADS, Pattern
from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Shape

DividedCall = Any
"""A call whose tokens or heads are divided, of PyTorch or of JAX."""


class HeadAxes(NamedTuple):
    """An array's time and head axes; None for an axis that it does not have."""

    time: int | None
    """The axis of the tokens that are divided: of queries, if the array also has one of keys."""
    heads: int | None
    """The axis of the heads; None if there is one head."""

    @classmethod
    def of_pattern(cls, pattern: Pattern, shape: Shape) -> HeadAxes:
        letters = pattern.letters
        time = pattern.time_axis
        if time is not None and pattern.axes[time].broadcasts and shape[time] == 1:
            time = None
        heads = next((i for i, letter in enumerate(letters) if letter in HEADS), None)
        return cls(time, None if heads is None or shape[heads] == 1 else heads)


def share(count: int, devices: int, device: int) -> slice:
    """The heads that a device computes, of `count`, which P divides or which divides P."""
    if count < devices:
        head = device * count // devices
        return slice(head, head + 1)
    each = count // devices
    return slice(device * each, (device + 1) * each)


def refusal(mechanism: Mechanism, sizes: Mapping[str, int], devices: int) -> str | None:
    """The reason why this layout can not divide these numbers of heads; None if it can."""
    if mechanism.numbers_heads:
        return "divides heads, and the decay of each depends on its number among all"
    patterns = [*mechanism.inputs.values(), mechanism.program.output]
    axes = [axis for pattern in patterns for axis in pattern.axes]
    if any(axis.letter in HEADS and axis.multiple > 1 for axis in axes):
        return "divides heads, and those of an input come in groups"
    letter = next(letter for letter in mechanism.program.output.letters if letter in HEADS)
    if sizes[letter] % devices:
        return (
            f"expects that {devices} devices divide the number of heads of the output; found "
            f"{letter}={sizes[letter]}"
        )
    for letter in HEADS:
        count = sizes.get(letter, devices)
        if count % devices and devices % count:
            return (
                f"expects that {devices} devices divide the number of heads, or are a multiple; "
                f"found {letter}={count}"
            )
    return None
