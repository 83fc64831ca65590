"""Binding the arguments of a call: names, checks, and the frame of positions and masks.

Every error that bad input can cause is raised here or in `array_checks.py`, `masks.py` and
`cache_checks.py`, before anything is computed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from precondattn.algebra.declaration import Inputs, ShapeError, Sizes
from precondattn.arrays import (
    Array,
    dtype_name,
    exact_device,
    host_array,
    host_integers,
    is_traced,
    library_of,
    namespace,
)
from precondattn.cache import KEY_MASK, Cache
from precondattn.execution.array_checks import call_dtype, check_arrays
from precondattn.execution.autocast import cast_inputs, hint
from precondattn.execution.cache_checks import (
    check_buffers,
    check_cache,
    check_cacheable,
    keeps_tokens,
)
from precondattn.execution.cu_seqlens import packed_by
from precondattn.execution.masks import (
    INTEGERS,
    ValueChecks,
    check_lengths,
    check_mask,
    is_contiguous,
    zero_padding,
)
from precondattn.frame import Frame, extending_frame, full_frame
from precondattn.limits import KEPT

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.execution.containment import Spoiled


class BoundCall(NamedTuple):
    """The checked arguments of a call."""

    inputs: dict[str, Array]
    frame: Frame
    sizes: Sizes
    library: str
    dtype: str
    masks: frozenset[str]
    """Which of segment_ids, lengths and key_mask were passed."""
    lengths: Array | None
    """Valid tokens (b,) of each sequence, as int32."""
    invalid: Array | None
    """Sequences (b,) whose traced arguments are out of range: their output is NaN."""
    dtypes_before: Mapping[str, Any] | None = None
    """The dtypes of the inputs before autocast cast them; None where it is off."""
    spoiled: Spoiled | None = None
    """Outputs that are NaN because of a NaN or infinity in the inputs, which is 0 here."""
    segments: np.ndarray | None = None
    """The segment ids (b, s) of a packed call, where they can be read."""


NEGATIVE = "the cache's length is negative"
EXCEEDED = "capacity exceeded: the cache holds at most {} tokens, and the new ones do not fit"


def bind(
    mechanism: Mechanism,
    arrays: Sequence[Array],
    named: Mapping[str, Array],
    *,
    segment_ids: Array | None = None,
    cu_seqlens: Any = None,
    lengths: Any = None,
    key_mask: Array | None = None,
) -> BoundCall:
    """The arguments of a full call."""
    owner, declared = str(mechanism), _declared(mechanism)
    inputs = inputs_by_name(owner, declared, arrays, named, CALL_OPTIONS)
    inputs, before = cast_inputs(declared, inputs)
    library = check_arrays(owner, declared, inputs)
    sizes = declared.sizes(owner, _shapes(inputs))
    b = sizes["b"]
    t, s = sizes.get("t", sizes.get("s", 1)), sizes.get("s", sizes.get("t", 1))
    if t > s and mechanism.offers.causal:
        raise ShapeError(
            f"{owner}: is causal, so there must not be more queries than keys; "
            f"found t = {t} and s = {s}"
        )
    if t != s and not mechanism.offers.causal:
        masks = {"lengths": lengths, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
        for name, given in masks.items():
            if given is not None:
                raise ValueError(
                    f"{owner}: {name} of a non-causal call needs as many queries as keys; "
                    f"found t = {t} and s = {s}; use key_mask"
                )
    like = next(iter(inputs.values()))
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, lengths, like, b, s, "s", checks)
    key_mask = check_mask(owner, KEY_MASK, key_mask, like, (b, s), ("bool",), "(b s)")
    segment_ids, segments = _segments(owner, segment_ids, cu_seqlens, like, (b, s), checks)
    frame = full_frame(t, s, like, lengths=lengths, key_mask=key_mask, segment_ids=segment_ids)
    names = _names(segment_ids=segment_ids, lengths=lengths, key_mask=key_mask)
    inputs = zero_padding(inputs, declared, frame.q_valid, frame.k_valid)
    dtype = call_dtype(inputs)
    bound = BoundCall(inputs, frame, sizes, library, dtype, names, lengths, checks.invalid, before)
    return bound if segments is None else bound._replace(segments=segments)


def _segments(
    owner: str,
    segment_ids: Array | None,
    cu_seqlens: Any,
    like: Array,
    shape: tuple[int, int],
    checks: ValueChecks,
) -> tuple[Array | None, np.ndarray | None]:
    """The segment ids (b, s), and the same on the host where they can be read."""
    if cu_seqlens is None:
        ids = check_mask(owner, "segment_ids", segment_ids, like, shape, INTEGERS, "(b s)")
        if ids is None:
            return None, None
        on_host = host_array(ids)
        checks.require(
            is_contiguous(ids if on_host is None else on_host),
            "segment_ids must be contiguous: each id in one run",
        )
        return ids, on_host
    if segment_ids is not None:
        raise ValueError(f"{owner}: segment_ids and cu_seqlens mean the same: give one of them")
    return packed_by(owner, cu_seqlens, like, *shape, checks)


def bind_extension(
    mechanism: Mechanism,
    cache: Cache,
    arrays: Sequence[Array],
    named: Mapping[str, Array],
    *,
    lengths: Any = None,
    key_mask: Array | None = None,
) -> BoundCall:
    """The arguments of `extend`."""
    owner, declared = str(mechanism), _extending(mechanism)
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{owner}: the first argument of extend must be a Cache from init_cache; "
            f"found {type(cache).__name__}"
        )
    inputs = inputs_by_name(owner, declared, arrays, named, EXTEND_OPTIONS)
    inputs, before = cast_inputs(declared, inputs)
    library, sizes = _checked_once(owner, mechanism, cache, inputs)
    b, t, capacity = (sizes[letter] for letter in "btc")
    like = next(iter(inputs.values()))
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, lengths, like, b, t, "t", checks)
    key_mask = check_mask(owner, KEY_MASK, key_mask, like, (b, t), ("bool",), "(b t)")
    cached_mask = cache.store.get(KEY_MASK)
    if not keeps_tokens(mechanism):
        # Masked keys are not written to the state, so only the mask of the new keys matters.
        relevant_mask = key_mask
    elif key_mask is not None and cached_mask is None:
        raise ValueError(
            f"{owner}: this cache stores no key_mask; create it with init_cache(..., key_mask=True)"
        )
    else:
        relevant_mask = cached_mask
    old_lengths = host_integers(cache.length)
    new_counts = [t] * b if lengths is None else host_integers(lengths)
    if old_lengths is None or new_counts is None:
        checks.require(cache.length >= 0, NEGATIVE)
        if capacity:
            fits = cache.length + (t if lengths is None else lengths) <= capacity
            checks.require(fits, EXCEEDED.format(capacity))
    else:
        checks.require_now((n >= 0 for n in old_lengths), NEGATIVE)
        if capacity:
            fits = (n + new <= capacity for n, new in zip(old_lengths, new_counts, strict=True))
            checks.require_now(fits, EXCEEDED.format(capacity))
    is_unmasked = lengths is None and key_mask is None and cached_mask is None
    uniform_length = old_lengths[0] if old_lengths and len(set(old_lengths)) == 1 else None
    frame = extending_frame(
        cache.length,
        capacity,
        t,
        lengths=lengths,
        key_mask=key_mask,
        past_mask=cached_mask,
        held=uniform_length if is_unmasked else None,
    )
    masks = _names(lengths=lengths, key_mask=relevant_mask)
    new_valid = frame.k_valid[:, capacity:] if masks and frame.k_valid is not None else None
    inputs = zero_padding(inputs, _declared(mechanism), frame.q_valid, new_valid)
    dtype = call_dtype(inputs)
    return BoundCall(inputs, frame, sizes, library, dtype, masks, lengths, checks.invalid, before)


_checked: dict[Any, tuple[str, Sizes]] = {}
"""Library and sizes by the signature of an extension. Decoding repeats the same signature."""
MAX_SIGNATURES = 256


def _checked_once(
    owner: str, mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]
) -> tuple[str, Sizes]:
    """`_check_signature`, cached by signature."""
    if any(map(is_traced, inputs.values())):  # Sizes may be symbolic, and those are not hashable.
        return _check_signature(owner, mechanism, cache, inputs)
    signature = _signature(mechanism, cache, inputs)
    checked = _checked.get(signature)  # Read once: another thread may clear the dict.
    if checked is None:
        checked = _check_signature(owner, mechanism, cache, inputs)
        if len(_checked) >= MAX_SIGNATURES:
            _checked.clear()
        _checked[signature] = checked
    return checked


def _signature(mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]) -> Any:
    """Everything on which the result of `_check_signature` depends."""
    arrays = (cache.length, *cache.store.values(), *inputs.values())
    return mechanism, tuple(cache.store), tuple(inputs), tuple(map(_kind, arrays))


def _kind(array: Array) -> Any:
    if library_of(array) is None:
        return type(array)
    return type(array), array.dtype, tuple(array.shape), str(exact_device(array))


def _check_signature(
    owner: str, mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]
) -> tuple[str, Sizes]:
    """Check libraries, devices, dtypes and shapes of cache and inputs.

    Returns the library, and the size of every letter.
    """
    check_cacheable(mechanism)
    declared = _extending(mechanism)
    library = check_arrays(owner, declared, inputs)
    capacity = check_cache(owner, mechanism, cache, inputs)
    known = {"c": capacity, "b": cache.length.shape[0]}
    sizes = declared.sizes(owner, _shapes(inputs), known)
    check_buffers(
        owner, mechanism, cache, sizes, call_dtype(inputs), hint(next(iter(inputs.values())))
    )
    return library, sizes


def bind_shapes(
    mechanism: Mechanism, arrays: Sequence[Array], named: Mapping[str, Array]
) -> tuple[Array, Sizes]:
    """An input with the library, device and dtype of the buffers, and the sizes of the inputs."""
    owner, declared = str(mechanism), _extending(mechanism)
    inputs = inputs_by_name(owner, declared, arrays, named, INIT_OPTIONS, complete=False)
    if not inputs:
        raise TypeError(f"{owner}: init_cache needs the inputs, for their shapes and dtype")
    inputs, _ = cast_inputs(declared, inputs)
    check_arrays(owner, declared, inputs)
    token_inputs = {n: a for n, a in inputs.items() if "c" not in declared[n].letters}
    sizes = declared.sizes(owner, _shapes(token_inputs))
    like = next(a for a in inputs.values() if dtype_name(a) == call_dtype(inputs))
    return like, sizes


@lru_cache(maxsize=KEPT)
def _declared(mechanism: Mechanism) -> Inputs:
    return mechanism.inputs


@lru_cache(maxsize=KEPT)
def _extending(mechanism: Mechanism) -> Inputs:
    """The inputs of `extend`."""
    return mechanism.inputs.extending()


CALL_OPTIONS = ("segment_ids", "cu_seqlens", "lengths", "key_mask", "backend")
"""Keywords of a call that are not inputs."""

EXTEND_OPTIONS = ("lengths", "key_mask", "donate", "backend")
INIT_OPTIONS = ("capacity", "key_mask")


def inputs_by_name(
    owner: str,
    declared: Inputs,
    arrays: Sequence[Array],
    named: Mapping[str, Array],
    options: Sequence[str],
    *,
    complete: bool = True,
) -> dict[str, Array]:
    """The inputs in the declared order; those that are given, unless `complete`."""
    takes = f"{owner} takes {', '.join(declared)}"
    if len(arrays) > min(3, len(declared)):
        raise TypeError(
            f"{takes}: at most {min(3, len(declared))} by position, the others by name; "
            f"found {len(arrays)} by position"
        )
    given = dict(zip(declared, arrays, strict=False))
    for name, array in named.items():
        if name in given:
            raise TypeError(f"{owner}: {name} is given by position and by name")
        if name not in declared:
            near = difflib.get_close_matches(name, [*declared, *options], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(
                f"{owner}: unknown keyword {name!r}{hint}; {takes}, and {', '.join(options)}"
            )
        given[name] = array
    missing = [name for name in declared if name not in given]
    if missing and complete:
        raise TypeError(f"{owner}: missing {', '.join(missing)}; {takes}")
    return {name: given[name] for name in declared if name in given}


def _shapes(inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in inputs.items()}


def _names(**masks: Array | None) -> frozenset[str]:
    return frozenset(name for name, mask in masks.items() if mask is not None)


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
    capacity = bound.sizes["c"]
    invalid_length = capacity + 1 if capacity else -1
    return xp.where(bound.invalid, invalid_length - cache.length, count)
