"""Extensions of a cache: the filled part of its buffers, and steps in parts.

Buffers have capacity for more tokens than are cached. If every sequence has equally many cached
tokens, all of them visible, the filled part is a plain slice and needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, arange_like, cast, namespace, upcast, upcast_all
from precondattn.cache import Replace, Updates, append, updated
from precondattn.cache.slots import held_part, longest_held
from precondattn.frame import Frame
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.read import MEAN, Read
from precondattn.spec.softmax import bias_of_keys
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import Tile, blocks, time_first
from precondattn_portable.read_log_mean_exp import LogMeanExpRead
from precondattn_portable.read_mean import MeanAndLogSumRead, exponentials, sink_of_rows

TOKENS = 64
"""New tokens per call of a leaf's own step: its memory is their number times the cache."""

Step = Callable[[Arrays, Arrays, Frame], tuple[Array, Updates]]


class FilledPart(NamedTuple):
    """The filled part of a cache, with the frame of that part and the new tokens."""

    count: int  # type: ignore[assignment]  # No method of a tuple is called.
    """Filled slots of the longest sequence."""
    offset: int | None
    """`count` if all sequences have as many cached tokens, all of them visible; else None."""
    frame: Frame


def filled(frame: Frame, capacity: int) -> FilledPart:
    """The filled part for an extension's frame: `capacity` slots, and then the new tokens."""
    if frame.held is not None:
        return FilledPart(frame.held, frame.held, frame.of_held())
    count = min(longest_held(frame), capacity)
    part = frame.of_slots(count)
    # A sequence with fewer cached tokens has slots that are not valid.
    is_plain = bool(namespace(frame.q_position).all(part.k_valid))
    k_valid = None if is_plain else part.k_valid
    of_tokens = frame.q_position, part.k_position, None, k_valid
    filled_frame = Frame(*of_tokens, q_prefix=frame.q_prefix, pairs=part.pairs)
    return FilledPart(count, count if is_plain else None, filled_frame)


def past_heads(buffer: Array, count: int, first: int = 0) -> Array:
    """The filled part of a buffer (b, c, n, d) with heads before time, without a copy."""
    return time_first(upcast(buffer[:, first:count, ...]))


def past_columns(buffer: Array, count: int, first: int = 0) -> Array:
    """`past_heads`, transposed: (b, n, d, c), which is the order in memory."""
    return namespace(buffer).permute_dims(upcast(buffer[:, first:count, ...]), (0, 2, 3, 1))


def bias_of_filled(bias: Array, frame: Frame, known: FilledPart) -> Array:
    """Columns of bias (b or 1, h or 1, t, capacity) at the filled slots and the new tokens."""
    if known.offset is not None:
        return bias[..., : known.offset + frame.q_position.shape[1]]
    return bias_of_keys(bias, known.frame)


def read_of_parts(
    ops: Arithmetic, read: Read, row_block: Array, values: list[Array], sink: Array | None = None
) -> Array:
    """The read of a masked row block, with values in several arrays, and sinks (b, n, r)."""
    if read != MEAN:
        whole = namespace(row_block).concat(values, axis=2)
        of_whole = LogMeanExpRead if read == LOG_MEAN_EXP else MeanAndLogSumRead
        tile = Tile(0, row_block.shape[2], 0, whole.shape[2])
        return of_whole(ops, whole, sink).forward(row_block, tile)[0]
    sink = sink_of_rows(sink, row_block.shape[2])
    row_block, total, _ = exponentials(ops, row_block, sink)
    start, result = 0, None
    for v in values:
        part = ops.product(row_block[..., start : start + v.shape[2]], v)
        result = part if result is None else result + part
        start += v.shape[2]
    return result / total


def new_tokens(frame: Frame, t: int) -> Frame:
    """The frame of the new tokens alone, as in a full call."""
    assert frame.k_valid is not None
    position = arange_like(t, frame.q_position)[None, :]
    valid = frame.k_valid[:, frame.k_valid.shape[1] - t :]
    prefix = None if frame.q_prefix is None else frame.q_prefix - frame.q_position[:, :1]
    pairs = None if frame.pairs is None else frame.pairs[..., frame.pairs.shape[3] - t :]
    return Frame(position, position, None, valid, q_prefix=prefix, pairs=pairs)


def step_as_defined(
    leaf: LeafProtocol, past: Arrays, x: Arrays, frame: Frame
) -> tuple[Array, Updates]:
    """The step of the leaf's definition, for a few new tokens at a time."""
    return few_tokens_at_a_time(leaf.step, leaf, past, x, frame)


def few_tokens_at_a_time(
    step: Step, leaf: LeafProtocol, past: Arrays, x: Arrays, frame: Frame
) -> tuple[Array, Updates]:
    """A step computed as several shorter steps, which give the same output."""
    t = next(iter(x.values())).shape[1]
    is_whole = t <= TOKENS or frame.is_traced
    past, frame = held_part(leaf.slots(), past, frame, room=0 if is_whole else t)
    past = upcast_all(past)
    if is_whole:
        return step(past, x, frame)
    xp = namespace(frame.q_position)
    capacity = frame.k_position.shape[1] - t
    assert frame.k_valid is not None
    slot_valid, new_valid = frame.k_valid[:, :capacity], frame.k_valid[:, capacity:]
    buffers, length, outs = dict(past), frame.q_position[:, 0], []
    slots = frame.k_position[:, :capacity]
    for i0, i1 in blocks(t, TOKENS):
        position = length[:, None] + arange_like(i1 - i0, length)[None, :]
        q_valid = None if frame.q_valid is None else frame.q_valid[:, i0:i1]
        k_valid = xp.concat([slot_valid, new_valid[:, i0:i1]], axis=1)
        part_frame = Frame(position, xp.concat([slots, position], axis=1), q_valid, k_valid)
        if frame.pairs is not None:
            rows = frame.pairs[:, :, i0:i1, :]
            of_new = rows[..., capacity + i0 : capacity + i1]
            part_frame.pairs = xp.concat([rows[..., :capacity], of_new], axis=3)
        new = dict(x)
        for name, array in x.items():
            axis = leaf.inputs[name].time_axis
            if axis is not None:
                new[name] = array[(*[slice(None)] * axis, slice(i0, i1), ...)]
        out, updates = step(buffers, new, part_frame)
        outs.append(out)
        count = xp.full_like(length, i1 - i0)
        if q_valid is not None:
            count = xp.sum(cast(q_valid, length.dtype), axis=1, dtype=length.dtype)
        for slot, update in updates.items():
            buffers[slot] = updated(buffers[slot], update, length, count, donate=i0 > 0)
        slot_valid = append(slot_valid, new_valid[:, i0:i1], length, count, donate=False)
        length = length + count
    return xp.concat(outs, axis=1), {slot: Replace(buffer) for slot, buffer in buffers.items()}
