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
from precondattn.cache.kinds import STATE, Kind
from precondattn.integrations.transformers.linear.packed import refuse_packed
from precondattn.spec.delta import GatedDelta

CHUNKS, STEP = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
"""The names of Transformers' functions for many tokens and for one."""
RULE = GatedDelta()
KIND = str(Kind(STATE, is_wide=True))


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
        q, k = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            q, k = unit_rows(q), unit_rows(k)
        inputs = {"q": q, "k": k, "v": value.float(), "g": g.float(), "beta": beta.float()}
        if initial_state is None and not output_final_state:
            out = RULE(**inputs, backend=backend)
            return out.to(query.dtype), None
        if initial_state is None:
            cache = RULE.init_cache(**inputs)
        else:
            cache = holding_state(RULE, initial_state.float())
        out, cache = extended(RULE, cache, inputs, backend)
        state = next(iter(cache.store.values())) if output_final_state else None
        return out.to(query.dtype), state

    return {CHUNKS: rule, STEP: rule}


def unit_rows(x: Tensor) -> Tensor:
    """L2(x) = x / √(‖x‖² + 10⁻⁶), as Transformers computes it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def holding_state(mechanism: Mechanism, state: Tensor) -> Cache:
    """A cache of the mechanism with that state (b, …), the only one that it has."""
    (name,) = mechanism.program.slots
    length = torch.zeros(state.shape[0], dtype=torch.int32, device=state.device)
    return Cache(length, {name: state}, {name: {KIND: ()}})


def extended(
    mechanism: Mechanism, cache: Cache, inputs: dict[str, Tensor], backend: Any
) -> tuple[Tensor, Cache]:
    """The output for new tokens, and the longer cache.

    Without gradients the state is computed in its own memory: Transformers writes the new state
    there in any case.
    """
    donate = not torch.is_grad_enabled()
    out, longer = mechanism.extend(cache, **inputs, backend=backend, donate=donate)
    return out, longer
