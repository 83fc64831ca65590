"""The preparation that calls of one signature share: the checks and the plan.

The first call of a signature (`signature.py`) is prepared. Later calls only check the entries of
their arrays (`arguments.py`, `containment.py`), and run the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

from precondattn.algebra.call import Call
from precondattn.algebra.declaration import HEADS, Inputs, Pattern, ShapeError, Sizes
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
from precondattn.arrays import (
    device_of,
    is_captured,
    is_traced,
    library_of,
    transforms_of,
    wants_gradient,
)
from precondattn.backend import Request, UnsupportedError
from precondattn.cache import KEY_MASK
from precondattn.cache.kinds import STATE
from precondattn.dispatch.discovery import REFERENCE, allowed_backends
from precondattn.dispatch.empty import is_empty
from precondattn.dispatch.plan import CallPlan, make_plan
from precondattn.execution.array_checks import call_dtype, check_arrays, check_stored, values_of
from precondattn.execution.cache_checks import (
    check_buffers,
    check_cache,
    check_cacheable,
    check_is_cache,
)
from precondattn.execution.input_names import (
    CALL_OPTIONS,
    EXTEND_OPTIONS,
    EXTEND_VJP_OPTIONS,
    declared_inputs,
    inputs_by_name,
    shapes_of,
)
from precondattn.execution.pair_masks import check_takes_masks
from precondattn.frame import FULL, Layout
from precondattn.frameworks import of
from precondattn.frameworks.framework import Framework
from precondattn.frameworks.types import Array, Arrays, DType, Shape
from precondattn.limits import KEPT, KEPT_SIGNATURES


class PreparedCall(NamedTuple):
    """The checks and the plan of a call."""

    names: tuple[str, ...]
    numbers: tuple[int, ...] | None
    """The index of each input among the arguments; None if these are in the declared order."""
    sizes: Sizes
    is_cast: bool
    examined: Mapping[str, Pattern]
    """The inputs that `containment.py` examines for NaN and infinity."""
    framework: Framework
    dtype: DType
    """The dtype of the output, as the inputs have it: not every namespace has bfloat16."""
    request: Request
    plan: CallPlan
    is_direct: bool
    """Whether the methods of backends are called directly: nothing differentiates, traces,
    transforms or counts the call."""
    are_on_host: bool
    """Whether the entries of arrays can be read without waiting for a device."""
    is_recorded: bool
    """Whether PyTorch's autograd may differentiate the call, and nothing else observes it."""
    layout: Layout | None
    """The layout of a full call without masks; None if sizes are symbolic."""
    allowed: tuple[str, ...] | None
    """The names of the allowed backends, in order of preference; None for all."""


prepared_calls: dict[Hashable | None, PreparedCall] = {}


def prepared(call: Call, signature: Hashable | None) -> PreparedCall:
    """The preparation of a call whose signature is new or None."""
    ready = _planned(call, has_signature=signature is not None)
    if signature is not None:
        if len(prepared_calls) >= KEPT_SIGNATURES:
            prepared_calls.clear()
        prepared_calls[signature] = ready
    return ready


def _planned(call: Call, *, has_signature: bool) -> PreparedCall:
    mechanism, owner, cache = call.mechanism, str(call.mechanism), call.cache
    is_full = call.verb in ("forward", "vjp")
    if not is_full:
        check_is_cache(owner, cache)
    declared = declared_inputs(mechanism)
    declared = declared if is_full else declared.extending()
    options: tuple[str, ...] = CALL_OPTIONS if is_full else EXTEND_OPTIONS
    options = EXTEND_VJP_OPTIONS if call.verb == "extend_vjp" else options
    inputs = inputs_by_name(owner, declared, call.arrays, call.named, options)
    inputs, dtypes_before = of(next(iter(inputs.values()), None)).cast_inputs(declared, inputs)
    if not is_full:
        check_cacheable(mechanism)
    library = check_arrays(owner, declared, inputs)
    given_masks = {name: mask for name, mask in call.masks.items() if mask is not None}
    for name, mask in given_masks.items():
        if library_of(mask) is not None:  # `bind` checks what else a mask may be.
            check_stored(f"{owner}: {name}", mask)
    shapes, like = shapes_of(inputs), next(iter(inputs.values()))
    framework = of(like)
    # Backends get `cu_seqlens` as `segment_ids`.
    masks = {"segment_ids" if name == "cu_seqlens" else name for name in given_masks}
    check_takes_masks(mechanism, frozenset(masks))
    others = [mask for mask in given_masks.values() if library_of(mask) == library]
    if is_full:
        sizes = _sizes(mechanism, declared, shapes)
        t, s = times(sizes)
        if t != s and not mechanism.offers.causal:
            for name in ("lengths", "segment_ids", "cu_seqlens"):
                if call.masks[name] is not None:
                    raise ValueError(
                        f"{mechanism}: {name} of a non-causal call needs as many queries as keys; "
                        f"found t = {t} and s = {s}; use key_mask"
                    )
        program = mechanism.program
        for leaf_call, axes in zip(program.calls, program.axes, strict=True):
            own = {x: axis.size(sizes) for x, axis in axes.items() if axis.letter in sizes}
            leaf_call.leaf.check_call(own, frozenset(masks))  # Sizes by the leaf's own letters.
    else:
        capacity = check_cache(owner, mechanism, cache, inputs)
        known = {"c": capacity, "b": cache.length.shape[0]}
        sizes = _sizes(mechanism, declared, shapes, known)
        hint = " (autocast casts them; create the cache by init_cache under the same autocast)"
        hint = "" if dtypes_before is None else hint
        check_buffers(owner, mechanism, cache, sizes, call_dtype(inputs), hint)
        masks |= cache.store.keys() & {KEY_MASK}
        if call.verb == "extend":  # It may be differentiated with respect to cached arrays too.
            others.extend(cache.store.values())
    # A single token is followed by no token that its NaN could reach.
    can_spread = (is_full or sizes["t"] != 1) and not is_empty(shapes.values())
    patterns = examined(mechanism, is_packed="segment_ids" in masks) if can_spread else {}
    request = _request(call.verb, library, inputs, frozenset(masks), others)
    allowed = allowed_backends(call.backend)
    if framework.is_ordinary(like):
        allowed = _only_reference(mechanism, inputs, allowed)
    positional = list(declared_inputs(mechanism))[: len(call.arrays)]
    numbers = {name: i for i, name in enumerate((*positional, *call.named))}
    order = tuple([numbers[name] for name in inputs])
    return PreparedCall(
        names=tuple(inputs),
        numbers=None if order == tuple(range(len(order))) else order,
        sizes=sizes,
        is_cast=dtypes_before is not None,
        examined=patterns,
        framework=framework,
        dtype=values_of(inputs).dtype,
        request=request,
        plan=make_plan(mechanism, request, sizes.get("c"), allowed),
        is_direct=has_signature and not request.differentiated,
        are_on_host=has_signature and request.device == "cpu" and framework.reads_at_once,
        is_recorded=has_signature and request.differentiated,
        layout=None if request.is_symbolic else Layout(FULL, *times(sizes)),
        allowed=allowed,
    )


@lru_cache(maxsize=KEPT)
def examined(mechanism: Piece, *, is_packed: bool) -> dict[str, Pattern]:
    """The inputs whose NaN or infinity could reach an output that does not depend on them.

    With segments these are all that have tokens. In a causal call with a state or a triangular
    system they are keys, directions, gates and β; softmax alone masks scores by −∞, not by 0 · s.
    """
    leaves = relating_leaves(mechanism)
    patterns = {
        name: pattern
        for name, pattern in mechanism.inputs.items()
        if pattern.time_axis is not None and not pattern.is_pairwise
    }
    if is_packed:
        return patterns if leaves else {}
    if not mechanism.offers.causal or all(leaf.hides_later_keys for leaf in leaves):
        return {}
    return {n: p for n, p in patterns.items() if "s" in p.letters and "e" not in p.letters}


def relating_leaves(mechanism: Piece) -> list[LeafProtocol]:
    """The leaves that relate tokens to other tokens."""
    return [leaf for leaf in mechanism.program.leaves if leaf.relates_tokens]


def _only_reference(
    mechanism: Piece, inputs: Arrays, allowed: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The only backend of calls that are recorded as ordinary operators; others are an error."""
    owner = str(mechanism)  # PyTorch 2.13 can not export a scan with a gradient to ONNX.
    is_scanned = any(slot.kind.rows == STATE for slot, _ in mechanism.program.slots.values())
    if is_scanned and wants_gradient(*inputs.values()):
        raise UnsupportedError(
            f"{owner}: within ordinary_operators() a recurrence has no gradient, and an input "
            f"requires one; call requires_grad_(False) on the module"
        )

    if allowed is not None and REFERENCE.name not in allowed:
        raise UnsupportedError(
            f"{owner}: within ordinary_operators() a call is recorded as the reference computes "
            f"it, so no other backend can be named; found {', '.join(allowed)}"
        )
    return (REFERENCE.name,)


def prepared_part(
    mechanism: Piece, whole: PreparedCall, inputs: Arrays, sizes: Sizes, masks: frozenset[str]
) -> PreparedCall:
    """The preparation of a call on some of the tokens of another call."""
    shapes = tuple(shapes_of(inputs).items())
    request = dataclasses.replace(whole.request, shapes=shapes, masks=masks)
    plan = make_plan(mechanism, request, allowed=whole.allowed)
    return whole._replace(sizes=sizes, request=request, plan=plan, layout=None)


def times(sizes: Sizes) -> tuple[int, int]:
    """The numbers of queries and of keys; the same number if only one of them is given."""
    return sizes.get("t", sizes.get("s", 1)), sizes.get("s", sizes.get("t", 1))


def _sizes(
    mechanism: Piece, declared: Inputs, shapes: Mapping[str, Shape], known: Sizes | None = None
) -> Sizes:
    """The sizes of all axes; raises an error if a causal mechanism has more queries than keys."""
    try:
        sizes = declared.sizes(str(mechanism), shapes, known)
        t, s = times(sizes)
        if t > s and s != 0 and mechanism.offers.causal:
            raise ShapeError(
                f"{mechanism}: is causal, so there must not be more queries than keys; "
                f"found t = {t} and s = {s}"
            )
    except ShapeError as error:
        hint = _transposed(declared, shapes, known or {}, causal=mechanism.offers.causal)
        raise ShapeError(f"{error}{hint}") from None
    return sizes


def _transposed(
    declared: Inputs, shapes: Mapping[str, Shape], known: Sizes, *, causal: bool
) -> str:
    """A hint for a ShapeError, if the shapes fit the layout (b, h, t, d) of other libraries."""
    rows = {name for name, shape in shapes.items() if len(shape) > 3}
    for exchanged in (shapes.keys(), rows):
        others = {
            name: (shape[0], shape[2], shape[1], *shape[3:])
            if name in exchanged and _has_both_axes(declared[name], shape)
            else shape
            for name, shape in shapes.items()
        }
        try:
            sizes = declared.sizes("", others, known)
        except ShapeError:
            continue
        tokens = sizes.get("t", sizes.get("s", 0))
        keys, heads = sizes.get("s", tokens), [sizes[x] for x in HEADS if x in sizes]
        if tokens > max(heads, default=tokens) and (tokens <= keys or not causal):
            names = ", ".join(name for name in shapes if others[name] != shapes[name])
            return (
                f"; these shapes fit with the axes 1 and 2 of {names} exchanged: here the layout "
                f"is (b, t, h, d), and not (b, h, t, d)"
            )
    return ""


def _has_both_axes(pattern: Pattern, shape: Shape) -> bool:
    """Whether tokens and heads are axes 1 and 2 of an array."""
    letters = pattern.letters
    return len(shape) == len(letters) > 2 and letters[1] in "ts" and letters[2] in HEADS


def _request(
    verb: str, library: str, inputs: Arrays, masks: frozenset[str], others: list[Array]
) -> Request:
    """The request for backends; `others` are the masks and the cached arrays."""
    shapes, arrays = tuple(shapes_of(inputs).items()), (*inputs.values(), *others)
    differentiated, transforms = wants_gradient(*arrays), transforms_of(*arrays)
    # A call that a CUDA graph captures has the plan of other calls: it is run.
    traced = library == "torch" and is_traced(arrays[0]) and not transforms
    traced = traced and not is_captured(arrays[0])
    has_symbols = any(not isinstance(size, int) for _, shape in shapes for size in shape)
    return Request(
        verb="vjp" if verb == "forward" and differentiated else verb,
        library=library,
        device=device_of(arrays[0]),
        dtype=call_dtype(inputs),
        shapes=shapes,
        masks=masks,
        differentiated=differentiated,
        transformed="grad" in transforms,
        mapped="vmap" in transforms,
        traced=traced,
        is_symbolic=traced and has_symbols,
    )
