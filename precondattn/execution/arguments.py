"""Binding the arguments of a call: its inputs by name, its masks, and the frame of positions.

Errors that depend on the entries of arrays are raised here and in `masks.py`, before anything is
computed. All others were raised when the call was prepared (`preparation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from precondattn.algebra.declaration import Sizes
from precondattn.arrays import (
    Array,
    Arrays,
    DType,
    dtype_name,
    host_array,
    host_integers,
    namespace,
    traceable,
)
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import invalid_length
from precondattn.execution.array_checks import call_dtype, check_arrays
from precondattn.execution.cache_checks import keeps_tokens
from precondattn.execution.cu_seqlens import packed_by
from precondattn.execution.input_names import (
    CALL_OPTIONS,
    INIT_OPTIONS,
    declared_inputs,
    extending_inputs,
    inputs_by_name,
    shapes_of,
)
from precondattn.execution.masks import (
    INTEGERS,
    ValueChecks,
    check_lengths,
    check_mask,
    is_contiguous,
    zero_padding,
)
from precondattn.execution.preparation import PreparedCall, prepared, times
from precondattn.execution.signature import GivenCall, signature_of
from precondattn.execution.torch.autocast import cast_inputs
from precondattn.frame import (
    EXTENSION,
    Frame,
    Layout,
    extending_frame,
    full_frame,
    held_by_all,
)

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.execution.containment import NonFiniteRows
    from precondattn.given import Given


class BoundCall(NamedTuple):
    """The checked arguments of a call."""

    prepared: PreparedCall
    inputs: dict[str, Array]
    frame: Frame
    lengths: Array | None = None
    """Valid tokens (b,) of each sequence, as int32."""
    invalid: Array | None = None
    """Sequences (b,) whose traced arguments are out of range: their output is NaN."""
    dtypes_before: Mapping[str, DType] | None = None
    """The dtypes of the inputs before autocast cast them; None where it is off."""
    non_finite: NonFiniteRows | None = None
    """Outputs that are NaN because of a NaN or infinity in the inputs, which is 0 here."""
    segments: np.ndarray | None = None
    """The segment ids (b, s) of a packed call, where they can be read."""

    @property
    def sizes(self) -> Sizes:
        return self.prepared.sizes

    @property
    def library(self) -> str:
        return self.prepared.library

    @property
    def dtype(self) -> str:
        return self.prepared.dtype

    @property
    def masks(self) -> frozenset[str]:
        """Which of segment_ids, lengths and key_mask were passed."""
        return self.prepared.request.masks


NEGATIVE = "the cache's length is negative"
EXCEEDED = "capacity exceeded: the cache holds at most {} tokens, and the new ones do not fit"


def bind(
    call: GivenCall,
    ready: PreparedCall,
    *,
    segment_ids: Array | None,
    cu_seqlens: Given,
    lengths: Given,
    key_mask: Array | None,
) -> BoundCall:
    """The arguments of a full call, with its masks."""
    inputs, before = _inputs(call, ready)
    like = next(iter(inputs.values()))
    if segment_ids is None and cu_seqlens is None and lengths is None and key_mask is None:
        layout = ready.layout
        frame = full_frame(*times(ready.sizes), like) if layout is None else Frame.of(layout, like)
        return BoundCall(ready, inputs, frame, dtypes_before=before)
    owner, b, (t, s) = str(call.mechanism), ready.sizes["b"], times(ready.sizes)
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, lengths, like, b, s, "s", checks)
    key_mask = check_mask(owner, KEY_MASK, key_mask, like, (b, s), ("bool",), "(b s)")
    segment_ids, segments, end = _segments(owner, segment_ids, cu_seqlens, like, (b, s), checks)
    if end is not None:
        if lengths is None:  # Only now it is known that there is padding, which changes the plan.
            padded = call._replace(masks={**call.masks, "lengths": end})
            ready = prepared(padded, signature_of(padded))
        lengths = end if lengths is None else namespace(end).minimum(lengths, end)
    frame = full_frame(t, s, like, lengths=lengths, key_mask=key_mask, segment_ids=segment_ids)
    inputs = zero_padding(inputs, declared_inputs(call.mechanism), frame.q_valid, frame.k_valid)
    bound = BoundCall(ready, inputs, frame, lengths, checks.invalid, before)
    return bound if segments is None else bound._replace(segments=segments)


def check_call(
    mechanism: Piece, arrays: tuple[Array, ...], named: Arrays, options: Mapping[str, Given]
) -> None:
    """Raise the errors of a full call for bad arguments; `options` are masks and `backend`."""
    masks = {name: options.get(name) for name in CALL_OPTIONS if name != "backend"}
    call = GivenCall("forward", mechanism, arrays, named, masks, options.get("backend"))
    bind(call, prepared(call, signature_of(call)), **masks)


def _segments(
    owner: str,
    segment_ids: Array | None,
    cu_seqlens: Given,
    like: Array,
    shape: tuple[int, int],
    checks: ValueChecks,
) -> tuple[Array | None, np.ndarray | None, Array | None]:
    """The segment ids (b, s), the same on the host where they can be read, and their ends (b,).

    After the end of a sequence is padding. The ends are None where there is none.
    """
    if cu_seqlens is None:
        ids = check_mask(owner, "segment_ids", segment_ids, like, shape, INTEGERS, "(b s)")
        if ids is None:
            return None, None, None
        on_host = host_array(ids)
        checks.require(
            is_contiguous(ids if on_host is None else on_host),
            "segment_ids must be contiguous: each id in one run",
        )
        return ids, on_host, None
    if segment_ids is not None:
        raise ValueError(f"{owner}: segment_ids and cu_seqlens mean the same: give one of them")
    return packed_by(owner, cu_seqlens, like, *shape, checks)


def bind_extension(
    call: GivenCall,
    ready: PreparedCall,
    *,
    lengths: Given,
    key_mask: Array | None,
    segment_ids: Array | None = None,
) -> BoundCall:
    """The arguments of `extend`, with its masks.

    `segment_ids` (b, t) are for caches of states only, and not of the public verbs: states before
    the new tokens are those of the segment that the first one is of.
    """
    inputs, before = _inputs(call, ready)
    mechanism, cache = call.mechanism, call.cache
    sizes, length = ready.sizes, cache.length
    b, t, capacity = sizes["b"], sizes["t"], sizes["c"]
    cached_mask = cache.store.get(KEY_MASK)
    old_lengths = length.tolist() if ready.are_on_host else host_integers(length)
    if lengths is None and key_mask is None and cached_mask is None and segment_ids is None:
        held = None if old_lengths is None else held_by_all(old_lengths, t, capacity)
        if held is not None:  # As in most steps: nothing is masked, and there is nothing to check.
            layout = Layout(EXTENSION, t, capacity, held=held, longest=held)
            return BoundCall(ready, inputs, Frame.of(layout, cache.length), dtypes_before=before)
    owner, like = str(mechanism), next(iter(inputs.values()))
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, lengths, like, b, t, "t", checks)
    key_mask = check_mask(owner, KEY_MASK, key_mask, like, (b, t), ("bool",), "(b t)")
    if key_mask is not None and cached_mask is None and keeps_tokens(mechanism):
        raise ValueError(
            f"{owner}: this cache stores no key_mask; create it with init_cache(..., key_mask=True)"
        )
    new_counts = None
    if old_lengths is not None:  # A traced batch may have a symbolic size.
        new_counts = [t] * b if lengths is None else host_integers(lengths)
    if old_lengths is None or new_counts is None:
        checks.require(cache.length >= 0, NEGATIVE)
        if capacity:
            fits = cache.length + (t if lengths is None else lengths) <= capacity
            checks.require(fits, EXCEEDED.format(capacity))
    else:
        checks.require_now([n >= 0 for n in old_lengths], NEGATIVE)
        if capacity:
            fits = [n + new <= capacity for n, new in zip(old_lengths, new_counts, strict=True)]
            checks.require_now(fits, EXCEEDED.format(capacity))
    frame = extending_frame(
        cache.length,
        capacity,
        t,
        lengths=lengths,
        key_mask=key_mask,
        past_mask=cached_mask,
        segment_ids=segment_ids,
        longest=None if old_lengths is None else max(old_lengths, default=0),
    )
    if lengths is not None or key_mask is not None:
        valid = frame.valid_keys(t)
        inputs = zero_padding(inputs, declared_inputs(mechanism), frame.q_valid, valid)
    return BoundCall(ready, inputs, frame, lengths, checks.invalid, before)


def _inputs(call: GivenCall, ready: PreparedCall) -> tuple[Arrays, Mapping[str, DType] | None]:
    """The inputs in the declared order, and, under autocast, their dtypes before it cast them."""
    given = (*call.arrays, *call.named.values())
    if ready.numbers is not None:
        given = tuple([given[i] for i in ready.numbers])
    inputs = dict(zip(ready.names, given, strict=True))
    if not ready.is_cast:
        return inputs, None
    return cast_inputs(declared_inputs(call.mechanism), inputs)


def bind_shapes(mechanism: Piece, arrays: tuple[Array, ...], named: Arrays) -> tuple[Array, Sizes]:
    """An input with the library, device and dtype of the buffers, and the sizes of the inputs."""
    owner, declared = str(mechanism), traceable(extending_inputs)(mechanism)
    inputs = inputs_by_name(owner, declared, arrays, named, INIT_OPTIONS, complete=False)
    if not inputs:
        raise TypeError(f"{owner}: init_cache needs the inputs, for their shapes and dtype")
    inputs, _ = cast_inputs(declared, inputs)
    check_arrays(owner, declared, inputs)
    token_inputs = {n: a for n, a in inputs.items() if "c" not in declared[n].letters}
    sizes = declared.sizes(owner, shapes_of(token_inputs))
    like = next(a for a in inputs.values() if dtype_name(a) == call_dtype(inputs))
    return like, sizes


def new_token_count(bound: BoundCall, cache: Cache) -> Array:
    """The number of tokens (b,) by which each sequence grows; an int where all caches are equally
    long.

    An invalid sequence stays invalid: its length becomes greater than the capacity, or negative
    where there is no capacity.
    """
    if bound.frame.held is not None:
        return bound.sizes["t"]
    xp = namespace(cache.length)
    count = bound.lengths
    if count is None:
        count = xp.full_like(cache.length, bound.sizes["t"])
    if bound.invalid is None:
        return count
    return xp.where(bound.invalid, invalid_length(bound.sizes["c"]) - cache.length, count)
