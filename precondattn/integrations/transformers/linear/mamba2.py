"""Mamba-2's scan and step with the arguments of Transformers' own functions.

    q = C,  k = B,  v = Δ x,  g = Δ A,      y = ssd(q, k, v, g) + D x,      Δ = softplus(dt + bias)

Transformers computes it in float32. Its state is (b, heads, e, d), the transpose of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

from precondattn.integrations.transformers.linear.gated_delta import with_state
from precondattn.integrations.transformers.linear.packed import refuse_packed
from precondattn.interop.mamba2 import mamba2_inputs
from precondattn.spec.ssd import SSD

CHUNKS, STEP = "mamba2_chunk_scan", "mamba2_selective_state_update"
"""The names of Transformers' functions for many tokens and for one."""


def functions(backend: Any) -> dict[str, Callable[..., Any]]:
    """What to call in place of both functions."""

    def run(
        x: Tensor,
        dt: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        skip: Tensor | None,
        state: Tensor | None,
        returns_state: bool,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        x = x.float()
        inputs = mamba2_inputs(x, dt.float(), *(a.float() for a in given), **options)
        if state is None and not returns_state:
            y, after = SSD()(**inputs, backend=backend), None
        else:
            cache = SSD().init_cache(**inputs)
            if state is not None:
                cache = with_state(cache, state.float().mT)
            y, cache = SSD().extend(cache, **inputs, backend=backend)
            after = next(iter(cache.store.values())).mT
        return (y if skip is None else y + skip.float()[:, None] * x), after

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        refuse_packed(kwargs)
        if kwargs.get("z") is not None:
            raise ValueError("z: Transformers' own scan has no gate; found one")
        y, state = run(
            hidden_states,
            dt,
            (A, B, C),
            D,
            initial_states,
            return_final_states,
            dt_bias=None if dt_bias is None else dt_bias.float(),
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )
        return (y, state) if return_final_states else y

    def step(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One token. Step sizes, A, D and the bias are expanded over the axes of the state."""
        refuse_packed(kwargs)
        y, after = run(
            hidden_states[:, None],
            dt[:, None, :, 0],
            (A[:, 0, 0], B[:, None], C[:, None]),
            None if D is None else D[:, 0],
            state,
            True,
            dt_bias=None if dt_bias is None else dt_bias[:, 0].float(),
            dt_softplus=dt_softplus,
        )
        state.copy_(after)
        y = y[:, 0] if z is None else y[:, 0] * silu(z)
        return y.to(hidden_states.dtype)

    return {CHUNKS: scan, STEP: step}
