"""Feature maps: a base on features φ(q) and φ(k) of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, TokenWise, options, step
from precondattn.spec.elu_plus_one import EluPlusOne
from precondattn.spec.hedgehog import HedgehogMap
from precondattn.spec.softmax import Softmax


class FeatureMap(Preconditioner):
    """The base class of feature maps: o = base(φ(q), φ(k), v); subclasses define φ."""

    base: Mechanism

    def feature_map(self) -> TokenWise:
        """The leaf φ."""
        raise NotImplementedError

    def parameters(self, name: str) -> dict[str, str]:
        """The names of φ's other inputs for `name`, which is q or k."""
        return {}

    @cached_property
    def offers(self) -> Offers:
        base = self.base.offers
        return base._replace(key_steps=(self._of("k"), *base.key_steps), unit_keys=False)

    def refuses(self) -> str | None:
        parameters = [value for name in "qk" for value in self.parameters(name).values()]
        duplicates = [name for name in parameters if name in self.base.inputs]
        if duplicates:
            return (
                f"{', '.join(duplicates)} are inputs of the base already, and would be used twice"
            )
        return self._refuses_several_keys()

    def _of(self, name: str) -> Step:
        return step(f"{name}_map", self.feature_map(), x=name, **self.parameters(name))

    def steps(self) -> tuple[Step, ...]:
        return (self._of("q"), self._of("k"), step("out", self.base, q="q_map", k="k_map"))


@dataclass(frozen=True)
class Elu1(FeatureMap):
    """The feature map φ(x) = elu(x) + 1, which is positive: o = base(φ(q), φ(k), v).

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 7.

    Parameters
    ----------
    base : Mechanism
        Any base with one score map, except the delta rule, whose keys must not be longer than 1. It
        is meant for `Linear(normalize=True)`, whose weights are then positive and sum to 1, up to
        its `eps`.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k = np.random.default_rng(0).normal(size=(2, 1, 5, 2, 4))
    >>> mean = pa.Elu1(pa.Linear(normalize=True))
    >>> bool(np.allclose(mean(q, k, np.ones((1, 5, 2, 3))), 1))
    True
    """

    name: ClassVar[str] = "elu1"
    variants: ClassVar[tuple[str, ...]] = ("elu1(linear[normalize=true])",)

    base: Mechanism = Softmax()

    def feature_map(self) -> TokenWise:
        leaf: TokenWise = EluPlusOne()
        return leaf

    def refuses(self) -> str | None:
        if self.base.offers.unit_keys:
            return "elu(k) + 1 is longer than 1, and the delta rule diverges with such keys"
        return super().refuses()


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """The feature map φ(x) = softmax([y, −y]) of width 2d, with y = c (W x + b).

    o = base(φ(q), φ(k), v). The inputs `q_weight` and `k_weight` are W for queries and keys, and
    `q_bias` and `k_bias` are b. Pass the same arrays for both if the maps are tied. A base with a
    gate per key channel has 2d channels.

    Source: Hedgehog (arXiv 2402.04347), Eq. 6; CCQ (arXiv 2606.01294) 4.1.

    Parameters
    ----------
    base : Mechanism
        Any base with one score map. The features are positive and sum to 1.
    factor : float
        The factor c. flash-linear-attention has 2.
    per : {"layer", "head"}
        Whether W (d, d) and b (d) are shared by all heads, or each head has its own, W (h, d, d).

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> identity, zero = np.eye(4), np.zeros(4)
    >>> maps = dict(q_weight=identity, q_bias=zero, k_weight=identity, k_bias=zero)
    >>> pa.Hedgehog(pa.GLA())(q, k, v, g=np.zeros((1, 5, 2, 8)), **maps).shape
    (1, 5, 2, 4)
    """

    name: ClassVar[str] = "hedgehog"
    variants: ClassVar[tuple[str, ...]] = (
        "hedgehog(gla)",
        "hedgehog[factor=2,per=head](gla)",
        "hedgehog(linear[normalize=true])",
    )

    base: Mechanism = Softmax()
    factor: float = options.positive(1.0)
    per: str = options.choice("layer", "head")

    def feature_map(self) -> TokenWise:
        return HedgehogMap(self.factor, self.per)

    def parameters(self, name: str) -> dict[str, str]:
        return {"weight": f"{name}_weight", "bias": f"{name}_bias"}
