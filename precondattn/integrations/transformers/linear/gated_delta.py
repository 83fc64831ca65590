"""The gated delta rule with the arguments of Transformers' own functions.

    q̄ = L2(q),  k̄ = L2(k),      o = gated_delta(q̄, k̄, v, g, β)

Transformers computes it in float32 and returns the dtype of the queries; so does this. The state
is (b, value heads, d, e) in float32 in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.integrations.transformers.linear.packed import refuse_packed
from precondattn.preconditioners.qk_norm import QKNorm
from precondattn.spec.delta import GatedDelta

CHUNKS, STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
"""The names of Transformers' functions for many tokens and for one."""
NORMALISED = QKNorm(GatedDelta(), norm="l2")


def functions(backend: Any) -> dict[str, Callable[..., Any]]:
    """What to call in place of both functions, which have the same arguments."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_packed(kwargs)
        mechanism: Mechanism = NORMALISED if use_qk_l2norm_in_kernel else GatedDelta()
        names = dict(zip("qkv", (query.float(), key.float(), value.float()), strict=True))
        inputs = {**names, "g": g.float(), "beta": beta.float()}
        if initial_state is None and not output_final_state:
            out = mechanism(**inputs, backend=backend)
            return out.to(query.dtype), None
        cache = mechanism.init_cache(**inputs)
        if initial_state is not None:
            cache = with_state(cache, initial_state.float())
        out, cache = mechanism.extend(cache, **inputs, backend=backend)
        state = next(iter(cache.store.values())) if output_final_state else None
        return out.to(query.dtype), state

    return {CHUNKS: rule, STEP: rule}


def with_state(cache: Cache, state: Tensor) -> Cache:
    """The cache with another state, the only one that it has."""
    (name,) = cache.store
    return Cache(torch.zeros_like(cache.length), {name: state}, cache.kinds)
