"""QK-norm: queries and keys normalised before they meet (`spec/rms_norm.py`, `layer_norm.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.mechanism import Mechanism, Offers, Preconditioner, Step, step
from precondattn.options import choice, flag, non_negative
from precondattn.preconditioners.query_side import misses_second_map
from precondattn.spec.layer_norm import LayerNorm
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.softmax import Softmax


@dataclass(frozen=True)
class QKNorm(Preconditioner):
    """o = base(norm(q), norm(k), v).

    LASER puts a layer norm here, Table 5 of LUCID an RMS norm. A LUCID around it builds Φ from the
    normalised keys, as one inside it does.

    Parameters
    ----------
    base : Mechanism
        Any base with one map of scores that does not normalise its queries itself.
    norm : {"rms", "layer"}
        Root-mean-square norm, or layer norm without bias.
    eps : float
        Inside the root.
    gain : bool
        Whether there are inputs `q_gain` and `k_gain` (d) that multiply the normalised rows.

    Source
    ------
    Dehghani et al. 2023 (arXiv 2302.05442) §2; LASER (arXiv 2411.03493) §4.1; LUCID Table 5.

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
    )

    base: Mechanism = Softmax()
    norm: str = choice("rms", "layer")
    eps: float = non_negative(1e-6)
    gain: bool = flag(False)

    @property
    def offers(self) -> Offers:
        base = self.base.offers
        return base._replace(key_steps=(self._of("k"), *base.key_steps), normalizes_query=True)

    def refuses(self) -> str | None:
        missed = misses_second_map(self.name, self.base)
        if missed is None and self.base.offers.normalizes_query:
            return "the base normalises its queries already"
        return missed

    def _of(self, name: str) -> Step:
        norm = (RMSNorm if self.norm == "rms" else LayerNorm)(self.eps, self.gain)
        gain = {"gain": f"{name}_gain"} if self.gain else {}
        return step(f"{name}_norm", norm, x=name, **gain)

    def steps(self) -> tuple[Step, ...]:
        return (self._of("q"), self._of("k"), step("out", self.base, q="q_norm", k="k_norm"))
