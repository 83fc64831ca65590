"""The public methods of a mechanism: bind the arguments, make a plan, and run it.

`algebra/verbs.py` has their signatures and documentation, and passes every call to this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from precondattn import frameworks
from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
from precondattn.arrays import Array, Arrays, is_distributed, namespace
from precondattn.cache import Cache
from precondattn.cache.kinds import empty_if_donated
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.explanation import Explanation
from precondattn.execution import checks, evaluation, packed, packed_extension, windows
from precondattn.execution.arguments import BoundCall, bind, bind_extension
from precondattn.execution.array_checks import check_cotangent
from precondattn.execution.cache_checks import check_has_states
from precondattn.execution.containment import contained, contained_after
from precondattn.execution.keeping import Keeping
from precondattn.execution.masks import zero_padding
from precondattn.execution.pair_masks import ATTN_MASK, PAIR_MASKS, PREFIX, has_no
from precondattn.execution.signature import GivenCall, signature_of
from precondattn.execution.unchanged import held
from precondattn.given import Given

Masks = Mapping[str, Any]
"""The masks by name, each an array or None, for `bind` or `bind_extension`."""


def call(
    mechanism: Piece, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames, masks: Masks
) -> Array:
    """The output of a full call."""
    given = GivenCall("forward", mechanism, arrays, named, masks, backend)
    signature = signature_of(given)
    if signature is None and _is_distributed(given):
        return frameworks.distributed.call(given)
    bound = bind(given, signature)
    if checks.contexts:
        _check_values(mechanism, bound, is_full=True)
    if bound.prepared.examined:
        bound = contained(mechanism, bound)
    check_division = bound.prepared.framework.check_division
    if check_division is not None:
        check_division(mechanism, bound)
    divided = None if bound.segments is None else packed.divided(mechanism, bound)
    return _evaluated(bound) if divided is None else packed.forward(divided, _evaluated)


def _evaluated(bound: BoundCall) -> Array:
    if bound.dtypes_before is None:
        return evaluation.forward(bound)
    return frameworks.under_autocast.forward(bound)


def vjp(
    mechanism: Piece, arrays: tuple[Array, ...], named: Arrays, backend: BackendNames, masks: Masks
) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output of a full call, and its pullback."""
    given = GivenCall("vjp", mechanism, arrays, named, masks, backend)
    signature = signature_of(given)
    if signature is None and _is_distributed(given):
        of_parts: tuple[Array, Callable[[Array], Arrays]] = frameworks.distributed.vjp(given)
        return of_parts
    given, check_arguments = held(given)
    bound = bind(given, signature)
    if checks.contexts:
        _check_values(mechanism, bound, is_full=True)
    framework = bound.prepared.framework
    if framework.check_division is not None:
        framework.check_division(mechanism)
    bound = contained(mechanism, bound)
    divided = packed.divided(mechanism, bound)
    with framework.without_autocast(next(iter(bound.inputs.values()))):
        out, pull = evaluation.vjp(bound) if divided is None else packed.vjp(divided)

    def pullback(cotangent: Array) -> Arrays:
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        check_arguments()
        with framework.without_autocast(cotangent):
            gradients = pull(cotangent)
        return _of_valid(gradients, mechanism, bound, bound.frame.k_valid)

    return out, pullback


def _of_valid(gradients: Arrays, mechanism: Piece, bound: BoundCall, k_valid: Array) -> Arrays:
    """The gradients, with 0 at padding and in rows with a NaN or infinity."""
    gradients = zero_padding(gradients, mechanism.inputs, bound.frame.q_valid, k_valid)
    return gradients if bound.non_finite is None else bound.non_finite.cleaned(gradients)


def gradients_from_lse(
    mechanism: Piece,
    inputs: Arrays,
    backend: BackendNames,
    masks: Masks,
    out: Array,
    lse: Array,
    cotangent: Array,
) -> Arrays | None:
    """The gradients of softmax attention from its output and log-sum-exp, without a forward pass.

    None if the backend needs a forward pass.
    """
    given = GivenCall("vjp", mechanism, (), inputs, masks, backend)
    bound = contained(mechanism, bind(given, signature_of(given)))
    if packed.divided(mechanism, bound) is not None:
        return None
    with bound.prepared.framework.without_autocast(cotangent):
        gradients = evaluation.gradients_from_lse(bound, out, lse, cotangent)
    k_valid = bound.frame.k_valid
    return None if gradients is None else _of_valid(gradients, mechanism, bound, k_valid)


def extend(
    mechanism: Piece,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    masks: Masks,
    *,
    donate: bool,
    keeping: Keeping | None = None,
) -> tuple[Array, Cache]:
    """The output for new tokens, and the extended cache."""
    if keeping is not None and not keeping.check(str(mechanism), cache):
        keeping = None  # A cache without states can always be cropped.
    given = GivenCall("extend", mechanism, arrays, named, masks, backend, cache)
    signature = signature_of(given)
    if signature is None and _is_distributed(given):
        of_parts: tuple[Array, Cache] = frameworks.distributed.extend(given, donate=donate)
        return of_parts
    if windows.is_window(cache):
        for name, lacks in ((PREFIX, "no prefix"), (ATTN_MASK, "not all columns of an attn_mask")):
            if masks.get(name) is not None:
                raise ValueError(
                    f"{mechanism}: the cache of a window keeps the last tokens only, and {lacks}; "
                    f"use full calls, or a mechanism without a window"
                )
        plain, old = windows.ordinary(given), cache._replace(store=dict(cache.store))
        try:
            out, longer = extend(mechanism, plain, arrays, named, backend, masks, donate=donate)
        finally:
            empty_if_donated(cache, plain)
        return out, windows.moved_on(mechanism, old, longer, donate=donate)
    bound = bind_extension(given, signature)
    if keeping is not None and keeping.needs_lengths(bound, cache.length):
        b, t = (bound.sizes[letter] for letter in "bt")
        given = given._replace(masks={**masks, "lengths": [t] * b})
        bound = bind_extension(given, signature_of(given))
    if checks.contexts:
        _check_values(mechanism, bound, is_full=False)
    ready = bound.prepared
    if ready.framework.check_division is not None:
        ready.framework.check_division(mechanism)
    if ready.examined or bound.frame.k_segment is not None:
        bound, cache = contained_after(mechanism, bound, cache)
    if donate and ready.request.library == "torch" and ready.request.differentiated:
        raise ValueError(
            f"{mechanism}: donate=True writes in place, so the call can not be differentiated; "
            f"call it under torch.no_grad(), or without donate"
        )
    if bound.dtypes_before is None:
        return evaluation.extend(bound, cache, donate=donate, keeping=keeping)
    under_autocast: tuple[Array, Cache] = frameworks.under_autocast.extend(
        bound, cache, donate=donate, keeping=keeping
    )
    return under_autocast


def extend_packed(
    mechanism: Piece,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    masks: Masks,
    *,
    donate: bool,
    keeping: Keeping | None = None,
) -> tuple[Array, Cache]:
    """The output for packed new tokens, and the extended cache; `cu_seqlens` is in the masks."""
    for name in PAIR_MASKS:
        if masks.get(name) is not None:
            raise ValueError(
                f"{mechanism}: packed sequences of extend take no {name}; give each sequence a row"
            )
    given = GivenCall("extend", mechanism, arrays, named, masks, backend, cache)
    one_batch = partial(extend, keeping=keeping)
    return packed_extension.extend(given, one_batch, donate=donate)


def extend_vjp(
    mechanism: Piece,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    masks: Masks,
) -> tuple[Array, Cache, ExtendPullback]:
    """The output for new tokens, the extended cache of states, and the pullback."""
    _refuse_pair_masks(mechanism, named)
    if "donate" in named:
        raise TypeError(
            f"{mechanism}: extend_vjp does not donate: the pullback needs the old cache"
        )
    for name in ("keep", "states_every"):
        if name in named:
            raise TypeError(
                f"{mechanism}: extend_vjp has no {name}; where the library has automatic "
                f"differentiation, differentiate extend(..., {name}=...)"
            )
    check_has_states(mechanism)
    given = GivenCall("extend_vjp", mechanism, arrays, named, masks, backend, cache)
    signature = signature_of(given)
    if signature is None and _is_distributed(given):
        of_parts: tuple[Array, Cache, ExtendPullback] = frameworks.distributed.extend_vjp(given)
        return of_parts
    given, check_arguments = held(given)
    bound = bind_extension(given, signature)
    if checks.contexts:
        _check_values(mechanism, bound, is_full=False)
    framework = bound.prepared.framework
    if framework.check_division is not None:
        framework.check_division(mechanism)
    bound, cache = contained_after(mechanism, bound, given.cache)
    with framework.without_autocast(cache.length):
        out, extended, pull = evaluation.extend_vjp(bound, cache)

    def pull_valid(cotangent: Array, d_store: Arrays) -> tuple[Arrays, Arrays]:
        check_arguments()
        with framework.without_autocast(cotangent):
            gradients, d_past = pull(cotangent, d_store)
        k_valid = bound.frame.valid_keys(bound.sizes["t"])
        return _of_valid(gradients, mechanism, bound, k_valid), d_past

    return out, extended, _checked_pullback(mechanism, out, extended, pull_valid)


def extend_vjp_packed(
    mechanism: Piece,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    masks: Masks,
) -> tuple[Array, Cache, ExtendPullback]:
    """The output for packed new tokens, the extended cache of states, and the pullback."""
    _refuse_pair_masks(mechanism, named)
    given = GivenCall("extend_vjp", mechanism, arrays, named, masks, backend, cache)
    out, extended, pull = packed_extension.extend_vjp(given, extend_vjp)
    return out, extended, _checked_pullback(mechanism, out, extended, pull)


def _checked_pullback(
    mechanism: Piece, out: Array, extended: Cache, pull: ExtendPullback
) -> ExtendPullback:
    """The pullback with checks of its cotangents; those of buffers may be left out."""
    new_store = dict(extended.store)

    def pullback(cotangent: Array, d_store: Arrays | Cache | None = None) -> tuple[Arrays, Arrays]:
        given = d_store.store if isinstance(d_store, Cache) else d_store
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{mechanism}: the cotangents of buffers must be a dict by buffer name, or a "
                f"Cache; found {type(d_store).__name__}"
            )
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        for name, array in given.items():
            if name not in new_store:
                raise ValueError(
                    f"{mechanism}: the cache has no buffer {name!r}; it has {', '.join(new_store)}"
                )
            what = f"the cotangent of {name!r}"
            check_cotangent(str(mechanism), what, array, "that buffer", new_store[name])
        zeros = {n: namespace(a).zeros_like(a) for n, a in new_store.items() if n not in given}
        return pull(cotangent, {**given, **zeros})

    return pullback


def explain(
    mechanism: Piece,
    verb: str,
    cache: Cache | None,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    masks: Masks,
) -> Explanation:
    """The plan of a call, made by the same code as when the call runs."""
    if verb not in ("forward", "vjp"):
        raise ValueError(
            f"{mechanism}: verb must be 'forward' or 'vjp' (for extend, pass the cache); "
            f"found {verb!r}"
        )
    for name in ("segment_ids", "cu_seqlens"):
        if cache is not None and masks.get(name) is not None:
            raise ValueError(
                f"{mechanism}: {name} divides an extension into several; explain one of them, "
                f"without {name}"
            )
    given = GivenCall(verb, mechanism, arrays, named, masks, backend, cache)
    if _is_distributed(given):
        of_parts: Explanation = frameworks.distributed.explain(given)
        return of_parts
    if cache is not None:
        if verb == "vjp":
            check_has_states(mechanism)
        if windows.is_window(cache):
            cache = windows.ordinary(given)
        masks = {name: masks[name] for name in ("lengths", "key_mask", *PAIR_MASKS)}
        verb = "extend_vjp" if verb == "vjp" else "extend"
        given = given._replace(verb=verb, masks=masks, cache=cache)
    bound = (bind if cache is None else bind_extension)(given, signature_of(given))
    ready = bound.prepared
    divided = packed.divided(mechanism, bound)
    if divided is not None:
        ready = divided.largest.prepared
    batches = () if divided is None else divided.sizes
    plan, program = ready.plan, mechanism.program
    return Explanation(str(mechanism), program, ready.request, plan, discover(), batches)


def _check_values(mechanism: Piece, bound: BoundCall, *, is_full: bool) -> None:
    """Check the values of the inputs, if this context is a checked one."""
    current = checks.current()
    if current is not None:
        from precondattn.execution.examined_values import examine

        examine(mechanism, bound, current, is_full=is_full)


def _is_distributed(given: GivenCall) -> bool:
    cache = given.cache
    buffers = (cache.length, *cache.store.values()) if isinstance(cache, Cache) else ()
    return is_distributed(given.arrays, given.named, *buffers, *given.masks.values())


def _refuse_pair_masks(mechanism: Piece, named: Mapping[str, Given]) -> None:
    """Raise a TypeError for a mask of pairs in `extend_vjp`, whose cache is a state."""
    for name in PAIR_MASKS:
        if name in named:
            raise TypeError(f"{mechanism}: {has_no(name)}")
