"""A fault: a change of one method of a backend.

    planted(truth, call) ≠ truth(call)

`truth` is the correct method. A change passes it another call, alters its result, or runs it while
a function inside it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import RLock
from types import ModuleType
from typing import Any

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.algebra.mechanism import parse
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays
from precondattn.cache import Slot, Update
from precondattn.frame import Frame
from precondattn_conformance.oracle import rounded

FORWARD, BACKWARD, STEP, STEP_BACKWARD = "forward", "backward", "step", "step_backward"
STAGES = (FORWARD, BACKWARD, STEP, STEP_BACKWARD)
"""The methods of a backend."""


Function = Callable[..., Any]
"""A function, a method or a class of the code under test, or its replacement."""
Owner = type | ModuleType
"""A class or a module that contains a function."""


@dataclass(frozen=True)
class MethodCall:
    """The arguments of a method; arguments that the method does not have are empty."""

    stage: str
    mechanism: Piece
    """A leaf, or the group of all leaves of a mechanism."""
    inputs: Arrays
    frame: Frame
    past: Arrays = field(default_factory=dict)
    """Buffers: of a leaf by the name of the slot, of a group by the key in the program."""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """The declarations of `past`."""
    out: Array = None
    residuals: tuple[Array, ...] = ()
    cotangent: Array = None
    d_buffers: Arrays = field(default_factory=dict)
    dtype: str = ""
    """The dtype of the caller's inputs; `inputs` in half precision have been cast to float32."""
    wiring: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Arrays to read in place of others, by a leaf's index in a group and its input's name."""

    def with_inputs(self, **inputs: Array) -> MethodCall:
        """The call with other inputs."""
        return replace(self, inputs={**self.inputs, **inputs})

    def with_frame(self, **entries: Array) -> MethodCall:
        """The call with other entries of its frame."""
        return replace(self, frame=self.frame.replaced(**entries))

    def with_segments(self, ids: Array) -> MethodCall:
        """The call with these segments of its keys, of which the last are those of its queries."""
        t = self.frame.q_position.shape[1]
        return self.with_frame(k_segment=ids, q_segment=ids[:, ids.shape[1] - t :])

    @property
    def declared(self) -> Inputs:
        """The patterns of the mechanism's inputs."""
        inputs: Inputs = self.mechanism.inputs
        return inputs.extending() if self.stage in (STEP, STEP_BACKWARD) else inputs

    @property
    def output(self) -> Pattern:
        """The pattern of the mechanism's output."""
        program = self.mechanism.program
        pattern: Pattern = program.output
        return pattern.renamed({"s": "t"}) if self.stage in (STEP, STEP_BACKWARD) else pattern


@dataclass(frozen=True)
class MethodResult:
    """The result of a method; parts that the method does not have are empty."""

    out: Array = None
    residuals: tuple[Array, ...] = ()
    updates: dict[str, Update] = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    d_past: Arrays = field(default_factory=dict)


Truth = Callable[[MethodCall], MethodResult]
Change = Callable[[Truth, MethodCall], MethodResult]


@dataclass(frozen=True)
class Fault:
    """One fault: the subject, the methods, the carrier, the kind, and the change."""

    subject: str
    """The registered name of the leaf or preconditioner that is wrong."""
    mechanism: str
    """The expression whose cases must catch it: the subject, or a composition with it."""
    stages: tuple[str, ...]
    """The methods in which it is planted."""
    carrier: str
    operator: str
    """The kind of fault."""
    detail: str
    change: Change
    library: str = "numpy"

    @property
    def name(self) -> str:
        """The fault's name, unique among all faults."""
        where = "+".join(self.stages)
        inside = "" if self.mechanism.startswith(self.subject) else f" of {self.subject}"
        about = f"{self.operator}: {self.detail}" if self.operator else self.detail
        return f"{self.mechanism}{inside}, {where} of {self.carrier}: {about}"

    def concerns(self, call: MethodCall) -> bool:
        """Whether the fault is planted in this call."""
        if call.stage not in self.stages:
            return False
        is_all = len(call.mechanism.program.calls) == len(parse(self.mechanism).program.calls)
        return is_all or getattr(call.mechanism, "name", None) == self.subject


def with_call(change: Callable[[MethodCall], MethodCall]) -> Change:
    """A change that runs the correct method with another call."""
    return lambda truth, call: truth(change(call))


def with_result(change: Callable[[MethodResult], MethodResult]) -> Change:
    """A change of the correct method's result."""
    return lambda truth, call: change(truth(call))


def to_bfloat16(x: Array) -> Array:
    """x rounded to bfloat16, in the dtype of x."""
    return rounded(x, "bfloat16").astype(x.dtype)


def written(
    mechanism: str,
    stages: tuple[str, ...] | str,
    detail: str,
    change: Change,
    *,
    carrier: str = "leaves",
    subject: str = "",
    operator: str = "",
    library: str = "numpy",
) -> Fault:
    """A fault that no operator makes. By default its subject is the mechanism itself."""
    parsed = parse(mechanism)
    stages = (stages,) if isinstance(stages, str) else stages
    named = subject or parsed.name, str(parsed)
    return Fault(*named, stages, carrier, operator, detail, change, library)


REPLACING = RLock()
"""Locked from the replacement of a name of a module or class until the original is restored: it
applies to all threads, and another thread would take the replacement for the original."""


def inside(owner: Owner, name: str, change: Callable[[Function], Function]) -> Change:
    """A change that runs the method while `owner.name` (in a class or module) is replaced."""

    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        with REPLACING:
            original = vars(owner)[name]
            plain = original.__func__ if isinstance(original, staticmethod) else original
            changed = change(plain)
            setattr(owner, name, staticmethod(changed) if plain is not original else changed)
            try:
                return truth(call)
            finally:
                setattr(owner, name, original)

    return planted
