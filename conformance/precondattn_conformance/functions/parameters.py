"""Assignment of a function's parameters to inputs, options, masks and states of a mechanism.

By default it follows from the parameters' names. A function that names none of the inputs, or has
no signature (many built-in ones), gets the inputs by position, in the mechanism's order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import precondattn as pa
from precondattn.algebra.options import fields_of
from precondattn.algebra.piece import Piece

Function = Callable[..., object]

INPUTS = {
    "q": ("query", "queries"),
    "k": ("key", "keys"),
    "v": ("value", "values"),
    "q2": ("query2", "queries2"),
    "k2": ("key2", "keys2"),
}
"""Alternative names of inputs."""
OPTIONS = {"causal": ("is_causal",), "scale": ("softmax_scale", "sm_scale")}
"""Alternative names of options."""
VISIBLE = "visible"
MASKS = ("key_mask", "segment_ids", VISIBLE)
"""Masks that a function may take: which keys count (b, s); the packed segments (b, s); and which
query sees which key (b or 1, 1, t, s), which combines all masks, causality and windows."""
IN_VISIBLE = ("causal", "window")
"""Options that `visible` includes."""


@dataclass(frozen=True)
class State:
    """The parameters of a recurrent state: a call with both returns `(out, new state)`."""

    given: str
    """The parameter for the state before the first token."""
    wanted: str | None = None
    """The parameter that is set to true to get the last state; None if it is always returned."""


STATES = (
    State("initial_state", "output_final_state"),
    State("initial_states", "return_final_states"),
    State("initial_state"),
    State("state"),
)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, by their roles."""

    inputs: Mapping[str, str]
    """The function's parameters by the mechanism's input names."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The function's parameters by the mechanism's option names."""
    masks: frozenset[str] = frozenset()
    state: State | None = None
    names: frozenset[str] = frozenset()
    """All parameters. One with the name of an input that an option adds gets that input."""
    by_position: bool = False
    """Whether the inputs are passed in the mechanism's order, without names."""
    positional: tuple[str, ...] = ()
    """Parameters that can only be passed by position."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The function's default values of options."""
    unused: tuple[str, ...] = ()
    """Parameters that keep their default values."""

    @classmethod
    def of(
        cls,
        function: Function,
        mechanism: pa.Mechanism,
        *,
        inputs: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        state: State | None = None,
    ) -> Parameters:
        """The parameters of a function that computes a mechanism.

        Parameters
        ----------
        inputs, options : mapping, optional
            The function's names of inputs and options that differ from the mechanism's.

        Raises
        ------
        TypeError
            if an input of the mechanism has no parameter, or the function needs another argument.
        ValueError
            if `inputs` or `options` contain a name that the mechanism or the function does not
            have.
        """
        if not callable(function):
            raise TypeError(f"function must be callable; found {type(function).__name__}")
        owner = leaf_or_whole(mechanism)
        try:
            signature = _signature_of(function)
        except (TypeError, ValueError):  # Some built-in functions have no signature.
            return cls({name: name for name in mechanism.inputs}, by_position=True)
        parameters = signature.parameters
        kinds = [each.kind for each in parameters.values()]
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        for what, names, ours in (
            ("inputs", inputs, list(mechanism.inputs)),
            ("options", options, list(fields_of(owner))),
        ):
            _require_names(what, names or {}, ours, mechanism, None if takes_any else parameters)
        found = {
            name: _named(name, INPUTS, inputs, parameters) or (name if takes_any else None)
            for name in mechanism.inputs
        }
        if inspect.Parameter.VAR_POSITIONAL in kinds or not any(found.values()):
            _require_count(parameters, mechanism)
            return cls({name: name for name in mechanism.inputs}, by_position=True)
        missing = [name for name, parameter in found.items() if parameter is None]
        if missing:
            raise TypeError(
                f"{mechanism} has the inputs {', '.join(mechanism.inputs)}; the function has no "
                f"parameter for {', '.join(missing)}, only {', '.join(parameters)} "
                f"(inputs={{{missing[0]!r}: ...}} names one)"
            )
        named = {name: parameter for name, parameter in found.items() if parameter is not None}
        chosen = {
            name: parameter
            for name in fields_of(owner)
            if name not in named
            and not _adds_an_input(owner, name)
            and (parameter := _named(name, OPTIONS, options, parameters))
        }
        state = state or next((each for each in STATES if _has(each, parameters)), None)
        masks = frozenset(name for name in MASKS if name in parameters)
        used = {*named.values(), *chosen.values(), *masks}
        used |= {each for each in (state.given, state.wanted) if each} if state else set()
        for name, each in parameters.items():
            if name not in used and each.default is each.empty and _is_one(each):
                raise TypeError(
                    f"the function needs an argument {name!r}, which is no input or option of "
                    f"{mechanism}; pass a function that sets it"
                )
        added = {name for name in fields_of(owner) if _adds_an_input(owner, name)}
        return cls(
            named,
            chosen,
            masks,
            state,
            frozenset(parameters),
            positional=tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY),
            defaults={
                option: parameters[parameter].default
                for option, parameter in chosen.items()
                if parameter in parameters
                and parameters[parameter].default is not inspect.Parameter.empty
            },
            unused=tuple(n for n, p in parameters.items() if n not in used | added and _is_one(p)),
        )


def _signature_of(function: Function) -> inspect.Signature:
    """The signature; for a PyTorch module, that of `forward`, since a module takes anything."""
    function = getattr(function, "_orig_mod", function)
    return inspect.signature(getattr(function, "forward", function))


def leaf_or_whole(mechanism: Piece) -> Piece:
    """The piece that has the options: the leaf of a single-leaf mechanism, else the mechanism."""
    leaves = mechanism.program.leaves
    return cast("Piece", leaves[0]) if len(leaves) == 1 else mechanism


def _require_names(
    what: str,
    names: Mapping[str, str],
    ours: list[str],
    mechanism: pa.Mechanism,
    parameters: Mapping[str, object] | None,
) -> None:
    """Raise an error for a mapping with unknown keys or values."""
    for name, parameter in names.items():
        if name not in ours:
            raise ValueError(
                f"{what} must map names of {mechanism} ({', '.join(ours)}) to parameters of the "
                f"function; found the key {name!r}"
            )
        if parameters is not None and parameter not in parameters:
            raise ValueError(
                f"{what} must map to parameters of the function ({', '.join(parameters)}); found "
                f"{parameter!r}"
            )


def _require_count(parameters: Mapping[str, inspect.Parameter], mechanism: pa.Mechanism) -> None:
    """Raise an error for a function that names no input and takes another number of arguments."""
    one = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed, count = sum(p.default is p.empty for p in one), len(mechanism.inputs)
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if needed > count or (len(one) < count and not takes_more):
        raise TypeError(
            f"{mechanism} has the inputs {', '.join(mechanism.inputs)}; the parameters of the "
            f"function are {', '.join(parameters) or 'none'}: pass a function of these inputs that "
            "calls it"
        )


def _adds_an_input(mechanism: Piece, option: str) -> bool:
    """Whether an option, such as `bias`, has the same name as the input that it adds."""
    if getattr(mechanism, option) is not False:
        return False
    try:
        return option in replace(mechanism, **{option: True}).inputs
    except (TypeError, ValueError):  # The base does not allow this option.
        return False


def _named(
    name: str,
    others: Mapping[str, tuple[str, ...]],
    names: Mapping[str, str] | None,
    parameters: Mapping[str, object],
) -> str | None:
    if names and name in names:
        return names[name]
    return next((each for each in (name, *others.get(name, ())) if each in parameters), None)


def _has(state: State, parameters: Mapping[str, inspect.Parameter]) -> bool:
    names = {name for name, each in parameters.items() if _is_one(each)}
    return state.given in names and (state.wanted is None or state.wanted in names)


def _is_one(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
