"""The interface of leaves for programs, dispatch and backends, and leaf calls.

`mechanism.py` has `Leaf`, which can also be constructed and called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from precondattn.algebra.declaration import ATTENTION_INPUTS, Inputs
from precondattn.algebra.flops import Flops
from precondattn.algebra.options import OptionValue
from precondattn.algebra.recurrence import Recurrence
from precondattn.algebra.registry import AnyMechanism
from precondattn.arrays import Array, Arrays, ByName, Residuals
from precondattn.cache import Slot, Updates
from precondattn.frame import Frame
from precondattn.limits import KEPT_TEXTS


class Offers(NamedTuple):
    """The properties that a preconditioner reads from its base, and may refuse it for."""

    metric: OptionValue = None
    """The score function of a query and a key, which is linear in the key; None without one."""
    scale: float | None = None
    """The factor of the scores; None for d^{-1/2}."""
    causal: bool = True
    window: int | None = None
    read: str | None = None
    """`"mean"` if the output is a weighted mean of the values with non-negative weights."""
    row_axis: str = "token"
    """The axis that the rows of the attention matrix belong to, `"token"` or `"channel"`."""
    key_steps: tuple[tuple[str, AnyMechanism, tuple[tuple[str, str], ...]], ...] = ()
    """The `Step`s that change the key before the metric is applied; each reads `k`."""
    normalizes_query: bool = False
    """Whether the mechanism normalises its queries, so that their length does not matter."""
    paired: tuple[str, ...] = ()
    """The inputs of a second score map, on which the first map does not depend."""
    unit_rows: bool = False
    """Whether the rows of the output have length 1."""
    unit_keys: bool = False
    """Whether the mechanism diverges for keys longer than 1, like the delta rule."""
    several_keys: bool = False
    """Whether a token has several keys, along an additional axis."""
    decay: str | None = None
    """The decay of the state: `"head"` or `"channel"` for a gate g per head or key channel, or
    `"retention"` for a fixed factor per query head. None without decay."""
    sink: bool = False
    """Whether a sink takes some of the weight, so that the values' weights sum to less than 1."""


class Described:
    """The properties that every mechanism, and every group of leaf calls, declares."""

    name: ClassVar[str]
    """The name in an expression."""
    role: ClassVar[str] = "piece"
    """`"base"`, `"preconditioner"` or `"piece"`."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Expressions with other options that tests, the conformance suite and benchmarks run too."""
    if TYPE_CHECKING:  # Every piece is a dataclass.
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def inputs(self) -> Inputs:
        """The declared inputs in order, a mapping from name to symbolic shape.

        Examples
        --------
        >>> import precondattn as pa
        >>> {name: pattern.text for name, pattern in pa.GatedDelta().inputs.items()}["g"]
        'b s u in (-inf, 0]'
        """
        raise NotImplementedError

    @property
    def offers(self) -> Offers:
        return Offers()

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of the leaf, by which backends choose an algorithm; None for others.

        It is also None for a subclass of a recurrence that overrides its equations and declares no
        recurrence. Such a leaf runs on the reference.
        """
        return None

    def meaning(self, name: str) -> object:
        """The meaning of the input `name`. Inputs of one name must have the same meaning."""
        raise NotImplementedError


class LeafProtocol(Described):
    """The interface of a leaf for programs, dispatch and backends."""

    output: ClassVar[str]
    allows_any_length: ClassVar[frozenset[str]] = frozenset()
    """The inputs whose rows may have any length because of this leaf, even if another leaf that
    reads them declares length 1."""

    @property
    def is_base(self) -> bool:
        """Whether the leaf computes attention from queries, keys and values."""
        return self.role == "base"

    @property
    def hides_later_keys(self) -> bool:
        """Whether a NaN in a later key can not reach an output, because scores are masked by −∞.

        Otherwise keys with a NaN or infinity are set to 0 before a call
        (`execution/containment.py`).
        """
        return False

    relates_tokens: ClassVar[bool] = True
    """Whether an output depends on other tokens."""
    reads_all_queries: ClassVar[bool] = False
    """Whether a query affects the outputs of other tokens."""
    reverses_tokens: ClassVar[bool] = False
    """Whether the output has the tokens of each sequence in reversed order."""

    @property
    def mixes_sequences(self) -> bool:
        """Whether an output depends on the other sequences of its batch."""
        return False

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """The FLOPs for one sequence, from the size of every dimension letter; None if unknown."""
        return None

    def meaning(self, name: str) -> object:
        return "attention" if name in ATTENTION_INPUTS else self.name

    def check_call(self, sizes: Mapping[str, int], masks: frozenset[str]) -> None:
        """Raise a ValueError for sizes, by letter, or masks that a full call does not support."""

    def refuses_mask(self, name: str) -> str | None:
        """The reason why the leaf does not support the mask `"attn_mask"` or `"prefix"`; or None.

        Every leaf that does not relate tokens supports both.
        """
        if not self.relates_tokens:
            return None
        return f"{self.name} does not relate tokens by scores of queries and keys alone"

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        """The output, and the residuals that `backward` needs besides inputs and output."""
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
        """The declarations of the leaf's cache buffers."""
        return ()

    @property
    def reach(self) -> int | None:
        """The number of last cached tokens that a new token reads; None for all of them.

        If it is a number, the leaf may get only the last tokens, with positions counted from the
        first of them.
        """
        return None

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        """The output for new tokens after the tokens in `past`, and the update of each buffer."""
        raise missing_method(self, "step", "`extend` needs")

    def step_backward(
        self, past: ByName, x: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of `past`.

        `cotangent` is the gradient of the output of `step`, and `d_buffers` has the gradients of
        the new buffers. Leaves that cache tokens do not define it.
        """
        raise missing_method(self, "step_backward", "`extend_vjp` needs")


def missing_method(leaf: LeafProtocol, name: str, why: str) -> NotImplementedError:
    """The error of a method that a leaf's class does not define."""
    return NotImplementedError(
        f"the class {type(leaf).__name__} of the mechanism {leaf.name!r} defines no method "
        f"`{name}`, which {why}"
    )


class LeafCall(NamedTuple):
    """The call of one leaf on named values."""

    out: str
    leaf: LeafProtocol
    arguments: tuple[tuple[str, str], ...]
    """(the leaf's name of an input, the program's name of the value)."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset([value for _, value in self.arguments])

    def slot_keys(self) -> Mapping[str, str]:
        """The key in the cache of each slot of the leaf: the name of the value that it stores."""
        return _slot_keys(self)

    def __str__(self) -> str:
        arguments = [a if a == value else f"{a}={value}" for a, value in self.arguments]
        return f"{self.out} = {self.leaf}({', '.join(arguments)})"


@lru_cache(maxsize=KEPT_TEXTS)
def _slot_keys(call: LeafCall) -> Mapping[str, str]:
    names = {**dict(call.arguments), "out": call.out}
    return {slot.name: slot.holds.format(**names) for slot in call.leaf.slots()}
