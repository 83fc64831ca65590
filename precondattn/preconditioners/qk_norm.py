"""QK-norm: queries and keys are normalised before the scores (`spec/norm.py`, its subclasses)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, options, step, with_base
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.layer_norm import LayerNorm
from precondattn.spec.norm import RowNorm
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.softmax import Softmax

NORMS: dict[str, type[RowNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "l2": L2Norm}


@dataclass(frozen=True)
class QKNorm(Preconditioner):
    """QK-norm: o = base(norm(q), norm(k), v).

    LASER uses a layer norm, Table 5 of LUCID an RMS norm, and layers with a delta rule an L2 norm.
    LUCID outside or inside it computes Φ from the normalised keys.

    Source: Dehghani et al. 2023 (arXiv 2302.05442) 2; LASER (arXiv 2411.03493) 4.1; LUCID Table 5.

    Parameters
    ----------
    base : Mechanism
        Any base with one score map that does not normalise its queries itself.
    norm : {"rms", "layer", "l2"}
        The root-mean-square norm, the layer norm without bias, or scaling to length 1. The delta
        rule allows only "l2" without gain, because it diverges for longer keys.
    eps : float
        The ε inside the square root.
    gain : bool
        Whether there are inputs `q_gain` and `k_gain` (d) that multiply the normalised rows.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> normed = pa.QKNorm(eps=0)
    >>> bool(np.allclose(normed(q, k, v), normed(3 * q, 7 * k, v)))
    True
    """

    name: ClassVar[str] = "qk_norm"
    variants: ClassVar[tuple[str, ...]] = (
        "qk_norm[gain=true]",
        "qk_norm[norm=layer]",
        "qk_norm[norm=layer,gain=true]",
        "qk_norm[eps=0]",
        "qk_norm[norm=l2](linear)",
        "qk_norm[norm=l2](delta)",
        "qk_norm[norm=l2](gated_delta)",
    )

    base: Mechanism = Softmax()
    norm: str = options.choice("rms", "layer", "l2")
    eps: float = options.non_negative(1e-6)
    gain: bool = options.flag(False)

    @cached_property
    def offers(self) -> Offers:
        base = self.base.offers
        return base._replace(
            key_steps=(self._of("k"), *base.key_steps), normalizes_query=True, unit_keys=False
        )

    def refuses(self) -> str | None:
        missed = self._refuses_several_keys()
        if missed is None and self.base.offers.normalizes_query:
            return "the base normalises its queries already"
        if missed is None and self.base.offers.unit_keys and (self.norm != "l2" or self.gain):
            return "the delta rule diverges with keys longer than 1, as this norm makes them"
        return missed

    def _instead(self) -> Mechanism | None:
        return super()._instead() or with_base(self, self.base, norm="l2", gain=False)

    def _of(self, name: str) -> Step:
        norm = NORMS[self.norm](self.eps, self.gain)
        gain = {"gain": f"{name}_gain"} if self.gain else {}
        return step(f"{name}_norm", norm, x=name, **gain)

    def steps(self) -> tuple[Step, ...]:
        return (self._of("q"), self._of("k"), step("out", self.base, q="q_norm", k="k_norm"))
