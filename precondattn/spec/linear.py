"""Linear attention: o_t = s S_tᵀ q_t, S_t = S_{t−1} + k_t v_tᵀ.

Optionally normalised, with the denominator as one more entry per key channel in the state:

    o_t = S_tᵀ q_t / (z_tᵀ q_t + ε / s),    z_t = z_{t−1} + k_t.

Source: Katharopoulos et al. 2020 (arXiv 2006.16236) Eq. 18–20. z is the column of S for a value
channel that is 1 at every token, so the recurrence is the same. With o = a / c:

    da = do / c,    dc = −(do·o) / c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Recurrence, options
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn.spec.linear_family import LinearFamily, queries_of_states, rows_of_states
from precondattn.spec.recurrence import Form, Stream


def with_mass(state: ByName) -> Array:
    """The state S with z as an additional column."""
    return namespace(state["mass"]).concat([state["state"], state["mass"][..., None]], axis=-1)


@dataclass(frozen=True)
class Linear(LinearFamily):
    """Linear attention: o_i = s Σ_{j≤i} (q_i·k_j) v_j, in linear time. Causal.

    Keys and values may have fewer heads than queries (n < h). There is one state per key/value
    head.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 18–20.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.
    normalize : bool
        Whether the weights of a row are divided by their sum plus `eps`. Use it with non-negative
        features, such as those of `Elu1` and `Hedgehog`: for others the sum can be 0 or close to
        it, and the output is then arbitrary.
    eps : float
        The ε that is added to the sum of the scaled weights. With 0, a row of zero weights has
        output 0.

    Examples
    --------
    With q = k and d = 1 the output is a running sum, or, normalised, a running mean:

    >>> import numpy as np, precondattn as pa
    >>> ones, v = np.ones((1, 4, 1, 1)), np.asarray([2.0, 4.0, 6.0, 8.0]).reshape(1, 4, 1, 1)
    >>> pa.Linear()(ones, ones, v).ravel()
    array([ 2.,  6., 12., 20.])
    >>> pa.Linear(normalize=True, eps=0)(ones, ones, v).ravel()
    array([2., 3., 4., 5.])
    """

    name: ClassVar[str] = "linear"
    variants: ClassVar[tuple[str, ...]] = ("linear[scale=0.3]",)

    normalize: bool = options.flag(False)
    eps: float = options.non_negative(1e-10)

    @property
    def declares(self) -> Recurrence:
        return Recurrence("add", normaliser="sum" if self.normalize else None)

    def check_together(self) -> None:
        if not self.normalize and self.eps != type(self).eps:
            raise ValueError(f"linear: eps belongs to normalize=true; found eps={self.eps:g}")

    def slots(self) -> tuple[Slot, ...]:
        if not self.normalize:
            return super().slots()
        return (*super().slots(), Slot("mass", "linear.mass({k})", "b n d", wide=True, symbol="z"))

    def stream(self, x: ByName, frame: Frame) -> Stream:
        stream = super().stream(x, frame)
        if not self.normalize:
            return stream
        xp = namespace(stream.v)
        return stream._replace(v=xp.concat([stream.v, xp.ones_like(stream.v[..., :1])], axis=-1))

    def _sum_of_weights(self, mass: Array) -> Array:
        """The denominator; 1 where it is 0."""
        total = mass + self.eps
        return namespace(mass).where(total == 0, 1.0, total)

    @property
    def computes_with_states(self) -> bool:
        return self.normalize

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        if not self.normalize:
            return super().run(state, x, frame, form)
        o, final = form.forward(self.stream(x, frame), with_mass(state))
        rows = rows_of_states(o)
        out = rows[..., :-1] / self._sum_of_weights(rows[..., -1:])
        return out, {"state": final[..., :-1], "mass": final[..., -1]}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        if not self.normalize:
            return super().run_vjp(state, x, frame, cotangent, d_state, form)
        xp = namespace(cotangent)
        stream, start = self.stream(x, frame), with_mass(state)
        rows = rows_of_states(form.forward(stream, start)[0])
        total = self._sum_of_weights(rows[..., -1:])
        d_sum = cotangent / total
        d_mass = -row_sum(d_sum * (rows[..., :-1] / total))
        d_rows = queries_of_states(xp.concat([d_sum, d_mass], axis=-1), stream.k.shape[1])
        d = form.vjp(stream, start, d_rows, with_mass(d_state))
        gradients = self.gradients(x, d.stream._replace(v=d.stream.v[..., :-1]), frame)
        return gradients, {"state": d.state[..., :-1], "mass": d.state[..., -1]}
