"""CCQ: queries that are contracted by the covariance of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import (
    Leaf,
    Mechanism,
    Offers,
    Preconditioner,
    Step,
    options,
    step,
    with_base,
)
from precondattn.preconditioners.qk_norm import QKNorm
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.query_weighted import QueryWeightedQuery
from precondattn.spec.softmax import Softmax


@dataclass(frozen=True)
class CCQ(Preconditioner):
    """CCQ: o = base(q^c, k, v), q^c = (I − λ Σ) q̄, where Σ is the running covariance of k̄.

    q̄ and k̄ are queries and keys scaled to length 1. λ in [0, 1] is an input `contraction`
    (b, t, h), which `contraction_gate` computes from learnt parameters. With λ = 0, CCQ is the base
    on q̄. The spectrum of I − λΣ is in [1 − λ, 1] for any number of tokens. There may be more value
    heads than query heads, and more query heads than key heads; the query heads of a key head share
    its statistics.

    Source: CCQ (arXiv 2606.01294), Eq. 8–12, Algorithms 1 and 2, App. I.

    Parameters
    ----------
    base : Mechanism
        A causal base with one score map that does not normalise its queries, which would undo the
        contraction of their length.
    covariance : {"running", "decayed", "query_weighted"}
        The weights of the keys in Σ. "running": all keys so far have equal weight. "decayed": the
        weights decay like the state of the base, which must have a gate per query head or per key
        channel (whose mean is taken). "query_weighted": the query's softmax weights, which take
        quadratic time and are meant for comparisons.
    backbone_key : {"auto", "raw", "unit"}
        Whether the base reads k or k̄; "auto" is k̄ for the delta rule, and k for all others.
    tau : float
        The temperature of "query_weighted".
    eps : float
        The ε in L2(x) = x / √(‖x‖² + ε).

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> unit = q / np.linalg.vector_norm(q, axis=-1, keepdims=True)
    >>> out = pa.CCQ(pa.Linear(), eps=0)(q, k, v, contraction=np.zeros((1, 5, 2)))
    >>> bool(np.allclose(out, pa.Linear()(unit, k, v)))
    True
    """

    name: ClassVar[str] = "ccq"
    variants: ClassVar[tuple[str, ...]] = (
        "ccq(hedgehog(gla))",
        "ccq[covariance=decayed](gla)",
        "ccq[covariance=decayed](gated_delta)",
        "ccq[covariance=decayed](retention)",
        "ccq[covariance=query_weighted](linear)",
        "ccq[covariance=query_weighted,tau=0.3](linear)",
        "ccq[backbone_key=unit](gla)",
        "ccq[backbone_key=raw](delta)",
    )

    base: Mechanism = Softmax()
    covariance: str = options.choice("running", "decayed", "query_weighted")
    backbone_key: str = options.choice("auto", "raw", "unit")
    tau: float = options.positive(1.0)
    eps: float = options.non_negative(1e-6)

    def check_together(self) -> None:
        if self.tau != type(self).tau and self.covariance != "query_weighted":
            raise ValueError(
                f"ccq: tau belongs to covariance='query_weighted'; found tau={self.tau:g} and "
                f"covariance={self.covariance!r}"
            )

    @cached_property
    def offers(self) -> Offers:
        base = self.base.offers
        unit = (self._unit_key(),) if self._reads_unit_keys else ()
        return base._replace(
            key_steps=(*unit, *base.key_steps),
            normalizes_query=True,
            unit_keys=base.unit_keys and not self._reads_unit_keys,
        )

    def refuses(self) -> str | None:
        base = self.base.offers
        if (missed := self._refuses_several_keys()) is not None:
            return missed
        if not base.causal:
            return "its covariance is that of the keys so far, and the base is not causal"
        if base.normalizes_query:
            return (
                "the base normalises its queries, which divides out the contraction of their "
                "length, and ccq normalises them itself"
            )
        if self.covariance == "decayed" and base.decay is None:
            return "covariance=decayed follows the decay of the base, and the base has none"
        return None

    def _instead(self) -> Mechanism | None:
        if isinstance(self.base, CCQ):
            return with_base(self, self.base.base)
        if isinstance(self.base, QKNorm):
            reads_unit = self.base.base.offers.unit_keys or self.backbone_key == "unit"
            changes = {} if reads_unit else {"backbone_key": "unit"}
            return with_base(self, self.base.base, **changes)
        return super()._instead()

    @property
    def _reads_unit_keys(self) -> bool:
        is_unit = {"raw": False, "unit": True}
        return is_unit.get(self.backbone_key, self.base.offers.unit_keys)

    def _unit_key(self) -> Step:
        return step("k_unit", L2Norm(self.eps), x="k")

    def conditioned_query(self) -> Leaf:
        """The leaf that contracts the query."""
        if self.covariance == "query_weighted":
            return QueryWeightedQuery(self.tau, self.eps)
        decay = self.base.offers.decay if self.covariance == "decayed" else None
        return ConditionedQuery(decay or "none", self.eps)

    def steps(self) -> tuple[Step, ...]:
        conditioned = step("q_conditioned", self.conditioned_query())
        if not self._reads_unit_keys:
            return (conditioned, step("out", self.base, q="q_conditioned"))
        base = step("out", self.base, q="q_conditioned", k="k_unit")
        return (conditioned, self._unit_key(), base)
