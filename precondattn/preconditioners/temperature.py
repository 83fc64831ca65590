"""Temperature: logits divided by τ (`spec/tempered.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Mechanism, Preconditioner, Step, options, step
from precondattn.spec.softmax import Softmax
from precondattn.spec.tempered import Tempered


@dataclass(frozen=True)
class Temperature(Preconditioner):
    """A learnt temperature: logits s ⟨q, k⟩ / τ, where τ > 0 is an input `tau`.

    A bias or a forget gate of the base is not divided by τ. LUCID outside or inside it is not
    affected, because Φ depends on keys only.

    Source: LASER (arXiv 2411.03493) 4.1.

    Parameters
    ----------
    base : Mechanism
        Any base that does not normalise its queries, which would undo the temperature.
    per : {"layer", "head"}
        Whether `tau` is a 0-d array, or (h,) with one number per query head.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> tempered = pa.Temperature()(q, k, v, tau=np.asarray(2.0))
    >>> bool(np.allclose(tempered, pa.Softmax(scale=0.25)(q, k, v)))
    True
    """

    name: ClassVar[str] = "temperature"
    variants: ClassVar[tuple[str, ...]] = ("temperature[per=head]",)

    base: Mechanism = Softmax()
    per: str = options.choice("layer", "head")

    def refuses(self) -> str | None:
        return self._refuses_second_map() or self._refuses_lost_length()

    def steps(self) -> tuple[Step, ...]:
        return (step("q_tempered", Tempered(self.per)), step("out", self.base, q="q_tempered"))
