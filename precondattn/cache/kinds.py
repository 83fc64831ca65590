"""The kinds of buffers, which determine how the operations of a cache treat them.

A cache includes the kinds of its buffers, so that it can be cropped or grown without its mechanism.
They are dicts without arrays, such as `{"k": {"tokens": ()}}`. JAX and PyTorch treat them as part
of the structure of the pytree, not of its data, without registration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

from precondattn.arrays import Array, Arrays, is_compiling, is_distributed, namespace

TOKENS = "tokens"
"""A buffer (b, c, …) with a row for each token, which later tokens do not change; unused rows
are 0."""
REWRITTEN = "rewritten"
"""A buffer (b, c, …) with a row for each token, which later tokens change."""
STATE = "state"
"""A buffer without a row for each token; `"state S"` if its mechanism's page calls it S."""
KEPT = "kept"
"""The states (b, n, …) at n earlier lengths, or their first lengths (b,); `"kept 64"` if they are
64 tokens apart (`kept.py`)."""
WINDOW = "window "
"""The position (b,) of the first row, in the cache of a window, which has the last tokens only."""
WIDE = "wide "

Kinds = dict[str, dict[str, tuple[()]]]
"""The kind of each buffer, as a text that is the key of a dict with one item."""


class CacheLike(Protocol):
    """The attributes of a cache that its operations need (`cache.py`)."""

    def __init__(self, length: Array, store: Arrays, kinds: Kinds) -> None: ...
    @property
    def length(self) -> Array: ...
    @property
    def store(self) -> Arrays: ...
    @property
    def kinds(self) -> Kinds: ...


C = TypeVar("C", bound=CacheLike)


class Kind(NamedTuple):
    """The kind of a buffer, parsed from its text."""

    rows: str
    """`"tokens"`, `"rewritten"`, `"state"`, `"kept"` or `"window "`."""
    is_wide: bool = False
    """Whether the buffer is in float32 if the inputs are in half precision."""
    window: int = 0
    symbol: str = ""
    every: int = 1

    @classmethod
    def read(cls, text: str) -> Kind:
        if text.startswith(WINDOW) and text.removeprefix(WINDOW).isdecimal():
            return cls(WINDOW, window=int(text.removeprefix(WINDOW)))
        is_wide = text.startswith(WIDE)
        rows, space, symbol = text.removeprefix(WIDE).partition(" ")
        if rows == KEPT and symbol.isdecimal() and int(symbol):
            return cls(KEPT, is_wide, every=int(symbol))
        if rows not in (TOKENS, REWRITTEN, STATE, KEPT) or (
            space and (rows != STATE or not symbol)
        ):
            raise ValueError(f"{text!r} is no kind of a buffer")
        return cls(rows, is_wide, symbol=symbol)

    def __str__(self) -> str:
        if self.rows == WINDOW:
            return f"{WINDOW}{self.window}"
        after = str(self.every) if self.every > 1 else self.symbol
        text = f"{self.rows} {after}" if after else self.rows
        return WIDE + text if self.is_wide else text

    @property
    def has_tokens(self) -> bool:
        """Whether axis 1 is the token axis."""
        return self.rows in (TOKENS, REWRITTEN)

    def token_axis(self, rank: int) -> int:
        """The index of the token axis in the order of memory.

        The memory layout is (b, h, …, c), so that the tokens of one feature are contiguous. A step
        multiplies few rows by many tokens, and reads this layout twice as fast. Rewritten buffers
        have the memory layout (b, h, c, …).
        """
        if not self.has_tokens or rank < 3:
            return 1
        return 2 if self.rows == REWRITTEN else rank - 1

    def in_memory_order(self, buffer: Array) -> Array:
        """A view of a buffer with its axes in the order of memory."""
        axis = self.token_axis(buffer.ndim)
        return buffer if axis == 1 else _moved(buffer, 1, axis)

    def from_memory_order(self, array: Array) -> Array:
        """A view of an array in memory order with the axes of a buffer."""
        axis = self.token_axis(array.ndim)
        return array if axis == 1 else _moved(array, axis, 1)


def _moved(array: Array, axis: int, place: int) -> Array:
    """The array with one axis moved. PyTorch's vmap can not map its own `moveaxis`."""
    order = list(range(array.ndim))
    order.insert(place, order.pop(axis))
    return namespace(array).permute_dims(array, tuple(order))


def kinds_of(cache: CacheLike) -> dict[str, Kind]:
    """The kind of every buffer."""
    if cache.kinds and not cache.store:
        raise ValueError("this cache was donated and can not be used again")
    if set(cache.kinds) != set(cache.store):
        raise ValueError(
            f"this cache does not say what its buffers hold: it has the buffers "
            f"{sorted(cache.store)}, and kinds for {sorted(cache.kinds)}; start from init_cache, "
            f"and replace buffers by `cache._replace(store=...)`"
        )
    return {name: Kind.read(next(iter(cache.kinds[name]))) for name in cache.store}


def names_of_states(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """The name of each state's buffer, by the state's short name.

    If several states have one symbol, the inputs of the buffer follow it, as in "S(k2, v)".
    """
    symbols = {name: kind.symbol for name, kind in kinds.items() if kind.rows == STATE}
    short = {name: symbol or name for name, symbol in symbols.items()}
    for with_arguments in (True, False):
        count = Counter(short.values())
        for name, text in short.items():
            if count[text] > 1:
                arguments = name[name.find("(") :] if "(" in name else ""
                short[name] = symbols[name] + arguments if with_arguments else name
    return {text: name for name, text in short.items()}


def empty_if_donated(cache: CacheLike, part: CacheLike) -> None:
    """Empty a cache if `part`, which has its buffers, was donated, also by a call that failed."""
    if not part.store:
        cache.store.clear()


def holding(cache: C, length: Array, store: Arrays) -> C:
    """The cache with other contents. Up to 2.11, PyTorch's compiler loses those of `_replace`."""
    return type(cache)(length, store, cache.kinds)


def refuse_distributed(cache: CacheLike, verb: str) -> None:
    """Raise a TypeError for a cache of DTensors."""
    if not is_compiling() and is_distributed((cache.length,), {}):
        raise TypeError(
            f"{verb}: a cache of DTensors has no such operation; make one of each device's part "
            f"by `to_local()` and `cache._replace(...)`"
        )


def capacity_of(cache: CacheLike) -> int | None:
    """The number of tokens that fit; None for states and windows, which have no limit."""
    kinds = kinds_of(cache)
    if any(kind.rows == WINDOW for kind in kinds.values()):
        return None
    for name, kind in kinds.items():
        if kind.has_tokens:
            return int(cache.store[name].shape[1])
    return None


def invalid_length(capacity: int | None) -> int:
    """A length that marks a sequence as invalid, so that its outputs are NaN, also as it grows."""
    return capacity + 1 if capacity else -1
