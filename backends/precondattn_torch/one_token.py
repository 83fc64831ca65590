"""One token of a recurrence, with states updated in place, by as few calls of PyTorch as possible.

S' = Γ ∘ S,    u = v  (additive),  β (v − S'ᵀ k)  (delta rule),    S = S' + k uᵀ,    o = s Sᵀ q

If queries read the state before their token, o = s (Sᵀ q + (q · (w ∘ k)) v) with the old S and the
bonus w. The result is that of `precondattn_portable.stateful.OneToken`. One token takes so little
arithmetic that the overhead of calls dominates: the states of all sequences and heads are one stack
of matrices here, without the layout that the recurrence has for many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.arrays import Array, Arrays
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.linear_family import LinearFamily
from precondattn_portable.stateful import StatefulAlgorithm
from precondattn_torch.arithmetic import stacked


class InPlaceToken(StatefulAlgorithm[LinearFamily]):
    """Algorithm of leaves that are one recurrence, whose decay, if it has one, is an input."""

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        state = past["state"]
        if frame.may_overwrite and frame.held is not None and x["k"].shape[1] == 1:
            states = stacked(state)
            if states is not None:
                return one_token(self.leaf, x, states), {"state": Replace(state)}
        return super().step(past, x, frame)


def one_token(leaf: LinearFamily, x: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The output (b, 1, heads, e) for q (b, 1, h, d), k, v; writes to `states` (b heads, d, e)."""
    count, d, e = states.shape
    recurrence = leaf.recurrence
    assert recurrence is not None
    q, k = x["q"] * leaf.scale_for(d), x["k"]
    b, _, h, _ = q.shape
    m = count // b
    if k.shape[2] < m:
        k = k.repeat_interleave(m // k.shape[2], 2)
    if h < m:
        q = q.repeat_interleave(m // h, 2)
    k, u = k.reshape(count, 1, d), x["v"].reshape(count, 1, e)
    q = q.reshape(count, -1, d)
    if recurrence.reads == "before, with a bonus":
        weight = torch.bmm((q.unflatten(0, (b, m)) * x["u"].reshape(m, -1, d)).flatten(0, 1), k.mT)
        # The bonus, and the read of the state before the token changes it.
        out = torch.baddbmm(weight * u, q, states)
    if recurrence.gate is not None:
        states.mul_(x["g"].exp().reshape(count, -1, 1))
    if recurrence.rule == "delta":
        u = torch.baddbmm(u, k, states, alpha=-1) * x["beta"].reshape(count, 1, 1)
    states.addcmul_(k.mT, u)
    if recurrence.reads == "after":
        out = torch.bmm(q, states)
    return out.reshape(b, 1, -1, e)
