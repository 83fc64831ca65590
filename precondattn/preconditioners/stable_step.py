"""Stable steps: a delta rule whose strengths are reduced according to the key's length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, options, step
from precondattn.spec.delta import GatedDelta
from precondattn.spec.stable_strength import StableBeta, StableChannels


@dataclass(frozen=True)
class StableStep(Preconditioner):
    """A delta rule that is stable for keys of any length: φ(c) β in place of β, with c = β ‖k‖².

    The rule "implicit" is φ = 1 / (1 + c), and "exact" is φ = (1 − e^{−c}) / c. Along k the state
    is multiplied by 1 / (1 + c) or e^{−c}, for any non-negative β. So keys need not have length 1,
    and `beta` is expected in [0, ∞). For `gdn2`, φ(c) multiplies both strengths b and w, with c = Σ
    b k².

    Source: Longhorn (arXiv 2407.14207); error-free linear attention (arXiv 2512.12602).

    Parameters
    ----------
    base : Mechanism
        A delta rule that erases with the key it writes: `Delta`, `GatedDelta`, `KDA` or `GDN2`; or
        a preconditioner around one of them that does not change its keys.
    rule : {"implicit", "exact"}
        "implicit" is the default, because β still has an effect for long keys: its gradient falls
        like 1/c², and with "exact" like e^{−c}. For small c both are the unchanged delta rule.

    Examples
    --------
    If a key is repeated with a large β, its value is replaced, whatever its length:

    >>> import numpy as np, precondattn as pa
    >>> k, beta = np.full((1, 3, 1, 1), 50.0), np.full((1, 3, 1), 10.0)
    >>> v = np.asarray([2.0, 5.0, 7.0]).reshape(1, 3, 1, 1)
    >>> pa.StableStep(pa.Delta(), rule="exact")(k, k, v, beta=beta).ravel()
    array([2., 5., 7.])
    """

    name: ClassVar[str] = "stable_step"
    variants: ClassVar[tuple[str, ...]] = (
        "stable_step[rule=exact]",
        "stable_step(delta)",
        "stable_step[rule=exact](kda)",
        "stable_step(gdn2)",
        "stable_step[rule=exact](gdn2)",
        "ccq(stable_step(kda))",
        "qk_norm(stable_step)",
    )

    base: Mechanism = GatedDelta()
    rule: str = options.choice("implicit", "exact")

    @cached_property
    def offers(self) -> Offers:
        return self.base.offers._replace(unit_keys=False)

    def refuses(self) -> str | None:
        if (missed := self._refuses_several_keys()) is not None:
            return missed
        if not self.base.offers.unit_keys:
            return (
                "it shortens the steps of a delta rule, and its base is none, or one that is "
                "stable already"
            )
        if {"p", "erase"} & self.base.inputs.keys():
            return (
                "the base erases along another key than it writes: where the two are opposite, it "
                "grows with steps of any length"
            )
        return None

    def steps(self) -> tuple[Step, ...]:
        if "beta" in self.base.inputs:
            return (
                step("beta_stable", StableBeta(self.rule)),
                step("out", self.base, beta="beta_stable"),
            )
        return (
            step("b_stable", StableChannels(self.rule)),
            step("w_stable", StableChannels(self.rule, of="w")),
            step("out", self.base, b="b_stable", w="w_stable"),
        )
