"""What there is to check: every declared mechanism, its variants, and every composition."""

from __future__ import annotations

from functools import cache

import precondattn as pa
from precondattn.algebra import registry


def compositions() -> dict[str, str | None]:
    """Every preconditioner around every other mechanism: the expression, and why it is refused.

    The reason is None where the composition makes sense.
    """
    classes = pa.mechanisms()
    found: dict[str, str | None] = {}
    for outer in classes.values():
        if outer.role != "preconditioner":
            continue
        for inner in classes.values():
            try:
                found[str(outer(base=inner()))] = None
            except TypeError as reason:
                found[f"{outer.name}({inner.name})"] = str(reason)
    return found


def expressions(*, pieces: bool = True) -> list[str]:
    """Everything that can be called, as expressions, each once."""
    found: list[str] = []
    for cls in registry.registered().values():
        if pieces or cls.role != "piece":
            found += [cls.name, *cls.variants]
    found += [expression for expression, refused in compositions().items() if refused is None]
    return list(dict.fromkeys(str(pa.parse(expression)) for expression in found))


@cache
def derived() -> frozenset[str]:
    """Compositions that no class declares: they have steps, and no code of their own."""
    declared = {
        str(pa.parse(expression))
        for cls in registry.registered().values()
        for expression in (cls.name, *cls.variants)
    }
    return frozenset(set(compositions()) - declared)


def is_bounded(mechanism: pa.Mechanism) -> bool:
    """Whether its preconditioner obeys a bound for any keys.

    LUCID with normalize "rows" or "none" does not: on correlated keys its system can have any
    condition, and then no two ways of computing it agree. Such a mechanism gets harmless keys.
    """
    return all(
        leaf.has_unit_diagonal
        for leaf in mechanism.program.leaves
        if isinstance(leaf, pa.LucidSolve)
    )


@cache
def mechanism_of(expression: str) -> pa.Mechanism:
    """The mechanism that an expression means; cases ask for it often."""
    return pa.parse(expression)


def is_constant_in_one_token(mechanism: pa.Mechanism) -> bool:
    """Whether the output of a single token does not depend on some input: its gradient is 0.

    A channel of one token has norm 1, one key has no covariance, a mean over one key is it, and a
    key of length 1 has the product 1 with itself.
    """
    return any(
        getattr(leaf, "axis", "") == "channel"
        or isinstance(leaf, pa.ConditionedQuery | pa.QueryWeightedQuery)
        or (isinstance(leaf, pa.Linear) and leaf.normalize)
        or (isinstance(leaf, pa.LucidSolve) and leaf.normalize == "rows")
        for leaf in mechanism.program.leaves
    )


def is_softmax(mechanism: pa.Mechanism) -> bool:
    """Whether values are read with weights that sum to 1, so that a single key has all of it."""
    return any(isinstance(leaf, pa.Softmax | pa.Path) for leaf in mechanism.program.leaves)


def is_smooth(mechanism: pa.Mechanism, kind: str) -> bool:
    """Whether central differences can show the gradient for keys of this kind.

    They can not where something is constant to the gradient by declaration, nor at a point where
    the function has a kink, or bends within their step: two equal maxima, a zero key under a norm
    without eps, under two norms in a row, or under a norm and elu, or a zero row (of β = 0) that is
    brought to length 1.
    """
    leaves = mechanism.program.leaves
    norms = [leaf for leaf in leaves if isinstance(leaf, pa.RMSNorm | pa.LayerNorm | pa.L2Norm)]
    for leaf in leaves:
        if getattr(leaf, "detach_max", False) or getattr(leaf, "detach", False):
            return False
        if isinstance(leaf, pa.UnitRows) and "lucid_beta" in mechanism.inputs:
            return False
        if kind == "zero" and norms and getattr(leaf, "normalize", None) == "keys":
            return False
        if kind == "zero" and norms and isinstance(leaf, pa.EluPlusOne):
            return False
        if kind in ("zero", "duplicate") and getattr(leaf, "normalize", None) == "rows":
            return False
        if kind == "zero" and getattr(leaf, "eps", None) == 0:
            return False
    return True
