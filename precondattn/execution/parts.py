"""A step whose new tokens are divided into parts, to keep the states between them (`keeping.py`).

    o_j, S_j = step(S_{j−1}, tokens of part j)

If JAX traces the call, the parts between places are a loop: compiling many steps would take long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from precondattn.algebra.call import Keeping
from precondattn.algebra.declaration import Inputs
from precondattn.arrays import arange_like, as_index, cast, namespace, take_tokens
from precondattn.backend import UnsupportedError
from precondattn.cache import KEY_MASK, Cache, Replace, Updates
from precondattn.execution.arguments import BoundCall
from precondattn.execution.keeping import Places, rows_from, stacked
from precondattn.execution.masks import nan_where_invalid, zero_padding
from precondattn.frame import EXTENSION, Frame, Layout, extending_frame
from precondattn.frameworks import of
from precondattn.frameworks.types import Array, Arrays, ByName

PartStep = Callable[[Arrays, Arrays, Frame, Array, Array], tuple[Array, Updates]]
"""A function from states, inputs, a frame, lengths and numbers of new tokens to output and updates.
"""


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
