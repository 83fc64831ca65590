"""Declared inputs: names and symbolic shapes, used for checks, tests and documentation.

A pattern is a list of axes, each with one letter (`LETTERS`). An axis may be a multiple (`2*d`), a
fixed size (`64`), or may broadcast (`1|b`: either b or 1). A pattern without axes is a 0-d array.
After the axes, a pattern may declare that rows have length 1 (`"b s n d unit"` for directions, `"b
s h d unit row"` for keys), or the range of the entries (`"b s n in [0, 2]"`, `"h in (0, inf)"`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from precondattn.arrays import Shape
from precondattn.limits import KEPT_TEXTS

LETTERS = {
    "b": "batch",
    "t": "query time",
    "s": "key time",
    "c": "capacity",
    "h": "query heads",
    "n": "key/value heads",
    "u": "value heads",
    "d": "key width",
    "e": "value width",
    "m": "slots",
}
HEADS = "nhu"
"""The letters of key/value heads, query heads and value heads; each number divides the next."""

MAY_BE_EMPTY = "bts"
"""The letters whose size may be 0: sequences, queries and keys (`dispatch/empty.py`)."""

Sizes = dict[str, int]

ATTENTION_INPUTS = frozenset({"q", "k", "v", "g"})


class ShapeError(ValueError):
    """An input's shape disagrees with its declaration or with another input."""


FIXED = "."


class Axis(NamedTuple):
    letter: str
    multiple: int = 1
    broadcasts: bool = False

    def size(self, sizes: Mapping[str, int]) -> int:
        return self.multiple * (1 if self.letter == FIXED else sizes[self.letter])

    def __str__(self) -> str:
        if self.letter == FIXED:
            return str(self.multiple)
        multiple = f"{self.multiple}*" if self.multiple != 1 else ""
        return ("1|" if self.broadcasts else "") + multiple + self.letter


class Pattern(NamedTuple):
    """One input's symbolic shape and, optionally, the range of its entries."""

    axes: tuple[Axis, ...]
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """Whether the range excludes `low`; `open_high` is whether it excludes `high`."""
    open_high: bool = False
    unit: bool = False
    """Whether rows, along the last axis, have length 1."""
    row: bool = False
    """Whether rows of length 1 are token data like q and v, not directions; used with `unit`."""

    @classmethod
    @lru_cache(maxsize=KEPT_TEXTS)
    def read(cls, text: str) -> Pattern:
        """The pattern from its text, such as `"b s n in [0, 2]"`."""
        parts = re.fullmatch(r"(.*?)(?:\bin ([\[(])(.+), (.+)([\])]))?", text)
        assert parts is not None  # The pattern matches every text.
        axes = []
        words = parts[1].split()
        row = words[-2:] == ["unit", "row"]
        words = words[:-1] if row else words
        unit = words[-1:] == ["unit"]
        for word in words[:-1] if unit else words:
            if word.isdecimal():
                axes.append(Axis(FIXED, int(word)))
                continue
            match = re.fullmatch(r"(1\|)?(?:(\d+)\*)?([a-z])", word)
            if match is None or match[3] not in LETTERS:
                raise ValueError(f"pattern {text!r}: {word!r} is no axis; letters are {[*LETTERS]}")
            axes.append(Axis(match[3], int(match[2] or 1), bool(match[1])))
        if parts[2] is None:
            return cls(tuple(axes), unit=unit, row=row)
        low, high = float(parts[3]), float(parts[4])
        return cls(tuple(axes), low, high, parts[2] == "(", parts[5] == ")", unit, row)

    @property
    def letters(self) -> str:
        return "".join([axis.letter for axis in self.axes])

    @property
    def is_pairwise(self) -> bool:
        """Whether it has an entry for each pair of query and key, like an additive bias."""
        return "t" in self.letters and "s" in self.letters

    @property
    def is_rows(self) -> bool:
        """Whether it has a row for each token, like queries, keys and values.

        Directions of length 1, and inputs with a range, are parameters of a computation on rows.
        """
        is_free = (self.row or not self.unit) and self.low is None
        return self.time_axis is not None and self.letters[-1:] in ("d", "e") and is_free

    @property
    def is_matrix(self) -> bool:
        """Whether it is a weight matrix, or one for each head, without a time axis."""
        features = [letter for letter in self.letters if letter in ("d", "e", "m", FIXED)]
        return self.time_axis is None and len(features) > 1

    @property
    def keeps_tokens(self) -> bool:
        """Whether a buffer of this shape has a row for each cached token."""
        return "c" in self.letters

    @property
    def time_axis(self) -> int | None:
        """The index of the token axis (of queries if there are two); None without one."""
        axis = self.letters.find("t" if "t" in self.letters else "s")
        return None if axis < 0 else axis

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        # Inlined from `axis.size`, because a first call computes many shapes.
        return tuple([n * (1 if letter == FIXED else sizes[letter]) for letter, n, _ in self.axes])

    def renamed(self, letters: Mapping[str, str]) -> Pattern:
        """The pattern with some of its letters replaced."""
        return self.substituted({old: Axis(new) for old, new in letters.items()})

    def substituted(self, axes: Mapping[str, Axis]) -> Pattern:
        """The pattern with other axes in place of some letters: 2*d with d = 3*e is 6*e."""
        substituted = []
        for axis in self.axes:
            new = axes.get(axis.letter, Axis(axis.letter))
            substituted.append(Axis(new.letter, axis.multiple * new.multiple, axis.broadcasts))
        return self._replace(axes=tuple(substituted))

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))

    @property
    def text(self) -> str:
        """The text of the pattern, which `read` parses: axes, unit length and range."""
        text = str(self) + (" unit" if self.unit else "") + (" row" if self.row else "")
        if self.low is None or self.high is None:
            return text
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{text} in {left}{self.low:g}, {self.high:g}{right}".strip()


class Inputs(dict[str, Pattern]):
    """The inputs of a mechanism, in order.

    Examples
    --------
    >>> inputs = Inputs(q="b t h d", k="b s n d")
    >>> inputs.sizes("softmax", {"q": (2, 3, 8, 16), "k": (2, 5, 4, 16)})
    {'b': 2, 't': 3, 'h': 8, 'd': 16, 's': 5, 'n': 4}
    """

    def __init__(self, **patterns: str | Pattern) -> None:
        super().__init__(
            (name, Pattern.read(pattern) if isinstance(pattern, str) else pattern)
            for name, pattern in patterns.items()
        )

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        patterns = ", ".join(f'{name}="{pattern.text}"' for name, pattern in self.items())
        return f"Inputs({patterns})"

    def extending(self) -> Inputs:
        """The inputs of `extend`: t in place of s, and the capacity c in inputs with t and s."""
        renamed = {n: p.renamed({"s": "c" if p.is_pairwise else "t"}) for n, p in self.items()}
        return Inputs(**renamed)

    def sizes(self, owner: str, shapes: Mapping[str, Shape], known: Sizes | None = None) -> Sizes:
        """The size of every letter, from the shapes of all or some inputs."""
        sizes: Sizes = dict(known or {})
        source: dict[str, str] = dict.fromkeys(sizes, "the cache")
        for name, shape in shapes.items():
            pattern = self[name]
            if len(shape) != len(pattern.axes):
                raise ShapeError(
                    f"{owner}: {name} is declared ({pattern}), found shape {shape}: "
                    f"{len(pattern.axes)} axes expected, not {len(shape)}"
                )
            for i, (axis, size) in enumerate(zip(pattern.axes, shape, strict=True)):
                letter, multiple, fault = axis.letter, axis.multiple, ""
                if size == 0 and letter not in MAY_BE_EMPTY:
                    fault = "empty"
                elif axis.broadcasts and size == 1:
                    continue
                elif letter == FIXED:
                    fault = "" if size == multiple else f"{size}, but {multiple} is needed"
                elif size % multiple:
                    fault = f"{size}, not a multiple of {multiple}"
                elif sizes.setdefault(letter, size // multiple) != size // multiple:
                    fault = f"{size}, but {multiple * sizes[letter]} in {source[letter]}"
                else:
                    source.setdefault(letter, name)
                if fault:
                    raise ShapeError(
                        f"{owner}: {name} is declared ({pattern}), found shape {shape}: "
                        f"axis {i} ({axis}) is {fault}"
                    )
        for few, many in (("n", "h"), ("h", "u")):
            if few in sizes and many in sizes and sizes[many] % sizes[few]:
                raise ShapeError(
                    f"{owner}: {LETTERS[many]} ({many} = {sizes[many]}) must be a multiple of "
                    f"{LETTERS[few]} ({few} = {sizes[few]}); found shapes {dict(shapes)}"
                )
        return sizes
