"""The arguments of a prefill besides those of a call: a capacity, and a cache of earlier tokens."""

from __future__ import annotations

from typing import NamedTuple

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.execution.array_checks import call_dtype
from precondattn.execution.cache_checks import (
    check_buffers,
    check_cache,
    check_cacheable,
    keeps_tokens,
)
from precondattn.execution.input_names import shapes_of
from precondattn.given import at_least
from precondattn.parallel.layouts import ORDERS, TokenOrder
from precondattn.parallel.torch.arguments import Bound, described


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
        for name in ("segment_ids", "cu_seqlens"):
            if name in bound.masks:
                raise TypeError(f"{name} belong to a full call; each sequence has its own cache")
        if keeps_tokens(self.mechanism):
            if self.capacity is None:
                raise TypeError(
                    "missing capacity, the greatest number of tokens per sequence, of all "
                    "processes together"
                )
            at_least(1, "capacity", self.capacity)
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
