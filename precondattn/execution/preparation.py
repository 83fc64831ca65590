"""What all calls of one signature share: they pass the same checks, and have the same plan.

A signature (`signature.py`) is prepared by its first call. What is left for every call are the
entries of its arrays (`arguments.py`, `containment.py`), and the work itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
from precondattn.dispatch.plan import Plan, make_plan
from precondattn.execution.array_checks import call_dtype, check_arrays
from precondattn.execution.autocast import cast_inputs, hint
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
from precondattn.limits import KEPT_SIGNATURES

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.algebra.verbs import BackendNames


class Prepared(NamedTuple):
    """The checks and the plan of a call."""

    order: tuple[tuple[str, int], ...]
    """(name of an input, its number among the arguments), in the order of the declaration."""
    sizes: Sizes
    library: str
    dtype: str
    is_cast: bool
    """Whether autocast casts the inputs."""
    examined: Mapping[str, Pattern]
    """The inputs whose NaN or infinities could reach other outputs."""
    request: Request
    plan: Plan
    is_direct: bool
    """Whether the methods of backends are called directly: nothing differentiates, traces,
    transforms or counts the call."""
    allowed: tuple[str, ...] | None
    """The backends allowed, in order of preference; None for all."""
    discovered: Discovered


_prepared: dict[Hashable, Prepared] = {}


def prepared(
    signature: Hashable | None,
    verb: str,
    mechanism: Mechanism,
    arrays: tuple[Array, ...],
    named: Arrays,
    masks: Mapping[str, Any],
    backend: BackendNames,
    cache: Cache | None = None,
) -> Prepared:
    """The preparation of a call, found by its signature or made; it is made where that is None."""
    known = _prepared.get(signature)  # Read once: another thread may clear the dict.
    if known is not None and known.discovered is discover():
        return known
    known = _prepare(signature, verb, mechanism, arrays, named, masks, backend, cache)
    if signature is not None:
        if len(_prepared) >= KEPT_SIGNATURES:
            _prepared.clear()
        _prepared[signature] = known
    return known


def _prepare(
    signature: Hashable | None,
    verb: str,
    mechanism: Mechanism,
    arrays: tuple[Array, ...],
    named: Arrays,
    masks: Mapping[str, Any],
    backend: BackendNames,
    cache: Cache | None,
) -> Prepared:
    owner, is_full = str(mechanism), verb in ("forward", "vjp")
    if not is_full and not isinstance(cache, Cache):
        raise TypeError(
            f"{owner}: the first argument of extend must be a Cache from init_cache; "
            f"found {type(cache).__name__}"
        )
    declared = declared_inputs(mechanism) if is_full else extending_inputs(mechanism)
    options = CALL_OPTIONS if is_full else EXTEND_OPTIONS
    inputs = inputs_by_name(owner, declared, arrays, named, options)
    numbers = {name: i for i, name in enumerate((*list(declared)[: len(arrays)], *named))}
    inputs, before = cast_inputs(declared, inputs)
    discovered = discover()
    past: tuple[Array, ...] = ()
    if is_full:
        library = check_arrays(owner, declared, inputs)
        sizes = declared.sizes(owner, shapes_of(inputs))
        _check_times(mechanism, sizes, masks)
        # `cu_seqlens` is another way to write `segment_ids`.
        named_masks = {"cu_seqlens": "segment_ids"}
        given = {named_masks.get(n, n) for n, mask in masks.items() if mask is not None}
        patterns = examined(mechanism, is_packed="segment_ids" in given)
    else:
        library, sizes = _check_extension(mechanism, cache, inputs)
        assert cache is not None
        past = tuple(cache.store.values()) if verb == "extend" else ()
        given = _masks_of_extension(mechanism, cache, masks)
        # After one token there is no later one.
        patterns = {} if sizes["t"] == 1 else examined(mechanism, is_packed=False)
    others = (m for m in masks.values() if m is not None and library_of(m) == library)
    request = _request(verb, library, inputs, given, (*past, *others))
    allowed = allowed_backends(backend)
    plan = make_plan(mechanism, request, sizes.get("c"), allowed)
    return Prepared(
        tuple((name, numbers[name]) for name in inputs),
        sizes,
        library,
        request.dtype,
        before is not None,
        patterns,
        request,
        plan,
        signature is not None and not request.differentiated,
        allowed,
        discovered,
    )


def prepared_part(
    mechanism: Mechanism, whole: Prepared, inputs: Arrays, sizes: Sizes, masks: frozenset[str]
) -> Prepared:
    """The preparation of a call on parts of the tokens of another."""
    shapes = tuple(shapes_of(inputs).items())
    request = dataclasses.replace(whole.request, shapes=shapes, masks=masks)
    plan = make_plan(mechanism, request, allowed=whole.allowed)
    return whole._replace(sizes=sizes, request=request, plan=plan)


def _check_times(mechanism: Mechanism, sizes: Sizes, masks: Mapping[str, Any]) -> None:
    """Raise unless the numbers of queries and keys fit the mechanism and the masks."""
    t, s = sizes.get("t", sizes.get("s", 1)), sizes.get("s", sizes.get("t", 1))
    if t > s and mechanism.offers.causal:
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


def _check_extension(
    mechanism: Mechanism, cache: Any, inputs: Mapping[str, Array]
) -> tuple[str, Sizes]:
    """Check libraries, devices, dtypes and shapes of cache and inputs.

    Returns the library, and the size of every letter.
    """
    owner, declared = str(mechanism), extending_inputs(mechanism)
    check_cacheable(mechanism)
    library = check_arrays(owner, declared, inputs)
    capacity = check_cache(owner, mechanism, cache, inputs)
    known = {"c": capacity, "b": cache.length.shape[0]}
    sizes = declared.sizes(owner, shapes_of(inputs), known)
    like = next(iter(inputs.values()))
    check_buffers(owner, mechanism, cache, sizes, call_dtype(inputs), hint(like))
    return library, sizes


def _masks_of_extension(mechanism: Mechanism, cache: Cache, masks: Mapping[str, Any]) -> set[str]:
    """The masks that matter: masked keys are not written to a state, but are to a row of tokens."""
    has_key_mask = masks[KEY_MASK] is not None
    if keeps_tokens(mechanism):
        has_key_mask = KEY_MASK in cache.store
    given = {"lengths"} if masks["lengths"] is not None else set()
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
    sizes = (size for _, shape in shapes for size in shape)
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
        and any(not isinstance(size, int) for size in sizes),
    )
