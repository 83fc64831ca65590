"""Faults of options: another scale, ε or window, a norm left out.

The arrays are unchanged, so options that change which inputs or buffers exist are not tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import precondattn as pa
from precondattn_conformance.faults.applicable import Named, leaves
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Call,
    Change,
    with_call,
)


def with_option(name: str, change: Callable[[Any], Any]) -> Change:
    """The method of the leaf, with one option changed."""

    def other(call: Call) -> Call:
        leaf = call.mechanism
        changed = dataclasses.replace(leaf, **{name: change(getattr(leaf, name))})
        return dataclasses.replace(call, mechanism=changed)

    return with_call(other)


def scale(m: pa.Mechanism, stage: str) -> Named:
    """A wrong scale of the scores. The last state does not contain the scale."""
    for leaf in leaves(m)[:1]:
        if not hasattr(leaf, "_scale"):
            continue
        yield "2 % too large", _with_scale(lambda s, d: 1.02 * s)
        if leaf.scale is None:
            yield "1/d for 1/√d", _with_scale(lambda s, d: 1 / d)


def _with_scale(change: Callable[[float, int], float]) -> Change:
    def other(call: Call) -> Call:
        d = call.inputs["k"].shape[3]
        scaled = change(call.mechanism.scale_for(d), d)
        return dataclasses.replace(
            call, mechanism=dataclasses.replace(call.mechanism, scale=scaled)
        )

    return with_call(other)


BOTH = (FORWARD, BACKWARD, STEP)
ALL = (*BOTH, STEP_BACKWARD)

CHANGES: tuple[tuple[Any, str, str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    # 1e-5 in place of 1e-6 occurs in public code.
    (pa.RMSNorm, "eps", "ten times larger", lambda eps: 10 * eps, BOTH),
    (pa.L2Norm, "eps", "ten times larger", lambda eps: 10 * eps, BOTH),
    (pa.LayerNorm, "eps", "ten times larger", lambda eps: 10 * eps, BOTH),
    (pa.ContractionGate, "eps", "ten times larger", lambda eps: 10 * eps, BOTH),
    (pa.ConditionedQuery, "eps", "ten times larger", lambda eps: 10 * eps, ALL),
    (pa.QueryWeightedQuery, "eps", "ten times larger", lambda eps: 10 * eps, BOTH),
    (pa.QueryWeightedQuery, "tau", "2 % too large", lambda tau: 1.02 * tau, BOTH),
    (pa.Softmax, "softcap", "2 % too large", lambda cap: cap and 1.02 * cap, BOTH),
    (pa.ScaledDims, "normalize", "the ln 2 forgotten", lambda each: not each, ALL),
    (pa.HedgehogMap, "factor", "2 % too large", lambda factor: 1.02 * factor, ALL),
    # The output is the same either way; only the gradient differs.
    (pa.UnitRows, "detach", "its norm differentiated", lambda detach: not detach, (BACKWARD,)),
    (pa.UnitRows, "axis", "rows taken for channels", lambda axis: "channel", (FORWARD, BACKWARD)),
)

OTHER_SIDE = {"scaled": "unscaled", "unscaled": "scaled"}


def option(m: pa.Mechanism, stage: str) -> Named:
    """Another value of any other option of a leaf."""
    for leaf in leaves(m)[:1]:
        for kind, name, detail, change, stages in CHANGES:
            if (
                isinstance(leaf, kind)
                and stage in stages
                and change(getattr(leaf, name)) != getattr(leaf, name)
            ):
                yield f"{name} {detail}", with_option(name, change)
        if isinstance(leaf, pa.LucidSolve) and stage != STEP:
            yield from _of_the_solve(leaf, stage)
        if isinstance(leaf, pa.Softmax | pa.Path) and leaf.forget != "none":
            yield (
                "the forget gate on the other side of the scale",
                with_option("forget", OTHER_SIDE.__getitem__),
            )


def _of_the_solve(leaf: Any, stage: str) -> Named:
    """Options of the solve, in full calls: with another norm its cache has other buffers."""
    if leaf.normalize == "keys":
        yield "eps ten times larger", with_option("eps", lambda eps: 10 * eps)
        yield "the norm of the keys forgotten", with_option("normalize", lambda _: "given")
    if leaf.normalize == "rows" and stage == BACKWARD:
        yield (
            "the maximum constant to the gradient",
            with_option("detach_max", lambda detach: not detach),
        )


OPERATORS = {"scale": scale, "option": option}
