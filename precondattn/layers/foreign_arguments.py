"""Errors for arguments that a layer does not have, with the equivalent of other libraries' names.

For arguments that a mechanism has, the error says where to give them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Self, TypeVar, cast

from precondattn.algebra.foreign_keywords import (
    LAYER,
    MODEL,
    OF_ATTENTION,
    RECIPES,
    Said,
    keyword_elsewhere,
    of_each_layer,
)
from precondattn.algebra.mechanism import Mechanism, mechanisms, parse
from precondattn.algebra.text import nearest, plain
from precondattn.execution.build import with_options
from precondattn.given import Given

Method = TypeVar("Method", bound=Callable[..., object])

KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

OF_CALLS = {
    "key_mask": (Said("", "layer(x, mask=key_mask)"), Said("", "model(tokens, mask=key_mask)")),
    "lengths": (
        Said("True for valid tokens and False for padding", "layer(x, mask=mask)"),
        Said("True for valid tokens and False for padding", "model(tokens, mask=mask)"),
    ),
    "prefix": (Said("", "layer(x, prefix=prefix)"), Said("", "model(tokens, prefix=prefix)")),
    "backend": (
        Said("", "with pa.use_backend('reference'): layer(x)"),
        Said("", "with pa.use_backend('reference'): model(tokens)"),
    ),
    "capacity": (
        Said("", "layer.init_cache(batch, capacity=4096)"),
        Said("", "model.init_caches(batch, capacity=4096)"),
    ),
    "states": (Said("it is of a mechanism", "attn.init_cache(q, k, v, states={'S': S})"),) * 2,
    "keep": (
        Said("", "layer(x, cache=cache, keep=4)"),
        Said("", "model(tokens, caches=caches, keep=4)"),
    ),
    "positions": (Said("it is of Attention"), Said("leave it out: a Decoder counts positions")),
    "bias": (Said(RECIPES, "recipes={'out': Biased()}"),) * 2,
    "depth": (Said("it is the number of blocks", "blocks=depth"), Said("", "layers=depth")),
}
"""The arguments and options of mechanisms, with the equivalent in a layer and in a Decoder."""


class AnswersForeignNames:
    """A base class whose constructor raises helpful errors for other libraries' arguments."""

    def __new__(cls, *values: object, **named: object) -> Self:
        parameters = signature(cls.__init__).parameters
        unknown = {name: value for name, value in named.items() if name not in parameters}
        if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            # Classes of other packages may accept them; ours pass on only known arguments.
            is_ours = cls.__module__.startswith("precondattn.")
            unknown = {n: v for n, v in unknown.items() if is_ours and keyword_elsewhere(n)}
        # Python would first report `heads` as missing if `num_heads` is given.
        refuse(cls.__name__, cls.__init__, unknown, named.get("mechanism", "softmax"))
        refuse_by_position(cls.__name__, cls.__init__, values)
        return super().__new__(cls)


def answering(owner: str) -> Callable[[Method], Method]:
    """A decorator that refuses unknown arguments before Python reports missing ones."""

    def decorated(method: Method) -> Method:
        known = _names(method, KINDS)

        @wraps(method)
        def answered(self: object, *values: object, **named: object) -> object:
            refuse(owner, method, {name: v for name, v in named.items() if name not in known})
            refuse_by_position(owner, method, values)
            return method(self, *values, **named)

        return cast("Method", answered)

    return decorated


def refuse(
    owner: str,
    function: Callable[..., object],
    unknown: Mapping[str, Given],
    mechanism: Given = None,
) -> None:
    """Raise a TypeError for the first of these arguments, which the function does not have."""
    known = _names(function, KINDS)
    for name in sorted(unknown):
        place = MODEL if owner.startswith("Decoder") else LAYER
        hint = keyword_elsewhere(name, place) or _place_here(name, unknown[name], place, mechanism)
        hint = hint or nearest(name, known)
        raise TypeError(f"{owner}: unknown keyword {name!r}{hint}; it takes {', '.join(known)}")


def refuse_by_position(
    owner: str, function: Callable[..., object], values: tuple[Given, ...]
) -> None:
    """Raise a TypeError for positional arguments that must be given by name."""
    first, rest = _names(function, KINDS[:1]), _names(function, KINDS[1:])
    takes_more = any(
        each.kind is Parameter.VAR_POSITIONAL for each in signature(function).parameters.values()
    )
    if len(values) > len(first) and not takes_more:
        found = ", ".join(repr(v) if isinstance(v, int | str) else "..." for v in values)
        by_name = f", and the others by name, as {rest[0]}=" if rest else ""
        raise TypeError(f"{owner}: {', '.join(first)} by position{by_name}; found {owner}({found})")


def _names(function: Callable[..., object], kinds: Collection[object]) -> list[str]:
    parameters = signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]


def _place_here(name: str, value: Given, place: str, mechanism: Given) -> str:
    """The advice for an argument that this library takes in another place; empty if none."""
    if name in OF_CALLS:
        in_layer, in_model = OF_CALLS[name]
        return f" (here: {of_each_layer(in_model) if place == MODEL else in_layer})"
    if place == MODEL and name in OF_ATTENTION:
        return f" (here: {of_each_layer(Said('', f'{name}={plain(value)}'))})"
    for cls in _classes(mechanism):
        try:
            expression = str(with_options(cls, {name: value}))
        except (TypeError, ValueError):
            continue
        return f" (an option of the mechanism: mechanism={expression!r})"
    return ""


def _classes(mechanism: Given) -> list[type[Mechanism]]:
    """The classes of a layer's mechanism and of softmax."""
    try:
        own = parse(mechanism) if isinstance(mechanism, str) else mechanism
    except (TypeError, ValueError):
        own = None
    return [*([type(own)] if isinstance(own, Mechanism) else []), mechanisms()["softmax"]]
