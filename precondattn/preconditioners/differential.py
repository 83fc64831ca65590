"""Differential attention: the difference of two attention maps (`spec/difference.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, options, step, with_base
from precondattn.spec.difference import Difference
from precondattn.spec.softmax import Softmax


@dataclass(frozen=True)
class Differential(Preconditioner):
    """Differential attention: o = base(q, k, v) − λ base(q2, k2, v).

    Two score maps read the same values. Each map is the whole base: `differential(lucid)`
    decorrelates v by k for one map, and by k2 for the other. In the paper, heads come in pairs;
    `split_heads` and `pair_values` convert both published layouts to these inputs. The group norm
    that the published layer applies to the difference is not included.

    Source: Differential Transformer (arXiv 2410.05258) Eq. 1; LUCID Table 1; LASER 4.4.

    Parameters
    ----------
    base : Mechanism
        Any base with one score map.
    per : {"layer", "head", "token"}
        Whether λ, the input `lam`, is a 0-d array, (h,), or (b, t, h).
    paired : names
        The inputs that the two maps do not share. Each has a second input, such as `q2`.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> o = pa.Differential()(q, k, v, q2=q, k2=k, lam=np.asarray(0.25))
    >>> bool(np.allclose(o, 0.75 * pa.Softmax()(q, k, v)))
    True
    """

    name: ClassVar[str] = "differential"
    variants: ClassVar[tuple[str, ...]] = (
        "differential[per=head]",
        "differential[per=token]",
        "differential[per=head,paired=q/k/w/beta](path)",
    )

    base: Mechanism = Softmax()
    per: str = options.choice("layer", "head", "token")
    paired: tuple[str, ...] = options.names(("q", "k"))

    @cached_property
    def offers(self) -> Offers:
        # Weights may be negative and sum to 1 − λ, and there is no single score.
        second = tuple(f"{name}2" for name in self.paired)
        return self.base.offers._replace(
            metric=None, read=None, key_steps=(), paired=second, unit_rows=False, sink=False
        )

    def refuses(self) -> str | None:
        if self.base.offers.paired:
            return f"the base has two maps already, with {', '.join(self.base.offers.paired)}"
        if self.base.offers.read == "mean_and_log_sum":
            return "the difference of two logarithms of sums is not that of a difference"
        unknown = [name for name in self.paired if name not in self.base.inputs]
        if unknown:
            takes = ", ".join(self.base.inputs)
            return f"paired names {', '.join(unknown)}, and the base takes {takes}"
        return None

    def _instead(self) -> Mechanism | None:
        if "logits" in self.base.inputs:
            return with_base(self, self.base, paired=("logits",))
        return super()._instead()

    def steps(self) -> tuple[Step, ...]:
        return (
            step("o1", self.base),
            step("o2", self.base, **{name: f"{name}2" for name in self.paired}),
            step("out", Difference(self.per)),
        )
