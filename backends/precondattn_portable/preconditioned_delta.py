"""ATK with a delta rule, fused: each group of chunks computes its preconditioned keys.

    y1  = preconditioned_key(k, g_atk, beta_atk)
    out = erasing_gated_delta(q, k=y1, v, g, beta, erase=k)

Computed separately, all preconditioned keys would be written to memory and read again, in another
order. Here a group of chunks computes them from the keys that it erases with, which are in a CPU's
cache already.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import precondattn as pa
from precondattn.algebra.group import Group
from precondattn.algebra.program import Program
from precondattn.algebra.recurrences import Recurrences
from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.limits import KEPT
from precondattn.spec.recurrence import Stream
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import stored
from precondattn_portable.chunkwise import CHUNK, Chunkwise, ChunkWork
from precondattn_portable.chunkwise_additive import ChunkGroup
from precondattn_portable.layout import blocks
from precondattn_portable.preconditioned_key import (
    KEY_CHUNK,
    MOST_CHUNKS,
    PreconditionedChunks,
    PreconditionedKeyChunks,
    gates_and_weights,
)

RULES = Recurrences(
    ("delta",), gate=(None, "head", "channel"), erase=("own key",), strength=("scalar",)
)
"""The delta rules that erase with an unchanged input."""


class PreconditionedDelta(Algorithm[Group]):
    """Algorithm of the group, without masks and without gradient."""

    name = "keys made in the chunks that read them"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        key, rule = cast("tuple[pa.PreconditionedKey, pa.LinearFamily]", self.leaf.program.leaves)
        of_key, of_rule = (
            {formal: x[name] for formal, name in call.arguments if name in x}
            for call in self.leaf.program.calls
        )
        # The chunks of `k` are replaced.
        of_rule["k"] = of_rule[rule.erase_name]
        form = _Form(PreconditionedKeyChunks(self.ops, key), of_key, frame)
        return rule.run(rule.zero_state(of_rule), of_rule, frame, form)[0], ()


class _Form(Chunkwise):
    """The recurrence in chunks, which writes with the preconditioned keys."""

    def __init__(self, key: PreconditionedKeyChunks, x: Arrays, frame: Frame) -> None:
        super().__init__(key.ops)
        self.key, self.x, self.frame = key, x, frame

    def work(self, x: Stream) -> ChunkWork:
        return _Work(self, x)


class _Work(ChunkWork):
    """A stream in chunks, which computes its written keys from the keys that it erases with."""

    def __init__(self, form: _Form, x: Stream) -> None:
        super().__init__(form.ops, x, form.chunk)
        xp, heads = namespace(x.k), self.b * self.m
        size = min(KEY_CHUNK, self.size)
        self.p = self.size // size
        g, beta = (
            xp.reshape(self._chunks(array, range(self.count), 0), (self.count, -1, size, 1))
            for array in gates_and_weights(form.x, form.frame)
        )
        self.most = max(MOST_CHUNKS // self.p, 1)
        """The most chunks whose keys are computed together."""
        self.together = min(self.chunks_together(self.widest), self.most)
        self.keys = PreconditionedChunks(form.key, form.x, g, beta, self.together, self.p)
        self.squares = self.ops.zeros((heads, 1, x.k.shape[3]), x.k)

    def group(self, part: range, known: dict[int, Array] | None = None) -> ChunkGroup:
        xp, erase = namespace(self.squares), self.written.erase
        assert erase is not None  # The rules have one.
        k = self._chunks(erase, part, 0)
        written = self.ops.empty(k.shape, k)
        shape = (len(part), self.b * self.m * self.p, self.size // self.p, k.shape[3])
        by_key_chunk, rows = xp.reshape(k, shape), xp.reshape(written, shape)
        for low, high in blocks(len(part), self.together):
            index, block = (slice(low, high), ...), (part.start + low) // self.together
            view = rows[index]
            m, self.squares = self.keys.multipliers(block, by_key_chunk[index], self.squares, view)
            stored(rows, index, view, self.ops.multiply(m, by_key_chunk[index]))
        return super().group(part, {id(erase): k, id(self.written.k): written})

    def chunks_together(self, widest: int) -> int:
        """The chunks of a group, in whole blocks of keys."""
        count = super().chunks_together(widest)
        return count if count < self.most else count - count % self.most


def computes_together(program: Program, request: Request) -> bool:
    """Whether this group is computed at once: a full call without masks, of several chunks.

    Every token has a query, so that groups of chunks begin with the first one, and every key head
    one value head, so that no key is made twice.
    """
    is_plain = request.verb == "forward" and not request.masks and not request.is_symbolic
    if not is_plain or not is_preconditioned_delta(program):
        return False
    shapes = dict(request.shapes)
    second = dict(program.calls[1].arguments)
    rule = cast("pa.LinearFamily", program.leaves[1])
    q, k, v = (shapes[second[name]] for name in ("q", rule.erase_name, "v"))
    return q[1] == k[1] > CHUNK and k[2] == v[2]


@lru_cache(maxsize=KEPT)
def is_preconditioned_delta(program: Program) -> bool:
    """Whether a group is ATK's key, and a delta rule that writes with it and erases with k."""
    if len(program.calls) != 2:
        return False
    key, rule = program.leaves
    recurrence = rule.recurrence
    if type(key) is not pa.PreconditionedKey or recurrence is None or recurrence not in RULES:
        return False
    first, second = (dict(call.arguments) for call in program.calls)
    made = [formal for formal, name in second.items() if name == program.calls[0].out]
    return made == ["k"] and second[cast("pa.LinearFamily", rule).erase_name] == first["k"]
