"""The public methods of a mechanism: bind the arguments, make a plan, and run it.

`algebra/verbs.py` has their signatures and documentation, and passes each call to this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from precondattn import frameworks
from precondattn.algebra.call import Call
from precondattn.algebra.piece import ExtendPullback, Piece
from precondattn.arrays import Array, Arrays, is_distributed, namespace
from precondattn.cache import Cache
from precondattn.cache.kinds import empty_if_donated
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.explanation import Explanation
from precondattn.execution import evaluation, packed, packed_extension, windows
from precondattn.execution.arguments import BoundCall, bind, bind_extension
from precondattn.execution.array_checks import check_cotangent
from precondattn.execution.cache_checks import check_has_states
from precondattn.execution.checked import CHECKS
from precondattn.execution.containment import contained, contained_after
from precondattn.execution.masks import zero_padding
from precondattn.execution.pair_masks import ATTN_MASK, PAIR_MASKS, PREFIX
from precondattn.execution.parts import can_keep, needs_lengths
from precondattn.execution.signature import signature_of
from precondattn.execution.unchanged import guarded


def forward(call: Call) -> Array:
    """The output of a full call."""
    signature = signature_of(call)
    if signature is None and _is_distributed(call):
        return frameworks.distributed.forward(call)
    mechanism, bound = call.mechanism, bind(call, signature)
    _check(call, bound, bound)
    if bound.prepared.examined:
        bound = contained(mechanism, bound)
    divided = None if bound.segments is None else packed.divided(mechanism, bound)
    return _evaluated(bound) if divided is None else packed.forward(divided, _evaluated)


def _evaluated(bound: BoundCall) -> Array:
    if bound.dtypes_before is None:
        return evaluation.forward(bound)
    return frameworks.under_autocast.forward(bound)


def vjp(call: Call) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output of a full call, and its pullback."""
    mechanism, signature = call.mechanism, signature_of(call)
    if signature is None and _is_distributed(call):
        of_parts: tuple[Array, Callable[[Array], Arrays]] = frameworks.distributed.vjp(call)
        return of_parts
    call, check_unchanged = guarded(call)
    bound = bind(call, signature)
    _check(call, bound)
    framework = bound.prepared.framework
    bound = contained(mechanism, bound)
    divided = packed.divided(mechanism, bound)
    with framework.without_autocast(next(iter(bound.inputs.values()))):
        out, pull = evaluation.vjp(bound) if divided is None else packed.vjp(divided)

    def pullback(cotangent: Array) -> Arrays:
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        check_unchanged()
        with framework.without_autocast(cotangent):
            gradients = pull(cotangent)
        return _of_valid(gradients, mechanism, bound, bound.frame.k_valid)

    return out, pullback


def _of_valid(gradients: Arrays, mechanism: Piece, bound: BoundCall, k_valid: Array) -> Arrays:
    """The gradients, with 0 at padding and in rows with a NaN or infinity."""
    gradients = zero_padding(gradients, mechanism.inputs, bound.frame.q_valid, k_valid)
    return gradients if bound.non_finite is None else bound.non_finite.cleaned(gradients)


def gradients_from_lse(call: Call, out: Array, lse: Array, cotangent: Array) -> Arrays | None:
    """The gradients of softmax attention from its output and log-sum-exp; None if impossible."""
    mechanism = call.mechanism
    bound = contained(mechanism, bind(call, signature_of(call)))
    if packed.divided(mechanism, bound) is not None:
        return None
    with bound.prepared.framework.without_autocast(cotangent):
        gradients = evaluation.gradients_from_lse(bound, out, lse, cotangent)
    k_valid = bound.frame.k_valid
    return None if gradients is None else _of_valid(gradients, mechanism, bound, k_valid)


def extend(call: Call) -> tuple[Array, Cache]:
    """The output for new tokens, and the extended cache."""
    mechanism, cache, masks, donate = call.mechanism, call.cache, call.masks, call.donate
    keeping = call.keeping
    if keeping is not None and not can_keep(call):
        keeping = None  # A cache without states can always be cropped.
    signature = signature_of(call)
    if signature is None and _is_distributed(call):
        of_parts: tuple[Array, Cache] = frameworks.distributed.extend(call)
        return of_parts
    if windows.is_window(cache):
        for name, lacks in ((PREFIX, "no prefix"), (ATTN_MASK, "not all columns of an attn_mask")):
            if masks.get(name) is not None:
                raise ValueError(
                    f"{mechanism}: the cache of a window keeps the last tokens only, and {lacks}; "
                    f"use full calls, or a mechanism without a window"
                )
        plain, old = windows.ordinary(call), cache._replace(store=dict(cache.store))
        try:
            out, longer = extend(call._replace(cache=plain, keeping=None))
        finally:
            empty_if_donated(cache, plain)
        return out, windows.moved_on(mechanism, old, longer, donate=donate)
    bound = bind_extension(call, signature)
    if keeping is not None and needs_lengths(keeping, bound, cache.length):
        b, t = (bound.sizes[letter] for letter in "bt")
        call = call._replace(masks={**masks, "lengths": [t] * b})
        bound = bind_extension(call, signature_of(call))
    _check(call, bound)
    ready = bound.prepared
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


def extend_packed(call: Call) -> tuple[Array, Cache]:
    """The output for packed new tokens, and the extended cache; `cu_seqlens` is in the masks."""
    for name in PAIR_MASKS:
        if call.masks.get(name) is not None:
            raise ValueError(
                f"{call.mechanism}: packed sequences of extend take no {name}; give each sequence "
                f"a row"
            )
    return packed_extension.extend(call, extend)


def extend_vjp(call: Call) -> tuple[Array, Cache, ExtendPullback]:
    """The output for new tokens, the extended cache of states, and the pullback."""
    mechanism = call.mechanism
    check_has_states(mechanism)
    signature = signature_of(call)
    if signature is None and _is_distributed(call):
        of_parts: tuple[Array, Cache, ExtendPullback] = frameworks.distributed.extend_vjp(call)
        return of_parts
    call, check_unchanged = guarded(call)
    bound = bind_extension(call, signature)
    _check(call, bound)
    framework = bound.prepared.framework
    bound, cache = contained_after(mechanism, bound, call.cache)
    with framework.without_autocast(cache.length):
        out, extended, pull = evaluation.extend_vjp(bound, cache)

    def pull_valid(cotangent: Array, d_store: Arrays) -> tuple[Arrays, Arrays]:
        check_unchanged()
        with framework.without_autocast(cotangent):
            gradients, d_past = pull(cotangent, d_store)
        k_valid = bound.frame.valid_keys(bound.sizes["t"])
        return _of_valid(gradients, mechanism, bound, k_valid), d_past

    return out, extended, _checked_pullback(mechanism, out, extended, pull_valid)


def extend_vjp_packed(call: Call) -> tuple[Array, Cache, ExtendPullback]:
    """The output for packed new tokens, the extended cache of states, and the pullback."""
    out, extended, pull = packed_extension.extend_vjp(call, extend_vjp)
    return out, extended, _checked_pullback(call.mechanism, out, extended, pull)


def _checked_pullback(
    mechanism: Piece, out: Array, extended: Cache, pull: ExtendPullback
) -> ExtendPullback:
    """The pullback with checks of its cotangents; those of buffers may be left out."""
    new_store = dict(extended.store)

    def pullback(cotangent: Array, d_store: Arrays | Cache | None = None) -> tuple[Arrays, Arrays]:
        d_buffers = d_store.store if isinstance(d_store, Cache) else d_store
        d_buffers = {} if d_buffers is None else d_buffers
        if not isinstance(d_buffers, Mapping):
            raise TypeError(
                f"{mechanism}: the cotangents of buffers must be a dict by buffer name, or a "
                f"Cache; found {type(d_store).__name__}"
            )
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        for name, array in d_buffers.items():
            if name not in new_store:
                raise ValueError(
                    f"{mechanism}: the cache has no buffer {name!r}; it has {', '.join(new_store)}"
                )
            what = f"the cotangent of {name!r}"
            check_cotangent(str(mechanism), what, array, "that buffer", new_store[name])
        missing = {n: a for n, a in new_store.items() if n not in d_buffers}
        zeros = {n: namespace(a).zeros_like(a) for n, a in missing.items()}
        return pull(cotangent, {**d_buffers, **zeros})

    return pullback


def explain(call: Call) -> Explanation:
    """The plan of a call, made by the same code as when the call runs."""
    verb, mechanism, cache, masks = call.verb, call.mechanism, call.cache, call.masks
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
    if _is_distributed(call):
        of_parts: Explanation = frameworks.distributed.explain(call)
        return of_parts
    if cache is not None:
        if verb == "vjp":
            check_has_states(mechanism)
        if windows.is_window(cache):
            cache = windows.ordinary(call)
        masks = {name: masks[name] for name in ("lengths", "key_mask", *PAIR_MASKS)}
        verb = "extend_vjp" if verb == "vjp" else "extend"
        call = call._replace(verb=verb, masks=masks, cache=cache)
    bound = (bind if cache is None else bind_extension)(call, signature_of(call))
    ready = bound.prepared
    divided = packed.divided(mechanism, bound)
    if divided is not None:
        ready = divided.largest.prepared
    batches = () if divided is None else divided.sizes
    plan, program = ready.plan, mechanism.program
    return Explanation(str(mechanism), program, ready.request, plan, discover(), batches)


def _check(call: Call, bound: BoundCall, *divided: BoundCall) -> None:
    """Check values, and the devices: those of PyTorch's `context_parallel` serve `divided` only."""
    if CHECKS.get() is not None:
        from precondattn.execution.examined_values import examine

        examine(call.mechanism, bound, is_full=call.cache is None)
    check_division = bound.prepared.framework.check_division
    if check_division is not None:
        check_division(call.mechanism, *divided)


def _is_distributed(call: Call) -> bool:
    cache = call.cache
    buffers = (cache.length, *cache.store.values()) if isinstance(cache, Cache) else ()
    return is_distributed(call.arrays, call.named, *buffers, *call.masks.values())
