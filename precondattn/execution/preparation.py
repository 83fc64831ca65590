"""What all calls of one signature share: they pass the same checks, and have the same plan.

A signature (`signature.py`) is prepared by its first call. What is left for every call are the
entries of its arrays (`arguments.py`, `containment.py`), and the work itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from precondattn.algebra.declaration import Pattern, ShapeError, Sizes
from precondattn.arrays import (
    Array,
    Arrays,
    device_of,
    is_traced,
    library_of,
    transforms_of,
    wants_gradient,
)
from precondattn.backend import Request
from precondattn.cache import KEY_MASK, Cache
from precondattn.dispatch.discovery import Discovered, allowed_backends, discover
from precondattn.dispatch.empty import is_empty
from precondattn.dispatch.plan import CallPlan, make_plan
from precondattn.execution.array_checks import call_dtype, check_arrays, check_masks_stored
from precondattn.execution.cache_checks import (
    check_buffers,
    check_cache,
    check_cacheable,
    keeps_tokens,
)
from precondattn.execution.containment import examined
from precondattn.execution.input_names import (
    CALL_OPTIONS,
    EXTEND_OPTIONS,
    declared_inputs,
    extending_inputs,
    inputs_by_name,
    shapes_of,
)
from precondattn.execution.signature import GivenCall
from precondattn.execution.torch import autocast
from precondattn.execution.torch.autocast import cast_inputs, hint
from precondattn.frame import FULL, Layout
from precondattn.limits import KEPT_SIGNATURES

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.given import Given


class PreparedCall(NamedTuple):
    """The checks and the plan of a call."""

    names: tuple[str, ...]
    """The inputs, in the order of the declaration."""
    numbers: tuple[int, ...] | None
    """The number of each among the arguments; None where these have the same order."""
    sizes: Sizes
    library: str
    dtype: str
    is_cast: bool
    """Whether autocast casts the inputs."""
    examined: Mapping[str, Pattern]
    """The inputs whose NaN or infinities could reach other outputs."""
    request: Request
    plan: CallPlan
    is_direct: bool
    """Whether the methods of backends are called directly: nothing differentiates, traces,
    transforms or counts the call."""
    are_on_host: bool
    """Whether the entries of arrays can be read without waiting for a device."""
    is_recorded: bool
    """Whether PyTorch's autograd may differentiate the call, and nothing else looks at it."""
    layout: Layout | None
    """That of a full call without masks; None where sizes are symbols."""
    allowed: tuple[str, ...] | None
    """The backends allowed, in order of preference; None for all."""
    discovered: Discovered


_prepared: dict[Hashable | None, PreparedCall] = {}

READ_AT_ONCE = ("numpy", "torch")
"""Libraries whose arrays on the CPU are read without waiting."""

SAME_MASK = {"cu_seqlens": "segment_ids"}
"""Masks that are another way to write one that backends know."""


def prepared(call: GivenCall, signature: Hashable | None) -> PreparedCall:
    """The preparation of a call, found by its signature or made; it is made where that is None.

    Raises
    ------
    TypeError, ValueError
        for a bad argument, unless only the entries of an array are bad.
    """
    known = _prepared.get(signature)  # Read once: another thread may clear the dict.
    if known is not None:
        return known
    is_full = call.verb in ("forward", "vjp")
    checked = _checked_call(call) if is_full else _checked_extension(call)
    known = _planned(call, checked, has_signature=signature is not None)
    if signature is not None:
        if len(_prepared) >= KEPT_SIGNATURES:
            _prepared.clear()
        _prepared[signature] = known
    return known


class _Checked(NamedTuple):
    """The inputs of a call in the declared order, as autocast casts them, and what they show."""

    inputs: Arrays
    library: str
    sizes: Sizes
    masks: set[str]
    """The names of the masks that matter to backends."""
    others: tuple[Array, ...]
    """The cached arrays, which a derivative may be taken of too."""
    examined: Mapping[str, Pattern]


def _checked_call(call: GivenCall) -> _Checked:
    """A full call."""
    mechanism, owner = call.mechanism, str(call.mechanism)
    declared = declared_inputs(mechanism)
    inputs = inputs_by_name(owner, declared, call.arrays, call.named, CALL_OPTIONS)
    inputs, _ = cast_inputs(declared, inputs)
    library = check_arrays(owner, declared, inputs)
    check_masks_stored(owner, call.masks)
    sizes = declared.sizes(owner, shapes_of(inputs))
    _check_times(mechanism, sizes, call.masks)
    masks = {SAME_MASK.get(n, n) for n, mask in call.masks.items() if mask is not None}
    _check_leaves(mechanism, sizes, frozenset(masks))
    patterns: Mapping[str, Pattern] = {}
    if not is_empty(shapes_of(inputs).values()):
        patterns = examined(mechanism, is_packed="segment_ids" in masks)
    return _Checked(inputs, library, sizes, masks, (), patterns)


def _checked_extension(call: GivenCall) -> _Checked:
    """An extension of a cache."""
    mechanism, owner, cache = call.mechanism, str(call.mechanism), call.cache
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{owner}: the first argument of extend must be a Cache from init_cache; "
            f"found {type(cache).__name__}"
        )
    declared = extending_inputs(mechanism)
    inputs = inputs_by_name(owner, declared, call.arrays, call.named, EXTEND_OPTIONS)
    inputs, _ = cast_inputs(declared, inputs)
    check_cacheable(mechanism)
    library = check_arrays(owner, declared, inputs)
    check_masks_stored(owner, call.masks)
    capacity = check_cache(owner, mechanism, cache, inputs)
    known = {"c": capacity, "b": cache.length.shape[0]}
    sizes = declared.sizes(owner, shapes_of(inputs), known)
    like = next(iter(inputs.values()))
    check_buffers(owner, mechanism, cache, sizes, call_dtype(inputs), hint(like))
    masks = _masks_of_extension(mechanism, cache, call.masks)
    past = tuple(cache.store.values()) if call.verb == "extend" else ()
    patterns: Mapping[
        str, Pattern
    ] = {}  # After one token there is no later one, which its NaN could reach.
    if sizes["t"] != 1 and not is_empty(shapes_of(inputs).values()):
        patterns = examined(mechanism, is_packed="segment_ids" in masks)
    return _Checked(inputs, library, sizes, masks, past, patterns)


def _planned(call: GivenCall, checked: _Checked, *, has_signature: bool) -> PreparedCall:
    mechanism, inputs, sizes = call.mechanism, checked.inputs, checked.sizes
    masks = [mask for mask in call.masks.values() if mask is not None]
    others = (*checked.others, *[m for m in masks if library_of(m) == checked.library])
    request = _request(call.verb, checked.library, inputs, checked.masks, others)
    allowed, discovered = allowed_backends(call.backend), discover()
    positional = list(declared_inputs(mechanism))[: len(call.arrays)]
    numbers = {name: i for i, name in enumerate((*positional, *call.named))}
    order = tuple([numbers[name] for name in inputs])
    return PreparedCall(
        names=tuple(inputs),
        numbers=None if order == tuple(range(len(order))) else order,
        sizes=sizes,
        library=checked.library,
        dtype=request.dtype,
        is_cast=autocast.target(next(iter(inputs.values()))) is not None,
        examined=checked.examined,
        request=request,
        plan=make_plan(mechanism, request, sizes.get("c"), allowed),
        is_direct=has_signature and not request.differentiated,
        are_on_host=has_signature and request.device == "cpu" and request.library in READ_AT_ONCE,
        is_recorded=has_signature and request.differentiated and checked.library == "torch",
        layout=None if request.is_symbolic else Layout(FULL, *times(sizes)),
        allowed=allowed,
        discovered=discovered,
    )


def prepared_part(
    mechanism: Piece, whole: PreparedCall, inputs: Arrays, sizes: Sizes, masks: frozenset[str]
) -> PreparedCall:
    """The preparation of a call on parts of the tokens of another."""
    shapes = tuple(shapes_of(inputs).items())
    request = dataclasses.replace(whole.request, shapes=shapes, masks=masks)
    plan = make_plan(mechanism, request, allowed=whole.allowed)
    return whole._replace(sizes=sizes, request=request, plan=plan, layout=None)


def times(sizes: Sizes) -> tuple[int, int]:
    """The numbers of queries and of keys; the same where there is one of them."""
    return sizes.get("t", sizes.get("s", 1)), sizes.get("s", sizes.get("t", 1))


def _check_times(mechanism: Piece, sizes: Sizes, masks: Mapping[str, Given]) -> None:
    """Raise unless the numbers of queries and keys fit the mechanism and the masks."""
    t, s = times(sizes)
    if t > s and s != 0 and mechanism.offers.causal:
        raise ShapeError(
            f"{mechanism}: is causal, so there must not be more queries than keys; "
            f"found t = {t} and s = {s}"
        )
    if t != s and not mechanism.offers.causal:
        for name in ("lengths", "segment_ids", "cu_seqlens"):
            if masks[name] is not None:
                raise ValueError(
                    f"{mechanism}: {name} of a non-causal call needs as many queries as keys; "
                    f"found t = {t} and s = {s}; use key_mask"
                )


def _check_leaves(mechanism: Piece, sizes: Sizes, masks: frozenset[str]) -> None:
    """Raise for sizes or masks that a leaf refuses, each in the leaf's own letters."""
    program = mechanism.program
    for call, axes in zip(program.calls, program.axes, strict=True):
        own = {letter: axis.size(sizes) for letter, axis in axes.items() if axis.letter in sizes}
        call.leaf.check_call(own, masks)


def _masks_of_extension(mechanism: Piece, cache: Cache, masks: Mapping[str, Given]) -> set[str]:
    """The masks that matter: masked keys are not written to a state, but are to a row of tokens."""
    has_key_mask = masks[KEY_MASK] is not None
    if keeps_tokens(mechanism):
        has_key_mask = KEY_MASK in cache.store
    given = {n for n in ("lengths", "segment_ids") if masks.get(n) is not None}
    return given | ({KEY_MASK} if has_key_mask else set())


def _request(
    verb: str,
    library: str,
    inputs: Arrays,
    masks: set[str],
    others: tuple[Array, ...],
) -> Request:
    """The description for backends; `others` are the masks and the cached arrays."""
    first = next(iter(inputs.values()))
    arrays = (*inputs.values(), *others)
    differentiated, transforms = wants_gradient(*arrays), transforms_of(*arrays)
    shapes = tuple(shapes_of(inputs).items())
    is_torch_traced = library == "torch" and is_traced(first)
    return Request(
        verb="vjp" if verb == "forward" and differentiated else verb,
        library=library,
        device=device_of(first),
        dtype=call_dtype(inputs),
        shapes=shapes,
        masks=frozenset(masks),
        differentiated=differentiated,
        transformed="grad" in transforms,
        mapped="vmap" in transforms,
        traced=is_torch_traced and not transforms,
        is_symbolic=is_torch_traced
        and not transforms
        and any(not isinstance(size, int) for _, shape in shapes for size in shape),
    )
