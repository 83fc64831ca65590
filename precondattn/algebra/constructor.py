"""Errors for wrong constructor arguments of mechanisms: arrays, and options that do not exist.

Python's own errors would print whole arrays, and would not say which mechanism has the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature

from precondattn.algebra.options import OptionValue, fields_of
from precondattn.algebra.registry import MechanismClass
from precondattn.algebra.text import hint_at_option, plain
from precondattn.arrays import library_of


def check_constructor(
    cls: MechanismClass, values: tuple[OptionValue, ...], options: Mapping[str, OptionValue]
) -> None:
    """Raise a TypeError for arrays, and for keywords that the constructor does not accept."""
    for value in (*values, *options.values()):
        if getattr(value, "ndim", 0) and library_of(value) is not None:
            raise TypeError(
                f"{cls.name}: a mechanism is built from options, and then called on arrays, as in "
                f"{cls.__name__}()(q, k, v); found an array of shape {tuple(value.shape)}"
            )
    if options.keys() <= getattr(cls, "__dataclass_fields__", {}).keys():
        return
    parameters = signature(cls.__init__).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            hint = hint_at_option(cls, name, plain(options[name]))
            options_of_class = ", ".join(fields_of(cls))
            raise TypeError(
                f"{cls.name}: unknown option {name!r}{hint}; it has {options_of_class or 'none'}"
            )
