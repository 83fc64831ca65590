"""The public verbs: bind the arguments, make a plan, and evaluate the plan.

`algebra/verbs.py` has the signatures and the documentation, and passes every call to this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from precondattn.arrays import (
    Array,
    Arrays,
    device_of,
    is_distributed,
    is_traced,
    namespace,
    transforms_of,
    wants_gradient,
)
from precondattn.backend import Request
from precondattn.cache import Cache
from precondattn.dispatch.discovery import allowed_backends, discover
from precondattn.dispatch.explanation import Explanation
from precondattn.dispatch.plan import Plan, make_plan
from precondattn.execution import autocast, evaluation, packed
from precondattn.execution.arguments import (
    BoundCall,
    bind,
    bind_extension,
    new_token_count,
)
from precondattn.execution.array_checks import check_cotangent
from precondattn.execution.cache_checks import check_has_states
from precondattn.execution.containment import contained
from precondattn.execution.context_parallel import refuse_parts
from precondattn.execution.masks import zero_padding

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.algebra.verbs import BackendNames, ExtendPullback


def call(
    mechanism: Mechanism,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    segment_ids: Array | None,
    cu_seqlens: Any,
    lengths: Any,
    key_mask: Array | None,
) -> Array:
    """A full call."""
    masks = {
        "segment_ids": segment_ids,
        "cu_seqlens": cu_seqlens,
        "lengths": lengths,
        "key_mask": key_mask,
    }
    if is_distributed(arrays, named, *masks.values()):
        from precondattn.execution import dtensor

        return dtensor.call(mechanism, arrays, named, backend, masks)
    bound = bind(mechanism, arrays, named, **masks)
    bound = contained(mechanism, bound)
    request = _request("forward", bound)
    plan = _plan(mechanism, request, bound, backend)
    refuse_parts(mechanism, plan, bound)
    divided = packed.divided(mechanism, plan, bound)
    if divided is None:
        return _evaluated(plan, bound, request)

    def evaluate(batch: BoundCall) -> Array:
        request = _request("forward", batch)
        return _evaluated(_plan(mechanism, request, batch, backend), batch, request)

    return packed.forward(divided, evaluate)


def _evaluated(plan: Plan, bound: BoundCall, request: Request) -> Array:
    if bound.dtypes_before is not None:
        from precondattn.execution import autograd_autocast

        return autograd_autocast.forward(plan, bound, request)
    return evaluation.forward(plan, bound)


def vjp(
    mechanism: Mechanism,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    segment_ids: Array | None,
    cu_seqlens: Any,
    lengths: Any,
    key_mask: Array | None,
) -> tuple[Array, Callable[[Array], Arrays]]:
    """A full call and its pullback."""
    refuse_parts(mechanism)
    masks = {
        "segment_ids": segment_ids,
        "cu_seqlens": cu_seqlens,
        "lengths": lengths,
        "key_mask": key_mask,
    }
    if is_distributed(arrays, named, *masks.values()):
        from precondattn.execution import dtensor

        return dtensor.vjp(mechanism, arrays, named, backend, masks)
    bound = bind(mechanism, arrays, named, **masks)
    bound = contained(mechanism, bound)
    plan = _plan(mechanism, _request("vjp", bound), bound, backend)
    divided = packed.divided(mechanism, plan, bound)

    def evaluate(batch: BoundCall) -> Any:
        return evaluation.vjp(_plan(mechanism, _request("vjp", batch), batch, backend), batch)

    with autocast.off(next(iter(bound.inputs.values()))):
        if divided is None:
            out, pull = evaluation.vjp(plan, bound)
        else:
            out, pull = packed.vjp(divided, evaluate)

    def pullback(cotangent: Array) -> Arrays:
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        frame = bound.frame
        with autocast.off(cotangent):
            gradients = pull(cotangent)
        gradients = zero_padding(gradients, mechanism.inputs, frame.q_valid, frame.k_valid)
        return gradients if bound.spoiled is None else bound.spoiled.cleaned(gradients)

    return out, pullback


def extend(
    mechanism: Mechanism,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    lengths: Any,
    key_mask: Array | None,
    *,
    donate: bool,
) -> tuple[Array, Cache]:
    """An extension of a cache."""
    refuse_parts(mechanism)
    _refuse_segments(mechanism, named)
    if is_distributed(arrays, named, *_arrays_of(cache), lengths, key_mask):
        from precondattn.execution import dtensor

        masks = {"lengths": lengths, "key_mask": key_mask}
        return dtensor.extend(mechanism, cache, arrays, named, backend, masks, donate=donate)
    bound = bind_extension(mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask)
    bound = contained(mechanism, bound)
    request = _request("extend", bound, tuple(cache.store.values()))
    plan = _plan(mechanism, request, bound, backend)
    if donate and bound.library == "torch" and request.differentiated:
        raise ValueError(
            f"{mechanism}: donate=True writes in place, so the call can not be differentiated; "
            f"call it under torch.no_grad(), or without donate"
        )
    count = new_token_count(bound, cache)
    if bound.dtypes_before is not None:
        from precondattn.execution import autograd_autocast

        return autograd_autocast.extend(plan, bound, request, cache, count, donate=donate)
    return evaluation.extend(plan, bound, cache, count, donate=donate)


def extend_vjp(
    mechanism: Mechanism,
    cache: Cache,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    lengths: Any,
    key_mask: Array | None,
) -> tuple[Array, Cache, ExtendPullback]:
    """An extension of a cache of states, and its pullback."""
    refuse_parts(mechanism)
    _refuse_segments(mechanism, named)
    if "donate" in named:
        raise TypeError(
            f"{mechanism}: extend_vjp does not donate: the pullback needs the old cache"
        )
    check_has_states(mechanism)
    if is_distributed(arrays, named, *_arrays_of(cache), lengths, key_mask):
        from precondattn.execution import dtensor

        masks = {"lengths": lengths, "key_mask": key_mask}
        return dtensor.extend_vjp(mechanism, cache, arrays, named, backend, masks)
    bound = bind_extension(mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask)
    bound = contained(mechanism, bound)
    plan = _plan(mechanism, _request("extend_vjp", bound), bound, backend)
    count = new_token_count(bound, cache)
    with autocast.off(cache.length):
        out, extended, pull = evaluation.extend_vjp(plan, bound, cache, count)
    new_store, spoiled = dict(extended.store), bound.spoiled

    def pullback(
        cotangent: Array, d_store: Mapping[str, Array] | Cache | None = None
    ) -> tuple[Arrays, Arrays]:
        given = _cotangents_of_buffers(str(mechanism), d_store)
        check_cotangent(str(mechanism), "the cotangent", cotangent, "the output", out)
        for name, array in given.items():
            if name not in new_store:
                raise ValueError(
                    f"{mechanism}: the cache has no buffer {name!r}; it has {', '.join(new_store)}"
                )
            description = f"the cotangent of {name!r}"
            check_cotangent(str(mechanism), description, array, "that buffer", new_store[name])
        zeros = {n: namespace(a).zeros_like(a) for n, a in new_store.items() if n not in given}
        with autocast.off(cotangent):
            gradients, d_past = pull(cotangent, {**given, **zeros})
        frame = bound.frame
        new_valid = None if frame.k_valid is None else frame.k_valid[:, -bound.sizes["t"] :]
        gradients = zero_padding(gradients, mechanism.inputs, frame.q_valid, new_valid)
        return gradients if spoiled is None else spoiled.cleaned(gradients), d_past

    return out, extended, pullback


def explain(
    mechanism: Mechanism,
    verb: str,
    cache: Cache | None,
    arrays: tuple[Array, ...],
    named: Arrays,
    backend: BackendNames,
    segment_ids: Array | None,
    cu_seqlens: Any,
    lengths: Any,
    key_mask: Array | None,
) -> Explanation:
    """The plan of a call, from the same code that makes the plan when the call runs."""
    if verb not in ("forward", "vjp"):
        raise ValueError(
            f"{mechanism}: verb must be 'forward' or 'vjp' (for extend, pass the cache); "
            f"found {verb!r}"
        )
    masks = {
        "segment_ids": segment_ids,
        "cu_seqlens": cu_seqlens,
        "lengths": lengths,
        "key_mask": key_mask,
    }
    for name in ("segment_ids", "cu_seqlens"):
        if cache is not None and masks[name] is not None:
            raise ValueError(f"{mechanism}: a cache is for extend, which has no {name}")
    if is_distributed(arrays, named, *_arrays_of(cache), *masks.values()):
        from precondattn.execution import dtensor

        return dtensor.explain(mechanism, verb, cache, arrays, named, backend, masks)
    if cache is None:
        bound = bind(mechanism, arrays, named, **masks)
    else:
        if verb == "vjp":
            check_has_states(mechanism)
        verb = "extend_vjp" if verb == "vjp" else "extend"
        bound = bind_extension(mechanism, cache, arrays, named, lengths=lengths, key_mask=key_mask)
    request = _request(verb, bound)
    plan = _plan(mechanism, request, bound, backend)
    divided = packed.divided(mechanism, plan, bound)
    if divided is None:
        return Explanation(str(mechanism), mechanism.program, request, plan, discover())
    batch = divided.largest
    request = _request(verb, batch)
    plan = _plan(mechanism, request, batch, backend)
    explanation = Explanation(str(mechanism), mechanism.program, request, plan, discover())
    return replace(explanation, batches=divided.sizes)


def _arrays_of(cache: Any) -> tuple[Array, ...]:
    return (cache.length, *cache.store.values()) if isinstance(cache, Cache) else ()


def _refuse_segments(mechanism: Mechanism, named: Arrays) -> None:
    for name in ("segment_ids", "cu_seqlens"):
        if name in named:
            raise TypeError(
                f"{mechanism}: {name} belong to a full call; each sequence has its own cache"
            )


def _cotangents_of_buffers(owner: str, given: Any) -> Arrays:
    given = given.store if isinstance(given, Cache) else given
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: the cotangents of buffers must be a dict by buffer name, or a Cache; "
            f"found {type(given).__name__}"
        )
    return dict(given or {})


def _request(verb: str, bound: BoundCall, past: tuple[Array, ...] = ()) -> Request:
    arrays = bound.inputs
    first = next(iter(arrays.values()))
    differentiated = wants_gradient(*arrays.values(), *past)
    transforms = transforms_of(*arrays.values(), *past)
    shapes = tuple((name, tuple(array.shape)) for name, array in arrays.items())
    is_torch_traced = bound.library == "torch" and is_traced(first)
    sizes = (size for _, shape in shapes for size in shape)
    return Request(
        verb="vjp" if verb == "forward" and differentiated else verb,
        library=bound.library,
        device=device_of(first),
        dtype=bound.dtype,
        shapes=shapes,
        masks=bound.masks,
        differentiated=differentiated,
        transformed="grad" in transforms,
        mapped="vmap" in transforms,
        traced=is_torch_traced and not transforms,
        is_symbolic=is_torch_traced
        and not transforms
        and any(not isinstance(size, int) for size in sizes),
    )


def _plan(mechanism: Mechanism, request: Request, bound: BoundCall, backend: BackendNames) -> Plan:
    return make_plan(mechanism, request, bound.sizes.get("c"), allowed_backends(backend))
