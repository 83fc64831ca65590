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

from precondattn.algebra.call import Call
from precondattn.algebra.declaration import Pattern, ShapeError
from precondattn.algebra.piece import ExtendPullback, Piece
from precondattn.arrays import ByName, Tree
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import empty_if_donated
from precondattn.cache.windows import FIRST
from precondattn.dispatch.explanation import Explanation
from precondattn.execution import input_names, run
from precondattn.execution.cache_checks import check_cache, check_cacheable
from precondattn.execution.empty_cache import empty_cache
from precondattn.execution.pair_masks import refuse_divided
from precondattn.frameworks.torch.dtensor_sharding import MASKS, MeshSharding, sharding_of


class DTensorCall(NamedTuple):
    """A call with DTensors, and this device's part of it."""

    sharding: MeshSharding
    inputs: dict[str, DTensor]
    part: Call

    def whole(self, out: Tensor) -> DTensor:
        """The output as a DTensor, from the part that this device has computed."""
        output = self.part.mechanism.program.output
        return self.sharding.whole(out, self.sharding.placements(output))

    def whole_cache(self, cache: Cache) -> Cache:
        patterns, whole = _patterns_of_cache(self.part.mechanism), {}
        for name, part in {"length": cache.length, **cache.store}.items():
            whole[name] = self.sharding.whole(part, self.sharding.placements(patterns[name]))
        return cache._replace(length=whole.pop("length"), store=whole)


def forward(call: Call) -> DTensor:
    divided = _divided(call)
    return divided.whole(run.forward(divided.part))


def vjp(call: Call) -> tuple[DTensor, Callable[[DTensor], dict[str, DTensor]]]:
    divided = _divided(call)
    out, pull = run.vjp(divided.part)
    whole = divided.whole(out)

    def pullback(cotangent: DTensor) -> dict[str, DTensor]:
        _check_cotangent(call.mechanism, "the cotangent", cotangent, whole)
        return divided.sharding.whole_gradients(pull(cotangent.to_local()), divided.inputs)

    return whole, pullback


def explain(call: Call) -> Explanation:
    return run.explain(_divided(call).part)


def init_cache(
    mechanism: Piece, arrays: Tensor, named: ByName, capacity: int | None, key_mask: bool
) -> Cache:
    divided = _divided(Call("init_cache", mechanism, arrays, named, {}, None))
    return divided.whole_cache(empty_cache(mechanism, (), divided.part.named, capacity, key_mask))


def extend(call: Call) -> tuple[DTensor, Cache]:
    divided = _divided(call)
    try:
        out, extended = run.extend(divided.part)
    finally:
        empty_if_donated(call.cache, divided.part.cache)
    return divided.whole(out), divided.whole_cache(extended)


def extend_vjp(call: Call) -> tuple[DTensor, Cache, ExtendPullback]:
    divided, mechanism = _divided(call), call.mechanism
    out, extended, pull = run.extend_vjp(divided.part)
    whole, whole_cache = divided.whole(out), divided.whole_cache(extended)
    sharding, buffers = divided.sharding, dict(call.cache.store)

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


def _divided(call: Call) -> DTensorCall:
    """The sharding of all arrays, the inputs by name, and this device's part of the call."""
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
    present = {name: mask for name, mask in masks.items() if mask is not None}
    patterns = {**declared, **{name: MASKS[name] for name in present}}
    everything: dict[str, Tensor] = {**inputs, **present}
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
    named = sharding.parts(inputs)
    part = call._replace(arrays=(), named=named, masks=parts, cache=cache)
    return DTensorCall(sharding, inputs, part)


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
