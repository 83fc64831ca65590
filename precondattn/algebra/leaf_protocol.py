"""Leaves as programs, dispatch and backends see them, and their calls on named values.

`mechanism.py` has `Leaf`, which can also be constructed and called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from precondattn.algebra.declaration import ATTENTION_INPUTS, Inputs
from precondattn.algebra.flops import Flops
from precondattn.algebra.offers import Offers
from precondattn.algebra.recurrence import Recurrence
from precondattn.arrays import Array, Arrays, ByName, Residuals
from precondattn.cache import Slot, Updates
from precondattn.frame import Frame
from precondattn.limits import KEPT_TEXTS


class Described:
    """What every mechanism, and a group of leaf calls, says of itself."""

    name: ClassVar[str]
    """Its name in an expression."""
    role: ClassVar[str] = "piece"
    """`"base"`, `"preconditioner"` or `"piece"`."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Expressions with other options, which tests, conformance and benchmarks run too."""
    if TYPE_CHECKING:  # Every piece is a dataclass.
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def inputs(self) -> Inputs:
        """The tensor inputs: name and symbolic shape, in order."""
        raise NotImplementedError

    @property
    def offers(self) -> Offers:
        return Offers()

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence that it is, by which backends find an algorithm.

        None for every other mechanism, and for a subclass of a recurrence that defines mathematics
        of its own and declares none: it runs as it is written, on the reference.
        """
        return None

    def meaning(self, name: str) -> object:
        """The meaning of the input `name`. Inputs of one name must have the same meaning."""
        raise NotImplementedError


class LeafProtocol(Described):
    """What programs, dispatch and backends may ask of a leaf, which they do not construct."""

    output: ClassVar[str]
    allows_any_length: ClassVar[frozenset[str]] = frozenset()
    """Inputs whose rows may have any length because of it, also where another leaf that reads them
    declares length 1."""

    @property
    def is_base(self) -> bool:
        """Whether it computes attention from queries, keys and values: a base, or what a
        preconditioner makes of one."""
        return self.role == "base"

    @property
    def hides_later_keys(self) -> bool:
        """Whether NaN in a later key can not reach an output, because scores are masked by −∞.

        Otherwise bad keys are set to 0 before a call (`execution/containment.py`).
        """
        return False

    @property
    def relates_tokens(self) -> bool:
        """Whether an output depends on other tokens."""
        return True

    @property
    def reads_all_queries(self) -> bool:
        """Whether a query has an effect on the outputs of other tokens."""
        return False

    @property
    def reverses_tokens(self) -> bool:
        """Whether its output has the tokens of each sequence in reversed order."""
        return False

    @property
    def mixes_sequences(self) -> bool:
        """Whether an output depends on the other sequences of its batch."""
        return False

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """FLOPs for one sequence, from the size of every letter of its patterns; None if unknown.

        Benchmarks divide by it. A leaf that declares none is measured in seconds only.
        """
        return None

    def meaning(self, name: str) -> object:
        return "attention" if name in ATTENTION_INPUTS else self.name

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        """Raise a ValueError for sizes, by letter, or masks of a full call that it can not have."""

    def refuses_mask(self, name: str) -> str | None:
        """Why it can not have a mask of pairs of tokens, `"attn_mask"` or `"prefix"`; None where it
        can, as every leaf that relates no tokens."""
        if not self.relates_tokens:
            return None
        return f"{self.name} does not relate tokens by scores of queries and keys alone"

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        """The output, and the residuals: what the gradient needs besides inputs and output."""
        raise missing_method(self, "forward", "every call needs")

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        """The gradient of every input, by name."""
        raise missing_method(self, "backward", "gradients need")

    @property
    def numbers_heads(self) -> bool:
        return False

    def slots(self) -> tuple[Slot, ...]:
        """The buffers it keeps in a cache."""
        return ()

    @property
    def reach(self) -> int | None:
        """How many of the last cached tokens a new token reads; None for all of them.

        Such a leaf may be given the last tokens only, at positions counted from the first of them.
        """
        return None

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        """The output for new tokens after those in `past`, and the update of each buffer."""
        raise missing_method(self, "step", "`extend` needs")

    def step_backward(
        self, past: ByName, x: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of `past`, from those of `step`'s output and buffers.

        Leaves that cache tokens do not have it: a buffer of tokens is not differentiated.
        """
        raise missing_method(self, "step_backward", "`extend_vjp` needs")


def missing_method(leaf: LeafProtocol, name: str, why: str) -> NotImplementedError:
    """The error of a method that a leaf's class does not define."""
    return NotImplementedError(
        f"the class {type(leaf).__name__} of the mechanism {leaf.name!r} defines no method "
        f"`{name}`, which {why}"
    )


class LeafCall(NamedTuple):
    """One leaf, applied to named values."""

    out: str
    leaf: LeafProtocol
    arguments: tuple[tuple[str, str], ...]
    """(the leaf's name of an input, the name of the value)."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset([value for _, value in self.arguments])

    def slot_keys(self) -> Mapping[str, str]:
        """For each slot of the leaf, its key in the cache: the name of the value that it stores."""
        return _slot_keys(self)

    def __str__(self) -> str:
        arguments = [a if a == value else f"{a}={value}" for a, value in self.arguments]
        return f"{self.out} = {self.leaf}({', '.join(arguments)})"


@lru_cache(maxsize=KEPT_TEXTS)
def _slot_keys(call: LeafCall) -> Mapping[str, str]:
    names = {**dict(call.arguments), "out": call.out}
    return {slot.name: slot.holds.format(**names) for slot in call.leaf.slots()}
