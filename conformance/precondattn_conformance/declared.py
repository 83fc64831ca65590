"""The expressions to check: every declared mechanism, its variants, and every composition."""

from __future__ import annotations

from functools import cache

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.registry import Registered


def compositions() -> dict[str, str | None]:
    """Every preconditioner around every other mechanism: expressions with the reason of a refusal.

    The reason is None if the composition is accepted.
    """
    classes = pa.mechanisms()
    refusals: dict[str, str | None] = {}
    for outer in classes.values():
        if outer.role != "preconditioner":
            continue
        for inner in classes.values():
            try:
                refusals[str(outer(base=inner()))] = None
            except TypeError as reason:
                refusals[f"{outer.name}({inner.name})"] = str(reason)
    return refusals


def expressions() -> list[str]:
    """All callable expressions, each once."""
    return list(_expressions_of(tuple(registry.registered().values())))


@cache  # For the classes that are registered now: a user may add one.
def _expressions_of(classes: tuple[type[Registered], ...]) -> tuple[str, ...]:
    names = [name for cls in classes for name in (cls.name, *cls.variants)]
    names += [expression for expression, refusal in compositions().items() if refusal is None]
    return tuple(dict.fromkeys(str(pa.parse(name)) for name in names))


@cache
def derived() -> frozenset[str]:
    """Compositions that no class declares; their code consists of the pieces' steps only."""
    declared = {
        str(pa.parse(expression))
        for cls in registry.registered().values()
        for expression in (cls.name, *cls.variants)
    }
    return frozenset(set(compositions()) - declared)


def is_class(expression: str) -> bool:
    """Whether an expression is a class as it is declared, without options."""
    return expression in registry.registered()


def is_bounded(mechanism: pa.Mechanism) -> bool:
    """Whether the mechanism's preconditioner is bounded for any keys.

    LUCID with normalize "rows" or "none" is not: on correlated keys the condition number of its
    system can be arbitrarily large, and then no two ways of computing it agree. Such a mechanism
    is checked on harmless keys.
    """
    return all(
        leaf.has_unit_diagonal
        for leaf in mechanism.program.leaves
        if isinstance(leaf, pa.LucidSolve)
    )


@cache
def mechanism_of(expression: str) -> pa.Mechanism:
    """The mechanism of an expression, cached."""
    return pa.parse(expression)


def is_constant_in_one_token(mechanism: pa.Mechanism) -> bool:
    """Whether the output of a single token does not depend on some input, whose gradient is then 0.

    A normalised channel of one token is ±1, as in cross-covariance attention. One key has no
    covariance, the mean over one key is that key, and the inner product of a key of length 1 with
    itself is 1. The last window of a grid may contain only one token.
    """
    constant = pa.CrossCovariance | pa.ConditionedQuery | pa.QueryWeightedQuery | pa.Windowed
    return any(
        getattr(leaf, "axis", "") == "channel"
        or isinstance(leaf, constant)
        or (isinstance(leaf, pa.Linear) and leaf.normalize)
        or (isinstance(leaf, pa.LucidSolve) and leaf.normalize == "rows")
        for leaf in mechanism.program.leaves
    )


def is_softmax(mechanism: pa.Mechanism) -> bool:
    """Whether values are read with weights that sum to 1, so that a single key has weight 1."""
    kinds = pa.Softmax | pa.Path | pa.DeltaFormer | pa.Windowed
    return any(isinstance(leaf, kinds) for leaf in mechanism.program.leaves)


def is_smooth(mechanism: pa.Mechanism, kind: str) -> bool:
    """Whether central differences can verify the gradient for keys of this kind.

    They can not if the mechanism declares a quantity to be constant in the gradient. Nor can they
    where the function is not differentiable, or too curved within the step: at two equal maxima, at
    a zero key under a norm without eps, under two norms in a row, or under a norm and elu, ATK or a
    stable step, at a feature of almost 0, where ATK takes the logarithm of its square, or at a zero
    row (β = 0) that is normalised to length 1.
    """
    leaves = mechanism.program.leaves
    has_features = any(isinstance(leaf, pa.EluPlusOne | pa.HedgehogMap) for leaf in leaves)
    norms = [leaf for leaf in leaves if isinstance(leaf, pa.RMSNorm | pa.LayerNorm | pa.L2Norm)]
    for leaf in leaves:
        if getattr(leaf, "detach_max", False) or getattr(leaf, "detach", False):
            return False
        if isinstance(leaf, pa.UnitRows) and "lucid_beta" in mechanism.inputs:
            return False
        if kind == "zero" and norms and getattr(leaf, "normalize", None) == "keys":
            return False
        curved = pa.EluPlusOne | pa.PreconditionedKey | pa.StableBeta | pa.StableChannels
        if kind == "zero" and norms and isinstance(leaf, curved):
            return False
        if has_features and isinstance(leaf, pa.PreconditionedKey):
            return False
        if kind in ("zero", "duplicate") and getattr(leaf, "normalize", None) == "rows":
            return False
        if kind == "zero" and getattr(leaf, "eps", None) == 0:
            return False
    return True
