"""LUCID: values that are decorrelated by the keys (`spec/lucid.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, options, step, with_base
from precondattn.algebra.program import Program
from precondattn.limits import KEPT
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.softmax import Softmax
from precondattn.spec.symmetric_lucid import SymmetricLucidSolve

SYMMETRIC = ("rho", "tolerance", "iterations")
"""The options of the solve around a base that is not causal."""


@dataclass(frozen=True)
class Lucid(Preconditioner):
    """LUCID: o = base(q, k, y), with (I + diag(β) stril(Φ)) y = diag(β) v.

    Φ_ij = exp(s ⟨RN(k_i), RN(k_j)⟩ − s d) is computed with the base's own score function from the
    keys that this function reads, with the base's causality, window, segments and lengths. Φ does
    not depend on what the base does to queries alone (a temperature) or to its logits (a bias, a
    forget gate, a soft cap), nor on a sink. (With a cap, exp(c tanh(s x / c)) would not be positive
    semidefinite, and the bound below would not hold.) There is one solve per key/value head, which
    its query heads share.

    With `normalize` "keys" or "queries_and_keys", without `beta` and without a window, the inverse
    P of the matrix has |P_ij| ≤ 1, and the condition number is at most N √(N + 1), for any keys,
    including equal and zero ones.

    Source: LUCID (arXiv 2602.10410), Eq. 2 and Table 5; 3.4 for beta. The metric around `path` is
    this library's interpretation.

    Parameters
    ----------
    base : Mechanism
        Any base with a score function. A base that is not causal must use the dot product and have
        no window.
    normalize : {"keys", "queries_and_keys", "rows", "none"}
        What is normalised: the keys in Φ (Eq. 2); queries and keys everywhere; each row of the
        matrix, by its maximum (the paper's "max"); or nothing (Table 1). With "rows" and "none" P
        is unbounded, and "none" overflows for keys of large norm.
    scale : float, optional
        The scale s in Φ; by default that of the base.
    eps : float
        The ε in the norm rms(k) = √(mean(k²) + ε).
    beta : bool
        Whether there is an input `lucid_beta` (b, s, n). Entries outside [0, 2] are not rejected;
        the equation still holds, but the solution is not bounded.
    detach_max : bool
        With "rows", whether the gradient treats the maximum as a constant.
    rho, tolerance, iterations : optional
        Options around a base that is not causal. Its system is (Φ + ρ I) y = v over all tokens,
        with ρ > 0, by default 1e-3, and |P_ij| ≤ 1/ρ. The solve (`SymmetricLucidSolve`) is
        iterative, with this tolerance and largest number of iterations. It checks its result, and
        has no cache.
    metric : {"base", "dot"}
        The score function in Φ: that of the base, or the dot product. They differ only around
        `path`, whose score function transports the key to the later token.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 2, 6, 4, 8))
    >>> o = pa.Lucid()(q, k, v)
    >>> o, cache = pa.Lucid().extend(pa.Lucid().init_cache(q, k, v, capacity=16), q, k, v)
    >>> sorted(cache.store)
    ['k', 'rms(k)', 'y']
    """

    name: ClassVar[str] = "lucid"
    variants: ClassVar[tuple[str, ...]] = (
        "lucid[eps=0]",
        "lucid[scale=5]",
        "lucid[beta=true]",
        "lucid[normalize=queries_and_keys]",
        "lucid[normalize=queries_and_keys,beta=true]",
        "lucid[normalize=rows]",
        "lucid[normalize=rows,detach_max=true]",
        "lucid[normalize=none]",
        "lucid(softmax[window=3])",
        "lucid(softmax[scale=0.3])",
        "lucid(softmax[bias=true])",
        "lucid(path[flush=3])",
        "lucid[metric=dot](path)",
        "lucid(qk_norm[gain=true])",
        "lucid(softmax[causal=false])",
        "lucid[rho=0.1,scale=0.3](softmax[causal=false])",
        "lucid[normalize=queries_and_keys,rho=0.1](softmax[causal=false,bias=true])",
    )

    base: Mechanism = Softmax()
    normalize: str = options.choice("keys", "queries_and_keys", "rows", "none")
    scale: float | None = options.positive_or_none()
    eps: float = options.non_negative(1e-6)
    beta: bool = options.flag(False)
    detach_max: bool = options.flag(False)
    rho: float | None = options.positive_or_none()
    tolerance: float | None = options.positive_or_none()
    iterations: int | None = options.count_or_none()
    metric: str = options.choice("base", "dot")

    def check_together(self) -> None:
        if self.detach_max and self.normalize != "rows":
            raise ValueError(
                f"lucid: detach_max belongs to normalize='rows'; found {self.normalize!r}"
            )
        if self.beta and self.normalize in ("rows", "none"):
            raise ValueError(
                f"lucid: beta needs the unit diagonal, which normalize={self.normalize!r} has not"
            )
        if self.normalize in ("rows", "none") and self.eps != LucidSolve.eps:
            raise ValueError(f"lucid: eps belongs to a norm; normalize={self.normalize!r} has none")

    @cached_property
    def offers(self) -> Offers:
        # Rows of A E⁻¹ need not be non-negative nor sum to one, and no second solve can use the
        # metric.
        return self.base.offers._replace(
            metric=None,
            read=None,
            key_steps=(),
            normalizes_query=self._normalizes_all or self.base.offers.normalizes_query,
        )

    def refuses(self) -> str | None:
        base = self.base.offers
        if base.metric is None and not base.causal:
            return (
                "without causality, lucid needs one score for each pair of tokens of a sequence, "
                "as softmax[causal=false] has, and a base that no other preconditioner has used; "
                "windows, landmarks and channels have none"
            )
        if base.metric is None:
            return (
                "lucid needs a base that exponentiates a score function, and one that no other "
                "preconditioner has used (what it does to softmax, delta does to linear)"
            )
        if self.metric == "dot" and base.metric is DOT:
            return "metric=dot leaves out how path transports keys, and this base transports none"
        if base.causal:
            symmetric = [name for name in SYMMETRIC if getattr(self, name) is not None]
            if symmetric:
                return (
                    f"{' and '.join(symmetric)} belong to the symmetric solve of a base that is "
                    f"not causal; the triangular one is exact and bounded without"
                )
        else:
            reason = self._refuses_symmetric()
            if reason is not None:
                return reason
        if self._normalizes_all and (base.normalizes_query or base.key_steps):
            return (
                "normalize=queries_and_keys normalises what reaches the base, and the base would "
                "change it again"
            )
        return None

    def _instead(self) -> Mechanism | None:
        instead = super()._instead()
        return instead or (
            with_base(self, self.base, metric="base") if self.metric == "dot" else None
        )

    @property
    def _normalizes_all(self) -> bool:
        return self.normalize == "queries_and_keys"

    def _refuses_symmetric(self) -> str | None:
        """The reason why a base that is not causal is refused; None if it is not."""
        base = self.base.offers
        if base.metric is not DOT:
            return (
                "without causality, lucid needs a symmetric score function, the dot product; the "
                f"base has {base.metric.name}"
            )
        if base.window is not None:
            return (
                "without causality, a window makes the matrix of lucid indefinite, which has no "
                "bound and may have no inverse"
            )
        if self.normalize in ("rows", "none"):
            return (
                f"without causality, lucid needs a unit diagonal, which normalize="
                f"{self.normalize} has not"
            )
        if self.beta:
            return (
                "without causality there is no order in which values are written, and beta, the "
                "strength of a write, is not defined"
            )
        return None

    def solve(self) -> LucidSolve | SymmetricLucidSolve:
        """The leaf that decorrelates the values."""
        base = self.base.offers
        normalize = "given" if self._normalizes_all else self.normalize
        scale = base.scale if self.scale is None else self.scale
        eps = self.eps if normalize == "keys" else LucidSolve.eps
        if not base.causal:
            chosen = {n: v for n in SYMMETRIC if (v := getattr(self, n)) is not None}
            return SymmetricLucidSolve(scale=scale, normalize=normalize, eps=eps, **chosen)
        return LucidSolve(
            metric=DOT if self.metric == "dot" else base.metric,
            scale=scale,
            window=base.window,
            normalize=normalize,
            eps=eps,
            beta=self.beta,
            detach_max=self.detach_max,
        )

    def steps(self) -> tuple[Step, ...]:
        if not self._normalizes_all:
            keys, key = self._keys()
            return (*keys, step("y", self.solve(), k=key), step("out", self.base, v="y"))
        return (
            step("q_unit", RMSNorm(self.eps), x="q"),
            step("k_unit", RMSNorm(self.eps), x="k"),
            step("y", self.solve(), k="k_unit"),
            step("out", self.base, q="q_unit", k="k_unit", v="y"),
        )

    def _keys(self) -> tuple[tuple[Step, ...], str]:
        """The base's steps on its keys, repeated for Φ, and the name of the resulting key.

        They are the same leaf calls as in the base, and so are computed once.
        """
        key_steps: list[Step] = []
        key = "k"
        for i, (_, mechanism, renamed) in enumerate(self.base.offers.key_steps):
            name = f"key{i + 1}"
            wiring = tuple((a, key if value == "k" else value) for a, value in renamed)
            key_steps.append(Step(name, mechanism, wiring))
            key = name
        return tuple(key_steps), key


@lru_cache(maxsize=KEPT)
def is_lucid(program: Program) -> bool:
    """Whether a group is LUCID around softmax, with the dot product and the normalised keys."""
    if len(program.calls) != 2 or [*map(type, program.leaves)] != [LucidSolve, Softmax]:
        return False
    solve, softmax = cast("tuple[LucidSolve, Softmax]", program.leaves)
    has_supported_options = (
        solve.metric == DOT
        and solve.has_unit_diagonal
        and softmax.read == MEAN
        and softmax.forget == "none"
        and not softmax.bias
        and softmax.softcap is None
        and not softmax.sink
        and softmax.distance == "none"
    )
    first, second = (dict(call.arguments) for call in program.calls)
    is_wired_as_lucid = second["v"] == program.calls[0].out and first["k"] == second["k"]
    return has_supported_options and is_wired_as_lucid
