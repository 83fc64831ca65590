"""Mechanisms: leaves, which implement mathematics, and preconditioners, which are lists of steps.

A mechanism is a frozen, hashable dataclass. Its fields are options, never arrays. It declares its
inputs, and its methods (`verbs.py`) are derived from this declaration and from its program of leaf
calls (`program.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import Parameter, signature
from math import prod
from typing import ClassVar, NamedTuple, cast

from precondattn import frameworks
from precondattn.algebra import registry
from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.algebra.flops import Flops
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol, Offers
from precondattn.algebra.names import name_of
from precondattn.algebra.options import OptionValue, check_options, fields_of
from precondattn.algebra.program import Program
from precondattn.algebra.text import hint_at_option, plain, read, text_of_mechanism
from precondattn.algebra.unfolding import program_of
from precondattn.algebra.verbs import Verbs
from precondattn.arrays import Array, Arrays, ByName, is_traced_by_dynamo, library_of
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.limits import NESTED

SEARCHED = 4
"""The most preconditioners around a base for which an error advises another order."""


class Mechanism(Verbs):
    """The base class of leaves and preconditioners."""

    _depth: ClassVar[int] = 0

    def __new__(cls, *values: OptionValue, **options: OptionValue) -> registry.AnyMechanism:
        if is_traced_by_dynamo():  # Dynamo can not trace the checks of options and programs.
            return frameworks.in_graph.constructed(cls, values, options)
        if values or options:
            _check_constructor(cls, values, options)
        return super().__new__(cls)

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if "__hash__" not in cls.__dict__:
            # `dataclass` keeps this hash. Its own would hash all inner mechanisms each time.
            cls.__hash__ = Mechanism.__hash__  # type: ignore[method-assign]
        if "name" in cls.__dict__:
            registry.register(cls)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        fields = dataclasses.fields(self)
        return hash((type(self), *[getattr(self, f.name) for f in fields if f.compare]))

    def __reduce__(self) -> tuple[Callable[..., Mechanism], tuple[object, ...]]:
        """Copying constructs a new mechanism, because what it caches depends on the process."""
        fields = (f.name for f in dataclasses.fields(self) if f.init)
        return _constructed, (type(self), {name: getattr(self, name) for name in fields})

    def __post_init__(self) -> None:
        check_options(self)
        self.check_together()
        self._check_base()
        object.__setattr__(self, "_text", text_of_mechanism(self))
        object.__setattr__(self, "_name", name_of(self))
        tuple(self.inputs)  # This unfolds the program, which raises an error for clashing names.

    def check_together(self) -> None:
        """Raise a ValueError for options that exclude each other; subclasses define it."""

    def _check_base(self) -> None:
        """Raise a TypeError for a base that is refused."""

    def __str__(self) -> str:
        return self._text

    @cached_property
    def program(self) -> Program:
        """The leaf calls of the mechanism, in order."""
        return program_of(self)

    def with_read(self, read: OptionValue) -> Mechanism:
        """The mechanism with another read of the values, such as the one of LASER."""
        raise NotImplementedError


def _check_constructor(
    cls: registry.MechanismClass,
    values: tuple[OptionValue, ...],
    options: dict[str, OptionValue],
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


def _constructed(cls: type[Mechanism], fields: dict[str, OptionValue]) -> Mechanism:
    built: Mechanism = cls(**fields)
    return built


def parse(text: str) -> Mechanism:
    """The mechanism of an expression such as `"lucid[eps=0](laser)"`.

    Raises
    ------
    ValueError
        for text that is not an expression, for an unknown name or option, or for an option out of
        range.
    TypeError
        for a composition that is refused; the message has the reason.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.parse("lucid[eps=0](laser)") == pa.Lucid(pa.Laser(), eps=0)
    True
    >>> str(pa.Lucid(pa.Softmax(window=128)))
    'lucid(softmax[window=128])'
    """
    mechanism: Mechanism = frameworks.in_graph.parsed(text) if is_traced_by_dynamo() else read(text)
    return mechanism


def mechanisms() -> dict[str, type[Mechanism]]:
    """All bases and preconditioners that an expression can name: a dict of classes by name.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.mechanisms()["lucid"].__name__
    'Lucid'
    """
    classes = cast("dict[str, type[Mechanism]]", registry.registered())
    return {n: c for n, c in classes.items() if c.role in ("base", "preconditioner")}


class Leaf(LeafProtocol, Mechanism):
    """The base class of leaves: a forward pass, a closed-form gradient, and a step of `extend`.

    Subclasses are frozen dataclasses with a `name`, declared `inputs`, the pattern of their
    `output`, and the methods `forward`, `backward` and `step`. The argument `x` has the inputs by
    name.
    """

    role: ClassVar[str] = "base"
    scale: float | None
    """The option of leaves that multiply the products of queries and keys by a scale s."""

    def scale_for(self, d: int) -> float:
        """The scale s for rows of width d: the option, or d^{-1/2}."""
        return d**-0.5 if self.scale is None else self.scale


def leaf_of(call: LeafCall) -> Leaf:
    """The leaf of a leaf call, as a mechanism that can be called."""
    return cast("Leaf", call.leaf)


class TokenWise(Leaf):
    """A leaf without a cache: it computes each token from that token alone, or is not causal."""

    role: ClassVar[str] = "piece"
    relates_tokens = False

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """Three FLOPs for each element of the output, as in a norm.

        None if an input is a weight matrix.
        """
        if any(pattern.is_matrix for pattern in self.inputs.values()):
            return None
        pattern = Pattern.read(self.output)
        elements = 3.0 * prod(pattern.shape(sizes)) / sizes.get("b", 1)
        axis = pattern.time_axis
        one_token = elements if axis is None else elements / pattern.axes[axis].size(sizes)
        return Flops(elements, elements, one_token)

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        return self.forward(x, frame)[0], {}

    def step_backward(
        self, past: ByName, x: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        out, residuals = self.forward(x, frame)
        return self.backward(x, frame, out, residuals, cotangent), {}


class Step(NamedTuple):
    """One step of a preconditioner: a mechanism, with some of its inputs renamed."""

    out: str
    mechanism: Mechanism
    renamed: tuple[tuple[str, str], ...] = ()
    """(the mechanism's name of an input, its name in this list of steps), if they differ."""


def step(out: str, mechanism: Mechanism, **renamed: str) -> Step:
    """A `Step`: `step("out", base, v="y")` is the base with the value y as its input v."""
    return Step(out, mechanism, tuple(renamed.items()))


class Preconditioner(Mechanism):
    """The base class of preconditioners: a static list of steps around a base.

    Subclasses are frozen dataclasses with a field `base`, a method `steps`, and a method `refuses`
    if some bases are refused. They contain no mathematics themselves.
    """

    role: ClassVar[str] = "preconditioner"
    base: Mechanism

    def _check_base(self) -> None:
        if not isinstance(self.base, Mechanism):
            raise TypeError(f"{self.name}: base must be a mechanism; found {self.base!r}")
        if self.base._depth >= NESTED:
            raise ValueError(
                f"{self.name}: at most {NESTED} preconditioners can be nested; base has "
                f"{self.base._depth}"
            )
        object.__setattr__(self, "_depth", self.base._depth + 1)
        if (reason := self.refuses()) is not None:
            instead = self._instead()
            advice = "" if instead is None else f"; write {instead}"
            raise TypeError(f"{text_of_mechanism(self)} makes no sense: {reason}{advice}")

    def refuses(self) -> str | None:
        """The reason why this base is refused, or None if it is accepted."""
        return None

    def _refuses_second_map(self) -> str | None:
        """The reason to refuse a base with two score maps, of which it would reach one; or None."""
        other = ", ".join(self.base.offers.paired)
        return f"{self.name} would reach the first of two maps only, not {other}" if other else None

    def _refuses_lost_length(self) -> str | None:
        """The reason to refuse a base that normalises its queries, whose length it changes."""
        lost = "the base normalises its queries, which divides out what {} does to their length"
        return lost.format(self.name) if self.base.offers.normalizes_query else None

    def _refuses_several_keys(self) -> str | None:
        """The reason to refuse a base with two score maps, or several keys for a token; or None."""
        several = f"a token of the base has several keys, and {self.name} has one"
        return self._refuses_second_map() or (several if self.base.offers.several_keys else None)

    def _instead(self) -> Mechanism | None:
        """The mechanism that an error advises if the base is refused: this one further inside."""
        return _moved_inside(self, self.base)

    def steps(self) -> tuple[Step, ...]:
        """The steps in order; the last step computes the output."""
        raise NotImplementedError

    @cached_property
    def inputs(self) -> Inputs:
        """The base's inputs in order, followed by the preconditioner's own inputs."""
        declared = {name: self.program.inputs[name] for name in self.program.meanings}
        order = [name for name in self.base.inputs if name in declared]
        return Inputs(**{name: declared[name] for name in dict.fromkeys([*order, *declared])})

    @cached_property
    def offers(self) -> Offers:
        return self.base.offers

    def meaning(self, name: str) -> object:
        return self.program.meanings[name]

    def with_read(self, read: OptionValue) -> Mechanism:
        return dataclasses.replace(self, base=self.base.with_read(read))


def _moved_inside(outer: Preconditioner, base: Mechanism) -> Preconditioner | None:
    """The outer preconditioner moved inside the base, as little as possible; None if refused."""
    if not isinstance(base, Preconditioner) or base._depth > SEARCHED:
        return None
    inner = with_base(outer, base.base) or _moved_inside(outer, base.base)
    return None if inner is None else with_base(base, inner)


def with_base(
    outer: Preconditioner, base: Mechanism, **options: OptionValue
) -> Preconditioner | None:
    """A preconditioner around another base, with some other options; None if it is refused."""
    # The constructor would search for advice too.
    unchecked = object.__new__(type(outer))
    fields = {field.name: getattr(outer, field.name) for field in dataclasses.fields(outer)}
    for name, value in {**fields, **options, "base": base}.items():
        object.__setattr__(unchecked, name, value)
    if unchecked.refuses() is not None:
        return None
    try:
        return dataclasses.replace(outer, base=base, **options)
    except (TypeError, ValueError):  # The names of inputs clash.
        return None
