"""Recurrences with the arguments of flash-linear-attention's functions.

All of its functions for one recurrence (in chunks, token by token) have the same arguments. They
compute in float32 and return the dtype of the queries. A state is (n, heads, d, e) in float32, or
its transpose, for n sequences. A missing token has k = v = 0, g = 0 and β = 0, which changes no
state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from inspect import signature

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Tree
from precondattn.given import Given
from precondattn.integrations.transformers.linear.computed import Functions
from precondattn.integrations.transformers.linear.fla.delta_gates import (
    delta_inputs,
    unit_rows_of,
)
from precondattn.integrations.transformers.linear.fla.ragged import as_batch, as_row, valid_slots
from precondattn.integrations.transformers.linear.states import States, computed_from
from precondattn.limits import KEPT
from precondattn.spec.delta import Delta, GatedDelta
from precondattn.spec.gla import GLA
from precondattn.spec.gsa import GSA
from precondattn.spec.kda import KDA
from precondattn.spec.linear import Linear
from precondattn.spec.ssd import SSD

NAMES = {
    "gla": ("chunk_gla", "fused_recurrent_gla"),
    "gated_delta": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "delta": ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gsa": ("chunk_gsa", "fused_recurrent_gsa"),
    "linear": ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"),
    "retention": (
        "chunk_retention",
        "fused_chunk_retention",
        "fused_recurrent_retention",
        "parallel_retention",
    ),
}
"""The functions of flash-linear-attention by recurrence, listed by hand because their arguments
differ."""
PREPARED = (*signature(delta_inputs).parameters,)[5:]
"""The arguments of both gated delta rules that say how q, k, g and beta are made first."""


def recurrences(backend: BackendNames) -> Functions:
    """The functions that replace these functions."""

    def run(
        mechanism: Mechanism,
        scale: float | None,
        inputs: dict[str, Tensor],
        states: States | None,
        returns_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, States | None]:
        dtype, total = inputs["q"].dtype, inputs["q"].shape[1]
        inputs = {name: x.float() for name, x in inputs.items()}
        valid = None if cu_seqlens is None else valid_slots(cu_seqlens)
        if cu_seqlens is not None and valid is not None:
            inputs = {name: as_batch(x, cu_seqlens, valid) for name, x in inputs.items()}
        scaled = _with_scale(mechanism, scale)
        out, after = computed_from(scaled, inputs, states, returns_state, backend)
        return (out if valid is None else as_row(out, valid, total)).to(dtype), after

    def one_state(
        mechanism: Mechanism,
        inputs: dict[str, Tensor],
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        **others: Given,
    ) -> tuple[Tensor, Tensor | None]:
        _refuse(others)
        before = _turned(initial_state, state_v_first)
        states = None if before is None else (before,)
        wanted = bool(output_final_state)
        out, after = run(mechanism, scale, inputs, states, wanted, cu_seqlens)
        return out, None if after is None else _turned(after[0], state_v_first)

    def gla(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        gk: Tensor | None = None,
        **others: Given,
    ) -> Tree:
        decay = gk if g is None else g
        if decay is None:
            raise ValueError("gk: a decay for each channel expected; found None")
        return one_state(GLA(), {"q": q, "k": k, "v": v, "g": decay}, **others)

    def gated_delta(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **others: Given
    ) -> Tree:
        return one_state(GatedDelta(), delta_inputs(q, k, v, g, beta, **_taken(others)), **others)

    def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **others: Given) -> Tree:
        return one_state(KDA(), delta_inputs(q, k, v, g, beta, **_taken(others)), **others)

    def delta(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Given,
    ) -> Tree:
        if use_qk_l2norm_in_kernel:
            q, k = unit_rows_of(q), unit_rows_of(k)
        return one_state(Delta(), {"q": q, "k": k, "v": v, "beta": beta}, **others)

    def retention(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **others: Given
    ) -> Tree:
        """SSD with the decay log γ, because a missing token must not decay the state."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale  # The scale of SSD is 1.
        heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
        g = torch.log1p(-torch.exp2(-5 - heads)).expand(q.shape[:3])
        return one_state(SSD(), {"q": q, "k": k, "v": v, "g": g}, scale=scale, **others)

    def gsa(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor,
        g: Tensor | None = None,
        scale: float | None = None,
        initial_state: States | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        **others: Given,
    ) -> tuple[Tensor, States | None]:
        _refuse(others)
        if g is None:
            raise ValueError("g: a decay for each slot expected; found None")
        inputs = {"q": q, "k": k, "v": v, "s": s, "g": g}
        return run(GSA(), scale, inputs, initial_state, bool(output_final_state), cu_seqlens)

    def linear(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        initial_state: Tree = None,
        output_final_state: bool = False,
        normalize: bool = True,
        cu_seqlens: Tensor | None = None,
        **others: Given,
    ) -> Tree:
        _refuse(others)
        inputs, wanted = {"q": q, "k": k, "v": v}, bool(output_final_state)
        if normalize and initial_state is not None:
            # The sum of keys is (n, 1, heads, d).
            initial_state = (initial_state[0], initial_state[1][:, 0])
        elif initial_state is not None:
            initial_state = (initial_state,)
        mechanism = Linear(normalize=normalize)
        out, after = run(mechanism, scale, inputs, initial_state, wanted, cu_seqlens)
        if after is None:
            return out, None
        return out, (after[0], after[1][:, None]) if normalize else after[0]

    own: Functions
    own = {"gla": gla, "gated_delta": gated_delta, "kda": kda, "delta": delta}
    own |= {"gsa": gsa, "linear": linear, "retention": retention}
    return {name: own[kind] for kind, names in NAMES.items() for name in names}


def _taken(others: dict[str, Given]) -> dict[str, Given]:
    """The arguments for `delta_inputs`, which are no longer among the others."""
    return {name: others.pop(name) for name in PREPARED if name in others}


@lru_cache(maxsize=KEPT)
def _with_scale(mechanism: Mechanism, scale: float | None) -> Mechanism:
    scaled: Mechanism = mechanism if scale is None else replace(mechanism, scale=scale)
    return scaled


def _turned(state: Tensor | None, is_value_first: bool) -> Tensor | None:
    return state.mT if is_value_first and state is not None else state


def _refuse(others: dict[str, Given]) -> None:
    """Raise an error for a set argument that is not supported, except hints for kernels."""
    for name in ("cu_seqlens_cpu", "chunk_indices", "chunk_size", "checkpoint_level", "safe_gate"):
        others.pop(name, None)
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: not supported; found {value!r}")
