"""The arguments of `prefill` besides those of a call, and those of `extend`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import dtype_name, wants_gradient
from precondattn.cache import KEY_MASK, Cache
from precondattn.execution.array_checks import call_dtype, check_arrays
from precondattn.execution.cache_checks import (
    check_buffers,
    check_cache,
    check_cacheable,
    keeps_tokens,
)
from precondattn.execution.input_names import EXTEND_OPTIONS, inputs_by_name, shapes_of
from precondattn.execution.masks import ValueChecks, check_lengths, check_mask
from precondattn.execution.pair_masks import refuse_divided
from precondattn.parallel.layouts import ORDERS, TokenOrder
from precondattn.parallel.torch.call import Bound, described, local_part
from precondattn.parallel.torch.divided_cache import DividedCache


class CacheStart(NamedTuple):
    """The capacity of a divided cache, and the cache that it continues."""

    mechanism: Mechanism
    capacity: int | None
    cache: Cache | None
    """An ordinary cache of states, or None"""

    def check(self, order: TokenOrder | None, bound: Bound) -> None:
        """Raise an error if this process's arguments do not allow a cache."""
        if order is None:
            raise ValueError(
                f"a cache is divided by tokens: layout must be {', '.join(map(repr, ORDERS))}; "
                f"found 'heads'"
            )
        check_cacheable(self.mechanism)
        _refuse_packed(bound.masks)
        if keeps_tokens(self.mechanism) and self.capacity is None:
            raise TypeError(
                "missing capacity, the greatest number of tokens per sequence, of all "
                "processes together"
            )
        if self.cache is None:
            return
        if not isinstance(self.cache, Cache):
            raise TypeError(
                f"cache must be an ordinary Cache, of an earlier call on one device or from "
                f"redistribute; found {type(self.cache).__name__}"
            )
        owner = str(self.mechanism)
        check_cache(owner, self.mechanism, self.cache, bound.inputs)
        if keeps_tokens(self.mechanism):
            raise ValueError(
                f"cache must be of states only, for its tokens are not divided; that of "
                f"{self.mechanism} has tokens"
            )
        of_cache = {"b": self.cache.length.shape[0]}
        sizes = self.mechanism.inputs.sizes(owner, shapes_of(bound.inputs), of_cache)
        check_buffers(owner, self.mechanism, self.cache, sizes, call_dtype(bound.inputs))
        if min(self.cache.length.tolist(), default=0) < 0:
            raise ValueError("the cache's length is negative: a sequence of it is invalid")

    def __str__(self) -> str:
        """The properties that must be the same on all processes."""
        if self.cache is None:
            return f"with a cache for {self.capacity} tokens"
        states = ", ".join(f"{name} {described(x)}" for name, x in self.cache.store.items())
        return f"after {self.cache.length.tolist()} tokens with states {states}"


class NewTokens(NamedTuple):
    """The inputs and masks of new tokens, the same on all processes."""

    inputs: dict[str, Tensor]
    sizes: dict[str, int]
    counts: tuple[int, ...]
    """The number of valid new tokens of each sequence"""
    lengths: Tensor | None
    """The number of valid new tokens (b,) as a tensor; None if all are valid"""
    key_mask: Tensor | None
    is_distributed: bool
    """Whether the inputs with tokens were DTensors"""
    backend: BackendNames

    @property
    def within(self) -> Tensor | None:
        """Which new tokens are valid queries (b, t); None if all are."""
        if self.lengths is None:
            return None
        tokens = torch.arange(self.sizes["t"], device=self.lengths.device)
        return tokens < self.lengths[:, None]

    @property
    def valid(self) -> Tensor | None:
        """Which new tokens are valid keys (b, t); None if all are."""
        within = self.within
        if within is None or self.key_mask is None:
            return self.key_mask if within is None else within
        return within & self.key_mask

    def __str__(self) -> str:
        """The properties that must be the same on all processes: all but the entries of arrays."""
        of_arrays = [f"{n} {dtype_name(x)} {tuple(x.shape)}" for n, x in self.inputs.items()]
        masked = "" if self.key_mask is None else " with key_mask"
        return f"{'; '.join(of_arrays)}; {self.counts} of the tokens{masked}"


def bind_new(
    mechanism: Mechanism,
    mesh: DeviceMesh,
    layout: str,
    cache: DividedCache,
    arrays: tuple[Tensor, ...],
    named: Mapping[str, Tensor],
    backend: BackendNames,
) -> NewTokens:
    """The arguments of an extension, checked; `named` has inputs and masks."""
    owner = str(mechanism)
    _check_is_of(cache, mechanism, mesh, layout)
    _refuse_packed(named)
    refuse_divided(owner, named)
    masks = ("lengths", KEY_MASK, "segment_ids", "cu_seqlens")
    arguments = {name: x for name, x in named.items() if name not in masks}
    declared = mechanism.inputs.extending()
    inputs = inputs_by_name(owner, declared, arrays, arguments, EXTEND_OPTIONS)
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; found {type(x).__name__}")
    kinds = {isinstance(x, DTensor) for x in inputs.values()}
    inputs = {name: local_part(name, x, None, mesh) for name, x in inputs.items()}
    of_process = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in named.items()}
    check_arrays(owner, declared, inputs)
    of_cache = {"c": check_cache(owner, mechanism, cache.part, inputs), "b": len(cache.lengths)}
    sizes = declared.sizes(owner, shapes_of(inputs), of_cache)
    check_buffers(owner, mechanism, cache.part, sizes, call_dtype(inputs))
    if wants_gradient(*inputs.values(), *cache.part.store.values()):
        raise ValueError(
            f"{owner}: the extension of a divided cache has no gradient; call it under "
            f"torch.no_grad()"
        )
    like, b, t = next(iter(inputs.values())), sizes["b"], sizes["t"]
    checks = ValueChecks(owner)
    lengths = check_lengths(owner, of_process.get("lengths"), like, b, t, "t", checks)
    key_mask = of_process.get(KEY_MASK)
    key_mask = check_mask(owner, KEY_MASK, key_mask, like, (b, t), ("bool",), "(b t)")
    if key_mask is not None and cache.token_buffers and KEY_MASK not in cache.token_buffers:
        raise ValueError(
            f"{owner}: this cache stores no key_mask; give one to prefill, of True if nothing is "
            f"masked"
        )
    counts = (t,) * b if lengths is None else tuple(lengths.tolist())
    if cache.capacity is not None:
        fits = [n + new <= cache.capacity for n, new in zip(cache.lengths, counts, strict=True)]
        checks.require(
            torch.tensor(fits, dtype=torch.bool, device="cpu"),
            f"capacity exceeded: the cache holds at most {cache.capacity} tokens, and the new "
            f"ones do not fit",
        )
    return NewTokens(inputs, sizes, counts, lengths, key_mask, True in kinds, backend)


def _refuse_packed(masks: Mapping[str, Tensor]) -> None:
    for name in ("segment_ids", "cu_seqlens"):
        if masks.get(name) is not None:
            raise TypeError(f"{name} belong to a full call; each sequence has its own cache")


def _check_is_of(cache: object, mechanism: Mechanism, mesh: DeviceMesh, layout: str) -> None:
    """Raise an error unless this mechanism created the cache on this mesh in this layout."""
    if not isinstance(cache, DividedCache):
        raise TypeError(
            f"{mechanism}: the first argument of extend must be a DividedCache from prefill; "
            f"found {type(cache).__name__}"
        )
    for what, found, expected in (
        ("mechanism", cache.mechanism, mechanism),
        ("mesh", cache.mesh, mesh),
        ("layout", cache.layout, layout),
    ):
        if found != expected:
            raise ValueError(
                f"{mechanism}: the cache must be of the {what} {str(expected)!r}; it is of "
                f"{str(found)!r}"
            )
    check_not_donated(str(mechanism), cache)


def check_not_donated(owner: str, cache: DividedCache) -> None:
    if cache.is_donated:
        raise ValueError(
            f"{owner}: this cache was donated by extend(..., donate=True) and can not be used again"
        )
