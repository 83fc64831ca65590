"""The states between new tokens that `extend(..., keep=n)` or `states_every=m` keeps.

A state is kept (`cache/kept.py`) before each of the last n new tokens, or after each m tokens of a
sequence. Leaves that compute states run from one of these places to the next,

    o_j, S_j = step(S_{j−1}, tokens of part j),

and all other leaves run once for all new tokens. In a ragged batch, the places are in different
columns for each sequence. The tokens between two places are then moved to the front. If JAX traces
the call, the parts between places are a loop: compiling many steps would take long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from precondattn.algebra.call import Call, Keeping
from precondattn.algebra.declaration import Inputs
from precondattn.arrays import (
    arange_like,
    as_index,
    cast,
    host_array,
    is_distributed,
    namespace,
    take_tokens,
)
from precondattn.backend import UnsupportedError
from precondattn.cache import KEY_MASK, Cache, Replace, Updates
from precondattn.cache.kept import states_in, with_kept, without_way_back
from precondattn.execution.arguments import BoundCall
from precondattn.execution.cache_checks import check_is_cache
from precondattn.execution.masks import nan_where_invalid, zero_padding
from precondattn.frame import EXTENSION, Frame, Layout, extending_frame
from precondattn.frameworks import of
from precondattn.frameworks.types import Array, Arrays, ByName

PartStep = Callable[[Arrays, Arrays, Frame, Array, Array], tuple[Array, Updates]]
"""A function from states, inputs, a frame, lengths and numbers of new tokens to output and updates.
"""


def can_keep(call: Call) -> bool:
    """Whether the cache has states; raises an error if it has buffers that can not be kept."""
    owner, cache = call.mechanism, call.cache
    assert call.keeping is not None
    (option,) = call.keeping.options
    check_is_cache(str(owner), cache)
    if is_distributed((cache.length,), {}):
        raise TypeError(f"{owner}: DTensors have no {option}")
    others = without_way_back(cache)
    if others:
        raise ValueError(
            f"{owner}: {option} is for states; {', '.join(map(repr, others))} of this cache "
            f"can not go back; take a snapshot() before the tokens, and restore() it"
        )
    return bool(states_in(cache))


def needs_lengths(keeping: Keeping, bound: BoundCall, length: Array) -> bool:
    """Whether the parts of a call without `lengths` are ragged, so that its plan must have them."""
    if bound.lengths is not None or not keeping.every:
        return False
    return Places(length, bound.sizes["t"], None, keeping).is_ragged


class Places:
    """The places among new tokens at which states are kept.

    There are `length` (b,) tokens before the t new ones, of which the first `lengths` (b,), or
    all, are valid.
    """

    def __init__(self, length: Array, t: int, lengths: Array | None, keeping: Keeping) -> None:
        self.length, self.t, self.lengths = length, t, lengths
        self.every = keeping.every or 1
        self.columns: list[Array] = []
        """The number of new tokens (b,) before each place; an int if it is the same for all."""
        self.before: Array = 0
        """The number of new tokens before the first place, if there were enough tokens."""
        widths = self._last(keeping.last) if keeping.last else self._every(keeping.every)
        count = len(self.columns)
        self.widths = [widths[0], *[min(self.every, self.t)] * (count - 1), widths[1]][: count + 1]
        """The most tokens of a sequence before the first place, between places, and after."""

    @property
    def is_ragged(self) -> bool:
        return any(not isinstance(column, int) for column in self.columns)

    def _last(self, n: int) -> tuple[int, int]:
        n, count = min(n, self.t), self.lengths
        if count is None:
            self.columns = [*range(self.t - n, self.t)]
            self.before = self.t - n
        else:
            xp = namespace(count)
            self.before = xp.clip(count - n, min=0)
            self.columns = [xp.minimum(self.before + j, count) for j in range(n)]
        return self.t - n, min(self.t, 1)

    def _every(self, m: int) -> tuple[int, int]:
        xp, t = namespace(self.length), self.t
        counts = host_array(self.length)
        self.before = m - self.length % m
        if counts is not None and len({*(counts % m).tolist()}) == 1:
            first = m - int(counts[0]) % m
            self.columns = [*range(first, t + 1, m)]
            return min(first, t), t - self.columns[-1] if self.columns else 0
        most = -(-t // m) if counts is None else max((counts % m + t).tolist(), default=0) // m
        self.columns = [xp.clip(self.before + m * j, max=t) for j in range(most)]
        return min(m, t), min(m, t)

    def rows_before(self, array: Array, count: int) -> Array:
        """The `count` rows before each place, (b, n, count, …), from x (b, count + t, …)."""
        rows = [rows_from(array, column, count) for column in self.columns]
        return stacked(rows) if rows else array[:, None, :count, ...][:, :0, ...]

    def kept_in(self, cache: Cache, states: Arrays) -> Cache:
        """The cache after the new tokens, with the states (b, n, …) at the places."""
        return with_kept(cache, states, self.length + self.before, self.every)


class Part(NamedTuple):
    """The new tokens between two places; several parts are stacked along a first axis."""

    inputs: Arrays
    """The inputs with a row for each token (b, w, …)."""
    length: Array
    """The number of tokens before the part (b,)."""
    lengths: Array | None
    """The number of valid tokens of the part (b,); None if all are valid."""
    mask: Array | None
    """Which keys (b, w) are valid; None if all are."""


class Parts(Places):
    """The parts of a call, and the states that are kept between them."""

    def __init__(self, call: BoundCall, length: Array, keeping: Keeping) -> None:
        super().__init__(length, call.sizes["t"], call.lengths, keeping)
        self.call = call
        has_mask = KEY_MASK in call.prepared.request.masks
        self.valid = call.frame.valid_keys(self.t) if has_mask else None
        self.starts, self.stops = [0, *self.columns], [*self.columns, self.t]
        self.kept: Arrays = {}

    def step(
        self, step: PartStep, past: Arrays, inputs: Arrays, declared: Inputs
    ) -> tuple[Array, Updates, Arrays]:
        """The output, the updates, and the states (b, n + 1, …) at all places and at the end."""
        tokens = {name: a for name, a in inputs.items() if declared[name].time_axis is not None}
        outs, rows, number, last = [], [], 0, len(self.widths) - 1

        def one(past: Arrays, number: int, part: Part) -> tuple[Arrays, Array]:
            width, frame = self.widths[number], self._frame(number, part)
            of_part = inputs | part.inputs
            if part.lengths is not None:
                of_part = zero_padding(of_part, declared, frame.q_valid, frame.valid_keys(width))
            count = width if part.lengths is None else part.lengths
            out, updates = step(past, of_part, frame, part.length, count)
            return {name: _state(updates[name], array) for name, array in past.items()}, out

        def between(past: Arrays, part: Part) -> tuple[Arrays, tuple[Arrays, Array]]:
            past, out = one(past, 1, part)
            return past, (past, out)

        while number <= last:
            parts = last - 1 if number == 1 and last > 2 else 0
            loop = of(self.length).traced_loop(self.length, *inputs.values()) if parts else None
            if loop is not None:
                past, (states, out) = loop(between, past, self._several(tokens, parts))
                outs.append(_joined(out))
                rows.append({n: namespace(a).moveaxis(a, 0, 1) for n, a in states.items()})
                number = last
            else:
                if self.widths[number] or not last:
                    past, out = one(past, number, self._part(tokens, number))
                    outs.append(out)
                rows.append({name: state[:, None, ...] for name, state in past.items()})
                number += 1
        xp = namespace(outs[0])
        joined = outs[0] if len(outs) == 1 else xp.concat(outs, axis=1)
        if self.is_ragged:
            joined = take_tokens(joined, self._order(joined.shape[1]))
        kept = {n: namespace(a).concat([each[n] for each in rows], axis=1) for n, a in past.items()}
        return joined, {name: Replace(state) for name, state in past.items()}, kept

    def _part(self, tokens: Arrays, number: int) -> Part:
        of_part = partial(rows_from, start=self.starts[number], width=self.widths[number])
        return Part(
            {name: of_part(array) for name, array in tokens.items()},
            self.length + self.starts[number],
            self._count(number),
            None if self.valid is None else of_part(self.valid),
        )

    def _several(self, tokens: Arrays, count: int) -> Part:
        """The parts between places, which are adjacent and of equal width."""
        of_parts = partial(rows_from, start=self.starts[1], width=count * self.widths[1])
        numbers = range(1, count + 1)
        xp, counts = namespace(self.length), [self._count(number) for number in numbers]
        return Part(
            {name: _divided(of_parts(array), count) for name, array in tokens.items()},
            xp.stack([self.length + self.starts[number] for number in numbers]),
            None if counts[0] is None else xp.stack(counts),
            None if self.valid is None else _divided(of_parts(self.valid), count),
        )

    def _count(self, number: int) -> Array | None:
        """The number of new tokens (b,) of a part; None if all sequences have its width."""
        count, start = self.lengths, self.starts[number]
        if count is None and not self.is_ragged:
            return None
        xp, end = namespace(self.length), self.stops[number] + 0 * self.length
        end = end if count is None else xp.minimum(count, end)
        return xp.clip(end - start, 0, self.widths[number])

    def _frame(self, number: int, part: Part) -> Frame:
        frame, width = self.call.frame, self.widths[number]
        if part.lengths is None and part.mask is None and frame.held is not None:
            cached = frame.held + self.starts[number]
            layout = Layout(EXTENSION, width, frame.layout.s or 0, held=cached, longest=cached)
            return Frame.of(layout, part.length)
        longest = None if frame.longest is None else frame.longest + self.t
        masks = {"lengths": part.lengths, "key_mask": part.mask}
        return extending_frame(part.length, 0, width, longest=longest, **masks)

    def _order(self, count: int) -> Array:
        """The index of each token (b, t) among the tokens of all parts."""
        token = arange_like(self.t, self.length)[None, :]
        xp, source = namespace(token), token + 0 * self.length[:, None]
        for column, base in zip(self.columns, accumulate(self.widths), strict=False):
            place = column[:, None]
            source = xp.where(token >= place, base + token - place, source)
        return as_index(xp.clip(source, 0, count - 1))

    def keep(self, owned: Sequence[tuple[str, str]], rows: ByName) -> None:
        """Keep a piece's states at the places, the first n of (b, n + 1, …)."""
        call = self.call
        for name, key in owned:
            kept = rows[name][:, :-1, ...]
            if call.invalid is not None:
                kept = nan_where_invalid(kept, call.invalid)
            if call.non_finite is not None and self.columns:
                marked = [
                    call.non_finite.marked_state(key, kept[:, j, ...], column)
                    for j, column in enumerate(self.columns)
                ]
                kept = stacked(marked)
            self.kept[key] = kept

    def added_to(self, extended: Cache, before: Cache) -> Cache:
        """The extended cache with the kept states, in the dtypes of the cache before."""
        kept = {key: cast(rows, before.store[key].dtype) for key, rows in self.kept.items()}
        return self.kept_in(extended, kept)


def _divided(array: Array, count: int) -> Array:
    """Tokens (b, count · w, …) as (count, b, w, …)."""
    xp, (b, t, *rest) = namespace(array), array.shape
    return xp.moveaxis(xp.reshape(array, (b, count, t // count, *rest)), 1, 0)


def _joined(array: Array) -> Array:
    """Tokens (count, b, w, …) as (b, count · w, …)."""
    xp, (count, b, width, *rest) = namespace(array), array.shape
    return xp.reshape(xp.moveaxis(array, 0, 1), (b, count * width, *rest))


def _state(update: object, before: Array) -> Array:
    if not isinstance(update, Replace):
        raise UnsupportedError(
            "keep and states_every: a backend computes states together with rows of tokens, so "
            "that it can not give earlier states; name another backend"
        )
    return cast(update.value, before.dtype)


def stacked(states: Sequence[Array]) -> Array:
    """n states (b, …), stacked to (b, n, …)."""
    return namespace(states[0]).stack(states, axis=1)


def rows_from(array: Array, start: Array, width: int) -> Array:
    """Up to `width` rows of each sequence of an array (b, t, …), from `start` (b,) or an int on."""
    if isinstance(start, int):
        return array[:, start : start + width, ...]
    tokens = start[:, None] + arange_like(width, start)[None, :]
    return take_tokens(array, as_index(namespace(tokens).clip(tokens, max=array.shape[1] - 1)))
