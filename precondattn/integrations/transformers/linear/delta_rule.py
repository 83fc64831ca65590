"""A delta rule with a gate, with the arguments of Transformers' own functions.

    q̄ = L2(q),  k̄ = L2(k),      o = rule(q̄, k̄, v, g, β)

Transformers computes it in float32 and returns the dtype of the queries; so does this. The state
is (b, value heads, d, e) in float32 in both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.given import Given
from precondattn.integrations.transformers.linear.computed import Functions
from precondattn.integrations.transformers.linear.packed import refuse_packed
from precondattn.integrations.transformers.linear.states import computed_from

Compute = Callable[[dict[str, Tensor], bool, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""A function of inputs in float32, whether to normalise q and k, the old state, and whether to
return the new state, which returns the output and the new state or None."""


def computed_by(rule: Mechanism, names: tuple[str, ...], backend: BackendNames) -> Functions:
    """The functions that replace Transformers' functions of these names."""

    def compute(
        inputs: dict[str, Tensor], normalise: bool, state: Tensor | None, returns_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        if normalise:
            inputs["q"], inputs["k"] = _both_unit_rows(inputs["q"], inputs["k"])
        states = None if state is None else (state,)
        out, after = computed_from(rule, inputs, states, returns_state, backend)
        return out, None if after is None else after[0]

    return called_as_by_transformers(compute, names)


def called_as_by_transformers(compute: Compute, names: tuple[str, ...]) -> Functions:
    """Functions with these names, which have the same arguments in Transformers."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Given,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_packed(kwargs)
        inputs = {"q": query.float(), "k": key.float(), "v": value.float()}
        inputs |= {"g": g.float(), "beta": beta.float()}
        out, state = compute(inputs, use_qk_l2norm_in_kernel, initial_state, output_final_state)
        return out.to(query.dtype), state

    return dict.fromkeys(names, rule)


def _both_unit_rows(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """L2(q) and L2(k); for one token they are normalised together, with half as many calls."""
    if q.shape[1] > 1:
        return unit_rows(q), unit_rows(k)
    q, k = unit_rows(torch.cat((q, k), 1)).split(1, 1)
    return q, k


def unit_rows(x: Tensor) -> Tensor:
    """The normalised rows L2(x) = x / √(‖x‖² + 10⁻⁶), as Transformers computes them."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
