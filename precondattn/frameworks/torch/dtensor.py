"""PyTorch's DTensors: every device calls the mechanism on its part of the sequences and heads.

    out_local = mechanism(q_local, k_local, …)

Nothing is communicated. `dtensor_sharding.py` has the rules. Each function calls the function of
the same name in `run.py` with this device's parts; `init_cache` calls `empty_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from precondattn.algebra.declaration import Pattern, ShapeError
from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
from precondattn.arrays import Arrays, Tree
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import empty_if_donated
from precondattn.cache.windows import FIRST
from precondattn.dispatch.explanation import Explanation
from precondattn.execution import input_names, run
from precondattn.execution.cache_checks import check_cache, check_cacheable
from precondattn.execution.empty_cache import empty_cache
from precondattn.execution.pair_masks import refuse_divided
from precondattn.execution.signature import GivenCall
from precondattn.frameworks.torch.dtensor_sharding import MASKS, MeshSharding, sharding_of
from precondattn.given import Given


class DTensorCall(NamedTuple):
    """A call with DTensors, and this device's parts of its arguments."""

    mechanism: Piece
    sharding: MeshSharding
    inputs: dict[str, DTensor]
    backend: BackendNames
    masks: dict[str, Tensor | None]
    """This device's parts of the masks; `cache` has its parts of the cache."""
    cache: Given

    @property
    def arguments(self) -> tuple[tuple[()], dict[str, Tensor], BackendNames, Arrays]:
        """The arguments of a function of `run.py` after the mechanism and the cache."""
        return (), self.sharding.parts(self.inputs), self.backend, self.masks

    def whole(self, out: Tensor) -> DTensor:
        """The output as a DTensor, from the part that this device has computed."""
        return self.sharding.whole(out, self.sharding.placements(self.mechanism.program.output))

    def whole_cache(self, cache: Cache) -> Cache:
        patterns, whole = _patterns_of_cache(self.mechanism), {}
        for name, part in {"length": cache.length, **cache.store}.items():
            whole[name] = self.sharding.whole(part, self.sharding.placements(patterns[name]))
        return cache._replace(length=whole.pop("length"), store=whole)


def call(given: GivenCall) -> DTensor:
    divided = _divided(given)
    return divided.whole(run.call(given.mechanism, *divided.arguments))


def vjp(given: GivenCall) -> tuple[DTensor, Callable[[DTensor], dict[str, DTensor]]]:
    divided = _divided(given)
    out, pull = run.vjp(given.mechanism, *divided.arguments)
    whole = divided.whole(out)

    def pullback(cotangent: DTensor) -> dict[str, DTensor]:
        _check_cotangent(given.mechanism, "the cotangent", cotangent, whole)
        return divided.sharding.whole_gradients(pull(cotangent.to_local()), divided.inputs)

    return whole, pullback


def explain(given: GivenCall) -> Explanation:
    divided = _divided(given)
    return run.explain(given.mechanism, given.verb, divided.cache, *divided.arguments)


def init_cache(
    mechanism: Piece, arrays: Tensor, named: Arrays, capacity: int | None, key_mask: bool
) -> Cache:
    divided = _divided(GivenCall("init_cache", mechanism, arrays, named, {}, None))
    parts = divided.sharding.parts(divided.inputs)
    return divided.whole_cache(empty_cache(mechanism, (), parts, capacity, key_mask))


def extend(given: GivenCall, *, donate: bool) -> tuple[DTensor, Cache]:
    divided = _divided(given)
    try:
        results = run.extend(given.mechanism, divided.cache, *divided.arguments, donate=donate)
    finally:
        empty_if_donated(given.cache, divided.cache)
    out, extended = results
    return divided.whole(out), divided.whole_cache(extended)


def extend_vjp(given: GivenCall) -> tuple[DTensor, Cache, ExtendPullback]:
    divided, mechanism = _divided(given), given.mechanism
    out, extended, pull = run.extend_vjp(mechanism, divided.cache, *divided.arguments)
    whole, whole_cache = divided.whole(out), divided.whole_cache(extended)
    sharding, buffers = divided.sharding, dict(given.cache.store)

    def pullback(cotangent: DTensor, d_store: Tensor = None) -> tuple[Tree, Tree]:
        d_store = d_store.store if isinstance(d_store, Cache) else dict(d_store or {})
        _check_cotangent(mechanism, "the cotangent", cotangent, whole)
        for name in set(d_store) & set(whole_cache.store):
            what = f"the cotangent of {name!r}"
            _check_cotangent(mechanism, what, d_store[name], whole_cache.store[name])
        d_parts = {name: d.to_local() for name, d in d_store.items()}
        gradients, d_past = pull(cotangent.to_local(), d_parts)
        whole_gradients = sharding.whole_gradients(gradients, divided.inputs)
        return whole_gradients, sharding.whole_gradients(d_past, buffers)

    return whole, whole_cache, pullback


def _divided(call: GivenCall) -> DTensorCall:
    """The call with inputs by name, the sharding of all arrays, and this device's parts."""
    mechanism, cache = call.mechanism, call.cache
    owner, declared, masks = str(mechanism), mechanism.inputs, dict(call.masks)
    refuse_divided(owner, masks)
    options: tuple[str, ...] = input_names.INIT_OPTIONS
    is_call = call.verb != "init_cache"
    if is_call:
        options = input_names.CALL_OPTIONS if cache is None else input_names.EXTEND_OPTIONS
    arrays, named = call.arrays, call.named
    inputs = input_names.inputs_by_name(owner, declared, arrays, named, options, complete=is_call)
    bounds = masks.get("cu_seqlens")
    if bounds is not None and not isinstance(bounds, DTensor):
        masks["cu_seqlens"] = None  # Every device has the whole array.
    given = {name: mask for name, mask in masks.items() if mask is not None}
    patterns = {**declared, **{name: MASKS[name] for name in given}}
    everything: dict[str, Tensor] = {**inputs, **given}
    if cache is not None:
        check_cacheable(mechanism)
        check_cache(owner, mechanism, cache, inputs)
        of_cache = _patterns_of_cache(mechanism)
        for name, buffer in {"length": cache.length, **cache.store}.items():
            patterns[f"the cache's {name!r}"] = of_cache[name]
            everything[f"the cache's {name!r}"] = buffer
    sharding = sharding_of(owner, patterns, everything)
    if "h" in sharding.divided and mechanism.numbers_heads:
        raise ValueError(
            f"{owner}: heads can not be sharded: the decay of each depends on its number "
            f"among all heads; shard the batch"
        )
    if any(sharding.divided) and mechanism.mixes_sequences:
        raise ValueError(
            f"{owner}: neither the batch nor the heads can be sharded: the output of a sequence "
            f"depends on all others"
        )
    if bounds is not None and sharding.counts.get("b", 1) != 1:
        raise ShapeError(
            f"{owner}: cu_seqlens divides one row of tokens, so b = 1 is expected; found "
            f"b = {sharding.counts['b']} (use segment_ids)"
        )
    parts = {name: None if mask is None else sharding.part(mask) for name, mask in masks.items()}
    if bounds is not None and parts["cu_seqlens"] is None:
        parts["cu_seqlens"] = bounds
    if cache is not None:
        length, store = sharding.part(cache.length), sharding.parts(cache.store)
        cache = cache._replace(length=length, store=store)
    return DTensorCall(mechanism, sharding, inputs, call.backend, parts, cache)


def _patterns_of_cache(mechanism: Piece) -> dict[str, Pattern]:
    row, slots = MASKS["lengths"], mechanism.program.slots.items()
    patterns = {name: pattern for name, (_, pattern) in slots}
    return {"length": row, FIRST: row, KEY_MASK: MASKS[KEY_MASK], **patterns}


def _check_cotangent(mechanism: Piece, what: str, cotangent: Tree, output: DTensor) -> None:
    if not isinstance(cotangent, DTensor) or cotangent.placements != output.placements:
        found = getattr(cotangent, "placements", type(cotangent).__name__)
        raise ValueError(
            f"{mechanism}: {what} must be a DTensor with the placements {output.placements}; "
            f"found {found}"
        )
