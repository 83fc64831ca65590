"""Binding the arguments of a call: inputs by name, masks, and the frame.

Errors that depend on the entries of arrays are raised here and in `masks.py`, before anything is
computed. All other errors are raised earlier, when the call is prepared (`preparation.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from precondattn.algebra.call import Call
from precondattn.algebra.declaration import Sizes
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays, DType, host_integers, namespace
from precondattn.cache import KEY_MASK
from precondattn.cache.kinds import invalid_length
from precondattn.cache.known_lengths import lengths_on_host
from precondattn.execution import preparation
from precondattn.execution.cache_checks import keeps_tokens
from precondattn.execution.containment import NonFiniteRows
from precondattn.execution.input_names import MASKS, declared_inputs
from precondattn.execution.masks import (
    ValueChecks,
    check_lengths,
    check_mask,
    segments_of,
    sequences_between,
    zero_padding,
)
from precondattn.execution.pair_masks import (
    ATTN_MASK,
    PREFIX,
    check_attn_mask,
    check_extends_prefix,
    check_prefix,
    of_slots_and_new,
    prefix_of_packed,
    prefix_of_queries,
)
from precondattn.execution.preparation import PreparedCall, prepared, times
from precondattn.execution.signature import signature_of
from precondattn.frame import EXTENSION, Frame, Layout, extending_frame, full_frame, held_by_all
from precondattn.given import Given


class BoundCall(NamedTuple):
    """The checked arguments of a call."""

    prepared: PreparedCall
    inputs: dict[str, Array]
    frame: Frame
    lengths: Array | None = None
    """The number of valid tokens of each sequence (b,), int32."""
    invalid: Array | None = None
    """The sequences (b,) whose traced arguments are out of range; their output is NaN."""
    dtypes_before: Mapping[str, DType] | None = None
    """The dtypes of the inputs before autocast cast them; None if autocast is off."""
    non_finite: NonFiniteRows | None = None
    """The input rows with a NaN or infinity, which were set to 0, and the outputs they reach."""
    segments: np.ndarray | None = None
    """The segment ids (b, s) of a packed call, if they can be read."""
    count: Array = None
    """The number of tokens (b,) by which an extension lengthens each sequence; an int if all caches
    are equally long."""

    @property
    def sizes(self) -> Sizes:
        return self.prepared.sizes


def bind(call: Call, signature: Hashable | None) -> BoundCall:
    """The checked arguments of a full call, with its masks."""
    ready = preparation.prepared_calls.get(signature) or prepared(call, signature)
    inputs, before = _inputs(call, ready)
    like = next(iter(inputs.values()))
    if not ready.request.masks:
        layout = ready.layout
        frame = full_frame(*times(ready.sizes), like) if layout is None else Frame.of(layout, like)
        return BoundCall(ready, inputs, frame, dtypes_before=before)
    owner, masks, b, (t, s) = str(call.mechanism), call.masks, ready.sizes["b"], times(ready.sizes)
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, masks["lengths"], like, b, s, "s", checks)
    key_mask = check_mask(owner, KEY_MASK, masks[KEY_MASK], like, (b, s), ("bool",), "(b s)")
    segment_ids, segments, end = segments_of(owner, masks, like, b, s, checks)
    attn_mask = check_attn_mask(owner, masks.get(ATTN_MASK), like, ready.sizes)
    if end is not None:
        if lengths is None:  # Padding was found only now; it changes the plan.
            padded = call._replace(masks={**masks, "lengths": end})
            signature = signature_of(padded)
            ready = preparation.prepared_calls.get(signature) or prepared(padded, signature)
        lengths = end if lengths is None else namespace(end).minimum(lengths, end)
    prefix = _prefix(owner, masks, like, ready.sizes, segment_ids, checks)
    of_tokens = {"lengths": lengths, KEY_MASK: key_mask, "segment_ids": segment_ids}
    frame = full_frame(t, s, like, **of_tokens, prefix=prefix, attn_mask=attn_mask)
    inputs = zero_padding(inputs, declared_inputs(call.mechanism), frame.q_valid, frame.k_valid)
    return BoundCall(ready, inputs, frame, lengths, checks.invalid, before, segments=segments)


def _prefix(
    owner: str,
    masks: Mapping[str, Given],
    like: Array,
    sizes: Sizes,
    segment_ids: Array,
    checks: ValueChecks,
) -> Array | None:
    """The end of each query's prefix (b, t)."""
    bounds = masks["cu_seqlens"]
    count, letter = (sizes["b"], "b") if bounds is None else (sequences_between(bounds), "n")
    prefix = check_prefix(owner, masks.get(PREFIX), like, count, letter, checks)
    if prefix is None:
        return None
    of_sequences = prefix if bounds is None else prefix_of_packed(prefix, segment_ids)
    return prefix_of_queries(of_sequences, *times(sizes), segment_ids)


def check_call(
    mechanism: Piece, arrays: tuple[Array, ...], named: Arrays, options: Mapping[str, Given]
) -> None:
    """Raise the errors of a full call for invalid arguments; `options` are masks and `backend`."""
    masks = {name: options.get(name) for name in MASKS}
    call = Call("forward", mechanism, arrays, named, masks, options.get("backend"))
    bind(call, signature_of(call))


def bind_extension(call: Call, signature: Hashable | None) -> BoundCall:
    """The checked arguments of `extend`, with its masks.

    `segment_ids` (b, t) are no argument of the public verbs; cached states belong to the first.
    """
    ready = preparation.prepared_calls.get(signature) or prepared(call, signature)
    inputs, before = _inputs(call, ready)
    masks, length, sizes = call.masks, call.cache.length, ready.sizes
    b, t, capacity = sizes["b"], sizes["t"], sizes["c"]
    old_lengths = length.tolist() if ready.are_on_host else lengths_on_host(length)
    if old_lengths is not None and not ready.request.masks:
        held = held_by_all(old_lengths, t, capacity)
        if held is not None:  # Usually nothing is masked, and nothing must be checked.
            layout = Layout(EXTENSION, t, capacity, held=held, longest=held)
            frame = Frame.of(layout, length)
            return BoundCall(ready, inputs, frame, dtypes_before=before, count=t)
    owner, like = str(call.mechanism), next(iter(inputs.values()))
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, masks["lengths"], like, b, t, "t", checks)
    key_mask = check_mask(owner, KEY_MASK, masks[KEY_MASK], like, (b, t), ("bool",), "(b t)")
    cached_mask = call.cache.store.get(KEY_MASK)
    if key_mask is not None and cached_mask is None and keeps_tokens(call.mechanism):
        raise ValueError(
            f"{owner}: this cache stores no key_mask; create it with init_cache(..., key_mask=True)"
        )
    now, new = length, t if lengths is None else lengths
    new_lengths = t if lengths is None else host_integers(lengths)
    if old_lengths is not None and new_lengths is not None:  # Reading waits for no device.
        now, new = np.asarray(old_lengths), np.asarray(new_lengths)
    checks.require(now >= 0, "the cache's length is negative")
    if capacity:
        holds = f"capacity exceeded: the cache holds at most {capacity} tokens"
        checks.require(now + new <= capacity, f"{holds}, and the new ones do not fit")
    longest = None if old_lengths is None else max(old_lengths, default=0)
    given = {"lengths": lengths, KEY_MASK: key_mask, "segment_ids": masks.get("segment_ids")}
    prefix = check_prefix(owner, masks.get(PREFIX), like, b, "b", checks)
    if prefix is not None:
        check_extends_prefix(prefix, length, t if lengths is None else lengths, checks)
        given[PREFIX] = prefix_of_queries(prefix, t, t, None)
    if masks.get(ATTN_MASK) is not None:
        columns = range(t, capacity + 1) if longest is None else (longest + t, capacity)
        attn_mask = check_attn_mask(owner, masks[ATTN_MASK], like, sizes, columns)
        assert attn_mask is not None
        has_all = now + new <= attn_mask.shape[3]
        checks.require(has_all, "attn_mask must have a column for each cached and new token")
        given[ATTN_MASK] = of_slots_and_new(attn_mask, length, t, capacity)
    frame = extending_frame(length, capacity, t, longest=longest, past_mask=cached_mask, **given)
    if lengths is not None or key_mask is not None:
        valid = frame.valid_keys(t)
        inputs = zero_padding(inputs, declared_inputs(call.mechanism), frame.q_valid, valid)
    xp = namespace(length)
    count = xp.full_like(length, t) if lengths is None else lengths
    if checks.invalid is not None:  # These sequences have an invalid length from now on.
        count = xp.where(checks.invalid, invalid_length(capacity) - length, count)
    return BoundCall(ready, inputs, frame, lengths, checks.invalid, before, count=count)


def _inputs(call: Call, ready: PreparedCall) -> tuple[Arrays, Mapping[str, DType] | None]:
    """The inputs in the declared order, and under autocast their dtypes before the cast."""
    given = (*call.arrays, *call.named.values())
    if ready.numbers is not None:
        given = tuple([given[i] for i in ready.numbers])
    inputs = dict(zip(ready.names, given, strict=True))
    if not ready.is_cast:
        return inputs, None
    return ready.framework.cast_inputs(declared_inputs(call.mechanism), inputs)
