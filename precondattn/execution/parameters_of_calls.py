"""The parameters of a call, as `help`, an editor and a type checker show them.

They are derived from the declared inputs and options. `docs/make_pages.py` writes those of the
shorthands to the stub `shorthands.pyi`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import Parameter, Signature, signature

from precondattn.algebra.options import OptionValue
from precondattn.algebra.piece import Piece
from precondattn.algebra.registry import MechanismClass
from precondattn.execution.input_names import CALL_OPTIONS
from precondattn.execution.shorthand import declared_by_options, options_of


class _Optional:
    """The default that is shown for an optional input."""

    def __repr__(self) -> str:
        return "..."


OPTIONAL = _Optional()


def signature_of_call(mechanism: Piece) -> Signature:
    """The parameters of `mechanism(…)`."""
    inputs = [_input(name, [pattern.text]) for name, pattern in mechanism.inputs.items()]
    return _signature(type(mechanism), inputs, [])


def signature_of_shorthand(cls: MechanismClass) -> Signature:
    """The parameters of a class's shorthand: the inputs that any option declares, and options."""
    declared = [cls().inputs, *(inputs for _, _, inputs in declared_by_options(cls))]
    inputs: dict[str, Parameter] = {}
    for name in dict.fromkeys(name for each in declared for name in each):
        patterns = dict.fromkeys(each[name].text for each in declared if name in each)
        is_needed = all(name in each for each in declared)
        inputs[name] = _input(name, patterns, Parameter.empty if is_needed else OPTIONAL)
    options = []
    of_class, of_base = options_of(cls)
    for name, field in {**of_class, **of_base}.items():
        option = _option(field)
        if name in inputs:  # An array for the input of an option's name sets the option.
            array = inputs.pop(name).annotation
            option = option.replace(annotation=f"{option.annotation} | {array}")
        options.append(option)
    return _signature(cls, [*inputs.values()], options)


def _signature(cls: MechanismClass, inputs: list[Parameter], options: list[Parameter]) -> Signature:
    positional = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in inputs[:3]]
    others = sorted(inputs[3:], key=lambda each: each.default is OPTIONAL)
    of_call = signature(cls.__call__).parameters
    masks = [of_call[name] for name in CALL_OPTIONS]
    return Signature([*positional, *others, *options, *masks], return_annotation="Array")


def _input(name: str, patterns: Iterable[str], default: OptionValue = Parameter.empty) -> Parameter:
    shapes = " or ".join(text or "a number" for text in patterns)
    annotation = f'Annotated[Array, "{shapes}"]'
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _option(field: OptionValue) -> Parameter:
    settings, default = field.metadata["kind"].settings, field.default
    # An option that keeps a tuple takes any sequence, or one number or name.
    annotation = re.sub(r"tuple\[(int|str), \.\.\.\]", r"\1 | Sequence[\1]", str(field.type))
    if settings and not isinstance(default, bool):
        names = ", ".join(f'"{getattr(each, "name", each)}"' for each in settings)
        annotation, default = f"Literal[{names}]", getattr(default, "name", default)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
