"""ATK: a delta rule whose written key is shortened in channels that are already full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Preconditioner, Recurrence, Step, options, step
from precondattn.spec.delta import GatedDelta
from precondattn.spec.erase_key import ErasingDelta, ErasingGatedDelta, ErasingGDN2, ErasingKDA
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.preconditioned_key import PreconditionedKey

ERASING: dict[Recurrence | None, type[LinearFamily]] = {
    rule.declares: rule for rule in (ErasingDelta, ErasingGatedDelta, ErasingKDA, ErasingGDN2)
}
"""The variants of the delta rules with a separate input `erase`, which ATK sets to k."""


@dataclass(frozen=True)
class ATK(Preconditioner):
    """ATK: a delta rule that erases with k and writes with m ∘ k, where m depends on earlier keys.

    A_t = e^{g_atk} A_{t−1} + β_atk k ∘ k for each key head, and m = x^{−r/(1 + |r|)}, which is
    between 1/x and x, with r = log(A + ε) − c. Keys should have length 1. `atk(gated_delta)` is
    PGDN, and `atk(kda)` is PKDA. The inputs `g_atk` and `beta_atk` (b, s, h) have one entry per key
    head.

    Source: flash-linear-attention, fla/ops/precond_gated_delta_rule and fla/ops/precond_kda.

    Parameters
    ----------
    base : Mechanism
        A delta rule: `Delta`, `GatedDelta`, `KDA`, `GDN2` or `Comba`. Other preconditioners go
        outside: `qk_norm[norm=l2](atk(gated_delta))`.
    bound : float
        The bound x, 1 or more. Along k the state is multiplied by e^g (1 − β Σ m k²), so β ‖k‖²
        should be at most 2/x. `beta`, or `b`, is expected in [0, 1].
    eps : float
        The ε that replaces A in channels where all keys were 0.
    center : float
        The constant c: channels with log(A + ε) = c are not changed.
    learned : bool
        Whether c is an input `log_atk_scale` (h) instead, with one number per key head.

    Examples
    --------
    With x = 1, ATK is its base:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> x = {"g": -rng.uniform(size=(1, 5, 2)), "beta": rng.uniform(size=(1, 5, 2))}
    >>> out = pa.ATK(bound=1)(q, k, v, **x, g_atk=x["g"], beta_atk=x["beta"])
    >>> bool(np.allclose(out, pa.GatedDelta()(q, k, v, **x)))
    True
    """

    name: ClassVar[str] = "atk"
    variants: ClassVar[tuple[str, ...]] = (
        "atk(kda)",
        "atk(gdn2)",
        "atk(comba)",
        "atk[learned=true](delta)",
        "ccq(atk)",
        "qk_norm[norm=l2](atk)",
    )

    base: Mechanism = GatedDelta()
    bound: float = options.positive(1.5)
    eps: float = options.positive(1e-6)
    center: float = options.number(-0.2)
    learned: bool = options.flag(False)

    def check_together(self) -> None:
        self._key()  # The leaf checks the same options.

    def refuses(self) -> str | None:
        if self._rule is None:
            return (
                "it changes the key that a delta rule writes with, and not the one it erases with; "
                "its base is a delta rule with one step a token, such as gated_delta or comba"
            )
        return None

    @cached_property
    def _rule(self) -> Mechanism | None:
        """The base, or its variant with an input `erase`; None if it is not a delta rule."""
        declared = self.base.recurrence if self.base.role == "base" else None
        if declared is None or declared.rule != "delta" or declared.steps is not None:
            return None
        if declared.erase != "written key":
            return self.base
        rule = ERASING.get(replace(declared, erase="own key"))
        return None if rule is None else rule(scale=self.base.scale)  # type: ignore[attr-defined]

    def _key(self) -> PreconditionedKey:
        return PreconditionedKey(self.bound, self.eps, self.center, self.learned)

    def steps(self) -> tuple[Step, ...]:
        assert self._rule is not None  # Other bases are refused.
        erase = {} if self._rule is self.base else {"erase": "k"}
        out = step("out", self._rule, k="k_written", **erase)
        return step("k_written", self._key()), out
