"""The arrangement of arrays that a function expects: axes, heads, widths, number of tokens.

    layout="bhtd"      heads before tokens
    layout="thd"       one sequence per call, without a batch axis
    heads="equal"      as many key and value heads as query heads: the given heads are repeated
    widths="equal"     values as wide as keys: zeros are appended, and their output is cut off
    multiple=64        a multiple of 64 tokens: zeros are appended, and their output is cut off

The conversions use array functions that the framework can differentiate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from precondattn.algebra.declaration import FIXED, HEADS, Pattern
from precondattn.arrays import Array, Arrays, namespace, placement

ROLES = {"b": "b", "t": "t", "s": "t", "c": "t", FIXED: "t", "n": "h", "h": "h", "u": "h"}
"""The layout letter for each axis of an input; every other axis is d. If a token has several steps
(a fixed number), their axis stays after the token axis."""
PLAIN = "bthd"


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of arrays that a function expects.

    Raises
    ------
    ValueError
        if the layout does not consist of the letters b, t, h, d, each once (b may be missing).
    """

    layout: str = PLAIN
    heads: str = "grouped"
    multiple: int = 1
    widths: str = "any"

    def __post_init__(self) -> None:
        if "".join(sorted(self.layout)) not in ("bdht", "dht"):
            raise ValueError(
                f"layout must have the letters b, t, h and d, each once, as 'bthd', 'bhtd' or "
                f"'thd' for one sequence; found {self.layout!r}"
            )
        if self.heads not in ("grouped", "equal"):
            raise ValueError(f"heads must be 'grouped' or 'equal'; found {self.heads!r}")
        if self.widths not in ("any", "equal"):
            raise ValueError(f"widths must be 'any' or 'equal'; found {self.widths!r}")
        if self.multiple < 1:
            raise ValueError(f"multiple must be at least 1; found {self.multiple}")

    def arranged(self, patterns: Mapping[str, Pattern], x: Mapping[str, Array]) -> Arrays:
        """Inputs in the order (b, t, h, d), rearranged as the function expects them.

        Raises
        ------
        ValueError
            if tokens must be padded to a multiple and there are fewer queries than keys: with zeros
            after both, the last query would not see the same keys; or if equal widths are required
            and values are wider than keys: zeros appended to keys would change norms and scales.
        """
        d, e = width(patterns, x, "d"), width(patterns, x, "e")
        if self.widths == "equal" and e > d:
            raise ValueError(f"takes values as wide as keys; found {e} beside {d}")
        if self.multiple > 1:
            counts = {n for name, a in x.items() if (n := _tokens(patterns[name], a)) is not None}
            if len(counts) > 1:
                raise ValueError(f"takes a multiple of {self.multiple} tokens, of all inputs alike")
        most = max((_heads(patterns[name], a) for name, a in x.items()), default=1)
        arrays = {}
        for name, array in x.items():
            pattern = patterns[name]
            if self.heads == "equal":
                array = _repeated(pattern, array, most)
            array = self._padded(pattern, self.widened(pattern, array, d))
            # A bias (b, h, t, s) has the axes of the scores, in every layout.
            order = None if pattern.is_pairwise else self._order(_roles(pattern))
            arrays[name] = array if order is None else _permuted(array, order)
        return arrays

    def output(self, out: Array, tokens: int) -> Array:
        """The function's output in the order (b, t, h, e), without the appended tokens.

        An output with an unexpected number of tokens is returned whole, so that its shape is
        reported.
        """
        order = self._order(PLAIN)
        inverse = tuple(sorted(range(4), key=order.__getitem__))
        out = _permuted(out, inverse)
        return out[:, :tokens, ...] if out.shape[1] == tokens + -tokens % self.multiple else out

    def widened(self, pattern: Pattern, array: Array, d: int) -> Array:
        """Values or a state with zeros appended to its channels, if keys have more channels."""
        axes = [i for i, axis in enumerate(pattern.axes) if axis.letter == "e"]
        for axis in axes if self.widths == "equal" else ():
            array = _longer(array, axis, d * pattern.axes[axis].multiple)
        return array

    def narrowed(self, pattern: Pattern, array: Array, e: int) -> Array:
        """An output or a state without the appended channels."""
        index = tuple(
            slice(e * axis.multiple) if axis.letter == "e" else slice(None) for axis in pattern.axes
        )
        return array[index] if self.widths == "equal" else array

    def _order(self, roles: str) -> tuple[int, ...]:
        """The axes of an array, given their roles, in the order of the layout."""
        layout = self.layout if "b" in self.layout else "b" + self.layout
        return tuple(sorted(range(len(roles)), key=lambda axis: layout.index(roles[axis])))

    def _padded(self, pattern: Pattern, array: Array) -> Array:
        axis = _time(pattern)
        if axis is None:
            return array
        n = array.shape[axis]
        return _longer(array, axis, n + -n % self.multiple)


def width(patterns: Mapping[str, Pattern], x: Mapping[str, Array], letter: str) -> int:
    """The number of channels of keys (d) or values (e); 0 if no input has them."""
    sizes = (
        int(array.shape[i]) // axis.multiple
        for name, array in x.items()
        for i, axis in enumerate(patterns[name].axes)
        if axis.letter == letter
    )
    return next(sizes, 0)


def _longer(array: Array, axis: int, size: int) -> Array:
    """The array padded with zeros to a size along an axis."""
    xp, shape = namespace(array), list(array.shape)
    shape[axis] = size - shape[axis]
    if not shape[axis]:
        return array
    more = xp.zeros(tuple(shape), dtype=array.dtype, **placement(array))
    return xp.concat([array, more], axis=axis)


def _roles(pattern: Pattern) -> str:
    return "".join(ROLES.get(axis.letter, "d") for axis in pattern.axes)


def _time(pattern: Pattern) -> int | None:
    return next((i for i, axis in enumerate(pattern.axes) if axis.letter in "ts"), None)


def _tokens(pattern: Pattern, array: Array) -> int | None:
    axis = _time(pattern)
    return None if axis is None else int(array.shape[axis])


def _heads(pattern: Pattern, array: Array) -> int:
    axis = next((i for i, a in enumerate(pattern.axes) if a.letter in HEADS), None)
    return 1 if axis is None else int(array.shape[axis])


def _repeated(pattern: Pattern, array: Array, heads: int) -> Array:
    axis = next((i for i, a in enumerate(pattern.axes) if a.letter in HEADS), None)
    if axis is None or array.shape[axis] == heads or _broadcasts(pattern, array, axis):
        return array
    return namespace(array).repeat(array, heads // array.shape[axis], axis=axis)


def _broadcasts(pattern: Pattern, array: Array, axis: int) -> bool:
    return pattern.axes[axis].broadcasts and array.shape[axis] == 1


def _permuted(array: Array, order: tuple[int, ...]) -> Array:
    return (
        array if order == tuple(range(len(order))) else namespace(array).permute_dims(array, order)
    )
