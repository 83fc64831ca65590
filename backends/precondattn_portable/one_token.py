"""One token of the recurrence, by its definition, without chunks.

S' = Γ ∘ S,    u = v  (additive),  β (v − S'ᵀ a)  (delta rule),    S = S' + k uᵀ,    o = Sᵀ q

with a the key that is erased. If a is given as `undecayed`, Sᵀ a replaces S'ᵀ a.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import transpose
from precondattn.spec.recurrence import AllTokens, Stream, erased, recurrent_vjp
from precondattn_portable.arithmetic import Arithmetic


class OneToken(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`) for streams of one token.

    With `in_place`, the new state is written to the old one's memory if the library supports it.
    """

    vjp = staticmethod(recurrent_vjp)

    def __init__(self, ops: Arithmetic, *, decays: bool, in_place: bool = False) -> None:
        self.ops, self.decays, self.in_place = ops, decays, in_place

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        ops, in_place = self.ops, self.in_place
        if x.undecayed is not None:
            from_state = ops.product(x.undecayed, state)
        if self.decays:
            kept = namespace(state).exp(x.g[:, :, 0, ...])
            state = ops.multiply(state, kept) if in_place else state * kept
        u = x.v
        if x.beta is not None:
            if x.undecayed is None:
                from_state = ops.product(erased(x), state)
            u = x.beta[..., None] * (u - from_state)
        add = ops.add_multiple if in_place else ops.plus_product
        state = add(state, transpose(x.k), u)
        return ops.product(x.q[:, :, 0, ...], state)[:, :, None, ...], state
