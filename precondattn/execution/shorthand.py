"""Shorthands such as `pa.lucid(q, k, v)`, which build a mechanism from keywords and call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import Field
from functools import cache
from itertools import chain
from textwrap import fill

from precondattn import frameworks
from precondattn.algebra.call import Call
from precondattn.algebra.declaration import Inputs
from precondattn.algebra.options import OptionValue, fields_of
from precondattn.algebra.other_names import keyword_elsewhere
from precondattn.algebra.registry import AnyMechanism, MechanismClass
from precondattn.algebra.text import nearest
from precondattn.arrays import Array, Arrays, is_compiling
from precondattn.execution.input_names import CALL_OPTIONS, MASKS
from precondattn.given import Given
from precondattn.limits import KEPT

WIDTH = 96

Settings = tuple[tuple[str, OptionValue], ...]

Switches = Mapping[str, Mapping[int, Settings]]
"""The settings that declare an optional input, by its name and its number of axes."""

Options = dict[str, Field[OptionValue]]


def shorthand(cls: MechanismClass) -> Callable[..., Array]:
    """A function that builds a mechanism from keywords and calls it, such as `pa.lucid`.

    Its keywords are the mechanism's options, inputs and masks. A preconditioner is built around
    softmax, whose options are accepted too. An array for an optional input sets the option that
    declares this input, if only one value of one option does.

    Parameters
    ----------
    cls : type
        A class of mechanisms that can be constructed without arguments.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> temperature = pa.shorthand(pa.Temperature)
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> temperature(q, k, v, tau=np.ones(2), window=3).shape  # per="head"
    (1, 5, 2, 4)
    """

    def call(*arrays: Array, **named: Given) -> Array:
        if is_compiling():
            return frameworks.in_graph.captured_shorthand(cls.name, arrays, named)
        from precondattn.execution.run import forward

        mechanism, rest = built(cls, named)
        backend = rest.pop("backend", None)
        masks = dict.fromkeys(MASKS)
        for name in rest.keys() & MASKS:
            masks[name] = rest.pop(name)
        return forward(Call("forward", mechanism, arrays, rest, masks, backend))

    equation = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    hashable: MechanismClass = cls
    lists = zip(("Options", "Those of the softmax inside"), options_of(hashable), strict=True)
    options = [fill(f"{title}: {', '.join(names)}.", WIDTH) for title, names in lists if names]
    about = f"`{cls.__name__}`, built from its options and called. An optional input sets its own."
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = "\n".join([equation, "", about, *options])
    call.__wrapped__ = _DeclaredCall(cls)  # type: ignore[attr-defined]
    return call


class _DeclaredCall:
    """The descriptor from which `inspect` gets the signature of a shorthand, when it is needed."""

    def __init__(self, cls: MechanismClass) -> None:
        self.cls = cls

    @property
    def __signature__(self) -> inspect.Signature:
        from precondattn.execution.parameters_of_calls import signature_of_shorthand

        return signature_of_shorthand(self.cls)


@cache
def options_of(cls: MechanismClass) -> tuple[Options, Options]:
    """The options of the mechanism, and the options of softmax if that is its base, by name."""
    options, base = fields_of(cls), _base_of(cls)
    if getattr(base, "name", None) != "softmax":
        return options, {}
    return options, {name: field for name, field in fields_of(base).items() if name not in options}


def _base_of(cls: MechanismClass) -> MechanismClass:
    """The class of a preconditioner's default base; None for a leaf."""
    field = cls.__dataclass_fields__.get("base")
    return None if field is None else type(field.default)


def with_options(cls: MechanismClass, options: Mapping[str, OptionValue]) -> AnyMechanism:
    """The mechanism with these options; options of softmax are passed to its base."""
    _, of_base = options_of(cls)
    base = {name: value for name, value in options.items() if name in of_base}
    rest = {name: value for name, value in options.items() if name not in of_base}
    return cls(**rest, base=_base_of(cls)(**base)) if base else cls(**rest)


@cache
def switches_of(cls: MechanismClass) -> Switches:
    """The inputs that an option adds, or gives other axes; found by setting each option in turn."""
    default = cls().inputs
    switches: dict[str, dict[int, Settings]] = {}
    for option, value, inputs in declared_by_options(cls):
        for name, pattern in inputs.items():
            axes = len(pattern.axes)
            if name not in default or len(default[name].axes) != axes:
                settings = switches.setdefault(name, {})
                settings[axes] = (*settings.get(axes, ()), (option, value))
    return switches


def declared_by_options(cls: MechanismClass) -> Iterator[tuple[str, OptionValue, Inputs]]:
    """Each option with each of its settings, and the inputs that are then declared."""
    options, of_base = options_of(cls)
    for name, field in {**options, **of_base}.items():
        for value in field.metadata["kind"].settings:
            try:
                yield name, value, with_options(cls, {name: value}).inputs
            except (TypeError, ValueError):  # Refused with the other options' defaults.
                continue


def build(cls: MechanismClass, named: Mapping[str, Given]) -> tuple[AnyMechanism, dict[str, Array]]:
    """The mechanism of a shorthand's keywords, and the keywords that are left for its call."""
    of_class, of_base = options_of(cls)
    switches = switches_of(cls)
    options: dict[str, OptionValue] = {}
    rest: Arrays = {}
    for name, value in named.items():
        is_option = name in of_class or name in of_base
        # NumPy's True has a shape, but is the value of an option.
        is_array = hasattr(value, "shape") and not (is_option and value.ndim == 0)
        if is_array and name in switches:
            rest[name] = value
            matching = switches[name].get(value.ndim, ())
            if not matching and name not in cls().inputs:  # The call then refuses its shape.
                matching = next(iter(switches[name].values()))
            if len(matching) == 1:
                ((option, setting),) = matching
                if option == name or option not in named:
                    options[option] = setting
        elif is_option:
            options[name] = value
        else:
            rest[name] = value
    mechanism = with_options(cls, options)
    keywords = [*of_class, *of_base, *mechanism.inputs, *CALL_OPTIONS]
    for name in rest:
        if name not in keywords:
            settings = chain(*switches.get(name, {}).values())
            belongs = " or ".join(f"{option}={value!r}" for option, value in settings)
            hint = keyword_elsewhere(name) or nearest(name, keywords)
            hint = f" (it belongs to {belongs})" if belongs else hint
            raise TypeError(
                f"{cls.name}: unknown keyword {name!r}{hint}; options are "
                f"{', '.join([*of_class, *of_base])}, inputs {', '.join(mechanism.inputs)}, and "
                f"{', '.join(CALL_OPTIONS)}"
            )
    return mechanism, rest


_built: dict[Hashable, tuple[AnyMechanism, tuple[str, ...]]] = {}
"""The results of `build` by the key of `_key`: mechanism, and keywords left for its call."""

PLAIN = frozenset({bool, int, float, str, type(None)})


def built(cls: MechanismClass, named: Mapping[str, Given]) -> tuple[AnyMechanism, dict[str, Array]]:
    """The result of `build`, kept for all calls that differ only in masks and array entries."""
    key = _key(cls, named) if named else cls
    kept = _built.get(key)
    if kept is not None:
        return kept[0], {name: named[name] for name in kept[1]} if named else {}
    mechanism, rest = build(cls, named)
    if key is not None:
        if len(_built) >= KEPT:
            _built.clear()
        _built[key] = mechanism, tuple(rest)
    return mechanism, rest


def _key(cls: MechanismClass, named: Mapping[str, Given]) -> Hashable | None:
    """What the result of `build` depends on; None if a setting is neither plain nor an array."""
    key: list[Hashable] = [cls]
    for name, value in named.items():
        if name in CALL_OPTIONS:
            key.append(name)
        elif type(value) in PLAIN:  # 1 and True are equal, but not the same setting.
            key.append((name, type(value), value))
        elif getattr(value, "ndim", 0):
            key.append((name, value.ndim))
        else:
            return None
    return tuple(key)
