"""Comba: a delta rule whose erasing key differs from its written key.

    o_t = s S_tᵀ q_t,    S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ

Source: Comba (arXiv 2506.02475), whose transition is a scalar plus a matrix of rank one: what is
erased is read before the state decays. With `erases="decayed"` it is read after, from e^{g_t}
S_{t−1}, as gated DeltaNet does. A token multiplies the state by e^{g} I − β k pᵀ. Along k its
eigenvalue is e^{g} − β k·p: with p = k of length 1 no direction grows for 0 ≤ β ≤ 1 + e^{g}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Recurrence, options
from precondattn.algebra.recurrence import Erase
from precondattn.cache import Slot
from precondattn.spec.linear_family import LinearFamily


@dataclass(frozen=True)
class Comba(LinearFamily):
    """Comba: o_t = s S_tᵀ q_t, S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ.

    `p` (b, s, h, d) is the key whose value is erased, and `k` is the key that is written. Queries
    and keys are not normalised here; both keys should have length at most 1. `g` and `beta`
    (b, s, u) belong to value heads, each of which has a state. Entries outside the declared ranges
    are not rejected: if β k·p > 1 + e^{g}, the state grows exponentially.

    The paper also corrects queries to q − D p, with a learnt D for each head. That does not depend
    on the state, and the recipe of the layer does it.

    Source: Comba (arXiv 2506.02475), 3.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.
    erases : {"undecayed", "decayed"}
        The state in which p is read: S_{t−1}, or e^{g_t} S_{t−1}. The two are equal up to a factor
        e^{g_t} of p.

    Examples
    --------
    With p = k, and p read in the decayed state, it is gated DeltaNet:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> x = {"g": -np.exp(rng.normal(size=(1, 5, 2))), "beta": np.full((1, 5, 2), 0.5)}
    >>> gated = pa.GatedDelta()(q, k, v, **x)
    >>> bool(np.allclose(pa.Comba(erases="decayed")(q, k, v, p=k, **x), gated))
    True
    >>> bool(np.allclose(pa.Comba()(q, k, v, p=np.exp(x["g"])[..., None] * k, **x), gated))
    True
    """

    name: ClassVar[str] = "comba"
    variants: ClassVar[tuple[str, ...]] = ("comba[scale=0.3]", "comba[erases=decayed]")
    erase_name: ClassVar[str] = "p"

    erases: str = options.choice("undecayed", "decayed")

    @property
    def declares(self) -> Recurrence:
        erase: Erase = "own key" if self.erases == "decayed" else "own key, before the decay"
        return Recurrence("delta", gate="head", erase=erase, strength="scalar", heads="u")

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            q="b t h d",
            k="b s h d unit row",
            v="b s u e",
            p="b s h d unit row",
            g="b s u in (-inf, 0]",
            beta=f"b s u in [0, {1 if self.erases == 'undecayed' else 2}]",
        )

    def slots(self) -> tuple[Slot, ...]:
        (slot,) = super().slots()
        option = "" if self.erases == type(self).erases else "[erases=decayed]"
        return (slot._replace(holds=slot.holds.replace("comba", f"comba{option}", 1)),)
