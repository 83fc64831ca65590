"""Faults of options: one that the backend ignores, and yet supports.

    softmax[window=3] computed as softmax

Options that change which inputs, buffers or columns of the output there are can not be ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import precondattn as pa
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import Change, MethodCall, with_call


def with_option(name: str, change: Callable[[Any], Any]) -> Change:
    """The method of the leaf, with one option changed."""

    def other(call: MethodCall) -> MethodCall:
        leaf = call.mechanism
        changed = dataclasses.replace(leaf, **{name: change(getattr(leaf, name))})
        return dataclasses.replace(call, mechanism=changed)

    return with_call(other)


ONE_COMPARISON = ("scale", "detach")
"""Options that a leaf reads in one condition: a mutant of it stands for the option ignored."""


def ignored(m: pa.Mechanism, stage: str) -> Named:
    """Each option of a leaf that is not its default."""
    (leaf,) = m.program.leaves
    for field in dataclasses.fields(leaf):
        name, default = field.name, field.default
        if name in ONE_COMPARISON or getattr(leaf, name) == default:
            continue
        if _can_be(leaf, name, default):
            yield name, with_option(name, lambda _, default=default: default)


def _can_be(leaf: Any, name: str, default: Any) -> bool:
    """Whether the leaf without the option exists, and has the same arrays."""
    try:
        other = dataclasses.replace(leaf, **{name: default})
    except (TypeError, ValueError):  # The option is required, or another one needs it.
        return False
    return _arrays(other) == _arrays(leaf)


def _arrays(leaf: Any) -> Any:
    return leaf.inputs, leaf.slots(), leaf.output


OPERATORS = {"option ignored": ignored}
