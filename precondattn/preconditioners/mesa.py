"""Mesa: queries that are multiplied by the inverse second moment of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Mechanism, Preconditioner, Step, options, step
from precondattn.spec.mesa_query import MesaQuery
from precondattn.spec.ssd import SSD
from precondattn.spec.stateful import Stateful


@dataclass(frozen=True)
class Mesa(Preconditioner):
    """Mesa: o = base(q*, k, v), q* = (H + diag λ)⁻¹ q, H_t = e^{g_t} H_{t−1} + β_t k_t k_tᵀ.

    H decays like the state of the base. λ > 0 is an input `lam_mesa` (h, d). With the option
    `beta`, β is an input `beta_mesa` (b, s, n). `mesa[beta=true](ssd)` with β v in place of v is
    MesaNet. For λ → ∞ it is the base divided by λ. Keys should have length 1; then the condition
    number of H + diag λ is at most 1 + N / min λ.

    Source: MesaNet (arXiv 2506.05233).

    Parameters
    ----------
    base : Mechanism
        A base with a state that does not normalise its queries: the linear family and delta rules.
    decay : bool
        Whether H decays; if not, all keys have equal weight.
    beta : bool
        Whether there is an input `beta_mesa`.
    tolerance, iterations : optional
        The options of the iterative solve (`MesaQuery`).

    Examples
    --------
    It is the ridge regression of values on keys, evaluated at the query:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.normal(size=(1, 9, 1, 4)), rng.normal(size=(1, 9, 1, 3))
    >>> out = pa.Mesa(pa.Linear(scale=1))(k, k, v, lam_mesa=np.full((1, 4), 0.5))
    >>> keys, values = k[0, :, 0], v[0, :, 0]
    >>> fit = np.linalg.solve(keys.T @ keys + 0.5 * np.eye(4), keys.T @ values)
    >>> bool(np.allclose(out[0, -1, 0], keys[-1] @ fit))
    True
    """

    name: ClassVar[str] = "mesa"
    variants: ClassVar[tuple[str, ...]] = (
        "mesa[beta=true]",
        "mesa[decay=false](gated_delta)",
        "mesa(gla)",
        "mesa(retention)",
        "mesa(linear)",
    )

    base: Mechanism = SSD()
    decay: bool = options.flag(True)
    beta: bool = options.flag(False)
    tolerance: float | None = options.positive_or_none()
    iterations: int | None = options.count_or_none()

    def refuses(self) -> str | None:
        if (missed := self._refuses_several_keys()) is not None:
            return missed
        if not self.base.offers.causal:
            return "its regression is that of the keys so far, and the base is not causal"
        leaves: tuple[object, ...] = self.base.program.leaves
        if not any(isinstance(leaf, Stateful) and leaf.role == "base" for leaf in leaves):
            return (
                "it solves a regression that the state of its base reads, and the base has none: "
                "it takes the linear family and delta rules"
            )
        if self.base.offers.normalizes_query:
            return (
                "the base normalises its queries, which divides out the length that the solve "
                "gives them"
            )
        return None

    def query(self) -> MesaQuery:
        """The leaf that solves for the query."""
        decay = (self.base.offers.decay if self.decay else None) or "none"
        return MesaQuery(decay, self.beta, self.tolerance, self.iterations)

    def steps(self) -> tuple[Step, ...]:
        return step("q_mesa", self.query()), step("out", self.base, q="q_mesa")
