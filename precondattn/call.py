"""One call's arguments, checked: every error that bad input can cause is raised here.

Nothing has been computed when an error is raised. What can only be seen by looking at values
(a length out of range, segments that are not contiguous, a cache that is full) raises too, unless
the values are traced; then the sequences concerned come out as NaN, never as something plausible.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from precondattn.arrays import (
    FLOATING,
    HALF,
    Array,
    cast,
    dtype_name,
    exact_device,
    is_traced,
    library_of,
    namespace,
    placement,
    values_at_hand,
    zero_where_not,
)
from precondattn.cache import KEY_MASK, Cache
from precondattn.declaration import Inputs, ShapeError, Sizes
from precondattn.frame import Frame, extending_frame, full_frame
from precondattn.verbs import CALL_OPTIONS

if TYPE_CHECKING:
    from precondattn.mechanism import Mechanism


class BoundCall(NamedTuple):
    """A call whose arguments are in order."""

    inputs: dict[str, Array]
    frame: Frame
    sizes: Sizes
    library: str
    dtype: str
    masks: frozenset[str]
    """Which of segment_ids, lengths and key_mask were given."""
    lengths: Array | None
    """Valid tokens (b,) of each sequence, as int32."""
    spoiled: Array | None
    """Sequences (b,) whose traced arguments are out of range: their output is NaN."""


def bind(
    mechanism: Mechanism,
    arrays: Sequence[Array],
    named: Mapping[str, Array],
    *,
    segment_ids: Array | None = None,
    lengths: Any = None,
    key_mask: Array | None = None,
) -> BoundCall:
    """The arguments of a full call."""
    owner, declared = str(mechanism), _declared(mechanism)
    inputs = _inputs_by_name(owner, declared, arrays, named, CALL_OPTIONS)
    library = check_arrays(owner, declared, inputs)
    sizes = declared.sizes(owner, _shapes(inputs))
    b = sizes["b"]
    t, s = sizes.get("t", sizes.get("s", 1)), sizes.get("s", sizes.get("t", 1))
    if t > s and mechanism.offers.causal:
        raise ShapeError(
            f"{owner}: is causal, and so takes at most as many queries as keys; "
            f"found t = {t} and s = {s}"
        )
    if t != s and not mechanism.offers.causal:
        for name, given in (("lengths", lengths), ("segment_ids", segment_ids)):
            if given is not None:
                raise ValueError(
                    f"{owner}: {name} speaks of positions, which queries (t = {t}) and keys "
                    f"(s = {s}) of a non-causal call do not share; use key_mask"
                )
    like = next(iter(inputs.values()))
    checks = _ValueChecks(owner)
    lengths = _check_lengths(owner, lengths, like, b, s, "s", checks)
    key_mask = _check_mask(owner, KEY_MASK, key_mask, like, (b, s), ("bool",), "(b s)")
    segment_ids = _check_mask(owner, "segment_ids", segment_ids, like, (b, s), INTEGERS, "(b s)")
    if segment_ids is not None:
        checks.require(
            _is_contiguous(segment_ids), "segment_ids must be contiguous: equal ids stand together"
        )
    frame = full_frame(t, s, like, lengths=lengths, key_mask=key_mask, segment_ids=segment_ids)
    masks = _names(segment_ids=segment_ids, lengths=lengths, key_mask=key_mask)
    inputs = zero_padding(inputs, declared, frame.q_valid, frame.k_valid)
    dtype = _call_dtype(inputs)
    return BoundCall(inputs, frame, sizes, library, dtype, masks, lengths, checks.spoiled)


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
            f"{owner}: extend takes a Cache first, as init_cache makes it; "
            f"found {type(cache).__name__}"
        )
    inputs = _inputs_by_name(owner, declared, arrays, named, EXTEND_OPTIONS)
    library, sizes = _checked_once(owner, mechanism, cache, inputs)
    b, t, capacity = (sizes[letter] for letter in "btc")
    like = next(iter(inputs.values()))
    checks = _ValueChecks(owner)
    lengths = _check_lengths(owner, lengths, like, b, t, "t", checks)
    key_mask = _check_mask(owner, KEY_MASK, key_mask, like, (b, t), ("bool",), "(b t)")
    seen = cache.store.get(KEY_MASK)
    if not keeps_tokens(mechanism):
        seen = key_mask  # What is hidden now has not come into the state, and need not be recalled.
    elif key_mask is not None and seen is None:
        raise ValueError(
            f"{owner}: this cache keeps no key_mask; make it with init_cache(..., key_mask=True)"
        )
    before = values_at_hand(cache.length)
    new = [t] * b if lengths is None else values_at_hand(lengths)
    if before is None or new is None:
        checks.require(cache.length >= 0, NEGATIVE)
        if capacity:
            fits = cache.length + (t if lengths is None else lengths) <= capacity
            checks.require(fits, EXCEEDED.format(capacity))
    else:
        checks.require_known((n >= 0 for n in before), NEGATIVE)
        if capacity:
            fits = (n + more <= capacity for n, more in zip(before, new, strict=True))
            checks.require_known(fits, EXCEEDED.format(capacity))
    is_open = lengths is None and key_mask is None and KEY_MASK not in cache.store
    frame = extending_frame(
        cache.length,
        capacity,
        t,
        lengths=lengths,
        key_mask=key_mask,
        past_mask=cache.store.get(KEY_MASK),
        held=before[0] if before and len(set(before)) == 1 and is_open else None,
    )
    masks = _names(lengths=lengths, key_mask=seen)
    new_valid = frame.k_valid[:, capacity:] if masks and frame.k_valid is not None else None
    inputs = zero_padding(inputs, _declared(mechanism), frame.q_valid, new_valid)
    dtype = _call_dtype(inputs)
    return BoundCall(inputs, frame, sizes, library, dtype, masks, lengths, checks.spoiled)


_in_order: dict[Any, tuple[str, Sizes]] = {}
"""What was found in the extensions checked so far. Decoding repeats one of them at every token."""
MOST_SIGNATURES = 256


def _checked_once(
    owner: str, mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]
) -> tuple[str, Sizes]:
    """`_check_signature`, where it is not known already."""
    if any(map(is_traced, inputs.values())):  # Sizes may be symbols, which have no hash.
        return _check_signature(owner, mechanism, cache, inputs)
    signature = _signature(mechanism, cache, inputs)
    if signature not in _in_order:
        if len(_in_order) >= MOST_SIGNATURES:
            _in_order.clear()
        _in_order[signature] = _check_signature(owner, mechanism, cache, inputs)
    return _in_order[signature]


def _signature(mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]) -> Any:
    """All that `_check_signature` looks at."""
    arrays = (cache.length, *cache.store.values(), *inputs.values())
    return mechanism, tuple(cache.store), tuple(inputs), tuple(map(_kind, arrays))


def _kind(array: Array) -> Any:
    if library_of(array) is None:
        return type(array)
    return type(array), array.dtype, tuple(array.shape), str(exact_device(array))


def _check_signature(
    owner: str, mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]
) -> tuple[str, Sizes]:
    """Libraries, devices, dtypes and shapes of cache and inputs; the library, and all sizes."""
    check_cacheable(mechanism)
    declared = _extending(mechanism)
    library = check_arrays(owner, declared, inputs)
    capacity = _check_cache(owner, mechanism, cache, inputs)
    known = {"c": capacity, "b": cache.length.shape[0]}
    sizes = declared.sizes(owner, _shapes(inputs), known)
    _check_buffers(owner, mechanism, cache, sizes, _call_dtype(inputs))
    return library, sizes


def bind_shapes(
    mechanism: Mechanism, arrays: Sequence[Array], named: Mapping[str, Array]
) -> tuple[Array, Sizes]:
    """An input to make buffers like, and the sizes that (some of) the inputs have."""
    owner, declared = str(mechanism), _extending(mechanism)
    inputs = _inputs_by_name(owner, declared, arrays, named, INIT_OPTIONS, complete=False)
    if not inputs:
        raise TypeError(f"{owner}: init_cache needs the inputs, for their shapes and dtype")
    check_arrays(owner, declared, inputs)
    token_inputs = {n: a for n, a in inputs.items() if "c" not in declared[n].letters}
    sizes = declared.sizes(owner, _shapes(token_inputs))
    like = next(a for a in inputs.values() if dtype_name(a) == _call_dtype(inputs))
    return like, sizes


def check_cotangent(owner: str, what: str, cotangent: Array, of: str, array: Array) -> None:
    """Raise an error for a cotangent that is not like the array it belongs to."""
    library = library_of(array)
    if library_of(cotangent) != library:
        raise TypeError(
            f"{owner}: {what} must be an array of {library}, as {of}; "
            f"found {type(cotangent).__name__}"
        )
    shape, dtype = tuple(array.shape), dtype_name(array)
    if tuple(cotangent.shape) != shape or dtype_name(cotangent) != dtype:
        raise ValueError(
            f"{owner}: {what} must have {of}'s shape {shape} and dtype {dtype}; "
            f"found {tuple(cotangent.shape)} and {dtype_name(cotangent)}"
        )


def zero_padding(
    inputs: Mapping[str, Array],
    declared: Inputs,
    q_valid: Array | None,
    k_valid: Array | None,
) -> dict[str, Array]:
    """The inputs (or their gradients) with padded tokens 0, so that NaN padding poisons nothing.

    q_valid (b, t) goes with the time axis of queries, k_valid (b, s) with that of keys.
    """
    zeroed = {}
    for name, array in inputs.items():
        pattern = declared[name]
        for letter, valid in (("t", q_valid), ("s", k_valid)):
            if valid is None or letter not in pattern.letters or pattern.is_pairwise:
                continue  # What stands at a hidden pair is masked with its score.
            shape = [1] * array.ndim
            shape[0], shape[pattern.letters.index(letter)] = valid.shape
            array = zero_where_not(namespace(valid).reshape(valid, tuple(shape)), array)
        zeroed[name] = array
    return zeroed


@cache
def _declared(mechanism: Mechanism) -> Inputs:
    return mechanism.inputs


@cache
def _extending(mechanism: Mechanism) -> Inputs:
    """The inputs of `extend`."""
    return mechanism.inputs.extending()


EXTEND_OPTIONS = ("lengths", "key_mask", "donate", "backend")
INIT_OPTIONS = ("capacity", "key_mask")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


NEGATIVE = "the cache's length is negative"
EXCEEDED = "capacity exceeded: the cache holds at most {} tokens, and the new ones do not fit"


class _ValueChecks:
    """Conditions on values: raised at once, or kept as a spoiled sequence when traced."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.spoiled: Array | None = None

    def require(self, good: Array, message: str) -> None:
        """`good` (b,) must hold for every sequence."""
        xp = namespace(good)
        if not is_traced(good):
            if not bool(xp.all(good)):
                self.require_known((bool(good[i, ...]) for i in range(good.shape[0])), message)
            return
        bad = xp.logical_not(good)
        self.spoiled = bad if self.spoiled is None else self.spoiled | bad

    def require_known(self, good: Iterable[bool], message: str) -> None:
        """The same of values that are at hand."""
        for i, is_good in enumerate(good):
            if not is_good:
                raise ValueError(f"{self.owner}: {message} (sequence {i} of the batch)")


def _inputs_by_name(
    owner: str,
    declared: Inputs,
    arrays: Sequence[Array],
    named: Mapping[str, Array],
    options: Sequence[str],
    *,
    complete: bool = True,
) -> dict[str, Array]:
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


def check_arrays(owner: str, declared: Inputs, inputs: Mapping[str, Array]) -> str:
    """One library, one device, dtypes that go together; returns the library."""
    libraries = {}
    for name, array in inputs.items():
        library = library_of(array)
        if library is None:
            raise TypeError(
                f"{owner}: {name} must be an array of NumPy, PyTorch, JAX, CuPy or another "
                f"array-API library; found {type(array).__name__}"
            )
        libraries[name] = library
    if len(set(libraries.values())) > 1:
        raise TypeError(f"{owner}: inputs of one library expected; found {libraries}")
    devices = {name: exact_device(array) for name, array in inputs.items()}
    placed = {name: device for name, device in devices.items() if device is not None}
    # Compared, not hashed: CuPy's devices have no hash.
    if any(device != next(iter(placed.values())) for device in placed.values()):
        found = {name: str(device) for name, device in placed.items()}
        raise ValueError(f"{owner}: inputs on one device expected; found {found}")
    dtypes = {name: dtype_name(array) for name, array in inputs.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise TypeError(
                f"{owner}: {name} must be of dtype float16, bfloat16, float32 or float64; "
                f"found {dtype}"
            )
    call_dtype = _call_dtype(inputs)
    for name, dtype in dtypes.items():
        wider_gate = call_dtype in HALF and dtype == "float32" and not declared[name].is_rows
        if dtype != call_dtype and not wider_gate:
            raise TypeError(
                f"{owner}: inputs of one dtype expected (beside half-precision queries, keys "
                f"and values, gates and the like may be float32); found {dtypes}"
            )
    return next(iter(libraries.values()))


def _call_dtype(inputs: Mapping[str, Array]) -> str:
    """The dtype of the output: v's, or the first input's where there is no v."""
    return dtype_name(inputs["v"] if "v" in inputs else next(iter(inputs.values())))


def _check_lengths(
    owner: str,
    lengths: Any,
    like: Array,
    b: int,
    longest: int,
    letter: str,
    checks: _ValueChecks,
) -> Array | None:
    if lengths is None:
        return None
    xp = namespace(like)
    within = f"lengths must lie between 0 and {letter} = {longest}"
    if isinstance(lengths, list | tuple):
        try:
            lengths = [_whole_number(n) for n in lengths]
        except TypeError:
            raise TypeError(f"{owner}: lengths must be whole numbers; found {lengths!r}") from None
        outside = [i for i, n in enumerate(lengths) if not 0 <= n <= longest]
        if outside:
            raise ValueError(f"{owner}: {within} (sequence {outside[0]} of the batch)")
        lengths = xp.asarray(lengths, dtype=xp.int32, **placement(like))
    lengths = _check_mask(owner, "lengths", lengths, like, (b,), INTEGERS, "(b)")
    assert lengths is not None
    # Compared before the cast, which would wrap a number beyond int32 around.
    checks.require((lengths >= 0) & (lengths <= longest), within)
    return cast(lengths, xp.int32)


def _whole_number(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _check_mask(
    owner: str,
    name: str,
    mask: Array | None,
    like: Array,
    shape: tuple[int, ...],
    dtypes: Sequence[str],
    pattern: str,
) -> Array | None:
    if mask is None:
        return None
    library = library_of(mask)
    if library != library_of(like):
        found = type(mask).__name__ if library is None else f"one of {library}"
        raise TypeError(
            f"{owner}: {name} must be an array of {library_of(like)}, as the inputs; found {found}"
        )
    if tuple(mask.shape) != shape:
        raise ShapeError(
            f"{owner}: {name} is declared {pattern}, that is {shape}; found {tuple(mask.shape)}"
        )
    if dtype_name(mask) not in dtypes:
        expected = "dtype bool" if dtypes == ("bool",) else "an integer dtype"
        raise TypeError(f"{owner}: {name} must have {expected}; found {dtype_name(mask)}")
    device, expected_device = exact_device(mask), exact_device(like)
    if None not in (device, expected_device) and device != expected_device:
        raise ValueError(f"{owner}: {name} is on {device}; the inputs are on {expected_device}")
    return mask


def _is_contiguous(segment_ids: Array) -> Array:
    """Per sequence, whether equal ids stand together: as many runs as there are ids."""
    xp = namespace(segment_ids)

    def runs(ids: Array) -> Array:
        return xp.sum(cast(ids[:, 1:] != ids[:, :-1], xp.int32), axis=1)

    return runs(segment_ids) == runs(xp.sort(segment_ids, axis=1))


@cache
def keeps_tokens(mechanism: Mechanism) -> bool:
    """Whether its cache has a place for each token, and not states only."""
    return any("c" in pattern.letters for _, pattern in mechanism.program.slots.values())


def check_has_states(mechanism: Mechanism) -> None:
    check_cacheable(mechanism)
    if keeps_tokens(mechanism):
        raise TypeError(
            f"{mechanism}: extend_vjp goes through states, and this cache keeps tokens; use vjp "
            f"of a full call, or the automatic differentiation of PyTorch or JAX"
        )


def check_cacheable(mechanism: Mechanism) -> None:
    if not mechanism.offers.causal:
        raise ValueError(f"{mechanism}: is not causal, so nothing of it can be cached")


def _check_cache(
    owner: str, mechanism: Mechanism, cache: Cache, inputs: Mapping[str, Array]
) -> int:
    """The capacity of the cache; 0 for a mechanism that remembers no tokens."""
    slots = mechanism.program.slots
    keys = set(slots)
    if keys and not cache.store:
        raise ValueError(f"{owner}: this cache was spent by extend(..., donate=True)")
    missing = sorted(keys - set(cache.store))
    surplus = sorted(set(cache.store) - keys - {KEY_MASK})
    if missing or surplus:
        raise ValueError(
            f"{owner}: the cache is of another mechanism: it holds {sorted(cache.store)}, "
            f"and {sorted(keys)} are needed"
        )
    like = next(iter(inputs.values()))
    device = exact_device(like)
    for name, array in {"length": cache.length, **cache.store}.items():
        if library_of(array) != library_of(like):
            raise TypeError(
                f"{owner}: the cache's {name!r} is an array of {library_of(array)}; the inputs are "
                f"of {library_of(like)}"
            )
        own_device = exact_device(array)
        if None not in (own_device, device) and own_device != device:
            raise ValueError(
                f"{owner}: the cache's {name!r} is on {own_device}; the inputs are on {device}"
            )
    if cache.length.ndim != 1 or dtype_name(cache.length) not in INTEGERS:
        raise TypeError(
            f"{owner}: the cache's 'length' must be integers of shape (b); found "
            f"{dtype_name(cache.length)} of shape {tuple(cache.length.shape)}"
        )
    for name, (_, pattern) in slots.items():
        buffer = cache.store[name]
        if "c" in pattern.letters and buffer.ndim == len(pattern.letters):
            return int(buffer.shape[pattern.letters.index("c")])
    return int(cache.store[KEY_MASK].shape[1]) if KEY_MASK in cache.store else 0


def _check_buffers(
    owner: str, mechanism: Mechanism, cache: Cache, sizes: Sizes, dtype: str
) -> None:
    if KEY_MASK in cache.store:
        kept, expected = cache.store[KEY_MASK], (sizes["b"], sizes["c"])
        if tuple(kept.shape) != expected or dtype_name(kept) != "bool":
            raise TypeError(
                f"{owner}: the cache's {KEY_MASK!r} must be bool of shape {expected}; found "
                f"{dtype_name(kept)} of shape {tuple(kept.shape)}"
            )
    for name, (slot, pattern) in mechanism.program.slots.items():
        shape, buffer = pattern.shape(sizes), cache.store[name]
        found = tuple(buffer.shape)
        if found != shape:
            raise ShapeError(
                f"{owner}: the cache's {name!r} has shape {found}; these inputs need {shape}"
            )
        needed = "float32" if slot.wide and dtype in HALF else dtype
        if dtype_name(buffer) != needed:
            raise TypeError(
                f"{owner}: the cache's {name!r} has dtype {dtype_name(buffer)}; "
                f"these inputs need {needed}"
            )


def _shapes(inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in inputs.items()}


def _names(**masks: Array | None) -> frozenset[str]:
    return frozenset(name for name, mask in masks.items() if mask is not None)


def spoil(out: Array, spoiled: Array | None) -> Array:
    """The output, NaN for sequences whose traced arguments were out of range.

    A product, so that the gradients of those sequences are NaN as well.
    """
    if spoiled is None:
        return out
    xp = namespace(out)
    bad = xp.reshape(spoiled, (-1,) + (1,) * (out.ndim - 1))
    return out * xp.where(bad, float("nan"), xp.ones_like(out))


def new_token_count(bound: BoundCall, cache: Cache) -> Array:
    """How many tokens (b,) each sequence grows by; a number where all caches hold as many.

    A spoiled sequence stays spoiled: it grows beyond the capacity, or where there is none, to a
    length below 0.
    """
    if bound.frame.held is not None:
        return bound.sizes["t"]
    xp = namespace(cache.length)
    count = bound.lengths
    if count is None:
        count = xp.full_like(cache.length, bound.sizes["t"])
    if bound.spoiled is None:
        return count
    capacity = bound.sizes["c"]
    spoiled = capacity + 1 if capacity else -1
    return xp.where(bound.spoiled, spoiled - cache.length, count)
