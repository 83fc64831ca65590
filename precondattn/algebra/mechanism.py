"""Mechanisms: leaves that own mathematics, and preconditioners that are lists of steps.

A mechanism is a frozen, hashable dataclass. Its fields are options, never arrays. It declares its
inputs once, and everything that can be done with it (`verbs.py`) follows from that declaration and
from its program of leaf calls (`program.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from precondattn.algebra import expression, registry
from precondattn.algebra.declaration import ATTENTION_INPUTS, Inputs
from precondattn.algebra.options import check_options
from precondattn.algebra.program import Program
from precondattn.algebra.unfolding import program_of
from precondattn.algebra.verbs import Verbs
from precondattn.arrays import Array, Arrays, Residuals
from precondattn.cache import Slot, Updates
from precondattn.frame import Frame

M = TypeVar("M", bound="Mechanism")


class Offers(NamedTuple):
    """What a mechanism offers the preconditioners around it; None is what it has not."""

    metric: Any = None
    """The score function of a query and a key, which is linear in the key."""
    scale: float | None = None
    """The factor of the scores; None is d^{-1/2}."""
    causal: bool = True
    window: int | None = None
    read: str | None = None
    """`"mean"` where the output is a mean of the values under non-negative weights."""
    row_axis: str = "token"
    """Along which axis lie the rows of the attention matrix."""
    key_steps: tuple[Any, ...] = ()
    """What happens to the key before the metric sees it: `Step`s, each of which reads `k`."""
    normalizes_query: bool = False
    """Whether the query's length is divided out."""
    paired: tuple[str, ...] = ()
    """Inputs of a second map of scores, which the first map's inputs do not reach."""
    unit_rows: bool = False
    """Whether the rows of the output have length 1."""
    unit_keys: bool = False
    """Whether keys longer than 1 make it diverge, as they do the delta rule."""
    decay: str | None = None
    """What of a state decays by a gate g of its own, each `"head"` or each key `"channel"`;
    `"retention"` is a fixed decay of each query head."""


class Mechanism(Verbs):
    """What leaves and preconditioners have in common."""

    name: ClassVar[str]
    """What it is called in an expression."""
    role: ClassVar[str] = "piece"
    """`"base"`, `"preconditioner"` or `"piece"`."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Expressions with other options, which tests, conformance and benchmarks try as well."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "name" in cls.__dict__:
            registry.register(cls)

    def __post_init__(self) -> None:
        check_options(self)
        self.check_together()
        self._check_base()
        object.__setattr__(self, "_text", self._expression())
        object.__setattr__(self, "_positional", tuple(self.inputs)[:3])  # Names that clash surface.

    def check_together(self) -> None:
        """Raise a ValueError for options that do not go together."""

    def _check_base(self) -> None:
        """Raise a TypeError for a base that will not do."""

    def _expression(self) -> str:
        return expression.text_of_mechanism(self)

    def __str__(self) -> str:
        return self._text

    @property
    def inputs(self) -> Inputs:
        """The tensor inputs: name and symbolic shape, in order."""
        raise NotImplementedError

    @property
    def offers(self) -> Offers:
        return Offers()

    @property
    def program(self) -> Program:
        """The leaf calls it stands for, in order."""
        return program_of(self)

    def meaning(self, name: str) -> object:
        """What the input `name` means. Equal names may meet only where they mean the same."""
        raise NotImplementedError

    def with_read(self: M, read: Any) -> M:
        """The same mechanism, reading its values another way."""
        raise NotImplementedError


class Leaf(Mechanism):
    """Mathematics: a forward, its closed-form gradient, and its half of `extend`.

    Subclasses are frozen dataclasses with a `name`, declared `inputs`, the pattern of their
    `output`, and the methods below. `x` holds the inputs by name.
    """

    role: ClassVar[str] = "base"
    output: ClassVar[str]

    def meaning(self, name: str) -> object:
        return "attention" if name in ATTENTION_INPUTS else self.name

    def forward(self, x: Mapping[str, Array], frame: Frame) -> tuple[Array, Residuals]:
        """The output, and what the gradient needs besides the inputs and the output."""
        raise NotImplementedError

    def backward(
        self,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        """The gradient of every input, by name."""
        raise NotImplementedError

    def slots(self) -> tuple[Slot, ...]:
        """The buffers it keeps in a cache."""
        return ()

    def step(
        self, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        """The output for new tokens behind those in `past`, and what to add to each buffer."""
        raise NotImplementedError

    def step_backward(
        self,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of `past`, from those of `step`'s output and buffers.

        Leaves that keep tokens have none: a buffer of them is not a value to differentiate by.
        """
        raise NotImplementedError


class TokenWise(Leaf):
    """A leaf with nothing to remember: it treats each token alone (or is not causal)."""

    role: ClassVar[str] = "piece"

    def step(
        self, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Updates]:
        return self.forward(x, frame)[0], {}

    def step_backward(
        self,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        out, residuals = self.forward(x, frame)
        return self.backward(x, frame, out, residuals, cotangent), {}


class Step(NamedTuple):
    """One step of a preconditioner: a mechanism, with some of its inputs renamed."""

    out: str
    """The name of the value it makes."""
    mechanism: Mechanism
    renamed: tuple[tuple[str, str], ...] = ()
    """(the mechanism's name of an input, its name in this list of steps) where they differ."""


def step(out: str, mechanism: Mechanism, **renamed: str) -> Step:
    """`step("out", base, v="y")`: the base, reading the value y as its v."""
    return Step(out, mechanism, tuple(renamed.items()))


class Preconditioner(Mechanism):
    """Wiring: a static list of steps around a base. It owns no mathematics.

    Subclasses are frozen dataclasses with a field `base`, a method `steps`, and, where not every
    base will do, `refuses`.
    """

    role: ClassVar[str] = "preconditioner"
    base: Mechanism

    def _check_base(self) -> None:
        if not isinstance(self.base, Mechanism):
            raise TypeError(f"{self.name}: base must be a mechanism; found {self.base!r}")
        reason = self.refuses()
        if reason is not None:
            raise TypeError(f"{self._expression()} makes no sense: {reason}")

    def refuses(self) -> str | None:
        """Why this base will not do; None where it does."""
        return None

    def steps(self) -> tuple[Step, ...]:
        """What it does, in order; the last step makes the output."""
        raise NotImplementedError

    @property
    def inputs(self) -> Inputs:
        """The base's inputs, in order, and its own after them."""
        declared = {name: self.program.inputs[name] for name in self.program.meanings}
        order = [name for name in self.base.inputs if name in declared]
        return Inputs(**{name: declared[name] for name in dict.fromkeys([*order, *declared])})

    @property
    def offers(self) -> Offers:
        return self.base.offers

    def meaning(self, name: str) -> object:
        return self.program.meanings[name]

    def with_read(self: M, read: Any) -> M:
        base: Mechanism = self.base  # type: ignore[attr-defined]
        return dataclasses.replace(self, base=base.with_read(read))  # type: ignore[type-var]
