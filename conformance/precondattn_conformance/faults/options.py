"""Faults of options: the backend claims to support an option but ignores it.

    softmax[window=3] computed as softmax

Options that change the inputs, buffers or output columns can not be ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from precondattn.algebra.mechanism import Leaf, leaf_of
from precondattn.algebra.options import OptionValue
from precondattn.algebra.piece import Piece
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import Change, MethodCall, with_call


def with_option(name: str, change: Callable[[OptionValue], OptionValue]) -> Change:
    """The method of the leaf, with one option changed."""

    def other(call: MethodCall) -> MethodCall:
        leaf = call.mechanism
        assert isinstance(leaf, Leaf)
        changed = dataclasses.replace(leaf, **{name: change(getattr(leaf, name))})
        return dataclasses.replace(call, mechanism=changed)

    return with_call(other)


ONE_COMPARISON = ("scale", "detach")
"""Options that a leaf reads in one condition. A change of one token makes them ignored."""


def ignored(m: Piece, stage: str) -> Named:
    """A fault for each option of a leaf that differs from its default: it is ignored."""
    leaf = leaf_of(m.program.calls[0])
    for field in dataclasses.fields(leaf):
        name, default = field.name, field.default
        if name in ONE_COMPARISON or getattr(leaf, name) == default:
            continue
        if _can_be(leaf, name, default):
            yield name, with_option(name, _always(default))


def _always(setting: OptionValue) -> Callable[[OptionValue], OptionValue]:
    return lambda _: setting


def _can_be(leaf: Leaf, name: str, default: object) -> bool:
    """Whether the leaf without the option exists and has the same arrays."""
    try:
        other = dataclasses.replace(leaf, **{name: default})
    except (TypeError, ValueError):  # The option is required, or another one needs it.
        return False
    return _arrays(other) == _arrays(leaf)


def _arrays(leaf: Leaf) -> object:
    return leaf.inputs, leaf.slots(), leaf.output
