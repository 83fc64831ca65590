"""Errors for keywords that a layer does not have, with the nearest name or the answer for it."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Self

from precondattn.algebra.other_names import keyword_elsewhere
from precondattn.algebra.text import nearest


class ChecksKeywords:
    """A base class whose constructor names an unknown keyword, and what to write in its place."""

    def __new__(cls, *values: object, **named: object) -> Self:
        parameters = signature(cls.__init__).parameters
        if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            names = [name for name in parameters if name != "self"]
            for name in (name for name in named if name not in parameters):
                hint = keyword_elsewhere(name) or nearest(name, names)
                raise TypeError(
                    f"{cls.__name__}: unknown keyword {name!r}{hint}; it takes {', '.join(names)}"
                )
        return super().__new__(cls)
