"""Errors for what is given in the place of a mechanism: its name, its class or its shorthand."""

from __future__ import annotations

from precondattn.algebra import registry
from precondattn.algebra.options import OptionValue
from precondattn.algebra.other_names import in_our_spelling, mechanism_elsewhere
from precondattn.algebra.text import nearest


def name_given(value: OptionValue) -> str | None:
    """The expression of a mechanism given as an object, text, class or shorthand; or None."""
    if isinstance(value, str):
        return value
    cls = getattr(getattr(value, "__wrapped__", None), "cls", value)
    if isinstance(cls, type):
        name: str | None = getattr(cls, "name", None) if hasattr(cls, "variants") else None
        return name
    return str(value) if hasattr(value, "program") else None


def not_a_mechanism(value: OptionValue) -> TypeError:
    """The error for an argument that is not a mechanism where a layer expects one."""
    expression = name_given(value)
    advice = "" if expression is None else f"; write mechanism={expression!r}"
    return TypeError(f"mechanism must be a text or a mechanism; found {value!r}{advice}")


def attribute_elsewhere(name: str) -> str:
    """The advice for an attribute that the package does not have; empty for unknown names."""
    elsewhere = mechanism_elsewhere(name)
    if elsewhere is not None:
        return f"; here it is pa.parse({elsewhere!r})"
    return nearest(in_our_spelling(name), registry.nameable())
