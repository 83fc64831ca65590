"""Mamba-2's scan and step with the arguments of Transformers' own functions.

    q = C,  k = B,  v = Δ x,  g = Δ A,      y = ssd(q, k, v, g) + D x,      Δ = softplus(dt + bias)

Transformers computes it in float32. Its state is (b, heads, e, d), the transpose of ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Tree
from precondattn.given import Given
from precondattn.integrations.transformers.linear.computed import Functions
from precondattn.integrations.transformers.linear.packed import refuse_packed
from precondattn.integrations.transformers.linear.states import computed_from
from precondattn.spec.ssd import SSD

CHUNKS, STEP = "mamba2_chunk_scan", "mamba2_selective_state_update"
"""The names of Transformers' functions for many tokens and for one."""
RULE = SSD()


def functions(backend: BackendNames) -> Functions:
    """The functions that replace both functions."""

    def run(
        x: Tensor,
        size: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        skip: Tensor | None,
        state: Tensor | None,
        returns_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs (b, t, u, e) for step sizes Δ (b, t, u), and the state if it is wanted."""
        x = x.float()
        a, b, c = (array.float() for array in given)
        inputs = {"q": c, "k": b, "v": size[..., None] * x, "g": size * a}
        before = None if state is None else (state.mT,)
        y, after = computed_from(RULE, inputs, before, returns_state, backend)
        if skip is not None:
            y = y + skip.float()[:, None] * x
        return y, None if after is None else after[0].mT

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
        **kwargs: Given,
    ) -> Tree:
        refuse_packed(kwargs)
        if kwargs.get("z") is not None:
            raise ValueError("z: Transformers' own scan has no gate; found one")
        size = step_size(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        y, state = run(hidden_states, size, (A, B, C), D, initial_states, return_final_states)
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
        **kwargs: Given,
    ) -> Tensor:
        """The output of one token; Δ, A, D and the bias are expanded over the state's axes."""
        refuse_packed(kwargs)
        own_bias = None if dt_bias is None else dt_bias[:, 0]
        y, after = run(
            hidden_states[:, None],
            step_size(dt[:, None, :, 0], own_bias, dt_softplus),
            (A[:, 0, 0], B[:, None], C[:, None]),
            None if D is None else D[:, 0],
            state,
            True,
        )
        if after is not None and not _is_in_place(after, state):
            state.copy_(after)
        y = y[:, 0] if z is None else y[:, 0] * silu(z)
        return y.to(hidden_states.dtype)

    return {CHUNKS: scan, STEP: step}


def _is_in_place(after: Tensor, state: Tensor) -> bool:
    """Whether the new state has the memory of the old one, which a compiler does not know."""
    return not torch.compiler.is_compiling() and after.data_ptr() == state.data_ptr()


def step_size(dt: Tensor, bias: Tensor | None, has_softplus: bool) -> Tensor:
    """The step size Δ = softplus(dt + bias) in float32; softplus and bias are optional."""
    size = dt.float()
    if bias is not None:
        size = size + bias.float()
    return softplus(size) if has_softplus else size
