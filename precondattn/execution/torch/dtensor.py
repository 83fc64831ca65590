"""PyTorch's DTensors: every device calls the mechanism on its own sequences and heads.

    out_local = mechanism(q_local, k_local, …)

Nothing is communicated. `dtensor_sharding.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from precondattn.algebra.declaration import ShapeError
from precondattn.arrays import Arrays, Tree
from precondattn.cache import Cache
from precondattn.dispatch.explanation import Explanation
from precondattn.execution import run
from precondattn.execution.cache_checks import check_cache, check_cacheable
from precondattn.execution.empty_cache import empty_cache
from precondattn.execution.input_names import (
    CALL_OPTIONS,
    EXTEND_OPTIONS,
    INIT_OPTIONS,
    inputs_by_name,
)
from precondattn.execution.torch.dtensor_sharding import (
    MASKS,
    MeshSharding,
    Patterns,
    patterns_of_cache,
    sharding_of,
)

if TYPE_CHECKING:
    from precondattn.algebra.piece import BackendNames, ExtendPullback, Piece
    from precondattn.given import Given


def call(
    mechanism: Piece,
    arrays: Tensor,
    named: Arrays,
    backend: BackendNames,
    masks: Mapping[str, Given],
) -> DTensor:
    """`run.call`."""
    inputs, given, sharding = _bound(mechanism, arrays, named, masks, CALL_OPTIONS)
    out = run.call(mechanism, (), sharding.parts(inputs), backend, given)
    return _whole(mechanism, sharding, out)


def vjp(
    mechanism: Piece,
    arrays: Tensor,
    named: Arrays,
    backend: BackendNames,
    masks: Mapping[str, Given],
) -> tuple[DTensor, Callable[[DTensor], dict[str, DTensor]]]:
    """`run.vjp`."""
    inputs, given, sharding = _bound(mechanism, arrays, named, masks, CALL_OPTIONS)
    out, pull = run.vjp(mechanism, (), sharding.parts(inputs), backend, given)
    whole = _whole(mechanism, sharding, out)

    def pullback(cotangent: DTensor) -> dict[str, DTensor]:
        _check_cotangent(mechanism, "the cotangent", cotangent, whole)
        return sharding.whole_gradients(pull(cotangent.to_local()), inputs)

    return whole, pullback


def explain(
    mechanism: Piece,
    verb: str,
    cache: Cache | None,
    arrays: Tensor,
    named: Arrays,
    backend: BackendNames,
    masks: Mapping[str, Given],
) -> Explanation:
    """`run.explain` of the call on one device."""
    options = CALL_OPTIONS if cache is None else EXTEND_OPTIONS
    inputs, given, sharding = _bound(mechanism, arrays, named, masks, options, cache)
    part = None if cache is None else _part_of_cache(sharding, cache)
    parts = sharding.parts(inputs)
    return run.explain(mechanism, verb, part, (), parts, backend, given)


def init_cache(
    mechanism: Piece, arrays: Tensor, named: Arrays, capacity: int | None, key_mask: bool
) -> Cache:
    """`empty_cache`."""
    inputs, _, sharding = _bound(mechanism, arrays, named, {}, INIT_OPTIONS)
    cache = empty_cache(mechanism, (), sharding.parts(inputs), capacity, key_mask)
    return sharding.whole_cache(mechanism, cache)


def extend(
    mechanism: Piece,
    cache: Cache,
    arrays: Tensor,
    named: Arrays,
    backend: BackendNames,
    masks: Mapping[str, Given],
    *,
    donate: bool,
) -> tuple[DTensor, Cache]:
    """`run.extend`."""
    part, inputs, given, sharding = _extension(mechanism, cache, arrays, named, masks)
    parts = sharding.parts(inputs)
    out, extended = run.extend(mechanism, part, (), parts, backend, given, donate=donate)
    if donate:
        cache.store.clear()
    return _whole(mechanism, sharding, out), sharding.whole_cache(mechanism, extended)


def extend_vjp(
    mechanism: Piece,
    cache: Cache,
    arrays: Tensor,
    named: Arrays,
    backend: BackendNames,
    masks: Mapping[str, Given],
) -> tuple[DTensor, Cache, ExtendPullback]:
    """`run.extend_vjp`."""
    part, inputs, given, sharding = _extension(mechanism, cache, arrays, named, masks)
    parts = sharding.parts(inputs)
    out, extended, pull = run.extend_vjp(mechanism, part, (), parts, backend, given)
    whole, whole_cache = _whole(mechanism, sharding, out), sharding.whole_cache(mechanism, extended)
    buffers = dict(cache.store)

    def pullback(cotangent: DTensor, d_store: Tensor = None) -> tuple[Tree, Tree]:
        d_store = d_store.store if isinstance(d_store, Cache) else dict(d_store or {})
        _check_cotangent(mechanism, "the cotangent", cotangent, whole)
        for name in set(d_store) & set(whole_cache.store):
            what = f"the cotangent of {name!r}"
            _check_cotangent(mechanism, what, d_store[name], whole_cache.store[name])
        d_parts = {name: d.to_local() for name, d in d_store.items()}
        gradients, d_past = pull(cotangent.to_local(), d_parts)
        return (
            sharding.whole_gradients(gradients, inputs),
            sharding.whole_gradients(d_past, buffers),
        )

    return whole, whole_cache, pullback


def _extension(
    mechanism: Piece, cache: Cache, arrays: Tensor, named: Arrays, masks: Mapping[str, Given]
) -> tuple[Cache, dict[str, DTensor], dict[str, Tensor | None], MeshSharding]:
    """This device's part of the cache, and `_bound`."""
    inputs, given, sharding = _bound(mechanism, arrays, named, masks, EXTEND_OPTIONS, cache)
    return _part_of_cache(sharding, cache), inputs, given, sharding


def _whole(mechanism: Piece, sharding: MeshSharding, out: Tensor) -> DTensor:
    """The output, of which this device has computed a part."""
    return sharding.whole(out, sharding.placements(mechanism.program.output))


def _bound(
    mechanism: Piece,
    arrays: Tensor,
    named: Arrays,
    masks: Mapping[str, Given],
    options: tuple[str, ...],
    cache: Cache | None = None,
) -> tuple[dict[str, DTensor], dict[str, Tensor | None], MeshSharding]:
    """The inputs by name, this device's part of the masks, and how all of them are sharded."""
    owner, declared = str(mechanism), mechanism.inputs
    is_complete = options is not INIT_OPTIONS
    inputs = inputs_by_name(owner, declared, arrays, named, options, complete=is_complete)
    bounds = masks.get("cu_seqlens")
    if bounds is not None and not isinstance(bounds, DTensor):
        masks = {**masks, "cu_seqlens": None}  # Every device has it.
    given = {name: mask for name, mask in masks.items() if mask is not None}
    patterns: Patterns = {**declared, **{name: MASKS[name] for name in given}}
    everything: dict[str, Tensor] = {**inputs, **given}
    if cache is not None:
        check_cacheable(mechanism)
        check_cache(owner, mechanism, cache, inputs)
        buffers = {"length": cache.length, **cache.store}
        of_cache = patterns_of_cache(mechanism)
        patterns |= {f"the cache's {name!r}": of_cache[name] for name in buffers}
        everything |= {f"the cache's {name!r}": buffer for name, buffer in buffers.items()}
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
    return inputs, parts, sharding


def _part_of_cache(sharding: MeshSharding, cache: Cache) -> Cache:
    return cache._replace(length=sharding.part(cache.length), store=sharding.parts(cache.store))


def _check_cotangent(mechanism: Piece, what: str, cotangent: Tree, output: DTensor) -> None:
    if not isinstance(cotangent, DTensor) or cotangent.placements != output.placements:
        found = getattr(cotangent, "placements", type(cotangent).__name__)
        raise ValueError(
            f"{mechanism}: {what} must be a DTensor with the placements {output.placements}; "
            f"found {found}"
        )
